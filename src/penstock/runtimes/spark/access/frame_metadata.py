"""What is added to frames: the column `_partition` of what is read, and counts of written rows.

`tagged` looks `_partition` up by the path of the file. The path is a constant of a file, which
Spark knows before it opens any: a filter that needs nothing but `_partition`, in whatever
expression, is therefore applied by Spark to the list of files, and those that it drops are
never read. That holds for each use of a frame by itself, for SQL and for DataFrames, and needs
nothing private of Spark. Where rows are read, the look-up costs no more than the join with a
small table that it stands for: paths lie in buckets by their checksum, so that each row
compares one or two of them.

`observed` counts rows by an observation that stands right below the write: there each row comes
by once, in tasks of which Spark counts one attempt each. What was counted is there a moment
after the job; where it never comes, nobody waits, and whoever asked looks at the files instead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote
from zlib import crc32

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.runtimes.spark.internals import connect_observation, is_of_connect
from penstock.runtimes.spark.job_config import PARTITION

_KEPT: Final = "/~!$&'()*+,;=:@-._"
_BUCKETS: Final = "array<map<string,string>>"


def tagged(frame: DataFrame, paths: Sequence[tuple[str, str | None]]) -> DataFrame:
    """Rows with the tag of the file that they are from."""
    return frame.withColumn(PARTITION, _tag_of(F.col("_metadata.file_path"), paths))


def _tag_of(path: Column, paths: Sequence[tuple[str, str | None]]) -> Column:
    spelt = [(how, tag) for each, tag in paths for how in _spellings(each)]
    buckets: list[dict[str, str | None]] = [{} for _ in spelt]
    for how, tag in spelt:
        buckets[crc32(how.encode(errors="replace")) % len(buckets)][how] = tag
    # One literal, which Spark makes into a value once: a column of Python's for each path would
    # cost a call of the JVM each.
    table = F.from_json(F.lit(json.dumps(buckets)), _BUCKETS)
    place = (F.crc32(path) % len(buckets) + 1).cast("int")
    # A path that is spelt in a way that nobody thought of must not cost a row.
    unknown = F.raise_error(F.concat(F.lit("no partition is known for "), path))
    return F.coalesce(F.element_at(F.element_at(table, place), path), unknown.cast("string"))


def _spellings(path: str) -> set[str]:
    """How Spark may write the path of a file: versions differ."""
    scheme, _, rest = path.partition(":")
    plain = rest if not rest.startswith("///") else rest[2:]
    escaped = {quote(plain, safe=_KEPT), _escaped(plain), plain}
    heads = ("file:", "file://") if scheme == "file" else (f"{scheme}:",)
    return {head + each for head in heads for each in escaped}


def _escaped(plain: str) -> str:
    """As Java does it: what is not ASCII stays."""
    return "".join(each if ord(each) > 127 else quote(each, safe=_KEPT) for each in plain)


ROWS: Final = "rows"
_SECONDS_MAX: Final = 30.0

Counts = Callable[[], Mapping[str, int] | None]
"""Says what was counted, after the write; None if nobody knows."""


def observed(frame: DataFrame, counts: Mapping[str, Column]) -> tuple[DataFrame, Counts]:
    """The frame, and what says how many rows it had when it was written, and what else counts."""
    observation: Any = _observation(frame)
    more = [each.alias(name) for name, each in counts.items()]
    watched = frame.observe(observation, F.count(F.lit(1)).alias(ROWS), *more)

    def counted() -> Mapping[str, int] | None:
        found: list[Mapping[str, int]] = []
        asking = threading.Thread(
            target=lambda: found.append(observation.get), name="penstock-count", daemon=True
        )
        asking.start()
        asking.join(_SECONDS_MAX)
        return found[0] if found else None

    return watched, counted


def _observation(frame: DataFrame) -> object:
    return connect_observation() if is_of_connect(frame) else Observation()
