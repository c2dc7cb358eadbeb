"""Requests that become events: over ASGI, and as functions of AWS Lambda."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatcher.sources.client import SourceClient
from penstock.dispatcher.sources.functions import cron_handler, webhook_handler
from penstock.dispatcher.sources.receiving import BODY_BYTES_MAX, Receiver, Request
from penstock.dispatcher.sources.schedule import milliseconds
from penstock.dispatcher.sources.webhook import WebhookApp
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    DispatcherRefused,
    DispatcherUnavailable,
    InvalidInput,
    PenstockError,
)
from tests.unit.dispatcher.sources.scripted import (
    BEGIN,
    ScriptedDispatcher,
    cron_source,
    webhook_source,
)


class HandClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps")


def made(**fields: Any) -> ScriptedDispatcher:
    return ScriptedDispatcher([webhook_source(**fields), cron_source()])


def ask(
    dispatcher: ScriptedDispatcher,
    path: str = "/orders",
    *,
    method: str = "POST",
    token: str | None = None,
    **fields: Any,
) -> httpx.Response:
    app = WebhookApp(dispatcher, clock=HandClock(), entropy=seeded_entropy(1), token=token)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://hook") as client:
            return await client.request(method, path, **fields)

    return asyncio.run(main())


def test_a_request_is_an_event_of_every_dataset() -> None:
    dispatcher = made(datasets={"b": "2", "a": "1"})
    body = {"event_id": "x", "partition_key": "2030", "start": 1, "end": 2}
    answer = ask(dispatcher, json=body)
    assert answer.status_code == 202
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["event_id"] == "x"
    assert [each["outcome"] for each in answer.json()["results"]] == ["new", "new"]
    assert answer.json()["paused"] is None
    assert "retry-after" not in answer.headers
    (one, two) = dispatcher.kept
    assert (one.dataset, one.event_id, one.partition_key) == ("a", "x", "2030")
    assert (one.start, one.end, one.cursor) == (1, 2, None)
    assert two.dataset == "b"


def test_a_request_without_anything_has_an_id_and_the_time() -> None:
    dispatcher = made()
    answer = ask(dispatcher)
    (event,) = dispatcher.kept
    assert event.event_id == answer.json()["event_id"]
    assert len(event.event_id) == 24
    assert event.cursor == milliseconds(BEGIN)


def test_the_same_key_is_the_same_event() -> None:
    dispatcher = made()
    for outcome in ("new", "duplicate"):
        answer = ask(dispatcher, headers={"Idempotency-Key": "order-7"})
        assert answer.json()["results"][0]["outcome"] == outcome
    assert dispatcher.ids == ["order-7"]
    same = ask(dispatcher, headers={"Idempotency-Key": "order-7"}, json={"event_id": "order-7"})
    assert same.status_code == 202
    other = ask(dispatcher, headers={"Idempotency-Key": "order-7"}, json={"event_id": "8"})
    assert (other.status_code, other.json()["field"]) == (422, "event_id")


def test_a_source_that_is_paused_is_told_so() -> None:
    dispatcher = made()
    dispatcher.paused = "The queue of clean is full."
    answer = ask(dispatcher)
    assert answer.status_code == 202
    assert answer.headers["retry-after"] == "30"
    assert answer.json()["paused"] == "The queue of clean is full."
    assert len(dispatcher.kept) == 1


@pytest.mark.parametrize(
    ("content", "status", "field"),
    [
        (b"{", 400, ""),
        (b"\xff", 400, ""),
        (b'{"partition_key": "\\ud800"}', 400, ""),
        (b"[1]", 422, ""),
        (b'{"cursor": "x"}', 422, "cursor"),
        (b'{"cursor": 9223372036854775808}', 422, "cursor"),
        (b'{"partition_key": ""}', 422, "partition_key"),
        (b'{"other": 1}', 422, ""),
        (b" " * (BODY_BYTES_MAX + 1), 413, ""),
        (b"[" * 20_000, 422, ""),
    ],
)
def test_a_body_that_makes_no_sense(content: bytes, status: int, field: str) -> None:
    dispatcher = made()
    answer = ask(dispatcher, content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["field"]) == (status, field)
    assert dispatcher.kept == []


def test_what_the_dispatcher_refuses() -> None:
    dispatcher = made()
    dispatcher.refused = "An event has a cursor or a partition, and not both."
    answer = ask(dispatcher, json={"cursor": 1, "partition_key": "x"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == dispatcher.refused


@pytest.mark.parametrize("error", [DispatcherUnavailable("away"), DispatcherRefused("who?")])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_dispatcher_that_is_away(calls: int, error: PenstockError) -> None:
    dispatcher = made()
    app = WebhookApp(dispatcher, clock=HandClock(), entropy=seeded_entropy(1))

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://hook") as client:
            answers = [await client.post("/orders") for _ in range(calls)]
            dispatcher.failures = [error]
            return [*answers, await client.post("/orders"), await client.post("/orders")]

    *before, failed, after = asyncio.run(main())
    assert [each.status_code for each in before] == [202] * calls
    assert (failed.status_code, failed.headers["retry-after"]) == (503, "5")
    assert after.status_code == 202


def test_other_paths_and_methods() -> None:
    dispatcher = made()
    assert ask(dispatcher, "/nothing").status_code == 404
    assert ask(dispatcher, "/").status_code == 404
    wrong = ask(dispatcher, method="GET")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert ask(dispatcher, "/healthz", method="GET").status_code == 200
    assert dispatcher.kept == []


def test_a_token_if_there_is_one() -> None:
    dispatcher = made()
    for header in ("", "Bearer", "Bearer wrong", "Basic secret", "Bearer s\u00e9cret"):
        headers = {"Authorization": header.encode()} if header else {}
        answer = ask(dispatcher, token="secret", headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert dispatcher.asked == 0
    right = ask(dispatcher, token="secret", headers={"Authorization": "bearer secret"})
    assert right.status_code == 202


def test_new_paths_are_seen_and_the_dispatcher_is_not_asked_each_time() -> None:
    dispatcher, clock = made(), HandClock()
    receiver = Receiver(dispatcher, clock=clock, entropy=seeded_entropy(1))

    def status(path: str) -> int:
        return asyncio.run(receiver.receive(Request("POST", path, {}, b""))).status

    assert [status("/orders") for _ in range(5)] == [202] * 5
    assert dispatcher.asked == 1
    dispatcher.sources_.append(webhook_source("new", "/new"))
    assert [status("/new") for _ in range(5)] == [404] * 5
    assert dispatcher.asked == 1
    clock.seconds += 1.1
    assert status("/new") == 202
    assert dispatcher.asked == 2
    clock.seconds += 4
    assert status("/new") == 202
    assert dispatcher.asked == 2
    clock.seconds += 1.1
    dispatcher.sources_.clear()
    assert status("/new") == 404


def test_time_goes_on_between_looks() -> None:
    dispatcher, clock = made(), HandClock()
    receiver = Receiver(dispatcher, clock=clock, entropy=seeded_entropy(1))
    asyncio.run(receiver.receive(Request("POST", "/orders", {}, b"")))
    clock.seconds += 2
    asyncio.run(receiver.receive(Request("POST", "/orders", {}, b"")))
    assert [each.cursor for each in dispatcher.kept] == [
        milliseconds(BEGIN),
        milliseconds(BEGIN) + 2000,
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["event_id", "cursor", "partition_key", "start", "end"])
                | st.text(),
                inner,
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_comes_is_answered(content: bytes) -> None:
    receiver = Receiver(made(), clock=HandClock(), entropy=seeded_entropy(1))
    reply = asyncio.run(receiver.receive(Request("POST", "/orders", {}, content)))
    assert reply.status in (202, 400, 422)


# The same as functions ---------------------------------------------------------------------------


def connecting(
    dispatcher: ScriptedDispatcher,
) -> Callable[[], contextlib.AbstractAsyncContextManager[SourceClient]]:
    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[SourceClient]:
        yield dispatcher

    return connect


FUNCTION_URL = {
    "version": "2.0",
    "rawPath": "/orders",
    "headers": {"idempotency-key": "k"},
    "requestContext": {"http": {"method": "POST"}, "stage": "$default"},
    "body": '{"partition_key": "p"}',
    "isBase64Encoded": False,
}
GATEWAY = {
    "path": "/orders",
    "httpMethod": "POST",
    "headers": {"Idempotency-Key": "k"},
    "requestContext": {"stage": "prod"},
    "body": base64.b64encode(b'{"partition_key": "p"}').decode(),
    "isBase64Encoded": True,
}
STAGED = {
    **FUNCTION_URL,
    "rawPath": "/prod/orders",
    "requestContext": {"http": {"method": "POST"}, "stage": "prod"},
}


@pytest.mark.parametrize("event", [FUNCTION_URL, GATEWAY, STAGED])
def test_a_webhook_function(event: dict[str, Any]) -> None:
    dispatcher = made()
    handler = webhook_handler(connecting(dispatcher), entropy=seeded_entropy(1))
    for outcome in ("new", "duplicate"):
        answer = handler(event, None)
        assert answer["statusCode"] == 202
        told = json.loads(answer["body"])
        assert (told["event_id"], told["results"][0]["outcome"]) == ("k", outcome)
    (kept,) = dispatcher.kept
    assert (kept.event_id, kept.partition_key) == ("k", "p")


def test_a_webhook_function_that_is_asked_nonsense() -> None:
    handler = webhook_handler(connecting(made()), token="secret")
    assert handler({}, None)["statusCode"] == 401
    handler = webhook_handler(connecting(made()))
    assert handler({}, None)["statusCode"] == 404
    assert handler({**GATEWAY, "body": "!"}, None)["statusCode"] == 400
    assert handler({**GATEWAY, "body": None}, None)["statusCode"] == 202


def test_a_cron_function() -> None:
    dispatcher = ScriptedDispatcher(
        [cron_source(), cron_source("daily", "0 0 * * *", datasets={"days": "u"})]
    )
    handler = cron_handler(connecting(dispatcher))
    # A few seconds late, and called twice.
    dispatcher.passed = lambda: 20.0
    event = {"time": "2030-01-01T00:00:12Z"}
    for _ in range(2):
        assert handler(event, None) == {"sent": {"hourly": 1, "daily": 1}}
    assert dispatcher.ids == ["cron:2030-01-01T00:00:00+00:00"] * 2
    assert handler({**event, "job": "daily"}, None) == {"sent": {"daily": 1}}
    with pytest.raises(InvalidInput, match="no cron source 'weekly'"):
        handler({**event, "job": "weekly"}, None)


def test_a_cron_function_catches_up_and_holds() -> None:
    last = milliseconds(BEGIN) - 3 * 3_600_000
    dispatcher = ScriptedDispatcher([cron_source(last_cursor=last, paused="full")])
    handler = cron_handler(connecting(dispatcher))
    assert handler({"time": "2030-01-01T00:00:00Z"}, None) == {"sent": {}}
    dispatcher.sources_ = [cron_source(last_cursor=last)]
    # A time that has not come is not emitted, whatever the caller says.
    assert handler({"time": "2040-01-01T00:00:00Z"}, None) == {"sent": {"hourly": 3}}
    dispatcher.refused = "no"
    with pytest.raises(InvalidInput, match="Events of hourly were refused: no"):
        handler({"time": "2030-01-01T00:00:00Z"}, None)


@pytest.mark.parametrize("event", [{}, {"time": 1}, {"time": "x"}, {"time": "0001-01-01T00:00Z"}])
def test_a_cron_function_that_is_not_called_by_a_rule(event: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="no `time`"):
        cron_handler(connecting(made()))(event, None)
