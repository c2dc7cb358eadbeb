"""The runtime `process`, and the pool of warm child processes that `lambda` uses too.

The operator is `module:function`, imported in the child from the folder in which the worker was
started, from `path`, or from what is installed; or it is a name that an installed package gives
such a function by the entry point group `penstock.operators`. See `task` for what the function
is given.

A task takes an idle child that has run its operator before, with the same bound of memory, or a
new one. A child goes back when its task has ended and nothing of it runs on. It is ended, and
what it started with it, when

- it has run `tasks_max` tasks, or has been idle for `idle_seconds`;
- its task was cancelled, whether by a person, by a timeout or by the end of the worker;
- its function has left a thread or a process behind, so that nothing runs on after `run`;
- its task has credentials of its own: what a function keeps, such as a client of boto3, would
  go on
  with those of the former task. Such a task also begins in a new child;
- its task is untrusted. Its child runs as a user of its own;
- it reported that the user's code has changed since it was imported; then the task, which it has
  not begun, is begun in a new child.

An idle child is ended by SIGKILL. A cancelled one gets SIGTERM and the grace of its task first,
and its frames are read meanwhile, so that a source can send what it still has.

A bound of memory (`resources.memory`) is kept by each process itself, and for all processes of
a child together by a control group (`resource_limits`). Where none can be made, their memory is
sampled every second instead, and a child that uses more is ended; peaks between two samples are
not seen.

A child has the environment of its worker, less everything that proves who the worker is: what
is Penstock's own, and what AWS's tools find credentials by. The tools are also kept from
looking elsewhere by themselves: in the home folder of the worker, and at the machine's own
role. A task has its own token and credentials instead, while it runs (`secrets`). Untrusted
work has what a program needs to run, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError, WorkFailed, WorkReleased
from penstock.kernel.framed_child import FrameChannel
from penstock.kernel.service import Service
from penstock.kernel.settings_schema import check, read_table, setting
from penstock.kernel.units import memory_bytes
from penstock.runtimes.base import AttemptWork, Runtime, RuntimeFault, WorkReporter, WorkResult
from penstock.runtimes.child_process import ForkServers, LaunchSpec, RuntimeChild
from penstock.runtimes.frames import (
    BeginTask,
    CallStyle,
    ChildDone,
    ChildFailed,
    ChildProgress,
    CredentialsReply,
    CredentialsRequest,
    EmitEvents,
    EventsReply,
    FromChild,
    StaleCode,
    StopTask,
    from_child,
)
from penstock.runtimes.guard import Guard
from penstock.runtimes.privileges import PROCESSES_MAX, hindrance
from penstock.runtimes.resource_limits import (
    Cgroup,
    CgroupLimit,
    Cgroups,
    resource_faults,
)
from penstock.runtimes.uid_pool import FOLDER, UidPool
from penstock.runtimes.user_code import (
    FUNCTION_FORM,
    FunctionReference,
    installed_operators,
    reference,
)

_SECRET: Final = re.compile(
    r"PENSTOCK_.*"
    r"|AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|CREDENTIAL_EXPIRATION"
    r"|(DEFAULT_)?PROFILE|SHARED_CREDENTIALS_FILE|CREDENTIAL_FILE|CONFIG_FILE|CONTAINER_.*"
    r"|WEB_IDENTITY_TOKEN_FILE|ROLE_ARN|ROLE_SESSION_NAME)"
)
_ELSEWHERE: Final = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
_HARMLESS: Final = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|LD_LIBRARY_PATH|PYTHON(PATH|HASHSEED|UTF8|DONTWRITEBYTECODE)"
    r"|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|AWS_CA_BUNDLE"
    r"|AWS_(DEFAULT_)?REGION|AWS_ENDPOINT_URL(_[A-Z0-9_]+)?|AWS_EC2_METADATA_DISABLED"
    r"|AWS_CONFIG_FILE|AWS_SHARED_CREDENTIALS_FILE"
    r"|OMP_NUM_THREADS|OPENBLAS_NUM_THREADS|MKL_NUM_THREADS"
)


def child_environment(ours: Mapping[str, str], search_path: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of children, from that of this process."""
    kept = {name: value for name, value in ours.items() if not _SECRET.fullmatch(name.upper())}
    return {**kept, **_ELSEWHERE, **search_path}


def untrusted_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Of the environment of children, what untrusted work has."""
    return {name: value for name, value in environment.items() if _HARMLESS.fullmatch(name)}


_log = logging.getLogger(__name__)

_CHILD: Final = ("-m", "penstock.runtimes.child")
_TEMPLATE: Final = ("-m", "penstock.runtimes.fork_server")
STALE_MAX: Final = 3
_WHO: Final = "The child process of the task"
_SAMPLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLifetime:
    """How long children are kept."""

    tasks_max: int = 1_000
    idle_seconds: float = 60.0
    idle_max: int = 32
    """How many idle children there are at most."""
    templates_max: int = 8
    """How many functions there are at most that children are forked for; others are started."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a child can be used for again."""

    operator: str
    memory_bytes: int | None

    @classmethod
    def of(cls, work: AttemptWork) -> _Kind:
        return cls(work.operator, memory_bytes(work.resources.get("memory")))


@dataclass(slots=True)
class _Idle:
    kind: _Kind
    child: RuntimeChild[FromChild]
    timer: asyncio.TimerHandle = field(repr=False)


class WarmChildPool(Service):
    """The child processes of one runtime."""

    def __init__(
        self, python: Sequence[str], *, environment: Mapping[str, str], warmth: ChildLifetime
    ) -> None:
        self._command = (*python, *_CHILD)
        self._environment = environment
        self._warmth = warmth
        self._clock = SystemClock()
        self._guard = Guard()
        self._templates = ForkServers(
            (*python, *_TEMPLATE),
            environment=environment,
            guard=self._guard,
            most=warmth.templates_max,
            idle_seconds=warmth.idle_seconds,
        )
        self._idle: deque[_Idle] = deque()
        self._all: set[RuntimeChild[FromChild]] = set()
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
        await self._templates.stop()
        await asyncio.to_thread(self._guard.close)

    @property
    def pids(self) -> tuple[int, ...]:
        """The children there are, idle and busy."""
        return tuple(child.pid for child in self._all if not child.ended.is_set())

    async def run(self, begin: BeginTask, reporter: WorkReporter) -> WorkResult:
        """Run a task in a child, and return what it has made."""
        work = begin.work
        if work.is_untrusted and not work.user:
            raise WorkFailed("Untrusted work has no user of its own to run as.")
        begin.has_log = bool(work.user)
        reporter.begins()  # A template imports its code.
        for number in range(STALE_MAX):
            # Where one child is stale the other warm ones are too: each finds out by itself.
            may_be_warm = number == 0 and not _is_alone(work)
            warm = self._warm(_Kind.of(work)) if may_be_warm else None
            child = warm or await self._new(begin)
            ended = await self._run_in(child, begin, reporter)
            if isinstance(ended, StaleCode):
                self._templates.retire((begin.style, begin.entry))
            if isinstance(ended, ChildDone | ChildFailed):
                return finished(ended)
        raise always_stale()

    async def _run_in(
        self, child: RuntimeChild[FromChild], begin: BeginTask, reporter: WorkReporter
    ) -> ChildDone | ChildFailed | StaleCode | None:
        """Run a task in this child, which is gone or idle afterwards."""
        conversation = TaskSession(child, reporter)
        is_kept = False
        try:
            child.tasks_begun += 1
            await child.say(begin)
            async with self._watched(child, begin.work):
                ended = await conversation.until_end()
            if ended is None:
                why = await child.why_ended(_WHO)
                raise WorkFailed(_overrun(child, begin.work) or why + self._hindered(begin.work))
            if isinstance(ended, ChildFailed) and (why := _overrun(child, begin.work)):
                ended.reason = f"{ended.reason} {why}"
            is_kept = isinstance(ended, ChildDone | ChildFailed) and ended.is_clean
            is_kept = is_kept and not _is_alone(begin.work) and not child.has_overrun
        except asyncio.CancelledError:
            await self._let_end(conversation, child, begin.work.grace_seconds)
            raise
        else:
            return ended
        finally:
            await self._put_back(_Kind.of(begin.work), child, is_kept=is_kept)

    async def _let_end(
        self, conversation: TaskSession, child: RuntimeChild[FromChild], grace_seconds: float
    ) -> None:
        """Ask a child to end, and listen to it until it has, or has had its time."""
        try:
            async with asyncio.timeout(grace_seconds):
                await child.say(StopTask())
                child.send_signal(signal.SIGTERM)
                await conversation.until_end()
        except (TimeoutError, WorkFailed):
            pass

    async def _put_back(
        self, kind: _Kind, child: RuntimeChild[FromChild], *, is_kept: bool
    ) -> None:
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

    def _warm(self, kind: _Kind) -> RuntimeChild[FromChild] | None:
        """The child of this kind that was busy last."""
        for idle in reversed(self._idle):
            if idle.kind == kind:
                self._idle.remove(idle)
                idle.timer.cancel()
                return idle.child if not idle.child.ended.is_set() else self._warm(kind)
        return None

    def _let_go(self, child: RuntimeChild[FromChild]) -> None:
        """End an idle child; it is gone soon after."""
        for idle in list(self._idle):
            if idle.child is child:
                self._idle.remove(idle)
                idle.timer.cancel()
        child.send_signal(signal.SIGKILL)

    async def _new(self, begin: BeginTask) -> RuntimeChild[FromChild]:
        """A child that has run nothing: forked where it may be, else started."""
        if self._is_stopped:
            raise WorkReleased("The runtime was stopped.", is_delayed=False)
        self._all = {child for child in self._all if not child.is_closed}
        work = begin.work
        child = None
        if not work.user:
            wanted = (begin.style, begin.entry)
            child = await self._templates.child(wanted, partial(self._cgroup, work))
        if child is None:
            start = LaunchSpec(
                command=self._command,
                environment=untrusted_environment(self._environment)
                if work.user
                else self._environment,
                user=work.user,
                log=work.log,
                cgroup=await self._cgroup(work),
            )
            child = await RuntimeChild.born(start, guard=self._guard, decoder=from_child)
        self._all.add(child)
        return child

    async def _cgroup(self, work: AttemptWork) -> Cgroup | None:
        """A control group for a child whose memory is bounded, where there can be one."""
        memory = memory_bytes(work.resources.get("memory"))
        if memory is None or sys.platform != "linux":
            return None
        if not self._are_cgroups_known:
            self._are_cgroups_known = True
            self._cgroups = await asyncio.to_thread(_found_cgroups)
        if self._cgroups is None:
            return None
        limit = CgroupLimit(memory, processes_max=PROCESSES_MAX if work.user else 0)
        try:
            return self._cgroups.made(limit)
        except OSError as error:
            _log.warning(
                "task %d has no control group, its memory is sampled: %s", work.task_id, error
            )
            return None

    @asynccontextmanager
    async def _watched(
        self, child: RuntimeChild[FromChild], work: AttemptWork
    ) -> AsyncIterator[None]:
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

    async def _sample(self, child: RuntimeChild[FromChild], memory: int) -> None:
        while not child.ended.is_set():
            await self._clock.sleep(_SAMPLE_SECONDS)
            if await asyncio.to_thread(child.bytes_used) > memory:
                child.end_overrun()
                return

    def _hindered(self, work: AttemptWork) -> str:
        """Why a child of another user may have come to nothing, as one more sentence."""
        if not work.user:
            return ""
        for each in (Path(__file__), Path(msgspec.__file__)):
            if (stopped_by := hindrance(each, work.user)) is not None:
                return f" The user {work.user} cannot read {each}, because of {stopped_by}."
        return ""


def finished(ended: ChildDone | ChildFailed) -> WorkResult:
    """What a child has told of the end of its task: what it has made, or `WorkFailed`."""
    if isinstance(ended, ChildDone):
        # Facts are the worker's to find: whoever runs users' code believes none of its.
        return WorkResult(made=tuple(replace(each, facts=None) for each in ended.made))
    if ended.is_released:
        raise WorkReleased(ended.reason, is_delayed=ended.is_delayed)
    raise WorkFailed(ended.reason, is_retried=ended.is_retried)


def always_stale() -> WorkFailed:
    """After `STALE_MAX` children in a row that have found their code changed."""
    return WorkFailed("The code of the function changes all the time.")


def _found_cgroups() -> Cgroups | None:
    """Where groups can be made, said once in the log."""
    found = Cgroups.found()
    if found is None:
        _log.warning(
            "cannot create a control group: resources.memory bounds each process of a task,"
            " and their sum by sampling every %g s",
            _SAMPLE_SECONDS,
        )
        return None
    _log.info("resources.memory bounds all processes of a task by control groups: %s", found)
    found.sweep()
    return found


def _overrun(child: RuntimeChild[FromChild], work: AttemptWork) -> str:
    """What is said of a task that has used too much memory; empty of any other."""
    if not child.has_overrun:
        return ""
    memory = work.resources.get("memory")
    return f"The processes of the task used more memory than resources.memory = {memory}."


def _is_alone(work: AttemptWork) -> bool:
    """Whether a child runs this work and none before or after it."""
    return bool(work.user) or (work.handed is not None and work.handed.has_credentials)


class TaskSession:
    """What is said while a task runs. It may be cancelled and taken up again: nothing is lost."""

    def __init__(self, child: FrameChannel[FromChild], reporter: WorkReporter) -> None:
        self._child = child
        self._reporter = reporter
        self._unanswered: FromChild | None = None

    async def until_end(self) -> ChildDone | ChildFailed | StaleCode | None:
        """Answer the child until it has ended its task, or is gone: None."""
        while True:
            if self._unanswered is None:
                self._unanswered = await self._child.hear()
            match self._unanswered:
                case ChildProgress(said):
                    self._reporter.progress(said)
                case EmitEvents() as emit:
                    # Sent once more if this was cancelled: the dispatcher knows an event again.
                    await self._child.say(await self._heard(emit))
                case CredentialsRequest() as mint:
                    await self._child.say(await self._minted(mint))
                case ended:
                    return ended
            self._unanswered = None

    async def _minted(self, mint: CredentialsRequest) -> CredentialsReply:
        try:
            made = await self._reporter.credentials(mint.locations)
        except PenstockError as error:
            said = f"{error.message} {error.hint}".strip()
            return CredentialsReply(number=mint.number, error=said or "There are no credentials.")
        return CredentialsReply(number=mint.number, credentials=made)

    async def _heard(self, emit: EmitEvents) -> EventsReply:
        try:
            return EventsReply(number=emit.number, paused=await self._reporter.emit(emit.news))
        except PenstockError as error:
            return EventsReply(
                number=emit.number, error=error.message or "The events were not taken."
            )


class ChildRuntime(Runtime):
    """A runtime whose work is users' own code in child processes."""

    joins_batches = False

    def __init__(
        self, python: Sequence[str], *, environment: Mapping[str, str], warmth: ChildLifetime
    ) -> None:
        self._children = WarmChildPool(python, environment=environment, warmth=warmth)

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


@dataclass(frozen=True, kw_only=True)
class FunctionRuntimeSettings:
    """The settings of any runtime that runs users' functions."""

    path: tuple[str, ...] = setting(())
    """Folders in which modules are looked for first."""
    python: tuple[str, ...] = setting((), most=20)
    """The Python that children run in, which must have Penstock; by default the worker's own."""
    idle_seconds: float = setting(60.0, least=0)
    """After how long without a task a child, and what children are forked from, is ended."""

    def __post_init__(self) -> None:
        check(self)

    def interpreter(self) -> Sequence[str]:
        """The Python that children run in."""
        return self.python or (sys.executable,)

    def search_path(self, existing: str = "") -> Mapping[str, str]:
        """What a child gets in its environment, so that it finds modules."""
        path = os.pathsep.join([*self.path, *([existing] if existing else [])])
        return {"PYTHONPATH": path} if path else {}


@dataclass(frozen=True, kw_only=True)
class ChildSettings(FunctionRuntimeSettings):
    """The settings of a runtime that runs children."""

    tasks_max: int = setting(1_000, least=1)
    """After how many tasks a child is replaced."""
    idle_max: int = setting(32, least=0)
    """How many idle children are kept at most."""
    templates_max: int = setting(8, least=0)
    """How many functions there are at most that children are forked for; 0 starts each child."""
    resources: dict[str, Any] = setting({})
    """What a job gets that says nothing else."""
    uids: str = setting("")
    """The users that untrusted work runs as, as in 60800-60863; empty runs none of it."""
    uids_folder: str = setting(FOLDER)
    """Where it is noted which of them are taken, for all workers of a machine."""
    untrusted_on_files: bool = setting(default=False)
    """Whether untrusted work also runs on a `file://` store, where it can read every dataset."""

    def users(self) -> UidPool | None:
        """The users that untrusted work runs as."""
        if not self.uids:
            return None
        return UidPool.of(self.uids, self.uids_folder, is_on_files=self.untrusted_on_files)

    def warmth(self) -> ChildLifetime:
        """How long children are kept."""
        return ChildLifetime(
            tasks_max=self.tasks_max,
            idle_seconds=self.idle_seconds,
            idle_max=self.idle_max,
            templates_max=self.templates_max,
        )

    def completed(self, work: AttemptWork) -> AttemptWork:
        """The work with the resources that its job says nothing of."""
        return replace(work, resources={**self.resources, **work.resources})


class ProcessRuntime(ChildRuntime):
    """Runs `module:function` for each task."""

    name = "process"
    hands_over = True

    def __init__(self, settings: ChildSettings | None = None) -> None:
        self._settings = settings if settings is not None else ChildSettings()
        self._installed = installed_operators()
        self.users = self._settings.users()
        path = self._settings.search_path(os.environ.get("PYTHONPATH", ""))
        super().__init__(
            self._settings.interpreter(),
            environment=child_environment(os.environ, path),
            warmth=self._settings.warmth(),
        )

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[RuntimeFault]:
        del config  # the user's own
        if self._function(operator) is None:
            message = f"Write your function as {FUNCTION_FORM}, as in flights.clean:clean."
            yield RuntimeFault("operator", message)
        yield from resource_faults(resources, runtime=self.name)

    def secrets_refused(self, operator: str) -> str:
        del operator
        return ""

    def untrusted_refused(self) -> str:
        return ""

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        wanted = self._function(work.operator)
        if wanted is None:
            # It was, where the DAG was applied: the package that offers it is not installed here.
            raise WorkReleased(
                f"{work.operator!r} is neither of the form {FUNCTION_FORM} nor offered by a package"
                " that is installed for this worker."
            )
        complete = self._settings.completed(work)
        begin = BeginTask(style=CallStyle.TASK, entry=str(wanted), work=complete)
        return await self._children.run(begin, reporter)

    def _function(self, operator: str) -> FunctionReference | None:
        return self._installed.get(operator) or reference(operator)


def process(settings: Mapping[str, Any]) -> ProcessRuntime:
    """The runtime of these settings."""
    return ProcessRuntime(read_table(ChildSettings, settings, whose="the runtime process"))
