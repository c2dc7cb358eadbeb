"""How much a result is made of, as far as Spark knows before it computes anything.

What a task was given is known from manifests; what its query or function reads by itself is not. A
small result leaves Spark through the driver, so an unknown one must not be taken for small: if it
turned out to be large it would be computed twice. Nothing is computed here, and no source is read.
"""

from __future__ import annotations

from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from penstock.runtimes.spark.cutting import UNKNOWN_BYTES
from penstock.runtimes.spark.internals import optimized_plan, planned_bytes

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
        leaves = optimized.collectLeaves()
        count = min(leaves.size(), _LEAVES_MAX)
        return min(UNKNOWN_BYTES, sum(_read_by(leaves.apply(place)) for place in range(count)))
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
    if leaf.nodeName() != "LogicalRDD":
        return False
    lines = leaf.rdd().toDebugString().strip().splitlines()
    return bool(lines) and _MADE_IN_DRIVER in lines[-1]
