"""Who watches a worker's attempts and what becomes of them: figures, hooks and spans.

One `Watch` a worker. Whoever runs attempts runs them through it, and tells it what was written.
What it does is done at once and in memory; it never raises, and changes no outcome.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from penstock.kernel.clock import Clock
from penstock.queue.claims import PackInHand
from penstock.queue.endings import (
    Ending,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Stopped,
    Succeeded,
)
from penstock.queue.ledger import Status, TaskState
from penstock.queue.metrics import Metrics
from penstock.queue.pack import Pack
from penstock.queue.running.attempts import Attempt, Ended
from penstock.queue.running.hooks import Hooks, WorkerEvent
from penstock.queue.tracing import attempting, is_collected
from penstock.queue.views import WORDS

_EVENTS: Final = {Status.SUCCEEDED: "success", Status.FAILED: "failure"}


class Watch:
    """Watches for one worker."""

    def __init__(self, *, hooks: Hooks | None = None, metrics: Metrics | None = None) -> None:
        self._worker = ""
        self._hooks = hooks or Hooks()
        self._metrics = metrics or Metrics()

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

    async def run(self, attempt: Attempt, pack: Pack, *, clock: Clock) -> Ended:
        """Run an attempt."""
        if attempt.is_interrupted:
            return await attempt.run()  # It never begins.
        task = attempt.task
        if attempt.counted == 1:
            due_ms = max(pack.submitted_ms, pack.due_ms)
            self._metrics.note_start(task.type, max(0, attempt.now_ms() - due_ms) / 1000)
        self._tell_of(attempt, "attempt", Status.CLAIMED)
        self._metrics.running[task.type] += 1
        began = clock.monotonic()
        try:
            ended = await (_traced(attempt, pack) if is_collected() else attempt.run())
        finally:
            self._metrics.running[task.type] -= 1
        attempt.seconds = clock.monotonic() - began
        self._metrics.note_end(task.type, _word(ended.ending), attempt.seconds)
        return ended

    def written(self, attempt: Attempt, ending: Ending, state: TaskState) -> None:
        """How an attempt ended is in the bucket; `state` is the task's now."""
        if state.status.settled:
            self._settled(attempt.task.type, state.status)
            if state.status in _EVENTS:
                self._tell_of(attempt, _EVENTS[state.status], state.status, state)
            self._tell_of(attempt, "settled", state.status, state)
        elif isinstance(ending, Retried):
            self._tell_of(attempt, "retry", Status.RETRYING, state)

    def closed(self, hand: PackInHand) -> None:
        """What these hands have settled without an attempt."""
        ledger, _ = hand.ledger
        for place, status in hand.closed.items():
            self._settled(hand.at.type, status)
            state = ledger.tasks[place] if ledger else TaskState(status=status)
            for what in (_EVENTS.get(status), "settled"):
                if what is not None:
                    self._hooks.tell(
                        WorkerEvent(
                            what=what,
                            worker=self._worker,
                            task=hand.at.task(place),
                            type=hand.at.type,
                            attempt=state.attempt,
                            status=WORDS[status],
                            error=state.failure.error if state.failure else "",
                            message=state.failure.message if state.failure else "",
                        )
                    )

    def _settled(self, type: str, status: Status) -> None:
        self._metrics.tasks[type, WORDS[status]] += 1

    def _tell_of(
        self, attempt: Attempt, what: str, status: Status, state: TaskState | None = None
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
            status=WORDS[status],
            error=failure.error if failure else "",
            message=failure.message if failure else "",
        )
        self._hooks.tell(event)


async def _traced(attempt: Attempt, pack: Pack) -> Ended:
    """Run an attempt in a span of its own."""
    task = attempt.task
    named: dict[str, str | int] = {"penstock.task": task.id, "penstock.attempt": task.attempt}
    with attempting(type=task.type, trace=pack.trace, attributes=named) as span:
        attempt.trace = span.traceparent
        ended = await attempt.run()
        span.end(ended.ending)
    return ended


def _word(ending: Ending | None) -> str:
    """The name of an ending, for figures."""
    return "lost" if ending is None else _ENDINGS[type(ending)]


_ENDINGS: Final = {
    Succeeded: "succeeded",
    Failed: "failed",
    Retried: "retried",
    Rescheduled: "rescheduled",
    GivenBack: "given_back",
    Stopped: "stopped",
    Expired: "expired",
}
