"""Text for people: tables that fit the terminal, progress bars, escaped control characters.

What reaches a terminal, a pipe or a file passes `guarded`: control characters of somebody else's
text are shown, not obeyed. Tables are aligned and cut; a progress bar is one line of standard
error, and nothing where nobody looks.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import TracebackType
from typing import Any, Final, Self, TextIO, cast

import click

_OBEYED: Final = (
    # Controls but tab and line feed, the marks that turn the order of characters, other line ends,
    # and halves of characters, which no encoding takes.
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
)
_ANY: Final = re.compile(f"[{_OBEYED}]")
_OURS: Final = re.compile(rf"(\x1b\[(?:0|1|3[1236])m)|[{_OBEYED}]")
"""Bold, red, green, yellow, cyan, and the end of each."""
_WITHOUT_UNICODE: Final = ("ascii", "us-ascii", "ansi_x3.4-1968")


def harmless(text: str) -> str:
    """A text in which nothing is obeyed.

    >>> print(harmless("\\x1b]0;title\\x07"))
    \\u001b]0;title\\u0007
    """
    return _ANY.sub(_shown, text)


def unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for codes of our own that move the cursor."""
    return stream.unguarded if isinstance(stream, Guarded) else stream


def _shown(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


class Guarded:
    """A text stream on which nothing is obeyed but our own colours.

    It has no `buffer`: bytes would go round it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str | bytes) -> int:
        if isinstance(text, bytes):
            if not text:
                # So click asks whether a stream is one of bytes; it writes some where none is.
                raise TypeError("It is a stream of text.")
            text = text.decode("utf-8", "replace")
        self.unguarded.write(_OURS.sub(lambda match: match[1] or _shown(match), text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for each in lines:
            self.write(each)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach"):
            raise AttributeError(name)
        return getattr(self.unguarded, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Within this, what is printed is guarded."""
    with redirect_stdout(_guarding(sys.stdout)), redirect_stderr(_guarding(sys.stderr)):
        yield


def _guarding(stream: TextIO) -> TextIO:
    if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() in _WITHOUT_UNICODE:
        # As click does it by itself where it finds a buffer.
        stream.reconfigure(encoding="utf-8", errors="replace")
    return stream if isinstance(stream, Guarded) else cast("TextIO", Guarded(stream))


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


_CELLS: Final = 24
_FULL, _EMPTY = "█", "·"
_ERASE: Final = "\r\x1b[K"


class ProgressBar:
    """A bar, from the first `show` to the end of the block. Codes that move are no colours."""

    def __init__(self, *, is_live: bool | None = None) -> None:
        self.is_live = sys.stderr.isatty() if is_live is None else is_live
        """Whether somebody looks: what is asked for the bar alone is asked only then."""
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Take the bar away, so that what is said next stands alone."""
        if self._is_drawn:
            self._is_drawn = False
            click.echo(_ERASE, file=unguarded(sys.stderr), nl=False, color=True)

    def show(self, text: str, *, done: int = 0, of: int = 0) -> None:
        """So much is done of so much; of nothing that can be counted there is only the text."""
        if not self.is_live:
            return
        text = harmless(text)
        shown = f"{bar(done, of)} {text}" if of > 0 else text
        # What went over the edge would stay.
        room = max(1, shutil.get_terminal_size().columns - 1)
        self._is_drawn = True
        drawn = f"{_ERASE}{shown[:room]}"
        click.echo(drawn, file=unguarded(sys.stderr), nl=False, color=True)


def bar(done: int, of: int) -> str:
    """A part of a whole. Never full before it is."""
    full = _CELLS * max(0, min(done, of)) // of
    return _FULL * full + _EMPTY * (_CELLS - full)
