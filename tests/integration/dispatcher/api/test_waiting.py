"""Workers wait for work over real HTTP: they are answered, leave, and are let go."""

from __future__ import annotations

import asyncio

import httpx

from penstock.dispatcher.api.table import internal_app
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.serving import Listener, Serving
from penstock.dispatcher.wakeups.base import Channel
from penstock.dispatcher.wakeups.broker import Broker
from penstock.kernel.clock import SystemClock
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, ok, parts_of, refused

CLEAN = Channel("a:clean", Priority.NORMAL)
ASK = {"operators": ["a:clean"], "seconds": 50}


async def _until_waiting(broker: Broker, count: int) -> None:
    async with asyncio.timeout(30):
        while broker.waiters != count:
            await SystemClock().sleep(0.01)


def test_more_may_wait_than_may_work_and_whoever_leaves_is_not_waited_for(
    on_stage: Perform,
) -> None:
    async def story(stage: Stage) -> None:
        broker = Broker()
        app = internal_app(parts_of(stage.world, broker=broker))
        serving = Serving([Listener("internal", app, "127.0.0.1", 0)])
        limits = httpx.Limits(max_connections=400)
        async with serving, httpx.AsyncClient(limits=limits, timeout=60) as http, broker:
            url = f"{serving.url('internal')}/internal/wait"

            async def wait(name: str) -> httpx.Response:
                ask = {**ASK, "listener": name}
                return await http.post(url, json=ask, headers=stage.identity())

            async with asyncio.TaskGroup() as group:
                leaving = group.create_task(wait("leaving"))
                await _until_waiting(broker, 1)
                staying = [group.create_task(wait(f"listener-{n}")) for n in range(300)]
                await _until_waiting(broker, 301)
                leaving.cancel()
                await _until_waiting(broker, 300)
                broker.send([CLEAN])
                done, _ = await asyncio.wait(staying, return_when=asyncio.FIRST_COMPLETED)
                (answered,) = done
                (given,) = ok(answered.result())["wake_ups"]
                assert (given["operator"], given["priority"]) == ("a:clean", "normal")
                await broker.stop()
                for each in staying:
                    if each is not answered:
                        assert refused(await each, 503).title == "This dispatcher stops."

    on_stage(story)


def test_a_dispatcher_whose_wake_ups_go_another_way_says_so(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        answer = await stage.internal.post(
            "/internal/wait", json={**ASK, "listener": "me"}, headers=stage.identity()
        )
        problem = refused(answer, 409)
        assert problem.title == "This dispatcher does not send wake-ups by long poll."
        assert "`wakeups`" in problem.detail

    on_stage(story)
