"""One child process that speaks frames: sends and receives by a deadline, and how it ended."""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.environments import frames

BANNER = 65536
"""Bytes that may come before a greeting: what ssh and login shells have to say."""
PIPE = 1 << 20
"""Bytes that a pipe should hold."""
TAIL = 2000
"""Bytes of standard error that are kept of a process that was lost."""


class Silence(Exception):
    """The deadline has passed."""


class Deadline:
    """So many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def wait(self, fd: int, *, to_write: bool = False) -> None:
        """Until the file descriptor is ready.

        Raises:
            Silence: it is not by then.
        """
        left = self._end - time.monotonic()
        fds = ([], [fd]) if to_write else ([fd], [])
        if left <= 0 or not any(select.select(*fds, [], left)):
            raise Silence(f"no answer within {self.seconds:g} s")


TROUBLE = (frames.FrameError, OSError, ValueError, Silence)
"""What talking to a child can raise; then `Child.end` says what became of it."""


class Child:
    """A running process. It has a session of its own, so that Ctrl-C is for the harness alone.

    Raises:
        OSError: the command can't be started.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                cwd=folder,
                bufsize=0,
                start_new_session=True,
            )
        except OSError:
            self._stderr.close()
            raise
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout
        os.set_blocking(self._in.fileno(), False)
        for pipe in (self._in, self._out):
            _widen(pipe.fileno())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, header: dict[str, Any], body: bytes, deadline: Deadline) -> None:
        """Raises one of TROUBLE."""
        frames.write(_Sink(self._in.fileno(), deadline), header, body)

    def receive(self, deadline: Deadline) -> frames.Frame:
        """The next frame. Raises one of TROUBLE."""
        frame = frames.read(lambda count: self._read(count, deadline))
        if frame is None:
            raise frames.FrameError("its stream ended")
        return frame

    def greeting(self, deadline: Deadline) -> dict[str, Any]:
        """The header of its hello, after what a login shell may have printed before it.

        Raises one of TROUBLE.
        """
        seen = b""
        while not seen.endswith(frames.MAGIC):
            if len(seen) > BANNER or not (byte := self._read(1, deadline)):
                raise frames.FrameError(f"no greeting, but {seen[:200]!r}")
            seen += byte
        head = [frames.MAGIC]  # read already

        def read(count: int) -> bytes:
            given = head.pop() if head else b""
            return given + self._read(count - len(given), deadline)

        frame = frames.read(read)
        if frame is None or frame.header.get("kind") != "hello":
            raise frames.FrameError(f"another greeting: {frame and frame.header}")
        return frame.header

    def end(self, error: Exception) -> str:
        """Kill what is left of it; how it was lost in a sentence, with its last words."""
        if not isinstance(error, Silence):  # a stream that ended is mostly a process that ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
        code = self._process.poll()
        self._kill()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - TAIL))
        words = self._stderr.read().decode(errors="replace").strip()
        self._stderr.close()
        if isinstance(error, Silence):
            how = f"gave {error}"
        elif code is None:
            how = f"sent {error}"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}, having sent {error}"
        return how + (f"; its last words:\n{words}" if words else "")

    def close(self) -> None:
        """End it in good order: it stops when its input does."""
        self._in.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._kill()
        self._stderr.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._in.close()
        self._out.close()

    def _read(self, count: int, deadline: Deadline) -> bytes:
        """So many bytes of its output; fewer where it ends."""
        parts, missing = [], count
        while missing:
            deadline.wait(self._out.fileno())
            part = os.read(self._out.fileno(), min(missing, 1 << 20))
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _widen(fd: int) -> None:
    """Let the pipe hold more than 64 KiB, where the system can: a message is megabytes, and both
    sides would wake up for every piece of it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE)


class _Sink:
    """A non-blocking file descriptor that is written until a deadline."""

    def __init__(self, fd: int, deadline: Deadline) -> None:
        self._fd, self._deadline = fd, deadline

    def write(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            self._deadline.wait(self._fd, to_write=True)
            view = view[os.write(self._fd, view) :]

    def flush(self) -> None:
        """Nothing is kept back."""
