"""Secrets as work has them: a mapping that does not show its values, and texts without them.

The worker resolves what a job's `secrets` name just before the work begins, and gives the values to
the runtime in `Work.secrets` (`penstock.worker.secrets`). From there they go over a socket to the
process that runs the work, and into `task.secrets` or `context.secrets`. They are in no repr, and
nothing here writes them anywhere.

`hidden` takes values out of a text that leaves the work, such as why it failed: as they are, as
they look in a repr, in JSON and in a URL, line by line, and of a JSON document each of its texts.
What is shorter than `HIDDEN_CHARACTERS_MIN` stays, for it would be found everywhere. It never makes
a text longer, and takes time by the length of it: so texts are cut before, and the beginning of a
value that is cut off is found as well. It is a net for accidents: code that wants to tell a secret
can always write it in another way.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import quote, quote_plus

HIDDEN_CHARACTERS_MIN: Final = 6
"""A value that is shorter than this is not looked for in texts."""
HIDDEN: Final = "***"
_FORMS_MAX: Final = 1000


class Secrets(Mapping[str, str]):
    """Values by name; for any other name it is told which there are. Shows no values."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(sorted((values or {}).items()))

    def __getitem__(self, name: str) -> str:
        if name not in self._values:
            there = f"it has {', '.join(self)}" if self else "it has none"
            raise KeyError(f"The job has no secret {name!r}; {there}.")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self)})"


def hidden(text: str, values: Iterable[str]) -> str:
    """The text with `***` where one of these values was."""
    forms = sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)
    for form in forms[:_FORMS_MAX]:
        text = text.replace(form, HIDDEN)
    for form in forms[:_FORMS_MAX]:
        text = _without_beginning(text, form)
    return text


def print_error(error: BaseException, values: Iterable[str]) -> None:
    """Print an error with its traceback, as Python does, without these values."""
    said = "".join(traceback.format_exception(error))
    sys.stderr.write(hidden(said, values))


def _forms(value: str) -> Iterator[str]:
    """A value in all forms that are looked for."""
    for piece in {value, value.strip(), *value.splitlines(), *_leaves(value)}:
        forms = (piece, repr(piece)[1:-1], json.dumps(piece)[1:-1], quote(piece), quote_plus(piece))
        for form in forms:
            if len(form) >= HIDDEN_CHARACTERS_MIN and not form.isspace():
                yield form


def _leaves(value: str) -> Iterator[str]:
    """The texts of a JSON object, which is how several secrets are kept in one."""
    if not value.lstrip().startswith("{"):
        return
    try:
        waiting: list[object] = [json.loads(value)]
    except (ValueError, RecursionError):
        return
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() as fields:
                waiting.extend(fields.values())
            case list() as items:
                waiting.extend(items)


def _without_beginning(text: str, form: str) -> str:
    """The text without the beginning of a value that was cut off with the end of the text."""
    first = form[:HIDDEN_CHARACTERS_MIN]
    place = text.find(first, max(0, len(text) - len(form) + 1))
    while place >= 0:
        if form.startswith(text[place:]):
            return f"{text[:place]}{HIDDEN}"
        place = text.find(first, place + 1)
    return text
