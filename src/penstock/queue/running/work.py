"""A pack that a worker works on: its claims are kept alive, its tasks run, their endings written.

One `PackAtWork` a pack. It runs the tasks that were claimed, as far as there is room, with one
coroutine for each slot that they may have at once, and writes the ledger when there is a reason to:

- everything that it holds has ended;
- an ending has waited for others for `settle_seconds`, up to four times as long in large packs;
- nothing of the pack waits to start, there is room, and the pack has more;
- a third of a lease has passed: whoever is alive renews;
- a handler has said how far it is, and the last write is `PROGRESS_SECONDS` ago.

Whatever the reason, one swap does it all: it records the endings, renews the leases and claims
more. So in a pack of many a swap is shared by many tasks, and a pack of one costs one. Where
nothing is to be written, a worker that is set so renews with a touch (`heartbeats`).

A task starts only while its lease is surely live and its pack has not expired, and one that the
ledger no longer gives to this claim is interrupted. If the store is away, the same swap is tried
again until long after the lease has ended; an ending that nobody has overtaken still counts then. A
worker that dies leaves leases that end by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.claims import PackInHand
from penstock.queue.endings import (
    Ending,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
)
from penstock.queue.ledger import Progress
from penstock.queue.outcomes import Claimed, Swapped
from penstock.queue.pack import Pack
from penstock.queue.payloads import Payloads
from penstock.queue.running.attempts import Attempt
from penstock.queue.running.carrying import Carrier
from penstock.queue.running.gates import Pass
from penstock.queue.running.handlers import Handler, TaskContext
from penstock.queue.running.hands import GIVE_UP_SECONDS, Hands
from penstock.queue.running.progress import PROGRESS_SECONDS, Said, Voice
from penstock.queue.transitions import Claim, has_expired

Spawn = Callable[[Coroutine[Any, Any, None]], None]
"""Runs something beside, as long as the worker runs."""

_log = logging.getLogger(__name__)

_PAUSE_SECONDS_MAX: Final = 10.0


@dataclass(slots=True, eq=False)
class _Held:
    claim: str
    attempt: Attempt
    since: float
    pack: Pack
    place: int
    started: bool = False
    begun: bool = False
    """Its handler runs: what it rested on has been checked."""
    ending: Ending | None = None


class PackAtWork:
    """Some tasks of one pack, claimed by this worker. `run` ends when none is held any more."""

    def __init__(
        self, hands: Hands, hand: PackInHand, handler: Handler, *, leave: Pass, spawn: Spawn
    ) -> None:
        self.hand = hand
        self._hands = hands
        self._handler = handler
        self._leave = leave
        self._spawn = spawn
        self._clock = hands.store.clock.machine
        self._carrier = Carrier(Payloads(hands.store, hand.layout, hands.entropy), hand.at)
        self._settle_seconds = hands.settings.settle_seconds_of(hand.at.count)
        self._held: dict[int, _Held] = {}
        self._queue: deque[_Held] = deque()
        """What was claimed and has not had a slot yet, in the order of the pack."""
        self._runners = 0
        self._unstarted = 0
        """How many of those that are held have neither started nor ended."""
        self._unended = 0
        self._has_said = False
        """Whether a handler may have said something that is not written."""
        self._expires_ms: dict[str, int] = {}
        self._pack_expires_ms = 0
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended_at: float | None = None
        self._renewed_at = 0.0
        self._draining = False
        self._is_dry = False
        self._is_slow = False
        self._more: Claim | None = None
        self._failures = 0
        leave.watch(over=self._interrupt, freed=self._news.set)

    @property
    def has_more(self) -> bool:
        """Whether the pack has tasks that nobody holds."""
        return self.hand.claimable(attempts_max=self._handler.retry.attempts) > 0

    async def run(self, claim: str, claimed: Claimed) -> None:
        """Work on what was claimed, and on what more of the pack is claimed on the way."""
        self._begin(claim, claimed)
        try:
            while self._held:
                await self._wait()
                await self._write()
        finally:
            self._let_go()

    def drain(self) -> None:
        """Claim no more, and give back what has not started."""
        self._draining = True
        self._give_back_unstarted()
        self._news.set()

    def give_back(self) -> None:
        """Interrupt what runs and give it back."""
        self.drain()
        self._interrupt()

    def _interrupt(self) -> None:
        for held in self._held.values():
            held.attempt.give_back()

    def _give_back_unstarted(self, after_seconds: float = 0.0) -> None:
        """Others may have what waits longer than that for a slot: the tasks before it are slow."""
        until = self._clock.monotonic() - after_seconds
        for held in self._held.values():
            if not held.started and held.since <= until and held.ending is None:
                self._is_slow = True
                self._ended(held, GivenBack())

    def _begin(self, claim: str, claimed: Claimed) -> None:
        # A claim whose answer was lost for a while has less of its lease left.
        left_seconds = (claimed.expires_ms - self._hands.now_ms()) / 1000
        spent_seconds = max(0.0, self._hands.settings.task_lease_seconds - left_seconds)
        self._renewed_at = self._clock.monotonic() - spent_seconds
        self._expires_ms[claim] = claimed.expires_ms
        self._pack_expires_ms = claimed.pack.expires_ms
        since = self._clock.monotonic()
        for place, number in claimed.attempts.items():
            attempt = self._attempt(claimed, place, number)
            held = _Held(claim, attempt, since, claimed.pack, place)
            self._held[place] = held
            self._queue.append(held)
        self._unstarted += len(claimed.attempts)
        self._unended += len(claimed.attempts)
        for _ in range(min(len(self._queue), self._hands.room.concurrency - self._runners)):
            self._runners += 1
            self._spawn(self._run_all())
        if self._draining:
            self.drain()

    def _attempt(self, claimed: Claimed, place: int, number: int) -> Attempt:
        task = TaskContext(
            id=self.hand.at.task(place),
            type=self.hand.at.type,
            attempt=number,
            raw_input=claimed.pack.inputs[place],
            voice=Voice(self._heard),
        )
        return Attempt(
            self._handler,
            task,
            counted=number - claimed.given_back[place],
            now_ms=self._hands.now_ms,
            entropy=self._hands.entropy,
            children=self._hands.children,
        )

    async def _run_all(self) -> None:
        """One attempt after the other, each when there is a slot for it, until none waits."""
        slots = self._hands.room.slots
        try:
            while self._queue:
                async with slots:
                    if self._queue:  # Others may have taken the last one.
                        await self._run(self._queue.popleft())
        except BaseException:
            # The worker is torn down: what has not started never will.
            self._hands.room.give(len(self._queue))
            self._leave.give(len(self._queue))
            self._queue.clear()
            raise
        finally:
            self._runners -= 1

    async def _run(self, held: _Held) -> None:
        """One attempt, in a slot of its own."""
        room = self._hands.room
        is_gone = True
        try:
            if held.ending is not None:
                return
            held.started = True
            self._unstarted -= 1
            if not self._unstarted and room.free:
                self._news.set()  # Nothing waits any more: there may be more to claim.
            problem: Ending | None = Expired() if self._has_expired() else None
            if problem is None and held.place in held.pack.refs:
                problem = await self._carrier.bring(held.attempt.task, held.pack, held.place)
            if problem is not None or self._has_expired():
                self._ended(held, problem or Expired())
                return
            if not self._is_trusted(held) or not self._leave.begin():
                held.attempt.give_back()
            held.begun = True
            is_gone = False
            ended = await self._hands.watch.run(held.attempt, held.pack, clock=self._clock)
            is_gone = ended.released is None
            ending = ended.ending
            if self._carrier.is_large(ending):
                ending = await self._carrier.store(ending, held.pack, held.place)
            self._ended(held, ending)
            room.note_end(self.hand.at.type)
            if ended.released is not None:
                await self._until(ended.released)
                is_gone = True
        finally:
            room.give(1)
            if is_gone:
                self._leave.give(1)
            # Else this was cancelled, and the handler may go on: its leave must end by itself.

    async def _until(self, released: asyncio.Future[Any]) -> None:
        """The handler does not heed its interruption: its slot is not free yet."""
        room = self._hands.room
        room.stuck += 1
        try:
            if room.is_stuck:
                _log.error("all %d handlers are stuck: nothing can start here", room.concurrency)
                self._news.set()
            await asyncio.wait((released,))
        finally:
            room.stuck -= 1

    def _is_trusted(self, held: _Held) -> bool:
        return self._hands.now_ms() < self._expires_ms.get(held.claim, 0)

    def _has_expired(self) -> bool:
        if not self._pack_expires_ms:
            return False
        now = self._hands.store.clock.estimate()
        return now is not None and has_expired(self._pack_expires_ms, now)

    def _heard(self) -> None:
        """A handler has something to say, in whatever thread."""
        self._has_said = True
        with suppress(RuntimeError):  # The loop is closed: nobody writes it any more.
            self._loop.call_soon_threadsafe(self._news.set)

    def _said(self) -> dict[int, Said]:
        """What handlers have said that is not written yet."""
        if not self._has_said:
            return {}
        self._has_said = False  # Before looking: whoever speaks meanwhile is heard next time.
        said = ((place, held.attempt.task.voice.unsent) for place, held in self._held.items())
        unsent = {place: each for place, each in said if each is not None}
        self._has_said = self._has_said or bool(unsent)
        return unsent

    def _ended(self, held: _Held, ending: Ending | None) -> None:
        if held.ending is None:
            # What was lost has nothing to settle; the ledger refuses it.
            held.ending = ending or GivenBack()
            self._unended -= 1
            self._unstarted -= not held.started
            is_first = self._ended_at is None
            if is_first:
                self._ended_at = self._clock.monotonic()
            # While others wait for a slot, only the first ending sets a time for the next write.
            if is_first or not self._unstarted:
                self._news.set()

    async def _wait(self) -> None:
        """Until there is a reason to write."""
        while self._unended:
            room = self._hands.room
            if not self._unstarted and room.free and self._claimable() and self._leave.has_more():
                return
            seconds = self._next_at() - self._clock.monotonic()
            if seconds <= 0:
                return
            self._news.clear()
            timer = self._loop.call_later(seconds, self._news.set)
            try:
                await self._news.wait()
            finally:
                timer.cancel()

    def _next_at(self) -> float:
        """When the next write is due at the latest."""
        instants = [self._renewed_at + self._hands.settings.task_lease_seconds / 3]
        if self._ended_at is not None:
            instants.append(self._ended_at + self._settle_seconds)
        if self._said():
            instants.append(self._renewed_at + PROGRESS_SECONDS)
        retry = None if self._draining else self.hand.seconds_to_retry()
        if retry is not None:
            instants.append(self._clock.monotonic() + retry)
        return min(instants)

    async def _write(self) -> None:
        """One swap: endings, renewals, and more."""
        may_start = self._leave.may_start() and not self._hands.room.is_stuck
        self._give_back_unstarted(self._hands.settings.task_lease_seconds / 3 if may_start else 0.0)
        if not self._leave.may_run():
            self._interrupt()
        endings = {p: (h.claim, h.ending) for p, h in self._held.items() if h.ending is not None}
        live = {held.claim for held in self._held.values() if held.ending is None}
        more = self._more = self._more or self._next_claim()
        said = self._said()
        try:
            swapped = await self._send(endings, live, more, said)
        except (StoreError, UnreadableObject) as error:
            # It may have taken effect: the same claim is sent again, with its room.
            await self._failed(error)
            return
        self._failures = 0
        self._more = None
        self._ended_at = None
        for place, each in said.items():
            self._held[place].attempt.task.voice.sent(each)
        for place in endings:
            self._tell(place, self._held.pop(place), is_refused=place in swapped.refused)
        self._renew(live, swapped)
        taken = swapped.more
        if more is not None:
            unused = more.tasks_max - (len(taken.attempts) if taken else 0)
            self._hands.room.give(unused)
            self._leave.give(unused)
            if taken is not None:
                self._begin(more.id, taken)
        # What cannot be had now is found again by a look.
        self._is_dry = more is not None and taken is None

    async def _send(
        self,
        endings: Mapping[int, tuple[str, Ending]],
        live: set[str],
        more: Claim | None,
        said: Mapping[int, Said],
    ) -> Swapped:
        """A swap; a touch will do if nothing has to be written, and nothing waits to start."""
        lease_ms = self._hands.lease_ms
        if not (endings or more or said) and all(held.begun for held in self._held.values()):
            touched = await self.hand.touch(frozenset(live), lease_ms=lease_ms)
            if touched is not None:
                return touched
        reports = self._reports(said)
        return await self.hand.swap(
            endings, claims=live, lease_ms=lease_ms, more=more, reports=reports
        )

    def _reports(self, said: Mapping[int, Said]) -> dict[int, tuple[str, Progress]]:
        now_ms = self._hands.now_ms()
        return {place: (self._held[place].claim, each.at(now_ms)) for place, each in said.items()}

    def _next_claim(self) -> Claim | None:
        """What else to claim, with the room for it taken."""
        slots = self._hands.room.free
        room = self._hands.room.take(
            self._claimable(),
            type=self.hand.at.type,
            ahead_seconds=self._settle_seconds,
            blindly=not self._is_slow,
        )
        tasks = self._leave.more(room) if room else 0
        self._hands.room.give(room - tasks)
        if not tasks:
            return None
        return self._hands.claim(self._handler, tasks_max=tasks, slots=slots)

    def _tell(self, place: int, held: _Held, *, is_refused: bool) -> None:
        """Tell who watches, and log what a user would want to know."""
        ledger, _ = self.hand.ledger
        if ledger is not None and held.ending is not None and not is_refused:
            self._hands.watch.written(held.attempt, held.ending, ledger.tasks[place])
        if isinstance(held.ending, Succeeded) and not is_refused:
            return
        what = f"task {held.attempt.task.id}: attempt {held.attempt.task.attempt}"
        match held.ending:
            case _ if is_refused:
                _log.info("%s was overtaken by another", what)
            case Failed(failure):
                _log.warning("%s failed for good: %s: %s", what, failure.error, failure.message)
            case Retried(failure):
                _log.info("%s will be retried: %s: %s", what, failure.error, failure.message)
            case Rescheduled(due_ms, reason):
                seconds = max(0.0, (due_ms - self._hands.now_ms()) / 1000)
                _log.info("%s was rescheduled by %.0f s: %s", what, seconds, reason or "no reason")
            case _:
                pass

    def _claimable(self) -> int:
        may_start = self._leave.may_start() and not self._hands.room.is_contended
        if self._is_dry or self._draining or not may_start:
            return 0
        return self.hand.claimable(
            attempts_max=self._handler.retry.attempts,
            held=[place for place, held in self._held.items() if held.ending is None],
            slots=self._hands.room.free,
        )

    def _renew(self, live: set[str], swapped: Swapped) -> None:
        self._renewed_at = self._clock.monotonic()
        self._expires_ms = dict(swapped.expires_ms)
        for held in self._held.values():
            if held.claim in live and held.claim not in swapped.expires_ms:
                held.attempt.lose()
        for place in swapped.asked_to_stop & self._held.keys():
            self._held[place].attempt.ask_to_stop()
        if any(held.ending is not None for held in self._held.values()):
            self._ended_at = self._clock.monotonic()

    def _let_go(self) -> None:
        """Nothing more is written for what is held."""
        for held in self._held.values():
            held.attempt.lose()
            self._ended(held, GivenBack())
        self._held.clear()
        if self._more is not None:
            self._hands.room.give(self._more.tasks_max)
            self._leave.give(self._more.tasks_max)
            self._more = None

    async def _failed(self, error: StoreError | UnreadableObject) -> None:
        """The write failed: try again later, until there is no point in it any more."""
        self._failures += 1
        late_ms = self._hands.now_ms() - max(self._expires_ms.values(), default=0)
        if isinstance(error, UnreadableObject) or late_ms > GIVE_UP_SECONDS * 1000:
            _log.error(
                "pack %s is given up, its tasks will run again: %s", self.hand.at.path, error
            )
            self._let_go()
            return
        _log.warning("pack %s cannot be written, trying again: %s", self.hand.at.path, error)
        pause = min(_PAUSE_SECONDS_MAX, 0.25 * 2.0 ** min(self._failures, 10))
        await self._clock.sleep(self._hands.entropy.uniform(pause / 2, pause))
