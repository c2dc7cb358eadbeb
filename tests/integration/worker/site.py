"""A worker and a dispatcher, joined by real HTTP, real wake-ups and a real Postgres."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.dispatcher.api.routes import internal_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.carriers import WakeCarrier
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.loop import Loop
from penstock.dispatcher.outbox import Relay
from penstock.dispatcher.router import route_events
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.dispatcher.wakeups.long_poll import Broker, LongPollListener, LongPollSender
from penstock.dispatcher.wakeups.notifications import Notifications
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.runtimes.base import Runtime
from penstock.worker.claim_scheduler import ClaimScheduler
from penstock.worker.client import InternalClient
from penstock.worker.secrets import SecretResolver
from penstock.worker.settings import PipelineWorkerSettings
from penstock.worker.worker import PipelineWorker
from tests.integration.dispatcher.api.stage import parts_of
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.world import World

CLOCK = SystemClock()


@dataclass
class Site:
    """What a story works with."""

    world: World
    pipeline: Pipeline
    folder: Path
    serve: Callable[[int, Broker], HttpServer]
    serving: list[HttpServer] = field(default_factory=list)
    broker: Broker = field(default_factory=Broker)
    port: int = 0

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        """Ask until something is so, for a minute at most."""
        for _ in range(12_000):
            if await is_so():
                return
            await CLOCK.sleep(0.005)
        pytest.fail("it never came to that")

    async def statuses(self) -> Mapping[str, int]:
        rows = await self.world.rows("SELECT status, count(*) AS n FROM task GROUP BY status")
        return {row["status"]: row["n"] for row in rows}

    async def until_all(self, **expected: int) -> None:
        async def is_so() -> bool:
            return await self.statuses() == expected

        await self.until(is_so)

    async def up(self) -> None:
        """Have the dispatcher answer."""
        self.broker = Broker()
        await self.broker.start()
        self.serving.append(self.serve(self.port, self.broker))
        await self.serving[-1].start()
        self.port = self.serving[-1].port("internal")

    async def down(self) -> None:
        """Have nobody answer."""
        await self.broker.stop()
        await self.serving.pop().stop()

    @contextlib.asynccontextmanager
    async def working(
        self,
        runtime: Runtime,
        *,
        name: str = "worker-1",
        secrets: SecretResolver | None = None,
        store_url: str = "",
        **settings: Any,
    ) -> AsyncIterator[PipelineWorker]:
        """A worker, as long as the block lasts."""

        def listening(claiming: ClaimScheduler) -> LongPollListener:
            return LongPollListener(
                client.wait, claiming.heard, hello=claiming.hello, served=claiming.serve
            )

        parts = parts_of(self.world)
        client = InternalClient(
            [f"http://127.0.0.1:{self.port}"],
            parts.identities.identity(name),
            clock=SystemClock(),
            entropy=system_entropy(),
        )
        worker = PipelineWorker(
            client,
            {"process": runtime},
            listening,
            logs=self.folder / "logs",
            handed=self.folder / "handed",
            settings=PipelineWorkerSettings(**{"concurrency": 8, "look_seconds": 30.0} | settings),
            secrets=secrets,
            store_url=store_url,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run())
            try:
                yield worker
            finally:
                worker.stop()
                await running


Story = Callable[[Site], Awaitable[None]]


def _nobody(_: Collection[WakeUpChannel]) -> None:
    """Nobody waits there."""


def play(dsn: str, folder: Path, dag: str, story: Story, **parts: Any) -> None:
    """Tell a story on a site of its own; `parts` are other ones of its dispatcher."""

    async def main() -> None:
        async with Database(dsn, connections_max=10) as database:
            tasks = Tasks(database, route=route_events)
            world = World(dsn, database, tasks)
            pipeline = Pipeline(world)
            await pipeline.apply(dag)

            def serve(port: int, broker: Broker) -> HttpServer:
                fields = {"root": (folder / "store").as_uri(), **parts}
                app = internal_app(parts_of(world, kick=relaying.kick, broker=broker, **fields))
                return HttpServer([HttpListener("internal", app, "127.0.0.1", port)])

            site = Site(world, pipeline, folder, serve)
            # The relay is that of another dispatcher: what it sends comes by notifications.
            others = Notifications(dsn, database, heard=_nobody, has_waiters=lambda: False)
            here = Notifications(
                dsn,
                database,
                heard=lambda channels: site.broker.send(channels),  # noqa: PLW0108 - it is another later
                has_waiters=lambda: site.broker.waiters > 0,
            )
            sender = LongPollSender(Broker(), others.publish)
            relay = Relay(database, carriers={"wake": WakeCarrier(sender)})
            relaying = Loop("relay", relay.turn, idle_seconds=0.2)
            async with here, sender, relay, relaying:
                await site.up()
                try:
                    await story(site)
                finally:
                    while site.serving:
                        await site.down()

    asyncio.run(main())
