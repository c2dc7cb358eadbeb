"""What a claimed task is given to read: its partition, the whole, its range, or everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.dispatcher.tasks.model import ClaimedTask
from tests.integration.dispatcher.world import Job, Play, World

DIGEST = "a" * 64


@dataclass(frozen=True)
class Reading:
    """A job that reads the dataset of another."""

    world: World
    writer: Job
    reader: Job

    async def published(
        self, key: str, *, span: tuple[int, int] | None = None, mode: str = "replace", **more: Any
    ) -> None:
        start, end = span or (None, None)
        columns = {
            "dataset_id": self.writer.dataset,
            "generation": self.writer.generation,
            "partition_key": key,
            "range_start": start,
            "range_end": end,
            "mode": mode,
            "task_id": 1,
            "attempt": 1,
            "location": f"s3://b/{key}",
            **more,
        }
        await insert(self.world, "publication", columns)

    async def appended(self, key: str, append_key: str, *, task: int, **more: Any) -> None:
        columns = {
            "dataset_id": self.writer.dataset,
            "generation": self.writer.generation,
            "partition_key": key,
            "append_key": append_key,
            "task_id": task,
            "attempt": 1,
            "location": f"s3://b/{key}/{append_key}",
            **more,
        }
        await insert(self.world, "appended", columns)

    async def given(self, **payload: Any) -> Mapping[str, Any]:
        """What the input of a task is that was made for this."""
        new = self.reader.new(f"task {payload}", payload=payload)
        (task_id,) = await self.world.tasks.create([new])
        assert task_id is not None
        claimed = await self.world.tasks.claim(task_id, worker="w")
        assert isinstance(claimed, ClaimedTask)
        return claimed.inputs["in"]

    async def locations(self, **payload: Any) -> list[str]:
        return [each["location"] for each in (await self.given(**payload))["parts"]]


async def insert(world: World, table: str, columns: Mapping[str, Any]) -> None:
    names, marks = ", ".join(columns), ", ".join("%s" for _ in columns)
    await world.rows(f"INSERT INTO {table} ({names}) VALUES ({marks})", *columns.values())


async def reading(world: World, *, reads: str = "partition") -> Reading:
    writer, reader = await world.job("writer", operator="w"), await world.job("reader")
    version = await world.value(
        "INSERT INTO dag_version (hash, source) VALUES ('x', 'x') RETURNING id"
    )
    for job in (writer, reader):
        await world.rows(
            "INSERT INTO dag_job VALUES (%s, %s, %s, %s)",
            *(version, job.id, job.definition_id, job.generation),
        )
    edge = {
        "dag_version_id": version,
        "dataset_id": writer.dataset,
        "job_id": reader.id,
        "input": "in",
        "reads": reads,
    }
    await insert(world, "edge", edge)
    return Reading(world, writer, reader)


def test_its_own_partition_and_all_that_is_known_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        known: dict[str, Any] = {"manifest": DIGEST, "rows": 5, "bytes": 6, "files": 1}
        await it.published("a", span=(10, 20), revision=3, **known)
        await it.published("b", span=(20, 30))
        found = await it.given(partition_key="a", start=10, end=20)
        assert found == {
            "dataset": "writer",
            "uuid": it.writer.dataset,
            "generation": it.writer.generation,
            "location": "s3://b/a",
            "revision": 3,
            "has_data": True,
            "parts": [
                {
                    "location": "s3://b/a",
                    "partition_key": "a",
                    "start": 10,
                    "end": 20,
                    "revision": 3,
                    "manifest": DIGEST,
                    "rows": 5,
                    "bytes": 6,
                }
            ],
        }

    play(story)


def test_where_there_is_nothing_nothing_is_given(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        await it.published("b", span=(20, 30))
        for payload in ({"partition_key": "a"}, {"cursor": 4}, {}):
            found = await it.given(**payload)
            assert (found["location"], found["revision"], found["parts"]) == (None, None, [])

    play(story)


def test_the_whole_where_its_own_is_not_and_its_own_before_its_range(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        await it.published("")
        await it.published("a", span=(0, 10))
        whole = await it.given(partition_key="z", start=0, end=100)
        assert whole["parts"] == [{"location": "s3://b/", "revision": 1}]
        assert await it.locations(partition_key="a", start=0, end=100) == ["s3://b/a"]
        assert await it.locations(cursor=3) == ["s3://b/"]

    play(story)


def test_what_lies_within_its_range(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        # Not in the order of their keys, and some of them across the ends.
        spans = [(20, 30), (0, 10), (10, 20), (30, 41), (-5, 5), (40, 50)]
        for key, span in zip("cbadef", spans, strict=True):
            await it.published(key, span=span)
        await it.published("without a range")
        found = await it.given(partition_key="month", start=0, end=40)
        assert [each["location"][-1] for each in found["parts"]] == ["b", "a", "c"]
        assert [each["start"] for each in found["parts"]] == [0, 10, 20]
        # There is no one location of three partitions.
        assert (found["location"], found["revision"]) == (None, None)
        one = await it.given(partition_key="ten", start=10, end=20)
        assert (one["location"], len(one["parts"])) == ("s3://b/a", 1)
        assert await it.locations(partition_key="none", start=1, end=9) == []

    play(story)


def test_everything_where_the_edge_says_so(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world, reads="all")
        for key in ("b", "B", "a"):
            await it.published(key)
        await it.published("z", span=(0, 10))
        expected = ["s3://b/z", "s3://b/B", "s3://b/a", "s3://b/b"]
        assert await it.locations(partition_key="a") == expected
        assert await it.locations(cursor=1) == expected
        assert (await it.given(partition_key="b"))["location"] is None

    play(story)


def test_every_part_of_what_is_appended_to_in_the_order_of_publication(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        await it.published("a", mode="append", revision=3, location="s3://b/a/z", rows=99)
        await it.published("b")
        await it.appended("a", "z", task=1, rows=1, manifest=DIGEST)
        await it.appended("a", "y", task=2)
        world.later(1)
        await it.appended("a", "x", task=0)
        # What was appended before the partition was replaced is no part of it any more.
        await it.appended("b", "old", task=1)
        found = await it.given(partition_key="a")
        assert [each["location"] for each in found["parts"]] == [
            "s3://b/a/z",
            "s3://b/a/y",
            "s3://b/a/x",
        ]
        assert found["parts"][0] == {
            "location": "s3://b/a/z",
            "partition_key": "a",
            "revision": 3,
            "append_key": "z",
            "rows": 1,
            "manifest": DIGEST,
        }
        # Whoever reads but one location reads what came last.
        assert (found["location"], found["revision"]) == ("s3://b/a/z", 3)
        assert await it.locations(partition_key="b") == ["s3://b/b"]

    play(story)


def test_a_source_that_runs_nothing_has_no_data(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        assert (await it.given(partition_key="a"))["has_data"]
        for runtime in ("", "dispatcher"):
            await world.rows(
                "UPDATE job_definition SET runtime = %s WHERE id = %s",
                *(runtime, it.writer.definition_id),
            )
            assert not (await it.given(partition_key=f"of {runtime}"))["has_data"]

    play(story)


def test_what_is_told_of_ranges_alone_has_nothing_to_read(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        await it.published("month", span=(0, 40), location="range:month")
        found = await it.given(partition_key="month", start=0, end=40)
        assert (found["location"], found["parts"]) == ("range:month", [])

    play(story)


def test_another_generation_is_not_read(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world)
        other = await world.value(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, gen_random_uuid(), 'building', 'y') RETURNING version::text",
            it.writer.dataset,
        )
        await it.published("a", generation=other)
        assert await it.locations(partition_key="a") == []

    play(story)


def test_a_task_is_given_all_parts_however_many(play: Play) -> None:
    async def story(world: World) -> None:
        it = await reading(world, reads="all")
        await world.rows(
            "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
            " attempt, location) SELECT %s, %s, 'p' || number, 'replace', 1, 1, 's3://b/x'"
            " FROM generate_series(1, 10010) AS number",
            it.writer.dataset,
            it.writer.generation,
        )
        assert len(await it.locations(partition_key="p1")) == 10_010

    play(story)
