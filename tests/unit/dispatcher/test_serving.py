"""Connections that say nothing, or never come to their point, are closed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import Any

import pytest

from penstock.dispatcher.api import server
from penstock.dispatcher.api.requests import be_known
from penstock.dispatcher.api.server import HttpListener, HttpServer, connections_within_files

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    del scope
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    told = b"%d" % len(body)
    headers = [(b"content-length", b"%d" % len(told))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": told})


def _answer(*pieces: bytes) -> bytes:
    """What is answered to these, until the other side closes."""

    async def main() -> bytes:
        async with HttpServer([HttpListener("test", _app, "127.0.0.1", 0)]) as listening:
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.port("test"))
            try:
                async with asyncio.timeout(60):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                    return await reader.read()
            except ConnectionError:
                # Who closes while more is coming may reset the connection.
                return b""
            finally:
                writer.transport.abort()

    return asyncio.run(main())


def test_a_page_that_is_open_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an end of its own it would be waited for without end.
    monkeypatch.setattr(server, "_GRACE_SECONDS", None)
    monkeypatch.setattr(server, "_STOP_SECONDS_MAX", None)
    ended = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"news", "more_body": True})
        ended.append((await receive())["type"])

    async def main() -> bytes:
        async with asyncio.timeout(60):
            async with HttpServer([HttpListener("test", app, "127.0.0.1", 0)]) as listening:
                reader, writer = await asyncio.open_connection("127.0.0.1", listening.port("test"))
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
                await reader.readuntil(b"news")
            rest = await reader.read()
            writer.close()
            return rest

    assert asyncio.run(main()) in (b"", b"\r\n")
    assert ended == ["http.disconnect"]


def test_a_connection_that_nobody_has_told_to_end_is_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As one that is let in while the listener looks through those that it has.
    monkeypatch.setattr(server._Connection, "shutdown", lambda _: None)
    monkeypatch.setattr(server, "_GRACE_SECONDS", 0)

    async def main() -> None:
        async with HttpServer([HttpListener("test", _app, "127.0.0.1", 0)]) as listening:
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.port("test"))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n0")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                assert await reader.read() == b""
        writer.transport.abort()

    asyncio.run(main())


@pytest.mark.parametrize("said", [(), (HEAD,), (b"\r\n",)])
def test_a_silent_caller_does_not_hold_a_connection(
    monkeypatch: pytest.MonkeyPatch, said: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(server, "_HEADERS_SECONDS_MAX", 0.05)
    assert _answer(*said) == b""


def test_headers_after_an_answer_have_to_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_SECONDS_MAX", 0.05)
    answer = _answer(HEAD + b"Content-Length: 2\r\n\r\nab" + HEAD)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n2")


async def _hasty(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once, whatever is still to come."""
    del scope, receive
    await send(
        {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("more", [b"x", b"x" * 9, b"x" * 9 + b"\r\n"])
def test_what_comes_after_an_answer_does_not_hold_a_connection(
    monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    # What comes of the body, or an end of line, ends uvicorn's own waiting for the next request.
    monkeypatch.setattr(server, "_REST_SECONDS_MAX", 0.05)
    monkeypatch.setattr(server, "_KEEP_ALIVE_SECONDS", 1000)

    async def main() -> bytes:
        async with HttpServer([HttpListener("test", _hasty, "127.0.0.1", 0)]) as listening:
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.port("test"))
            async with asyncio.timeout(60):
                writer.write(HEAD + b"Content-Length: 9\r\n\r\n")
                answer = await reader.readuntil(b"\r\n\r\n")
                writer.write(more)
                assert await reader.read() == b""
            writer.close()
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 401 ")


def test_an_answer_that_nobody_reads_does_not_hold_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_UNREAD_SECONDS_MAX", 0.05)

    async def main() -> None:
        left = asyncio.Event()

        async def app(_: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await asyncio.wait_for(receive(), 60))["type"] != "http.disconnect":
                for _ in range(100):
                    body = b"x" * 1_000_000
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            left.set()

        async with HttpServer([HttpListener("test", app, "127.0.0.1", 0)]) as listening:
            with socket.create_connection(("127.0.0.1", listening.port("test"))) as caller:
                caller.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                async with asyncio.timeout(60):
                    await left.wait()

    asyncio.run(main())


def test_connections_without_identity_give_way_to_each_other() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/":
            be_known(scope, is_limited=scope["path"] == "/limited")
        await _app(scope, receive, send)

    async def main() -> None:
        listener = HttpListener("test", app, "127.0.0.1", 0, connections_max=12)
        async with HttpServer([listener]) as listening:
            port = listening.port("test")

            async def opened(said: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                return reader, writer

            async with asyncio.timeout(60):
                known = await opened(b"GET /known HTTP/1.1\r\nHost: x\r\n\r\n")
                await known[0].readuntil(b"\r\n\r\n0")
                limited = [
                    await opened(b"GET /limited HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(20)
                ]
                silent = [await opened(b"") for _ in range(20)]
                for reader, _ in silent[:17]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
                # A new one is served while others stand, and the known one was kept.
                other = await opened(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await other[0].readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 ")
                known[1].write(b"GET /known HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await known[0].readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200 ")
            for _, writer in (known, other, *silent, *limited):
                writer.transport.abort()

    asyncio.run(main())


def test_a_listener_has_no_more_connections_than_its_process_has_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    for limits, expected in (
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), [2000, 4000]),
        ((1024, 524288), [2000, 4000]),
        ((1024, 1024), [256, 512]),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert connections_within_files([2000, 4000]) == expected
    assert told == [(6256, 524288), (1024, 1024)]


def test_headers_without_end_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_BYTES_MAX", 1000)
    monkeypatch.setattr(server, "_HEADERS_SECONDS_MAX", 1000)
    # More than is ever read at once.
    assert _answer(HEAD, b"X: ", b"x" * 4_000_000)[:13] in (b"HTTP/1.1 400 ", b"")


def test_a_long_body_in_one_piece_with_headers_is_no_long_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_HEADERS_BYTES_MAX", 1000)
    said = HEAD + b"Connection: close\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
    answer = _answer(said[:10], said[10:40], said[40:])
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n5000")


def test_an_address_is_told_as_it_was_taken_and_as_this_machine_reaches_it() -> None:
    async def main() -> None:
        every = "0.0.0.0"
        async with HttpServer([HttpListener("test", _app, every, 0)]) as listening:
            port = listening.port("test")
            assert listening.bound("test") == f"http://{every}:{port}"
            assert listening.url("test") == f"http://127.0.0.1:{port}"

    asyncio.run(main())
