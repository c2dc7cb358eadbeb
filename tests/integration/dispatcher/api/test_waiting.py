"""Workers wait for work over real HTTP: they are answered, leave, and are let go."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from penstock.dispatcher.api import worker_endpoints
from penstock.dispatcher.api.endpoints import ApiCall
from penstock.dispatcher.api.routes import internal_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.dispatcher.wakeups.long_poll import Broker, LongPollListener
from penstock.dispatcher.wakeups.notifications import ECHO_SECONDS, Notifications
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.protocol.work import HelloAsk, WaitAnswer, WaitAsk
from penstock.worker.client import InternalClient
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, ok, parts_of, refused
from tests.integration.dispatcher.test_deployment import chain
from tests.sizes import SIZES

CLEAN = WakeUpChannel("a:clean", Priority.NORMAL)
ASK = {"operators": ["a:clean"], "seconds": 50}


HALF_MINUTE = 30.0
"""In seconds: nothing waits longer, whatever is lost."""


async def _until_waiting(broker: Broker, count: int) -> None:
    async with asyncio.timeout(120):
        while broker.waiters != count:
            await SystemClock().sleep(0.01)


def test_more_may_wait_than_may_work_and_whoever_leaves_is_not_waited_for(
    on_stage: Perform,
) -> None:
    async def story(stage: Stage) -> None:
        broker = Broker()
        app = internal_app(parts_of(stage.world, broker=broker))
        serving = HttpServer([HttpListener("internal", app, "127.0.0.1", 0)])
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
                broker.send(Counter([CLEAN]))
                done, _ = await asyncio.wait(staying, return_when=asyncio.FIRST_COMPLETED)
                (answered,) = done
                (given,) = ok(answered.result())["wake_ups"]
                assert (given["operator"], given["priority"]) == ("a:clean", "normal")
                await broker.stop()
                for each in staying:
                    if each is not answered:
                        assert refused(await each, 503).title == "This dispatcher is shutting down."

    on_stage(story)


HELLO = HelloAsk(runtimes=["process"], concurrency=2, about={"host": "h"})


def _kill(serving: HttpServer) -> None:
    """Drop its addresses and its connections without a word."""
    for server, _ in serving._running:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()


@pytest.mark.proof
def test_who_waits_at_a_dispatcher_that_is_killed_waits_at_the_next(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        brokers = [Broker(), Broker()]
        servings = [
            HttpServer([HttpListener("internal", internal_app(parts), "127.0.0.1", 0)])
            for parts in (parts_of(stage.world, broker=each) for each in brokers)
        ]
        heard: list[WakeUpChannel] = []

        async def hear(channel: WakeUpChannel) -> None:
            heard.append(channel)

        async with AsyncExitStack() as stack:
            for each in (*brokers, *servings):
                await stack.enter_async_context(each)
            identity = parts_of(stage.world).identities.identity("w")
            for number in range(SIZES.workers_that_wait):
                client = InternalClient(
                    [each.url("internal") for each in servings],
                    identity,
                    clock=SystemClock(),
                    # Some begin with the one, and some with the other.
                    entropy=seeded_entropy(number),
                )
                await stack.enter_async_context(client)
                for _ in range(10):
                    listener = LongPollListener(client.wait, hear, hello=HELLO)
                    listener.listen_to(["a:clean", "a:report"])
                    await stack.enter_async_context(listener)
            count = 10 * SIZES.workers_that_wait
            async with asyncio.timeout(120):
                while sum(each.waiters for each in brokers) < count:
                    await SystemClock().sleep(0.01)
            assert all(each.waiters for each in brokers)
            survivor = Notifications(
                stage.world.dsn,
                stage.world.database,
                heard=brokers[1].send,
                has_waiters=lambda: brokers[1].waiters > 0,
                # A tenth of what it is, so that this takes a tenth of the time.
                echo_seconds=ECHO_SECONDS / 10,
            )
            await stack.enter_async_context(survivor)
            async with asyncio.timeout(60):
                while not survivor.is_listening:
                    await SystemClock().sleep(0.01)
            # Work is committed, and the dispatcher that knows of it dies before it says so: what
            # it has answered goes into connections that are cut.
            await stage.trigger("p", "q", "r")
            brokers[0].send({CLEAN: 3})
            _kill(servings[0])
            async with asyncio.timeout(HALF_MINUTE):
                while len(heard) < 3:
                    await SystemClock().sleep(0.01)
            await _until_waiting(brokers[1], count)
            brokers[1].send(Counter([CLEAN]))
            async with asyncio.timeout(HALF_MINUTE):
                while len(heard) < 4:
                    await SystemClock().sleep(0.01)

    on_stage(story)


def _counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The transactions of the stage from now on."""
    found: list[object] = []
    transact = stage.world.database.transact

    async def counting(work: Any) -> Any:
        found.append(work)
        return await transact(work)

    monkeypatch.setattr(stage.world.database, "transact", counting)
    return found


def test_who_waits_is_there_and_is_written_with_all_others(
    on_stage: Perform, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        broker = Broker()
        parts = parts_of(stage.world, broker=broker)
        ask = WaitAsk(listener="one", operators=["a:clean", "a:report"], seconds=50, hello=HELLO)

        async def wait(number: int, **fields: Any) -> WaitAnswer:
            call = ApiCall(ask=replace(ask, **fields), worker=f"w{number}")
            answer = await worker_endpoints.wait(parts, call)
            assert isinstance(answer, WaitAnswer)
            return answer

        async def seen() -> set[str]:
            rows = await stage.world.rows(
                "SELECT name FROM worker WHERE last_seen_at > penstock_now() - interval '1 minute'"
                " AND operators = '{a:clean,a:report}' AND about ->> 'concurrency' = '2'"
            )
            return {row["name"] for row in rows}

        async with broker:
            transactions = _counted(stage, monkeypatch)
            loop = asyncio.get_running_loop()
            waiting = [loop.create_task(wait(number)) for number in range(300)]
            await _until_waiting(broker, 300)
            assert len(transactions) <= 5, "one by one they would be 600"
            assert len(await seen()) == 300
            # Half of them leave; a while later the others are there, by one statement for all.
            for each in waiting[150:]:
                each.cancel()
            await _until_waiting(broker, 150)
            await parts.presence.turn()
            stage.world.later(70)
            del transactions[:]
            await parts.presence.turn()
            assert len(transactions) <= 2
            assert await seen() == {f"w{number}" for number in range(150)}
            # Another DAG: whoever waits is answered, and learns what to serve when it asks again.
            ok(await stage.apply(chain().replace("a:clean", "a:other")))
            assert parts.presence.is_due(1)
            assert not parts.presence.is_due(1)
            await parts.presence.turn()
            answers = await asyncio.gather(*waiting[:150])
            assert {len(each.wake_ups) for each in answers} == {0}
            told = (await wait(0)).operators
            assert told is not None
            assert [each.name for each in told] == ["a:other", "a:report"]

    on_stage(story)


def test_nobody_who_has_left_comes_back_by_what_another_dispatcher_knows(
    on_stage: Perform,
) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        one, two = (parts_of(stage.world).presence for _ in range(2))
        await one.hello("w", HELLO)
        await one.hello("w", HELLO)
        await two.hello("w", replace(HELLO, is_leaving=True))
        await one.turn()
        (row,) = await stage.world.rows("SELECT operators, about FROM worker")
        assert row["operators"] == []
        assert row["about"]["has_left"]
        assert row["about"]["served"] == ["a:clean", "a:report"]

    on_stage(story)


def test_a_dispatcher_whose_wake_ups_go_another_way_says_so(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        answer = await stage.internal.post(
            "/internal/wait", json={**ASK, "listener": "me"}, headers=stage.identity()
        )
        problem = refused(answer, 409)
        assert problem.title == "This dispatcher does not use long-poll wake-ups."
        assert "`wakeups`" in problem.detail

    on_stage(story)
