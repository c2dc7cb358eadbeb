"""Shard leases: which worker looks at which shards. Own, offer, take, expire; nobody negotiates.

Each worker has one registration and renews one lease, its own, whatever it owns. A shard `s` is
owned by `W` if the lease object of `s` names `W` and the registration of `W` is that of an owner
whose lease has not ended (SHARD-1). Ownership only avoids contention: tasks are safe in their
ledgers, so two workers that look at one shard for a while do no harm.

| role | means | leaves by |
|---|---|---|
| STANDBY | owns nothing, looks now and then | its own take, which makes it an OWNER |
| OWNER | its projection counts until `expires_ms` | itself, to STANDBY when nothing is left; |
| | | whoever looks, to GONE when its lease is over |
| GONE | for ever: the worker comes back under a new id | a delete, after an hour |

Others also write to an owner's registration when they remove what it offers. A take writes the
taker's projection first, then ends or relieves the former owner, then swaps the lease object:
`penstock.queue.shards.acquirer` has the order, what a crash between its steps leaves, and why
epochs never go back. Later looks find whatever is left. An owner whose registration is GONE,
missing or unreadable loses everything at once and begins anew under another id (SHARD-4). An
unreadable object counts as expired at `modified` + the longest ttl, and is then swapped.

Allocation follows load. `shards_per_worker` is a target, not a cap: free shards are taken by
whoever looks. A saturated owner offers what it has beyond its target and its fair share, and
standbys take it up to their fair share. An idle owner that knows of another offers all it has;
busy owners take it, or the idle one that sorts first. So few own while there is little to do,
one if nothing.

Looks. A standby reads one owner's registration every 2.5 to 75 s, depending on how many
standbys there are, so that one of them does every two seconds, and lists all workers only if
that shows something to take, or after an hour. If it shows that help is wanted, the worker
looks at once. An owner lists them every 60 s (of more than 15 busy owners each every 4 s times
their number), or every 10 minutes if it is idle and knows no other owner, and every 10 minutes
compares the lease objects with what it holds.

Bounds. A dead owner's shards are taken within three minutes: ttl (30 s, idle 90 s) + 90 s (the
longest time between two looks, with its jitter), and the requests of one take besides; this also
holds for a lost registration. An object that was damaged takes up to 90 s more. A worker that
starts where a dead one was, and has the proof of it, takes them at its first look
(`penstock.queue.incarnation`). A
deleted lease of a live owner is replaced within 10 minutes, and is not missed before that. A
worker that has lost a shard knows it at its next renewal (10 s, idle 30 s), one whose lease is
over at once, without a request.

`penstock.queue.shards.reshard` changes the number of shards. All here is about one cut.

Price idle, 1 owner and 49 standbys, a month at S3's prices: $1.47, half of it for the reads of
standbys, the rest for renewals, LISTs and refreshed registrations.

Called by the worker: `turn` by one coroutine in a loop, `release` when that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import BucketNotFound, Refused, StoreError, Unsupported
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import ShardLeaseSettings
from penstock.queue.shards import allocation as decide
from penstock.queue.shards.acquirer import OwnerReport, ShardAcquirer, ShardHoldings
from penstock.queue.shards.allocation import WorkerLoad
from penstock.queue.shards.registry import (
    OfferReason,
    OwnerRole,
    Registration,
    ShardRegistry,
    is_covered,
    left_to_others,
    of_cut,
)
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled
from penstock.store.time import Interval

_log = logging.getLogger(__name__)

_SOON_SECONDS: Final = 1.0
_JITTER: Final = 0.2
_NONE: Final[Mapping[int, int]] = {}
_LASTING = (Refused, BucketNotFound, Unsupported)


class ShardLeases:
    """The shards of one worker. `owned` and `epochs` ask for nothing; `turn` does the rest."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        shards: int = decide.SHARDS_DEFAULT,
        era: int = 0,
        handles: frozenset[str] = frozenset(),
        settings: ShardLeaseSettings | None = None,
        entropy: Entropy,
        concurrency: int = 1,
        is_current: Callable[[], Awaitable[bool]] | None = None,
        gained: asyncio.Event | None = None,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        """`is_current` is asked before a take: whether the queue is still cut like this."""
        self.cut = decide.Cut(decide.check_shards(shards), era)
        self._store = store
        self._clock = store.clock.machine
        self._began_at = self._clock.monotonic()
        self._is_current = is_current
        self._shards = shards
        self._settings = settings or ShardLeaseSettings()
        self._entropy = entropy
        self._handles = handles
        self._registry = ShardRegistry(
            store,
            layout,
            cut=self.cut,
            entropy=entropy,
            standby_seconds=self._settings.standby_seconds,
            unreadable_seconds=self._settings.longest_ttl_seconds,
            incarnation=incarnation,
        )
        fresh = _standby(self.cut, handles=handles, concurrency=concurrency, id=incarnation.id)
        self._mine = ShardHoldings(
            store, self._registry, name=name, fresh=fresh, entropy=entropy, gained=gained
        )
        self._taking = ShardAcquirer(self._registry, self._mine, shards=shards, write=self._write)
        self.others: Mapping[str, Registration] = {}
        """The other workers of this cut that were live when they were last looked at."""
        self.before: frozenset[str] = frozenset()
        """The same worker under other cuts."""
        self._load = WorkerLoad()
        self._saturated_since: float | None = None
        self._failures, self._released, self._waited = 0, False, False
        self._written_at = self._renew_at = self._refresh_at = 0.0
        self._look_at = self._verify_at = self._listed_at = self._list_by = 0.0
        self._list_jitter = 1.0

    @property
    def worker(self) -> str:
        """The id of the present incarnation."""
        return self._mine.worker

    @property
    def gained(self) -> asyncio.Event:
        """Set when `owned` grows, or others want help; whoever waits for it clears it."""
        return self._mine.gained

    def owned(self) -> frozenset[int]:
        """The shards to look at now; none unless the own lease has surely not ended."""
        return self._mine.owned()

    def epochs(self) -> Mapping[int, int]:
        """The shards owned now, with their epochs."""
        return self._mine.epochs()

    def slots(self) -> tuple[range, ...]:
        """The slots to look at now, as runs."""
        return decide.slot_runs(self.owned(), shards=self._shards)

    def covers(self, slots: Iterable[range]) -> bool:
        """Whether all shards with these slots have a live owner, as far as is known."""
        return is_covered(slots, self.others, mine=self.owned(), shards=self._shards)

    async def hold(self) -> float:
        """In place of `turn`: renew the lease of what is held, and neither offer nor take."""
        self._load, self._saturated_since = WorkerLoad(), None
        with labelled("leases"):
            try:
                if self._mine.is_owner and self._seconds_to_renewal() <= 0:
                    await self._write()
            except StoreError as error:
                _log.info("worker %s: failed to renew its lease, retrying: %s", self.worker, error)
                return _SOON_SECONDS
        return max(_SOON_SECONDS, self._seconds_to_renewal())

    async def turn(self, load: WorkerLoad) -> float:
        """Do what is due, and return the seconds until something is due again.

        May be called earlier, when the load has changed. What fails in passing is tried again.
        """
        if self._released:
            return self._settings.alone_list_seconds
        self._load = load
        if not load.saturated:
            self._saturated_since = None
        elif self._saturated_since is None:
            self._saturated_since = self._clock.monotonic()
        with labelled("leases"):
            try:
                await self._do_what_is_due()
            except _LASTING:
                raise
            except StoreError as error:
                self._failures += 1
                _log.info("worker %s: failed to update leases, retrying: %s", self.worker, error)
                return self._jittered(min(10.0, 2.0 ** min(self._failures, 4)))
        self._failures = 0
        return self._seconds_to_next()

    async def release(self) -> None:
        """Give everything up, so that others can take it at once. Never takes long or fails."""
        self._released = True
        with labelled("leases"):
            await self._mine.release(seconds_max=self._settings.release_seconds)

    async def _do_what_is_due(self) -> None:
        mine = self._mine
        if mine.registration is None:
            await self._register()
        elif mine.is_owner and self._seconds_to_renewal() <= 0:
            await self._write()
        if mine.pending:
            await self._write(drop=await mine.settle())
        instant = self._clock.monotonic()
        if mine.registration is not None and not mine.is_owner and instant >= self._refresh_at:
            self._refresh_at = instant + self._settings.refresh_seconds
            await mine.refresh()
        if mine.registration is None:
            return
        if self._seconds_to_list() <= 0:
            await self._look_at_all()
        elif not mine.is_owner and instant >= self._look_at:
            await self._look_at_one()

    def _seconds_to_next(self) -> float:
        instant = self._clock.monotonic()
        due = [self._seconds_to_list()]
        if self._mine.registration is None or self._mine.pending:
            due.append(_SOON_SECONDS)
        elif self._mine.is_owner:
            due.append(self._seconds_to_renewal())
            if self._saturated_since is not None:
                left = self._saturated_since + self._settings.saturated_seconds - instant
                due.extend([left] if left > 0 else [])
        else:
            due.extend([self._look_at - instant, self._refresh_at - instant])
        return max(_SOON_SECONDS / 2, min(due))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._entropy.uniform(1 - _JITTER, 1 + _JITTER)

    def look_again_in(self, seconds: float) -> None:
        """Look at all workers within so many seconds."""
        self._list_by = min(self._list_by, self._clock.monotonic() + max(_SOON_SECONDS, seconds))

    @property
    def _is_idle(self) -> bool:
        return self._load.idle_seconds >= self._settings.idle_seconds

    @property
    def _stretch(self) -> float:
        calm = self._load.idle_seconds >= self._settings.calm_seconds
        return self._settings.idle_stretch if calm else 1.0

    @property
    def _owners(self) -> list[str]:
        return sorted(name for name, other in self.others.items() if other.role is OwnerRole.OWNER)

    async def _register(self) -> None:
        self._waited = False
        instant = self._clock.monotonic()
        self._refresh_at = instant + self._settings.refresh_seconds
        self._list_by = instant
        await self._mine.register()

    def _seconds_to_renewal(self) -> float:
        if self._mine.said != self._words():
            return 0.0
        # A lease that was stretched is renewed at the quicker pace as soon as work has come.
        pace = self._settings.renew_seconds * self._stretch
        return min(self._renew_at, self._written_at + pace) - self._clock.monotonic()

    def _words(self) -> OwnerReport:
        """What the registration should say now: offers, and the types without a handler."""
        help_wanted = tuple(sorted(self._load.help_wanted))
        held = self._mine.shards
        since = self._saturated_since
        if since is not None:
            if self._clock.monotonic() - since >= self._settings.saturated_seconds:
                share = decide.fair_share(shards=self._shards, workers=len(self.others) + 1)
                most = self._settings.shards_per_worker
                offers = decide.surplus(held, shards_per_worker=most, share=share)
                return OwnerReport(offers, OfferReason.SATURATED if offers else None, help_wanted)
        elif self._is_idle and held and self._owners:
            return OwnerReport(tuple(sorted(held)), OfferReason.IDLE, help_wanted)
        return OwnerReport((), None, help_wanted)

    async def _write(self, add: Mapping[int, int] = _NONE, drop: Collection[int] = ()) -> bool:
        """Write the own registration, which also renews the lease. False: all is lost."""
        begun = self._clock.monotonic()
        expected = (self._mine.projection | add.keys()) - frozenset(drop)
        ttl = self._settings.ttl_seconds * self._stretch
        if not await self._mine.write(self._words(), ttl_seconds=ttl, add=add, drop=drop):
            return False
        self._written_at = begun
        self._renew_at = begun + self._settings.renew_seconds * self._stretch
        if expected - self._mine.projection:
            # Others have taken from us: they are owners, and we may not know them.
            self.look_again_in(self._jittered(self._settings.again_seconds))
        return True

    async def _look_at_one(self) -> None:
        """Read one owner's registration; look at all only if there is something to do."""
        owners = self._owners
        self._look_at = self._clock.monotonic() + self._jittered(self._look_seconds())
        if owners:
            offering = [
                name for name in owners if self.others[name].reason is OfferReason.SATURATED
            ]
            name = self._entropy.choice(offering or owners)
            again_at = self._listed_at + self._settings.again_seconds
            if not await self._shows_something_to_do(name) or self._clock.monotonic() < again_at:
                return
        await self._look_at_all()

    async def _shows_something_to_do(self, name: str) -> bool:
        found = await self._registry.read(name)
        now = await self._store.now()
        document = found.document if found else None
        if found is None or document is None or document.role is not OwnerRole.OWNER:
            return True
        news = set(document.help_wanted) - set(self.others[name].help_wanted)
        self.others = {**self.others, name: document}
        if news & self._handles:
            # Whoever helps needs no shards, and no picture of the others.
            self.gained.set()
        return document.reason is OfferReason.SATURATED or self._registry.is_over(found, now)

    def _look_seconds(self) -> float:
        if any(self._handles & set(other.help_wanted) for other in self.others.values()):
            # Whoever helps wants to know when that is over.
            return self._settings.again_seconds
        return self._settings.look_seconds(standbys=1 + len(self.others) - len(self._owners))

    async def _look_at_all(self) -> None:
        """Renew the picture of all workers, and take what is to be taken."""
        await self._registry.look(but=self.worker)
        now = await self._store.now()
        self.others = of_cut(self._registry.live(now), self.cut)
        instant = self._clock.monotonic()
        self._look_at = instant + self._jittered(self._look_seconds())
        self._listed_at, self._list_by = instant, math.inf
        self._list_jitter = self._jittered(1.0)
        try:
            await self._act_on(now)
        except StoreError:
            self.look_again_in(_SOON_SECONDS)
            raise

    async def _act_on(self, now: Interval) -> None:
        await self._registry.forget(now, after_seconds=self._settings.forget_seconds)
        instant = self._clock.monotonic()
        if self._mine.is_owner and instant >= self._verify_at:
            lost, unreadable = await self._mine.verify(now)
            times = self._settings
            pause = times.longest_ttl_seconds if unreadable else times.verify_seconds
            self._verify_at = instant + pause
            if lost and not await self._write(drop=lost):
                return
        if self._is_current is not None and not await self._is_current():
            return
        if not self._must_wait():
            again_seconds = await self._taking.take(
                self.others,
                now,
                idle=self._is_idle,
                saturated=self._load.saturated,
                draw=self._entropy.random(),
                left=self._left_to_others(now),
            )
            if again_seconds is not None:
                self.look_again_in(self._jittered(again_seconds))

    def _left_to_others(self, now: Interval) -> frozenset[int]:
        """What the live owners of other cuts are about to take, in a tenure's first minute."""
        if self._clock.monotonic() >= self._began_at + self._settings.patience_seconds:
            return frozenset()
        left = left_to_others(self._registry.live(now), self.cut, before=self.before)
        if left:
            self.look_again_in(self._settings.again_seconds)
        return left

    def _seconds_to_list(self) -> float:
        """Until all workers are to be listed; as role and load are now, not as they were."""
        is_owner, owners = self._mine.is_owner, len(self._owners)
        seconds = self._settings.list_seconds(owners, is_owner=is_owner, is_idle=self._is_idle)
        due = min(self._listed_at + seconds * self._list_jitter, self._list_by)
        return (min(due, self._verify_at) if is_owner else due) - self._clock.monotonic()

    def _must_wait(self) -> bool:
        """Where nobody owns anything, the standby that sorts first goes first."""
        rivals = [name for name in self.others if name < self.worker]
        if self._mine.is_owner or self._owners or not rivals:
            self._waited = False
        elif not self._waited:
            self._waited = True
            self.look_again_in(self._look_at - self._clock.monotonic())
            return True
        return False


def _standby(cut: decide.Cut, *, handles: Iterable[str], concurrency: int, id: str) -> Registration:
    """What a worker writes of itself at first."""
    return Registration(
        role=OwnerRole.STANDBY,
        era=cut.era,
        of=cut.shards,
        handles=tuple(sorted(handles)),
        host=platform.node(),
        pid=os.getpid(),
        concurrency=concurrency,
        incarnation=id,
    )
