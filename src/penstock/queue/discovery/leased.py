"""`leased`, the default: workers own shards, and each looks only at its own.

Who owns what is decided in `penstock.queue.owning.leases`; here is what an owner does with it. It
looks at its slots, one LIST for those that are neighbours, and guards them as their monitor. A
worker that owns nothing asks nothing but what its leases need. When a shard is lost it is no
longer looked at, from that moment; tasks of it that are running go on, because their claims are in
the ledgers and not in the shard: they are renewed and settled as before, and nobody else can claim
them meanwhile.

Looks are lists, while there is work: every one shows all that has come. After a few that found
nothing, sooner if finds are rare, the owner writes into the doorbell that it is *asleep*, and
producers ring from then on (`penstock.queue.bell` has the rules and why none is missed). It lists
for `TAIL_SECONDS` more; then a look is a GET of the doorbell, every `BELL_SECONDS` at the most, and
a list only

- when it has rung: all that is owned, and what is urgent a second time, for those who rang for two;
- when something is due of which a list has told, or shards have come;
- `LIST_SECONDS` after the last one, for rings that were lost. A task that such a list finds, and
  that nobody has begun, has a producer that does not ring, of an older release say: for
  `DEAF_SECONDS` looks are lists again, at the pace of the polling.

A worker that has enough to do asks for the doorbell as often: who submits something urgent always
rings, and what is urgent, one LIST of all shards, is then looked at before what was found earlier.

Price, for an owner with nothing to do, a month: 860,000 GETs $0.35 and 29,000 LISTs $0.14, where
a LIST every 8 s was $1.62. A task that comes alone costs a ring, a put to go to sleep and five or
six LISTs; a queue in which they come faster than a look in three is never asleep, and pays no ring.

A worker with room, and with nothing of its own to do, looks into the shards of owners that want
help with a type it has a handler for, at the slow end of its polling. An owner of a part of the
queue looks into `ready/`, which is one list for all shards, at most every `READY_SECONDS`: so a
task with a key or a delay may start that much later.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.bell import BELIEVED_SECONDS, ECHO_SECONDS, Ear
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
from penstock.store.time import Interval

_log = logging.getLogger(__name__)

READY_SECONDS: Final = 5.0
BELL_SECONDS: Final = 3.0
"""So often the doorbell is asked for by who is asleep, or has enough to do."""
LIST_SECONDS: Final = 90.0
"""So often who is asleep looks at the lists all the same."""
TAIL_SECONDS: Final = BELIEVED_SECONDS + 0.5
DEAF_SECONDS: Final = 3600.0
EMPTY_MAX: Final = 3
"""After so many looks that found nothing an owner goes to sleep; after one where finds are rare."""
RARE_SECONDS: Final = 30.0
UNRUNG_SECONDS: Final = 5.0
HELP_SECONDS: Final = 8.0
_PAUSE_SECONDS: Final = 30.0
_TURN_SECONDS_MAX: Final = 5.0


class _List(Enum):
    """Why an owner lists."""

    NEW = auto()
    """It owns something else than before."""
    DUE = auto()
    """Something has become due, or was let go of."""
    AWAKE = auto()
    RUNG = auto()
    LATE = auto()
    """It is asleep, and a ring may have been lost."""


class LeasedDiscovery(Discovery):
    """Looks at the shards that this worker owns."""

    sight_seconds = 30.0
    is_alone = True
    peek_seconds = BELL_SECONDS

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
        self._peeking = Scanner(store, layout)
        self._ear = Ear(store, layout.doorbell, entropy)
        self._ready_at = self._help_at = self._listed_at = float("-inf")
        self._found_at = self._deaf_until = float("-inf")
        self._echo_at = math.inf
        self._asleep_at: float | None = None
        self._empty = 0
        self._is_rare = False
        self._later_ms: int | None = None
        self._runs_seen: Sequence[Run] = ()
        self._stands = ""
        self._strained = asyncio.Event()

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
        now = await self._store.now()
        runs = self.guarded()
        view = View(is_news=False, later_ms=self._later_ms)
        if runs:
            is_new = runs != self._runs_seen
            self._runs_seen = runs
            reason = _List.NEW if is_new else await self._reason_to_list(wanted, now)
            if reason is not None:
                view = await self._look_at_own(wanted, runs, now, reason)
        if wanted.has_room and not any(map(wanted.worth, view.sights)):
            helping = await self._help(wanted, int(now.earliest // 60))
            view.is_news = view.is_news or bool(helping)
            view.sights += helping
        return view

    async def _reason_to_list(self, wanted: Wanted, now: Interval) -> _List | None:
        """Why this look has to be a list: while awake always, otherwise if there may be news."""
        if self._is_due(now) or wanted.is_afresh:
            return _List.DUE
        if not self._is_asleep:
            return _List.AWAKE
        if await self._has_rung():
            # Perhaps it was for others: then this is the only list that it costs.
            self._asleep_at, self._empty = None, EMPTY_MAX
            return _List.RUNG
        is_late = self._clock.monotonic() >= self._listed_at + LIST_SECONDS
        return _List.LATE if is_late else None

    def _is_due(self, now: Interval) -> bool:
        return self._later_ms is not None and self._later_ms <= now.earliest * 1000

    @property
    def _is_asleep(self) -> bool:
        """Whether looks are for the doorbell now, and no longer lists."""
        if self._asleep_at is None:
            return False
        return self._clock.monotonic() >= self._asleep_at + TAIL_SECONDS

    async def _has_rung(self) -> bool:
        has_rung = await self._ear.has_rung()
        if has_rung:
            self._echo_at = self._clock.monotonic() + ECHO_SECONDS
        return has_rung

    async def _look_at_own(
        self, wanted: Wanted, runs: Sequence[Run], now: Interval, reason: _List
    ) -> View:
        """List what is owned; go to sleep if that shows nothing, a few times."""
        instant = self._clock.monotonic()
        with_ready = reason is not _List.AWAKE or runs == ALL
        if with_ready or instant >= min(self._ready_at + READY_SECONDS, self._echo_at):
            with_ready = True
            self._ready_at = instant
            self._echo_at = math.inf if instant >= self._echo_at else self._echo_at
        view = await self._scanner.look(
            runs,
            minute=int(now.earliest // 60),
            worth=wanted.worth,
            wanted=wanted.tasks,
            with_ready=with_ready,
        )
        self._listed_at = instant
        view.later_ms = self._later_ms = view.later_ms if with_ready else self._later_ms
        # The most urgent and then the oldest first, as far as their ids and pointers tell.
        view.sights.sort(key=lambda sight: (-sight.priority, sight.age_ms))
        found = [sight for sight in view.sights if wanted.worth(sight)]
        if reason is _List.LATE and any(_is_unrung(sight, now) for sight in found):
            _log.info("there are tasks for which nobody has rung: the doorbell is not relied on")
            self._deaf_until = instant + DEAF_SECONDS
        if found:
            self._is_rare = instant - self._found_at >= RARE_SECONDS
            self._found_at = instant
        if found or reason is _List.NEW:
            self._asleep_at, self._empty = None, 0
        else:
            await self._tire(instant)
        return view

    async def _tire(self, instant: float) -> None:
        """A look has found nothing: go to sleep, if it was not the first."""
        self._empty += 1
        is_tired = self._empty >= (1 if self._is_rare else EMPTY_MAX)
        if self._asleep_at is not None or not is_tired or instant < self._deaf_until:
            return
        try:
            # A ring that comes to light only now may be younger than the list.
            if not await self._has_rung() and await self._ear.sleep():
                self._asleep_at = self._clock.monotonic()
        except StoreError as error:
            _log.debug("the doorbell cannot be written, lists go on: %s", error)

    def pause_seconds(self, seconds: float, *, has_room: bool = True) -> float:
        is_deaf = self._clock.monotonic() < self._deaf_until
        if is_deaf or not self._runs_seen or (self._asleep_at is None and not has_room):
            return seconds
        return min(seconds, BELL_SECONDS)

    async def peek(self, wanted: Wanted) -> View | None:
        runs = self.guarded()
        if not runs:
            return None
        if not await self._has_rung():
            if self._clock.monotonic() < self._echo_at:
                return None
            self._echo_at = math.inf
        view = await self._peeking.look_at_urgent(runs, worth=wanted.worth, wanted=wanted.tasks)
        view.sights.sort(key=lambda sight: (-sight.priority, sight.age_ms))
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

    def strained(self) -> None:
        self._strained.set()

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
            # A load that changes is told before the next turn is due, a burst at once.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _TURN_SECONDS_MAX)):
                    await self._strained.wait()
            self._strained.clear()

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


def _is_unrung(sight: Sight, now: Interval) -> bool:
    """Whether this waits for its first claim, and not since just now."""
    waits_seconds = now.earliest - sight.age_ms / 1000
    is_first = sight.ledger is None and sight.pointer is None and sight.at.due_minute is None
    return is_first and UNRUNG_SECONDS < waits_seconds < DEAF_SECONDS


def _runs(slots: Iterable[range]) -> tuple[Run, ...]:
    return tuple((run.start, run.stop - 1) for run in slots)
