"""The log of what was published and the snapshots made of it, on a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.dispatcher.catalog import snapshots as catalog
from penstock.dispatcher.catalog.snapshots import History, Snapshots
from penstock.dispatcher.database.pool import Connection, fetch_rows
from penstock.dispatcher.deployment_plan import DagApplied
from penstock.dispatcher.retention import KEEP_PASS_SECONDS, PartitionExpirer
from penstock.dispatcher.tasks.model import AttemptEnd, ClaimedTask, TaskOutput
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from tests.integration.dispatcher.readers import ROOT, Library, columns, completed, facts
from tests.integration.dispatcher.test_compacted_parts import parts as compacting
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.test_keeping import kept, run_all, send, states
from tests.integration.dispatcher.test_maintenance import ROWS, site
from tests.integration.dispatcher.world import Job, Play, World, done
from tests.sizes import SIZES

SUMS = b"""
    SELECT id, generation, partitions, parts, files, rows, bytes FROM table_snapshot
    WHERE dataset_id = %(dataset)s::uuid AND id = %(id)s"""


@pytest.fixture(autouse=True)
def _sums_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot has the sums of all that it shows, however it was made."""
    make = catalog._make

    async def checked(connection: Connection, dataset: str) -> Sequence[int]:
        made = await make(connection, dataset)
        for each in made:
            found = await connection.execute(SUMS, {"dataset": dataset, "id": each})
            (said,) = await found.fetchall()
            asked = {"dataset": dataset, **said}
            (counted,) = await fetch_rows(connection, "count_parts", asked)
            assert {name: said[name] for name in counted} == counted
        return made

    monkeypatch.setattr(catalog, "_make", checked)


def snapshots(world: World) -> Snapshots:
    return Snapshots(world.database, pace_seconds=0)


async def shown(world: World, snapshot: int) -> list[str]:
    """What a snapshot shows: partitions with their locations."""
    rows = await world.rows(
        "SELECT part.partition_key || ' ' || part.location AS said"
        " FROM table_snapshot AS made"
        " JOIN table_part AS part USING (dataset_id, generation)"
        " WHERE made.id = %s AND part.came <= made.id"
        " AND coalesce(part.gone, made.id + 1) > made.id"
        " ORDER BY 1",
        snapshot,
    )
    return [row["said"] for row in rows]


async def published(world: World) -> list[str]:
    """What is published of current generations now."""
    rows = await world.rows(
        "SELECT head.partition_key || ' ' || coalesce(part.location, head.location) AS said"
        " FROM publication AS head JOIN generation"
        " ON generation.version = head.generation AND generation.state = 'current'"
        " LEFT JOIN part ON head.mode = 'append' AND part.generation = head.generation"
        " AND part.partition_key = head.partition_key ORDER BY 1"
    )
    return [row["said"] for row in rows]


async def put(world: World, job: Job, key: str, partition: str, location: str, **more: Any) -> None:
    held = await job.claimed(key)
    await completed(world, held, job.output(partition, location, **more))


async def latest(world: World, job: Job) -> int:
    (made,) = await snapshots(world).make(job.dataset)
    return made


def test_a_snapshot_shows_what_was_published_and_goes_on_to(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await put(world, job, "one", "a", "s3://b/1")
        await put(world, job, "two", "b", "s3://b/2")
        first = await latest(world, job)
        assert await snapshots(world).make(job.dataset) == [], "nothing is new"
        await put(world, job, "three", "a", "s3://b/3")
        second = await latest(world, job)
        await world.rows("DELETE FROM publication WHERE partition_key = 'b'")
        third = await latest(world, job)
        assert first < second < third
        assert await shown(world, first) == ["a s3://b/1", "b s3://b/2"]
        assert await shown(world, second) == ["a s3://b/3", "b s3://b/2"]
        assert await shown(world, third) == ["a s3://b/3"] == await published(world)
        rows = await world.rows(
            "SELECT operation, added, removed, partitions FROM table_snapshot ORDER BY id"
        )
        assert [tuple(row.values()) for row in rows] == [
            ("append", 2, 0, 2),
            ("overwrite", 1, 1, 2),
            ("delete", 0, 1, 1),
        ]

    play(story)


def test_what_commits_late_is_in_the_next_one(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(update_mode="append")
        slow, fast = await job.claimed("slow"), await job.claimed("fast")
        async with world.unfinished() as theirs:
            late = job.output("a", "s3://b/late", append_key="slow")
            await theirs.complete(done(slow.fence, late))
            # Its row of the log has the lower number, and is not there yet. Nobody waits for it.
            await completed(world, fast, job.output("b", "s3://b/fast", append_key="fast"))
            first = await latest(world, job)
        second = await latest(world, job)
        assert await shown(world, first) == ["b s3://b/fast"]
        assert await shown(world, second) == ["a s3://b/late", "b s3://b/fast"]

    play(story)


async def orders(world: World) -> dict[str, list[int]]:
    """The tasks of each partition, in the order of the snapshots that show them.

    No snapshot shows two of a partition, nor, after the first, none.
    """
    rows = await world.rows(
        "SELECT part.partition_key, made.id, array_agg(part.task_id) AS tasks"
        " FROM table_snapshot AS made JOIN table_part AS part USING (dataset_id, generation)"
        " WHERE part.came <= made.id AND coalesce(part.gone, made.id + 1) > made.id"
        " GROUP BY 1, 2 ORDER BY 1, 2"
    )
    snapshots = await world.value("SELECT array_agg(id ORDER BY id) FROM table_snapshot")
    found: dict[str, list[int]] = {}
    since: dict[str, list[int]] = {}
    for row in rows:
        (task,) = row["tasks"]
        found.setdefault(row["partition_key"], []).append(task)
        since.setdefault(row["partition_key"], []).append(row["id"])
    for ids in since.values():
        assert ids == snapshots[-len(ids) :]
    return found


def test_of_two_that_make_snapshots_one_does(play: Play) -> None:
    """And many publish into few partitions at once: nobody is lost, and their order is kept."""

    async def story(world: World) -> None:
        job = await world.job()
        many = SIZES.publishers_at_once
        held: list[ClaimedTask] = [await job.claimed(f"{number}") for number in range(many)]

        async def publish(number: int) -> None:
            await completed(world, held[number], job.output(f"{number % 5}", f"s3://b/{number}"))

        async def make() -> Sequence[int]:
            found: list[int] = []
            for _ in range(10):
                found += await snapshots(world).make(job.dataset)
            return found

        async with asyncio.TaskGroup() as group:
            makers = [group.create_task(make()) for _ in range(2)]
            for number in range(many):
                group.create_task(publish(number))
        made = sorted(each for maker in makers for each in maker.result())
        made += await snapshots(world).make(job.dataset)
        assert len(set(made)) == len(made)
        assert await shown(world, made[-1]) == await published(world)
        assert await world.value("SELECT count(*) FROM publication_log WHERE snapshot IS NULL") == 0
        # The later task wins, at each moment; and the log has all that ever was published.
        for tasks in (await orders(world)).values():
            assert tasks == sorted(tasks)
        published_at_all = await world.value("SELECT sum(revision) FROM publication")
        rows = await world.rows("SELECT * FROM publication_log ORDER BY id")
        assert sum(row["change"] == "put" for row in rows) == published_at_all
        for key in {row["partition_key"] for row in rows} - {None}:
            mine = [row for row in rows if row["partition_key"] == key]
            puts = [row["task_id"] for row in mine if row["change"] == "put"]
            assert puts == sorted(puts)
            assert [row["location"] for row in mine if row["change"] == "removed"] == [
                row["location"] for row in mine if row["change"] == "put"
            ][:-1]

    play(story)


def test_what_nobody_asks_for_is_a_snapshot_after_a_quiet_minute(play: Play) -> None:
    async def story(world: World) -> None:
        job, keeper = await world.job(), Snapshots(world.database)

        async def turns(seconds: float) -> int:
            """Let time pass, and have a dispatcher look; how many snapshots there are."""
            world.later(seconds)
            assert await keeper.turn() == catalog.QUIET_SECONDS / 4
            return int(await world.value("SELECT count(*) FROM table_snapshot"))

        await put(world, job, "one", "a", "s3://b/1")
        assert await turns(50) == 0, "perhaps more comes, or somebody asks"
        await put(world, job, "two", "b", "s3://b/2")
        assert await turns(15) == 1
        assert await shown(world, await world.value("SELECT id FROM table_snapshot")) == [
            "a s3://b/1",
            "b s3://b/2",
        ]
        assert await turns(600) == 1, "nothing is new"
        await put(world, job, "three", "a", "s3://b/3")
        assert await turns(15) == 1
        assert await turns(50) == 2
        # A clock that was ahead when it was published does not keep it for so long.
        world.later(3600)
        await put(world, job, "four", "a", "s3://b/4")
        assert await turns(-3585) == 3

    play(story)


def test_a_cut_over_is_a_snapshot_of_main_and_what_was_left_stays(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await put(world, job, "one", "a", "s3://b/old")
        first = await latest(world, job)
        await world.rows(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, gen_random_uuid(), 'building', 'y')",
            job.dataset,
        )
        await world.rows(
            "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
            " attempt, location) SELECT dataset_id, version, 'a', 'replace', 9, 1, 's3://b/new'"
            " FROM generation WHERE state = 'building'"
        )
        building = await latest(world, job)
        assert await shown(world, building) == ["a s3://b/new"]
        await world.rows(
            "UPDATE generation SET state = CASE state WHEN 'building' THEN 'current' ELSE 'retired'"
            " END"
        )
        cut = await latest(world, job)
        assert await shown(world, cut) == ["a s3://b/new"]
        # What comes late into what was left is noted, and is in no snapshot.
        late = await job.claimed("late")
        await completed(world, late, job.output("a", "s3://b/late"))
        assert await snapshots(world).make(job.dataset) == []
        assert await shown(world, first) == ["a s3://b/old"]
        rows = await world.rows("SELECT branch, operation FROM table_snapshot ORDER BY id")
        assert [tuple(row.values()) for row in rows] == [
            ("main", "append"),
            ("building", "append"),
            ("main", "overwrite"),
        ]

    play(story)


def test_ids_grow_when_the_clock_goes_back_and_snapshots_are_forgotten(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await put(world, job, "one", "a", "s3://b/1")
        first = await latest(world, job)
        world.later(-3600)
        await put(world, job, "two", "a", "s3://b/2")
        paced = Snapshots(world.database)
        (second,) = await paced.make(job.dataset)
        assert second == first + 1
        await put(world, job, "three", "a", "s3://b/3")
        assert await paced.make(job.dataset) == [], "one a second at most"
        await world.rows("DELETE FROM table_snapshot")
        world.later(1)
        assert await latest(world, job) == second + 1

    play(story)


def test_appended_parts_and_schemas_are_shown_as_they_come(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(update_mode="append")
        for number, of in enumerate((columns("x"), columns("x"), columns("x", "y"))):
            said = facts(rows=number + 1, of=of)
            key = f"{number}"
            await put(world, job, key, "a", f"s3://b/{number}", append_key=key, facts=said)
            await latest(world, job)
        rows = await world.rows("SELECT schema_id, parts, rows FROM table_snapshot ORDER BY id")
        assert [tuple(row.values()) for row in rows] == [(0, 1, 1), (0, 2, 3), (1, 3, 6)]
        rows = await world.rows("SELECT partition_column FROM table_schema")
        assert [row["partition_column"] for row in rows] == ["partition_key", "partition_key"]

    play(story)


def test_history_is_thinned_and_holds_folders_until_it_ends(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        keeper = Snapshots(world.database, pace_seconds=0, grace_seconds=100)

        async def data() -> list[str]:
            """The folders that have data, by their tasks."""
            keys = [key for key in library.bucket.objects if key.endswith(".parquet")]
            return [f"{ROOT}/{key.rpartition('/')[0]}" for key in sorted(keys)]

        old = await library.publish(job, await job.claimed("old"))
        # What is replaced before anybody has looked is held until somebody has.
        replaced = await library.publish(job, await job.claimed("new"))
        await library.carry()
        library.later(1000)
        await library.sweeping().sweep()
        assert await data() == [old, replaced]
        await keeper.make(job.dataset)
        await library.sweeping().sweep()
        assert await data() == [replaced], "no snapshot has ever shown the first"
        third = await library.publish(job, await job.claimed("third"))
        await keeper.make(job.dataset)
        fourth = await library.publish(job, await job.claimed("fourth"))
        await keeper.make(job.dataset)
        await library.carry()
        library.later(1000)
        await library.sweeping().sweep()
        assert await data() == [replaced, third, fourth]
        library.later(2 * 86_400)
        assert await keeper.forget() == 2, "of one hour there is one"
        await library.sweeping().sweep()
        assert await data() == [replaced, third, fourth], "somebody may read what is forgotten"
        library.later(101)
        assert await keeper.forget() == 0
        await library.sweeping().sweep()
        assert await data() == [fourth]
        later = await library.publish(job, await job.claimed("fifth"))
        await keeper.make(job.dataset)
        await library.carry()
        library.later(8 * 86_400)
        assert await keeper.forget() == 1, "after seven days there is the newest"
        library.later(101)
        await keeper.forget()
        await library.sweeping().sweep()
        assert await data() == [later]

    play(story)


def test_what_nobody_can_read_any_more_is_removed_batch_by_batch(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what was shown between two snapshots that stay, and of a generation that was left."""
    monkeypatch.setattr(catalog, "_ROWS_MAX", 3)
    monkeypatch.setattr(catalog, "_SNAPSHOTS_MAX", 2)

    async def story(world: World) -> None:
        keeper = Snapshots(world.database, pace_seconds=0)
        job = await world.job()
        await put(world, job, "first", "a", "s3://b/first")
        (tag,) = await keeper.make(job.dataset)
        await world.rows(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, gen_random_uuid(), 'building', 'y')",
            job.dataset,
        )
        await world.rows(
            "UPDATE generation SET state = CASE state WHEN 'building' THEN 'current'"
            " ELSE 'retired' END"
        )
        await world.rows(
            "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
            " attempt, location) SELECT dataset_id, version, 'k' || number, 'replace', 9, 1,"
            " 's3://b/0' FROM generation, generate_series(1, 4) AS number"
            " WHERE state = 'current'"
        )
        last = 0
        for number in range(6):
            await world.rows(
                "UPDATE publication SET location = 's3://b/' || %s::text, task_id = task_id + 1,"
                " revision = revision + 1 WHERE location <> 's3://b/first'",
                str(number),
            )
            world.later(1)
            (last,) = await keeper.make(job.dataset)
        world.later(7200)
        assert await keeper.forget() == 5
        assert await world.value("SELECT count(*) FROM publication_log") == 0
        assert await world.value("SELECT count(*) FROM table_part") == 1 + 6 * 4
        world.later(86_401)
        assert await keeper.forget() == 0
        assert await world.value("SELECT count(*) FROM table_part") == 1 + 4
        rows = await world.rows("SELECT id FROM table_snapshot ORDER BY id")
        assert [row["id"] for row in rows] == [tag, last]
        assert await shown(world, tag) == ["a s3://b/first"]
        assert len(await shown(world, last)) == 4

    play(story)


class Located(Pipeline):
    """What each task writes is elsewhere."""

    async def finish(self, task: ClaimedTask) -> None:
        (said,) = task.definition["outputs"]
        dataset = task.definition["datasets"][said if isinstance(said, str) else said["name"]]
        key = task.payload["partition_key"]
        output = TaskOutput(dataset=dataset, location=f"s3://b/{task.task_id}", partition_key=key)
        await self.tasks.complete(done(task.fence, output))


async def dataset_of(world: World, name: str) -> str:
    return str(await world.value("SELECT id::text FROM dataset WHERE name = %s", name))


async def served(world: World, dataset: str, state: str = "current") -> list[str]:
    """What is published of a generation of a dataset."""
    rows = await world.rows(
        "SELECT partition_key || ' ' || location AS said FROM publication JOIN generation"
        " USING (dataset_id) WHERE dataset_id = %s AND generation = version AND state = %s"
        " ORDER BY 1",
        *(dataset, state),
    )
    return [row["said"] for row in rows]


def test_generations_are_shown_as_they_are_moved_and_never_half_cleared(play: Play) -> None:
    """With the real cut-over, rollback and drop, and `history` as a DAG says it."""

    async def story(world: World) -> None:
        library, pipeline = Library(world), Located(world)
        keeper = Snapshots(world.database, pace_seconds=0, grace_seconds=0)
        first = await pipeline.apply(kept("generations: 1, history: 1d"))
        await send(pipeline, "a", "b")
        tidy = await dataset_of(world, "tidy")

        async def made(branch: str, operation: str) -> int:
            (found,) = await keeper.make(tidy)
            rows = await world.rows(
                "SELECT branch, operation FROM table_snapshot WHERE id = %s", found
            )
            assert tuple(rows[0].values()) == (branch, operation)
            return found

        old = await made("main", "append")
        before = await served(world, tidy)
        assert await shown(world, old) == before
        second = await pipeline.apply(kept("generations: 1, history: 1d", clean="2"), force=True)
        await pipeline.backfills.turn()
        await run_all(pipeline)
        building = await made("building", "append")
        assert await shown(world, building) == await served(world, tidy, "building") != before
        await pipeline.backfills.turn()
        # What reads the old one holds it.
        for name in ("daily", "tidy"):
            await pipeline.deployment.cut_over(await dataset_of(world, name), force=True)
        after = await served(world, tidy)
        assert await shown(world, await made("main", "overwrite")) == after
        assert isinstance(await pipeline.deployment.rollback(first.version_id), DagApplied)
        back = await made("main", "overwrite")
        assert await shown(world, back) == before == await served(world, tidy)
        assert isinstance(await pipeline.deployment.rollback(second.version_id), DagApplied)
        assert await shown(world, await made("main", "overwrite")) == after
        # The other is dropped and cleared, row by row: no snapshot is made of that.
        await library.carry()
        world.later(3600)
        dropped = 0
        keeping = PartitionExpirer(world.database, rows_max=1, grace_seconds=0)
        for _ in range(100):
            if await keeping.turn() == KEEP_PASS_SECONDS:
                break
            dropped += len(await keeper.make(tidy))
            assert await shown(world, old) == await shown(world, back) == before
        assert await states(world) == ["dropped", "current"]
        assert await keeper.make(tidy) == []
        assert await served(world, tidy, "abandoned") == []
        assert dropped == 0
        # For a day, and not for seven.
        assert await shown(world, back) == before
        world.later(86_400)
        await keeper.forget()
        assert await shown(world, back) == []
        assert await world.value(
            "SELECT count(*) FROM table_part WHERE dataset_id = %s", tidy
        ) == len(after)

    play(story)


def test_sums_go_on_from_the_last_snapshot(play: Play) -> None:
    """Whatever comes and goes between two; the sums of all parts are asked for but once."""
    random = seeded_entropy(23)

    async def story(world: World) -> None:
        append = await world.job(update_mode="append")
        replace = await world.job("other")
        for number in range(60):
            job, key = random.choice([append, replace]), random.choice("abc")
            if random.random() < 0.2:
                await world.rows(
                    "DELETE FROM publication WHERE dataset_id = %s AND partition_key = %s",
                    *(job.dataset, key),
                )
            else:
                more = {"append_key": str(number)} if job is append else {}
                said = facts(rows=number, files=random.choice([0, 1, 3]))
                await put(world, job, f"t{number}", key, f"s3://b/{number}", facts=said, **more)
            if random.random() < 0.5:
                for each in (append, replace):
                    await snapshots(world).make(each.dataset)
        # Were they counted again, this would be mended by the next one.
        await snapshots(world).make(replace.dataset)
        told = "UPDATE table_snapshot SET rows = 1000 + rows"
        await world.rows(f"{told} WHERE dataset_id = %s", replace.dataset)
        await put(world, replace, "last", "z", "s3://b/z", facts=facts(rows=5))
        with pytest.raises(AssertionError):
            await snapshots(world).make(replace.dataset)

    play(story)


def test_files_that_are_rewritten_replace_others_and_no_rows(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p", "q")
        tidy = await dataset_of(world, "tidy")

        async def operation() -> str:
            await snapshots(world).make(tidy)
            rows = await world.rows(
                "SELECT operation FROM table_snapshot WHERE dataset_id = %s ORDER BY id", tidy
            )
            return str(rows[-1]["operation"])

        assert await operation() == "append"
        for _ in "pq":
            assert isinstance(await it.end(await it.rewriting(), files=1), AttemptEnd)
        assert await operation() == "replace"
        await it.publish("q")
        assert await operation() == "overwrite", "as many rows, and not the same"
        # What was published and rewritten since is news all the same.
        await it.publish("p")
        assert isinstance(await it.end(await it.rewriting(), files=1), AttemptEnd)
        assert await operation() == "overwrite"

    play(story)


def test_parts_that_are_put_together_are_one_change(play: Play) -> None:
    async def story(world: World) -> None:
        it = await compacting(world)
        tidy = await dataset_of(world, "tidy")
        await it.append(3)
        (before,) = await snapshots(world).make(tidy)
        old = await shown(world, before)
        assert len(old) == 3
        claimed = await it.rewriting()
        # What comes meanwhile is beside it.
        await it.append()
        await it.rewritten(claimed)
        (after,) = await snapshots(world).make(tidy)
        there = [f"p {each['location']}" for each in await it.there()]
        assert await shown(world, after) == sorted(there)
        assert len(there) == 2
        assert await shown(world, before) == old
        rows = await world.rows(
            "SELECT operation, rows, parts FROM table_snapshot WHERE dataset_id = %s ORDER BY id",
            tidy,
        )
        assert [tuple(row.values()) for row in rows] == [
            ("append", 3 * ROWS, 3),
            ("overwrite", 4 * ROWS, 2),
        ]
        await it.append(2)
        assert await snapshots(world).make(tidy)
        assert await it.compact()
        (alone,) = await snapshots(world).make(tidy)
        said = "SELECT operation FROM table_snapshot WHERE id = %s"
        assert await world.value(said, alone) == "replace"

    play(story)


def test_a_snapshot_that_goes_bit_by_bit_is_never_read_in_part(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_ROWS_MAX", 1)
    monkeypatch.setattr(catalog, "_BATCHES_MAX", 1)

    async def story(world: World) -> None:
        job = await world.job()
        keeper = Snapshots(world.database, pace_seconds=0, history_ms=0, grace_seconds=100)
        history = History(world.database, keeper)
        name = await world.value("SELECT name FROM dataset WHERE id = %s", job.dataset)
        for number in range(2):
            for key in ("a", "b"):
                await put(world, job, f"{key}{number}", key, f"s3://b/{key}{number}")
            await keeper.make(job.dataset)
        old, new = [row["id"] for row in await world.rows("SELECT id FROM table_snapshot")]
        await keeper.forget()
        seen = await history.at(name, str(old), partition_key=None)
        assert [each.location for each in seen.parts] == ["s3://b/a0", "s3://b/b0"]
        world.later(101)
        await keeper.forget()
        count = "SELECT count(*) FROM table_part WHERE gone IS NOT NULL"
        assert await world.value(count) == 1, "half of it is gone"
        with pytest.raises(InvalidInput, match="no longer keeps it"):
            await history.at(name, str(old), partition_key=None)
        with pytest.raises(InvalidInput, match="no longer keeps it"):
            await history.changes(name, since=str(old), until=str(new))
        await keeper.forget()
        await keeper.forget()
        assert await world.value(count) == 0
        assert await world.value("SELECT count(*) FROM table_snapshot") == 1

    play(story)


def test_what_is_cleared_after_its_last_snapshot_is_forgotten(play: Play) -> None:
    async def story(world: World) -> None:
        keeper = Snapshots(world.database, pace_seconds=0, history_ms=0, grace_seconds=0)
        job = await world.job()
        await put(world, job, "one", "a", "s3://b/1")
        await keeper.make(job.dataset)
        await world.rows("UPDATE generation SET state = 'abandoned', dropped_at = changed_at")
        await world.rows(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, gen_random_uuid(), 'current', 'y')",
            job.dataset,
        )
        await keeper.make(job.dataset)
        assert await keeper.forget() == 1
        await world.rows("DELETE FROM publication")
        assert await keeper.make(job.dataset) == []
        await keeper.forget()
        assert await world.value("SELECT count(*) FROM table_part") == 0

    play(story)
