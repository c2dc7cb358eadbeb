"""Warm child processes: one for each task that runs, kept for the next task of its operator.

A task takes a child that is idle and has run its operator before, with the same bound of memory,
or a new one. A child goes back
when its task has ended and nothing of it runs on. It is ended, and what it started with it, when

- it has run `tasks_max` tasks, or has been idle for `idle_seconds`;
- its task was cancelled, whether by a person, by a time limit or by the end of the worker;
- its function has left a thread or a process behind, so that nothing runs on after `run`;
- its task has credentials of its own: what a function keeps, such as a client of boto3, would go on
  with those of the former task. Such a task also begins in a new child;
- its task is untrusted. Its child runs as a user of its own;
- it said that the user's code has changed since it was imported; then the task, which it has not
  begun, is begun in a new child.

What is idle holds nothing that is worth a goodbye: it is ended by SIGKILL. What is cancelled gets
SIGTERM and the grace of its task first, and is listened to meanwhile, so that a source can send
what it still has.

A bound of memory (`resources.memory`) is kept by each process itself, and for all processes of a
child together by a control group (`cgroups`). Where none can be made, what they use is looked at
every second instead, and a child that uses more is ended; what comes and goes between two looks is
not seen.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError, WorkFailed, WorkReleased
from penstock.kernel.service import Service
from penstock.runtimes.base import Finished, Runtime, Voice, Work
from penstock.runtimes.cgroups import Cgroup, Cgroups, Limit
from penstock.runtimes.environment import of_untrusted
from penstock.runtimes.frames import (
    Begin,
    Done,
    Emit,
    Failed,
    FromChild,
    Heard,
    Mint,
    Minted,
    Progress,
    Stale,
    Stop,
    from_child,
)
from penstock.runtimes.guard import Guard
from penstock.runtimes.lowering import PROCESSES_MAX, hindrance
from penstock.runtimes.offspring import Offspring, Start
from penstock.runtimes.resources import memory_bytes

_log = logging.getLogger(__name__)

_STALE_MAX: Final = 3
_SAMPLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmth:
    """How long children are kept."""

    tasks_max: int = 1_000
    idle_seconds: float = 60.0
    idle_max: int = 32
    """How many idle children there are at most."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a child can be used for again."""

    operator: str
    memory_bytes: int | None

    @classmethod
    def of(cls, work: Work) -> _Kind:
        return cls(work.operator, memory_bytes(work.resources.get("memory")))


@dataclass(slots=True)
class _Idle:
    kind: _Kind
    child: Offspring[FromChild]
    timer: asyncio.TimerHandle = field(repr=False)


class Children(Service):
    """The child processes of one runtime."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], warmth: Warmth
    ) -> None:
        self._command = command
        self._environment = environment
        self._warmth = warmth
        self._clock = SystemClock()
        self._guard = Guard()
        self._idle: deque[_Idle] = deque()
        self._all: set[Offspring[FromChild]] = set()
        self._is_stopped = False
        self._cgroups: Cgroups | None = None
        self._are_cgroups_known = False

    async def start(self) -> None:
        self._is_stopped = False

    async def stop(self) -> None:
        self._is_stopped = True
        while self._idle:
            self._idle.pop().timer.cancel()
        async with asyncio.TaskGroup() as group:
            for child in list(self._all):
                group.create_task(child.destroy())
        self._all.clear()
        await asyncio.to_thread(self._guard.close)

    @property
    def pids(self) -> tuple[int, ...]:
        """The children there are, idle and busy."""
        return tuple(child.pid for child in self._all if not child.ended.is_set())

    async def run(self, begin: Begin, voice: Voice) -> Finished:
        """Run a task in a child, and return what it has made."""
        work = begin.work
        if work.is_untrusted and not work.user:
            raise WorkFailed("Untrusted work has no user of its own to run as.")
        begin.has_log = bool(work.user)
        for number in range(_STALE_MAX):
            # Where one child is stale the other warm ones are too: each finds out by itself.
            may_be_warm = number == 0 and not _is_alone(work)
            warm = self._warm(_Kind.of(work)) if may_be_warm else None
            child = warm or await self._new(work)
            ended = await self._run_in(child, begin, voice)
            if isinstance(ended, Failed) and ended.is_released:
                raise WorkReleased(ended.reason, is_delayed=ended.is_delayed)
            if isinstance(ended, Failed):
                raise WorkFailed(ended.reason, is_retried=ended.is_retried)
            if isinstance(ended, Done):
                # Facts are the worker's to find: whoever runs users' code believes none of its.
                return Finished(made=tuple(replace(each, facts=None) for each in ended.made))
        raise WorkFailed("The code of the function changes all the time.")

    async def _run_in(
        self, child: Offspring[FromChild], begin: Begin, voice: Voice
    ) -> Done | Failed | Stale | None:
        """Run a task in this child, which is gone or idle afterwards."""
        conversation = _Conversation(child, voice)
        is_kept = False
        try:
            child.tasks_begun += 1
            await child.say(begin)
            async with self._watched(child, begin.work):
                ended = await conversation.until_end()
            if ended is None:
                why = await child.why_ended()
                raise WorkFailed(_overrun(child, begin.work) or why + self._hindered(begin.work))
            if isinstance(ended, Failed) and (why := _overrun(child, begin.work)):
                ended.reason = f"{ended.reason} {why}"
            is_kept = isinstance(ended, Done | Failed) and ended.is_clean
            is_kept = is_kept and not _is_alone(begin.work) and not child.has_overrun
        except asyncio.CancelledError:
            await self._let_end(conversation, child, begin.work.grace_seconds)
            raise
        else:
            return ended
        finally:
            await self._put_back(_Kind.of(begin.work), child, is_kept=is_kept)

    async def _let_end(
        self, conversation: _Conversation, child: Offspring[FromChild], grace_seconds: float
    ) -> None:
        """Ask a child to end, and listen to it until it has, or has had its time."""
        try:
            async with asyncio.timeout(grace_seconds):
                await child.say(Stop())
                child.send_signal(signal.SIGTERM)
                await conversation.until_end()
        except (TimeoutError, WorkFailed):
            pass

    async def _put_back(self, kind: _Kind, child: Offspring[FromChild], *, is_kept: bool) -> None:
        is_worn = child.tasks_begun >= self._warmth.tasks_max or child.ended.is_set()
        if not is_kept or is_worn or self._is_stopped:
            try:
                await child.destroy()
            finally:
                self._all.discard(child)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._warmth.idle_seconds, self._let_go, child)
        self._idle.append(_Idle(kind, child, timer))
        if len(self._idle) > self._warmth.idle_max:
            self._let_go(self._idle[0].child)

    def _warm(self, kind: _Kind) -> Offspring[FromChild] | None:
        """The child of this kind that was busy last."""
        for idle in reversed(self._idle):
            if idle.kind == kind:
                self._idle.remove(idle)
                idle.timer.cancel()
                return idle.child if not idle.child.ended.is_set() else self._warm(kind)
        return None

    def _let_go(self, child: Offspring[FromChild]) -> None:
        """End an idle child; it is gone soon after."""
        for idle in list(self._idle):
            if idle.child is child:
                self._idle.remove(idle)
                idle.timer.cancel()
        child.send_signal(signal.SIGKILL)

    async def _new(self, work: Work) -> Offspring[FromChild]:
        if self._is_stopped:
            raise WorkReleased("The runtime was stopped.", is_delayed=False)
        self._all = {child for child in self._all if not child.is_closed}
        start = Start(
            command=self._command,
            environment=of_untrusted(self._environment) if work.user else self._environment,
            user=work.user,
            log=work.log,
            cgroup=await self._cgroup(work),
        )
        child = await Offspring.born(start, guard=self._guard, decoder=from_child)
        self._all.add(child)
        return child

    async def _cgroup(self, work: Work) -> Cgroup | None:
        """A control group for a child whose memory is bounded, where there can be one."""
        memory = memory_bytes(work.resources.get("memory"))
        if memory is None or sys.platform != "linux":
            return None
        if not self._are_cgroups_known:
            self._are_cgroups_known = True
            self._cgroups = await asyncio.to_thread(_found_cgroups)
        if self._cgroups is None:
            return None
        limit = Limit(memory, processes_max=PROCESSES_MAX if work.user else 0)
        try:
            return self._cgroups.made(limit)
        except OSError as error:
            _log.warning(
                "task %d has no control group, its memory is sampled: %s", work.task_id, error
            )
            return None

    @asynccontextmanager
    async def _watched(self, child: Offspring[FromChild], work: Work) -> AsyncIterator[None]:
        """Within this, a child that the kernel does not bound is ended if it uses too much."""
        memory = memory_bytes(work.resources.get("memory"))
        if memory is None or child.is_in_cgroup or sys.platform != "linux":
            yield
            return
        task = asyncio.get_running_loop().create_task(self._sample(child, memory))
        try:
            yield
        finally:
            task.cancel()

    async def _sample(self, child: Offspring[FromChild], memory: int) -> None:
        while not child.ended.is_set():
            await self._clock.sleep(_SAMPLE_SECONDS)
            if await asyncio.to_thread(child.bytes_used) > memory:
                child.end_overrun()
                return

    def _hindered(self, work: Work) -> str:
        """Why a child of another user may have come to nothing, as one more sentence."""
        if not work.user:
            return ""
        for each in (Path(__file__), Path(msgspec.__file__)):
            if (stopped_by := hindrance(each, work.user)) is not None:
                return f" The user {work.user} cannot read {each}, because of {stopped_by}."
        return ""


def _found_cgroups() -> Cgroups | None:
    """Where groups can be made, said once in the log."""
    found = Cgroups.found()
    if found is None:
        _log.warning(
            "no control group can be made here: resources.memory bounds each process of a task,"
            " and all of them together by a look every %g s",
            _SAMPLE_SECONDS,
        )
        return None
    _log.info("resources.memory bounds all processes of a task by control groups: %s", found)
    found.sweep()
    return found


def _overrun(child: Offspring[FromChild], work: Work) -> str:
    """What is said of a task that has used too much memory; empty of any other."""
    if not child.has_overrun:
        return ""
    memory = work.resources.get("memory")
    return f"The processes of the task used more memory than resources.memory = {memory}."


def _is_alone(work: Work) -> bool:
    """Whether a child runs this work and none before or after it."""
    return bool(work.user) or (work.handed is not None and work.handed.has_credentials)


class _Conversation:
    """What is said while a task runs. It may be cancelled and taken up again: nothing is lost."""

    def __init__(self, child: Offspring[FromChild], voice: Voice) -> None:
        self._child = child
        self._voice = voice
        self._unanswered: FromChild | None = None

    async def until_end(self) -> Done | Failed | Stale | None:
        """Answer the child until it has ended its task, or is gone: None."""
        while True:
            if self._unanswered is None:
                self._unanswered = await self._child.hear()
            match self._unanswered:
                case Progress(said):
                    self._voice.progress(said)
                case Emit() as emit:
                    # Sent once more if this was cancelled: the dispatcher knows an event again.
                    await self._child.say(await self._heard(emit))
                case Mint() as mint:
                    await self._child.say(await self._minted(mint))
                case ended:
                    return ended
            self._unanswered = None

    async def _minted(self, mint: Mint) -> Minted:
        try:
            made = await self._voice.credentials(mint.locations)
        except PenstockError as error:
            said = f"{error.message} {error.hint}".strip()
            return Minted(number=mint.number, error=said or "There are no credentials.")
        return Minted(number=mint.number, credentials=made)

    async def _heard(self, emit: Emit) -> Heard:
        try:
            return Heard(number=emit.number, paused=await self._voice.emit(emit.news))
        except PenstockError as error:
            return Heard(number=emit.number, error=error.message or "The events were not taken.")


class ChildRuntime(Runtime):
    """A runtime whose work is users' own code in child processes."""

    joins_batches = False

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], warmth: Warmth
    ) -> None:
        self._children = Children(command, environment=environment, warmth=warmth)

    @property
    def pids(self) -> Sequence[int]:
        """The child processes there are."""
        return self._children.pids

    async def start(self) -> None:
        await self._children.start()

    async def stop(self) -> None:
        await self._children.stop()

    def operators(self) -> Collection[str] | None:
        return None
