"""`leased`, the default: workers own shards, and each looks only at its own.

Who owns what is decided in `penstock.queue.owning.leases`; here is what an owner does with it. It
looks at its slots, one LIST for those that are neighbours, and guards them as their monitor. A
worker that owns nothing asks nothing but what its leases need. When a shard is lost it is no
longer looked at, from that moment; tasks of it that are running go on, because their claims are in
the ledgers and not in the shard: they are renewed and settled as before, and nobody else can claim
them meanwhile.

A worker with room, and with nothing of its own to do, looks into the shards of owners that want
help with a type it has a handler for, at the slow end of its polling. An owner of a part of the
queue looks into `ready/`, which is one list for all shards, at most every `READY_SECONDS`: so a
task with a key or a delay may start that much later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.config import ConfigWatch, QueueConfig
from penstock.queue.discovery.base import Discovery, Wanted
from penstock.queue.discovery.scan import ALL, Run, Scanner, Sight, View
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.owning import shards as decide
from penstock.queue.owning.leases import ShardLeases
from penstock.queue.owning.load import Load
from penstock.queue.owning.moving import Tenures
from penstock.queue.owning.shards import Cut
from penstock.queue.owning.times import LeaseSettings
from penstock.queue.settings import WorkerSettings
from penstock.store.base import ObjectStore

_log = logging.getLogger(__name__)

READY_SECONDS: Final = 5.0
HELP_SECONDS: Final = 8.0
_PAUSE_SECONDS: Final = 30.0
_TURN_SECONDS_MAX: Final = 5.0


class LeasedDiscovery(Discovery):
    """Looks at the shards that this worker owns."""

    sight_seconds = 30.0
    is_alone = True

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        config: QueueConfig,
        handles: frozenset[str],
        settings: WorkerSettings,
        concurrency: int,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        super().__init__()
        self._store = store
        self._clock = store.clock.machine
        self._entropy = entropy
        self._lease_seconds = settings.task_lease_seconds
        self._handles = handles
        self._scanner = Scanner(store, layout)
        self._helping = Scanner(store, layout)
        self._ready_at = self._help_at = float("-inf")
        self._runs_seen: Sequence[Run] = ()
        self._stands = ""

        def begin(
            cut: Cut, *, is_current: Callable[[], Awaitable[bool]], gained: asyncio.Event
        ) -> ShardLeases:
            return ShardLeases(
                store,
                layout,
                name=name,
                shards=cut.shards,
                era=cut.era,
                handles=handles,
                settings=_times(settings),
                entropy=entropy,
                concurrency=concurrency,
                is_current=is_current,
                gained=gained,
                incarnation=incarnation,
            )

        watch = ConfigWatch(store, layout, config)
        self._tenures = Tenures(watch, begin=begin, clock=self._clock)
        self.changed = self._tenures.gained
        self.name = self._tenures.present.worker

    async def look(self, wanted: Wanted) -> View:
        minute = int((await self._store.now()).earliest // 60)
        runs = self.guarded()
        view = View()
        if runs:
            instant = self._clock.monotonic()
            is_news = runs != self._runs_seen
            self._runs_seen = runs
            with_ready = is_news or runs == ALL or instant >= self._ready_at + READY_SECONDS
            if with_ready:
                self._ready_at = instant
            view = await self._scanner.look(
                runs,
                minute=minute,
                worth=wanted.worth,
                wanted=wanted.tasks,
                with_ready=with_ready,
            )
        # The most urgent and then the oldest first, as far as their ids and pointers tell.
        view.sights.sort(key=lambda sight: (-sight.priority, sight.age_ms))
        if wanted.has_room and not any(map(wanted.worth, view.sights)):
            view.sights += await self._help(wanted, minute)
        return view

    async def _help(self, wanted: Wanted, minute: int) -> list[Sight]:
        """What owners have met and cannot run, or not all of it, and this worker can."""
        present = self._tenures.present
        asked: set[int] = set()
        types: set[str] = set()
        for other in self._tenures.others.values():
            wants = self._handles & set(other.help_wanted)
            if wants:
                asked |= set(other.shards)
                types |= wants
        if not asked or self._clock.monotonic() < self._help_at + HELP_SECONDS:
            return []
        self._help_at = self._clock.monotonic()
        now = (await self._store.now()).earliest

        def worth(sight: Sight) -> int:
            is_wanted = sight.at.type in types and not sight.is_held(now, self._lease_seconds)
            return wanted.worth(sight) if is_wanted else 0

        view = await self._helping.look(
            _runs(decide.slot_runs(asked - present.owned(), shards=present.cut.shards)),
            minute=minute,
            worth=worth,
            wanted=wanted.tasks,
        )
        # All who help look at the same: each takes a few, in an order of its own.
        found = [(self._entropy.random(), sight) for sight in view.sights if worth(sight)]
        found.sort(key=lambda drawn: drawn[0])
        return [sight for _, sight in found[: 2 * wanted.tasks]]

    def guarded(self) -> Sequence[Run]:
        return _runs(self._tenures.slots())

    async def keep(self, load: Callable[[], Load]) -> None:
        while True:
            try:
                seconds = await self._tenures.turn(load())
            except (StoreError, UnreadableObject) as error:
                _log.error("this worker can own nothing: %s", error)
                seconds = _PAUSE_SECONDS
            self.name = self._tenures.present.worker
            self._say_where_it_stands()
            # A load that changes is told before the next turn is due.
            await self._clock.sleep(min(seconds, _TURN_SECONDS_MAX))

    def _say_where_it_stands(self) -> None:
        """Log when this worker begins to own shards, or to stand by."""
        owned = len(self._tenures.present.owned())
        owners = [name for name, other in self._tenures.others.items() if other.shards]
        if owned and self._stands != "owns":
            self._stands = "owns"
            _log.info("owns %d of %d shards", owned, self._tenures.present.cut.shards)
        elif owners and not owned and self._stands != "by":
            self._stands = "by"
            _log.info("stands by: the shards are owned by %s", ", ".join(sorted(owners)[:5]))

    async def release(self) -> None:
        await self._tenures.release()


def _times(settings: WorkerSettings) -> LeaseSettings:
    return LeaseSettings(
        ttl_seconds=settings.lease_ttl_secs,
        renew_seconds=settings.lease_renew_interval_secs,
        shards_per_worker=settings.shards_per_worker,
    )


def _runs(slots: Iterable[range]) -> tuple[Run, ...]:
    return tuple((run.start, run.stop - 1) for run in slots)
