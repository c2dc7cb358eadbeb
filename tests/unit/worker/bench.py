"""A worker on virtual time with a scripted dispatcher, runtime and listener around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import Heard, WakeUpChannel, WakeUpListener
from penstock.protocol.identity import Identity
from penstock.runtimes.base import (
    AttemptWork,
    ProducedOutput,
    Runtime,
    RuntimeFault,
    Staged,
    WorkReporter,
    WorkResult,
)
from penstock.testing.virtual import VirtualClock, World, simulate
from penstock.worker.claim_scheduler import ClaimScheduler
from penstock.worker.client import InternalClient
from penstock.worker.secrets import SecretResolver
from penstock.worker.settings import PipelineWorkerSettings
from penstock.worker.worker import PipelineWorker
from tests.unit.worker.over_httpx import OverHttpx
from tests.unit.worker.scripted import URL, Dispatcher

Doing = Callable[[AttemptWork, WorkReporter], Awaitable[tuple[ProducedOutput, ...]]]


class ScriptedRuntime(Runtime):
    """Does what the test says, and keeps count."""

    name = "process"
    hands_over = True

    def __init__(self, doing: Doing) -> None:
        self.doing = doing
        self.works: list[AttemptWork] = []
        self.running: dict[int, AttemptWork] = {}
        self.most_at_once = 0
        self.cancelled: list[int] = []
        self.is_started = False
        self.is_stubborn = False
        self.expected = 0
        self.metrics: Mapping[str, Any] = {}
        self.staged: Mapping[str, Staged] = {}

    async def start(self) -> None:
        self.is_started = True

    async def stop(self) -> None:
        assert self.is_stubborn or not self.running, "stopped after the last run"
        self.is_started = False

    def operators(self) -> Collection[str] | None:
        return None

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterable[RuntimeFault]:
        return ()

    def secrets_refused(self, operator: str) -> str:
        return ""

    def expect(self) -> None:
        assert self.is_started
        self.expected += 1

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        assert self.is_started
        self.works.append(work)
        self.running[id(work)] = work
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            made = await self.doing(work, reporter)
            return WorkResult(made=made, metrics=self.metrics, staged=self.staged)
        except asyncio.CancelledError:
            self.cancelled.append(work.task_id)
            raise
        finally:
            del self.running[id(work)]


class ScriptedListener(WakeUpListener):
    """Hears what the test says."""

    def __init__(self, answer: Heard) -> None:
        self._answer = answer
        self.listening: list[list[str]] = []
        self.is_started = False
        self.is_waiting_there = False

    @property
    def is_present(self) -> bool:
        return self.is_waiting_there

    async def start(self) -> None:
        self.is_started = True

    async def stop(self) -> None:
        self.is_started = False

    def listen_to(self, operators: Collection[str]) -> None:
        self.listening.append(sorted(operators))

    async def say(self, operator: str = "a:clean") -> None:
        """A wake-up; returns when it is settled, raises if it comes again."""
        await self._answer(WakeUpChannel(operator, Priority.NORMAL))


@dataclass
class Bench:
    """One worker and its surroundings."""

    world: World
    clock: VirtualClock
    dispatcher: Dispatcher
    runtime: ScriptedRuntime
    worker: PipelineWorker
    listener: ScriptedListener
    running: list[asyncio.Task[None]] = field(default_factory=list)

    async def until(self, is_so: Callable[[], bool], *, seconds: float = 3600.0) -> float:
        """Let time pass until something is so; returns how long that took."""
        began = self.clock.monotonic()
        while not is_so():
            assert self.clock.monotonic() - began < seconds, "it never came to that"
            await self.clock.sleep(0.01)
        return self.clock.monotonic() - began

    async def stopped(self) -> float:
        """Stop the worker; returns how long that took."""
        began = self.clock.monotonic()
        self.worker.stop()
        await self.running[0]
        return self.clock.monotonic() - began


Story = Callable[[Bench], Awaitable[None]]


async def nothing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
    """Publishes every output at its own place."""
    key = work.payload.get("partition_key")
    return tuple(
        ProducedOutput(output=name, location=place.location, partition_key=key)
        for name, place in work.outputs.items()
    )


def taking(bench_clock: list[VirtualClock], seconds: float) -> Doing:
    """Work that takes so long."""

    async def doing(work: AttemptWork, reporter: WorkReporter) -> tuple[ProducedOutput, ...]:
        await bench_clock[0].sleep(seconds)
        return await nothing(work, reporter)

    return doing


@contextlib.asynccontextmanager
async def opened(
    world: World,
    dispatcher: Dispatcher,
    doing: Doing | None,
    *,
    seconds: float,
    settings: PipelineWorkerSettings,
    secrets: SecretResolver | None = None,
    handed: Path | None = None,
    locks: Path | None = None,
) -> AsyncIterator[Bench]:
    clock = world.clock()
    runtime = ScriptedRuntime(doing or taking([clock], seconds))
    client = InternalClient(
        [URL],
        Identity("worker-1", "secret"),
        clock=clock,
        entropy=world.entropy("client"),
        transport=OverHttpx(httpx.ASGITransport(app=dispatcher)),
    )
    listeners: list[ScriptedListener] = []

    def listening(claiming: ClaimScheduler) -> WakeUpListener:
        listeners.append(ScriptedListener(claiming.heard))
        return listeners[0]

    worker = PipelineWorker(
        client,
        {"process": runtime},
        listening,
        handed=handed,
        locks=locks,
        settings=settings,
        clock=clock,
        entropy=world.entropy("worker"),
        about={},
        secrets=secrets,
    )
    bench = Bench(world, clock, dispatcher, runtime, worker, listeners[0])
    bench.running.append(world.loop.create_task(worker.run()))
    yield bench
    if not bench.running[0].done():
        await bench.stopped()
    await bench.running[0]


def play(
    story: Story,
    *,
    dispatcher: Dispatcher | None = None,
    doing: Doing | None = None,
    seconds: float = 0.1,
    seeds: Iterable[int] = range(5),
    setting: Callable[[Dispatcher], object] | None = None,
    secrets: Callable[[World], SecretResolver] | None = None,
    handed: Path | None = None,
    locks: Path | None = None,
    **settings: Any,
) -> None:
    """Tell a story with several seeds. `seconds` is how long work takes, unless `doing` says."""
    for seed in seeds:

        async def main(world: World) -> None:
            served = dispatcher or Dispatcher()
            if setting is not None:
                setting(served)
            made = PipelineWorkerSettings(**{"concurrency": 8, "look_seconds": 30.0} | settings)
            found = secrets(world) if secrets is not None else None
            async with opened(
                world,
                served,
                doing,
                seconds=seconds,
                settings=made,
                secrets=found,
                handed=handed,
                locks=locks,
            ) as bench:
                await story(bench)

        simulate(main, seed=seed)
