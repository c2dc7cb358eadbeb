"""Who feeds whom, in which order, and how a DAG looks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatcher.dag.canonical import show
from penstock.dispatcher.dag.model import (
    Activation,
    Dag,
    Graph,
    InputSpec,
    Job,
    ManualSource,
    OutputSpec,
    RangeAggregate,
    RangeSplit,
)
from penstock.dispatcher.dag.parser import parse
from tests.sizes import some
from tests.unit.dispatcher.dag.drawing import dags

EXAMPLE = parse((Path(__file__).parent / "example.yaml").read_text("utf-8"), "example.yaml")


def _wired(edges: dict[str, str]) -> Dag:
    """Jobs of one letter, each with the letters that it reads from."""
    return Dag(
        tuple(
            Job(
                name=name,
                inputs=tuple(InputSpec(each, each) for each in sorted(feeders)),
                outputs=(OutputSpec(name, name),),
            )
            for name, feeders in sorted(edges.items())
        )
    )


def test_the_example() -> None:
    graph = Graph(EXAMPLE)
    assert graph.order() == ("hourly", "fetch", "clean", "days", "report")
    assert graph.upstream("days") == {"hourly", "fetch", "clean"}
    assert graph.downstream("clean") == {"days", "report"}
    assert graph.upstream("hourly") == frozenset()
    assert graph.feeders["report"] == ("days",)
    assert graph.readers["clean"] == ("days",)
    assert graph.writers["daily_report"] == "report"


def test_where_names_alone_decide_they_do() -> None:
    assert Graph(_wired({"z": "", "a": "", "m": "za", "b": "z"})).order() == ("a", "z", "b", "m")


@given(dags(most=8))
@settings(deadline=None, max_examples=some(100))
def test_the_order_and_the_closures_agree(dag: Dag) -> None:
    graph = Graph(dag)
    order = graph.order()
    assert sorted(order) == [job.name for job in dag.jobs]
    for job in order:
        before = set(order[: order.index(job)])
        assert graph.upstream(job) <= before
        assert graph.upstream(job) >= set(graph.feeders[job])
        assert all(job in graph.downstream(each) for each in graph.upstream(job))
        assert all(job in graph.upstream(each) for each in graph.downstream(job))
    assert graph.cycles() == ()


@pytest.mark.parametrize(
    ("edges", "cycles"),
    [
        ({"a": "a"}, [("a",)]),
        ({"a": "b", "b": "a"}, [("a", "b")]),
        ({"c": "b", "b": "a", "a": "c"}, [("a", "b", "c")]),
        ({"a": "", "b": "ac", "c": "b", "d": "c", "e": "d"}, [("b", "c")]),
        ({"a": "b", "b": "a", "c": "d", "d": "cb"}, [("a", "b"), ("d",)]),
    ],
)
def test_cycles(edges: dict[str, str], cycles: list[tuple[str, ...]]) -> None:
    found = Graph(_wired(edges)).cycles()
    for cycle in found:
        for feeder, reader in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            assert feeder in edges[reader]
    if len(edges) < 4:
        assert list(found) == cycles
    assert len(found) == len(cycles)


def test_on_a_cycle_a_job_is_not_upstream_of_itself() -> None:
    graph = Graph(_wired({"a": "b", "b": "ac", "c": ""}))
    assert graph.upstream("a") == {"b", "c"}
    assert graph.downstream("a") == {"b"}


@given(st.dictionaries(st.sampled_from("abcdefg"), st.sets(st.sampled_from("abcdefg"))))
def test_what_is_left_without_the_cycles_has_an_order(drawn: dict[str, set[str]]) -> None:
    edges = {name: "".join(sorted(found & drawn.keys())) for name, found in drawn.items()}
    cycles = Graph(_wired(edges)).cycles()
    on_cycles = {name for cycle in cycles for name in cycle}
    assert len(on_cycles) == sum(map(len, cycles))
    left = {
        name: "".join(each for each in feeders if each not in on_cycles)
        for name, feeders in edges.items()
        if name not in on_cycles
    }
    assert len(Graph(_wired(left)).order()) == len(left)


def test_a_long_chain_is_no_deeper_than_a_short_one() -> None:
    names = [f"j{number:04}" for number in range(1000)]
    source = Job(
        name=names[0],
        activation=Activation.SOURCE,
        source=ManualSource(),
        outputs=(OutputSpec(names[0], names[0]),),
    )
    jobs = [
        Job(name=name, inputs=(InputSpec(before, before),), outputs=(OutputSpec(name, name),))
        for before, name in itertools.pairwise(names)
    ]
    dag = Dag((source, *jobs))
    assert Graph(dag).order() == tuple(names)
    assert len(Graph(dag).upstream(names[-1])) == 999
    assert len(show(dag).splitlines()) == 1000


def test_it_is_shown_as_a_tree() -> None:
    assert show(EXAMPLE) == (
        "hourly              cron 0 * * * * UTC, intervals; writes ticks\n"
        "└─ fetch            process flights.fetch:departures; writes departures; bulk\n"
        "   └─ clean         process flights.clean:clean; writes flights\n"
        "      └─ days       dispatcher range_aggregate; writes full_days\n"
        "         └─ report  process flights.report:daily; writes daily_report\n"
    )


def test_who_reads_several_is_shown_once_and_says_so() -> None:
    lines = show(_wired({"a": "", "b": "a", "c": "ab"})).splitlines()
    assert [line.split() for line in lines][2][:2] == ["└─", "c"]
    assert "reads a, b" in lines[2]


def test_branches_of_a_tree() -> None:
    lines = show(_wired({"a": "", "b": "a", "c": "a", "d": "b", "e": "cd", "z": ""})).splitlines()
    assert [line.split("  writes")[0].split("  reads")[0].rstrip() for line in lines] == [
        "a",
        "├─ b",
        "│  └─ d",
        "│     └─ e",
        "└─ c",
        "z",
    ]


@given(dags(most=8))
@settings(deadline=None, max_examples=50)
def test_every_job_is_shown_once(dag: Dag) -> None:
    shown = [line.lstrip("└├│─ ").split(" ")[0] for line in show(dag).splitlines()]
    assert sorted(shown) == [job.name for job in dag.jobs]


def test_ranges_of_platform_operators() -> None:
    assert EXAMPLE.job("days").ranges == RangeAggregate(size=86_400, step=86_400)
    assert EXAMPLE.job("clean").ranges is None
    split = Job(name="x", runtime="dispatcher", operator="range_split", config={"size": 5})
    assert split.ranges == RangeSplit(5)


def test_pressure_ends_at_half_of_the_maximum_or_where_it_is_told_to() -> None:
    clean = EXAMPLE.job("clean")
    assert (clean.resumes_at_depth, clean.resumes_at_age_ms) == (2000, 15 * 60_000)
    assert Job(name="x", max_queue_depth=7).resumes_at_depth == 3
    assert (Job(name="x").resumes_at_depth, Job(name="x").resumes_at_age_ms) == (None, None)
    with pytest.raises(KeyError):
        EXAMPLE.job("nobody")
