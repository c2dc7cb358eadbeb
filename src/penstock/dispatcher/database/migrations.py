"""Brings a database to the schema of this release: forward only, each step once.

A migration is a file `NNNN_words.sql` in `penstock/dispatcher/sql`, numbered from 1 without gaps.
It is applied in a transaction of its own, together with its row in the table `migration`; so a
crash leaves it applied or not applied. One advisory lock makes several dispatchers that start at
once apply each step once: the others wait, and find it done.

A file that was applied never changes: its checksum is compared. A database that is ahead of this
release was migrated by a later one, and is left alone. Both are errors that say what to do. Called
when a dispatcher starts, before anything else touches the database.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from penstock.dispatcher.database.pool import first_line, migration_texts, query, unavailable
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput, MigrationRefused

_log = logging.getLogger(__name__)

_PAUSES_SECONDS: Final = (0.5, 1.0, 2.0, 4.0)
_RECOVERY_PAUSES_SECONDS: Final = (5.0, 5.0, 5.0, 5.0)
"""Beyond these, for a server that is coming: as long as one that was killed may take to recover."""
_RECOVERS: Final = ("the database system is", "No such file or directory")
"""It is starting up, or has not made its socket yet: libpq has no codes for it, only words."""
_PATIENT: Final = {
    "application": "penstock migrations",
    "statement_ms": "900000",
    "lock_ms": "900000",
    "idle_ms": "900000",
}
"""A migration of a large table takes its time, and so does waiting for it."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AppliedMigration:
    """What a database remembers of a step."""

    number: int
    name: str
    checksum: str


def migrations(texts: Mapping[str, str] | None = None) -> tuple[Migration, ...]:
    """The steps of this release, or of these files, in their order."""
    files = sorted((migration_texts() if texts is None else texts).items())
    found = [
        Migration(int(name.split("_")[0]), name.removesuffix(".sql"), text) for name, text in files
    ]
    numbers = [each.number for each in found]
    if numbers != list(range(1, len(found) + 1)):
        raise ValueError(f"The migrations are numbered {numbers}, not 1, 2, 3 and so on.")
    return tuple(found)


def pending(steps: Sequence[Migration], applied: Sequence[AppliedMigration]) -> Sequence[Migration]:
    """The steps that are missing. Raises `MigrationRefused` if those applied are not ours."""
    for place, done in enumerate(applied, start=1):
        if done.number != place:
            raise MigrationRefused(
                f"The database does not remember migration {place}, but {done.name} after it.",
                hint="Restore the table `migration` from a backup.",
            )
        if done.number > len(steps):
            raise MigrationRefused(
                f"The database is at migration {applied[-1].number} ({applied[-1].name}), and this"
                f" release of Penstock knows {len(steps)}.",
                hint="Upgrade Penstock; a database never goes back.",
            )
        step = steps[done.number - 1]
        if (step.name, step.checksum) != (done.name, done.checksum):
            raise MigrationRefused(
                f"Migration {step.name} is not the one that was applied to this database"
                f" ({done.name}).",
                hint="Restore the file: a migration that was applied never changes.",
            )
    return steps[len(applied) :]


async def migrate(dsn: str, steps: Sequence[Migration] | None = None) -> tuple[Migration, ...]:
    """Apply what is missing and return it. Waits for others who are doing the same."""
    steps = migrations() if steps is None else steps
    try:
        connection = await psycopg.AsyncConnection.connect(
            dsn, autocommit=True, row_factory=dict_row, connect_timeout=10
        )
        async with connection:
            return await _migrate(connection, steps)
    except psycopg.ProgrammingError as error:
        if error.sqlstate is not None:
            raise
        raise InvalidInput(
            f"The address of Postgres cannot be read: {first_line(error)}.",
            hint="Write it as postgresql://USER@HOST:PORT/DATABASE.",
        ) from error
    except psycopg.OperationalError as error:
        raise unavailable(error) from error


async def _migrate(
    connection: psycopg.AsyncConnection[dict[str, Any]], steps: Sequence[Migration]
) -> tuple[Migration, ...]:
    await connection.execute(query("set_up_connection"), _PATIENT)
    await connection.execute(query("take_migration_lock"))
    await connection.execute(query("make_migration_table"))
    rows = await (await connection.execute(query("applied_migrations"))).fetchall()
    missing = pending(steps, [AppliedMigration(**row) for row in rows])
    for step in missing:
        await _apply(connection, step)
    await connection.execute(query("release_migration_lock"))
    return tuple(missing)


async def migrate_patiently(dsn: str) -> None:
    """The same, for who starts beside a Postgres that is just starting again."""
    for number, pause in enumerate((*_PAUSES_SECONDS, *_RECOVERY_PAUSES_SECONDS)):
        try:
            await migrate(dsn)
        except DatabaseUnavailable as error:
            is_coming = any(words in error.message for words in _RECOVERS)
            if number >= len(_PAUSES_SECONDS) and not is_coming:
                raise
            _log.warning("retrying migrations: %s", error.message)
            await SystemClock().sleep(pause)
        else:
            return
    await migrate(dsn)


async def _apply(connection: psycopg.AsyncConnection[dict[str, object]], step: Migration) -> None:
    try:
        async with connection.transaction():
            await connection.execute(step.text.encode())
            record = {"number": step.number, "name": step.name, "checksum": step.checksum}
            await connection.execute(query("record_migration"), record)
    except psycopg.Error as error:
        raise MigrationRefused(
            f"Migration {step.name} failed and was rolled back: {error}",
            hint="The database is as it was before this step.",
        ) from error
