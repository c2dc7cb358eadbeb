"""Queries over what is published: what people and tasks ask, and what the query service does."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.protocol.base import HELD, Answer, Ask, Name, Page, TaskNumber
from penstock.protocol.datasets import ColumnAnswer, Moment

SQL_CHARACTERS_MAX: Final = 100_000
TABLES_MAX: Final = 64
QUERY_PARTS_MAX: Final = 10_000
QUERY_SECONDS_MAX: Final = 3_600.0
QUERY_LESS_HINT: Final = (
    "Select less, by a condition on `partition_key`, fewer columns or a LIMIT; or run it as a job"
    " of the runtime `spark`."
)
"""What to do about a query that is too slow or too large."""
Sql = Annotated[str, Meta(min_length=1)]
"""Of at most `SQL_CHARACTERS_MAX` characters, which is judged where it is begun."""
Ticket = Annotated[str, Meta(min_length=16, max_length=64)]
_Count = Annotated[int, Meta(ge=0, le=2**62)]


class QueryFormat(StrEnum):
    """How a result is written."""

    ROWS = "rows"
    """A line of columns, lines of rows, and a line that says how it ended; all JSON."""
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


class QueryAsk(Ask):
    """One SELECT over datasets, by their names."""

    sql: Sql
    format: QueryFormat = QueryFormat.ROWS
    at: Moment | None = None
    """As it was then: the id of a snapshot, or a time; None is now."""
    explain: bool = False
    """Only say how it would be run."""
    rows: Annotated[int, Meta(ge=0, le=10**9)] | None = None
    """Cut the result after so many, and say so; None is all, or a refusal."""


class KeyRange(Ask):
    """The partition keys from one to another, both included; null is no bound."""

    low: str | None = None
    high: str | None = None


class QueryBeginAsk(Ask):
    """The query service is about to run a query, or has refused it."""

    sql: Sql
    tables: Annotated[list[Name], Meta(max_length=TABLES_MAX)] = []
    given: Annotated[list[Name], Meta(max_length=1000)] = []
    """Names that the query gives by WITH: if there is no such dataset, that is what is meant."""
    keys: Annotated[dict[Name, list[KeyRange]], Meta(max_length=TABLES_MAX)] = {}
    """Of partitioned tables which partitions are needed; of those not named here all are."""
    at: Moment | None = None
    refusal: str | None = None
    """Why it is not run: it is noted, and nothing else."""
    ticket: Ticket | None = None
    """What it is ended by, made by the service: who begins with the same again begins nothing new;
    None leaves it to the dispatcher."""
    service: Annotated[str, Meta(max_length=200, pattern=HELD)] = ""
    """Which query service that is."""
    seconds: Annotated[float, Meta(ge=1, le=2 * QUERY_SECONDS_MAX)] = 2 * QUERY_SECONDS_MAX
    """After how long a query that has not ended counts as lost."""


class QueryPart(Answer):
    location: str
    partition_key: str = ""
    manifest: str | None = None


class QueryTable(Answer):
    """A dataset, as the query sees it."""

    name: str
    uuid: str
    generation: str | None
    columns: list[ColumnAnswer]
    parts: list[QueryPart]
    snapshot: int | None = None
    is_partitioned: bool = False
    """Whether it has partitions, also if none of them is needed."""


class QueryBeginAnswer(Answer):
    """What may be read, of one moment."""

    ticket: str
    id: int
    tables: list[QueryTable]
    moment: datetime | None = None


class QueryOutcome(StrEnum):
    SUCCEEDED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class QueryEndAsk(Ask):
    """What became of a query. A result counts only if this is answered well."""

    ticket: Ticket
    outcome: QueryOutcome
    rows: _Count = 0
    bytes: _Count = 0
    reason: str = ""


class QueryEndAnswer(Answer):
    is_new: bool
    """False if it had ended before."""


class QueriesParams(Ask):
    limit: Page = 100
    before: TaskNumber | None = None
    """Only queries with a lower number."""


class QueryRow(Answer):
    """A query that was begun or refused."""

    id: int
    caller: str
    task_id: int | None
    attempt: int | None
    sql: str
    datasets: list[dict[str, Any]]
    """Of each dataset its name, generation and, if the query was about a time, snapshot."""
    began_at: datetime
    ended_at: datetime | None
    """Null while it runs; of one that was lost, when it counted as that."""
    outcome: str | None
    """completed, failed, cancelled, refused, or lost: with its query service, which is in `reason`;
    null while it runs."""
    rows: int | None
    bytes: int | None
    reason: str | None
    service: str | None = None
    """The query service that has run or refused it."""


class QueriesAnswer(Answer):
    """Queries, the newest first."""

    queries: list[QueryRow]
    before: int | None = None
    """For the next page; null if there is none."""
