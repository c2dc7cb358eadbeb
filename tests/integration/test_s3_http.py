"""What a server does beyond the rules of HTTP harms this exchange at most, never the next."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock.kernel.errors import OutcomeUnknown, Unavailable, VersionConflict
from penstock.store.base import Object, Swap, Version
from penstock.store.s3.backend import S3Store
from tests.conftest import Background
from tests.integration.asking import BIG, READS, WRITES, error_of, run, turns
from tests.integration.scripted import (
    MODIFIED,
    SHORT,
    Call,
    ScriptedServer,
    fine_object,
    message,
    says,
)

GOOD = message(200, b"hello", ETag='"e1"', Last_Modified=MODIFIED)


async def is_hello(store: S3Store) -> None:
    found = await store.get("k")
    assert isinstance(found, Object)
    assert (found.body, found.version) == (b"hello", "e1")


@pytest.mark.parametrize(
    "surplus",
    [
        b"EXTRA",
        b"\r\n\r\nEXTRA",
        message(200, b"wrong", ETag='"e2"', Last_Modified=MODIFIED),
        message(412),
        message(500, b"wrong", Connection="close"),
        message(200, b"wrong", ETag='"e2"', Last_Modified=MODIFIED)[:40],
    ],
)
def test_more_than_announced_changes_no_answer(surplus: bytes) -> None:
    async def check() -> None:
        async with ScriptedServer(says(GOOD + surplus)) as server:
            store = server.store()
            for _ in range(10):
                await is_hello(store)
                assert await store.put("k", b"") == "e1"
            assert server.connections == 20
            await store.close()

    run(check())


@pytest.mark.parametrize("value", ["close", "Close", "x, close"])
def test_a_connection_that_is_announced_as_the_last_is(value: str) -> None:
    async def check() -> None:
        last = message(200, b"hello", ETag='"e1"', Last_Modified=MODIFIED, Connection=value)
        async with ScriptedServer(says(last)) as server:
            store = server.store()
            for _ in range(3):
                await is_hello(store)
            assert server.connections == 3
            await server.all_gone()
            await store.close()

    run(check())


def test_what_comes_unasked_ends_the_connection() -> None:
    async def check() -> None:
        sent = asyncio.Event()

        async def adds(call: Call) -> None:
            await call.write(GOOD)
            await turns(5)
            await call.write(s3_408)
            sent.set()
            await call.gone()

        s3_408 = message(408, b"too slow", Connection="close")
        async with ScriptedServer(adds, fine_object()) as server:
            store = server.store()
            await is_hello(store)
            await sent.wait()
            await server.all_gone()
            await is_hello(store)
            assert [call.connection for call in server.calls] == [1, 2]
            await store.close()

    run(check())


def test_a_body_after_a_head_ends_the_connection() -> None:
    async def check() -> None:
        async with ScriptedServer(says(GOOD)) as server:
            store = server.store()
            for _ in range(5):
                assert (await store.head("k")).size == 5
            assert server.connections == 5
            await store.close()

    run(check())


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        GOOD.replace(b"Date:", b"x-long: " + b"x" * 100_000 + b"\r\nDate:"),
        GOOD.replace(b"Date:", b"x: y\r\n" * 40_000 + b"Date:"),
        b"HTTP/1.1 000 Nothing\r\n\r\n",
        b"HTTP/1.1 99999 Much\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\0" * 1000,
    ],
    ids=[
        "upgrade",
        "long header",
        "many headers",
        "status 0",
        "status 99999",
        "9.9",
        "tls",
        "zeros",
    ],
)
def test_what_is_hardly_http(data: bytes) -> None:
    async def check() -> None:
        async with ScriptedServer(says(data)) as server:
            store = server.store(limits=SHORT)
            assert type(await error_of(READS["get"](store))) is Unavailable
            assert type(await error_of(WRITES["put"](store))) is OutcomeUnknown
            await server.all_gone()
            await store.close()

    run(check())


@pytest.mark.parametrize("reads_on", [False, True])
def test_an_answer_before_the_request_was_read(reads_on: bool) -> None:
    """The refusal is heard, and nothing is sent after what is left of the body."""

    async def check() -> None:
        over = asyncio.Event()

        async def refuses_unread(call: Call) -> None:
            await call.write(message(412))
            call.ended = True
            await (call.gone() if reads_on else over.wait())

        async with ScriptedServer(refuses_unread, fine_object()) as server:
            store = server.store()
            with pytest.raises(VersionConflict):
                await store.put("k", b"x" * 5 * BIG, Swap(Version("v")))
            await is_hello(store)
            assert [call.connection for call in server.calls] == [1, 2]
            await store.close()
            over.set()

    run(check())


def test_a_refusal_with_a_reset_is_heard_or_unknown() -> None:
    async def refuses_and_resets(call: Call) -> None:
        await call.write(message(412, Connection="close"))
        await call.reset()

    async def check() -> None:
        async with ScriptedServer(refuses_and_resets) as server:
            store = server.store()
            for _ in range(10):
                with pytest.raises((VersionConflict, OutcomeUnknown)):
                    await store.put("k", b"x" * BIG, Swap(Version("v")))
            await store.close()

    run(check())


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
def test_a_store_left_open_by_one_loop_works_in_the_next(background: Background) -> None:
    """Its connections ended with their loop: they are not used, and closing them is no error."""
    server = ScriptedServer(fine_object())
    background.run(server.__aenter__())
    opened: list[S3Store] = []

    async def first() -> None:
        opened.append(server.store())
        await asyncio.gather(*(is_hello(opened[0]) for _ in range(3)))

    async def second() -> None:
        await is_hello(opened[0])
        await opened[0].close()

    run(first())
    run(second())
    assert server.connections == 4
    opened.clear()
    gc.collect()
    background.run(server.__aexit__(None, None, None))
