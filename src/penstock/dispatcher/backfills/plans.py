"""What a backfill is asked for and what of it becomes a plan. Pure.

A plan names its partitions by ranges (from start to end by step: any number of them are one row) or
by a list of keys. A `rebuild` is planned by `deployment` and follows the events instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from penstock.dispatcher.wire.steering import BackfillAsk

PARTITIONS_MAX: Final = 1_000_000_000
KEY_BYTES_MAX: Final = 500


class Kind(StrEnum):
    """How the partitions of a plan are found."""

    RANGES = "ranges"
    KEYS = "keys"
    REBUILD = "rebuild"


class WhyRefused(StrEnum):
    """Why a backfill was not made, or not moved."""

    INVALID = "invalid"
    """What was asked for makes no sense."""
    UNKNOWN_JOB = "unknown job"
    """The DAG in force has no such job."""
    NOT_RUN = "not run"
    """The job computes no partitions."""
    OVER = "over"
    """The backfill is done or cancelled."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A call that changed nothing."""

    why: WhyRefused
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The partitions to compute."""

    kind: Kind
    partitions: int
    start: int = 0
    end: int = 0
    step: int = 1
    keys: tuple[str, ...] = ()

    @property
    def stored(self) -> dict[str, Any]:
        """What is stored of it; keys have a table of their own."""
        if self.kind is Kind.KEYS:
            return {"kind": self.kind.value}
        return {"kind": self.kind.value, "start": self.start, "end": self.end, "step": self.step}


def plan_of(ask: BackfillAsk) -> Plan | Refused:
    """The plan that a call asks for, or what is wrong with it."""
    has_range = any(value is not None for value in (ask.start, ask.end, ask.step))
    if ask.keys and has_range:
        return _invalid("A backfill has keys, or a start, an end and a step; leave one out.")
    if ask.keys:
        return _keys(ask.keys)
    if ask.start is None or ask.end is None or ask.step is None:
        return _invalid("A backfill needs keys, or a start, an end and a step; give one of them.")
    if ask.start >= ask.end:
        return _invalid(f"The start, {ask.start}, has to be lower than the end, {ask.end}.")
    partitions = -(-(ask.end - ask.start) // ask.step)
    if partitions > PARTITIONS_MAX:
        return _invalid(
            f"That is {partitions:,} partitions, and {PARTITIONS_MAX:,} are the most;"
            " make the step larger, or several backfills."
        )
    return Plan(
        kind=Kind.RANGES, partitions=partitions, start=ask.start, end=ask.end, step=ask.step
    )


def _keys(keys: list[str]) -> Plan | Refused:
    # Each once, in the order in which they were named.
    distinct = tuple(dict.fromkeys(keys))
    for key in distinct:
        if not _is_storable(key):
            return _invalid(
                f"The key of a partition has 1 to {KEY_BYTES_MAX} bytes that can be stored,"
                f" and {key[:50]!r} has not."
            )
    return Plan(kind=Kind.KEYS, partitions=len(distinct), keys=distinct)


def _is_storable(key: str) -> bool:
    try:
        return "\x00" not in key and 1 <= len(key.encode()) <= KEY_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _invalid(detail: str) -> Refused:
    return Refused(WhyRefused.INVALID, detail)
