"""Durations, counts and sizes as people write them: `30s`, `1h30m`, `250`, `10k`, `16MiB`.

A duration is whole milliseconds, so that it is compared and hashed exactly. `duration_text` is
the one way in which a duration is written, so two files that mean the same have the same
canonical form. Pure functions; a text that is neither is a `ValueError`, which `sections` turns
into a problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeVar

DURATION_MS_MAX: Final = 366 * 86_400_000
"""A year, the longest time that anything in a DAG may take."""
AGE_MS_MAX: Final = 36_525 * 86_400_000
"""A century, the longest time that anything may be kept."""
DAY_MS: Final = 86_400_000
COUNT_MAX: Final = 10**12
WAIT_SECONDS_MAX: Final = 50.0
"""How long a request may wait for work: less than proxies do, as a rule a minute."""

DURATION_HOW: Final = "write a number with a unit, as in 500ms, 30s, 5m, 2h or 1h30m"
COUNT_HOW: Final = "write a whole number, as in 250, 10k or 2M"

_UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_PART = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?(ms|[dhms])")
_DURATION = re.compile(r"(?:[0-9]{1,15}(?:\.[0-9]{1,6})?(?:ms|[dhms])){1,5}")
_COUNT = re.compile(r"([0-9]{1,15}|[0-9]{1,3}(?:_[0-9]{3}){1,5})([kM]?)")
_SIZES: Final = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_SIZE = re.compile(r"([0-9]{1,9})(GiB|MiB|KiB)")
_MEMORY: Final = {
    "": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
_MEMORY_SIZE: Final = re.compile(r"([0-9]{1,15})\s?([A-Za-z]*)")
_SCALES: Final = {"": 1, "k": 1000, "M": 1_000_000}

Number = TypeVar("Number", int, float)


def bounded(
    parse: Callable[[str], Number],
    *,
    least: Number,
    most: Number | None = None,
    show: Callable[[Number], str],
) -> Callable[[str], Number]:
    """The same, for numbers within bounds."""

    def parse_bounded(text: str) -> Number:
        value = parse(text)
        if value < least:
            raise ValueError(f"is too small; write at least {show(least)}")
        if most is not None and value > most:
            raise ValueError(f"is too large; write at most {show(most)}")
        return value

    return parse_bounded


def duration_ms(text: str) -> int:
    """The milliseconds of a duration; the units go from large to small, each once."""
    total = _milliseconds(text)
    if total > DURATION_MS_MAX:
        raise ValueError("is longer than a year; write a shorter one")
    return total


def age_ms(text: str) -> int:
    """The milliseconds of a duration for which something is kept."""
    total = _milliseconds(text)
    if total > AGE_MS_MAX:
        raise ValueError("is longer than a century; write a shorter one")
    return total


def in_units(text: str, *, unit_ms: int = 1000) -> float:
    """A length of time in seconds, or in units of so much: a number of these, or a duration."""
    text = text.strip()
    if not text[-1:].isdigit():
        return age_ms(text) / unit_ms
    try:
        return float(text)
    except ValueError as error:
        raise ValueError("is not a duration; write 90s, 15m, 12h, 1h30m or 30d") from error


def _milliseconds(text: str) -> int:
    if not _DURATION.fullmatch(text):
        raise ValueError(f"is not a duration; {DURATION_HOW}")
    units = list(_UNITS_MS)
    total, last = 0, -1
    for whole, fraction, unit in _PART.findall(text):
        if units.index(unit) <= last:
            raise ValueError("has its units in the wrong order; go from large to small, each once")
        last = units.index(unit)
        scaled, rest = divmod(int(whole + fraction) * _UNITS_MS[unit], 10 ** len(fraction))
        if rest:
            raise ValueError("is finer than a millisecond; write whole milliseconds")
        total += scaled
    return total


def duration_text(milliseconds: int) -> str:
    """The shortest exact way to write a duration."""
    parts = []
    for unit, size in _UNITS_MS.items():
        whole, milliseconds = divmod(milliseconds, size)
        if whole:
            parts.append(f"{whole}{unit}")
    return "".join(parts) or "0s"


def byte_count(text: str) -> int:
    """The bytes of a size, as in 16MiB."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("is not a size; write a number with a unit, as in 64KiB, 16MiB or 1GiB")
    return int(found[1]) * _SIZES[found[2]]


def memory_bytes(said: object) -> int | None:
    """How many bytes of memory a text such as 2GiB or 500MB means; None if it means none."""
    found = _MEMORY_SIZE.fullmatch(str(said)) if isinstance(said, str | int) else None
    if found is None or isinstance(said, bool) or found[2] not in _MEMORY:
        return None
    return int(found[1]) * _MEMORY[found[2]] or None


def bytes_text(size: int) -> str:
    """The shortest exact way to write a size of whole KiB."""
    unit = next(unit for unit, each in _SIZES.items() if size % each == 0)
    return f"{size // _SIZES[unit]}{unit}"


def count(text: str) -> int:
    """A whole number that may have a `k` (thousand) or an `M` (million) behind it."""
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"is not a count; {COUNT_HOW}")
    total = int(found[1]) * _SCALES[found[2]]
    if total > COUNT_MAX:
        raise ValueError(f"is more than {COUNT_MAX:,}; write a smaller number")
    return total
