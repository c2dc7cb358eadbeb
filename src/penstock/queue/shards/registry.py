"""The stored documents of the shard leases, the single steps on them, and the membership they show.

    workers/{worker}.json        `Registration`: role, lease, projection of shards, offers
    shard-leases/{shard}.json    `ShardLease`: who owns the shard, under which epoch; in a folder
                                 of its era if the number of shards was changed

Both are written only by create and swap. `penstock.queue.shards.leases` decides when and in
which order. `ShardRegistry` caches the last reading of `workers/`: one LIST shows which
registrations are new, and only those are read. The result, live workers by name, is the
`Membership`. Only workers of the same cut share out its shards; what owners of another cut look
at is what they are about to take when they move (`penstock.queue.shards.reshard`).

A registration or lease that cannot be read is a `StoredDocument(None, …)`. It counts as expired
at `modified` + `unreadable_seconds`, the longest that a lease can be. A standby's registration
counts from its `modified` on: it is refreshed by a touch, which leaves its version, so that
nobody has to read it again.

A lease that names an owner is only ever written by a swap (SHARD-6). Where there is none, a lease
of nobody is created first: a create that arrives late, after somebody has deleted the object,
brings back nobody and no epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, Generic, TypeVar

import msgspec

from penstock.kernel.document_format import Stamped, decode, encode
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    StoreError,
    UnreadableObject,
    VersionConflict,
)
from penstock.queue.ids import SLOTS
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.shards import allocation as decide
from penstock.queue.shards.allocation import Cut, slot_runs
from penstock.queue.tombstones import remove_old
from penstock.store.base import CREATE, Object, ObjectStore, Swap, Version, pages
from penstock.store.cell import Cell
from penstock.store.time import Interval

AT_ONCE_MAX: Final = 16
_PAGES_MAX: Final = 20
_FORGOTTEN_MAX: Final = 100

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Kept = TypeVar("Kept", bound=Stamped)


class OwnerRole(StrEnum):
    """What a worker is. Only GONE is for ever."""

    STANDBY = "standby"
    OWNER = "owner"
    GONE = "gone"


class OfferReason(StrEnum):
    """Why an owner offers shards."""

    SATURATED = "saturated"
    IDLE = "idle"


class Registration(Stamped, frozen=True, kw_only=True):
    """One incarnation of a worker. Written by itself; others end it or take what it offers."""

    kind: ClassVar[str] = "worker"

    role: OwnerRole
    expires_ms: int = 0
    """The end of an owner's lease, on the store's clock."""
    shards: dict[int, int] = msgspec.field(default_factory=dict)
    """Shard → epoch: what it owns or is about to take. Of one that is gone: what it had."""
    offers: tuple[int, ...] = ()
    reason: OfferReason | None = None
    handles: tuple[str, ...] = ()
    help_wanted: tuple[str, ...] = ()
    """Types of tasks that it met in its shards and has no handler for."""
    host: str = ""
    pid: int = 0
    concurrency: int = 0
    era: int = 0
    """Which cut of the queue its shards are of."""
    of: int = 0
    """Into how many shards that is; 0 where an older release does not tell."""
    incarnation: str = ""
    """Its process, of which a lock tells when it has ended (`penstock.queue.incarnation`)."""

    def is_of(self, cut: Cut) -> bool:
        """Whether its shards are those of a cut."""
        return self.era == cut.era and self.of in (0, cut.shards)

    @property
    def slots(self) -> tuple[range, ...]:
        """The slots of its shards, as runs; all if it cannot be told."""
        return slot_runs(self.shards, shards=self.of) if self.of else (range(SLOTS),)


class ShardLease(Stamped, frozen=True, kw_only=True):
    """Who owns a shard. Written when that changes, and at no other time."""

    kind: ClassVar[str] = "shard-lease"

    worker: str = ""
    """Empty: nobody yet."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StoredDocument(Generic[Kept]):
    """A stored document; None if it cannot be read."""

    document: Kept | None
    version: Version
    modified: float


async def each(
    items: Iterable[Item], act: Callable[[Item], Awaitable[Answer]]
) -> dict[Item, Answer | StoreError]:
    """Do the same for all items, a few at once. What fails shows its error."""
    waiting = list(items)
    answers: dict[Item, Answer | StoreError] = {}

    async def one(item: Item) -> None:
        try:
            answers[item] = await act(item)
        except StoreError as error:
            answers[item] = error

    for start in range(0, len(waiting), AT_ONCE_MAX):
        async with asyncio.TaskGroup() as group:
            for item in waiting[start : start + AT_ONCE_MAX]:
                group.create_task(one(item))
    return answers


class ShardRegistry:
    """The documents of one queue in the hands of one process, and its picture of the others."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        cut: Cut,
        entropy: Entropy,
        standby_seconds: float,
        unreadable_seconds: float,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        self._store = store
        self._layout = layout
        self._entropy = entropy
        self._standby_seconds = standby_seconds
        self._unreadable_seconds = unreadable_seconds
        self._incarnation = incarnation
        self._cut = cut
        self._shards = {self._lease_key(shard): shard for shard in range(cut.shards)}
        self.workers: dict[str, StoredDocument[Registration]] = {}
        self._epochs: dict[int, int] = {}

    def _lease_key(self, shard: int) -> str:
        return self._layout.shard_lease(shard, era=self._cut.era)

    def cell(self, worker: str) -> Cell[Registration]:
        """A handle on the registration of a worker."""
        return Cell(self._store, self._layout.worker(worker), Registration, entropy=self._entropy)

    def epoch_seen(self, shard: int) -> int:
        """The highest epoch of a shard that was read in any document."""
        return self._epochs.get(shard, 0)

    def ends(self, found: StoredDocument[Registration]) -> float:
        """When a registration ends, or has ended, if nobody renews it. Seconds, store time."""
        document = found.document
        if document is None:
            return found.modified + self._unreadable_seconds
        if self._incarnation.is_ended(document.incarnation):
            return found.modified
        match document.role:
            case OwnerRole.OWNER:
                return document.expires_ms / 1000
            case OwnerRole.STANDBY:
                return found.modified + self._standby_seconds
            case OwnerRole.GONE:
                return found.modified

    def is_over(self, found: StoredDocument[Registration], now: Interval) -> bool:
        """Whether it has surely ended."""
        return now.earliest >= self.ends(found)

    def lease_ends(self, found: StoredDocument[ShardLease]) -> float:
        """From when on a lease that names nobody, or cannot be read, may be taken.

        Nobody's may be taken when the time is surely past that of its write, which the store
        dates to the second: what makes its next epoch larger than any that was there before.
        """
        return found.modified + (self._unreadable_seconds if found.document is None else 1.0)

    def live(self, now: Interval) -> dict[str, Registration]:
        """The workers of the picture that can be read and have not surely ended."""
        return {
            worker: found.document
            for worker, found in self.workers.items()
            if found.document is not None
            and found.document.role is not OwnerRole.GONE
            and not self.is_over(found, now)
        }

    async def look(self, *, but: str) -> None:
        """Renew the picture of all workers but one: a LIST, and a GET for each that is new."""
        listed: dict[str, tuple[Version, float]] = {}
        seen_pages = 0
        async for page in pages(self._store, self._layout.workers):
            await remove_old(self._store, page.tombstones)
            for entry in page.entries:
                worker = self._layout.read_worker(entry.key)
                if worker is not None and worker != but:
                    listed[worker] = (entry.version, entry.modified)
            seen_pages += 1
            if seen_pages == _PAGES_MAX:
                break
        self.workers = {
            worker: StoredDocument(found.document, found.version, listed[worker][1])
            for worker, found in self.workers.items()
            if worker in listed and listed[worker][0] == found.version
        }
        answers = await each((name for name in listed if name not in self.workers), self.read)
        for answer in answers.values():
            if isinstance(answer, StoreError):
                raise answer

    async def read(self, worker: str) -> StoredDocument[Registration] | None:
        """One registration as it is now; the picture has it too."""
        known = self.workers.get(worker)
        key = self._layout.worker(worker)
        try:
            answer = await self._store.get(key, unless=known.version if known else None)
        except NotFound:
            self.workers.pop(worker, None)
            return None
        if answer is None:
            return known
        found = _found(Registration, answer)
        self.workers[worker] = found
        if found.document is not None and found.document.is_of(self._cut):
            self._note(found.document.shards)
        return found

    async def refresh(self, worker: str) -> bool:
        """Let a standby's registration count anew. False: it is gone, or cannot be read."""
        key = self._layout.worker(worker)
        try:
            answer = await self._store.get(key)
        except NotFound:
            return False
        assert answer is not None
        document = _found(Registration, answer).document
        if document is None or document.role is OwnerRole.GONE:
            return False
        mark = {"refreshed": new_id(self._entropy, characters=12)}
        await self._store.touch(key, version=answer.version, metadata=mark)
        return True

    async def end(self, worker: str, now: Interval) -> bool:
        """Swap an owner whose lease or process is over to GONE, so that its renewal fails.

        False: it is an owner still, because it has renewed, or cannot be told yet.
        """

        def change(present: Registration | None) -> Registration | None:
            if present is None or present.role is not OwnerRole.OWNER:
                return None
            is_ended = self._incarnation.is_ended(present.incarnation)
            if not is_ended and now.earliest * 1000 < present.expires_ms:
                return None
            return msgspec.structs.replace(present, role=OwnerRole.GONE, offers=(), reason=None)

        self.workers.pop(worker, None)
        try:
            after = await self.cell(worker).update(change)
        except UnreadableObject:
            return await self._end_unreadable(worker, now)
        return after is None or after.role is not OwnerRole.OWNER

    async def _end_unreadable(self, worker: str, now: Interval) -> bool:
        found = await self.read(worker)
        if found is None:
            return True
        if found.document is not None or not self.is_over(found, now):
            return False
        gone = Registration(role=OwnerRole.GONE).stamped(
            writer=new_id(self._entropy, characters=12), write=new_id(self._entropy, characters=16)
        )
        key = self._layout.worker(worker)
        await self._store.put(key, encode(gone), Swap(found.version))
        return True

    async def take_offers(self, worker: str, shards: Collection[int]) -> frozenset[int]:
        """Remove from an owner what it still offers of these, and return that."""
        taken: frozenset[int] = frozenset()

        def change(present: Registration | None) -> Registration | None:
            nonlocal taken
            taken = frozenset()
            if present is None or present.role is not OwnerRole.OWNER:
                return None
            taken = frozenset(present.offers) & frozenset(shards) & present.shards.keys()
            if not taken:
                return None
            rest = {shard: epoch for shard, epoch in present.shards.items() if shard not in taken}
            offers = tuple(shard for shard in present.offers if shard not in taken)
            return msgspec.structs.replace(present, shards=rest, offers=offers)

        self.workers.pop(worker, None)
        with suppress(UnreadableObject):
            await self.cell(worker).update(change)
        return taken

    async def lease(self, shard: int) -> StoredDocument[ShardLease] | None:
        """The lease of a shard; None if there is no object."""
        try:
            answer = await self._store.get(self._lease_key(shard))
        except NotFound:
            return None
        assert answer is not None
        found = _found(ShardLease, answer)
        if found.document is not None:
            self._note({shard: found.document.epoch})
        return found

    async def lease_versions(self) -> dict[int, Version]:
        """The versions of all leases that are there: a LIST."""
        versions: dict[int, Version] = {}
        seen_pages = 0
        folder = self._layout.shard_leases_of(self._cut.era)
        async for page in pages(self._store, folder, delimiter="/"):
            for entry in page.entries:
                shard = self._shards.get(entry.key)
                if shard is not None:
                    versions[shard] = entry.version
            seen_pages += 1
            if seen_pages == _PAGES_MAX:
                break
        return versions

    async def create_lease(self, shard: int) -> None:
        """Create a lease of nobody where there is none."""
        with suppress(AlreadyExists):
            body = encode(self._stamped(ShardLease()))
            await self._store.put(self._lease_key(shard), body, CREATE)

    async def give_lease(
        self, shard: int, found: StoredDocument[ShardLease], *, worker: str, epoch: int
    ) -> Version | None:
        """Swap a lease, as it was found, to a new owner. None: it is not as it was found."""
        before = found.document or ShardLease()
        lease = self._stamped(msgspec.structs.replace(before, worker=worker, epoch=epoch))
        key = self._lease_key(shard)
        try:
            version = await self._store.put(key, encode(lease), Swap(found.version))
        except VersionConflict:
            return None
        self._note({shard: epoch})
        return version

    async def forget(self, now: Interval, *, after_seconds: float) -> None:
        """Delete the registrations that ended so long ago. To fail does no harm."""
        old = [
            worker
            for worker, found in self.workers.items()
            if now.earliest >= self.ends(found) + after_seconds
        ]

        async def delete(worker: str) -> None:
            version = self.workers.pop(worker).version
            await self._store.delete(self._layout.worker(worker), version=version)

        await each(old[:_FORGOTTEN_MAX], delete)

    def _stamped(self, lease: ShardLease) -> ShardLease:
        writer = new_id(self._entropy, characters=12)
        return lease.stamped(writer=writer, write=new_id(self._entropy, characters=16))

    def _note(self, epochs: Mapping[int, int]) -> None:
        for shard, epoch in epochs.items():
            self._epochs[shard] = max(epoch, self._epochs.get(shard, 0))


def _found(kind: type[Kept], answer: Object) -> StoredDocument[Kept]:
    try:
        document = decode(kind, answer.body, where=answer.key)
    except UnreadableObject:
        return StoredDocument(None, answer.version, answer.modified)
    return StoredDocument(document, answer.version, answer.modified)


Membership = Mapping[str, Registration]


def of_cut(live: Membership, cut: Cut) -> dict[str, Registration]:
    """The workers whose shards are those of a cut."""
    return {name: other for name, other in live.items() if other.is_of(cut)}


def is_covered(
    slots: Iterable[range], others: Membership, *, mine: Collection[int], shards: int
) -> bool:
    """Whether all shards with these slots are mine or another owner's of the same cut."""
    owners = [other.shards for other in others.values() if other.role is OwnerRole.OWNER]
    free = decide.unowned([*owners, mine], shards=shards)
    return decide.shards_in(slots, shards=shards).isdisjoint(free)


def left_to_others(live: Membership, cut: Cut, *, before: Collection[str]) -> frozenset[int]:
    """The shards of a cut whose first slot an owner of another cut looks at.

    `before` are the names that the worker who asks has under other cuts: what it looks at
    itself it need not leave.
    """
    looked_at = [
        run
        for name, other in live.items()
        if other.role is OwnerRole.OWNER and name not in before and not other.is_of(cut)
        for run in other.slots
    ]
    return decide.begun_in(looked_at, shards=cut.shards)
