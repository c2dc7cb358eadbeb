"""What was said between releases: workers, sources and functions of then and a dispatcher of today,
and the other way round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from penstock.dispatcher.api.application import unserved
from penstock.dispatcher.api.routes import INTERNAL
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DispatcherRefused
from penstock.protocol.base import PROTOCOL, PROTOCOL_HEADER, PROTOCOL_MIN, Answer
from penstock.protocol.events import EventsAsk, TaskEventsAsk
from penstock.protocol.identity import Identity
from penstock.protocol.work import (
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    CredentialsAsk,
    HeartbeatAsk,
    HelloAsk,
)
from penstock.runtimes import deployed
from penstock.worker import assignment_codec
from penstock.worker.client import InternalClient
from tests.integration.dispatcher.api.stage import refused, staged
from tests.integration.dispatcher.world import Worlds
from tests.releases.conversation import ROOT, Mint, said_again
from tests.releases.recorded import Exchange, exchanges, releases
from tests.unit.worker.over_httpx import OverHttpx

Kind = TypeVar("Kind")
NEWER = {
    *("/internal/wait", "/internal/webhook-refusals", "/v1/task/buffer-publish"),
    *("/internal/query/begin", "/internal/query/end", "/v1/task/query"),
}
"""Paths that no release has said anything at yet."""
every_release = pytest.mark.parametrize("release", releases())


def test_a_release_was_recorded_with_all_that_there_is_to_say() -> None:
    """What is recorded says nothing of a path that nobody has asked for."""
    asked = {(each.who, each.path) for each in exchanges(releases()[0])}
    spoken = {path for _, path in asked}
    # People and probes have no part in this.
    assert (
        spoken
        == {
            each.path
            for each in INTERNAL
            if each.path.startswith(("/internal/", "/v1/task/")) and "jwks" not in each.path
        }
        - NEWER
    )
    assert {who for who, _ in asked} == {"worker", "source", "function"}
    assert ("function", "/v1/task/heartbeat") in asked


@every_release
def test_a_dispatcher_of_today_serves_what_they_say(release: str, worlds: Worlds) -> None:
    every = exchanges(release)

    async def main() -> None:
        async with worlds.world() as world, staged(world, root=ROOT, minter=Mint()) as stage:
            for each, status, told in await said_again(stage, every):
                where = f"{each.who} {each.path}: {told}"
                assert status == each.status, where
                assert _lacks(each.answer, told) == [], where

    asyncio.run(main())


def _lacks(before: Any, now: Any, where: str = "") -> list[str]:
    """The fields that were in an answer then, and are not now."""
    if isinstance(before, dict):
        lost = [f"{where}.{name}" for name in before if name not in now]
        # What is said of the job is the DAG's, and what is there of it depends on its defaults.
        kept = [name for name in before if name in now and name != "definition"]
        return lost + [each for name in kept for each in _lacks(before[name], now[name], name)]
    if isinstance(before, list):
        pairs = zip(before, now, strict=True)
        return [each for old, new in pairs for each in _lacks(old, new, where)]
    return [] if before is None or now is not None else [where]


@every_release
def test_a_worker_of_today_reads_what_they_were_told(release: str) -> None:
    for each in exchanges(release):
        found = asyncio.run(_asked(each))
        assert isinstance(found, DispatcherRefused) == (_is_refused(each)), each
        if isinstance(found, ClaimAnswer):
            for task in found.tasks:
                work = assignment_codec.work_of(task, logs=None, grace_seconds=1)
                assert {place.dataset for place in work.outputs.values()} <= set(
                    task.definition["datasets"]
                )
        if each.who == "function" and "tasks" in each.answer:
            for said in each.answer["tasks"]:
                assert deployed.work_of(said).task_id == said["task_id"]


@every_release
def test_what_a_later_dispatcher_says_besides_is_passed_over(release: str) -> None:
    for each in exchanges(release):
        more = replace(each, answer=_with_news(each.answer))
        found, again = asyncio.run(_asked(each)), asyncio.run(_asked(more))
        if isinstance(found, DispatcherRefused):
            assert str(again) == str(found)
            continue
        assert again == found
        if each.who == "function" and "tasks" in each.answer:
            pairs = zip(each.answer["tasks"], more.answer["tasks"], strict=True)
            for said, later in pairs:
                assert deployed.work_of(later) == deployed.work_of(said)


def _with_news(said: Any) -> Any:
    """The same with a field more wherever there are some, but for what the user's own are."""
    if isinstance(said, list):
        return [_with_news(each) for each in said]
    if not isinstance(said, dict):
        return said
    free = ("definition", "payload", "datasets", "inputs")
    known = {name: each if name in free else _with_news(each) for name, each in said.items()}
    if "inputs" in known:
        known["inputs"] = {name: _with_news(each) for name, each in said["inputs"].items()}
    return {"news_of_a_later_release": {"n": 1}, **known}


def _is_refused(each: Exchange) -> bool:
    """Whether a call is refused as such, and not just each of its tasks."""
    return each.status >= 400 and not each.answer.get("results")


async def _asked(each: Exchange) -> Answer | DispatcherRefused:
    """What a client of today makes of an answer of then to the same question."""

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(each.status, json=each.answer)

    client = InternalClient(
        ["http://then"],
        Identity("worker-1", "token"),
        clock=SystemClock(),
        entropy=seeded_entropy(1),
        transport=OverHttpx(httpx.MockTransport(answer)),
    )
    body = b"" if each.request is None else json.dumps(each.request).encode()
    try:
        async with client:
            return await CALLS[each.path](client, body)
    except DispatcherRefused as error:
        return error


def _read(body: bytes, kind: type[Kind]) -> Kind:
    return msgspec.json.decode(body, type=kind)


CALLS: Mapping[str, Callable[[InternalClient, bytes], Awaitable[Answer]]] = {
    "/internal/hello": lambda client, body: client.hello(_read(body, HelloAsk)),
    "/internal/task-claim": lambda client, body: client.claim(_read(body, ClaimAsk)),
    "/internal/events": lambda client, body: client.events(_read(body, EventsAsk)),
    "/internal/sources": lambda client, _: client.sources(),
    "/v1/task/heartbeat": lambda client, body: client.heartbeat(_read(body, HeartbeatAsk)),
    "/v1/task/complete": lambda client, body: client.complete(_read(body, CompleteAsk)),
    "/v1/task/events": lambda client, body: client.task_events(_read(body, TaskEventsAsk)),
    "/v1/task/credentials": lambda client, body: client.credentials(
        "a token", _read(body, CredentialsAsk) if body else None
    ),
}


def test_the_protocol_of_this_release_is_one_that_it_serves() -> None:
    assert PROTOCOL_MIN <= PROTOCOL


Headers = Sequence[tuple[bytes, bytes]]


def _said(number: str) -> Headers:
    return [(b"host", b"x"), (PROTOCOL_HEADER.lower().encode(), number.encode())]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("1", "The caller runs an earlier release of Penstock than this dispatcher supports"),
        ("5", "The caller runs a later release of Penstock than this dispatcher"),
    ],
)
def test_who_cannot_be_served_is_told_in_one_sentence_what_to_do(said: str, words: str) -> None:
    problem = unserved(_said(said), least=2, most=4)
    assert problem is not None
    assert (problem.status, problem.type) == (426, "release")
    assert problem.title == f"{words} (protocol {said}; it supports 2 to 4)."
    assert "release" in problem.detail


def test_who_can_be_served_is_and_so_is_who_does_not_say() -> None:
    for number in ("2", "3", "4"):
        assert unserved(_said(number), least=2, most=4) is None
    assert unserved([(b"host", b"x")], least=2, most=4) is None
    for wrong in ("", "0", "x", "-1", "1" * 20):
        problem = unserved(_said(wrong), least=2, most=4)
        assert problem is not None
        assert problem.status == 400


def test_both_listeners_judge_the_release_before_anything_else(worlds: Worlds) -> None:
    async def main() -> None:
        async with worlds.world() as world, staged(world) as stage:
            later = {PROTOCOL_HEADER: str(PROTOCOL + 1)}
            # Neither proved nor of a shape that anybody knows.
            asked = {"a field of a later release": 1}
            for answer in (
                await stage.internal.post("/internal/task-claim", json=asked, headers=later),
                await stage.internal.post("/v1/task/complete", json=asked, headers=later),
                await stage.public.post("/v1/trigger", json=asked, headers=later),
            ):
                assert refused(answer, 426).type == "release"
                assert answer.headers["upgrade"] == f"penstock/{PROTOCOL}"
            # Probes and people who ask by hand say nothing of it.
            assert (await stage.internal.get("/healthz")).status_code == 200

    asyncio.run(main())


class Fleet:
    """Dispatchers by their names, each with what it answers."""

    def __init__(self, **answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        said = self.answers[request.url.host]
        return httpx.Response(said.get("status", 200), json=said)

    def client(self) -> InternalClient:
        return InternalClient(
            [f"http://{name}" for name in self.answers],
            Identity("worker-1", "token"),
            clock=SystemClock(),
            entropy=seeded_entropy(1),
            transport=OverHttpx(httpx.MockTransport(self)),
        )


OLD: Mapping[str, Any] = {
    "type": "release",
    "title": "Who calls is of a later release.",
    "status": 426,
}
NEW: Mapping[str, Any] = {"operators": [], "now": "2030-01-01T00:00:00Z"}


def test_a_worker_passes_over_a_dispatcher_of_an_earlier_release() -> None:
    async def main() -> None:
        for answers in ({"a": OLD, "b": NEW}, {"a": NEW, "b": OLD}):
            fleet = Fleet(**answers)
            async with fleet.client() as client:
                for _ in range(2):
                    assert (await client.hello(HelloAsk(runtimes=[]))).operators == []
            assert len(fleet.asked) <= 3

    asyncio.run(main())


def test_a_worker_that_nobody_serves_is_told_why() -> None:
    async def main() -> None:
        away = {"type": "busy", "title": "Not now.", "status": 503}
        async with Fleet(a=away, b=OLD).client() as client:
            with pytest.raises(DispatcherRefused) as caught:
                await client.hello(HelloAsk(runtimes=[]))
        assert (caught.value.status, caught.value.kind) == (426, "release")
        assert caught.value.message == "Who calls is of a later release."

    asyncio.run(main())
