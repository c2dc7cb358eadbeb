"""Parquet that somebody else wrote, read by a process that can reach nothing (`parquet_child`).

Whoever shows or describes what an attempt has made reads it through here: the console and the
command line its first rows, the worker its footers. The reader of Parquet is a large program, and
the file may be made to lead it astray: so neither the credentials nor the files of who asks are
there for it. It asks for ranges of the open files that it is handed, and its answer is bounded:
what it says is as little to be trusted as the file.

Blocks, for `seconds_max` at most and while a store answers. A crash leaves a process that ends
when it next asks, or has had its time.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any, BinaryIO, Final

import msgspec
from msgspec import Meta

from penstock.datasets import parquet_child
from penstock.datasets.bounds import Bound, bound_values
from penstock.datasets.iceberg.schemas import ids_of
from penstock.datasets.manifest import Unfit
from penstock.datasets.schema import Column, is_hidden
from penstock.kernel.errors import PenstockError

_ENVIRONMENT: Final = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
_VALUES_BYTES_MAX: Final = 64 * 1024 * 1024
_FOOTERS_BYTES_MAX: Final = 16 * 1024 * 1024
_CHARACTER_BYTES_MAX: Final = 12
"""In JSON, where one that is not of ASCII may be written as two halves."""
_NAME_CHARACTERS_MAX: Final = 200
_Ends = tuple[
    str, int | float | str | None, int | float | str | None, Annotated[int, Meta(ge=0)] | None, bool
]
_READ_BYTES_MAX: Final = 4 * 1024**3
_READS_MAX: Final = 4
"""How much of all files is handed over at most: so much, or each of them so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRows:
    """The first rows of a file."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left_out: int
    """How many columns are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a file says of itself. Without columns if there is no word for one of them."""

    rows: int
    columns: tuple[Column, ...]
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    unfit: Unfit | None = None


def first_rows(
    file: BinaryIO,
    *,
    rows: int,
    seconds_max: float,
    columns_max: int = 0,
    characters_max: int = 0,
    skip: int = 0,
) -> PreviewRows:
    """The first rows after `skip`: as texts of so many characters, or as values that JSON has.

    Without the columns that only merges read.

    Raises `PenstockError` for what cannot be read so, `OSError` if no process can be started.
    """
    asked = {
        "rows": rows,
        "columns_max": columns_max,
        "characters_max": characters_max,
        "skip": skip,
    }
    most = _VALUES_BYTES_MAX
    if columns_max and characters_max:
        cells = (rows + 1) * columns_max
        characters = max(characters_max, _NAME_CHARACTERS_MAX) + 4
        most = min(most, 4096 + cells * characters * _CHARACTER_BYTES_MAX)
    (found,) = _ask([file], asked, seconds_max=seconds_max, answer_bytes_max=most)
    if found is None:
        raise PenstockError("The file cannot be read as Parquet.")
    try:
        columns = [str(each)[:_NAME_CHARACTERS_MAX] for each in found["columns"]]
        columns = columns[: columns_max or None]
        seen = [place for place, name in enumerate(columns) if not is_hidden(name)]
        return PreviewRows(
            columns=[columns[place] for place in seen],
            rows=[
                [_cell(row[place], characters_max) for place in seen]
                for row in found["rows"][:rows]
            ],
            left_out=int(found["left_out"]),
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise PenstockError("The file cannot be read as Parquet.") from error


def _cell(said: Any, characters_max: int) -> Any:
    return str(said)[:characters_max] if characters_max and said is not None else said


def footers(
    files: Sequence[BinaryIO], *, seconds_max: float, is_trusted: bool = False
) -> list[Footer | None]:
    """What each of these says of itself; None for what cannot be read as Parquet.

    What trusted code has written, which runs with the rights of who asks, is read in this process:
    that takes milliseconds, and a process of its own half a second.
    """
    if is_trusted:
        return [_footer(_read_here(each)) for each in files]
    found = _ask(files, {}, seconds_max=seconds_max, answer_bytes_max=_FOOTERS_BYTES_MAX)
    return [_footer(each) for each in found]


def _read_here(file: BinaryIO) -> dict[str, Any] | None:
    try:
        return parquet_child.footer(import_module("pyarrow.parquet").ParquetFile(file))
    except Exception:  # noqa: BLE001 - whatever it is, it is the file's
        return None


def _footer(said: dict[str, Any] | None) -> Footer | None:
    """What was said of a file, and so perhaps by it."""
    if said is None:
        return None
    try:
        rows, columns = said["rows"], [(name, kind) for name, kind in said["columns"]]
    except (LookupError, TypeError, ValueError):
        return None
    if not isinstance(rows, int) or not 0 <= rows < 2**63:
        return None
    if not all(isinstance(text, str) and text for each in columns for text in each):
        return None
    try:
        unfit = None if said.get("unfit") is None else Unfit(said["unfit"])
        bounds = bound_values(msgspec.convert(said.get("bounds", []), list[_Ends]))
        ids = msgspec.convert(said.get("ids", []), list[int | None])
    except (msgspec.ValidationError, ArithmeticError, TypeError, ValueError):
        return None
    made = tuple(Column(name, kind) for name, kind in columns)
    if any(each is not None for each in ids) and ids != list(ids_of(made)):
        unfit = unfit or Unfit.FIELD_IDS
    return Footer(
        rows=rows,
        columns=made,
        bounds=bounds,
        unfit=unfit,
    )


def copied(file: BinaryIO, columns: Sequence[Column], *, seconds_max: float) -> Iterator[bytes]:
    """All rows of a file as CSV for COPY, in pieces: these columns in this order, or null.

    Raises `PenstockError` for what cannot be read so, after some pieces perhaps.
    """
    asked = {"copied": [[each.name, each.type] for each in columns]}
    with _process([file], asked, seconds_max=seconds_max) as reader:
        found = yield from _served(reader, [file], _FOOTERS_BYTES_MAX)
        reader.check(found)
    if found != [{}]:
        raise PenstockError("The file cannot be read as Parquet.")


def _ask(
    files: Sequence[BinaryIO],
    asked: dict[str, Any],
    *,
    seconds_max: float,
    answer_bytes_max: int,
) -> list[dict[str, Any] | None]:
    with _process(files, asked, seconds_max=seconds_max) as reader:
        found: object = None
        try:
            next(_served(reader, files, answer_bytes_max))
        except StopIteration as end:
            found = end.value
        reader.check(found)
    if not isinstance(found, list) or len(found) != len(files):
        raise PenstockError("The file cannot be read as Parquet.")
    return [each if isinstance(each, dict) else None for each in found]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A process that reads files, and what it is asked."""

    process: subprocess.Popen[bytes]
    asked: dict[str, Any]
    is_late: threading.Event
    seconds_max: float

    def check(self, found: object) -> None:
        """Raise `PenstockError` if it has found nothing because its time was over."""
        if self.is_late.is_set() and found is None:
            told = f"The file could not be read within {self.seconds_max:.0f} seconds."
            raise PenstockError(told)


@contextmanager
def _process(
    files: Sequence[BinaryIO], asked: dict[str, Any], *, seconds_max: float
) -> Iterator[_Reader]:
    sizes = [each.seek(0, io.SEEK_END) for each in files]
    asked = {**asked, "sizes": sizes, "cpu_seconds": max(1, int(seconds_max) + 2)}
    process = subprocess.Popen(  # noqa: S603 - our own
        [sys.executable, "-I", parquet_child.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd="/",
    )
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds_max, end)
    timer.daemon = True
    timer.start()
    try:
        yield _Reader(process, asked, is_late, seconds_max)
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def _served(
    reader: _Reader, files: Sequence[BinaryIO], answer_bytes_max: int
) -> Generator[bytes, None, object]:
    """Hand over what the process asks for; what it has found, or None if it has ended so.

    Yields what it copies, and nothing where nothing is to be copied.
    """
    process, asked = reader.process, reader.asked
    assert process.stdin is not None
    assert process.stdout is not None
    left = max(_READ_BYTES_MAX, _READS_MAX * sum(asked["sizes"]))
    try:
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        while line := process.stdout.readline(answer_bytes_max):
            said = json.loads(line)
            if "found" in said:
                return said["found"]
            if "copied" in said and "copied" in asked:
                if not 0 <= said["copied"] <= parquet_child.PIECE_BYTES_MAX:
                    return None
                yield process.stdout.read(said["copied"])
                continue
            left -= said["bytes"]
            if left < 0 or not 0 <= said["bytes"] <= parquet_child.PIECE_BYTES_MAX:
                return None
            file = files[said["file"]]
            file.seek(said["at"])
            process.stdin.write(file.read(said["bytes"]))
            process.stdin.flush()
    except (BrokenPipeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return None
