"""Waiting for many tasks of few packs: one reading of a ledger serves all who wait for it.

A pack of a thousand has one ledger. Whoever waits for a thousand results of it asks here, and the
ledger is read once for all of them: again only when what was read last is older than the caller
accepts, and then with a question that costs little if nothing has changed. What is settled does not
change, and is not read again while it is remembered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.errors import NotFound
from penstock.kernel.wire import decode
from penstock.queue.layout import PackAt, QueueLayout
from penstock.queue.ledger import Ledger, check_ledger
from penstock.store.base import ObjectStore, Version

PACKS_MAX: Final = 64


@dataclass(slots=True)
class _Watched:
    ledger: Ledger | None = None
    version: Version | None = None
    read_at: float = float("-inf")
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Watch:
    """The ledgers that somebody in this process waits for; the last few are remembered."""

    def __init__(self, store: ObjectStore, layout: QueueLayout) -> None:
        self._store = store
        self._layout = layout
        self._clock = store.clock.machine
        self._watched: dict[PackAt, _Watched] = {}

    async def ledger(self, at: PackAt, *, seconds: float) -> Ledger | None:
        """The ledger as it was at most so long ago; None if there is none."""
        watched = self._watched.pop(at, None) or _Watched()
        self._watched[at] = watched
        while len(self._watched) > PACKS_MAX:
            del self._watched[next(iter(self._watched))]
        async with watched.reading:
            if self._clock.monotonic() - watched.read_at > seconds:
                await self._read(at, watched)
        return watched.ledger

    async def _read(self, at: PackAt, watched: _Watched) -> None:
        key = self._layout.ledger(at)
        instant = self._clock.monotonic()
        try:
            found = await self._store.get(key, unless=watched.version)
        except NotFound:
            watched.ledger = watched.version = None
        else:
            if found is not None:
                ledger = decode(Ledger, found.body, where=key)
                check_ledger(at, ledger)
                watched.ledger, watched.version = ledger, found.version
        watched.read_at = instant
