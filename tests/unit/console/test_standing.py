"""Where a task stands, in sentences."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from penstock.console.pages.tasks import explain_attempts, explain_task
from penstock.dispatcher.views.jobs import AboutTask
from penstock.protocol.steering import AttemptAnswer, TaskAnswer, TaskSummary

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ABOUT = AboutTask(
    runtime="process",
    max_attempts=3,
    timeout_seconds=3600.0,
    cancel_asked=False,
    backfill_id=None,
    now=NOW,
    event_seq=None,
    event_id=None,
    event_at=None,
    event_task=None,
    event_dataset=None,
    generation_state="current",
    is_in_dag=True,
    is_in_force=True,
    paused=(),
    operator_max=None,
    job_max=None,
    is_operator_full=False,
    is_job_full=False,
    workers=1,
    later_task=None,
    later_status=None,
)


def failed(number: int, reason: str, outcome: str = "failed") -> AttemptAnswer:
    started = NOW + timedelta(minutes=number)
    return AttemptAnswer(
        number=number,
        worker="w",
        started_at=started,
        ended_at=started + timedelta(seconds=2),
        outcome=outcome,
        reason=reason,
        progress=None,
        log=None,
    )


def task(status: str, *attempts: AttemptAnswer, limit: int = 3) -> TaskAnswer:
    summary = TaskSummary(
        id=7,
        job="clean",
        operator="a:clean",
        generation="g",
        status=status,
        priority="normal",
        attempt=len(attempts),
        attempt_limit=limit,
        partition_key="p",
        worker=None,
        reason=attempts[-1].reason if attempts else None,
        created_at=NOW,
        due_at=NOW,
        settled_at=None,
    )
    return TaskAnswer(task=summary, payload={}, attempts=list(attempts), published=[])


def test_a_task_that_runs_alone_says_why() -> None:
    answer = task("running", failed(1, "The JVM died."))
    assert "It runs alone in a process" not in explain_task(answer, ABOUT).head
    answer.task.runs_alone = True
    assert "It runs alone in a process" in explain_task(answer, ABOUT).head
    assert answer.task.attempts == "1 of 3, runs alone"


def test_attempts_that_failed_alike_and_those_that_did_not() -> None:
    # The first line is the cause; where in the code it was may differ.
    alike = task("dead", failed(1, "E: x\n at 1"), failed(2, "E: x\n at 2"), failed(3, "E: x"))
    assert explain_attempts(alike) == [
        "Tried 3 times within 2 min 2 s, and failed for the same reason each time."
    ]
    differ = task("dead", failed(1, "E: x"), failed(2, "E: y"), limit=2)
    assert "the reasons differ" in explain_attempts(differ)[0]
    assert explain_attempts(task("queued")) == []


def test_a_failure_that_no_attempt_would_change() -> None:
    said = explain_attempts(task("dead", failed(1, "DoNotRetry: x")))
    assert said[0] == "Tried once, on worker w, for 2.0 s."
    assert "not retryable" in said[1]
    assert len(explain_attempts(task("dead", failed(1, "x"), limit=1))) == 1


def test_what_was_handed_back_has_not_failed() -> None:
    stopped = failed(1, "The worker was stopped.", "released")
    found = explain_task(task("queued", stopped), ABOUT)
    assert found.head.startswith("Attempt 1 was released by its worker")
    assert found.reason == "The worker was stopped."
    said = explain_attempts(task("dead", stopped, failed(2, "E: x"), failed(3, "E: x"), limit=3))
    assert said == [
        "Released once by workers, which does not count as an attempt.",
        "Tried 2 times within 1 min 2 s, and failed for the same reason each time.",
    ]


def test_what_to_know_before_a_replay() -> None:
    answer = task("dead", failed(1, "x"), limit=1)
    assert explain_task(answer, ABOUT).can_replay
    assert (
        explain_task(answer, ABOUT)
        .further[-1]
        .startswith("After fixing the cause, replay the task")
    )
    for about, sentence in (
        (replace(ABOUT, generation_state="retired"), "its outputs would not be read"),
        (replace(ABOUT, is_in_dag=False, is_in_force=False), "no longer has this job"),
        (replace(ABOUT, is_in_force=False), "runs the task as it was created"),
    ):
        assert not any(sentence in each for each in explain_task(answer, ABOUT).further)
        assert any(sentence in each for each in explain_task(answer, about).further)


@pytest.mark.parametrize(("runtime", "is_missed"), [("process", True), ("lambda", False)])
def test_a_worker_is_missed_only_where_one_is_needed(runtime: str, *, is_missed: bool) -> None:
    about = replace(ABOUT, workers=0, runtime=runtime)
    found = explain_task(task("queued"), about)
    assert any("No worker" in each for each in found.further) == is_missed
    assert found.can_cancel


def test_what_was_asked_to_stop_is_not_cancelled_again() -> None:
    found = explain_task(task("running", failed(1, "x")), replace(ABOUT, cancel_asked=True))
    assert "Cancellation requested" in found.head
    assert not found.can_cancel


def test_what_was_cancelled_has_not_failed() -> None:
    answer = task("cancelled")
    answer.task.reason = "Cancelled in the console."
    found = explain_task(answer, ABOUT)
    # A reason is set in the type of an error; this is a sentence.
    assert (found.reason, found.tone) == ("", "")
    assert found.further == ["Cancelled in the console."]


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_what_is_over_offers_nothing(status: str) -> None:
    found = explain_task(task(status, failed(1, "x", "completed")), ABOUT)
    assert (found.can_cancel, found.can_replay) == (False, False)
