"""Who is pressed, and who pauses for it: one pure function of the DAG, the measures, and before.

A job with limits is in one of three states:

| state | becomes | when |
|---|---|---|
| calm | pressed, bulk | over a limit, and something upstream is bulk |
| calm | pressed, all | over a limit by half or more, or nothing upstream is bulk |
| pressed, bulk | pressed, all | as above: shedding bulk was not enough, or there is none left |
| pressed, either | calm | at or below every threshold of resuming |

Between the thresholds nothing moves, in either direction: that is the hysteresis. From `all`
nothing goes back to `bulk`, so a queue that swings about one and a half times its limit does not
make its upstream stop and go.

A pressed job pauses everything upstream of it, along all edges: by `all` every job, by `bulk` those
that are bulk or have bulk tasks (a backfill's, for instance). It never pauses itself: then it would
not drain. As there is no cycle, the furthest downstream can always work. Called by `pressures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from penstock.dispatcher.dag.graph import Graph
from penstock.dispatcher.dag.model import Dag, Job, Priority
from penstock.dispatcher.dag.units import duration_text
from penstock.dispatcher.pressure.values import CAUSE, Decision, Measure, Pause, Scope, State

ALL_FROM: Final = 1.5
"""At this many times its limit a queue makes all of its upstream pause, not only what is bulk.
Routing fills it no further: see `penstock_depth_max`."""
DEPTH_SHOWN_MAX: Final = 10_000


def has_limits(job: Job) -> bool:
    """Whether a job can be pressed."""
    return job.max_queue_depth is not None or job.max_queue_age_ms is not None


def depth_counted_max(job: Job) -> int:
    """To where the depth of a job has to be counted for a decision."""
    if job.max_queue_depth is None:
        return DEPTH_SHOWN_MAX
    return max(DEPTH_SHOWN_MAX, int(job.max_queue_depth * ALL_FROM) + 1)


def decide(dag: Dag, measures: Mapping[str, Measure], before: Mapping[str, State]) -> Decision:
    """What is so now. Jobs without a measure have empty queues; those without a state are calm."""
    # What is only read fills no queue: pausing it would help nobody.
    graph = Graph(dag, by_triggers=True)
    bulk = {
        job.name
        for job in dag.jobs
        if job.priority is Priority.BULK or measures.get(job.name, Measure()).has_bulk
    }
    states: dict[str, State] = {}
    pauses: set[Pause] = set()
    for job in dag.jobs:
        if not has_limits(job):
            continue
        upstream = graph.upstream(job.name)
        measure = measures.get(job.name, Measure())
        state = _state(
            job,
            measure,
            before.get(job.name, State()),
            has_bulk_upstream=not bulk.isdisjoint(upstream),
        )
        states[job.name] = state
        if state.scope is not None and state.reason is not None:
            paused = upstream if state.scope is Scope.ALL else upstream & bulk
            pauses |= {Pause(each, CAUSE + job.name, state.scope, state.reason) for each in paused}
    return Decision(states, frozenset(pauses))


def _state(job: Job, measure: Measure, before: State, *, has_bulk_upstream: bool) -> State:
    highest = max((share for share, _ in _over(job, measure)), default=0.0)
    if highest <= 1:
        return before if before.is_pressed and not _is_calm(job, measure) else State()
    scope = Scope.BULK if has_bulk_upstream and highest < ALL_FROM else Scope.ALL
    if before.scope in (scope, Scope.ALL):
        return before
    return State(scope, " ".join(said for share, said in _over(job, measure) if share > 1))


def _over(job: Job, measure: Measure) -> Iterator[tuple[float, str]]:
    """How many times its limits each measure is, and what to say of it."""
    if (limit := job.max_queue_depth) is not None:
        share = measure.depth / limit
        yield share, f"{measure.depth:,} tasks of {job.name} wait, and {limit:,} may."
    if (limit_ms := job.max_queue_age_ms) is not None:
        waited = duration_text(int(measure.oldest_seconds) * 1000)
        allowed = duration_text(limit_ms)
        share = measure.oldest_seconds * 1000 / limit_ms
        yield share, f"A task of {job.name} has waited for {waited}, and {allowed} is the limit."


def _is_calm(job: Job, measure: Measure) -> bool:
    depth, age_ms = job.resumes_at_depth, job.resumes_at_age_ms
    return (depth is None or measure.depth <= depth) and (
        age_ms is None or measure.oldest_seconds * 1000 <= age_ms
    )
