"""The runtime `spark`: work on a warm session of Spark, in a process beside the worker's.

The worker imports no Spark: its event loop sends heartbeats whatever Spark and users' code do. What
runs, runs in a *host*; a batch becomes one run there. How a job is judged (`faults`) needs neither
Spark nor Java, so a dispatcher can do it that has none.

Of the promise that nothing of cancelled work runs on, one case is left: the code of a user that
does not let go of its thread, in a host that others use too. `run` ends then after the grace,
the Spark jobs of that work are cancelled, what it writes is in a folder that nobody reads, and
the thread ends with its host, as soon as the others in it have ended.

The pools decide which host gets which work, and how long hosts live. Most work runs with the
settings of the runtime itself, whose hosts are always there. For every other profile (`settings`)
hosts are made when its first bundle comes, and ended when it has had none for `idle_seconds`. At
most `profiles_max` profiles have hosts at once, since each has a JVM: a bundle of one more waits
until another has nothing to do, which is then ended for it.

In the pool of one profile there is at most one host that gets work: made when work is expected
or comes, and made anew when it is gone, with a backoff while hosts end before they have done
anything. `parallel` bundles run at a time, in all hosts of the pool together; the rest waits
here, where dropping it costs nothing.

A host is *retired*, gets no more work, and ends when its last bundle is over,

- when a bundle that was dropped as a whole has not ended within its grace: the code of a user holds
  a thread that nobody can take from it. Neighbours in that host go on; the bundle does not count
  any more, and what it still does can reach no reader;
- when it has run `recycle_tasks` tasks or is larger than `resident_bytes_max`.

The same is done if the one task of a batch that is being worked for was dropped and does not
end; the others of the batch are released then.

A bundle that *runs alone* begins when the host that gets work has nothing in it, and until it
is over nothing else begins there. Bundles begin in the order in which they came: one that runs
alone waits for those that run, which have time limits, and those that came later wait for it.
Nobody's own time limit runs while it waits. A host that dies takes what is in it along: see
`host_process`. One that does not start releases what waits, since another worker may have what
it lacks.

Once a host has been idle for a while, the archive of classes is made, if there is none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.kernel.service import Service
from penstock.runtimes.base import AttemptWork, Runtime, RuntimeFault, WorkReporter, WorkResult
from penstock.runtimes.child_process import LaunchSpec, RuntimeChild
from penstock.runtimes.guard import Guard
from penstock.runtimes.spark.frames import FromHost, OpenSession, from_host
from penstock.runtimes.spark.host_process import (
    BatchCollector,
    Bundle,
    HostFolders,
    HostProcess,
    Ticket,
    temporary_data,
)
from penstock.runtimes.spark.job_config import OPERATORS, config_faults
from penstock.runtimes.spark.settings import (
    SparkSettings,
    profile,
    profile_faults,
    read_spark_settings,
)

_log = logging.getLogger(__name__)

PYTHON: Final = "spark.python"
ENGINE: Final = "penstock.runtimes.spark.engine:Engine"
_STOPPED: Final = "The runtime was stopped."
_BEHIND_STUCK: Final = "Another task of its batch did not stop in time; this one is released."
_HOST: Final = ("-m", "penstock.runtimes.spark.host")
_ARCHIVING: Final = ("-m", "penstock.runtimes.spark.class_archiver")
_NOT_OF_HOSTS: Final = ("PENSTOCK_", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
"""What a host's environment has nothing of: our secrets, and what makes PySpark a client of Connect
whatever the settings say."""
_PAUSE_SECONDS: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 30.0
_ARCHIVE_IDLE_SECONDS: Final = 20.0
_ARCHIVE_SECONDS: Final = 400.0


class HostPool(Service):
    """The hosts of one runtime."""

    def __init__(self, settings: SparkSettings, *, engine: str, clock: Clock | None = None) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock or SystemClock()
        self._guard = Guard()
        self._places = HostFolders(settings.data)
        self._waiting: deque[Bundle] = deque()
        self._current: HostProcess | None = None
        self._all: set[HostProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_starting = False
        self._is_stopped = True
        self._is_expected = False
        self._failures = 0
        self._idle: asyncio.TimerHandle | None = None
        self._is_archive_tried = False

    @property
    def hosts(self) -> tuple[HostProcess, ...]:
        """Those that get work, and those that do not any more."""
        return tuple(self._all)

    @property
    def pids(self) -> tuple[int, ...]:
        """The host processes there are."""
        return tuple(host.pid for host in self._all if not host.is_gone)

    @property
    def jvms(self) -> tuple[int, ...]:
        """The JVMs of hosts that are ready."""
        return tuple(host.ready.jvm for host in self._all if host.ready is not None)

    @property
    def is_busy(self) -> bool:
        """Whether something waits or runs here."""
        return bool(self._waiting) or any(host.bundles for host in self._all)

    def has(self, bundle: Bundle) -> bool:
        """Whether this bundle waits or runs here."""
        return bundle in self._waiting or any(bundle.number in each.bundles for each in self._all)

    async def start(self) -> None:
        self._is_stopped = False
        await asyncio.to_thread(self._places.open)

    async def stop(self) -> None:
        self._is_stopped = True
        self._disarm()
        waiting = tuple(self._waiting)
        self._waiting.clear()
        for host in self._all:
            # So that what ends now is told to have been stopped, and nothing else.
            host.is_retired = True
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        for bundle in waiting:
            bundle.fail(_stopped())
        await asyncio.to_thread(self._guard.close)
        await asyncio.to_thread(self._places.close)

    def expect(self) -> None:
        """There will be work: have a host ready."""
        self._is_expected = True
        self._ensure()

    def submit(self, bundle: Bundle) -> None:
        """Have a bundle run when there is room."""
        if self._is_stopped:
            bundle.fail(_stopped())
            return
        self._waiting.append(bundle)
        self._pump()

    async def drop(self, bundle: Bundle, ticket: Ticket) -> None:
        """Nobody waits for this ticket, whose future is cancelled. Returns when nothing of it runs.

        The last of a bundle that has not ended within the grace ends the host with it, at once or
        when its neighbours have ended.
        """
        host = next((each for each in self._all if bundle.number in each.bundles), None)
        if host is None:
            bundle.tickets.pop(ticket.work.task_id, None)
            if not bundle.tickets and bundle in self._waiting:
                self._waiting.remove(bundle)
                # What came later may have waited for it alone.
                self._pump()
            return
        host.drop(bundle, ticket)
        if bundle.is_stuck or not bundle.is_vain:
            return
        try:
            async with asyncio.timeout(ticket.work.grace_seconds):
                await bundle.let_go()
        except TimeoutError:
            await self._end_stuck(host, bundle)
        except asyncio.CancelledError:
            await self._end_stuck(host, bundle)
            raise

    async def _end_stuck(self, host: HostProcess, bundle: Bundle) -> None:
        if bundle.over.is_set() or not bundle.is_vain:
            return
        _log.warning("run %s does not stop; its host %s is retired", bundle.number, host.pid)
        bundle.is_stuck = True
        bundle.fail(WorkReleased(_BEHIND_STUCK, is_delayed=False))
        self._retire(host)
        self._pump()
        if not host.live:
            await host.destroy()

    def _retire(self, host: HostProcess) -> None:
        """Give it no more work; it ends when its bundles are over, or now."""
        host.is_retired = True
        if self._current is host:
            self._current = None
        if host.live or host.is_leaving:
            return
        host.is_leaving = True
        if host.bundles:
            host.kill()
        else:
            self._spawn(host.leave())

    def _pump(self) -> None:
        """Begin what there is room for."""
        self._disarm()
        if self._waiting:
            self._ensure()
        while self._waiting and self._current is not None:
            if not self._has_room(self._current, self._waiting[0]):
                return
            self._current.begin(self._waiting.popleft())
            if self._is_worn(self._current):
                self._retire(self._current)
                self._ensure()
        self._arm()

    def _has_room(self, host: HostProcess, bundle: Bundle) -> bool:
        if sum(each.live for each in self._all) >= self._settings.parallel:
            return False
        if bundle.runs_alone:
            return not host.bundles
        return not any(each.runs_alone for each in host.bundles.values())

    def _changed(self) -> None:
        """A bundle is over."""
        self._failures = 0
        for host in tuple(self._all):
            if host.is_retired and not host.live:
                self._retire(host)
        if self._current is not None and self._is_worn(self._current):
            self._retire(self._current)
        self._pump()

    def _is_worn(self, host: HostProcess) -> bool:
        is_large = host.resident_bytes >= self._settings.resident_bytes_max
        return is_large or host.tasks_begun >= self._settings.recycle_tasks

    def _ensure(self) -> None:
        """Have a host made, if there is none."""
        if self._current is None and not self._is_starting and not self._is_stopped:
            self._is_starting = True
            self._spawn(self._live())

    async def _live(self) -> None:
        """The life of one host."""
        host: HostProcess | None = None
        reason = _STOPPED
        try:
            await self._clock.sleep(self._pause_seconds())
            host = await self._born()
            ready = await host.greet(self._hello(host), seconds=self._settings.start_seconds)
            _log.info("Spark %s is ready; its log is %s", ready.spark, host.log)
            self._is_starting = False
            self._current = host
            self._pump()
            reason = await host.attend()
        except WorkFailed as error:
            reason = error.message
        except asyncio.CancelledError:
            if host is not None and host.ready is not None:
                await host.leave()
            raise
        finally:
            await self._bury(host, _stopped() if self._is_stopped else WorkFailed(reason))

    async def _bury(self, host: HostProcess | None, error: WorkFailed) -> None:
        """Clear away a host that is gone, or that never came, and have another one made."""
        has_started = host is not None and host.ready is not None
        is_unasked = not self._is_stopped and not (host is not None and host.is_retired)
        if not has_started:
            self._is_starting = False
        if self._current is host:
            self._current = None
        try:
            if host is not None:
                await host.destroy()
        finally:
            if is_unasked:
                self._failures += 1
                _log.warning("a Spark host has died: %s", error.message)
            if host is not None:
                self._all.discard(host)
                host.lose(error)
                self._places.remove(host.folder)
            if not has_started:
                self._fail_waiting(_stopped() if self._is_stopped else WorkReleased(error.message))
            if self._waiting or (self._is_expected and has_started):
                self._ensure()

    def _fail_waiting(self, error: WorkFailed) -> None:
        waiting, self._waiting = self._waiting, deque()
        for bundle in waiting:
            bundle.fail(error)

    async def _born(self) -> HostProcess:
        folder, log = await asyncio.to_thread(self._places.new_host)
        child = await self._child(*_HOST, str(log))
        host = HostProcess(child, folder=folder, log=log, changed=self._changed)
        self._all.add(host)
        return host

    async def _child(self, *command: str) -> RuntimeChild[FromHost]:
        start = LaunchSpec(
            command=(sys.executable, *command),
            environment=_environment(os.environ, self._settings),
        )
        return await RuntimeChild.born(start, guard=self._guard, decoder=from_host)

    def _hello(self, host: HostProcess) -> OpenSession:
        return OpenSession(settings=self._settings, engine=self._engine, folder=str(host.folder))

    def _pause_seconds(self) -> float:
        if not self._failures:
            return 0.0
        return min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * (1 << min(self._failures - 1, 10)))

    def _arm(self) -> None:
        """Have the archive made, if nothing comes for a while."""
        host = self._current
        is_due = host is not None and host.ready is not None and not host.ready.is_archived
        if is_due and not any(each.live for each in self._all) and not self._is_archive_tried:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(_ARCHIVE_IDLE_SECONDS, self._start_archiving)

    def _disarm(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _start_archiving(self) -> None:
        self._is_archive_tried = True
        self._spawn(self._archive())

    async def _archive(self) -> None:
        """Make the archive, once in the life of this runtime; in vain is no harm."""
        folder, log = await asyncio.to_thread(self._places.new_host)
        child = await self._child(*_ARCHIVING, str(log))
        try:
            await child.say(OpenSession(settings=self._settings, engine="", folder=str(folder)))
            async with asyncio.timeout(_ARCHIVE_SECONDS):
                await child.ended.wait()
        except (TimeoutError, WorkFailed):
            _log.warning("the class archive was not made; see %s", log)
        finally:
            await child.destroy()
            self._places.remove(folder)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the Spark runtime failed", exc_info=error)


def _stopped() -> WorkReleased:
    """What becomes of work when the runtime stops."""
    return WorkReleased(_STOPPED, is_delayed=False)


def _environment(ours: Mapping[str, str], settings: SparkSettings) -> Mapping[str, str]:
    """That of the worker, without its own secrets, and with the folders of users' modules."""
    kept = {name: value for name, value in ours.items() if not name.startswith(_NOT_OF_HOSTS)}
    folders = [str(Path(folder).absolute()) for folder in settings.path]
    path = os.pathsep.join([*folders, *filter(None, [ours.get("PYTHONPATH", "")])])
    return {**kept, "PYTHONPATH": path} if path else kept


_LOOK_SECONDS: Final = 1.0


@dataclass(eq=False, slots=True)
class _Pool:
    hosts: HostPool
    used_at: float


class ProfilePools(Service):
    """The hosts of one runtime."""

    def __init__(self, settings: SparkSettings, *, engine: str, clock: Clock | None = None) -> None:
        self._settings = settings
        self._engine = engine
        self._given = clock
        self._clock = clock or SystemClock()
        self.base = HostPool(settings, engine=engine, clock=clock)
        self._pools: dict[bytes, _Pool] = {}
        self._waiting: deque[tuple[SparkSettings, Bundle]] = deque()
        self._looking: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self._is_stopped = True

    @property
    def every(self) -> tuple[HostPool, ...]:
        """Those of all profiles."""
        return (self.base, *(pool.hosts for pool in self._pools.values()))

    async def start(self) -> None:
        self._is_stopped = False
        await self.base.start()

    async def stop(self) -> None:
        self._is_stopped = True
        self._look_now.set()
        if self._looking is not None:
            await self._looking
        waiting, self._waiting = self._waiting, deque()
        for _, bundle in waiting:
            bundle.fail(_stopped())
        await asyncio.gather(*(hosts.stop() for hosts in self.every))

    def submit(self, bundle: Bundle) -> None:
        """Have a bundle run where the settings are those of its job."""
        work = next(iter(bundle.tickets.values())).work
        try:
            settings = profile(self._settings, work.resources)
        except WorkFailed as error:
            bundle.fail(error)
            return
        pool = self._pools.get(settings.digest)
        if settings == self._settings or self._is_stopped:
            self.base.submit(bundle)
        elif pool is not None:
            pool.used_at = self._clock.monotonic()
            pool.hosts.submit(bundle)
        else:
            self._waiting.append((settings, bundle))
            self._look_after()

    async def drop(self, bundle: Bundle, ticket: Ticket) -> None:
        """Nobody waits for this ticket. Returns when nothing of it runs."""
        entry = next((each for each in self._waiting if each[1] is bundle), None)
        if entry is not None:
            bundle.tickets.pop(ticket.work.task_id, None)
            if not bundle.tickets:
                self._waiting.remove(entry)
            return
        hosts = next((each for each in self.every if each.has(bundle)), self.base)
        await hosts.drop(bundle, ticket)

    def _look_after(self) -> None:
        self._look_now.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """Make hosts for what waits, and end those that nobody needs, while there are any."""
        while (self._waiting or self._pools) and not self._is_stopped:
            self._look_now.clear()
            now = self._clock.monotonic()
            for pool in self._pools.values():
                if pool.hosts.is_busy:
                    pool.used_at = now
            while self._waiting and await self._has_room():
                await self._serve_next()
            for key, pool in tuple(self._pools.items()):
                if now - pool.used_at >= self._settings.idle_seconds and not pool.hosts.is_busy:
                    await self._end(key)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._look_now.wait()

    async def _serve_next(self) -> None:
        """Make the hosts that the first of what waits needs, for all that needs the same."""
        if not self._waiting:
            return  # it was dropped meanwhile
        settings, _ = self._waiting[0]
        hosts = HostPool(settings, engine=self._engine, clock=self._given)
        problem: WorkFailed | None = None
        try:
            await hosts.start()
            self._pools[settings.digest] = _Pool(hosts, self._clock.monotonic())
        except OSError as error:
            problem = WorkFailed(f"The folder of Spark cannot be used: {error}.")
        for entry in [each for each in self._waiting if each[0] == settings]:
            self._waiting.remove(entry)
            if problem is None:
                hosts.submit(entry[1])
            else:
                entry[1].fail(problem)

    async def _has_room(self) -> bool:
        """Whether one more may be made; what has nothing to do is ended for it."""
        if len(self._pools) < self._settings.profiles_max:
            return True
        idle = [key for key, pool in self._pools.items() if not pool.hosts.is_busy]
        if not idle:
            return False
        await self._end(min(idle, key=lambda key: self._pools[key].used_at))
        return True

    async def _end(self, key: bytes) -> None:
        # Out of the way first: what comes now gets hosts that live.
        pool = self._pools.pop(key)
        await pool.hosts.stop()


class SparkRuntime(Runtime):
    """Runs jobs on Spark."""

    name = "spark"
    merges = True

    def __init__(
        self,
        settings: SparkSettings | None = None,
        *,
        engine: str = ENGINE,
        clock: Clock | None = None,
    ) -> None:
        """`engine` is what runs work in the host; another one is for tests."""
        self._settings = settings if settings is not None else SparkSettings()
        self._engine = engine
        self._clock = clock
        self._pools: ProfilePools | None = None
        self._gathering: BatchCollector | None = None
        self._temporary = ""

    @property
    def hosts(self) -> HostPool | None:
        """The hosts of jobs without settings of their own, from `start` to `stop`."""
        return self._pools.base if self._pools is not None else None

    @property
    def data(self) -> str:
        """The data folder that is in use."""
        return self._temporary or self._settings.data

    @property
    def pids(self) -> tuple[int, ...]:
        """The host processes there are."""
        every = self._pools.every if self._pools is not None else ()
        return tuple(pid for hosts in every for pid in hosts.pids)

    @property
    def jvms(self) -> tuple[int, ...]:
        """The JVMs of hosts that are ready."""
        every = self._pools.every if self._pools is not None else ()
        return tuple(jvm for hosts in every for jvm in hosts.jvms)

    async def start(self) -> None:
        settings = self._settings
        if not settings.data:
            self._temporary = await asyncio.to_thread(temporary_data)
            # What is thrown away with this runtime is made for nothing.
            settings = replace(settings, data=self._temporary, archive=False)
        self._pools = ProfilePools(settings, engine=self._engine, clock=self._clock)
        self._gathering = BatchCollector(self._pools.submit)
        await self._pools.start()

    async def stop(self) -> None:
        pools, self._pools = self._pools, None
        if pools is not None:
            assert self._gathering is not None
            self._gathering.close()
            await pools.stop()
        if self._temporary:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = ""

    def expect(self) -> None:
        if self._pools is not None:
            self._pools.base.expect()

    def operators(self) -> Collection[str]:
        return OPERATORS

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[RuntimeFault]:
        yield from config_faults(operator, config)
        yield from profile_faults(resources, runtime=self.name)

    def secrets_refused(self, operator: str) -> str:
        if operator == PYTHON:
            return ""
        return f"{operator} runs no code of yours that could use secrets; take them out."

    def untrusted_refused(self) -> str:
        return (
            f"Tasks of the runtime {self.name} share a session that has the worker's own rights, so"
            " it runs no untrusted code; write runtime: process or runtime: lambda."
        )

    def partition_by_refused(self, config: Mapping[str, Any]) -> str:
        if not config.get("partition_wise"):
            return ""
        return (
            "partition_wise makes the partition of each task, and `partition_by` whichever are in"
            " the result; take one of the two out."
        )

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        pools, gathering = self._pools, self._gathering
        if pools is None or gathering is None:
            raise _stopped()
        ticket = Ticket(work, reporter, asyncio.get_running_loop().create_future())
        reporter.timed(is_running=False)
        bundle = gathering.add(ticket)
        try:
            return await ticket.end
        except asyncio.CancelledError:
            if not gathering.drop(ticket):
                await pools.drop(bundle, ticket)
            raise


def spark(settings: Mapping[str, Any]) -> SparkRuntime:
    """The runtime of these settings."""
    return SparkRuntime(read_spark_settings(settings, runtime=SparkRuntime.name))
