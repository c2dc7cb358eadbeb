"""What attempts say of themselves, which may be anything."""

from __future__ import annotations

import pytest

from penstock.console.pages.measured import Count, as_json, figures, progress


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


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), 1e300, True, [1, 2], {"a": {"b": {"c": {"d": {"e": 1}}}}}, "x" * 9999],
)
def test_whatever_is_said_is_shown_within_bounds(value: object) -> None:
    for name in ("it", "it_ms", "it_bytes", "it_seconds"):
        ((_, shown),) = figures({name: value})
        assert len(shown) <= 200
    progress({"done": value, "of": value, "tasks": value, "tasks_done": value, "phase": value})


def test_very_many_figures_are_cut() -> None:
    assert len(figures({str(number): number for number in range(10_000)})) <= 100


def test_progress_of_spark() -> None:
    said = {"phase": "writing", "stages": 3, "stages_done": 1, "tasks": 200, "tasks_done": 50}
    found = progress(said)
    assert found.phase == "writing"
    assert found.counts == [Count("stages", 1, 3), Count("tasks", 50, 200)]
    assert found.others == []


def test_progress_of_a_function() -> None:
    found = progress({"done": 3, "of": 10, "file": "a.csv"})
    assert found.counts == [Count("", 3, 10)]
    assert found.others == [("file", "a.csv")]


def test_progress_that_cannot_be_a_share_is_shown_as_it_is() -> None:
    found = progress({"done": "much", "of": 10, "phase": 3})
    assert found.counts == []
    assert dict(found.others) == {"done": "much", "of": "10", "phase": "3"}


def test_a_payload_is_cut() -> None:
    assert as_json({"a": 1}) == '{\n  "a": 1\n}'
    assert len(as_json({"a": "x" * 100_000})) < 10_000
