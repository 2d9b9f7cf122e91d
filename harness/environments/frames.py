"""Messages between the harness and a worker: a small JSON header and safetensors bytes.

On the wire a frame is

    magic (8 bytes) | version u16 | header length u32 | body length u64 | header | body

with integers in network order. It needs neither a seek nor a terminator, so any pair of byte
streams carries it: pipes, ssh, docker exec, srun.
"""

import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

MAGIC = b"\x89parity\n"
VERSION = 1
"""Of the frames and of the fields of their headers; both sides must have the same."""
MOST = 256 * 2**20
"""Bytes that one frame may hold; no case comes near it."""

_HEAD = struct.Struct("!8sHIQ")


class FrameError(Exception):
    """What came is no frame of this version; the message says what it was instead."""


class Frame(NamedTuple):
    """header: JSON values by name. body: safetensors bytes, or nothing."""

    header: dict[str, Any]
    body: bytes


class Sink(Protocol):
    def write(self, data: bytes, /) -> Any: ...
    def flush(self) -> Any: ...


Read = Callable[[int], bytes]
"""Exactly so many bytes, fewer only where the stream ends."""


def write(sink: Sink, header: dict[str, Any], body: bytes = b"") -> None:
    """Send one frame.

    Raises:
        FrameError: it would be larger than MOST.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    if (size := len(text) + len(body)) > MOST:
        raise FrameError(f"a message of {_mib(size)}, expected at most {_mib(MOST)}")
    sink.write(_HEAD.pack(MAGIC, VERSION, len(text), len(body)) + text)
    if body:
        sink.write(body)
    sink.flush()


def read(read: Read) -> Frame | None:
    """The next frame, or None where the stream ends between two.

    Raises:
        FrameError: something else came, or the stream ended in the middle.
    """
    head = read(_HEAD.size)
    if not head:
        return None
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise FrameError(f"bytes that are no message: {head!r}")
    if len(head) < _HEAD.size:
        raise FrameError(f"the stream ended after {len(head)} bytes of a message's head")
    _, version, header_size, body_size = _HEAD.unpack(head)
    if version != VERSION:
        raise FrameError(
            f"protocol version {version}, expected {VERSION}: run the same checkout on both sides"
        )
    size = header_size + body_size
    if size > MOST:
        raise FrameError(f"a message of {_mib(size)}, expected at most {_mib(MOST)}")
    data = read(size)
    if len(data) < size:
        raise FrameError(f"a message of {size} bytes ended after {len(data)}")
    try:
        return Frame(json.loads(data[:header_size]), data[header_size:])
    except ValueError as error:
        raise FrameError(f"a header that is no JSON: {data[:80]!r} ({error})") from error


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
