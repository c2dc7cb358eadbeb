"""What a query may read, and the log of all queries.

The query service asks with the token of whoever queries. `begin` finds what that may read: for
somebody with a token for some datasets those, for an attempt the parts that its own token names,
for others everything. All datasets of a query are read by one statement, so of one moment; or, with
`at`, as the latest snapshot of each shows them that is not after that. What is begun, and what is
refused, is a row of `query_log` before the service gets an answer; `end` completes the row, once.

The ticket of a query is random, made by the service and known to it alone, and stored as a digest:
nobody else can say what became of a query, and a begin whose answer was lost may be repeated. A
service that is killed leaves rows without an end, which are lost when their time is over: the
service has said how long the query may take. Old rows are removed by `dispatcher.retention`. Called
by the API.

`QueryRelay` is the way to the query service (`penstock.query`) from both listeners and the console.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from penstock.datasets.schema import is_hidden
from penstock.dispatcher.catalog.snapshots import Snapshots, moment_of
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, TokenRefused
from penstock.protocol.datasets import ColumnAnswer
from penstock.protocol.queries import (
    QUERY_LESS_HINT,
    QUERY_PARTS_MAX,
    QUERY_SECONDS_MAX,
    SQL_CHARACTERS_MAX,
    QueriesAnswer,
    QueryBeginAnswer,
    QueryBeginAsk,
    QueryEndAsk,
    QueryPart,
    QueryRow,
    QueryTable,
)
from penstock.tokens.claims import TASK_AUDIENCE, Claims

_TICKET_CHARACTERS: Final = 32
_REASON_CHARACTERS_MAX: Final = 4000
NOT_GRANTED: Final = "not granted"
_JSON_HEADERS: Final = {"content-type": "application/json", "accept-encoding": "identity"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryableDataset:
    """A dataset, as those see it who are about to query it."""

    name: str
    columns: Sequence[ColumnAnswer]
    is_partitioned: bool


class Queries:
    """Begins and ends queries."""

    def __init__(self, database: Database, snapshots: Snapshots, *, entropy: Entropy) -> None:
        self._database = database
        self._snapshots = snapshots
        self._entropy = entropy

    async def begin(self, ask: QueryBeginAsk, claims: Claims) -> QueryBeginAnswer:
        """What a query may read. Raises `TokenRefused` and `InvalidInput`, which are noted."""
        if len(ask.sql) > SQL_CHARACTERS_MAX:
            raise InvalidInput(f"The query has more than {SQL_CHARACTERS_MAX:,} characters.")
        if ask.refusal is not None:
            noted = await self.refused(ask, claims, ask.refusal)
            return QueryBeginAnswer(ticket=ask.ticket or "", id=noted, tables=[])
        try:
            rows = await self._found(ask, claims)
            tables = [_table(each) for each in rows]
            _check_size(tables)
        except (TokenRefused, InvalidInput) as error:
            await self.refused(ask, claims, error.message)
            raise
        ticket = ask.ticket or new_id(self._entropy, characters=_TICKET_CHARACTERS)
        number = await self._note(ask, claims, tables, ticket=ticket)
        if number is None:
            raise InvalidInput("This query has ended already, or is of somebody else.")
        moment = rows[0]["moment"] if rows else None
        return QueryBeginAnswer(ticket=ticket, id=number, tables=tables, moment=moment)

    async def refused(
        self, ask: QueryBeginAsk, claims: Claims, reason: str, *, is_expired: bool = False
    ) -> int:
        """Note that a query is not run; the number of the row, or 0 if it is too late for one."""
        ticket = new_id(self._entropy, characters=_TICKET_CHARACTERS)
        number = await self._note(
            ask, claims, [], ticket=ticket, refusal=reason, is_expired=is_expired
        )
        return number or 0

    async def end(self, ask: QueryEndAsk, claims: Claims) -> bool:
        """Note what became of a query; False if that was done before."""
        rows = await self._rows(
            "end_query",
            ticket=_digest(ask.ticket),
            caller=claims.sub,
            outcome=ask.outcome.value,
            rows=ask.rows,
            bytes=ask.bytes,
            reason=storable(ask.reason[:_REASON_CHARACTERS_MAX]) or None,
        )
        return bool(rows)

    async def listed(self, *, limit: int, before: int | None = None) -> QueriesAnswer:
        """The latest queries, the newest first."""
        rows = await self._rows("list_queries", limit=limit, before=before)
        last = rows[-1]["id"] if len(rows) == limit else None
        return QueriesAnswer(queries=msgspec.convert(rows, list[QueryRow]), before=last)

    async def datasets(self, *, limit: int) -> list[QueryableDataset]:
        """What can be queried, by name."""
        rows = await self._rows("queryable_datasets", limit=limit)
        return [
            QueryableDataset(
                name=row["name"],
                columns=[
                    each
                    for each in msgspec.convert(row["columns"], list[ColumnAnswer])
                    if not is_hidden(each.name)
                ],
                is_partitioned=row["is_partitioned"],
            )
            for row in rows
        ]

    async def _found(self, ask: QueryBeginAsk, claims: Claims) -> list[dict[str, Any]]:
        names = list(dict.fromkeys(ask.tables))
        if claims.aud == TASK_AUDIENCE:
            rows = await self._of_claim(ask, claims, names)
        else:
            may = claims.tables
            refused = [x for x in names if may is not None and x not in may and x not in ask.given]
            if refused:
                raise TokenRefused(
                    f"This token does not grant reading the dataset {refused[0]!r}.",
                    kind=NOT_GRANTED,
                )
            rows = await self._published(ask, [x for x in names if may is None or x in may])
        known = {row["name"] for row in rows}
        missing = [each for each in names if each not in known and each not in ask.given]
        if missing and claims.aud == TASK_AUDIENCE:
            # Whether there is such a dataset is not for tasks to know.
            raise TokenRefused(
                f"This attempt was not given the dataset {missing[0]!r} to read.", kind=NOT_GRANTED
            )
        if missing:
            raise InvalidInput(
                f"There is no dataset {missing[0][:200]!r}.",
                hint="'penstock dataset list' lists them.",
            )
        return rows

    async def _published(self, ask: QueryBeginAsk, names: Sequence[str]) -> list[dict[str, Any]]:
        if ask.at is None:
            return await self._rows("queried_now", names=names, **_ranges(ask))
        moment = moment_of(ask.at)
        for each in await self._rows("dataset_uuids", names=names):
            await self._snapshots.make(each["uuid"])
        # The id of a snapshot is its time, so it means a moment for every dataset.
        moment_ms = moment["id"] if moment["id"] is not None else moment["moment_ms"]
        asked = {"names": names, "moment_ms": moment_ms, **_ranges(ask)}
        rows = await self._rows("queried_then", **asked)
        bare = next((row["name"] for row in rows if row["snapshot"] is None), None)
        if bare is not None:
            raise InvalidInput(
                f"The dataset {bare!r} has no snapshot as old as {ask.at}, or no longer keeps it.",
                hint="'penstock dataset snapshots' lists those that are kept.",
            )
        return rows

    async def _of_claim(
        self, ask: QueryBeginAsk, claims: Claims, names: Sequence[str]
    ) -> list[dict[str, Any]]:
        if ask.at is not None:
            raise InvalidInput("A task cannot use `at`: it reads what its attempt was given.")
        grants = [
            {"dataset": each.dataset, "version": each.version, "prefix": prefix}
            for each in claims.grants.read
            for prefix in each.prefixes
        ]
        asked = {"names": names, "grants": json.dumps(grants), **_ranges(ask)}
        rows = await self._rows("queried_claim", **asked)
        lacking = [each.dataset for each in claims.grants.read if each.omitted]
        if lacking:
            every = await self._rows("dataset_names", uuids=lacking)
            bare = next((row["name"] for row in every if row["name"] in names), None)
            if bare is not None:
                raise InvalidInput(
                    f"The input {bare!r} has more folders than the token of a task names.",
                    hint="Declare `read: all` at the input, if the job reads all of it.",
                )
        return rows

    async def _note(
        self,
        ask: QueryBeginAsk,
        claims: Claims,
        tables: Sequence[QueryTable],
        *,
        ticket: str,
        refusal: str | None = None,
        is_expired: bool = False,
    ) -> int | None:
        is_task = claims.aud == TASK_AUDIENCE
        read = [
            {"name": each.name, "generation": each.generation, "parts": len(each.parts)}
            | ({} if each.snapshot is None else {"snapshot": each.snapshot})
            for each in tables
        ]
        rows = await self._rows(
            "begin_query",
            ticket=_digest(ticket),
            caller=claims.sub,
            task_id=claims.task_id if is_task else None,
            attempt=claims.attempt if is_task else None,
            sql=storable(ask.sql[:SQL_CHARACTERS_MAX]),
            service=ask.service,
            seconds=ask.seconds,
            expired=claims.exp if is_expired else None,
            datasets=json.dumps(read),
            reason=None if refusal is None else storable(refusal[:_REASON_CHARACTERS_MAX]),
        )
        return int(rows[0]["id"]) if rows else None

    async def _rows(self, statement: str, /, **asked: object) -> list[dict[str, Any]]:
        return await self._database.rows(statement, asked)


def _table(row: dict[str, Any]) -> QueryTable:
    return QueryTable(
        name=row["name"],
        uuid=row["uuid"],
        generation=row["generation"],
        columns=msgspec.convert(row["columns"], list[ColumnAnswer]),
        parts=msgspec.convert(row["parts"], list[QueryPart]),
        snapshot=row["snapshot"],
        is_partitioned=row["is_partitioned"],
    )


def _ranges(ask: QueryBeginAsk) -> dict[str, object]:
    """Which partitions are needed, as the statements take it."""
    ranges = [
        {"name": name, "low": _text(each.low), "high": _text(each.high)}
        for name, every in ask.keys.items()
        for each in every
    ]
    return {"ranges": json.dumps(ranges), "pruned": list(ask.keys)}


def _text(key: str | None) -> str | None:
    """A key as Postgres takes it. No partition has one that it does not."""
    return None if key is None else storable(key)


def _check_size(tables: Sequence[QueryTable]) -> None:
    parts = sum(len(each.parts) for each in tables)
    if parts > QUERY_PARTS_MAX:
        raise InvalidInput(
            f"The query reads {parts:,} parts of datasets, and at most {QUERY_PARTS_MAX:,} are"
            " allowed.",
            hint=QUERY_LESS_HINT,
        )


def _digest(ticket: str) -> str:
    return hashlib.sha256(b"penstock query\x00" + ticket.encode()).hexdigest()


_RELAY_CONNECTIONS_MAX: Final = 64
_CONNECT_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedReply:
    """What the query service answers, as it came."""

    status: int
    content_type: bytes
    pieces: AsyncGenerator[bytes]


class QueryRelay:
    """The way to the query service: requests go there with the caller's token, and nothing else."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http: httpx.AsyncClient | None = None

    async def send(self, path: str, *, headers: Mapping[str, str], body: bytes) -> RelayedReply:
        """The answer, of which no more than its head is here. Raises `DispatcherUnavailable`."""
        if self._http is None:
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(QUERY_SECONDS_MAX + 60, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=_RELAY_CONNECTIONS_MAX),
                trust_env=False,
            )
        request = self._http.build_request(
            "POST", f"{self._url}{path}", content=body, headers={**headers, **_JSON_HEADERS}
        )
        try:
            found = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise DispatcherUnavailable(
                f"The query service does not answer ({type(error).__name__}).",
                hint="'penstock query-service' runs it; it needs penstock[query].",
            ) from error

        async def pieces() -> AsyncGenerator[bytes]:
            try:
                async for piece in found.aiter_raw():
                    yield piece
            finally:
                await found.aclose()

        kind = found.headers.get("content-type", "application/json").encode("latin-1")
        return RelayedReply(status=found.status_code, content_type=kind, pieces=pieces())

    async def close(self) -> None:
        """End what is on its way."""
        if self._http is not None:
            await self._http.aclose()
