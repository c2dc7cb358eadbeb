"""The runtime `thread`: users' functions side by side in one child process of the worker.

For trusted functions that wait for others most of the time, `async def` or plain, and that want
no process of their own: `penstock.runtimes.thread_host` says how they run and how they are
stopped. One process, the *host*, runs all tasks of the runtime; it is started when there is a
task, and ended when there was none for `idle_seconds`. It is *retired*, which means that it
gets no more tasks and is ended after the last one, when it has run `tasks_max`, or when a task
in it finds that the user's code has changed since it was imported; then the task begins in
another host.

| ends | what becomes of the tasks in it |
|---|---|
| a function, whatever it raises | the others go on |
| a task that does not stop in its time | its host is ended; the others are released, uncounted |
| the host: a crash, no memory, `os._exit` | see below |
| the worker | the host, and what is in its group, by its socket, the kernel and the guard |

A host that dies has failed the task that was alone in it. Of several nobody knows whose fault it
was: all are released uncounted, and run alone the next time (decision 0035).

A task has its token and credentials in files (`task.token`, `task.credentials`), and never in
the environment, which all of them share. There is no bound of memory. Untrusted work is
refused.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.kernel.framed_child import FrameChannel
from penstock.kernel.settings_schema import read_table, setting
from penstock.runtimes.base import AttemptWork, Runtime, RuntimeFault, WorkReporter, WorkResult
from penstock.runtimes.child_process import LaunchSpec, RuntimeChild, codec_of
from penstock.runtimes.frames import (
    BeginTask,
    CallStyle,
    ChildDone,
    ChildFailed,
    FromChild,
    OpenTask,
    StaleCode,
    StopTask,
    from_child,
)
from penstock.runtimes.guard import Guard
from penstock.runtimes.process import (
    STALE_MAX,
    FunctionRuntimeSettings,
    TaskSession,
    always_stale,
    child_environment,
    finished,
)
from penstock.runtimes.user_code import FUNCTION_FORM, installed_operators, reference

_HOST: Final = ("-m", "penstock.runtimes.thread_host", "")
_WHO: Final = "The process of the runtime thread"
_IN_COMPANY: Final = " Other tasks ran in it, so it is not counted, and runs alone the next time."
_ENDED_FOR_ANOTHER: Final = (
    "Another task of the runtime thread did not stop in its time, and its process had to be ended."
)


@dataclass(frozen=True, kw_only=True)
class ThreadSettings(FunctionRuntimeSettings):
    """The settings of the runtime `thread`."""

    tasks_max: int = setting(10_000, least=1)
    """After how many tasks the host is replaced."""


@dataclass(slots=True, eq=False)
class _Host:
    child: RuntimeChild[FromChild]
    is_alone: bool
    """Whether it is for one task only."""
    talks: set[FrameChannel[FromChild]] = field(default_factory=set)
    begun: int = 0
    is_retired: bool = False
    is_ended_for_one: bool = False
    company: int = 0
    """How many tasks were in it when it was found to be gone."""
    timer: asyncio.TimerHandle | None = None

    async def open(self) -> FrameChannel[FromChild]:
        """A line to it for one more task."""
        ours, theirs = socket.socketpair()
        talk: FrameChannel[FromChild] = FrameChannel(codec_of(from_child))
        with theirs:
            await talk.open(ours)
            self.child.hand(OpenTask(), theirs.fileno())
        self.talks.add(talk)
        self.begun += 1
        if self.timer is not None:
            self.timer.cancel()
        return talk

    async def why_gone(self) -> WorkFailed:
        """What the end of this process is to a task that was in it."""
        self.company = self.company or len(self.talks)
        if self.is_ended_for_one:
            return WorkReleased(_ENDED_FOR_ANOTHER, is_delayed=False)
        why = await self.child.why_ended(_WHO)
        if self.company > 1:
            return WorkReleased(f"{why}{_IN_COMPANY}", is_delayed=False, runs_alone=True)
        return WorkFailed(why, runs_alone=True)


class ThreadRuntime(Runtime):
    """Runs `module:function` for each task, many in one process."""

    name = "thread"
    joins_batches = False
    hands_over = True

    def __init__(self, settings: ThreadSettings | None = None) -> None:
        self._settings = settings if settings is not None else ThreadSettings()
        self._installed = installed_operators()
        path = self._settings.search_path(os.environ.get("PYTHONPATH", ""))
        self._start = LaunchSpec(
            command=(*self._settings.interpreter(), *_HOST),
            environment=child_environment(os.environ, path),
        )
        self._guard = Guard()
        self._hosts: set[_Host] = set()
        self._starting = asyncio.Lock()
        self._is_stopped = False

    @property
    def pids(self) -> Sequence[int]:
        """The processes there are."""
        return [each.child.pid for each in self._hosts if not each.child.ended.is_set()]

    async def start(self) -> None:
        self._is_stopped = False

    async def stop(self) -> None:
        self._is_stopped = True
        async with asyncio.TaskGroup() as group:
            for host in self._hosts:
                if host.timer is not None:
                    host.timer.cancel()
                group.create_task(host.child.destroy())
        self._hosts.clear()
        await asyncio.to_thread(self._guard.close)

    def operators(self) -> Collection[str] | None:
        return None

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[RuntimeFault]:
        del config  # the user's own
        if self._function(operator) is None:
            yield RuntimeFault(
                "operator", f"Write your function as {FUNCTION_FORM}, as in feeds.ask:ask."
            )
        for name in resources:
            message = (
                f"Tasks of the runtime {self.name} share a process, and nothing bounds one of them;"
                " take it out, or write runtime: process."
            )
            yield RuntimeFault(f"resources.{name}", message)

    def secrets_refused(self, operator: str) -> str:
        del operator
        return ""

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        wanted = self._function(work.operator)
        if wanted is None:
            raise WorkReleased(
                f"{work.operator!r} is neither of the form {FUNCTION_FORM} nor offered by a package"
                " that is installed for this worker."
            )
        if work.is_untrusted:
            raise WorkFailed(self.untrusted_refused(), is_retried=False)
        begin = BeginTask(style=CallStyle.TASK, entry=str(wanted), work=work)
        reporter.begins()
        for _ in range(STALE_MAX):
            host = await self._host(is_alone=work.runs_alone)
            ended = await self._run_in(host, begin, reporter)
            if isinstance(ended, ChildDone | ChildFailed):
                return finished(ended)
            host.is_retired = True
            self._end_if_idle(host)
        raise always_stale()

    async def _run_in(
        self, host: _Host, begin: BeginTask, reporter: WorkReporter
    ) -> ChildDone | ChildFailed | StaleCode:
        talk = await host.open()
        conversation = TaskSession(talk, reporter)
        try:
            await talk.say(begin)
            ended = await conversation.until_end()
        except asyncio.CancelledError:
            await self._let_end(host, talk, conversation, begin.work.grace_seconds)
            raise
        else:
            if ended is None:
                raise await host.why_gone()
            return ended
        finally:
            host.talks.discard(talk)
            talk.close()
            self._end_if_idle(host)

    @staticmethod
    async def _let_end(
        host: _Host, talk: FrameChannel[FromChild], conversation: TaskSession, seconds: float
    ) -> None:
        """Ask the function to end, and end its process if it does not."""
        is_over = False
        try:
            with suppress(TimeoutError, WorkFailed):
                async with asyncio.timeout(seconds):
                    await talk.say(StopTask())
                    await conversation.until_end()
                    is_over = True
        finally:
            if not is_over:
                host.is_ended_for_one = host.is_retired = True
                await host.child.destroy()

    async def _host(self, *, is_alone: bool) -> _Host:
        """The process for one more task."""
        async with self._starting:
            if self._is_stopped:
                raise WorkReleased("The runtime was stopped.", is_delayed=False)
            self._hosts = {each for each in self._hosts if not each.child.is_closed}
            for host in () if is_alone else self._hosts:
                is_full = host.begun >= self._settings.tasks_max
                if not (is_full or host.is_retired or host.is_alone or host.child.ended.is_set()):
                    return host
            child = await RuntimeChild.born(self._start, guard=self._guard, decoder=from_child)
            host = _Host(child, is_alone)
            self._hosts.add(host)
            if not is_alone:
                self._end_if_idle(host)
            return host

    def _end_if_idle(self, host: _Host) -> None:
        if host.talks or self._is_stopped:
            return
        if host.is_retired or host.is_alone or host.begun >= self._settings.tasks_max:
            host.child.kill()
            return
        if host.timer is not None:
            host.timer.cancel()
        loop = asyncio.get_running_loop()
        host.timer = loop.call_later(self._settings.idle_seconds, host.child.kill)

    def _function(self, operator: str) -> object | None:
        return self._installed.get(operator) or reference(operator)


def thread(settings: Mapping[str, Any]) -> ThreadRuntime:
    """The runtime of these settings."""
    return ThreadRuntime(read_table(ThreadSettings, settings, whose="the runtime thread"))
