"""A dispatcher that answers from a script, and remembers what it was asked."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec

from penstock.protocol.base import Answer
from penstock.protocol.problem import Problem
from penstock.protocol.steering import (
    BackfillAnswer,
    JobAnswer,
    StatusAnswer,
    TaskAnswer,
    TaskSummary,
)
from tests.unit.worker.over_httpx import OverHttpx

NOW = datetime(2030, 1, 1, tzinfo=UTC)
Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Heard:
    """One request."""

    method: str
    path: str
    query: str
    body: Any
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """One answer as it is sent."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Step = Answer | Reply | Exception


@dataclass
class Scripted:
    """The steps of a path are taken one after the other; the last one stays."""

    steps: dict[str, list[Step]] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)

    def on(self, request: str, *steps: Step) -> Scripted:
        """Answer a request, as in `GET /v1/status`."""
        self.steps[request] = list(steps)
        return self

    @property
    def transport(self) -> OverHttpx:
        return OverHttpx(httpx.ASGITransport(app=self))

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = unquote(scope["raw_path"].decode())
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        said = json.loads(body) if body else None
        query = scope["query_string"].decode()
        self.heard.append(Heard(scope["method"], path, query, said, headers))
        steps = self.steps.get(f"{scope['method']} {path}", [problem(404, title="No such path.")])
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        if isinstance(step, Exception):
            raise step
        reply = step if isinstance(step, Reply) else Reply(msgspec.json.encode(step))
        await send(
            {
                "type": "http.response.start",
                "status": reply.status,
                "headers": [(n.encode(), v.encode()) for n, v in reply.headers.items()],
            }
        )
        await send({"type": "http.response.body", "body": reply.body})


def problem(
    status: int, *, title: str = "No.", headers: Mapping[str, str] | None = None, **fields: Any
) -> Reply:
    """A refusal."""
    said = Problem(**{"type": "no", **fields}, title=title, status=status)
    kind = {"Content-Type": "application/problem+json"}
    return Reply(msgspec.json.encode(said), status, {**kind, **(headers or {})})


def job(name: str = "clean", **fields: Any) -> JobAnswer:
    return JobAnswer(
        **{
            "name": name,
            "activation": "reactive",
            "runtime": "process",
            "operator": f"mine:{name}",
            "priority": "normal",
            "generation": "g",
            "is_building": False,
            "outputs": [],
            "queued": 0,
            "running": 0,
            "dead": 0,
            "oldest_seconds": 0.0,
            "paused": [],
            **fields,
        }
    )


def status(*jobs: JobAnswer, **fields: Any) -> StatusAnswer:
    return StatusAnswer(
        **{
            "dag_version": 1,
            "now": NOW,
            "jobs": list(jobs),
            "events_pending": 0,
            "outbox_pending": 0,
            "outbox_parked": 0,
            "workers": 1,
            "backfills": [],
            **fields,
        }
    )


def backfill(**fields: Any) -> BackfillAnswer:
    return BackfillAnswer(
        **{
            "id": 7,
            "job": "totals",
            "kind": "ranges",
            "state": "running",
            "partitions": 1000,
            "planned": 0,
            "open": 0,
            "dead": 0,
            "concurrency": 100,
            "created_at": NOW,
            **fields,
        }
    )


def summary(**fields: Any) -> TaskSummary:
    return TaskSummary(
        **{
            "id": 42,
            "job": "clean",
            "operator": "mine:clean",
            "generation": "g",
            "status": "queued",
            "priority": "normal",
            "attempt": 0,
            "attempt_limit": 3,
            "partition_key": "p",
            "worker": None,
            "reason": None,
            "created_at": NOW,
            "due_at": NOW,
            "settled_at": None,
            **fields,
        }
    )


def task(**fields: Any) -> TaskAnswer:
    return TaskAnswer(task=summary(**fields), payload={}, attempts=[], published=[])
