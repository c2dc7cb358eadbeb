"""Editing a job that appends: readers lose nothing that nobody has given up, on a real Postgres."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from penstock.dispatcher.dag.parser import parse, parse_stored
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.deployment import CutOverController
from penstock.dispatcher.deployment_plan import (
    CutOverOutcome,
    PartsKept,
    PartsNotKept,
    UnrebuildableParts,
)
from penstock.dispatcher.retention import RowPruner
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, Failure, Refusal, TaskOutput
from penstock.protocol.steering import BackfillAnswer, BackfillAsk
from penstock.runtimes.base import Facts
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import Play, World


def texts(
    *, log: str = "1", sums: str = "1", clean: str = "1", more: str = "", update: str = "append"
) -> str:
    """A source; a job that appends what comes with its events; and what is computed of that."""
    key = "unique_key: [n]" if update == "merge" else ""
    return f"""
jobs:
  feed:
    activation: source
    source: {{kind: manual}}
    outputs: [raw]
  log:
    runtime: process
    operator: a:log
    config: {{v: {log}}}
    update: {update}
    {key}
    inputs: [raw]
    outputs: [entries]
    {more}
  sums:
    runtime: process
    operator: a:sums
    config: {{v: {sums}}}
    inputs: [entries]
    outputs: [totals]
"""


class Log(Pipeline):
    """What is appended is called by what it was made of: `n` of the event's payload."""

    async def bring(self, partition: str, *numbers: int) -> None:
        for n in numbers:
            told: Any = {"partition_key": partition} if partition else {"cursor": n}
            event = await self.event(f"{partition}{n}", payload={"n": n}, **told)
            await self.routing.accept([event])
            await self.route()

    async def labour(self, *operators: str) -> int:
        """Do what waits, until nothing does."""
        count = 0
        for _ in range(100):
            done = 0
            for operator in operators or ("a:log", "a:clean", "a:copy", "a:sums", "a:look"):
                for each in await self.tasks.claim_next(operator, worker="w", limit=100):
                    done += 1
                    await self.finish(each)
            count += done
            if not done:
                return count
        pytest.fail("there is no end to tasks")

    async def finish(self, task: ClaimedTask) -> None:
        parts = [
            part["location"] for each in task.inputs.values() for part in each.get("parts") or []
        ]
        is_looking = task.operator == "a:look"
        n = None if is_looking else task.payload.get("payload", {}).get("n")
        made = f"{n}" if n is not None else "+".join(each.rsplit("/", 1)[1] for each in parts)
        (output,) = task.definition["outputs"]
        base: Any = None
        if task.current is not None:
            base = task.current.get(output["name"], [{"revision": 0, "location": ""}])
            # What was merged is called by all that it was made of.
            made = "+".join(filter(None, [base[0]["location"].removeprefix("s3://b/"), made]))
        made_of = TaskOutput(
            dataset=task.definition["datasets"][output["name"]],
            location=f"s3://b/{made}",
            partition_key=task.payload.get("partition_key"),
            facts=Facts(files=1, rows=1, bytes=10, columns=(), manifest="0" * 64),
            base_revision=base and base[0]["revision"],
        )
        (answer,) = await self.tasks.complete([Completion(task.fence, (made_of,))])
        if isinstance(answer, Refusal) and answer.current:
            await self.finish(replace(task, current=answer.current))

    async def build(self) -> None:
        """Rebuild and cut over as far as it goes by itself."""
        for _ in range(8):
            await self.route()
            await self.backfills.turn()
            await self.labour()
            await CutOverController(self.world.database, self.deployment).turn()

    async def read(self, dataset: str = "entries") -> list[str]:
        """What readers are served."""
        rows = await self.world.rows(
            "SELECT coalesce(appended.location, publication.location) AS location"
            " FROM publication JOIN generation"
            " ON (generation.dataset_id, version) = (publication.dataset_id, generation)"
            " JOIN dataset ON dataset.id = generation.dataset_id"
            " LEFT JOIN appended ON publication.mode = 'append' AND (appended.dataset_id,"
            " appended.generation, appended.partition_key) = (publication.dataset_id,"
            " publication.generation, publication.partition_key)"
            " WHERE name = %s AND state = 'current' ORDER BY 1",
            dataset,
        )
        return [row["location"].removeprefix("s3://b/") for row in rows]

    async def retain(self) -> None:
        """Let a year pass, and remove what is old."""
        self.world.later(366 * 86_400)
        retention = RowPruner(self.world.database, days=30)
        while await retention.turn() != 3600.0:
            pass

    async def dataset(self, name: str) -> str:
        return str(await self.world.value("SELECT id::text FROM dataset WHERE name = %s", name))

    async def number(self, operator: str) -> Any:
        return await self.world.value("SELECT count(*) FROM task WHERE operator = %s", operator)


def test_every_publication_is_made_again(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 104, 105, 106)
        await it.bring("q", 201)
        await it.labour()
        everything = await it.read()
        assert everything == ["104", "105", "106", "201"]
        seen = await it.deployment.foresee(parse(texts(log="2"), "dag"))
        assert seen.losses == ()
        await it.apply(texts(log="2"))
        await it.backfills.turn()
        # All but one are made.
        for each in await it.tasks.claim_next("a:log", worker="w", limit=3):
            await it.finish(each)
        await it.labour("a:sums")
        await it.backfills.turn()
        await CutOverController(world.database, it.deployment).turn()
        assert await it.states("entries") == ["building", "current"]
        await it.bring("p", 107)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.read() == sorted([*everything, "107"])

    play(story)


def test_what_is_merged_is_made_again_of_every_event(play: Play) -> None:
    """Of the latest event alone there would be a partition, and not the rows of the others."""

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts(update="merge"))
        await it.bring("p", 104, 105, 106)
        await it.bring("q", 201)
        await it.labour()
        assert await it.read() == ["104+105+106", "201"]
        await it.apply(texts(log="2", update="merge"))
        await it.backfills.turn()
        for each in await it.tasks.claim_next("a:log", worker="w"):
            await it.finish(each)
        await it.labour("a:sums")
        await CutOverController(world.database, it.deployment).turn()
        # The partitions are not there with all that was merged into them.
        assert await it.states("entries") == ["building", "current"]
        await it.bring("p", 107)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        (whole, other) = await it.read()
        assert sorted(whole.split("+")) == ["104", "105", "106", "107"]
        assert other == "201"
        # What was merged with is left behind, and nothing that was merged is read by itself.
        assert await world.value("SELECT count(*) FROM appended WHERE location <> 'merged:'") == 0

    play(story)


def test_a_key_that_earlier_releases_asked_for_is_taken_out_without_a_rebuild(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        old = texts().replace("    update: append\n", "    update: append\n    unique_key: [n]\n")
        await it.deployment.apply(parse_stored(old, "dag"), old)
        await it.bring("p", 104, 105)
        await it.labour()
        before = await it.generations()
        for text in (texts(), texts(more="timeout: 2h")):
            await it.apply(text)
            assert await it.generations() == before
        assert await it.read() == ["104", "105"]
        await it.apply(texts(log="2"))
        assert (await it.generations())["log"] != before["log"]

    play(story)


def test_what_retention_has_removed_is_told_and_waits_for_somebody(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        for partition in "pqr":
            await it.bring(partition, *range(7))
        await it.labour()
        before = await it.read()
        assert len(before) == 21
        await it.retain()
        loss = UnrebuildableParts("entries", "log", publications=21, lost=18)
        seen = await it.deployment.foresee(parse(texts(log="2"), "dag"))
        assert seen.losses == (loss,)
        applied = await it.apply(texts(log="2"))
        assert applied.losses == (loss,)
        await it.build()
        assert await it.read() == before
        # What is computed of it waits too: it would be of three parts, and have all partitions.
        assert await it.states("totals") == ["building", "current"]
        entries, totals = await it.dataset("entries"), await it.dataset("totals")
        assert await it.deployment.cut_over(totals) is CutOverOutcome.UPSTREAM
        assert await it.deployment.cut_over(entries) is CutOverOutcome.UNCOVERED
        # Also after another year.
        await it.retain()
        assert await it.deployment.cut_over(entries, force=True) is CutOverOutcome.DONE
        await it.build()
        assert await it.read() == ["6", "6", "6"]
        assert await it.states("totals") == ["current", "retired"]

    play(story)


def test_what_cannot_be_built_is_kept(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        for partition in "pq":
            await it.bring(partition, *range(3))
        await it.labour()
        before = await it.read()
        await it.retain()
        await it.apply(texts(log="2"))
        entries, totals = await it.dataset("entries"), await it.dataset("totals")
        assert await it.deployment.keep(entries) == PartsNotKept(CutOverOutcome.BACKFILL)
        await it.build()
        assert await it.deployment.keep(totals) == PartsNotKept(CutOverOutcome.UPSTREAM)
        assert await it.deployment.keep(entries) == PartsKept(4)
        assert await it.deployment.keep(entries) == PartsKept(0)
        # Nothing is cut over before what is downstream has seen what was kept.
        await CutOverController(world.database, it.deployment).turn()
        assert await it.states("totals") == ["building", "current"]
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.read() == before
        assert await it.read("totals") == ["0+1+2", "0+1+2"]
        heads = await world.rows(
            "SELECT revision, files, rows FROM publication WHERE dataset_id = %s"
            " AND generation = (SELECT version FROM generation"
            "   WHERE dataset_id = %s AND state = 'current')",
            entries,
            entries,
        )
        assert [tuple(row.values()) for row in heads] == [(2, 3, 3), (2, 3, 3)]
        # What was kept cannot be built at the next time either.
        assert (await it.apply(texts(log="3"))).losses == (
            UnrebuildableParts("entries", "log", 6, 4),
        )
        await it.build()
        assert await it.deployment.keep(entries) == PartsKept(4)
        await it.build()
        assert await it.read() == before

    play(story)


def test_what_is_kept_to_be_merged_with_is_not_lost_by_the_next_rebuild(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts(update="replace"))
        await it.bring("p", 0)
        await it.labour()
        await it.apply(texts(update="merge"))
        await it.route()
        await it.backfills.turn()
        for each in await it.tasks.claim_next("a:log", worker="w"):
            await it.tasks.cancel([each.task_id])
            await it.tasks.fail([Failure(each.fence, "It was cancelled.")])
        entries = await it.dataset("entries")
        await it.build()
        assert await it.deployment.keep(entries) == PartsKept(1)
        await it.build()
        await it.bring("p", 1)
        await it.labour()
        assert await it.read() == ["0+1"]
        await it.retain()
        # Of the two that are merged, one cannot be made again: that is told, and waits.
        assert (await it.apply(texts(log="2", update="merge"))).losses == (
            UnrebuildableParts("entries", "log", 2, 1),
        )
        await it.build()
        assert await it.read() == ["0+1"]

    play(story)


def test_nothing_is_kept_for_who_finds_its_partitions_by_itself(play: Play) -> None:
    """It may read its own generation, and what is kept lies in another one."""

    async def story(world: World) -> None:
        divided = "outputs: [{name: entries, partition_by: day}]"
        it = Log(world)
        await it.apply(texts(update="replace"))
        await it.bring("p", 0)
        await it.labour()
        await it.apply(texts(update="merge").replace("outputs: [entries]", divided))
        await it.route()
        await it.backfills.turn()
        for each in await it.tasks.claim_next("a:log", worker="w"):
            await it.tasks.cancel([each.task_id])
            await it.tasks.fail([Failure(each.fence, "It was cancelled.")])
        await it.build()
        assert await it.deployment.keep(await it.dataset("entries")) == PartsKept(0)

    play(story)


def test_what_is_kept_upstream_of_changes_is_appended_once(play: Play) -> None:
    """A new generation reads all changes, also what was kept, and would have it twice."""

    async def story(world: World) -> None:
        def text(log: str) -> str:
            changes = "inputs: [{from: entries, read: changes}]\n    update: append"
            return texts(log=log).replace("inputs: [entries]", changes)

        it = Log(world)
        await it.apply(text("1"))
        for n in range(3):
            await it.bring("p", n)
            await it.labour()
        assert await it.read("totals") == ["0", "1", "2"]
        await it.retain()
        await it.apply(text("2"))
        entries, totals = await it.dataset("entries"), await it.dataset("totals")
        await it.build()
        assert await it.deployment.keep(entries) == PartsKept(2)
        await it.build()
        assert await it.deployment.keep(totals) == PartsNotKept(CutOverOutcome.CHANGES)
        assert await it.deployment.cut_over(totals, force=True) is CutOverOutcome.DONE
        await it.build()
        await it.bring("p", 9)
        await it.labour()
        assert await it.states("entries") == await it.states("totals") == ["current", "retired"]
        assert await it.read() == ["0", "1", "2", "9"]
        assert await it.read("totals") == ["0+1+9", "2"]

    play(story)


def test_what_only_looks_into_it_is_computed_again_with_what_is_kept(play: Play) -> None:
    look = """
  look:
    runtime: process
    operator: a:look
    inputs: [raw, {from: entries, trigger: false, read: all}]
    outputs: [seen]
"""

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts() + look)
        await it.bring("p", 1, 2)
        await it.labour("a:log")
        await it.labour()
        assert await it.read("seen") == ["1+2"]
        await it.retain()
        await it.apply(texts(log="2") + look)
        await it.build()
        assert await it.read("seen") == ["1+2"]
        assert await it.deployment.keep(await it.dataset("entries")) == PartsKept(1)
        await it.build()
        assert (await it.job("look")).is_building is False
        assert await it.read("seen") == ["1+2"]

    play(story)


def test_other_columns_are_not_kept(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1, 2)
        await it.labour()
        await it.retain()
        await it.apply(texts(log="2"))
        await it.build()
        types = {"retired": "string", "current": "string", "building": "bigint"}
        for state, column in types.items():
            await world.rows(
                "INSERT INTO generation_schema (dataset_id, version, columns)"
                " SELECT dataset_id, version, jsonb_build_array(jsonb_build_object("
                " 'name', 'n', 'type', %s::text)) FROM generation"
                " WHERE dataset_id = %s AND state = %s",
                column,
                await it.dataset("entries"),
                state,
            )
        found = await it.deployment.keep(await it.dataset("entries"))
        assert isinstance(found, PartsNotKept)
        assert found.why is None
        assert "'n'" in found.detail
        assert await it.read() == ["1", "2"]

    play(story)


def test_a_dead_task_may_be_replayed_and_is_not_kept(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1, 2)
        await it.labour()
        await it.apply(texts(log="2"))
        await it.backfills.turn()
        first, second = await it.tasks.claim_next("a:log", worker="w", limit=10)
        await it.tasks.fail([Failure(first.fence, "broken", is_retried=False)])
        await it.finish(second)
        await it.build()
        assert await it.read() == ["1", "2"]
        assert await it.deployment.keep(await it.dataset("entries")) == PartsKept(0)
        await it.tasks.replay([first.task_id])
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.read() == ["1", "2"]

    play(story)


def test_what_the_input_was_replaced_by_is_not_appended_again(play: Play) -> None:
    """An earlier state of a replaced input is gone: its rows are kept, or given up by somebody."""

    def chained(log: str, clean: str = "1") -> str:
        return (
            texts(log=log).replace("inputs: [raw]", "inputs: [tidy]")
            + f"""
  clean:
    runtime: process
    operator: a:clean
    config: {{v: {clean}}}
    inputs: [raw]
    outputs: [tidy]
"""
        )

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(chained("1"))
        for n in (104, 105, 106):
            await it.bring("p", n)
            await it.labour()
        assert await it.read() == ["104", "105", "106"]
        # Whether the job itself is edited, or what it reads.
        for text in (chained("2"), chained("2", clean="2")):
            assert (await it.apply(text)).losses == (UnrebuildableParts("entries", "log", 3, 2),)
            await it.build()
            assert await it.deployment.keep(await it.dataset("entries")) == PartsKept(2)
            await it.build()
            assert (await it.job("log")).is_building is False
            assert await it.read() == ["104", "105", "106"]
        # Large tables are joined in other ways, in which nothing is asked for ever.
        ways = [await world.database.transact(partial(_lost, joins=joins)) for joins in JOINS]
        assert ways[0] == ways[1] != []

    play(story)


JOINS = ("nestloop", "hashjoin")


async def _lost(connection: Connection, *, joins: str) -> list[tuple[int, bool]]:
    """Of all tasks, whether they are lost, by plans that join only so."""
    await connection.execute("DISCARD PLANS")
    for each in ("nestloop", "hashjoin", "mergejoin", "memoize"):
        await connection.execute(f"SET LOCAL enable_{each} = {joins == each}".encode())
    found = await connection.execute(
        "SELECT id, penstock_is_lost(id, ARRAY(SELECT version FROM generation)) AS lost FROM task"
        " ORDER BY id"
    )
    return [(row["id"], row["lost"]) for row in await found.fetchall()]


COPY = """
  copy:
    runtime: process
    operator: a:copy
    update: append
    inputs: [entries]
    outputs: [copies]
"""


def test_what_is_kept_upstream_is_kept_downstream_and_not_computed_twice(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts() + COPY)
        for n in (1, 2, 3):
            await it.bring("p", n)
            await it.labour()
        await it.retain()
        losses = (
            UnrebuildableParts("copies", "copy", 3, 2),
            UnrebuildableParts("entries", "log", 3, 2),
        )
        assert (await it.apply(texts(log="2") + COPY)).losses == losses
        await it.build()
        assert await it.deployment.keep(await it.dataset("copies")) == PartsNotKept(
            CutOverOutcome.UPSTREAM
        )
        assert await it.deployment.keep(await it.dataset("entries")) == PartsKept(2)
        await it.build()
        assert await it.read("copies") == ["1", "1+2", "1+2+3"]
        assert await it.states("entries") == ["building", "current"]
        assert await it.deployment.keep(await it.dataset("copies")) == PartsKept(2)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.states("copies") == ["current", "retired"]
        assert await it.read() == ["1", "2", "3"]
        assert len(await it.read("copies")) == 3

    play(story)


@pytest.mark.parametrize("partition", ["p", ""])
def test_what_is_kept_upstream_is_merged_downstream(play: Play, partition: str) -> None:
    """Nothing is kept of what was merged; a row that is merged again is the same row."""
    merging = COPY.replace("update: append", "update: merge\n    unique_key: [n]")

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts() + merging)
        for n in (1, 2, 3):
            await it.bring(partition, n)
            await it.labour()
        await it.retain()
        await it.apply(texts(log="2") + merging)
        await it.build()
        entries, copies = await it.dataset("entries"), await it.dataset("copies")
        assert await it.deployment.keep(entries) == PartsKept(2)
        await it.build()
        if not partition:
            # What was told without a partition, and is forgotten, has no name to know it by.
            assert await it.deployment.cut_over(copies) is CutOverOutcome.UNCOVERED
            assert await it.deployment.cut_over(copies, force=True) is CutOverOutcome.DONE
            await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.states("copies") == ["current", "retired"]
        assert await it.read() == ["1", "2", "3"]
        (merged,) = await it.read("copies")
        assert {*merged.split("+")} == {"1", "2", "3"}
        # Nor does the next edit, of the job that merges alone, make less of them.
        await it.apply(texts(log="2") + merging.replace("a:copy", "a:copy\n    config: {v: 2}"))
        await it.build()
        assert await it.states("copies") == ["current", "retired", "retired"]
        (merged,) = await it.read("copies")
        assert {*merged.split("+")} == {"1", "2", "3"}

    play(story)


def test_what_is_kept_of_a_rebuild_that_was_cancelled_is_not_made_after_all(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1, 2)
        await it.labour()
        await it.apply(texts(log="2"))
        await world.rows("UPDATE backfill SET concurrency_max = 1")
        await it.backfills.turn()
        # One of them is a task that is cancelled, of the other there is none.
        await it.forget_rebuilds()
        entries = await it.dataset("entries")
        assert await it.deployment.keep(entries) == PartsKept(2)
        await it.apply(texts(), force=True)
        await it.apply(texts(log="2"), force=True)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.read() == ["1", "2"]

    play(story)


async def work_at_random(it: Log) -> None:
    for _ in range(25):
        for operator in ("a:log", "a:copy", "a:sums"):
            for each in await it.tasks.claim_next(operator, worker="w", limit=2):
                await it.finish(each)


async def turn_often(it: Log) -> None:
    for _ in range(25):
        await it.backfills.turn()
        await CutOverController(it.world.database, it.deployment).turn()


async def read_often(it: Log) -> list[str]:
    """What readers once had, and then not any more."""
    seen, missed = set[str](), list[str]()
    for _ in range(60):
        now = set(await it.read())
        missed += seen - now
        seen |= now
    return missed


async def edit_often(it: Log) -> None:
    for text in (texts(log="3"), texts(log="2"), texts(log="1"), texts(log="3", sums="2")):
        await it.apply(text + COPY, force=True)
        await turn_often(it)


def test_everything_at_once(play: Play) -> None:
    """Events come, tasks end, edits are rebuilt, taken back and cut over: no row is lost."""

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts() + COPY)
        await it.bring("p", *range(10))
        await it.labour()
        await it.apply(texts(log="2") + COPY)

        async def bring() -> None:
            for n in range(10, 22):
                await it.bring("pq"[n % 2], n)

        workers = (work_at_random(it) for _ in range(3))
        reading = read_often(it)
        missed, *_ = await asyncio.gather(
            reading, bring(), *workers, turn_often(it), edit_often(it)
        )
        await it.build()
        assert missed == []
        assert (await it.job("log")).is_building is False
        assert await it.read() == sorted(map(str, range(22)))
        assert len(await it.read("copies")) == 22

    play(story)


def test_an_edit_upstream_is_followed_part_by_part(play: Play) -> None:
    """Both append: what stands for what is found through the task upstream."""

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts() + COPY)
        for n in (1, 2, 3):
            await it.bring("p", n)
            await it.labour()
        assert await it.read("copies") == ["1", "1+2", "1+2+3"]
        assert (await it.apply(texts(log="2") + COPY)).losses == ()
        await it.backfills.turn()
        for each in await it.tasks.claim_next("a:log", worker="w", limit=10):
            await it.finish(each)
        # Two of three: the partition is there, and a part is not.
        for each in await it.tasks.claim_next("a:copy", worker="w", limit=2):
            await it.finish(each)
        await it.labour("a:sums")
        await it.backfills.turn()
        await CutOverController(world.database, it.deployment).turn()
        assert await it.states("copies") == ["building", "current"]
        await it.build()
        assert await it.states("copies") == ["current", "retired"]
        assert len(await it.read("copies")) == 3
        assert await it.read() == ["1", "2", "3"]

    play(story)


def test_what_backfills_have_appended_is_made_as_often(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1)
        await it.labour()
        for _ in range(2):
            asked = BackfillAsk(job="log", keys=["p", "other"])
            assert isinstance(await it.backfills.create(asked), BackfillAnswer)
            await it.backfills.turn()
            await it.labour()
        assert len(await it.read()) == 5
        assert (await it.apply(texts(log="2"))).losses == ()
        # There and back: what was made stays made.
        await it.backfills.turn()
        await it.labour()
        await it.apply(texts(), force=True)
        await it.apply(texts(log="2"), force=True)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert len(await it.read()) == 5

    play(story)


def test_merged_updates_are_made_as_one(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts(more="merge_updates: true"))
        await it.bring("p", 1, 2, 3)
        await it.labour()
        await it.bring("p", 4)
        await it.labour()
        before = await it.read()
        assert before == ["3", "4"]
        await it.apply(texts(log="2", more="merge_updates: true"))
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.read() == before

    play(story)


def test_an_earlier_text_is_served_at_once_if_it_lacks_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1, 2)
        await it.labour()
        await it.apply(texts(log="2"))
        await it.build()
        seen = await it.deployment.foresee(parse(texts(), "dag"))
        assert (seen.returned, seen.building) == (("log", "sums"), ())
        back = await it.apply(texts())
        assert (back.returned, back.building) == (("log", "sums"), ())
        assert await it.read() == ["1", "2"]
        # Forward, with more; and back again, where that is lacking.
        await it.apply(texts(log="2"))
        await it.bring("p", 3, 4)
        await it.labour()
        seen = await it.deployment.foresee(parse(texts(), "dag"))
        assert (seen.returned, seen.building, seen.losses) == ((), ("log", "sums"), ())
        back = await it.apply(texts())
        assert (back.returned, back.building) == ((), ("log", "sums"))
        assert await it.read() == ["1", "2", "3", "4"]
        await it.build()
        assert (await it.job("log")).is_building is False
        assert await it.read() == ["1", "2", "3", "4"]
        assert await it.read("totals") == ["1+2+3+4"]
        # A rollback is at once, and catches up with every event.
        await it.bring("p", 5, 6)
        await it.labour()
        rolled = await it.deployment.rollback()
        assert getattr(rolled, "returned", None) == ("log", "sums")
        await it.build()
        assert await it.read() == ["1", "2", "3", "4", "5", "6"]

    play(story)


def test_an_edit_that_is_taken_back_among_others_goes_back_too(play: Play) -> None:
    more = """
  mail:
    runtime: process
    operator: a:mail
    inputs: [entries]
"""

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1, 2)
        await it.labour()
        first = await it.generations()
        await it.apply(texts(log="2"))
        await it.build()
        tasks = await it.number("a:log")
        # Never in force as a whole, and as it was in all that makes these two.
        seen = await it.deployment.foresee(parse(texts() + more, "dag"))
        assert (seen.version_id, seen.returned, seen.building) == (None, ("log", "sums"), ())
        await it.apply(texts() + more)
        now = await it.generations()
        assert {name: now[name] for name in first} == first
        await it.build()
        assert await it.number("a:log") == tasks
        assert await it.read() == ["1", "2"]
        # Edited again, only one of them is as it was.
        await it.apply(texts(sums="2"))
        assert (await it.generations())["log"] == first["log"]
        assert await it.states("totals") == ["building", "current", "retired"]
        # What was dropped does not come back.
        await it.build()
        await it.apply(texts(log="3"))
        await it.build()
        await world.rows(
            "UPDATE generation SET state = 'abandoned', dropped_at = changed_at WHERE version = %s",
            first["log"],
        )
        seen = await it.deployment.foresee(parse(texts(sums="4"), "dag"))
        assert (seen.returned, seen.building) == ((), ("log", "sums"))

    play(story)


def test_what_the_earlier_text_lacks_for_good_waits_for_somebody(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1)
        await it.labour()
        await it.apply(texts(log="2"))
        await it.build()
        await it.bring("p", 2, 3)
        await it.labour()
        await it.retain()
        loss = UnrebuildableParts("entries", "log", publications=3, lost=1)
        assert (await it.deployment.foresee(parse(texts(), "dag"))).losses == (loss,)
        # A rollback would give it up.
        rolled = await it.deployment.foresee_rollback()
        assert getattr(rolled, "losses", None) == (loss,)
        assert getattr(rolled, "returned", None) == ("log", "sums")
        assert (await it.apply(texts())).losses == (loss,)
        await it.build()
        assert await it.read() == ["1", "2", "3"]
        # What the earlier generation has of it is not lacking.
        assert await it.deployment.keep(await it.dataset("entries")) == PartsKept(1)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await it.read() == ["1", "2", "3"]

    play(story)


def test_to_replace_what_was_appended_waits_for_somebody(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1, 2)
        await it.labour()
        await it.apply(texts(update="replace"))
        await it.build()
        assert await it.read() == ["1", "2"]
        entries = await it.dataset("entries")
        assert await it.deployment.keep(entries) == PartsKept(0)
        assert await it.deployment.cut_over(entries, force=True) is CutOverOutcome.DONE
        assert await it.read() == ["2"]

    play(story)


def test_a_job_that_waits_for_all_inputs_is_built_as_often(play: Play) -> None:
    def joined(log: str) -> str:
        return (
            texts(log=log, more="when: all").replace("inputs: [raw]", "inputs: [raw, more]")
            + """
  other:
    activation: source
    source: {kind: manual}
    outputs: [more]
"""
        )

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(joined("1"))
        other = await it.job("other")
        place = {"dataset": other.outputs["more"], "generation": other.generation}
        for n in (1, 2, 3):
            await it.bring("p", n)
            event = await it.event(f"more {n}", partition_key="p", payload={"n": n * 10}, **place)
            await it.routing.accept([event])
            await it.route()
        await it.labour()
        # The first made none: nothing else was there.
        before = await it.read()
        assert before == ["10", "2", "20", "3", "30"]
        await it.apply(joined("2"))
        await it.build()
        assert (await it.job("log")).is_building is False
        assert await it.read() == before

    play(story)


@pytest.mark.parametrize("times", [1, 3])
def test_what_another_job_catches_up_with_is_not_appended_again(play: Play, times: int) -> None:
    """A job that waits for all inputs has made its task of the event that came last."""

    def joined(copy: str) -> str:
        return (
            texts(more="when: all").replace("inputs: [raw]", "inputs: [raw, more]")
            + f"""
  other:
    activation: source
    source: {{kind: manual}}
    outputs: [more]
  copy:
    runtime: process
    operator: a:copy
    config: {{v: {copy}}}
    inputs: [raw]
    outputs: [copies]
"""
        )

    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(joined("1"))
        await it.bring("q", 99)
        await it.labour()
        await it.apply(joined("2"))
        await it.build()
        other = await it.job("other")
        place = {"dataset": other.outputs["more"], "generation": other.generation}
        await it.bring("p", 1)
        event = await it.event("more 1", partition_key="p", payload={"n": 10}, **place)
        await it.routing.accept([event])
        await it.route()
        await it.labour()
        assert (await it.read(), await it.read("copies")) == (["10"], ["1", "99"])
        # There, and perhaps back and there again before anything is routed.
        for _ in range(times):
            await it.deployment.rollback()
        await it.route()
        await it.labour()
        assert (await it.read(), await it.read("copies")) == (["10"], ["1", "99"])

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_part_that_is_published_at_the_cut_over_is_seen(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        await it.apply(texts())
        await it.bring("p", 1)
        await it.labour()
        old = await it.job("log")
        await it.apply(texts(log="2"))
        version = (await it.job("log")).generation
        await it.backfills.turn()
        await it.labour()
        await it.backfills.turn()
        await it.bring("p", 2)
        claimed = await it.tasks.claim_next("a:log", worker="w", limit=2)
        (first,) = [each for each in claimed if each.generation == old.generation]
        entries = old.outputs["entries"]
        output = TaskOutput(dataset=entries, location="s3://b/2", partition_key="p")
        async with asyncio.TaskGroup() as group, world.unfinished(is_kept=is_kept) as other:
            await other.complete([Completion(first.fence, (output,))])
            # Who looks without locks does not see it.
            judged_at = await it.deployment.judge(version)
            assert judged_at is not None
            cutting = group.create_task(
                it.deployment.cut_over(entries, version=version, judged_at=judged_at)
            )
            await world.until_waiting()
        assert cutting.result() is (CutOverOutcome.UNCOVERED if is_kept else CutOverOutcome.DONE)

    play(story)
