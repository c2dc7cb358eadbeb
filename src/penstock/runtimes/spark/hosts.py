"""Which host gets which work, and how long hosts live. Imports no Spark.

There is at most one host that gets work: made when work is expected or comes, and made anew when it
is gone, with pauses that grow while hosts end before they have done anything. `parallel` bundles
run at a time, in all hosts together; the rest waits here, where dropping it costs nothing.

A host is *retired*, gets no more work, and ends when its last bundle is over,

- when a bundle that was dropped as a whole has not ended within its grace: the code of a user holds
  a thread that nobody can take from it. Neighbours in that host go on; the bundle does not count
  any more, and what it still does can reach no reader;
- when it has run `recycle_tasks` tasks or is larger than `resident_bytes_max`.

The same is done if the one task of a batch that is being worked for was dropped and does not end;
the others of the batch are handed back then.

A bundle that *runs alone* begins when the host that gets work has nothing in it, and until it is
over nothing else begins there. Bundles begin in the order in which they came: one that runs alone
waits for those that run, which have time limits, and those that came later wait for it. Nobody's
own time limit runs while it waits. A host that dies takes what is in it along: see `hosting`. One
that does not start hands back what waits, since another worker may have what it lacks.

Once a host has been idle for a while, the archive of classes is made, if there is none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.kernel.service import Service
from penstock.runtimes.guard import Guard
from penstock.runtimes.offspring import Offspring, Start
from penstock.runtimes.spark.bundles import Bundle, Ticket
from penstock.runtimes.spark.frames import FromHost, Hello, from_host
from penstock.runtimes.spark.hosting import HostProcess
from penstock.runtimes.spark.places import HostPlaces
from penstock.runtimes.spark.settings import SparkSettings

_log = logging.getLogger(__name__)

_STOPPED: Final = "The runtime was stopped."
_BEHIND_STUCK: Final = "A task of its batch was to end, and does not; this one is handed back."
_HOST: Final = ("-m", "penstock.runtimes.spark.host")
_ARCHIVING: Final = ("-m", "penstock.runtimes.spark.archiving")
_OURS: Final = "PENSTOCK_"
_PAUSE_SECONDS: Final = 0.5
_PAUSE_SECONDS_MAX: Final = 30.0
_ARCHIVE_IDLE_SECONDS: Final = 20.0
_ARCHIVE_SECONDS: Final = 400.0


class Hosts(Service):
    """The hosts of one runtime."""

    def __init__(self, settings: SparkSettings, *, engine: str, clock: Clock | None = None) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock or SystemClock()
        self._guard = Guard()
        self._places = HostPlaces(settings.data)
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
            bundle.fail(stopped())
        await asyncio.to_thread(self._guard.close)
        await asyncio.to_thread(self._places.close)

    def expect(self) -> None:
        """There will be work: have a host ready."""
        self._is_expected = True
        self._ensure()

    def submit(self, bundle: Bundle) -> None:
        """Have a bundle run when there is room."""
        if self._is_stopped:
            bundle.fail(stopped())
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
        _log.warning("run %s does not end; its host %s is retired", bundle.number, host.pid)
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
            await self._bury(host, stopped() if self._is_stopped else WorkFailed(reason))

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
                _log.warning("a host of Spark is gone: %s", error.message)
            if host is not None:
                self._all.discard(host)
                host.lose(error)
                self._places.remove(host.folder)
            if not has_started:
                self._fail_waiting(stopped() if self._is_stopped else WorkReleased(error.message))
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

    async def _child(self, *command: str) -> Offspring[FromHost]:
        start = Start(
            command=(sys.executable, *command),
            environment=_environment(os.environ, self._settings),
        )
        return await Offspring.born(start, guard=self._guard, decoder=from_host)

    def _hello(self, host: HostProcess) -> Hello:
        return Hello(settings=self._settings, engine=self._engine, folder=str(host.folder))

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
            await child.say(Hello(settings=self._settings, engine="", folder=str(folder)))
            async with asyncio.timeout(_ARCHIVE_SECONDS):
                await child.ended.wait()
        except (TimeoutError, WorkFailed):
            _log.warning("the archive of classes was not made; see %s", log)
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
            _log.error("the runtime of Spark failed in itself", exc_info=error)


def stopped() -> WorkReleased:
    """What becomes of work when the runtime stops."""
    return WorkReleased(_STOPPED, is_delayed=False)


def _environment(ours: Mapping[str, str], settings: SparkSettings) -> Mapping[str, str]:
    """That of the worker, without its own secrets, and with the folders of users' modules."""
    kept = {name: value for name, value in ours.items() if not name.startswith(_OURS)}
    folders = [str(Path(folder).absolute()) for folder in settings.path]
    path = os.pathsep.join([*folders, *filter(None, [ours.get("PYTHONPATH", "")])])
    return {**kept, "PYTHONPATH": path} if path else kept
