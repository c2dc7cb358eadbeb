"""Which problem stands for which refusal or error. Pure.

A problem is one sentence on what is wrong, a word for programs, and what to do. Its status is
decided here and nowhere else. Called by the application, for errors, and by handlers, for values
that say no.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, get_args, get_type_hints

import msgspec

from penstock.dispatcher.tasks.model import Refusal, TaskRefusalReason, TaskSnapshot
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    DatabaseUnavailable,
    DispatcherUnavailable,
    InvalidInput,
    SignerUnavailable,
    TokenRefused,
)
from penstock.kernel.validation import wrong_shape
from penstock.protocol.base import Answer
from penstock.protocol.dags import DagProblem
from penstock.protocol.problem import DagError, Problem
from penstock.protocol.work import PartAnswer, ResultsAnswer, TaskResult, TaskStateAnswer

DAG_PROBLEMS_MAX: Final = 1000

_TITLES: Final = {
    TaskRefusalReason.UNKNOWN: "There is no task {task}.",
    TaskRefusalReason.RUNNING: "Task {task} is held by another attempt.",
    TaskRefusalReason.OVER: "Task {task} is {status}.",
    TaskRefusalReason.NOT_DUE: "Task {task} is not due yet.",
    TaskRefusalReason.PAUSED: "The job of task {task} is paused.",
    TaskRefusalReason.FULL: "As many tasks like {task} are running as may run at a time.",
    TaskRefusalReason.STALE: "This is not the current attempt of task {task}.",
    TaskRefusalReason.DIFFERENT: "This attempt of task {task} has ended with something else.",
    TaskRefusalReason.OUTPUTS: "Task {task} may not publish these outputs.",
    TaskRefusalReason.SCHEMA: "What task {task} has made has columns that its dataset cannot take.",
    TaskRefusalReason.UNDECLARED: "What task {task} has made has columns that are not declared.",
    TaskRefusalReason.MOVED: "Task {task} merged with a revision that is no longer published.",
    TaskRefusalReason.NOT_DEAD: "Task {task} is {status}, and only dead tasks are replayed.",
}


def malformed(title: str, *, field: str = "", detail: str = "") -> Problem:
    """What was asked makes no sense."""
    return Problem(type="malformed", title=title, status=422, field=field, detail=detail)


def unknown(title: str, *, detail: str = "") -> Problem:
    """What was asked for is not there."""
    return Problem(type="unknown", title=title, status=404, detail=detail)


def conflict(kind: str, title: str, *, detail: str = "") -> Problem:
    """What is there now does not allow what was asked."""
    return Problem(type=kind, title=title, status=409, detail=detail)


def not_json(error: Exception) -> Problem:
    """A body that is not JSON at all."""
    said = str(error).rstrip(".") or "it is nested too deeply"
    return Problem(type="not json", title=f"The body is not JSON: {said}.", status=400)


def not_as_declared(
    error: msgspec.ValidationError, *, kind: type | None = None, place: str = ""
) -> Problem:
    """A body or a parameter that is not of its type, which is `kind`."""
    named, words = wrong_shape(error)
    if (choices := _choices(kind, named)) is not None:
        named, words = wrong_shape(error, choices=choices)
    field = named or place
    return malformed(f"{f'`{field}`' if field else 'The body'} {words}.", field=field)


def _choices(kind: type | None, field: str) -> Sequence[str] | None:
    """The words that a field may be; None if it is not one of some."""
    hints = {} if kind is None else get_type_hints(kind)
    hint = hints.get(field)
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, StrEnum):
            return [str(word) for word in each]
    return None


def problem_of(error: Exception) -> Problem | None:
    """The problem that an error of ours is for the caller; None for one that is a mistake."""
    match error:
        case DagError():
            problems = [
                DagProblem(line=each.line, field=each.field, message=each.message)
                for each in error.problems[:DAG_PROBLEMS_MAX]
            ]
            return Problem(type="dag", title=error.message, status=422, problems=problems)
        case InvalidInput():
            return malformed(_sentence(error.message), detail=error.hint)
        case TokenRefused():
            return _of_token(error)
        case CredentialsRefused():
            return conflict(error.kind, _sentence(error.message), detail=error.hint)
        case SignerUnavailable() | CredentialsUnavailable() | DispatcherUnavailable():
            title, detail = _sentence(error.message), error.hint or "Retry."
            return Problem(type="unavailable", title=title, status=503, detail=detail)
        case DatabaseUnavailable():
            return Problem(
                type="unavailable",
                title="The database does not answer.",
                status=503,
                detail="Retry: what was already done is not done twice.",
            )
        case TimeoutError():
            return Problem(
                type="slow",
                title="The request timed out.",
                status=503,
                detail="Retry: what was already done is not done twice.",
            )
    return None


def token_result(task_id: int, error: TokenRefused) -> TaskResult:
    """A token that proves nothing, as one of the answers of a call about several tasks.

    Whoever proves nothing is not told what the task is.
    """
    problem = _of_token(error)
    return TaskResult(
        task_id=task_id, status=problem.status, why=problem.type, detail=problem.title
    )


def _of_token(error: TokenRefused) -> Problem:
    return Problem(
        type=f"token {error.kind}",
        title=_sentence(error.message),
        status=401 if error.kind == "missing" else 403,
        detail=error.hint,
    )


def _sentence(message: str) -> str:
    return f"{message.rstrip('.')}."


def state_answer(state: TaskSnapshot | None) -> TaskStateAnswer | None:
    """What a task is now, as it is told."""
    if state is None:
        return None
    return TaskStateAnswer(
        task_id=state.task_id,
        status=state.status.value,
        attempt=state.attempt,
        worker=state.worker,
        lease_expires_at=state.lease_expires_at,
        due_at=state.due_at,
        cancel_asked=state.cancel_asked,
        reason=state.reason,
    )


def refused_result(refusal: Refusal) -> TaskResult:
    """A refusal as one of the answers of a call about several tasks."""
    return TaskResult(
        task_id=refusal.task_id,
        status=404 if refusal.why is TaskRefusalReason.UNKNOWN else 409,
        why=refusal.why.value,
        detail=refusal.detail or _title(refusal.why, refusal.task_id, refusal.state),
        state=state_answer(refusal.state),
        current=msgspec.convert(refusal.current, dict[str, list[PartAnswer]] | None),
    )


def refusal_problem(refusal: Refusal) -> Problem:
    """A refusal as the answer to a call about one task."""
    return _of_result(refused_result(refusal))


def results_answer(results: Sequence[TaskResult]) -> tuple[Answer, int]:
    """The answers of a call about several tasks, and the status of the call."""
    statuses = {each.status for each in results}
    if len(statuses) > 1:
        return ResultsAnswer(results=list(results)), 207
    (status,) = statuses
    if status < 400:
        return ResultsAnswer(results=list(results)), status
    problem = _of_result(results[0])
    if len(results) > 1:
        problem.title = "All tasks of the request were refused."
        problem.detail = "`results` says why, one by one."
        problem.state = None
    problem.results = list(results)
    return problem, status


def _of_result(result: TaskResult) -> Problem:
    return Problem(type=result.why, title=result.detail, status=result.status, state=result.state)


def _title(why: TaskRefusalReason, task_id: int, state: TaskSnapshot | None) -> str:
    status = state.status.value if state is not None else ""
    return _TITLES[why].format(task=task_id, status=status)
