"""Inputs that are read by their changes: what was consumed is not given again, and nothing is lost.

`tally` is run by ticks, and reads what has changed in `tidy` in whichever partitions; or by the
events of `tidy`, and then it reads what has changed in its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatcher.tasks.completion import UNACKNOWLEDGED_SECONDS
from penstock.dispatcher.tasks.consumption import OVERTAKEN
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    PublishOutcome,
    Refusal,
    Release,
    TaskOutput,
    TaskRefusalReason,
)
from penstock.dispatcher.views.jobs import TaskViews
from penstock.dispatcher.views.status import StatusViews
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import BackfillAsk
from tests.integration.dispatcher.crews import Crew, drawn
from tests.integration.dispatcher.readers import columns, facts
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.test_keeping import keep_all
from tests.integration.dispatcher.world import Play, World, failed

APPEND = "update: append"


def dag(*, clean: str = APPEND, tally: str = APPEND, v: int = 1, w: int = 1, keep: str = "") -> str:
    return f"""
jobs:
  feed: {{activation: source, source: {{kind: manual}}, outputs: [raw]}}
  tick: {{activation: source, source: {{kind: manual}}, outputs: [ticks]}}
  clean:
    runtime: process
    operator: a:clean
    config: {{v: {w}}}
    inputs: [raw]
    outputs: [{{name: tidy{keep}}}]
    {clean}
  tally:
    runtime: process
    operator: a:tally
    config: {{v: {v}}}
    retry: {{first: 0s}}
    inputs: [ticks, {{from: tidy, read: changes, trigger: false}}]
    outputs: [totals]
    {tally}
"""


def keyed(*, tally: str = APPEND) -> str:
    """The same, by the events of the input itself."""
    return dag(tally=tally).replace("[ticks, {from: tidy, read: changes, trigger: false}]", CHANGES)


CHANGES = "[{from: tidy, read: changes}]"


class Book(Pipeline):
    """A pipeline with a job that consumes."""

    ticks: int = 0

    async def publish(self, *keys: str) -> None:
        """Partitions of the input are published, or appended to, one after the other."""
        for key in keys:
            number = await self.world.value("SELECT count(*) FROM event")
            await self.routing.accept([await self.event(f"e{number}", partition_key=key)])
            await self.route()
            (claimed,) = await self.tasks.claim_next("a:clean", worker="w")
            place = f"s3://b/{key}/{claimed.task_id}"
            output = self.output(claimed, "tidy", key, place, facts=facts(of=columns("n")))
            await self.tasks.complete([Completion(claimed.fence, (output,))])

    async def tick(self) -> None:
        """The consumer has something to do."""
        tick = await self.job("tick")
        number = await self.world.value("SELECT count(*) FROM event")
        place = {"dataset": tick.outputs["ticks"], "generation": tick.generation}
        event = await self.event(f"t{number}", cursor=number, **place)
        await self.routing.accept([event])
        await self.route()

    async def claim(self, *, limit: int = 1) -> ClaimedTask:
        (found,) = await self.tasks.claim_next("a:tally", worker="w", limit=limit)
        return found

    async def take(self) -> ClaimedTask:
        await self.tick()
        return await self.claim()

    async def end(self, claimed: ClaimedTask) -> AttemptEnd | Refusal:
        key = claimed.payload.get("partition_key")
        output = self.output(claimed, "totals", key, "s3://b/totals")
        (found,) = await self.tasks.complete([Completion(claimed.fence, (output,))])
        return found

    async def consumed(self) -> list[str]:
        """What the next task of all reads, and completes."""
        claimed = await self.take()
        assert isinstance(await self.end(claimed), AttemptEnd)
        return read(claimed)

    def output(
        self, claimed: ClaimedTask, name: str, key: str | None, place: str, **more: Any
    ) -> TaskOutput:
        dataset = claimed.definition["datasets"][name]
        return TaskOutput(dataset=dataset, location=place, partition_key=key, **more)


def read(claimed: ClaimedTask) -> list[str]:
    """The parts that a task is given, as the partition and the number of the revision."""
    given = claimed.inputs["tidy"]
    return [f"{each['partition_key']}{each['revision']}" for each in given["parts"]]


def test_only_what_was_appended_since(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a", "a", "b")
        assert await it.consumed() == ["a1", "a2", "b1"]
        await it.publish("a", "c")
        assert await it.consumed() == ["a3", "c1"]
        assert await it.consumed() == []

    play(story)


@pytest.mark.parametrize("clean", ["", APPEND])
def test_a_claim_that_is_repeated_late_consumes_nothing_that_nobody_has_read(
    clean: str, play: Play
) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag(clean=clean))
        await it.publish("a")
        await it.tick()
        (first,) = await it.tasks.claim_next("a:tally", worker="w", claim_id="a claim")
        same = await it.tasks.claim_next("a:tally", worker="w", claim_id="a claim")
        assert [(each.fence, read(each)) for each in same] == [(first.fence, read(first))]
        # The first answer was read after all, and its request comes once more.
        await it.publish("a", "b")
        for again in await it.tasks.claim_next("a:tally", worker="w", claim_id="a claim"):
            assert read(again) == read(first)
        assert isinstance(await it.end(first), AttemptEnd)
        assert await it.consumed() == ["a2", "b1"]

    play(story)


def test_what_cannot_be_given_again_is_taken_back_and_given_anew(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        await it.tick()
        await it.tasks.reap()
        await it.tasks.claim_next("a:tally", worker="w", claim_id="a claim")
        await it.publish("a")
        assert await it.tasks.claim_next("a:tally", worker="w", claim_id="a claim") == ()
        world.later(UNACKNOWLEDGED_SECONDS + 1)
        (reaped,) = (await it.tasks.reap(outage_seconds=1e6)).reaped
        assert reaped.status is TaskStatus.QUEUED
        claimed = await it.claim()
        assert read(claimed) == ["a1", "a2"]
        assert isinstance(await it.end(claimed), AttemptEnd)

    play(story)


def test_the_whole_of_what_was_replaced_since(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag(clean=""))
        await it.publish("a", "b")
        assert await it.consumed() == ["a1", "b1"]
        await it.publish("a", "a")
        assert await it.consumed() == ["a3"]

    play(story)


def test_several_parts_of_one_call_are_of_one_revision_and_all_given(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        assert await it.consumed() == ["a1"]
        for name in ("x", "y"):
            await it.routing.accept([await it.event(name, partition_key="a")])
        await it.route()
        claimed = await it.tasks.claim_next("a:clean", worker="w", limit=2)
        await it.tasks.complete(
            [
                Completion(each.fence, (it.output(each, "tidy", "a", f"s3://b/{each.task_id}"),))
                for each in claimed
            ]
        )
        assert await it.consumed() == ["a2", "a2"]
        assert await it.consumed() == []

    play(story)


def test_what_an_attempt_only_read_is_given_again_with_what_is_new(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        claimed = await it.take()
        assert read(claimed) == ["a1"]
        await it.tasks.fail(failed(claimed.fence))
        await it.publish("b")
        claimed = await it.claim()
        assert read(claimed) == ["a1", "b1"]
        await it.tasks.end([Release(claimed.fence, "stopping")])
        claimed = await it.claim()
        # Nobody is heard of it any more; who comes back late changes nothing.
        await it.tasks.reap(outage_seconds=10_000)
        world.later(3600)
        await it.tasks.reap(outage_seconds=10_000)
        await it.publish("a")
        again = await it.claim()
        assert (again.task_id, read(again)) == (claimed.task_id, ["a1", "a2", "b1"])
        refused = await it.end(claimed)
        assert isinstance(refused, Refusal)
        assert isinstance(await it.end(again), AttemptEnd)
        assert await it.consumed() == []

    play(story)


def test_what_is_published_while_it_runs_is_for_the_next(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        claimed = await it.take()
        await it.publish("a", "b")
        ended = await it.end(claimed)
        # The same again is the same answer, and consumes nothing more.
        assert await it.end(claimed) == ended
        assert await it.consumed() == ["a2", "b1"]

    play(story)


def test_one_task_at_a_time(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        await it.tick()
        await it.tick()
        first = await it.claim(limit=5)
        assert await it.tasks.claim_next("a:tally", worker="w") == ()
        await it.publish("b")
        await it.end(first)
        assert [read(first), read(await it.claim())] == [["a1"], ["b1"]]

    play(story)


def test_of_two_that_were_given_the_same_one_completes(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        await it.tick()
        await it.tick()
        # As when the DAG in force has the job without changes, and this generation is still served.
        await world.rows("UPDATE job SET max_concurrency = NULL")
        first, second = await it.tasks.claim_next("a:tally", worker="w", limit=2)
        assert read(first) == read(second) == ["a1"]
        assert isinstance(await it.end(second), AttemptEnd)
        refused = await it.end(first)
        assert isinstance(refused, Refusal)
        assert (refused.why, refused.detail) == (TaskRefusalReason.STALE, OVERTAKEN)
        # Nothing was published, and its next attempt has what is left.
        assert await world.value("SELECT count(*) FROM appended WHERE location = %s", TOTALS) == 1
        await it.tasks.fail(failed(first.fence))
        assert read(await it.claim()) == []

    play(story)


TOTALS = "s3://b/totals"


def test_two_that_were_given_the_same_in_one_call(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        await it.tick()
        await it.tick()
        await world.rows("UPDATE job SET max_concurrency = NULL")
        both = await it.tasks.claim_next("a:tally", worker="w", limit=2)
        outputs = [(it.output(each, "totals", None, TOTALS),) for each in both]
        answers = await it.tasks.complete(
            [Completion(each.fence, out) for each, out in zip(both, outputs, strict=True)]
        )
        assert [type(each) for each in answers] == [AttemptEnd, Refusal]

    play(story)


def test_what_does_not_count_consumes_nothing(play: Play) -> None:
    """An earlier task that comes late has made something that is superseded."""

    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag(tally=""))
        await it.publish("a")
        early = await it.take()
        await it.tasks.fail(failed(early.fence))
        await world.rows(
            "UPDATE task SET due_at = due_at + interval '1 minute' WHERE id = %s", early.task_id
        )
        assert await it.consumed() == ["a1"]
        await it.publish("a")
        world.later(60)
        again = await it.claim()
        assert (again.task_id, read(again)) == (early.task_id, ["a2"])
        ended = await it.end(again)
        assert isinstance(ended, AttemptEnd)
        assert [each.outcome for each in ended.published] == [PublishOutcome.SUPERSEDED]
        assert await it.consumed() == ["a2"]

    play(story)


def test_a_task_with_a_partition_reads_the_changes_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(keyed())
        await it.publish("a", "b", "a")
        seen = []
        for _ in range(3):
            claimed = await it.claim()
            seen.append((claimed.payload["partition_key"], read(claimed)))
            await it.end(claimed)
        # The second task of `a` finds that the first had all of it.
        assert seen == [("a", ["a1", "a2"]), ("b", ["b1"]), ("a", [])]

    play(story)


def test_a_new_generation_of_either_begins_with_everything(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a", "b")
        assert await it.consumed() == ["a1", "b1"]
        await it.apply(dag(v=2))
        await it.backfills.turn()
        claimed = await it.claim()
        assert (claimed.generation, read(claimed)) == (
            (await it.generations())["tally"],
            ["a1", "b1"],
        )
        await it.end(claimed)
        # The input anew: all of its parts are made again, and all of them are new.
        await it.apply(dag(v=2, w=2))
        await it.backfills.turn()
        parts = await it.tasks.claim_next("a:clean", worker="w", limit=9)
        for each in parts:
            key = each.payload["partition_key"]
            done = Completion(each.fence, (it.output(each, "tidy", key, f"s3://c/{key}"),))
            await it.tasks.complete([done])
        await it.backfills.turn()
        await it.backfills.turn()
        assert read(await it.claim()) == ["a1", "b1"]

    play(story)


def test_a_backfill_reads_everything_again(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(keyed(tally=""))
        await it.publish("a", "a")
        await it.end(await it.claim())
        await it.end(await it.claim())
        await it.backfills.create(BackfillAsk(job="tally", keys=["a"]))
        await it.backfills.turn()
        claimed = await it.claim()
        assert read(claimed) == ["a1", "a2"]
        await it.publish("a")
        assert isinstance(await it.end(claimed), AttemptEnd)
        assert read(await it.claim()) == ["a3"]

    play(story)


def test_a_replay_reads_what_is_left(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        dead = await it.take()
        await it.tasks.fail(failed(dead.fence, is_retried=False))
        await it.publish("b")
        assert await it.consumed() == ["a1", "b1"]
        await it.publish("c")
        (state,) = await it.tasks.replay([dead.task_id])
        assert not isinstance(state, Refusal)
        assert state.status is TaskStatus.QUEUED
        assert read(await it.claim()) == ["c1"]

    play(story)


def test_what_was_removed_before_it_was_read_is_said_once(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag(clean="", keep=", keep: {partitions: 1}"))
        await it.publish("a")
        assert await it.consumed() == ["a1"]
        await it.publish("b", "c")
        await keep_all(world)
        # `a` was read; `b` never will be.
        claimed = await it.take()
        assert (read(claimed), claimed.inputs["tidy"]["missed"]) == (["c1"], 1)
        await it.end(claimed)
        answer = await StatusViews(world.database).task(claimed.task_id)
        assert answer is not None
        (said,) = answer.consumed
        assert (said.input, said.partitions, said.missed, said.is_consumed) == ("tidy", 1, 1, True)
        after = await it.take()
        assert (read(after), after.inputs["tidy"]["missed"]) == ([], 0)
        about = await TaskViews(world.database).about(after.task_id)
        assert about is not None
        (tidy,) = [each for each in about.inputs if each.input == "tidy"]
        assert (tidy.changed, tidy.missed, tidy.is_consumed) == (0, 0, False)
        await it.end(after)
        # What comes back is new.
        await it.publish("a")
        assert await it.consumed() == ["a3"]

    play(story)


def test_what_a_waiting_task_has_not_read_is_kept(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag(clean="", keep=", keep: {partitions: 1}"))
        await it.publish("a", "b")
        await it.tick()
        await keep_all(world)
        assert read(await it.claim()) == ["a1", "b1"]

    play(story)


def test_where_nothing_has_changed_the_columns_are_told(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        await it.consumed()
        given = (await it.take()).inputs["tidy"]
        assert given["parts"] == []
        assert given["columns"] == [{"name": "n", "type": "bigint", "is_nullable": True}]

    play(story)


def test_a_generation_that_was_dropped_begins_anew(play: Play) -> None:
    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        await it.publish("a")
        await it.consumed()
        assert await world.value("SELECT count(*) FROM consumed") == 1
        await world.rows(
            "UPDATE generation SET dropped_at = penstock_now() WHERE version = %s",
            (await it.generations())["tally"],
        )
        assert await it.consumed() == ["a1"]

    play(story)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_of_two_that_append_at_once_are_both_given(play: Play, order: Sequence[int]) -> None:
    """Whoever commits first has the lower revision, whoever was first to write."""

    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag())
        for name in ("x", "y"):
            await it.routing.accept([await it.event(name, partition_key="a")])
        await it.route()
        both = await it.tasks.claim_next("a:clean", worker="w", limit=2)
        seen = []
        for place in order:
            each = both[place]
            done = Completion(each.fence, (it.output(each, "tidy", "a", f"s3://b/{place}"),))
            await it.tasks.complete([done])
            seen += await it.consumed()
        assert seen == ["a1", "a2"]

    play(story)


DEEDS = st.lists(
    st.tuples(st.sampled_from(["publish", "tick", "claim", "finish", "fail"]), st.integers(0, 3)),
    min_size=8,
    max_size=16,
)


@given(DEEDS, st.sampled_from([APPEND, ""]), st.booleans())
@drawn
def test_everything_is_consumed_and_nothing_twice(
    play: Play, deeds: Sequence[Any], tally: str, is_limited: bool
) -> None:
    """Whatever fails, comes late or runs beside another, and however the outputs are published."""

    async def story(world: World) -> None:
        it = Book(world)
        await it.apply(dag(tally=tally))
        if not is_limited:
            await world.rows("UPDATE job SET max_concurrency = NULL")
        counted: list[str] = []

        async def finish(claimed: ClaimedTask) -> None:
            ended = await it.end(claimed)
            if isinstance(ended, Refusal):
                await it.tasks.fail(failed(claimed.fence))
            elif ended.published[0].outcome is PublishOutcome.PUBLISHED:
                counted.extend(each["location"] for each in claimed.inputs["tidy"]["parts"])

        crew = Crew(it, "a:tally", finish)
        for deed, which in deeds:
            if deed == "publish":
                await it.publish("abc"[which % 3])
            elif deed == "tick":
                await it.tick()
            else:
                await crew.do(deed, which)
        await crew.drain()
        await finish(await it.take())
        rows = await world.rows(
            "SELECT location FROM appended JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = 'tidy'"
        )
        assert sorted(counted) == sorted(row["location"] for row in rows)

    play(story)
