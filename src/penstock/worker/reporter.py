"""Reports to the dispatcher: progress and events of running work, and how attempts ended.

`TaskReporter` is what running work reports through. Progress goes with the next heartbeat.
Events are sent until they are acknowledged, however long that takes: an event has the source's
own id, so a repeat is no second event. Only a refusal of the attempt ends this, and the attempt
with it. A token that has expired, because no heartbeat was answered for a while, is no such
refusal: the next heartbeat brings another. Credentials for some of the work's folders are
requested through `penstock.worker.sandbox`. Called by runtimes, from the event loop.

`CompletionReporter` reports the ends of attempts, many in one call. One call is under way at a
time, so what ends meanwhile goes with the next. A first completion waits a moment for others,
unless nothing else runs here. A completion is retried until it is answered, for hours if need
be and beyond the lease: the dispatcher takes it as long as nobody has ended the attempt, and
answers the same completion with the same answer, so a lost answer costs a retry.

| answer | what follows |
|---|---|
| taken | the attempt is done |
| refused: not the current attempt, or over | nothing is published; the attempt is done |
| refused for its outputs | the attempt is still ours: its end is reported as a failure instead |
| refused for their schema | the same, without a retry: another attempt would make the same |
| refused, because what it was merged with has changed | it merges again, or waits |
| refused for columns that the DAG does not declare | likewise |
| refused for columns that were only observed | again without them: functions have no schema |
| the token is not proved | again with another token, a few times; then it is the reaper's |
| the whole call is refused | its completions go one by one; one refused alone is a failure |
| none | again after a pause; after each failure with fewer, so that none spoils the others |

Called by `executor`. A crash loses what was not answered: the leases expire, and the tasks run
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.dispatcher.tasks.model import TaskRefusalReason
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    DispatcherError,
    DispatcherRefused,
    DispatcherUnavailable,
    WorkFailed,
)
from penstock.protocol.client import UNSERVED
from penstock.protocol.events import EventAsk, EventResult, TaskEventsAsk
from penstock.protocol.work import Assignment, CompleteAsk, EndAsk, NextClaim, TaskResult
from penstock.runtimes.base import AttemptWork, WorkEvent, progress_fault
from penstock.runtimes.secrets import TaskCredentials
from penstock.worker.attempt import InterruptReason, TaskAttempt
from penstock.worker.client import Backoff, InternalClient
from penstock.worker.sandbox import CredentialRequester

_log = logging.getLogger(__name__)

EVENTS_MAX: Final = 1000
"""How many events one call may have."""
_OVER: Final = frozenset({404, 409})
_EVENT_UNPROVED: Final = frozenset({401, 403})
_EXPIRED: Final = "token expired"
_EVENT_PROOFS_MAX: Final = 20
"""How often events are refused for their token before the work fails; about two minutes."""
_ASKS: Final = msgspec.json.Decoder(TaskEventsAsk)


class TaskReporter:
    """What the running work of one attempt reports through."""

    def __init__(
        self,
        attempt: TaskAttempt,
        work: AttemptWork,
        client: InternalClient,
        *,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._attempt = attempt
        self._work = work
        self._client = client
        self._clock = clock
        self._entropy = entropy
        self._is_warned = False
        """Whether the log says already that this attempt reports what cannot be passed on."""

    def progress(self, said: Mapping[str, Any]) -> None:
        """Keep it for the next heartbeat."""
        try:
            why = progress_fault(said)
        except TypeError as error:
            why = f"{error}."
        if not why:
            # A copy: the caller may go on to change it.
            encoded = msgspec.json.encode(said)
            self._attempt.progress = msgspec.json.decode(encoded, type=dict[str, Any])
        elif not self._is_warned:
            self._is_warned = True
            _log.warning("%s: its progress is not reported: %s", self._attempt, why)

    def begins(self) -> None:
        """Note in the journal that its code begins."""
        self._attempt.begins()

    def timed(self, *, is_running: bool) -> None:
        """Restart the time limit of the attempt, or suspend it."""
        self._attempt.time(is_running=is_running)

    async def emit(self, news: Sequence[WorkEvent]) -> str:
        """Send events; returns why the source is to pause, or nothing."""
        paused = ""
        for first in range(0, len(news), EVENTS_MAX):
            ask = self._ask(news[first : first + EVENTS_MAX])
            for result in await self._until_acknowledged(ask):
                if result.outcome == "refused":
                    raise WorkFailed(f"An event was refused: {result.why or 'no reason was given'}")
                paused = result.paused or paused
        return paused

    async def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        """Credentials for these folders."""
        minting = CredentialRequester(
            self._attempt, self._work, self._client, self._clock, self._entropy
        )
        minted = await minting.some(locations)
        return TaskCredentials(
            access_key=minted.access_key,
            secret_key=minted.secret_key,
            session_token=minted.session_token,
            expires_at=minted.expires_at,
            region=minted.region,
            endpoint=minted.endpoint,
        )

    def _ask(self, news: Sequence[WorkEvent]) -> TaskEventsAsk:
        ask = TaskEventsAsk(
            task_id=self._work.task_id,
            attempt=self._work.attempt,
            lease_token=self._attempt.assignment.lease_token,
            events=[self._event(each) for each in news],
        )
        try:
            return _ASKS.decode(msgspec.json.encode(ask))
        except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError) as error:
            raise WorkFailed(f"An event cannot be sent: {error}.") from error

    def _event(self, news: WorkEvent) -> EventAsk:
        place = self._work.outputs.get(news.output)
        if place is None:
            known = ", ".join(sorted(self._work.outputs)) or "none"
            raise WorkFailed(
                f"There is an event of {news.output!r}, which is no output of job {self._work.job};"
                f" its outputs: {known}.",
                is_retried=False,
            )
        return EventAsk(
            event_id=news.event_id,
            dataset=place.dataset,
            cursor=news.cursor,
            partition_key=news.partition_key,
            start=news.start,
            end=news.end,
            payload=dict(news.payload) if news.payload else None,
        )

    async def _until_acknowledged(self, ask: TaskEventsAsk) -> Sequence[EventResult]:
        backoff = Backoff(self._entropy)
        unproved = 0
        while not self._attempt.is_over:
            token = self._attempt.token
            try:
                return (await self._client.task_events(ask, token=token)).results
            except DispatcherUnavailable as error:
                if not backoff.failures:
                    _log.warning("%s: sending events failed, retrying: %s", self._attempt, error)
            except DispatcherRefused as error:
                if error.status in _OVER:
                    self._attempt.interrupt(InterruptReason.LOST)
                unproved += error.status in _EVENT_UNPROVED
                if error.status not in _EVENT_UNPROVED or unproved > _EVENT_PROOFS_MAX:
                    raise WorkFailed(f"Its events were refused: {error.message}") from error
                if error.kind != _EXPIRED:
                    self._attempt.doubt(token)
            await self._clock.sleep(backoff.next_seconds())
        raise WorkFailed("The attempt has ended; its events are not sent.")


TASKS_MAX: Final = 200
"""How many completions one call reports: its transaction should be short."""
_BYTES_MAX: Final = 500_000
# These say something about the call, not about its content.
_NOT_JUDGED: Final = frozenset({401, 403, 404, 405, UNSERVED})
_UNPROVED: Final = frozenset({401, 403})
_UNPROVED_MAX: Final = 5
"""How often a completion is sent whose token is rejected."""
_UNPROVED_SECONDS: Final = 3.0
_BROKEN_MAX: Final = 10


@dataclass(slots=True)
class _Completion:
    attempt: TaskAttempt
    ask: EndAsk
    size_bytes: int
    is_alone: bool = False
    """Whether it is sent by itself, because a call with others was refused."""
    unproved: int = 0
    """How often its token was rejected."""
    broken: int = 0
    """How often a call with it failed in this worker."""


class CompletionReporter:
    """The completions that have not been acknowledged.

    `done` is called for each attempt when there is nothing more to report of it, and `moved` for
    one that has to merge again, or to wait for another, before it can end; `is_idle` says whether
    nothing else runs that could end soon. A call also claims what `reserve` says there is room for,
    and `claimed` is told of what it has brought, however it ends, and when that was asked for.
    """

    def __init__(
        self,
        client: InternalClient,
        *,
        clock: Clock,
        entropy: Entropy,
        gather_seconds: float,
        done: Callable[[TaskAttempt], None],
        moved: Callable[[TaskAttempt, EndAsk, TaskResult], None],
        is_idle: Callable[[], bool],
        reserve: Callable[[], Sequence[NextClaim]] = lambda: (),
        claimed: Callable[[str, Sequence[Assignment], float], None] = lambda _, __, ___: None,
    ) -> None:
        self._client = client
        self._reserve = reserve
        self._claimed = claimed
        self._clock = clock
        self._backoff = Backoff(entropy)
        self._gather_seconds = gather_seconds
        self._done = done
        self._moved = moved
        self._is_idle = is_idle
        self._entropy = entropy
        self._claim_id = ""
        """Of the claim of a report that was not answered, which the next one repeats."""
        self._waiting: deque[_Completion] = deque()
        self._in_call: list[_Completion] = []
        self._most = TASKS_MAX
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_call)

    @property
    def is_due(self) -> bool:
        """Whether a call is about to begin."""
        return bool(self._waiting) and not self._in_call

    @property
    def is_failing(self) -> bool:
        """Whether the last call was not answered."""
        return self._backoff.failures > 0

    def add(self, attempt: TaskAttempt, ask: EndAsk) -> None:
        """Report this completion."""
        self._waiting.append(_Completion(attempt, ask, len(msgspec.json.encode(ask))))
        self._empty.clear()
        self._news.set()

    def forget(self, attempt: TaskAttempt) -> None:
        """Report nothing of this attempt, unless that is under way."""
        self._waiting = deque(each for each in self._waiting if each.attempt is not attempt)
        self._note_empty()

    async def drained(self) -> None:
        """Return when nothing is left to report."""
        await self._empty.wait()

    async def run(self) -> None:
        """Report, until cancelled."""
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            await self._gather()
            self._in_call = self._next()
            if not self._in_call:
                continue
            try:
                pause_seconds = await self._report(self._in_call)
            except Exception:  # noqa: BLE001 - a faulty completion keeps back no other
                pause_seconds = self._broken(self._in_call)
            if pause_seconds:
                await self._clock.sleep(pause_seconds)

    async def _gather(self) -> None:
        if self._is_idle() or len(self._waiting) >= self._most or self.is_failing:
            return
        await self._clock.sleep(self._gather_seconds)

    def _next(self) -> list[_Completion]:
        """The completions for the next call, taken out of those that wait."""
        taken: list[_Completion] = []
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

    async def _report(self, batch: Sequence[_Completion]) -> float:
        """One call; returns how long to wait before the next."""
        again: list[_Completion] = []
        pause_seconds = 0.0
        ask = self._ask(batch)
        claimed_of, claimed = "", list[Assignment]()
        asked_at = self._clock.monotonic()
        try:
            answer = await self._client.complete(ask)
            claimed_of, claimed = answer.claimed_of, answer.claimed
            self._claim_id = ""
        except DispatcherUnavailable as error:
            again, pause_seconds = list(batch), self._unanswered(error)
            if error.is_faulty:
                # Perhaps for what it has claimed. While calls fail none claims anything.
                self._claim_id = ""
        except DispatcherRefused as error:
            if error.status in _NOT_JUDGED:
                again, pause_seconds = list(batch), self._unanswered(error)
            else:
                again = self._refused(batch, error)
        else:
            if self._backoff.succeeded():
                _log.info("task completions are acknowledged again")
            self._most = min(TASKS_MAX, self._most * 2)
            for completion, result in zip(batch, answer.results, strict=True):
                again.extend(self._take(completion, result))
            if any(each.unproved for each in again):
                # No outage: a dispatcher that does not know a key yet will, in a moment.
                pause_seconds = _UNPROVED_SECONDS
        finally:
            self._claimed(claimed_of, claimed, asked_at)
        self._waiting.extend(each for each in again if not each.attempt.is_lost)
        self._in_call = []
        self._note_empty()
        return pause_seconds

    def _ask(self, batch: Sequence[_Completion]) -> CompleteAsk:
        for each in batch:
            if each.unproved:
                each.ask.token = each.attempt.token or None
        wanted = list(self._reserve())
        if wanted and not self._claim_id:
            self._claim_id = new_id(self._entropy)
        return CompleteAsk(
            tasks=[each.ask for each in batch], next=wanted, claim_id=self._claim_id or None
        )

    def _broken(self, batch: Sequence[_Completion]) -> float:
        """A call failed here: retry its completions one by one, each a few times."""
        message = "failed to report %d task completions; they will be retried"
        _log.error(message, len(batch), exc_info=True)
        for each in batch:
            each.is_alone = True
            each.broken += 1
            if each.broken >= _BROKEN_MAX:
                _log.error("%s: completion not reported; its lease will expire", each.attempt)
                self._done(each.attempt)
            elif not each.attempt.is_lost:
                self._waiting.append(each)
        self._in_call = []
        self._note_empty()
        return self._backoff.next_seconds()

    def _unanswered(self, error: DispatcherError) -> float:
        if not self.is_failing:
            _log.warning("failed to report task completions, retrying: %s", error.advice)
        self._most = max(1, self._most // 2)
        return self._backoff.next_seconds()

    def _refused(self, batch: Sequence[_Completion], error: DispatcherRefused) -> list[_Completion]:
        """The dispatcher refused a call: send one by one to find the faulty completion."""
        if len(batch) > 1:
            for each in batch:
                each.is_alone = True
            return list(batch)
        return self._as_failure(batch[0], error.message)

    def _take(self, completion: _Completion, result: TaskResult) -> list[_Completion]:
        """What is left to report after this answer."""
        attempt = completion.attempt
        if result.status < 400:
            end = completion.ask.failure or completion.ask.release
            if end is not None:
                _log.warning(
                    "%s %s, and is %s now: %s",
                    attempt,
                    "failed" if completion.ask.release is None else "was released",
                    result.task_status or "over",
                    end.reason.partition("\n")[0],
                )
            self._done(attempt)
            return []
        if result.why == TaskRefusalReason.MOVED:
            self._moved(attempt, completion.ask, result)
            return []
        if result.why == TaskRefusalReason.SCHEMA and attempt.has_observed_columns:
            message = "%s: its columns are not those of the dataset, which stay as they are: %s"
            _log.warning(message, attempt, result.detail or result.why)
            attempt.has_observed_columns = False
            for output in completion.ask.outputs:
                if output.facts is not None:
                    output.facts.columns = []
            return [completion]
        if result.why in (TaskRefusalReason.SCHEMA, TaskRefusalReason.UNDECLARED):
            return self._as_failure(completion, result.detail or result.why, is_retried=False)
        if result.status in _UNPROVED:
            return self._unproved(completion, result)
        if result.why == TaskRefusalReason.OUTPUTS or result.status not in {404, 409}:
            return self._as_failure(completion, result.detail or result.why)
        _log.warning("%s publishes nothing: its lease was lost (%s)", attempt, result.why)
        self._done(attempt)
        return []

    def _unproved(self, completion: _Completion, result: TaskResult) -> list[_Completion]:
        """A failure would have the same token, so the same is sent again."""
        completion.unproved += 1
        completion.attempt.doubt(completion.ask.token or "")
        if completion.unproved >= _UNPROVED_MAX:
            message = "%s: its completion was rejected; its lease will expire: %s"
            _log.error(message, completion.attempt, result.detail or result.why)
            self._done(completion.attempt)
            return []
        return [completion]

    def _as_failure(
        self, completion: _Completion, message: str, *, is_retried: bool = True
    ) -> list[_Completion]:
        if completion.ask.failure is not None or completion.ask.release is not None:
            _log.error("%s: its completion was rejected: %s", completion.attempt, message)
            self._done(completion.attempt)
            return []
        ask = completion.attempt.failure(
            f"Its outputs were refused: {message}",
            is_retried=is_retried,
            log=completion.ask.log or "",
            metrics=completion.ask.metrics,
        )
        return [
            _Completion(completion.attempt, ask, len(msgspec.json.encode(ask)), completion.is_alone)
        ]

    def _note_empty(self) -> None:
        if not self._waiting and not self._in_call:
            self._empty.set()
