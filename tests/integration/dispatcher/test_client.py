"""`penstock.Client` and the command line over the real API and a real Postgres."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import Client, NotSettled
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.routes import public_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.metrics import MetricsReader
from penstock.dispatcher.tasks.model import ClaimedTask, Completion, Failure, TaskOutput
from penstock.kernel.errors import DispatcherRefused
from penstock.protocol.problem import DagError
from tests.e2e.command import PENSTOCK
from tests.integration.dispatcher.api.stage import parts_of
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import World, Worlds
from tests.unit.worker.over_httpx import OverHttpx

TOKEN = "a-token-of-the-tests"


@dataclass
class Site:
    """A dispatcher without its loops, which the test moves, and a client of it."""

    world: World
    parts: ApiContext
    backfills: Backfills
    client: Client

    async def trigger(self, *keys: str) -> None:
        for key in keys:
            answer = await self.client.trigger("feed", partition_key=key)
            assert [each.outcome for each in answer.results] == ["new"]
        await self.parts.routing.route()

    async def work(self, operator: str, *, fails: bool = False) -> int:
        """Run what waits for an operator; how many tasks that were."""
        claimed = await self.parts.tasks.claim_next(operator, worker="w", limit=1000)
        if fails:
            failures = [Failure(each.fence, "Boom.", is_retried=False) for each in claimed]
            await self.parts.tasks.fail(failures)
        else:
            await self.parts.tasks.complete([await self._done(each) for each in claimed])
        await self.parts.routing.route()
        return len(claimed)

    async def _done(self, claimed: ClaimedTask) -> Completion:
        (dataset,) = await self.world.rows(
            "SELECT dataset.id::text FROM dataset JOIN task USING (job_id) WHERE task.id = %s",
            claimed.fence.task_id,
        )
        made = TaskOutput(
            dataset=dataset["id"],
            location=f"s3://b/{claimed.fence.task_id}",
            partition_key=claimed.payload.get("partition_key"),
        )
        return Completion(claimed.fence, (made,))


@contextlib.asynccontextmanager
async def built(
    worlds: Worlds, **fields: Any
) -> AsyncIterator[tuple[World, ApiContext, Backfills]]:
    async with worlds.world() as world:
        backfills = Backfills(world.database)
        parts = parts_of(
            world,
            backfills=backfills,
            metrics=MetricsReader(world.database),
            api_token=TOKEN,
            **fields,
        )
        yield world, parts, backfills


Story = Callable[[Site], Coroutine[Any, Any, None]]


def tell(worlds: Worlds, story: Story) -> None:
    async def main() -> None:
        async with built(worlds) as (world, parts, backfills):
            transport = OverHttpx(httpx.ASGITransport(public_app(parts)))
            async with Client("http://x", TOKEN, transport=transport) as client:
                await story(Site(world, parts, backfills, client))

    asyncio.run(main())


def test_a_dag_from_nothing_to_its_rollback(worlds: Worlds, tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        client = site.client
        with pytest.raises(DispatcherRefused, match="No DAG is in force") as none:
            await client.dag()
        assert none.value.status == 404
        assert (await client.status()).dag_version is None

        file = tmp_path / "mine.yaml"
        file.write_text(chain())
        first = await client.apply(file)
        assert (first.is_changed, (await client.apply(str(file))).is_changed) == (True, False)
        assert (await client.dag()).source == chain()
        with pytest.raises(DagError, match=r"mine\.yaml:2: jbos"):
            await client.apply(chain().replace("jobs:", "jbos:"), where="mine.yaml")
        query = "    runtime: spark\n    operator: spark.sql\n    config: {sql_file: q.sql}\n"
        sql = chain() + "  q:\n" + query + "    inputs: [tidy]\n    outputs: [q]\n"
        file.write_text(sql)
        with pytest.raises(DagError, match=r"config\.sql_file: There is no file 'q\.sql' in the"):
            await client.apply(file, dry_run=True)
        with pytest.raises(DagError, match="did not come with the DAG"):
            await client.apply(sql, dry_run=True)
        (tmp_path / "q.sql").write_text("SELECT 1")
        foreseen = await client.apply(file, dry_run=True)
        same = await client.apply(sql, files={"q.sql": "SELECT 1"}, dry_run=True)
        assert foreseen.hash == same.hash != first.hash

        await site.trigger("p")
        await site.work("a:clean")
        shorter = chain()[: chain().index("  report:")]
        with pytest.raises(DispatcherRefused, match="report: 1 waiting") as breaks:
            await client.apply(shorter)
        assert (breaks.value.status, breaks.value.kind) == (409, "breaks")
        second = await client.apply(shorter, force=True)
        assert second.cancelled == 1
        assert (first.version, second.version) == (1, 2)
        assert [each.is_current for each in (await client.versions()).versions] == [True, False]
        assert (await client.rollback()).version == first.version
        with pytest.raises(DispatcherRefused, match="There is no version 99"):
            await client.rollback(99)

    tell(worlds, story)


def test_what_is_dead_in_a_generation_that_nothing_uses_is_not_missed(worlds: Worlds) -> None:
    async def story(site: Site) -> None:
        client = site.client
        await client.apply(chain())
        await client.apply(chain(clean="2"))
        await site.trigger("a")
        assert await site.work("a:clean", fails=True) >= 1
        assert len((await client.tasks(status="dead")).tasks) >= 1
        assert sum(job.dead for job in (await client.status()).jobs) >= 1
        # The first generation is still current; the second is given up for the third.
        await client.apply(chain(clean="3"))
        abandoned = [each for each in (await client.tasks()).tasks if each.status == "dead"]
        listed = (await client.tasks(status="dead")).tasks
        assert len(listed) < len(abandoned)
        assert sum(job.dead for job in (await client.status()).jobs) == len(listed)

    tell(worlds, story)


def test_events_become_tasks_that_are_seen_cancelled_and_replayed(worlds: Worlds) -> None:
    async def story(site: Site) -> None:
        client = site.client
        await client.apply(chain())
        await site.trigger("a", "b", "c")
        listed = await client.tasks(job="clean", status="queued", limit=2)
        assert [each.partition_key for each in listed.tasks] == ["c", "b"]
        rest = await client.tasks(job="clean", status="queued", before=listed.before)
        assert [each.partition_key for each in rest.tasks] == ["a"]
        with pytest.raises(NotSettled, match=r"clean \(3 waiting, 0 running\)"):
            await client.wait(timeout_seconds=0)

        last = listed.tasks[0].id
        answer = await client.cancel([last, 999], reason="Not wanted.")
        assert [each.status for each in answer.results] == [200, 404]
        assert (await client.wait(task=last)).task.reason == "Not wanted."

        assert await site.work("a:clean", fails=True) == 2
        dead = (await client.tasks(status="dead")).tasks
        assert [each.reason for each in dead] == ["Boom.", "Boom."]
        again = await client.replay([each.id for each in dead])
        assert [each.status for each in again.results] == [200, 200]
        refused = await client.replay([each.id for each in dead])
        assert [each.status for each in refused.results] == [409, 409]
        assert "only dead tasks are replayed" in refused.results[0].detail

        assert await site.work("a:clean") == 2
        assert await site.work("a:report") == 2
        status = await client.wait(timeout_seconds=60)
        assert [job.queued for job in status.jobs] == [0, 0, 0]
        told = await client.task(dead[0].id)
        assert [each.outcome for each in told.attempts] == ["failed", "completed"]
        (found,) = [each for each in (await client.datasets()).datasets if each.name == "tidy"]
        assert [each.partitions for each in found.generations] == [2]
        published = await client.partitions("tidy", limit=1)
        assert [each.partition_key for each in published.partitions] == ["a"]
        rest_of = await client.partitions("tidy", after=published.after)
        assert [each.partition_key for each in rest_of.partitions] == ["b"]

    tell(worlds, story)


def test_a_backfill_is_waited_for_paused_and_cancelled(worlds: Worlds) -> None:
    async def story(site: Site) -> None:
        client = site.client
        await client.apply(chain())
        made = await client.backfill("clean", start=0, end=100, step=10, request_id="once")
        again = await client.backfill("clean", start=0, end=100, step=10, request_id="once")
        assert (made.partitions, again.id) == (10, made.id)
        assert [each.id for each in (await client.status()).backfills] == [made.id]
        with pytest.raises(NotSettled, match="0 of 10 partitions have ended"):
            await client.wait(backfill=made.id, timeout_seconds=0)
        await site.backfills.turn()
        assert await site.work("a:clean") == 10
        await site.backfills.turn()
        over = await client.wait(backfill=made.id, timeout_seconds=60)
        assert (over.state, over.planned, over.open, over.dead) == ("done", 10, 0, 0)

        other = await client.backfill("clean", keys=["x", "y"])
        assert other.id != made.id
        assert (await client.pause_backfill(other.id)).state == "paused"
        assert (await client.resume_backfill(other.id)).state == "running"
        assert (await client.cancel_backfill(other.id)).state == "cancelled"
        with pytest.raises(DispatcherRefused, match="is cancelled"):
            await client.resume_backfill(other.id)
        assert [each.id for each in (await client.backfills()).backfills] == [other.id, made.id]
        with pytest.raises(DispatcherRefused, match="has no job nobody") as unknown:
            await client.backfill("nobody", keys=["x"])
        assert unknown.value.status == 404
        with pytest.raises(DispatcherRefused, match="must be lower") as wrong:
            await client.backfill("clean", start=1, end=1, step=1)
        assert wrong.value.status == 422

    tell(worlds, story)


def test_jobs_operators_and_the_outbox_are_steered(worlds: Worlds) -> None:
    async def story(site: Site) -> None:
        client = site.client
        await client.apply(chain())
        paused = await client.pause("clean", reason="Moving.")
        assert [each.reason for each in paused.pauses] == ["Moving."]
        assert [each.job for each in (await client.pressure()).pauses] == ["clean"]
        assert (await client.resume("clean")).pauses == []
        with pytest.raises(DispatcherRefused, match="There is no job 'nobody'"):
            await client.pause("nobody")
        assert (await client.limit_operator("a:clean", 3)).in_flight_max == 3
        loads = {each.name: each.in_flight_max for each in (await client.operators()).operators}
        assert loads["a:clean"] == 3
        assert (await client.outbox()).parked == []
        assert (await client.retry_outbox([1])).retried == 0

    tell(worlds, story)


def test_a_wrong_token_is_one_sentence(worlds: Worlds) -> None:
    async def main() -> None:
        async with built(worlds) as (_, parts, _):
            for token in (None, "wrong"):
                transport = OverHttpx(httpx.ASGITransport(public_app(parts)))
                async with Client("http://x", token, transport=transport) as client:
                    with pytest.raises(DispatcherRefused) as caught:
                        await client.status()
                assert caught.value.status in (401, 403)
                assert caught.value.hint

    asyncio.run(main())


def test_the_command_line_over_a_real_listener(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(chain())

    async def main() -> None:
        async with built(worlds) as (_, parts, _):
            serving = HttpServer([HttpListener("public", public_app(parts), "127.0.0.1", 0)])
            await serving.start()
            try:
                await _commands(serving.url("public"), tmp_path, parts)
            finally:
                await serving.stop()

    asyncio.run(main())


async def _commands(url: str, folder: Path, parts: ApiContext) -> None:
    async def said(line: str, *, code: int = 0) -> str:
        running = await asyncio.create_subprocess_exec(
            PENSTOCK,
            *line.split(),
            cwd=folder,
            env={**os.environ, "PENSTOCK_URL": url, "PENSTOCK_API_TOKEN": TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await running.communicate()
        assert running.returncode == code, errors.decode()
        return (out if code == 0 else errors).decode()

    assert "is in force" in await said("dag apply mine.yaml")
    assert "Event 1 is new." in await said("trigger feed --partition p --event-id e")
    assert "is a duplicate and was ignored" in await said("trigger feed --partition p --event-id e")
    await parts.routing.route()
    (task,) = json.loads(await said("task list --json"))["tasks"]
    assert (task["job"], task["status"]) == ("clean", "queued")
    assert "clean" in await said("status")
    assert f"{task['id']}  cancelled" in await said(f"task cancel {task['id']}")
    assert f"Task {task['id']} is cancelled" in await said(f"task replay {task['id']}", code=1)
    assert "is not a source" in await said("trigger clean --partition p", code=1)
    assert "is planned: 1 partition." in await said("backfill start clean --key q")
    assert "There is no backfill 99." in await said("backfill show 99", code=1)
