"""`direct`: every worker has an inbox, and whoever submits tells one of them.

The protocol is in `penstock.queue.direct`: leases, entries, the cursor, recovery, bounds, requests.
Here is what a worker does with it. A look lists the own inbox; every so often it also looks
around: into `ready/`, or at everything, for what no inbox has led to. While the whole queue is in
one page of a list, both are the same one LIST. What was found around comes in an order of this
worker's own, since others look there too.

A worker that has a handler for a type that is not direct looks at everything every time, as in
`shared`: nobody would tell it of such tasks.
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
from penstock.queue.direct.cursor import Cursor
from penstock.queue.direct.inbox import Inbox
from penstock.queue.direct.leases import IDLE_STRETCH, Held
from penstock.queue.direct.recovery import Recovery
from penstock.queue.direct.roster import Roster
from penstock.queue.discovery.base import Wanted
from penstock.queue.discovery.elected import RELEASE_SECONDS, ElectedDiscovery
from penstock.queue.discovery.scan import ALL, Scanner, Sight, View
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.owning.load import Load
from penstock.queue.places import SLOTS, PackAt
from penstock.queue.settings import WorkerSettings
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
        self._held = Held(
            store,
            layout,
            worker=self.name,
            handles=handles,
            seconds=settings.lease_duration_secs,
            entropy=entropy,
            incarnation=incarnation,
        )
        self._cursor = Cursor(store, layout, worker=self.name, entropy=entropy)
        self._inbox = Inbox(store, layout, worker=self.name, handles=handles, cursor=self._cursor)
        self._roster = Roster(store, layout)
        self._recovery = Recovery(
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
            _log.warning("this worker cannot have an inbox yet, trying again: %s", error)

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

    async def look(self, wanted: Wanted) -> View:
        if not self._has_begun or not self._held.is_live:
            return View()
        now = await self._store.now()
        entries: list[Sight] = []
        if wanted.has_room:
            entries = await self._inbox.look(
                now_minute=int(now.earliest // 60), worth=wanted.worth, wanted=wanted.tasks
            )
        mine = {sight.at: sight for sight in entries}

        def worth(sight: Sight) -> int:
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

    def _is_for_us(self, sight: Sight, now: Interval) -> bool:
        return sight.at.type in self._handles and not self._is_young(sight, now)

    def _is_young(self, sight: Sight, now: Interval) -> bool:
        """Whether the worker that was told of a pack should have it first."""
        if sight.at.due_minute is not None or not self._config.is_direct(sight.at.type):
            return False
        patience = min(YOUNG_SECONDS, self._settings.overflow_scavenge_interval_secs / 2)
        return sight.age_ms > (now.earliest - patience) * 1000

    async def _look_around(
        self, wanted: Wanted, worth: Callable[[Sight], int], now: Interval, *, is_enough: bool
    ) -> View:
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
            return View(later_ms=self._later_ms if wanted.has_room else None)
        # The more workers there are, the more rarely each of them looks.
        self._ready_at = instant + self._jittered(
            min(READY_SECONDS * self._fleet, self._settings.overflow_scavenge_interval_secs)
        )
        self._later_ms = view.later_ms
        return view

    def _jittered(self, seconds: float) -> float:
        return seconds * self._entropy.uniform(0.8, 1.2)

    async def keep(self, load: Callable[[], Load]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().keep(load))
            group.create_task(self._mind_others())
            await self._mind_lease(load)

    async def _mind_lease(self, load: Callable[[], Load]) -> None:
        """Renew the lease and save the cursor, until it is lost."""
        while self.lost is None:
            seconds = _AGAIN_SECONDS
            try:
                seconds = await self._turn(is_idle=load().idle_seconds >= CALM_SECONDS)
            except WorkerIdConflict as error:
                self._lose(error)
            except (StoreError, UnreadableObject) as error:
                _log.info("worker %s: its lease is tried again soon: %s", self.name, error)
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
                self._lose(self._words_of_loss())
                return pause
        await self._cursor.save()
        return self._renewed_at + pause - self._clock.monotonic()

    def _words_of_loss(self) -> WorkerLeaseLost:
        return WorkerLeaseLost(
            f"The worker {self.name!r} has lost its name: its lease had ended, and others have"
            " taken over what it had. It stops, and gives back what runs.",
            hint="It was cut off for longer than its lease, or another started under its name."
            " Start it again.",
        )

    def _lose(self, error: PenstockError) -> None:
        _log.error("%s", error)
        self.lost = error
        self.changed.set()

    async def _mind_others(self) -> None:
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
                    await self._mind_orphans()
                except StoreError as error:
                    _log.info("the other workers are looked at later: %s", error)
                seconds = max(least, min(OTHERS_SECONDS * self._fleet, 10 * least))
            await self._clock.sleep(self._jittered(seconds if self._has_begun else 1.0))

    async def _mind_orphans(self) -> None:
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
            _log.info("the inbox is given away by others, when its lease has ended: %s", error)


def _warn_of_others(types: Iterable[str]) -> bool:
    """Whether there are types that are not direct: then the worker looks at everything."""
    others = sorted(types)
    if others:
        _log.warning(
            "this worker of the mode 'direct' looks at everything, as in 'shared': of its types"
            " these are not direct: %s; 'penstock queue config set --direct' makes them so",
            ", ".join(others),
        )
    return bool(others)
