"""Connections to Postgres, and the one way to use them: `transact`.

Owns the pool, the bounds on every wait (for a connection, a lock, a statement, a transaction that
idles) and the mapping of psycopg's errors. An operation is a function of a connection; it runs in
one transaction and is run again, from the beginning, when Postgres has ended it because of a
deadlock. So it may do nothing but talk to that connection. A statement is prepared when a
connection first runs it: planning the large ones costs tens of milliseconds, running them one.
Called by everything of the dispatcher that has state. A crash leaves what is committed; Postgres
rolls back the rest.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from penstock.dispatcher.database.queries import query
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from penstock.kernel.service import Service

Connection = psycopg.AsyncConnection[DictRow]
Answer = TypeVar("Answer")

_TRIES_MAX: Final = 5
_CONNECT_SECONDS_MAX: Final = 10
_WAIT_SECONDS_MAX: Final = 30.0
_IDLE_SECONDS: Final = 1.0
_UNASKED_SECONDS_MAX: Final = 60.0
_LIMITS: Final = {"statement_ms": "30000", "lock_ms": "10000", "idle_ms": "30000"}


class Database(Service):
    """A pool of connections to one database.

    `began` is called at the beginning of every transaction; tests move the time with it.
    """

    def __init__(
        self,
        dsn: str,
        *,
        connections_max: int = 10,
        application: str = "penstock",
        clock: Clock | None = None,
        began: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        self._application = application
        self._began = began
        self._clock = clock or SystemClock()
        self._used: WeakKeyDictionary[object, float] = WeakKeyDictionary()
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            dsn,
            connection_class=psycopg.AsyncConnection[DictRow],
            kwargs={
                "row_factory": dict_row,
                "connect_timeout": _CONNECT_SECONDS_MAX,
                "prepare_threshold": 0,
            },
            configure=self._set_up,
            check=self._check,
            min_size=1,
            max_size=connections_max,
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
        except psycopg.OperationalError as error:
            raise unavailable(error) from error

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A connection inside a transaction, which ends with the block. Errors are psycopg's."""
        async with self._pool.connection() as connection:
            async with connection.transaction():
                if self._began is not None:
                    await self._began(connection)
                yield connection
            self._used[connection] = self._clock.monotonic()

    async def look(self, name: str, asked: Mapping[str, object]) -> DictRow:
        """The one row of a statement that only reads, by its name, without a transaction."""

        async def work(connection: Connection) -> DictRow:
            row = await (await connection.execute(query(name), asked)).fetchone()
            assert row is not None, "the statement has one row"
            return row

        if self._began is not None:
            return await self.transact(work)
        try:
            async with self._pool.connection() as connection:
                await connection.set_autocommit(True)
                try:
                    return await work(connection)
                finally:
                    self._used[connection] = self._clock.monotonic()
                    if not connection.closed:
                        await connection.set_autocommit(False)
        except psycopg.OperationalError as error:
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
        readable, _, _ = select.select([connection.fileno()], [], [], 0)
        if readable or idle_seconds > _UNASKED_SECONDS_MAX:
            await AsyncConnectionPool.check_connection(connection)

    async def _set_up(self, connection: psycopg.AsyncConnection[Any]) -> None:
        limits = {"application": self._application, **_LIMITS}
        await connection.execute(query("set_up_connection"), limits)
        await connection.commit()


def unavailable(error: psycopg.Error) -> DatabaseUnavailable:
    """What to say of a Postgres that cannot be reached, or that went away."""
    return DatabaseUnavailable(
        f"Postgres does not answer: {first_line(error)}", hint="Is it running, and reachable?"
    )


def first_line(error: Exception) -> str:
    """What an error says, without what libpq adds to it."""
    return (str(error) or type(error).__name__).splitlines()[0]
