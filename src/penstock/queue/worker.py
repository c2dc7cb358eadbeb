"""The worker: what runs the tasks of a queue, as its user sees it.

    worker = Worker(queue, concurrency=8)

    @worker.handler("resize", timeout=30, retry=Retry(attempts=5))
    async def resize(task): ...

    await worker.run()

`run` goes on until `stop` is called, or SIGTERM or SIGINT comes. Then it claims nothing more, lets
what runs go on for `stop_seconds`, gives the rest back, and lets go of its leases. A second signal
gives back at once. `kill -9` at any point loses nothing: what was claimed is free again when its
lease ends. What happens in between is told in `penstock.queue.running.shift`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, TypeVar

from penstock.kernel.errors import InvalidInput
from penstock.kernel.signals import stopped_by_signals
from penstock.queue.client import Queue
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.leased import LeasedDiscovery
from penstock.queue.discovery.shared import SharedDiscovery
from penstock.queue.running.handlers import Handler, Handlers
from penstock.queue.running.retry import Retry
from penstock.queue.running.shift import Shift
from penstock.queue.settings import Mode, WorkerSettings, mode_from, settings_from

CONCURRENCY_MAX: Final = 1000

Function = TypeVar("Function", bound=Callable[..., Any])


class Worker:
    """Runs the tasks of one queue. Make it, give it handlers, and `run` it, once."""

    def __init__(
        self,
        queue: Queue,
        *,
        concurrency: int = 8,
        mode: str | None = None,
        name: str = "",
        settings: WorkerSettings | None = None,
    ) -> None:
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"A worker runs 1 to {CONCURRENCY_MAX} tasks, not {concurrency}.")
        self.queue = queue
        self.concurrency = concurrency
        self.mode: Mode = mode_from(mode, os.environ)
        self.settings = settings or settings_from(os.environ)
        self._name = name or platform.node().split(".")[0][:40] or "worker"
        self._handlers = Handlers()
        self._shift: Shift | None = None
        self._stop_asked = 0

    def handler(
        self, type: str, *, timeout: float | None = None, retry: Retry | None = None
    ) -> Callable[[Function], Function]:
        """Register the function for the tasks of a type. `timeout` is in seconds."""

        def register(function: Function) -> Function:
            self._handlers.add(
                Handler(
                    type=type, function=function, timeout_seconds=timeout, retry=retry or Retry()
                )
            )
            return function

        return register

    @property
    def types(self) -> tuple[str, ...]:
        """The types that it has a handler for."""
        return self._handlers.types

    def stop(self) -> None:
        """Begin to stop; asked a second time, give back at once what runs."""
        self._stop_asked += 1
        if self._shift is not None:
            self._shift.stop(at_once=self._stop_asked > 1)

    async def run(self, *, signals: bool = True) -> None:
        """Work until stopped. SIGTERM and SIGINT stop it, unless `signals` is false."""
        if not self._handlers.types:
            raise InvalidInput(
                "The worker has no handler.",
                hint='Register one: @worker.handler("TYPE") above def handle(task).',
            )
        if self._shift is not None:
            raise InvalidInput("A worker runs once; make another.")
        async with self.queue.opened():
            self._shift = Shift(
                self.queue.access,
                self._handlers,
                self._discovery(),
                concurrency=self.concurrency,
                settings=self.settings,
            )
            if self._stop_asked:
                self._shift.stop(at_once=False)
            with stopped_by_signals(self.stop) if signals else nullcontext():
                await self._shift.run()

    def _discovery(self) -> Discovery:
        """The mode's way to find work."""
        queue = self.queue.access
        match self.mode:
            case Mode.SHARED:
                return SharedDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    lease_seconds=self.settings.task_lease_seconds,
                    entropy=queue.entropy,
                )
            case Mode.LEASED:
                return LeasedDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    shards=queue.config.shards,
                    handles=frozenset(self._handlers.types),
                    settings=self.settings,
                    concurrency=self.concurrency,
                    entropy=queue.entropy,
                )
