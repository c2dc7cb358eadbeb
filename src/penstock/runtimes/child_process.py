"""Child processes as their runtime sees them: started or forked, guarded, bounded, and reaped.

They are those of `penstock.kernel.framed_child`, with what a runtime adds: its guard knows the
group of each before anything of the user runs in it, and the whole session ends with a child.

A child of untrusted work runs as a user of its own, and is started through `privileges`. What
it has started is found by that user, wherever it has hidden itself, and killed before `ended`
is set. It prints to its log only, which is opened here: the user needs no access to it.

`ForkServers` is the runtime's side of `penstock.runtimes.fork_server`, where the states are. A
fork server is begun when the first child of its function is wanted, which waits for it: that
takes as long as starting a child would. It is retired when the code on disk is not what it has
imported, and ended when its last fork is gone; so is one from which nothing was forked for a
while. Whether a function has one that fits is remembered, and checked anew after a while or
when its code has changed: the log says once why children of it are started instead. A fork is
handed to nobody before the guard knows it, and nothing of a task runs in it before that. A fork
that nobody waits for any more is ended. What goes wrong with a fork server ends it and starts
the child: no task fails for it. A forked child differs in this alone: its end shows by a pidfd,
and the fork server reaps it.

Called by `process`, `thread` and the Spark host pool, from the event loop. A crash of the
runtime ends fork servers and children by their sockets, the kernel and the guard.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.kernel.framed_child import FrameCodec, FramedChild, StartedProcess
from penstock.runtimes import privileges
from penstock.runtimes.frames import (
    FRAME_BYTES_MAX,
    CallStyle,
    ChildForked,
    ChildReaped,
    ForkChild,
    FromChild,
    FromTemplate,
    LoadModule,
    ModuleLoaded,
    ReapChild,
    decode_frame,
    encode_frame,
    from_child,
    from_template,
)
from penstock.runtimes.guard import (
    Guard,
    kill_session,
    kill_user,
    resident_bytes,
    session_members,
    user_processes,
)
from penstock.runtimes.resource_limits import Cgroup

Heard = TypeVar("Heard")
"""What a child may say: a union of frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """How a child is started."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    user: int = 0
    """The user of untrusted work that it runs as; 0 for our own."""
    log: str = ""
    """Where a child of another user prints to; empty for nowhere."""
    cgroup: Cgroup | None = None
    """The control group that it runs in, which ends with it."""


def codec_of(decoder: msgspec.json.Decoder[Heard]) -> FrameCodec[Heard]:
    """What is said to processes that run users' code; what they may say is told by the decoder."""
    return FrameCodec(
        encode_frame, partial(decode_frame, decoder=decoder), FRAME_BYTES_MAX, WorkFailed
    )


class _SessionLeader(StartedProcess):
    """One whose whole session ends with it: Spark's Python workers have groups of their own."""

    def kill_session(self) -> None:
        kill_session(self.pid)


class RuntimeChild(FramedChild[Heard]):
    """A child process of a runtime, which its guard knows."""

    def __init__(
        self,
        process: StartedProcess,
        guard: Guard,
        *,
        decoder: msgspec.json.Decoder[Heard],
        user: int = 0,
        cgroup: Cgroup | None = None,
    ) -> None:
        self._user = user
        self._cgroup = cgroup
        self._has_overrun = False
        self._guard = guard
        self.tasks_begun = 0
        super().__init__(process, codec_of(decoder))

    @classmethod
    async def born(
        cls, start: LaunchSpec, *, guard: Guard, decoder: msgspec.json.Decoder[Heard]
    ) -> RuntimeChild[Heard]:
        """Start a child. The number of this process is added to the command."""
        try:
            process, ours = _started(start, guard)
        except OSError as error:
            if start.cgroup is not None:
                await asyncio.to_thread(start.cgroup.remove)
            what = error.filename or start.command[0]
            raise WorkReleased(
                f"No child process can be started: {error.strerror or error} ({what})."
            ) from error
        child = cls(process, guard, decoder=decoder, user=start.user, cgroup=start.cgroup)
        await child.open(ours)
        return child

    @property
    def is_in_cgroup(self) -> bool:
        """Whether the kernel bounds what all its processes use together."""
        return self._cgroup is not None

    @property
    def has_overrun(self) -> bool:
        """Whether processes of it were ended because they used more memory than they may."""
        if not self._has_overrun and self._cgroup is not None:
            self._has_overrun = self._cgroup.has_overrun()
        return self._has_overrun

    def bytes_used(self) -> int:
        """How much memory its processes use together, as far as they can be found. It blocks."""
        found = user_processes(self._user) if self._user else session_members(self.pid)
        return sum(map(resident_bytes, found))

    def end_overrun(self) -> None:
        """End it because it uses more memory than it may."""
        self._has_overrun = True
        self.kill()

    def at_end(self) -> None:
        if self._user:
            # While the guard still knows of it. Whether any is left is seen by whoever gives the
            # user back.
            with suppress(OSError):
                kill_user(self._user)

    def before_reaping(self) -> None:
        self._guard.forget(self.pid)

    def after_reaping(self) -> None:
        if self._cgroup is not None:
            self._has_overrun = self.has_overrun
            self._cgroup.remove()


def _started(start: LaunchSpec, guard: Guard) -> tuple[_SessionLeader, socket.socket]:
    command = start.command
    if start.user:
        # As root until it has given that up: the user may not be able to run our own Python.
        command = [sys.executable, "-I", "-S", privileges.__file__, str(start.user), *command]
    with _printing(start) as prints:
        process, ours = _SessionLeader.start(command, environment=start.environment, **prints)
    try:
        guard.watch(process.pid, user=start.user)
        if start.cgroup is not None:
            # Before it is told of any work: nothing of the user has run.
            start.cgroup.admit(process.pid)
    except OSError:
        ours.close()
        os.kill(process.pid, signal.SIGKILL)
        # Before its number is free for others, whom the guard would kill.
        guard.forget(process.pid)
        process.reap()
        raise
    return process, ours


@contextmanager
def _printing(start: LaunchSpec) -> Iterator[dict[str, Any]]:
    """Where a child prints to. One of another user has nothing of ours, such as a terminal."""
    if not start.user:
        yield {"stdout": subprocess.DEVNULL}
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    file = (
        os.open(start.log, flags | os.O_CREAT, 0o640) if start.log else os.open(os.devnull, flags)
    )
    try:
        yield {"stdout": file, "stderr": file}
    finally:
        os.close(file)


_log = logging.getLogger(__name__)

_LOAD_SECONDS_MAX: Final = 60.0
_ANSWER_SECONDS_MAX: Final = 5.0
_IDLE_SECONDS_MIN: Final = 5.0
_UNFIT_SECONDS: Final = 300.0
"""After how long a function that no child could be forked for is tried again."""
_UNKNOWN: Final = -int(signal.SIGKILL)
"""How forks of a template that is gone have ended: the kernel kills them."""

ForkKey = tuple[CallStyle, str]
"""What is imported, for calls of which style."""


class _Gone(Exception):
    """The fork server does not answer."""


@dataclass(slots=True, eq=False)
class _Template:
    """One fork server process, and its forks."""

    process: RuntimeChild[FromTemplate]
    talking: asyncio.Lock = field(default_factory=asyncio.Lock)
    forks: int = 0
    is_retired: bool = False
    timer: asyncio.TimerHandle | None = None

    async def ask(
        self, frame: LoadModule | ForkChild | ReapChild, *, descriptor: int = -1
    ) -> FromTemplate:
        """Ask, and wait for the answer. Once asked, it is waited for whoever gives up."""
        return await asyncio.shield(
            asyncio.get_running_loop().create_task(self._asked(frame, descriptor))
        )

    async def _asked(
        self, frame: LoadModule | ForkChild | ReapChild, descriptor: int
    ) -> FromTemplate:
        seconds = _LOAD_SECONDS_MAX if isinstance(frame, LoadModule) else _ANSWER_SECONDS_MAX
        async with self.talking:
            try:
                async with asyncio.timeout(seconds):
                    if descriptor < 0:
                        await self.process.say(frame)
                    else:
                        self.process.hand(frame, descriptor)
                    answer = await self.process.hear()
            except (TimeoutError, WorkFailed):
                answer = None
            if answer is None:
                self.process.send_signal(signal.SIGKILL)
                raise _Gone
            return answer


class _ForkedProcess(StartedProcess):
    """A child that was forked by a fork server, which kills its session and reaps it."""

    def __init__(self, pid: int, template: _Template, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._loop = loop
        self._file = os.pidfd_open(pid)
        self._began = _began_at(pid)

    def until_ended(self) -> None:
        waiting = select.poll()
        waiting.register(self._file, select.POLLIN)
        waiting.poll()
        os.close(self._file)

    def reap(self) -> None:
        asking = self._template.ask(ReapChild(self.pid))
        try:
            answer = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
            assert isinstance(answer, ChildReaped)
            self.returncode = answer.code
        except (_Gone, RuntimeError):  # A loop that is closed asks nobody.
            asking.close()
            self.returncode = _UNKNOWN
            # Reaped elsewhere. Another process that has the pid by now is left alone; while
            # anything of the session lives, the pid is not reused.
            if _began_at(self.pid) in {None, self._began}:
                kill_session(self.pid)


class ForkServers:
    """The fork servers of one runtime, at most `most` of them, started as children are."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        guard: Guard,
        most: int,
        idle_seconds: float,
    ) -> None:
        self._start = LaunchSpec(command=command, environment=environment)
        self._guard = guard
        self._most = most if sys.platform == "linux" and hasattr(os, "pidfd_open") else 0
        self._idle_seconds = idle_seconds
        self._loading: dict[ForkKey, asyncio.Task[_Template | None]] = {}
        self._all: set[_Template] = set()
        self._unfit: dict[ForkKey, tuple[float, str]] = {}

    async def child(
        self, wanted: ForkKey, cgroup: Callable[[], Awaitable[Cgroup | None]]
    ) -> RuntimeChild[FromChild] | None:
        """A child that has imported this; None if it has to be started."""
        template = await self._template(wanted)
        if template is None:
            return None
        making = self._fork(template, await cgroup())
        forking = asyncio.get_running_loop().create_task(making)
        try:
            return await asyncio.shield(forking)
        except (_Gone, OSError):
            self.retire(wanted)
            return None
        except asyncio.CancelledError:
            forking.add_done_callback(_end)
            raise

    def retire(self, wanted: ForkKey) -> None:
        """Fork no more from what has imported this: its code has changed, or it is gone."""
        self._unfit.pop(wanted, None)
        loading = self._loading.pop(wanted, None)
        if loading is None:
            return
        if not loading.done():
            loading.cancel()
        elif not loading.cancelled() and (template := loading.result()) is not None:
            template.is_retired = True
            self._end_if_idle(template)

    async def stop(self) -> None:
        """End all of them; their forks are gone already."""
        for loading in self._loading.values():
            loading.cancel()
        self._loading.clear()
        async with asyncio.TaskGroup() as group:
            for template in self._all:
                if template.timer is not None:
                    template.timer.cancel()
                group.create_task(template.process.destroy())
        self._all.clear()

    async def _template(self, wanted: ForkKey) -> _Template | None:
        loop = asyncio.get_running_loop()
        self._all = {each for each in self._all if not each.process.is_closed}
        since, _ = self._unfit.get(wanted, (-_UNFIT_SECONDS, ""))
        loading = self._loading.get(wanted)
        if loading is not None and loading.done() and not self._is_there(loading):
            del self._loading[wanted]
            loading = None
        if loading is None:
            if loop.time() - since < _UNFIT_SECONDS or len(self._loading) >= self._most:
                return None
            loading = self._loading[wanted] = loop.create_task(self._load(wanted))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():
                return None
            raise

    @staticmethod
    def _is_there(loading: asyncio.Task[_Template | None]) -> bool:
        if loading.cancelled() or loading.exception() is not None:
            return False
        template = loading.result()
        return template is not None and not template.process.ended.is_set()

    async def _load(self, wanted: ForkKey) -> _Template | None:
        process = await RuntimeChild.born(self._start, guard=self._guard, decoder=from_template)
        template = _Template(process)
        self._all.add(template)
        try:
            style, entry = wanted
            answer = await template.ask(LoadModule(style=style, entry=entry))
            assert isinstance(answer, ModuleLoaded)
            why = answer.unfit
        except _Gone:
            why = "importing it ends its process, or takes too long"
        except BaseException:
            await process.destroy()
            raise
        if not why:
            self._end_if_idle(template)
            return template
        await process.destroy()
        _, said = self._unfit.get(wanted, (0.0, ""))
        self._unfit[wanted] = (asyncio.get_running_loop().time(), why)
        if why != said:
            _log.info("children of %s are started, not forked: %s", wanted[1], why)
        return None

    async def _fork(self, template: _Template, cgroup: Cgroup | None) -> RuntimeChild[FromChild]:
        ours, theirs = socket.socketpair()
        template.forks += 1
        if template.timer is not None:
            template.timer.cancel()
        try:
            with theirs:
                answer = await template.ask(ForkChild(), descriptor=theirs.fileno())
            assert isinstance(answer, ChildForked)
            loop = asyncio.get_running_loop()
            process = _ForkedProcess(answer.pid, template, loop)
            self._guard.watch(answer.pid)
            if cgroup is not None:
                cgroup.admit(answer.pid)
            child = RuntimeChild(process, self._guard, decoder=from_child, cgroup=cgroup)
            await child.open(ours)
        except BaseException:
            # Without its socket it ends by itself.
            ours.close()
            if cgroup is not None:
                await asyncio.to_thread(cgroup.remove)
            self._forked_has_ended(template)
            raise
        child.when_ended(lambda: self._forked_has_ended(template))
        return child

    def _forked_has_ended(self, template: _Template) -> None:
        template.forks -= 1
        self._end_if_idle(template)

    def _end_if_idle(self, template: _Template) -> None:
        """Let it go when nothing is forked from it, and nothing will be or was for a while."""
        if template.forks:
            return
        if template.is_retired:
            template.process.send_signal(signal.SIGKILL)
            return
        if template.timer is not None:
            template.timer.cancel()
        loop = asyncio.get_running_loop()
        seconds = max(self._idle_seconds, _IDLE_SECONDS_MIN)
        template.timer = loop.call_later(seconds, template.process.send_signal, signal.SIGKILL)


def _end(forking: asyncio.Task[RuntimeChild[FromChild]]) -> None:
    """Kill a child that nobody waits for any more, and close its connection."""
    with suppress(asyncio.CancelledError, _Gone, OSError, WorkReleased):
        child = forking.result()
        child.kill()
        child.close()


def _began_at(process: int) -> str | None:
    """When a process began, as the kernel says it; None if there is none of this number."""
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The name of the program may hold anything; what follows its last bracket may not.
    return text.rpartition(")")[2].split()[19]
