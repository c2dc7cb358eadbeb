"""Observing a worker's attempts: metrics, user hooks and spans.

One `AttemptObserver` a worker. Attempts run through it, and it is given what was written. It
works at once and in memory, never raises, and changes no outcome.

    @worker.on("failure")
    async def page_somebody(event): ...

| event | when |
|---|---|
| start, stop | the worker begins to look for work; it has released everything |
| attempt | a handler is called now |
| success, failure | a task is settled so, and that is in the bucket |
| retry | an attempt failed, another will follow, and that is in the bucket |
| settled | a task is settled, in whatever way: also cancelled, and expired |

- A hook gets one event after the other, in order, beside everything else: a slow one delays only
  itself. It has `HOOK_SECONDS` for each; then it is interrupted, as a handler would be. `async
  def` hooks run on the loop, plain ones in a thread.
- What a hook raises is logged. One that is stuck `STUCK_MAX` times is called no more.
- At most `EVENTS_MAX` events wait for a hook; further ones are dropped, and that is logged. A
  worker that stops waits `HOOK_SECONDS` for its hooks. So hooks are for observing: what must not
  be missed belongs into a handler. A worker that is killed calls no hook, and no hook sees what
  another worker has settled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.queue.attempt_outcomes import (
    AttemptCancelled,
    AttemptOutcome,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
)
from penstock.queue.execution.attempt import AttemptResult, HandlerAttempt, HandlerThread
from penstock.queue.ledger import QueueTaskState, QueueTaskStatus
from penstock.queue.metrics import WorkerMetrics
from penstock.queue.pack import Pack
from penstock.queue.pack_session import PackSession
from penstock.queue.tracing import attempting, is_collected

HOOK_SECONDS: Final = 5.0
EVENTS_MAX: Final = 1000
STUCK_MAX: Final = 3
EVENTS: Final = ("start", "stop", "attempt", "success", "retry", "failure", "settled")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """What a hook is told. Of `start` and `stop`, only the worker."""

    what: str
    """The name of the event."""
    worker: str = ""
    task: str = ""
    """The id of the task."""
    type: str = ""
    attempt: int = 0
    status: str = ""
    """Where the task is now, in the words of `TaskView.status`."""
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    """How long the handler has run."""


Hook = Callable[[WorkerEvent], Any]


class Hooks:
    """The hooks of one worker."""

    def __init__(self) -> None:
        self._hooks: list[tuple[str, Hook]] = []
        self._lines: list[tuple[str, _Line]] = []
        self._told: frozenset[str] = frozenset()

    def add(self, event: str, hook: Hook) -> None:
        """Register a hook."""
        self.check(event)
        if not callable(hook):
            raise InvalidInput(f"The hook for {event!r} cannot be called: {hook!r}.")
        self._hooks.append((event, hook))

    def again(self, adapt: Callable[[Hook], Hook] | None = None) -> Hooks:
        """The same hooks for another worker, changed by `adapt`."""
        other = Hooks()
        for event, hook in self._hooks:
            other.add(event, adapt(hook) if adapt else hook)
        return other

    def check(self, event: str) -> None:
        """Raises `InvalidInput` for an event that never comes."""
        if event not in EVENTS:
            raise InvalidInput(
                f"{event!r} is not an event of a worker.",
                hint=f"Events are {', '.join(EVENTS)}.",
            )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hooks are told of events only inside of this."""
        loop = asyncio.get_running_loop()
        self._lines = [(event, _Line(event, hook)) for event, hook in self._hooks]
        self._told = frozenset(event for event, _ in self._lines)
        tasks = [loop.create_task(line.serve()) for _, line in self._lines]
        try:
            yield
        finally:
            for _, line in self._lines:
                line.close()
            if tasks:
                await asyncio.wait(tasks, timeout=HOOK_SECONDS)
            for task in tasks:
                task.cancel()
            self._lines = []
            self._told = frozenset()

    def is_told(self, event: str) -> bool:
        """Whether anybody is told of this event now."""
        return event in self._told

    def tell(self, event: WorkerEvent) -> None:
        """Have the hooks of this event called, soon."""
        for name, line in self._lines:
            if name == event.what:
                line.put(event)


class _Line:
    """The events that wait for one hook."""

    def __init__(self, event: str, hook: Hook) -> None:
        self._name = f"the hook {getattr(hook, '__qualname__', hook)!s} for {event!r}"
        self._hook = hook
        self._waiting: asyncio.Queue[WorkerEvent | None] = asyncio.Queue(EVENTS_MAX)
        self._dropped = 0
        self._stuck: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    def put(self, event: WorkerEvent) -> None:
        if self._is_closed or self._waiting.full():
            self._dropped += 1
            if self._dropped == 1:
                _log.warning("%s is too slow: events are dropped", self._name)
        else:
            self._waiting.put_nowait(event)

    def close(self) -> None:
        """There will be no more."""
        self._is_closed = True
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def serve(self) -> None:
        """Call the hook for one event after the other, to the last."""
        while (event := await self._waiting.get()) is not None:
            if len(self._stuck) < STUCK_MAX:
                await self._call(event)

    async def _call(self, event: WorkerEvent) -> None:
        loop = asyncio.get_running_loop()
        thread = None
        if inspect.iscoroutinefunction(self._hook):
            body = loop.create_task(self._await(event))
        else:
            thread = HandlerThread(lambda: self._plain(event), nothing=None)
            body = loop.create_task(thread.run())
        try:
            await asyncio.wait((body,), timeout=HOOK_SECONDS)
        finally:
            if not body.done():
                self._interrupt(body, thread)

    def _interrupt(self, body: asyncio.Task[None], thread: HandlerThread[None] | None) -> None:
        _log.error("%s did not end within %g s", self._name, HOOK_SECONDS)
        if thread is None:
            body.cancel()
        else:
            thread.tell(TimeoutError)
        self._stuck.add(body)
        body.add_done_callback(self._stuck.discard)
        if len(self._stuck) >= STUCK_MAX:
            _log.error("%s is stuck, and will not be called again", self._name)

    async def _await(self, event: WorkerEvent) -> None:
        try:
            await self._hook(event)
        except Exception:  # noqa: BLE001 - it may raise anything, and changes nothing
            _log.exception("%s failed", self._name)

    def _plain(self, event: WorkerEvent) -> None:
        try:
            self._hook(event)
        except TimeoutError:
            _log.warning("%s was interrupted", self._name)
        except Exception:  # noqa: BLE001 - it may raise anything, and changes nothing
            _log.exception("%s failed", self._name)


_EVENTS: Final = {QueueTaskStatus.SUCCEEDED: "success", QueueTaskStatus.FAILED: "failure"}


class AttemptObserver:
    """Watches for one worker."""

    def __init__(self, *, hooks: Hooks | None = None, metrics: WorkerMetrics | None = None) -> None:
        self._worker = ""
        self._hooks = hooks or Hooks()
        self._metrics = metrics or WorkerMetrics()

    @asynccontextmanager
    async def watching(self, worker: str) -> AsyncIterator[None]:
        """Hooks are told of what happens inside of this, of its beginning and of its end."""
        self._worker = worker
        async with self._hooks.running():
            self._hooks.tell(WorkerEvent(what="start", worker=worker))
            try:
                yield
            finally:
                self._hooks.tell(WorkerEvent(what="stop", worker=worker))

    async def run(self, attempt: HandlerAttempt, pack: Pack, *, clock: Clock) -> AttemptResult:
        """Run an attempt."""
        if attempt.is_interrupted:
            return await attempt.run()  # It never begins.
        task = attempt.task
        if attempt.counted == 1:
            due_ms = max(pack.submitted_ms, pack.due_ms)
            self._metrics.note_start(task.type, max(0, attempt.now_ms() - due_ms) / 1000)
        self._tell_of(attempt, "attempt", QueueTaskStatus.CLAIMED)
        self._metrics.running[task.type] += 1
        began = clock.monotonic()
        try:
            ended = await (_traced(attempt, pack) if is_collected() else attempt.run())
        finally:
            self._metrics.running[task.type] -= 1
        attempt.seconds = clock.monotonic() - began
        self._metrics.note_end(task.type, _word(ended.ending), attempt.seconds)
        return ended

    def written(
        self, attempt: HandlerAttempt, ending: AttemptOutcome, state: QueueTaskState
    ) -> None:
        """How an attempt ended is in the bucket; `state` is the task's now."""
        if state.status.settled:
            self._settled(attempt.task.type, state.status)
            if state.status in _EVENTS:
                self._tell_of(attempt, _EVENTS[state.status], state.status, state)
            self._tell_of(attempt, "settled", state.status, state)
        elif isinstance(ending, Retried):
            self._tell_of(attempt, "retry", QueueTaskStatus.RETRYING, state)

    def closed(self, session: PackSession) -> None:
        """What these hands have settled without an attempt."""
        ledger, _ = session.ledger
        for place, status in session.closed.items():
            self._settled(session.at.type, status)
            state = ledger.tasks[place] if ledger else QueueTaskState(status=status)
            for what in (_EVENTS.get(status), "settled"):
                if what is not None:
                    self._hooks.tell(
                        WorkerEvent(
                            what=what,
                            worker=self._worker,
                            task=session.at.task(place),
                            type=session.at.type,
                            attempt=state.attempt,
                            status=status.word,
                            error=state.failure.error if state.failure else "",
                            message=state.failure.message if state.failure else "",
                        )
                    )

    def _settled(self, type: str, status: QueueTaskStatus) -> None:
        self._metrics.tasks[type, status.word] += 1

    def _tell_of(
        self,
        attempt: HandlerAttempt,
        what: str,
        status: QueueTaskStatus,
        state: QueueTaskState | None = None,
    ) -> None:
        if not self._hooks.is_told(what):
            return
        task = attempt.task
        failure = state.failure if state else None
        event = WorkerEvent(
            what=what,
            worker=self._worker,
            task=task.id,
            type=task.type,
            attempt=task.attempt,
            seconds=attempt.seconds,
            status=status.word,
            error=failure.error if failure else "",
            message=failure.message if failure else "",
        )
        self._hooks.tell(event)


async def _traced(attempt: HandlerAttempt, pack: Pack) -> AttemptResult:
    """Run an attempt in a span of its own."""
    task = attempt.task
    named: dict[str, str | int] = {"penstock.task": task.id, "penstock.attempt": task.attempt}
    with attempting(type=task.type, trace=pack.trace, attributes=named) as span:
        attempt.trace = span.traceparent
        ended = await attempt.run()
        span.end(ended.ending)
    return ended


def _word(ending: AttemptOutcome | None) -> str:
    """The name of an ending, for figures."""
    return "lost" if ending is None else _ENDINGS[type(ending)]


_ENDINGS: Final = {
    Succeeded: "succeeded",
    Failed: "failed",
    Retried: "retried",
    Rescheduled: "rescheduled",
    GivenBack: "given_back",
    AttemptCancelled: "stopped",
    Expired: "expired",
}
