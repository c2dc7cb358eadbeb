"""What may come with an event: a JSON object within bounds. Pure.

A payload is small and is told with the event; what is large belongs into a file, of which the
payload tells. It has to come out of the database as it went in, so it has no NUL, which Postgres
cannot store, and no number that it would write out at great length. Called by routing, for every
event, and by the webhook source, which answers its callers itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Any, Final

import msgspec

PAYLOAD_BYTES_MAX: Final = 64 * 1024
"""As JSON without spaces, in UTF-8, with its numbers in full: 1e20 has 21 digits."""
DEPTH_MAX: Final = 64
DIGITS_MAX: Final = 320
"""How many a number may have: as many as the largest one of a floating-point number, and a few."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a payload, as a sentence."""

    why: str
    is_too_large: bool = False


def payload_fault(payload: Mapping[str, Any]) -> Fault | None:
    """Why an event cannot have this payload; None if it can."""
    try:
        size = len(msgspec.json.encode(payload))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return Fault("A payload is what JSON can say, in UTF-8.")
    if size > PAYLOAD_BYTES_MAX:
        return _too_large(size)
    level: list[Any] = [payload]
    for _ in range(DEPTH_MAX):
        if why := next(filter(None, map(_wrong, level)), ""):
            return Fault(why)
        size += sum(_longer_by(each) for each in level if isinstance(each, float))
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return _too_large(size) if size > PAYLOAD_BYTES_MAX else None
    return Fault(f"A payload has {DEPTH_MAX} levels at most.")


def _inside(value: object) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else ()


def _wrong(value: object) -> str:
    """What is wrong with a value, whatever it holds; empty if nothing is."""
    if isinstance(value, str) and "\0" in value:
        return "A payload has no NUL character, for that cannot be stored."
    if isinstance(value, float) and not isfinite(value):
        return "A payload has no number that is not finite, for JSON has none."
    if isinstance(value, int) and abs(value) >= 10**DIGITS_MAX:
        return f"A number of a payload has {DIGITS_MAX} digits at most."
    return ""


def _too_large(size: int) -> Fault:
    return Fault(
        f"A payload has {PAYLOAD_BYTES_MAX:,} bytes at most as JSON, not {size:,}; what is larger"
        " goes into a file, of which the payload tells.",
        is_too_large=True,
    )


def _longer_by(number: float) -> int:
    """How many more characters a number has in full."""
    short = repr(number)
    return max(0, len(f"{Decimal(short):f}") - len(short))
