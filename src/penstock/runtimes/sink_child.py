"""The process that reads the batches of one sink task, and makes Parquet of them; see `sink`.

What a batch holds was written by whoever may publish it, and is read by large programs: so it is
read here, where nothing can be reached. Before the first byte of a batch is asked for, the process
has given up files, connections, programs and, if that was root, its user
(`penstock.datasets.parquet_child`), and its memory and processor time are bounded. It ends with its
parent, or when its input does.

| it reads | it writes |
|---|---|
| a line of JSON: `SinkOrder`, in builtins | `READY`, having given up all; or `{"wrong": why}` |
| the body of each batch, in order | a line after each, `{"read": place}` |
| the files that are merged with, in order | |
| | a line, `SinkYield` in builtins, and the files that it names |

A row is judged by itself. It has to have the declared columns and types (what it leaves out is
null), to satisfy `expect`, and, where rows are merged, to have its key and its version; then it is
written, else it is rejected with all that is wrong with it. Whoever is judged alone or among others
is judged the same: what cannot be read at once is read row by row, by the same rules.

Of rows with one key the one of the highest version is kept (`version_by`), then that of the highest
sequence, then the last in its batch. The sequence stands in the hidden column of merges
(`penstock.datasets.schema.TASK_COLUMN`), so the order in which batches are merged makes no
difference. Pure but for `main`.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from importlib import import_module
from typing import Annotated, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from penstock.datasets.parquet_child import ODD
from penstock.datasets.schema import TASK_COLUMN, field_of, parts_of

_SEQUENCE: Final = TASK_COLUMN.name
_PLACE: Final = "_penstock_place"
ROW_CHARACTERS_MAX: Final = 1024 * 1024
"""A longer row is rejected without its text, and can only be dropped."""
_REASON_CHARACTERS_MAX: Final = 2_000
_SHOWN_MAX: Final = 60
_REASONS_MAX: Final = 5
_HOT_KEY_BYTES_MAX: Final = 2_000
"""What the index of a hot table holds of a key, beside the key of a partition."""
_WIDEST_PLAIN: Final = 24
_YEARS: Final = "in the years 1 to 9999"
_DAYS: Final = (-719_162, 2_932_896)
_MICROSECONDS: Final = (-62_135_596_800_000_000, 253_402_300_799_999_999)
_INTEGERS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_PLAIN: Final[Mapping[str, tuple[Any, pa.DataType]]] = {
    "boolean": (bool, pa.bool_()),
    "float": (float, pa.float32()),
    "double": (float, pa.float64()),
    "string": (str, pa.string()),
    "binary": (bytes, pa.binary()),
    "date": (date, pa.date32()),
    "timestamp": (Annotated[datetime, Meta(tz=True)], pa.timestamp("us", tz="UTC")),
    "timestamp_ntz": (Annotated[datetime, Meta(tz=False)], pa.timestamp("us")),
}
READY: Final = b"ready\n"
REJECTED: Final = (
    ("row", "string"),
    ("reason", "string"),
    ("batch", "string"),
    ("task", "bigint"),
    ("sequence", "bigint"),
    ("place", "bigint"),
    ("partition", "string"),
)
"""The columns of rejected rows. `place` is -1 where a batch was rejected as a whole."""


class SinkBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of an order; its body follows."""

    sequence: int
    batch: str
    task: int
    format: str
    bytes: int
    unreadable: str = ""
    """Why it is rejected as a whole, if that is known already; then no body follows."""


class SinkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be made."""

    columns: list[tuple[str, str]]
    """Names and types, in Spark's words."""
    batches: list[SinkBatch]
    expect: dict[str, dict[str, Any]] = {}
    partition: str = ""
    key: list[str] = []
    """The columns that a row is known by, if rows are merged."""
    version_by: str = ""
    is_hot: bool = False
    """Whether a table of Postgres follows what is written."""
    current: list[int] = []
    """How long the files are that are merged with, which follow."""
    cpu_seconds: int
    memory_bytes: int


class SinkYield(msgspec.Struct, frozen=True, kw_only=True):
    """What was made. The file of rows follows, then that of rejected ones; 0 is none."""

    rows: int
    bytes: int
    rejected: int
    rejected_bytes: int


@dataclass(slots=True)
class RejectedRows:
    """Rows that are not written, column by column."""

    rows: list[str | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    batches: list[SinkBatch] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def add(self, batch: SinkBatch, place: int, row: str | None, reason: str) -> None:
        if row is not None and len(row) > ROW_CHARACTERS_MAX:
            row = None
        self.rows.append(row)
        self.reasons.append(reason[:_REASON_CHARACTERS_MAX])
        self.batches.append(batch)
        self.places.append(place)

    def table(self, partition: str) -> pa.Table:
        return pa.table(
            [
                pa.array(self.rows, pa.string()),
                pa.array(self.reasons, pa.string()),
                pa.array([each.batch for each in self.batches], pa.string()),
                pa.array([each.task for each in self.batches], pa.int64()),
                pa.array([each.sequence for each in self.batches], pa.int64()),
                pa.array(self.places, pa.int64()),
                pa.array([partition or None] * len(self.rows), pa.string()),
            ],
            names=[name for name, _ in REJECTED],
        )


def arrow_type(text: str) -> pa.DataType:
    """A type in Spark's words as Arrow has it; `ValueError` for one that there is not."""
    return _types(text)[1]


def _types(text: str) -> tuple[Any, pa.DataType]:
    """A type as JSON is decoded to it, and as Arrow has it."""
    if text in _PLAIN:
        return _PLAIN[text]
    if text in _INTEGERS:
        bits = _INTEGERS[text]
        bounds = Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)
        return Annotated[int, bounds], getattr(pa, f"int{bits}")()
    if text.startswith("decimal("):
        digits, _, scale = text[8:-1].partition(",")
        return Decimal, pa.decimal128(int(digits), int(scale))
    kind, inner = parts_of(text)
    if kind == "array" and inner:
        decoded, held = _types(inner[0])
        return list.__class_getitem__(decoded | None), pa.list_(held)
    if kind == "map" and inner:
        (key, held_key), (decoded, held) = _types(inner[0]), _types(inner[1])
        return dict.__class_getitem__((key, decoded | None)), pa.map_(held_key, held)
    if kind == "struct" and inner:
        fields = [(name, _types(each)) for name, each in map(field_of, inner)]
        held_fields = [(name, held) for name, (_, held) in fields]
        return _row_type([(name, decoded) for name, (decoded, _) in fields]), pa.struct(held_fields)
    raise ValueError(f"There is no type {text}.")


def _row_type(fields: Sequence[tuple[str, Any]]) -> type[msgspec.Struct]:
    """What a row is decoded to: nothing but these columns, each of which may be left out."""
    names = {f"c{place}": name for place, (name, _) in enumerate(fields)}
    return msgspec.defstruct(
        "Row",
        [(f"c{place}", each | None, None) for place, (_, each) in enumerate(fields)],
        rename=names,
        forbid_unknown_fields=True,
    )


def _plain(value: Any) -> Any:
    """A value as Arrow takes it: structs as dicts."""
    if isinstance(value, msgspec.Struct):
        return {
            name: _plain(getattr(value, own))
            for own, name in zip(
                value.__struct_fields__, value.__struct_encode_fields__, strict=True
            )
        }
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [(key, _plain(each)) for key, each in value.items()]
    return value


def _whole(value: Any) -> Any:
    """A number for a column of whole ones, which Arrow would cut; what is none is a text."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else str(value)


@dataclass(slots=True)
class _Read:
    """The rows of a batch that have the columns and types, and their places in it."""

    table: pa.Table
    places: list[int]
    text: Callable[[int], str]
    """The text of a row, by its place."""


class BatchReader:
    """Reads batches of one dataset, row by row where it has to."""

    def __init__(self, order: SinkOrder, rejected: RejectedRows) -> None:
        self._rejected = rejected
        self._columns = [(name, *_types(kind)) for name, kind in order.columns]
        self._words = dict(order.columns)
        self.schema = pa.schema([(name, held) for name, _, held in self._columns])
        self._nested = {
            name
            for name, kind in order.columns
            if kind.partition("<")[0] in ("array", "map", "struct")
        }
        row = _row_type([(name, decoded) for name, decoded, _ in self._columns])
        self._decoder = msgspec.json.Decoder(row)
        self.checks = RowChecks(order)

    def rows(self, batch: SinkBatch, body: bytes) -> pa.Table:
        """The rows of a batch that are to be written; the others are among the rejected ones."""
        if batch.unreadable:
            self._rejected.add(batch, -1, None, batch.unreadable)
            return self.schema.empty_table()
        try:
            read = self._lines(batch, body) if batch.format == "jsonl" else self._table(batch, body)
        except (pa.ArrowException, *ODD) as error:
            why = f"The batch cannot be read as {batch.format}: {_short(error)}"
            self._rejected.add(batch, -1, None, why)
            return self.schema.empty_table()
        return self._checked(batch, read)

    def _lines(self, batch: SinkBatch, body: bytes) -> _Read:
        lines = body.split(b"\n")
        while lines and not lines[-1].strip():
            lines.pop()

        def text(place: int) -> str:
            return lines[place].decode("utf-8", "replace")

        try:
            rows = [self._decoder.decode(each) for each in lines]
            places = list(range(len(lines)))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            rows, places = [], []
            for place, line in enumerate(lines):
                try:
                    rows.append(self._decoder.decode(line))
                    places.append(place)
                except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                    self._rejected.add(batch, place, text(place), _said(error))
        values = {
            name: [getattr(row, f"c{at}") for row in rows]
            for at, (name, _, _) in enumerate(self._columns)
        }
        return self._arrays(batch, values, places, text)

    def _table(self, batch: SinkBatch, body: bytes) -> _Read:
        source = pa.BufferReader(body)
        if batch.format == "arrow":
            table = pa.ipc.open_stream(source).read_all()
        else:
            file = import_module("pyarrow.parquet").ParquetFile(source, pre_buffer=False)
            table = file.read(use_threads=False)
        unknown = [name for name in table.column_names if name not in self._words]
        if unknown:
            raise ValueError(f"its column {_shown(unknown[0])} is not declared")
        if len(set(table.column_names)) < len(table.column_names):
            raise ValueError("it has a column twice")

        def text(place: int) -> str:
            row = {name: _value(table.column(name)[place]) for name in table.column_names}
            return json.dumps(row, default=str)

        places = list(range(table.num_rows))
        try:
            columns = [
                table.column(name).cast(held, safe=True).combine_chunks()
                if name in table.column_names
                else pa.nulls(table.num_rows, held)
                for name, _, held in self._columns
            ]
            for each in columns:
                each.validate(full=True)
            return _Read(pa.Table.from_arrays(columns, schema=self.schema), places, text)
        except (pa.ArrowException, ValueError):
            table.validate(full=True)
            values = {
                name: [_value(each) for each in table.column(name)]
                if name in table.column_names
                else [None] * table.num_rows
                for name, _, _ in self._columns
            }
            return self._arrays(batch, values, places, text)

    def _arrays(
        self,
        batch: SinkBatch,
        values: Mapping[str, list[Any]],
        places: list[int],
        text: Callable[[int], str],
    ) -> _Read:
        """Values as arrays, without the rows of which one has no place in its column."""
        arrays: dict[str, pa.Array] = {}
        wrong: dict[int, list[str]] = {}
        for name, _, held in self._columns:
            each = values[name]
            if name in self._nested:
                each = [_plain(value) for value in each]
            elif pa.types.is_integer(held):
                each = [_whole(value) for value in each]
            try:
                arrays[name] = pa.array(each, held)
                continue
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                pass
            kept: list[Any] = []
            for at, value in enumerate(each):
                try:
                    kept.append(pa.scalar(value, held))
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                    kept.append(None)
                    why = f"{name}: {_shown(value)} is no {self._words[name]} ({_short(error)})."
                    wrong.setdefault(at, []).append(why)
            arrays[name] = pa.array([None if one is None else one.as_py() for one in kept], held)
        table = pa.Table.from_arrays(list(arrays.values()), schema=self.schema)
        if not wrong:
            return _Read(table, places, text)
        for at, reasons in wrong.items():
            self._rejected.add(
                batch, places[at], text(places[at]), " ".join(reasons[:_REASONS_MAX])
            )
        left = [at for at in range(len(places)) if at not in wrong]
        return _Read(table.take(pa.array(left, pa.int64())), [places[at] for at in left], text)

    def _checked(self, batch: SinkBatch, read: _Read) -> pa.Table:
        reasons = self.checks.reasons(read.table)
        for at, why in sorted(reasons.items()):
            place = read.places[at]
            self._rejected.add(batch, place, read.text(place), " ".join(why[:_REASONS_MAX]))
        table = read.table
        places = read.places
        if reasons:
            left = [at for at in range(len(places)) if at not in reasons]
            table = table.take(pa.array(left, pa.int64()))
            places = [places[at] for at in left]
        rows = len(places)
        sequence = pa.array([batch.sequence] * rows, pa.int64())
        return table.append_column(_SEQUENCE, sequence).append_column(
            _PLACE, pa.array(places, pa.int64())
        )


def _value(held: pa.Scalar) -> Any:
    """A value as Python has it, which knows fewer moments than Arrow."""
    try:
        return held.as_py()
    except (ValueError, OverflowError):
        return f"<not {_YEARS}>"


def _is_beyond(held: pa.Scalar) -> bool:
    try:
        held.as_py()
    except (ValueError, OverflowError):
        return True
    return False


def _beyond(column: Any, kind: pa.DataType) -> Any:
    """Where a moment is one that not everybody who reads it knows; None if it has no moments."""
    if pa.types.is_nested(kind):
        if "timestamp" in str(kind) or "date" in str(kind):
            return pa.array([_is_beyond(each) for each in column])
        return None
    if pa.types.is_date(kind):
        (least, most), whole = _DAYS, pa.int32()
    elif pa.types.is_timestamp(kind):
        (least, most), whole = _MICROSECONDS, pa.int64()
    else:
        return None
    numbers = column.cast(whole)
    return pc.or_(pc.less(numbers, least), pc.greater(numbers, most))


class RowChecks:
    """What rows have to satisfy, column by column."""

    def __init__(self, order: SinkOrder) -> None:
        self._expect = order.expect
        self._kinds = {name: _types(kind)[1] for name, kind in order.columns}
        self._needed = [*order.key, *([order.version_by] if order.version_by else [])]
        self._hot_key = order.key if order.is_hot else []
        self._texts = [name for name, kind in self._kinds.items() if pa.types.is_string(kind)]

    def reasons(self, table: pa.Table) -> dict[int, list[str]]:
        """By its place in the table, what is wrong with a row."""
        found: dict[int, list[str]] = {}
        for failing, why in self._failing(table):
            for at in pc.indices_nonzero(pc.fill_null(failing, False)).to_pylist():  # noqa: FBT003
                found.setdefault(at, []).append(why(at))
        return found

    def _failing(self, table: pa.Table) -> Iterator[tuple[Any, Callable[[int], str]]]:
        for name in self._needed:
            column = table.column(name)
            yield pc.is_null(column, nan_is_null=True), _always(f"{name}: it is missing.")
        for name in self._texts:
            column = table.column(name)
            yield pc.match_substring(column, "\0"), _always(f"{name}: it has a NUL character.")
        yield from self._unread(table)
        for name, said in self._expect.items():
            column, kind = table.column(name), self._kinds[name]
            for word, value in said.items():
                if word == "required":
                    if value and name not in self._needed:
                        yield (
                            pc.is_null(column, nan_is_null=True),
                            _always(f"{name}: it is missing."),
                        )
                    continue
                yield _fails(column, kind, word, value), _told(name, column, word, value)

    def _unread(self, table: pa.Table) -> Iterator[tuple[Any, Callable[[int], str]]]:
        """What not everybody could read who reads what is written."""
        for name, kind in self._kinds.items():
            if (beyond := _beyond(table.column(name), kind)) is not None:
                yield beyond, _always(f"{name}: it is not {_YEARS}.")
        if self._hot_key:
            sizes = [_size(table.column(name), self._kinds[name]) for name in self._hot_key]
            total = sizes[0]
            for each in sizes[1:]:
                total = pc.add(total, each)
            yield (
                pc.greater(total, _HOT_KEY_BYTES_MAX),
                _always(f"The key has more than {_HOT_KEY_BYTES_MAX:,} bytes."),
            )


def _size(column: Any, kind: pa.DataType) -> Any:
    """How many bytes of an index the values may take."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pc.add(pc.cast(pc.binary_length(column), pa.int64()), 8)
    return pa.array([_WIDEST_PLAIN] * len(column), pa.int64())


def _always(text: str) -> Callable[[int], str]:
    return lambda _: text


def _told(name: str, column: Any, word: str, value: Any) -> Callable[[int], str]:
    said = f"{word} {value}"[:200]
    return lambda at: f"{name}: {_shown(_value(column[at]))} does not satisfy {said}."


def _fails(column: Any, kind: pa.DataType, word: str, value: Any) -> Any:
    """Where a value that is there does not satisfy a check; what is null satisfies all."""
    match word:
        case "in":
            found = pc.is_in(column, value_set=pa.array(converted(value, kind), kind))
            return pc.and_(pc.invert(found), pc.is_valid(column))
        case "min":
            # A NaN is no less than anything, and not as much either.
            (bound,) = converted([value], kind)
            return pc.invert(pc.greater_equal(column, pa.scalar(bound, kind)))
        case "max":
            (bound,) = converted([value], kind)
            return pc.invert(pc.less_equal(column, pa.scalar(bound, kind)))
        case "matches":
            return pc.invert(pc.match_substring_regex(column, f"^(?:{value})$"))
        case "min_length":
            return pc.less(pc.utf8_length(column), value)
        case "max_length":
            return pc.greater(pc.utf8_length(column), value)
    raise ValueError(f"There is no check {word!r}.")


def converted(values: Sequence[Any], kind: pa.DataType) -> list[Any]:
    """Values of a config as a column of this type has them, or `ValueError`."""
    decoded: Any = None
    if pa.types.is_date(kind):
        decoded = date
    elif pa.types.is_timestamp(kind):
        decoded = Annotated[datetime, Meta(tz=kind.tz is not None)]
    elif pa.types.is_decimal(kind):
        decoded = Decimal
    try:
        found = [
            each if decoded is None else msgspec.convert(str(each), decoded) for each in values
        ]
        if any(isinstance(each, bool) != pa.types.is_boolean(kind) for each in found):
            raise ValueError(f"{values} is not of the type of the column")
        return [each.as_py() for each in pa.array(found, kind)]
    except (pa.ArrowException, msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(f"{_shown(values)} is not of the type of the column") from error


def merged(new: pa.Table, current: pa.Table | None, order: SinkOrder) -> pa.Table:
    """Of the rows with one key the one that counts; in the order of the keys."""
    if current is not None and current.num_rows:
        aside = pa.array([-1] * current.num_rows, pa.int64())
        new = pa.concat_tables([new, current.append_column(_PLACE, aside).select(new.column_names)])
    new = new.combine_chunks()
    by = [(name, "ascending") for name in order.key]
    last = [*([order.version_by] if order.version_by else []), _SEQUENCE, _PLACE]
    ranked = new.take(
        pc.sort_indices(new, sort_keys=[*by, *((name, "descending") for name in last)])
    ).combine_chunks()
    rows = ranked.num_rows
    if rows < 2:
        return ranked
    same: Any = None
    for name in order.key:
        column = ranked.column(name).combine_chunks()
        equal = pc.equal(column.slice(1), column.slice(0, rows - 1))
        same = equal if same is None else pc.and_(same, equal)
    first = pa.concat_arrays([pa.array([True]), _array(pc.invert(same))])
    return ranked.filter(first)


def _array(found: Any) -> pa.Array:
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def conformed(table: pa.Table, order: SinkOrder) -> pa.Table:
    """A file that was published, with the columns and types that are declared now."""
    columns = []
    for name, kind in (*order.columns, (_SEQUENCE, "bigint")):
        held = arrow_type(kind)
        at = table.schema.get_field_index(name)
        columns.append(
            pa.chunked_array([pa.nulls(table.num_rows, held)])
            if at < 0
            else table.column(at).cast(held)
        )
    return pa.table(columns, names=[*(name for name, _ in order.columns), _SEQUENCE])


def written(table: pa.Table) -> bytes:
    """A table as a Parquet file; nothing if it has no rows."""
    if not table.num_rows:
        return b""
    body = io.BytesIO()
    import_module("pyarrow.parquet").write_table(
        table, body, compression="zstd", version="2.6", store_schema=False
    )
    return body.getvalue()


def made(
    order: SinkOrder, bodies: Iterator[bytes], files: Iterator[bytes]
) -> tuple[SinkYield, bytes, bytes]:
    """What a sink task makes of its batches: the figures, the rows, and what was rejected."""
    rejected = RejectedRows()
    reader = BatchReader(order, rejected)
    tables = [reader.rows(batch, body) for batch, body in zip(order.batches, bodies, strict=True)]
    tables = [each for each in tables if each.num_rows]
    rows = pa.concat_tables(tables) if tables else None
    if rows is not None and order.key:
        parquet = import_module("pyarrow.parquet")
        held = [
            conformed(
                parquet.ParquetFile(pa.BufferReader(each), pre_buffer=False).read(
                    use_threads=False
                ),
                order,
            )
            for each in files
        ]
        rows = merged(rows, pa.concat_tables(held) if held else None, order)
        rows = rows.drop_columns([_PLACE])
    elif rows is not None:
        rows = rows.drop_columns([_PLACE, _SEQUENCE])
    body = b"" if rows is None else written(rows)
    aside = written(rejected.table(order.partition))
    return (
        SinkYield(
            rows=0 if rows is None else rows.num_rows,
            bytes=len(body),
            rejected=len(rejected.rows),
            rejected_bytes=len(aside),
        ),
        body,
        aside,
    )


def order_problem(order: SinkOrder) -> str:
    """What is wrong with the columns or checks of an order, whatever its batches hold."""
    try:
        reader = BatchReader(order, RejectedRows())
        reader.checks.reasons(reader.schema.empty_table())
        for said in order.expect.values():
            # A pattern is compiled when there is a value.
            _fails(pa.array([""]), pa.string(), "matches", said.get("matches", ""))
    except (pa.ArrowException, *ODD) as error:
        return f"`expect` does not fit the columns: {_short(error)}"
    return ""


def _said(error: Exception) -> str:
    return f"The row does not fit: {_short(error)}"


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300] if text.endswith(".") else f"{text[:300]}."


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def _exactly(size: int) -> bytes:
    body = sys.stdin.buffer.read(size)
    if len(body) != size:
        raise EOFError("the parent process exited")
    return body


def _say(body: bytes) -> None:
    left = memoryview(body)
    while left:
        left = left[os.write(1, left) :]


def main() -> None:
    """Read an order and its batches, and write what is made of them."""
    lockdown = import_module("penstock.datasets.parquet_child")
    limits = import_module("resource")
    watch = import_module("penstock.kernel.parent_watch")
    import_module("pyarrow.parquet")
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=SinkOrder)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # Arrow looks for time zones when it meets one.
    utc = pa.scalar(0, pa.timestamp("us", tz="UTC")).as_py()
    if os.geteuid() == 0:
        lockdown.become_nobody()
    # The kernel forgets the wish with the user.
    watch.die_with(int(sys.argv[2]))
    limits.setrlimit(limits.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    lockdown.give_up(order.cpu_seconds)
    if problem := order_problem(order):
        _say(msgspec.json.encode({"wrong": problem}) + b"\n")
        return
    _say(READY)

    def bodies() -> Iterator[bytes]:
        for place, batch in enumerate(order.batches):
            yield b"" if batch.unreadable else _exactly(batch.bytes)
            _say(b'{"read":%d}\n' % place)

    found, rows, rejected = made(order, bodies(), map(_exactly, order.current))
    del utc
    _say(msgspec.json.encode(found) + b"\n")
    _say(rows)
    _say(rejected)


if __name__ == "__main__":
    main()
