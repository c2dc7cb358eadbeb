"""Announcing packs: what a producer does beyond the submit itself, for types that are direct.

Before the pack is written a worker is chosen, from a picture of the workers that is at most
`worker_discovery_cache_ttl_secs` old (one LIST, and only while something is submitted). After the
pack is written, an entry is put into that worker's inbox. Neither can fail the submit, and each is
given up after a few seconds: a pack without an entry is found by scavenging. An entry that was
given up may still arrive; it is a hint like any other.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from penstock.kernel.entropy import new_id
from penstock.kernel.errors import InvalidInput, StoreError
from penstock.queue.access import Access
from penstock.queue.direct.roster import Roster
from penstock.queue.direct.selection import Selector
from penstock.queue.layout import PointerAt, QueueLayout
from penstock.queue.pack import Pack
from penstock.queue.places import NONCE_CHARACTERS, PRIORITY_MAX, URGENT_MINUTE, PackAt, minute_of
from penstock.queue.settings import DispatchSettings
from penstock.store.base import REPLACE, ObjectStore
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

LOOK_SECONDS_MAX: Final = 5.0
ENTRY_SECONDS_MAX: Final = 5.0


class Dispatch:
    """Tells workers of packs, for one process that submits to one queue."""

    def __init__(self, access: Access, settings: DispatchSettings) -> None:
        self._store = access.store
        self._layout = access.layout
        self._config = access.config
        self._ttl_seconds = settings.worker_discovery_cache_ttl_secs
        self._entropy = access.entropy
        self._roster = Roster(access.store, access.layout)
        self._selector = Selector(settings.worker_selection, entropy=access.entropy)
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def choose(self, at: PackAt, *, affinity: str = "") -> str | None:
        """The worker to tell of a pack; empty if none lives. None: its type is not direct."""
        if not self._config.is_direct(at.type):
            return None
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                await self._look()
                now = await self._store.now()
        except (StoreError, TimeoutError) as error:
            _log.info("the workers cannot be looked for: %s", error)
            return ""
        workers = self._roster.live(now, type=at.type)
        return self._selector.choose(workers, by=affinity or at.pack) if workers else ""

    async def _look(self) -> None:
        clock = self._store.clock.machine
        async with self._looking:
            # A picture that is older than half a lease would show workers as dead that live.
            ttl_seconds = min(self._ttl_seconds, self._roster.shortest_seconds / 2)
            if clock.monotonic() < self._looked_at + ttl_seconds:
                return
            # A look that fails is not repeated for every submit.
            self._looked_at = clock.monotonic()
            await self._roster.look()

    async def announce(self, worker: str, at: PackAt, pack: Pack) -> None:
        """Tell a worker of a pack that is written. Never fails."""
        try:
            async with asyncio.timeout(ENTRY_SECONDS_MAX):
                now_ms = int((await self._store.now()).latest * 1000)
                if pack.key is not None:
                    # In the minute of the pack's own pointer, so that one tells where the other is.
                    now_ms = pack.submitted_ms
                await announce(
                    self._store,
                    self._layout,
                    worker,
                    self._to(at, pack),
                    minute=bucket_of(pack.priority, due_ms=pack.due_ms, now_ms=now_ms),
                )
        except (StoreError, InvalidInput, TimeoutError) as error:
            _log.info("a pack is not announced, and found later: %s", error)

    def _to(self, at: PackAt, pack: Pack) -> PointerAt:
        # The pointer to a pack with a key has the pack's own nonce, which tells which it is.
        keyed = pack.key is not None
        nonce = pack.nonce if keyed else new_id(self._entropy, characters=NONCE_CHARACTERS)
        return PointerAt(at, nonce, pack.priority, pack.limit)


def bucket_of(priority: int, *, due_ms: int, now_ms: int) -> int:
    """The minute of an entry: that in which its pack is due, or one long past if it is urgent."""
    if priority > 0 and due_ms <= now_ms:
        return URGENT_MINUTE + PRIORITY_MAX - priority
    return minute_of(max(due_ms, now_ms))


async def announce(
    store: ObjectStore, layout: QueueLayout, worker: str, to: PointerAt, *, minute: int
) -> None:
    """Put an entry into an inbox. Raises `StoreError`."""
    with labelled("dispatch"):
        # The key says it all: to write it again, after a lost answer, writes the same.
        await store.put(layout.inbox_entry(worker, to, minute=minute), b"", REPLACE)
