"""Access to Postgres: named SQL, the connection pool, and the one way to use both: `transact`.

Every statement stands in a file of `penstock/dispatcher/sql` below `-- name: the_name`, with
its parameters as `%(parameter)s` (`query`). Files whose name begins with a number are
migrations. They are read once, at first use; an unknown name is a bug.

`Database` owns the pool, the bounds on every wait (for a connection, a lock, a statement, an
idle transaction) and the mapping of psycopg's errors. An operation is a function of a
connection; it runs in one transaction and is run again from the beginning after a deadlock. So
it may do nothing but talk to that connection. A statement is prepared when a connection first
runs it: planning the large ones costs tens of milliseconds, running them one. A crash leaves
what is committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import select
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.abc import Params
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from penstock.kernel.ports import ASK_SECONDS, ASKS_MAX, PEER_SECONDS_MAX, SILENT_SECONDS
from penstock.kernel.service import Service

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_MIGRATION: Final = re.compile(r"\d+_\w+\.sql")


def query(name: str) -> bytes:
    """The statement of this name, as psycopg takes it."""
    return _queries()[name]


def named(text: str, *, where: str) -> Mapping[str, bytes]:
    """The statements of one file."""
    pieces = _NAME.split(text)
    names, bodies = pieces[1::2], pieces[2::2]
    found = {name: body.strip().encode() for name, body in zip(names, bodies, strict=True)}
    if len(found) < len(names):
        raise ValueError(f"{where} has two statements of one name.")
    return found


def migration_texts() -> Mapping[str, str]:
    """The migrations that come with this release, by the names of their files."""
    return {
        each.name: each.read_text("utf-8")
        for each in _folder().iterdir()
        if _MIGRATION.fullmatch(each.name)
    }


@functools.cache
def _queries() -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    for each in _folder().iterdir():
        if each.name.endswith(".sql") and not _MIGRATION.fullmatch(each.name):
            statements = named(each.read_text("utf-8"), where=each.name)
            if twice := found.keys() & statements.keys():
                raise ValueError(f"{each.name} names {sorted(twice)}, which are there already.")
            found |= statements
    return found


def _folder() -> resources.abc.Traversable:
    return resources.files("penstock.dispatcher") / "sql"


_PARAMETER: Final = re.compile(rb"%(?:\((\w+)\)s|(s)|(%))")


@functools.cache
def numbered(statement: bytes) -> tuple[bytes, Sequence[str]]:
    """A statement with `$1` for its first parameter, and the names of all, each once.

    Those of `%s` are named by their places.
    """
    names: dict[str, int] = {}

    def one(found: re.Match[bytes]) -> bytes:
        name, is_placed, _ = found.groups()
        if name is None and is_placed is None:
            return b"%"
        number = names.setdefault(
            str(len(names)) if name is None else name.decode(), len(names) + 1
        )
        return b"$%d" % number

    text = _PARAMETER.sub(one, statement)
    return text, tuple(names)


class NamedCursor(psycopg.AsyncRawCursor[DictRow]):
    """Takes statements as they stand in `sql/`, and has Postgres number their parameters."""

    async def execute(
        self,
        query: Any,
        params: Params | None = None,
        *,
        prepare: bool | None = None,
        binary: bool | None = None,
    ) -> NamedCursor:
        if params is not None and isinstance(query, bytes):
            query, names = numbered(query)
            if isinstance(params, Mapping):
                params = [params[name] for name in names]
        return await super().execute(query, params, prepare=prepare, binary=binary)


class Connection(psycopg.AsyncConnection[DictRow]):
    """A connection of a `Database`, in a transaction."""

    woken: Counter[tuple[str, str]] | None = None
    """By operator and priority, how many tasks may begin because of this transaction, for the
    announcement after its commit. None: they are announced by rows of the outbox."""
    is_kept: bool = False
    """Whether the caller may claim that work, before it is announced to others."""


Answer = TypeVar("Answer")


class Announce(Protocol):
    """Announces tasks, by operator and priority: see `penstock.dispatcher.announcer`."""

    def __call__(self, woken: Mapping[tuple[str, str], int], *, is_kept: bool) -> None: ...


_UNAVAILABLE: Final = (
    psycopg.OperationalError,
    # Of a server in recovery, as in a fail-over; for psycopg not an operational one.
    psycopg.errors.ReadOnlySqlTransaction,
    # Has ended the connection.
    psycopg.errors.IdleInTransactionSessionTimeout,
)
_TRIES_MAX: Final = 5
_CONNECT_SECONDS_MAX: Final = 10
_WAIT_SECONDS_MAX: Final = 30.0
_IDLE_SECONDS: Final = 1.0
_UNASKED_SECONDS_MAX: Final = 60.0
_UNUSED_SECONDS_MAX: Final = 15.0
"""How long all connections were more than were needed before one of them is closed: each is a
process of Postgres. A load that comes back finds most of them."""
_LIMITS: Final = {"statement_ms": "30000", "lock_ms": "10000", "idle_ms": "30000"}


class Database(Service):
    """A pool of connections to one database.

    `began` is called at the beginning of every transaction; tests move the time with it.
    `announce` is called after the commit of every transaction that has made work: see `Connection`.
    """

    def __init__(
        self,
        dsn: str,
        *,
        connections_max: int,
        application: str = "penstock",
        clock: Clock | None = None,
        began: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        self.announce: Announce | None = None
        self._application = application
        self._began = began
        self._clock = clock or SystemClock()
        self._used: WeakKeyDictionary[object, float] = WeakKeyDictionary()
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            dsn,
            connection_class=Connection,
            kwargs={
                "row_factory": dict_row,
                "cursor_factory": NamedCursor,
                "connect_timeout": _CONNECT_SECONDS_MAX,
                "prepare_threshold": 0,
                **watching(dsn),
            },
            configure=self._set_up,
            check=self._check,
            min_size=1,
            max_size=connections_max,
            max_idle=_UNUSED_SECONDS_MAX,
            timeout=_WAIT_SECONDS_MAX,
            name=application,
            open=False,
        )

    async def start(self) -> None:
        try:
            await self._pool.open(wait=True, timeout=_WAIT_SECONDS_MAX)
        except psycopg.OperationalError as error:
            raise unavailable(error) from error

    async def stop(self) -> None:
        await self._pool.close(timeout=_WAIT_SECONDS_MAX)

    async def transact(self, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        """Run an operation in one transaction; again if it was the victim of a deadlock."""
        for _ in range(_TRIES_MAX - 1):
            with contextlib.suppress(psycopg.errors.DeadlockDetected):
                return await self._once(work)
        return await self._once(work)

    async def _once(self, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        try:
            async with self.transaction() as connection:
                return await work(connection)
        except psycopg.errors.DeadlockDetected:
            raise
        except (psycopg.DataError, UnicodeEncodeError) as error:
            raise InvalidInput(f"Postgres cannot hold a value: {first_line(error)}") from error
        except _UNAVAILABLE as error:
            raise unavailable(error) from error

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A connection inside a transaction, which ends with the block. Errors are psycopg's."""
        async with self._pool.connection() as connection:
            connection.woken = None if self.announce is None else Counter()
            connection.is_kept = is_undone = False
            try:
                async with connection.transaction():
                    if self._began is not None:
                        await self._began(connection)
                    is_undone = True
                    yield connection
                    is_undone = False
            except (asyncio.CancelledError, psycopg.OperationalError):
                # It may be committed all the same: a hint too many costs an empty claim.
                connection.is_kept = False
                self._announce(connection)
                raise
            except psycopg.errors.ReadOnlySqlTransaction:
                # The next connection may lead to the server that is the primary now.
                await connection.close()
                raise
            self._used[connection] = self._clock.monotonic()
            # What ends by `psycopg.Rollback` comes to here as well.
            if not is_undone:
                self._announce(connection)

    def _announce(self, connection: Connection) -> None:
        if connection.woken and self.announce is not None:
            self.announce(connection.woken, is_kept=connection.is_kept)

    async def rows(
        self, name: str, asked: Mapping[str, object] | None = None, /, **more: object
    ) -> list[DictRow]:
        """The rows of one statement, by its name, in a transaction of its own: see `transact`."""
        return await self.transact(lambda one: fetch_rows(one, name, asked, **more))

    async def fetch(self, name: str, asked: Mapping[str, object] | None = None) -> list[DictRow]:
        """The rows of one statement, by its name, without `BEGIN` and `COMMIT` around it."""

        async def work(connection: Connection) -> list[DictRow]:
            cursor = await connection.execute(query(name), asked)
            return await cursor.fetchall() if cursor.description else []

        if self._began is not None:
            return await self.transact(work)
        try:
            async with self._pool.connection() as connection:
                await connection.set_autocommit(True)
                try:
                    return await work(connection)
                except psycopg.errors.ReadOnlySqlTransaction:
                    await connection.close()
                    raise
                finally:
                    self._used[connection] = self._clock.monotonic()
                    if not connection.closed:
                        await connection.set_autocommit(False)
        except _UNAVAILABLE as error:
            raise unavailable(error) from error

    async def _check(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Find out whether a connection that has idled is still there.

        Without this, each connection that a restart of Postgres has broken would fail once. The
        end of a server is there to be read, and costs no statement to be seen; what has idled for
        long is asked.
        """
        idle_seconds = self._clock.monotonic() - self._used.get(connection, -math.inf)
        if idle_seconds <= _IDLE_SECONDS:
            return
        # Not `select.select`: thousands of workers wait here, and it takes no number above 1,023.
        look = select.poll()
        look.register(connection.fileno(), select.POLLIN)
        if look.poll(0) or idle_seconds > _UNASKED_SECONDS_MAX:
            await AsyncConnectionPool.check_connection(connection)

    async def _set_up(self, connection: psycopg.AsyncConnection[Any]) -> None:
        limits = {"application": self._application, **_LIMITS}
        await connection.execute(query("set_up_connection"), limits)
        await connection.commit()


async def fetch_rows(
    connection: Connection, name: str, asked: Mapping[str, object] | None = None, /, **more: object
) -> list[DictRow]:
    """The rows of a statement, by its name; its parameters come as a mapping or by their names."""
    return await (await connection.execute(query(name), {**(asked or {}), **more})).fetchall()


def watching(dsn: str) -> Mapping[str, Any]:
    """What has a connection end soon if the server's machine is gone; not what the address says.

    After a fail-over nobody would say so, and every call would wait for as long as TCP tries.
    """
    wanted = {
        "keepalives_idle": SILENT_SECONDS,
        "keepalives_interval": ASK_SECONDS,
        "keepalives_count": ASKS_MAX,
        "tcp_user_timeout": 1000 * PEER_SECONDS_MAX,
    }
    said = conninfo_to_dict(dsn)
    return {name: str(value) for name, value in wanted.items() if name not in said}


def unavailable(error: psycopg.Error) -> DatabaseUnavailable:
    """What to say of a Postgres that cannot be reached, or that went away."""
    return DatabaseUnavailable(
        f"Postgres does not answer: {first_line(error)}", hint="Is it running, and reachable?"
    )


def first_line(error: Exception) -> str:
    """What an error says, without what libpq adds to it."""
    return (str(error) or type(error).__name__).splitlines()[0]
