"""The protocol between a runtime and its child process: frames of JSON with a length prefix.

The runtime begins a task, asks it to stop, and answers events and requests for credentials. The
child sends progress, events and requests, and ends the task with `ChildDone` or `ChildFailed`;
`StaleCode` is its answer to a task that it has not begun, because the user's code has changed
since it was imported. What a fork server is sent, and what it answers, are frames too. A frame
is JSON, which begins with its type (`penstock.kernel.frames`). Whatever does not decode is a broken
child; so is one that sends too much, unless it is what its work has made.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from penstock.kernel import frames
from penstock.kernel.errors import InvalidInput
from penstock.kernel.frames import framed
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkEvent
from penstock.runtimes.secrets import TaskCredentials

FRAME_BYTES_MAX: Final = 16 * 2**20
"""How large what a child has made may be. Work that it is given has no bound but memory: a task may
read very many partitions."""
SMALL_BYTES_MAX: Final = 128 * 1024
"""How large all else is that a child says than what it has made: all wait while it is decoded."""


class CallStyle(StrEnum):
    """How the user's code is called."""

    TASK = "task"
    """`function(task)`: see `penstock.runtimes.task`."""
    EVENT = "event"
    """`handler(event, context)`, as at Lambda, and with nothing in the environment."""


class BeginTask(msgspec.Struct, tag="begin", kw_only=True):
    """Run this. `entry` is `module:function`."""

    style: CallStyle
    entry: str
    work: AttemptWork
    has_log: bool = False
    """Whether what is printed goes to the log already: the process was started so."""


class StopTask(msgspec.Struct, tag="stop"):
    """The task should end."""


class EventsReply(msgspec.Struct, tag="heard", kw_only=True):
    """The answer to events: why to pause, or why they were not taken."""

    number: int
    paused: str = ""
    error: str = ""


class CredentialsReply(msgspec.Struct, tag="minted", kw_only=True):
    """The answer to a request for credentials: what it asked for, or why there is nothing."""

    number: int
    credentials: TaskCredentials | None = None
    error: str = ""


class ChildProgress(msgspec.Struct, tag="progress"):
    said: dict[str, Any]


class EmitEvents(msgspec.Struct, tag="emit", kw_only=True):
    """Events to be sent; `number` comes back in the answer."""

    number: int
    news: list[WorkEvent]


class CredentialsRequest(msgspec.Struct, tag="mint", kw_only=True):
    """Credentials are wanted for these folders; `number` comes back in the answer."""

    number: int
    locations: list[str]


class ChildDone(msgspec.Struct, tag="done", kw_only=True):
    """The task has succeeded. `is_clean` tells whether nothing of it runs on in the child."""

    made: list[ProducedOutput]
    is_clean: bool


class ChildFailed(msgspec.Struct, tag="failed", kw_only=True):
    reason: str
    is_retried: bool
    is_clean: bool
    is_released: bool = False
    """Whether it is released, and has not failed: see `WorkReleased`."""
    is_delayed: bool = False


class StaleCode(msgspec.Struct, tag="stale"):
    """Nothing was begun: the code on disk is not the code that is loaded."""


class LoadModule(msgspec.Struct, tag="load", kw_only=True):
    """To a template: import this, for calls of this style."""

    style: CallStyle
    entry: str


class ModuleLoaded(msgspec.Struct, tag="loaded"):
    """Why no child can be forked from it; empty if any number can."""

    unfit: str


class ForkChild(msgspec.Struct, tag="fork"):
    """To a template: fork a child that has the socket which comes with this."""


class ChildForked(msgspec.Struct, tag="forked"):
    pid: int


class ReapChild(msgspec.Struct, tag="reap"):
    """To a template: this child has ended, and its number may be free for others."""

    pid: int


class ChildReaped(msgspec.Struct, tag="reaped"):
    """How it has ended: an exit code, or the number of a signal, negative."""

    code: int


class OpenTask(msgspec.Struct, tag="open"):
    """To a host of threads: talk of one task over the socket that comes with this."""


ToChild = BeginTask | StopTask | EventsReply | CredentialsReply
FromChild = ChildProgress | EmitEvents | CredentialsRequest | ChildDone | ChildFailed | StaleCode
ToTemplate = LoadModule | ForkChild | ReapChild
FromTemplate = ModuleLoaded | ChildForked | ChildReaped

Frame = TypeVar("Frame")
_LARGE: Final = (b'{"type":"done",', b'{"type":"ended",')
"""How frames begin that tell what was made, here and in `penstock.runtimes.spark.frames`."""
_WORK: Final = (b'{"type":"begin",', b'{"type":"give",')
"""How frames begin that give work."""
_encoder: Final = msgspec.json.Encoder()
to_child: Final = msgspec.json.Decoder(ToChild)
from_child: Final = msgspec.json.Decoder(FromChild)
to_template: Final = msgspec.json.Decoder(ToTemplate)
from_template: Final = msgspec.json.Decoder(FromTemplate)


def encode_frame(frame: msgspec.Struct) -> bytes:
    """The frame as it is sent."""
    body = _encoder.encode(frame)
    bytes_max = (
        SMALL_BYTES_MAX
        if isinstance(frame, ChildProgress | EmitEvents | CredentialsRequest)
        else FRAME_BYTES_MAX
    )
    if body.startswith(_WORK):
        bytes_max = frames.FRAME_BYTES_MAX
    return framed(body, bytes_max=bytes_max)


def decode_frame(body: bytes, decoder: msgspec.json.Decoder[Frame]) -> Frame:
    """What a child has said. Raises `UNREADABLE`, or `InvalidInput` for what is too large."""
    if len(body) > SMALL_BYTES_MAX and not body.startswith(_LARGE):
        raise InvalidInput(f"{len(body):,} bytes at once, and {SMALL_BYTES_MAX:,} are allowed")
    return decoder.decode(body)
