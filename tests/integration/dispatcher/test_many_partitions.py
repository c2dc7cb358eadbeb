"""Many partitions of one task, by `partition_by`: one transaction, one fence, an event each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock.datasets.layout import attempt_name, many_prefix, part
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import (
    PUBLISHED_MAX,
    AttemptEnd,
    ClaimedTask,
    PublishOutcome,
    Refusal,
    TaskOutput,
)
from tests.integration.dispatcher.readers import ROOT, Library, facts
from tests.integration.dispatcher.test_sweeping import GRACE, reader, sweep
from tests.integration.dispatcher.world import Job, Play, World, done, failed

MANY = 10_000


def folder(claimed: ClaimedTask) -> str:
    name = attempt_name(
        task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
    )
    return many_prefix("job", generation=claimed.generation, attempt=name)


def made(job: Job, claimed: ClaimedTask, keys: Iterable[str], *, run: str = "") -> list[TaskOutput]:
    """What the attempt has made: a folder for each partition, inside of its own."""
    base = f"{ROOT}/{folder(claimed)}{run}"
    return [job.output(key, f"{base}/{part(key)}", facts=facts()) for key in keys]


def keys(count: int) -> list[str]:
    return [f"k{number:05}" for number in range(count)]


async def written(library: Library, claimed: ClaimedTask, *names: str, run: str = "") -> None:
    for key in names:
        home = f"{folder(claimed)}{run}/{part(key)}"
        await library.store.put(f"{home}/part-00000.parquet", b"rows")
        await library.store.put(f"{home}/manifest.json", b"{}")


def left(library: Library, claimed: ClaimedTask) -> set[str]:
    """The partitions of an attempt of which there are files."""
    prefix = f"{folder(claimed)}/"
    return {
        key.removeprefix(prefix).removeprefix("~merge-2/").split("/")[0]
        for key in library.bucket.objects
        if key.startswith(prefix)
    }


def test_ten_thousand_partitions_are_published_at_once_and_each_is_a_task_of_who_reads_them(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        reading = await reader(world, job)
        await world.rows("INSERT INTO dag_current (dag_version_id) SELECT max(id) FROM dag_version")
        claimed = await job.claimed()
        completion = done(claimed.fence, *made(job, claimed, keys(MANY)))
        tasks = Tasks(world.database, route=route_events)
        (found,) = await tasks.complete(completion)
        assert isinstance(found, AttemptEnd)
        # What is told, and kept with the attempt, is bounded.
        assert (len(found.published), found.omitted) == (PUBLISHED_MAX, MANY - PUBLISHED_MAX)
        assert await world.value("SELECT count(*) FROM publication") == MANY
        assert await world.value("SELECT count(DISTINCT place) FROM publication") == MANY
        # The transaction is kept short: routers make the tasks, in windows.
        assert await world.value("SELECT count(*) FROM event WHERE routed = 'pending'") == MANY
        for _ in range(10):
            await Router(world.database).route(limit=1_000)
        made_of = await world.value(
            "SELECT count(DISTINCT payload ->> 'partition_key') FROM task WHERE job_id = %s",
            reading.id,
        )
        assert made_of == MANY
        # The answer was lost, and the same is told again.
        assert await tasks.complete(completion) == (found,)
        assert await world.value("SELECT count(*) FROM event") == MANY

    play(story)


def test_a_later_task_keeps_its_partition_and_the_earlier_one_says_which(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        early, late = await job.claimed("early"), await job.claimed("late")
        await world.tasks.complete(done(late.fence, *made(job, late, ["k01500"])))
        (found,) = await world.tasks.complete(done(early.fence, *made(job, early, keys(2000))))
        assert isinstance(found, AttemptEnd)
        assert found.status == "completed"
        first, *others = found.published
        assert (first.partition_key, first.outcome) == ("k01500", PublishOutcome.SUPERSEDED)
        assert {each.outcome for each in others} == {PublishOutcome.PUBLISHED}
        assert found.omitted == 2000 - PUBLISHED_MAX
        rows = await world.rows("SELECT task_id FROM publication WHERE partition_key = 'k01500'")
        assert [row["task_id"] for row in rows] == [late.task_id]

    play(story)


def test_who_has_lost_the_fence_publishes_none_and_the_retry_may_make_others(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        first = await job.claimed()
        world.later(20)
        for _ in range(2):  # the first reaper after an outage holds still
            await world.tasks.reap()
            world.later(20)
        second = await world.tasks.claim(first.task_id, worker="other")
        assert isinstance(second, ClaimedTask)
        (refused,) = await world.tasks.complete(done(first.fence, *made(job, first, "abc")))
        assert isinstance(refused, Refusal)
        assert await world.value("SELECT count(*) FROM publication") == 0
        await world.tasks.complete(done(second.fence, *made(job, second, "bcd")))
        rows = await world.rows("SELECT partition_key FROM publication ORDER BY 1")
        assert [row["partition_key"] for row in rows] == ["b", "c", "d"]

    play(story)


def test_what_is_appended_adds_a_part_to_each_partition(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(update_mode="append")
        for name, some in (("one", "ab"), ("two", "bc")):
            claimed = await job.claimed(name)
            await world.tasks.complete(done(claimed.fence, *made(job, claimed, some)))
        rows = await world.rows("SELECT partition_key, rows FROM publication ORDER BY 1")
        assert [(row["partition_key"], row["rows"]) for row in rows] == [
            *(("a", 1), ("b", 2), ("c", 1))
        ]
        assert await world.value("SELECT count(DISTINCT place) FROM appended") == 4

    play(story)


@pytest.mark.parametrize("run", ["", "/~merge-2"])
def test_each_partition_of_an_attempt_is_swept_by_itself(play: Play, run: str) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(max_attempts=1)
        first, killed = await job.claimed("first"), await job.claimed("killed")
        await written(library, first, "a", "b/ö", "c", run=run)
        await world.tasks.complete(done(first.fence, *made(job, first, ["a", "b/ö", "c"], run=run)))
        # It was killed after some of its manifests.
        await written(library, killed, "a", "d")
        await world.tasks.fail(failed(killed.fence))
        second = await job.claimed("second")
        await written(library, second, "b/ö")
        await world.tasks.complete(done(second.fence, *made(job, second, ["b/ö"])))
        await library.carry()
        library.later(GRACE * 2)
        await sweep(library)
        assert left(library, first) == {"a", "c"}
        assert left(library, killed) == set()
        assert left(library, second) == {part("b/ö")}
        # A database of an earlier day knows nothing of it, and readers are still sent there.
        await world.rows("DELETE FROM publication WHERE partition_key = 'c'")
        await world.rows("DELETE FROM departed")
        library.later(GRACE * 2)
        await sweep(library)
        assert left(library, first) == {"a", "c"}

    play(story)
