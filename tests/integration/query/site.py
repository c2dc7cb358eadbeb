"""Datasets in a folder, a dispatcher on sockets, and a real query service that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.datasets.layout import path_of
from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.datasets.schema import Column
from penstock.dispatcher.api.routes import internal_app, public_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.catalog.queries import QueryRelay
from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.work import Assignment
from penstock.query.engine import QueryBounds
from penstock.query.service import QueryService, QueryServiceSettings
from penstock.runtimes.uid_pool import FOLDER, UidPool
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, parts_of, place, staged
from tests.integration.dispatcher.world import World

API = "the-token-of-the-API"
VIEWER = "the-token-of-viewers"
DAG = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean:
    runtime: process
    operator: a:clean
    inputs: [raw]
    outputs: [tidy]
  other: {runtime: process, operator: a:other, inputs: [raw], outputs: [secret]}
  last: {runtime: process, operator: a:last, inputs: [tidy], outputs: [answers]}
"""
BOUNDS = QueryBounds(
    memory_bytes=256 * 1024**2,
    threads=2,
    spill_bytes=64 * 1024**2,
    seconds_max=60,
    rows_max=10_000,
    bytes_max=4 * 1024**2,
)
TYPES = {pa.int64(): "bigint", pa.string(): "string", pa.float64(): "double"}


class WorldClock(SystemClock):
    """This machine's, but for the date, which is the world's."""

    def __init__(self, world: World) -> None:
        self._world = world

    def wall(self) -> float:
        return 1_893_456_000.0 + self._world.offset_seconds[0]


@dataclass
class Site:
    """Everything, and how it is asked."""

    stage: Stage
    service: QueryService
    public: httpx.AsyncClient
    internal: httpx.AsyncClient
    direct: httpx.AsyncClient
    events: int = 0

    async def query(self, sql: str, *, token: str = API, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        body = {"sql": sql, "format": "csv", **fields}
        return await self.public.post("/v1/query", json=body, headers=headers)

    async def as_task(
        self, token: str, sql: str, *, direct: bool = False, **fields: Any
    ) -> httpx.Response:
        side = self.direct if direct else self.internal
        body = {"sql": sql, "format": "csv", **fields}
        return await side.post("/v1/task/query", json=body, headers={TASK_HEADER: token})

    async def logged(self) -> dict[str, Any]:
        """The latest query."""
        return (await self.every_logged(limit=1))[0]

    async def every_logged(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """Queries, the latest first."""
        headers = {"Authorization": f"Bearer {API}"}
        answer = await self.public.get("/v1/queries", params={"limit": limit}, headers=headers)
        return list(ok(answer)["queries"])

    async def claim(self, operator: str, *keys: str) -> list[Assignment]:
        for key in keys:
            self.events += 1
            asked = {"job": "feed", "partition_key": key, "event_id": f"{key} {self.events}"}
            headers = {"Authorization": f"Bearer {API}"}
            ok(await self.public.post("/v1/trigger", json=asked, headers=headers))
        await self.stage.route()
        return await self.stage.claim(operator, limit=max(1, len(keys)))

    async def publish(self, task: Assignment, name: str, table: pa.Table) -> None:
        """Complete a task with a table as its output."""
        location = place(task, name)
        folder = path_of(location)
        folder.mkdir(parents=True)
        opened = io.BytesIO()
        pq.write_table(table, opened)
        body = opened.getvalue()
        (folder / "part-0.parquet").write_bytes(body)
        columns = [{"name": x.name, "type": TYPES[x.type]} for x in table.schema]
        sha = hashlib.sha256(body).hexdigest()
        manifest = encode(
            Manifest(
                dataset=name,
                generation=task.generation,
                job=task.job,
                task_id=task.task_id,
                attempt=task.attempt,
                partition_key=task.payload.get("partition_key"),
                rows=table.num_rows,
                bytes=len(body),
                columns=_columns(columns),
                files=(
                    File(name="part-0.parquet", rows=table.num_rows, bytes=len(body), sha256=sha),
                ),
            )
        )
        (folder / "manifest.json").write_bytes(manifest)
        facts = {"files": 1, "rows": table.num_rows, "bytes": len(body), "columns": columns}
        facts["manifest"] = digest(manifest)
        ok(await self.stage.complete(held(task, outputs=[output(task, name, facts=facts)])))
        await self.stage.route()


@dataclass
class Between:
    """Servers between a query service and its dispatcher, which is behind the last of them.

    `statuses` are what those before it answer to everything; `answer` is asked about each request
    to the last, before it is handed on: None is that its answer is lost.
    """

    statuses: tuple[int, ...] = ()
    has_real: bool = True
    answer: Callable[[str, Callable[[], Awaitable[bytes]]], Awaitable[bytes | None]] | None = None

    @contextlib.asynccontextmanager
    async def opened(self, real: str) -> AsyncIterator[list[str]]:
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            every: list[str] = []
            for status in (*self.statuses, *((0,) if self.has_real else ())):

                async def serve(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int = status
                ) -> None:
                    with contextlib.closing(writer):
                        head = (await reader.readuntil(b"\r\n\r\n")).decode()
                        method, path, _ = head.splitlines()[0].split(" ")
                        headers = dict(x.split(": ", 1) for x in head.splitlines()[1:] if x)
                        body = await reader.readexactly(int(headers["content-length"]))

                        async def handed_on() -> bytes:
                            found = await http.request(
                                method, f"{real}{path}", content=body, headers=headers
                            )
                            return whole(found.status_code, found.content)

                        said: bytes | None = whole(status, b"{}")
                        if not status:
                            ask = self.answer
                            said = await (ask(path, handed_on) if ask else handed_on())
                        writer.write(said or b"")
                        await writer.drain()

                server = await asyncio.start_server(serve, "127.0.0.1", 0)
                stack.callback(server.close)
                every.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            yield every


def whole(status: int, body: bytes) -> bytes:
    """An answer of HTTP."""
    head = f"HTTP/1.1 {status} said\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def _columns(said: list[dict[str, str]]) -> tuple[Column, ...]:
    return tuple(Column(each["name"], each["type"]) for each in said)


def lines(answer: httpx.Response) -> list[Any]:
    """The lines of a result in the format `rows`."""
    return [json.loads(each) for each in answer.text.splitlines()]


@contextlib.asynccontextmanager
async def opened_site(
    world: World,
    folder: Path,
    *,
    bounds: QueryBounds = BOUNDS,
    uids: str = "60864-60895",
    between: Between | None = None,
) -> AsyncIterator[Site]:
    """`between` stands before the dispatcher that the service asks."""
    port = free_port()
    root = folder.as_uri()
    relay = QueryRelay(f"http://127.0.0.1:{port}")
    said: dict[str, Any] = {"root": root, "relay": relay, "api_token": API, "viewer_token": VIEWER}
    async with contextlib.AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(world, **said))
        ok(
            await stage.public.post(
                "/v1/dag", json={"source": DAG}, headers={"Authorization": f"Bearer {API}"}
            )
        )
        parts = parts_of(world, **said)
        await parts.keys.turn()
        serving = HttpServer(
            [
                HttpListener("internal", internal_app(parts), "127.0.0.1", 0),
                HttpListener("public", public_app(parts), "127.0.0.1", 0),
            ]
        )
        await stack.enter_async_context(serving)
        stack.push_async_callback(relay.close)
        dispatchers = [serving.url("internal")]
        if between is not None:
            dispatchers = await stack.enter_async_context(between.opened(*dispatchers))
        service = QueryService(
            QueryServiceSettings(
                name="here-1",
                dispatchers=dispatchers,
                org="default",
                store_url=root,
                bounds=replace(bounds),
                concurrency=2,
                uids=UidPool.of(uids, FOLDER) if uids else None,
                scan_bytes=1024**3,
            ),
            clock=WorldClock(world),
        )
        await stack.enter_async_context(service)
        listening = HttpServer([HttpListener("query", service.app(), "127.0.0.1", port)])
        await stack.enter_async_context(listening)
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120))
            for url in (serving.url("public"), serving.url("internal"), listening.url("query"))
        ]
        public, internal, direct = clients
        yield Site(stage, service, public, internal, direct)
