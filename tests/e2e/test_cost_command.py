"""`penstock cost`: what it prints, for people and for programs, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.e2e.command import penstock

SMALL = ("--workers", "2", "--tasks-per-day", "4320", "--days", "0.02", "--concurrency", "4")


def test_the_figures_for_programs() -> None:
    ran = penstock("cost", *SMALL, "--json")
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    for figure in (
        "requests_per_task",
        "dollars_per_month",
        "idle_dollars_per_month",
        "dollars_per_million",
        "start_seconds_p50",
        "start_seconds_p99",
    ):
        assert said[figure] > 0, figure
    assert said["requests_per_task"] > 4
    assert said["simulated_tasks"] == 86
    assert said["requests_per_task_by_kind"]["put"] > 3
    assert said["requests_per_task_by_cause"]["submit"] == 1
    assert penstock("cost", *SMALL, "--json").stdout == ran.stdout


def test_the_figures_for_people() -> None:
    ran = penstock("cost", *SMALL, "--batch", "10")
    assert ran.returncode == 0, ran.stderr
    assert "2 workers, 4,320 tasks a day in batches of 10" in ran.stdout
    assert "simulated 0.5 hours after 10 minutes to warm up: 90 tasks" in ran.stdout
    for line in (
        "Requests a task",
        "Dollars a month",
        "  submit",
        "  discovery",
        "Idle, dollars a month",
        "beyond the idle cost",
        "(p50)",
        "after an idle hour within",
    ):
        assert line in ran.stdout
    assert "--full" not in ran.stdout


def test_the_table_has_every_mode_and_cause() -> None:
    ran = penstock("cost", *SMALL, "--table")
    assert ran.returncode == 0, ran.stderr
    rows = {line[:22].strip(): line[22:].split() for line in ran.stdout.splitlines()}
    assert rows["dollars a month"] == ["leased", "shared", "sampled", "direct"]
    names = list(rows)
    causes = names[names.index("dollars a month") + 1 : names.index("all")]
    assert {"submit", "discovery", "claim", "settle", "leases", "time", "monitor"} <= set(causes)
    for mode in range(4):
        parts = sum(float(rows[cause][mode]) for cause in causes)
        assert float(rows["all"][mode]) == pytest.approx(parts, abs=0.08)
        assert float(rows["idle fleet"][mode]) > 0
    assert "There is no row for a hybrid index" in ran.stdout


def test_a_saturated_queue() -> None:
    words = ("--saturated", "--workers", "3", "--concurrency", "2", "--json")
    ran = penstock("cost", *words)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert [fleet["workers"] for fleet in said["fleets"]] == [1, 3]
    assert [fleet["workers_busy"] for fleet in said["fleets"]] == [1, 3]
    assert said["growth_percent"] < 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", "0"), "penstock: --workers must be between 1 and 1,000, not 0."),
        (("--mode", "psychic"), "penstock: 'psychic' is not a mode."),
        (("--table", "--saturated"), "two different questions"),
        (("--workers", "many"), "'many' is not a valid integer"),
    ],
)
def test_options_that_cannot_be_right_are_one_sentence(words: tuple[str, ...], said: str) -> None:
    ran = penstock("cost", *words)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
