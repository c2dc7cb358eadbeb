"""An answer to a claim that is lost costs nothing: it is repeated, or taken back uncounted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from penstock.dispatcher.announcer import Announcer
from penstock.dispatcher.api.routes import internal_app
from penstock.dispatcher.tasks.completion import LOSSES_MAX, UNACKNOWLEDGED_SECONDS
from penstock.dispatcher.tasks.lifecycle import RepeatedClaim
from penstock.dispatcher.tasks.model import ClaimedTask, Refusal
from penstock.dispatcher.wakeups.base import TaskCounts
from penstock.protocol.work import Assignment, ClaimAnswer, ResultsAnswer
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import (
    Stage,
    held,
    ok,
    output,
    parts_of,
    read,
    refused,
    staged,
)
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import Play, World, Worlds, done

ID = "the-id-of-one-claim"
OTHER_ID = "the-id-of-another"


def fences(tasks: list[Assignment]) -> list[tuple[int, int, str]]:
    return [(each.task_id, each.attempt, each.lease_token) for each in tasks]


@contextlib.asynccontextmanager
async def another(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    """The internal side of another dispatcher over the same database."""
    parts = parts_of(stage.world)
    await parts.keys.turn()
    transport = httpx.ASGITransport(internal_app(parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def claimed(
    client: httpx.AsyncClient, stage: Stage, *, name: str = "worker", **fields: Any
) -> list[Assignment]:
    ask = {"operator": "a:clean", "claim_id": ID, "limit": 3, **fields}
    answer = await client.post("/internal/task-claim", json=ask, headers=stage.identity(name))
    return read(answer, ClaimAnswer).tasks


SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "alone": ("", {}),
    "limited": ("    max_concurrency: 3\n", {}),
    "batches": ("    coalesce: 2\n", {"in_batches": True, "limit": 2}),
    "of a job": ("", {"job": "clean"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_claim_that_is_repeated_gives_the_same_attempts(shape: str, on_stage: Perform) -> None:
    more, fields = SHAPES[shape]

    async def story(stage: Stage) -> None:
        ok(await stage.apply(chain().replace("  clean:\n", f"  clean:\n{more}")))
        await stage.trigger("a", "b", "c", "d", "e", "f", "g", "h")
        lost = await claimed(stage.internal, stage, **fields)
        assert len(lost) >= 3
        assert all(each.acknowledge_seconds == UNACKNOWLEDGED_SECONDS for each in lost)
        async with another(stage) as other:
            again = lost
            for client in (stage.internal, other):
                stage.world.later(1)
                again = await claimed(client, stage, **fields)
                assert sorted(fences(again)) == sorted(fences(lost))
                assert len({each.batch for each in again}) == len({each.batch for each in lost})
            # Another claim, and the same id of somebody else, are not that one.
            others = await claimed(other, stage, **{**fields, "claim_id": OTHER_ID})
            more_ = await claimed(other, stage, name="somebody", **fields)
            assert not {each.task_id for each in (*others, *more_)} & {e.task_id for e in lost}
            # What was repeated is as good as what was lost.
            ends = [held(each, outputs=[output(each)]) for each in again]
            results = read(await stage.complete(*ends), ResultsAnswer).results
            assert [each.task_status for each in results] == ["completed"] * len(ends)
        assert await stage.world.value("SELECT count(*) FROM attempt WHERE number > 1") == 0

    on_stage(story)


def test_a_claim_that_is_repeated_late_leaves_the_tokens_of_its_answer_as_they_are(
    on_stage: Perform,
) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply())
        lost: list[Assignment] = []
        for event in ("e1", "e2"):
            asked = {"job": "feed", "partition_key": "a", "event_id": event}
            ok(await stage.public.post("/v1/trigger", json=asked))
            await stage.route()
            (task,) = await stage.claim()
            ok(await stage.complete(held(task, outputs=[output(task)])))
            await stage.route()
            if event == "e1":
                lost = await claimed(stage.internal, stage, operator="a:report", limit=1)
        # What it reads was replaced meanwhile: it would be granted something else by now.
        assert await claimed(stage.internal, stage, operator="a:report", limit=1) == []
        (first,) = lost
        ok(await stage.beat(held(first)))
        ok(await stage.complete(held(first, outputs=[output(first, "daily")])))

    on_stage(story)


def test_a_claim_that_is_always_repeated_is_taken_back_in_the_end(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(heartbeat_ms=30_000)
        await job.make("one")
        await world.tasks.reap()
        await world.tasks.claim_next("operator", worker="w", claim_id="a claim")
        for _ in range(6):
            world.later(4)
            assert (await world.tasks.reap(outage_seconds=1e6)).reaped == ()
            assert (
                len(await world.tasks.claim_next("operator", worker="w", claim_id="a claim")) == 1
            )
        world.later(7)
        await world.tasks.claim_next("operator", worker="w", claim_id="a claim")
        (reaped,) = (await world.tasks.reap(outage_seconds=1e6)).reaped
        assert reaped.status == "queued"

    play(story)


def test_a_repeated_claim_is_given_the_changes_that_it_was_given(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        changing = "inputs: [{from: tidy, read: changes}]\n    max_concurrency: 1"
        ok(await stage.apply(chain().replace("inputs: [tidy]", changing)))
        await stage.trigger("a")
        for task in await stage.claim():
            ok(await stage.complete(held(task, outputs=[output(task)])))
        await stage.route()
        (lost,) = await claimed(stage.internal, stage, operator="a:report")
        (again,) = await claimed(stage.internal, stage, operator="a:report")
        assert again.inputs == lost.inputs
        assert again.inputs["tidy"].location is not None
        end = held(again, outputs=[output(again, "daily")])
        results = read(await stage.complete(end), ResultsAnswer).results
        assert results[0].task_status == "completed"

    on_stage(story)


def test_a_worker_is_told_of_a_lease_that_is_shorter(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(
            await stage.apply(
                chain().replace("  clean:\n", "  clean:\n    heartbeat_timeout: 2s\n")
            )
        )
        await stage.trigger("a")
        (task,) = await claimed(stage.internal, stage)
        assert (task.heartbeat_seconds, task.acknowledge_seconds) == (2.0, 2.0)

    on_stage(story)


def test_what_is_acknowledged_is_an_ordinary_lease(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("a", "b")
        await stage.parts.tasks.reap()
        (task,) = await claimed(stage.internal, stage, limit=1)
        stage.world.later(UNACKNOWLEDGED_SECONDS / 2)
        ok(await stage.beat(held(task)))
        stage.world.later(UNACKNOWLEDGED_SECONDS + 1)
        assert (await stage.parts.tasks.reap(outage_seconds=1e6)).reaped == ()
        # Nobody repeats a claim whose answer was read.
        assert task.task_id not in {
            each.task_id for each in await claimed(stage.internal, stage, limit=1)
        }

    on_stage(story)


def test_a_worker_that_is_late_learns_that_its_attempt_is_gone(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("a")
        await stage.parts.tasks.reap()
        (late,) = await claimed(stage.internal, stage)
        stage.world.later(UNACKNOWLEDGED_SECONDS + 1)
        (reaped,) = (await stage.parts.tasks.reap(outage_seconds=1e6)).reaped
        assert reaped.status == "queued"
        refused(await stage.beat(held(late)), 409)
        (task,) = await claimed(stage.internal, stage, name="somebody", claim_id=OTHER_ID)
        assert (task.task_id, task.attempt) == (late.task_id, 2)
        refused(await stage.beat(held(late)), 409)
        refused(await stage.complete(held(late, outputs=[output(late)])), 409)
        ok(await stage.beat(held(task)))
        ok(await stage.complete(held(task, outputs=[output(task)])))

    on_stage(story)


def test_a_late_acknowledgement_counts_if_nobody_has_taken_the_attempt(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("a")
        await stage.parts.tasks.reap()
        (late,) = await claimed(stage.internal, stage)
        stage.world.later(UNACKNOWLEDGED_SECONDS + 1)
        ok(await stage.beat(held(late)))
        assert (await stage.parts.tasks.reap(outage_seconds=1e6)).reaped == ()

    on_stage(story)


def test_what_nobody_acknowledges_is_taken_back_uncounted(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1, heartbeat_ms=60_000)
        await job.make("one")
        await world.tasks.reap()
        for loss in range(LOSSES_MAX):
            (lost,) = await world.tasks.claim_next("operator", worker="w", claim_id=f"{loss}")
            # The next one is to be acknowledged before it begins: this one may have begun.
            assert (lost.attempt, lost.was_lost) == (loss + 1, loss > 0)
            world.later(UNACKNOWLEDGED_SECONDS - 1)
            assert (await world.tasks.reap(outage_seconds=1e6)).reaped == ()
            world.later(2)
            (reaped,) = (await world.tasks.reap(outage_seconds=1e6)).reaped
            assert (reaped.attempt, reaped.status) == (lost.attempt, "queued")
            # It may begin at once, and that is announced.
            assert await world.wakes() == ["operator/normal"]
        outcomes = await world.rows("SELECT DISTINCT outcome FROM attempt")
        assert outcomes == [{"outcome": "released"}]
        # Not for ever: then it is counted.
        await world.tasks.claim_next("operator", worker="w", claim_id="one more")
        world.later(UNACKNOWLEDGED_SECONDS + 1)
        (reaped,) = (await world.tasks.reap(outage_seconds=1e6)).reaped
        assert reaped.status == "dead"

    play(story)


def test_what_could_not_be_acknowledged_is_spared_once(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(heartbeat_ms=60_000)
        await job.make("one", "two")

        async def reaped() -> list[int]:
            found = await world.tasks.reap(outage_seconds=15, unheard_seconds=6.5)
            return [each.task_id for each in found.reaped]

        await reaped()
        (alive,) = await world.tasks.claim_next("operator", worker="w", claim_id="one")
        (lost,) = await world.tasks.claim_next("operator", worker="w", claim_id="two")
        # The only dispatcher is away for so long, and then its reaper is back first.
        world.later(UNACKNOWLEDGED_SECONDS + 1)
        assert await reaped() == []
        world.later(3)
        await world.tasks.heartbeat([alive.fence])
        world.later(2)
        assert await reaped() == []
        # Also where reapers are always late.
        world.later(7)
        assert await reaped() == [lost.task_id]

    play(story)


def test_a_claim_without_an_id_has_the_lease_of_its_job(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_attempts=1, heartbeat_ms=60_000)
        await job.make("one")
        await world.tasks.reap()
        await world.tasks.claim_next("operator", worker="w")
        world.later(UNACKNOWLEDGED_SECONDS + 1)
        assert (await world.tasks.reap(outage_seconds=1e6)).reaped == ()
        world.later(60)
        (reaped,) = (await world.tasks.reap(outage_seconds=1e6)).reaped
        assert reaped.status == "dead"

    play(story)


def test_a_claim_id_is_forgotten_when_its_attempt_has_ended(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make("one", "two")
        (first,) = await world.tasks.claim_next("operator", worker="w", claim_id="a claim")
        await world.tasks.complete(done(first.fence))
        assert await world.value("SELECT count(*) FROM task WHERE claim_id IS NOT NULL") == 0
        (second,) = await world.tasks.claim_next("operator", worker="w", claim_id="a claim")
        assert second.task_id != first.task_id

    play(story)


def test_of_claims_that_are_made_as_one_the_repeated_one_is_made_alone(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        await job.make(*"abcdef")
        (lost,) = await world.tasks.claim_for("operator", ["one"], claim_ids=["first"])
        with pytest.raises(RepeatedClaim):
            await world.tasks.claim_for("operator", ["one", "two"], claim_ids=["first", "second"])
        assert await world.value("SELECT count(*) FROM attempt") == 1
        (again,) = await world.tasks.claim_for("operator", ["one"], claim_ids=["first"])
        assert isinstance(lost, ClaimedTask)
        assert isinstance(again, ClaimedTask)
        assert again.fence == lost.fence

    play(story)


def test_a_claim_that_comes_many_times_at_once_has_whole_answers(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*"abcdefgh")
        calls = [
            stage.parts.claim("a:clean", worker="w", limit=limit, claim_id=ID)
            for limit in (2, 2, 2, 2, 1, 1)
        ]
        # Two are made at once, and know nothing of each other; all others come after one of them.
        first, second, *others = await asyncio.gather(*calls)
        begun = {each.task_id for each in (*first, *second)}
        running = await stage.world.rows("SELECT id FROM task WHERE status = 'running'")
        assert {row["id"] for row in running} == begun
        for found in others:
            assert {each.task_id for each in found} in (
                begun,
                {each.task_id for each in first},
                {each.task_id for each in second},
            )
        assert {each.task_id for each in others[-1]} == begun

    on_stage(story)


def test_a_repeated_claim_and_the_reaper_share_no_attempt(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(heartbeat_ms=60_000)
        await job.make("one")
        await world.tasks.reap()
        (lost,) = await world.tasks.claim_next("operator", worker="w", claim_id="a claim")
        world.later(UNACKNOWLEDGED_SECONDS + 1)
        async with world.unfinished() as other:
            (again,) = await other.claim_again("a claim", worker="w", issue=None)
            assert again.fence == lost.fence
            # The reaper passes over what a repeated claim has in hand.
            assert (await world.tasks.reap(outage_seconds=1e6)).reaped == ()
        assert (await world.tasks.reap(outage_seconds=1e6)).reaped == ()
        assert not isinstance((await world.tasks.heartbeat([again.fence]))[0], Refusal)

    play(story)


def test_a_report_that_is_repeated_brings_the_same_tasks(worlds: Worlds) -> None:
    async def nobody(_: TaskCounts) -> None:
        """There is no other dispatcher."""

    async def main() -> None:
        announcer = Announcer(here=lambda tasks_of: tasks_of, elsewhere=nobody)
        async with worlds.world() as world, announcer:
            world.database.announce = announcer.announce
            async with staged(world, announcer=announcer) as stage:
                await stage.apply()
                await stage.trigger("p", "q")
                (task,) = await stage.claim()
                wanted = [{"operator": "a:report", "limit": 5}]
                end = held(task, outputs=[output(task)])
                ask = {"tasks": [end], "next": wanted, "claim_id": ID}

                async def report(client: httpx.AsyncClient) -> ResultsAnswer:
                    answer = await client.post(
                        "/v1/task/complete", json=ask, headers=stage.identity()
                    )
                    return read(answer, ResultsAnswer)

                lost = await report(stage.internal)
                assert [each.job for each in lost.claimed] == ["report"]
                async with another(stage) as other:
                    for client in (stage.internal, other):
                        again = await report(client)
                        assert fences(again.claimed) == fences(lost.claimed)
                        assert again.claimed_of == "a:report"
                        assert again.results == lost.results

    asyncio.run(main())
