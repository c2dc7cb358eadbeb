"""A dispatcher's API over a world: both applications, with real parts, called without sockets.

What other parts of the dispatcher do in the background is done by the test: `route` makes tasks of
events. `kicks` counts how often the loops were asked to run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.requests import RequestLimits
from penstock.dispatcher.api.routes import internal_app, public_app
from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.capabilities.audit import AuditLog
from penstock.dispatcher.capabilities.tokens import TokenIssuer
from penstock.dispatcher.deployment import Deployer
from penstock.dispatcher.metrics import MetricsReader
from penstock.dispatcher.outbox import Outbox
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.views.status import StatusViews
from penstock.kernel.entropy import seeded_entropy
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER
from penstock.protocol.identity import Identities
from penstock.protocol.problem import Problem
from penstock.protocol.work import Assignment, ClaimAnswer
from penstock.runtimes.base import AttemptPaths
from tests.integration.dispatcher.api.forging import forged, publish_key
from tests.integration.dispatcher.api.signing import StageKeys
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import World, Worlds

SECRET = "a secret of the tests"
ROOT = "file:///lake"
Body = TypeVar("Body")


@dataclass
class Stage:
    """Both sides of an API, and the world behind it."""

    world: World
    parts: ApiContext
    internal: httpx.AsyncClient
    public: httpx.AsyncClient
    kicks: list[None] = field(default_factory=list)

    def identity(self, name: str = "worker") -> dict[str, str]:
        """The headers of a worker."""
        proof = self.parts.identities.identity(name)
        return {WORKER_HEADER: proof.name, "Authorization": f"Bearer {proof.token}"}

    async def route(self) -> int:
        """Make tasks of all events; how many."""
        return (await self.parts.routing.route()).tasks

    async def apply(self, text: str | None = None, **fields: Any) -> httpx.Response:
        return await self.public.post("/v1/dag", json={"source": text or chain(), **fields})

    async def trigger(self, *keys: str) -> None:
        """Have tasks for these partitions of the source."""
        for key in keys:
            asked = {"job": "feed", "partition_key": key, "event_id": key}
            ok(await self.public.post("/v1/trigger", json=asked))
        await self.route()

    async def claim(self, operator: str = "a:clean", **fields: Any) -> list[Assignment]:
        answer = await self.internal.post(
            "/internal/task-claim",
            json={"operator": operator, **fields},
            headers=self.identity(),
        )
        return read(answer, ClaimAnswer).tasks

    async def complete(self, *ends: dict[str, Any]) -> httpx.Response:
        """As a worker does, which says who it is with every call."""
        return await self.internal.post(
            "/v1/task/complete", json={"tasks": ends}, headers=self.identity()
        )

    async def beat(self, *tasks: dict[str, Any]) -> httpx.Response:
        return await self.internal.post("/v1/task/heartbeat", json={"tasks": tasks})

    async def task_events(self, said: Mapping[str, Any], *events: Any) -> httpx.Response:
        """Events of an attempt, whose proof is as `held` has it."""
        ask = {name: value for name, value in said.items() if name != "token"}
        headers = {TASK_HEADER: said["token"]} if "token" in said else {}
        return await self.internal.post(
            "/v1/task/events", json={**ask, "events": events}, headers=headers
        )

    async def token(self, task_id: int, attempt: int, **fields: Any) -> str:
        """A token that nobody was given, as another dispatcher would sign it."""
        await publish_key(self.world)
        return await forged(self.world, task_id, attempt, **fields)


def held(task: Assignment, **fields: Any) -> dict[str, Any]:
    """The proof of an attempt, and what else is said with it."""
    fence = {"task_id": task.task_id, "attempt": task.attempt, "lease_token": task.lease_token}
    return {**fence, "token": task.token, **fields}


def place(task: Assignment, name: str = "tidy") -> str:
    """Where an attempt may write this output."""
    return AttemptPaths(task.root).output(
        name, generation=task.generation, payload=task.payload, attempt_id=task.folder
    )


def output(task: Assignment, name: str = "tidy", **fields: Any) -> dict[str, Any]:
    """An output of a task for its own partition."""
    said = {"dataset": task.definition["datasets"][name], "location": place(task, name)}
    return {**said, "partition_key": task.payload.get("partition_key"), **fields}


def ok(answer: httpx.Response) -> dict[str, Any]:
    """The body of a success."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    return body


def read(answer: httpx.Response, kind: type[Body]) -> Body:
    """The body of a success, as a client reads it."""
    ok(answer)
    return msgspec.json.decode(answer.content, type=kind)


def refused(answer: httpx.Response, status: int) -> Problem:
    """The problem that an answer is."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = msgspec.json.decode(answer.content, type=Problem)
    assert problem.status == status
    assert problem.type
    assert problem.title.endswith((".", "?")), problem.title
    return problem


def parts_of(world: World, *, kick: Callable[[], None] = lambda: None, **fields: Any) -> ApiContext:
    """The parts of a dispatcher over a world."""
    database = world.database
    keys = StageKeys(database)
    real: dict[str, Any] = {
        "database": database,
        "tasks": Tasks(database, route=route_events),
        "routing": Router(database),
        "deployment": Deployer(database),
        "backfills": Backfills(database),
        "pressures": Backpressure(database),
        "metrics": MetricsReader(database),
        "outbox": Outbox(database),
        "views": StatusViews(database),
        "identities": Identities(SECRET),
        "root": ROOT,
        "keys": keys,
        "issuer": TokenIssuer(database, keys, root=fields.get("root", ROOT), refresh_seconds_min=0),
        "audit": AuditLog(database),
        "kick": kick,
        "entropy": seeded_entropy(1),
    }
    return ApiContext(**{**real, **fields})


@contextlib.asynccontextmanager
async def staged(
    world: World, *, limits: RequestLimits | None = None, **fields: Any
) -> AsyncIterator[Stage]:
    kicks: list[None] = []
    parts = parts_of(world, kick=lambda: kicks.append(None), **fields)
    await parts.keys.turn()
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
            )
            for app in (internal_app(parts, limits=limits), public_app(parts, limits=limits))
        ]
        internal, public = clients
        yield Stage(world, parts, internal, public, kicks)


Story = Callable[[Stage], Coroutine[Any, Any, None]]


def perform(worlds: Worlds, story: Story, **fields: Any) -> None:
    """Run a story on a stage of its own."""

    async def main() -> None:
        async with worlds.world() as world, staged(world, **fields) as stage:
            await story(stage)

    asyncio.run(main())
