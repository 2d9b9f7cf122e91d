"""Subjects of a worker that does not behave, each in the cases whose seed is 2, 7, 12, ..."""

import ctypes
import fcntl
import os
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from harness.environments import frames
from harness.subject import Subject, Tensors


def bad(case: Any) -> bool:
    return case.seed % 5 == 2


def _sink() -> int:
    """The descriptor on which the worker speaks to the harness."""
    for fd in range(3, 64):
        try:
            mode, access = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:
            continue
        if stat.S_ISFIFO(mode) and access == os.O_WRONLY:
            return fd
    raise LookupError("no pipe")


def _head(version: int, size: int) -> bytes:
    return struct.pack("!8sHIQ", frames.MAGIC, version, 2, size)


def _printed() -> None:
    print("a line of Python's")
    os.write(1, b"a line of C's\n")


def _cut() -> None:
    os.write(_sink(), _head(frames.VERSION, 1000) + b"{}" + bytes(10))
    _exit(0)


def _exit(code: int) -> None:
    """As C code ends a process, past Python's os._exit, which subjects don't get."""
    ctypes.CDLL(None)._exit(code)


def _hang() -> None:
    print("about to wait", flush=True)
    time.sleep(1000)


def _subject(name: str, act: Callable[[], Any]) -> Subject:
    def run(case: Any, t: Tensors) -> Tensors:
        if bad(case):
            got = act()
            if isinstance(got, torch.Tensor):
                return {"out": got}
        return {"out": torch.bmm(t["a"], t["b"])}

    return Subject(
        name=f"acme.bmm.{name}", run=run, claims=frozenset(), dtypes=("float32", "bfloat16")
    )


SUBJECTS = (
    _subject("behaves", lambda: None),
    _subject("prints", _printed),
    _subject("raises", lambda: 1 / 0),
    _subject("returns_a_gigabyte", lambda: torch.zeros(1).expand(2**28)),
    _subject("killed", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    _subject("aborts", os.abort),
    _subject("exits", lambda: _exit(3)),
    _subject("exits_in_python", lambda: os._exit(3)),
    _subject("leaves", lambda: sys.exit(0)),
    _subject("hangs", _hang),
    _subject("garbles", lambda: os.write(_sink(), b"Segmentation fault (not really)\n")),
    _subject("cuts", _cut),
    _subject("announces_a_gigabyte", lambda: os.write(_sink(), _head(frames.VERSION, 2**30))),
    _subject("speaks_another_version", lambda: os.write(_sink(), _head(frames.VERSION + 1, 0))),
)
