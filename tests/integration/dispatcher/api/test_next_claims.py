"""A report of ends brings the worker its next tasks, and tells others of what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import httpx
import pytest

from penstock.dispatcher.announcer import Announcer
from penstock.dispatcher.wakeups.base import TaskCounts
from penstock.kernel.errors import SignerUnavailable
from tests.integration.dispatcher.api.stage import Stage, Story, held, ok, output, staged
from tests.integration.dispatcher.world import Worlds

REPORT = {"operator": "a:report", "limit": 5}


def on_stage(worlds: Worlds, story: Story, told: list[str]) -> None:
    """A stage whose dispatcher announces; `told` is what waits for somebody else."""

    def here(tasks_of: TaskCounts) -> TaskCounts:
        told.extend(each.operator for each in tasks_of)
        return tasks_of

    async def nobody(_: TaskCounts) -> None:
        """There is no other dispatcher."""

    async def main() -> None:
        announcer = Announcer(here=here, elsewhere=nobody)
        async with worlds.world() as world, announcer:
            world.database.announce = announcer.announce
            async with staged(world, announcer=announcer) as stage:
                await stage.apply()
                await stage.trigger("p", "q")
                told.clear()
                await story(stage)

    asyncio.run(main())


async def report(
    stage: Stage, *ends: dict[str, Any], wanted: Collection[dict[str, Any]] = (REPORT,), **more: Any
) -> httpx.Response:
    fields: dict[str, Any] = {"headers": stage.identity(), **more}
    ask = {"tasks": ends, "next": list(wanted)}
    return await stage.internal.post("/v1/task/complete", json=ask, **fields)


def test_an_end_brings_what_it_has_made(worlds: Worlds) -> None:
    told: list[str] = []

    async def story(stage: Stage) -> None:
        first, second = await stage.claim(limit=2)
        answer = ok(await report(stage, held(first, outputs=[output(first)])))
        (begun,) = answer["claimed"]
        assert (answer["claimed_of"], begun["job"], begun["attempt"]) == ("a:report", "report", 1)
        assert begun["payload"]["partition_key"] == first.payload["partition_key"]
        assert told == []
        workers = await stage.world.rows("SELECT worker FROM task WHERE operator = 'a:report'")
        assert [row["worker"] for row in workers] == ["worker"]
        # Who asks for nothing gets nothing, and others hear of it at once.
        answer = ok(await report(stage, held(second, outputs=[output(second)]), wanted=()))
        assert "claimed" not in answer
        assert told == ["a:report"]

    on_stage(worlds, story, told)


def test_what_is_wanted_is_claimed_if_the_ends_have_made_nothing(worlds: Worlds) -> None:
    told: list[str] = []

    async def story(stage: Stage) -> None:
        (task,) = await stage.claim()
        clean = {"operator": "a:clean", "limit": 3, "is_wanted": True}
        failure = {"reason": "It broke.", "is_retried": False}
        answer = ok(await report(stage, held(task, failure=failure), wanted=[REPORT, clean]))
        assert answer["claimed_of"] == "a:clean"
        assert [each["job"] for each in answer["claimed"]] == ["clean"]

    on_stage(worlds, story, told)


def test_the_token_of_an_attempt_alone_claims_nothing(worlds: Worlds) -> None:
    told: list[str] = []

    async def story(stage: Stage) -> None:
        (task, _) = await stage.claim(limit=2)
        wanted = [{**REPORT, "is_wanted": True}]
        answer = ok(
            await report(stage, held(task, outputs=[output(task)]), wanted=wanted, headers={})
        )
        assert "claimed" not in answer
        assert told == ["a:report"]
        assert [each.job for each in await stage.claim("a:report")] == ["report"]

    on_stage(worlds, story, told)


def test_an_end_is_taken_though_nothing_can_be_claimed_with_it(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def story(stage: Stage) -> None:
        (task, _) = await stage.claim(limit=2)

        async def failing(*_: Any, **__: Any) -> None:
            raise SignerUnavailable("The key is away.")

        monkeypatch.setattr(type(stage.parts.claim), "__call__", failing)
        answer = ok(await report(stage, held(task, outputs=[output(task)])))
        assert answer["results"][0]["task_status"] == "completed"
        assert "claimed" not in answer
        assert told == ["a:report"]

    on_stage(worlds, story, told)


def test_others_wake_for_what_a_report_leaves(worlds: Worlds) -> None:
    told: list[str] = []

    async def story(stage: Stage) -> None:
        tasks = await stage.claim(limit=2)
        ends = [held(each, outputs=[output(each)]) for each in tasks]
        answer = ok(await report(stage, *ends, wanted=[{**REPORT, "limit": 1}]))
        assert len(answer["claimed"]) == 1
        assert told
        assert [each.job for each in await stage.claim("a:report")] == ["report"]

    on_stage(worlds, story, told)
