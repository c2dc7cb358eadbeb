"""Who still needs a payload: the question that comes before its deletion.

A payload's key names its owner, a task, and the day in which it was submitted: a task with a key
has the same name in each of its lives. What happens to the owner goes one way: pack, then settled
ledger, then a record in the archive, each written before the one before it is deleted. So the
questions are asked in this order, and an owner that moves on meanwhile is met at the next one:

1. Is there a pack of that task, submitted on that day?
2. Is there a settled ledger of it? (One that is not settled and has no pack is void, and removed by
   the monitor; until then it counts.)
3. Does a record in a batch of the archive, listed after that, refer to the payload?

What cannot be read may need it, and counts as a yes. A payload whose pack has not come yet is
asked for only when the pack can no longer come: W after the submit, and here it is days.

A batch that was listed may be gone when it is read, and what it held be in one that came after the
list. So the archive is listed again until no batch of these days is new; if there always is a new
one, its days count as needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

import msgspec

from penstock.kernel.errors import NotFound, UnreadableObject
from penstock.kernel.wire import decode
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.ledger import Ledger
from penstock.queue.pack import Pack
from penstock.queue.payloads import references
from penstock.queue.places import PackAt, day_of
from penstock.store.base import find


@dataclass(frozen=True, slots=True)
class Owners:
    """Asks for the owners of payloads in one queue."""

    access: Access

    async def is_live(self, at: PackAt, day: str) -> bool:
        """Whether there is a pack or a ledger of the life that began on that day."""
        if at.submitted_ms is not None:
            layout = self.access.layout
            return await self._is_there(layout.pack(at)) or await self._is_there(layout.ledger(at))
        try:
            pack = await self._pack(at)
            if pack is not None and day_of(pack.submitted_ms) == day:
                return True
            ledger = await self._ledger(at)
        except UnreadableObject:
            return True
        if ledger is None:
            return False
        return day_of(ledger.submitted_ms) == day if ledger.settled else pack is None

    async def _is_there(self, key: str) -> bool:
        try:
            await self.access.store.head(key)
        except NotFound:
            return False
        return True

    async def _pack(self, at: PackAt) -> Pack | None:
        found = await find(self.access.store, self.access.layout.pack(at))
        return decode(Pack, found.body, where=found.key) if found else None

    async def _ledger(self, at: PackAt) -> Ledger | None:
        found = await find(self.access.store, self.access.layout.ledger(at))
        return decode(Ledger, found.body, where=found.key) if found else None

    async def recorded(self, days: Collection[str]) -> Recorded:
        """What the records of tasks that were submitted on these days refer to.

        Two LISTs for every 1,000 batches, and a GET for each that overlaps one of the days.
        """
        store, layout = self.access.store, self.access.layout
        recorded = Recorded()
        seen: set[str] = set()
        for _ in range(archive.LOOKS_MAX):
            new = [each for each in await self._batches(days) if each[0] not in seen]
            if not new:
                return recorded
            for key, within in new:
                seen.add(key)
                try:
                    async for _, ledger in archive.read(store, layout, key):
                        recorded.paths.update(ref.key for ref in references(ledger))
                except (UnreadableObject, msgspec.MsgspecError):
                    recorded.doubtful.update(within)
        for key, within in await self._batches(days):
            if key not in seen:
                recorded.doubtful.update(within)
        return recorded

    async def _batches(self, days: Collection[str]) -> list[tuple[str, list[str]]]:
        """The batches with submits of these days, and of which."""
        store, layout = self.access.store, self.access.layout
        found: list[tuple[str, list[str]]] = []
        for prefix in (layout.archive, layout.dead):
            async for entry in archive.batches(store, layout, prefix):
                first_ms, last_ms = layout.read_batch(entry.key) or (0, 0)
                within = [day for day in days if day_of(first_ms) <= day <= day_of(last_ms)]
                if within:
                    found.append((entry.key, within))
        return found


@dataclass(slots=True)
class Recorded:
    """What the archive refers to, and of which days it cannot be told."""

    paths: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)

    def needs(self, path: str, day: str) -> bool:
        """Whether a payload of that day must stay."""
        return day in self.doubtful or path in self.paths


def ends_of(day: str) -> float:
    """When a day ends, in seconds; infinity if it is no day."""
    try:
        following = date.fromisoformat(day) + timedelta(days=1)
    except (ValueError, OverflowError):
        return float("inf")
    return datetime(following.year, following.month, following.day, tzinfo=UTC).timestamp()


def days_of(folders: Iterable[str], prefix: str) -> list[str]:
    """The days that folders below the payloads are named after, the first first."""
    names = (folder.removeprefix(prefix).rstrip("/") for folder in folders)
    return sorted(name for name in names if ends_of(name) < float("inf"))
