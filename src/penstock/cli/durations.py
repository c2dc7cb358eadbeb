"""Lengths of time as they are typed: a number of seconds, or `90s`, `15m`, `1h30m`, `30d`."""

from __future__ import annotations

from typing import Final

import click

from penstock.dispatcher.dag.units import AGE_MS_MAX, age_ms

DURATION: Final = "DURATION"
"""What it is called in usage lines."""


class Seconds(click.ParamType[float]):
    """Seconds from `least` to `most`."""

    name = "duration"

    def __init__(self, least: float = 0.0, most: float = AGE_MS_MAX / 1000) -> None:
        self._least = least
        self._most = most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, int | float):
            return float(value)
        text = str(value).strip()
        try:
            seconds = _number(text) if text[-1:].isdigit() else age_ms(text) / 1000
        except ValueError as error:
            said = str(error) or "is not a duration"
            self.fail(f"{text!r} {said}; without a unit it is seconds.", param, ctx)
        # Also what is no number at all.
        if not self._least <= seconds <= self._most:
            self.fail(f"{text!r} is not from {self._least:g} to {self._most:,.0f} s.", param, ctx)
        return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError("is not a duration; write 90s, 15m, 12h, 1h30m or 30d") from error
