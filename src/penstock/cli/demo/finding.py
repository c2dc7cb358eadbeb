"""What the flights say: when to fly from which airport, from what the pipeline has published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

AIRPORTS: Final = {"EWR": "Newark", "JFK": "JFK", "LGA": "LaGuardia"}
_FLIGHTS_A_DAY_MIN: Final = 3


@dataclass(frozen=True, slots=True)
class Share:
    """How many flights left, and how many of those a quarter of an hour late or more."""

    left: int
    late: int

    @property
    def late_share(self) -> float:
        return self.late / self.left if self.left else 0.0

    @property
    def percent(self) -> str:
        return f"{100 * self.late_share:.0f} %"


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of Parquet files."""
    # Imported here: only those who run the demo need to have it.
    parquet = import_module("pyarrow.parquet")
    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += parquet.read_table(path, partitioning=None).to_pylist()
    return rows


def shares(
    rows: Iterable[Mapping[str, Any]], by: Callable[[Mapping[str, Any]], Hashable]
) -> dict[Any, Share]:
    """How punctual flights were, by something that each row says."""
    left: Counter[Hashable] = Counter()
    late: Counter[Hashable] = Counter()
    for row in rows:
        left[by(row)] += row["flights"] - row["cancelled"]
        late[by(row)] += row["late"]
    return {key: Share(count, late[key]) for key, count in left.items()}


def finding(rows: Sequence[Mapping[str, Any]], *, days: int) -> list[str]:
    """What a traveller would want to know, in sentences."""
    by_hour = shares(rows, lambda row: (row["origin"], row["hour"]))
    busy = {key: each for key, each in by_hour.items() if each.left >= _FLIGHTS_A_DAY_MIN * days}
    if not busy:
        return []
    ranked = sorted(busy, key=lambda key: (busy[key].late_share, key))
    best, worst = ranked[0], ranked[-1]
    found = [
        f"Of the flights that were to leave {_place(worst)}, {busy[worst].percent} left at least",
        f"15 minutes late; of those that were to leave {_place(best)}, {busy[best].percent} did.",
    ]
    weather = shares(rows, lambda row: bool(row["is_wet"]))
    if True in weather and False in weather:
        found.append(
            f"In rain or snow it was {weather[True].percent} of all flights,"
            f" in dry hours {weather[False].percent}."
        )
    return found


def _place(key: tuple[str, int]) -> str:
    origin, hour = key
    return f"{AIRPORTS.get(origin, origin)} between {hour}:00 and {hour + 1}:00"
