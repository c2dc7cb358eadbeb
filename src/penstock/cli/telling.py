"""How what a dispatcher says looks: ages instead of times, and tables that fit the terminal.

Programs get the answer itself, with the times in it. What others have written (reasons, names of
workers, locations) is shown on one line, and without what a terminal would obey.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from penstock.cli import tables
from penstock.cli.queue.showing import age, as_json
from penstock.dispatcher.wire.base import Answer

fitted, cut = tables.table, tables.cut
_PLACES: Final = ("Traceback (most recent call last)", 'File "')


def show_json(answer: Answer) -> None:
    """An answer for programs."""
    as_json(msgspec.to_builtins(answer))


def ago(at: datetime | None, *, now: float) -> str:
    """How long ago something was, or how soon it is, or with `--absolute` when; else nothing."""
    return "" if at is None else age(at.timestamp(), now=now)


def line(text: str | None, *, characters_max: int = 200) -> str:
    """Somebody's words as one line that does nothing to a terminal."""
    shown = "".join(each if each.isprintable() else " " for each in text or "").strip()
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def lines(text: str | None, *, characters_max: int = 4000) -> str:
    """Somebody's words with their own line ends and indentation, harmless to a terminal."""
    kept = []
    for each in (text or "").expandtabs(4).splitlines():
        indent = len(each) - len(each.lstrip(" "))
        kept.append(f"{'':<{indent}}{line(each, characters_max=characters_max)}".rstrip())
    return "\n".join(kept)


def gist(reason: str | None) -> str:
    """Why something failed, in one line: of an error with its traceback the error itself.

    Ours begin with it. Those of Python end with it, and begin with where it was.
    """
    own = [each for each in (reason or "").splitlines() if each.strip()]
    if own and own[0].lstrip().startswith(_PLACES):
        last = [each for each in own if not each.startswith((" ", "\t", *_PLACES))]
        own = last[-1:] or own
    return line(own[0]) if own else ""


def counted(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
