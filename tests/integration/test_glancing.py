"""A short look at whatever listens: an answer, or none, and never an error."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.cli.start_page import Glance, glance

LONG = 30.0
SHORT = 0.05


@contextmanager
def answering(
    *pieces: bytes, heard: list[bytes] | None = None, pause_seconds: float = 0.0
) -> Iterator[str]:
    """A server that says this once, and then stays silent until the end of the block."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if heard is not None:
                    heard.append(connection.recv(65536))
                with suppress(OSError):
                    for piece in pieces:
                        connection.sendall(piece)
                        if over.wait(pause_seconds):
                            return
                over.wait(LONG)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            thread.join(LONG)


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_an_answer_is_an_object_and_a_status() -> None:
    heard: list[bytes] = []
    with answering(http(b'{"jobs": []}'), heard=heard) as url:
        seen = glance(url, "/v1/x", token="t", seconds=LONG, asked={"a": "b c"})
    assert seen == Glance(200, {"jobs": []})
    assert heard[0].startswith(b"GET /v1/x?a=b+c HTTP/1.1\r\n")
    assert b"Authorization: Bearer t\r\n" in heard[0]


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b"[" * 100_000, b"\xff"])
def test_what_is_no_object_is_an_empty_one(body: bytes) -> None:
    with answering(http(body, "401 Unauthorized")) as url:
        assert glance(url, "/", token=None, seconds=LONG) == Glance(401, {})


@pytest.mark.parametrize("pieces", [(), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"{")])
def test_who_does_not_answer_in_time_has_not_answered(pieces: tuple[bytes, ...]) -> None:
    with answering(*pieces) as url:
        assert glance(url, "/", token=None, seconds=SHORT) is None


def test_an_answer_in_drops_keeps_nobody_waiting() -> None:
    head, *drops = http(b" " * 300 + b"{}").partition(b"\r\n\r\n")
    pieces = (head, drops[0], *(bytes([each]) for each in drops[1]))
    with answering(*pieces, pause_seconds=0.01) as url:
        assert glance(url, "/", token=None, seconds=SHORT) is None


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://127.0.0.1:1", None),
        ("ftp://127.0.0.1", None),
        ("http://", None),
        ("http://[", None),
        ("nonsense", None),
        ("http://127.0.0.1:99999", None),
        ("http://127.0.0.1:1", "two\r\nlines"),
    ],
)
def test_where_nobody_can_answer_there_is_no_answer(url: str, token: str | None) -> None:
    assert glance(url, "/", token=token, seconds=LONG) is None


def test_who_speaks_something_else_has_not_answered() -> None:
    with answering(b"SSH-2.0-OpenSSH\r\n\r\n") as url:
        assert glance(url, "/", token=None, seconds=SHORT) is None
