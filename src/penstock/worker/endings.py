"""Tells the dispatcher how attempts have ended: many in one call, until it has answered.

One call is under way at a time, so what ends meanwhile goes with the next. A first end waits a
moment for others, unless nothing else runs here. An end is told until it is answered, for hours if
need be and beyond the lease: the dispatcher takes it as long as nobody has ended the attempt, and
answers the same words with the same answer, so a lost answer costs a repeat.

| answer | what follows |
|---|---|
| taken | the attempt is done |
| refused: not the current attempt, or over | nothing is published; the attempt is done |
| refused for its outputs | the attempt is still ours: its end is told as a failure instead |
| refused for their schema | the same, and it is not retried: another attempt would make the same |
| refused, because what it was merged with has moved | it is not over: it merges again, or waits |
| refused for columns that were only seen | again without the columns: functions have no schema |
| its token proves nothing | again with another token, a few times; then it is the reaper's |
| the whole call is refused | its ends are told one by one; one that is refused alone is a failure |
| none | again after a pause; after each failure with fewer ends, so that none spoils the others |

Called by `penstock.worker.worker`. A crash loses what was not answered: the leases run out, and the
tasks are run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.dispatcher.tasks.values import Why
from penstock.dispatcher.wire.work import CompleteAsk, EndAsk, TaskResult
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherError, DispatcherRefused, DispatcherUnavailable
from penstock.worker.attempt import Attempt
from penstock.worker.backoff import Backoff
from penstock.worker.client import UNSERVED, InternalClient

_log = logging.getLogger(__name__)

TASKS_MAX: Final = 200
"""How many ends one call tells: its transaction should be short."""
_BYTES_MAX: Final = 500_000
# These say something about a call, not about what is in it.
_NOT_JUDGED: Final = frozenset({401, 403, 404, 405, UNSERVED})
_UNPROVED: Final = frozenset({401, 403})
_UNPROVED_MAX: Final = 5
"""How often an end is told whose token proves nothing."""
_UNPROVED_SECONDS: Final = 3.0
_BROKEN_MAX: Final = 10


@dataclass(slots=True)
class _Ending:
    attempt: Attempt
    ask: EndAsk
    size_bytes: int
    is_alone: bool = False
    """Whether it is told by itself, because a call with others was refused."""
    unproved: int = 0
    """How often its token has proved nothing."""
    broken: int = 0
    """How often a call with it failed in this worker."""


class Endings:
    """The ends that have not been answered.

    `done` is called for each attempt when there is nothing more to tell of it, and `moved` for one
    that has to merge again, or to wait for another, before it can end; `is_idle` says whether
    nothing else runs that could end soon.
    """

    def __init__(
        self,
        client: InternalClient,
        *,
        clock: Clock,
        entropy: Entropy,
        gather_seconds: float,
        done: Callable[[Attempt], None],
        moved: Callable[[Attempt, EndAsk, TaskResult], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._client = client
        self._clock = clock
        self._backoff = Backoff(entropy)
        self._gather_seconds = gather_seconds
        self._done = done
        self._moved = moved
        self._is_idle = is_idle
        self._waiting: deque[_Ending] = deque()
        self._in_call: list[_Ending] = []
        self._most = TASKS_MAX
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_call)

    @property
    def is_failing(self) -> bool:
        """Whether the last call was not answered."""
        return self._backoff.failures > 0

    def add(self, attempt: Attempt, ask: EndAsk) -> None:
        """Tell of this end."""
        self._waiting.append(_Ending(attempt, ask, len(msgspec.json.encode(ask))))
        self._empty.clear()
        self._news.set()

    def forget(self, attempt: Attempt) -> None:
        """Do not tell of this attempt any more, if it is not being told of."""
        self._waiting = deque(each for each in self._waiting if each.attempt is not attempt)
        self._note_empty()

    async def told(self) -> None:
        """Return when nothing is left to tell."""
        await self._empty.wait()

    async def run(self) -> None:
        """Tell, until cancelled."""
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            await self._gather()
            self._in_call = self._next()
            if not self._in_call:
                continue
            try:
                pause_seconds = await self._tell(self._in_call)
            except Exception:  # noqa: BLE001 - what is wrong with one end keeps back no other
                pause_seconds = self._broken(self._in_call)
            if pause_seconds:
                await self._clock.sleep(pause_seconds)

    async def _gather(self) -> None:
        if self._is_idle() or len(self._waiting) >= self._most or self.is_failing:
            return
        await self._clock.sleep(self._gather_seconds)

    def _next(self) -> list[_Ending]:
        """The ends for the next call, taken out of those that wait."""
        taken: list[_Ending] = []
        size_bytes = 0
        while self._waiting and len(taken) < self._most:
            first = self._waiting[0]
            size_bytes += first.size_bytes
            if taken and (first.is_alone or size_bytes > _BYTES_MAX):
                break
            taken.append(self._waiting.popleft())
            if first.is_alone:
                break
        return taken

    async def _tell(self, endings: Sequence[_Ending]) -> float:
        """One call; returns how long to wait before the next."""
        again: list[_Ending] = []
        pause_seconds = 0.0
        for each in endings:
            if each.unproved:
                each.ask.token = each.attempt.token or None
        try:
            answer = await self._client.complete(CompleteAsk(tasks=[each.ask for each in endings]))
        except DispatcherUnavailable as error:
            again, pause_seconds = list(endings), self._unanswered(error)
        except DispatcherRefused as error:
            if error.status in _NOT_JUDGED:
                again, pause_seconds = list(endings), self._unanswered(error)
            else:
                again = self._refused(endings, error)
        else:
            if self._backoff.succeeded():
                _log.info("ends of tasks are answered again")
            self._most = min(TASKS_MAX, self._most * 2)
            for ending, result in zip(endings, answer.results, strict=True):
                again.extend(self._take(ending, result))
            if any(each.unproved for each in again):
                # Nobody is away: a dispatcher that does not know a key yet will, in a moment.
                pause_seconds = _UNPROVED_SECONDS
        self._waiting.extend(each for each in again if not each.attempt.is_lost)
        self._in_call = []
        self._note_empty()
        return pause_seconds

    def _broken(self, endings: Sequence[_Ending]) -> float:
        """A call failed here: its ends are told one by one, and each of them a few times."""
        told = "failed to report %d ends of tasks; they are retried"
        _log.error(told, len(endings), exc_info=True)
        for each in endings:
            each.is_alone = True
            each.broken += 1
            if each.broken >= _BROKEN_MAX:
                _log.error("%s: its end cannot be reported; its lease will run out", each.attempt)
                self._done(each.attempt)
            elif not each.attempt.is_lost:
                self._waiting.append(each)
        self._in_call = []
        self._note_empty()
        return self._backoff.next_seconds()

    def _unanswered(self, error: DispatcherError) -> float:
        if not self.is_failing:
            _log.warning("ends of tasks are kept until they are answered: %s", error.advice)
        self._most = max(1, self._most // 2)
        return self._backoff.next_seconds()

    def _refused(self, endings: Sequence[_Ending], error: DispatcherRefused) -> list[_Ending]:
        """The dispatcher does not understand a call: find out which of its ends it is."""
        if len(endings) > 1:
            for each in endings:
                each.is_alone = True
            return list(endings)
        return self._as_failure(endings[0], error.message)

    def _take(self, ending: _Ending, result: TaskResult) -> list[_Ending]:
        """What is left to tell after this answer."""
        attempt = ending.attempt
        if result.status < 400:
            end = ending.ask.failure or ending.ask.release
            if end is not None:
                _log.warning(
                    "%s %s, and is %s now: %s",
                    attempt,
                    "failed" if ending.ask.release is None else "was handed back",
                    result.task_status or "over",
                    end.reason.partition("\n")[0],
                )
            self._done(attempt)
            return []
        if result.why == Why.MOVED:
            self._moved(attempt, ending.ask, result)
            return []
        if result.why == Why.SCHEMA and attempt.has_observed_columns:
            told = "%s: its columns are not those of the dataset, which stay as they are: %s"
            _log.warning(told, attempt, result.detail or result.why)
            attempt.has_observed_columns = False
            for output in ending.ask.outputs:
                if output.facts is not None:
                    output.facts.columns = []
            return [ending]
        if result.why == Why.SCHEMA:
            return self._as_failure(ending, result.detail or result.why, is_retried=False)
        if result.status in _UNPROVED:
            return self._unproved(ending, result)
        if result.why == Why.OUTPUTS or result.status not in {404, 409}:
            return self._as_failure(ending, result.detail or result.why)
        _log.warning("%s publishes nothing: it is not ours any more (%s)", attempt, result.why)
        self._done(attempt)
        return []

    def _unproved(self, ending: _Ending, result: TaskResult) -> list[_Ending]:
        """A failure would prove no more, so the same is told again."""
        ending.unproved += 1
        ending.attempt.doubt(ending.ask.token or "")
        if ending.unproved >= _UNPROVED_MAX:
            told = "%s: its end is not accepted, and its lease will run out: %s"
            _log.error(told, ending.attempt, result.detail or result.why)
            self._done(ending.attempt)
            return []
        return [ending]

    def _as_failure(self, ending: _Ending, told: str, *, is_retried: bool = True) -> list[_Ending]:
        if ending.ask.failure is not None or ending.ask.release is not None:
            _log.error("%s: its end is not accepted: %s", ending.attempt, told)
            self._done(ending.attempt)
            return []
        ask = ending.attempt.failure(
            f"What it made was refused: {told}",
            is_retried=is_retried,
            log=ending.ask.log or "",
            metrics=ending.ask.metrics,
        )
        return [_Ending(ending.attempt, ask, len(msgspec.json.encode(ask)), ending.is_alone)]

    def _note_empty(self) -> None:
        if not self._waiting and not self._in_call:
            self._empty.set()
