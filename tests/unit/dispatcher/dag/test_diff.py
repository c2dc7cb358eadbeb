"""What is rebuilt when a DAG is edited, and what keeps its generation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatcher.dag.canonical import (
    JobChange,
    canonical,
    definition_hash,
    diff,
    lineage_hash,
    lineage_hashes,
)
from penstock.dispatcher.dag.model import Dag, Graph, Job
from penstock.dispatcher.dag.parser import parse, parse_stored
from tests.sizes import some
from tests.unit.dispatcher.dag.drawing import dags

TEXT = (Path(__file__).parent / "example.yaml").read_text("utf-8")
EXAMPLE = parse(TEXT, "example.yaml")


def _edited(*pairs: tuple[str, str]) -> Dag:
    text = TEXT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return parse(text, "edited.yaml")


def test_nothing_changed() -> None:
    found = diff(EXAMPLE, parse(f"# words\n{TEXT}", "again.yaml"))
    assert found.is_empty
    assert found.unchanged == ("clean", "days", "fetch", "hourly", "report")
    assert found.new_generations() == frozenset()


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("timeout: 10m", "timeout: 20m", "timeout"),
        ("priority: bulk", "priority: normal", "priority"),
        ("max_attempts: 5", "max_attempts: 6", "max_attempts"),
        ("{first: 5s,", "{first: 6s,", "retry"),
        ("max_concurrency: 4", "max_concurrency: 5", "max_concurrency"),
        ("max_concurrency: 4", "max_concurrency: 4\n    coalesce: 50", "coalesce"),
        ("max_concurrency: 4", "max_concurrency: 4\n    merge_updates: true", "merge_updates"),
        ("[departures]", "[{name: departures, keep: {partitions: 7, age: 730d}}]", "outputs"),
        ("[departures]", "[{name: departures, maintain: {compact: true}}]", "outputs"),
        ("[departures]", "[{name: departures, columns: {a: int}}]", "outputs"),
        ("[departures]", "[{name: departures, columns: {a: int}, storage: postgres}]", "outputs"),
    ],
)
def test_how_a_job_is_run_rebuilds_nothing(old: str, new: str, field: str) -> None:
    found = diff(EXAMPLE, _edited((old, new)))
    assert found.changed == {"fetch": JobChange((field,), keeps_generation=True)}
    assert found.rebuilt == ()
    assert found.new_generations() == frozenset()
    assert not found.is_empty


def test_a_schedule_rebuilds_nothing() -> None:
    for new in (
        "cron: 6 *",
        "time_zone: Europe/Zurich\n      cron: 0 *",
        "catch_up: false\n      cron: 0 *",
    ):
        found = diff(EXAMPLE, _edited(("cron: 0 *", new)))
        assert found.changed == {"hourly": JobChange(("source",), keeps_generation=True)}
        assert found.new_generations() == frozenset()


def test_what_a_schedule_emits_rebuilds_all_that_follows() -> None:
    cursors = _edited(("      emits: interval\n", ""))
    for found in (diff(EXAMPLE, cursors), diff(cursors, EXAMPLE)):
        assert found.changed == {"hourly": JobChange(("source",), keeps_generation=False)}
        assert found.rebuilt == ("clean", "days", "fetch", "report")
    assert diff(cursors, _edited(("emits: interval", "emits: cursor"))).is_empty


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("flights.clean:clean", "flights.clean:clean2", "operator"),
        ("[fetch.departures]", "[{from: departures, where: start > 1}]", "inputs"),
        ("[fetch.departures]", "[{from: departures, as: rows}]", "inputs"),
        ("[fetch.departures]", "[{from: departures, read: all}]", "inputs"),
        ("[fetch.departures]", "[departures, {from: ticks, trigger: false}]", "inputs"),
        (
            "    max_queue_age: 30m",
            "    max_queue_age: 30m\n    execution: per_update",
            "execution",
        ),
        ("    max_queue_age: 30m", "    max_queue_age: 30m\n    config: {x: 1}", "config"),
    ],
)
def test_what_a_job_writes_rebuilds_it_and_all_downstream(old: str, new: str, field: str) -> None:
    found = diff(EXAMPLE, _edited((old, new)))
    assert found.changed == {"clean": JobChange((field,), keeps_generation=False)}
    assert found.rebuilt == ("days", "report")
    assert found.unchanged == ("fetch", "hourly")
    assert found.new_generations() == {"clean", "days", "report"}


def test_a_job_that_is_changed_and_whose_upstream_is_changed() -> None:
    edits = (("clean:clean", "clean:new"), ("merge_updates: true", "timeout: 5m"))
    found = diff(EXAMPLE, _edited(*edits))
    assert found.changed["report"] == JobChange(
        ("merge_updates", "timeout"), keeps_generation=False
    )


def test_numbers_and_booleans_are_different() -> None:
    one, two, three = (_edited(("pages: 20", f"pages: {each}")) for each in ("1", "true", "1.0"))
    for old, new in [(one, two), (one, three), (two, three)]:
        assert diff(old, new).changed["fetch"] == JobChange(("config",), keeps_generation=False)


def test_jobs_come_and_go() -> None:
    job = "  more: {runtime: process, operator: f, inputs: daily_report}\n"
    more = parse(TEXT + job, "more.yaml")
    assert diff(EXAMPLE, more).added == ("more",)
    assert diff(EXAMPLE, more).new_generations() == {"more"}
    assert diff(more, EXAMPLE).removed == ("more",)
    assert diff(more, EXAMPLE).unchanged == ("clean", "days", "fetch", "hourly", "report")


def test_an_input_that_comes_from_another_job_is_another_input() -> None:
    # The dataset moves to a job with another definition: its reader says the same and is rebuilt.
    text = (
        "jobs:\n  s: {activation: source, source: {kind: manual}, outputs: [x%s]}\n"
        "  t: {activation: source, source: {kind: manual}, outputs: [%s]}\n"
        "  r: {runtime: process, operator: f, inputs: x}\n"
    )
    old, new = parse(text % ("", "y"), "old"), parse(text % ("2", "x, y"), "new")
    assert diff(old, new).rebuilt == ("r",)


def test_the_hashes_stay_from_release_to_release() -> None:
    # They decide whether data is rebuilt: a change of them here rebuilds everybody's.
    # Earlier releases asked for a key of what is appended.
    key = ("    update: append\n", "    update: append\n    unique_key: [day, airport]\n")
    stored = parse_stored(TEXT.replace(*key), "version 1")
    assert definition_hash(stored.job("report")) == (
        "b79620ac89c331f52b691cefe26991e22f2df729d90bc26af5a4983c260cbb78"
    )
    assert lineage_hash(stored, "report") == (
        "7b2676f8ce4bd27c668c502fa1d4d46fa8e6155ec11c85b3e69a3c3694d395e9"
    )
    # As it was before there were intervals.
    earlier = TEXT.replace(*key).replace("      emits: interval\n", "")
    assert lineage_hash(parse_stored(earlier, "version 0"), "report") == (
        "45ff0dbe5f62ae39106d4d2b26f77ce7e3d44e17818e5cb804b0b2fb8a99e795"
    )


@given(dags(), dags())
@settings(deadline=None, max_examples=some(100))
def test_every_job_is_in_one_place(old: Dag, new: Dag) -> None:
    found = diff(old, new)
    places = [
        *found.added,
        *found.removed,
        *found.changed,
        *found.rebuilt,
        *found.unchanged,
    ]
    assert sorted(places) == sorted({job.name for job in (*old.jobs, *new.jobs)})
    back = diff(new, old)
    assert (back.added, back.removed) == (found.removed, found.added)
    assert back.changed == found.changed
    assert (back.rebuilt, back.unchanged) == (found.rebuilt, found.unchanged)
    assert found.is_empty == (canonical(old) == canonical(new))


@given(dags(most=6), st.data())
@settings(deadline=None, max_examples=some(100))
def test_an_edit_reaches_what_is_downstream_and_nothing_else(dag: Dag, data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(dag.jobs))
    edited = replace(target, config={**target.config, "edited": "yes, edited"})
    new = _replaced(dag, edited)
    found = diff(dag, new)
    graph = Graph(dag)
    assert set(found.changed) == {target.name}
    assert set(found.rebuilt) == graph.downstream(target.name)
    assert found.new_generations() == {target.name, *graph.downstream(target.name)}
    before, after = lineage_hashes(dag), lineage_hashes(new)
    assert {name for name in before if before[name] != after[name]} == found.new_generations()


@given(dags(most=6), st.data())
@settings(deadline=None, max_examples=50)
def test_a_timeout_reaches_nothing(dag: Dag, data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(dag.jobs))
    new = _replaced(dag, replace(target, timeout_ms=target.timeout_ms + 1))
    assert lineage_hashes(new) == lineage_hashes(dag)
    found = diff(dag, new)
    assert found.changed == {target.name: JobChange(("timeout",), keeps_generation=True)}
    assert found.rebuilt == ()


def _replaced(dag: Dag, edited: Job) -> Dag:
    return Dag(tuple(edited if job.name == edited.name else job for job in dag.jobs))
