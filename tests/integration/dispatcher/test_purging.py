"""What is purged is in no snapshot and no folder any more, and what readers read stays."""

from __future__ import annotations

from penstock.dispatcher.catalog.purging import Purged, Purging
from penstock.dispatcher.catalog.snapshots import Snapshots
from penstock.dispatcher.retention import PartitionExpirer
from tests.integration.dispatcher.readers import ROOT, Library
from tests.integration.dispatcher.world import Job, Play, World


async def made(world: World, job: Job) -> None:
    await Snapshots(world.database, pace_seconds=0).make(job.dataset)


async def there(library: Library, world: World) -> list[str]:
    """The folders of data that are left when all has settled."""
    await library.carry()
    library.later(1000)
    await library.sweeping().sweep()
    keys = [key for key in library.bucket.objects if key.endswith(".parquet")]
    return [f"{ROOT}/{key.rpartition('/')[0]}" for key in sorted(keys)]


def purged(snapshots: int, publications: int = 0, generations: int = 0, *, left: int = 0) -> Purged:
    return Purged(
        snapshots=snapshots,
        publications=publications,
        generations=generations,
        generations_left=left,
    )


async def cut_over(world: World, job: Job) -> None:
    """Have readers read a generation in which there is nothing."""
    await world.rows("UPDATE generation SET state = 'retired', changed_at = penstock_now()")
    await world.rows(
        "INSERT INTO generation (dataset_id, version, state, lineage)"
        " VALUES (%s, gen_random_uuid(), 'current', 'y')",
        job.dataset,
    )


def test_of_a_dataset_only_what_readers_read_is_left(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        for key in ("a", "b", "c"):
            await library.publish(job, await job.claimed(key))
            await made(world, job)
        assert len(await there(library, world)) == 3
        # What nobody has looked at is in history as well.
        last = await library.publish(job, await job.claimed("d"))
        assert await Purging(world.database).purge(job.dataset, keys=None) == purged(3)
        assert await there(library, world) == [last]
        assert await world.value("SELECT count(*) FROM table_snapshot") == 1
        assert await library.locations(job) == [last]
        assert await world.value("SELECT count(*) FROM table_part") == 1
        # A generation that was left is a tag, and holds its files by itself as well.
        await made(world, job)
        await cut_over(world, job)
        await made(world, job)
        assert await there(library, world) == [last]
        assert await Purging(world.database).purge(job.dataset, keys=None) == purged(1, 0, 1)
        keeping = PartitionExpirer(world.database, grace_seconds=86_400)
        for _ in range(20):
            await keeping.turn()
        await made(world, job)
        assert await there(library, world) == []

    play(story)


def test_of_a_partition_every_other_state_goes_and_its_last_if_that_is_said(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        purging = Purging(world.database)
        other = await library.publish(job, await job.claimed("other"), partition="q")
        await made(world, job)
        await library.publish(job, await job.claimed("old"), partition="p")
        await made(world, job)
        new = await library.publish(job, await job.claimed("new"), partition="p")
        await made(world, job)
        assert await purging.purge(job.dataset, keys=["p"]) == purged(1)
        # What was before there was the partition, and what is now, can be read.
        assert await world.value("SELECT count(*) FROM table_snapshot") == 2
        assert await there(library, world) == sorted([other, new])
        assert await purging.purge(job.dataset, keys=["p"], is_current=True) == purged(1, 1)
        assert await there(library, world) == [other]
        assert await library.locations(job) == []
        assert await library.locations(job, partition="q") == [other]
        assert await world.value("SELECT count(*) FROM table_snapshot") == 2

    play(story)


def test_a_generation_that_was_left_has_nothing_of_a_partition_that_is_purged(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.publish(job, await job.claimed("one"), partition="p")
        kept = await library.publish(job, await job.claimed("two"), partition="q")
        await made(world, job)
        await cut_over(world, job)
        await made(world, job)
        assert await Purging(world.database).purge(job.dataset, keys=["p"]) == purged(1, 1)
        assert await there(library, world) == [kept]

    play(story)


def test_manifests_with_bounds_of_what_is_gone_are_written_anew(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        for key in ("a", "b"):
            await library.publish(job, await job.claimed(key))
            await made(world, job)
        await world.rows("UPDATE table_snapshot SET manifest_list = 'x' || id")
        await world.rows(
            "INSERT INTO table_manifest (dataset_id, location, generation, came)"
            " SELECT dataset_id, 'm' || id, generation, id FROM table_snapshot"
        )
        await Purging(world.database).purge(job.dataset, keys=["no such"])
        assert await world.value("SELECT count(manifest_list) FROM table_snapshot") == 0
        assert await world.value("SELECT count(*) FROM table_manifest") == 0

    play(story)
