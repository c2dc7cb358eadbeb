"""What a worker and the processes of its handlers say to each other, and how.

A frame is four bytes with the length of what follows, and JSON. Pure but for `read_frame`.

| who | says | when |
|---|---|---|
| worker | `Run` | a process has nothing to do |
| process | `Begun` | the handler is found and is called now |
| process | `Report` | the handler has said how far it is |
| worker | `Stop` | the handler should end |
| process | `Over` | it has; the process has nothing to do |
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import msgspec

from penstock.queue.ledger import NULL, Failure
from penstock.queue.running.addresses import Address

FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
_LENGTH: Final = struct.Struct(">I")

ClassName = tuple[str, str]
"""The module and the qualified name of a class."""


class Run(msgspec.Struct, tag_field="say", tag="run", frozen=True):
    """Run a handler."""

    handler: Address
    path: tuple[str, ...]
    """Where modules are looked for."""
    type: str
    id: str
    attempt: int
    input: msgspec.Raw
    retried: tuple[ClassName, ...]
    """The classes of errors that are retried."""
    trace: str = ""
    """The span of the attempt, as in the header `traceparent`."""
    never: tuple[ClassName, ...] = ()
    """The classes of errors that are not, whatever `retried` says."""


class Stop(msgspec.Struct, tag_field="say", tag="stop", frozen=True):
    """Interrupt the handler."""


class Begun(msgspec.Struct, tag_field="say", tag="begun", frozen=True):
    """The handler is called now: its time counts from here."""


class Report(msgspec.Struct, tag_field="say", tag="report", frozen=True):
    """What the handler says of how far it is."""

    done: float
    total: float
    message: str


class Over(msgspec.Struct, tag_field="say", tag="over", frozen=True):
    """The handler has ended: with a result, a failure or a wish, or stopped if with none."""

    result: msgspec.Raw = NULL
    has_result: bool = False
    failure: Failure | None = None
    is_retried: bool = False
    again_seconds: float | None = None
    """It is to be called again after so long, and has not failed."""
    reason: str = ""


ToChild = Run | Stop
ToWorker = Begun | Report | Over
to_child: Final[msgspec.json.Decoder[ToChild]] = msgspec.json.Decoder(ToChild)
to_worker: Final[msgspec.json.Decoder[ToWorker]] = msgspec.json.Decoder(ToWorker)


def frame(said: ToChild | ToWorker) -> bytes:
    """As it is sent."""
    body = msgspec.json.encode(said)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's JSON; None if the other is gone, or says what nobody can read."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length) if length <= FRAME_BYTES_MAX else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
