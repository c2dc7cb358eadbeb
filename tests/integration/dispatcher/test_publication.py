"""What is published of datasets: what manifests say, schemas that grow, and what readers see."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from penstock.datasets.projection import (
    CurrentDataset,
    CurrentPart,
    CurrentPartition,
    project,
)
from penstock.datasets.schema import Column
from penstock.dispatcher.datasets import projector
from penstock.dispatcher.datasets.projector import ProjectionRefresher, RefreshResult
from penstock.dispatcher.outbox import PARKED_SECONDS, Reconciler
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    PublishOutcome,
    Refusal,
    TaskRefusalReason,
)
from penstock.kernel.errors import Unavailable
from penstock.protocol.base import TaskStatus
from penstock.store.base import PutMode
from tests.integration.dispatcher.readers import ROOT, Library, columns, completed, facts
from tests.integration.dispatcher.world import Job, Play, World, done


async def schema(world: World) -> list[str]:
    rows = await world.rows("SELECT columns FROM generation_schema")
    return [each["name"] for row in rows for each in row["columns"]]


async def publication(world: World, *, partition: str = "p") -> dict[str, Any]:
    (row,) = await world.rows(
        "SELECT files, rows, bytes, manifest, revision, projected, place FROM publication"
        " WHERE partition_key = %s",
        partition,
    )
    return row


def outcome(answer: AttemptEnd | Refusal) -> PublishOutcome:
    assert isinstance(answer, AttemptEnd)
    return answer.published[0].outcome


def refused(answer: AttemptEnd | Refusal) -> str:
    assert isinstance(answer, Refusal)
    assert answer.why is TaskRefusalReason.SCHEMA
    return answer.detail


def test_what_manifests_say_is_kept_and_summed_of_what_is_appended(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await completed(world, await job.claimed(), job.output(facts=facts(rows=3)))
        row = await publication(world)
        assert (row["files"], row["rows"], row["bytes"], row["manifest"]) == (1, 3, 30, "a" * 64)
        await completed(world, await job.claimed("two"), job.output(facts=facts(rows=5)))
        assert (await publication(world))["rows"] == 5
        await completed(world, await job.claimed("three"), job.output())
        assert (await publication(world))["rows"] is None

        log = await world.job("log", update_mode="append")
        two = [await log.claimed(key) for key in "ab"]
        output = log.output("q", facts=facts(rows=2))
        await world.tasks.complete([Completion(each.fence, (output,)) for each in two])
        last = log.output("q", facts=facts(rows=7, manifest="b"))
        await completed(world, await log.claimed("c"), last)
        row = await publication(world, partition="q")
        assert (row["files"], row["rows"], row["bytes"]) == (3, 11, 110)
        assert row["manifest"] == "b" * 64
        parts = await world.rows("SELECT rows, manifest FROM appended ORDER BY task_id")
        assert [part["rows"] for part in parts] == [2, 2, 7]
        # One part of which nothing is known makes the sum unknown.
        await completed(world, await log.claimed("d"), log.output("q"))
        await completed(world, await log.claimed("e"), last)
        assert (await publication(world, partition="q"))["rows"] is None

    play(story)


@pytest.mark.parametrize("update_mode", ["replace", "append"])
def test_one_task_replaces_a_partition_once(play: Play, update_mode: str) -> None:
    """Of two that it replaces a partition with, one would be lost, whatever they are called."""

    async def story(world: World) -> None:
        job = await world.job(update_mode=update_mode)
        one, neighbour = await job.claimed("one"), await job.claimed("neighbour")
        outputs = [job.output("p", f"s3://b/{key}", append_key=key) for key in "ab"]
        said = [*done(one.fence, *outputs), *done(neighbour.fence, job.output("q"))]
        answer, other = await world.tasks.complete(said)
        assert isinstance(other, AttemptEnd)
        if update_mode == "append":
            assert isinstance(answer, AttemptEnd)
            assert await world.value("SELECT count(*) FROM appended WHERE partition_key = 'p'") == 2
            return
        assert isinstance(answer, Refusal)
        assert answer.why is TaskRefusalReason.OUTPUTS
        assert "the same partition twice" in answer.detail
        assert answer.state is not None
        assert answer.state.status is TaskStatus.RUNNING
        assert await world.value("SELECT count(*) FROM publication") == 1

    play(story)


def test_a_schema_grows_and_refuses_one_task_alone(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()

        def said(claimed: ClaimedTask, *of: Column) -> Completion:
            return Completion(
                claimed.fence, (job.output(str(claimed.task_id), facts=facts(of=of)),)
            )

        first, second, third, fourth = [await job.claimed(key) for key in "abcd"]
        (begun,) = await world.tasks.complete([said(first, *columns("a", "b"))])
        assert outcome(begun) is PublishOutcome.PUBLISHED
        answers = await world.tasks.complete(
            [
                said(second, *columns("a", "c")),
                said(third, *columns("a", "b", b="string")),
                said(fourth, *columns("b", "a")),
            ]
        )
        assert outcome(answers[0]) is PublishOutcome.PUBLISHED
        assert "'b'" in refused(answers[1])
        assert "string" in refused(answers[1])
        assert outcome(answers[2]) is PublishOutcome.PUBLISHED
        assert await schema(world) == ["a", "b", "c"]
        assert await world.value("SELECT count(*) FROM publication") == 3
        # It may end otherwise, and the same words again are refused again.
        (again,) = await world.tasks.complete([said(third, *columns("b", b="string"))])
        assert refused(again)
        assert isinstance(answers[1], Refusal)
        assert answers[1].state is not None
        assert answers[1].state.status is TaskStatus.RUNNING
        (good,) = await world.tasks.complete([said(third, *columns("a", "b"))])
        assert outcome(good) is PublishOutcome.PUBLISHED

    play(story)


@pytest.mark.parametrize("storage", ["files", "postgres"])
def test_what_the_dag_does_not_declare_is_refused_by_its_column(play: Play, storage: str) -> None:
    async def story(world: World) -> None:
        said = [{"a": "bigint"}, {"b": "string"}]
        output = {"name": "out", "dataset": "job", "columns": said, "storage": storage}
        job = await world.job(body=Jsonb({"outputs": [output]}))
        await world.rows(
            "UPDATE job_definition SET body = body"
            " || jsonb_build_object('datasets', jsonb_build_object('job', %s::text))",
            job.dataset,
        )

        async def told(*of: Column, **fields: Any) -> AttemptEnd | Refusal:
            claimed = await job.claimed(str(of) + str(fields))
            return await completed(world, claimed, job.output(facts=facts(of=of, **fields)))

        for wrong, word in ((columns("a", "c"), "'c' (bigint)"), (columns("b"), "'b' is bigint")):
            answer = await told(*wrong)
            assert isinstance(answer, Refusal)
            assert answer.why is TaskRefusalReason.UNDECLARED
            assert word in answer.detail
        assert await world.value("SELECT count(*) FROM publication") == 0
        for right in ((Column("a", "int", is_nullable=False),), columns("b", "a", b="string")):
            assert outcome(await told(*right)) is PublishOutcome.PUBLISHED
        assert outcome(await told(files=0, rows=0)) is PublishOutcome.PUBLISHED
        # Files of which nothing is known cannot be rows of a table.
        if storage == "files":
            assert outcome(await told()) is PublishOutcome.PUBLISHED
        else:
            answer = await told()
            assert isinstance(answer, Refusal)
            assert "Write Parquet" in answer.detail

    play(story)


def test_who_is_refused_or_late_grows_no_schema(play: Play) -> None:
    async def story(world: World) -> None:
        job, other = await world.job(), await world.job("other")
        first = await job.claimed("a")
        output = job.output(facts=facts(of=columns("a")))
        await completed(world, first, output)
        # One that is over, one with a guessed token, one that is cancelled, one that is misplaced.
        stray = job.output("q", facts=facts(of=columns("a", "z")))
        (replayed,) = await world.tasks.complete(done(first.fence, stray))
        assert isinstance(replayed, Refusal)
        assert replayed.why is TaskRefusalReason.DIFFERENT
        second = await job.claimed("b")
        guessed = type(second.fence)(second.task_id, second.attempt, "guessed")
        (stale,) = await world.tasks.complete(done(guessed, stray))
        assert isinstance(stale, Refusal)
        assert stale.why is TaskRefusalReason.STALE
        misplaced = await completed(world, second, stray, other.output("x"))
        assert isinstance(misplaced, Refusal)
        assert misplaced.why is TaskRefusalReason.OUTPUTS
        await world.tasks.cancel([second.task_id])
        cancelled = await completed(world, second, stray)
        assert isinstance(cancelled, AttemptEnd)
        assert cancelled.status is TaskStatus.CANCELLED
        # Of two outputs of one task neither counts if one does not fit.
        wide = await world.job("wide")
        extra = await world.value(
            "INSERT INTO dataset (name, job_id) VALUES ('extra', %s) RETURNING id::text", wide.id
        )
        await world.rows(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, %s, 'current', 'x')",
            *(extra, wide.generation),
        )
        narrow = wide.output(facts=facts(of=columns("a")))
        await completed(world, await wide.claimed("a"), narrow)
        both = await completed(
            world,
            await wide.claimed("b"),
            Job(world, wide.id, wide.definition_id, extra, wide.generation, "operator").output(
                facts=facts(of=columns("n"))
            ),
            wide.output(facts=facts(of=(Column("a", "string"),))),
        )
        assert refused(both)
        assert sorted(await schema(world)) == ["a", "a"]

    play(story)


def test_readers_of_the_bucket_see_what_is_published(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        assert await library.current() is None
        await library.publish(job, await job.claimed("a"), facts=facts(rows=4))
        await library.publish(job, await job.claimed("b"), partition="q", start=1, end=3)
        second = await library.publish(job, await job.claimed("c"), facts=facts(rows=6))
        await library.carry()
        assert await library.current() == (job.generation, 1)
        seen = await library.seen(job)
        assert isinstance(seen, CurrentPartition)
        assert seen.revision == 2
        (part,) = seen.parts
        assert (part.location, part.rows, part.manifest) == (second, 6, "a" * 64)
        other = await library.seen(job, partition="q")
        assert isinstance(other, CurrentPartition)
        assert (other.revision, other.start, other.end) == (1, 1, 3)
        rows = await world.rows("SELECT revision, projected FROM publication")
        assert all(row["revision"] == row["projected"] for row in rows)
        # What is not told of files is not told at all.
        await completed(world, await job.claimed("d"), job.output("0-10", "range:0-10"))
        await library.carry()
        assert await library.seen(job, partition="0-10") is None

    play(story)


def test_one_word_for_a_generation_however_much_moves(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.carry()
        tasks = [await job.claimed(str(number)) for number in range(5)]
        await world.tasks.complete(
            [
                Completion(each.fence, tuple(job.output(f"{each.task_id}:{n}") for n in range(3)))
                for each in tasks
            ]
        )
        rows = await world.rows("SELECT target, body FROM outbox WHERE kind = 'project'")
        assert [row["target"] for row in rows] == [f"job/{job.generation}"]
        # A completion that moves nothing says nothing.
        late, later = [await job.claimed(key) for key in "xy"]
        await completed(world, later, job.output("z"))
        await library.carry()
        assert outcome(await completed(world, late, job.output("z"))) is PublishOutcome.SUPERSEDED
        assert await world.value("SELECT count(*) FROM outbox WHERE kind = 'project'") == 0

    play(story)


def test_what_is_appended_is_told_in_its_order(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job(update_mode="append")
        made = [await library.publish(job, await job.claimed(key)) for key in "ab"]
        await library.carry()
        library.later(1)
        made.append(await library.publish(job, await job.claimed("c"), append_key="k"))
        await library.carry()
        assert await library.locations(job) == made
        assert await world.value("SELECT count(*) FROM departed") == 0

    play(story)


def test_a_late_relay_never_takes_readers_back(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.publish(job, await job.claimed("a"))
        await library.carry()
        held: list[tuple[str, bytes, PutMode]] = []
        put = library.store.put

        async def late(key: str, body: bytes, mode: PutMode, **_: object) -> str:
            held.append((key, body, mode))
            raise Unavailable("not now")

        library.store.put = late  # type: ignore[assignment,method-assign]  # the store of the test
        await library.publish_row(job, await job.claimed("b"))
        await library.relay.turn()
        assert len(held) == 1
        library.store.put = put  # type: ignore[method-assign]  # as it was
        third = await library.publish(job, await job.claimed("c"))
        library.later(10)
        await library.carry()
        assert await library.locations(job) == [third]
        with pytest.raises(Exception, match="version"):
            await library.store.put(*held[0])
        assert await library.locations(job) == [third]

    play(story)


def test_a_store_that_fails_costs_a_row_its_time(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.carry()
        await library.publish(job, await job.claimed("a"))
        good = await library.publish(job, await job.claimed("b"), partition="q")
        put = library.store.put

        async def picky(key: str, body: bytes, *args: Any, **named: Any) -> object:
            if "/p/current.json" in key:
                raise Unavailable("The store is not there.")
            return await put(key, body, *args, **named)

        library.store.put = picky  # type: ignore[assignment,method-assign]  # the store of the test
        await library.relay.turn()
        assert await library.locations(job, partition="q") == [good]
        assert await library.locations(job) == []
        row = await publication(world)
        assert (row["revision"], row["projected"]) == (1, 0)
        assert (await publication(world, partition="q"))["projected"] == 1
        failed = await world.value("SELECT last_error FROM outbox WHERE kind = 'project'")
        assert failed == "The store is not there."
        library.store.put = put  # type: ignore[method-assign]  # as it was
        library.later(10)
        await library.carry()
        assert (await publication(world))["projected"] == 1

    play(story)


def test_a_store_that_was_away_for_long_is_told_all_the_same(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        location = await library.publish(job, await job.claimed("a"))
        put, reconciler = library.store.put, Reconciler(world.database)

        async def away(*args: object, **named: object) -> object:
            raise Unavailable("The store is not there.")

        library.store.put = away  # type: ignore[assignment,method-assign]  # the store of the test
        parked = "SELECT count(*) FROM outbox WHERE parked_at IS NOT NULL"
        for _ in range(13):
            await library.relay.turn()
            library.later(61)
        assert await world.value(parked) == 2
        library.later(PARKED_SECONDS)
        await reconciler.turn()
        assert await world.value(parked) == 0
        # It is one try, and shown as parked again.
        await library.relay.turn()
        assert await world.value(parked) == 2
        await reconciler.turn()
        assert await world.value(parked) == 2, "not at once"
        library.store.put = put  # type: ignore[method-assign]  # as it was
        library.later(PARKED_SECONDS + 61)
        await reconciler.turn()
        await library.carry()
        assert await library.locations(job) == [location]
        assert await library.current() == (job.generation, 1)

    play(story)


def test_revisions_of_a_dataset_grow_also_on_the_way_back(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.publish(job, await job.claimed("a"))
        await library.carry()
        other = await world.value(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " VALUES (%s, gen_random_uuid(), 'building', 'y') RETURNING version::text",
            job.dataset,
        )
        await library.carry()
        assert await library.current() == (job.generation, 1)
        last = 1
        for leaving, coming in ((job.generation, other), (other, job.generation)):
            await world.rows("UPDATE generation SET state = 'retired' WHERE version = %s", leaving)
            await world.rows("UPDATE generation SET state = 'current' WHERE version = %s", coming)
            await library.carry()
            found = await library.current()
            assert found is not None
            assert found[0] == coming
            assert found[1] > last
            last = found[1]

    play(story)


def test_a_generation_is_named_when_all_of_it_is_written(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.publish(job, await job.claimed("a"))
        # The word of the partitions is lost.
        await world.rows("DELETE FROM outbox WHERE target LIKE 'job/%%'")
        order: list[str] = []
        put = library.store.put

        async def noted(key: str, body: bytes, *args: Any, **named: Any) -> object:
            order.append(key)
            return await put(key, body, *args, **named)

        library.store.put = noted  # type: ignore[assignment,method-assign]  # the store of the test
        await library.carry()
        assert [key.count("/") for key in order] == [4, 2]

    play(story)


def test_a_publication_may_only_be_noted_as_written(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await completed(world, await job.claimed(), job.output())
        await world.rows("UPDATE publication SET projected = 1")
        for wrong in (
            "projected = 2",
            "projected = 0",
            "location = 'x'",
            "revision = 2, projected = 2",
            "revision = 1, projected = 1, task_id = 99",
        ):
            with pytest.raises(psycopg.errors.CheckViolation):
                await world.rows(f"UPDATE publication SET {wrong}")

    play(story)


def test_what_is_too_much_for_one_delivery_comes_with_the_next(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projector, "PAGE", 2)
    monkeypatch.setattr(projector, "PAGES_MAX", 1)

    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        claimed = await job.claimed()
        keys = [str(number) for number in range(7)]
        await completed(world, claimed, *(job.output(key) for key in keys))
        await library.relay.turn()
        # The generation is not named before all of it is written.
        assert await library.current() is None
        await library.carry()
        assert await library.current() == (job.generation, 1)
        assert all([await library.locations(job, partition=key) for key in keys])

    play(story)


def test_an_object_that_is_not_ours_holds_back_no_other(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        await library.carry()
        await library.store.put(f"datasets/job/{job.generation}/p/current.json", b"{}")
        claimed = await job.claimed()
        await completed(world, claimed, job.output("p"), job.output("q"))
        await library.relay.turn()
        assert await library.locations(job, partition="q") == ["s3://b/x"]
        assert (await publication(world))["projected"] == 0
        said = await world.value("SELECT last_error FROM outbox WHERE kind = 'project'")
        assert "current.json" in said

    play(story)


def test_a_database_that_has_gone_back_tells_readers_what_it_knows(play: Play) -> None:
    """As after a restore: revisions are given out twice, and the second ones count."""

    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        first = await library.publish(job, await job.claimed())
        await library.carry()
        # Published by a life of the database that is forgotten: of this partition and of another.
        generation = job.generation
        for key, revision in (("p", 2), ("q", 4)):
            part = CurrentPart(location=f"{ROOT}/datasets/job/{generation}/{key}/forgotten")
            gone = CurrentPartition(
                dataset="job",
                generation=generation,
                partition_key=key,
                revision=revision,
                parts=(part,),
            )
            await project(library.store, gone)
        await project(library.store, CurrentDataset(dataset="job", generation="x", revision=8))
        forgotten = await library.locations(job)
        assert forgotten != [first]
        # What is computed again is told, under a revision that readers have not seen.
        second = await library.publish(job, await job.claimed("again"), partition="q")
        await library.carry()
        assert await library.locations(job, partition="q") == [second]
        (row,) = await world.rows(
            "SELECT revision, projected FROM publication WHERE partition_key = 'q'"
        )
        assert row == {"revision": 1, "projected": 1}
        seen = await library.seen(job, partition="q")
        assert seen is not None
        assert seen.revision == 5
        # What is not is told when somebody asks for it, and once.
        (dataset,) = await world.rows("SELECT id::text AS uuid FROM dataset WHERE name = 'job'")
        refreshing = ProjectionRefresher(world.database, library.store, clock=library.clock)
        assert await library.locations(job) == forgotten
        done = await refreshing.refresh("job", uuid=dataset["uuid"])
        assert done == RefreshResult(looked=2, written=2, at=None)
        assert await library.locations(job) == [first]
        assert await library.current() == (generation, 9)
        done = await refreshing.refresh("job", uuid=dataset["uuid"])
        assert done == RefreshResult(looked=2, written=0, at=None)
        # And from now on publications of it are told as ever.
        third = await library.publish(job, await job.claimed("third"))
        await library.carry()
        assert await library.locations(job) == [third]

    play(story)
