"""How values look on a terminal and as JSON: times, ages, fields, notes.

Notes and errors go to standard error; what a program reads goes to standard output.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from penstock.cli.options import is_absolute
from penstock.cli.output import harmless, status
from penstock.kernel.errors import PenstockError

_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"))


def iso(at: float | None, *, precise: bool = False) -> str | None:
    """A time as ISO 8601 in UTC, to the second, or to the millisecond."""
    if at is None:
        return None
    try:
        shown = datetime.fromtimestamp(at, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at:.0f} s since the epoch"
    text = shown.isoformat(timespec="milliseconds" if precise else "seconds")
    return text.removesuffix("+00:00") + "Z"


def length(seconds: float) -> str:
    """A length of time in one unit, or in two."""
    for size, unit in _UNITS:
        if seconds >= 10 * size or (seconds >= size and unit == "min"):
            return f"{seconds // size:.0f} {unit}"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{max(0.0, seconds):.0f} s"


def age(at: float, *, now: float) -> str:
    """How long ago something was, or how soon it is; with `--absolute` when."""
    if is_absolute():
        return iso(at) or ""
    ago = now - at
    # Clocks are known to a second or so: what was just written may seem to come.
    return f"{length(max(0.0, ago))} ago" if ago > -2 else f"in {length(-ago)}"


def when(at: float, *, now: float) -> str:
    """A time and how long ago it was, or how soon it is; where there is room for both."""
    return f"{iso(at)}  {age(at, now=now)}" if not is_absolute() else iso(at) or ""


def since(at: float, *, now: float) -> str:
    """A time and how long ago it was, within a sentence."""
    return f"{iso(at)} ({age(at, now=now)})" if not is_absolute() else iso(at) or ""


def fields(rows: Iterable[tuple[str, str]]) -> None:
    """Names and values, one a line; values of several lines are indented."""
    shown = list(rows)
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        first, *rest = harmless(value).split("\n")
        if name == "status":
            word, *others = first.split(" ", 1)
            first = " ".join((status(word), *others))
        click.echo(f"{click.style(f'{name:<{width}}', bold=True)}  {first}".rstrip())
        for line in rest:
            click.echo(f"{'':<{width}}  {line}")


def notes(sentences: Sequence[str], *, shown_max: int = 10) -> None:
    """What could not be read or is worth knowing, to standard error."""
    for sentence in sentences[:shown_max]:
        click.echo(f"note: {harmless(sentence)}", err=True)
    if len(sentences) > shown_max:
        click.echo(f"note: and {len(sentences) - shown_max} more like these.", err=True)


def complain(errors: Iterable[PenstockError]) -> None:
    """What failed for some of several things, as the command line says it for one."""
    for error in errors:
        click.echo(f"penstock: {harmless(error.message)}", err=True)
        if error.hint:
            click.echo(f"  {harmless(error.hint)}", err=True)


def print_json(value: object) -> None:
    """Print a value for programs."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def print_json_line(value: object) -> None:
    """Print a value for programs, as one line of many."""
    click.echo(json.dumps(plain(value), ensure_ascii=False))


def plain(value: Any) -> Any:
    """The value as JSON has it; fields that end in `_at` are times, and no text is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: _field(each.name, getattr(value, each.name), is_text=each.type == "str")
            for each in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


def _field(name: str, value: Any, *, is_text: bool) -> Any:
    if is_text and not value:
        # What a task does not have; an empty text that is somebody's input stays one.
        return None
    is_time = (name == "at" or name.endswith("_at")) and isinstance(value, float)
    return iso(value, precise=True) if is_time else plain(value)


def compact(value: object, *, characters_max: int = 2000) -> str:
    """A JSON value in one line, cut if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}… ({len(text):,} characters; --json shows all)"
