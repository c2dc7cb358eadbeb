"""The query service: who runs queries of people and tasks over published files.

```
caller ─▶ dispatcher ─▶ query service ◀──socket──▶ a process for each query, closed
            ▲  the token       │  begin, end              (`query.child`, DuckDB)
            └──────────────────┤
                               └──▶ store: manifests, and ranges of the listed files
```

**Who trusts whom.** The service believes nobody: every request has a token that a dispatcher has
signed, which it verifies by the published keys (cached; fetched again for an unknown `kid`) before
anything else. It holds no key of ours. What a query may read it learns from the dispatcher, by the
caller's token, so it cannot be talked into reading more; and whether an attempt lives, before and
after. It reads the store as its environment lets it. The process that runs the SQL is trusted by
nobody: it has open files or asks for ranges of listed ones, and what it says is bounded.

**The states of a query.**

| state | what is done | ended by |
|---|---|---|
| admitted | a place of `concurrency`; a process is ready | busy (503, noted), the caller leaves |
| parsed | DuckDB's parser: one SELECT; names of tables | refused (422), and noted |
| begun | the dispatcher has noted it and said the parts, of one moment | refused (403, 404, 422) |
| running | manifests are read, files opened, views made | an error, a bound, the caller |
| ended | the dispatcher has noted how, and an attempt still runs | |

The result of an attempt is held until it has ended well; that of people is sent as it comes, and
cut off by an error, so that nobody takes a part for the whole.

**Crash points.** The service is killed: its processes end with it (the kernel sees to it, and so
does their socket), callers see a broken connection, the row of the query stays without an end. The
dispatcher is away: nothing begins (503); an end that could not be told leaves such a row, and an
attempt without its result. The caller leaves: the process is killed, and the end is told. Nothing
else is kept anywhere.

**Bounds.** Of each query memory, threads, spill, seconds, rows and bytes (`engine.QueryBounds`),
parts and files; `concurrency` queries at a time, `WAITING_MAX` that wait, `CALLER_MAX` of one
attempt. Where the processes cannot be users of their own (not root on Linux), only callers who may
read everything are served, and others are told so.

Hot tables come in here as another kind of table in the answer to `begin`. Called by the wiring.
"""

from __future__ import annotations

import asyncio
import io
import logging
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import msgspec

from penstock.datasets import snapshot
from penstock.datasets.bounds import ColumnKind, kind_of, may_hold
from penstock.datasets.schema import Column, is_hidden
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.api.application import Application
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply, RequiredProof
from penstock.dispatcher.api.problems import problem_of
from penstock.dispatcher.api.read_endpoints import healthz
from penstock.dispatcher.api.requests import Headers, RequestLimits, credentials, task_token
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import (
    DispatcherRefused,
    InvalidInput,
    PenstockError,
    StoreError,
    TokenRefused,
)
from penstock.kernel.service import Service
from penstock.protocol.base import TASK_HEADER, Answer, HealthAnswer
from penstock.protocol.client import UNSERVED
from penstock.protocol.problem import Problem
from penstock.protocol.queries import (
    QUERY_SECONDS_MAX,
    SQL_CHARACTERS_MAX,
    QueryAsk,
    QueryBeginAnswer,
    QueryBeginAsk,
    QueryEndAsk,
    QueryFormat,
    QueryOutcome,
    QueryTable,
)
from penstock.query.engine import (
    FILES_MAX,
    OPEN_FILES_MAX,
    ParsedQuery,
    QueryBounds,
    QueryFailed,
    QueryProcess,
    QueryProcesses,
)
from penstock.query.pruning import Condition, file_filter, folded, needed_keys
from penstock.runtimes.uid_pool import UidPool
from penstock.tokens.claims import QUERY_AUDIENCE, TASK_AUDIENCE, Claims
from penstock.tokens.verifier import KeyCache, Verifier
from penstock.worker.client import InternalClient

_log = logging.getLogger(__name__)

WAITING_MAX: Final = 32
CALLER_MAX: Final = 4
WAIT_SECONDS: Final = 45.0
"""How long a query waits for a place and a process: less than the token of one for people lives."""
_LOST_SECONDS: Final = 120.0
"""How much later than its own bound a query that has not ended counts as lost."""
_REASON_CHARACTERS_MAX: Final = 4000
PARTITION_COLUMN: Final = "partition_key"
_HELD_BYTES: Final = 16 * 1024 * 1024
"""How much of a result that is held stands in memory; the rest in a file without a name."""
_PIECE_BYTES: Final = 1024 * 1024
_TYPES: Final[Mapping[QueryFormat, bytes]] = {
    QueryFormat.ROWS: b"application/x-ndjson",
    QueryFormat.JSONL: b"application/x-ndjson",
    QueryFormat.CSV: b"text/csv; charset=utf-8",
    QueryFormat.PARQUET: b"application/vnd.apache.parquet",
    QueryFormat.ARROW: b"application/vnd.apache.arrow.stream",
}
_TRUSTED_ONLY: Final = (
    "This query service keeps queries apart only where it runs as root on Linux: it serves"
    " callers who may read everything, and no others."
)
_TICKET_CHARACTERS: Final = 32
_BUSY: Final = "Too many queries are waiting."
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryServiceSettings:
    """What a query service is told."""

    name: str
    """What the log of queries calls this service."""
    dispatchers: Sequence[str]
    org: str
    store_url: str
    bounds: QueryBounds
    concurrency: int
    uids: UidPool | None
    scan_bytes: int
    """How much the files of a query may have together."""


class LazyFile(io.RawIOBase):
    """A file of the store that is opened when it is first read."""

    def __init__(self, transfer: Transfer, location: str) -> None:
        self._transfer = transfer
        self._location = location
        self._file: BinaryIO | None = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._transfer.open(self._location)
        return self._file

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._opened().seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        return self._opened().read(size)

    def fileno(self) -> int:
        raise OSError("it is not open")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


@dataclass(slots=True)
class QueryFiles:
    """The files of a query, and the views over them."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    files: list[BinaryIO] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bytes: int = 0
    """How much all of them have together."""

    def close(self) -> None:
        """Close what is open."""
        for each in self.files:
            each.close()


def open_files(
    tables: Sequence[QueryTable],
    transfer: Transfer,
    *,
    scan_bytes: int,
    conditions: Mapping[str, Condition] = MappingProxyType({}),
) -> QueryFiles:
    """Read the manifests of parts and open the files that may have rows of the query; blocks.

    Columns are those of the manifests: files with the same are one scan, and scans are put together
    by name. A file of another size than was published is refused.
    """
    made = QueryFiles()
    try:
        for table in tables:
            wanted = conditions.get(table.name)
            # Without a schema, what columns there are is known by the files.
            sought = wanted if table.columns else None
            made.tables.append(_add_table(made, table, transfer, sought, scan_bytes=scan_bytes))
    except BaseException:
        made.close()
        raise
    return made


def _add_table(
    made: QueryFiles,
    table: QueryTable,
    transfer: Transfer,
    wanted: Condition,
    *,
    scan_bytes: int,
) -> dict[str, Any]:
    groups: dict[tuple[tuple[str, str], ...] | None, list[tuple[int, str]]] = {}
    columns = [(each.name, each.type) for each in table.columns if not is_hidden(each.name)]
    contents = snapshot.read(table.parts, transfer)
    for part, found in zip(table.parts, contents, strict=True):
        if found.others and not found.files:
            raise InvalidInput(
                f"The dataset {table.name!r} cannot be queried: {found.others[0].location} is not a"
                " Parquet file."
            )
        named = tuple((x.name, x.type) for x in found.columns if not is_hidden(x.name)) or None
        kinds = _kinds(found.columns, {name for name, _ in columns})
        sought = file_filter(wanted, kinds)
        bounded = dict(kinds.values())
        for file in found.files:
            if file.rows == 0:
                continue
            if not may_hold(sought, file.bounds, bounded, rows=file.rows):
                groups.setdefault(named, [])
                continue
            groups.setdefault(named, []).append((len(made.files), part.partition_key))
            _add_file(made, file, transfer)
            if made.bytes > scan_bytes:
                raise QueryFailed(
                    f"The files of this query have more than {scan_bytes:,} bytes together"
                    " (`query_scan`).",
                    kind="too large",
                )
    if not groups and not columns:
        raise InvalidInput(f"The dataset {table.name!r} has no published data with columns.")
    is_partitioned = table.is_partitioned or any(each.partition_key for each in table.parts)
    shown = [tuple(columns)] if columns else list(groups)
    known = {folded(name) for group in shown for name, _ in group or ()}
    name = PARTITION_COLUMN
    while name in known:
        name = f"_{name}"
    return {
        "name": table.name,
        "columns": columns,
        "partition": name if is_partitioned else None,
        "groups": [{"columns": group, "files": files} for group, files in groups.items() if files],
    }


def _kinds(every: Sequence[Column], known: set[str]) -> dict[str, tuple[str, ColumnKind]]:
    """How columns are compared, by the names that DuckDB has for them, where these are certain."""
    names = Counter(folded(each.name) for each in every)
    return {
        folded(each.name): (each.name, kind)
        for each in every
        if names[folded(each.name)] == 1
        and (not known or each.name in known)
        and (kind := kind_of(each.type)) is not None
    }


def _add_file(made: QueryFiles, file: snapshot.DataFile, transfer: Transfer) -> None:
    if len(made.files) >= FILES_MAX:
        raise QueryFailed(
            f"The query reads more than {FILES_MAX:,} files; compacting makes them fewer.",
            kind="too large",
        )
    opened: Any = LazyFile(transfer, file.location)
    is_here = file.location.startswith("file:") and len(made.files) < OPEN_FILES_MAX
    if is_here:
        opened = transfer.open(file.location)
        made.files.append(opened)
        if opened.seek(0, io.SEEK_END) != file.bytes:
            raise InvalidInput(
                f"The file {file.location} has another size than its manifest says.",
                hint="Run a backfill of its partition: it writes new files.",
            )
    else:
        made.files.append(opened)
    made.sizes.append(file.bytes)
    made.bytes += file.bytes


class QueryService(Service):
    """Runs queries, and answers `POST /v1/query` and `POST /v1/task/query`."""

    def __init__(
        self, settings: QueryServiceSettings, *, clock: Clock, entropy: Entropy | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._entropy = entropy or system_entropy()
        self._dispatcher = InternalClient(
            settings.dispatchers, None, clock=clock, entropy=self._entropy
        )
        self._threads = ThreadPoolExecutor(
            2 * settings.concurrency + 2, thread_name_prefix="penstock-query"
        )
        self._processes = QueryProcesses(
            settings.bounds, uids=settings.uids, threads=self._threads, clock=clock
        )
        self._places = asyncio.Semaphore(settings.concurrency)
        self._waiting = 0
        self._callers: Counter[str] = Counter()
        cache = KeyCache(self._dispatcher, clock=clock)
        self._verifiers = {
            audience: Verifier(
                cache, issuer=f"penstock/{settings.org}", audience=audience, clock=clock
            )
            for audience in (TASK_AUDIENCE, QUERY_AUDIENCE)
        }

    @property
    def serves_all(self) -> bool:
        """Whether callers are served who may not read everything."""
        return self._processes.has_users

    @property
    def waiting(self) -> int:
        """How many queries wait for a place, or for their process."""
        return self._waiting

    async def start(self) -> None:
        """The first query starts its process."""
        await self._dispatcher.start()

    async def stop(self) -> None:
        self._processes.end()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._dispatcher.stop()

    def app(self) -> Application:
        """What its listener serves."""
        more: Any = {
            "ask": QueryAsk,
            "answer": None,
            "is_stream": True,
            "request_seconds_max": QUERY_SECONDS_MAX,
        }
        task, people = RequiredProof.TASK, RequiredProof.QUERY
        endpoints = [
            ApiEndpoint("POST", "/v1/query", "Query", self._run, proof=people, **more),
            ApiEndpoint("POST", "/v1/task/query", "Query", self._run, proof=task, **more),
            ApiEndpoint(
                *("GET", "/healthz", "Liveness probe", healthz),
                answer=HealthAnswer,
                proof=RequiredProof.NONE,
                is_probe=True,
            ),
        ]
        nothing: Any = None
        # A few more than may wait: those are refused by `admitted`, which has it noted.
        count = WAITING_MAX + self._settings.concurrency + CALLER_MAX
        limits = RequestLimits(
            body_bytes_max=512 * 1024,
            requests_max=count,
            limited_requests_max=count,
            attempt_requests_max=2 * CALLER_MAX,
        )
        return Application("query", endpoints, nothing, limits=limits, proving=self)

    async def refusal(
        self, proof: RequiredProof, headers: Headers, call: ApiCall
    ) -> Problem | None:
        """Why a caller may not go on: judged by its token, before anything else."""
        if proof is RequiredProof.NONE:
            return None
        audience = TASK_AUDIENCE if proof is RequiredProof.TASK else QUERY_AUDIENCE
        call.token = task_token(headers) if proof is RequiredProof.TASK else credentials(headers)[1]
        try:
            call.claims = await self._verifiers[audience].verify(call.token)
        except TokenRefused as error:
            return problem_of(error)
        call.is_known = True
        call.is_limited = proof is RequiredProof.TASK
        return None

    async def _run(self, _: Any, call: ApiCall) -> Answer | HttpReply:
        ask: QueryAsk = call.ask
        claims = call.claims
        assert claims is not None, "it was verified"
        is_task = claims.aud == TASK_AUDIENCE
        header = TASK_HEADER if is_task else "Authorization"
        proof = {header: call.token if is_task else f"Bearer {call.token}"}
        query = _Query(self, ask, claims, proof)
        pieces = query.pieces()
        try:
            # The first piece has the head, or is the error.
            first = await anext(pieces)
        except StopAsyncIteration:
            first = b""
        except BaseException as error:
            await pieces.aclose()
            if isinstance(error, Exception) and (problem := _problem(error)) is not None:
                return problem
            raise
        return HttpReply(b"", content_type=_TYPES[ask.format], stream=_with_first(first, pieces))

    @asynccontextmanager
    async def admitted(self, claims: Claims) -> AsyncGenerator[QueryProcess]:
        """A place among the queries that run, and a process for this one, killed at its end.

        Raises `QueryFailed` if too many wait, or that takes too long.
        """
        held = self._callers[claims.sub] if claims.aud == TASK_AUDIENCE else 0
        if self._waiting >= WAITING_MAX or held >= CALLER_MAX:
            raise QueryFailed(_BUSY, kind="busy", hint="Retry in a moment.")
        self._callers[claims.sub] += 1
        try:
            process = await self._process()
            try:
                # Whoever asks next waits for its imports no more than for this query.
                self._processes.prepare()
                yield process
            finally:
                try:
                    await self._processes.closed(process)
                finally:
                    self._places.release()
                self._processes.prepare()
        finally:
            self._callers[claims.sub] -= 1
            if not self._callers[claims.sub]:
                del self._callers[claims.sub]

    async def _process(self) -> QueryProcess:
        """A place, and a process; who has them gives both back."""
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._places.acquire()
                try:
                    return await self._processes.take()
                except BaseException:
                    self._places.release()
                    raise
        except TimeoutError:
            raise QueryFailed(_BUSY, kind="busy", hint="Retry in a moment.") from None
        finally:
            self._waiting -= 1

    async def within(self, work: Any, *given: Any) -> Any:
        """Call something that blocks."""
        return await self._processes.within(work, *given)

    @property
    def dispatcher(self) -> InternalClient:
        return self._dispatcher

    @property
    def settings(self) -> QueryServiceSettings:
        return self._settings

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def entropy(self) -> Entropy:
        return self._entropy


class _Query:
    """One query, from its admission to its end."""

    def __init__(
        self, service: QueryService, ask: QueryAsk, claims: Claims, proof: Mapping[str, str]
    ) -> None:
        self._service = service
        self._ask = ask
        self._claims = claims
        self._proof = proof
        self._began = service.clock.monotonic()
        self._telling = asyncio.Lock()
        """The end is told after the begin."""
        self._ticket = ""
        """By which it has begun, or may have, and has not ended."""
        self._is_asked = False
        """Whether the dispatcher was asked to begin it: it notes what it refuses."""
        self._begun: QueryBeginAnswer | None = None
        self._conditions: Mapping[str, Condition] = {}
        self._rows = self._bytes = 0

    async def pieces(self) -> AsyncGenerator[bytes]:
        """What is answered. An error before the first piece is raised, and one after it too."""
        outcome, reason = QueryOutcome.CANCELLED, "The caller left."
        try:
            async with self._service.admitted(self._claims) as process:
                await self._begin(process)
                if self._claims.aud == TASK_AUDIENCE:
                    with tempfile.SpooledTemporaryFile(_HELD_BYTES) as held:
                        async for piece in self._result(process):
                            await self._service.within(held.write, piece)
                        # Nothing of it is seen by an attempt that is over.
                        await self._end(QueryOutcome.SUCCEEDED, "")
                        held.seek(0)
                        while piece := await self._service.within(held.read, _PIECE_BYTES):
                            yield piece
                    return
                async for piece in self._result(process):
                    yield piece
                outcome, reason = QueryOutcome.SUCCEEDED, ""
        except Exception as error:
            outcome, reason = QueryOutcome.FAILED, str(error)
            if not self._is_asked:
                await self._refuse(reason)
            raise
        finally:
            with suppress(PenstockError):
                await asyncio.shield(self._end(outcome, reason))

    async def _begin(self, process: QueryProcess) -> None:
        if len(self._ask.sql) > SQL_CHARACTERS_MAX:
            raise QueryFailed(f"The query has more than {SQL_CHARACTERS_MAX:,} characters.")
        if not process.is_isolated and not _may_read_all(self._claims):
            raise QueryFailed(_TRUSTED_ONLY, kind="not isolated")
        parsed: ParsedQuery = await self._service.within(process.parse, self._ask.sql)
        if len(parsed.tables) > 64 or any(not 0 < len(x) <= 200 for x in parsed.tables):
            raise QueryFailed(
                "The query names more than 64 tables, or one whose name no dataset can have."
            )
        settings = self._service.settings
        self._ticket = new_id(self._service.entropy, characters=_TICKET_CHARACTERS)
        self._is_asked = True
        asked = QueryBeginAsk(
            sql=self._ask.sql,
            ticket=self._ticket,
            service=settings.name,
            seconds=settings.bounds.seconds_max + _LOST_SECONDS,
            tables=list(parsed.tables),
            given=[each for each in parsed.tables if each in parsed.given],
            keys={
                name: ranges
                for name, each in parsed.conditions.items()
                if name in parsed.tables
                and (ranges := needed_keys(each, PARTITION_COLUMN)) is not None
            },
            at=self._ask.at,
        )
        self._conditions = parsed.conditions
        # It goes on if the caller leaves: an end that came before it would end nothing.
        await asyncio.shield(self._ask_to_begin(asked))

    async def _ask_to_begin(self, asked: QueryBeginAsk) -> None:
        async with self._telling:
            self._begun = await self._service.dispatcher.begin_query(asked, self._proof)

    async def _refuse(self, reason: str) -> None:
        """Have it noted that this was not run. Who asks is told why, whatever comes of it here."""
        ask = QueryBeginAsk(
            sql=self._ask.sql[:SQL_CHARACTERS_MAX],
            service=self._service.settings.name,
            refusal=reason[:_REASON_CHARACTERS_MAX],
        )
        try:
            await self._service.dispatcher.begin_query(ask, self._proof)
        except PenstockError as error:
            _log.warning("failed to note that a query was refused: %s", error.message)

    async def _result(self, process: QueryProcess) -> AsyncGenerator[bytes]:
        assert self._begun is not None, "it was begun"
        service, ask = self._service, self._ask
        transfer = Transfer(service.settings.store_url)

        def run() -> None:
            assert self._begun is not None
            made = open_files(
                self._begun.tables,
                transfer,
                scan_bytes=service.settings.scan_bytes,
                conditions=self._conditions,
            )
            how = {"format": ask.format.value, "explain": ask.explain, "cut": ask.rows}
            process.run(made.tables, made.files, made.sizes, how=how)

        await service.within(run)
        is_rows = ask.format is QueryFormat.ROWS
        if is_rows:
            yield _encode({"columns": process.columns}) + b"\n"
        while (piece := await service.within(process.next)) is not None:
            if piece:
                self._bytes += len(piece)
                yield piece
        assert process.result is not None, "it is whole"
        self._rows = process.result.rows
        if is_rows:
            yield _encode({"end": self._told(is_cut=process.result.is_cut)}) + b"\n"

    def _told(self, *, is_cut: bool) -> dict[str, Any]:
        assert self._begun is not None, "it was begun"
        return {
            "rows": self._rows,
            "is_cut": is_cut,
            "seconds": round(self._service.clock.monotonic() - self._began, 3),
            "id": self._begun.id,
            "moment": self._begun.moment,
            "datasets": [
                {"name": each.name, "generation": each.generation, "snapshot": each.snapshot}
                for each in self._begun.tables
            ],
        }

    async def _end(self, outcome: QueryOutcome, reason: str) -> None:
        """Tell the dispatcher, once. Raises `DispatcherRefused` if the attempt is over."""
        if not self._ticket:
            return
        ticket, self._ticket = self._ticket, ""
        ask = QueryEndAsk(
            ticket=ticket,
            outcome=outcome,
            rows=self._rows,
            bytes=self._bytes,
            reason=reason[:_REASON_CHARACTERS_MAX],
        )
        async with self._telling:
            await self._service.dispatcher.end_query(ask, self._proof)


def _may_read_all(claims: Claims) -> bool:
    return claims.aud == QUERY_AUDIENCE and claims.tables is None


async def _with_first(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for each in rest:
            yield each
    finally:
        await rest.aclose()


def _problem(error: Exception) -> Problem | None:
    """What is wrong with a query, for who asked it."""
    match error:
        case DispatcherRefused():
            # Of a release, or words, that do not fit, who asks is not to blame.
            is_callers = error.status != UNSERVED and error.kind != "unreadable"
            return Problem(
                type=error.kind,
                title=error.message if is_callers else f"The query service: {error.message}",
                status=error.status if is_callers else 503,
                detail=error.hint,
            )
        case QueryFailed():
            status = {"unavailable": 503, "busy": 503, "not isolated": 403}.get(error.kind, 422)
            return Problem(
                type=error.kind,
                title=error.message,
                status=status,
                detail=error.hint,
                position=error.position,
            )
        case StoreError():
            detail = error.hint or "Retry."
            return Problem(type="store", title=error.message, status=503, detail=detail)
    return problem_of(error)
