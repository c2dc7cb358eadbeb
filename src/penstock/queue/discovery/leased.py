"""`leased`, the default mode: workers own shards, and each looks only at its own.

`penstock.queue.shards.leases` decides who owns what; here is what an owner does with it. It
looks at its slots, one LIST for neighbouring ones, and is their monitor. A worker that owns
nothing sends only the requests that its leases need. A lost shard is no longer looked at, from
that moment; its running tasks go on, because their claims are in the ledgers and not in the
shard: they are renewed and settled as before, and nobody else can claim them meanwhile.

While there is work, looks are lists. After a few that found nothing, sooner if finds are rare,
the owner writes into the doorbell that it is *asleep*, and producers ring from then on
(`penstock.queue.doorbell` has the rules). It lists for `TAIL_SECONDS` more; then a look is a
GET of the doorbell, every `BELL_SECONDS` at most, and a list only

- when it has rung: all that is owned, and urgent packs a second time, for producers that rang
  for
  two;
- when something is due that a list has shown, or shards have come;
- `LIST_SECONDS` after the last one, for lost rings. An unclaimed task that such a list finds
  has a
  producer that does not ring, of an older release say: for `DEAF_SECONDS` looks are lists again,
  at the pace of the polling.

A worker with enough to do reads the doorbell as often: an urgent submit always rings, and urgent
packs, one LIST of all shards, are then tried before what was found earlier.

Price, for an idle owner, a month: 650,000 GETs $0.26 and 22,000 LISTs $0.11, where a LIST every
8 s was $1.62. A lone task costs a ring, a put to go to sleep and five or six LISTs, as much as
20 s of lists at the quick pace: so an owner goes to sleep only where that pays, after
`EMPTY_MAX` looks that found nothing. Where finds are rare, one will do, or a list that found
one pack and showed all there was. A busy queue is never asleep, and pays no ring.

A worker with room, and with nothing of its own to do, looks into the shards of owners that want
help with a type it has a handler for, every `HELP_SECONDS`, and more rarely each time it finds
nothing. An owner of a part of the queue looks into `ready/`, one list for all shards, at most
every `READY_SECONDS`, and with the list that ends its tail: so a task with a key or a delay may
start that much later.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.config import ConfigWatch, QueueConfig
from penstock.queue.discovery.base import Discovery, DiscoveryRequest
from penstock.queue.discovery.scanner import ALL, PackCandidate, Run, Scanner, ScanResult
from penstock.queue.doorbell import BELIEVED_SECONDS, ECHO_SECONDS, DoorbellListener
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import ShardLeaseSettings, WorkerSettings
from penstock.queue.shards import allocation as decide
from penstock.queue.shards.allocation import Cut, WorkerLoad
from penstock.queue.shards.leases import ShardLeases
from penstock.queue.shards.reshard import ShardTenures
from penstock.store.base import ObjectStore
from penstock.store.time import Interval

_log = logging.getLogger(__name__)

READY_SECONDS: Final = 5.0
BELL_SECONDS: Final = 4.0
"""So often the doorbell is asked for by who is asleep, or has enough to do."""
LIST_SECONDS: Final = 120.0
"""So often who is asleep looks at the lists all the same."""
TAIL_SECONDS: Final = BELIEVED_SECONDS + 0.5
DEAF_SECONDS: Final = 3600.0
EMPTY_MAX: Final = 6
"""After so many looks that found nothing an owner goes to sleep; after any where finds are rare."""
RARE_SECONDS: Final = 30.0
UNRUNG_SECONDS: Final = 5.0
HELP_SECONDS: Final = 8.0
HELP_SECONDS_MAX: Final = 64.0
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
    _asleep_at: float | None = None
    _help_seconds = HELP_SECONDS
    _empty = 0
    _is_rare = False

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
        self._scanner, self._helping, self._peeking = (Scanner(store, layout) for _ in range(3))
        self._listener = DoorbellListener(store, layout.doorbell, entropy)
        self._ready_at = self._help_at = self._listed_at = float("-inf")
        self._found_at = self._unreliable_until = float("-inf")
        self._echo_at = math.inf
        self._later_ms: int | None = None
        self._runs_seen: Sequence[Run] = ()
        self._logged_role = ""
        self._strained = asyncio.Event()

        leases = partial(
            ShardLeases,
            store,
            layout,
            name=name,
            handles=handles,
            settings=_times(settings),
            entropy=entropy,
            concurrency=concurrency,
            incarnation=incarnation,
        )

        def begin(
            cut: Cut, *, is_current: Callable[[], Awaitable[bool]], gained: asyncio.Event
        ) -> ShardLeases:
            return leases(shards=cut.shards, era=cut.era, is_current=is_current, gained=gained)

        watch = ConfigWatch(store, layout, config)
        self._tenures = ShardTenures(watch, begin=begin, clock=self._clock)
        self.changed = self._tenures.gained
        self.name = self._tenures.present.worker

    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        now = await self._store.now()
        runs = self.guarded()
        view = ScanResult(is_news=False, later_ms=self._later_ms)
        is_new = runs != self._runs_seen
        # Whoever loses all and gets it back knows nothing of the time between.
        self._runs_seen = runs
        if runs:
            reason = _List.NEW if is_new else await self._reason_to_list(wanted, now)
            if reason is not None:
                view = await self._look_at_own(wanted, runs, now, reason)
        if wanted.has_room and not any(map(wanted.worth, view.sights)):
            helping = await self._help(wanted, int(now.earliest // 60))
            view.is_news = view.is_news or bool(helping)
            view.sights += helping
        return view

    async def _reason_to_list(self, wanted: DiscoveryRequest, now: Interval) -> _List | None:
        """Why this look has to be a list: while awake always, otherwise if there may be news."""
        if self._is_due(now) or wanted.is_afresh:
            return _List.DUE
        if not self._is_asleep:
            return _List.AWAKE
        if await self._has_rung():
            return _List.RUNG
        is_late = self._clock.monotonic() >= self._listed_at + LIST_SECONDS
        return _List.LATE if is_late else None

    def _is_due(self, now: Interval) -> bool:
        return self._later_ms is not None and self._later_ms <= now.earliest * 1000

    @property
    def _is_asleep(self) -> bool:
        """Whether looks are for the doorbell now, and no longer lists: one has ended the tail."""
        return self._ends_tail(self._listed_at)

    def _ends_tail(self, listed_at: float) -> bool:
        return self._asleep_at is not None and listed_at >= self._asleep_at + TAIL_SECONDS

    @property
    def is_prompt(self) -> bool:
        return self._asleep_at is not None

    async def _has_rung(self) -> bool:
        """Ask whether it has rung; whoever hears that is awake, since nobody rings for it again."""
        has_rung = await self._listener.has_rung()
        if has_rung:
            self._echo_at = self._clock.monotonic() + ECHO_SECONDS
            if self._asleep_at is not None:
                # Perhaps it was for others: then one list is all that it costs.
                self._asleep_at, self._empty = None, EMPTY_MAX
        return has_rung

    async def _look_at_own(
        self, wanted: DiscoveryRequest, runs: Sequence[Run], now: Interval, reason: _List
    ) -> ScanResult:
        """List what is owned; go to sleep if that shows nothing, a few times."""
        instant = self._clock.monotonic()
        with_ready = self._wants_ready(runs, instant, reason)
        if with_ready:
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
        view.is_cut = not self._scanner.is_through
        view.later_ms = self._later_ms = view.later_ms if with_ready else self._later_ms
        # The most urgent and then the oldest first, as far as their ids and pointers tell.
        view.sights.sort(key=lambda sight: (-sight.priority, sight.age_ms))
        found = [sight for sight in view.sights if wanted.worth(sight)]
        if reason is _List.LATE and any(_is_unrung(sight, now) for sight in found):
            _log.info("found tasks without a ring: not relying on the doorbell")
            self._unreliable_until = instant + DEAF_SECONDS
        if found:
            self._is_rare = instant - self._found_at >= RARE_SECONDS
            self._found_at = instant
        if found or reason is _List.NEW:
            self._asleep_at, self._empty = None, 0
        if not found or (self._is_rare and len(found) == 1 and not view.is_cut):
            await self._tire(instant)
        return view

    def _wants_ready(self, runs: Sequence[Run], instant: float, reason: _List) -> bool:
        """Whether `ready/` is listed as well: always by the list that ends the tail (QUEUE-24)."""
        if reason is not _List.AWAKE or runs == ALL or self._ends_tail(instant):
            return True
        return instant >= min(self._ready_at + READY_SECONDS, self._echo_at)

    async def _tire(self, instant: float) -> None:
        """There is nothing more to find: go to sleep, if that has been so for some looks."""
        self._empty += 1
        is_tired = self._empty >= (1 if self._is_rare else EMPTY_MAX)
        if self._asleep_at is not None or not is_tired or instant < self._unreliable_until:
            return
        try:
            # A ring that comes to light only now may be younger than the list.
            if not await self._has_rung() and await self._listener.sleep():
                self._asleep_at = self._clock.monotonic()
        except StoreError as error:
            _log.debug("failed to write the doorbell, going on with lists: %s", error)

    def pause_seconds(self, seconds: float, *, has_room: bool = True) -> float:
        instant = self._clock.monotonic()
        is_deaf = instant < self._unreliable_until
        if is_deaf or not self._runs_seen or (self._asleep_at is None and not has_room):
            return seconds
        if self._asleep_at is not None and not self._is_asleep and not has_room:
            # One list ends the tail; what it shows could not start sooner.
            return min(seconds, max(0.1, self._asleep_at + TAIL_SECONDS - instant))
        return min(seconds, BELL_SECONDS)

    async def peek(self, wanted: DiscoveryRequest) -> ScanResult | None:
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

    async def _help(self, wanted: DiscoveryRequest, minute: int) -> list[PackCandidate]:
        """What owners have met and cannot run, or not all of it, and this worker can."""
        present = self._tenures.present
        asked: set[int] = set()
        types: set[str] = set()
        for other in self._tenures.others.values():
            wants = self._handles & set(other.help_wanted)
            if wants:
                asked |= set(other.shards)
                types |= wants
        if not asked:
            self._help_seconds = HELP_SECONDS
        if not asked or self._clock.monotonic() < self._help_at + self._help_seconds:
            return []
        self._help_at = self._clock.monotonic()
        now = (await self._store.now()).earliest

        def worth(sight: PackCandidate) -> int:
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
        # Others were faster, if there is nothing: who goes on asking pays for all of them.
        more = HELP_SECONDS if found else 2 * self._help_seconds
        self._help_seconds = min(more, HELP_SECONDS_MAX)
        return [sight for _, sight in found[: 2 * wanted.tasks]]

    def strained(self) -> None:
        self._strained.set()

    def guarded(self) -> Sequence[Run]:
        return _runs(self._tenures.slots())

    async def keep(self, load: Callable[[], WorkerLoad]) -> None:
        while True:
            try:
                seconds = await self._tenures.turn(load())
            except (StoreError, UnreadableObject) as error:
                _log.error("this worker cannot own shards: %s", error)
                seconds = _PAUSE_SECONDS
            self.name = self._tenures.present.worker
            self._log_role()
            # A load that changes is told before the next turn is due, a burst at once.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _TURN_SECONDS_MAX)):
                    await self._strained.wait()
            self._strained.clear()

    def _log_role(self) -> None:
        """Log when this worker begins to own shards, or to stand by."""
        owned = len(self._tenures.present.owned())
        owners = [name for name, other in self._tenures.others.items() if other.shards]
        if owned and self._logged_role != "owns":
            self._logged_role = "owns"
            _log.info("owns %d of %d shards", owned, self._tenures.present.cut.shards)
        elif owners and not owned and self._logged_role != "by":
            self._logged_role = "by"
            _log.info("standing by: the shards are owned by %s", ", ".join(sorted(owners)[:5]))

    async def release(self) -> None:
        await self._tenures.release()


def _times(settings: WorkerSettings) -> ShardLeaseSettings:
    return ShardLeaseSettings(
        ttl_seconds=settings.lease_ttl_secs,
        renew_seconds=settings.lease_renew_interval_secs,
        shards_per_worker=settings.shards_per_worker,
    )


def _is_unrung(sight: PackCandidate, now: Interval) -> bool:
    """Whether this waits for its first claim, and not since just now."""
    waits_seconds = now.earliest - sight.age_ms / 1000
    is_first = sight.ledger is None and sight.pointer is None and sight.at.due_minute is None
    return is_first and UNRUNG_SECONDS < waits_seconds < DEAF_SECONDS


def _runs(slots: Iterable[range]) -> tuple[Run, ...]:
    return tuple((run.start, run.stop - 1) for run in slots)
