"""How much a result is made of, as far as Spark knows before it computes anything.

What a task was given is known from manifests; what its query or function reads by itself is not. A
small result leaves Spark through the driver, so an unknown one must not be taken for small.
"""

from __future__ import annotations

from typing import Final

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from penstock.runtimes.spark.internals import optimized_plan, planned_bytes

_UNKNOWN: Final = 2**60
"""Spark says so much of what it knows nothing about: rows that were made in the driver."""
_LEAVES_MAX: Final = 500


def estimated_bytes(frame: DataFrame, *, enough: int) -> int:
    """At most how large a result is, or all that it reads; 0 if Spark does not know.

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
        sizes = (planned_bytes(leaves.apply(place)) for place in range(count))
        return sum(size for size in sizes if size < _UNKNOWN)
    except Py4JError:
        return 0
