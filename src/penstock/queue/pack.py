"""The pack: one immutable object that holds the inputs of 1 to 1,000 tasks of one type."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from penstock.kernel.errors import NotOurs
from penstock.kernel.wire import Document
from penstock.queue.places import PackAt

RESEND_SECONDS: Final = 300.0
"""W: no submit is sent again later than this after its first send, on the store's clock."""


class Reference(msgspec.Struct, frozen=True):
    """Where a payload is that is too large for its pack or ledger, and what it must be."""

    key: str
    """Below the folder of the queue."""
    bytes: int
    sha256: str


class Pack(Document, frozen=True, kw_only=True):
    """What was submitted. Written once, never changed, deleted when all of it is settled.

    `nonce` makes the bodies of equal submits differ, so that their versions do; the pointer to a
    pack with a key has the same nonce. `submitted_ms` is the store's time at the first send: a
    pack that the store dates `RESEND_SECONDS` or more after it came too late, is void, and is
    never run.
    """

    kind: ClassVar[str] = "pack"

    type: str
    nonce: str
    submitted_ms: int
    due_ms: int = 0
    inputs: tuple[msgspec.Raw, ...]
    """Each task's input, as the JSON it was submitted as."""
    key: str | None = None
    key_seconds: int = 0
    """How long the key stays taken after the task is settled."""
    refs: tuple[int, ...] = ()
    """The places whose input is a `Reference` to a payload."""
    priority: int = 0
    limit: str = ""
    expires_ms: int = 0
    """What has not begun by then never will; 0 for no such time."""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    batch: str = ""
    """The batch that its tasks belong to."""
    trace: str = ""
    """The span that submitted it, as in the header `traceparent`."""


def is_void(submitted_ms: int | None, modified: float) -> bool:
    """Whether a pack that the store dates so came too late (R2)."""
    return submitted_ms is not None and modified * 1000 >= submitted_ms + RESEND_SECONDS * 1000


def forgotten_ms(submitted_ms: int) -> int:
    """From when on a pack of this submit can only be void: nobody has to remember it (R3)."""
    # Stores date to the second: a pack that is dated before W may have come a second after it.
    return submitted_ms + int(RESEND_SECONDS * 1000) + 1000


def check_pack(at: PackAt, pack: Pack) -> None:
    """Raises `NotOurs` unless the pack is what its key says."""
    is_named = at.submitted_ms is None or (pack.priority, pack.limit) == (at.priority, at.limit)
    if len(pack.inputs) != at.count or pack.type != at.type or not is_named:
        raise NotOurs(f"The pack {at.path} does not hold what its name says.")
