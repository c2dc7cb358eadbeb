"""The query service's side of a query's process (`penstock.query.child`): forked, fed, bounded.

`QueryProcess` is one process, for one query. It is forked before the query is known, by a
`QueryForkServer`, which has imported everything. It is told the SQL (`parse`), then which files
there are (`run`), and each `next` is a piece of what comes out. Ranges that it asks for are read
here: of the files that it was given, of at most `PIECE_BYTES_MAX`, and of nothing else. What it
says is not trusted: its messages and results are bounded here, too.

Bounds: `seconds_max` from `parse` on, after which it is ended; memory, threads, space for what
does not fit, rows and bytes, which it keeps to itself, and the kernel has it keep to. `kill` cuts
it off at once, from any thread, and `close` ends it, whatever it does; so does the end of the fork
server, which ends with this process.

`QueryProcesses` has one ready, from the first query on: an installation that nobody asks has none.
After `idle_seconds` without a query the one that waits is ended, and the fork server too.

Users: where this runs as root on Linux, each process is a user whom nobody else is, taken from
`uids` by a lock (`penstock.runtimes.uid_pool`). To end a user costs more than a small query, so one
whose process was closed, and has been waited for, is kept, locked, for another query. Elsewhere the
processes are this user, closed by the filter of calls alone: `is_isolated` is then False, and only
callers who may read everything are served. Blocks, but for the pool.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from penstock.kernel.clock import Clock
from penstock.kernel.errors import NotFound, PenstockError
from penstock.protocol.queries import QUERY_LESS_HINT
from penstock.query import child, fork_server, pruning
from penstock.query.pruning import Condition
from penstock.runtimes.uid_pool import LeasedUid, UidPool

_log = logging.getLogger(__name__)

PIECE_BYTES_MAX: Final = 64 * 1024 * 1024
FILES_MAX: Final = 10_000
OPEN_FILES_MAX: Final = 512
"""How many files of folders are handed over open; of more, ranges."""
IDLE_SECONDS: Final = 120.0
_USERS_MAX: Final = 4
"""How many users that are free are kept for the next queries."""
_TOO_MUCH: Final = frozenset({"too slow", "too large", "memory", "ended"})
_START_SECONDS_MAX: Final = 60.0
_READY_BYTES: Final = 1024 * 1024
_MORE_BYTES: Final = 1024**3
"""What a process has besides DuckDB's own memory: programs, stacks, results on their way."""
_FORK_SERVER: Final = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from penstock.query import fork_server; fork_server.main()"
)
_ENVIRONMENT: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "4",
    # What is read is copied through memory that is reused, and not mapped anew for each range.
    "MALLOC_MMAP_THRESHOLD_": str(64 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 1024**2),
}


class QueryFailed(PenstockError):
    """The query was not run to its end, and why; `kind` is what a caller may act on.

    Of one that needs too much the hint says what to do, whatever it is that is too much.
    """

    def __init__(
        self, message: str, *, kind: str = "query", position: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint or (QUERY_LESS_HINT if kind in _TOO_MUCH else ""))
        self.kind = kind
        self.position = position


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBounds:
    """What one query may use."""

    memory_bytes: int
    threads: int
    spill_bytes: int
    seconds_max: float
    rows_max: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class ParsedQuery:
    """What a SELECT names: tables, and the names that it gives by WITH; and of its tables what its
    conditions let through (`penstock.query.pruning`)."""

    tables: tuple[str, ...]
    given: frozenset[str]
    conditions: Mapping[str, Condition]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """What is known when a result is whole."""

    rows: int
    is_cut: bool


class QueryForkServer:
    """The process that forks those of queries, one request at a time. Made on the loop's thread:
    the kernel ends it with the thread that has started it."""

    def __init__(self, bounds: QueryBounds) -> None:
        self._lock = threading.Lock()
        self._is_ready = False
        ours, theirs = socket.socketpair()
        self._socket = ours
        settings = {
            "memory_bytes": bounds.memory_bytes,
            "process_bytes": bounds.memory_bytes + _MORE_BYTES,
            "threads": bounds.threads,
            "spill_bytes": bounds.spill_bytes,
            "spill_folder": tempfile.gettempdir(),
            "cpu_seconds": int(bounds.seconds_max * bounds.threads) + 30,
            "files_max": OPEN_FILES_MAX,
            "parent": os.getpid(),
        }
        root = Path(fork_server.__file__).parents[2]
        command = [sys.executable, "-I", "-c", _FORK_SERVER, str(root), json.dumps(settings)]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    @property
    def is_alive(self) -> bool:
        """Whether more can be forked."""
        return self._process.poll() is None

    def fork(self, theirs: socket.socket, user: int) -> int:
        """A new child that has this socket; its process id, which is its own until `end`."""
        with self._lock:
            return self._asked(fork_server.FORK, user, [theirs.fileno()])

    def end(self, pid: int) -> bool:
        """Kill a child and wait for it; whether that was seen. If this process has ended, the
        kernel ends the child."""
        with self._lock, suppress(QueryFailed):
            return self._asked(fork_server.END, pid, []) == pid
        return False

    def close(self) -> None:
        """End it, and with it its children."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _asked(self, kind: bytes, number: int, files: Sequence[int]) -> int:
        try:
            self._socket.settimeout(_START_SECONDS_MAX)
            if not self._is_ready:
                self._answer()
                self._is_ready = True
            socket.send_fds(self._socket, [fork_server.REQUEST.pack(kind, number)], files)
            return self._answer()
        except OSError as error:
            self._process.kill()
            raise QueryFailed(
                f"The fork server of queries does not answer: {error}.",
                kind="unavailable",
                hint="Retry. The log of the query service says why.",
            ) from error

    def _answer(self) -> int:
        said = self._socket.recv(fork_server.ANSWER.size, socket.MSG_WAITALL)
        if len(said) != fork_server.ANSWER.size:
            raise ConnectionError("it has ended")
        (number,) = fork_server.ANSWER.unpack(said)
        return int(number)


class QueryProcess:
    """One process for one query."""

    def __init__(
        self,
        bounds: QueryBounds,
        forks: QueryForkServer,
        *,
        user: LeasedUid | None,
        clock: Clock,
    ) -> None:
        self._bounds = bounds
        self._forks = forks
        self._user = user
        self._clock = clock
        self._files: Sequence[BinaryIO | None] = ()
        self._sizes: Sequence[int] = ()
        self._bytes = 0
        self._deadline: float | None = None
        self.columns: list[list[str]] = []
        self.result: QueryResult | None = None
        self.is_closed = False
        """Whether the kernel refuses it everything that it does not need."""
        self._socket, theirs = socket.socketpair()
        try:
            self.pid = forks.fork(theirs, 0 if user is None else user.number)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    @property
    def is_isolated(self) -> bool:
        """Whether it is a user of its own, and closed."""
        return self.is_closed and self._user is not None

    def wait(self) -> None:
        """Wait until it is ready."""
        self._deadline = self._clock.monotonic() + _START_SECONDS_MAX
        said = self._message(_READY_BYTES)
        if not said.get("ready"):
            raise QueryFailed("The process of the query did not start.", kind="unavailable")
        self.is_closed = bool(said.get("is_closed"))

    def parse(self, sql: str) -> ParsedQuery:
        """What the SQL names. Raises `QueryFailed` for what is not one SELECT."""
        self._deadline = self._clock.monotonic() + self._bounds.seconds_max
        self._send(json.dumps({"sql": sql}).encode())
        said = self._message(_READY_BYTES)
        names, given = said.get("tables"), said.get("given")
        every = (names, given)
        if not all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in every):
            raise QueryFailed(
                "The process of the query sent an invalid answer.", kind="unavailable"
            )
        found = said.get("conditions")
        known = {
            str(name): pruning.checked(each)
            for name, each in (found if isinstance(found, dict) else {}).items()
        }
        return ParsedQuery(tuple(names or ()), frozenset(given or ()), known)

    def run(
        self,
        tables: Sequence[Mapping[str, Any]],
        files: Sequence[BinaryIO | None],
        sizes: Sequence[int],
        *,
        how: Mapping[str, Any],
    ) -> None:
        """Run it over these files, which stay open until it is killed."""
        self._files, self._sizes = files, sizes
        opened = [_descriptor(each) for each in files]
        given = [each for each in opened if each is not None][:OPEN_FILES_MAX]
        is_open = [each in given for each in opened]
        ask = {
            "tables": tables,
            "files": [
                {"bytes": size, "is_open": each} for size, each in zip(sizes, is_open, strict=True)
            ],
            "rows_max": self._bounds.rows_max,
            "bytes_max": self._bounds.bytes_max,
            **how,
        }
        self._send(json.dumps(ask).encode())
        at_once = child.DESCRIPTORS_AT_ONCE
        for start in range(0, len(given), at_once):
            socket.send_fds(self._socket, [b"f"], given[start : start + at_once])
        said = self._message(_READY_BYTES)
        self.columns = [[str(name), str(kind)] for name, kind in said.get("columns", ())]

    def next(self) -> bytes | None:
        """The next piece of the result; None when it is whole, and then `result` is there."""
        kind, body = self._frame(child.FRAME_BYTES_MAX)
        if kind == child.DATA:
            self._bytes += len(body)
            if self._bytes > self._bounds.bytes_max + child.FRAME_BYTES_MAX:
                raise QueryFailed(
                    f"The result has more than {self._bounds.bytes_max:,} bytes (`query_bytes`).",
                    kind="too large",
                )
            return body
        said = self._read_message(body)
        if "file" in said:
            self._hand_over(said)
            return b""
        end = said.get("end")
        if not isinstance(end, dict):
            raise QueryFailed("The process of the query sent no result.", kind="unavailable")
        self.result = QueryResult(rows=int(end["rows"]), is_cut=bool(end["is_cut"]))
        return None

    def kill(self) -> None:
        """Cut it off: whoever waits for it goes on. May be called again, and by any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> LeasedUid | None:
        """End it, whatever it does, and give back what it has.

        Returns its user if nothing is left of that: a closed process cannot have made another.
        """
        self.kill()
        is_over = self._forks.end(self.pid) and self.is_closed
        self._socket.close()
        for each in self._files:
            if each is not None:
                each.close()
        self._files = ()
        user, self._user = self._user, None
        if user is not None and not is_over:
            try:
                user.end()
            except PenstockError as error:
                _log.error("the user %d of a query stays in use: %s", user.number, error)
        return user if is_over else None

    def _message(self, bytes_max: int) -> dict[str, Any]:
        """The next message that is no wish for a range."""
        while True:
            kind, body = self._frame(bytes_max)
            if kind != child.JSON:
                raise QueryFailed(
                    "The process of the query sent an invalid answer.", kind="unavailable"
                )
            said = self._read_message(body)
            if "file" not in said:
                return said
            self._hand_over(said)

    def _read_message(self, body: bytes) -> dict[str, Any]:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise QueryFailed(
                "The process of the query sent an invalid answer.", kind="unavailable"
            )
        if isinstance(error := said.get("error"), dict):
            position = error.get("position")
            raise QueryFailed(
                str(error.get("message", ""))[:4000],
                kind=str(error.get("kind", "query"))[:20],
                position=position if isinstance(position, int) and position >= 0 else None,
            )
        return said

    def _hand_over(self, said: Mapping[str, Any]) -> None:
        """Read a range of a file that was given, and of no other."""
        number, at, count = said.get("file"), said.get("at"), said.get("bytes")
        wrong = QueryFailed("The process of the query asked for a range that it may not read.")
        if not (isinstance(number, int) and isinstance(at, int) and isinstance(count, int)):
            raise wrong
        file = self._files[number] if 0 <= number < len(self._files) else None
        if file is None or not 0 <= at <= at + count <= self._sizes[number]:
            raise wrong
        if count > PIECE_BYTES_MAX:
            raise QueryFailed(
                f"A column chunk has more than {PIECE_BYTES_MAX:,} bytes: write smaller row groups."
            )
        try:
            file.seek(at)
            body = file.read(count)
        except NotFound as error:
            raise QueryFailed(
                f"{error.message.rstrip('.')}: it was removed since it was published.",
                kind="missing",
                hint="Query again. If it stays missing, run a backfill of its partition.",
            ) from error
        if len(body) != count:
            raise QueryFailed(
                "A file is shorter than its manifest says: it was changed after it was published."
            )
        self._write(body)

    def _frame(self, bytes_max: int) -> tuple[int, bytes]:
        size, kind = child.HEADER.unpack(self._read(child.HEADER.size))
        if size > bytes_max:
            raise QueryFailed(
                "The process of the query sent a message that is too large.", kind="unavailable"
            )
        return kind, self._read(size)

    def _send(self, body: bytes) -> None:
        self._write(child.HEADER.pack(len(body), child.JSON) + body)

    def _write(self, body: bytes) -> None:
        try:
            self._socket.settimeout(self._left())
            self._socket.sendall(body)
        except TimeoutError:
            raise self._late() from None
        except OSError:
            raise self._ended() from None

    def _read(self, size: int) -> bytes:
        pieces: list[bytes] = []
        while size:
            try:
                self._socket.settimeout(self._left())
                piece = self._socket.recv(min(size, 1 << 20))
            except TimeoutError:
                raise self._late() from None
            except OSError:
                raise self._ended() from None
            if not piece:
                raise self._ended()
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _left(self) -> float:
        assert self._deadline is not None, "it was waited for"
        left = self._deadline - self._clock.monotonic()
        if left <= 0:
            raise self._late()
        return left

    def _late(self) -> QueryFailed:
        self.kill()
        return QueryFailed(
            f"The query was cancelled after {self._bounds.seconds_max:g} seconds"
            " (`query_seconds`).",
            kind="too slow",
        )

    def _ended(self) -> QueryFailed:
        return QueryFailed(
            "The process of the query exited before its result was complete: it was cancelled, or"
            " needed more memory than `query_memory` allows.",
            kind="ended",
        )


def _descriptor(file: BinaryIO | None) -> int | None:
    """Of a file of this machine; None of one in a bucket."""
    try:
        return None if file is None else file.fileno()
    except OSError:
        return None


class QueryProcesses:
    """Processes for queries: as many as are asked for, and one that is ready."""

    def __init__(
        self,
        bounds: QueryBounds,
        *,
        uids: UidPool | None,
        threads: ThreadPoolExecutor,
        clock: Clock,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._bounds = bounds
        self._uids = uids if sys.platform == "linux" and os.geteuid() == 0 else None
        self._threads = threads
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._forks: QueryForkServer | None = None
        self._ready: Future[QueryProcess] | None = None
        self._taken = 0
        self._users: deque[LeasedUid] = deque()
        """Those of queries that have ended, for the next ones: nothing is left of them."""
        self._idle: asyncio.TimerHandle | None = None

    @property
    def has_users(self) -> bool:
        """Whether each process is a user of its own."""
        return self._uids is not None

    async def take(self) -> QueryProcess:
        """One that is ready; who has taken it gives it to `closed`."""
        found, self._ready = self._ready, None
        starting = self._started() if found is None else found
        self._taken += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(starting))
        except BaseException:
            self._taken -= 1
            starting.add_done_callback(_close_made)
            raise

    def prepare(self) -> None:
        """Have one ready for the next query, for a while."""
        if self._idle is not None:
            self._idle.cancel()
        if self._ready is not None and self._ready.done() and self._ready.exception() is not None:
            self._ready = None
        if self._ready is None:
            self._ready = self._started()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self._idle_seconds, self._end_if_idle)

    def end(self) -> None:
        """End the one that is ready, and the fork server with all of its processes."""
        if self._idle is not None:
            self._idle.cancel()
        found, self._ready = self._ready, None
        if found is not None:
            found.add_done_callback(_close_made)
        forks, self._forks = self._forks, None
        if forks is not None:
            forks.close()
        while self._users:
            self._users.pop().unlock()

    async def within(self, work: Any, *given: Any) -> Any:
        """Call something that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    async def closed(self, process: QueryProcess) -> None:
        """Close a process that was taken, whatever becomes of who asks."""
        self._taken -= 1
        process.kill()
        await asyncio.shield(self.within(self._close, process))

    def _close(self, process: QueryProcess) -> None:
        user = process.close()
        if user is not None:
            self._users.append(user)
            while len(self._users) > _USERS_MAX:
                self._users.popleft().unlock()

    def _end_if_idle(self) -> None:
        if not self._taken:
            self.end()

    def _started(self) -> Future[QueryProcess]:
        if self._forks is None or not self._forks.is_alive:
            self._forks = QueryForkServer(self._bounds)
        return self._threads.submit(self._start, self._forks)

    def _start(self, forks: QueryForkServer) -> QueryProcess:
        try:
            user = None if self._uids is None else self._user(self._uids)
        except PenstockError as error:
            raise QueryFailed(error.message, kind="unavailable", hint=error.hint) from error
        try:
            process = QueryProcess(self._bounds, forks, user=user, clock=self._clock)
        except BaseException:
            if user is not None:
                user.end()
            raise
        try:
            process.wait()
        except BaseException:
            if (left := process.close()) is not None:
                left.unlock()
            raise
        return process

    def _user(self, uids: UidPool) -> LeasedUid:
        with suppress(IndexError):
            return self._users.pop()
        return uids.take()


def _close_made(starting: Future[QueryProcess]) -> None:
    """Close a process that nobody wants any more."""
    if not starting.cancelled() and starting.exception() is None:
        user = starting.result().close()
        if user is not None:
            user.unlock()
