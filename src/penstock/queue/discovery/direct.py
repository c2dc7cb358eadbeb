"""`direct` mode: producers announce each pack to one worker, in its inbox. Opt-in, type by type.

`QueueConfig(direct=("resize",))` says which types are direct, so that producers and workers
agree. An inbox is an index and nothing else: the pack lies in `tasks/`, `ready/` or `keyed/` as
any other, its ledger decides who runs it, and workers of every mode may find it there. So
whatever happens to an inbox costs time, never a task (QUEUE-22), and mixed fleets are fine.

## Objects

    inbox/@leases/{worker}.json      a cell: who holds the worker's name, and until when
    inbox/@cursors/{worker}.json     a cell of its own: saving it can never cost the lease
    inbox/{worker}/{minute}/{nonce}@{task}   an entry: empty; its key alone tells the pack, its
                                     type, size, priority and limit. The nonce is never used twice

## The lease: states, and who moves them

| state | means | leaves by |
|---|---|---|
| (no object) | the name is free | `create` of a worker that starts: LIVE |
| LIVE | `holder` works until `expires_ms` | its own renewal; itself: GONE; when it is over, |
| | | a recovery: GONE, or a worker that starts: LIVE, of another holder |
| GONE | nobody holds it; others are given what is in the inbox | a worker that starts: LIVE; |
| | | a recovery, when the inbox is empty: deleted |

Each is a compare-and-swap (SHARD-8). A worker that starts under a name whose lease is LIVE and not
surely over gets `WorkerIdConflict`. A holder trusts its lease while the store's time is surely
before its end; when it does not, it reads and starts nothing. At a renewal it finds out whether it
still holds the name. If not, it stops at once and gives back what runs. A lease that has run out
and that nobody has touched is simply renewed. A lease lasts `lease_duration_secs` (60 s) and is
renewed every `lease_renewal_interval_secs` (20 s); both are tripled while idle.

## An entry

Written after the pack, never before; best effort: a submit does not fail or wait long because
of it (`penstock.queue.inbox_announcer`). It goes to a live worker that has a handler for the
type. The minute is that in which the pack is due. The worker lists its inbox, tries what is
there as it tries what a list shows, and deletes the entry once it, or somebody else, has
claimed the pack, or the pack is over (`penstock.queue.inbox`). An entry of a type that the
worker has no handler for is deleted. Where no live worker is known, a pack that would be in
`tasks/` is put into `ready/` instead, in the present minute: direct workers look there often.

## The cursor

The minute before which everything in the inbox was handled. It moves up to the oldest entry
that a list showed and that is not handled, and no further than `LATE_MINUTES` behind the
present. A worker that takes over its own name goes on from its cursor, or from the beginning of
the inbox if none was saved; at most from 24 hours back, with a warning. A fresh worker, whose
name was free, starts now. Entries before the cursor, written late, are deleted when they are
seen. Their packs, and those behind the 24 hours, are found by scavenging.

## Recovery, by anyone

Workers list the leases; one that is over is swapped to GONE, which fences its holder. Then the
entries of the inbox are looked at one by one: a pack with a ledger was claimed, and is left to
its lease; one that is gone is over; one that is pending is announced to a live worker, in its
minute and under the same nonce. Then the entry is deleted. `LINGER_SECONDS` after the swap,
when no producer can know the worker any more, cursor and lease go. Every step may be done
twice, by two at once, or be left half done by a crash: the lease stays GONE and the next who
looks goes on. What comes even later lies in an inbox without a lease: the elected monitor looks
for such every `ORPHAN_SECONDS` and does the same with them. A worker that stops does it for
itself. There is no overflow prefix (docs/decisions/0018).

## What finds what an inbox loses

A worker looks into `ready/` so often that the fleet as a whole does every 5 s or so, and each
at least every `overflow_scavenge_interval_secs` (120 s), with jitter. As often it scavenges:
one look at everything, as in `shared`, at what is older than `YOUNG_SECONDS`. Retries are
remembered by the worker that failed; if it dies, or if its claim runs out, the pack is in
`tasks/` with a ledger, and is found so. One worker is elected to be the monitor, as in
`shared`.

## Crash points

| a crash | leaves | and then |
|---|---|---|
| before the entry is written | a pack without an entry | scavenged within 120 s + 10 s |
| after a claim, before the delete | an entry to a claimed pack | the next who lists deletes it |
| of a worker, whenever | a lease that ends, an inbox | recovered after 60 s (idle 180 s), a look |
| of the whole fleet | the same | the same names go on from their cursors, others recover |
| between two steps of a recovery | a lease that is GONE | the next who looks goes on |
| before a cursor is saved | an older cursor | entries that were deleted are not there any more |

Bounds. Every live worker looks at the leases every 60 s, or every 10 s times the number of
workers if that is more, at most 600 s, with jitter: the fleet as a whole finds a lease that is
over within 72 s. Scavenging, which needs no recovery, finds every pack within 144 s of its
tenth second, or of the end of its lease: whatever a dead worker had, within three minutes. A
producer's roster is at most 30 s old: a worker that stops gets entries for that
long, and one that dies until its lease has ended.

## Requests

A task by itself: 4 puts (pack, entry, claim, settle), 3 gets, its deletes, and its share of the
LISTs. An inbox is one LIST a look, for every worker: with `Polling`'s 8 s an idle worker pays
$1.62 a month for that, $0.22 for its lease, $0.11 for scavenging, $0.04 for other leases; a
fleet pays $2.60 for `ready/`. A producer pays one LIST in 30 s while it submits, and a GET for
each worker that is new to it.

A worker that has a handler for a type that is not direct looks at everything every time, as in
`shared`: nobody would announce such tasks to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    PenstockError,
    StoreError,
    UnreadableObject,
    WorkerIdConflict,
    WorkerLeaseLost,
)
from penstock.queue.config import QueueConfig
from penstock.queue.discovery.base import DiscoveryRequest
from penstock.queue.discovery.elected import RELEASE_SECONDS, ElectedDiscovery
from penstock.queue.discovery.scanner import ALL, PackCandidate, Scanner, ScanResult
from penstock.queue.ids import SLOTS, PackAt
from penstock.queue.inbox import IDLE_STRETCH, HeldWorkerLease, Inbox, InboxCursor, WorkerRoster
from penstock.queue.inbox_announcer import InboxRecovery
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import WorkerSettings
from penstock.queue.shards.allocation import WorkerLoad
from penstock.store.base import ObjectStore
from penstock.store.time import Interval

_log = logging.getLogger(__name__)

READY_SECONDS: Final = 5.0
"""So often the fleet as a whole looks into `ready/`."""
YOUNG_SECONDS: Final = 10.0
"""What was submitted so lately is left to the worker that was told of it."""
CALM_SECONDS: Final = 20.0
"""After so long without work a worker is idle, and renews its lease more rarely."""
OTHERS_SECONDS: Final = 10.0
"""So often the fleet as a whole looks at the leases."""
ORPHAN_SECONDS: Final = 600.0
_TURN_SECONDS_MAX: Final = 5.0
_AGAIN_SECONDS: Final = 2.0


class DirectDiscovery(ElectedDiscovery):
    """Looks into one inbox, and around."""

    sight_seconds = 10.0

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        is_named: bool,
        handles: frozenset[str],
        config: QueueConfig,
        settings: WorkerSettings,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        """With `is_named`, the worker is called exactly `name`, and nobody else may be."""
        super().__init__(
            store,
            layout,
            name=name,
            lease_seconds=settings.task_lease_seconds,
            entropy=entropy,
            incarnation=incarnation,
        )
        if is_named:
            self.name = name
        self._clock = store.clock.machine
        self._config = config
        self._settings = settings
        self._handles = handles
        self._held = HeldWorkerLease(
            store,
            layout,
            worker=self.name,
            handles=handles,
            seconds=settings.lease_duration_secs,
            entropy=entropy,
            incarnation=incarnation,
        )
        self._cursor = InboxCursor(store, layout, worker=self.name, entropy=entropy)
        self._inbox = Inbox(store, layout, worker=self.name, handles=handles, cursor=self._cursor)
        self._roster = WorkerRoster(store, layout)
        self._recovery = InboxRecovery(
            store, layout, self._roster, entropy=entropy, incarnation=incarnation
        )
        self._scanner = Scanner(store, layout)
        self._shares = _warn_of_others(each for each in handles if not config.is_direct(each))
        self._has_begun = False
        self._renewed_at = self._ready_at = self._scavenge_at = self._orphans_at = float("-inf")
        self._stretch = 1.0
        self._fleet = 1
        self._is_small = False
        self._later_ms: int | None = None

    async def begin(self) -> None:
        try:
            await self._begin()
        except StoreError as error:
            _log.warning("failed to take the inbox, retrying: %s", error)

    async def _begin(self) -> None:
        await self._held.take()
        self._renewed_at = self._clock.monotonic()
        now = await self._store.now()
        await self._cursor.load(
            since_minute=self._held.since_ms // 60_000, now_minute=int(now.earliest // 60)
        )
        self._has_begun = True
        self.changed.set()

    def handled(self, at: PackAt) -> None:
        self._inbox.handled(at)

    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        if not self._has_begun or not self._held.is_live:
            return ScanResult()
        now = await self._store.now()
        entries: list[PackCandidate] = []
        if wanted.has_room:
            entries = await self._inbox.look(
                now_minute=int(now.earliest // 60), worth=wanted.worth, wanted=wanted.tasks
            )
        mine = {sight.at: sight for sight in entries}

        def worth(sight: PackCandidate) -> int:
            is_left = sight.at not in mine and self._is_young(sight, now)
            return 0 if is_left else wanted.worth(sight)

        is_enough = sum(map(wanted.worth, entries)) >= wanted.tasks
        view = await self._look_around(wanted, worth, now, is_enough=is_enough)
        around = [
            sight
            for sight in view.sights
            # Also what may not start now: it is seen so rarely that it has to wait for its gate.
            if worth(sight) or (sight.at not in mine and self._is_for_us(sight, now))
        ]
        for sight in around:
            # What a list shows can be claimed with a request or two less.
            mine.pop(sight.at, None)
        drawn = [(-each.priority, 0, self._entropy.random(), each) for each in around]
        drawn += [(-each.priority, 1, each.age_ms, each) for each in mine.values()]
        view.sights = [each for *_, each in sorted(drawn, key=lambda of: of[:3])]
        return view

    def _is_for_us(self, sight: PackCandidate, now: Interval) -> bool:
        return sight.at.type in self._handles and not self._is_young(sight, now)

    def _is_young(self, sight: PackCandidate, now: Interval) -> bool:
        """Whether the worker that was told of a pack should have it first."""
        if sight.at.due_minute is not None or not self._config.is_direct(sight.at.type):
            return False
        patience = min(YOUNG_SECONDS, self._settings.overflow_scavenge_interval_secs / 2)
        return sight.age_ms > (now.earliest - patience) * 1000

    async def _look_around(
        self,
        wanted: DiscoveryRequest,
        worth: Callable[[PackCandidate], int],
        now: Interval,
        *,
        is_enough: bool,
    ) -> ScanResult:
        """Look at what others may have found as well, if it is time for that."""
        instant, minute = self._clock.monotonic(), int(now.earliest // 60)
        is_over = self._later_ms is not None and self._later_ms <= now.earliest * 1000
        is_due = wanted.has_room and (is_over or instant >= self._ready_at)
        # What the last look broke off is gone on with as soon as there is nothing better to do.
        is_on = wanted.has_room and not is_enough and not self._scanner.is_through
        is_late = instant >= self._scavenge_at and (wanted.has_room or bool(self.guarded()))
        if self._shares or is_late or is_on or (is_due and self._is_small):
            view = await self._scanner.look(ALL, minute=minute, worth=worth, wanted=wanted.tasks)
            self._scanner.go_on_from(ALL[0], self._entropy.randrange(SLOTS))
            self._is_small = self._scanner.is_through and self._scanner.lists == 1
            self._scavenge_at = instant + self._jittered(
                self._settings.overflow_scavenge_interval_secs
            )
        elif is_due:
            view = await self._scanner.look_at_due(minute=minute, worth=worth, wanted=wanted.tasks)
        else:
            # Without room nobody is to look again because something becomes due.
            return ScanResult(later_ms=self._later_ms if wanted.has_room else None)
        # The more workers there are, the more rarely each of them looks.
        self._ready_at = instant + self._jittered(
            min(READY_SECONDS * self._fleet, self._settings.overflow_scavenge_interval_secs)
        )
        self._later_ms = view.later_ms
        return view

    def _jittered(self, seconds: float) -> float:
        return seconds * self._entropy.uniform(0.8, 1.2)

    async def keep(self, load: Callable[[], WorkerLoad]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().keep(load))
            group.create_task(self._check_peers())
            await self._keep_lease(load)

    async def _keep_lease(self, load: Callable[[], WorkerLoad]) -> None:
        """Renew the lease and save the cursor, until it is lost."""
        while self.lost is None:
            seconds = _AGAIN_SECONDS
            try:
                seconds = await self._turn(is_idle=load().idle_seconds >= CALM_SECONDS)
            except WorkerIdConflict as error:
                self._lose(error)
            except (StoreError, UnreadableObject) as error:
                _log.info("worker %s: failed to renew its lease, retrying: %s", self.name, error)
            await self._clock.sleep(min(seconds, _TURN_SECONDS_MAX))

    async def _turn(self, *, is_idle: bool) -> float:
        """Do what is due for the lease; returns the seconds until something is due again."""
        if not self._has_begun:
            await self._begin()
        stretch = IDLE_STRETCH if is_idle else 1.0
        # A lease that was stretched is renewed at the quicker pace as soon as work has come.
        pause = self._settings.lease_renewal_interval_secs * min(stretch, self._stretch)
        if self._clock.monotonic() >= self._renewed_at + pause:
            begun = self._clock.monotonic()
            await self._held.renew(is_idle=is_idle)
            self._renewed_at, self._stretch = begun, stretch
            if self._held.is_lost:
                self._lose(self._lease_lost())
                return pause
        await self._cursor.save()
        return self._renewed_at + pause - self._clock.monotonic()

    def _lease_lost(self) -> WorkerLeaseLost:
        return WorkerLeaseLost(
            f"The worker {self.name!r} has lost its lease: it expired, and others have"
            " taken over its tasks. It stops, and gives back what runs.",
            hint="It was cut off for longer than its lease, or another started under its name."
            " Start it again.",
        )

    def _lose(self, error: PenstockError) -> None:
        _log.error("%s", error)
        self.lost = error
        self.changed.set()

    async def _check_peers(self) -> None:
        """Look at the leases of the others, and give away what those have left that are gone."""
        least = self._settings.lease_duration_secs
        while True:
            seconds = least
            if self._held.is_live:
                try:
                    await self._roster.look()
                    # The picture grows old, and the number holds until the next.
                    self._fleet = max(1, len(self._roster.live(await self._store.now())))
                    await self._recovery.recover_all(but=self.name)
                    await self._check_orphans()
                except StoreError as error:
                    _log.info("failed to check the other workers, retrying later: %s", error)
                seconds = max(least, min(OTHERS_SECONDS * self._fleet, 10 * least))
            await self._clock.sleep(self._jittered(seconds if self._has_begun else 1.0))

    async def _check_orphans(self) -> None:
        if self.guarded() and self._clock.monotonic() >= self._orphans_at + ORPHAN_SECONDS:
            self._orphans_at = self._clock.monotonic()
            await self._recovery.recover_orphans()

    async def release(self) -> None:
        await super().release()
        if not self._has_begun or self.lost is not None:
            return
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._inbox.tidy()
                await self._cursor.save(at_once=True)
                await self._held.leave()
                await self._roster.look()
                if self._roster.live(await self._store.now()):
                    await self._recovery.recover(self.name)
        except (StoreError, UnreadableObject, TimeoutError) as error:
            _log.info("failed to release the inbox, its lease will expire: %s", error)


def _warn_of_others(types: Iterable[str]) -> bool:
    """Whether there are types that are not direct: then the worker looks at everything."""
    others = sorted(types)
    if others:
        _log.warning(
            "this worker of the mode 'direct' lists the whole queue, as in 'shared': of its types"
            " these are not direct: %s; 'penstock queue config set --direct' makes them so",
            ", ".join(others),
        )
    return bool(others)
