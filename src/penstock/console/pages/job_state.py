"""How a job is doing, as one word and in sentences: what holds it back, what it waits for. Pure.

The word is the worst that is true of it, in the order of `STATES`. The sentences are for somebody
who asks why nothing happens: each says what is the matter and, where a person can do something
about it, what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.console.rendering import length, number
from penstock.dispatcher.views.jobs import AboutJob
from penstock.dispatcher.views.pipeline import RECENT_MINUTES, Endings
from penstock.dispatcher.wire.steering import JobAnswer, PauseAnswer, PressureAnswer

STATES: Final = {
    "dead": "has tasks that failed and will not be tried again by themselves",
    "pressed": "more tasks wait for it than its limit allows",
    "paused": "starts nothing new",
    "running": "tasks run now",
    "waiting": "tasks wait to be run",
    "ok": f"has completed tasks in the last {RECENT_MINUTES} minutes",
    "idle": "has nothing to do",
}
MANY: Final = 10_000
BY_PEOPLE: Final = "operator"
_PRESSURE: Final = "pressure:"
_NEEDS_NO_WORKER: Final = ("", "dispatcher", "lambda")


def state_of(job: JobAnswer, ended: Endings | None, *, is_pressed: bool) -> str:
    """The word for a job."""
    if job.dead:
        return "dead"
    if is_pressed:
        return "pressed"
    if job.paused:
        return "paused"
    if job.running:
        return "running"
    if job.queued:
        return "waiting"
    return "ok" if ended is not None and ended.completed else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A note on top of the page of a job."""

    tone: str
    """Its class: `bad`, `warn`, `paused`, or nothing."""
    told: str
    since: datetime | None = None
    job: str = ""
    """Another job that it is about."""
    tasks: str = ""
    """The status of the tasks to look at."""


def word_of(
    about: AboutJob, pauses: Sequence[PauseAnswer], ended: Endings | None, *, is_pressed: bool
) -> str:
    """The word for a job, by all that is known of it."""
    counts = about.counts
    if not about.is_in_force:
        return "retired"
    if counts.dead:
        return "dead"
    if is_pressed:
        return "pressed"
    if pauses:
        return "paused"
    if counts.running:
        return "running"
    if counts.waiting:
        return "waiting"
    return "ok" if ended is not None and ended.completed else "idle"


def remarks(
    about: AboutJob, pauses: Sequence[PauseAnswer], pressure: PressureAnswer | None
) -> list[Remark]:
    """What has to be said of a job, the worst first; nothing of one that does what it should."""
    said: list[Remark] = []
    if not about.is_in_force:
        told = f"The DAG in force has no such job. This is what version {about.version} had."
        said.append(Remark(tone="warn", told=told))
    if dead := about.counts.dead:
        which = "1 task has" if dead == 1 else f"{number(dead, most=MANY)} tasks have"
        told = f"{which} failed and will not be tried again without somebody."
        said.append(Remark(tone="bad", told=told, tasks="dead"))
    said += [_pause(each) for each in pauses]
    if pressure is not None and pressure.pressed:
        said.append(_pressed(pressure))
    if about.generation_state == "building":
        told = "A new generation of what it writes is being built; readers have the old one so far."
        said.append(Remark(tone="", told=told))
    return said + _waiting(about, is_paused=bool(pauses))


def _pause(pause: PauseAnswer) -> Remark:
    what = "Its bulk tasks are" if pause.scope == "bulk" else "It is"
    if pause.cause == BY_PEOPLE:
        return Remark(tone="paused", told=f"{what} paused: {pause.reason}", since=pause.since)
    job = pause.cause.removeprefix(_PRESSURE)
    told = f"{what} held back until the queue of {job} is shorter: {pause.reason}"
    return Remark(tone="warn", told=told, since=pause.since, job=job)


def _pressed(pressure: PressureAnswer) -> Remark:
    told = f"Its queue is over its limit: {pressure.reason or ''}".strip()
    if pressure.pauses:
        told = f"{told} Until it is shorter, {_listed(pressure.pauses)} start nothing new."
    return Remark(tone="warn", told=told, since=pressure.since)


def _waiting(about: AboutJob, *, is_paused: bool) -> list[Remark]:
    """Why what waits is not run, if anything waits."""
    counts = about.counts
    if not counts.waiting:
        return []
    said = []
    if not about.workers and about.runtime not in _NEEDS_NO_WORKER:
        told = (
            f"{_tasks(counts.waiting)}, and no worker that serves {about.operator} was heard of in"
            " the last minute: start one with `penstock worker`."
        )
        said.append(Remark(tone="warn", told=told))
    if about.is_job_full:
        told = f"It runs as many tasks as it may, {about.max_concurrency}; the others wait."
        said.append(Remark(tone="", told=told))
    elif about.is_operator_full:
        told = (
            f"{about.operator} runs as many tasks as it may, {about.operator_max}, of all jobs"
            " together; the others wait."
        )
        said.append(Remark(tone="", told=told))
    if not said and not is_paused and not counts.running:
        if counts.oldest_seconds:
            told = f"{_tasks(counts.waiting)} for {length(counts.oldest_seconds)}."
            said.append(Remark(tone="", told=told, tasks="queued"))
        else:
            told = f"{_tasks(counts.waiting)} for the next attempt after a failure."
            said.append(Remark(tone="", told=told, since=counts.next_due_at, tasks="retrying"))
    return said


def waits_for(about: AboutJob) -> str:
    """What makes a job run that has nothing to do."""
    if about.body.get("activation") == "source":
        return {
            "cron": "Its clock tells of the next time.",
            "webhook": "It waits for a call from outside.",
            "manual": "It waits to be triggered.",
            "always_on": "Its task runs all the time.",
        }.get(str(about.body.get("source", {}).get("kind")), "")
    wanted = [each.dataset for each in about.inputs if each.is_trigger]
    if not wanted:
        return ""
    every = about.body.get("when") == "all" and len(wanted) > 1
    listed = _listed(wanted, last="and" if every else "or")
    return f"It runs when there is something new of {listed}{' for a partition' if every else ''}."


def _tasks(count: int) -> str:
    return "1 task waits" if count == 1 else f"{number(count, most=MANY)} tasks wait"


def _listed(names: Sequence[str], *, last: str = "and") -> str:
    if len(names) > 5:
        return f"{', '.join(names[:4])} {last} {len(names) - 4} more"
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
