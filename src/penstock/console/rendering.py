"""Templates, and how words, figures and times look in them.

Everything that is put into a template is escaped, whatever it is; nothing marks a text as safe but
the templates themselves. Files of `static/` are read once and named with a digest of what they
hold, so that a browser keeps them until they change. Times are shown as ages, with the time itself
at hand, and are kept going by a script.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

_KINDS: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_UNITS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_POWERS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LINE_CHARACTERS_MAX: Final = 200
_NOTHING: Final = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class File:
    """A file of ours, as it is sent."""

    content: bytes
    kind: str
    digest: str


class Rendering:
    """The templates and files of the console."""

    def __init__(self) -> None:
        self.files = _files()
        self._environment = Environment(
            loader=PackageLoader("penstock.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            ago=ago, lasting=length, size=size, number=number, data=data, line=line, share=share
        )
        self._environment.globals["file"] = self.address

    def page(self, name: str, said: Mapping[str, Any]) -> str:
        """A whole page."""
        return self._environment.get_template(f"{name}.html").render(said)

    def block(self, name: str, block: str, said: Mapping[str, Any]) -> str:
        """One block of a page, as it stands there."""
        template: Template = self._environment.get_template(f"{name}.html")
        return "".join(template.blocks[block](template.new_context(dict(said))))

    def address(self, name: str) -> str:
        """Where a browser finds a file."""
        return f"/static/{name}?v={self.files[name].digest[:12]}"


def _files() -> Mapping[str, File]:
    found: dict[str, File] = {}
    for each in files("penstock.console").joinpath("static").iterdir():
        ending = each.name[each.name.rfind(".") :]
        if ending in _KINDS:
            content = each.read_bytes()
            found[each.name] = File(content, _KINDS[ending], hashlib.sha256(content).hexdigest())
    return found


def ago(at: datetime | float | None, *, none: str = "never") -> Markup:
    """A time as its age, which a script keeps going; the time itself is the title."""
    if at is None:
        return Markup("<span class=quiet>{}</span>").format(none)
    moment = at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)
    moment = moment.astimezone(UTC)
    whole = moment.isoformat(timespec="seconds").replace("+00:00", "Z")
    exact = moment.isoformat(timespec="milliseconds")
    shown = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    return Markup('<time datetime="{}" title="{}" data-ago>{}</time>').format(exact, shown, whole)


def length(seconds: float | None) -> str:
    """How long something takes: two units at most."""
    if seconds is None:
        return _NOTHING
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for place, (unit, name) in enumerate(_UNITS):
        if seconds >= unit or name == "s":
            whole = int(seconds // unit)
            rest = seconds - whole * unit
            smaller = _UNITS[place + 1] if place + 1 < len(_UNITS) else None
            part = int(rest // smaller[0]) if smaller is not None else 0
            return f"{whole} {name} {part} {smaller[1]}" if smaller and part else f"{whole} {name}"
    raise AssertionError("every length has seconds")


def size(count: float | None) -> str:
    """Bytes, in the largest unit that leaves a whole number before the point."""
    if count is None:
        return _NOTHING
    value, place = float(count), 0
    while value >= 1024 and place < len(_POWERS) - 1:
        value, place = value / 1024, place + 1
    shown = f"{value:.0f}" if place == 0 or value >= 100 else f"{value:.1f}"
    return f"{shown} {_POWERS[place]}"


def number(count: float | None, *, most: int | None = None) -> str:
    """A count with its thousands apart; at `most` it is at least that many."""
    if count is None:
        return _NOTHING
    shown = f"{count:,.0f}" if float(count).is_integer() else f"{count:,.1f}"
    return f"{shown}+" if most is not None and count >= most else shown


def share(part: float, whole: float) -> str:
    """A share as a percentage."""
    return _NOTHING if not whole else f"{100 * part / whole:.0f} %"


def line(text: str | None, characters_max: int = _LINE_CHARACTERS_MAX) -> str:
    """Somebody's words as one line."""
    shown = "".join(each if each.isprintable() else " " for each in text or "").strip()
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def data(value: Any) -> Markup:
    """A value for a script, inside of an element `script` that is not run: it cannot end it."""
    text = json.dumps(value, separators=(",", ":"), default=str)
    for each, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(each, escaped)
    return Markup(text)  # noqa: S704 - what could end the element was escaped
