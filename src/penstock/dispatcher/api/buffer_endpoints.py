"""The buffer endpoints: batches that tasks publish, and rows that sinks have rejected.

A task proves itself by its token alone: it names the datasets that the job may publish into, and
its grants are of one lease and no other, so the statement that keeps the batch knows by them
whether it is the attempt that runs (`tasks.batches`, BATCH-1). What is sent inline is stored first,
under a key that says its sum; a file has to lie in a folder that the token lets the attempt write.

A row that was rejected is known by its batch and its place there. It is read from what the sink has
published of such rows, by a closed process, and given back as a batch whose id is made of the rows:
asking twice gives it back once. The marks that say so are written with that batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.datasets.layout import buffer_prefix, place_of_key
from penstock.datasets.parquet import first_rows
from penstock.dispatcher.api.auth import note_fenced, note_refused, require_grants
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply, RequiredProof
from penstock.dispatcher.api.problems import conflict, malformed, refusal_problem, unknown
from penstock.dispatcher.database.pool import Connection, fetch_rows
from penstock.dispatcher.tasks.batches import (
    AcceptedBatch,
    NewBatch,
    RefusedBatch,
    keep_batch,
)
from penstock.dispatcher.tasks.model import Fence, Refusal
from penstock.dispatcher.tasks.rows import storable
from penstock.kernel.errors import NotFound, PenstockError
from penstock.protocol.base import Answer, NameParams
from penstock.protocol.datasets import (
    BufferAnswer,
    BuffersAnswer,
    RejectedAnswer,
    RejectedAsk,
    RejectedDoneAnswer,
    RejectedParams,
    RejectedPlace,
    RejectedRow,
)
from penstock.protocol.events import BATCH_BYTES_MAX, BufferPublishAnswer, BufferPublishAsk
from penstock.protocol.problem import Problem
from penstock.runtimes.sink import FILE_NAME
from penstock.store.base import ObjectStore, find
from penstock.tokens.claims import Claims
from penstock.tokens.scopes import Root, Scope

PUBLISH_PATH: Final = "/v1/task/buffer-publish"
RETRY_SECONDS: Final = 5
_BODY_BYTES_MAX: Final = 4 * BATCH_BYTES_MAX
_PARTS_MAX: Final = 100
_ROWS_MAX: Final = 10_000
_ROWS_LEAST: Final = 8
"""So many of the longest rows can be had at once."""
_READS_MAX: Final = 50
"""How often one part is looked into."""
_READ_SECONDS: Final = 10.0
_PART_BYTES_MAX: Final = 64 * 2**20
_NAME: Final = r"[A-Za-z0-9_=~][A-Za-z0-9_.=~-]{0,199}"
_PLAIN: Final = re.compile(rf"{_NAME}(?:/{_NAME})*")
_COLUMNS: Final = ("row", "reason", "batch", "task", "sequence", "place", "partition")


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of a batch, and where it lies or is to lie."""

    key: str
    format: str
    sha256: str
    size: int
    rows: int | None
    inline: bytes | None


async def publish(parts: ApiContext, call: ApiCall) -> Answer | HttpReply:
    """Publish a batch of rows into a buffered dataset."""
    ask: BufferPublishAsk = call.ask
    claims = call.claims
    assert claims is not None, "the endpoint's proof is TASK"
    buffer = await parts.batches.buffer(ask.dataset)
    if buffer is None or buffer.dataset not in claims.grants.buffers:
        said = {"dataset": storable(ask.dataset)}
        note_refused(parts, call, reason="not granted", claims=claims, detail=said)
        return Problem(
            type="not granted",
            title=f"The job of task {claims.task_id} may not publish into {ask.dataset!r}.",
            status=403,
            detail=f"Write `buffers: [{ask.dataset}]` at the job, and `buffered: true` at the"
            " output of a sink.",
        )
    if buffer.pressed is not None:
        return _later(f"The sink of {ask.dataset!r} has fallen behind. {buffer.pressed}")
    store = parts.store
    if store is None:
        return conflict("no store", "This dispatcher has no store for batches.")
    body = await _body(parts, store, ask, claims)
    if isinstance(body, Problem):
        if body.status == 403:
            note_refused(parts, call, reason="outside of its grants", claims=claims)
        return body
    new = NewBatch(
        dataset=buffer.dataset,
        partition_key=ask.partition_key or "",
        batch=ask.batch,
        sha256=body.sha256,
        format=body.format,
        location=f"{Root.parse(parts.root)}{body.key}",
        place=place_of_key(body.key) or "",
        bytes=body.size,
        rows=body.rows,
        made_at_ms=ask.made_at,
    )
    fence = Fence(claims.task_id, claims.attempt, "", claims.grants.digest)
    found = await _kept(parts, store, body, fence, new)
    if found is None:
        require_grants(parts, call, claims, has_grants=False)
    if isinstance(found, Refusal):
        note_fenced(parts, call, [(found, claims)])
    return _accepted(parts, found)


async def _kept(
    parts: ApiContext, store: ObjectStore, body: _Body, fence: Fence, new: NewBatch
) -> AcceptedBatch | RefusedBatch | Refusal | None:
    if body.inline is not None:
        # Nothing is stored for who may publish nothing, or no more.
        found = await parts.batches.accept(fence, new, is_trial=True)
        if not isinstance(found, AcceptedBatch):
            return found
        # Before the row, which would be a promise that nobody can keep (BATCH-3).
        await store.put(body.key, body.inline)
    return await parts.batches.accept(fence, new)


def _accepted(
    parts: ApiContext, found: AcceptedBatch | RefusedBatch | Refusal | None
) -> Answer | HttpReply:
    match found:
        case AcceptedBatch():
            if found.is_released:
                parts.kick()
            state = "released" if found.is_released else "held"
            return BufferPublishAnswer(sequence=found.sequence, state=state, is_new=found.is_new)
        case RefusedBatch() if found.kind == "too old":
            return malformed(found.why, field="made_at")
        case RefusedBatch():
            return conflict(found.kind, found.why)
        case Refusal():
            return refusal_problem(found)
        case None:
            raise AssertionError("whoever has other grants was refused")


def _later(title: str) -> HttpReply:
    """Too much waits already: the caller repeats the same after a while."""
    problem = Problem(
        type="pressed", title=title, status=429, detail=f"Retry in {RETRY_SECONDS} seconds."
    )
    return HttpReply(problem, 429, headers=((b"retry-after", str(RETRY_SECONDS).encode()),))


async def _body(
    parts: ApiContext, store: ObjectStore, ask: BufferPublishAsk, claims: Claims
) -> _Body | Problem:
    given = [each for each in (ask.rows, ask.arrow, ask.file) if each is not None]
    if len(given) != 1:
        return malformed("A batch has `rows`, `arrow` or `file`, and one of them.", field="rows")
    if ask.file is not None:
        return await _file(parts, store, ask, claims)
    if ask.rows is not None:
        # Outside of texts, which have none as it is, the end of a line is a space in JSON.
        lines = [bytes(each).replace(b"\n", b" ").replace(b"\r", b" ") for each in ask.rows]
        body, format_, field = b"\n".join(lines), "jsonl", "rows"
        rows: int | None = len(lines)
    else:
        body, format_, field, rows = ask.arrow or b"", "arrow", "arrow", None
    if not body:
        return malformed("A batch has a row at least.", field=field)
    if len(body) > BATCH_BYTES_MAX:
        return Problem(
            type="too large",
            title=f"The rows of a batch have {BATCH_BYTES_MAX:,} bytes at most, not {len(body):,}.",
            status=413,
            field=field,
            detail="Publish several batches, or a file of the attempt's own folder.",
        )
    sha256 = hashlib.sha256(body).hexdigest()
    folder = claims.grants.scratch.rstrip("/").rpartition("/")[2]
    key = f"{buffer_prefix(ask.dataset, attempt=folder)}/{sha256}.{format_}"
    return _Body(key, format_, sha256, len(body), rows, body)


async def _file(
    parts: ApiContext, store: ObjectStore, ask: BufferPublishAsk, claims: Claims
) -> _Body | Problem:
    """The file of a batch: in a folder of the attempt's own, as long as it is said to be."""
    file = ask.file
    assert file is not None, "looked at by the caller"
    prefix = next(
        (each for each in claims.grants.write_prefixes if file.location.startswith(each)), None
    )
    if prefix is None or not _PLAIN.fullmatch(file.location, len(prefix)) or ".." in file.location:
        return Problem(
            type="not granted",
            title="The file does not lie in a folder that this attempt may write.",
            status=403,
            field="file.location",
            detail="Write it below one of the locations of the task's own outputs, under a plain"
            " name.",
        )
    home = Scope.parse(prefix, schemes=("s3", "file")).prefix
    key = f"{home.removeprefix(Root.parse(parts.root).prefix)}{file.location[len(prefix) :]}"
    try:
        head = await store.head(key)
    except NotFound:
        return malformed("There is no file at this location.", field="file.location")
    if head.size != file.bytes:
        return malformed(
            f"The file has {head.size:,} bytes, not {file.bytes:,}.", field="file.bytes"
        )
    return _Body(key, file.format, file.sha256, file.bytes, None, None)


async def buffers(parts: ApiContext, call: ApiCall) -> Answer:
    """The buffered datasets of the DAG in force."""
    del call
    rows = await parts.database.fetch("show_buffers", {"dataset": None})
    return BuffersAnswer(buffers=[BufferAnswer(**row) for row in rows])


async def rejected(parts: ApiContext, call: ApiCall) -> Answer:
    """The rows that a sink has rejected, and nobody has dealt with."""
    params: RejectedParams = call.params
    return await rejected_rows(parts, params.name, limit=params.limit)


async def rejected_rows(
    parts: ApiContext, name: str, *, limit: int, seconds_max: float | None = None
) -> RejectedAnswer | Problem:
    """The same; of the parts that could be read in that time."""
    found = await _show(parts, name)
    if isinstance(found, Problem):
        return found
    rows: list[RejectedRow] = []
    unread: list[str] = []
    bound = asyncio.timeout(seconds_max)
    try:
        async with bound:
            async for some in _pages(parts, found, unread):
                rows += await _unmarked(parts, found.dataset_id, some)
                if len(rows) > limit:
                    return RejectedAnswer(rows=rows[:limit], is_cut=True, unread=len(unread))
    except TimeoutError:
        if not bound.expired():
            raise
        return RejectedAnswer(rows=rows, is_cut=True, unread=len(unread))
    return RejectedAnswer(rows=rows, unread=len(unread))


async def give_back(parts: ApiContext, call: ApiCall) -> Answer:
    """Give rejected rows back to the buffer, mended or as they were, or drop them."""
    ask: RejectedAsk = call.ask
    found = await _show(parts, call.params.name)
    if isinstance(found, Problem):
        return found
    wanted = {(each.sequence, each.place): each for each in ask.rows}
    rows: dict[tuple[int, int], RejectedRow] = {}
    unread: list[str] = []
    async for some in _pages(parts, found, unread):
        rows |= {at: each for each in some if (at := (each.sequence, each.place)) in wanted}
        if len(rows) == len(wanted):
            break
    if missing := [at for at in wanted if at not in rows]:
        sequence, place = missing[0]
        why = f" {len(unread)} files of rejected rows could not be read wholly." if unread else ""
        return unknown(f"No row {place} of batch {sequence} was rejected by {found.job}.{why}")
    left = await _unmarked(parts, found.dataset_id, list(rows.values()))
    if ask.is_dropped:
        return await _mark(parts, found.dataset_id, left, [])
    lines = {at: _line(each, rows[at]) for at, each in wanted.items()}
    for at, line in lines.items():
        if line is None:
            return conflict(
                "no text",
                f"Row {at[1]} of batch {at[0]} was not kept, because it could not be read or is too"
                " long.",
                detail="Mend it by giving a row, or drop it.",
            )
    batches = [
        await _stored(parts, found, group, lines) for group in _by_writer(left, lines) if group
    ]
    return await _mark(
        parts,
        found.dataset_id,
        left,
        batches,
        is_mended=any(each.row is not None for each in ask.rows),
    )


def _line(asked: RejectedPlace, held: RejectedRow) -> bytes | None:
    """The text that is given back for a row; None if there is none."""
    text = held.row if asked.row is None else asked.row
    return None if text is None else " ".join(text.splitlines()).encode()


def _by_writer(
    rows: Sequence[RejectedRow], lines: Mapping[tuple[int, int], bytes | None]
) -> list[list[RejectedRow]]:
    """Rows that may be one batch: of one task and partition, and no more than a batch holds."""
    groups: dict[tuple[int, str | None], list[list[RejectedRow]]] = {}
    sizes: dict[int, int] = {}
    for each in sorted(rows, key=lambda row: (row.sequence, row.place)):
        size = len(lines[each.sequence, each.place] or b"") + 1
        some = groups.setdefault((each.task, each.partition_key), [[]])
        if sizes.get(id(some[-1]), 0) + size > BATCH_BYTES_MAX and some[-1]:
            some.append([])
        some[-1].append(each)
        sizes[id(some[-1])] = sizes.get(id(some[-1]), 0) + size
    return [group for some in groups.values() for group in some]


@dataclass(frozen=True, slots=True)
class _Sink:
    """The sink whose rejected rows are meant."""

    job: str
    dataset: str
    dataset_id: str
    rejected: str


async def _show(parts: ApiContext, name: str) -> _Sink | Problem:
    if parts.store is None:
        return conflict("no store", "This dispatcher has no store for batches.")
    buffer = await parts.batches.buffer(name)
    for row in await parts.database.fetch("show_buffers", {"dataset": name}):
        if buffer is not None:
            return _Sink(row["job"], name, buffer.dataset, row["rejected"])
    return unknown(f"The DAG that is in force has no buffered dataset {name!r}.")


async def _pages(
    parts: ApiContext, sink: _Sink, unread: list[str]
) -> AsyncIterator[list[RejectedRow]]:
    """The rejected rows, those that were rejected last first, some of a part at a time.

    The locations of parts that cannot be read to their ends are added to `unread`.
    """
    asked = {"dataset": sink.rejected, "limit": _PARTS_MAX}
    assert parts.store is not None, "looked at by the caller"
    for row in await parts.database.fetch("rejected_parts", asked):
        body = await _file_of(parts.store, row["location"], parts.root)
        seen, most = 0, _ROWS_MAX
        for _ in range(_READS_MAX):
            found = None if body is None else await _rows_of(body, skip=seen, most=most)
            if found is None and (body is None or most <= _ROWS_LEAST):
                break
            if found is None:
                # Long ones: what they need together is too much for one look.
                most = max(_ROWS_LEAST, most // 20)
                continue
            yield sorted(found, key=lambda each: (-each.sequence, each.place))
            seen += len(found)
            if seen >= row["rows"] or not found:
                break
        if seen < row["rows"]:
            unread.append(row["location"])


async def _file_of(store: ObjectStore, location: str, root: str) -> bytes | None:
    home = Scope.parse(f"{location.rstrip('/')}/", schemes=("s3", "file")).prefix
    key = f"{home.removeprefix(Root.parse(root).prefix)}{FILE_NAME}"
    try:
        if (await store.head(key)).size > _PART_BYTES_MAX:
            return None
        found = await find(store, key)
    except NotFound:
        return None
    return None if found is None else found.body


async def _rows_of(body: bytes, *, skip: int, most: int) -> list[RejectedRow] | None:
    """Some rows of a part; None if they cannot be had."""
    try:
        # By a process that can reach nothing: what stands there was written by whoever publishes.
        shown = await asyncio.to_thread(
            first_rows, io.BytesIO(body), rows=most, skip=skip, seconds_max=_READ_SECONDS
        )
    except (PenstockError, OSError):
        return None
    if tuple(shown.columns) != _COLUMNS:
        return None
    return [_row(dict(zip(_COLUMNS, each, strict=True))) for each in shown.rows]


def _row(said: Mapping[str, Any]) -> RejectedRow:
    return RejectedRow(
        sequence=int(said["sequence"]),
        place=int(said["place"]),
        reason=str(said["reason"]),
        batch=str(said["batch"]),
        task=int(said["task"]),
        row=None if said["row"] is None else str(said["row"]),
        partition_key=said["partition"] or None,
    )


async def _unmarked(
    parts: ApiContext, dataset_id: str, rows: Sequence[RejectedRow]
) -> list[RejectedRow]:
    """Those that nobody has dealt with."""
    if not rows:
        return []
    sequences = sorted({each.sequence for each in rows})
    asked = {"dataset": dataset_id, "sequences": sequences}
    marks = await parts.database.fetch("marked_rows", asked)
    marked = {(each["sequence"], each["place"]) for each in marks}
    return [each for each in rows if (each.sequence, each.place) not in marked]


async def _stored(
    parts: ApiContext,
    sink: _Sink,
    rows: Sequence[RejectedRow],
    lines: Mapping[tuple[int, int], bytes | None],
) -> tuple[NewBatch, int]:
    """Rows as a batch whose body is in the store; its id says which rows they are, and what."""
    body = b"\n".join(lines[each.sequence, each.place] or b"" for each in rows)
    sha256 = hashlib.sha256(body).hexdigest()
    places = msgspec.json.encode([[each.sequence, each.place] for each in rows])
    derived = hashlib.sha256(places + sha256.encode()).hexdigest()
    first = rows[0]
    # Named as an attempt of the publisher, which is over: the sweeper knows such folders.
    folder = f"{first.task}-1-{derived[:24]}"
    key = f"{buffer_prefix(sink.dataset, attempt=folder)}/{sha256}.jsonl"
    assert parts.store is not None, "looked at by the caller"
    await parts.store.put(key, body)
    new = NewBatch(
        dataset=sink.dataset_id,
        partition_key=first.partition_key or "",
        batch=f"rejected:{derived[:40]}",
        sha256=sha256,
        format="jsonl",
        location=f"{Root.parse(parts.root)}{key}",
        place=place_of_key(key) or "",
        bytes=len(body),
        rows=len(rows),
    )
    return new, first.task


async def _mark(
    parts: ApiContext,
    dataset_id: str,
    rows: Sequence[RejectedRow],
    batches: Sequence[tuple[NewBatch, int]],
    *,
    is_mended: bool = False,
) -> Answer:
    """Note what becomes of these rows, and keep their batches, in one transaction."""

    async def work(connection: Connection) -> RejectedDoneAnswer | None:
        sequences: list[int] = []
        for new, task_id in batches:
            kept = await keep_batch(connection, new, task_id=task_id)
            if not isinstance(kept, AcceptedBatch):
                return None
            sequences.append(kept.sequence)
        deed = "dropped" if not batches else "mended" if is_mended else "replayed"
        asked = {
            "dataset": dataset_id,
            "deed": deed,
            "batch_seq": sequences[0] if sequences else None,
            "sequences": [each.sequence for each in rows],
            "places": [each.place for each in rows],
        }
        marked = await fetch_rows(connection, "mark_rows", asked)
        if batches and len(marked) < len(rows):
            # Somebody else has dealt with some of them at this moment: nothing is given back twice.
            raise _Overtaken
        return RejectedDoneAnswer(rows=len(marked), batches=sequences)

    if not rows:
        return RejectedDoneAnswer(rows=0)
    try:
        found = await parts.database.transact(work)
    except _Overtaken:
        found = None
    if found is None:
        return conflict(
            "overtaken", "Somebody else deals with these rows right now.", detail="Look again."
        )
    parts.kick()
    return found


class _Overtaken(PenstockError):
    """Others have marked rows since they were looked at."""

    def __init__(self) -> None:
        super().__init__("Others have dealt with these rows.")


INTERNAL: Final = (
    ApiEndpoint(
        "POST",
        PUBLISH_PATH,
        "Publish a batch of rows into a buffered dataset",
        publish,
        ask=BufferPublishAsk,
        answer=BufferPublishAnswer,
        problems=(404, 409, 429),
        body_bytes_max=_BODY_BYTES_MAX,
        proof=RequiredProof.TASK,
    ),
)
PUBLIC: Final = (
    ApiEndpoint(
        "GET",
        "/v1/buffers",
        "List buffered datasets, and what waits for their sinks",
        buffers,
        answer=BuffersAnswer,
    ),
    ApiEndpoint(
        "GET",
        "/v1/buffers/{name}/rejected",
        "List rows that a sink has rejected",
        rejected,
        params=RejectedParams,
        answer=RejectedAnswer,
        problems=(404, 409),
    ),
    ApiEndpoint(
        "POST",
        "/v1/buffers/{name}/rejected",
        "Give rejected rows back to the buffer, mended or as they were, or drop them",
        give_back,
        ask=RejectedAsk,
        params=NameParams,
        answer=RejectedDoneAnswer,
        problems=(404, 409),
    ),
)
