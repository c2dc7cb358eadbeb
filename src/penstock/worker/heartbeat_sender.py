"""Sends heartbeats, which keep leases alive: many attempts in one call, from a task of their own.

Each attempt is in three heartbeats in the time that its job allows a worker to be silent. Those
that are past half of their own interval go along with one that is due, so that attempts which
began at different times soon share calls. Until an attempt is *acknowledged*, by a result that
extends its lease, its heartbeats come sooner, for its lease is short: a third of it is the
interval, and what a call may take, whatever came of the one before. They have a lane of their own,
so that a call of others that hangs keeps back none of them. A short task ends before its first one.

A result may ask to cancel a task, and may refuse one: then another attempt has taken over, or
the task is over, and the attempt is interrupted. No answer means nothing: the work goes on and
the call is retried, beyond the lease too, for a lease that nobody has ended is still ours. Nor
does an answer that our token is not proved: the next call brings the token before it. A result
may bring the next capability token of an attempt; one that brings none leaves the current one.
A call has no more than `_BYTES_MAX`, for tokens may be long and many; the rest goes with the
next. The pauses between retries stay below the interval, and so does the timeout of a call, so
that a dispatcher that hangs costs no lease.

Runs on the worker's event loop. Runtimes keep it free: they run users' code elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherError, DispatcherRefused
from penstock.protocol.work import HEARTBEATS, HeartbeatAsk, HeldAsk, TaskResult
from penstock.worker.attempt import InterruptReason, TaskAttempt
from penstock.worker.client import CALL_SECONDS, Backoff, InternalClient

_log = logging.getLogger(__name__)

TASKS_MAX: Final = 500
"""How many attempts one call may be about."""
_BYTES_MAX: Final = 500_000
"""How long a call may be, unless it is about one attempt."""
_PAUSE_SECONDS_MIN: Final = 0.05
_CALL_SECONDS_MIN: Final = 1.0
_REFUSED: Final = frozenset({404, 409})
_UNPROVED: Final = frozenset({401, 403})


@dataclass(slots=True)
class _Held:
    attempt: TaskAttempt
    pause_seconds: float
    due_at: float
    later_seconds: float
    """The pause when it is acknowledged."""
    in_call: bool = False

    @property
    def is_young(self) -> bool:
        """Whether it has yet to be acknowledged."""
        is_wanted = self.attempt.assignment.acknowledge_seconds > 0
        return is_wanted and not self.attempt.is_acknowledged.is_set()


@dataclass(slots=True)
class _Lane:
    """Calls one after the other: of what is acknowledged, or of what is not."""

    is_young: bool
    backoff: Backoff
    news: asyncio.Event


class HeartbeatSender:
    """The attempts whose leases are kept alive."""

    def __init__(self, client: InternalClient, *, clock: Clock, entropy: Entropy) -> None:
        self._client = client
        self._clock = clock
        self._lanes = [_Lane(each, Backoff(entropy), asyncio.Event()) for each in (True, False)]
        self._held: dict[int, _Held] = {}

    def hold(self, attempt: TaskAttempt) -> TaskAttempt | None:
        """Keep an attempt alive; returns an earlier one of the same task, which is let go.

        Where the attempt waits for being acknowledged, that is done at once.
        """
        seconds = HEARTBEATS.pause_seconds(attempt.assignment.heartbeat_seconds)
        pause = max(_PAUSE_SECONDS_MIN, seconds)
        first = pause
        if attempt.assignment.acknowledge_seconds:
            first = HEARTBEATS.pause_seconds(attempt.assignment.acknowledge_seconds)
            first = min(pause, max(_PAUSE_SECONDS_MIN, first))
        before = self._held.get(attempt.task_id)
        due_at = self._clock.monotonic() + (0.0 if attempt.is_asked else first)
        self._held[attempt.task_id] = _Held(attempt, first, due_at, later_seconds=pause)
        self._tell()
        return before.attempt if before is not None else None

    def release(self, attempt: TaskAttempt) -> None:
        """Send no more heartbeats of an attempt."""
        held = self._held.get(attempt.task_id)
        if held is not None and held.attempt is attempt:
            del self._held[attempt.task_id]

    async def run(self) -> None:
        """Send heartbeats, until cancelled."""
        async with asyncio.TaskGroup() as lanes:
            for lane in self._lanes:
                lanes.create_task(self._run(lane))

    async def _run(self, lane: _Lane) -> None:
        while True:
            lane.news.clear()
            seconds = self._seconds_to_wait(lane)
            if seconds is None or seconds > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await lane.news.wait()
                continue
            due = self._due(lane)
            try:
                is_answered = await self._beat(due, lane)
            except Exception:  # noqa: BLE001 - what is wrong with one attempt costs no other its lease
                _log.exception("heartbeat failed in the worker; it will be retried")
                is_answered = False
                self._forget_progress(due)
            finally:
                for each in due:
                    each.in_call = False
                self._tell()
            if not is_answered:
                pauses = (each.pause_seconds for each in self._of(lane))
                most = min(pauses, default=_PAUSE_SECONDS_MIN)
                await self._clock.sleep(lane.backoff.next_seconds(most_seconds=most))

    def _tell(self) -> None:
        for lane in self._lanes:
            lane.news.set()

    def _of(self, lane: _Lane) -> Sequence[_Held]:
        held = self._held.values()
        return [each for each in held if each.is_young is lane.is_young and not each.in_call]

    def _seconds_to_wait(self, lane: _Lane) -> float | None:
        first = min((each.due_at for each in self._of(lane)), default=None)
        return None if first is None else first - self._clock.monotonic()

    def _due(self, lane: _Lane) -> Sequence[_Held]:
        """What goes with one call: of the others as well, unless these may be what is wrong."""
        now = self._clock.monotonic()
        lanes = self._lanes if lane.is_young and not lane.backoff.failures else [lane]
        along = [
            each
            for one in lanes
            for each in self._of(one)
            if each.due_at - each.pause_seconds / 2 <= now
        ]
        return sorted(along, key=lambda each: (not each.is_young, each.due_at))[:TASKS_MAX]

    async def _beat(self, due: Sequence[_Held], lane: _Lane) -> bool:
        """One call; returns whether it was answered."""
        asks = _fitting(due)
        due = due[: len(asks)]
        shortest = min(each.pause_seconds for each in due)
        said = [each.attempt.progress for each in due]
        for each in due:
            each.in_call = True
        try:
            answer = await self._client.heartbeat(
                HeartbeatAsk(tasks=asks),
                call_seconds=min(CALL_SECONDS, max(_CALL_SECONDS_MIN, shortest)),
            )
        except DispatcherError as error:
            # A refusal of the whole call is not about an attempt: something between us and the
            # dispatcher is wrong, and may be put right.
            if not lane.backoff.failures:
                _log.warning("heartbeat failed, retrying; tasks continue: %s", error.advice)
            if isinstance(error, DispatcherRefused):
                self._forget_progress(due)
            return False
        if lane.backoff.succeeded():
            _log.info("heartbeats succeed again")
        for held, ask, words, result in zip(due, asks, said, answer.results, strict=True):
            if result.status < 400:
                held.attempt.is_acknowledged.set()
                held.pause_seconds = held.later_seconds
            held.due_at = self._clock.monotonic() + held.pause_seconds
            self._take(held.attempt, ask, result)
            if held.attempt.progress is words:
                held.attempt.progress = None
        return True

    def _forget_progress(self, due: Sequence[_Held]) -> None:
        """Progress is all that work itself puts into a call, so it may be what is wrong with it."""
        for each in due:
            each.attempt.progress = None

    def _take(self, attempt: TaskAttempt, ask: HeldAsk, result: TaskResult) -> None:
        attempt.renew(result.token)
        if result.status in _UNPROVED:
            attempt.doubt(ask.token or "")
            _log.warning("%s: the token of its heartbeat was rejected: %s", attempt, result.detail)
        elif result.status in _REFUSED:
            self.release(attempt)
            # If it has ended, the answer to its completion decides, which may be on its way.
            if not attempt.is_over:
                _log.warning("%s is interrupted: its lease was lost (%s)", attempt, result.why)
                attempt.interrupt(InterruptReason.LOST)
        elif result.cancel_asked and not attempt.is_over:
            _log.info("%s is cancelled", attempt)
            attempt.interrupt(InterruptReason.CANCELLED)


def _fitting(due: Sequence[_Held]) -> list[HeldAsk]:
    """The heartbeats of the first of these: as many as fit into one call, and at least one."""
    asks: list[HeldAsk] = []
    size_bytes = 0
    for each in due:
        ask = each.attempt.held_ask()
        size_bytes += len(msgspec.json.encode(ask))
        if asks and size_bytes > _BYTES_MAX:
            break
        asks.append(ask)
    return asks
