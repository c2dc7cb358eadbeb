"""What a runtime and its child process say to each other: JSON behind its length.

The runtime begins a task, says that it should stop, and answers events and requests for
credentials. The child tells progress, sends events, asks, and ends the task with `Done` or
`Failed`; `Stale` is its answer to a task that it has not begun, because the user's code has changed
since it was imported. A frame is four bytes of length and as many bytes of JSON, which begins with
its type. Whatever does not read so is a broken child; so is one that says much, unless it is what
its work has made.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import Made, News, Work
from penstock.runtimes.handed import TaskCredentials

FRAME_BYTES_MAX: Final = 16 * 2**20
"""How large what a child has made may be. Work that it is given has no bound but memory: a task may
read very many partitions."""
SMALL_BYTES_MAX: Final = 128 * 1024
"""How large all else is that a child says than what it has made: all wait while it is decoded."""
_HEADER_BYTES: Final = 4
_WORK_BYTES_MAX: Final = 2 ** (8 * _HEADER_BYTES) - 1
_READ_BYTES: Final = 65_536


class Style(StrEnum):
    """How the user's code is called."""

    TASK = "task"
    """`function(task)`: see `penstock.runtimes.task`."""
    EVENT = "event"
    """`handler(event, context)`, as at Lambda, and with nothing in the environment."""


class Begin(msgspec.Struct, tag="begin", kw_only=True):
    """Run this. `entry` is `module:function`."""

    style: Style
    entry: str
    work: Work
    has_log: bool = False
    """Whether what is printed goes to the log already: the process was started so."""


class Stop(msgspec.Struct, tag="stop"):
    """The task should end."""


class Heard(msgspec.Struct, tag="heard", kw_only=True):
    """The answer to events: why to pause, or why they were not taken."""

    number: int
    paused: str = ""
    error: str = ""


class Minted(msgspec.Struct, tag="minted", kw_only=True):
    """The answer to a request for credentials: what it asked for, or why there is nothing."""

    number: int
    credentials: TaskCredentials | None = None
    error: str = ""


class Progress(msgspec.Struct, tag="progress"):
    said: dict[str, Any]


class Emit(msgspec.Struct, tag="emit", kw_only=True):
    """Events to be sent; `number` comes back in the answer."""

    number: int
    news: list[News]


class Mint(msgspec.Struct, tag="mint", kw_only=True):
    """Credentials are wanted for these folders; `number` comes back in the answer."""

    number: int
    locations: list[str]


class Done(msgspec.Struct, tag="done", kw_only=True):
    """The task has succeeded. `is_clean` tells whether nothing of it runs on in the child."""

    made: list[Made]
    is_clean: bool


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    reason: str
    is_retried: bool
    is_clean: bool
    is_released: bool = False
    """Whether it is handed back, and has not failed: see `WorkReleased`."""
    is_delayed: bool = False


class Stale(msgspec.Struct, tag="stale"):
    """Nothing was begun: the code on disk is not the code that is loaded."""


ToChild = Begin | Stop | Heard | Minted
FromChild = Progress | Emit | Mint | Done | Failed | Stale

Frame = TypeVar("Frame")
_LARGE: Final = (b'{"type":"done",', b'{"type":"ended",')
"""How frames begin that tell what was made, here and in `penstock.runtimes.spark.frames`."""
_WORK: Final = (b'{"type":"begin",', b'{"type":"give",')
"""How frames begin that give work."""
_encoder: Final = msgspec.json.Encoder()
to_child: Final = msgspec.json.Decoder(ToChild)
from_child: Final = msgspec.json.Decoder(FromChild)


def framed(frame: msgspec.Struct) -> bytes:
    """The frame as it is sent."""
    body = _encoder.encode(frame)
    bytes_max = SMALL_BYTES_MAX if isinstance(frame, Progress | Emit | Mint) else FRAME_BYTES_MAX
    if body.startswith(_WORK):
        bytes_max = _WORK_BYTES_MAX
    if len(body) > bytes_max:
        raise InvalidInput(
            f"{len(body):,} bytes are too many to say at once; {bytes_max:,} are allowed."
            " Write them to a file, and say where it is."
        )
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def heard(body: bytes, decoder: msgspec.json.Decoder[Frame]) -> Frame:
    """What a child has said. Raises `UNREADABLE`, or `InvalidInput` for what is too large."""
    if len(body) > SMALL_BYTES_MAX and not body.startswith(_LARGE):
        raise InvalidInput(f"{len(body):,} bytes at once, and {SMALL_BYTES_MAX:,} are allowed")
    return decoder.decode(body)


def bodies(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of frames that come over a socket from the runtime, until it is closed."""
    unframing = Unframing(bytes_max=_WORK_BYTES_MAX)
    while more := connection.recv(_READ_BYTES):
        unframing.feed(more)
        while (body := unframing.body()) is not None:
            yield body


class Unframing:
    """Bytes as they come, to bodies of frames."""

    def __init__(self, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes = bytearray()
        self._bytes_max = bytes_max

    def feed(self, more: bytes) -> None:
        self._bytes += more

    def body(self) -> bytes | None:
        """The next body that is complete; an `InvalidInput` if this cannot become one."""
        if len(self._bytes) < _HEADER_BYTES:
            return None
        length = int.from_bytes(self._bytes[:_HEADER_BYTES], "big")
        if length > self._bytes_max:
            raise InvalidInput(f"A frame of {length:,} bytes is none of ours.")
        end = _HEADER_BYTES + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER_BYTES:end])
        del self._bytes[:end]
        return body
