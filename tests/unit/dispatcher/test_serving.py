"""Connections that say nothing, or never come to their point, are closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.dispatcher import serving
from penstock.dispatcher.serving import Listener, Serving

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
        async with Serving([Listener("test", _app, "127.0.0.1", 0)]) as listening:
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
    monkeypatch.setattr(serving, "_GRACE_SECONDS", None)
    monkeypatch.setattr(serving, "_STOP_SECONDS_MAX", None)
    ended = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"news", "more_body": True})
        ended.append((await receive())["type"])

    async def main() -> bytes:
        async with asyncio.timeout(60):
            async with Serving([Listener("test", app, "127.0.0.1", 0)]) as listening:
                reader, writer = await asyncio.open_connection("127.0.0.1", listening.port("test"))
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
                await reader.readuntil(b"news")
            rest = await reader.read()
            writer.close()
            return rest

    assert asyncio.run(main()) in (b"", b"\r\n")
    assert ended == ["http.disconnect"]


@pytest.mark.parametrize("said", [(), (HEAD,), (b"\r\n",)])
def test_a_silent_caller_does_not_hold_a_connection(
    monkeypatch: pytest.MonkeyPatch, said: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(serving, "_HEADERS_SECONDS_MAX", 0.05)
    assert _answer(*said) == b""


def test_headers_after_an_answer_have_to_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HEADERS_SECONDS_MAX", 0.05)
    answer = _answer(HEAD + b"Content-Length: 2\r\n\r\nab" + HEAD)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n2")


def test_headers_without_end_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HEADERS_BYTES_MAX", 1000)
    monkeypatch.setattr(serving, "_HEADERS_SECONDS_MAX", 1000)
    # More than is ever read at once.
    assert _answer(HEAD, b"X: ", b"x" * 4_000_000)[:13] in (b"HTTP/1.1 400 ", b"")


def test_a_long_body_in_one_piece_with_headers_is_no_long_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_HEADERS_BYTES_MAX", 1000)
    said = HEAD + b"Connection: close\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
    answer = _answer(said[:10], said[10:40], said[40:])
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n5000")


def test_an_address_is_told_as_it_was_taken_and_as_this_machine_reaches_it() -> None:
    async def main() -> None:
        every = "0.0.0.0"
        async with Serving([Listener("test", _app, every, 0)]) as listening:
            port = listening.port("test")
            assert listening.bound("test") == f"http://{every}:{port}"
            assert listening.url("test") == f"http://127.0.0.1:{port}"

    asyncio.run(main())
