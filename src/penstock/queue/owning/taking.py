"""How shards are taken. Each step is a create or a swap, in this order:

a. The taker's own registration gets the shards, with their new epochs, into its projection.
b. A live owner's offer: its registration is swapped without them, if it still offers them. An owner
   whose lease is over: its registration is swapped to GONE, so that its renewal fails.
c. The lease object is swapped to the taker, from the version that was read before (a). Where there
   is none, a lease of nobody is created first, and taken when the time is surely past its write.

What (b) or (c) refuse leaves the projection again. What is left open by a lost answer stays
pending, and is read back at the next turn.

A shard is free if it is in no live owner's projection, and its lease names nobody, or somebody in
whose registration, read after the lease, it is not. (An owner's projection has a shard before the
lease names it: a picture that is older than the lease proves nothing.)

What a crash leaves: after (a), a shard in the projection of a worker whose lease ends by itself;
after (b), the same, with a lease that names an owner which has it no more; after (c), an owner
that dies like any other. All of them are free when the lease of the dead worker is over.

An epoch is larger than its predecessor, than every epoch of the shard in any registration seen, and
no less than the store's milliseconds, but never ahead of true time. What has no readable
predecessor is taken only when the time is surely past the write of that. So epochs never go back,
also where an operator deletes or damages objects. (What is left: a create and the swap that follows
it would both have to arrive a second time, late and in order, after a delete.)

Called by `penstock.queue.owning.leases` after a look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import StoreError
from penstock.queue.owning import shards as decide
from penstock.queue.owning.holding import Holding
from penstock.queue.owning.registry import (
    Found,
    Reason,
    Registration,
    Registry,
    Role,
    ShardLease,
    each,
)
from penstock.store.time import Interval

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
    found: Found[ShardLease]
    epoch: int
    offerer: str
    to_end: frozenset[str]


class Taking:
    """Takes shards for one worker."""

    def __init__(self, registry: Registry, mine: Holding, *, shards: int, write: Write) -> None:
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

        async def give(shard: int) -> bool:
            chosen = allowed[shard]
            version = await self._registry.give_lease(
                shard, chosen.found, worker=self._mine.worker, epoch=chosen.epoch
            )
            if version is not None:
                self._mine.confirm(shard, version)
            return version is not None

        answers = await each(allowed, give)
        refused = {c.shard for c in candidates if answers.get(c.shard, False) is False}
        if refused:
            # Others were faster. What they left may be seen when they are done.
            self._look_again_in(_AGAIN_SECONDS)
            await self._write({}, refused)
        return self._again_seconds

    def _free(self, others: Mapping[str, Registration], left: frozenset[int]) -> dict[int, str]:
        """What is in no live projection: shard → "", for nobody offers it."""
        projections = [other.shards for other in others.values() if other.role is Role.OWNER]
        free = decide.unowned([*projections, self._mine.projection], shards=self._shards)
        return dict.fromkeys((shard for shard in free if shard not in left), "")

    def _of_the_saturated(
        self, others: Mapping[str, Registration], *, draw: float
    ) -> dict[int, str]:
        """A fair share of what saturated owners offer: shard → who offers it."""
        plan: dict[int, str] = {}
        share = decide.fair_share(shards=self._shards, workers=len(others) + 1)
        for name in sorted(others, key=lambda name: (-len(others[name].offers), name)):
            if others[name].reason is Reason.SATURATED:
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
            if other.reason is Reason.IDLE
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
        found: Found[ShardLease],
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
        return found.document.role is Role.OWNER and shard in found.document.shards

    def _is_over(self, worker: str, now: Interval) -> bool:
        """Whether a worker is an owner, as far as can be told, and its lease is over."""
        found = self._registry.workers.get(worker)
        if found is None or not self._registry.is_over(found, now):
            return False
        return found.document is None or found.document.role is Role.OWNER

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
