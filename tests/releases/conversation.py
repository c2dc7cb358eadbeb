"""What a worker, a source and a function say to a dispatcher in a release, and what they are told.

`spoken` has the real clients talk to a real dispatcher's internal side over a real Postgres, all of
which are of this release, and writes down what goes over the wire. `said_again` says what was
written down to a dispatcher of today, with the names that this one gives. Both begin with the same
rows, so numbers of tasks are the same.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from penstock.dispatcher.api.routes import internal_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.capabilities.credentials import CredentialMinter, MintedCredentials
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import DispatcherRefused
from penstock.protocol.base import PROTOCOL_HEADER, TASK_HEADER
from penstock.protocol.events import EventAsk, EventsAsk, TaskEventsAsk
from penstock.protocol.work import (
    Assignment,
    ClaimAsk,
    ColumnAsk,
    CompleteAsk,
    CredentialsAsk,
    EndAsk,
    FactsAsk,
    FailureAsk,
    HeartbeatAsk,
    HeldAsk,
    HelloAsk,
    OutputAsk,
)
from penstock.runtimes.deployed import FunctionDeployment, task_handler
from penstock.tokens.claims import Claims
from penstock.worker.client import InternalClient
from tests.integration.dispatcher.api.stage import Stage, place
from tests.releases.recorded import Exchange
from tests.unit.worker.over_httpx import OverHttpx

ROOT: Final = "s3://bucket/lake"
DAG: Final = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  hourly: {activation: source, source: {kind: cron, cron: "0 * * * *"}, outputs: [hours]}
  hook: {activation: source, source: {kind: webhook, path: /told}, outputs: [told]}
  stream:
    activation: source
    source: {kind: always_on}
    runtime: process
    operator: a:stream
    outputs: [ticks]
  clean:
    runtime: process
    operator: a:clean
    config: {limit: 3}
    resources: {memory: 1GB}
    inputs: [raw]
    outputs: [tidy]
    timeout: 1h
    secrets: {password: "file:password"}
  report: {runtime: process, operator: "a:report", inputs: [tidy], outputs: [daily]}
  log:
    runtime: process
    operator: a:log
    inputs: [raw]
    outputs: [lines]
    update: append
  far:
    runtime: lambda
    operator: far-away
    inputs: [raw]
    outputs: [distant]
    heartbeat_timeout: 1s
"""
PARTITIONS: Final = ("p1", "p2", "p3")
_HIDDEN: Final = "hidden"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Mint(CredentialMinter):
    """Mints for whoever has a token, so that it is seen what that looks like."""

    async def mint(
        self,
        claims: Claims,
        *,
        read: Sequence[str] | None = None,
        write: Sequence[str] | None = None,
    ) -> MintedCredentials:
        granted = claims.grants
        return MintedCredentials(
            access_key="AKIAEXAMPLE",
            secret_key="secret",
            session_token="session",
            expires_at=datetime(2030, 1, 1, 0, 15, tzinfo=UTC),
            region="eu-central-1",
            endpoint="",
            read=tuple(map(str, granted.read_prefixes if read is None else read)),
            write=tuple(map(str, granted.write_prefixes if write is None else write)),
        )


class Listening:
    """An application that writes down what it is asked and what it answers."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self.who = "worker"
        self.heard: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked, told, status = bytearray(), bytearray(), 0

        async def hear() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def tell(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            told.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, hear, tell)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = ("authorization", "content-type", TASK_HEADER.lower(), "x-penstock-worker")
        self.heard.append(
            Exchange(
                who=self.who,
                method=scope["method"],
                path=scope["path"],
                protocol=headers.get(PROTOCOL_HEADER.lower()),
                headers=sorted(name for name in headers if name in kept),
                request=_without_proof(json.loads(bytes(asked))) if asked else None,
                status=status,
                answer=_without_proof(json.loads(bytes(told))),
            )
        )


async def prepare(stage: Stage) -> None:
    """Have tasks of every kind."""
    answer = await stage.apply(DAG)
    assert answer.status_code == 200, answer.text
    await stage.trigger(*PARTITIONS)


async def spoken(stage: Stage) -> Sequence[Exchange]:
    """Have all of them talk; returns what went over the wire."""
    await prepare(stage)
    listening = Listening(internal_app(stage.parts))
    client = InternalClient(
        ["http://dispatcher"],
        stage.parts.identities.identity("worker-1"),
        clock=SystemClock(),
        entropy=seeded_entropy(1),
        transport=OverHttpx(httpx.ASGITransport(listening)),
    )
    async with client:
        await _work(client)
        listening.who = "source"
        await client.sources()
        events = [
            EventAsk(event_id="e1", dataset="hours", cursor=1_767_225_600_000),
            EventAsk(event_id="e2", dataset="told", partition_key="p", payload={"id": 7}),
            EventAsk(event_id="e3", dataset="raw", partition_key="p", start=0, end=10),
            EventAsk(event_id="e4", dataset="nowhere", cursor=1),
        ]
        await client.events(EventsAsk(events=events))
    listening.who = "function"
    await _function(stage, listening)
    return listening.heard


async def _work(client: InternalClient) -> None:
    """Everything that a worker says, with what it is refused."""
    await client.hello(HelloAsk(runtimes=["process"], concurrency=4, about={"host": "h"}))
    (first, second, third) = (
        await client.claim(ClaimAsk(operator="a:clean", limit=5, in_batches=True))
    ).tasks
    (line,) = (await client.claim(ClaimAsk(operator="a:log"))).tasks
    await client.claim(ClaimAsk(operator="a:report"))
    said = {"rows": 3, "part": "two"}
    held = [HeldAsk(**_fence(first), token=first.token, progress=said)]
    held.append(HeldAsk(**{**_fence(second), "lease_token": "another"}, token=second.token))
    await client.heartbeat(HeartbeatAsk(tasks=held))
    event = EventAsk(event_id="t1", dataset="tidy", partition_key="p1")
    with suppress(DispatcherRefused):
        await client.task_events(TaskEventsAsk(**_fence(first), events=[event]), token=first.token)
    for ask in (None, CredentialsAsk(read=[], write=[place(first, "tidy")])):
        with suppress(DispatcherRefused):
            await client.credentials(first.token, ask)
    columns = [ColumnAsk(name="id", type="bigint", is_nullable=False)]
    facts = FactsAsk(manifest="0" * 64, files=1, rows=3, bytes=100, columns=columns)
    made = EndAsk(
        **_fence(first),
        token=first.token,
        outputs=[_output(first, "tidy", facts=facts)],
        log="/logs/1-1.log",
        metrics={"seconds": 1.5},
    )
    failed = EndAsk(
        **_fence(second),
        token=second.token,
        failure=FailureAsk(reason="It is broken.", is_retried=False),
    )
    appended = EndAsk(
        **_fence(line), token=line.token, outputs=[_output(line, "lines", append_key="k")]
    )
    await client.complete(CompleteAsk(tasks=[made, failed, appended]))
    stale = {**_fence(third), "lease_token": "another"}
    await client.complete(CompleteAsk(tasks=[EndAsk(**stale, token=third.token)]))
    # What came of it can be claimed.
    await client.claim(ClaimAsk(operator="a:report", limit=2))


async def _function(stage: Stage, listening: Listening) -> None:
    """The same by a function that is invoked twice for one task."""
    (task,) = await stage.world.rows(
        "SELECT task.id FROM task JOIN job ON job.id = job_id WHERE job.name = 'far'"
        " ORDER BY task.id LIMIT 1"
    )
    token = await stage.parts.issuer.invocation(task["id"], 1)
    async with HttpServer([HttpListener("internal", listening, "127.0.0.1", 0)]) as serving:
        event = {
            "dispatcher": serving.url("internal"),
            "task_id": task["id"],
            "claim_token": token,
        }
        pausing = threading.Event()

        def work(*asked: Any) -> None:
            del asked
            # Until it was told of once, in a third of the time that it may be silent.
            for _ in range(200):
                if any(each.path == "/v1/task/heartbeat" for each in listening.heard[before:]):
                    break
                pausing.wait(0.05)

        before = len(listening.heard)
        handler = task_handler(work, FunctionDeployment(entropy=seeded_entropy(1)))
        for _ in range(2):
            await asyncio.to_thread(handler, event, None)


async def said_again(stage: Stage, every: Sequence[Exchange]) -> list[tuple[Exchange, int, Any]]:
    """What today's dispatcher answers to a conversation, with the status, one by one."""
    await prepare(stage)
    names: dict[str, str] = {}
    tokens: dict[tuple[int, int], str] = {}
    found: list[tuple[Exchange, int, Any]] = []
    for each in every:
        text = json.dumps(each.request)
        for before, now in names.items():
            text = text.replace(before, now)
        body = None if each.request is None else _with_proof(json.loads(text), tokens)
        headers = await _headers(stage, each, body, tokens)
        answer = await stage.internal.request(each.method, each.path, json=body, headers=headers)
        told = answer.json()
        found.append((each, answer.status_code, told))
        _learn(names, tokens, each, told)
    return found


async def _headers(
    stage: Stage, each: Exchange, body: Any, tokens: dict[tuple[int, int], str]
) -> dict[str, str]:
    headers = {} if each.protocol is None else {PROTOCOL_HEADER: each.protocol}
    if "x-penstock-worker" in each.headers:
        headers |= stage.identity("worker-1")
    if TASK_HEADER.lower() in each.headers:
        if each.path == "/internal/task-claim":
            headers[TASK_HEADER] = await stage.parts.issuer.invocation(body["task_id"], 1)
        else:
            # Credentials are asked for by the token alone: that of the first attempt.
            is_named = body is not None and "task_id" in body
            headers[TASK_HEADER] = (
                tokens[body["task_id"], body["attempt"]] if is_named else tokens[min(tokens)]
            )
    return headers


def _learn(
    names: dict[str, str], tokens: dict[tuple[int, int], str], each: Exchange, told: Any
) -> None:
    """What was called otherwise then."""
    before = each.answer.get("tasks") or []
    for old, new in zip(before, told.get("tasks") or [], strict=True):
        tokens[new["task_id"], new["attempt"]] = new["token"]
        pairs = [(old[name], new[name]) for name in ("lease_token", "folder", "generation")]
        uuids = old["definition"]["datasets"]
        pairs += [(uuid, new["definition"]["datasets"][name]) for name, uuid in uuids.items()]
        names.update(pairs)


def _fence(task: Assignment) -> dict[str, Any]:
    return {"task_id": task.task_id, "attempt": task.attempt, "lease_token": task.lease_token}


def _output(task: Assignment, name: str, **fields: Any) -> OutputAsk:
    return OutputAsk(
        dataset=task.definition["datasets"][name],
        location=place(task, name),
        partition_key=task.payload["partition_key"],
        **fields,
    )


def _without_proof(said: Any) -> Any:
    """The same without capability tokens, which say nothing here and are long."""
    if isinstance(said, dict):
        return {
            name: _HIDDEN if name == "token" and value else _without_proof(value)
            for name, value in said.items()
        }
    return [_without_proof(each) for each in said] if isinstance(said, list) else said


def _with_proof(said: Any, tokens: dict[tuple[int, int], str]) -> Any:
    if isinstance(said, list):
        return [_with_proof(each, tokens) for each in said]
    if not isinstance(said, dict):
        return said
    found = {name: _with_proof(value, tokens) for name, value in said.items()}
    if found.get("token") == _HIDDEN:
        found["token"] = tokens[found["task_id"], found["attempt"]]
    return found
