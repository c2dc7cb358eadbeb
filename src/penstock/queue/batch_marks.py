"""Stored documents of batches, and the marks that count settled packs. Times are the store's.

A mark is a small object for each pack, described by its key alone. A settled ledger never
changes, so every writer of a mark writes the same key: to mark twice is to mark once. A LIST
for every 1,000 packs shows the progress of a batch. Marks are written by the worker that
settles a pack, by maintenance for packs that lack one, and by the monitor before a ledger is
archived, so that no settled pack can stay without.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from penstock.kernel.document_format import Document, Stamped, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import NotFound
from penstock.queue.ids import (
    NONCE_CHARACTERS,
    PackAt,
    TaskId,
    keyed_pack,
    milliseconds_of,
    pack_at,
    stamp_of,
)
from penstock.queue.layout import MarkAt, QueueLayout, is_batch
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.store.base import REPLACE, ObjectStore, pages
from penstock.store.metered import labelled

PACKS_MAX: Final = 10_000
"""So many packs a batch has at the most."""
KEPT_SECONDS: Final = 86_400
"""How long the key of the task that comes then stays taken after it is settled."""


class BatchFollowUp(msgspec.Struct, frozen=True):
    """The task that comes when all have ended."""

    type: str
    input: msgspec.Raw


class BatchCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tasks have ended in which way."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    lost: int = 0
    """Of which there is no record any more: somebody has deleted it."""

    def __add__(self, other: BatchCounts) -> BatchCounts:
        sums = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return BatchCounts(*(mine + theirs for mine, theirs in sums))

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class OpenBatch(Stamped, frozen=True, kw_only=True):
    """A batch that has not ended."""

    kind: ClassVar[str] = "batch"

    made_ms: int
    then: BatchFollowUp | None = None
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
    counts: BatchCounts
    then: BatchFollowUp | None = None


class BatchMark(Document, frozen=True, kw_only=True):
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


def then_task(batch: str, then: BatchFollowUp | None) -> TaskId | None:
    """The id of the task that comes when a batch has ended, if one does."""
    return keyed_pack(type=then.type, key=then_key(batch)).task(0) if then else None


def then_input(batch: str, then: BatchFollowUp, counts: BatchCounts) -> dict[str, Any]:
    """What that task is given."""
    return {
        "batch": batch,
        "total": counts.total,
        **{name: getattr(counts, name) for name in counts.__struct_fields__},
        "input": json.loads(bytes(then.input)),
    }


_PAGES_MAX: Final = 100

Marks = Mapping[str, BatchCounts]
"""The packs that have a mark, by their ids, and what the marks say."""


def mark_of(at: PackAt, ledger: Ledger) -> MarkAt:
    """The mark of a settled pack."""
    ends = Counter(task.status for task in ledger.tasks)
    return MarkAt(
        ledger.batch,
        at.pack,
        ends[QueueTaskStatus.SUCCEEDED],
        ends[QueueTaskStatus.FAILED],
        ends[QueueTaskStatus.CANCELLED],
        ends[QueueTaskStatus.EXPIRED],
    )


async def write(store: ObjectStore, layout: QueueLayout, mark: MarkAt) -> None:
    """Write a mark, whether it is there or not."""
    await store.put(layout.mark(mark), encode(BatchMark()), REPLACE)


async def read(store: ObjectStore, layout: QueueLayout, batch: str) -> Marks:
    """All marks of a batch."""
    marks: dict[str, BatchCounts] = {}
    number = 0
    async for page in pages(store, layout.marks(batch)):
        for entry in page.entries:
            mark = layout.read_mark(entry.key)
            if mark is not None:
                marks[mark.pack] = BatchCounts(*mark[2:])
        number += 1
        if number == _PAGES_MAX:
            break
    return marks


def members(batch: OpenBatch) -> list[PackAt]:
    """The packs of a sealed batch."""
    return [read[0] for path in batch.packs if (read := pack_at(path)) is not None]


def tally(packs: Iterable[PackAt], marks: Marks) -> tuple[BatchCounts, list[PackAt]]:
    """How the tasks of these packs have ended, and the packs that have no mark."""
    counts, missing = BatchCounts(), []
    for at in packs:
        said = marks.get(at.pack)
        if said is None:
            missing.append(at)
        else:
            counts += said + BatchCounts(lost=max(0, at.count - said.total))
    return counts, missing


async def mark_before_archiving(
    store: ObjectStore, layout: QueueLayout, records: Collection[tuple[PackAt, Ledger]]
) -> None:
    """Write the marks that these settled packs lack, of batches that have not ended.

    A HEAD for each batch among them; if it has not ended, a LIST, and a put for each mark that is
    missing.
    """
    by_batch: dict[str, list[tuple[PackAt, Ledger]]] = {}
    for at, ledger in records:
        if is_batch(ledger.batch):
            by_batch.setdefault(ledger.batch, []).append((at, ledger))
    with labelled("batches"):
        for batch, packs in by_batch.items():
            try:
                await store.head(layout.open_batch(batch))
            except NotFound:
                continue
            marks = await read(store, layout, batch)
            for at, ledger in packs:
                if at.pack not in marks:
                    await write(store, layout, mark_of(at, ledger))
