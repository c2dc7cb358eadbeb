"""How a worker holds and takes shards: `ShardHoldings` and `ShardAcquirer`.

The registration is the truth about the projection (the shards that a worker has);
`ShardHoldings` is the worker's side of it. A shard is *held* when its lease object was written
by this incarnation, and is lost as soon as a reading of the registration no longer shows it:
others have taken it. A shard in the projection that is not held is *pending*: a take whose
outcome is unknown. `settle` reads their leases. If the registration turns out to be GONE,
missing or unreadable, everything is lost at once and a new incarnation begins, under a new id.
The `Cell` resolves lost answers; after a write of unknown outcome the older, shorter lease is
trusted. A crash leaves the registration as it is.

Taking: each step is a create or a swap, in this order (SHARD-2):

a. The taker's own registration gets the shards, with their new epochs, into its projection.
b. A live owner's offer: its registration is swapped without them, if it still offers them. An
   owner whose lease is over: its registration is swapped to GONE, so that its renewal fails.
c. The lease object is swapped to the taker, from the version that was read before (a). Where
there
   is none, a lease of nobody is created first, and taken when the time is surely past its write.

What (b) or (c) refuse leaves the projection again. Steps with a lost answer stay pending, and
are read back at the next turn.

A shard is free if it is in no live owner's projection, and its lease names nobody, or a worker
in whose registration, read after the lease, it is not (SHARD-3). (An owner's projection has a shard
before the lease names it: a reading that is older than the lease proves nothing.)

What a crash leaves: after (a), a shard in the projection of a worker whose lease ends by itself;
after (b), the same, with a lease that names a former owner; after (c), an owner
that dies like any other. All of them are free when the lease of the dead worker is over.

An epoch is larger than its predecessor, than every epoch of the shard in any registration seen,
and no less than the store's milliseconds, but never ahead of true time (SHARD-5). A shard without a
readable predecessor is taken only when the time is surely past the write of that. So epochs
never go back, also where an operator deletes or damages objects. (Not covered: a create and the
swap that follows it would both have to arrive a second time, late and in order, after a
delete.)

Called by `penstock.queue.shards.leases`, one object a worker, by one coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.shards import allocation as decide
from penstock.queue.shards.registry import (
    OfferReason,
    OwnerRole,
    Registration,
    ShardLease,
    ShardRegistry,
    StoredDocument,
    each,
)
from penstock.store.base import ObjectStore, Version
from penstock.store.cell import Change
from penstock.store.time import Interval

_log = logging.getLogger(__name__)
_NO_SHARDS: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """What an owner says of itself with each write."""

    offers: tuple[int, ...] = ()
    reason: OfferReason | None = None
    help_wanted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Held:
    epoch: int
    version: Version


class ShardHoldings:
    """The registration of one worker and what it holds."""

    def __init__(
        self,
        store: ObjectStore,
        registry: ShardRegistry,
        *,
        name: str,
        fresh: Registration,
        entropy: Entropy,
        gained: asyncio.Event | None = None,
    ) -> None:
        self._store = store
        self._registry = registry
        self._name = name
        self._fresh = fresh
        self._entropy = entropy
        self.gained = gained or asyncio.Event()
        self.begin()

    def begin(self) -> None:
        """A new incarnation, which holds nothing and has not registered."""
        self.worker = f"{self._name}-{new_id(self._entropy, characters=12)}"
        self._cell = self._registry.cell(self.worker)
        self._cell.assume_absent()
        self.registration: Registration | None = None
        self._held: dict[int, _Held] = {}

    @property
    def is_owner(self) -> bool:
        return self.registration is not None and self.registration.role is OwnerRole.OWNER

    @property
    def shards(self) -> frozenset[int]:
        """What is held, whether the lease is live or not."""
        return frozenset(self._held)

    @property
    def projection(self) -> frozenset[int]:
        """What the registration shows: held or pending."""
        return frozenset(self.registration.shards if self.registration else ())

    @property
    def pending(self) -> frozenset[int]:
        return self.projection - self._held.keys()

    @property
    def said(self) -> OwnerReport:
        mine = self.registration
        return OwnerReport(mine.offers, mine.reason, mine.help_wanted) if mine else OwnerReport()

    def epochs(self) -> dict[int, int]:
        """What is held, with epochs; nothing unless the lease has surely not ended. No request."""
        return {shard: held.epoch for shard, held in self._held.items()} if self._is_live else {}

    def owned(self) -> frozenset[int]:
        """The same without epochs."""
        return frozenset(self._held) if self._is_live else frozenset()

    @property
    def _is_live(self) -> bool:
        now = self._store.clock.estimate()
        mine = self.registration
        return now is not None and mine is not None and now.latest * 1000 < mine.expires_ms

    def confirm(self, leases: Mapping[int, Version]) -> None:
        """The leases of these shards in the projection name this worker."""
        assert self.registration is not None
        epochs = self.registration.shards
        self._held |= {shard: _Held(epochs[shard], version) for shard, version in leases.items()}
        if leases:
            self.gained.set()

    async def register(self) -> bool:
        """Create the registration, as a standby's. False: it was lost on the way."""
        # A second try after a lost answer finds the first.
        return self._adopt(await self._update(lambda present: present or self._fresh))

    async def write(
        self,
        said: OwnerReport,
        *,
        ttl_seconds: float,
        add: Mapping[int, int] = _NO_SHARDS,
        drop: Collection[int] = (),
    ) -> bool:
        """Renew the lease, with these shards more and those less. False: everything was lost."""
        for shard in drop:
            self._held.pop(shard, None)
        now = await self._store.now()
        expires_ms = int((now.earliest + ttl_seconds) * 1000)

        def change(present: Registration | None) -> Registration | None:
            if present is None or present.role is OwnerRole.GONE:
                return None
            kept = {shard: at for shard, at in present.shards.items() if shard not in drop}
            shards = kept | dict(add)
            if not shards and present.role is OwnerRole.STANDBY:
                return None
            return msgspec.structs.replace(
                present,
                role=OwnerRole.OWNER if shards else OwnerRole.STANDBY,
                # Never shortened (SHARD-10): an answer may be lost, and the longer one trusted.
                expires_ms=max(present.expires_ms, expires_ms) if shards else 0,
                shards=shards,
                offers=tuple(shard for shard in said.offers if shard in shards),
                reason=said.reason if shards else None,
                help_wanted=said.help_wanted if shards else (),
            )

        return self._adopt(await self._update(change))

    async def refresh(self) -> bool:
        """Let a standby's registration count anew. False: it was lost."""
        if await self._registry.refresh(self.worker):
            return True
        self.begin()
        return False

    async def settle(self) -> frozenset[int]:
        """Find out what has become of pending takes; returns what is not ours."""
        others: set[int] = set()
        mine: dict[int, Version] = {}
        for shard, found in (await each(sorted(self.pending), self._registry.lease)).items():
            if isinstance(found, StoreError):
                continue
            if found and found.document and self._is_mine(shard, found.document):
                mine[shard] = found.version
            else:
                others.add(shard)
        self.confirm(mine)
        return frozenset(others)

    async def verify(self, now: Interval) -> tuple[frozenset[int], frozenset[int]]:
        """Compare the lease objects with what is held.

        Returns what is not ours any more, and what cannot be read: that is kept until it counts
        as expired.
        """
        versions = await self._registry.lease_versions()
        doubtful = [s for s, held in self._held.items() if versions.get(s) != held.version]
        lost: set[int] = set()
        unreadable: set[int] = set()
        for shard, found in (await each(doubtful, self._registry.lease)).items():
            if isinstance(found, StoreError):
                unreadable.add(shard)
            elif found is None:
                lost.add(shard)
            elif found.document is None:
                expired = now.earliest >= self._registry.lease_ends(found)
                (lost if expired else unreadable).add(shard)
            elif not self._is_mine(shard, found.document):
                lost.add(shard)
        return frozenset(lost), frozenset(unreadable)

    def _is_mine(self, shard: int, lease: ShardLease) -> bool:
        projected = self.registration.shards.get(shard) if self.registration else None
        return lease.worker == self.worker and lease.epoch == projected

    async def release(self, *, seconds_max: float) -> None:
        """End this incarnation, so that others can take what it has at once."""
        was_owner, self.registration = self.is_owner, None
        self._held = {}

        def change(present: Registration | None) -> Registration | None:
            return present and msgspec.structs.replace(
                present, role=OwnerRole.GONE, offers=(), reason=None
            )

        try:
            async with asyncio.timeout(seconds_max):
                await (self._cell.update(change) if was_owner else self._cell.remove())
        except (StoreError, UnreadableObject, TimeoutError) as error:
            _log.info("worker %s: failed to deregister, its lease ends: %s", self.worker, error)

    async def _update(self, change: Change[Registration]) -> Registration | None:
        try:
            return await self._cell.update(change)
        except UnreadableObject:
            return None

    def _adopt(self, state: Registration | None) -> bool:
        """Believe what was written or found; begin anew if that is the end."""
        if state is None or state.role is OwnerRole.GONE:
            _log.warning("worker %s: lost its registration, and all its shards", self.worker)
            self.begin()
            return False
        self.registration = state
        self._held = {
            shard: held
            for shard, held in self._held.items()
            if state.shards.get(shard) == held.epoch
        }
        return True


TAKEN_AT_ONCE_MAX: Final = 256
"""How many shards are taken at once at the most; the others follow at the next look."""
_SOON_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 5.0

Write = Callable[[Mapping[int, int], Collection[int]], Awaitable[bool]]
"""Writes the own registration with these shards more and those less; False if all is lost."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A shard that may be taken: its lease as found, from whom, and who has to be ended before."""

    shard: int
    found: StoredDocument[ShardLease]
    epoch: int
    offerer: str
    to_end: frozenset[str]


class ShardAcquirer:
    """Takes shards for one worker."""

    def __init__(
        self, registry: ShardRegistry, mine: ShardHoldings, *, shards: int, write: Write
    ) -> None:
        self._registry = registry
        self._mine = mine
        self._shards = shards
        self._write = write
        self._again_seconds: float | None = None

    async def take(
        self,
        others: Mapping[str, Registration],
        now: Interval,
        *,
        idle: bool,
        saturated: bool,
        draw: float,
        left: frozenset[int] = frozenset(),
    ) -> float | None:
        """Take what is to be taken by the picture of the others, and end all who are over.

        What is in `left` is free and left to others for now.
        Returns in how many seconds it is worth to look again; None if nothing was put off.
        """
        self._again_seconds = None
        plan = (
            self._free(others, left)
            or (not self._mine.is_owner and self._of_the_saturated(others, draw=draw))
            or (self._mine.is_owner and self._of_the_idle(others, idle=idle, saturated=saturated))
            or {}
        )
        if len(plan) > TAKEN_AT_ONCE_MAX:
            self._look_again_in(_SOON_SECONDS)
        candidates = await self._vet(dict(list(plan.items())[:TAKEN_AT_ONCE_MAX]), now)
        if candidates and not await self._write({c.shard: c.epoch for c in candidates}, ()):
            return self._again_seconds
        ended = await self._end({*self._dead(now), *_all(c.to_end for c in candidates)}, now)
        offered = await self._take_offers(candidates)
        allowed = {
            c.shard: c
            for c in candidates
            if (c.shard in offered if c.offerer else c.to_end <= ended)
        }

        async def give(shard: int) -> Version | None:
            chosen = allowed[shard]
            return await self._registry.give_lease(
                shard, chosen.found, worker=self._mine.worker, epoch=chosen.epoch
            )

        answers = await each(allowed, give)
        # All at once: who looks at a part only would take what is less urgent in it.
        self._mine.confirm(
            {s: v for s, v in answers.items() if v is not None and not isinstance(v, StoreError)}
        )
        refused = {c.shard for c in candidates if answers.get(c.shard) is None}
        if refused:
            # Others were faster. What they left may be seen when they are done.
            self._look_again_in(_AGAIN_SECONDS)
            await self._write({}, refused)
        return self._again_seconds

    def _free(self, others: Mapping[str, Registration], left: frozenset[int]) -> dict[int, str]:
        """What is in no live projection: shard → "", for nobody offers it."""
        projections = [other.shards for other in others.values() if other.role is OwnerRole.OWNER]
        free = decide.unowned([*projections, self._mine.projection], shards=self._shards)
        return dict.fromkeys((shard for shard in free if shard not in left), "")

    def _of_the_saturated(
        self, others: Mapping[str, Registration], *, draw: float
    ) -> dict[int, str]:
        """A fair share of what saturated owners offer: shard → who offers it."""
        plan: dict[int, str] = {}
        share = decide.fair_share(shards=self._shards, workers=len(others) + 1)
        for name in sorted(others, key=lambda name: (-len(others[name].offers), name)):
            if others[name].reason is OfferReason.SATURATED:
                left = share - len(plan)
                picked = decide.pick(others[name].offers, count=left, draw=draw)
                plan |= dict.fromkeys(picked, name)
        return plan

    def _of_the_idle(
        self, others: Mapping[str, Registration], *, idle: bool, saturated: bool
    ) -> dict[int, str]:
        """All that idle owners offer, if it is for us to take: shard → who offers it."""
        me = self._mine.worker
        return {
            shard: name
            for name, other in sorted(others.items())
            if other.reason is OfferReason.IDLE
            if decide.takes_idle_offer(me=me, offerer=name, idle=idle, saturated=saturated)
            for shard in other.offers
        }

    async def _vet(self, plan: Mapping[int, str], now: Interval) -> list[_Candidate]:
        """Read the leases, then those whom they name, and keep what may be taken."""
        leases = {
            shard: found
            for shard, found in (await each(plan, self._registry.lease)).items()
            if not isinstance(found, StoreError)
        }
        missing = [shard for shard, found in leases.items() if found is None]
        if missing:
            await each(missing, self._registry.create_lease)
            self._look_again_in(_SOON_SECONDS + now.width)
        named = {
            found.document.worker
            for shard, found in leases.items()
            if found is not None and found.document is not None and not plan[shard]
        } - {"", self._mine.worker}
        read = await each(sorted(named), self._registry.read)
        unknown = {name for name, answer in read.items() if isinstance(answer, StoreError)}
        if unknown or len(leases) < len(plan):
            self._look_again_in(_AGAIN_SECONDS)
        candidates = (
            self._candidate(shard, found, offerer=plan[shard], unknown=unknown, now=now)
            for shard, found in leases.items()
            if found is not None
        )
        return [candidate for candidate in candidates if candidate is not None]

    def _candidate(
        self,
        shard: int,
        found: StoredDocument[ShardLease],
        *,
        offerer: str,
        unknown: Collection[str],
        now: Interval,
    ) -> _Candidate | None:
        lease = found.document
        to_end = {name for name in self._dead(now) if shard in self._shards_of(name)}
        if lease is None or not lease.worker:
            ripe = self._registry.lease_ends(found)
            if offerer:
                return None  # Its owner will miss it, and take it anew.
            if now.earliest < ripe:
                self._look_again_in(ripe - now.earliest)
                return None
        elif offerer:
            if lease.worker != offerer:
                return None
        elif lease.worker in unknown or self._is_held(shard, lease.worker, now):
            return None
        elif self._is_over(lease.worker, now):
            to_end.add(lease.worker)
        epoch = decide.next_epoch(
            previous=lease.epoch if lease else 0,
            seen=self._registry.epoch_seen(shard),
            earliest_ms=int(now.earliest * 1000),
        )
        return _Candidate(shard, found, epoch, offerer, frozenset(to_end))

    def _is_held(self, shard: int, worker: str, now: Interval) -> bool:
        """Whether the worker that a lease names may really have the shard."""
        if worker == self._mine.worker:
            return shard in self._mine.projection
        found = self._registry.workers.get(worker)
        if found is None or self._registry.is_over(found, now):
            return False
        if found.document is None:
            self._look_again_in(self._registry.ends(found) - now.earliest)
            return True
        return found.document.role is OwnerRole.OWNER and shard in found.document.shards

    def _is_over(self, worker: str, now: Interval) -> bool:
        """Whether a worker is an owner, as far as can be told, and its lease is over."""
        found = self._registry.workers.get(worker)
        if found is None or not self._registry.is_over(found, now):
            return False
        return found.document is None or found.document.role is OwnerRole.OWNER

    def _dead(self, now: Interval) -> list[str]:
        """The owners of the picture whose leases are over."""
        return [
            name
            for name, found in self._registry.workers.items()
            if found.document is not None and self._is_over(name, now)
        ]

    def _shards_of(self, worker: str) -> Collection[int]:
        found = self._registry.workers.get(worker)
        return found.document.shards if found and found.document else ()

    async def _end(self, workers: Collection[str], now: Interval) -> frozenset[str]:
        """End these owners; returns those who own nothing any more."""

        async def end(worker: str) -> bool:
            return await self._registry.end(worker, now)

        answers = await each(sorted(workers), end)
        return frozenset(worker for worker, answer in answers.items() if answer is True)

    async def _take_offers(self, candidates: Iterable[_Candidate]) -> frozenset[int]:
        offers: dict[str, list[int]] = {}
        for candidate in candidates:
            if candidate.offerer:
                offers.setdefault(candidate.offerer, []).append(candidate.shard)

        async def take(worker: str) -> frozenset[int]:
            return await self._registry.take_offers(worker, offers[worker])

        answers = await each(offers, take)
        return frozenset(
            shard
            for answer in answers.values()
            if not isinstance(answer, StoreError)
            for shard in answer
        )

    def _look_again_in(self, seconds: float) -> None:
        wanted = max(_SOON_SECONDS, seconds)
        self._again_seconds = min(self._again_seconds or wanted, wanted)


def _all(sets: Iterable[Iterable[str]]) -> set[str]:
    return {item for items in sets for item in items}
