"""A settled pack as rows of text, one a task, and back again. Pure.

A batch of the archive is gzip of JSON Lines, so that Spark, pandas and `zcat` read it as it is.
A row is a settled task. Its columns are flat and have the same types in every batch: times are
ISO 8601 in UTC, what users submitted and returned is JSON text, the log is an array of structs,
and missing values are null. `SCHEMA` is the same for `spark.read.schema(…)`.

The rows of a pack stand together, in the order of its tasks. What the columns do not say of its
ledger (its birth, its writers, the whole log) is in the column `record` of the first of them, so
that the ledger can be restored, equal to the last byte. `record` is for Penstock alone.

A batch of an earlier release, one JSON document whose name has no ending, is still read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import ClassVar, Final

import msgspec

from penstock.kernel.document_format import Document, decode, encode
from penstock.kernel.errors import NotOurs
from penstock.queue.ids import PackAt, pack_at
from penstock.queue.ledger import (
    NULL,
    Ledger,
    LedgerFailure,
    LedgerLogLine,
    QueueTaskState,
    QueueTaskStatus,
)
from penstock.queue.pack import PayloadReference
from penstock.queue.payloads import raw, reference

ENDING: Final = ".jsonl.gz"
LOG_LINES_SHOWN: Final = 50
"""So many lines of the log a row has at the most, the last ones; `record` has all of them."""
BATCH_BYTES_READ_MAX: Final = 512 * 1024 * 1024
_CHUNK_BYTES: Final = 1024 * 1024
_LEVEL: Final = 6

SCHEMA: Final = (
    "id string, type string, status string, attempt int, submitted_at timestamp,"
    " due_at timestamp, expires_at timestamp, settled_at timestamp, key string,"
    " tags map<string,string>, priority int, `limit` string, batch string, input string,"
    " result string, error string, message string, traceback string,"
    " log array<struct<at:timestamp,what:string,attempt:int,who:string,note:string>>,"
    " input_ref struct<key:string,bytes:bigint,sha256:string>,"
    " result_ref struct<key:string,bytes:bigint,sha256:string>"
)
"""The columns for people, as Spark takes them."""

_replace = msgspec.structs.replace


class LogEntry(msgspec.Struct, frozen=True):
    """One thing that happened to a task."""

    at: str
    what: str
    attempt: int
    who: str
    note: str


class ArchiveRow(Document, frozen=True, kw_only=True):
    """A settled task. The name of its pack comes first, so that a row is passed over quickly."""

    kind: ClassVar[str] = "settled-task"

    pack: str
    """Where the pack was, below the folder of the queue."""
    place: int
    id: str
    type: str
    status: str
    attempt: int
    submitted_at: str
    due_at: str | None
    expires_at: str | None
    settled_at: str | None
    key: str | None
    tags: dict[str, str]
    priority: int
    limit: str | None
    batch: str | None
    input: str | None
    result: str | None
    error: str | None
    message: str | None
    traceback: str | None
    log: tuple[LogEntry, ...]
    input_ref: PayloadReference | None
    result_ref: PayloadReference | None
    record: str | None = None


class LegacyArchiveRecord(msgspec.Struct, frozen=True):
    """A settled pack in a batch of an earlier release."""

    path: str
    ledger: msgspec.Raw


class LegacyArchiveBatch(Document, frozen=True, kw_only=True):
    """A batch of an earlier release: many records in one document."""

    kind: ClassVar[str] = "archive"

    records: tuple[LegacyArchiveRecord, ...]


def rows_of(at: PackAt, ledger: Ledger) -> Iterator[ArchiveRow]:
    """The tasks of a settled pack."""
    bare = _replace(
        ledger,
        inputs=(),
        tasks=tuple(_replace(task, result=NULL, failure=None) for task in ledger.tasks),
    )
    logs = _logs(ledger.log, at.count)
    for place, task in enumerate(ledger.tasks):
        row = _row(at, place, task, ledger, logs[place])
        yield _replace(row, record=encode(bare).decode()) if place == 0 else row


def _row(
    at: PackAt, place: int, task: QueueTaskState, ledger: Ledger, log: tuple[LogEntry, ...]
) -> ArchiveRow:
    body = bytes(ledger.inputs[place]) if ledger.inputs else None
    is_ref = body is not None and place in ledger.refs
    result = bytes(task.result)
    has_result = task.status is QueueTaskStatus.SUCCEEDED or result != bytes(NULL)
    submitted_ms = ledger.submitted_ms or at.submitted_ms or 0
    failure = task.failure
    return ArchiveRow(
        pack=at.path,
        place=place,
        id=at.task(place),
        type=at.type,
        status=task.status.word,
        attempt=task.attempt,
        submitted_at=_iso(submitted_ms),
        due_at=_iso(ledger.due_ms) if ledger.due_ms else None,
        expires_at=_iso(ledger.expires_ms) if ledger.expires_ms else None,
        settled_at=_iso(task.at_ms) if task.status.settled else None,
        key=ledger.key,
        tags=ledger.tags,
        priority=ledger.priority,
        limit=ledger.limit or None,
        batch=ledger.batch or None,
        input=body.decode() if body is not None and not is_ref else None,
        result=result.decode() if has_result and not task.is_ref else None,
        error=failure.error if failure else None,
        message=failure.message if failure else None,
        traceback=failure.trace if failure else None,
        log=log,
        input_ref=reference(body) if body is not None and is_ref else None,
        result_ref=reference(result) if task.is_ref else None,
    )


def ledger_of(rows: Sequence[ArchiveRow], *, where: str) -> tuple[PackAt, Ledger]:
    """The settled pack that these rows tell of: all of its tasks, in order."""
    first = rows[0]
    read = pack_at(first.pack)
    if read is None or first.record is None:
        raise NotOurs(f"{where} is damaged: the row of task {first.id!r} names no pack.")
    bare = decode(Ledger, first.record.encode(), where=where)
    if [row.place for row in rows] != list(range(len(bare.tasks))):
        raise NotOurs(f"{where} is damaged: it does not have every task of {first.pack!r}.")
    inputs = [_raw(row.input, row.input_ref) for row in rows]
    tasks = [
        _replace(
            task,
            result=_raw(row.result, row.result_ref) or NULL,
            failure=None if row.error is None else _failure(row),
        )
        for row, task in zip(rows, bare.tasks, strict=True)
    ]
    known = tuple(each for each in inputs if each is not None)
    return read[0], _replace(bare, tasks=tuple(tasks), inputs=known)


def packed(records: Iterable[tuple[PackAt, Ledger]]) -> Iterator[bytes]:
    """The body of a batch in pieces, a piece for each record and one more."""
    # Without a time in its header, equal records are equal bytes.
    gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
    for at, ledger in records:
        lines = b"".join(encode(row) + b"\n" for row in rows_of(at, ledger))
        yield gzip.compress(lines)
    yield gzip.flush()


def unpacked(
    body: bytes, *, where: str, only: PackAt | None = None
) -> Iterator[tuple[PackAt, Ledger]]:
    """The records of a batch, in whichever form it is; `only` those of one pack, if given.

    Raises `NotOurs` if it is damaged, and `NewerFormat`.
    """
    if not where.endswith(ENDING):
        yield from _unpacked_document(body, where=where, only=only)
        return
    sought = b'"pack":' + msgspec.json.encode(only.path) if only else b""
    rows: list[ArchiveRow] = []
    for line in _lines(body, where=where):
        if sought and sought not in line:
            continue
        row = decode(ArchiveRow, line, where=where)
        if only is not None and row.pack != only.path:
            continue
        if rows and row.place == 0:
            yield ledger_of(rows, where=where)
            rows = []
        rows.append(row)
    if rows:
        yield ledger_of(rows, where=where)


def _unpacked_document(
    body: bytes, *, where: str, only: PackAt | None
) -> Iterator[tuple[PackAt, Ledger]]:
    for record in decode(LegacyArchiveBatch, body, where=where).records:
        read = pack_at(record.path)
        if read is not None and only in (None, read[0]):
            yield read[0], decode(Ledger, bytes(record.ledger), where=where)


def _lines(body: bytes, *, where: str) -> Iterator[bytes]:
    """The lines of a batch, each unpacked when it is its turn."""
    gzip = zlib.decompressobj(31)
    rest, taken, size = b"", body, 0
    try:
        while taken and not gzip.eof:
            text = gzip.decompress(taken, _CHUNK_BYTES)
            taken = gzip.unconsumed_tail
            size += len(text)
            *lines, rest = (rest + text).split(b"\n")
            yield from filter(None, lines)
            if size > BATCH_BYTES_READ_MAX:
                raise NotOurs(f"{where} is larger than a batch can be.")
        tail = rest + gzip.flush()
    except zlib.error as error:
        raise NotOurs(f"{where} is damaged: {error}.") from error
    if not gzip.eof:
        raise NotOurs(f"{where} is damaged: it is truncated.")
    yield from filter(None, tail.split(b"\n"))


def _logs(log: Sequence[LedgerLogLine], count: int) -> list[tuple[LogEntry, ...]]:
    """The last lines of the log that are about each task."""
    logs: list[list[LogEntry]] = [[] for _ in range(count)]
    # From the end, so that of a long log only what is shown is made.
    for line in reversed(log):
        entry = LogEntry(_iso(line.at_ms), str(line.what), line.attempt, line.who, line.note)
        for first, last in zip(line.runs[::2], line.runs[1::2], strict=True):
            for place in range(first, min(last, count - 1) + 1):
                if len(logs[place]) < LOG_LINES_SHOWN:
                    logs[place].append(entry)
    return [tuple(reversed(lines)) for lines in logs]


def _raw(text: str | None, ref: PayloadReference | None) -> msgspec.Raw | None:
    if ref is not None:
        return raw(ref)
    return None if text is None else msgspec.Raw(text.encode())


def _failure(row: ArchiveRow) -> LedgerFailure:
    return LedgerFailure(row.error or "", row.message or "", row.traceback or "")


def _iso(milliseconds: int) -> str:
    try:
        shown = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        shown = datetime.fromtimestamp(0, tz=UTC)
    return shown.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
