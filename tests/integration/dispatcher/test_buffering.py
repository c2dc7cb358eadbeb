"""Batches of buffered datasets, on a real Postgres: accepted once, released once, written once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from penstock.dispatcher.database.pool import query
from penstock.dispatcher.retention import RowPruner
from penstock.dispatcher.tasks.batches import (
    HELD_MAX,
    ID_DAYS,
    AcceptedBatch,
    BufferedBatches,
    NewBatch,
    RefusedBatch,
)
from penstock.dispatcher.tasks.model import ClaimedTask, Fence, Refusal, Release
from tests.integration.dispatcher.world import Job, Play, World, done, failed


@dataclass
class Buffer:
    """A buffered dataset `alerts`, its sink, and a job that publishes into it."""

    world: World
    sink: Job
    writer: Job
    aside: str
    batches: BufferedBatches
    names: int = field(default=0)

    async def published(
        self, task: ClaimedTask, name: str = "b", body: str = "x", **more: Any
    ) -> AcceptedBatch | RefusedBatch | Refusal | None:
        return await self.batches.accept(task.fence, self.new(name, body, **more))

    def new(self, name: str = "b", body: str = "x", **more: Any) -> NewBatch:
        said: dict[str, Any] = {
            "dataset": self.sink.dataset,
            "partition_key": "",
            "batch": name,
            "sha256": f"{body:0>64}",
            "format": "jsonl",
            "location": f"s3://b/buffers/alerts/1-1-{'a' * 24}/{name}-{body}",
            "place": f"alerts/1-1-{'a' * 24}",
            "bytes": 100,
            "rows": 10,
        }
        return NewBatch(**{**said, **more})

    async def writing(self) -> ClaimedTask:
        self.names += 1
        return await self.writer.claimed(f"w{self.names}")

    async def claimed(self) -> ClaimedTask | None:
        found = await self.world.tasks.claim_next("sink.write", worker="sink", limit=1)
        return found[0] if found else None

    async def edit(self, **config: Any) -> int:
        """Put a version of the DAG in force whose sink has this config; the one before."""
        world = self.world
        definition = await world.value(
            "INSERT INTO job_definition (job_id, hash, body, runtime, operator, priority,"
            " update_mode, max_attempts, timeout_ms, heartbeat_ms, retry_first_ms, retry_max_ms,"
            " retry_backoff)"
            " SELECT job_id, 'newer', body || jsonb_build_object('config', %s::jsonb), runtime,"
            " operator, priority, update_mode, max_attempts, timeout_ms, heartbeat_ms,"
            " retry_first_ms, retry_max_ms, retry_backoff"
            " FROM job_definition WHERE id = %s RETURNING id",
            Jsonb(config),
            self.sink.definition_id,
        )
        before: int = await world.value("SELECT dag_version_id FROM dag_current")
        version = await world.value(
            "INSERT INTO dag_version (hash, source) VALUES ('newer', '') RETURNING id"
        )
        await world.rows(
            "INSERT INTO dag_job (dag_version_id, job_id, definition_id, generation)"
            " VALUES (%s, %s, %s, %s::uuid)",
            version,
            self.sink.id,
            definition,
            self.sink.generation,
        )
        await world.rows("UPDATE dag_current SET dag_version_id = %s", version)
        return before

    async def states(self) -> dict[str, str]:
        rows = await self.world.rows(
            "SELECT batch_id, CASE WHEN state = 'released' AND sink_task IS NOT NULL THEN 'taken'"
            " ELSE state END AS state FROM buffer_batch ORDER BY seq"
        )
        return {row["batch_id"]: row["state"] for row in rows}

    async def tasks(self) -> list[str]:
        rows = await self.world.rows("SELECT status FROM task WHERE payload ? 'buffer' ORDER BY id")
        return [row["status"] for row in rows]


def given(task: ClaimedTask | None) -> list[str]:
    """The batches that a task of the sink was given."""
    assert task is not None
    return [each["batch"] for each in task.payload["buffer"]["batches"]]


async def buffer(
    world: World, *, source: str = "", update: str = "append", **config: Any
) -> Buffer:
    body = {
        "operator": "sink.write",
        "outputs": [
            {"name": "alerts", "buffered": True, "columns": [{"id": "string"}]},
            {"name": "aside"},
        ],
        "config": config,
    }
    sink = await world.job(
        "alerts",
        runtime="sink",
        operator="sink.write",
        update_mode=update,
        body=Jsonb(body),
    )
    aside = await world.value(
        "INSERT INTO dataset (name, job_id) VALUES ('aside', %s) RETURNING id::text", sink.id
    )
    await world.rows(
        "INSERT INTO generation (dataset_id, version, state, lineage)"
        " VALUES (%s, %s::uuid, 'current', 'x')",
        aside,
        sink.generation,
    )
    await world.rows(
        "UPDATE job_definition SET body = body || %s::jsonb WHERE id = %s",
        Jsonb({"datasets": {"alerts": sink.dataset, "aside": aside}}),
        sink.definition_id,
    )
    said: dict[str, Any] = {"buffers": ["alerts"]}
    if source:
        said["source"] = {"kind": source}
    writer = await world.job("writer", body=Jsonb(said))
    version = await world.value(
        "INSERT INTO dag_version (hash, source) VALUES ('h', '') RETURNING id"
    )
    await world.rows("INSERT INTO dag_current (dag_version_id) VALUES (%s)", version)
    for job in (sink, writer):
        await world.rows(
            "INSERT INTO dag_job (dag_version_id, job_id, definition_id, generation)"
            " VALUES (%s, %s, %s, %s::uuid)",
            version,
            job.id,
            job.definition_id,
            job.generation,
        )
    return Buffer(world, sink, writer, aside, BufferedBatches(world.database))


def test_the_same_batch_is_kept_once_and_another_body_is_refused(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world)
        task = await made.writing()
        first = await made.published(task)
        assert isinstance(first, AcceptedBatch)
        assert first.is_new
        assert not first.is_released
        again = await made.published(task)
        assert again == replace(first, is_new=False)
        other = await made.published(task, body="y")
        assert isinstance(other, RefusedBatch)
        assert other.kind == "different"
        elsewhere = await made.published(task, partition_key="p")
        assert isinstance(elsewhere, RefusedBatch)
        # Ids are those of a task: another task's batch of the same id is another batch.
        assert isinstance(await made.published(await made.writing(), body="y"), AcceptedBatch)

    play(story)


def test_zombies_publish_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        await world.tasks.reap()
        task = await made.writing()
        assert isinstance(await made.published(task, "early"), AcceptedBatch)
        world.later(11)
        await world.tasks.reap()
        assert isinstance(await made.published(task, "late"), Refusal)
        assert await made.states() == {}
        world.later(60)
        again = await world.tasks.claim(task.task_id, worker="other")
        assert isinstance(again, ClaimedTask)
        # The number is another, and so is the lease.
        assert isinstance(await made.published(task, "zombie"), Refusal)
        assert isinstance(await made.published(again, "early", "other rows"), AcceptedBatch)
        await world.tasks.complete(done(again.fence))
        assert isinstance(await made.published(again, "after"), Refusal)
        assert await made.states() == {"early": "released"}

    play(story)


def test_a_token_with_other_grants_publishes_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world)
        task = await made.writing()
        await world.rows("UPDATE task SET grants = '1:mine' WHERE id = %s", task.task_id)
        stolen = Fence(task.task_id, 1, "", "theirs")
        assert await made.batches.accept(stolen, made.new()) is None
        own = Fence(task.task_id, 1, "", "mine")
        assert isinstance(await made.batches.accept(own, made.new()), AcceptedBatch)

    play(story)


@pytest.mark.parametrize("end", ["fails", "is released", "is cancelled"])
def test_only_completion_releases(play: Play, end: str) -> None:
    """A retry that publishes other rows under the same ids neither doubles nor is refused."""

    async def story(world: World) -> None:
        made = await buffer(world)
        task = await made.writing()
        await made.published(task, "a")
        await made.published(task, "b")
        if end == "fails":
            await world.tasks.fail(failed(task.fence))
        elif end == "is released":
            await world.tasks.end([Release(task.fence, "stopped")])
        else:
            await world.tasks.cancel([task.task_id])
            told = await made.published(task, "c")
            assert isinstance(told, RefusedBatch)
            await world.tasks.complete(done(task.fence))
        assert await made.states() == {}
        assert await made.tasks() == []
        if end == "is cancelled":
            return
        world.later(10)
        again = await world.tasks.claim(task.task_id, worker="w")
        assert isinstance(again, ClaimedTask)
        await made.published(again, "a", "other")
        await world.tasks.complete(done(again.fence))
        assert await made.states() == {"a": "released"}
        assert await made.tasks() == ["queued"]

    play(story)


def test_a_sink_is_given_what_was_released_and_writes_it_once(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="5s")
        first, second = await made.writing(), await made.writing()
        await made.published(second, "b")
        await made.published(first, "a")
        await world.tasks.complete(done(first.fence))
        # The second is still held, and the task waits for more.
        assert await made.claimed() is None
        await world.tasks.complete(done(second.fence))
        assert await made.tasks() == ["queued"]
        world.later(5)
        task = await made.claimed()
        # In the sequence in which they were accepted.
        assert given(task) == ["b", "a"]
        assert task is not None
        # An attempt that fails has written nothing, and the next one is given the same.
        third = await made.writing()
        await made.published(third, "c")
        await world.tasks.complete(done(third.fence))
        await world.tasks.fail(failed(task.fence))
        world.later(10)
        both = [await made.claimed(), await made.claimed()]
        assert sorted(given(each) for each in both) == [["b", "a"], ["c"]]
        for each in both:
            assert each is not None
            out = made.sink.output(None, f"s3://b/{each.task_id}")
            await world.tasks.complete(done(each.fence, out))
        assert await made.states() == dict.fromkeys("bac", "done")
        assert await made.claimed() is None
        # The end is reported again, as after an answer that was lost.
        await world.tasks.complete(done(task.fence))
        assert await world.value("SELECT count(*) FROM appended") == 2

    play(story)


def test_what_has_gathered_is_due_at_once_and_what_is_left_is_next(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="1h", max_rows=30)
        task = await made.writing()
        for name in "abcde":
            await made.published(task, name)
        await world.tasks.complete(done(task.fence))
        sink = await made.claimed()
        assert given(sink) == ["a", "b", "c"]
        assert sink is not None
        await world.tasks.complete(done(sink.fence))
        # Two are left: too few to be due.
        assert await made.tasks() == ["completed", "queued"]
        assert await made.claimed() is None
        more = await made.writing()
        await made.published(more, "f")
        await world.tasks.complete(done(more.fence))
        assert given(await made.claimed()) == ["d", "e", "f"]

    play(story)


@pytest.mark.parametrize("storage", ["files", "postgres"])
def test_a_task_says_whether_a_table_follows(play: Play, storage: str) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        await world.rows(
            "UPDATE job_definition SET body = jsonb_set(body, '{outputs,0,storage}', %s::jsonb)"
            " WHERE id = %s",
            Jsonb(storage),
            made.sink.definition_id,
        )
        task = await made.writing()
        await made.published(task, "a")
        await world.tasks.complete(done(task.fence))
        sink = await made.claimed()
        assert sink is not None
        assert sink.payload["buffer"]["is_hot"] == (storage == "postgres")

    play(story)


def test_each_partition_has_a_task_of_its_own(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        task = await made.writing()
        await made.published(task, "a", partition_key="p")
        await made.published(task, "b", partition_key="q")
        await world.tasks.complete(done(task.fence))
        found = [await made.claimed(), await made.claimed()]
        assert {each.payload["partition_key"]: given(each) for each in found if each} == {
            "p": ["a"],
            "q": ["b"],
        }

    play(story)


def test_very_many_partitions_get_their_tasks_a_bounded_number_at_a_time(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="1h")
        task = await made.writing()
        await world.rows(
            "INSERT INTO buffer_batch (dataset_id, partition_key, task_id, attempt, batch_id,"
            " digest, format, location, place, bytes, state)"
            " SELECT %s::uuid, 'p' || n, %s, 1, 'n' || n, repeat('0', 64), 'jsonl', 'l', 'p', 1,"
            " 'held' FROM generate_series(1, 1200) AS n",
            made.sink.dataset,
            task.task_id,
        )
        await world.tasks.complete(done(task.fence))
        for count in (500, 1_000, 1_200, 1_200):
            assert len(await made.tasks()) == count
            await made.batches.turn()

    play(story)


def test_two_that_release_at_once_lose_nothing(play: Play) -> None:
    """Whoever does not get the lock of the line leaves it to the other, or to the pass."""

    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        first, second = await made.writing(), await made.writing()
        await made.published(first, "a")
        await made.published(second, "b")
        async with world.unfinished() as tasks:
            await tasks.complete(done(first.fence))
            await world.tasks.complete(done(second.fence))
            # The other makes the task, which nobody sees yet.
            assert await made.tasks() == []
        assert await made.tasks() == ["queued"]
        assert given(await made.claimed()) == ["a", "b"]

    play(story)


def test_what_a_claim_has_not_seen_gets_a_task_by_the_pass(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        first, second = await made.writing(), await made.writing()
        await made.published(first, "a")
        await made.published(second, "b")
        await world.tasks.complete(done(first.fence))
        async with world.unfinished() as tasks:
            # It finds a task that waits, and leaves its batch to that.
            await tasks.complete(done(second.fence))
            assert given(await made.claimed()) == ["a"]
        assert await made.tasks() == ["running"]
        (found,) = await world.database.fetch("poll", {"operators": []})
        assert found["is_buffered"]
        # The next pass is made when there is something to look at, and not before.
        assert await made.batches.turn() is None
        await made.batches.turn()
        assert await made.tasks() == ["running", "queued"]
        assert given(await made.claimed()) == ["b"]

    play(story)


def test_a_claim_that_is_repeated_takes_no_batch_that_its_first_answer_had_not(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        body = {"buffer": {"dataset": "alerts"}}
        await world.tasks.create([replace(made.sink.new("empty"), payload=body)])
        (first,) = await world.tasks.claim_next("sink.write", worker="sink", claim_id="a claim")
        assert given(first) == []
        task = await made.writing()
        await made.published(task, "a")
        await world.tasks.complete(done(task.fence))
        (again,) = await world.tasks.claim_next("sink.write", worker="sink", claim_id="a claim")
        assert (again.fence, given(again)) == (first.fence, [])
        # Whoever has read the first answer ends it, and has written nothing.
        await world.tasks.complete(done(first.fence))
        assert await made.states() != {"a": "done"}

    play(story)


def test_two_claims_share_no_batch(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s", max_rows=20)
        task = await made.writing()
        for name in "abcd":
            await made.published(task, name)
        await world.tasks.complete(done(task.fence))
        # A second task for the same line, as two passes may make one.
        body = {"buffer": {"dataset": "alerts"}}
        await world.tasks.create([replace(made.sink.new("more"), payload=body)])
        async with world.unfinished() as tasks:
            (first,) = await tasks.claim_next("sink.write", worker="one")
            # What the other looks at is passed by, not waited for.
            second = await made.claimed()
            assert (given(first), given(second)) == (["a", "b"], [])
        assert second is not None
        # Whoever ends sees that something is left.
        await world.tasks.complete(done(second.fence))
        assert given(await made.claimed()) == ["c", "d"]
        assert await made.states() == dict.fromkeys("abcd", "taken")

    play(story)


def test_a_cancelled_task_gives_its_batches_back(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        task = await made.writing()
        await made.published(task, "a")
        await world.tasks.complete(done(task.fence))
        sink = await made.claimed()
        assert sink is not None
        await world.tasks.cancel([sink.task_id])
        await world.tasks.fail(failed(sink.fence))
        assert await made.tasks() == ["cancelled", "queued"]
        again = await made.claimed()
        assert given(again) == ["a"]
        assert again is not None
        # One that waits for its next attempt is cancelled at once, and found by the pass.
        await world.tasks.fail(failed(again.fence))
        await world.tasks.cancel([again.task_id])
        await made.batches.turn()
        assert given(await made.claimed()) == ["a"]

    play(story)


@pytest.mark.parametrize("how", ["replay", "cancel", "forget"])
def test_a_dead_task_keeps_its_batches_until_it_gives_them_back(play: Play, how: str) -> None:
    """The next task is of the definition in force then: as after `max_rows` was lowered."""

    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        task = await made.writing()
        await made.published(task, "a")
        await made.published(task, "b")
        await world.tasks.complete(done(task.fence))
        sink = await made.claimed()
        assert sink is not None
        await world.tasks.fail(failed(sink.fence, is_retried=False))
        await made.batches.turn()
        assert await made.tasks() == ["dead"]
        await made.edit(max_age="0s", max_rows=10)
        if how == "replay":
            (found,) = await world.tasks.replay([sink.task_id])
            assert not isinstance(found, Refusal)
        elif how == "cancel":
            (found,) = await world.tasks.cancel([sink.task_id])
            assert not isinstance(found, Refusal)
            await made.batches.turn()
        else:
            await world.rows("DELETE FROM task WHERE id = %s", sink.task_id)
            await made.batches.turn()
        assert (await made.tasks())[-1] == "queued"
        again = await made.claimed()
        assert given(again) == ["a"]
        assert again is not None
        assert again.task_id != sink.task_id
        # Asked again, it is nothing that could be replayed.
        (found,) = await world.tasks.replay([sink.task_id])
        assert isinstance(found, Refusal)

    play(story)


def test_a_rollback_reaches_the_next_task(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        before = await made.edit(max_age="0s", max_rows=10)
        await world.rows("UPDATE dag_current SET dag_version_id = %s", before)
        task = await made.writing()
        await made.published(task, "a")
        await made.published(task, "b")
        await world.tasks.complete(done(task.fence))
        assert given(await made.claimed()) == ["a", "b"]

    play(story)


def test_a_source_that_is_always_on_has_its_batches_released_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, source="always_on", max_age="0s")
        task = await made.writing()
        bare = await made.published(task)
        assert isinstance(bare, RefusedBatch)
        assert "made_at" in bare.why
        now = int(await world.value("SELECT extract(epoch FROM penstock_now())") * 1000)
        found = await made.published(task, "a", made_at_ms=now)
        assert isinstance(found, AcceptedBatch)
        assert found.is_released
        sink = await made.claimed()
        assert given(sink) == ["a"]
        assert sink is not None
        await world.tasks.complete(done(sink.fence))
        # Whatever becomes of the attempt, the next one knows the id.
        await world.tasks.fail(failed(task.fence))
        world.later(10)
        again = await world.tasks.claim(task.task_id, worker="w")
        assert isinstance(again, ClaimedTask)
        repeated = await made.published(again, "a", made_at_ms=now)
        assert repeated == replace(found, is_new=False)
        # The id is forgotten when rows as old are refused, and not before.
        for days, kept in ((ID_DAYS, 1), (2, 0)):
            world.later(days * 86_400)
            pruner = RowPruner(world.database, days=1)
            for _ in range(8):
                await pruner.turn()
            world.later(1)
            assert await world.value("SELECT count(*) FROM buffer_batch") == kept
            late = await made.published(again, "a", made_at_ms=now)
            assert isinstance(late, RefusedBatch)
            assert "older than 7 days" in late.why

    play(story)


def test_an_attempt_publishes_no_more_than_its_bounds(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world)
        task = await made.writing()
        await made.published(task, "first")
        await world.rows(
            "INSERT INTO buffer_batch (dataset_id, partition_key, task_id, attempt, batch_id,"
            " digest, format, location, place, bytes, state)"
            " SELECT %s::uuid, '', %s, 1, 'n' || n, repeat('0', 64), 'jsonl', 'l', 'p', 1, 'held'"
            " FROM generate_series(2, %s) AS n",
            made.sink.dataset,
            task.task_id,
            HELD_MAX,
        )
        told = await made.published(task, "more")
        assert isinstance(told, RefusedBatch)
        assert told.kind == "too much"
        # What is there already is still the same batch.
        assert isinstance(await made.published(task, "first"), AcceptedBatch)

    play(story)


def test_who_publishes_while_the_attempt_ends_is_in_or_refused(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world)
        task = await made.writing()

        async with asyncio.TaskGroup() as group, world.unfinished() as tasks:
            await tasks.complete(done(task.fence))
            waiting = group.create_task(made.published(task))
            await world.until_waiting()
        assert isinstance(waiting.result(), Refusal)

    play(story)


def test_a_merging_sink_appends_what_it_rejects(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, update="merge", max_age="0s")
        for name in "ab":
            task = await made.writing()
            await made.published(task, name)
            await world.tasks.complete(done(task.fence))
            sink = await made.claimed()
            assert sink is not None
            base = await world.value(
                "SELECT coalesce(max(revision), 0) FROM publication WHERE dataset_id = %s::uuid",
                made.sink.dataset,
            )
            outputs = (
                made.sink.output(None, f"s3://b/{name}", base_revision=base),
                replace(made.sink.output(None, f"s3://b/aside-{name}"), dataset=made.aside),
            )
            (end,) = await world.tasks.complete(done(sink.fence, *outputs))
            assert not isinstance(end, Refusal)
        assert await made.states() == dict.fromkeys("ab", "done")
        rows = await world.rows(
            "SELECT location FROM part WHERE dataset_id = %s::uuid ORDER BY location", made.aside
        )
        assert [row["location"] for row in rows] == ["s3://b/aside-a", "s3://b/aside-b"]

    play(story)


def test_where_rows_are_merged_one_task_runs_at_a_time(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, update="merge", max_age="0s")
        found = []
        for name in "ab":
            task = await made.writing()
            await made.published(task, name)
            await world.tasks.complete(done(task.fence))
            found.append(await made.claimed())
        first, second = found
        assert given(first) == ["a"]
        assert second is None
        await made.batches.turn()
        assert await made.tasks() == ["running"]
        # One that is dead keeps nobody waiting.
        assert first is not None
        await world.tasks.fail(failed(first.fence, is_retried=False))
        await made.batches.turn()
        assert given(await made.claimed()) == ["b"]

    play(story)


def test_the_guard_keeps_what_a_batch_is(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        task = await made.writing()
        await made.published(task, "a")
        for change in (
            "state = 'done', done_at = penstock_now(), released_at = penstock_now()",
            "digest = repeat('1', 64)",
            "sink_task = task_id",
        ):
            with pytest.raises(Exception, match=r"batch|taken_when"):
                await world.rows(f"UPDATE buffer_batch SET {change}")

    play(story)


@pytest.mark.parametrize("end", ["completes", "fails"])
def test_a_generation_that_is_no_more_marks_no_batch_done(play: Play, end: str) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        task = await made.writing()
        await made.published(task, "a")
        await world.tasks.complete(done(task.fence))
        sink = await made.claimed()
        assert sink is not None
        await world.rows(
            "UPDATE generation SET state = 'retired' WHERE version = %s::uuid",
            made.sink.generation,
        )
        if end == "fails":
            await world.tasks.fail(failed(sink.fence))
        else:
            out = made.sink.output(None, "s3://b/late")
            await world.tasks.complete(done(sink.fence, out))
        assert await made.tasks() == ["cancelled"]
        assert await made.states() == {"a": "released"}
        assert await world.value("SELECT count(*) FROM appended") == 0

    play(story)


def test_who_is_cut_over_while_it_ends_marks_no_batch_done(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        task = await made.writing()
        await made.published(task, "a")
        await world.tasks.complete(done(task.fence))
        sink = await made.claimed()
        assert sink is not None
        out = made.sink.output(None, "s3://b/late")
        async with asyncio.TaskGroup() as group, world.database.transaction() as moving:
            served = {"dataset": made.sink.dataset}
            await moving.execute(query("lock_cut_over"), served)
            await moving.execute(b"UPDATE generation SET state = 'retired'")
            group.create_task(world.tasks.complete(done(sink.fence, out)))
            await world.until_waiting()
        assert await made.tasks() == ["cancelled"]
        assert await made.states() == {"a": "released"}

    play(story)


def test_what_is_late_for_a_removed_partition_is_written_by_a_later_task(play: Play) -> None:
    async def story(world: World) -> None:
        made = await buffer(world, max_age="0s")
        found = []
        for name in "ab":
            task = await made.writing()
            await made.published(task, name, partition_key="p")
            await world.tasks.complete(done(task.fence))
            found.append(await made.claimed())
        late, later = found
        assert late is not None
        assert later is not None
        out = made.sink.output("p", "s3://b/b")
        await world.tasks.complete(done(later.fence, out))
        await world.rows(
            "INSERT INTO removed (dataset_id, generation, partition_key, task_id, revision)"
            " SELECT dataset_id, generation, partition_key, task_id, revision FROM publication"
        )
        await world.rows("DELETE FROM appended")
        await world.rows("DELETE FROM publication")
        await world.tasks.complete(done(late.fence, made.sink.output("p", "s3://b/a")))
        assert await made.tasks() == ["cancelled", "completed", "queued"]
        again = await made.claimed()
        assert given(again) == ["a"]
        assert again is not None
        await world.tasks.complete(done(again.fence, made.sink.output("p", "s3://b/c")))
        assert await world.value("SELECT location FROM appended") == "s3://b/c"
        assert await made.states() == {"a": "done", "b": "done"}

    play(story)
