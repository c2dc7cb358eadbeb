"""The worker loop: look, claim, run, remember, and release at the end.

| what | when |
|---|---|
| look | no candidate is left to try, and the pace allows it; rarely while there is no room |
| peek | there is enough to do: has something more urgent come? (`Discovery.peek`) |
| try a pack | there is room, and a look found it or its time has come (`PackMemory`) |
| run a pack | claimed, until nothing of it is held (`PackRunner`) |
| run one task and nothing else | it is suspect, and on its last attempt (`ExclusiveMode`) |
| maintenance | every so often, in the slots that this worker guards (`MaintenanceLoop`) |

A worker claims only types that it has a handler for; others are left where they are and never
block. Transient failures of the store are retried and logged; while the store refuses, the
worker waits and says so. Gates decide what may start (`penstock.queue.execution.gates`).
Candidates are tried by priority, and a pack that is more urgent than what is held need not wait
for what was only claimed ahead (`WorkerCapacity`).

**Exclusive mode.** A suspect on its last attempt is claimed exclusively
(`penstock.queue.transitions`): while it is held, its worker runs and holds nothing else, so
that a loss says which task it was.

| phase | means | leaves by |
|---|---|---|
| ordinary | the worker claims as always | a task waits here and the pause is over: draining; |
| | | one waits and the worker has nothing else to do: running |
| draining | nothing is claimed; what runs may end | nothing is held: running; patience ends: |
| | | ordinary, after a pause of four times the patience, which doubles |
| running | one task is claimed exclusively, to its last write | the next one; after |
| | | `PHASE_SECONDS`, or when none waits: ordinary, for as long as the phase took |

So a task that waits here comes when what runs has ended, also behind a backlog that never ends;
a handler that never ends costs its worker at most a fifth of its time; and many that wait leave
the rest of the queue half of the time. A worker with nothing else to do never waits. Where
several workers look at the same packs, each waits a while of its own before it drains, and
forgets the task if a list shows that its ledger has changed. A crash leaves nothing: the ledger
says what needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.context import LogLimiter, QueueContext
from penstock.queue.discovery.base import Discovery, DiscoveryRequest
from penstock.queue.discovery.scanner import PackCandidate, ScanResult
from penstock.queue.execution.capacity import WorkerCapacity
from penstock.queue.execution.gates import StartGate, admit
from penstock.queue.execution.handler_processes import HandlerProcessPool
from penstock.queue.execution.handlers import HandlerRegistry
from penstock.queue.execution.observer import AttemptObserver
from penstock.queue.execution.pack_memory import (
    AGAIN_MS,
    POINTER_MS,
    PackMemory,
    PackTracker,
    PointerTracker,
    Waitlist,
    is_ours,
)
from penstock.queue.execution.pack_runner import PackRunner, WorkerContext
from penstock.queue.ids import PackAt
from penstock.queue.maintenance import MaintenanceLoop, MaintenanceTask, Monitor
from penstock.queue.pack import Pack
from penstock.queue.pack_session import PackSession
from penstock.queue.settings import PollPace, WorkerSettings
from penstock.queue.shards.allocation import LoadTracker, WorkerLoad
from penstock.queue.survey import until_done
from penstock.store.base import Version

PATIENCE_SECONDS: Final = 60.0
PATIENCE_SECONDS_MAX: Final = 3600.0
PHASE_SECONDS: Final = 60.0
OTHERS_SECONDS: Final = 30.0
"""How long a worker waits at the most for others who see the same packs."""
_PAUSE: Final = 4.0
_PACKS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class _Waiting:
    sight: PackCandidate
    since: float
    """From when on it is worth draining for it."""


class ExclusiveMode:
    """What waits to run with nothing beside it, on one worker."""

    def __init__(self, clock: Clock, *, delay: Callable[[], float]) -> None:
        """`delay` draws how many seconds to leave to other workers."""
        self._clock = clock
        self._delay = delay
        self._waiting: dict[PackAt, _Waiting] = {}
        self._running: PackAt | None = None
        self._is_draining = False
        self._patience = PATIENCE_SECONDS
        self._drain_until = self._began_at = self._pause_until = float("-inf")

    def __contains__(self, at: PackAt) -> bool:
        return at in self._waiting

    @property
    def is_reserved(self) -> bool:
        """Whether nothing else may be claimed now."""
        return self._is_draining or self._running is not None

    def note(self, sight: PackCandidate) -> None:
        """A pack has a task that must run with nothing beside it."""
        if len(self._waiting) < _PACKS_MAX:  # The others are found again.
            since = self._clock.monotonic() + self._delay()
            self._waiting.setdefault(sight.at, _Waiting(sight, since))

    def see(self, sights: Iterable[PackCandidate]) -> None:
        """Forget what a list shows with another ledger: somebody else has it."""
        for sight in sights:
            known = self._waiting.get(sight.at)
            if known is not None and sight.seen and sight.ledger != known.sight.ledger:
                del self._waiting[sight.at]

    def next(self, *, is_empty: bool, is_idle: bool) -> PackCandidate | None:
        """What to claim exclusively now, if the worker holds nothing (`is_empty`).

        `is_idle`: it has also found nothing that it could claim instead.
        """
        if self._running is not None:
            return None
        instant = self._clock.monotonic()
        if not self._waiting:
            self._end_phase(instant)
            return None
        if self._is_draining and instant >= self._drain_until and not is_empty:
            self._is_draining = False
            self._pause_until = instant + _PAUSE * self._patience
            self._patience = min(2 * self._patience, PATIENCE_SECONDS_MAX)
        first = min(self._waiting.values(), key=lambda each: each.since)
        is_due = instant >= max(self._pause_until, first.since)
        if not self._is_draining and (is_due or (is_empty and is_idle)):
            self._is_draining = True
            self._began_at, self._drain_until = instant, instant + self._patience
        if not self._is_draining or not is_empty:
            return None
        del self._waiting[first.sight.at]
        self._running = first.sight.at
        return first.sight

    def ended(self, at: PackAt) -> None:
        """Nothing of a pack is held any more."""
        if at != self._running:
            return
        self._running = None
        self._patience = PATIENCE_SECONDS
        instant = self._clock.monotonic()
        self._drain_until = instant + self._patience
        if instant - self._began_at >= PHASE_SECONDS:
            self._end_phase(instant)

    def _end_phase(self, instant: float) -> None:
        if self._is_draining:
            self._is_draining = False
            self._pause_until = instant + (instant - self._began_at)


_log = logging.getLogger(__name__)

_UNREADABLE_MS: Final = 600_000
_FAILED_MAX: Final = 1000
_FLUSH_SECONDS: Final = 10.0
_NEIGHBOURS_SECONDS_MIN: Final = 0.5
_NEIGHBOURS_SECONDS_MAX: Final = 10.0
CALM_SECONDS: Final = 60.0
"""What comes after so long without work may be a burst."""
BURST_SECONDS: Final = 10.0
"""A burst shows itself in so long."""
BURST_ROUNDS: Final = 2
"""It is one if behind its first pack waits more than this worker runs in so many rounds."""


class WorkerLoop:
    """What one run of a worker has found, holds and knows."""

    _is_afresh = True
    _peeked: frozenset[PackAt] = frozenset()
    _waiting: frozenset[str] = frozenset()
    _later_ms: int | None = None

    def __init__(
        self,
        access: QueueContext,
        handlers: HandlerRegistry,
        discovery: Discovery,
        *,
        concurrency: int,
        settings: WorkerSettings,
        gates: Sequence[StartGate] = (),
        maintenance: Sequence[MaintenanceTask] = (),
        watch: AttemptObserver | None = None,
        children: HandlerProcessPool | None = None,
    ) -> None:
        self._access, self._handlers, self._discovery = access, handlers, discovery
        self._settings, self._incarnation = settings, access.incarnation
        self._clock = access.store.clock.machine
        self._wake = asyncio.Event()
        self._room = WorkerCapacity(concurrency, clock=self._clock, freed=self._wake)
        store, name, entropy = access.store, discovery.name, access.entropy
        watch = watch or AttemptObserver()
        self._context = WorkerContext(store, name, settings, entropy, self._room, watch, children)
        self._memory, self._pointers = PackMemory(), PointerTracker()
        key_seconds = access.config.key_seconds
        self._monitor = Monitor(store, access.layout, key_seconds=key_seconds, entropy=entropy)
        self._gates = tuple(gates)
        self._learning = PackTracker(access, discovery, self._memory, self._monitor)
        self._upkeep = MaintenanceLoop(
            access,
            discovery,
            self._monitor,
            maintenance,
            sweep_seconds=settings.sweep_seconds,
            found=self._look_now,
        )
        self._pace = PollPace(settings.polling, entropy=access.entropy, clock=self._clock)
        self._found: deque[PackCandidate] = deque()
        self._at_gates = Waitlist(gates, most=4 * concurrency)
        self._exclusive = ExclusiveMode(self._clock, delay=self._seconds_for_others)
        self._found_at = self._began = 0.0
        self._is_more = self._was_full = self._is_patient = self._has_left = False
        self._busy: dict[PackAt, PackRunner | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: dict[PackAt, int] = {}
        self._strain = LoadTracker(self._clock)
        self._warn = LogLimiter(self._clock)
        self._stopping, self._hurry, self._at_once = (asyncio.Event() for _ in range(3))
        self._look_at = self._worked_at = self._looked_at = self._clock.monotonic()
        self._peek_at = self._looked_at + discovery.peek_seconds
        self._burst_until = self._peeked_at = float("-inf")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, and no handler runs."""
        return not self._busy and not self._room.held

    def stop(self, *, at_once: bool) -> None:
        """Claim nothing more; with `at_once`, give back what runs."""
        if at_once:
            _log.info("giving back all running tasks")
        else:
            seconds = self._settings.stop_seconds
            _log.info("stopping: %d running packs have %.0f s to end", len(self._busy), seconds)
        self._hurry.set()
        self._stopping.set()
        self._wake.set()
        if at_once:
            self._at_once.set()

    def finish(self) -> None:
        """Claim nothing more; what runs may take as long as it needs, unless `stop` is called."""
        _log.info("claiming nothing more: %d packs are running", len(self._busy))
        self._is_patient = True
        self._stopping.set()
        self._wake.set()

    async def run(self, *, until_empty: bool = False) -> None:
        """Work until stopped, or until nothing is left, and let go."""
        self._began = (await self._access.store.now()).latest
        self._incarnation.refresh()
        await self._discovery.begin()
        async with asyncio.TaskGroup() as group:
            self._group = group
            beside = [self._discovery.keep(self._load), self._follow(), *self._upkeep.loops()]
            if self._incarnation.id:
                beside.append(self._watch_neighbours())
            if until_empty:
                beside.append(self._finish_when_empty())
            background = [group.create_task(each) for each in beside]
            gates = [group.create_task(gate.keep()) for gate in self._gates]
            try:
                await self._search()
                await self._drain(background)
            finally:
                for task in (*background, *gates, *self._tasks):
                    task.cancel()
                # What is on its way out must not write after its leases are given up.
                await asyncio.wait((*background, *gates), timeout=_FLUSH_SECONDS)
                for gate in self._gates:
                    await gate.release()
                await self._leave(background)
        if self._discovery.lost is not None:
            raise self._discovery.lost

    async def _leave(self, background: Sequence[asyncio.Task[None]]) -> None:
        """Look no more, so that others do, whatever still runs here: its claims are its own."""
        if self._has_left:
            return
        self._has_left = True
        for task in background:
            task.cancel()
        await asyncio.wait(background, timeout=_FLUSH_SECONDS)
        await self._upkeep.release()
        await self._discovery.release()

    async def _finish_when_empty(self) -> None:
        await until_done(
            self._access,
            frozenset(self._handlers.types),
            is_idle=lambda: not self._busy,
            failed=lambda error: self._warn(f"failed to check whether the queue is empty: {error}"),
        )
        self.finish()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _load(self) -> WorkerLoad:
        """How busy this worker is."""
        idle_seconds = 0.0 if self._busy else self._clock.monotonic() - self._worked_at
        left: Counter[str] = Counter()
        for at, work in self._busy.items():
            left[at.type] += work.left if work else 0
        room = self._room
        too_many = {each for each, count in left.items() if count and not room.is_soon(count, each)}
        return self._strain.load(
            is_full=not room.free,
            waiting=self._waiting,
            too_many=too_many,
            idle_seconds=idle_seconds,
        )

    async def _follow(self) -> None:
        """Look at once when discovery says that it is worth it."""
        while True:
            await self._discovery.changed.wait()
            self._discovery.changed.clear()
            if self._discovery.lost is not None:
                self.stop(at_once=True)
            self._look_now()

    async def _watch_neighbours(self) -> None:
        """Look whether other workers of this machine have ended: soon, and then more rarely."""
        seconds = _NEIGHBOURS_SECONDS_MIN
        while True:
            await self._clock.sleep(seconds)
            seconds = min(2 * seconds, _NEIGHBOURS_SECONDS_MAX)
            if self._incarnation.refresh():
                # What they held is not held any more.
                self._began = self._access.now().latest
                self._memory.forget_all()
                self._look_now()

    def _look_now(self) -> None:
        self._look_afresh_in(0.0)
        self._wake.set()

    async def _search(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            self._start_claims()
            if not self._found and self._clock.monotonic() >= self._look_at:
                await self._look()
                continue
            if self._has_enough and self._clock.monotonic() >= self._peek_at:
                await self._peek()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_wait()):
                    await self._wake.wait()

    @property
    def _has_enough(self) -> bool:
        """Whether nothing is looked for but what is more urgent."""
        return bool(self._found) or not (self._room.free or self._discovery.is_prompt)

    def _seconds_to_wait(self) -> float:
        instant = self._clock.monotonic()
        to_look = self._look_at - instant
        if not self._room.free:
            most = self._settings.polling.max_seconds
            most = min(most, self._peek_at - instant) if self._has_enough else most
            return max(0.05, most if self._found else min(most, to_look))
        waits = [to_look]
        if self._found:
            waits.append(self._peek_at - instant)
        to_open = self._at_gates.seconds_to_open()
        if to_open is not None:
            waits.append(to_open)
        due = [each for each in (self._memory.next_due_ms(), self._later_ms) if each is not None]
        if due:
            waits.append(min(due) / 1000 - self._access.now().earliest)
        # The store's time is known to a fraction of a second: do not ask it in a tight circle.
        return max(0.05, min(waits))

    async def _look(self) -> None:
        looked = self._access.now()
        # Whoever wants another look meanwhile sets it earlier.
        self._look_at = float("inf")
        is_afresh, self._is_afresh = self._is_afresh, False
        try:
            with self._strain.looking():
                view = await self._discovery.look(self._wanted(is_afresh=is_afresh))
        except StoreError as error:
            self._warn(f"failed to list the queue, retrying: {error}")
            self._is_afresh |= is_afresh
            self._look_in(self._pace.next_seconds())
            return
        if view.is_news:
            self._take_in(view)
            self._note_burst()
            if self._discovery.guarded():
                self._monitor.note(view.settled, looked)
            # If there was enough, look again as soon as it is used up and has given something.
            tasks = sum(sight.at.count for sight in self._found)
            self._is_more = view.is_cut and tasks >= self._room.concurrency
        self._looked_at = self._clock.monotonic()
        if self._discovery.is_whole:
            self._peek_at = self._looked_at + self._discovery.peek_seconds
        self._look_in(self._pause_seconds())

    def _pause_seconds(self) -> float:
        """Until the next look.

        While full, what waits must only be known, so that others can be asked to take it.
        """
        has_room = self._room.free > 0
        is_calm = self._clock.monotonic() >= self._burst_until
        is_rare = is_calm and not has_room
        seconds = self._settings.polling.max_seconds if is_rare else self._pace.next_seconds()
        return self._discovery.pause_seconds(seconds, has_room=has_room)

    def _note_burst(self) -> None:
        """Ask for help at once if much has come after a time without work."""
        instant = self._clock.monotonic()
        if self._found and not self._busy and instant >= self._worked_at + CALM_SECONDS:
            self._burst_until = instant + BURST_SECONDS
        # One pack is cheapest in one place, however large: others come to it later (`LoadTracker`).
        behind = sum(sight.at.count for sight in islice(self._found, 1, None))
        if instant < self._burst_until and behind > BURST_ROUNDS * self._room.concurrency:
            self._strain.burst({sight.at.type for sight in self._found})
            self._discovery.strained()

    def _wanted(self, *, is_afresh: bool = False) -> DiscoveryRequest:
        return DiscoveryRequest(
            self._worth,
            self._room.concurrency,
            has_room=self._room.free > 0,
            is_afresh=is_afresh,
        )

    async def _peek(self) -> None:
        """Take in what is more urgent than what was found before, if there is such."""
        self._peek_at = self._clock.monotonic() + self._discovery.peek_seconds
        try:
            view = await self._discovery.peek(self._wanted())
        except StoreError as error:
            self._warn(f"failed to list urgent tasks, retrying: {error}")
            return
        peeked = [sight for sight in view.sights if self._worth(sight)] if view else []
        if peeked:
            self._peeked = frozenset(sight.at for sight in peeked)
            self._peeked_at = self._clock.monotonic()
            rest = [sight for sight in self._found if sight.at not in self._peeked]
            self._found = _in_order([*peeked, *rest])

    def _look_afresh_in(self, seconds: float) -> None:
        """Look as `_look_in` says, at the lists themselves."""
        self._is_afresh = True
        self._look_in(seconds)

    def _look_in(self, seconds: float) -> None:
        """Look again after so long, or sooner if that was asked for."""
        self._look_at = min(self._look_at, self._clock.monotonic() + seconds)

    def _take_in(self, view: ScanResult) -> None:
        self._later_ms = view.later_ms
        self._exclusive.see(view.sights)
        for at in self._pointers.missing(view, self._discovery.guarded()):
            if at not in self._busy:
                self._spawn(self._point_again(at))
        worth = [sight for sight in view.sights if self._could_use(sight)]
        self._found = deque(sight for sight in worth if not self._at_gates.is_shut(sight))
        self._at_gates.take_in(
            [sight for sight in worth if self._at_gates.is_shut(sight)],
            shown={sight.at for sight in view.sights},
            busy=self._busy.keys(),
        )
        self._found_at = self._clock.monotonic()
        lease_seconds = self._settings.task_lease_seconds
        now = self._access.now().earliest
        self._waiting = frozenset(
            sight.at.type for sight in self._found if not sight.is_held(now, lease_seconds)
        )
        for sight in view.sights:
            if self._handlers.get(sight.at.type) is None:
                self._warn(f"found tasks of type {sight.at.type!r} without a handler here")
                self._strain.meet(sight.at.type)
        for key in view.foreign:
            self._warn(f"skipped an object that is not of this queue: {key}")

    async def _point_again(self, at: PackAt) -> None:
        """Write a pointer that is lost."""
        try:
            if await self._monitor.point_again(at):
                self._look_now()
        except (StoreError, UnreadableObject) as error:
            self._warn(f"failed to restore a pointer, a sweep will retry: {error}")

    def _worth(self, sight: PackCandidate) -> int:
        """How many tasks of a pack this worker could do with, now."""
        return 0 if self._at_gates.is_shut(sight) else self._could_use(sight)

    def _could_use(self, sight: PackCandidate) -> int:
        """How many it could do with, whether they may start now or not."""
        if sight.at in self._busy or self._handlers.get(sight.at.type) is None:
            return 0
        if sight.at in self._exclusive:
            return 0
        if sight.ledger is None and not self._memory.knows(sight):
            return sight.at.count  # As nearly all are: looks ask this several times of each.
        now = self._access.now().earliest
        if self._memory.is_known_idle(
            sight, now * 1000, reread_ms=self._discovery.reread_seconds * 1000
        ):
            return 0
        patience = self._discovery.patience_seconds(sight.at) if sight.ledger else 0.0
        if self._incarnation.knows_any and sight.ledger_modified <= self._began:
            patience = 0.0  # It may have been held by one who has ended.
        is_early = patience and sight.ledger_modified + patience > now
        return 0 if is_early else sight.at.count

    def _start_claims(self) -> None:
        now_ms = self._access.now().earliest * 1000
        if self._later_ms is not None and self._later_ms <= now_ms:
            self._later_ms = None
            self._look_afresh_in(0.0)
        is_old = self._clock.monotonic() - self._found_at > self._sight_seconds()
        if is_old and self._found:
            # Others will have taken it by now, unless nobody else is led to it.
            self._is_afresh = True
            self._let_go_of_found()
        due = [s for s in self._memory.due(now_ms) if s.at not in self._busy]
        due = [sight for sight in due if sight.at not in self._exclusive]
        if due:
            self._found = _in_order([*self._found, *due])
        self._take_up_again(is_old=is_old)
        self._start_exclusive()
        while self._found and self._room.free_for(self._found[0].priority):
            sight = self._found.popleft()
            if self._at_gates.is_shut(sight):
                self._put_aside(sight)
            elif sight.at not in self._busy:
                ahead = self._settings.settle_seconds_of(sight.at.count)
                room = self._room.take(
                    sight.at.count,
                    type=sight.at.type,
                    priority=sight.priority,
                    ahead_seconds=ahead,
                )
                self._busy[sight.at] = None
                self._spawn(self._take(sight, room))
        self._room.contended = self._found[0].priority if self._found else None
        if self._room.free:
            self._waiting = frozenset()
            if self._was_full:
                least = self._settings.polling.min_seconds
                self._look_in(max(0.0, self._looked_at + least - self._clock.monotonic()))
        elif not self._was_full:
            self._put_off_look()
        self._was_full = not self._room.free

    def _sight_seconds(self) -> float:
        """How long what was found is worth trying.

        Of low priorities not for long, if there is room for them: no peek shows what is less so.
        """
        seconds = self._discovery.sight_seconds
        if self._found and self._found[0].priority < 0 and self._room.free:
            return min(seconds, self._discovery.peek_seconds)
        return seconds

    def _put_off_look(self) -> None:
        """There is no room any more: the next look can wait, unless it was asked for."""
        if not self._is_afresh:
            self._look_at = max(self._look_at, self._looked_at + self._pause_seconds())

    def _seconds_for_others(self) -> float:
        """How long to leave an exclusive task to others who see it too."""
        entropy = self._access.entropy
        return 0.0 if self._discovery.is_alone else entropy.uniform(0, OTHERS_SECONDS)

    def _start_exclusive(self) -> None:
        """Make way for a task that is to run with nothing beside it, and claim it."""
        is_empty = self.is_empty
        sight = self._exclusive.next(is_empty=is_empty, is_idle=is_empty and not self._found)
        self._room.is_reserved = self._exclusive.is_reserved
        if sight is not None:
            self._room.hold(1, priority=sight.priority)
            self._busy[sight.at] = None
            self._spawn(self._take(sight, 1, exclusive=True))

    def _let_go_of_found(self) -> None:
        """What was found is old, but for what has come by a peek since."""
        # They last until they are seen again.
        seconds = max(self._discovery.sight_seconds, 2 * self._discovery.peek_seconds)
        is_young = self._clock.monotonic() - self._peeked_at <= seconds
        kept = [sight for sight in self._found if is_young and sight.at in self._peeked]
        self._at_gates.add_all(each for each in self._found if is_ours(each) and each not in kept)
        self._found = deque(kept)

    def _take_up_again(self, *, is_old: bool) -> None:
        """Try what waited at a gate that is open now; if that is old, look again as well."""
        opened = self._at_gates.opened() if self._room.free or not is_old else []
        if opened and is_old:
            self._look_afresh_in(0.0)
        if opened:
            self._found = _in_order([*opened, *self._found])

    def _put_aside(self, sight: PackCandidate) -> None:
        """A pack waits at a gate, and no others behind it."""
        self._at_gates.add(sight)
        if self._is_more and not self._found:
            # The look broke off because of such packs: what lies behind them was not seen.
            self._is_more = False
            self._look_afresh_in(0.0)

    async def _take(self, sight: PackCandidate, room: int, *, exclusive: bool = False) -> None:
        """Claim a pack and work on it to its end."""
        try:
            session, nonce = await self._work(sight, room, exclusive=exclusive)
            self._failed.pop(sight.at, None)
            if session is not None:
                self._note_exclusive(sight, session)
                self._context.watch.closed(session)
                if sight.pointer is not None and (session.is_gone or session.record is not None):
                    self._pointers.forget(sight.pointer.key)
                await self._learning.learn(sight, session, nonce)
        except (StoreError, UnreadableObject) as error:
            passing = isinstance(error, StoreError)
            self._warn(f"{'a claim failed' if passing else 'skipped a pack'}: {error}")
            failures = self._failed.pop(sight.at, 0) + 1
            self._failed[sight.at] = failures
            if len(self._failed) > _FAILED_MAX:
                del self._failed[next(iter(self._failed))]
            pause_ms = min(AGAIN_MS * 2**failures, _UNREADABLE_MS) if passing else _UNREADABLE_MS
            due_ms = int(self._access.now().latest * 1000) + pause_ms
            self._memory.note(sight, ledger=sight.ledger, due_ms=due_ms)
        finally:
            del self._busy[sight.at]
            self._exclusive.ended(sight.at)
            self._wake.set()

    def _note_exclusive(self, sight: PackCandidate, session: PackSession) -> None:
        """Remember a pack that has a task for a worker that holds nothing else."""
        handler = self._handlers.get(sight.at.type)
        if handler and session.needs_exclusive(attempts_max=handler.retry.attempts):
            seen = sight.seen and replace(sight.seen, has_ledger=True)
            self._exclusive.note(replace(sight, seen=seen, ledger=session.ledger[1]))

    async def _work(
        self, sight: PackCandidate, room: int, *, exclusive: bool
    ) -> tuple[PackSession | None, str]:
        """Claim and work; returns the nonce of the pack if there was something to claim.

        No hand if nothing of it may start now.
        """
        handler = self._handlers.get(sight.at.type)
        assert handler is not None, "only what has a handler is taken"
        leave = None
        try:
            leave = await admit(self._gates, sight, room)
        finally:
            unused = room - (leave.tasks if leave else 0)
            self._room.give(unused, priority=sight.priority)
        if leave is None:
            self._put_aside(sight)
            return None, ""
        room = leave.tasks
        context, incarnation = self._named_context(), self._incarnation
        store, layout, entropy = self._access.store, self._access.layout, self._access.entropy
        session = PackSession(store, layout, sight.at, entropy=entropy, incarnation=incarnation)
        slots = self._room.startable(room, priority=sight.priority)
        claim = context.claim(handler, tasks_max=room, slots=slots, exclusive=exclusive)
        try:
            claimed = await context.claim_surely(session, claim, sight.seen)
            leave.give(room - (len(claimed.attempts) if claimed else 0))
        except BaseException:
            leave.give(room)
            raise
        finally:
            self._room.give(room, priority=sight.priority)
        if claimed is None:
            return session, ""
        self._discovery.handled(sight.at)
        self._room.hold(len(claimed.attempts), priority=sight.priority)
        work = PackRunner(
            context, session, handler, leave=leave, spawn=self._spawn, priority=sight.priority
        )
        self._busy[sight.at] = work
        if self._stopping.is_set() or _is_misled(sight, claimed.pack):
            work.drain()
        self._worked_at = self._clock.monotonic()
        self._pace.reset()
        if self._is_more:
            self._look_afresh_in(0.0)
        else:
            self._look_in(self._pause_seconds())
        await work.run(claim.id, claimed)
        self._worked_at = self._clock.monotonic()
        if _is_misled(sight, claimed.pack):
            self._take_as_submitted(sight, claimed.pack, session.ledger[1])
            return None, ""
        return session, claimed.pack.nonce

    def _take_as_submitted(self, sight: PackCandidate, pack: Pack, ledger: Version | None) -> None:
        """Try a pack again under its own limit: that of another submit of its key led here."""
        assert sight.pointer is not None, "the key of a pack without a key says its limit"
        due_ms = int(self._access.now().latest * 1000) + POINTER_MS
        self._memory.note(sight, ledger=ledger, due_ms=due_ms, blind=False)
        pointer = replace(sight.pointer, priority=pack.priority, limit=pack.limit)
        self._found.appendleft(replace(sight, pointer=pointer, ledger=ledger))

    def _named_context(self) -> WorkerContext:
        """What claims are made with, under the names that this worker has now."""
        holder, incarnation = self._discovery.name, self._incarnation.id
        if (self._context.holder, self._context.incarnation) != (holder, incarnation):
            self._context = replace(self._context, holder=holder, incarnation=incarnation)
        return self._context

    async def _drain(self, background: Sequence[asyncio.Task[None]]) -> None:
        """Let what runs end, then give it back; each for a while."""
        works = [work for work in self._busy.values() if work is not None]
        for work in works:
            work.drain()
        if self._is_patient:
            await self._leave(background)
            await self._until_free(None, self._hurry)
        await self._until_free(self._settings.stop_seconds, self._at_once)
        for each in self._busy.values():
            if each is not None:
                each.give_back()
        await self._until_free(_FLUSH_SECONDS, None)
        if self._busy:
            _log.warning("failed to give back %d packs; their leases will expire", len(self._busy))
        if self._access.ringer and any(work.has_given_back for work in works):
            await self._access.ringer.ring()

    async def _until_free(self, seconds: float | None, sooner: asyncio.Event | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._busy and not (sooner and sooner.is_set()):
                    self._wake.clear()
                    await self._wake.wait()


def _is_misled(sight: PackCandidate, pack: Pack) -> bool:
    """Whether a pack has another limit than was asked, which its tasks must not start under.

    The pointer to a pack with a key may be that of another submit of the key (LIMIT-7).
    """
    return pack.limit != sight.limit


def _in_order(sights: Sequence[PackCandidate]) -> deque[PackCandidate]:
    """The most urgent first; among equals as they were."""
    return deque(sorted(sights, key=lambda each: -each.priority))
