"""A process of its own that reads Parquet: `python -I parquet_child.py`, see `parquet`.

What an attempt has written is not to be trusted: a small file can unpack to any size, and the
reader of it is a large program in C++. So it is read here, in a process that holds nothing and can
reach nothing. Before the first byte of a file is asked for it has given up, for good

- memory and processor time beyond a bound, and core dumps;
- opening anything: no file, no connection, no program, no thread (limits of zero, as OpenSSH's
  sandbox has them); what is needed was imported before;
- the user, if that was root: a number that nobody has, without groups and without a way back;
- on Linux every call of the kernel but those that memory, time and open files take (`ALLOWED`):
  limits do not keep it from removing files, or from looking into who asks, if that is its own user.

Its environment is empty but for two settings of Arrow. Files are asked for over standard output,
by range, and come over standard input; the last line is what was found. It ends when its parent
does. Imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import math
import os
import re
import resource
import struct
import sys
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal
from importlib import import_module
from types import MappingProxyType
from typing import Any

MEMORY_BYTES_MAX = 2 * 1024**3
PIECE_BYTES_MAX = 8 * 1024**2
USERS = (2_000_000_191, 65_534)
"""Whom root becomes: a number that no account has, or nobody, where there are no such numbers."""
CANNOT_BE_SHOWN = "(cannot be shown)"
NO_NEW_PRIVILEGES = 38
_SECCOMP, _SECCOMP_FILTER = 22, 2
_LOAD, _IF_EQUAL, _IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _DENY, _MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER_AT, _MACHINE_AT, _FLAGS_AT = 0, 4, 16
_CLONES = ((56, 220), (435, 435))
_CLONE_THREAD = 0x00010000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "getuid": (102, 174),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "rseq": (334, 293),
}
"""Calls of the kernel that are left, with their numbers on the machines above."""
# What Arrow and Python say of a time out of range, a time zone that nobody knows, bytes that are no
# text. Too little memory is not of one value: it ends the process.
ODD = (
    ArithmeticError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    TypeError,
    ValueError,
)
BOUNDS_MAX = 32
CHARACTERS_MAX = 32
"""Of how many columns bounds are told, and how much of a text; as in `bounds`."""
ROW_GROUPS_MAX = 10_000
COPY_ROWS = 8_192
LEGACY = b"org.apache.spark.legacy"
"""How keys of a footer begin if Spark was told to write dates as its earliest releases did."""
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ZERO = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""The character zero in JSON, and not a backslash before the letters of it."""
_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DAY_SECONDS = 86_400
_YEARS = (-719_162, 2_932_896)
"""The first day of the year 1, and the last one of 9999, counted from 1970."""
_CYCLE_DAYS = 146_097
"""Of 400 years, after which the calendar repeats itself."""
_WORDS = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "decimal(20,0)",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "binary": "binary",
    "large_binary": "binary",
    "date32[day]": "date",
}


class RemoteFile(io.RawIOBase):
    """A file that the parent has open."""

    def __init__(self, number: int, size: int) -> None:
        self._number = number
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), PIECE_BYTES_MAX, self._size - self._at)
        if wanted <= 0:
            return 0
        say({"file": self._number, "at": self._at, "bytes": wanted})
        body = sys.stdin.buffer.read(wanted)
        if len(body) != wanted:
            raise EOFError("the parent process exited")
        buffer[:wanted] = body
        self._at += wanted
        return wanted


def say(what: dict[str, Any]) -> None:
    """Write a line."""
    body = memoryview(json.dumps(what).encode() + b"\n")
    while body:
        body = body[os.write(1, body) :]


def say_bytes(body: memoryview) -> None:
    """Write bytes, after the line that says how many."""
    say({"copied": len(body)})
    while body:
        body = body[os.write(1, body) :]


def shown(value: Any, characters_max: int) -> str | None:
    """A value as a text that may be cut; None for null."""
    if value is None:
        return None
    if isinstance(value, bytes):
        dots = "…" if len(value) > 32 else ""
        return f"0x{value[:32].hex()}{dots}"
    text = str(value)
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


def plain(value: Any) -> Any:
    """A value as JSON has it; as a text, if it has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(Decimal(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return str(value)


def cell(scalar: Any, characters_max: int) -> Any:
    """A value of Arrow's, or that it cannot be shown."""
    try:
        value = scalar.as_py()
        return shown(value, characters_max) if characters_max else plain(value)
    except ODD:
        return CANNOT_BE_SHOWN


def first_rows(file: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The first rows of a file, as texts of so many characters; as values, if that is zero."""
    names = file.schema_arrow.names
    count, columns_max = asked["rows"], asked["columns_max"] or len(names)
    passed = asked.get("skip", 0)
    rows: list[list[Any]] = []
    # Columns that share a name cannot be asked for by it: they are taken by their places.
    for batch in file.iter_batches(batch_size=max(1, count), use_threads=False):
        if passed >= batch.num_rows:
            passed -= batch.num_rows
            continue
        left, passed = batch.slice(passed), 0
        kept = [left.column(place) for place in range(min(columns_max, left.num_columns))]
        rows += [
            [cell(column[number], asked["characters_max"]) for column in kept]
            for number in range(min(left.num_rows, count - len(rows)))
        ]
        if len(rows) >= count:
            break
    return {
        "columns": [shown(name, 200) for name in names[:columns_max]],
        "rows": rows,
        "left_out": max(0, len(names) - columns_max),
    }


def copied_pieces(file: Any, columns: list[list[str]]) -> Iterator[memoryview]:
    """All rows of a file as the lines that COPY takes.

    Columns are taken by their names, in this order; one that a file does not have is null.
    """
    pyarrow, csv = import_module("pyarrow"), import_module("pyarrow.csv")
    places = {field.name: place for place, field in enumerate(file.schema_arrow)}
    kept = [name for name, _ in columns if name in places]
    options = csv.WriteOptions(include_header=False)
    for batch in file.iter_batches(batch_size=COPY_ROWS, columns=kept, use_threads=False):
        held = dict(zip(batch.schema.names, batch.columns, strict=True))
        arrays = [
            copied(pyarrow, held[name], kind) if name in held else pyarrow.nulls(batch.num_rows)
            for name, kind in columns
        ]
        piece = io.BytesIO()
        named = [str(number) for number in range(len(arrays))]
        csv.write_csv(pyarrow.record_batch(arrays, names=named), piece, options)
        body = piece.getbuffer()
        for at in range(0, len(body), PIECE_BYTES_MAX):
            yield body[at : at + PIECE_BYTES_MAX]


def copied(pyarrow: Any, array: Any, kind: str) -> Any:
    """A column as CSV has it: moments in UTC, bytes in hexadecimal digits, nested ones as JSON."""
    types = pyarrow.types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_date32(array.type) or types.is_timestamp(array.type):
        return moments_of(pyarrow, array)
    if types.is_nested(array.type) or kind.startswith(("array<", "map<", "struct<")):
        try:
            values = [plain(each) for each in array.to_pylist(maps_as_pydicts="lossy")]
        except ODD:
            values = [jsonable(types, each) for each in array]
        texts = [None if x is None else _ZERO.sub(r"\1\\ufffd", json.dumps(x)) for x in values]
        return pyarrow.array(texts, pyarrow.string())
    if types.is_binary(array.type) or types.is_large_binary(array.type):
        texts = [None if x is None else "\\x" + x.hex() for x in array.to_pylist()]
        return pyarrow.array(texts, pyarrow.string())
    if types.is_string(array.type) or types.is_large_string(array.type):
        return text_of(array)
    return array


def moments_of(pyarrow: Any, array: Any) -> Any:
    """Dates, or moments in UTC: as texts, if there is one that Arrow does not write as Postgres."""
    is_date, unit = array.type == pyarrow.date32(), getattr(array.type, "unit", "s")
    numbers = array.view(pyarrow.int32() if is_date else pyarrow.int64())
    found = import_module("pyarrow.compute").min_max(numbers).as_py()
    per_day = 1 if is_date else _DAY_SECONDS * _UNITS[unit]
    if found["min"] is None or (
        _YEARS[0] <= found["min"] // per_day and found["max"] // per_day <= _YEARS[1]
    ):
        # Without its zone, so that no table of zones is asked for: the values are those of UTC.
        return array if is_date else array.view(pyarrow.timestamp(unit))
    write = dated if is_date else lambda each: timed(each, unit)
    texts = [None if each is None else write(each) for each in numbers.to_pylist()]
    return pyarrow.array(texts, pyarrow.string())


def dated(days: int, time: str = "") -> str:
    """A day as Postgres writes it, which has no year 0 and none below.

    >>> dated(-719_163), dated(0, " 12:00")
    ('0001-12-31 BC', '1970-01-01 12:00')
    """
    cycles, rest = divmod(days - _YEARS[0], _CYCLE_DAYS)
    day = date.fromordinal(rest + 1)
    year = day.year + 400 * cycles
    end = "" if year > 0 else " BC"
    return f"{year if year > 0 else 1 - year:04}-{day.month:02}-{day.day:02}{time}{end}"


def timed(value: int, unit: str, zone: str = "") -> str:
    """A moment as Postgres writes it."""
    seconds, parts = divmod(value, _UNITS[unit])
    days, rest = divmod(seconds, _DAY_SECONDS)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return dated(days, f" {clock}.{parts * 1_000_000 // _UNITS[unit]:06}{zone}")


def jsonable(types: Any, scalar: Any) -> Any:
    """A nested value of Arrow's as JSON has it, also where Python has no such moment."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        return {each.name: jsonable(types, scalar[at]) for at, each in enumerate(kind)}
    if types.is_map(kind):
        pairs = ((jsonable(types, each[0]), jsonable(types, each[1])) for each in scalar.values)
        return {str(name): value for name, value in pairs}
    if types.is_nested(kind):
        return [jsonable(types, each) for each in scalar.values]
    if types.is_date32(kind):
        return dated(scalar.value)
    if types.is_timestamp(kind):
        return timed(scalar.value, kind.unit, "+00:00" if kind.tz else "").replace(".000000", "")
    return plain(scalar.as_py())


def text_of(array: Any) -> Any:
    """Texts without the one character that Postgres cannot hold."""
    compute = import_module("pyarrow.compute")
    if compute.any(compute.match_substring(array, "\0")).as_py():
        return compute.replace_substring(array, "\0", "\N{REPLACEMENT CHARACTER}")
    return array


def footer(file: Any) -> dict[str, Any]:
    """How many rows a file has, and its columns; none if Spark has no word for one of them.

    Of fractions there are no bounds: not every writer says whether there is a NaN.
    """
    try:
        columns = [[field.name, word(field.type)] for field in file.schema_arrow]
    except ODD:
        columns = []
    return {
        "rows": file.metadata.num_rows,
        "columns": columns,
        "unfit": unfit(file.schema_arrow),
        "ids": field_ids(file.schema_arrow),
        "bounds": ends(file.metadata, columns_max=BOUNDS_MAX, with_fractions=False),
    }


def unfit(schema: Any) -> str | None:
    """What readers of Iceberg would misread in a file, in the words of `manifest.Unfit`."""
    types = import_module("pyarrow").types
    for field in every_field(schema):
        if types.is_uint32(field.type) or types.is_uint64(field.type):
            return "unsigned"
    return None


def field_ids(schema: Any) -> list[int | None]:
    """The ids of all fields, each before those in it."""
    return [
        None if said is None else int(said)
        for field in every_field(schema)
        for said in [(field.metadata or {}).get(b"PARQUET:field_id")]
    ]


def every_field(fields: Any) -> Iterator[Any]:
    """All fields, each before those in it; of maps the keys before the values."""
    types = import_module("pyarrow").types
    for field in fields:
        yield field
        kind = field.type
        if types.is_map(kind):
            yield from every_field([kind.key_field, kind.item_field])
        elif types.is_nested(kind):
            yield from every_field([kind.field(place) for place in range(kind.num_fields)])


def ends(
    metadata: Any, *, columns_max: int, with_fractions: bool = True
) -> list[tuple[str, Any, Any, int | None, bool]]:
    """Of columns at the top: the name, the least value, the greatest one, and how many nulls.

    Values are numbers and texts, and decimals are texts, as `bounds.told` takes them, and told by
    the last. None is what nobody knows: what a footer leaves out of one row group, nobody knows of
    the file.
    """
    if metadata.num_row_groups > ROW_GROUPS_MAX:
        return []
    # Days before 1582 are then stored as others than they are.
    is_shifted = any(each.startswith(LEGACY) for each in metadata.metadata or ())
    found = []
    for place in range(metadata.num_columns):
        column = metadata.schema.column(place)
        if is_shifted and column.logical_type.type in ("DATE", "TIMESTAMP"):
            continue
        is_top = column.max_repetition_level == 0 and column.max_definition_level <= 1
        is_left_out = column.physical_type == "DOUBLE" and not with_fractions
        # The path of a field inside of a struct has a dot too.
        if is_top and "." not in column.path and is_ordered(column) and not is_left_out:
            is_decimal = column.logical_type.type == "DECIMAL"
            found.append((column.name, *column_ends(metadata, place, column), is_decimal))
            if len(found) >= columns_max:
                break
    return found


def is_ordered(column: Any) -> bool:
    """Whether the bounds of a column are in the order of its values."""
    logical = column.logical_type.type
    match column.physical_type:
        case "DOUBLE":
            return bool(logical == "NONE")
        case "INT32" | "INT64" if logical in ("DATE", "INT", "NONE", "TIMESTAMP"):
            said = json.loads(column.logical_type.to_json())
            is_signed = said.get("isSigned", True)
            return bool(is_signed and said.get("timeUnit", "microseconds") == "microseconds")
        case "BYTE_ARRAY":
            return logical in ("STRING", "DECIMAL")
    return bool(logical == "DECIMAL")


def column_ends(metadata: Any, place: int, column: Any) -> tuple[Any, Any, int | None]:
    """The least and the greatest value of a column, and how many nulls it has."""
    low: Any = None
    high: Any = None
    nulls: int | None = 0
    is_known = True
    for number in range(metadata.num_row_groups):
        chunk = metadata.row_group(number).column(place)
        said = chunk.statistics
        if said is None or not said.has_null_count:
            nulls = None
        elif nulls is not None:
            nulls += said.null_count
        if said is not None and said.has_null_count and said.null_count == chunk.num_values:
            continue
        both = None if said is None or not said.has_min_max else chunk_ends(said, column)
        if both is None:
            is_known = False
            continue
        low = both[0] if low is None else min(low, both[0])
        high = both[1] if high is None else max(high, both[1])
    return (plain_end(low), plain_end(high), nulls) if is_known else (None, None, nulls)


def chunk_ends(said: Any, column: Any) -> tuple[Any, Any] | None:
    """The least and the greatest value of a row group."""
    try:
        low, high = said.min, said.max
        if column.physical_type == "DOUBLE":
            # A writer that puts NaN into its statistics says nothing about the other values.
            return (low, high) if low == low and high == high else None  # noqa: PLR0124 - NaN
        for logical, type_ in (("STRING", str), ("DECIMAL", Decimal)):
            if column.logical_type.type == logical:
                return (low, high) if isinstance(low, type_) and isinstance(high, type_) else None
        return int(said.min_raw), int(said.max_raw)
    except (ValueError, OverflowError, UnicodeDecodeError, NotImplementedError):
        return None


def plain_end(value: Any) -> Any:
    """One end as JSON has it. A text is cut, and may be seen to have been longer than is kept."""
    if isinstance(value, str):
        return value[: CHARACTERS_MAX + 1]
    return str(value) if isinstance(value, Decimal) else value


def word(kind: Any) -> str:
    """A type of Arrow's in Spark's words, as it is read of the file."""
    types = import_module("pyarrow").types
    if types.is_dictionary(kind):
        return word(kind.value_type)
    if types.is_decimal(kind) and kind.precision <= 38 and kind.scale >= 0:
        return f"decimal({kind.precision},{kind.scale})"
    if types.is_timestamp(kind) and kind.unit != "s":
        # Spark reads no nanoseconds, and says so; all others read them as microseconds.
        return "timestamp_ntz" if kind.tz is None else "timestamp"
    if types.is_map(kind):
        return f"map<{word(kind.key_type)},{word(kind.item_type)}>"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"array<{word(kind.value_type)}>"
    if types.is_struct(kind):
        inner = (f"{_name(each.name)}:{word(each.type)}" for each in kind)
        return f"struct<{','.join(inner)}>"
    return _WORDS[str(kind)]


def _name(text: str) -> str:
    return text if _PLAIN_NAME.fullmatch(text) else "`" + text.replace("`", "``") + "`"


def give_up(cpu_seconds: int) -> None:
    """Give up everything that reading takes not; for good."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    if os.geteuid() == 0:
        become_nobody()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError("failed to drop privileges for good")
    if sys.platform == "linux" and os.uname().machine in MACHINES:
        leave_calls(os.uname().machine)


def leave_calls(
    machine: str,
    *,
    allowed: Mapping[str, tuple[int, int]] = MappingProxyType(ALLOWED),
    has_threads: bool = False,
) -> None:
    """Give up every call of the kernel but some: the others are refused, for good.

    With `has_threads` a thread may be made, and no process: what makes either by flags is looked
    into, and what has them where nobody can look (`clone3`) is said to be missing.
    """
    column = list(MACHINES).index(machine)
    numbers = [each[column] for each in allowed.values()]
    count = len(numbers)
    threads = []
    if has_threads:
        clone, clone3 = (each[column] for each in _CLONES)
        threads = [
            (_IF_EQUAL, 0, 2, clone),
            (_LOAD, 0, 0, _FLAGS_AT),
            (_IF_SET, count + 2, count + 1, _CLONE_THREAD),
            (_IF_EQUAL, count + 2, 0, clone3),
        ]
    lines = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 0, count + len(threads) + 1, MACHINES[machine]),
        (_LOAD, 0, 0, _NUMBER_AT),
        *threads,
        *((_IF_EQUAL, count - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _MISSING),
    ]
    body = b"".join(struct.pack("=HBBI", *line) for line in lines)
    kept = ctypes.create_string_buffer(body)
    program = struct.pack("@HP", len(lines), ctypes.addressof(kept))
    if ctypes.CDLL(None).prctl(_SECCOMP, _SECCOMP_FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        raise OSError("failed to install the system call filter")


def become_nobody() -> None:
    """Become a user who has nothing. Raises `OSError` if that cannot be."""
    os.setgroups([])
    for number in USERS:
        try:
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
        except OSError as error:
            # There are not so many users in this container.
            if error.errno != errno.EINVAL or number == USERS[-1]:
                raise
        else:
            return


def main() -> None:
    """Read what is asked for, and write what was found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    asked = json.loads(sys.stdin.buffer.readline())
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    if "copied" in asked:
        import_module("pyarrow.compute")
        import_module("pyarrow.csv")
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    # Arrow looks for time zones when it meets one.
    utc = pyarrow.scalar(0, pyarrow.timestamp("us", tz="UTC")).as_py()
    give_up(asked["cpu_seconds"])
    found: list[dict[str, Any] | None] = []
    for number, size in enumerate(asked["sizes"]):
        opened = io.BufferedReader(RemoteFile(number, size), 256 * 1024)
        try:
            file = parquet.ParquetFile(opened, pre_buffer=False)
            if "copied" in asked:
                for piece in copied_pieces(file, asked["copied"]):
                    say_bytes(piece)
                found.append({})
            else:
                found.append(first_rows(file, asked) if "rows" in asked else footer(file))
        except EOFError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, it is the file's
            found.append(None)
    del utc
    say({"found": found})


if __name__ == "__main__":
    main()
