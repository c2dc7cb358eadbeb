"""Crash recovery: the journal of held attempts, and the ends of those that a killed worker held.

    {folder}/{incarnation}.lock     locked by the process: see `penstock.kernel.process_locks`
    {folder}/{incarnation}.held     mode 0600: a line for each transition of an attempt

| an attempt in the journal is | written | what a successor reports |
|---|---|---|
| held | when the claim is answered, before anything of it is done | a release, `is_lost`: not |
| | | counted, `LOSSES_MAX` times a task |
| begun | before its code is so much as imported (`WorkReporter.begins`) | a failure, `is_lost`: |
| | | counted, and the next attempt begins at once |
| over | when its completion is acknowledged, or nothing is to be reported | nothing |

A worker looks for locks that nobody holds any more when it starts, and every `LOOK_SECONDS`. It
reports what such a process held, with the lease tokens and capability tokens in the journal,
and removes both files. Whoever runs in the same folder may do so: the process that a supervisor
has started in its place, or one that ran beside it. Two that do it at once report the same, and
get the same answer.

The proof is the lock (FENCE-19). It is kept by the process, and by the guard of each of its
runtimes, which inherits it and has killed all that the runtimes have started before it ends, hosts
of Spark and untrusted work included. If the guard was killed as well, the kernel ends our children
with the worker, and what those have started may go on for a moment. It can publish nothing: its
attempt is over. Where a lock proves nothing (other file systems, other boots, other machines) there
is no journal, and the heartbeat timeout decides, as it does for a crash at these points:

| the process is killed | what follows |
|---|---|
| after the claim was committed, and before its answer was read | nobody acknowledges it: it is |
| | taken back within seconds, not counted. So where there is no journal nothing begins before |
| | it is acknowledged, and nothing that was taken back so before |
| before `held` was written | the same |
| between `held` and `begun` | a release: nothing of it has run |
| between `begun` and the first line of the function | a failure: counted, and it runs again |
| after the completion was reported, and before `over` was written | it counts; ours is refused |
| while a successor reports | the next one reports again |

Lines are written without `fsync`: what a killed process has written is there for all others on
the machine, and after a crash of the machine nothing is proved. A torn line is skipped. A
journal that has grown is compacted to what is held, and put in its place by one rename. A full
disk costs the journal: from then on the heartbeat timeout decides.

Called by `penstock.worker.worker` and `executor`, from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable
from penstock.kernel.process_locks import ProcessLock, ProcessLocks
from penstock.protocol.work import (
    Assignment,
    CompleteAsk,
    EndAsk,
    FailureAsk,
    ReleaseAsk,
    ResultsAnswer,
)

_log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""How often a worker looks for ended workers of its folder: a few system calls."""
NOT_BEGUN: Final = "Its worker was killed before its code had begun."
BEGUN: Final = "Its worker was killed while it ran."
_SUFFIX: Final = ".held"
_FILE_BYTES_MAX: Final = 4_000_000
_TOLD_MAX: Final = 200
_CALLERS_FAULT: Final = frozenset({401, 403, 426})
"""These say something about the caller, which may be put right."""

Fence = tuple[int, int]
"""A task and the number of its attempt."""


class _Line(msgspec.Struct, array_like=True, omit_defaults=True):
    task_id: int
    attempt: int
    move: str
    lease_token: str = ""
    token: str = ""


class CompletionClient(Protocol):
    """What reports completions: the client of a worker."""

    async def complete(self, ask: CompleteAsk) -> ResultsAnswer: ...


class AttemptJournal:
    """The attempts that this process holds, for its successor. Without a lock, not written."""

    def __init__(self, lock: ProcessLock | None, folder: Path) -> None:
        self._lock = lock
        self._held: dict[Fence, list[_Line]] = {}
        self._path = folder / f"{lock.incarnation}{_SUFFIX}" if lock is not None else folder
        self._file = -1
        self._bytes = 0
        if lock is not None:
            self._do(self._rewrite)

    @property
    def is_kept(self) -> bool:
        """Whether a successor on this machine would find what is held."""
        return self._file >= 0

    def hold(self, assignments: Iterable[Assignment]) -> None:
        """Note what was claimed."""
        lines = [
            _Line(each.task_id, each.attempt, "held", each.lease_token, each.token)
            for each in assignments
        ]
        self._held |= {(each.task_id, each.attempt): [each] for each in lines}
        self._write(lines)

    def begin(self, assignment: Assignment) -> None:
        """Note that the code of an attempt is about to run."""
        held = self._lines_of(assignment)
        if held is not None and len(held) == 1:
            held.append(_Line(assignment.task_id, assignment.attempt, "begun"))
            self._write(held[1:])

    def release(self, assignment: Assignment) -> None:
        """Note that there is nothing more to report of an attempt."""
        if self._lines_of(assignment) is not None:
            del self._held[assignment.task_id, assignment.attempt]
            self._write([_Line(assignment.task_id, assignment.attempt, "over")])

    def _lines_of(self, assignment: Assignment) -> list[_Line] | None:
        """What is noted of it; nothing, if an attempt of its number is held that is another."""
        held = self._held.get((assignment.task_id, assignment.attempt))
        return held if held and held[0].lease_token == assignment.lease_token else None

    def refresh(self) -> None:
        """Show that the lock is in use."""
        if self._lock is not None:
            self._lock.refresh()

    def close(self) -> None:
        """Remove the files, and let go of the lock, unless something is held still."""
        if self._lock is None or self._held:
            return
        self._give_up()
        self._lock.release()

    def _write(self, lines: Sequence[_Line]) -> None:
        if self._file >= 0 and lines:
            self._do(lambda: self._append(lines))

    def _append(self, lines: Sequence[_Line]) -> None:
        body = _encoded(lines)
        if self._bytes + len(body) > _FILE_BYTES_MAX:
            # `_held` has what these lines say.
            self._rewrite()
            return
        _write_whole(self._file, body)
        self._bytes += len(body)

    def _rewrite(self) -> None:
        """A new file of what is held, in the place of the old one."""
        body = _encoded([line for lines in self._held.values() for line in lines])
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(new, flags | os.O_CLOEXEC, 0o600)
        try:
            _write_whole(file, body)
            new.replace(self._path)
        except BaseException:
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._bytes = file, len(body)
        if len(body) > _FILE_BYTES_MAX / 2:
            raise OSError("the journal is too large")

    def _do(self, writing: Callable[[], None]) -> None:
        try:
            writing()
        except OSError as error:
            message = "failed to write %s: if this worker is killed, its leases have to expire (%s)"
            _log.warning(message, self._path, error)
            self._give_up()

    def _give_up(self) -> None:
        """What is not whole says too little: who has begun could be taken for who has not."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class CrashRecovery:
    """Reports the attempts that killed processes of this folder held."""

    def __init__(
        self, folder: Path, client: CompletionClient, clock: Clock, entropy: Entropy
    ) -> None:
        self._folder = folder
        self._locks = ProcessLocks(folder, entropy=entropy)
        self._client = client
        self._clock = clock
        self._is_warned = False
        self._reported_of = ""

    def journal(self) -> AttemptJournal:
        """Take the lock of this process, if it would prove anything, and begin its file."""
        with suppress(OSError):
            for path in self._folder.glob("*.held"):
                # A lock is there before its file and after it, so this one is of no use to anybody.
                if not path.with_suffix(".lock").exists():
                    path.unlink(missing_ok=True)
        return AttemptJournal(self._locks.acquire(), self._folder)

    async def run(self, journal: AttemptJournal) -> None:
        """Look for those that have ended, until cancelled."""
        while True:
            journal.refresh()
            for incarnation in await asyncio.to_thread(self._locks.ended):
                await self._succeed(incarnation)
            await self._clock.sleep(LOOK_SECONDS)

    async def _succeed(self, incarnation: str) -> None:
        """Report what it has held; what cannot be reported now is left for the next look."""
        path = self._folder / f"{incarnation}{_SUFFIX}"
        asks = await asyncio.to_thread(left_behind, path)
        if asks and incarnation != self._reported_of:
            self._reported_of = incarnation
            _log.info("a killed worker of this machine held %d tasks", len(asks))
        for first in range(0, len(asks), _TOLD_MAX):
            if not await self._report(asks[first : first + _TOLD_MAX]):
                return
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.with_suffix(".new").unlink(missing_ok=True)
        self._locks.forget(incarnation)

    async def _report(self, asks: Sequence[EndAsk]) -> bool:
        """Report completions; returns whether that is final."""
        try:
            answer = await self._client.complete(CompleteAsk(tasks=list(asks)))
        except (DispatcherUnavailable, DispatcherRefused) as error:
            is_final = isinstance(error, DispatcherRefused) and error.status not in _CALLERS_FAULT
            if is_final and len(asks) > 1:
                return all([await self._report([each]) for each in asks])
            if is_final or not self._is_warned:
                self._is_warned = True
                _log.warning("failed to report the tasks of a killed worker: %s", error.advice)
            return is_final
        self._is_warned = False
        for ask, result in zip(asks, answer.results, strict=True):
            lost = f"not ended: its lease was lost ({result.why or result.status})"
            _log.info("task %d of a killed worker is %s", ask.task_id, result.task_status or lost)
        return True


def left_behind(path: Path) -> list[EndAsk]:
    """The ends of what is held by the file of a process that has ended."""
    held: dict[Fence, _Line] = {}
    begun: set[Fence] = set()
    for line in _lines(path):
        fence = (line.task_id, line.attempt)
        match line.move:
            case "held":
                held[fence] = line
                begun.discard(fence)
            case "begun":
                begun.add(fence)
            case _:
                held.pop(fence, None)
    latest: dict[int, _Line] = {}
    for line in held.values():
        # Of a task that was given out again only the last attempt can be anybody's.
        if line.attempt >= latest.get(line.task_id, line).attempt:
            latest[line.task_id] = line
    return [_end(each, has_begun=(each.task_id, each.attempt) in begun) for each in latest.values()]


def _end(line: _Line, *, has_begun: bool) -> EndAsk:
    return EndAsk(
        task_id=line.task_id,
        attempt=line.attempt,
        lease_token=line.lease_token,
        token=line.token or None,
        failure=FailureAsk(reason=BEGUN, is_lost=True) if has_begun else None,
        release=None if has_begun else ReleaseAsk(reason=NOT_BEGUN, is_lost=True),
    )


def _lines(path: Path) -> Iterable[_Line]:
    try:
        body = path.read_bytes()
    except OSError:
        return
    for text in body.splitlines():
        with suppress(msgspec.MsgspecError, UnicodeError):
            yield msgspec.json.decode(text, type=_Line)


def _write_whole(file: int, body: bytes) -> None:
    if os.write(file, body) != len(body):
        raise OSError("short write")


def _encoded(lines: Sequence[_Line]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in lines)
