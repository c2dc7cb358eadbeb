"""The chore that sees to batches: it ends what is complete, marks what lacks a mark, and forgets.

- A batch that has not ended is looked at after 15 s, and as long as nothing happens more and more
  rarely, up to 2 minutes. Workers end most batches before that (`hearing`).
- If at most `REPAIRED_MAX` packs of a sealed batch have no mark, their ledgers are read, after a
  minute and then more and more rarely, up to ten minutes: a worker may have died before it could
  mark one, and what is cancelled is marked by nobody else. If more are missing, that can wait: no
  ledger leaves for the archive without a mark.
- Once a day, what is old is forgotten: batches that were not sealed `OPEN_SECONDS` after they were
  begun, records of batches that ended `ENDED_SECONDS` ago, and marks of batches that are gone.

Two who do this at the same time do the same twice; all of it is conditional or the same again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import NotFound, PenstockError, UnreadableObject, VersionConflict
from penstock.kernel.wire import decode
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.batches import marks
from penstock.queue.batches.documents import EndedBatch, OpenBatch, made_ms
from penstock.queue.batches.ending import Ender, Tried, delete_all
from penstock.queue.bell import HEARD_SECONDS, Bell
from penstock.queue.layout import MarkAt
from penstock.queue.ledger import Ledger
from penstock.queue.places import PackAt
from penstock.queue.running.saying import Saying
from penstock.queue.running.upkeep import Chore
from penstock.queue.tombstones import remove_old
from penstock.store.base import Version, find, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled

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
class _Minded:
    """A batch that has not ended."""

    cell: Cell[OpenBatch]
    look_at: float
    pause_seconds: float = _PAUSE_SECONDS_MIN
    progress: tuple[bool, int] = (False, 0)
    """Whether it was sealed at the last look, and how many marks it had."""
    repair_at: float = float("inf")
    repair_seconds: float = _REPAIR_SECONDS_MIN


class BatchChore(Chore):
    """Sees to the batches of one queue."""

    name = "the batches"

    def __init__(self, access: Access, bell: Bell) -> None:
        self._access = access
        self._bell = bell
        self._ender = Ender(access)
        self._clock = access.store.clock.machine
        self._say = Saying(self._clock)
        self._known: dict[str, _Minded] = {}
        self._heard: Version | None = None
        self._list_at = float("-inf")
        self._forget_at = self._clock.monotonic() + _FORGET_FIRST_SECONDS

    async def turn(self) -> float:
        with labelled("batches"):
            await self._learn()
            for batch, minded in tuple(self._known.items()):
                if minded.look_at <= self._clock.monotonic():
                    await self._mind(batch, minded)
            if self._clock.monotonic() >= self._forget_at:
                self._forget_at = self._clock.monotonic() + _FORGET_SECONDS
                await self._forget()
        next_at = min((each.look_at for each in self._known.values()), default=float("inf"))
        return max(_SOON_SECONDS, min(HEARD_SECONDS, next_at - self._clock.monotonic()))

    async def _learn(self) -> None:
        """List what has not ended, if the bell has rung or it was long ago."""
        rung = await self._bell.version()
        if rung == self._heard and self._clock.monotonic() < self._list_at:
            return
        found: dict[str, _Minded] = {}
        for batch in await self._ids(self._access.layout.open_batches):
            soon = self._clock.monotonic() + _PAUSE_SECONDS_MIN
            found[batch] = self._known.get(batch) or _Minded(self._ender.cell(batch), soon)
        self._known, self._heard = found, rung
        self._list_at = self._clock.monotonic() + LISTED_SECONDS

    async def _mind(self, batch: str, minded: _Minded) -> None:
        try:
            tried = await self._ender.try_to_end(batch, minded.cell)
            if tried.batch is None or (tried.batch.sealed_ms and not tried.missing):
                self._known.pop(batch, None)
                return
            self._plan(minded, tried)
            if self._clock.monotonic() >= minded.repair_at:
                minded.repair_seconds = min(_REPAIR_SECONDS_MAX, minded.repair_seconds * 2)
                minded.repair_at = self._clock.monotonic() + minded.repair_seconds
                if await self._repair(batch, tried):
                    minded.look_at = self._clock.monotonic()
        except PenstockError as error:
            self._say(f"the batch {batch} cannot be minded, trying again: {error}")
            minded.look_at = self._clock.monotonic() + _PAUSE_SECONDS_MAX

    def _plan(self, minded: _Minded, tried: Tried) -> None:
        """When to look at it again, and when to repair it."""
        instant = self._clock.monotonic()
        is_sealed = tried.batch is not None and tried.batch.sealed_ms > 0
        progress = (is_sealed, tried.marked)
        longer = min(_PAUSE_SECONDS_MAX, minded.pause_seconds * 2)
        minded.pause_seconds = _PAUSE_SECONDS_MIN if progress != minded.progress else longer
        minded.progress = progress
        minded.look_at = instant + minded.pause_seconds
        if is_sealed and len(tried.missing) <= REPAIRED_MAX:
            minded.repair_at = min(minded.repair_at, instant + minded.repair_seconds)
        else:
            minded.repair_at = float("inf")

    async def _repair(self, batch: str, tried: Tried) -> int:
        """Write the marks that are missing; returns how many."""
        written = 0
        for at in tried.missing:
            mark = await self._missing_mark(batch, at)
            if mark is not None:
                await marks.write(self._access.store, self._access.layout, mark)
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
            self._say(f"of the batch {batch} a pack is gone without a record: {at.path}")
            return MarkAt(batch, at.pack)
        return marks.mark_of(at, ledger)._replace(batch=batch) if ledger.settled else None

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
                self._say(f"there are more than {BATCHES_MAX} batches: not all are minded")
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
                with self._saying_what_is_unreadable():
                    await self._forget_unsealed(batch)
        if len(opened) >= BATCHES_MAX:
            # There are more, and theirs must not be forgotten.
            return
        for batch in await self._ids(access.layout.ended_batches):
            if made_ms(batch) + ENDED_SECONDS * 1000 <= now_ms and batch not in opened:
                with self._saying_what_is_unreadable():
                    await self._forget_ended(batch, now_ms)
        await delete_all(access.store, [key for key, batch in old if batch not in opened])

    @contextmanager
    def _saying_what_is_unreadable(self) -> Iterator[None]:
        """One object that cannot be read must not keep the others from being forgotten."""
        try:
            yield
        except UnreadableObject as error:
            self._say(f"a batch is left alone: {error}")

    async def _forget_unsealed(self, batch: str) -> None:
        cell = self._ender.cell(batch)
        found = await cell.read()
        if found is not None and not found.sealed_ms:
            self._say(f"the batch {batch} was never sealed, and is forgotten")
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
