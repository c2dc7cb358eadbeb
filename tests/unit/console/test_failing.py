"""Dead tasks that have died of the same are told together."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.console.pages.pipeline import group_failures
from penstock.protocol.steering import TaskSummary

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def dead(task_id: int, reason: str | None, *, job: str = "clean", key: str = "") -> TaskSummary:
    return TaskSummary(
        id=task_id,
        job=job,
        operator="a:clean",
        generation="g",
        status="dead",
        priority="normal",
        attempt=1,
        attempt_limit=1,
        partition_key=key or None,
        worker=None,
        reason=reason,
        created_at=NOW,
        due_at=NOW,
        settled_at=NOW,
    )


def test_those_of_one_cause_are_one_with_the_latest() -> None:
    found = group_failures(
        [
            dead(9, "E: no file x.csv\n at 1", key="x"),
            dead(8, "E: no file y.csv\n at 7", key="y"),
            dead(7, "E: row 12 is empty"),
            dead(6, "E: row 7 is empty"),
            dead(5, "E: row 7 is empty", job="other"),
            dead(4, None),
        ]
    )
    assert [(each.job, each.latest.id, each.count) for each in found] == [
        ("clean", 9, 2),
        ("clean", 7, 2),
        ("other", 5, 1),
        ("clean", 4, 1),
    ]
    assert [each.is_alike for each in found] == [True, True, False, False]
    assert [each.cause for each in found][:2] == ["E: no file x.csv", "E: row 12 is empty"]
    assert found[-1].cause == ""


def test_what_is_the_same_to_the_letter_is_not_only_alike() -> None:
    (found,) = group_failures([dead(each, "E: x") for each in (4, 3, 2, 1)])
    assert (found.count, found.is_alike) == (4, False)
