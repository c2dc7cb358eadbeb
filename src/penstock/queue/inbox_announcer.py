"""Announcing packs to workers in `direct` mode, and redistributing the inboxes of dead workers.

**Announcing** (`PackAnnouncer`), for producers. Before the pack is written a worker is chosen,
from a roster that is at most `worker_discovery_cache_ttl_secs` old (one LIST, and only while
something is submitted). After the pack is written, an entry is put into that worker's inbox.
Neither can fail the submit, and each is given up after a few seconds: a pack without an entry is
found by scavenging. An entry that was given up may still arrive; it is a hint like any other.

`WorkerSelector` chooses: `round_robin` deals the packs of one producer evenly, from a random
worker on. `hash` gives an affinity, or else a pack id and so a key, the same worker as long as
that lives (rendezvous hashing). `random` needs no memory.

**Recovery** (`InboxRecovery`): any worker, twice, or two at once. Each step is conditional or
harmless to repeat:

1. The lease is read, and if it, or its process, is surely over, swapped to GONE. Its holder's
next
   renewal fails, so that it stops; if it renews first, the swap fails and nothing was done.
2. Each entry of the inbox is judged by its pack. If there is a ledger, it was claimed, and the
   claim's own lease decides. If there is no pack, it is over. Otherwise it is pending, and
   announced to a live worker with a handler for it, under the same nonce. Where none lives,
   nothing is written: the pack is found by scavenging.
3. The entry is deleted, after its successor is written (SHARD-9).
4. When the inbox is empty, `LINGER_SECONDS` after the lease was swapped, the cursor and then the
   lease are deleted, each in the version that was seen.

A worker that starts under the name between any two steps swaps the lease to its own. The
recovery notices that at step 4, where its delete fails; what it has moved by then is run by
others. An entry costs a HEAD, or two and a put if it is pending. Used by
`penstock.queue.discovery.direct`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from penstock.kernel.document_format import encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    InvalidInput,
    NotFound,
    StoreError,
    UnreadableObject,
    VersionConflict,
)
from penstock.queue.context import QueueContext
from penstock.queue.ids import NONCE_CHARACTERS, PRIORITY_MAX, URGENT_MINUTE, PackAt, minute_of
from penstock.queue.inbox import UNREADABLE_SECONDS, WorkerLease, WorkerRoster
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import InboxAt, PointerAt, QueueLayout
from penstock.queue.pack import Pack
from penstock.queue.settings import DispatchSettings, WorkerSelection
from penstock.store.base import REPLACE, Head, ObjectStore, Swap, pages
from penstock.store.cell import Cell
from penstock.store.metered import labelled


class WorkerSelector:
    """Chooses workers for one process."""

    def __init__(self, selection: WorkerSelection, *, entropy: Entropy) -> None:
        self._selection = selection
        self._entropy = entropy
        self._turn = entropy.getrandbits(16)

    def choose(self, workers: Sequence[str], *, by: str) -> str:
        """One of these, which are in order and not none; `by` is what is hashed."""
        match self._selection:
            case WorkerSelection.ROUND_ROBIN:
                self._turn += 1
                return workers[self._turn % len(workers)]
            case WorkerSelection.HASH:
                return max(workers, key=lambda worker: _weight(worker, by))
            case WorkerSelection.RANDOM:
                return self._entropy.choice(workers)


def _weight(worker: str, by: str) -> bytes:
    return hashlib.blake2b(f"{worker}\0{by}".encode(), digest_size=8).digest()


_log = logging.getLogger(__name__)

LOOK_SECONDS_MAX: Final = 5.0
ENTRY_SECONDS_MAX: Final = 5.0


class PackAnnouncer:
    """Tells workers of packs, for one process that submits to one queue."""

    def __init__(self, access: QueueContext, settings: DispatchSettings) -> None:
        self._store = access.store
        self._layout = access.layout
        self._config = access.config
        self._ttl_seconds = settings.worker_discovery_cache_ttl_secs
        self._entropy = access.entropy
        self._roster = WorkerRoster(access.store, access.layout)
        self._selector = WorkerSelector(settings.worker_selection, entropy=access.entropy)
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
            _log.info("failed to list the workers: %s", error)
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
            _log.info("failed to announce a pack, scavenging will find it: %s", error)

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


LINGER_SECONDS: Final = 120.0
"""How long a lease stays GONE: those who submit may take its worker for alive for a while."""
PAGES_MAX: Final = 20
"""So many pages of an inbox are given away at a time; the next look goes on."""
_AT_ONCE: Final = 16


class InboxRecovery:
    """Looks after inboxes whose workers are gone, for one worker."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        roster: WorkerRoster,
        *,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        self._incarnation = incarnation
        self._store = store
        self._layout = layout
        self._roster = roster
        self._entropy = entropy
        self._selector = WorkerSelector(WorkerSelection.ROUND_ROBIN, entropy=entropy)

    async def recover(self, worker: str) -> None:
        """Give away what a worker has left, if its lease is surely over. Raises `StoreError`."""
        with labelled("recovery"):
            if not await self._fence(worker):
                return
            if await self._give_away(worker):
                await self._forget(worker)

    async def recover_all(self, *, but: str) -> None:
        """Recover whoever of the picture is gone; one that fails does not hold up the others."""
        now = await self._store.now()
        for worker, seen in list(self._roster.seen.items()):
            is_ended = seen.lease is not None and self._is_ended(seen.lease)
            if worker != but and (is_ended or seen.may_be_over(now)):
                try:
                    await self.recover(worker)
                except StoreError as error:
                    _log.info("failed to reassign the inbox of %s: %s", worker, error)

    async def recover_orphans(self) -> None:
        """Give away what is in inboxes that have no lease at all. Raises `StoreError`."""
        with labelled("recovery"):
            folders: list[str] = []
            async for page in pages(self._store, self._layout.inboxes, delimiter="/"):
                folders += page.folders
                if len(folders) > PAGES_MAX * 1000:
                    break
            # The leases are asked for after the folders: a worker has its lease before its inbox.
            for folder in folders:
                worker = self._layout.inbox_of(folder)
                if worker is None or worker in self._roster.seen:
                    continue
                if await self._roster.read(worker) is None:
                    await self._give_away(worker)

    async def _fence(self, worker: str) -> bool:
        """Swap a lease that is over to GONE. False: it is not over, or not there."""
        now = await self._store.now()
        key = self._layout.inbox_lease(worker)
        cell = Cell(self._store, key, WorkerLease, entropy=self._entropy)

        def change(present: WorkerLease | None) -> WorkerLease | None:
            if present is None or present.is_gone:
                return None
            if not self._is_ended(present) and not present.is_over(now):
                return None
            return msgspec.structs.replace(present, is_gone=True)

        try:
            lease = await cell.update(change)
        except UnreadableObject:
            return await self._fence_unreadable(worker)
        return lease is not None and lease.is_gone

    def _is_ended(self, lease: WorkerLease) -> bool:
        return self._incarnation.is_ended(lease.incarnation)

    async def _fence_unreadable(self, worker: str) -> bool:
        now = await self._store.now()
        key = self._layout.inbox_lease(worker)
        head = await self._store.head(key)
        if now.earliest < head.modified + UNREADABLE_SECONDS:
            return False
        gone = WorkerLease(holder="", expires_ms=0, seconds=1.0, since_ms=0, is_gone=True)
        stamped = gone.stamped(
            writer=new_id(self._entropy, characters=12), write=new_id(self._entropy, characters=16)
        )
        with suppress(VersionConflict):
            await self._store.put(key, encode(stamped), Swap(head.version))
            return True
        return False

    async def _give_away(self, worker: str) -> bool:
        """Step 2 and 3; whether the inbox is empty now."""
        slots = asyncio.Semaphore(_AT_ONCE)
        moved = 0

        async def give(key: str, read: InboxAt) -> None:
            nonlocal moved
            async with slots:
                moved += await self._give(key, read)

        number = 0
        async for page in pages(self._store, self._layout.inbox(worker)):
            entries = [(each.key, self._layout.read_inbox_entry(each.key)) for each in page.entries]
            await asyncio.gather(*(give(key, read) for key, read in entries if read))
            number += 1
            if number == PAGES_MAX and page.cursor is not None:
                return False
        if moved:
            _log.info("moved %d inbox entries of the worker %s, which is gone", moved, worker)
        return True

    async def _give(self, key: str, read: InboxAt) -> bool:
        """Deal with one entry; whether it has moved."""
        has_moved = await self._is_pending(read.to.at) and await self._move(read)
        await self._store.delete(key)
        return has_moved

    async def _is_pending(self, at: PackAt) -> bool:
        """Whether nobody has claimed a pack that is there."""
        if await self._head(self._layout.ledger(at)) is not None:
            return False
        return await self._head(self._layout.pack(at)) is not None

    async def _head(self, key: str) -> Head | None:
        try:
            return await self._store.head(key)
        except NotFound:
            return None

    async def _move(self, read: InboxAt) -> bool:
        now = await self._store.now()
        live = self._roster.live(now, type=read.to.at.type)
        workers = [worker for worker in live if worker != read.worker]
        if not workers:
            return False
        chosen = self._selector.choose(workers, by=read.to.at.pack)
        now_ms = int(now.latest * 1000)
        minute = bucket_of(read.to.priority, due_ms=read.minute * 60_000, now_ms=now_ms)
        await announce(self._store, self._layout, chosen, read.to, minute=minute)
        return True

    async def _forget(self, worker: str) -> None:
        """Step 4, if it is time."""
        now = await self._store.now()
        seen = await self._roster.read(worker)
        if seen is None or seen.lease is None or not seen.lease.is_gone:
            return
        if now.earliest < seen.modified + LINGER_SECONDS:
            return
        with suppress(VersionConflict, NotFound):
            cursor = self._layout.inbox_cursor(worker)
            head = await self._head(cursor)
            if head is not None:
                await self._store.delete(cursor, version=head.version)
            await self._store.delete(self._layout.inbox_lease(worker), version=seen.version)
