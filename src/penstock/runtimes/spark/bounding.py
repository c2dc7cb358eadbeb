"""A bound on what leaves Spark through the driver: what is beyond it is never gathered.

Imports PySpark.

Spark gathers all rows of a partition in the memory of the task that makes them, before anything
leaves it, and `spark.driver.maxResultSize` looks only at what has left. What a task reads says
little about what it makes: an `explode` makes millions of rows of a few. So the rows are measured
by the plan itself, in the expressions of Spark, on a JVM of ours and on a Connect server alike. The
row that goes beyond the bound fails the Spark job at once, and whoever asked takes the other way.

Expressions know no sums over rows, but they know the place of a row in its partition. A row passes
if its place times its width is within the bound. Rows of one width are cut exactly there; rows of
any widths, in any order, have at most `bytes_max * (1 + ln(rows))` together. A wide row after very
many narrow ones is refused too early, which costs time and nothing else. What all partitions have
together is bounded by `spark.driver.maxResultSize`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, types

from penstock.runtimes.spark.columns import quoted
from penstock.runtimes.spark.settings import SparkSettings, heap_bytes

_BEYOND: Final = "PENSTOCK_RESULT_BEYOND_BOUND"
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


def bounded(frame: DataFrame, *, bytes_max: int) -> DataFrame:
    """The frame, whose job fails as soon as a partition has more than about so much."""
    fixed, varying = 0, list[str]()
    for field in frame.schema.fields:
        width, more = _width(quoted(field.name), field.dataType)
        fixed += width
        varying += more
    width_of_row = " + ".join([f"CAST({max(1, fixed)} AS BIGINT)", *varying])
    # Divided, because a product of the two may have no place in 64 bits. One text, because each
    # expression that is put together here would cost a call of the JVM.
    is_within = f"{width_of_row} <= CAST({bytes_max} AS BIGINT) / {_PLACE}"
    return frame.where(f"assert_true({is_within}, '{_BEYOND}') IS NULL")


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
