"""What is stored of a batch, and what users are shown of it. Times are the store's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.wire import Document, Stamped
from penstock.queue.places import (
    NONCE_CHARACTERS,
    TaskId,
    keyed_pack,
    milliseconds_of,
    stamp_of,
)

PACKS_MAX: Final = 10_000
"""So many packs a batch has at the most."""
KEPT_SECONDS: Final = 86_400
"""How long the key of the task that comes then stays taken after it is settled."""


class Then(msgspec.Struct, frozen=True):
    """The task that comes when all have ended."""

    type: str
    input: msgspec.Raw


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tasks have ended in which way."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    lost: int = 0
    """Of which there is no record any more: somebody has deleted it."""

    def __add__(self, other: Counts) -> Counts:
        sums = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Counts(*(mine + theirs for mine, theirs in sums))

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class OpenBatch(Stamped, frozen=True, kw_only=True):
    """A batch that has not ended."""

    kind: ClassVar[str] = "batch"

    made_ms: int
    then: Then | None = None
    sealed_ms: int = 0
    """0 as long as more may be added."""
    packs: tuple[str, ...] = ()
    """Its packs, by their keys within the queue, once it is sealed."""


class EndedBatch(Document, frozen=True, kw_only=True):
    """How a batch has ended. Created once."""

    kind: ClassVar[str] = "batch-end"

    made_ms: int
    sealed_ms: int
    ended_ms: int
    """Nobody has submitted what comes then before this moment."""
    counts: Counts
    then: Then | None = None


class Mark(Document, frozen=True, kw_only=True):
    """Says that a pack of a batch is settled; its key says how."""

    kind: ClassVar[str] = "mark"


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch as it was a moment ago. Times are in seconds since the epoch."""

    id: str
    status: str
    """`open`, `sealed` or `ended`."""
    total: int
    """All tasks; of an open batch those that are known here."""
    ready: int
    """Not begun, or to be begun again; those that are delayed too."""
    running: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    lost: int
    is_exact: bool
    """False if there was too much to read: what runs may be among what is ready."""
    made_at: float
    sealed_at: float | None
    ended_at: float | None
    then_task: TaskId | None
    """The id of the task that comes when all have ended; there is no such task before that."""

    @property
    def settled(self) -> int:
        """How many tasks have ended, however."""
        return self.succeeded + self.failed + self.cancelled + self.expired + self.lost

    @property
    def is_ended(self) -> bool:
        """Whether all of it has ended."""
        return self.ended_at is not None


def new_batch(now_ms: int, entropy: Entropy) -> str:
    """A new id, which begins with the time so that ids sort by age."""
    return stamp_of(now_ms) + new_id(entropy, characters=NONCE_CHARACTERS)


def made_ms(batch: str) -> int:
    """When an id was drawn."""
    return milliseconds_of(batch[:-NONCE_CHARACTERS])


def then_key(batch: str) -> str:
    """The key of the task that comes when a batch has ended."""
    return f"batch {batch}"


def then_task(batch: str, then: Then | None) -> TaskId | None:
    """The id of the task that comes when a batch has ended, if one does."""
    return keyed_pack(type=then.type, key=then_key(batch)).task(0) if then else None


def then_input(batch: str, then: Then, counts: Counts) -> dict[str, Any]:
    """What that task is given."""
    return {
        "batch": batch,
        "total": counts.total,
        **{name: getattr(counts, name) for name in counts.__struct_fields__},
        "input": json.loads(bytes(then.input)),
    }
