"""The child process that answers for subjects: `python -m harness.environments.worker`.

It speaks frames over what were its standard streams. Engines print, in Python and in C, so file
descriptor 1 is pointed at standard error before anything is imported, and 0 at nothing.
"""

import os
import sys
import traceback
from typing import BinaryIO


def main() -> None:
    """Serve until the other side closes the stream, and end without Python's last rites: with
    torch and an engine loaded they take seconds, and may hang."""
    source, sink = _private_streams()
    code: object = 0
    try:
        from harness.environments.serving import serve

        serve(source, sink)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output under numbers that nobody else knows, not even a child."""
    sys.stdout.flush()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink


if __name__ == "__main__":
    main()
