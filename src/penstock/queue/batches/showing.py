"""How far a batch is: read for people and for who waits.

Of a batch that has ended that is a GET. Of any other it is two, a LIST for every 1,000 packs, and
a GET for each of up to `READS_MAX` packs that have no mark.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

from penstock.kernel.errors import BatchNotFound, NotFound
from penstock.kernel.wire import decode
from penstock.queue.access import Access
from penstock.queue.batches import marks
from penstock.queue.batches.documents import (
    BatchView,
    Counts,
    EndedBatch,
    OpenBatch,
    then_task,
)
from penstock.queue.ledger import Ledger, Status
from penstock.queue.places import PackAt
from penstock.store.base import find

READS_MAX: Final = 200
_AT_ONCE: Final = 16
_COUNTED: Final = {
    Status.SUCCEEDED: "succeeded",
    Status.FAILED: "failed",
    Status.CANCELLED: "cancelled",
    Status.EXPIRED: "expired",
}


async def ended_view(access: Access, batch: str) -> BatchView | None:
    """The batch if it has ended."""
    where = access.layout.ended_batch(batch)
    found = await find(access.store, where)
    if found is None:
        return None
    ended = decode(EndedBatch, found.body, where=where)
    return _view(
        batch,
        "ended",
        ended,
        counts=ended.counts,
        ended_at=ended.ended_ms / 1000,
        total=ended.counts.total,
    )


async def ended_unless_open(access: Access, batch: str) -> BatchView | None:
    """The batch if it has ended, None if it has not. Raises `BatchNotFound`."""
    try:
        await access.store.head(access.layout.open_batch(batch))
    except NotFound:
        # If it was there at all, it has ended by now.
        ended = await ended_view(access, batch)
        if ended is None:
            raise not_found(batch) from None
        return ended
    return None


async def view(
    access: Access, batch: str, *, own: Collection[PackAt] = (), reads_max: int = READS_MAX
) -> BatchView:
    """How far a batch is. Raises `BatchNotFound`.

    Of a batch that is not sealed only those packs are known that are given, and those with a mark.
    At most `reads_max` packs are read.
    """
    ended = await ended_view(access, batch)
    if ended is not None:
        return ended
    where = access.layout.open_batch(batch)
    found = await find(access.store, where)
    if found is None:
        # It may have ended between the two questions.
        ended = await ended_view(access, batch)
        if ended is None:
            raise not_found(batch)
        return ended
    present = decode(OpenBatch, found.body, where=where)
    return await _open_view(access, batch, present, own, reads_max=reads_max)


async def _open_view(
    access: Access,
    batch: str,
    present: OpenBatch,
    own: Collection[PackAt],
    *,
    reads_max: int,
) -> BatchView:
    said = await marks.read(access.store, access.layout, batch)
    packs = marks.members(present) if present.sealed_ms else list(own)
    counts, missing = marks.tally(packs, said)
    if not present.sealed_ms:
        known = {at.pack for at in packs}
        for pack, each in said.items():
            counts += each if pack not in known else Counts()
    partial, running = await _partly_done(access, missing[:reads_max])
    counts += partial
    total = counts.total + sum(at.count for at in missing) - partial.total
    return _view(
        batch,
        "sealed" if present.sealed_ms else "open",
        present,
        counts=counts,
        running=running,
        total=total,
        is_exact=len(missing) <= reads_max,
    )


async def _partly_done(access: Access, packs: Sequence[PackAt]) -> tuple[Counts, int]:
    """Of packs without a mark: what has ended, and how many tasks are claimed."""
    counts, running = Counts(), 0
    for place in range(0, len(packs), _AT_ONCE):
        some = packs[place : place + _AT_ONCE]
        found = await asyncio.gather(*(_ledger(access, at) for at in some))
        for ledger in found:
            states = Counter(task.status for task in ledger.tasks) if ledger else Counter[Status]()
            counts += Counts(**{name: states[status] for status, name in _COUNTED.items()})
            running += states[Status.CLAIMED]
    return counts, running


async def _ledger(access: Access, at: PackAt) -> Ledger | None:
    where = access.layout.ledger(at)
    found = await find(access.store, where)
    return decode(Ledger, found.body, where=where) if found else None


def _view(
    batch: str,
    status: str,
    said: OpenBatch | EndedBatch,
    *,
    counts: Counts,
    total: int,
    running: int = 0,
    ended_at: float | None = None,
    is_exact: bool = True,
) -> BatchView:
    return BatchView(
        id=batch,
        status=status,
        total=total,
        ready=max(0, total - counts.total - running),
        running=running,
        succeeded=counts.succeeded,
        failed=counts.failed,
        cancelled=counts.cancelled,
        expired=counts.expired,
        lost=counts.lost,
        is_exact=is_exact,
        made_at=said.made_ms / 1000,
        sealed_at=said.sealed_ms / 1000 if said.sealed_ms else None,
        ended_at=ended_at,
        then_task=then_task(batch, said.then),
    )


def not_found(batch: str) -> BatchNotFound:
    """The error for a batch that nothing is known of."""
    return BatchNotFound(
        f"Nothing is known of the batch {batch!r}.",
        hint="Is it another queue's? Batches are forgotten a week after they have ended, or, if"
        " they were never sealed, after they were begun.",
    )
