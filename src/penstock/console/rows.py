"""A process of its own that reads the first rows of a Parquet file: `python -I rows.py COUNT`.

What an attempt has written is not to be trusted: a small file can unpack to any size, and the
reader of it is a large program. So it is read here, with bounds on memory and time that the system
keeps, in a process that holds nothing and knows nobody. The file comes in by standard input; out
goes one JSON object, `columns` and `rows`, all texts that were cut. A value that Python has no room
for, or a text that is none, hides itself alone. Imports nothing of ours.
"""

from __future__ import annotations

import json
import resource
import sys
from importlib import import_module
from typing import Any

MEMORY_BYTES_MAX = 2 * 1024**3
CPU_SECONDS_MAX = 10
COLUMNS_MAX = 60
CHARACTERS_MAX = 200
CANNOT_BE_SHOWN = "(cannot be shown)"
# What Arrow and Python say of a time out of range, a time zone that nobody knows, bytes that are no
# text. Too little memory is not of one value: it ends the process.
ODD = (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError)


def shown(value: Any) -> str | None:
    """A value as a text; None for null."""
    if value is None:
        return None
    if isinstance(value, bytes):
        dots = "…" if len(value) > 32 else ""
        return f"0x{value[:32].hex()}{dots}"
    text = str(value)
    return text if len(text) <= CHARACTERS_MAX else f"{text[: CHARACTERS_MAX - 1]}…"


def cell(scalar: Any) -> str | None:
    """A value of Arrow's as a text, or that it cannot be one."""
    try:
        return shown(scalar.as_py())
    except ODD:
        return CANNOT_BE_SHOWN


def first_rows(body: bytes, count: int) -> dict[str, Any]:
    """The first rows of a file."""
    # Only now: the bounds are set.
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    file = parquet.ParquetFile(pyarrow.BufferReader(body))
    names = file.schema_arrow.names
    rows: list[list[str | None]] = []
    # Columns that share a name cannot be asked for by it: they are taken by their places.
    for batch in file.iter_batches(batch_size=count, use_threads=False):
        kept = [batch.column(place) for place in range(min(COLUMNS_MAX, batch.num_columns))]
        rows += [
            [cell(column[number]) for column in kept]
            for number in range(min(batch.num_rows, count - len(rows)))
        ]
        if len(rows) >= count:
            break
    return {
        "columns": [shown(name) for name in names[:COLUMNS_MAX]],
        "rows": rows,
        "left_out": max(0, len(names) - COLUMNS_MAX),
    }


def main() -> None:
    """Read standard input, write standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = first_rows(sys.stdin.buffer.read(), int(sys.argv[1]))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
