"""Marks: how the packs of a batch have ended, one small object each, told by its key alone.

A settled ledger never changes, so whoever marks a pack writes the same key: to mark twice is to
mark once. A LIST for every 1,000 packs shows how far a batch is. Marks are written by the worker
that settles a pack (`hearing`), by the chore for packs that lack one (`minding`), and by the
monitor before a ledger leaves for the archive, so that no settled pack can stay without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from penstock.kernel.errors import NotFound
from penstock.kernel.wire import encode
from penstock.queue.batches.documents import Counts, Mark, OpenBatch
from penstock.queue.layout import MarkAt, QueueLayout, is_batch
from penstock.queue.ledger import Ledger, Status
from penstock.queue.places import PackAt, pack_at
from penstock.store.base import REPLACE, ObjectStore, pages
from penstock.store.metered import labelled

_PAGES_MAX: Final = 100

Marks = Mapping[str, Counts]
"""The packs that have a mark, by their ids, and what the marks say."""


def mark_of(at: PackAt, ledger: Ledger) -> MarkAt:
    """The mark of a settled pack."""
    ends = Counter(task.status for task in ledger.tasks)
    return MarkAt(
        ledger.batch,
        at.pack,
        ends[Status.SUCCEEDED],
        ends[Status.FAILED],
        ends[Status.CANCELLED],
        ends[Status.EXPIRED],
    )


async def write(store: ObjectStore, layout: QueueLayout, mark: MarkAt) -> None:
    """Write a mark, whether it is there or not."""
    await store.put(layout.mark(mark), encode(Mark()), REPLACE)


async def read(store: ObjectStore, layout: QueueLayout, batch: str) -> Marks:
    """All marks of a batch."""
    marks: dict[str, Counts] = {}
    number = 0
    async for page in pages(store, layout.marks(batch)):
        for entry in page.entries:
            mark = layout.read_mark(entry.key)
            if mark is not None:
                marks[mark.pack] = Counts(*mark[2:])
        number += 1
        if number == _PAGES_MAX:
            break
    return marks


def members(batch: OpenBatch) -> list[PackAt]:
    """The packs of a sealed batch."""
    return [read[0] for path in batch.packs if (read := pack_at(path)) is not None]


def tally(packs: Iterable[PackAt], marks: Marks) -> tuple[Counts, list[PackAt]]:
    """How the tasks of these packs have ended, and the packs that have no mark."""
    counts, missing = Counts(), []
    for at in packs:
        said = marks.get(at.pack)
        if said is None:
            missing.append(at)
        else:
            counts += said + Counts(lost=max(0, at.count - said.total))
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
