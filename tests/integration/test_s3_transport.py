"""The S3 backend against a server that breaks off, hangs and babbles.

Whatever happens on the wire, the caller of a write learns `OutcomeUnknown` exactly if the request
may have arrived, and the caller of a read learns `Unavailable`.
"""

from __future__ import annotations

import asyncio

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import OutcomeUnknown, Unavailable
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.transport import TransportLimits
from tests.integration.asking import BIG, READS, WRITES, error_of, never_answers, run
from tests.integration.scripted import (
    KEYS,
    MODIFIED,
    SHORT,
    Call,
    Script,
    ScriptedServer,
    message,
    says,
)

GOOD = message(200, b"hello", ETag='"e1"', Last_Modified=MODIFIED)


async def closes_unread(call: Call) -> None:
    await call.close()


async def closes(call: Call) -> None:
    await call.read()
    await call.close()


async def resets(call: Call) -> None:
    await call.read()
    await call.reset()


def breaks_off(data: bytes) -> Script:
    return says(data, close=True)


CHUNKED = {"ETag": '"e1"', "Last_Modified": MODIFIED, "Transfer_Encoding": "chunked"}
BROKEN: dict[str, Script] = {
    "closes unread": closes_unread,
    "closes": closes,
    "resets": resets,
    "in the status line": breaks_off(b"HTTP/1.1 20"),
    "in the headers": breaks_off(GOOD[:40]),
    "after 100 Continue": breaks_off(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "not HTTP": breaks_off(b"SSH-2.0-OpenSSH_9.9\r\n"),
    "two lengths": says(GOOD.replace(b"Date:", b"Content-Length: 6\r\nDate:")),
    "length of no number": says(GOOD.replace(b"Length: 5", b"Length: five")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_exchange(name: str) -> None:
    async def check() -> None:
        async with ScriptedServer(BROKEN[name]) as server:
            store = server.store()
            for ask in READS.values():
                assert type(await error_of(ask(store))) is Unavailable
            for ask in WRITES.values():
                assert type(await error_of(ask(store))) is OutcomeUnknown
            assert len(server.calls) == len(READS) + len(WRITES)
            await store.close()

    run(check())


@pytest.mark.parametrize(
    "script",
    [
        breaks_off(message(200, b"hel", length=10, ETag='"e1"', Last_Modified=MODIFIED)),
        breaks_off(message(200, b"5\r\nhel", length=None, **CHUNKED)),
        breaks_off(message(200, b"5\r\nhello\r\n", length=None, **CHUNKED)),
        breaks_off(message(200, b"hello", length=None, ETag='"e1"', Last_Modified=MODIFIED)),
    ],
    ids=["announced", "in a chunk", "between chunks", "of no length"],
)
def test_a_body_that_is_cut_off_is_no_object(script: Script) -> None:
    async def check() -> None:
        async with ScriptedServer(script) as server:
            store = server.store()
            assert type(await error_of(store.get("k"))) is Unavailable
            assert type(await error_of(store.list())) is Unavailable
            await store.close()

    run(check())


def test_no_connection_is_unavailable_also_to_writers() -> None:
    async def check() -> None:
        async with ScriptedServer() as server:
            store = server.store()
        # The server is gone now, and nobody listens on its port.
        for ask in (*READS.values(), *WRITES.values()):
            error = await error_of(ask(store))
            assert type(error) is Unavailable
            assert "cannot be reached (connection refused)" in error.message
            assert error.hint.startswith("Check that the server runs")
        await store.close()

    run(check())


def test_an_unknown_host_is_unavailable() -> None:
    async def check() -> None:
        url = "s3://bucket?endpoint=http://nobody.invalid"
        config = s3_config(url, environment={}, credentials=KEYS)
        store = S3Store(config, clock=SystemClock(), limits=SHORT)
        assert type(await error_of(store.put("k", b""))) is Unavailable
        await store.close()

    run(check())


def test_a_connection_closed_before_a_word() -> None:
    async def check() -> None:
        async with ScriptedServer(greet=False) as server:
            store = server.store()
            for _ in range(20):
                # It depends on who is faster whether the request had left.
                assert type(await error_of(store.put("k", b""))) in (Unavailable, OutcomeUnknown)
                assert type(await error_of(store.get("k"))) is Unavailable
            assert server.calls == []
            await store.close()

    run(check())


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + GOOD,
        message(200, b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: t\r\n\r\n", length=None, **CHUNKED),
        GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        GOOD.replace(b"Date:", b"Connection: Close\r\nDate:"),
        GOOD.replace(b"Content-Length", b"content-LENGTH").replace(b"ETag", b"eTAG"),
        GOOD.replace(b'"e1"', b"e1"),
        GOOD.replace(b'"e1"', b'W/"e1"'),
    ],
)
def test_unusual_answers_that_are_fine(data: bytes) -> None:
    async def check() -> None:
        async with ScriptedServer(says(data)) as server:
            store = server.store()
            for _ in range(2):
                found = await store.get("k")
                assert found is not None
                assert (found.body, found.version) == (b"hello", "e1")
                assert await store.put("k", b"body") == "e1"
            assert [call.body for call in server.calls] == [b"", b"body"] * 2
            await store.close()

    run(check())


@pytest.mark.parametrize("name", ["get", "head", "list", "sample", "put", "create", "swap"])
def test_a_server_that_never_answers(name: str) -> None:
    async def check() -> None:
        async with ScriptedServer(never_answers) as server:
            store = server.store(limits=SHORT)
            error = await error_of((READS | WRITES)[name](store))
            assert type(error) is (Unavailable if name in READS else OutcomeUnknown)
            assert "no answer within 0.2 s" in error.message
            await server.all_gone()
            await store.close()

    run(check())


def test_an_answer_that_stops_halfway() -> None:
    async def stops(call: Call) -> None:
        await call.read()
        await call.write(GOOD[:-2])
        await call.gone()

    async def check() -> None:
        async with ScriptedServer(stops) as server:
            store = server.store(limits=SHORT)
            assert type(await error_of(store.get("k"))) is Unavailable
            assert type(await error_of(store.put("k", b""))) is OutcomeUnknown
            await server.all_gone()
            await store.close()

    run(check())


def test_a_large_answer_has_the_time_that_it_needs() -> None:
    limits = TransportLimits(answer_seconds=0.2, bytes_per_second_min=BIG // 60)

    async def check() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def large(call: Call) -> None:
            answer = message(200, b"x" * BIG, ETag='"e1"', Last_Modified=MODIFIED)
            await call.write(answer[:1000])
            begun.set()
            await go_on.wait()
            await call.write(answer[1000:])

        async with ScriptedServer(large, never_answers) as server, asyncio.TaskGroup() as group:
            store = server.store(limits=limits)
            getting = group.create_task(store.get("large"))
            await begun.wait()
            # A small request that begins later is given up; so the time for one has passed.
            assert type(await error_of(store.get("small"))) is Unavailable
            go_on.set()
            found = await getting
            assert found is not None
            assert found.size == BIG
            await store.close()

    run(check())
