"""How many rows Spark has written, as the tasks that wrote them counted: by an observation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.runtimes.spark.internals import connect_observation, is_of_connect

_ROWS: Final = "rows"
_SECONDS_MAX: Final = 30.0
"""What was observed is there a moment after the job; where it never comes, nobody waits."""


def counted(frame: DataFrame) -> tuple[DataFrame, Callable[[], int | None]]:
    """The frame, and what says how many rows it had when it was written; None if nobody knows."""
    observation: Any = _observation(frame)
    observed = frame.observe(observation, F.count(F.lit(1)).alias(_ROWS))

    def rows() -> int | None:
        found: list[int] = []
        asking = threading.Thread(
            target=lambda: found.append(observation.get[_ROWS]),
            name="penstock-count",
            daemon=True,
        )
        asking.start()
        asking.join(_SECONDS_MAX)
        return found[0] if found else None

    return observed, rows


def _observation(frame: DataFrame) -> object:
    return connect_observation() if is_of_connect(frame) else Observation()
