"""What reaches a terminal, a pipe or a file as text: nothing in it is obeyed.

Texts of tasks, workers, users and buckets may hold codes that move the cursor, rename the window,
answer for the user, or turn the order of characters round. `run` puts `Guarded` in the place of
standard output and standard error, so that no verb can forget it: such a character is shown as
`\\u001b`, which is the same text to whoever reads it as JSON. Line ends and tabs stay, and so do
the few codes of colour that verbs use themselves. `harmless` leaves not even these: tables, fields
and messages are made by it. What draws over itself writes to `unguarded`, its own codes only.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Final, TextIO, cast

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
