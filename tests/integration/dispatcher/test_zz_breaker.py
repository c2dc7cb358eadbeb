from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.dispatcher.deployment.moves import LEFT
from penstock.dispatcher.tasks.values import Completion, Ended, Output, Refusal, Publishing
from tests.integration.dispatcher.readers import Library, columns, facts, ROOT
from tests.integration.dispatcher.test_sweeping import sweep, GRACE
from tests.integration.dispatcher.test_waiting import Waiting, dag
from tests.integration.dispatcher.world import Play, World, done


def test_opening_filter(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, {from: planes, where: 'cursor >= 10'}]"))
        assert await waiting.bring(("feed", "a")) == []
        async def whole(cursor: int) -> list[Any]:
            before = await world.value("SELECT count(*) FROM task")
            await waiting.routing.accept([await waiting.new("third", None, cursor=cursor)])
            await waiting.route()
            rows = await world.rows("SELECT payload ->> 'partition_key' AS part FROM task ORDER BY id OFFSET %s", before)
            return [row["part"] for row in rows]
        assert await whole(5) == []
        assert await whole(12) == ["a"]
    play(story)


def test_own_filter(play: Play) -> None:
    async def story(world: World) -> None:
        waiting = Waiting(world)
        await waiting.apply(dag(inputs="[raw, {from: planes, where: 'partition_key glob \"x*\" or cursor >= 0'}]"))
        assert await waiting.bring(("feed", "a")) == []
        assert await waiting.bring(("third", "a")) == []
        assert await waiting.bring(("third", None)) == ["a"]
    play(story)


def test_cancel_race(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        base, late = await job.claimed("base"), await job.claimed("late")
        await world.tasks.complete(done(base.fence, job.output("z", facts=facts(of=columns("a")))))
        await world.rows("UPDATE task SET cancel_asked = true, reason = %s WHERE id = %s", LEFT, late.task_id)
        bad = job.output("q", facts=facts(of=columns("a", a="string")))
        # between judging and ending the cancellation is taken back
        import penstock.dispatcher.tasks.ending as ending
        real = ending.refuse_misfits
        async def then(connection: Any, completions: Any) -> Any:
            found = await real(connection, completions)
            async def back() -> None:
                await world.rows("UPDATE task SET cancel_asked = false, reason = NULL WHERE id = %s", late.task_id)
            task = asyncio.create_task(back())
            await asyncio.sleep(0.5)
            print("taken back", task.done())
            then.task = task
            return found
        ending.refuse_misfits = then
        try:
            (answer,) = await world.tasks.complete(done(late.fence, bad))
        finally:
            ending.refuse_misfits = real
        print(answer)
        assert not isinstance(answer, Ended) or not answer.published
    play(story)


def test_replace_twice(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        one = await job.claimed("one")
        outputs = [job.output("p", f"s3://b/{n}", append_key=str(n)) for n in range(2)]
        (answer,) = await world.tasks.complete(done(one.fence, *outputs))
        print(answer)
        print(await world.rows("SELECT * FROM publication"))
        assert isinstance(answer, Refusal)
    play(story)


def test_spelling(play: Play) -> None:
    async def story(world: World) -> None:
        library, job = Library(world), await world.job()
        one = await job.claimed("one")
        location = await library.written(one, partition="day=1")
        assert "day=1" in location
        (answer,) = await world.tasks.complete(done(one.fence, job.output("day=1", location.replace("=", "%3D"))))
        await library.carry()
        library.later(GRACE * 3)
        await sweep(library)
        assert await library.has([location]) == [True]
        assert len(library.files(location)) == 1
    play(story)
