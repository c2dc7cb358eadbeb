"""Refusals as people and programs read them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.dispatcher.api.problems import (
    problem_of,
    refusal_problem,
    results_answer,
    token_result,
)
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.tasks.model import Refusal, TaskRefusalReason, TaskSnapshot
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    PenstockError,
    SignerUnavailable,
    TokenRefused,
)
from penstock.protocol.base import TaskStatus
from penstock.protocol.problem import DagError, Problem
from penstock.protocol.work import ResultsAnswer, TaskResult

NOW = datetime(2030, 1, 1, tzinfo=UTC)
STATE = TaskSnapshot(7, TaskStatus.FAILED, 2, None, None, NOW, False, "broken")


@pytest.mark.parametrize("why", list(TaskRefusalReason))
def test_every_refusal_has_a_sentence(why: TaskRefusalReason) -> None:
    problem = refusal_problem(Refusal(7, why, None if why is TaskRefusalReason.UNKNOWN else STATE))
    assert problem.type == why.value
    assert problem.status == (404 if why is TaskRefusalReason.UNKNOWN else 409)
    assert "7" in problem.title
    assert problem.title.endswith(".")
    assert (problem.state is None) == (why is TaskRefusalReason.UNKNOWN)
    if problem.state is not None:
        assert (problem.state.status, problem.state.reason) == ("dead", "broken")


def test_a_refusal_with_words_of_its_own() -> None:
    assert (
        refusal_problem(Refusal(7, TaskRefusalReason.OUTPUTS, STATE, "Not yours.")).title
        == "Not yours."
    )


def result(status: int, why: str = "") -> TaskResult:
    return TaskResult(task_id=status, status=status, why=why, detail="It says why.")


def test_the_status_of_a_call_about_several() -> None:
    body, status = results_answer([result(200), result(200)])
    assert isinstance(body, ResultsAnswer)
    assert (status, len(body.results)) == (200, 2)
    body, status = results_answer([result(200), result(409, "stale")])
    assert isinstance(body, ResultsAnswer)
    assert status == 207
    body, status = results_answer([result(404, "unknown"), result(409, "stale")])
    assert isinstance(body, ResultsAnswer)
    assert status == 207


def test_a_call_that_was_refused_as_a_whole_is_a_problem() -> None:
    body, status = results_answer([result(409, "stale")])
    assert isinstance(body, Problem)
    assert (status, body.type, body.title) == (409, "stale", "It says why.")
    assert [each.task_id for each in body.results] == [409]
    body, _ = results_answer([result(409, "stale"), result(409, "over")])
    assert isinstance(body, Problem)
    assert [each.why for each in body.results] == ["stale", "over"]
    assert "All tasks" in body.title


def test_a_dag_that_is_wrong_has_its_lines() -> None:
    with pytest.raises(DagError) as raised:
        parse("jobs:\n  a:\n    what: 1\n", "dag.yaml")
    problem = problem_of(raised.value)
    assert problem is not None
    assert (problem.status, problem.type) == (422, "dag")
    assert 3 in [each.line for each in problem.problems]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (TokenRefused("There is none.", kind="missing"), 401, "token missing"),
        (TokenRefused("It is over", kind="expired", hint="Beat."), 403, "token expired"),
        (SignerUnavailable("KMS is away"), 503, "unavailable"),
        (CredentialsRefused("The store has none.", hint="Use S3."), 409, "no credentials"),
        (CredentialsUnavailable("STS is away."), 503, "unavailable"),
    ],
)
def test_what_is_wrong_with_tokens_and_credentials(
    error: PenstockError, status: int, kind: str
) -> None:
    problem = problem_of(error)
    assert problem is not None
    assert (problem.status, problem.type) == (status, kind)
    assert problem.title == f"{error.message.rstrip('.')}."
    assert problem.detail == error.hint or status == 503


def test_a_wrong_token_is_the_answer_of_its_entry_and_says_nothing_of_the_task() -> None:
    found = token_result(7, TokenRefused("It is of another", kind="another attempt"))
    assert (found.task_id, found.status, found.why) == (7, 403, "token another attempt")
    assert found.detail == "It is of another."
    assert found.state is None


def test_a_mistake_of_ours_has_no_problem() -> None:
    assert problem_of(KeyError("x")) is None
