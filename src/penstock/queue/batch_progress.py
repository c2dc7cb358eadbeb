"""How far a batch is, and how it ends: the record, the follow-up task, and the cleanup.

`BatchFinisher` tries to end a batch. Anybody may try at any time, also several at once;
`penstock.queue.batches` says why the follow-up is submitted once. A try costs a GET, and a LIST
if the batch is sealed.

`BatchMarker` is the worker's part: it marks the packs that it settles, and tries to end the
batch: each time while at most `FEW` packs are missing, so that small batches end at once, and
otherwise at most once in `PAUSE_SECONDS`. Maintenance makes up for whatever fails here.

`BatchMaintenance`:
- A batch that has not ended is read after 15 s, then more and more rarely, up to 2 minutes.
- If at most `REPAIRED_MAX` packs of a sealed batch have no mark, their ledgers are read, after a
  minute and then up to every ten minutes: a worker may have died before it could mark one, and
  nobody else marks what is cancelled. If more are missing, that can wait: no ledger is archived
  without a mark.
- Once a day it deletes batches that were not sealed `OPEN_SECONDS` after they were begun,
  records
  of batches that ended `ENDED_SECONDS` ago, and marks of batches that are gone.

Two that do this at once repeat each other; all of it is conditional or idempotent.

Views: of an ended batch a GET. Of any other two, a LIST for every 1,000 packs, and a GET for
each of up to `READS_MAX` packs that have no mark.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import (
    AlreadyExists,
    BatchNotFound,
    NotFound,
    PenstockError,
    StoreError,
    TaskNotFound,
    UnreadableObject,
    VersionConflict,
)
from penstock.queue import archive, batch_marks
from penstock.queue import batch_marks as marking
from penstock.queue.batch_marks import (
    KEPT_SECONDS,
    BatchCounts,
    BatchView,
    EndedBatch,
    OpenBatch,
    made_ms,
    then_input,
    then_key,
    then_task,
)
from penstock.queue.context import LogLimiter, QueueContext
from penstock.queue.doorbell import HEARD_SECONDS, ChangeSignal
from penstock.queue.ids import PackAt, keyed_pack
from penstock.queue.layout import MarkAt, is_batch
from penstock.queue.ledger import Ledger, QueueTaskStatus
from penstock.queue.maintenance import MaintenanceTask
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Submitter
from penstock.queue.task_reader import QueueTaskReader
from penstock.queue.tombstones import remove_old
from penstock.store.base import CREATE, ObjectStore, Version, find, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled

READS_MAX: Final = 200
_AT_ONCE: Final = 16
_COUNTED: Final = tuple(each for each in QueueTaskStatus if each.settled)


async def ended_view(access: QueueContext, batch: str) -> BatchView | None:
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


async def ended_unless_open(access: QueueContext, batch: str) -> BatchView | None:
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
    access: QueueContext, batch: str, *, own: Collection[PackAt] = (), reads_max: int = READS_MAX
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
    access: QueueContext,
    batch: str,
    present: OpenBatch,
    own: Collection[PackAt],
    *,
    reads_max: int,
) -> BatchView:
    said = await batch_marks.read(access.store, access.layout, batch)
    packs = batch_marks.members(present) if present.sealed_ms else list(own)
    counts, missing = batch_marks.tally(packs, said)
    if not present.sealed_ms:
        known = {at.pack for at in packs}
        for pack, each in said.items():
            counts += each if pack not in known else BatchCounts()
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


async def _partly_done(access: QueueContext, packs: Sequence[PackAt]) -> tuple[BatchCounts, int]:
    """Of packs without a mark: what has ended, and how many tasks are claimed."""
    counts, running = BatchCounts(), 0
    for place in range(0, len(packs), _AT_ONCE):
        some = packs[place : place + _AT_ONCE]
        found = await asyncio.gather(*(_ledger(access, at) for at in some))
        for ledger in found:
            states = (
                Counter(task.status for task in ledger.tasks)
                if ledger
                else Counter[QueueTaskStatus]()
            )
            counts += BatchCounts(**{each.word: states[each] for each in _COUNTED})
            running += states[QueueTaskStatus.CLAIMED]
    return counts, running


async def _ledger(access: QueueContext, at: PackAt) -> Ledger | None:
    where = access.layout.ledger(at)
    found = await find(access.store, where)
    return decode(Ledger, found.body, where=where) if found else None


def _view(
    batch: str,
    status: str,
    said: OpenBatch | EndedBatch,
    *,
    counts: BatchCounts,
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
        f"There is no batch {batch!r}.",
        hint="Is it another queue's? Batches are forgotten a week after they have ended, or, if"
        " they were never sealed, after they were begun.",
    )


@dataclass(frozen=True, slots=True)
class FinishAttempt:
    """What a try to end a batch has shown."""

    batch: OpenBatch | None
    """None if there is no open batch of this id: it has ended, or is forgotten."""
    missing: Sequence[PackAt] = field(default=())
    """Of a sealed batch: the packs without a mark. None are missing if it has ended now."""
    marked: int = 0


class BatchFinisher:
    """Ends the batches of one queue."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access

    def cell(self, batch: str) -> Cell[OpenBatch]:
        """The open object of a batch."""
        access = self._access
        return Cell(
            access.store, access.layout.open_batch(batch), OpenBatch, entropy=access.entropy
        )

    async def try_to_end(self, batch: str, cell: Cell[OpenBatch]) -> FinishAttempt:
        """End a batch, if it is sealed and everything in it is settled."""
        access = self._access
        # Noted before anything is read: what is submitted rests on it.
        read_ms = int((await access.store.now()).earliest * 1000)
        present = await cell.read()
        if present is None or not present.sealed_ms:
            return FinishAttempt(present)
        marks = await marking.read(access.store, access.layout, batch)
        counts, missing = marking.tally(marking.members(present), marks)
        if not missing:
            await self._end(batch, cell, present, counts, read_ms)
        return FinishAttempt(present, missing, len(marks))

    async def _end(
        self,
        batch: str,
        cell: Cell[OpenBatch],
        present: OpenBatch,
        counts: BatchCounts,
        read_ms: int,
    ) -> None:
        ended = await self._record(
            batch,
            EndedBatch(
                made_ms=present.made_ms,
                sealed_ms=present.sealed_ms,
                ended_ms=read_ms,
                counts=counts,
                then=present.then,
            ),
        )
        if ended.then is not None and not await self._is_known(batch, ended, read_ms):
            access = self._access
            await Submitter.of(access).submit_keyed(
                ended.then.type,
                then_input(batch, ended.then, ended.counts),
                SubmitOptions(key=then_key(batch)),
                key_seconds=KEPT_SECONDS,
                submitted_ms=read_ms,
            )
        with suppress(VersionConflict):
            await cell.remove()
        # Last: as long as the open object is there, the marks are what the end is known by.
        await self._clear(batch)

    async def _record(self, batch: str, ended: EndedBatch) -> EndedBatch:
        """Create the record, or read the one that is there."""
        where = self._access.layout.ended_batch(batch)
        try:
            await self._access.store.put(where, encode(ended), CREATE)
        except AlreadyExists:
            found = await find(self._access.store, where)
            return decode(EndedBatch, found.body, where=where) if found else ended
        return ended

    async def _is_known(self, batch: str, ended: EndedBatch, read_ms: int) -> bool:
        """Whether what comes then was submitted so long ago that its key may be free again."""
        assert ended.then is not None, "there is something to submit"
        if read_ms < ended.ended_ms + KEPT_SECONDS * 1000:
            return False
        try:
            at = keyed_pack(type=ended.then.type, key=then_key(batch))
            await QueueTaskReader(self._access).view(at, 0)
        except TaskNotFound:
            return False
        return True

    async def _clear(self, batch: str) -> None:
        """Delete the first thousand marks. What is left, maintenance removes one day."""
        access = self._access
        with suppress(StoreError):
            page = await access.store.list(access.layout.marks(batch))
            await delete_all(access.store, [entry.key for entry in page.entries])


async def delete_all(store: ObjectStore, keys: Sequence[str]) -> None:
    """Delete these objects, a few at a time."""
    for place in range(0, len(keys), _AT_ONCE):
        await asyncio.gather(*map(store.delete, keys[place : place + _AT_ONCE]))


PAUSE_SECONDS: Final = 5.0
FEW: Final = 16
_KNOWN_MAX: Final = 64


@dataclass(slots=True)
class _Known:
    """A batch that this worker has marked packs of."""

    cell: Cell[OpenBatch]
    is_nearly_done: bool = True
    try_at: float = float("-inf")


class BatchMarker:
    """Hears of the packs that one worker settles."""

    def __init__(self, access: QueueContext) -> None:
        self._access = access
        self._ender = BatchFinisher(access)
        self._clock = access.store.clock.machine
        self._warn = LogLimiter(self._clock)
        self._known: dict[str, _Known] = {}

    async def settled(self, at: PackAt, ledger: Ledger) -> None:
        """Mark a pack that is settled, if it is of a batch. Never fails."""
        if not is_batch(ledger.batch):
            return
        try:
            with labelled("batches"):
                await batch_marks.write(
                    self._access.store, self._access.layout, batch_marks.mark_of(at, ledger)
                )
                await self._try_to_end(ledger.batch)
        except PenstockError as error:
            self._warn(f"the batch {ledger.batch} is left to maintenance: {error}")

    async def _try_to_end(self, batch: str) -> None:
        known = self._known.pop(batch, None) or _Known(self._ender.cell(batch))
        self._known[batch] = known
        while len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if not known.is_nearly_done and self._clock.monotonic() < known.try_at:
            return
        tried = await self._ender.try_to_end(batch, known.cell)
        is_sealed = tried.batch is not None and tried.batch.sealed_ms > 0
        known.is_nearly_done = is_sealed and len(tried.missing) <= FEW
        known.try_at = self._clock.monotonic() + PAUSE_SECONDS


LISTED_SECONDS: Final = 900.0
OPEN_SECONDS: Final = 7 * 86_400
ENDED_SECONDS: Final = 7 * 86_400
REPAIRED_MAX: Final = 64
BATCHES_MAX: Final = 10_000
_PAUSE_SECONDS_MIN: Final = 15.0
_PAUSE_SECONDS_MAX: Final = 120.0
_REPAIR_SECONDS_MIN: Final = 60.0
_REPAIR_SECONDS_MAX: Final = 600.0
_FORGET_FIRST_SECONDS: Final = 600.0
_FORGET_SECONDS: Final = 86_400.0
_MARK_SECONDS: Final = 3600.0
"""A mark is no longer on its way to a batch that was begun after the lists were made."""
_PAGES_MAX: Final = 100
_SOON_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Tracked:
    """A batch that has not ended."""

    cell: Cell[OpenBatch]
    look_at: float
    pause_seconds: float = _PAUSE_SECONDS_MIN
    progress: tuple[bool, int] = (False, 0)
    """Whether it was sealed at the last look, and how many marks it had."""
    repair_at: float = float("inf")
    repair_seconds: float = _REPAIR_SECONDS_MIN


class BatchMaintenance(MaintenanceTask):
    """Sees to the batches of one queue."""

    name = "the batches"

    def __init__(self, access: QueueContext, bell: ChangeSignal) -> None:
        self._access = access
        self._bell = bell
        self._ender = BatchFinisher(access)
        self._clock = access.store.clock.machine
        self._warn = LogLimiter(self._clock)
        self._known: dict[str, _Tracked] = {}
        self._read_version: Version | None = None
        self._list_at = float("-inf")
        self._forget_at = self._clock.monotonic() + _FORGET_FIRST_SECONDS

    async def turn(self) -> float:
        with labelled("batches"):
            await self._learn()
            for batch, tracked in tuple(self._known.items()):
                if tracked.look_at <= self._clock.monotonic():
                    await self._process(batch, tracked)
            if self._clock.monotonic() >= self._forget_at:
                self._forget_at = self._clock.monotonic() + _FORGET_SECONDS
                await self._forget()
        next_at = min((each.look_at for each in self._known.values()), default=float("inf"))
        return max(_SOON_SECONDS, min(HEARD_SECONDS, next_at - self._clock.monotonic()))

    async def _learn(self) -> None:
        """List what has not ended, if the bell has rung or it was long ago."""
        rung = await self._bell.version()
        if rung == self._read_version and self._clock.monotonic() < self._list_at:
            return
        found: dict[str, _Tracked] = {}
        for batch in await self._ids(self._access.layout.open_batches):
            soon = self._clock.monotonic() + _PAUSE_SECONDS_MIN
            found[batch] = self._known.get(batch) or _Tracked(self._ender.cell(batch), soon)
        self._known, self._read_version = found, rung
        self._list_at = self._clock.monotonic() + LISTED_SECONDS

    async def _process(self, batch: str, tracked: _Tracked) -> None:
        try:
            tried = await self._ender.try_to_end(batch, tracked.cell)
            if tried.batch is None or (tried.batch.sealed_ms and not tried.missing):
                self._known.pop(batch, None)
                return
            self._plan(tracked, tried)
            if self._clock.monotonic() >= tracked.repair_at:
                tracked.repair_seconds = min(_REPAIR_SECONDS_MAX, tracked.repair_seconds * 2)
                tracked.repair_at = self._clock.monotonic() + tracked.repair_seconds
                if await self._repair(batch, tried):
                    tracked.look_at = self._clock.monotonic()
        except PenstockError as error:
            self._warn(f"failed to process the batch {batch}, retrying: {error}")
            tracked.look_at = self._clock.monotonic() + _PAUSE_SECONDS_MAX

    def _plan(self, tracked: _Tracked, tried: FinishAttempt) -> None:
        """When to look at it again, and when to repair it."""
        instant = self._clock.monotonic()
        is_sealed = tried.batch is not None and tried.batch.sealed_ms > 0
        progress = (is_sealed, tried.marked)
        longer = min(_PAUSE_SECONDS_MAX, tracked.pause_seconds * 2)
        tracked.pause_seconds = _PAUSE_SECONDS_MIN if progress != tracked.progress else longer
        tracked.progress = progress
        tracked.look_at = instant + tracked.pause_seconds
        if is_sealed and len(tried.missing) <= REPAIRED_MAX:
            tracked.repair_at = min(tracked.repair_at, instant + tracked.repair_seconds)
        else:
            tracked.repair_at = float("inf")

    async def _repair(self, batch: str, tried: FinishAttempt) -> int:
        """Write the marks that are missing; returns how many."""
        written = 0
        for at in tried.missing:
            mark = await self._missing_mark(batch, at)
            if mark is not None:
                await batch_marks.write(self._access.store, self._access.layout, mark)
                written += 1
        return written

    async def _missing_mark(self, batch: str, at: PackAt) -> MarkAt | None:
        """The mark of a pack that has none; None if it is not settled yet."""
        access = self._access
        ledger = await self._ledger(at)
        if ledger is None:
            with suppress(NotFound):
                await access.store.head(access.layout.pack(at))
                return None
            # It may have been claimed and settled between the two questions.
            ledger = await self._ledger(at) or await archive.find(access.store, access.layout, at)
        if ledger is None:
            self._warn(f"batch {batch}: a pack is missing and has no record: {at.path}")
            return MarkAt(batch, at.pack)
        return batch_marks.mark_of(at, ledger)._replace(batch=batch) if ledger.settled else None

    async def _ledger(self, at: PackAt) -> Ledger | None:
        where = self._access.layout.ledger(at)
        found = await find(self._access.store, where)
        return decode(Ledger, found.body, where=where) if found else None

    async def _ids(self, prefix: str) -> list[str]:
        """The batches in a folder, the oldest first; not all if there are too many."""
        layout, ids = self._access.layout, list[str]()
        async for page in pages(self._access.store, prefix):
            await remove_old(self._access.store, page.tombstones)
            read = (layout.read_batch_id(entry.key) for entry in page.entries)
            ids += [batch for batch in read if batch is not None]
            if len(ids) >= BATCHES_MAX:
                self._warn(f"there are more than {BATCHES_MAX} batches: not all are processed")
                break
        return ids

    async def _forget(self) -> None:
        """Delete what is old."""
        access = self._access
        now_ms = (await access.store.now()).earliest * 1000
        old = await self._old_marks(now_ms)
        opened = await self._ids(access.layout.open_batches)
        for batch in opened:
            # Ids begin with the time at which they were drawn: what is young need not be read.
            if made_ms(batch) + OPEN_SECONDS * 1000 <= now_ms:
                with self._skipping_unreadable():
                    await self._forget_unsealed(batch)
        if len(opened) >= BATCHES_MAX:
            # There are more, and theirs must not be forgotten.
            return
        for batch in await self._ids(access.layout.ended_batches):
            if made_ms(batch) + ENDED_SECONDS * 1000 <= now_ms and batch not in opened:
                with self._skipping_unreadable():
                    await self._forget_ended(batch, now_ms)
        await delete_all(access.store, [key for key, batch in old if batch not in opened])

    @contextmanager
    def _skipping_unreadable(self) -> Iterator[None]:
        """One object that cannot be read must not keep the others from being forgotten."""
        try:
            yield
        except UnreadableObject as error:
            self._warn(f"skipped a batch: {error}")

    async def _forget_unsealed(self, batch: str) -> None:
        cell = self._ender.cell(batch)
        found = await cell.read()
        if found is not None and not found.sealed_ms:
            self._warn(f"deleted the batch {batch}: it was never sealed")
            with suppress(VersionConflict):
                await cell.remove()

    async def _forget_ended(self, batch: str, now_ms: float) -> None:
        where = self._access.layout.ended_batch(batch)
        found = await find(self._access.store, where)
        if found is None:
            return
        ended = decode(EndedBatch, found.body, where=where)
        if ended.ended_ms + ENDED_SECONDS * 1000 <= now_ms:
            with suppress(VersionConflict):
                await self._access.store.delete(where, version=found.version)

    async def _old_marks(self, now_ms: float) -> list[tuple[str, str]]:
        """The marks that were not written just now, with their batches."""
        layout, old, number = self._access.layout, list[tuple[str, str]](), 0
        async for page in pages(self._access.store, layout.all_marks):
            for entry in page.entries:
                mark = layout.read_mark(entry.key)
                if mark is not None and (entry.modified + _MARK_SECONDS) * 1000 <= now_ms:
                    old.append((entry.key, mark.batch))
            number += 1
            if number == _PAGES_MAX:
                break
        return old
