"""How large a result is: estimated before, bounded while it leaves Spark, and cut into files.

What a task was given is known from manifests; what its query or function reads by itself is
not. A small result leaves Spark through the driver, so an unknown one must not be taken for
small: if it turned out to be large it would be computed twice. `estimated_bytes` computes
nothing and reads no source.

Spark gathers all rows of a partition in the memory of the task that makes them, before anything
leaves it, and `spark.driver.maxResultSize` looks only at what has left. What a task reads says
little about what it makes: an `explode` makes millions of rows of a few. So `bounded` measures
rows by the plan itself, in the expressions of Spark, on a JVM of ours and on a Connect server
alike. The row that goes beyond the bound fails the Spark job at once, and whoever asked takes
the other way. Expressions know no sums over rows, but they know the place of a row in its
partition. A row passes if its place times its width is within the bound. Rows of one width are
cut exactly there; rows of any widths, in any order, have at most `bytes_max * (1 + ln(rows))`
together. A wide row after very many narrow ones is refused too early, which costs time and
nothing else. What all partitions have together is bounded by `spark.driver.maxResultSize`.

Files follow the result and not what was read: Spark cuts by its own tasks first, and small
files (`splinters`) are put together and large ones (`oversized`) cut afterwards, from the files
(`output_writer`). With
`sort_by` every number here is made of the data alone: of the bytes that were given, and of
those that files have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, types
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.manifest import File, sums
from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.internals import (
    gather,
    optimized_plan,
    plan_leaves,
    planned_bytes,
    rdd_of_leaf,
)
from penstock.runtimes.spark.settings import SparkSettings, heap_bytes

UNKNOWN_BYTES: Final = 2**60
"""The size of what nobody has measured."""
_CUTS_OF_UNKNOWN: Final = 32
_SHARES_MAX: Final = 4
"""So many tasks write side by side what would fit into one file."""
_SPLINTER: Final = 8
"""A file is a splinter below this part of the target size."""
_FEWER: Final = 4
"""Splinters are put together if so many times fewer files hold them."""
_FAR: Final = 4
"""A file is cut again if it is so many times larger than it should be."""


def files_for(size: int, *, file_bytes: int) -> int:
    """How many files hold so many bytes; of an unknown size, how many cuts are worth a try."""
    if size >= UNKNOWN_BYTES:
        return _CUTS_OF_UNKNOWN
    shares = size * _SHARES_MAX // file_bytes
    return max(1, math.ceil(size / file_bytes), min(_SHARES_MAX, shares))


def splinters(files: Sequence[File], *, file_bytes: int) -> tuple[File, ...]:
    """The files that are better put together; none if that would make few files fewer."""
    small = tuple(each for each in files if each.bytes * _SPLINTER < file_bytes)
    needed = files_for(sum(each.bytes for each in small), file_bytes=file_bytes)
    return small if len(small) >= _FEWER * needed else ()


def oversized(files: Sequence[File], *, file_bytes: int) -> tuple[File, ...]:
    """The files that are better cut."""
    return tuple(each for each in files if each.bytes > _FAR * file_bytes)


def misfits(files: Sequence[File], *, file_bytes: int, is_sorted: bool = False) -> tuple[File, ...]:
    """The files that are better written again; all that are sorted or none of them.

    Those are too large if they are so on average: equal rows are in one, however often it is cut.
    """
    small = splinters(files, file_bytes=file_bytes)
    if is_sorted:
        is_far = sums(files).bytes > _FAR * file_bytes * len(files)
        return tuple(files) if small or is_far else ()
    return (*small, *oversized(files, file_bytes=file_bytes))


OUR_SOURCES: Final = "penstock_"
"""How the names of data sources begin that read what a task was given: its size is known."""
_MADE_IN_DRIVER: Final = "ParallelCollectionRDD"
_LEAVES_MAX: Final = 500


def estimated_bytes(frame: DataFrame, *, enough: int) -> int:
    """At most how large a result is, or all that it reads; `UNKNOWN_BYTES` if it reads what Spark
    has no size of, and 0 where Spark cannot be asked.

    Joins multiply what Spark expects, so beyond `enough` only what is read counts.
    """
    try:
        optimized = optimized_plan(frame)
        if optimized is None:
            return 0  # A Connect server would have to be asked for a plan, as a text.
        whole = planned_bytes(optimized)
        if whole <= enough:
            return whole
        leaves = plan_leaves(optimized, leaves_max=_LEAVES_MAX)
        return min(UNKNOWN_BYTES, sum(map(_read_by, leaves)))
    except Py4JError:
        return 0


def _read_by(leaf: Any) -> int:
    size = planned_bytes(leaf)
    if size < UNKNOWN_BYTES:
        return size
    return 0 if _is_given(leaf) or _is_made_in_driver(leaf) else UNKNOWN_BYTES


def _is_given(leaf: Any) -> bool:
    return f" {OUR_SOURCES}" in leaf.toString()


def _is_made_in_driver(leaf: Any) -> bool:
    """Whether a leaf is rows that a function has handed over, which the driver has had already."""
    lines = rdd_of_leaf(leaf).strip().splitlines()
    return bool(lines) and _MADE_IN_DRIVER in lines[-1]


_BEYOND: Final = "PENSTOCK_RESULT_BEYOND_BOUND"
_BYTES: Final = "_penstock_bytes"
_PLACE: Final = f"((monotonically_increasing_id() & {(1 << 33) - 1}) + 1)"
"""The place of a row in its partition, from 1: the lower 33 bits of its id."""
_WIDTHS: Final[dict[type[types.DataType], int]] = {
    types.BooleanType: 1,
    types.ByteType: 1,
    types.ShortType: 2,
    types.IntegerType: 4,
    types.FloatType: 4,
    types.DateType: 4,
    types.DecimalType: 16,
}
_WIDTH: Final = 8
"""Of other types: numbers, times, and the offsets of what has no width of its own."""
_SHARE: Final = 8
"""A JVM that is the executor too gathers with all its cores: together an eighth of its heap."""


def gathered_bytes_max(settings: SparkSettings, *, cores: int) -> int:
    """How much one task of Spark may gather."""
    if not settings.is_one_jvm:
        return settings.arrow_bytes_max
    room = heap_bytes(settings.driver_memory) // (_SHARE * max(1, cores))
    return min(settings.arrow_bytes_max, room)


def collected_bytes_max(settings: SparkSettings) -> int:
    """How much the tasks of Spark may gather of one result together: all that run at once, an
    eighth of the heap. Of cores it knows nothing."""
    room = heap_bytes(settings.driver_memory) // (_SHARE * settings.parallel)
    return settings.arrow_bytes_max if settings.is_connect else min(settings.arrow_bytes_max, room)


def bounded(frame: DataFrame, *, bytes_max: int) -> DataFrame:
    """The frame, whose job fails as soon as a partition has more than about so much."""
    # Divided, because a product of the two may have no place in 64 bits. One text, because each
    # expression that is put together here would cost a call of the JVM.
    is_within = f"{_sum(*_row(frame))} <= CAST({bytes_max} AS BIGINT) / {_PLACE}"
    return frame.where(f"assert_true({is_within}, '{_BEYOND}') IS NULL")


def gathered(
    frame: DataFrame,
    added: Callable[[DataFrame], DataFrame] = lambda frame: frame,
    *,
    task_bytes_max: int,
    bytes_max: int,
) -> Any:
    """The rows of a frame as a table, with the columns that are `added`.

    Raises what `is_beyond` knows, if a task of Spark or all of them make more.
    """
    fixed, varying = _row(frame)
    measured = bounded(frame, bytes_max=task_bytes_max)
    if varying:
        measured = measured.select("*", F.expr(_sum(fixed, varying)).alias(_BYTES))
    place, total = len(frame.columns), 0

    def seen(batch: Any) -> None:
        nonlocal total
        total += (pc.sum(batch.column(place)).as_py() or 0) if varying else batch.num_rows * fixed
        if total > bytes_max:
            raise OverflowError(_BEYOND)

    table = gather(added(measured), seen)
    return table.remove_column(place) if varying else table


def total_bytes(frame: DataFrame) -> int:
    """How much `gathered` would count; all rows are read."""
    said = F.sum(F.expr(_sum(*_row(frame))))
    return int(frame.agg(said).collect()[0][0] or 0)


def least_bytes(frame: DataFrame) -> int:
    """What a row has at least."""
    return _row(frame)[0]


def _row(frame: DataFrame) -> tuple[int, list[str]]:
    """The bytes of a row: those that all have, and what has to be asked of each, in SQL."""
    widths = [_width(quoted(field.name), field.dataType) for field in frame.schema.fields]
    return max(1, sum(each[0] for each in widths)), [one for each in widths for one in each[1]]


def _sum(fixed: int, varying: Sequence[str]) -> str:
    return " + ".join([f"CAST({fixed} AS BIGINT)", *varying])


def is_beyond(error: BaseException) -> bool:
    """Whether a result was larger than its bound."""
    return _BEYOND in str(error)


def _width(value: str, said: types.DataType, depth: int = 0) -> tuple[int, list[str]]:
    """The bytes of a value: those that all have, and what has to be asked of each, in SQL."""
    match said:
        case types.StringType() | types.BinaryType():
            return _WIDTH, [f"CAST(coalesce(octet_length({value}), 0) AS BIGINT)"]
        case types.StructType():
            widths = [
                _width(f"{value}.{quoted(each.name)}", each.dataType, depth) for each in said.fields
            ]
            return sum(each[0] for each in widths), [one for each in widths for one in each[1]]
        case types.ArrayType():
            return _WIDTH, [_width_of_all(value, said.elementType, depth)]
        case types.MapType():
            keys = _width_of_all(f"map_keys({value})", said.keyType, depth)
            return _WIDTH, [keys, _width_of_all(f"map_values({value})", said.valueType, depth)]
    return _WIDTHS.get(type(said), _WIDTH), []


def _width_of_all(values: str, said: types.DataType, depth: int) -> str:
    """The bytes of an array's elements."""
    element = f"e{depth}"
    fixed, varying = _width(element, said, depth + 1)
    if not varying:
        # Of an array that is null, the size is null, or by an old habit of Spark's -1.
        return f"CAST(greatest(coalesce(size({values}), 0), 0) AS BIGINT) * {fixed}"
    each = " + ".join([f"t{depth}", *varying, str(fixed)])
    total = f"aggregate({values}, CAST(0 AS BIGINT), (t{depth}, {element}) -> {each})"
    return f"coalesce({total}, CAST(0 AS BIGINT))"
