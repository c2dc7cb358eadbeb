"""How what a dispatcher says looks: ages instead of times, and tables that fit the terminal.

Programs get the answer itself, with the times in it. What others have written (reasons, names of
workers, locations) is shown on one line, and without what a terminal would obey.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from penstock.cli import tables
from penstock.cli.queue.showing import age, as_json
from penstock.dispatcher.wire.base import Answer

fitted, cut = tables.table, tables.cut


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


def counted(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
