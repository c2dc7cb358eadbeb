"""Waiting by polling until something is over.

The dispatcher pushes nothing to clients. Pauses grow to `PAUSE_SECONDS_MAX` and are spread, so
that a thousand waiting clients are a few hundred requests a second and no wave. A dispatcher
that is silent for less than `OUTAGE_SECONDS` interrupts nothing; one that is not there at the
first request is reported at once. Every wait ends: with what was waited for, or with
`NotSettled`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, NotSettled
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import BackfillAnswer, JobAnswer, StatusAnswer, TaskAnswer

WAIT_SECONDS: Final = 3600.0
"""How long a wait lasts if nobody says."""
PAUSE_SECONDS: Final = 0.2
PAUSE_SECONDS_MAX: Final = 3.0
OUTAGE_SECONDS: Final = 120.0
_GROWTH: Final = 1.4

Seen = TypeVar("Seen")

OVER: Final = (TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED)
"""What a task is when nothing more becomes of it by itself."""


@dataclass(frozen=True, slots=True)
class Wait(Generic[Seen]):
    """How to look, when it is over, and what is said if it is not in time."""

    look: Callable[[], Awaitable[Seen]]
    is_over: Callable[[Seen], bool]
    left: Callable[[Seen], str]
    """What is not over yet, as a sentence."""

    async def run(
        self,
        *,
        clock: Clock,
        entropy: Entropy,
        timeout_seconds: float,
        told: Callable[[Seen], None] | None = None,
    ) -> Seen:
        """Wait; `told` is called with everything that is seen."""
        if not timeout_seconds >= 0:
            raise InvalidInput(f"A timeout of {timeout_seconds} s is invalid.")
        received_at = clock.monotonic()
        ends_at = received_at + timeout_seconds
        pause = PAUSE_SECONDS
        found = await self.look()
        is_news = True
        while True:
            if is_news and told is not None:
                told(found)
            if is_news and self.is_over(found):
                return found
            left_seconds = ends_at - clock.monotonic()
            if left_seconds <= 0:
                raise NotSettled(self.left(found), hint="Wait longer, or look again later.")
            await clock.sleep(min(left_seconds, pause * entropy.uniform(0.7, 1.3)))
            pause = min(pause * _GROWTH, PAUSE_SECONDS_MAX)
            try:
                found, is_news, received_at = await self.look(), True, clock.monotonic()
            except DispatcherUnavailable:
                is_news = False
                if clock.monotonic() - received_at > OUTAGE_SECONDS:
                    raise


def backfill_is_over(backfill: BackfillAnswer) -> bool:
    """Whether nothing more becomes of a backfill, and of its tasks."""
    return backfill.state in ("done", "cancelled") and not backfill.open


def backfill_left(backfill: BackfillAnswer) -> str:
    ended = backfill.planned - backfill.open
    return (
        f"The backfill {backfill.id} of {backfill.job} is not over: it is {backfill.state},"
        f" and {ended:,} of {backfill.partitions:,} partitions have ended."
    )


def task_is_over(task: TaskAnswer) -> bool:
    """Whether a task has ended."""
    return task.task.status in OVER


def task_left(task: TaskAnswer) -> str:
    return f"The task {task.task.id} of {task.task.job} is not over: it is {task.task.status}."


class IdleCheck:
    """Whether there is nothing to do, seen twice in a row.

    Work goes from events to tasks to events; a look that is not one instant could miss it on its
    way once. Sources do not count, because one that is always on is never done. Nor do dead tasks
    and paused backfills, of which nothing becomes by itself, nor wake-ups, which are hints.
    """

    def __init__(self) -> None:
        self._seen = 0

    def __call__(self, status: StatusAnswer) -> bool:
        self._seen = 0 if any(_open(status)) else self._seen + 1
        return self._seen >= 2


def idle_left(status: StatusAnswer) -> str:
    found = list(_open(status))
    if not found:
        return "There is no work left, but that was checked only once."
    return f"There is still work: {'; '.join(found[:10])}."


def _open(status: StatusAnswer) -> Iterator[str]:
    if status.events_pending:
        yield f"{status.events_pending:,} events to route"
    for job in status.jobs:
        if job.activation != "source" and (job.queued or job.running):
            yield _job(job)
    for backfill in status.backfills:
        if backfill.state == "running" or (backfill.state == "cancelled" and backfill.open):
            yield f"backfill {backfill.id} of {backfill.job}"


def _job(job: JobAnswer) -> str:
    paused = f", paused: {'; '.join(job.paused)}" if job.paused else ""
    return f"{job.name} ({job.queued:,} waiting, {job.running:,} running{paused})"
