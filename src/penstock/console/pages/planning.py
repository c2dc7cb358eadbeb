"""The form of a backfill as what the API is asked, and the partitions that it names. Pure.

Partitions are a list of keys, days (each a key such as 2026-01-31), or ranges of numbers from a
start to an end by a step. A form travels in the address of the page that shows what it would do, so
the list has a bound; longer ones are for the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

from penstock.console.pages.acting import asked_as, lines_of
from penstock.dispatcher.backfills.plans import Kind, Plan
from penstock.dispatcher.wire.steering import BackfillAsk
from penstock.kernel.errors import InvalidInput

FIELDS: Final = (
    *("job", "by", "keys", "first_day", "last_day"),
    *("start", "end", "step", "concurrency"),
)
KEYS_CHARACTERS_MAX: Final = 20_000
DAYS_MAX: Final = 100_000
SHOWN_MAX: Final = 3
"""How many of the first keys are shown."""
_NAMES: Final = {
    "job": "The job",
    "keys": "A key",
    "start": "The start",
    "end": "The end",
    "step": "The step",
    "concurrency": "How many at a time",
    "request_id": "The request",
}


@dataclass(frozen=True, slots=True)
class Keys:
    """Some of the partitions of a plan: the first ones, and the last."""

    first: list[str]
    last: str
    """Empty if it is one of the first."""


def way_of(fields: Mapping[str, str]) -> str:
    """How a form names its partitions: `keys`, `days` or `ranges`."""
    by = fields.get("by", "")
    if by in ("keys", "days", "ranges"):
        return by
    if fields.get("first_day"):
        return "days"
    return "ranges" if fields.get("start") else "keys"


def backfill_ask(fields: Mapping[str, str], *, request_id: str | None = None) -> BackfillAsk:
    """What the API is asked; `InvalidInput` with a sentence about a field that is wrong."""
    said: dict[str, object] = {
        "job": fields.get("job", ""),
        "concurrency": fields.get("concurrency", ""),
        "request_id": request_id,
    }
    match way_of(fields):
        case "days":
            said["keys"] = _days(fields)
        case "ranges":
            for name, shown in (("start", "a start"), ("end", "an end"), ("step", "a step")):
                said[name] = fields.get(name, "")
                if not fields.get(name, "").strip():
                    raise InvalidInput(f"Ranges need {shown}.")
        case _:
            said["keys"] = _keys(fields.get("keys", ""))
    if not fields.get("job", "").strip():
        raise InvalidInput("Choose the job that computes the partitions.")
    return asked_as(BackfillAsk, said, names=_NAMES)


def _keys(text: str) -> list[str]:
    if len(text) > KEYS_CHARACTERS_MAX:
        raise InvalidInput(
            f"A list in the console has {KEYS_CHARACTERS_MAX:,} characters at most.",
            hint="Use `penstock backfill start JOB --keys-file FILE` for a longer one.",
        )
    found = lines_of(text)
    if not found:
        raise InvalidInput("Name at least one partition, one a line.")
    return found


def _days(fields: Mapping[str, str]) -> list[str]:
    first = _day(fields.get("first_day", ""), name="The first day")
    # One day alone is its own last.
    last = _day(fields.get("last_day", "").strip() or first.isoformat(), name="The last day")
    count = (last - first).days + 1
    if count < 1:
        raise InvalidInput("The first day has to be before the last; change one of them.")
    if count > DAYS_MAX:
        raise InvalidInput(f"That is {count:,} days, and {DAYS_MAX:,} are the most.")
    return [(first + timedelta(days=each)).isoformat() for each in range(count)]


def _day(text: str, *, name: str) -> date:
    try:
        return date.fromisoformat(text.strip())
    except ValueError:
        raise InvalidInput(f"{name} has to be a day, such as 2026-01-31.") from None


def keys_of(plan: Plan) -> Keys:
    """The first partitions of a plan, and the last."""
    if plan.kind is Kind.KEYS:
        first, last = list(plan.keys[:SHOWN_MAX]), plan.keys[-1]
    else:
        shown = range(min(SHOWN_MAX, plan.partitions))
        first = [range_key(plan.start, plan.end, plan.step, place=each) for each in shown]
        last = range_key(plan.start, plan.end, plan.step, place=plan.partitions - 1)
    return Keys(first, "" if plan.partitions <= SHOWN_MAX else last)


def range_key(start: int, end: int, step: int, *, place: int) -> str:
    """The key of the partition at a place of a plan of ranges."""
    begin = start + place * step
    return f"{begin}-{min(end, begin + step)}"
