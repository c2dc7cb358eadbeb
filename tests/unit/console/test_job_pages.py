"""How a job is doing, in words; its definition; the edges of the drawing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.console.pages import pipeline
from penstock.console.pages.jobs import (
    STATES,
    job_definition,
    remarks,
    state_of,
    waits_for,
    word_of,
)
from penstock.dispatcher.views.jobs import (
    RECENT_MINUTES,
    AboutJob,
    DagEdge,
    JobInput,
    RecentOutcomes,
    TaskCounts,
)
from penstock.protocol.steering import JobAnswer, PauseAnswer, PressureAnswer, PressuresAnswer

NOW = datetime(2030, 1, 1, tzinfo=UTC)
NOTHING = TaskCounts(queued=0, retrying=0, running=0, dead=0, oldest_seconds=0.0, next_due_at=None)
ABOUT = AboutJob(
    job_id=1,
    name="clean",
    version=3,
    is_in_force=True,
    generation="g",
    generation_state="current",
    body={"runtime": "process", "operator": "a:clean"},
    runtime="process",
    operator="a:clean",
    priority="normal",
    update_mode="replace",
    max_attempts=3,
    timeout_seconds=3600.0,
    heartbeat_seconds=60.0,
    retry_first_seconds=10.0,
    retry_max_seconds=600.0,
    retry_backoff=2.0,
    max_concurrency=None,
    now=NOW,
    operator_max=None,
    is_operator_full=False,
    is_job_full=False,
    workers=1,
    counts=NOTHING,
    inputs=(),
    outputs=(),
    ended=(),
    causes=(),
)


def waiting(count: int, **fields: Any) -> AboutJob:
    counts = replace(NOTHING, queued=count, oldest_seconds=90.0)
    return replace(ABOUT, counts=counts, **fields)


def told(about: AboutJob, *pauses: PauseAnswer, pressure: PressureAnswer | None = None) -> str:
    return " ".join(each.told for each in remarks(about, pauses, pressure))


def pause(cause: str, reason: str = "The disk is full.", scope: str = "all") -> PauseAnswer:
    return PauseAnswer(job="clean", cause=cause, scope=scope, reason=reason, since=NOW)


def pressure(job: str = "clean", *pauses: str, pressed: bool = True) -> PressureAnswer:
    return PressureAnswer(
        job=job,
        pressed=pressed,
        depth=12,
        oldest_seconds=80.0,
        max_queue_depth=10,
        max_queue_age_seconds=None,
        reason=f"12 tasks of {job} are queued; the limit is 10." if pressed else None,
        since=NOW,
        pauses=list(pauses),
    )


def test_a_job_that_does_what_it_should_has_no_remark() -> None:
    assert remarks(ABOUT, [], pressure(pressed=False)) == []
    running = replace(ABOUT, counts=replace(NOTHING, queued=5, running=2, oldest_seconds=9.0))
    assert remarks(running, [], None) == []


def test_what_waits_says_what_for() -> None:
    assert told(waiting(1)) == "1 task waits for 1 min 30 s."
    assert "2 tasks wait, and no worker that serves a:clean was seen" in told(waiting(2, workers=0))
    # What runs in the dispatcher, or is invoked, needs none.
    assert "worker" not in told(waiting(2, workers=0, runtime="dispatcher"))
    assert told(waiting(2, is_job_full=True, max_concurrency=4)) == (
        "The job is at its concurrency limit of 4; other tasks wait."
    )
    assert "a:clean is at its concurrency limit of 8 over all jobs" in told(
        waiting(2, is_operator_full=True, operator_max=8)
    )
    retrying = replace(ABOUT, counts=replace(NOTHING, retrying=3, next_due_at=NOW))
    assert told(retrying) == "3 tasks wait for a retry."


def test_pauses_say_who_and_why() -> None:
    assert told(ABOUT, pause("operator")) == "It is paused: The disk is full."
    (held,) = remarks(ABOUT, [pause("pressure:report", "12 of report wait.", "bulk")], None)
    assert held.told == (
        "Its bulk tasks are paused by backpressure until the queue of report is shorter:"
        " 12 of report wait."
    )
    assert (held.job, held.since) == ("report", NOW)


def test_pressure_says_who_is_held_back() -> None:
    said = told(ABOUT, pressure=pressure("clean", "feed", "raw"))
    assert said == (
        "The queue exceeds its limit: 12 tasks of clean are queued; the limit is 10."
        " Paused until it is shorter: feed and raw."
    )


def test_the_worst_comes_first() -> None:
    about = replace(ABOUT, counts=replace(NOTHING, queued=3, dead=1, oldest_seconds=2.0))
    found = remarks(about, [pause("operator")], pressure())
    assert [each.tone for each in found] == ["bad", "paused", "warn"]
    assert found[0].told == "1 task has failed and will not be retried automatically."
    assert word_of(about, [], None, is_pressed=True) == "dead"
    assert word_of(replace(about, is_in_force=False), [], None, is_pressed=True) == "retired"
    assert "The DAG in force has no such job." in told(replace(about, is_in_force=False))


def test_the_word_is_the_worst_that_is_true() -> None:
    assert word_of(ABOUT, [], None, is_pressed=False) == "idle"
    ended = RecentOutcomes(job="clean", completed=1, failed=0, last_at=NOW)
    assert word_of(ABOUT, [], ended, is_pressed=False) == "ok"
    assert word_of(waiting(1), [], ended, is_pressed=False) == "waiting"
    assert word_of(waiting(1), [pause("operator")], None, is_pressed=False) == "paused"
    assert word_of(waiting(1), [pause("operator")], None, is_pressed=True) == "pressed"


def test_the_legend_says_as_many_minutes_as_are_looked_at() -> None:
    assert STATES["ok"] == f"has completed tasks in the last {RECENT_MINUTES} minutes"


def an_input(dataset: str, *, is_trigger: bool = True) -> JobInput:
    return JobInput(
        input=dataset,
        dataset=dataset,
        writer=dataset,
        is_trigger=is_trigger,
        reads="partition",
        is_told=False,
        is_writer_paused=False,
        writer_dead=0,
        published_at=None,
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Runs on new data of sales or prices."),
        (
            {"when": "all"},
            "Runs on new data of sales and prices for a partition.",
        ),
        ({"activation": "source", "source": {"kind": "manual"}}, "Waits to be triggered."),
    ],
)
def test_an_idle_job_says_what_makes_it_run(body: dict[str, Any], said: str) -> None:
    read = an_input("shops", is_trigger=False)
    about = replace(ABOUT, body=body, inputs=[an_input("sales"), an_input("prices"), read])
    assert waits_for(about) == said


def test_a_definition_says_also_what_has_its_default() -> None:
    pairs = dict(job_definition(ABOUT).pairs)
    assert pairs["Attempts"] == (
        "3, the second 10 s after the first has failed; each pause is 2 times the last,"
        " 10 min at most"
    )
    assert pairs["Concurrency"] == "unlimited"
    assert pairs["Timeout"] == "1 h per attempt"
    assert "Secrets" not in pairs
    body = {
        "secrets": {"password": "env:SHOP"},
        "max_queue_depth": 10_000,
        "coalesce": 20,
        "unique_key": ["day"],
    }
    about = replace(ABOUT, body=body, update_mode="append", max_attempts=1, max_concurrency=1)
    pairs = dict(job_definition(about).pairs)
    assert pairs["Secrets"] == "password from env:SHOP"
    assert pairs["Concurrency"] == "one task, up to 20 of them run as one"
    assert pairs["New events"] == "is appended, once per task"
    merging = {"unique_key": ["day", "shop"], "version_by": "at", "delete_when": "op = 'd'"}
    pairs = dict(job_definition(replace(about, body=merging, update_mode="merge")).pairs)
    assert pairs["New events"] == (
        "is merged: one row for each day, shop, the highest at; deleted when op = 'd'"
    )
    pairs = dict(
        job_definition(replace(about, body={"unique_key": ["a"]}, update_mode="merge")).pairs
    )
    assert pairs["New events"] == "is merged: one row for each a, that of the latest task"
    pairs = dict(job_definition(about).pairs)
    assert pairs["Queue limit"] == "10,000 tasks that wait; beyond it, upstream jobs are paused"
    assert pairs["Attempts"] == "one"


def test_a_query_stands_by_itself_and_the_rest_is_yaml() -> None:
    config = {"sql": "SELECT 1\nFROM a\n", "sql_file": "a.sql", "sort_by": ["shop"]}
    body = {"outputs": [{"name": "b"}], "runtime": "spark", "config": config}
    found = job_definition(replace(ABOUT, body=body))
    assert (found.sql, found.sql_file) == ("SELECT 1\nFROM a", "a.sql")
    assert found.config == "sort_by:\n- shop\n"
    assert found.whole.splitlines()[:2] == ["clean:", "  runtime: spark"]
    assert "SELECT" not in found.whole


def a_job(name: str, **fields: Any) -> JobAnswer:
    said: dict[str, Any] = {
        "activation": "reactive",
        "runtime": "process",
        "operator": "a:b",
        "priority": "normal",
        "generation": "g",
        "is_building": False,
        "outputs": [],
        "queued": 0,
        "running": 0,
        "dead": 0,
        "oldest_seconds": 0.0,
        "paused": [],
    }
    return JobAnswer(name=name, **{**said, **fields})


def reading(writer: str, reader: str, *, is_trigger: bool = True) -> DagEdge:
    return DagEdge(
        reader=reader,
        input=writer,
        dataset=f"{writer}s",
        writer=writer,
        is_trigger=is_trigger,
        reads="partition",
    )


def test_edges_say_where_the_pressure_is_and_who_is_held_back() -> None:
    jobs = {name: a_job(name) for name in ("feed", "clean", "report", "shops")}
    readings = [
        reading("feed", "clean"),
        reading("clean", "report"),
        reading("shops", "report", is_trigger=False),
    ]
    pressures = PressuresAnswer(jobs=[pressure("report", "clean", "feed")], pauses=[])
    nodes, edges, _, _ = pipeline._graph(jobs, readings, {}, pressures)
    found = {each.told.partition(" reads ")[2].partition(" of ")[0]: each for each in edges}
    assert found["cleans"].state == "pressed"
    assert found["cleans"].told == (
        "report reads cleans of clean, and its queue exceeds its limit:"
        " 12 tasks of report are queued; the limit is 10. clean is paused until it is shorter."
    )
    assert found["feeds"].state == "held"
    assert found["feeds"].told.endswith("; feed is paused for the queue of report")
    # What is only read fills no queue.
    assert found["shopss"].state == "read"
    assert {each.name: each.pressure for each in nodes}["report"] == "12 waiting, limit 10"
    assert {each.name: each.state for each in nodes}["report"] == "pressed"


def test_what_presses_a_job_stands_above_it_until_it_is_over() -> None:
    found = pressure()
    assert pipeline._pressure(found) == "12 waiting, limit 10"
    found.depth = 7
    assert pipeline._pressure(found) == "7 waiting, draining"
    found.max_queue_age_seconds = 60.0
    assert pipeline._pressure(found) == "waiting for 1 min, limit 1 min"


def test_a_node_is_drawn_in_its_worst_state() -> None:
    ended = RecentOutcomes(job="a", completed=3, failed=0, last_at=NOW)
    assert state_of(a_job("a"), ended, is_pressed=False) == "ok"
    assert state_of(a_job("a"), None, is_pressed=False) == "idle"
    assert state_of(a_job("a", queued=1), ended, is_pressed=False) == "waiting"
    assert state_of(a_job("a", running=1, queued=1), ended, is_pressed=False) == "running"
    paused = a_job("a", running=1, paused=["x"])
    assert state_of(paused, ended, is_pressed=False) == "paused"
    assert state_of(paused, ended, is_pressed=True) == "pressed"
    assert state_of(a_job("a", dead=1), ended, is_pressed=True) == "dead"
    assert list(STATES) == ["dead", "pressed", "paused", "running", "waiting", "ok", "idle"]
