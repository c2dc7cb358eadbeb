"""The worker as its user sees it: register handlers, run, stop.

    worker = Worker(queue, concurrency=8)

    @worker.handler("resize", timeout=30, retry=Retry(attempts=5))
    async def resize(task): ...

    await worker.run()

`run` goes on until `stop` is called, or SIGTERM or SIGINT comes. Then it claims nothing more,
lets running tasks go on for `stop_seconds`, gives the rest back, and releases its leases. A
second signal gives back at once. `kill -9` at any point loses nothing: claims are free again
when their lease ends, or as soon as a worker starts on the same machine
(`penstock.queue.incarnation`). The loop itself is `penstock.queue.execution.worker_loop`.

Start-up functions (to load a model, say) are called one after the other when the queue is open
and before anything is claimed, or the worker registered. `async def` ones run on the loop,
plain ones in a thread. One that raises, or exceeds its time, ends the worker, which holds
nothing then.

`maintenance_tasks` lists the tasks that workers and the standalone monitor do for a whole queue:
add a new one there.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.kernel.process_locks import ProcessLocks
from penstock.kernel.service import stopped_by_signals
from penstock.queue.batch_progress import BatchMaintenance
from penstock.queue.client import Queue
from penstock.queue.context import QueueContext
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.direct import DirectDiscovery
from penstock.queue.discovery.elected import SampledDiscovery, SharedDiscovery
from penstock.queue.discovery.leased import LeasedDiscovery
from penstock.queue.doorbell import ChangeSignal
from penstock.queue.execution.attempt import HandlerThread
from penstock.queue.execution.gates import BudgetGate, ControlGate, StartGate
from penstock.queue.execution.handler_processes import HandlerProcessPool
from penstock.queue.execution.handlers import (
    Handler,
    HandlerRegistry,
    inline_function,
    inline_handler,
)
from penstock.queue.execution.limit_gate import LimitGate
from penstock.queue.execution.observer import AttemptObserver, Hooks
from penstock.queue.execution.retry import SECONDS_MAX, Retry, is_number, is_whole
from penstock.queue.execution.worker_loop import WorkerLoop
from penstock.queue.incarnation import Incarnation
from penstock.queue.maintenance import MaintenanceTask
from penstock.queue.metrics import StatsdPusher, WorkerMetrics, meter_of, statsd_address
from penstock.queue.retention import RetentionTask
from penstock.queue.schedules import Scheduler
from penstock.queue.settings import (
    QUEUE_SCHEMA,
    DiscoveryMode,
    WorkerSettings,
    mode_from,
    settings_from,
)
from penstock.store.metered import Meter


def maintenance_tasks(access: QueueContext) -> tuple[MaintenanceTask, ...]:
    """New maintenance tasks for one worker, or one monitor."""
    bell = ChangeSignal(access.store, access.layout.bell)
    return (Scheduler(access, bell), BatchMaintenance(access, bell), RetentionTask(access))


STARTUP_SECONDS: Final = 600.0


class StartupRunner:
    """What one worker has to do first."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], Any], float]] = []
        self._is_inline = False

    def add(self, function: Callable[[], Any], *, seconds: float) -> None:
        """Have a function called; raises `InvalidInput` for one that cannot be."""
        if not _takes_nothing(function):
            raise InvalidInput(
                f"The start-up function {_name(function)} must take no arguments.",
                hint="Write it as def prepare(): ..., or async def prepare(): ...",
            )
        if not is_number(seconds) or not 0 < seconds <= SECONDS_MAX:
            raise InvalidInput(f"{seconds!r} is not a timeout.", hint="Give seconds above 0.")
        self._steps.append((function, float(seconds)))

    def again(self, *, inline: bool) -> StartupRunner:
        """The same for another worker; with `inline`, without threads."""
        other = StartupRunner()
        other._steps = list(self._steps)
        other._is_inline = inline
        return other

    async def run(self) -> None:
        """Do all of it. Raises `PenstockError` if one fails."""
        for function, seconds in self._steps:
            name = _name(function)
            body = asyncio.get_running_loop().create_task(self._call(function))
            try:
                await asyncio.wait((body,), timeout=seconds)
            finally:
                is_late = body.cancel()
            if is_late:
                raise PenstockError(
                    f"The start-up function {name} did not end within {seconds:g} s.",
                    hint="Give it longer: @worker.startup(timeout=...).",
                )
            error = body.exception()
            if error is not None:
                raise PenstockError(
                    f"The start-up function {name} failed: {type(error).__name__}: {error}",
                    hint="The worker has not started, and nothing was claimed.",
                ) from error

    async def _call(self, function: Callable[[], Any]) -> None:
        if self._is_inline or inspect.iscoroutinefunction(function):
            made = function()
        else:
            thread = HandlerThread(lambda: _outcome(function), nothing=_Outcome())
            outcome = await thread.run()
            if outcome.error is not None:
                raise outcome.error
            made = outcome.made
        if inspect.isawaitable(made):
            await made


@dataclass(frozen=True, slots=True)
class _Outcome:
    made: Any = None
    error: Exception | None = None


def _outcome(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(made=function())
    except Exception as error:  # noqa: BLE001 - it may raise anything, and is told
        return _Outcome(error=error)
    except BaseException as error:  # noqa: BLE001 - not through the loop
        return _Outcome(error=PenstockError(repr(error)))


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # Some functions in C do not tell what they take.
        return True
    return True


def _name(function: object) -> str:
    return repr(getattr(function, "__qualname__", function))


CONCURRENCY_MAX: Final = 1000

Function = TypeVar("Function", bound=Callable[..., Any])


def _check_settings(settings: object) -> None:
    if settings is not None and not isinstance(settings, WorkerSettings):
        raise InvalidInput(
            f"settings= takes WorkerSettings, not a value of type {type(settings).__name__!r}.",
            hint="Write settings=WorkerSettings(stop_seconds=10).",
        )


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
        statsd: str | None = None,
    ) -> None:
        """With `statsd="HOST:PORT"`, its figures go there every ten seconds."""
        if not is_whole(concurrency) or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidInput(f"A worker runs 1 to {CONCURRENCY_MAX} tasks, not {concurrency!r}.")
        _check_settings(settings)
        self.queue = queue
        self.concurrency = concurrency
        file = QUEUE_SCHEMA.file(os.environ, Path())
        self.mode: DiscoveryMode = mode_from(mode, os.environ, file)
        self.settings = settings or settings_from(os.environ, file)
        self.call(name)
        self.statsd = statsd_address(statsd) if statsd is not None else None
        self._handlers = HandlerRegistry()
        self._hooks = Hooks()
        self._startup = StartupRunner()
        self._metrics = WorkerMetrics()
        self._meter: Meter | None = None
        self._shift: WorkerLoop | None = None
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

        if not isinstance(type, str):
            raise InvalidInput(
                "A handler needs the type of its tasks.",
                hint='Write @worker.handler("TYPE") above the function.',
            )

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
        handlers = HandlerRegistry()
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
            statsd=None if inline else self.statsd,
            _metrics=WorkerMetrics(),
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
            raise InvalidInput("A worker can run only once; create another.")
        self._handlers.check()
        with self._living() as (incarnation, inherited):
            watch = AttemptObserver(hooks=self._hooks, metrics=self._metrics)
            children = HandlerProcessPool(inherited=inherited)
            async with self.queue.opened(), watch.watching(self._name), children:
                await self._startup.run()
                access = replace(self.queue.access, incarnation=incarnation)
                self._meter = meter_of(access.store)
                self._shift = WorkerLoop(
                    access,
                    self._handlers,
                    self._discovery(access),
                    concurrency=self.concurrency,
                    settings=self.settings,
                    gates=self._gates(access, max_tasks),
                    maintenance=maintenance_tasks(access),
                    watch=watch,
                    children=children,
                )
                if self._stop_asked:
                    self._shift.stop(at_once=False)
                stopped = stopped_by_signals(self.stop) if signals else nullcontext()
                async with self._statsd_pusher(access.store.clock.machine) or nullcontext():
                    with stopped:
                        await self._shift.run(until_empty=until_empty)

    def _statsd_pusher(self, clock: Clock) -> StatsdPusher | None:
        if self.statsd is None:
            return None
        host, port = self.statsd
        return StatsdPusher(self.metrics, host=host, port=port, clock=clock)

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

    def _gates(self, access: QueueContext, max_tasks: int | None) -> list[StartGate]:
        gates: list[StartGate] = [
            ControlGate(access),
            LimitGate(access, name=self._name, concurrency=self.concurrency),
        ]
        if max_tasks is not None:
            gates.append(BudgetGate(max_tasks, spent=self._finish))
        return gates

    def _finish(self) -> None:
        if self._shift is not None:
            self._shift.finish()

    def _discovery(self, queue: QueueContext) -> Discovery:
        """The mode's way to find work."""
        match self.mode:
            case DiscoveryMode.SHARED:
                return SharedDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    lease_seconds=self.settings.task_lease_seconds,
                    entropy=queue.entropy,
                    incarnation=queue.incarnation,
                )
            case DiscoveryMode.SAMPLED:
                return SampledDiscovery(
                    queue.store,
                    queue.layout,
                    name=self._name,
                    lease_seconds=self.settings.task_lease_seconds,
                    sample_shards=self.settings.sample_shards,
                    entropy=queue.entropy,
                    incarnation=queue.incarnation,
                )
            case DiscoveryMode.DIRECT:
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
            case DiscoveryMode.LEASED:
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
    if tasks is not None and (not is_whole(tasks) or tasks < 1):
        raise InvalidInput(f"A worker runs at least 1 task, not max_tasks={tasks!r}.")
