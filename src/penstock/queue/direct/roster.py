"""Which workers have an inbox, and live: a picture of their leases, renewed by one LIST.

The list shows when each lease was written, and its size. A renewal changes neither the size nor
how long the lease lasts from its date on. So one that was read before is not read again, although
its version is new, while its size is the same and its date says that it lives. One that is gone,
lasts longer or has other handlers is of another size, as a rule. So a picture of N workers is one
LIST, and a GET for each of whom there is news. The picture is a hint: an entry in the inbox of a
worker that is gone, or has other handlers by now, costs time. What must not be wrong, that a
lease is over, is decided on the lease itself (`penstock.queue.direct.recovery`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.kernel.errors import NotFound, UnreadableObject
from penstock.kernel.wire import decode
from penstock.queue.direct.leases import UNREADABLE_SECONDS, WorkerLease
from penstock.queue.layout import QueueLayout
from penstock.store.base import Entry, ObjectStore, Version, pages
from penstock.store.metered import labelled
from penstock.store.time import Interval

AT_ONCE_MAX: Final = 16
_PAGES_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's lease as it was last read, and when the list says it was last written."""

    lease: WorkerLease | None
    """None if it cannot be read."""
    version: Version
    modified: float
    size: int

    def is_live(self, now: Interval) -> bool:
        """Whether the worker lives, as far as a list can tell."""
        lease = self.lease
        return bool(lease and not lease.is_gone and now.latest < self.modified + lease.seconds)

    def may_be_over(self, now: Interval) -> bool:
        """Whether it is worth looking after what the worker has left."""
        if self.lease is None:
            return now.earliest >= self.modified + UNREADABLE_SECONDS
        return self.lease.is_over(now) and not self.is_live(now)


class Roster:
    """The picture that one process has of the workers with an inbox."""

    def __init__(self, store: ObjectStore, layout: QueueLayout) -> None:
        self._store = store
        self._layout = layout
        self._seen: dict[str, Seen] = {}

    @property
    def seen(self) -> Mapping[str, Seen]:
        """All that were there at the last look, live or not."""
        return self._seen

    @property
    def shortest_seconds(self) -> float:
        """How long the shortest of the leases lasts."""
        leases = [seen.lease for seen in self._seen.values() if seen.lease]
        return min((lease.seconds for lease in leases if not lease.is_gone), default=float("inf"))

    def live(self, now: Interval, *, type: str | None = None) -> list[str]:
        """The workers that live, in order; those with a handler for a type, if it is given."""
        return sorted(
            worker
            for worker, seen in self._seen.items()
            if seen.is_live(now) and (type is None or (seen.lease and type in seen.lease.handles))
        )

    async def look(self) -> None:
        """Renew the picture. Raises `StoreError`."""
        with labelled("leases"):
            listed = await self._list()
            now = await self._store.now()
            known: dict[str, Seen] = {}
            for worker, entry in listed.items():
                before = self._seen.get(worker)
                if before is None:
                    continue
                dated = replace(before, modified=entry.modified)
                is_same = entry.size == before.size and dated.is_live(now)
                if entry.version == before.version or is_same:
                    known[worker] = dated
            self._seen = known
            slots = asyncio.Semaphore(AT_ONCE_MAX)

            async def read(worker: str) -> None:
                async with slots:
                    await self.read(worker)

            await asyncio.gather(*(read(worker) for worker in listed if worker not in known))

    async def _list(self) -> dict[str, Entry]:
        listed: dict[str, Entry] = {}
        number = 0
        async for page in pages(self._store, self._layout.inbox_leases):
            for entry in page.entries:
                worker = self._layout.read_inbox_lease(entry.key)
                if worker is not None:
                    listed[worker] = entry
            number += 1
            if number == _PAGES_MAX:
                break
        return listed

    async def read(self, worker: str) -> Seen | None:
        """One lease as it is now; the picture has it too. Raises `StoreError`."""
        key = self._layout.inbox_lease(worker)
        try:
            found = await self._store.get(key)
        except NotFound:
            self._seen.pop(worker, None)
            return None
        assert found is not None
        try:
            lease = decode(WorkerLease, found.body, where=key)
        except UnreadableObject:
            lease = None
        seen = self._seen[worker] = Seen(lease, found.version, found.modified, found.size)
        return seen
