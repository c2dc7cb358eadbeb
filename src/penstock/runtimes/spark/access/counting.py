"""What Spark has written, as the tasks that wrote it counted: by an observation.

An observation stands right below the write: there each row comes by once, in tasks of which Spark
counts one attempt each. What was counted is there a moment after the job; where it never comes,
nobody waits, and whoever asked looks at the files instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.runtimes.spark.internals import connect_observation, is_of_connect

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
