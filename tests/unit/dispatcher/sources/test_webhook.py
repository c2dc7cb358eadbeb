"""Requests that become events: over ASGI, and as functions of AWS Lambda."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatcher.sources.aws_lambda import cron_handler, webhook_handler
from penstock.dispatcher.sources.client import WebhookClient
from penstock.dispatcher.sources.cron import milliseconds
from penstock.dispatcher.sources.webhook import REFUSALS_MAX, WebhookApp, WebhookReceiver
from penstock.dispatcher.sources.webhook_request import BODY_BYTES_MAX, ID_HEADERS, WebhookRequest
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    DispatcherRefused,
    DispatcherUnavailable,
    InvalidInput,
    PenstockError,
    SecretUnavailable,
)
from penstock.protocol.events import AuthAnswer, RefusalsAnswer, RefusalsAsk, SourcesAnswer
from tests.sizes import some
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


SECRET = "the-secret-of-the-shop"
PLACES = {"env:SHOP": SECRET, "file:next": "the-next-secret-of-it", "env:SHORT": "short"}
HERE = "http://127.0.0.1:7072"
LOCAL = {"host": "127.0.0.1:7072"}
BEARER = AuthAnswer(type="bearer", secrets=["env:SHOP"])


async def secret(place: str) -> str:
    if place not in PLACES:
        raise SecretUnavailable("is not there")
    return PLACES[place]


def receiving(
    dispatcher: ScriptedDispatcher, *, clock: HandClock | None = None, is_loopback: bool = True
) -> WebhookReceiver:
    return WebhookReceiver(
        dispatcher,
        clock=clock or HandClock(),
        entropy=seeded_entropy(1),
        secret=secret,
        is_loopback=is_loopback,
    )


def ask(
    dispatcher: ScriptedDispatcher,
    path: str = "/orders",
    *,
    method: str = "POST",
    base_url: str = HERE,
    is_loopback: bool = True,
    **fields: Any,
) -> httpx.Response:
    receiver = receiving(dispatcher, is_loopback=is_loopback)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=WebhookApp(receiver), client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
            answer = await client.request(method, path, **fields)
        await receiver.note()
        return answer

    return asyncio.run(main())


def test_a_request_is_an_event_of_every_dataset() -> None:
    dispatcher = made(datasets={"b": "2", "a": "1"})
    answer = ask(dispatcher, "/orders?event_id=x&partition_key=2030&start=1&end=2", json={"id": 1})
    assert answer.status_code == 202
    assert answer.headers["content-type"] == "application/json"
    assert (answer.json()["event_id"], answer.json()["is_id_made"]) == ("x", False)
    assert [each["outcome"] for each in answer.json()["results"]] == ["new", "new"]
    assert answer.json()["paused"] is None
    assert "retry-after" not in answer.headers
    (one, two) = dispatcher.kept
    assert (one.dataset, one.event_id, one.partition_key) == ("a", "x", "2030")
    assert (one.start, one.end, one.cursor) == (1, 2, None)
    assert two.dataset == "b"
    assert one.payload == two.payload == {"id": 1}


def test_a_request_without_anything_has_an_id_and_the_time() -> None:
    dispatcher = made()
    answer = ask(dispatcher)
    (event,) = dispatcher.kept
    assert event.event_id == answer.json()["event_id"]
    assert answer.json()["is_id_made"] is True
    assert len(event.event_id) == 24
    assert event.cursor == milliseconds(BEGIN)
    assert event.payload is None


def test_the_same_key_is_the_same_event() -> None:
    dispatcher = made()
    for outcome in ("new", "duplicate"):
        answer = ask(dispatcher, headers={"Idempotency-Key": "order-7"})
        assert answer.json()["results"][0]["outcome"] == outcome
    assert dispatcher.ids == ["order-7"]


def test_the_first_header_that_names_an_event_does_and_the_query_before_all() -> None:
    headers = {name: f"by {name}" for name in ID_HEADERS}
    for name in ID_HEADERS:
        dispatcher = made()
        answer = ask(dispatcher, headers=headers)
        assert dispatcher.ids == [f"by {name}"] == [answer.json()["event_id"]]
        assert answer.json()["is_id_made"] is False
        del headers[name]
    dispatcher = made()
    ask(dispatcher, "/orders?event_id=mine", headers={"X-GitHub-Delivery": "theirs"})
    assert dispatcher.ids == ["mine"]
    # One that is empty is none.
    ask(dispatcher, headers={"Idempotency-Key": " ", "X-Request-Id": "r"})
    assert dispatcher.ids == ["mine", "r"]


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("content", "content_type", "payload"),
    [
        (b'{"id": 1}', FORM, {"id": 1}),
        (b' {"id": null, "more": [{}]} ', None, {"id": None, "more": [{}]}),
        # No field of a body steers anything.
        (b'{"partition_key": 5, "event_id": "x"}', None, {"partition_key": 5, "event_id": "x"}),
        (b"", "application/json", None),
        (b" \n", None, None),
        (b"{}", None, {}),
        (b"a=1&b=2", FORM, {"body": "a=1&b=2", "content_type": FORM}),
        ("é\n".encode(), None, {"body": "é\n", "content_type": ""}),
        (b"{", "text/plain", {"body": "{", "content_type": "text/plain"}),
        (b"[1]", "application/json", {"body": "[1]", "content_type": "application/json"}),
        (
            b"\xff\x00",
            "image/png",
            {"body": "/wA=", "content_type": "image/png", "encoding": "base64"},
        ),
        (b"a\0", "", {"body": "YQA=", "content_type": "", "encoding": "base64"}),
    ],
)
def test_the_body_is_the_payload(
    content: bytes, content_type: str | None, payload: dict[str, Any] | None
) -> None:
    dispatcher = made()
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = ask(dispatcher, content=content, headers=headers)
    assert answer.status_code == 202, answer.text
    (event,) = dispatcher.kept
    assert event.payload == payload
    assert (event.partition_key, event.event_id) == (None, answer.json()["event_id"])


def test_a_source_that_is_paused_is_told_so() -> None:
    dispatcher = made()
    dispatcher.paused = "The queue of clean is full."
    answer = ask(dispatcher)
    assert answer.status_code == 202
    assert answer.headers["retry-after"] == "30"
    assert answer.json()["paused"] == "The queue of clean is full."
    assert len(dispatcher.kept) == 1


JSON = {"Content-Type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"\xff", 400),
        (b'{"a": "\\ud800"}', 400),
        (b'{"a": "\\u0000"}', 422),
        (b'{"a\\u0000": 1}', 422),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", 422),
        (b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 422),
        (b'{"a": ' + b"9" * 400 + b"}", 422),
        (b" " * (BODY_BYTES_MAX + 1), 413),
        (b'{"a": [' + b",".join([b"1e300"] * 300) + b"]}", 413),
    ],
)
def test_a_body_that_makes_no_sense(content: bytes, status: int) -> None:
    dispatcher = made()
    answer = ask(dispatcher, content=content, headers=JSON)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert dispatcher.kept == []


def test_a_body_that_is_too_large_as_json() -> None:
    dispatcher = made()
    # It would be longer in base64, and with its ends of lines escaped.
    for content in (b"\xff" * 50_000, b"\n" * 40_000 + b"x"):
        answer = ask(dispatcher, content=content)
        assert (answer.status_code, "goes into a file" in answer.json()["title"]) == (413, True)
    assert ask(dispatcher, content=b"x" * 65_000).status_code == 202
    assert len(dispatcher.kept) == 1


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("other=1", "other"),
        ("cursor=1&id=7", "id"),
        ("payload=%7B%7D", "payload"),
        ("cursor=x", "cursor"),
        ("cursor=9223372036854775808", "cursor"),
        ("start=1.5", "start"),
        ("partition_key=", "partition_key"),
        ("partition_key=a&partition_key=a", "partition_key"),
        (f"event_id={'x' * 901}", "event_id"),
        ("partition_key=%ff", ""),
        ("&".join(f"p{n}" for n in range(200)), ""),
    ],
)
def test_a_query_that_makes_no_sense(query: str, field: str) -> None:
    dispatcher = made()
    answer = ask(dispatcher, f"/orders?{query}")
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert field in answer.json()["title"]
    assert dispatcher.kept == []


def test_a_header_that_is_too_long_for_an_id() -> None:
    answer = ask(made(), headers={"Webhook-Id": "x" * 901})
    assert (answer.status_code, answer.json()["field"]) == (422, "Webhook-Id")


def test_what_the_dispatcher_refuses() -> None:
    dispatcher = made()
    dispatcher.refused = "An event has a cursor or a partition, and not both."
    answer = ask(dispatcher, "/orders?cursor=1&partition_key=x")
    assert answer.status_code == 422
    assert answer.json()["detail"] == dispatcher.refused


@pytest.mark.parametrize("error", [DispatcherUnavailable("away"), DispatcherRefused("who?")])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_dispatcher_that_is_away(calls: int, error: PenstockError) -> None:
    dispatcher = made()
    app = WebhookApp(receiving(dispatcher))

    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=HERE) as client:
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


def test_a_secret_of_a_source_is_shown() -> None:
    dispatcher = made(auth=BEARER)
    for header in ("", "Bearer", "Bearer wrong", f"Basic {SECRET}", "Bearer s\u00e9cret"):
        headers = {"Authorization": header.encode()} if header else {}
        answer = ask(dispatcher, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert SECRET not in answer.text
    assert dispatcher.kept == []
    # Also to those who are not on this machine, by whatever name.
    right = {"Authorization": f"bearer {SECRET}", "Origin": "https://shop.example"}
    asked: dict[str, Any] = {"base_url": "https://hooks.example", "is_loopback": False}
    assert ask(dispatcher, headers=right, **asked).status_code == 202
    assert {(each.job, each.reason, each.address) for each in dispatcher.noted} == {
        ("orders", "no token", "192.0.2.7"),
        ("orders", "wrong token", "192.0.2.7"),
    }


def test_either_of_two_secrets_will_do() -> None:
    two = AuthAnswer(type="bearer", secrets=["file:next", "env:SHOP"])
    for text in (SECRET, PLACES["file:next"]):
        answer = ask(made(auth=two), headers={"Authorization": f"Bearer {text}"})
        assert answer.status_code == 202
    # One that is gone already takes nothing from the other.
    left = AuthAnswer(type="bearer", secrets=["file:gone", "env:SHOP"])
    assert ask(made(auth=left), headers={"Authorization": f"Bearer {SECRET}"}).status_code == 202


@pytest.mark.parametrize("place", ["env:SHORT", "file:gone"])
def test_a_secret_that_cannot_be_used_lets_nobody_in(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = made(auth=AuthAnswer(type="bearer", secrets=[place]))
    answer = ask(dispatcher, headers={"Authorization": "Bearer short"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert place not in answer.text
    assert place in caplog.text
    assert dispatcher.kept == []


@pytest.mark.parametrize(
    ("headers", "base_url", "reason"),
    [
        # A form or a script of a page that somebody looks at.
        ({"Origin": "https://evil.example", "Content-Type": "text/plain"}, HERE, "another site"),
        ({"Origin": "null"}, HERE, "another site"),
        ({"Origin": "http://127.0.0.1:3000"}, HERE, "another site"),
        ({"Sec-Fetch-Site": "cross-site"}, HERE, "another site"),
        ({"Sec-Fetch-Site": "same-site"}, HERE, "another site"),
        # Its own name leads here by now.
        ({"Origin": "http://evil.example"}, "http://evil.example", "another name"),
        ({}, "http://evil.example:7072", "another name"),
    ],
)
def test_a_page_cannot_post_to_a_webhook_of_this_machine(
    headers: dict[str, str], base_url: str, reason: str
) -> None:
    dispatcher = made()
    answer = ask(dispatcher, headers=headers, base_url=base_url, content=b"{}")
    assert (answer.status_code, answer.json()["type"]) == (403, "forbidden")
    assert dispatcher.kept == []
    assert [each.reason for each in dispatcher.noted] == [reason]
    for name in ("http://localhost:7072", "http://[::1]:7072"):
        assert ask(dispatcher, base_url=name).status_code == 202


def test_without_a_secret_a_webhook_is_for_a_machine_without_tokens() -> None:
    dispatcher = made()
    answer = ask(dispatcher, is_loopback=False)
    assert (answer.status_code, "`auth`" in answer.json()["detail"]) == (403, True)
    dispatcher.is_open = False
    assert ask(dispatcher).status_code == 403
    assert dispatcher.kept == []
    reasons = [each.reason for each in dispatcher.noted]
    assert reasons == ["no auth", "no auth, and the API has a token"]


def test_refusals_are_counted_and_wait_for_a_dispatcher_in_a_bounded_memory() -> None:
    dispatcher = made(auth=BEARER)
    receiver = receiving(dispatcher)

    async def main() -> None:
        for number in range(REFUSALS_MAX + 50):
            asked = WebhookRequest("POST", "/orders", {}, b"", address=f"192.0.2.{number}")
            for _ in range(2):
                assert (await receiver.receive(asked)).status == 401
        # Whoever else is refused while the dispatcher takes none.
        refuse, noted = dispatcher.webhook_refusals, dispatcher.noted

        async def away(ask: RefusalsAsk, /) -> RefusalsAnswer:
            for number in range(REFUSALS_MAX):
                asked = WebhookRequest("POST", "/orders", {}, b"", address=f"198.51.100.{number}")
                await receiver.receive(asked)
            dispatcher.failures = [DispatcherUnavailable("away")]
            return await refuse(ask)

        dispatcher.webhook_refusals = away  # type: ignore[method-assign]
        with pytest.raises(DispatcherUnavailable):
            await receiver.note()
        dispatcher.webhook_refusals = refuse  # type: ignore[method-assign]
        await receiver.note()
        assert sum(each.times for each in noted) == 3 * REFUSALS_MAX + 100
        await receiver.note()

    asyncio.run(main())
    assert len(dispatcher.noted) <= REFUSALS_MAX + 1
    assert {each.times for each in dispatcher.noted if each.address} == {2}


def test_senders_without_a_secret_keep_nobody_out_who_has_one() -> None:
    strange = AuthAnswer(type="bearer", secrets=["aws:slow"])
    dispatcher = ScriptedDispatcher(
        [webhook_source(auth=BEARER), webhook_source("slow", "/slow", auth=strange)]
    )
    gate, looked = asyncio.Event(), Counter[str]()
    answer, clock = dispatcher.sources, HandClock()

    async def slowly() -> SourcesAnswer:
        await gate.wait()
        return await answer()

    async def find(place: str) -> str:
        looked[place] += 1
        if place == "aws:slow":
            await asyncio.Event().wait()
        return await secret(place)

    async def main() -> None:
        dispatcher.sources = slowly  # type: ignore[method-assign]
        receiver = WebhookReceiver(
            dispatcher, clock=clock, entropy=seeded_entropy(1), secret=find, is_loopback=False
        )
        transport = httpx.ASGITransport(app=WebhookApp(receiver), client=("192.0.2.7", 1))
        client = httpx.AsyncClient(transport=transport, base_url=HERE)
        async with client, asyncio.TaskGroup() as group:
            paths = ["/nothing", "/slow", "/orders"]
            strangers = [group.create_task(client.post(paths[n % 3])) for n in range(900)]
            await asyncio.wait(strangers, timeout=0.1)
            right = {"authorization": f"Bearer {SECRET}"}
            proved = group.create_task(client.post("/orders", headers=right))
            await asyncio.wait([proved], timeout=0.1)
            gate.set()
            assert (await proved).status_code == 202
            assert (await client.get("/healthz")).status_code == 200
            for each in strangers:
                each.cancel()

    asyncio.run(main())
    assert dispatcher.asked == 1
    assert looked == {"aws:slow": 1, "env:SHOP": 1}


def test_new_paths_are_seen_and_the_dispatcher_is_not_asked_each_time() -> None:
    dispatcher, clock = made(), HandClock()
    receiver = receiving(dispatcher, clock=clock)

    def status(path: str) -> int:
        return asyncio.run(receiver.receive(WebhookRequest("POST", path, LOCAL, b""))).status

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
    receiver = receiving(dispatcher, clock=clock)
    asyncio.run(receiver.receive(WebhookRequest("POST", "/orders", LOCAL, b"")))
    clock.seconds += 2
    asyncio.run(receiver.receive(WebhookRequest("POST", "/orders", LOCAL, b"")))
    assert [each.cursor for each in dispatcher.kept] == [
        milliseconds(BEGIN),
        milliseconds(BEGIN) + 2000,
    ]


@settings(max_examples=some(100), deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: json.dumps(value).encode()),
    st.text(max_size=30)
    | st.lists(
        st.tuples(
            st.sampled_from(["event_id", "cursor", "partition_key", "start", "end"]),
            st.text(max_size=5) | st.integers().map(str),
        )
    ).map(urlencode),
    st.dictionaries(st.sampled_from(["content-type", "x-request-id"]), st.text(max_size=20)),
)
def test_whatever_comes_is_answered(content: bytes, query: str, headers: dict[str, str]) -> None:
    receiver = receiving(made())
    asked = WebhookRequest("POST", "/orders", LOCAL | headers, content, query)
    assert asyncio.run(receiver.receive(asked)).status in (202, 400, 422)


# The same as functions ---------------------------------------------------------------------------


def connecting(
    dispatcher: ScriptedDispatcher,
) -> Callable[[], contextlib.AbstractAsyncContextManager[WebhookClient]]:
    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[WebhookClient]:
        yield dispatcher

    return connect


FUNCTION_URL = {
    "version": "2.0",
    "rawPath": "/orders",
    "rawQueryString": "partition_key=p%26q&start=1&end=2",
    "headers": {"idempotency-key": "k", "authorization": f"Bearer {SECRET}"},
    "requestContext": {"http": {"method": "POST"}, "stage": "$default"},
    "body": '{"id": 1}',
    "isBase64Encoded": False,
}
GATEWAY = {
    "path": "/orders",
    "httpMethod": "POST",
    "headers": {"Idempotency-Key": "k", "Authorization": f"Bearer {SECRET}"},
    "queryStringParameters": {"partition_key": "p&q", "start": "1", "end": "2"},
    "multiValueQueryStringParameters": {"partition_key": ["p&q"], "start": ["1"], "end": ["2"]},
    "requestContext": {"stage": "prod"},
    "body": base64.b64encode(b'{"id": 1}').decode(),
    "isBase64Encoded": True,
}
BALANCED = {**GATEWAY, "multiValueQueryStringParameters": None}
STAGED = {
    **FUNCTION_URL,
    "rawPath": "/prod/orders",
    "requestContext": {"http": {"method": "POST"}, "stage": "prod"},
}


@pytest.mark.parametrize("event", [FUNCTION_URL, GATEWAY, BALANCED, STAGED])
def test_a_webhook_function(event: dict[str, Any]) -> None:
    dispatcher = made(auth=BEARER)
    handler = webhook_handler(connecting(dispatcher), secret=secret, entropy=seeded_entropy(1))
    for outcome in ("new", "duplicate"):
        answer = handler(event, None)
        assert answer["statusCode"] == 202
        told = json.loads(answer["body"])
        assert (told["event_id"], told["results"][0]["outcome"]) == ("k", outcome)
    (kept,) = dispatcher.kept
    assert (kept.event_id, kept.partition_key, kept.start, kept.end) == ("k", "p&q", 1, 2)
    assert kept.payload == {"id": 1}


def test_a_webhook_function_that_is_asked_nonsense() -> None:
    dispatcher = made(auth=BEARER)
    handler = webhook_handler(connecting(dispatcher), secret=secret)
    unproved = {**GATEWAY, "headers": {}, "requestContext": {"identity": {"sourceIp": "192.0.2.9"}}}
    assert handler(unproved, None)["statusCode"] == 401
    assert [each.address for each in dispatcher.noted] == ["192.0.2.9"]
    # Whoever calls a function comes from elsewhere: a source without a secret takes nothing.
    bare = webhook_handler(connecting(made()), secret=secret)
    local = {**GATEWAY, "headers": {"Host": "127.0.0.1"}}
    assert bare(local, None)["statusCode"] == 403
    assert handler({}, None)["statusCode"] == 404
    assert handler({**GATEWAY, "body": "!"}, None)["statusCode"] == 400
    assert handler({**GATEWAY, "body": None}, None)["statusCode"] == 202
    assert handler({**FUNCTION_URL, "rawQueryString": "x=1"}, None)["statusCode"] == 422
    twice = {"multiValueQueryStringParameters": {"cursor": ["1", "2"]}}
    assert handler({**GATEWAY, **twice}, None)["statusCode"] == 422
    no_query = {"rawQueryString": None}
    assert handler({**FUNCTION_URL, **no_query}, None)["statusCode"] == 202


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


def test_a_cron_function_of_intervals() -> None:
    hour = 3600
    end = milliseconds(BEGIN) // 1000
    source = cron_source(emits="interval", last_end=end - 2 * hour)
    dispatcher = ScriptedDispatcher([source])
    handler = cron_handler(connecting(dispatcher))
    event = {"time": "2030-01-01T00:00:00Z"}
    assert handler(event, None) == {"sent": {"hourly": 2}}
    assert [(each.partition_key, each.start, each.end) for each in dispatcher.kept] == [
        ("2029-12-31T22:00Z", end - 2 * hour, end - hour),
        ("2029-12-31T23:00Z", end - hour, end),
    ]
    dispatcher.sources_ = [cron_source(emits="interval", last_end=0, catch_up=False)]
    dispatcher.kept.clear()
    assert handler(event, None) == {"sent": {"hourly": 1}}
    assert [each.end for each in dispatcher.kept] == [end]


@pytest.mark.parametrize("event", [{}, {"time": 1}, {"time": "x"}, {"time": "0001-01-01T00:00Z"}])
def test_a_cron_function_that_is_not_called_by_a_rule(event: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="no `time`"):
        cron_handler(connecting(made()))(event, None)
