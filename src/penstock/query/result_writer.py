"""The result of a query in the format that was asked for, within its bounds, as it comes.

The names of its columns are unique, in every format (`unique_names`). In the format `rows` no value
depends on how a reader of JSON takes numbers (`exact`).

Called by the process of a query (`penstock.query.child`); imports what is large when it is used.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from importlib import import_module
from typing import Any

CHUNK_BYTES = 128 * 1024
WHOLE_MAX = 2**53 - 1
"""The largest whole number that every reader of JSON takes as it is."""


class QueryRefused(Exception):
    """The query cannot be run, and why; `position` is where in its text."""

    def __init__(self, message: str, *, position: int | None = None, kind: str = "query") -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        self.kind = kind


class ResultStream(io.RawIOBase):
    """Pieces of the result on their way, and their bound."""

    def __init__(self, send: Callable[[bytes], None], bytes_max: int) -> None:
        self._send = send
        self._bytes_max = bytes_max
        self._held = bytearray()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, body: Any) -> int:
        self._held += body
        self.bytes += len(body)
        if self.bytes > self._bytes_max:
            raise QueryRefused(
                f"The result has more than {self._bytes_max:,} bytes (`query_bytes`).",
                kind="too large",
            )
        if len(self._held) >= CHUNK_BYTES:
            self.send()
        return len(body)

    def tell(self) -> int:
        return self.bytes

    def send(self) -> None:
        """Send what is held."""
        if self._held:
            self._send(bytes(self._held))
            self._held.clear()


def batches(reader: Any, *, rows_max: int, cut: int | None) -> Iterator[tuple[Any, bool]]:
    """The batches of a result within its bounds; whether it goes on after `cut` rows."""
    left = rows_max if cut is None else min(cut, rows_max)
    is_cut = cut is not None and cut <= rows_max
    for batch in reader:
        if batch.num_rows > left:
            if not is_cut:
                raise QueryRefused(
                    f"The result has more than {rows_max:,} rows (`query_rows`).", kind="too large"
                )
            yield batch.slice(0, left), True
            return
        left -= batch.num_rows
        yield batch, False


def plain_columns(batch: Any) -> list[list[Any]]:
    """The values of a batch as Python has them, by column."""
    pyarrow = import_module("pyarrow")
    found = []
    for column in batch.columns:
        kind, each = column.type, column
        if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
            each = column.cast(pyarrow.timestamp("us", tz=kind.tz), safe=False)
        found.append(each.to_pylist())
    return found


def unique_names(names: Sequence[str]) -> list[str]:
    """The same names, where one that is there already, but for its case, gets a number."""
    taken = {name.lower() for name in names}
    seen: set[str] = set()
    found = []
    for name in names:
        shown, number = name, 0
        while shown.lower() in (taken if number else seen):
            number += 1
            shown = f"{name}_{number}"
        seen.add(shown.lower())
        taken.add(shown.lower())
        found.append(shown)
    return found


def exact(value: Any) -> Any:
    """A value whose numbers are the same for every reader of JSON: those that could be another are
    texts, which are large whole numbers, fractions in decimals, and what JSON has no number for."""
    match value:
        case bool():
            return value
        case int():
            return value if -WHOLE_MAX <= value <= WHOLE_MAX else str(value)
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case Decimal() if value.as_tuple().exponent == 0:
            return exact(int(value))
        case Decimal():
            return f"{value:f}"
        case list() | tuple():
            return [exact(each) for each in value]
        case dict():
            return {name: exact(each) for name, each in value.items()}
    return value


def _is_exact(kind: Any) -> bool:
    """Whether values of a column are the same for every reader without `exact`."""
    types = import_module("pyarrow").types
    is_wide = types.is_int64(kind) or types.is_uint64(kind)
    return not (
        is_wide or types.is_floating(kind) or types.is_decimal(kind) or types.is_nested(kind)
    )


def written(reader: Any, out: ResultStream, ask: dict[str, Any]) -> tuple[int, bool]:
    """Write a result in the format that was asked for; how many rows, and whether it was cut."""
    writer = {
        "rows": _rows,
        "jsonl": _lines,
        "csv": _csv,
        "parquet": _parquet,
        "arrow": _arrow,
    }[ask["format"]]
    rows, is_cut = 0, False
    pyarrow, schema = import_module("pyarrow"), reader.schema
    names = unique_names(schema.names)
    if names != schema.names:
        schema = pyarrow.schema(
            [each.with_name(name) for each, name in zip(schema, names, strict=True)]
        )

    def counted() -> Iterator[Any]:
        nonlocal rows, is_cut
        for batch, ends in batches(reader, rows_max=ask["rows_max"], cut=ask["cut"]):
            rows, is_cut = rows + batch.num_rows, ends
            yield pyarrow.RecordBatch.from_arrays(batch.columns, schema=schema)

    writer(schema, counted(), out)
    out.send()
    return rows, is_cut


def encoder() -> Any:
    return import_module("msgspec").json.Encoder(decimal_format="number", enc_hook=str)


def _rows(schema: Any, each: Iterator[Any], out: ResultStream) -> None:
    encode = encoder().encode
    are_exact = [_is_exact(kind) for kind in schema.types]
    for batch in each:
        columns = [
            values if is_exact else [exact(value) for value in values]
            for values, is_exact in zip(plain_columns(batch), are_exact, strict=True)
        ]
        for row in zip(*columns, strict=True):
            out.write(encode(row) + b"\n")
        out.send()


def _lines(schema: Any, each: Iterator[Any], out: ResultStream) -> None:
    encode, names = encoder().encode, schema.names
    for batch in each:
        for row in zip(*plain_columns(batch), strict=True):
            out.write(encode(dict(zip(names, row, strict=True))) + b"\n")


def _csv(schema: Any, each: Iterator[Any], out: ResultStream) -> None:
    encode = encoder().encode
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")

    def cell(value: Any) -> Any:
        match value:
            case bool():
                return "true" if value else "false"
            case bytes():
                return f"0x{value.hex()}"
            case list() | dict() | tuple():
                return encode(value).decode()
        return value

    writer.writerow(schema.names)
    for batch in each:
        for row in zip(*plain_columns(batch), strict=True):
            writer.writerow([cell(value) for value in row])
        out.write(text.getvalue().encode())
        text.seek(0)
        text.truncate()
    out.write(text.getvalue().encode())


def _parquet(schema: Any, each: Iterator[Any], out: ResultStream) -> None:
    with import_module("pyarrow.parquet").ParquetWriter(out, schema) as writer:
        for batch in each:
            writer.write_batch(batch)


def _arrow(schema: Any, each: Iterator[Any], out: ResultStream) -> None:
    with import_module("pyarrow").ipc.new_stream(out, schema) as writer:
        for batch in each:
            writer.write_batch(batch)
