"""What a limit allows, as its user says it. Pure."""

from __future__ import annotations

import math

import msgspec

from penstock.kernel.errors import InvalidInput

CONCURRENCY_MAX = 1_000_000
SECONDS_MAX = 366 * 86_400.0


class Definition(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many tasks may run at a time, or start in a time, or both. None is no such limit."""

    concurrency: int | None = None
    rate: float | None = None
    """Starts in `per_seconds`."""
    per_seconds: float = 1.0
    burst: int = 0
    """How many may start at once; 0 where there is no rate."""

    @property
    def starts_a_second(self) -> float:
        """The rate by the second. Only for one that has a rate."""
        assert self.rate is not None, "this limit has no rate"
        return self.rate / self.per_seconds


def definition(
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    per_seconds: float = 1.0,
    burst: int | None = None,
) -> Definition:
    """A definition, or `InvalidInput`. Where no burst is given, it is the rate, and at least 1."""
    if concurrency is None and rate is None:
        raise InvalidInput(
            "A limit needs a concurrency, a rate, or both.",
            hint="Write concurrency=5, or rate=10 with per_seconds=1.",
        )
    if concurrency is not None:
        _check_whole("concurrency", concurrency)
    if rate is None:
        if burst is not None:
            raise InvalidInput("A burst belongs to a rate.", hint="Give a rate, or leave it out.")
        return Definition(concurrency=concurrency)
    _check_length("rate", rate, most=float(CONCURRENCY_MAX))
    _check_length("per_seconds", per_seconds, most=SECONDS_MAX)
    if burst is not None:
        _check_whole("burst", burst)
    if not 1 / SECONDS_MAX <= rate / per_seconds <= CONCURRENCY_MAX:
        raise InvalidInput(f"A rate of {rate:g} in {per_seconds:g} s is out of all proportion.")
    return Definition(
        concurrency=concurrency,
        rate=float(rate),
        per_seconds=float(per_seconds),
        burst=max(1, int(rate)) if burst is None else burst,
    )


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= CONCURRENCY_MAX:
        raise InvalidInput(
            f"The {name} of a limit must be a whole number from 1 to {CONCURRENCY_MAX:,},"
            f" not {value!r}."
        )
    if value == 0:
        raise _zero(name)


def _check_length(name: str, value: object, *, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(str(value)) if is_number else math.nan
    if not 0 <= number <= most:
        raise InvalidInput(
            f"The {name} of a limit must be a positive number up to {most:,.0f}, not {value!r}."
        )
    if value == 0:
        raise _zero(name)


def _zero(name: str) -> InvalidInput:
    return InvalidInput(
        f"A limit with a {name} of zero would let nothing run.",
        hint="To let nothing run, pause: 'penstock queue pause', of the whole queue or a --type.",
    )
