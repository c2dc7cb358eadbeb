"""How far long work is: a bar in one line of standard error, and nothing where nobody looks.

The bar is drawn over itself, and gone when the work has ended, so that what is said then stands
alone. In a pipe, a file or a log there is none: whoever waits there waits for the end.
"""

from __future__ import annotations

import shutil
import sys
from types import TracebackType
from typing import Final, Self

import click

from penstock.cli.terminal import harmless, unguarded

_CELLS: Final = 24
_FULL, _EMPTY = "█", "·"
_ERASE: Final = "\r\x1b[K"


class Bar:
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
