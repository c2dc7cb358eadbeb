"""What a job expects of its output, as its config says it. Pure; `expectations` looks at the data.

expect:
  - check: distance > 0              # every row has to satisfy it: null is not enough
  - check: arr_delay < 1440
    name: delays are below a day
    at_most: 0.1%                    # or a number of rows
  - unique: [carrier, flight, day]
  - rows: {min: 1, max: 100000}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from penstock.runtimes.base import Fault

_FORM: Final = (
    "Write {check: SQL that every row has to satisfy}, {unique: [columns]} or {rows: {min: 1}}."
)
_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s?%")
_KINDS: Final = ("check", "unique", "rows")
_EXPECTATIONS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A predicate that every row has to satisfy, but for some."""

    sql: str
    name: str = ""
    rows_max: int = 0
    share_max: Decimal | None = None
    """The part of all rows that may fail, 0 to 1; instead of `rows_max`."""

    @property
    def title(self) -> str:
        return self.name or self.sql

    def allows(self, *, failed: int, rows: int) -> bool:
        """Whether so many rows may fail."""
        return failed <= (self.rows_max if self.share_max is None else self.share_max * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """Columns of which no two rows have the same values."""

    columns: tuple[str, ...]
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or f"unique {', '.join(self.columns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How many rows there have to be."""

    least: int | None = None
    most: int | None = None
    name: str = ""

    @property
    def title(self) -> str:
        if self.name:
            return self.name
        least = "" if self.least is None else f"at least {self.least}"
        most = "" if self.most is None else f"at most {self.most}"
        return " and ".join(each for each in (least, most) if each) + " rows"


Expectation = Check | Unique | Rows


def expectation_faults(said: object) -> Iterator[Fault]:
    """What is wrong with what a config says under `expect`."""
    if not isinstance(said, list | tuple):
        yield Fault("config.expect", f"Write a list. {_FORM}")
        return
    if len(said) > _EXPECTATIONS_MAX:
        yield Fault("config.expect", f"There are more than {_EXPECTATIONS_MAX} of them.")
        return
    for place, each in enumerate(said):
        yield from _faults(f"config.expect[{place}]", each)


def read_expectations(said: Sequence[Mapping[str, Any]]) -> tuple[Expectation, ...]:
    """What is expected; nothing is wrong with it."""
    return tuple(_read(each) for each in said)


def _read(said: Mapping[str, Any]) -> Expectation:
    name = said.get("name", "")
    if "unique" in said:
        return Unique(columns=tuple(said["unique"]), name=name)
    if "rows" in said:
        return Rows(least=said["rows"].get("min"), most=said["rows"].get("max"), name=name)
    most = said.get("at_most", 0)
    share = _share(most)
    return Check(
        sql=said["check"], name=name, rows_max=0 if share is not None else most, share_max=share
    )


def _faults(where: str, said: object) -> Iterator[Fault]:
    kinds = [each for each in _KINDS if isinstance(said, Mapping) and each in said]
    if not isinstance(said, Mapping) or len(kinds) != 1:
        yield Fault(where, _FORM)
        return
    allowed = (kinds[0], "name", *(("at_most",) if kinds[0] == "check" else ()))
    for name in said:
        if name not in allowed:
            message = f"It has no field {name!r}; it has {', '.join(allowed)}."
            yield Fault(f"{where}.{name}", message)
    if not isinstance(said.get("name", ""), str):
        yield Fault(f"{where}.name", "Write a text.")
    value = said[kinds[0]]
    match kinds[0]:
        case "check":
            if not isinstance(value, str) or not value.strip():
                yield Fault(f"{where}.check", "Write a predicate in SQL, as in distance > 0.")
            yield from _at_most_faults(f"{where}.at_most", said.get("at_most", 0))
        case "unique":
            is_list = isinstance(value, list | tuple) and value
            if not is_list or not all(isinstance(name, str) and name for name in value):
                yield Fault(f"{where}.unique", "Write a list of columns, as in [carrier, day].")
        case _:
            yield from _rows_faults(f"{where}.rows", value)


def _at_most_faults(where: str, said: object) -> Iterator[Fault]:
    is_count = isinstance(said, int) and not isinstance(said, bool) and said >= 0
    share = _share(said)
    if not is_count and (share is None or share > 1):
        yield Fault(where, "Write how many rows may fail, as in 10, or a part of them, as in 0.1%.")


def _rows_faults(where: str, said: object) -> Iterator[Fault]:
    form = "Write {min: 1}, {max: 1000} or both."
    if not isinstance(said, Mapping) or not said or not set(said) <= {"min", "max"}:
        yield Fault(where, form)
        return
    for name, value in said.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            yield Fault(f"{where}.{name}", "Write a whole number.")
            return
    if said.get("min", 0) > said.get("max", said.get("min", 0)):
        yield Fault(where, "min is more than max.")


def _share(said: object) -> Decimal | None:
    found = _PERCENT.fullmatch(said) if isinstance(said, str) else None
    return None if found is None else Decimal(found[1]) / 100
