"""What attempts say of themselves, which may be anything."""

from __future__ import annotations

import pytest

from penstock.console.pages.tasks import (
    MetricGroup,
    ProgressCount,
    as_json,
    attempt_progress,
    figures,
    metric_groups,
)


def test_figures_have_their_units() -> None:
    said = {"executor_run_ms": 1500, "shuffle_read_bytes": 2048, "rows": 1234567, "a_seconds": 90}
    assert figures(said) == [
        ("executor run", "1.5 s"),
        ("shuffle read", "2.0 KiB"),
        ("rows", "1,234,567"),
        ("a", "1 min 30 s"),
    ]


def test_figures_within_others_follow_them() -> None:
    assert figures({"spark": {"jobs": 2, "none": None}, "note": "fast"}) == [
        ("spark: jobs", "2"),
        ("note", "fast"),
    ]


def test_what_a_batch_took_is_told_apart_from_what_the_task_read() -> None:
    said: dict[str, float] = {"rows_in": 933, "bytes_in": 2048, "files_out": 1, "batched": 31}
    said |= {"input_rows": 27004, "jobs": 2, "running_seconds": 1.5, "shared_by": 31, "mine": 7}
    own, batch = metric_groups(said, runtime="spark")
    assert own.title == "This task"
    assert dict(own.figures)["Rows read"] == "933"
    # What somebody's own code has measured is of the task.
    assert dict(own.figures)["mine"] == "7"
    assert batch.title == "The batch of 31 tasks"
    assert "for the whole batch" in batch.note
    assert dict(batch.figures) == {
        "Compute time": "1.5 s",
        "Spark jobs": "2",
        "Spark rows read": "27,004",
    }


def test_what_spark_did_for_one_task_alone_is_no_batch() -> None:
    (alone,) = metric_groups({"executor_run_ms": 1500, "shared_by": "many"}, runtime="spark")
    assert (alone.title, alone.note) == ("Spark", "")
    assert alone.figures == [("Executor time, total", "1.5 s")]


def test_figures_of_others_are_one_group_as_they_are() -> None:
    said = {"jobs": 2, "rows_in": 3}
    assert metric_groups(said, runtime="process") == [MetricGroup(title="", figures=figures(said))]


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), 1e300, True, [1, 2], {"a": {"b": {"c": {"d": {"e": 1}}}}}, "x" * 9999],
)
def test_whatever_is_said_is_shown_within_bounds(value: object) -> None:
    for name in ("it", "it_ms", "it_bytes", "it_seconds"):
        ((_, shown),) = figures({name: value})
        assert len(shown) <= 200
    attempt_progress(
        {"done": value, "of": value, "tasks": value, "tasks_done": value, "phase": value}
    )


def test_very_many_figures_are_cut() -> None:
    assert len(figures({str(number): number for number in range(10_000)})) <= 100


def test_progress_of_spark() -> None:
    said = {"phase": "writing", "stages": 3, "stages_done": 1, "tasks": 200, "tasks_done": 50}
    found = attempt_progress(said)
    assert found.phase == "writing"
    assert found.counts == [ProgressCount("stages", 1, 3), ProgressCount("tasks", 50, 200)]
    assert found.others == []


def test_progress_of_a_function() -> None:
    found = attempt_progress({"done": 3, "of": 10, "file": "a.csv"})
    assert found.counts == [ProgressCount("", 3, 10)]
    assert found.others == [("file", "a.csv")]


def test_progress_that_cannot_be_a_share_is_shown_as_it_is() -> None:
    found = attempt_progress({"done": "much", "of": 10, "phase": 3})
    assert found.counts == []
    assert dict(found.others) == {"done": "much", "of": "10", "phase": "3"}


def test_a_payload_is_cut() -> None:
    assert as_json({"a": 1}) == '{\n  "a": 1\n}'
    assert len(as_json({"a": "x" * 100_000})) < 10_000
