"""The worker: what runs the tasks of a queue, as its user sees it.

    worker = Worker(queue, concurrency=8)

    @worker.handler("resize", timeout=30, retry=Retry(attempts=5))
    async def resize(task): ...

    await worker.run()

`run` goes on until `stop` is called, or SIGTERM or SIGINT comes. Then it claims nothing more, lets
what runs go on for `stop_seconds`, gives the rest back, and lets go of its leases. A second signal
gives back at once. `kill -9` at any point loses nothing: what was claimed is free again when its
lease ends, or as soon as a worker starts on the same machine (`penstock.queue.incarnation`). What
happens in between is told in `penstock.queue.running.shift`.
"""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.kernel.process_locks import ProcessLocks
from penstock.kernel.signals import stopped_by_signals
from penstock.queue.access import Access
from penstock.queue.chores import chores_of
from penstock.queue.client import Queue
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.direct import DirectDiscovery
from penstock.queue.discovery.leased import LeasedDiscovery
from penstock.queue.discovery.sampled import SampledDiscovery
from penstock.queue.discovery.shared import SharedDiscovery
from penstock.queue.incarnation import Incarnation
from penstock.queue.metrics import Metrics, meter_of
from penstock.queue.running.budget import BudgetGate
from penstock.queue.running.control_gate import ControlGate
from penstock.queue.running.gates import Gate
from penstock.queue.running.handlers import Handler, Handlers
from penstock.queue.running.hooks import Hooks
from penstock.queue.running.inline import inline_function, inline_handler
from penstock.queue.running.isolated import Children
from penstock.queue.running.limit_gate import LimitGate
from penstock.queue.running.observing import Watch
from penstock.queue.running.retry import Retry
from penstock.queue.running.shift import Shift
from penstock.queue.running.startup import STARTUP_SECONDS, StartUp
from penstock.queue.settings import Mode, WorkerSettings, mode_from, settings_from
from penstock.queue.settings_file import with_file
from penstock.store.metered import Meter

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
        environment = with_file(os.environ)
        self.mode: Mode = mode_from(mode, environment)
        self.settings = settings or settings_from(environment)
        self.call(name)
        self._handlers = Handlers()
        self._hooks = Hooks()
        self._startup = StartUp()
        self._metrics = Metrics()
        self._meter: Meter | None = None
        self._shift: Shift | None = None
        self._stop_asked = 0

    def call(self, name: str) -> None:
        """Give it a name, before it runs: in mode `direct` its own, elsewhere the beginning of it.

        Empty: that of the machine, and in mode `direct` a new one every time.
        """
        self._is_named = bool(name)
        self._name = name or platform.node().split(".")[0][:40] or "worker"

    def handler(
        self,
        type: str,
        *,
        timeout: float | None = None,
        retry: Retry | None = None,
        isolate: bool = False,
    ) -> Callable[[Function], Function]:
        """Register the function for the tasks of a type. `timeout` is in seconds.

        With `isolate`, it runs in a process of its own, which is killed at the timeout.
        """

        def register(function: Function) -> Function:
            self._handlers.add(
                Handler(
                    type=type,
                    function=function,
                    timeout_seconds=timeout,
                    retry=retry or Retry(),
                    isolate=isolate,
                )
            )
            return function

        return register

    def on(self, event: str) -> Callable[[Function], Function]:
        """Have a function told of events: start, stop, attempt, success, retry, failure, settled.

        It is called with a `WorkerEvent`, and changes nothing of what happens.
        """

        self._hooks.check(event)

        def register(function: Function) -> Function:
            self._hooks.add(event, function)
            return function

        return register

    def startup(self, *, timeout: float = STARTUP_SECONDS) -> Callable[[Function], Function]:
        """Have a function called before the first task is claimed; it takes no arguments.

        If it raises, or takes longer than `timeout` seconds, `run` raises and nothing was claimed.
        """

        def register(function: Function) -> Function:
            self._startup.add(function, seconds=timeout)
            return function

        return register

    def metrics(self) -> str:
        """What it has done so far, and what that cost, in the text format of Prometheus."""
        return self._metrics.text(self._meter)

    @property
    def types(self) -> tuple[str, ...]:
        """The types that it has a handler for."""
        return self._handlers.types

    def again(self, queue: Queue, *, inline: bool = False) -> Worker:
        """Another worker like this one, which has not run yet, on a queue of its own.

        With `inline`, no handler or hook has a thread or a process: for tests in virtual time.
        """
        handlers = Handlers()
        for each in map(self._handlers.get, self._handlers.types):
            assert each is not None
            handlers.add(inline_handler(each) if inline else each)
        other = copy.copy(self)
        vars(other).update(
            queue=queue,
            _handlers=handlers,
            _hooks=self._hooks.again(inline_function if inline else None),
            _startup=self._startup.again(inline=inline),
            # Its id and its figures are its own.
            _is_named=False,
            _metrics=Metrics(),
            _meter=None,
            _shift=None,
            _stop_asked=0,
        )
        return other

    def stop(self) -> None:
        """Begin to stop; asked a second time, give back at once what runs."""
        self._stop_asked += 1
        if self._shift is not None:
            self._shift.stop(at_once=self._stop_asked > 1)

    async def run(
        self, *, signals: bool = True, max_tasks: int | None = None, until_empty: bool = False
    ) -> None:
        """Work until stopped. SIGTERM and SIGINT stop it, unless `signals` is false.

        With `max_tasks`, until so many attempts have run; with `until_empty`, until no task of its
        types is ready or in progress, here or elsewhere. What runs then may end.
        """
        check_tasks_max(max_tasks)
        if not self._handlers.types:
            raise InvalidInput(
                "The worker has no handler.",
                hint='Register one: @worker.handler("TYPE") above def handle(task).',
            )
        if self._shift is not None:
            raise InvalidInput("A worker runs once; make another.")
        self._handlers.check()
        with self._living() as (incarnation, inherited):
            watch = Watch(hooks=self._hooks, metrics=self._metrics)
            children = Children(inherited=inherited)
            async with self.queue.opened(), watch.watching(self._name), children:
                await self._startup.run()
                access = replace(self.queue.access, incarnation=incarnation)
                self._meter = meter_of(access.store)
                self._shift = Shift(
                    access,
                    self._handlers,
                    self._discovery(access),
                    concurrency=self.concurrency,
                    settings=self.settings,
                    gates=self._gates(access, max_tasks),
                    chores=chores_of(access),
                    watch=watch,
                    children=children,
                )
                if self._stop_asked:
                    self._shift.stop(at_once=False)
                with stopped_by_signals(self.stop) if signals else nullcontext():
                    await self._shift.run(until_empty=until_empty)

    @contextmanager
    def _living(self) -> Iterator[tuple[Incarnation, tuple[int, ...]]]:
        """Its incarnation, with the lock that proves it, and what children inherit of that.

        The lock is let go of only when nothing is held: whatever may still run, a handler that does
        not heed its interruption, say, runs as long as this process.
        """
        locks = self.queue.locks or lock_files(self.queue.url, self.settings.lock_folder)
        lock = locks.acquire() if locks else None
        if locks is None or lock is None:
            yield Incarnation(look=locks.ended if locks else frozenset), ()
            return

        def look() -> frozenset[str]:
            lock.refresh()
            return locks.ended()

        descriptor = lock.descriptor
        try:
            yield Incarnation(lock.incarnation, look), (() if descriptor is None else (descriptor,))
        except BaseException:
            if self._shift is None:
                lock.release()
            raise
        if self._shift is not None and self._shift.is_empty:
            lock.release()

    def _gates(self, access: Access, max_tasks: int | None) -> list[Gate]:
        gates: list[Gate] = [
            ControlGate(access),
            LimitGate(access, name=self._name, concurrency=self.concurrency),
        ]
        if max_tasks is not None:
            gates.append(BudgetGate(max_tasks, spent=self._finish))
        return gates

    def _finish(self) -> None:
        if self._shift is not None:
            self._shift.finish()

    def _discovery(self, queue: Access) -> Discovery:
        """The mode's way to find work."""
        match self.mode:
            case Mode.SHARED:
                return SharedDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    lease_seconds=self.settings.task_lease_seconds,
                    entropy=queue.entropy,
                    incarnation=queue.incarnation,
                )
            case Mode.SAMPLED:
                return SampledDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    lease_seconds=self.settings.task_lease_seconds,
                    sample_shards=self.settings.sample_shards,
                    entropy=queue.entropy,
                    incarnation=queue.incarnation,
                )
            case Mode.DIRECT:
                return DirectDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    is_named=self._is_named,
                    handles=frozenset(self._handlers.types),
                    config=queue.config,
                    settings=self.settings,
                    entropy=queue.entropy,
                    incarnation=queue.incarnation,
                )
            case Mode.LEASED:
                return LeasedDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    config=queue.config,
                    handles=frozenset(self._handlers.types),
                    settings=self.settings,
                    concurrency=self.concurrency,
                    entropy=queue.entropy,
                    incarnation=queue.incarnation,
                )


def lock_files(url: str, folder: str | None) -> ProcessLocks | None:
    """The locks of this machine for workers on queues at this URL; None if there are none."""
    if not url or url.startswith("memory:") or folder == "":
        return None
    if folder is None:
        try:
            state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        except RuntimeError:  # This user has no home.
            return None
        folder = str(Path(state) / "penstock" / "workers")
    return ProcessLocks(Path(folder).absolute(), entropy=system_entropy())


def check_tasks_max(tasks: int | None) -> None:
    """Raises `InvalidInput` for a number of tasks that a worker cannot be bounded by."""
    if tasks is not None and (isinstance(tasks, bool) or tasks < 1):
        raise InvalidInput(f"A worker runs at least 1 task, not max_tasks={tasks!r}.")
