"""How what a dispatcher says looks: ages instead of times, and tables that fit the terminal.

Programs get the answer itself, with the times in it. What others have written (reasons, names of
workers, locations) is shown on one line, and without what a terminal would obey.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import click
import msgspec

from penstock.cli.queue.showing import as_json, length, table
from penstock.dispatcher.wire.base import Answer

_CELL_CHARACTERS_MIN: Final = 12
_BETWEEN: Final = 2


def show_json(answer: Answer) -> None:
    """An answer for programs."""
    as_json(msgspec.to_builtins(answer))


def ago(at: datetime | None, *, now: float) -> str:
    """How long ago something was, or how soon it is; nothing for a time that there is not."""
    if at is None:
        return ""
    seconds = now - at.timestamp()
    # Their clocks are told to the second: what was just written may seem to come.
    return f"{length(max(0.0, seconds))} ago" if seconds > -2 else f"in {length(-seconds)}"


def line(text: str | None, *, characters_max: int = 200) -> str:
    """Somebody's words as one line that does nothing to a terminal."""
    shown = "".join(each if each.isprintable() else " " for each in text or "").strip()
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def fitted(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()
) -> None:
    """A table whose longest columns are cut to the width of the terminal, if it is one."""
    shown = [tuple(row) for row in rows]
    if sys.stdout.isatty():
        shown = cut([tuple(heads), *shown], columns=shutil.get_terminal_size().columns)[1:]
    table(heads, shown, numbers=numbers)


def cut(rows: Sequence[Sequence[str]], *, columns: int) -> list[tuple[str, ...]]:
    """The rows with their longest columns cut, so that a table of them has so many columns."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    room = columns - _BETWEEN * (len(widths) - 1)
    while sum(widths) > room and max(widths) > _CELL_CHARACTERS_MIN:
        longest = widths.index(max(widths))
        second = max([0, *widths[:longest], *widths[longest + 1 :]])
        least = max(_CELL_CHARACTERS_MIN, min(second, widths[longest] - 1))
        widths[longest] = max(least, widths[longest] - (sum(widths) - room))
    return [
        tuple(
            cell if len(cell) <= width else f"{cell[: width - 1]}…"
            for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    ]


def counted(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def progress(text: str) -> None:
    """Put a line in the place of the last one on standard error; nothing ends it."""
    # What went over the edge would stay.
    room = max(1, shutil.get_terminal_size().columns - 1)
    click.echo(f"\r\x1b[K{text[:room]}", err=True, nl=False)
