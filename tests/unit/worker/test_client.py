"""The client finds a dispatcher that answers, and tells answers from failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import httpx
import msgspec
import pytest

from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.protocol.base import TASK_HEADER, Answer
from penstock.protocol.identity import Identity
from penstock.protocol.problem import Problem
from penstock.protocol.work import (
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    CredentialsAnswer,
    CredentialsAsk,
    EndAsk,
    HeartbeatAsk,
    HeldAsk,
    ResultsAnswer,
    TaskResult,
)
from penstock.testing.virtual import World, simulate
from penstock.worker.client import CALL_SECONDS, InternalClient
from tests.unit.worker.over_httpx import OverHttpx

Reply = Callable[[httpx.Request], httpx.Response]
CLAIM = ClaimAsk(operator="a:b")
EMPTY = ClaimAnswer(tasks=[])
BEAT = HeartbeatAsk(tasks=[HeldAsk(task_id=n, attempt=1, lease_token="t") for n in (1, 2)])


class Scripted(httpx.AsyncBaseTransport):
    """Answers by host; a host without a script hangs."""

    def __init__(self, **replies: Reply) -> None:
        self.replies = replies
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        if request.url.host not in self.replies:
            await asyncio.Event().wait()
        return self.replies[request.url.host](request)


def saying(answer: Answer | bytes, status: int = 200) -> Reply:
    body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
    return lambda _: httpx.Response(status, content=body)


def raising(*errors: Exception, then: Reply | None = None) -> Reply:
    left = list(errors)

    def reply(request: httpx.Request) -> httpx.Response:
        if then is not None and not left:
            return then(request)
        raise left.pop(0) if then is not None else left[0]

    return reply


def down() -> Reply:
    return raising(httpx.ConnectError("refused"))


def call(
    transport: Scripted,
    doing: Callable[[InternalClient], Awaitable[object]],
    *,
    urls: tuple[str, ...] = ("http://one",),
    seed: int = 0,
) -> tuple[object, float]:
    """Do something with a client; returns what came of it and how long it took."""

    async def main(world: World) -> tuple[object, float]:
        clock = world.clock()
        client = InternalClient(
            urls,
            Identity("w", "t"),
            clock=clock,
            entropy=world.entropy("client"),
            transport=OverHttpx(transport),
        )
        began = clock.monotonic()
        async with client:
            try:
                found = await doing(client)
            except (DispatcherUnavailable, DispatcherRefused) as error:
                found = error
        return found, clock.monotonic() - began

    return simulate(main, seed=seed)


def test_the_next_dispatcher_is_asked_when_one_does_not_answer() -> None:
    async def doing(client: InternalClient) -> object:
        return [await client.claim(CLAIM) for _ in range(3)]

    for seed in range(10):
        transport = Scripted(one=down(), two=saying(EMPTY))
        found, _ = call(transport, doing, urls=("http://one", "http://two"), seed=seed)
        assert found == [EMPTY] * 3
        # Whoever answered is asked first from then on.
        assert transport.asked.count("one") <= 1
        assert transport.asked[-2:] == ["two", "two"]


def test_a_dispatcher_that_is_back_gets_its_share_again() -> None:
    transport = Scripted(one=down(), two=saying(EMPTY))

    async def main(world: World) -> None:
        clock = world.clock()
        client = InternalClient(
            ["http://one", "http://two"],
            Identity("w", "t"),
            clock=clock,
            entropy=world.entropy("always the first"),
            transport=OverHttpx(transport),
        )
        home = ["one", "two"][client._caller.home]
        other = {"one": "two", "two": "one"}[home]
        transport.replies = {home: down(), other: saying(EMPTY)}
        async with client:
            await client.claim(CLAIM)
            transport.replies[home] = saying(EMPTY)
            await client.claim(CLAIM)
            await clock.sleep(61)
            await client.claim(CLAIM)
        assert transport.asked == [home, other, other, home]

    for seed in range(5):
        transport.asked.clear()
        simulate(main, seed=seed)


def test_when_none_answers_it_says_why_of_each() -> None:
    problem = Problem(type="unavailable", title="The database does not answer.", status=503)
    transport = Scripted(one=down(), two=saying(problem, 503))
    found, took = call(
        transport,
        lambda client: client.claim(CLAIM),
        urls=("http://one", "http://two/", "http://three"),
    )
    assert isinstance(found, DispatcherUnavailable)
    assert "http://one does not answer (refused)." in found.message
    assert "http://two cannot serve now: The database does not answer." in found.message
    assert f"http://three did not answer within {CALL_SECONDS:g} s." in found.message
    assert CALL_SECONDS <= took < CALL_SECONDS + 1


def test_a_heartbeat_waits_no_longer_than_it_is_told() -> None:
    found, took = call(Scripted(), lambda client: client.heartbeat(BEAT, call_seconds=2))
    assert isinstance(found, DispatcherUnavailable)
    assert 2 <= took < 2.1


def test_a_kept_connection_that_was_closed_is_no_failure() -> None:
    lost = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    transport = Scripted(one=raising(lost, then=saying(EMPTY)))
    assert call(transport, lambda client: client.claim(CLAIM))[0] == EMPTY
    transport = Scripted(one=raising(lost, lost, then=saying(EMPTY)))
    found, _ = call(transport, lambda client: client.claim(CLAIM))
    assert isinstance(found, DispatcherUnavailable)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_a_refusal_is_an_answer(status: int) -> None:
    problem = Problem(type="word", title="No.", status=status, detail="Do this.", field="limit")
    found, _ = call(Scripted(one=saying(problem, status)), lambda client: client.claim(CLAIM))
    assert isinstance(found, DispatcherRefused)
    assert (found.status, found.kind) == (status, "word")
    assert (found.message, found.hint) == ("No. (in limit)", "Do this.")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_be_over_soon_is_no_answer(status: int) -> None:
    found, _ = call(Scripted(one=saying(b"<html>", status)), lambda client: client.claim(CLAIM))
    assert isinstance(found, DispatcherUnavailable)
    assert found.message == f"http://one cannot serve now: it answered {status}."


@pytest.mark.parametrize(("body", "status"), [(b"<html>", 200), (b"{}", 200), (b"[1]", 302)])
def test_what_is_not_an_answer_is_not_taken_for_one(body: bytes, status: int) -> None:
    found, _ = call(Scripted(one=saying(body, status)), lambda client: client.claim(CLAIM))
    assert isinstance(found, DispatcherUnavailable)


def test_somebody_else_on_that_port() -> None:
    found, _ = call(Scripted(one=saying(b"nginx", 404)), lambda client: client.heartbeat(BEAT))
    assert isinstance(found, DispatcherRefused)
    assert found.message == (
        "http://one answered 404 Not Found, which is not an answer of a dispatcher."
    )


def test_each_task_of_a_call_has_its_own_answer_whatever_the_status() -> None:
    gone = [TaskResult(task_id=n, status=409, why="stale") for n in (1, 2)]
    mixed = [gone[0], TaskResult(task_id=2, status=200)]
    answers: list[tuple[Answer, int, list[TaskResult]]] = [
        (ResultsAnswer(results=mixed), 207, mixed),
        (ResultsAnswer(results=gone), 409, gone),
        (Problem(type="stale", title="No.", status=409, results=gone), 409, gone),
    ]
    for answer, status, expected in answers:
        found, _ = call(Scripted(one=saying(answer, status)), lambda client: client.heartbeat(BEAT))
        assert isinstance(found, ResultsAnswer)
        assert [(each.task_id, each.status) for each in found.results] == [
            (each.task_id, each.status) for each in expected
        ]


def test_an_answer_about_other_tasks_than_were_asked_for() -> None:
    one = [TaskResult(task_id=1, status=200)]
    found, _ = call(
        Scripted(one=saying(ResultsAnswer(results=one))), lambda client: client.heartbeat(BEAT)
    )
    assert isinstance(found, DispatcherUnavailable)
    problem = Problem(type="malformed", title="No.", status=422)
    end = CompleteAsk(tasks=[EndAsk(task_id=1, attempt=1, lease_token="t")])
    found, _ = call(Scripted(one=saying(problem, 422)), lambda client: client.complete(end))
    assert isinstance(found, DispatcherRefused)


@pytest.mark.parametrize(
    "url", ["", "dispatcher:7071", "ftp://x", "http://", "http://x:port", "\x00"]
)
def test_an_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidInput, match="not the URL of a dispatcher"):
        simulate(lambda world: _made(world, [url]), seed=1)
    with pytest.raises(InvalidInput, match="no URL"):
        simulate(lambda world: _made(world, []), seed=1)


async def _made(world: World, urls: list[str]) -> None:
    InternalClient(urls, Identity("w", "t"), clock=world.clock(), entropy=world.entropy("client"))


def test_a_client_that_is_not_started() -> None:
    async def main(world: World) -> None:
        client = InternalClient(
            ["http://one"], Identity("w", "t"), clock=world.clock(), entropy=world.entropy("client")
        )
        with pytest.raises(InvalidInput, match="not started"):
            await client.sources()
        await client.stop()

    simulate(main, seed=1)


def test_whoever_did_not_answer_is_not_asked_first_again() -> None:
    async def doing(client: InternalClient) -> object:
        for _ in range(2):
            with pytest.raises(DispatcherUnavailable):
                await client.claim(CLAIM)
        return None

    transport = Scripted(one=down(), two=down())
    call(transport, doing, urls=("http://one", "http://two"))
    first, second, third, fourth = transport.asked
    assert (third, fourth) == (second, first)
    assert first != second


def test_credentials_are_asked_for_with_the_token_of_the_attempt() -> None:
    asked: list[httpx.Request] = []
    answer = CredentialsAnswer(
        access_key="ASIA1",
        secret_key="a secret",
        session_token="a token of the session",
        expires_at=datetime(2030, 1, 1, tzinfo=UTC),
        region="eu-west-1",
        read=["s3://lake/in/"],
        write=[],
    )

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return saying(answer)(request)

    less = CredentialsAsk(read=["s3://lake/in/"], write=[])
    whole, _ = call(Scripted(one=reply), lambda client: client.credentials("a.b.c"))
    part, _ = call(Scripted(one=reply), lambda client: client.credentials("a.b.c", less))
    assert whole == part == answer
    assert {each.headers[TASK_HEADER] for each in asked} == {"a.b.c"}
    assert [each.url.path for each in asked] == ["/v1/task/credentials"] * 2
    assert [each.content for each in asked] == [b"", b'{"read":["s3://lake/in/"],"write":[]}']
    assert "a secret" not in repr(answer)


def test_credentials_that_are_refused_say_why() -> None:
    no = Problem(type="too many folders", title="No.", status=409, detail="Ask for fewer.")
    found, _ = call(Scripted(one=saying(no, 409)), lambda client: client.credentials("a.b.c"))
    assert isinstance(found, DispatcherRefused)
    assert (found.status, found.kind) == (409, "too many folders")
    away = Problem(type="unavailable", title="Failed to reach STS.", status=503)
    found, _ = call(Scripted(one=saying(away, 503)), lambda client: client.credentials("a.b.c"))
    assert isinstance(found, DispatcherUnavailable)
    assert "Failed to reach STS" in found.message
