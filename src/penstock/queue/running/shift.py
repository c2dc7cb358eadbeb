"""One run of a worker: it looks, claims, works, remembers, and in the end lets go.

| what | when |
|---|---|
| look | nothing found is left to try, and the pace allows it; rarely while there is no room |
| try a pack | there is room, and a look found it or its time has come (`Memory`) |
| work on a pack | claimed, until nothing of it is held (`PackAtWork`) |
| work on one task and nothing else | it is suspect, and on its last attempt (`Exclusive`) |
| repair, archive, do chores | every so often, in the slots that this worker guards (`Upkeep`) |

A worker claims only types that it has a handler for; others are left where they are and never
stand in the way. Passing failures of the store are tried again and logged; while the store
refuses, the worker waits and says so. What may start at all is for the gates to say
(`penstock.queue.running.gates`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.access import Access
from penstock.queue.claims import PackInHand
from penstock.queue.discovery.base import Discovery, Wanted
from penstock.queue.discovery.scan import Sight, View
from penstock.queue.draining import until_done
from penstock.queue.monitor import Monitor
from penstock.queue.owning.load import Load, Strain
from penstock.queue.places import PackAt
from penstock.queue.running.exclusive import OTHERS_SECONDS, Exclusive
from penstock.queue.running.gates import Gate, admit
from penstock.queue.running.handlers import Handlers
from penstock.queue.running.hands import Hands
from penstock.queue.running.isolated import Children
from penstock.queue.running.learning import AGAIN_MS, Learning
from penstock.queue.running.memory import Memory
from penstock.queue.running.observing import Watch
from penstock.queue.running.pointers import Pointers
from penstock.queue.running.polling import Pace
from penstock.queue.running.room import Room
from penstock.queue.running.saying import Saying
from penstock.queue.running.upkeep import Chore, Upkeep
from penstock.queue.running.waitlist import Waitlist, is_ours
from penstock.queue.running.work import PackAtWork
from penstock.queue.settings import WorkerSettings

_log = logging.getLogger(__name__)

_UNREADABLE_MS: Final = 600_000
_FAILED_MAX: Final = 1000
_FLUSH_SECONDS: Final = 10.0
_NEIGHBOURS_SECONDS_MIN: Final = 0.5
_NEIGHBOURS_SECONDS_MAX: Final = 10.0


class Shift:
    """What one run of a worker has found, holds and knows."""

    def __init__(
        self,
        access: Access,
        handlers: Handlers,
        discovery: Discovery,
        *,
        concurrency: int,
        settings: WorkerSettings,
        gates: Sequence[Gate] = (),
        chores: Sequence[Chore] = (),
        watch: Watch | None = None,
        children: Children | None = None,
    ) -> None:
        self._access, self._handlers, self._discovery = access, handlers, discovery
        self._settings = settings
        self._clock = access.store.clock.machine
        self._wake = asyncio.Event()
        self._room = Room(concurrency, clock=self._clock, freed=self._wake)
        store, name, entropy = access.store, discovery.name, access.entropy
        self._incarnation = access.incarnation
        self._hands = Hands(store, name, settings, entropy, self._room, watch or Watch(), children)
        self._memory, self._pointers = Memory(), Pointers()
        self._monitor = Monitor(
            store, access.layout, key_seconds=access.config.key_seconds, entropy=entropy
        )
        self._gates = tuple(gates)
        self._learning = Learning(access, discovery, self._memory, self._monitor)
        self._upkeep = Upkeep(
            access,
            discovery,
            self._monitor,
            chores,
            sweep_seconds=settings.sweep_seconds,
            found=self._look_now,
        )
        self._pace = Pace(settings.polling, entropy=access.entropy, clock=self._clock)
        self._found: deque[Sight] = deque()
        self._at_gates = Waitlist(gates, most=4 * concurrency)
        self._exclusive = Exclusive(self._clock, delay=self._seconds_for_others)
        self._found_at = self._began = 0.0
        self._is_more = self._was_full = self._is_patient = self._has_left = False
        self._busy: dict[PackAt, PackAtWork | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: dict[PackAt, int] = {}
        self._strain = Strain(self._clock)
        self._waiting: frozenset[str] = frozenset()
        self._say = Saying(self._clock)
        self._stopping, self._hurry, self._at_once = (asyncio.Event() for _ in range(3))
        self._later_ms: int | None = None
        self._look_at = self._worked_at = self._looked_at = self._clock.monotonic()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, and no handler runs."""
        return not self._busy and not self._room.held

    def stop(self, *, at_once: bool) -> None:
        """Claim nothing more; with `at_once`, give back what runs."""
        if at_once:
            _log.info("giving back what runs")
        else:
            seconds = self._settings.stop_seconds
            _log.info("stopping: %d at work may end within %.0f s", len(self._busy), seconds)
        self._hurry.set()
        self._stopping.set()
        self._wake.set()
        if at_once:
            self._at_once.set()

    def finish(self) -> None:
        """Claim nothing more; what runs may take as long as it needs, unless `stop` is called."""
        _log.info("nothing more to claim: %d at work", len(self._busy))
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
            failed=lambda error: self._say(f"whether the queue is empty cannot be told: {error}"),
        )
        self.finish()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _load(self) -> Load:
        """How busy this worker is."""
        idle_seconds = 0.0 if self._busy else self._clock.monotonic() - self._worked_at
        return self._strain.load(
            is_full=not self._room.free,
            waiting=self._waiting,
            too_many={at.type for at, work in self._busy.items() if work and work.has_more},
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
        self._look_at = self._clock.monotonic()
        self._wake.set()

    async def _search(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            self._start_claims()
            if not self._found and self._clock.monotonic() >= self._look_at:
                await self._look()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_wait()):
                    await self._wake.wait()

    def _seconds_to_wait(self) -> float:
        to_look = self._look_at - self._clock.monotonic()
        if not self._room.free:
            most = self._settings.polling.max_seconds
            return most if self._found else max(0.05, min(most, to_look))
        waits = [to_look]
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
        try:
            wanted = Wanted(self._worth, self._room.concurrency, has_room=self._room.free > 0)
            with self._strain.looking():
                view = await self._discovery.look(wanted)
        except StoreError as error:
            self._say(f"the queue cannot be looked at, trying again: {error}")
            self._look_in(self._pace.next_seconds())
            return
        self._take_in(view)
        if self._discovery.guarded():
            self._monitor.note(view.settled, looked)
        self._looked_at = self._clock.monotonic()
        # While full, what waits must only be known, so that others can be asked to take it.
        most = self._settings.polling.max_seconds
        self._look_in(self._pace.next_seconds() if self._room.free else most)
        # If there was enough, look again as soon as it is used up and has given something.
        tasks = sum(sight.at.count for sight in self._found)
        self._is_more = tasks >= self._room.concurrency

    def _look_in(self, seconds: float) -> None:
        """Look again after so long, or sooner if that was asked for."""
        self._look_at = min(self._look_at, self._clock.monotonic() + seconds)

    def _take_in(self, view: View) -> None:
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
                self._say(f"there are tasks of type {sight.at.type!r}, which has no handler here")
                self._strain.meet(sight.at.type)
        for key in view.foreign:
            self._say(f"an object that is not ours is left alone: {key}")

    async def _point_again(self, at: PackAt) -> None:
        """Write a pointer that is lost."""
        try:
            if await self._monitor.point_again(at):
                self._look_now()
        except (StoreError, UnreadableObject) as error:
            self._say(f"a pointer cannot be written again, a sweep will do it: {error}")

    def _worth(self, sight: Sight) -> int:
        """How many tasks of a pack this worker could do with, now."""
        return 0 if self._at_gates.is_shut(sight) else self._could_use(sight)

    def _could_use(self, sight: Sight) -> int:
        """How many it could do with, whether they may start now or not."""
        if sight.at in self._busy or self._handlers.get(sight.at.type) is None:
            return 0
        if sight.at in self._exclusive:
            return 0
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
            self._look_at = self._clock.monotonic()
        is_old = self._clock.monotonic() - self._found_at > self._discovery.sight_seconds
        if is_old:
            # Others will have taken it by now, unless nobody else is led to it.
            self._at_gates.add_all(filter(is_ours, self._found))
            self._found.clear()
        due = (s for s in self._memory.due(now_ms) if s.at not in self._busy)
        self._found.extend(sight for sight in due if sight.at not in self._exclusive)
        self._take_up_again(is_old=is_old)
        self._start_exclusive()
        while self._found and self._room.free:
            sight = self._found.popleft()
            if self._at_gates.is_shut(sight):
                self._put_aside(sight)
            elif sight.at not in self._busy:
                ahead = self._settings.settle_seconds_of(sight.at.count)
                room = self._room.take(sight.at.count, type=sight.at.type, ahead_seconds=ahead)
                self._busy[sight.at] = None
                self._spawn(self._take(sight, room))
        self._room.is_contended = bool(self._found)
        if self._room.free:
            self._waiting = frozenset()
            if self._was_full:
                least = self._settings.polling.min_seconds
                self._look_in(max(0.0, self._looked_at + least - self._clock.monotonic()))
        self._was_full = not self._room.free

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
            self._room.hold(1)
            self._busy[sight.at] = None
            self._spawn(self._take(sight, 1, exclusive=True))

    def _take_up_again(self, *, is_old: bool) -> None:
        """Try what waited at a gate that is open now; if that is old, look again as well."""
        opened = self._at_gates.opened() if self._room.free or not is_old else []
        if opened and is_old:
            self._look_in(0.0)
        if opened:
            self._found = deque(sorted([*opened, *self._found], key=lambda each: -each.priority))

    def _put_aside(self, sight: Sight) -> None:
        """A pack waits at a gate, and no others behind it."""
        self._at_gates.add(sight)
        if self._is_more and not self._found:
            # The look broke off because of such packs: what lies behind them was not seen.
            self._is_more = False
            self._look_in(0.0)

    async def _take(self, sight: Sight, room: int, *, exclusive: bool = False) -> None:
        """Claim a pack and work on it to its end."""
        try:
            hand, nonce = await self._work(sight, room, exclusive=exclusive)
            self._failed.pop(sight.at, None)
            if hand is not None:
                self._note_exclusive(sight, hand)
                self._hands.watch.closed(hand)
                if sight.pointer is not None and (hand.is_gone or hand.record is not None):
                    self._pointers.forget(sight.pointer.key)
                await self._learning.learn(sight, hand, nonce)
        except (StoreError, UnreadableObject) as error:
            passing = isinstance(error, StoreError)
            self._say(f"{'a claim failed' if passing else 'a pack is left alone'}: {error}")
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

    def _note_exclusive(self, sight: Sight, hand: PackInHand) -> None:
        """Remember a pack that has a task for a worker that holds nothing else."""
        handler = self._handlers.get(sight.at.type)
        if handler and hand.needs_exclusive(attempts_max=handler.retry.attempts):
            seen = sight.seen and replace(sight.seen, has_ledger=True)
            self._exclusive.note(replace(sight, seen=seen, ledger=hand.ledger[1]))

    async def _work(
        self, sight: Sight, room: int, *, exclusive: bool
    ) -> tuple[PackInHand | None, str]:
        """Claim and work; returns the nonce of the pack if there was something to claim.

        No hand if nothing of it may start now.
        """
        handler = self._handlers.get(sight.at.type)
        assert handler is not None, "only what has a handler is taken"
        leave = None
        try:
            leave = await admit(self._gates, sight, room)
        finally:
            self._room.give(room - (leave.tasks if leave else 0))
        if leave is None:
            self._put_aside(sight)
            return None, ""
        room = leave.tasks
        incarnation = self._incarnation
        hands = replace(self._hands, holder=self._discovery.name, incarnation=incarnation.id)
        hand = PackInHand(
            self._access.store,
            self._access.layout,
            sight.at,
            entropy=self._access.entropy,
            incarnation=incarnation,
        )
        slots = max(1, room + self._room.concurrency - self._room.held)
        claim = hands.claim(handler, tasks_max=room, slots=slots, exclusive=exclusive)
        try:
            claimed = await hands.claim_surely(hand, claim, sight.seen)
            leave.give(room - (len(claimed.attempts) if claimed else 0))
        except BaseException:
            leave.give(room)
            raise
        finally:
            self._room.give(room)
        if claimed is None:
            return hand, ""
        self._discovery.handled(sight.at)
        self._room.hold(len(claimed.attempts))
        work = PackAtWork(hands, hand, handler, leave=leave, spawn=self._spawn)
        self._busy[sight.at] = work
        if self._stopping.is_set():
            work.drain()
        self._worked_at = self._clock.monotonic()
        self._pace.reset()
        seconds = 0.0 if self._is_more else self._pace.next_seconds()
        self._look_in(seconds)
        await work.run(claim.id, claimed)
        self._worked_at = self._clock.monotonic()
        return hand, claimed.pack.nonce

    async def _drain(self, background: Sequence[asyncio.Task[None]]) -> None:
        """Let what runs end, then give it back; each for a while."""
        for work in self._busy.values():
            if work is not None:
                work.drain()
        if self._is_patient:
            await self._leave(background)
            await self._until_free(None, self._hurry)
        await self._until_free(self._settings.stop_seconds, self._at_once)
        for work in self._busy.values():
            if work is not None:
                work.give_back()
        await self._until_free(_FLUSH_SECONDS, None)
        if self._busy:
            _log.warning("%d packs could not be given back; their leases end", len(self._busy))

    async def _until_free(self, seconds: float | None, sooner: asyncio.Event | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._busy and not (sooner and sooner.is_set()):
                    self._wake.clear()
                    await self._wake.wait()
