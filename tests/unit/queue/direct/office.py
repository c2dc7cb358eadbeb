"""A bucket with inboxes, and whoever writes and reads them: what the tests of `direct` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from penstock.kernel.document_format import decode, encode
from penstock.kernel.errors import OutcomeUnknown
from penstock.queue.config import QueueConfig
from penstock.queue.context import QueueContext
from penstock.queue.discovery.scanner import PackCandidate
from penstock.queue.ids import PackAt, new_pack
from penstock.queue.inbox import (
    CursorDocument,
    HeldWorkerLease,
    Inbox,
    InboxCursor,
    WorkerLease,
    WorkerRoster,
)
from penstock.queue.inbox_announcer import InboxRecovery, PackAnnouncer, announce
from penstock.queue.layout import PointerAt, QueueLayout
from penstock.queue.pack import Pack
from penstock.queue.settings import DispatchSettings
from penstock.store.base import NO_METADATA, REPLACE, ObjectStore, PutMode, Swap, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.testing.virtual import VirtualClock, World, simulate

LAYOUT = QueueLayout("q")
LEASE_SECONDS = 60.0
NONCE = "0123456789abcde"


class LosesAnswers(Wrapper):
    """Loses the answers to as many writes as it is told."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.lost = 0

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        version = await self.inner.put(key, body, mode, metadata=metadata)
        if self.lost and isinstance(mode, Swap):
            self.lost -= 1
            raise OutcomeUnknown("The answer is lost.", key=key)
        return version


class Dies(Exception):
    """A process ends here."""


class Mortal(Wrapper):
    """Ends its process before a write, after so many."""

    def __init__(self, inner: ObjectStore, writes: int) -> None:
        super().__init__(inner)
        self._left = writes

    def _write(self) -> None:
        if not self._left:
            raise Dies
        self._left -= 1

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        self._write()
        return await self.inner.put(key, body, mode, metadata=metadata)

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        self._write()
        await self.inner.delete(key, version=version)


class Office:
    """One queue, all of whose types are direct unless told."""

    def __init__(self, world: World, *, direct: tuple[str, ...] = ("*",)) -> None:
        self.world = world
        self.clock: VirtualClock = world.clock()
        self.bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
        self.meter = Meter()
        self.config = QueueConfig(direct=direct)
        self._packs = 0

    def store(self) -> MeteredStore:
        clock = self.world.clock(skew_seconds=self.world.entropy("skew").uniform(-9e4, 9e4))
        return MeteredStore(MemoryStore(self.bucket, clock=clock), self.meter)

    def held(
        self,
        name: str,
        *,
        handles: frozenset[str] = frozenset({"t"}),
        store: ObjectStore | None = None,
    ) -> HeldWorkerLease:
        return HeldWorkerLease(
            store or self.store(),
            LAYOUT,
            worker=name,
            handles=handles,
            seconds=LEASE_SECONDS,
            entropy=self.world.entropy(f"held {name}"),
        )

    async def cursor(
        self, name: str, store: ObjectStore, *, since: int | None = None
    ) -> InboxCursor:
        cursor = InboxCursor(store, LAYOUT, worker=name, entropy=self.world.entropy("cursors"))
        await cursor.load(
            since_minute=self.minute if since is None else since, now_minute=self.minute
        )
        return cursor

    async def inbox(
        self, name: str, *, handles: frozenset[str] = frozenset({"t"}), since: int | None = None
    ) -> tuple[Inbox, InboxCursor]:
        store = self.store()
        cursor = await self.cursor(name, store, since=since)
        return Inbox(store, LAYOUT, worker=name, handles=handles, cursor=cursor), cursor

    async def look(self, inbox: Inbox, *, wanted: int = 10) -> list[PackCandidate]:
        return await inbox.look(
            now_minute=self.minute, worth=lambda sight: sight.at.count, wanted=wanted
        )

    def recovery(self, store: ObjectStore | None = None) -> tuple[InboxRecovery, WorkerRoster]:
        store = store or self.store()
        roster = WorkerRoster(store, LAYOUT)
        entropy = self.world.entropy("recovery")
        return InboxRecovery(store, LAYOUT, roster, entropy=entropy), roster

    def dispatch(self, *, store: ObjectStore | None = None, **settings: object) -> PackAnnouncer:
        access = QueueContext(
            store or self.store(), LAYOUT, self.config, self.world.entropy("dispatch")
        )
        return PackAnnouncer(access, DispatchSettings(**settings))  # type: ignore[arg-type]  # by name

    @property
    def minute(self) -> int:
        return int(self.world.now() // 60)

    def pack(self, *, type: str = "t", priority: int = 0) -> PackAt:
        """A pack that is in the bucket."""
        self._packs += 1
        submitted_ms = int(self.world.now() * 1000)
        at = new_pack(
            type=type,
            count=1,
            submitted_ms=submitted_ms,
            entropy=self.world.entropy("packs"),
            priority=priority,
        )
        pack = Pack(
            type=type,
            nonce=str(self._packs),
            submitted_ms=submitted_ms,
            inputs=(),
            priority=priority,
        )
        self.bucket.write(LAYOUT.pack(at), encode(pack), {})
        return at

    async def announced(self, worker: str, at: PackAt, *, minute: int | None = None) -> str:
        """Put an entry to a pack into an inbox; returns its key."""
        to = PointerAt(at, NONCE, at.priority, at.limit)
        where = self.minute if minute is None else minute
        await announce(self.store(), LAYOUT, worker, to, minute=where)
        return LAYOUT.inbox_entry(worker, to, minute=where)

    def entries(self, worker: str) -> list[PackAt]:
        """The packs that an inbox points to."""
        prefix = LAYOUT.inbox(worker)
        read = [LAYOUT.read_inbox_entry(key) for key in self.bucket.objects if prefix in key]
        return [each.to.at for each in read if each]

    def lease(self, worker: str) -> WorkerLease | None:
        found = self.bucket.objects.get(LAYOUT.inbox_lease(worker))
        return decode(WorkerLease, found.body, where="lease") if found else None

    def saved(self, worker: str) -> int | None:
        found = self.bucket.objects.get(LAYOUT.inbox_cursor(worker))
        return decode(CursorDocument, found.body, where="cursor").minute if found else None


def run(check: Callable[[Office], Awaitable[None]], *, seeds: int = 1) -> None:
    """Try something in an office of its own, for several seeds."""

    async def main(world: World) -> None:
        await check(Office(world))

    for seed in range(seeds):
        simulate(main, seed=seed)
