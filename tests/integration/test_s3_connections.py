"""The connections of the S3 backend: used again, shared, cancelled, closed, and none left over."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import (
    OutcomeUnknown,
    StoreError,
    Unavailable,
)
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.transport import TransportLimits
from tests.conftest import Background
from tests.integration.asking import (
    PATIENT,
    error_of,
    never_answers,
    own,
    run,
    turns,
)
from tests.integration.scripted import (
    KEYS,
    Call,
    ScriptedServer,
    answers,
    fine_object,
    message,
    says,
)


def test_connections_are_used_again() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            store = server.store()
            for _ in range(5):
                await store.get("k")
            assert server.connections == 1
            await store.close()
            await server.all_gone()

    run(check())


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_servers_connection_is_not_used_again(status: int) -> None:
    async def check() -> None:
        async with ScriptedServer(answers(status), fine_object()) as server:
            store = server.store()
            assert type(await error_of(store.get("k"))) is Unavailable
            await store.get("k")
            assert server.connections == 2
            await store.close()

    run(check())


def test_the_server_closes_just_as_the_next_request_is_sent() -> None:
    """Only what was not sent may be called so: no such body may have reached the server."""

    async def check() -> None:
        says_and_closes = says(message(200, ETag='"e1"'), close=True)
        async with ScriptedServer(says_and_closes) as server:
            store = server.store()
            told: dict[bytes, str] = {}
            for number in range(200):
                body = str(number).encode()
                try:
                    await store.put("k", body)
                    told[body] = "done"
                except StoreError as error:
                    told[body] = type(error).__name__
            arrived = {call.body for call in server.calls}
            assert {told[body] for body in told if body not in arrived} <= {
                "Unavailable",
                "OutcomeUnknown",
            }
            assert {told[body] for body in told if body in arrived} <= {"done", "OutcomeUnknown"}
            assert list(told.values()).count("done") >= 100
            await store.close()

    run(check())


class Watch(SystemClock):
    """A clock that can be moved forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def test_connections_that_were_idle_for_long_are_closed() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            clock = Watch()
            store = server.store(clock=clock)
            await asyncio.gather(*(store.get("k") for _ in range(5)))
            assert server.open_now == 5
            clock.ahead += 11
            await store.get("k")
            assert server.connections == 6
            await server.only(1)
            await store.close()

    run(check())


def test_connections_that_are_not_needed_are_closed_in_time() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            clock = Watch()
            store = server.store(clock=clock)
            await asyncio.gather(*(store.get("k") for _ in range(5)))
            for _ in range(3):
                clock.ahead += 4
                await store.get("k")
            assert server.connections == 5
            await server.only(1)
            await store.close()

    run(check())


def test_hundreds_of_requests_share_the_connections() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            store = server.store(limits=TransportLimits(connections_max=8))
            found = await asyncio.gather(*(store.get(f"k/{number}") for number in range(400)))
            assert [one.key for one in found if one] == [f"k/{number}" for number in range(400)]
            assert server.open_most == server.connections == 8
            await store.close()

    run(check())


def test_waiting_for_a_connection_has_an_end() -> None:
    async def check() -> None:
        arrived = asyncio.Event()

        async def holds(call: Call) -> None:
            arrived.set()
            await call.gone()

        limits = TransportLimits(connections_max=1, queue_seconds=0.1, answer_seconds=60)
        async with ScriptedServer(holds) as server, asyncio.TaskGroup() as group:
            store = server.store(limits=limits)
            holding = group.create_task(error_of(store.get("k")))
            await arrived.wait()
            error = await error_of(store.put("k", b""))
            assert type(error) is Unavailable
            assert "all 1 connections are busy" in error.message
            await store.close()
            assert type(await holding) is Unavailable

    run(check())


def test_a_cancelled_request_ends_its_connection() -> None:
    async def check() -> None:
        arrived = asyncio.Event()

        async def holds(call: Call) -> None:
            await call.read()
            arrived.set()
            await call.gone()

        async with ScriptedServer(holds, fine_object()) as server:
            store = server.store(limits=replace(PATIENT, connections_max=1))
            async with asyncio.TaskGroup() as group:
                putting = group.create_task(store.put("k", b"body"))
                await arrived.wait()
                waiting = group.create_task(store.get("k"))
                await turns(3)
                waiting.cancel()
                putting.cancel()
            assert putting.cancelled()
            assert waiting.cancelled()
            await server.all_gone()
            await store.get("k")
            assert [call.connection for call in server.calls] == [1, 2]
            await store.close()

    run(check())


def test_cancellation_at_any_moment_leaks_nothing() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            limits = replace(PATIENT, connections_max=1)
            await warm_up(server)
            files, running = own("fd"), own("task")
            for steps in range(60):
                store = server.store(limits=limits)
                async with asyncio.TaskGroup() as group:
                    getting = group.create_task(store.get("k"))
                    await turns(steps % 20)
                    getting.cancel()
                if steps % 2:
                    await store.get("k")
                await store.close()
            await server.all_gone()
            # A connection that was made for nobody is closed as soon as it is there.
            while own("fd") > files:
                await turns(1)
            assert own("task") <= running

    run(check())


async def warm_up(server: ScriptedServer) -> None:
    """Open what stays open, and close what does not."""
    store = server.store()
    await asyncio.gather(*(store.get("k") for _ in range(64)))
    await store.close()
    await server.all_gone()


def test_a_callers_own_time_limit() -> None:
    async def check() -> None:
        async with ScriptedServer(never_answers, fine_object()) as server:
            store = server.store(limits=PATIENT)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await store.put("k", b"")
            await server.all_gone()
            await store.get("k")
            await store.close()

    run(check())


def test_close_ends_what_is_in_flight() -> None:
    async def check() -> None:
        both = asyncio.Barrier(3)

        async def holds(call: Call) -> None:
            await call.read()
            await both.wait()
            await call.gone()

        async with ScriptedServer(holds) as server, asyncio.TaskGroup() as group:
            store = server.store(limits=replace(PATIENT, connections_max=2))
            reading = group.create_task(error_of(store.get("k")))
            writing = group.create_task(error_of(store.put("k", b"")))
            await both.wait()
            queued = group.create_task(error_of(store.put("k", b"")))
            await turns(3)
            await store.close()
            assert type(await reading) is Unavailable
            assert type(await writing) is OutcomeUnknown
            for request in (queued, error_of(store.get("k"))):
                error = await request
                assert type(error) is StoreError
                assert error.message == "This client of bucket 'bucket' has been closed."
            await server.all_gone()
            await store.close()
            assert len(server.calls) == server.connections == 2

    run(check())


def test_closing_after_the_server_went_away() -> None:
    async def check() -> None:
        async with ScriptedServer(fine_object()) as server:
            store = server.store()
            await asyncio.gather(*(store.get("k") for _ in range(5)))
        await turns(5)
        await store.close()

    run(check())


def test_a_store_in_each_of_two_loops_one_after_the_other(background: Background) -> None:
    server = ScriptedServer(fine_object())
    background.run(server.__aenter__())
    config = s3_config(f"s3://bucket?endpoint={server.endpoint}", environment={}, credentials=KEYS)

    async def use() -> None:
        store = S3Store(config, clock=SystemClock())
        for _ in range(3):
            await store.get("k")
        await store.close()

    run(use())
    run(use())
    assert server.connections == 2
    background.run(server.__aexit__(None, None, None))


def test_an_event_loop_that_ends_in_the_middle(background: Background) -> None:
    server = ScriptedServer(never_answers, fine_object())
    background.run(server.__aenter__())

    async def abandon() -> None:
        store = server.store(limits=PATIENT)
        async with asyncio.TaskGroup() as group:
            getting = group.create_task(store.get("k"))
            await turns(3)
            getting.cancel()

    async def use() -> None:
        store = server.store()
        await store.get("k")
        await store.close()

    for _ in range(5):
        run(abandon())
    server.scripts = [fine_object()]
    answered = server.connections
    run(use())
    assert server.connections == answered + 1
    background.run(server.__aexit__(None, None, None))
