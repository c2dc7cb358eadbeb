"""One host process as the runtime sees it, the work on its way to it, and its folders.

Imports no Spark. A *ticket* is one call of `run`: its work, its reporter, and how it ends. A
*bundle* is what one host runs as one: a ticket, or those of a batch. Bundles are *gathering*
until all tickets of the batch have come or a moment has passed, then *waiting* for a place,
*running* in a host, and *over*. A ticket that is dropped leaves a bundle that is not running
yet; in one that runs it stays, unwanted. While it runs it is *serving* some of its tickets, or
all: the time limits of the others wait.

A host is *starting* until it reports that it is ready, then *ready*, *retired* when it gets no
more work, and gone. Its frames are passed to the tickets that they are about. When the host is
gone, in whatever way, every ticket in it that has not ended fails with the reason: it was alone
in there, or it is released, because nobody knows whose fault it was, and runs alone the next
time.

    {data}/logs/spark-host-{name}.log       what a host, its JVM and Spark's workers print
    {data}/spark/hosts/{runtime}/{number}   what a host spills; removed after its end
    {data}/spark/hosts/{runtime}/held       locked as long as the runtime lives

`{data}/spark`, where fetched files are too, is closed to other users. What a killed runtime has
left behind is removed when the next one opens: nobody holds its lock. Of logs the newest are
kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.runtimes.base import AttemptWork, WorkReporter, WorkResult
from penstock.runtimes.child_process import RuntimeChild
from penstock.runtimes.spark.frames import (
    DropTask,
    EndHost,
    FromHost,
    GiveWork,
    HostBroken,
    HostMemory,
    HostReady,
    OpenSession,
    RunFocus,
    RunOver,
    RunProgress,
    StartRun,
    TaskEnded,
)

LOGS_MAX: Final = 20
_HELD: Final = "held"


class HostFolders:
    """Makes and removes folders. Its methods do not run at the same time."""

    def __init__(self, data: str, *, entropy: Entropy | None = None) -> None:
        self._data = Path(data).absolute()
        self._name = new_id(entropy or system_entropy(), characters=8)
        self._held: int | None = None
        self._hosts = 0

    @property
    def folder(self) -> Path:
        """That of this runtime."""
        return self._data / "spark" / "hosts" / self._name

    def open(self) -> None:
        """Make the folder of this runtime, and remove those of dead ones."""
        # Fetched files and what Spark spills are data, and no other user's to read.
        ours = self._data / "spark"
        ours.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours.chmod(0o700)
        hosts = self.folder.parent
        hosts.mkdir(exist_ok=True)
        gate = os.open(hosts, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One at a time: a folder that is made and not held yet looks like one of the dead.
            fcntl.flock(gate, fcntl.LOCK_EX)
            self.folder.mkdir(exist_ok=True)
            self._held = _held(self.folder)
            self._remove_dead(hosts)
        finally:
            os.close(gate)

    def _remove_dead(self, hosts: Path) -> None:
        for other in hosts.iterdir():
            if other == self.folder or not other.is_dir():
                continue
            with suppress(OSError):
                lock = _held(other)
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)

    def new_host(self) -> tuple[Path, Path]:
        """A folder and a log for another host."""
        self._hosts += 1
        folder = self.folder / str(self._hosts)
        folder.mkdir(parents=True, exist_ok=True)
        logs = self._data / "logs"
        logs.mkdir(mode=0o750, parents=True, exist_ok=True)
        kept = sorted(logs.glob("spark-host-*.log"), key=_changed_at, reverse=True)
        for old in kept[LOGS_MAX - 1 :]:
            old.unlink(missing_ok=True)
        return folder, logs / f"spark-host-{self._name}-{self._hosts}.log"

    def remove(self, folder: Path) -> None:
        """Remove the folder of a host that is gone."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all that is left of this runtime, but for logs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None


def temporary_data() -> str:
    """A data folder for a runtime that was given none."""
    return tempfile.mkdtemp(prefix="penstock-spark-")


def _held(folder: Path) -> int:
    """The lock of a folder; `OSError` if it is held."""
    opened = os.open(folder / _HELD, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


GATHER_SECONDS: Final = 0.05


@dataclass(eq=False, slots=True)
class Ticket:
    """One call of `run`."""

    work: AttemptWork
    reporter: WorkReporter
    end: asyncio.Future[WorkResult]
    """Cancelled if nobody waits for it any more."""

    def finish(self, finished: WorkResult) -> None:
        if not self.end.done():
            self.end.set_result(finished)

    def fail(self, error: WorkFailed) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def tell(self, said: Mapping[str, Any]) -> None:
        if not self.end.done():
            self.reporter.progress(said)

    def time(self, *, is_running: bool) -> None:
        if not self.end.done():
            self.reporter.timed(is_running=is_running)


@dataclass(eq=False, slots=True)
class Bundle:
    """Tickets that are run as one, by the id of their task."""

    number: int
    expected: int
    tickets: dict[int, Ticket] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing of it runs any more."""
    is_stuck: bool = False
    """It was asked to end, and has not."""
    serving: frozenset[int] = frozenset()
    """The tasks that it works for now."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def runs_alone(self) -> bool:
        """Whether nothing else may run in its host."""
        return any(ticket.work.runs_alone for ticket in self.tickets.values())

    @property
    def left(self) -> int:
        """How many tickets have not ended by themselves: they may run, wanted or not."""
        ends = (ticket.end for ticket in self.tickets.values())
        return sum(1 for end in ends if not end.done() or end.cancelled())

    @property
    def is_vain(self) -> bool:
        """Whether it works for nobody who waits, though others of it may."""
        ends = [ticket.end for number, ticket in self.tickets.items() if number in self.serving]
        return any(end.cancelled() for end in ends) and all(end.done() for end in ends)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for something of it."""
        return any(not ticket.end.done() for ticket in self.tickets.values())

    def serve(self, task_ids: Iterable[int]) -> None:
        """From now on it works for these: their time begins, and that of the others waits."""
        self.serving = frozenset(task_ids)
        for number, ticket in self.tickets.items():
            ticket.time(is_running=number in self.serving)
        self._move()

    def close(self) -> None:
        """Nothing of it runs any more."""
        self.over.set()
        self._move()

    async def let_go(self) -> None:
        """Return when it is over, or works for somebody who waits."""
        while self.is_vain and not self.over.is_set():
            await self._moved.wait()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def fail(self, error: WorkFailed) -> None:
        """End whatever of it has not ended."""
        for ticket in self.tickets.values():
            # Each raises one of its own: a traceback belongs to one.
            ticket.fail(copy(error))


class BatchCollector:
    """Puts tickets of one batch into one bundle."""

    def __init__(self, whole: Callable[[Bundle], None]) -> None:
        """`whole` is given every bundle that is to be run."""
        self._whole = whole
        self._bundles: dict[str, tuple[Bundle, asyncio.TimerHandle]] = {}
        self._number = 0

    def add(self, ticket: Ticket) -> Bundle:
        """The bundle that the ticket is in."""
        batch, task_id = ticket.work.batch, ticket.work.task_id
        if not batch or ticket.work.batch_size < 2 or ticket.work.runs_alone:
            bundle = self._new(1)
            bundle.tickets[task_id] = ticket
            self._whole(bundle)
            return bundle
        if batch in self._bundles and task_id in self._bundles[batch][0].tickets:
            self._close(batch)
        if batch not in self._bundles:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(GATHER_SECONDS, self._close, batch)
            self._bundles[batch] = (self._new(ticket.work.batch_size), timer)
        bundle, _ = self._bundles[batch]
        bundle.tickets[task_id] = ticket
        if len(bundle.tickets) >= bundle.expected:
            self._close(batch)
        return bundle

    def drop(self, ticket: Ticket) -> bool:
        """Take a ticket out, if it is in a bundle that is still gathering."""
        batch, task_id = ticket.work.batch, ticket.work.task_id
        bundle = self._bundles[batch][0] if batch in self._bundles else None
        if bundle is None or bundle.tickets.get(task_id) is not ticket:
            return False
        del bundle.tickets[task_id]
        bundle.expected -= 1
        if len(bundle.tickets) >= bundle.expected:
            self._close(batch)
        return True

    def close(self) -> None:
        """Gather no longer."""
        for batch in tuple(self._bundles):
            self._close(batch)

    def _new(self, expected: int) -> Bundle:
        self._number += 1
        return Bundle(self._number, expected)

    def _close(self, batch: str) -> None:
        bundle, timer = self._bundles.pop(batch)
        timer.cancel()
        if bundle.tickets:
            self._whole(bundle)


_log = logging.getLogger(__name__)

_WHO: Final = "The process of Spark"
_IN_COMPANY: Final = " Other tasks ran in it, so it is not counted, and runs alone the next time."
_SILENT: Final = "The process of Spark returned no result for this task."
_BYE_SECONDS: Final = 10.0


class HostProcess:
    """A host, and the bundles in it."""

    def __init__(
        self, child: RuntimeChild[FromHost], *, folder: Path, log: Path, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when a bundle is over."""
        self.folder = folder
        self.log = log
        self.bundles: dict[int, Bundle] = {}
        self.is_retired = False
        self.is_leaving = False
        self.tasks_begun = 0
        self.resident_bytes = 0
        self.ready: HostReady | None = None
        self._child = child
        self._changed = changed

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_gone(self) -> bool:
        return self._child.ended.is_set()

    @property
    def live(self) -> int:
        """How many bundles run in it, without those that are stuck."""
        return sum(1 for bundle in self.bundles.values() if not bundle.is_stuck)

    async def greet(self, hello: OpenSession, *, seconds: float) -> HostReady:
        """Have it make a session; `WorkFailed` if it does not."""
        try:
            async with asyncio.timeout(seconds):
                await self._child.say(hello)
                heard = await self._child.hear()
        except TimeoutError:
            raise WorkFailed(
                f"The session of Spark did not start within {seconds:g} s; see {self.log}."
            ) from None
        match heard:
            case HostReady():
                self.ready = heard
                return heard
            case HostBroken(reason=reason):
                raise WorkFailed(reason)
            case _:
                raise WorkFailed(f"{await self._child.why_ended(_WHO)} See {self.log}.")

    async def attend(self) -> str:
        """Hear it until it is gone; returns why that is."""
        while True:
            try:
                heard = await self._child.hear()
            except WorkFailed as error:
                return error.message
            match heard:
                case None:
                    return f"{await self._child.why_ended(_WHO)} See {self.log}."
                case HostBroken(reason=reason):
                    return reason
                case RunOver(run=number):
                    self._over(number)
                case HostMemory(bytes=size):
                    self.resident_bytes = size
                case RunProgress() | RunFocus() | TaskEnded():
                    self._pass_on(heard)
                case HostReady():
                    pass

    def begin(self, bundle: Bundle) -> None:
        """Have it run a bundle."""
        self.bundles[bundle.number] = bundle
        self.tasks_begun += len(bundle.tickets)
        for ticket in bundle.tickets.values():
            try:
                ticket.reporter.begins()
                self._child.tell(GiveWork(run=bundle.number, work=ticket.work))
            except InvalidInput as error:
                ticket.fail(WorkFailed(error.message, is_retried=False))
        if bundle.is_wanted:
            # Until it says otherwise.
            bundle.serve(bundle.tickets)
            self._child.tell(StartRun(run=bundle.number))
        else:
            self._over(bundle.number)

    def drop(self, bundle: Bundle, ticket: Ticket) -> None:
        """Tell it that nobody wants this any more."""
        if bundle.number in self.bundles:
            self._child.tell(DropTask(run=bundle.number, task_id=ticket.work.task_id))

    def kill(self) -> None:
        """End it by force, without waiting."""
        self._child.send_signal(signal.SIGKILL)

    async def leave(self) -> None:
        """End it politely, within a bound."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_BYE_SECONDS):
                await self._child.say(EndHost())
                await self._child.ended.wait()
        await self.destroy()

    async def destroy(self) -> None:
        """End it by force; returns when it is gone."""
        await self._child.destroy()

    def lose(self, error: WorkFailed) -> None:
        """It is gone: fail what was in it, or release it."""
        if not isinstance(error, WorkReleased):
            error = self._died(error.message)
        for bundle in tuple(self.bundles.values()):
            bundle.fail(error)
            bundle.close()
        self.bundles.clear()

    def _died(self, reason: str) -> WorkFailed:
        if sum(bundle.left for bundle in self.bundles.values()) > 1:
            return WorkReleased(f"{reason}{_IN_COMPANY}", is_delayed=False, runs_alone=True)
        return WorkFailed(reason, runs_alone=True)

    def _over(self, number: int) -> None:
        bundle = self.bundles.pop(number, None)
        if bundle is not None:
            bundle.fail(WorkFailed(_SILENT))
            bundle.close()
            self._changed()

    def _pass_on(self, heard: RunProgress | RunFocus | TaskEnded) -> None:
        bundle = self.bundles.get(heard.run)
        tickets = bundle.tickets if bundle is not None else {}
        if isinstance(heard, RunFocus):
            if bundle is not None:
                bundle.serve(heard.task_ids)
        elif isinstance(heard, RunProgress):
            for task_id in heard.task_ids:
                if task_id in tickets:
                    tickets[task_id].tell(heard.said)
        elif heard.task_id in tickets:
            ticket = tickets[heard.task_id]
            if heard.finished is not None:
                ticket.finish(heard.finished)
            elif heard.is_released:
                ticket.fail(WorkReleased(heard.reason))
            else:
                ticket.fail(WorkFailed(heard.reason, is_retried=heard.is_retried))
