"""Events in, tasks out, on a real Postgres."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from penstock.dispatcher.dag.filters import accepts, parse_where
from penstock.dispatcher.deployment_plan import CutOverOutcome
from penstock.dispatcher.events import (
    Acceptance,
    AcceptedEvent,
    EventRefusalReason,
    NewEvent,
    RefusedEvent,
    RoutingResult,
)
from penstock.dispatcher.router import BATCH_MAX, Router, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import AttemptEnd, Completion, TaskOutput
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from tests.integration.dispatcher.test_deployment import SINK, Pipeline, chain
from tests.integration.dispatcher.world import Play, World, either_way

NOWHERE = "00000000-0000-0000-0000-000000000000"
FEED = """
jobs:
  feed:
    activation: source
    source: {kind: manual}
    outputs: [raw]
"""


def reader(name: str, *, where: str = "", **fields: str) -> str:
    """A job that reads the source, and what else is said of it."""
    values = {"runtime": "process", "operator": f"a:{name}", "outputs": f"[{name}]", **fields}
    condition = f", where: {where!r}" if where else ""
    values.setdefault("inputs", f"[{{from: raw{condition}}}]")
    return f"  {name}:\n" + "".join(f"    {key}: {value}\n" for key, value in values.items())


async def outcome(pipeline: Pipeline, *events: NewEvent) -> list[str]:
    answers = await pipeline.routing.accept(events)
    return [each.outcome if isinstance(each, AcceptedEvent) else each.why for each in answers]


def test_events_come_twice_and_in_any_order(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        one, two = await pipeline.event("a"), await pipeline.event("b", cursor=7)
        assert await outcome(pipeline, two, one, two) == ["new", "new", "duplicate"]
        assert await outcome(pipeline, one) == ["duplicate"]
        # The id decides, not what is said of it.
        assert await outcome(pipeline, await pipeline.event("a", cursor=1)) == ["duplicate"]
        first, again = (await pipeline.routing.accept([one, one]))[:2]
        assert first == again
        rows = await world.rows("SELECT cursor, partition_key, routed FROM event ORDER BY 1")
        assert [tuple(row.values()) for row in rows] == [
            (7, None, "pending"),
            (None, "a", "pending"),
        ]
        assert await outcome(pipeline) == []

    play(story)


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset": "raw"},
        {"generation": "1"},
        {"cursor": 1},
        {"partition_key": None},
        {"partition_key": ""},
        {"partition_key": "x" * 501},
        {"partition_key": "a\x00b"},
        {"partition_key": "\ud800"},
        {"event_id": ""},
        {"event_id": "x" * 901},
        {"start": 1},
        {"end": 1},
        {"start": 2, "end": 2},
        {"start": 0, "end": 2**63},
        {"partition_key": None, "cursor": -(2**63) - 1},
        {"partition_key": None, "cursor": 1, "start": 1, "end": 2},
    ],
)
def test_an_event_that_makes_no_sense(play: Play, fields: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        good = await pipeline.event("a")
        bad = dataclasses.replace(good, event_id="b")
        bad = dataclasses.replace(bad, **fields)
        assert await outcome(pipeline, bad, good) == ["malformed", "new"]
        assert await world.value("SELECT count(*) FROM event") == 1

    play(story)


def test_the_longest_event(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        longest = await pipeline.event(
            "x" * 900, partition_key="y" * 500, start=-(2**63), end=2**63 - 1
        )
        assert await outcome(pipeline, longest) == ["new"]
        assert await pipeline.route() == 1
        (claimed,) = await pipeline.work("a:clean")
        assert (claimed.payload["start"], claimed.payload["end"]) == (-(2**63), 2**63 - 1)
        # The longest key of a task.
        assert await pipeline.open_tasks() == [("report", "y" * 500)]

    play(story)


def test_datasets_and_generations_that_are_not_there(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        lost = await pipeline.event("a", dataset=NOWHERE)
        (answer,) = await pipeline.routing.accept([lost])
        assert answer == RefusedEvent(
            EventRefusalReason.UNKNOWN_DATASET, f"There is no dataset {NOWHERE}."
        )
        strange = await pipeline.event("a", generation=NOWHERE)
        (kept,) = await pipeline.routing.accept([strange])
        assert isinstance(kept, AcceptedEvent)
        assert (kept.outcome, kept.why_not) == (
            Acceptance.AUDITED,
            "This generation is not known.",
        )
        assert await outcome(pipeline, strange) == ["duplicate"]
        assert await world.value("SELECT routed FROM event") == "audited"
        assert await pipeline.routing.route() == RoutingResult(0, 0, 0)

    play(story)


def test_what_has_left_is_audited(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        text = chain()
        await pipeline.apply(text)
        old = await pipeline.job("clean")
        daily = await pipeline.job("report")
        tidy = old.outputs["tidy"]
        early = await pipeline.event("early", dataset=tidy, generation=old.generation)
        assert await outcome(pipeline, early) == ["new"]
        await pipeline.apply(chain(clean="2"))
        assert await pipeline.deployment.cut_over(tidy) is CutOverOutcome.DONE
        # Accepted before it left, and routed after.
        assert await pipeline.routing.route() == RoutingResult(0, 1, 0)
        late = dataclasses.replace(early, event_id="late")
        assert await outcome(pipeline, late) == ["audited"]
        shorter = chain(clean="2")
        await pipeline.apply(shorter[: shorter.index("  report:")])
        gone = await pipeline.event(
            "gone", dataset=daily.outputs["daily"], generation=daily.generation
        )
        assert await outcome(pipeline, gone) == ["audited"]
        reasons = await world.rows("SELECT why_not FROM event ORDER BY seq")
        assert [row["why_not"] for row in reasons] == [
            "This generation is retired.",
            "This generation is retired.",
            "No job of the DAG writes this dataset.",
        ]

    play(story)


def test_a_paused_source_is_told(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        event = await pipeline.event("a")
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason)"
            " SELECT id, 'pressure', 'all', 'The queue of clean is full.' FROM job"
            " WHERE name = 'feed'"
        )
        (answer,) = await pipeline.routing.accept([event])
        assert isinstance(answer, AcceptedEvent)
        assert (answer.outcome, answer.paused) == (
            Acceptance.NEW,
            "The queue of clean is full.",
        )
        # What only bulk work has to give way to does not concern it.
        await world.rows("UPDATE pause SET scope = 'bulk'")
        (answer,) = await pipeline.routing.accept([event])
        assert isinstance(answer, AcceptedEvent)
        assert (answer.outcome, answer.paused) == (Acceptance.DUPLICATE, None)

    play(story)


@either_way
def test_one_event_is_one_task_a_reader(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        readers = reader("x") + reader("y", priority="bulk") + reader("z", operator="a:x")
        feeds = reader("last", inputs="[y]")
        await pipeline.apply(FEED + readers + feeds)
        feed = await pipeline.job("feed")
        event = await pipeline.event("p", start=3, end=9)
        await pipeline.routing.accept([event, await pipeline.event("q")])
        assert await pipeline.routing.route() == RoutingResult(2, 0, 6)
        assert await pipeline.open_tasks() == [(j, p) for j in "xyz" for p in "pq"]
        assert await world.wakes() == ["a:x/normal", "a:y/bulk"]
        assert await pipeline.routing.route() == RoutingResult(0, 0, 0)
        assert await world.wakes() == []
        (task,) = await pipeline.tasks.claim_next("a:y", worker="w")
        assert task.payload == {
            "event": 1,
            "dataset": feed.outputs["raw"],
            "generation": feed.generation,
            "inputs": ["raw"],
            "partition_key": "p",
            "start": 3,
            "end": 9,
        }
        assert task.generation == (await pipeline.job("y")).generation

    play(story)


def test_a_partition_that_comes_again_is_news(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for name in ("first", "second"):
            await pipeline.routing.accept([await pipeline.event(name, partition_key="p")])
            await pipeline.route()
            await pipeline.work("a:clean")
        assert await pipeline.select("job.name = 'clean'") == [("clean", "p")] * 2
        assert await pipeline.select("job.name = 'report'") == [("report", "p")] * 2

    play(story)


def test_a_function_is_invoked_for_each_task(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(FEED + reader("x", runtime="lambda"))
        await pipeline.send("p", "q")
        rows = await world.rows(
            "SELECT kind, target, body FROM outbox WHERE kind <> 'project' ORDER BY id"
        )
        ids = await world.rows("SELECT id AS task_id FROM task ORDER BY id")
        assert [row["body"] for row in rows] == ids
        assert {(row["kind"], row["target"]) for row in rows} == {("invoke", "a:x")}

    play(story)


def test_two_inputs_of_one_dataset_are_one_task(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        inputs = "[{from: raw, where: start < 10}, {from: raw, as: other, where: end > 5}]"
        await pipeline.apply(FEED + reader("x", inputs=inputs))
        ranges = {"low": (0, 4), "both": (3, 8), "high": (20, 30)}
        events = [await pipeline.event(n, start=a, end=b) for n, (a, b) in ranges.items()]
        await pipeline.routing.accept(events)
        assert await pipeline.route() == 3
        claimed = await pipeline.tasks.claim_next("a:x", worker="w", limit=9)
        found = {each.payload["partition_key"]: each.payload["inputs"] for each in claimed}
        assert found == {"low": ["raw"], "both": ["other", "raw"], "high": ["other"]}

    play(story)


@pytest.mark.parametrize(("execution", "count"), [("per_partition", 1), ("per_update", 2)])
def test_what_a_task_publishes_of_one_partition(play: Play, execution: str, count: int) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        twice = reader("x", outputs="[one, two]")
        await pipeline.apply(FEED + twice + reader("y", inputs="[one, two]", execution=execution))
        await pipeline.send("p", "q")
        await pipeline.work("a:x")
        assert await pipeline.open_tasks() == [("y", "p")] * count + [("y", "q")] * count

    play(story)


WHERES = (
    "partition_key = 'JFK-1'",
    "partition_key != 'JFK-1'",
    "partition_key glob 'JFK-*'",
    "partition_key not glob '*-1'",
    "partition_key glob '?FK-?'",
    "partition_key glob '*%*' or partition_key glob '_*'",
    "partition_key glob 'a\\*'",
    "partition_key = \"it's\" or partition_key = '$c1 || true'",
    "start = 10",
    "start != 10",
    "end <= 20",
    "end < 20",
    "cursor > 5",
    "cursor >= 5",
    "cursor = 9_223_372_036_854_775_807",
    "start >= 10 and (partition_key glob 'JFK*' or end = 99)",
    "(start < 5 or end > 50) and (partition_key = 'b' or partition_key = 'JFK-1' or cursor = 1)",
)
FOUND: tuple[dict[str, Any], ...] = (
    {"partition_key": "JFK-1"},
    {"partition_key": "JFK-22", "start": 10, "end": 20},
    {"partition_key": "JFK-1", "start": 0, "end": 99},
    {"partition_key": "b", "start": 4, "end": 19},
    {"partition_key": "50%"},
    {"partition_key": "_x\ny"},
    {"partition_key": "a\\b"},
    {"partition_key": "it's"},
    {"partition_key": "$c1 || true"},
    {"cursor": 5},
    {"cursor": 1},
    {"cursor": 2**63 - 1},
    {"cursor": -(2**63)},
)


def test_filters_say_in_sql_what_they_say_in_python(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        quoted = [where.replace("'", "''") for where in WHERES]
        jobs = [
            reader(f"j{n}", inputs=f"[{{from: raw, where: '{where}'}}]")
            for n, where in enumerate(quoted)
        ]
        await pipeline.apply(FEED + "".join(jobs))
        feed = await pipeline.job("feed")
        events = [
            NewEvent(
                dataset=feed.outputs["raw"],
                generation=feed.generation,
                event_id=str(number),
                **fields,
            )
            for number, fields in enumerate(FOUND)
        ]
        await pipeline.routing.accept(events)
        await pipeline.route()
        rows = await world.rows(
            "SELECT job.name, event.dedupe FROM task JOIN job ON job.id = job_id"
            " JOIN event ON event.seq = event_seq"
        )
        found = {(row["name"], row["dedupe"].removeprefix("source:")) for row in rows}
        expected = {
            (f"j{n}", str(number))
            for n, where in enumerate(WHERES)
            for number, fields in enumerate(FOUND)
            if accepts(parse_where(where), fields)
        }
        assert found == expected
        assert len({name for name, _ in expected}) == len(WHERES)

    play(story)


def test_what_is_being_built_and_what_it_replaces_are_both_served(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain(extra=SINK))
        old = await pipeline.generations()
        await pipeline.apply(chain(clean="2", extra=SINK))
        new = await pipeline.generations()
        await pipeline.send("p")
        both = await pipeline.work("a:clean")
        assert {(each.generation, each.definition["config"]["v"]) for each in both} == {
            (old["clean"], 1),
            (new["clean"], 2),
        }
        reports = await pipeline.work("a:report")
        assert {each.generation for each in reports} == {old["report"], new["report"]}
        assert all(
            each.payload["generation"] == generations["clean"]
            for generations in (old, new)
            for each in reports
            if each.generation == generations["report"]
        )
        mails = await pipeline.work("a:mail")
        assert {each.generation for each in mails} == {old["mail"], new["mail"]}
        tidy = (await pipeline.job("clean")).outputs["tidy"]
        daily = (await pipeline.job("report")).outputs["daily"]
        # The downstream one first: it is fed by both until the end.
        for dataset in (daily, tidy):
            assert await pipeline.deployment.cut_over(dataset) is CutOverOutcome.DONE
        await pipeline.send("q")
        assert [each.generation for each in await pipeline.work("a:clean")] == [new["clean"]]
        assert [each.generation for each in await pipeline.work("a:report")] == [new["report"]]
        assert [each.generation for each in await pipeline.work("a:mail")] == [new["mail"]]

    play(story)


def test_an_edited_job_without_outputs_just_goes_on(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain(extra=SINK))
        await pipeline.apply(chain(extra=SINK.replace("a:mail", "a:post")))
        await pipeline.send("p")
        await pipeline.work("a:clean")
        rows = await world.rows("SELECT operator FROM task ORDER BY 1")
        assert [row["operator"] for row in rows] == ["a:clean", "a:post", "a:report"]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
@either_way
def test_a_completion_routes_in_its_transaction(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.send("p")
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w")
        await world.wakes()
        tidy = claimed.definition["datasets"]["tidy"]
        output = TaskOutput(dataset=tidy, location="s3://b/x", partition_key="p")
        async with world.unfinished(is_kept=is_kept) as other:
            tasks = Tasks(other._database, route=route_events)
            (ended,) = await tasks.complete([Completion(claimed.fence, (output,))])
            assert isinstance(ended, AttemptEnd)
        assert await pipeline.select("job.name = 'report'") == [("report", "p")] * is_kept
        assert await world.wakes() == ["a:report/normal"] * is_kept
        assert await world.value("SELECT count(*) FROM event WHERE routed = 'pending'") == 0
        # Saying it again makes nothing again.
        await pipeline.tasks.complete([Completion(claimed.fence, (output,))])
        assert await pipeline.select("job.name = 'report'") == [("report", "p")]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_router_passes_by_what_another_has_in_hand(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        names = ["a", "b", "c"]
        await pipeline.routing.accept([await pipeline.event(name) for name in names])
        async with world.unfinished(is_kept=is_kept) as other:
            assert await Router(other._database).route(limit=2) == RoutingResult(2, 0, 2)
            assert await pipeline.routing.route() == RoutingResult(1, 0, 1)
        assert await pipeline.routing.route() == (
            RoutingResult(0, 0, 0) if is_kept else RoutingResult(2, 0, 2)
        )
        assert await pipeline.open_tasks() == [("clean", name) for name in names]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_bring_one_event(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        event = await pipeline.event("a")
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
            await Router(other._database).accept([event])
            second = group.create_task(pipeline.routing.accept([event]))
            await world.until_waiting()
        (answer,) = second.result()
        assert isinstance(answer, AcceptedEvent)
        assert answer.outcome == ("duplicate" if is_kept else "new")
        assert await world.value("SELECT count(*) FROM event") == 1

    play(story)


FAN_IN = (
    FEED
    + """
  left: {runtime: process, operator: "a:left", inputs: [raw], outputs: [l]}
  right: {runtime: process, operator: "a:right", inputs: [raw], outputs: [r]}
  both: {runtime: process, operator: "a:both", inputs: [l, r], outputs: [b]}
"""
)


def test_of_two_tasks_for_a_partition_the_later_one_sees_what_led_to_the_earlier(
    play: Play,
) -> None:
    """The number decides which output counts: who has the higher one must have read the latest."""

    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(FAN_IN)
        await pipeline.send("p")
        (left,) = await pipeline.tasks.claim_next("a:left", worker="w")
        (right,) = await pipeline.tasks.claim_next("a:right", worker="w")
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            output = TaskOutput(
                dataset=left.definition["datasets"]["l"], location="s3://b/l", partition_key="p"
            )
            # It has made a task for `both`, and nobody can see what it has published yet.
            await Tasks(other._database, route=route_events).complete(
                [Completion(left.fence, (output,))]
            )
            second = group.create_task(pipeline.finish(right))
            # The other has to wait for its number, or its task could run without seeing that.
            await world.until_waiting()
            assert not second.done()
        made = await world.rows(
            "SELECT task.id, event.task_id FROM task JOIN event ON event.seq = task.event_seq"
            " WHERE operator = 'a:both' ORDER BY task.id"
        )
        assert [row["task_id"] for row in made] == [left.task_id, right.task_id]

    play(story)


@pytest.mark.parametrize(("scope", "is_held"), [("all", True), ("bulk", False)])
def test_what_a_paused_source_has_sent_waits(play: Play, scope: str, is_held: bool) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason)"
            " SELECT id, 'operator', %s, 'Not now.' FROM job WHERE name = 'feed' RETURNING job_id",
            scope,
        )
        await pipeline.routing.accept([await pipeline.event("a")])
        assert await pipeline.route() == (0 if is_held else 1)
        await world.rows("DELETE FROM pause RETURNING job_id")
        assert await pipeline.route() == (1 if is_held else 0)
        assert await pipeline.open_tasks() == [("clean", "a")]

    play(story)


def test_bounds(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        event = await pipeline.event("a")
        with pytest.raises(InvalidInput, match="events at most"):
            await pipeline.routing.accept([event] * (BATCH_MAX + 1))
        for limit in (0, BATCH_MAX + 1):
            with pytest.raises(InvalidInput, match="One call routes"):
                await pipeline.routing.route(limit=limit)

    play(story)


def test_ten_routers_and_events_that_come_twice(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(FEED + "".join(reader(f"j{number}") for number in range(5)))
        names = [str(number) for number in range(2000)]
        one = await pipeline.event("any")
        events = [dataclasses.replace(one, event_id=n, partition_key=n) for n in names] * 2
        entropy = seeded_entropy(4)
        events.sort(key=lambda _: entropy.random())
        parts = [events[first : first + 100] for first in range(0, len(events), 100)]
        is_over = asyncio.Event()

        async def bring(some: list[list[NewEvent]]) -> int:
            answers = [each for part in some for each in await pipeline.routing.accept(part)]
            found = [each for each in answers if isinstance(each, AcceptedEvent)]
            assert len(found) == len(answers)
            return sum(each.outcome is Acceptance.NEW for each in found)

        async def bring_all() -> int:
            try:
                return sum(await asyncio.gather(*(bring(parts[n::4]) for n in range(4))))
            finally:
                is_over.set()

        async def route() -> int:
            made = 0
            for _ in range(10_000):
                is_last = is_over.is_set()
                found = await pipeline.routing.route(limit=70)
                made += found.tasks
                if is_last and found.routed == 0:
                    return made
            pytest.fail("there is no end to events")

        new, *made = await asyncio.gather(bring_all(), *(route() for _ in range(10)))
        assert (new, sum(made)) == (2000, 10_000)
        expected = sorted((f"j{number}", name) for number in range(5) for name in names)
        assert sorted(await pipeline.open_tasks()) == expected
        assert await world.value("SELECT count(*) FROM event WHERE routed <> 'routed'") == 0

    play(story)
