"""Frames: messages with a length prefix, as a process and its children exchange them over a socket.

A frame is four bytes of length and so many bytes of a message, mostly JSON. What a message may be,
and how large, is told by the pair that speaks: `penstock.runtimes.frames`,
`penstock.runtimes.spark.frames` and `penstock.queue.execution.handler_processes`. Who exceeds its
bound, or breaks off in the middle, is broken. Imports no asyncio: children that need none have
none. The parent's side is `FrameChannel` (`penstock.kernel.framed_child`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Final

from penstock.kernel.errors import InvalidInput

READ_BYTES: Final = 65_536
_HEADER_BYTES: Final = 4
FRAME_BYTES_MAX: Final = 2 ** (8 * _HEADER_BYTES) - 1
"""What the prefix can say."""


def framed(body: bytes, *, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """A message as it is sent; an `InvalidInput` if it is too large."""
    if len(body) > bytes_max:
        raise InvalidInput(
            f"{len(body):,} bytes are too large for one message; {bytes_max:,} are allowed."
            " Write them to a file, and pass its path."
        )
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def parent_connection() -> socket.socket:
    """The socket that this process was given as standard input, which is empty from now on.

    It is a copy that programs which users' code starts do not inherit.
    """
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def bodies(connection: socket.socket) -> Iterator[bytes]:
    """The messages that come over a blocking socket, until it is closed."""
    unframing = FrameDecoder()
    while more := connection.recv(READ_BYTES):
        unframing.feed(more)
        while (body := unframing.body()) is not None:
            yield body


class FrameDecoder:
    """Bytes as they come, to messages."""

    def __init__(self, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes = bytearray()
        self._bytes_max = bytes_max

    def feed(self, more: bytes) -> None:
        self._bytes += more

    def body(self) -> bytes | None:
        """The next message that is complete; an `InvalidInput` if this cannot become one."""
        if len(self._bytes) < _HEADER_BYTES:
            return None
        length = int.from_bytes(self._bytes[:_HEADER_BYTES], "big")
        if length > self._bytes_max:
            raise InvalidInput(f"A frame of {length:,} bytes is too long.")
        end = _HEADER_BYTES + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER_BYTES:end])
        del self._bytes[:end]
        return body
