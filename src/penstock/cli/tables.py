"""Tables for people: aligned, and as wide as the terminal at most.

In a pipe or a file nothing is cut, so that what reads it has everything. On a terminal the longest
columns give way first; numbers, and columns that somebody has to copy whole, are never cut. Where
that is not enough whole columns are left out, those first that their verb can do without, and it is
said which: lines that the terminal breaks are no table.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import click

from penstock.cli.terminal import harmless

_COLOURS: Final = {
    "succeeded": "green",
    "failed": "red",
    "expired": "red",
    "retrying": "yellow",
    "cancelled": "yellow",
    "running": "cyan",
    # Of pipelines:
    "completed": "green",
    "done": "green",
    "dead": "red",
    "paused": "yellow",
}
_CELL_CHARACTERS_MIN: Final = 12
"""No column is cut below this, so that what is short stays whole."""
_CELL_CHARACTERS_LEAST: Final = 6
"""To what a long column is cut if nothing else helps."""
_HEAD_CHARACTERS_MIN: Final = 4
_BETWEEN: Final = 2


def status(word: str, *, width: int = 0) -> str:
    """A status in its colour."""
    return click.style(f"{word:<{width}}", fg=_COLOURS.get(word))


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    whole: Iterable[int] = (),
    least: Sequence[int] = (),
) -> None:
    """An aligned table; a column named `status` is coloured, those in `numbers` go to the right.

    Those in `numbers` and `whole` are never cut. Those in `least` are left out where there is no
    room, the first first, before others are cut to what cannot be read any more.
    """
    shown = [tuple(heads), *(tuple(map(_cell, row)) for row in rows)]
    right = frozenset(numbers)
    left_out: list[str] = []
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        copied = frozenset(whole)
        uncut = right | copied
        some = _worth_showing(shown, columns=columns)
        kept = _with_room(shown, some, columns=columns, uncut=uncut, copied=copied, least=least)
        left_out = [heads[place] for place in some if place not in kept]
        right = frozenset(kept.index(place) for place in right if place in kept)
        shown = cut(*_chosen(shown, kept, uncut), columns=columns)
    _show(shown, right)
    if left_out:
        named = ", ".join(filter(None, left_out))
        click.echo(f"note: the terminal has no room for: {named}.", err=True)


def _cell(text: str) -> str:
    """A cell is one line."""
    return harmless(text).replace("\n", " ").replace("\t", " ")


def _show(shown: Sequence[Sequence[str]], right: Collection[int]) -> None:
    heads, widths = shown[0], _widths(shown)
    for number, row in enumerate(shown):
        cells = []
        for column, cell in enumerate(row):
            width = widths[column]
            aligned = f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            if column == len(row) - 1:
                aligned = aligned.rstrip()
            if number == 0:
                aligned = click.style(aligned, bold=True)
            elif heads[column] == "status":
                aligned = status(cell, width=width)
            cells.append(aligned)
        click.echo("  ".join(cells).rstrip())


def _worth_showing(rows: Sequence[Sequence[str]], *, columns: int) -> list[int]:
    """Which columns are shown: all, or if they do not fit, those that have something in them."""
    every = list(range(len(rows[0])))
    if _width(_widths(rows)) <= columns:
        return every
    return [place for place in every if any(row[place] for row in rows[1:])] or every


def _with_room(
    rows: Sequence[Sequence[str]],
    kept: Sequence[int],
    *,
    columns: int,
    uncut: Collection[int],
    copied: Collection[int],
    least: Sequence[int],
) -> list[int]:
    """Which of the columns are shown: as many as fit, the first and those that are copied always.

    Where what is copied does not fit by itself, nothing would, and everything is shown.
    """

    def fits(places: Sequence[int], characters: int) -> bool:
        chosen, whole = _chosen(rows, places, uncut)
        return _width(_narrowed(chosen, columns, whole, least=characters)) <= columns

    found = list(kept)
    for place in least:
        if place in found and not fits(found, _CELL_CHARACTERS_MIN):
            found.remove(place)
    needed = [place for place in found if place == found[0] or place in copied]
    if not fits(needed, _CELL_CHARACTERS_LEAST):
        return list(kept)
    while not fits(found, _CELL_CHARACTERS_LEAST):
        others = [place for place in found[1:] if place not in copied]
        found.remove(max(others, key=lambda place: (place not in uncut, place)))
    return found


def _chosen(
    rows: Sequence[Sequence[str]], places: Sequence[int], uncut: Collection[int]
) -> tuple[list[tuple[str, ...]], list[int]]:
    """The rows with some of their columns, and which of those are never cut."""
    chosen = [tuple(row[place] for place in places) for row in rows]
    return chosen, [new for new, place in enumerate(places) if place in uncut]


def cut(
    rows: Sequence[Sequence[str]], whole: Collection[int] = (), *, columns: int
) -> list[tuple[str, ...]]:
    """The rows, of which the first has the heads, cut so that a table of them has so many columns.

    The longest columns give way first, then heads that are longer than what is below them, then
    the longest again. What is short is never cut: then the table is wider than the terminal.
    """
    widths = _narrowed(rows, columns, whole, least=_CELL_CHARACTERS_LEAST)
    return [
        tuple(
            cell if len(cell) <= width else f"{cell[: width - 1]}…"
            for cell, width in zip(row, widths, strict=True)
        )
        for row in rows
    ]


def _narrowed(
    rows: Sequence[Sequence[str]], columns: int, whole: Collection[int], *, least: int
) -> list[int]:
    """How wide the columns are then; those that are long at least so wide."""
    widths = _widths(rows)
    long = [
        place
        for place, width in enumerate(_widths(rows[1:] or rows))
        if width > _CELL_CHARACTERS_MIN and place not in whole
    ]
    _narrow(widths, long, columns, _CELL_CHARACTERS_MIN)
    for place, width in enumerate(_widths(rows[1:])):
        over = max(0, _width(widths) - columns)
        lowest = max(width, min(_HEAD_CHARACTERS_MIN, widths[place]))
        widths[place] = max(min(widths[place], lowest), widths[place] - over)
    _narrow(widths, long, columns, least)
    return widths


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*rows, strict=True)]


def _width(widths: Sequence[int]) -> int:
    """How wide a table of such columns is."""
    return sum(widths) + _BETWEEN * (len(widths) - 1)


def _narrow(widths: list[int], places: Sequence[int], columns: int, least: int) -> None:
    """Take from the longest of these columns until all fit, or none is longer than the least."""
    while places and _width(widths) > columns:
        longest = max(places, key=lambda place: widths[place])
        if widths[longest] <= least:
            return
        second = max([0, *(widths[place] for place in places if place != longest)])
        lowest = max(least, min(second, widths[longest] - 1))
        widths[longest] = max(lowest, widths[longest] - (_width(widths) - columns))
