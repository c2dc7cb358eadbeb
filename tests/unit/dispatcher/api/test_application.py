"""What becomes of requests, good and bad, before and after a handler sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, RequiredProof
from penstock.dispatcher.api.requests import RequestLimits
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from penstock.protocol.base import WORKER_HEADER, Answer
from penstock.protocol.identity import Identities
from penstock.testing.virtual import simulate
from tests.unit.dispatcher.api.calling import (
    SECRET,
    Caller,
    EchoParams,
    Said,
    application,
    get,
    post,
    text,
    whole,
)


def said(call: Coroutine[Any, Any, Said | None]) -> Said:
    found = asyncio.run(call)
    assert found is not None
    return found


def test_a_body_reaches_its_handler() -> None:
    call = Caller(application(post("/echo")))
    answer = said(call("POST", "/echo", b'{"items": [{"number": 7}]}'))
    assert answer.echo.numbers == [7]


def test_a_body_in_pieces() -> None:
    call = Caller(application(post("/echo")))
    pieces = [whole(b'{"items": [', more=True), whole(b"", more=True), whole(b"]}")]
    assert said(call("POST", "/echo", messages=pieces)).echo.numbers == []


def test_parameters_of_path_and_query() -> None:
    call = Caller(application(get("/of/{name}", params=EchoParams)))
    answer = said(call("GET", "/of/a%20b?limit=3&after=")).echo
    # A server has decoded the path before; the query is ours to decode.
    assert (answer.name, answer.limit) == ("a%20b", 3)
    assert said(call("GET", "/of/x")).echo.limit == 10


def test_a_name_with_slashes() -> None:
    call = Caller(application(get("/of/{name:path}", params=EchoParams), get("/of")))
    assert said(call("GET", "/of/a/b:c")).echo.name == "a/b:c"
    assert said(call("GET", "/of")).echo.name == ""
    assert said(call("GET", "/of/")).status == 404
    single = Caller(application(get("/of/{name}/all", params=EchoParams)))
    assert said(single("GET", "/of/a/b/all")).status == 404


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=1&limit=1", "limit"),
        ("name=other", "name"),
        ("before=null", "before"),
        ("what=1", "what"),
        ("&".join(f"a{n}=1" for n in range(101)), ""),
    ],
)
def test_wrong_parameters(query: str, field: str) -> None:
    call = Caller(application(get("/of/{name}", params=EchoParams)))
    problem = said(call("GET", f"/of/a?{query}")).problem
    assert (problem.status, problem.type) == (422, "malformed")
    assert field in problem.field + problem.title


def test_unknown_paths_and_methods() -> None:
    call = Caller(application(post("/echo"), get("/echo"), get("/of/{name}", params=EchoParams)))
    assert said(call("GET", "/nowhere")).problem.type == "unknown"
    answer = said(call("DELETE", "/echo"))
    assert (answer.problem.status, answer.headers["allow"]) == (405, "POST, GET")
    assert said(call("POST", "/of/a")).headers["allow"] == "GET"


def test_head_is_a_get() -> None:
    call = Caller(application(get("/echo")))
    assert said(call("HEAD", "/echo")).status == 200


def test_a_text() -> None:
    answer = said(Caller(application(get("/text", text)))("GET", "/text"))
    assert (answer.headers["content-type"], answer.body) == ("text/plain", b"text")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"items": "\xff"}', b"[" * 100_000, b'{"a": ' * 100_000, b"nul", b"{}x"],
)
def test_a_body_that_is_not_json(body: bytes) -> None:
    problem = said(Caller(application(post("/echo")))("POST", "/echo", body)).problem
    assert problem.status in (400, 422)
    assert problem.title.count(".") >= 1
    if body not in (b'{"a": ' * 100_000, b"[" * 100_000, b'{"items": "\xff"}'):
        assert (problem.status, problem.type) == (400, "not json")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"items": [{"number": 1}, {"number": 0}]}', "items[1].number"),
        (b'{"items": [{"number": "1"}]}', "items[0].number"),
        (b'{"items": [{}]}', "items[0].number"),
        (b'{"items": {}}', "items"),
        (b'{"itmes": []}', "itmes"),
        (b"[]", ""),
    ],
)
def test_a_body_of_another_form_names_the_field(body: bytes, field: str) -> None:
    problem = said(Caller(application(post("/echo")))("POST", "/echo", body)).problem
    assert (problem.status, problem.type, problem.field) == (422, "malformed", field)


def test_no_body_where_none_is_needed() -> None:
    call = Caller(application(post("/echo", may_omit_body=True)))
    assert said(call("POST", "/echo")).echo.numbers == []


def test_a_body_that_is_too_large() -> None:
    call = Caller(application(post("/echo"), limits=RequestLimits(body_bytes_max=10)))
    declared = said(call("POST", "/echo", headers=[("content-length", "81")], messages=[]))
    assert declared.problem.status == 413
    assert declared.headers["connection"] == "close"
    # Heard to the end, so that the caller reads the answer; but not for ever.
    pieces = [*[whole(b"1234567", more=True)] * 3, whole(b"1")]
    assert said(call("POST", "/echo", messages=pieces)).problem.status == 413
    endless = [whole(b"1234567", more=True)] * 12
    assert said(call("POST", "/echo", messages=endless)).problem.status == 413
    assert said(call("POST", "/echo", b"{        }")).status == 200
    absurd = [("content-length", "9" * 5000)]
    assert said(call("POST", "/echo", headers=absurd, messages=[])).problem.status == 413


def test_a_body_that_never_comes() -> None:
    app = application(post("/echo"), limits=RequestLimits(body_seconds_max=3))

    async def main() -> None:
        async def never() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        sent = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/echo", "query_string": b""}
        before = asyncio.get_running_loop().time()
        await app({**scope, "headers": []}, never, send)
        assert sent[0]["status"] == 408
        assert asyncio.get_running_loop().time() - before == pytest.approx(3)

    simulate(main(), seed=1)


@pytest.mark.parametrize(
    "limits",
    [
        RequestLimits(arriving_max=2),
        RequestLimits(arriving_bytes_max=11),
        RequestLimits(requests_max=0),
    ],
)
def test_bodies_that_do_not_end_give_way_to_those_that_do(limits: RequestLimits) -> None:
    app = application(post("/echo"), limits=replace(limits, anonymous_requests_max=1))

    async def main() -> None:
        begun = asyncio.get_running_loop().time()

        async def slow() -> float:
            coming = iter([whole(b"12345", more=True)])
            sent: list[Any] = []

            async def receive() -> Any:
                if (message := next(coming, None)) is not None:
                    return message
                return await asyncio.Event().wait()

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": "/echo", "query_string": b""}
            await app({**scope, "headers": []}, receive, send)
            assert sent[0]["status"] == 408
            return asyncio.get_running_loop().time() - begun

        async with asyncio.TaskGroup() as group:
            held = []
            for _ in range(2):
                held.append(group.create_task(slow()))
                await asyncio.wait(held, timeout=1)
            pieces = [whole(b"{     ", more=True), whole(b"}")]
            answer = await Caller(app)("POST", "/echo", messages=pieces)
            assert answer is not None
            assert answer.status == 200
        is_bounded = limits != RequestLimits(requests_max=0)
        assert held[0].result() == pytest.approx(2 if is_bounded else 10)
        assert held[1].result() == pytest.approx(11)

    simulate(main(), seed=1)


def test_a_caller_that_leaves_is_not_answered() -> None:
    call = Caller(application(post("/echo")))
    left = [whole(b"{", more=True), {"type": "http.disconnect"}]
    assert asyncio.run(call("POST", "/echo", messages=left)) is None


def failing(error: Exception) -> ApiEndpoint:
    async def handler(_parts: ApiContext, _: ApiCall) -> Answer:
        raise error

    return get("/fails", handler)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("It is wrong."), 422, "malformed"),
        (DatabaseUnavailable("It is away."), 503, "unavailable"),
        (TimeoutError(), 503, "slow"),
    ],
)
def test_errors_of_ours_are_problems(error: Exception, status: int, kind: str) -> None:
    answer = said(Caller(application(failing(error)))("GET", "/fails"))
    assert (answer.problem.status, answer.problem.type) == (status, kind)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_mistake_is_logged_and_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    answer = said(Caller(application(failing(KeyError("the secret"))))("GET", "/fails"))
    assert (answer.problem.status, answer.problem.type) == (500, "mistake")
    assert b"secret" not in answer.body
    assert "the secret" in caplog.text


def test_a_handler_that_takes_too_long_is_cancelled() -> None:
    ended = []

    async def slow(_parts: ApiContext, _: ApiCall) -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.get_running_loop().time())
        raise AssertionError

    app = application(
        get("/slow", slow),
        get("/slower", slow, request_seconds_max=60),
        limits=RequestLimits(request_seconds_max=5),
    )

    async def main() -> None:
        call = Caller(app)
        began = asyncio.get_running_loop().time()
        first = await call("GET", "/slow")
        second = await call("GET", "/slower")
        assert first is not None
        assert second is not None
        assert first.problem.type == second.problem.type == "slow"
        assert first.headers["retry-after"] == "1"
        assert [each - began for each in ended] == [pytest.approx(5), pytest.approx(65)]

    simulate(main(), seed=1)


def test_more_requests_than_there_is_room_for() -> None:
    gate = asyncio.Event()

    async def waits(_parts: ApiContext, _: ApiCall) -> Answer:
        await gate.wait()
        raise InvalidInput("It is over.")

    app = application(
        get("/waits", waits),
        get("/known", proof=RequiredProof.WORKER),
        get("/probe", is_probe=True),
        limits=RequestLimits(requests_max=1, anonymous_requests_max=2),
    )
    token = Identities(SECRET).identity("me").token
    identity = [(WORKER_HEADER, "me"), ("Authorization", f"Bearer {token}")]

    async def main() -> None:
        call = Caller(app)
        async with asyncio.TaskGroup() as group:
            held = [group.create_task(call("GET", "/waits")) for _ in range(2)]
            await asyncio.wait(held, timeout=1)
            third, probe = await call("GET", "/waits"), await call("GET", "/probe")
            known = await call("GET", "/known", headers=identity)
            gate.set()
        assert third is not None
        assert (third.problem.status, third.problem.type) == (503, "busy")
        assert probe is not None
        assert probe.status == 200
        # Whoever has shown who it is has places of its own.
        assert known is not None
        assert known.status == 200
        again = await call("GET", "/waits")
        assert again is not None
        assert again.status == 422

    simulate(main(), seed=1)


def test_who_a_worker_says_to_be() -> None:
    call = Caller(application(get("/who", proof=RequiredProof.WORKER)))
    token = Identities(SECRET).identity("me").token
    good = [(WORKER_HEADER, "me"), ("Authorization", f"Bearer {token}")]
    assert said(call("GET", "/who", headers=good)).echo.worker == "me"
    missing = said(call("GET", "/who", headers=good[:1]))
    assert (missing.problem.status, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert said(call("GET", "/who", headers=good[1:])).problem.status == 401
    assert said(call("GET", "/who", headers=[good[0], ("Authorization", token)])).status == 401
    wrong = [(WORKER_HEADER, "you"), good[1]]
    assert said(call("GET", "/who", headers=wrong)).problem.type == "forbidden"


def test_the_token_of_the_api() -> None:
    endpoints = get("/open"), get("/closed", proof=RequiredProof.API_TOKEN)
    call = Caller(application(*endpoints, api_token="xyz"))
    assert said(call("GET", "/open")).status == 200
    assert said(call("GET", "/closed")).problem.status == 401
    for given, status in (("xyz", 200), ("xy", 401), ("xyzz", 401), ("\N{SNOWMAN}", 401)):
        headers = [("Authorization", f"bearer {given}")]
        assert said(call("GET", "/closed", headers=headers)).status == status
    free = Caller(application(*endpoints))
    assert said(free("GET", "/closed")).status == 200


def test_every_request_but_probes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.dispatcher.access")
    call = Caller(application(get("/echo"), get("/probe", is_probe=True)))
    said(call("GET", "/echo"))
    said(call("GET", "/no\nwhere"))
    said(call("GET", "/probe"))
    first, second = caplog.records
    noted = vars(first)["request"]
    assert (noted["listener"], noted["method"], noted["path"]) == ("test", "GET", "/echo")
    assert (noted["status"], noted["client"]) == (200, "1.2.3.4")
    assert noted["took_ms"] >= 0
    assert "\n" not in second.getMessage()
    assert vars(second)["request"]["status"] == 404


def test_other_protocols_are_a_mistake() -> None:
    app = application(get("/echo"))

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    with pytest.raises(ValueError, match="websocket"):
        asyncio.run(app({"type": "websocket"}, nothing, nothing))


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:7070", 200),
        ("https://evil.example", 403),
        ("http://127.0.0.1:8080", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_a_page_of_another_site_cannot_steer_a_dispatcher_without_a_token(
    origin: str | None, status: int
) -> None:
    call = Caller(application(post("/echo", proof=RequiredProof.API_TOKEN)))
    headers = [("host", "127.0.0.1:7070"), ("content-type", "text/plain")]
    if origin is not None:
        headers.append(("origin", origin))
    assert said(call("POST", "/echo", b"{}", headers=headers)).status == status
