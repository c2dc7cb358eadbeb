"""Waiting for many tasks of few packs: one reading of a ledger serves all who wait for it.

A pack of a thousand has one ledger. Whoever waits for a thousand results of it asks here, and what
the bucket says of the pack is read once for all of them: again only when what was read last is
older than the caller accepts, and then with a question that costs little if nothing has changed. A
reading that fails fails for all who waited for it, so that none of them waits for the others.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.errors import NotFound, StoreError
from penstock.kernel.wire import decode
from penstock.queue import archive
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, check_ledger
from penstock.queue.places import PackAt
from penstock.store.base import ObjectStore, Version

PACKS_MAX: Final = 16


@dataclass(slots=True)
class _Watched:
    ledger: Ledger | None = None
    version: Version | None = None
    is_archived: bool = False
    error: StoreError | None = None
    read_at: float = float("-inf")
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Watch:
    """The packs that somebody in this process waits for; the last few are remembered."""

    def __init__(self, store: ObjectStore, layout: QueueLayout) -> None:
        self._store = store
        self._layout = layout
        self._clock = store.clock.machine
        self._watched: dict[PackAt, _Watched] = {}

    async def ledger(self, at: PackAt, *, seconds: float) -> Ledger | None:
        """The ledger as it was at most so long ago; None if nobody has begun.

        Raises `NotFound` if there is neither a pack nor a record of it.
        """
        watched = self._watched.pop(at, None) or _Watched()
        self._watched[at] = watched
        while len(self._watched) > PACKS_MAX:
            del self._watched[next(iter(self._watched))]
        async with watched.reading:
            if self._clock.monotonic() - watched.read_at > seconds:
                try:
                    watched.error = None
                    await self._read(at, watched)
                except StoreError as error:
                    watched.error = error
                watched.read_at = self._clock.monotonic()
            if watched.error is not None:
                raise watched.error
        return watched.ledger

    async def _read(self, at: PackAt, watched: _Watched) -> None:
        if watched.is_archived:
            return
        if await self._read_ledger(at, watched) and await self._is_live(watched.ledger):
            return
        try:
            await self._store.head(self._layout.pack(at))
        except NotFound:
            # It may have been claimed and settled between the two questions; otherwise a ledger
            # that is not settled is void: a late write of somebody who was overtaken long ago.
            await self._read_ledger(at, watched)
            if watched.ledger is None or not watched.ledger.settled:
                found = await archive.find(self._store, self._layout, at)
                watched.ledger, watched.is_archived = found, found is not None
                if found is None:
                    raise

    async def _is_live(self, ledger: Ledger | None) -> bool:
        """Whether there is no doubt of a ledger: it is settled, or somebody works on it."""
        now_ms = (await self._store.now()).earliest * 1000
        return ledger is not None and (
            ledger.settled or any(lease.expires_ms > now_ms for lease in ledger.leases.values())
        )

    async def _read_ledger(self, at: PackAt, watched: _Watched) -> bool:
        key = self._layout.ledger(at)
        try:
            found = await self._store.get(key, unless=watched.version)
        except NotFound:
            watched.ledger = watched.version = None
            return False
        if found is not None:
            ledger = decode(Ledger, found.body, where=key)
            check_ledger(at, ledger)
            watched.ledger, watched.version = ledger, found.version
        return True
