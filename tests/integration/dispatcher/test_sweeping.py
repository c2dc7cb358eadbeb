"""Which folders are swept, on a real Postgres: what nobody can be reading, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.datasets.sweeper import Verdict
from penstock.dispatcher.datasets.sweeper import ROUND_SECONDS, PostgresFolderLedger
from penstock.dispatcher.tasks.model import AttemptEnd, ClaimedTask
from tests.integration.dispatcher.readers import ROOT, Library, completed
from tests.integration.dispatcher.world import Job, Play, World, done, failed

GRACE = 100.0


async def sweep(library: Library, *, dataset: str | None = None) -> int:
    """How many files a whole round removes; history is not what these tests are about."""
    await library.forget()
    swept = await library.sweeping(grace_seconds=GRACE).sweep(dataset)
    assert swept.is_round_over
    return swept.files


async def reader(world: World, job: Job, *, name: str = "reader") -> Job:
    """A job that reads another."""
    found = await world.job(name, operator=name)
    version = await world.value(
        "INSERT INTO dag_version (hash, source) VALUES (%s, '') RETURNING id", name
    )
    for each in (job, found):
        await world.rows(
            "INSERT INTO dag_job VALUES (%s, %s, %s, %s)",
            *(version, each.id, each.definition_id, each.generation),
        )
    await world.rows(
        "INSERT INTO edge (dag_version_id, dataset_id, job_id, input) VALUES (%s, %s, %s, 'in')",
        *(version, job.dataset, found.id),
    )
    return found


def test_what_failed_is_swept_and_what_is_published_stays(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(max_attempts=1)
        good = await library.publish(job, await job.claimed("good"))
        bad, running = await job.claimed("bad"), await job.claimed("running")
        orphan, busy = await library.written(bad), await library.written(running)
        await world.tasks.fail(failed(bad.fence))
        await library.carry()
        library.later(GRACE / 2)
        assert await sweep(library) == 0
        library.later(GRACE)
        # Of what is published, and of what failed, the scratch goes too.
        assert await sweep(library) == 3
        assert await library.has([good, orphan, busy]) == [True, False, True]
        assert len(library.files(good)) == 1
        assert len(library.files(busy)) == 2
        assert (await library.locations(job)) == [good]
        library.later(GRACE)
        assert await sweep(library) == 0

    play(story)


def test_what_was_replaced_goes_when_nobody_can_be_reading_it(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        reading = await reader(world, job)
        first = await library.publish(job, await job.claimed("a"))
        await library.carry()
        read = await reading.claimed("r")
        unrelated = await (await world.job("other", operator="other")).claimed("o")
        library.later(1000)
        second = await library.publish(job, await job.claimed("b"))
        library.later(1000)
        assert await world.value("SELECT count(*) FROM departed") == 1
        # Readers of the bucket are still sent there.
        await sweep(library)
        assert await library.has([first, second]) == [True, True]
        await library.carry()
        library.later(GRACE / 2)
        # They may just have been.
        await sweep(library)
        assert await library.has([first]) == [True]
        library.later(GRACE)
        # A task that began before it left may have been given it.
        await sweep(library)
        assert await library.has([first]) == [True]
        await world.tasks.complete(done(read.fence))
        await sweep(library)
        assert await library.has([first, second]) == [False, True]
        assert unrelated.attempt == 1

    play(story)


@pytest.mark.parametrize("update_mode", ["replace", "append"])
def test_what_is_published_stays_however_its_place_is_spelt(play: Play, update_mode: str) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(update_mode=update_mode)
        locations = []
        for number, (equals, tilde) in enumerate([("=", "~"), ("%3D", "%7E"), ("%3d", "%7e")]):
            claimed = await job.claimed(str(number))
            location = await library.written(claimed, partition=f"day={number}/")
            written = location.replace("=", equals).replace("~", tilde)
            output = job.output(f"day={number}/", f"{written}/part-0.parquet")
            assert isinstance(await completed(world, claimed, output), AttemptEnd)
            locations.append(location)
        await library.carry()
        library.later(GRACE * 3)
        # Their scratch is not published.
        assert await sweep(library) == len(locations)
        assert await library.has(locations) == [True, True, True]

    play(story)


def test_a_task_that_began_later_keeps_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        reading = await reader(world, job)
        first = await library.publish(job, await job.claimed("a"))
        await library.publish(job, await job.claimed("b"))
        await library.carry()
        library.later(601)
        await reading.claimed("r")
        library.later(GRACE)
        await sweep(library)
        assert await library.has([first]) == [False]

    play(story)


def test_what_comes_too_late_is_swept(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        early, late = await job.claimed("a"), await job.claimed("b")
        kept = await library.publish(job, late)
        superseded = await library.publish(job, early)
        await library.carry()
        library.later(GRACE + 1)
        await sweep(library)
        assert await library.has([kept, superseded]) == [True, False]
        assert await library.locations(job) == [kept]

    play(story)


def test_a_zombie_that_goes_on_writing_is_left_until_it_is_quiet(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await world.tasks.reap()
        first = await job.claimed("a")
        ghost = await library.written(first)
        library.later(11)
        await world.tasks.reap()
        library.later(GRACE * 2)
        await library.store.put(f"{ghost.removeprefix(f'{ROOT}/')}/part-1.parquet", b"late")
        library.later(GRACE / 2)
        # Its scratch is quiet already.
        assert await sweep(library) == 1
        assert len(library.files(ghost)) == 2
        library.later(GRACE)
        assert await sweep(library) == 2

    play(story)


def test_what_was_appended_stays(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(update_mode="append")
        made = [await library.publish(job, await job.claimed(key)) for key in "abc"]
        await library.carry()
        library.later(GRACE + 1)
        await sweep(library)
        assert await library.has(made) == [True] * 3
        again = await library.publish(job, await job.claimed("d"), append_key="k")
        double = await library.publish(job, await job.claimed("e"), append_key="k")
        await library.carry()
        library.later(GRACE + 1)
        await sweep(library)
        assert await library.has([again, double]) == [True, False]

    play(story)


def test_a_folder_that_somebody_else_publishes_stays(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        checking = await reader(world, job, name="checking")
        first = await library.publish(job, await job.claimed("a"))
        passed = checking.output("p", first)
        await completed(world, await checking.claimed("c"), passed)
        await library.publish(job, await job.claimed("b"))
        await library.carry()
        library.later(GRACE + 601)
        await sweep(library)
        assert await library.has([first]) == [True]
        await library.publish(job, await job.claimed("d"))
        newest = await checking.claimed("e")
        await completed(world, newest, checking.output("p", "s3://elsewhere/x"))
        await library.carry()
        library.later(GRACE + 601)
        await sweep(library)
        assert await library.has([first]) == [False]

    play(story)


def test_tasks_that_are_forgotten_and_such_that_never_were(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(max_attempts=1)
        claimed = await job.claimed("a")
        known = await library.written(claimed)
        await world.tasks.fail(failed(claimed.fence))
        await world.rows("DELETE FROM task")
        stranger = await library.written(_of_another_life(claimed))
        kept = await library.store.put("datasets/job/notes/readme.txt", b"mine")
        assert kept
        library.later(GRACE + 1)
        await sweep(library)
        assert await library.has([known, stranger]) == [False, True]
        assert "datasets/job/notes/readme.txt" in library.bucket.objects

    play(story)


def _of_another_life(claimed: ClaimedTask) -> ClaimedTask:
    values: dict[str, Any] = {name: getattr(claimed, name) for name in claimed.__dataclass_fields__}
    return ClaimedTask(**{**values, "task_id": claimed.task_id + 1000})


def test_a_partition_that_is_removed_is_swept_after_readers_are_told(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(update_mode="append")
        made = [await library.publish(job, await job.claimed(key)) for key in "ab"]
        await library.carry()
        library.later(GRACE + 1)
        await world.rows("DELETE FROM publication")
        await sweep(library)
        assert await library.has(made) == [True, True]
        await library.carry()
        seen = await library.seen(job)
        assert seen is not None
        assert (seen.revision, seen.parts) == (3, ())
        await sweep(library)
        assert await library.has(made) == [True, True]
        library.later(GRACE + 1)
        await sweep(library)
        assert await library.has(made) == [False, False]
        # What is published later has a higher revision.
        again = await library.publish(job, await job.claimed("c"))
        await library.carry()
        seen = await library.seen(job)
        assert seen is not None
        assert (seen.revision, [each.location for each in seen.parts]) == (4, [again])

    play(story)


def test_one_dataset_alone_and_rounds_of_one_dispatcher(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(max_attempts=1)
        folders = []
        for dataset in ("job", "jobs"):
            claimed = await job.claimed(dataset)
            folders.append(await library.written(claimed, dataset=dataset))
            await world.tasks.fail(failed(claimed.fence))
        library.later(GRACE + 1)
        assert await sweep(library, dataset="jobs") == 1
        assert [len(library.files(each)) for each in folders] == [2, 1]
        one, two = library.sweeping(grace_seconds=GRACE), library.sweeping(grace_seconds=GRACE)
        assert await one.turn() == ROUND_SECONDS
        assert await library.has(folders) == [False, False]
        assert await two.turn() == ROUND_SECONDS / 4
        assert await one.turn() == ROUND_SECONDS / 4

    play(story)


def test_departures_are_forgotten_in_the_end(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        reading = await reader(world, job)
        for key in "ab":
            await library.publish(job, await job.claimed(key))
        read = await reading.claimed("r")
        await library.carry()
        library.later(31 * 86_400)
        await library.sweeping().turn()
        assert await world.value("SELECT count(*) FROM departed") == 1
        await world.tasks.complete(done(read.fence))
        library.later(ROUND_SECONDS)
        await library.sweeping().turn()
        assert await world.value("SELECT count(*) FROM departed") == 0

    play(story)


def test_an_attempt_that_completes_while_the_book_is_asked(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        claimed = await job.claimed("a")
        location = await library.written(claimed)
        library.later(GRACE * 10)
        book = PostgresFolderLedger(world.database, grace_seconds=0)
        place = location.removeprefix(f"{ROOT}/datasets/")
        async with world.unfinished() as other:
            (ended,) = await other.complete(done(claimed.fence, job.output("p", location)))
            assert isinstance(ended, AttemptEnd)
            assert await book.verdicts([place]) == {place: Verdict.KEEP}
        assert await book.verdicts([place, "strange"]) == {
            place: Verdict.KEEP,
            "strange": Verdict.KEEP,
        }

    play(story)


def test_two_who_ask_at_once_share_a_round(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(max_attempts=1)
        claimed = await job.claimed("a")
        await library.written(claimed)
        await world.tasks.fail(failed(claimed.fence))
        library.later(GRACE + 1)
        sweeping = library.sweeping(grace_seconds=GRACE)
        swept = await asyncio.gather(*(sweeping.sweep() for _ in range(3)))
        assert sum(each.files for each in swept) == 2
        assert all(each.is_round_over for each in swept)

    play(story)


@pytest.mark.parametrize("grace", [0.0, 1000.0])
def test_somebody_may_ask_for_another_grace(play: Play, grace: float) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(max_attempts=1)
        claimed = await job.claimed("a")
        location = await library.written(claimed)
        await world.tasks.fail(failed(claimed.fence))
        library.later(GRACE + 1)
        await library.sweeping(grace_seconds=GRACE).sweep(grace_seconds=grace)
        assert await library.has([location]) == [grace > GRACE]

    play(story)
