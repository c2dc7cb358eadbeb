"""Where a task stands, in sentences: what is the matter, what was tried, what comes next. Pure.

A newcomer who looks at a task that has failed has to find out why, and what to do, from this. So
the reason is given whole, as the attempt has said it; what follows from it is said in words of
everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.console.rendering import length, line
from penstock.dispatcher.views.tasks import About
from penstock.dispatcher.wire.steering import AttemptAnswer, TaskAnswer

_UNREAD: Final = ("retired", "abandoned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stands on top of the page of a task."""

    tone: str
    """The class of the note: `bad`, `warn`, `paused`, or nothing."""
    head: str
    reason: str = ""
    """Why it has failed or is tried again: whole, in the words of the attempt."""
    further: Sequence[str] = field(default=())
    can_replay: bool = False
    can_cancel: bool = False


def standing(answer: TaskAnswer, about: About) -> Standing:
    """Where a task stands."""
    task = answer.task
    match task.status:
        case "dead":
            return Standing(
                tone="bad",
                head="This task has failed and will not be tried again by itself.",
                reason=task.reason or "",
                further=[*tried(answer), *_of_replay(about)],
                can_replay=True,
            )
        case "retrying":
            return Standing(
                tone="warn",
                head=f"Attempt {task.attempt} has failed; attempt {task.attempt + 1} of at most"
                f" {task.attempt_limit} follows.",
                reason=task.reason or "",
                further=[*tried(answer), *_waiting(answer, about)],
                can_cancel=True,
            )
        case "queued":
            return _queued(answer, about)
        case "running":
            return _running(answer, about)
        case "cancelled":
            return Standing(
                tone="",
                head="This task was cancelled.",
                further=[task.reason] if task.reason else [],
            )
    return Standing(tone="", head=_completed(answer))


def tried(answer: TaskAnswer) -> list[str]:
    """What the attempts that are over have in common."""
    task = answer.task
    ended = [each for each in answer.attempts if each.ended_at is not None]
    over = [each for each in ended if each.outcome != "released"]
    handed_back = len(ended) - len(over)
    said = []
    if handed_back:
        times = "once" if handed_back == 1 else f"{handed_back} times"
        said.append(f"It was handed back {times}, which is not counted.")
    if not over:
        return said
    said.append(_tried(over, task.attempt - handed_back))
    if task.status == "dead" and task.attempt < task.attempt_limit:
        said.append(
            "The last failure was one that another attempt would not change, so none was made."
        )
    if over[-1].outcome == "expired":
        said.append(
            "Nothing was heard of the attempt any more: its worker was stopped, ran out of memory,"
            " or could not reach the dispatcher."
        )
    return said


def _tried(over: Sequence[AttemptAnswer], attempts: int) -> str:
    last = over[-1]
    if attempts == 1 or len(over) == 1:
        times = "once" if attempts == 1 else f"{attempts} times"
        return f"It was tried {times}, on worker {line(last.worker, 60)}, for {_took(last)}."
    span = (last.ended_at or last.started_at) - over[0].started_at
    whole = f"It was tried {attempts} times within {length(span.total_seconds())}"
    causes = {_cause(each) for each in over}
    if len(causes) == 1:
        return f"{whole}, and failed for the same reason each time."
    return f"{whole}; the reasons differ, see the attempts below."


def _of_replay(about: About) -> list[str]:
    """What to know before a task that is dead is replayed."""
    said = []
    if about.generation_state in _UNREAD:
        said.append(f"Its generation is {about.generation_state}: nobody reads what it would make.")
    if not about.is_in_dag:
        said.append("The DAG in force has no such job any more.")
    elif not about.is_in_force:
        said.append("The job was changed since: a replay runs the task as it was made.")
    more = about.max_attempts
    said.append(
        "When the cause is gone, replay it: it is queued again at once, for"
        f" {'one more attempt' if more == 1 else f'up to {more} more attempts'}."
    )
    return said


def _queued(answer: TaskAnswer, about: About) -> Standing:
    task = answer.task
    head = "This task waits for its first attempt."
    if task.reason:
        head = f"Attempt {task.attempt} was handed back, which is not counted; another one follows."
    elif task.attempt:
        head = f"This task was replayed, and waits for attempt {task.attempt + 1}."
    further = _waiting(answer, about)
    is_warned = bool(task.reason) or (about.workers == 0 and bool(further))
    tone = "paused" if about.paused else "warn" if is_warned else ""
    return Standing(
        tone=tone, head=head, reason=task.reason or "", further=further, can_cancel=True
    )


def _running(answer: TaskAnswer, about: About) -> Standing:
    task = answer.task
    head = f"Attempt {task.attempt} of at most {task.attempt_limit} runs"
    head = f"{head} on worker {line(task.worker, 60)}." if task.worker else f"{head}."
    if task.releases:
        head = f"{head} Of these, {task.releases} handed back before are not counted."
    if task.runs_alone:
        head = f"{head} Nothing else runs in its process, since one has died that it ran in."
    if about.cancel_asked:
        return Standing(
            tone="warn",
            head="This task was asked to stop, and ends as soon as its worker hears of it.",
            further=[task.reason] if task.reason else [],
        )
    may = f"It may take {length(about.timeout_seconds)}."
    return Standing(tone="", head=head, further=[may], can_cancel=True)


def _waiting(answer: TaskAnswer, about: About) -> list[str]:
    """What keeps a task from running, as far as can be said."""
    said = [f"Its job is paused: {each}" for each in about.paused]
    if about.is_operator_full:
        said.append(
            f"Its operator runs as many tasks as it may, {about.operator_max}; it waits for room."
        )
    if about.is_job_full:
        said.append(f"Its job runs as many tasks as it may, {about.job_max}; it waits for room.")
    # Functions are invoked, and ask for no work.
    if about.workers == 0 and about.runtime not in ("lambda", "dispatcher"):
        said.append(
            "No worker that serves it was heard of in the last minute: start one with"
            " `penstock worker`."
        )
    if not said and answer.task.due_at <= about.now:
        said.append("A worker takes it as soon as one has room.")
    return said


def _completed(answer: TaskAnswer) -> str:
    last = answer.attempts[-1] if answer.attempts else None
    if last is None or last.ended_at is None:
        return "This task is completed."
    return f"This task was completed by attempt {last.number}, in {_took(last)}."


def _took(attempt: AttemptAnswer) -> str:
    ended = attempt.ended_at or attempt.started_at
    return length((ended - attempt.started_at).total_seconds())


def _cause(attempt: AttemptAnswer) -> str:
    return (attempt.reason or "").partition("\n")[0]
