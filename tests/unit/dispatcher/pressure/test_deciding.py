"""Who is pressed and who pauses: properties over any DAG, and the cases that are worth reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.dispatcher.backpressure import (
    ALL_FROM,
    CAUSE,
    PauseScope,
    PressureDecision,
    PressurePause,
    PressureState,
    QueueMeasure,
    decide,
    depth_counted_max,
    has_limits,
)
from penstock.dispatcher.dag.model import Dag, Graph, InputSpec, Job, OutputSpec, Priority
from penstock.dispatcher.dag.parser import parse

CALM = PressureState()
SWINGS = st.sampled_from([0.0, 0.2, 0.6, 0.8, 1.2, 3.0])
STATES = st.sampled_from(
    [CALM, PressureState(PauseScope.BULK, "before"), PressureState(PauseScope.ALL, "before")]
)


@st.composite
def dags(draw: st.DrawFn) -> Dag:
    """Jobs that read from some of those before them, with limits, and bulk where they feed one."""
    jobs: list[Job] = []
    for number in range(draw(st.integers(1, 6))):
        edges = draw(st.sets(st.integers(0, number - 1))) if number else set()
        depth = draw(st.none() | st.integers(1, 1000))
        age_ms = draw(st.none() | st.integers(1000, 10**6))
        jobs.append(
            Job(
                name=f"j{number}",
                inputs=tuple(InputSpec(f"d{each}", f"d{each}") for each in sorted(edges)),
                outputs=(OutputSpec(f"d{number}", f"d{number}"),),
                priority=draw(st.sampled_from(Priority)),
                max_queue_depth=depth,
                resume_queue_depth=draw(st.none() | st.integers(0, depth - 1)) if depth else None,
                max_queue_age_ms=age_ms,
                resume_queue_age_ms=draw(st.none() | st.integers(0, age_ms - 1))
                if age_ms
                else None,
            )
        )
    return Dag(tuple(jobs))


@st.composite
def measures_of(draw: st.DrawFn, dag: Dag) -> dict[str, QueueMeasure]:
    """Measures near the thresholds of the jobs, where decisions are made."""
    found = {}
    for job in dag.jobs:
        depths = st.just(0)
        if job.max_queue_depth is not None and job.resumes_at_depth is not None:
            low, high = job.resumes_at_depth, job.max_queue_depth
            edges = [0, low, low + 1, high, high + 1, int(high * ALL_FROM), high * 2]
            depths = st.sampled_from(edges)
        ages = st.just(0.0)
        if job.max_queue_age_ms is not None and job.resumes_at_age_ms is not None:
            low, high = job.resumes_at_age_ms, job.max_queue_age_ms
            ages = st.sampled_from([0, low, low + 1, high, high + 1, high * 2]).map(
                lambda milliseconds: milliseconds / 1000
            )
        found[job.name] = QueueMeasure(draw(depths), draw(ages), draw(st.booleans()))
    return found


@st.composite
def situations(draw: st.DrawFn) -> tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]]:
    dag = draw(dags())
    before = {job.name: draw(STATES) for job in dag.jobs if has_limits(job)}
    return dag, draw(measures_of(dag)), before


def shares(job: Job, measure: QueueMeasure) -> list[float]:
    found = []
    if job.max_queue_depth is not None:
        found.append(measure.depth / job.max_queue_depth)
    if job.max_queue_age_ms is not None:
        found.append(measure.oldest_seconds * 1000 / job.max_queue_age_ms)
    return found


def is_over(job: Job, measure: QueueMeasure) -> bool:
    return any(share > 1 for share in shares(job, measure))


def is_below(job: Job, measure: QueueMeasure) -> bool:
    return not (
        (job.resumes_at_depth is not None and measure.depth > job.resumes_at_depth)
        or (
            job.resumes_at_age_ms is not None
            and measure.oldest_seconds * 1000 > job.resumes_at_age_ms
        )
    )


def is_bulk(job: Job, measures: Mapping[str, QueueMeasure]) -> bool:
    return job.priority is Priority.BULK or measures[job.name].has_bulk


@given(situations())
def test_pressed_over_a_limit_and_calm_below_all(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]],
) -> None:
    dag, measures, before = situation
    decision = decide(dag, measures, before)
    assert set(decision.states) == {job.name for job in dag.jobs if has_limits(job)}
    for job in dag.jobs:
        if not has_limits(job):
            continue
        state = decision.states[job.name]
        assert state.is_pressed == (state.reason is not None)
        if is_over(job, measures[job.name]):
            assert state.is_pressed
        elif is_below(job, measures[job.name]):
            assert state == CALM
        else:
            assert state == before[job.name], "between the thresholds nothing moves"


@given(situations())
def test_deciding_again_changes_nothing(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]],
) -> None:
    dag, measures, before = situation
    once = decide(dag, measures, before)
    assert decide(dag, measures, once.states) == once


@given(situations(), st.data())
def test_a_queue_that_swings_makes_nobody_stop_and_go(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]], data: st.DataObject
) -> None:
    """As long as no measure comes down to where pressure ends, what is paused stays paused."""
    dag, _, state = situation
    limited = [job for job in dag.jobs if has_limits(job)]
    assume(limited)
    job = data.draw(st.sampled_from(limited))
    low = min(
        [
            threshold + 1
            for threshold in (job.resumes_at_depth, job.resumes_at_age_ms)
            if threshold is not None
        ]
    )
    paused: set[str] = set()
    for swing in data.draw(st.lists(SWINGS, min_size=2, max_size=6)):
        depth = low if job.max_queue_depth is None else int(low + swing * job.max_queue_depth)
        age_ms = low if job.max_queue_age_ms is None else int(low + swing * job.max_queue_age_ms)
        measures = {job.name: QueueMeasure(depth, age_ms / 1000)}
        decision = decide(dag, measures, state)
        now = {each.job for each in decision.pauses if each.cause == CAUSE + job.name}
        assert paused <= now
        paused, state = now, decision.states


@given(situations())
def test_every_pause_has_a_pressed_job_downstream(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]],
) -> None:
    dag, measures, before = situation
    graph = Graph(dag)
    decision = decide(dag, measures, before)
    for pause in decision.pauses:
        pressed = pause.cause.removeprefix(CAUSE)
        assert decision.states[pressed].is_pressed
        assert pressed in graph.downstream(pause.job)
        assert pause.job != pressed


@given(situations())
def test_all_edges_are_followed(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]],
) -> None:
    """Whoever feeds a paused or pressed job is paused too, as far as it is not only bulk."""
    dag, measures, before = situation
    graph = Graph(dag)
    decision = decide(dag, measures, before)
    for name, state in decision.states.items():
        by_this = {each.job for each in decision.pauses if each.cause == CAUSE + name}
        if not state.is_pressed:
            assert by_this == set()
            continue
        reached = {name, *by_this}
        feeders = {feeder for each in reached for feeder in graph.feeders[each]}
        if state.scope is PauseScope.ALL:
            assert feeders <= by_this
        else:
            assert {each for each in feeders if is_bulk(dag.job(each), measures)} <= by_this


def test_what_is_only_read_is_not_paused() -> None:
    text = """
jobs:
  s: {activation: source, source: {kind: manual}, outputs: [raw]}
  t: {activation: source, source: {kind: manual}, outputs: [planes]}
  a:
    runtime: process
    operator: f
    inputs: [raw, {from: planes, trigger: false}]
    max_queue_depth: 5
"""
    decision = decide(parse(text, "dag.yaml"), {"a": QueueMeasure(100, 0.0)}, {})
    assert {each.job for each in decision.pauses} == {"s"}


@given(situations())
def test_bulk_goes_first(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]],
) -> None:
    dag, measures, _ = situation
    graph = Graph(dag)
    decision = decide(dag, measures, {})
    for name, state in decision.states.items():
        job = dag.job(name)
        upstream = [dag.job(each) for each in graph.upstream(name)]
        has_bulk = any(is_bulk(each, measures) for each in upstream)
        is_far_over = max(shares(job, measures[name])) >= ALL_FROM
        if state.is_pressed:
            assert (state.scope is PauseScope.BULK) == (has_bulk and not is_far_over)
        if state.scope is PauseScope.BULK:
            paused = {each.job for each in decision.pauses if each.cause == CAUSE + name}
            assert paused == {each.name for each in upstream if is_bulk(each, measures)}


@given(situations())
def test_nothing_is_paused_when_nothing_is_pressed(
    situation: tuple[Dag, dict[str, QueueMeasure], dict[str, PressureState]],
) -> None:
    dag, _, before = situation
    empty = decide(dag, {}, before)
    assert empty.pauses == frozenset()
    assert not any(state.is_pressed for state in empty.states.values())
    unlimited = Dag(
        tuple(replace(job, max_queue_depth=None, max_queue_age_ms=None) for job in dag.jobs)
    )
    assert decide(unlimited, {}, before) == PressureDecision({}, frozenset())


@given(dags())
def test_depth_is_counted_beyond_every_threshold(dag: Dag) -> None:
    for job in dag.jobs:
        if job.max_queue_depth is not None:
            assert depth_counted_max(job) >= job.max_queue_depth * ALL_FROM


DIAMOND = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  left: {runtime: process, operator: "a:left", inputs: [raw], outputs: [l], priority: bulk}
  right: {runtime: process, operator: "a:right", inputs: [raw], outputs: [r]}
  join:
    runtime: process
    operator: a:join
    inputs: [l, r]
    max_queue_depth: 100
    resume_queue_depth: 20
    max_queue_age: 10m
"""


def paused(decision: PressureDecision) -> dict[str, str]:
    return {each.job: each.scope.value for each in decision.pauses}


@pytest.fixture(scope="module")
def diamond() -> Dag:
    return parse(DIAMOND, "diamond")


def at(depth: int = 0, minutes: float = 0) -> dict[str, QueueMeasure]:
    return {"join": QueueMeasure(depth, minutes * 60)}


def test_the_story_of_a_queue(diamond: Dag) -> None:
    calm = decide(diamond, at(100), {})
    assert paused(calm) == {}
    shedding = decide(diamond, at(101), calm.states)
    assert paused(shedding) == {"left": "bulk"}
    assert shedding.pauses == {
        PressurePause(
            "left",
            "pressure:join",
            PauseScope.BULK,
            "101 tasks of join are queued; the limit is 100.",
        )
    }
    far_over = decide(diamond, at(150), shedding.states)
    everything = {"feed": "all", "left": "all", "right": "all"}
    assert paused(far_over) == everything
    assert far_over.states["join"].reason == "150 tasks of join are queued; the limit is 100."
    # It swings about one and a half times its limit: nobody stops and goes.
    assert decide(diamond, at(120), far_over.states) == far_over
    draining = decide(diamond, at(21), far_over.states)
    assert paused(draining) == everything
    assert draining.states == far_over.states
    assert paused(decide(diamond, at(20), draining.states)) == {}


def test_age_alone_is_pressure_and_its_own_reason(diamond: Dag) -> None:
    old = decide(diamond, at(1, minutes=10.5), {})
    assert paused(old) == {"left": "bulk"}
    reason = "The oldest task of join has waited for 10m30s; the limit is 10m."
    assert old.states["join"].reason == reason
    # The depth is low enough, the age is not.
    assert paused(decide(diamond, at(1, minutes=5.1), old.states)) == {"left": "bulk"}
    assert paused(decide(diamond, at(1, minutes=5), old.states)) == {}


def test_without_bulk_all_give_way_at_once(diamond: Dag) -> None:
    plain = Dag(tuple(replace(job, priority=Priority.NORMAL) for job in diamond.jobs))
    assert paused(decide(plain, at(101), {})) == {"feed": "all", "left": "all", "right": "all"}
    # Bulk tasks of a normal job, as a backfill makes them, are shed first too.
    busy = {**at(101), "right": QueueMeasure(has_bulk=True)}
    shedding = decide(plain, busy, {})
    assert paused(shedding) == {"right": "bulk"}
    # They have ended, and it is still too much.
    assert paused(decide(plain, at(101), shedding.states)) == {
        "feed": "all",
        "left": "all",
        "right": "all",
    }
    # They have ended, and it is less already: nothing moves.
    assert paused(decide(plain, at(99), shedding.states)) == {}
    assert decide(plain, at(99), shedding.states).states == shedding.states
