"""Options that verbs share: `--json`, `--absolute`, pages of lists, durations with units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from penstock.kernel.units import AGE_MS_MAX, DAY_MS, in_units

DURATION: Final = "DURATION"
"""What it is called in usage lines."""


class _Duration(click.ParamType[float]):
    """So many units of time, from `least` to `most`."""

    name = "duration"
    _words: str
    _short: str
    _unit_ms: int

    def __init__(self, least: float = 0.0, most: float | None = None) -> None:
        self._least = least
        self._most = AGE_MS_MAX / self._unit_ms if most is None else most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        text = str(value).strip()
        try:
            found = in_units(text, unit_ms=self._unit_ms)
        except ValueError as error:
            said = str(error) or "is not a duration"
            self.fail(f"{text!r} {said}; without a unit it is {self._words}.", param, ctx)
        # Also what is no number at all.
        if not self._least <= found <= self._most:
            bounds = f"{self._least:g} to {self._most:,.0f} {self._short}"
            self.fail(f"{text!r} is not from {bounds}.", param, ctx)
        return found


class Seconds(_Duration):
    """Seconds; what has no unit is that."""

    _words, _short, _unit_ms = "seconds", "s", 1000


class Days(_Duration):
    """Days, or parts of one; what has no unit is days."""

    _words, _short, _unit_ms = "days", "days", DAY_MS


_ABSOLUTE: Final = "penstock.absolute"


def _note(context: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
    context.meta[_ABSOLUTE] = value


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
absolute_option = click.option(
    "--absolute",
    is_flag=True,
    expose_value=False,
    callback=_note,
    help="Show times in UTC instead of how long ago they were.",
)


def paged(*, limit: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--limit` and `--before`, for lists of what is numbered, the newest first."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        before = click.option(
            "--before",
            metavar="ID",
            type=click.IntRange(min=1),
            help="Only entries before this one (next page).",
        )
        most = click.option(
            "--limit",
            metavar="N",
            type=click.IntRange(1, 1000),
            default=limit,
            show_default=True,
            help="Maximum number of entries.",
        )
        return most(before(verb))

    return decorate


def is_absolute() -> bool:
    """Whether somebody wants to see times and not ages, in the verb that runs now."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_ABSOLUTE))
