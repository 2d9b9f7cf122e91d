"""Files that are whole or not there at all, for whoever reads meanwhile."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file by one with this text, in one step that outlasts a crash of the machine.

    Several processes may write at once: one of their texts stays.

    Raises:
        OSError: the folder can't be written.
    """
    handle, name = tempfile.mkstemp(prefix=".", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
