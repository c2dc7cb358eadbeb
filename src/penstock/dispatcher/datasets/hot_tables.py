"""Postgres data: the tables of hot datasets, and the view by which readers read each.

```
hot.alerts                   the view: what readers read, and all that they have to know
hot_store.alerts__3(...)     the function that it calls, whose text Postgres puts in its place
hot_store.alerts__9f3c…      a table for each generation, its rows marked by their partition
hot_store.pointer            a row for each dataset: the generation that readers are sent to
hot_store.dataset, .relation, .applied    what is there, and which transaction was the last
```

A cut-over changes a row: readers in a long transaction go on as before, and hold nobody up. What
cannot be done beside readers is done under a short `lock_timeout`, and tried again: a column more,
another shape of the view, the removal of a table (`HotTableBusy`). A table that is left stays for
`GRACE_SECONDS`, for transactions whose moment is before the cut-over.

All that changes a dataset holds its advisory lock, on the connection that does the work: a process
that is gone or cut off holds nothing and commits nothing. Statements are in `sql/hot_tables.sql`.
Called by `applier`, which says what the tables are to have.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from penstock.datasets.schema import Column, evolve, widened
from penstock.dispatcher.database.pool import (
    Connection,
    NamedCursor,
    fetch_rows,
    first_line,
    query,
    watching,
)
from penstock.kernel.errors import DatabaseUnavailable, PenstockError, SchemaRefused

GRACE_SECONDS: Final = 600.0
"""How long a table stays that readers are not sent to any more."""
LOCK_MS: Final = 500
_IDLE_MS: Final = 300_000
_CONNECT_SECONDS_MAX: Final = 10
_NAME_CHARACTERS: Final = 40
_TYPES: Final = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}


class HotTableBusy(PenstockError):
    """A transaction of a reader has a lock that is needed for a moment."""


def postgres_type(word: str) -> str:
    """The type of a column in Postgres; what is nested is `jsonb`.

    >>> postgres_type("decimal(12,2)")
    'numeric(12,2)'
    """
    if word.startswith("decimal"):
        return word.replace("decimal", "numeric", 1)
    return _TYPES.get(word, "jsonb")


def relation_name(dataset: str, name: str, generation: str) -> str:
    """What the table of a generation is called: by the dataset's name, and never twice."""
    digest = hashlib.sha256(f"{dataset}/{generation}".encode()).hexdigest()[:12]
    return f"{name[:_NAME_CHARACTERS]}__{digest}"


def projected(held: Sequence[Column], shape: Sequence[Column]) -> list[sql.Composable] | None:
    """The columns of a view as those of a table; None if one of them cannot be had of it."""
    types = {each.name: each.type for each in held}
    found: list[sql.Composable] = []
    for each in shape:
        as_type = sql.SQL(postgres_type(each.type))
        if each.name not in types:
            found.append(sql.SQL("NULL::{}").format(as_type))
        elif widened(each.type, types[each.name]) == each.type:
            column = sql.SQL("held.{}").format(sql.Identifier(each.name))
            found.append(sql.SQL("{}::{}").format(column, as_type))
        else:
            return None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HotGeneration:
    """A generation as the state has it."""

    generation: str
    is_current: bool
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    """The columns that identify a row of what is merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotRelation:
    """The table of a generation."""

    generation: str
    name: str
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    is_there: bool
    is_over: bool | None

    @property
    def table(self) -> sql.Composable:
        return sql.Identifier("hot_store", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPartition:
    """What a table has of a partition."""

    generation: str
    partition_key: str
    revision: int
    stamp: str
    """What tells this revision from one of the same number, in a state that was restored."""


class PostgresData:
    """The server of hot tables."""

    def __init__(self, dsn: str, *, reader: str) -> None:
        self._dsn = dsn
        self._reader = reader
        self._is_set_up = False

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection of its own. Raises `DatabaseUnavailable`."""
        try:
            connection = await Connection.connect(
                self._dsn,
                autocommit=True,
                row_factory=dict_row,
                cursor_factory=NamedCursor,
                connect_timeout=_CONNECT_SECONDS_MAX,
                application_name="penstock applier",
                **watching(self._dsn),
            )
        except psycopg.OperationalError as error:
            raise _unavailable(error) from error
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            try:
                limits = {"lock_ms": str(LOCK_MS), "idle_ms": str(_IDLE_MS)}
                await connection.execute(query("hot_session"), limits)
                if not self._is_set_up:
                    await self._set_up(connection)
                yield connection
            except psycopg.OperationalError as error:
                raise _unavailable(error) from error

    async def positions(self, connection: Connection) -> Mapping[str, str | None]:
        """The last transaction of every dataset; none of one that has a table to be removed."""
        rows = await fetch_rows(connection, "hot_positions", grace_seconds=GRACE_SECONDS)
        return {row["dataset"]: row["position"] for row in rows if not row["is_left"]}

    @contextlib.asynccontextmanager
    async def locked(
        self, connection: Connection, dataset: str, name: str
    ) -> AsyncIterator[HotDataset | None]:
        """The tables of a dataset, for this connection alone; None while another has them."""
        (row,) = await fetch_rows(connection, "hot_take", dataset=dataset)
        if not row["is_taken"]:
            yield None
            return
        try:
            yield HotDataset(connection, dataset, name, self._reader)
        finally:
            if not connection.closed:
                with contextlib.suppress(psycopg.Error):
                    await connection.execute(query("hot_let_go"), {"dataset": dataset})

    async def _set_up(self, connection: Connection) -> None:
        """Make what is not there yet, and let whoever reads read."""
        async with connection.transaction():
            await connection.execute(query("hot_set_up"))
            await connection.execute(query("hot_make_store"))
            await let_read(connection, self._reader)
        self._is_set_up = True


async def let_read(connection: Connection, reader: str) -> None:
    """Grant a role what reading takes, if there is such a role."""
    for row in await fetch_rows(connection, "hot_let_read", reader=reader):
        await connection.execute(row["statement"].encode())


class HotDataset:
    """The tables of one dataset, while its lock is held. Each method is one transaction."""

    def __init__(self, connection: Connection, dataset: str, name: str, reader: str) -> None:
        self._connection = connection
        self._dataset = dataset
        self._name = name
        self._reader = reader
        self.position: str | None = None
        self.served: str | None = None
        self._shape: tuple[Column, ...] = ()
        self._number = 0

    async def look(self) -> None:
        """Find out what is there. Raises `PenstockError` if another dataset has the name."""
        asked = {"dataset": self._dataset, "name": self._name}
        if await fetch_rows(self._connection, "hot_taken_name", **asked):
            raise PenstockError(
                f"Postgres data has a table {self._name} of another installation.",
                hint="Use a database of its own for each installation, or remove the view"
                f" hot.{self._name} and its row in hot_store.dataset.",
            )
        (row,) = await fetch_rows(self._connection, "hot_dataset", **asked)
        self.position, self.served = row["position"], row["served"]
        self._shape, self._number = _columns(row["columns"]), row["shape"]

    async def applied(self, position: str | None = None) -> list[AppliedPartition]:
        """What is there, or what the transaction of a name has applied."""
        rows = await fetch_rows(
            self._connection, "hot_applied", dataset=self._dataset, position=position
        )
        return [AppliedPartition(**row) for row in rows]

    async def relations(self) -> list[HotRelation]:
        """The tables that there are, or ought to be."""
        rows = await fetch_rows(
            self._connection, "hot_relations", dataset=self._dataset, grace_seconds=GRACE_SECONDS
        )
        return [
            HotRelation(
                generation=row["generation"],
                name=row["name"],
                columns=_columns(row["columns"]),
                keys=tuple(row["keys"]),
                is_there=row["is_there"],
                is_over=row["is_over"],
            )
            for row in rows
        ]

    async def prepare(self, wanted: Sequence[HotGeneration]) -> tuple[list[HotRelation], list[str]]:
        """Have a table for each of these generations, with at least their columns.

        Returns the tables, and the generations of those that have to be compared with what is
        published: they were made anew, or had been left and saw nothing meanwhile.
        """
        held = {each.generation: each for each in await self.relations()}
        unsure = []
        async with self._changing():
            for each in wanted:
                relation = held.get(each.generation)
                if relation is None or not relation.is_there:
                    await self._make(each)
                    unsure.append(each.generation)
                elif not await self._grow(relation, each.columns):
                    await self._execute("hot_drop_table", table=relation.table)
                    await self._make(each)
                    unsure.append(each.generation)
                elif relation.is_over is not None:
                    unsure.append(each.generation)
            named = {"dataset": self._dataset, "generations": [one.generation for one in wanted]}
            await self._connection.execute(query("hot_leave"), named)
            if unsure:
                forgot = "hot_forget_position"
                (row,) = await fetch_rows(self._connection, forgot, dataset=self._dataset)
                self.position = row["position"]
        return await self.relations(), unsure

    async def _make(self, wanted: HotGeneration) -> None:
        name = relation_name(self._dataset, self._name, wanted.generation)
        table = sql.Identifier("hot_store", name)
        columns = sql.SQL(", ").join(_defined(each) for each in wanted.columns)
        await self._execute("hot_make_table", table=table, columns=columns)
        if wanted.keys:
            await self._execute("hot_make_key", table=table, keys=_names(wanted.keys))
        await self._execute("hot_make_index", table=table)
        named = {"dataset": self._dataset, "generations": [wanted.generation]}
        await self._connection.execute(query("hot_forget_generations"), named)
        await self._note(name, wanted.generation, wanted.columns, keys=wanted.keys)

    async def _grow(self, relation: HotRelation, declared: Sequence[Column]) -> bool:
        """Add and widen columns; False if that is not how it can be."""
        try:
            grown = evolve(relation.columns, declared)
        except SchemaRefused:
            return False
        if grown == relation.columns:
            return True
        held = {each.name: each.type for each in relation.columns}
        for each in grown:
            column, as_type = sql.Identifier(each.name), sql.SQL(postgres_type(each.type))
            named: dict[str, sql.Composable] = {"table": relation.table, "column": column}
            if each.name not in held:
                await self._execute("hot_add_column", **named, type=as_type)
            elif postgres_type(held[each.name]) != postgres_type(each.type):
                await self._execute("hot_widen_column", **named, type=as_type)
        await self._note(relation.name, relation.generation, grown, keys=relation.keys)
        return True

    async def _note(
        self, name: str, generation: str, columns: Sequence[Column], *, keys: Sequence[str]
    ) -> None:
        noted = {
            "dataset": self._dataset,
            "generation": generation,
            "name": name,
            "columns": _plain(columns),
            "keys": json.dumps(list(keys)),
        }
        await self._connection.execute(query("hot_note_relation"), noted)

    @contextlib.asynccontextmanager
    async def loading(self, position: str) -> AsyncIterator[HotLoad]:
        """A transaction of this name, which loads partitions."""
        async with self._connection.transaction():
            yield HotLoad(self._connection, self._dataset, position)
            noted = {"dataset": self._dataset, "position": position}
            await self._connection.execute(query("hot_note_position"), noted)

    async def serve(self, current: HotGeneration, relations: Sequence[HotRelation]) -> None:
        """Send readers to a generation, and give the view its columns; once, and then again only
        where one of them has changed."""
        (own,) = [each for each in relations if each.generation == current.generation]
        held = {each.name: each.type for each in own.columns}
        shape = tuple(Column(each.name, held[each.name]) for each in current.columns)
        if (self.served, self._shape) == (current.generation, shape):
            return
        async with self._changing():
            if self._shape != shape:
                await self._reshape(shape, relations)
            else:
                await self._make_function(self._number, shape, relations)
            named = {"dataset": self._dataset, "generation": current.generation}
            await self._connection.execute(query("hot_point"), named)
        self.served = current.generation

    async def _reshape(self, shape: Sequence[Column], relations: Sequence[HotRelation]) -> None:
        number = self._number + 1
        await self._make_function(number, shape, relations)
        view = sql.Identifier("hot", self._name)
        # Columns are only added at its end by what is made in its place.
        if self._shape != tuple(shape[: len(self._shape)]):
            await self._execute("hot_drop_view", view=view)
        names = sql.SQL(", ").join(
            sql.SQL("held.{}").format(sql.Identifier(each.name)) for each in shape
        )
        function = self._function(number)
        await self._execute("hot_make_view", view=view, columns=names, function=function)
        await self._execute("hot_drop_function", function=self._function(self._number))
        noted = {"dataset": self._dataset, "columns": _plain(shape), "shape": number}
        await self._connection.execute(query("hot_note_view"), noted)
        await let_read(self._connection, self._reader)

    async def _make_function(
        self, number: int, shape: Sequence[Column], relations: Sequence[HotRelation]
    ) -> None:
        selects = [
            _template("hot_select").format(
                columns=sql.SQL(", ").join(columns),
                table=each.table,
                dataset=sql.Literal(self._dataset),
                generation=sql.Literal(each.generation),
            )
            for each in relations
            if each.is_there and (columns := projected(each.columns, shape)) is not None
        ]
        text = sql.SQL("\nUNION ALL\n").join(selects).as_string(self._connection)
        await self._execute(
            "hot_make_function",
            function=self._function(number),
            columns=sql.SQL(", ").join(_defined(each) for each in shape),
            body=sql.Literal(text),
        )

    async def clear(self, *, is_all: bool) -> None:
        """Remove tables whose time is over; with `is_all` the view and all tables."""
        relations = await self.relations()
        gone = [each for each in relations if is_all or each.is_over]
        if not gone and not is_all:
            return
        async with self._changing():
            if is_all:
                await self._execute("hot_drop_view", view=sql.Identifier("hot", self._name))
                await self._execute("hot_drop_function", function=self._function(self._number))
            elif self._shape:
                left = [each for each in relations if each not in gone]
                await self._make_function(self._number, self._shape, left)
            for each in gone:
                await self._execute("hot_drop_table", table=each.table)
            named = {"dataset": self._dataset, "generations": [one.generation for one in gone]}
            await self._connection.execute(query("hot_forget_generations"), named)
            if is_all:
                named = {"dataset": self._dataset}
                await self._connection.execute(query("hot_forget_dataset"), named)

    def _function(self, number: int) -> sql.Composable:
        name = f"{self._name[:_NAME_CHARACTERS]}__{number}"
        digest = hashlib.sha256(self._dataset.encode()).hexdigest()[:8]
        return sql.Identifier("hot_store", f"{name}__{digest}")

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """A transaction that changes tables, which waits for no reader."""
        try:
            async with self._connection.transaction():
                yield
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            raise HotTableBusy(
                f"A transaction that reads hot.{self._name} holds up a change of its tables.",
                hint="It is tried again; 'idle_in_transaction_session_timeout' ends such readers.",
            ) from error
        except psycopg.errors.DependentObjectsStillExist as error:
            raise PenstockError(
                f"Something of others depends on the view hot.{self._name}, whose columns change:"
                f" {first_line(error)}",
                hint="Drop it, and make it again afterwards.",
            ) from error

    async def _execute(self, statement: str, **named: sql.Composable) -> None:
        text = _template(statement).format(**named)
        await self._connection.execute(text.as_bytes(self._connection))


class HotLoad:
    """A transaction that loads partitions."""

    def __init__(self, connection: Connection, dataset: str, position: str) -> None:
        self._connection = connection
        self._dataset = dataset
        self._position = position

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection any more, and so nothing that could be committed."""
        return self._connection.closed

    async def has(self, wanted: AppliedPartition) -> bool:
        """Whether a partition is there in this revision, or a later one."""
        return bool(
            await fetch_rows(
                self._connection,
                "hot_is_applied",
                dataset=self._dataset,
                generation=wanted.generation,
                key=wanted.partition_key,
                revision=wanted.revision,
            )
        )

    async def load(
        self,
        relation: HotRelation,
        wanted: AppliedPartition,
        pieces: Generator[Generator[bytes]],
        *,
        is_added: bool,
    ) -> None:
        """Have a partition hold the rows of these files, or add them to those that it has."""
        async with self._connection.transaction():
            await self._load(relation, wanted, pieces, is_added=is_added)

    async def _load(
        self,
        relation: HotRelation,
        wanted: AppliedPartition,
        pieces: Generator[Generator[bytes]],
        *,
        is_added: bool,
    ) -> None:
        key = {"key": wanted.partition_key}
        await self._connection.execute(query("hot_in_partition"), key)
        if is_added:
            await self._copy("hot_copy", relation, pieces)
        elif relation.keys and await self._has_rows(relation, key):
            await self._merge(relation, pieces, key)
        else:
            await self._execute("hot_empty", key, table=relation.table)
            await self._copy("hot_copy", relation, pieces)
        await self._connection.execute(
            query("hot_note_applied"),
            {
                "dataset": self._dataset,
                "generation": wanted.generation,
                "key": wanted.partition_key,
                "revision": wanted.revision,
                "stamp": wanted.stamp,
                "position": self._position,
            },
        )

    async def _has_rows(self, relation: HotRelation, key: Mapping[str, str]) -> bool:
        (row,) = await self._execute("hot_has_rows", key, table=relation.table)
        return bool(row["is_so"])

    async def _merge(
        self,
        relation: HotRelation,
        pieces: Generator[Generator[bytes]],
        key: Mapping[str, str],
    ) -> None:
        """Write what differs, and nothing else: most rows of what is merged stay as they are."""
        names, keys = [each.name for each in relation.columns], relation.keys
        await self._execute("hot_make_stage", None, table=relation.table, columns=_names(names))
        await self._copy("hot_copy_stage", relation, pieces)
        await self._connection.execute(query("hot_analyze_stage"))
        await self._execute(
            "hot_delete_missing",
            key,
            table=relation.table,
            new_keys=_names(keys, of="new"),
            held_keys=_names(keys, of="held"),
        )
        changed = [each for each in names if each not in keys] or list(keys)
        await self._execute(
            "hot_upsert",
            key,
            table=relation.table,
            columns=_names(names),
            keys=_names(keys),
            changes=sql.SQL(", ").join(
                sql.SQL("{0} = excluded.{0}").format(sql.Identifier(each)) for each in changed
            ),
            held_columns=_names(changed, of="held"),
            excluded_columns=_names(changed, of="excluded"),
        )
        await self._connection.execute(query("hot_drop_stage"))

    async def _copy(
        self,
        statement: str,
        relation: HotRelation,
        pieces: Generator[Generator[bytes]],
    ) -> None:
        names = _names([each.name for each in relation.columns])
        text = _template(statement).format(table=relation.table, columns=names)
        async with self._connection.cursor() as cursor, cursor.copy(text) as copy:
            # Off the loop: files are read, and their pieces made, while others are served.
            while (each := await asyncio.to_thread(next, pieces, None)) is not None:
                try:
                    while (piece := await asyncio.to_thread(next, each, None)) is not None:
                        await copy.write(piece)
                finally:
                    # One that was interrupted ends its process by itself, with the piece.
                    with contextlib.suppress(ValueError):
                        each.close()

    async def _execute(
        self, statement: str, asked: Mapping[str, object] | None, **named: sql.Composable
    ) -> list[dict[str, Any]]:
        if asked is not None:
            # Where values are put in, a `%` of a name would be the mark of one.
            texts = {name: each.as_string(self._connection) for name, each in named.items()}
            named = {name: sql.SQL(text.replace("%", "%%")) for name, text in texts.items()}
        text = _template(statement).format(**named).as_bytes(self._connection)
        cursor = await self._connection.execute(text, asked)
        return await cursor.fetchall() if cursor.description else []


def _template(name: str) -> sql.SQL:
    return sql.SQL(query(name).decode())


def _names(names: Sequence[str], *, of: str = "") -> sql.Composable:
    return sql.SQL(", ").join(sql.Identifier(*filter(None, (of, each))) for each in names)


def _defined(column: Column) -> sql.Composable:
    return sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(postgres_type(column.type)))


def _columns(said: Sequence[Mapping[str, str]]) -> tuple[Column, ...]:
    return tuple(Column(each["name"], each["type"]) for each in said)


def _plain(columns: Sequence[Column]) -> str:
    return json.dumps([{"name": each.name, "type": each.type} for each in columns])


def _unavailable(error: psycopg.Error) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"Postgres data does not answer: {first_line(error)}",
        hint="Is it running, and reachable? 'postgres_data' says where it is.",
    )
