"""Templates, static files, and the format of times, sizes, numbers and names.

Every value that is put into a template is escaped; only templates themselves mark text as safe.
Files of `static/` are read once and named with a digest of their content, so that a browser
caches them until they change. Times are shown as ages, with the exact time as the title, and
are kept current by a script.
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
_WHOLE_CHARACTERS_MAX: Final = 40
_NOTHING: Final = "\N{EN DASH}"
_TIMES: Final = (631_152_000, 4_102_444_800)
"""What is taken for a time: seconds of the years from 1990 to 2099."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of ours, as it is sent."""

    content: bytes
    kind: str
    digest: str


class Renderer:
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
        self._environment.filters.update(
            plural=plural, counted=counted, prose=prose, word=word, span=span, cursor=cursor
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


def _files() -> Mapping[str, StaticFile]:
    found: dict[str, StaticFile] = {}
    for each in files("penstock.console").joinpath("static").iterdir():
        ending = each.name[each.name.rfind(".") :]
        if ending in _KINDS:
            content = each.read_bytes()
            found[each.name] = StaticFile(
                content, _KINDS[ending], hashlib.sha256(content).hexdigest()
            )
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


def plural(count: float | None, one: str, many: str = "") -> str:
    """The word for one, or for several; that for several mostly has an `s` more."""
    return one if count == 1 else many or f"{one}s"


def counted(count: float | None, one: str, many: str = "", *, most: int | None = None) -> str:
    """So many of something, with its word."""
    return f"{number(count, most=most)} {plural(count, one, many)}"


def prose(text: str | None) -> Markup:
    """Sentences; what stands between backticks is set as code."""
    pieces = (text or "").split("`")
    # One that has no other is a backtick.
    if len(pieces) % 2 == 0:
        last = pieces.pop()
        pieces[-1] = f"{pieces[-1]}`{last}"
    marks = [
        Markup("<code>{}</code>") if place % 2 else Markup("{}") for place in range(len(pieces))
    ]
    return Markup("").join(mark.format(piece) for mark, piece in zip(marks, pieces, strict=True))


def span(start: int | None, end: int | None) -> Markup:
    """A range: as times in UTC if both ends can be seconds since 1970, and as numbers otherwise."""
    if start is None or end is None:
        return Markup("<span class=quiet>{}</span>").format(_NOTHING)
    if not all(_TIMES[0] <= each < _TIMES[1] for each in (start, end)):
        return Markup("<span class=mono>{} {} {}</span>").format(start, _NOTHING, end)
    told = f"{start} to {end}, in seconds since 1970; the end is not part of it"
    shown = Markup('<span class="span" title="{}"><span>{} {}</span> <span>{} UTC</span></span>')
    return shown.format(told, _minutes(start), _NOTHING, _minutes(end))


def cursor(value: int | None) -> Markup:
    """A cursor: as a time in UTC if it can be milliseconds since 1970, otherwise as a number."""
    if value is None:
        return Markup("<span class=quiet>{}</span>").format(_NOTHING)
    if not _TIMES[0] * 1000 <= value < _TIMES[1] * 1000:
        return Markup("<span class=mono>{}</span>").format(value)
    told = f"{value}, in milliseconds since 1970"
    shown = Markup('<span class="span" title="{}"><span>{} UTC</span></span>')
    return shown.format(told, _minutes(value // 1000))


def _minutes(seconds: float) -> str:
    at = datetime.fromtimestamp(seconds, UTC)
    return f"{at:%Y-%m-%d %H:%M}" if at.second == 0 else f"{at:%Y-%m-%d %H:%M:%S}"


def share(part: float, whole: float) -> str:
    """A share as a percentage."""
    return _NOTHING if not whole else f"{100 * part / whole:.0f} %"


def line(text: str | None, characters_max: int = _LINE_CHARACTERS_MAX) -> str:
    """Somebody's words as one line."""
    shown = "".join(each if each.isprintable() else " " for each in text or "").strip()
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def word(text: str | None, characters_max: int = _LINE_CHARACTERS_MAX) -> Markup:
    """A key or a name as one line; a short one is not broken, at its hyphens for instance."""
    shown = line(text, characters_max)
    if len(shown) > _WHOLE_CHARACTERS_MAX or " " in shown:
        return Markup("{}").format(shown)
    return Markup('<span class="word">{}</span>').format(shown)


def data(value: Any) -> Markup:
    """A value for a script, inside of an element `script` that is not run: it cannot end it."""
    text = json.dumps(value, separators=(",", ":"), default=str)
    for each, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(each, escaped)
    return Markup(text)  # noqa: S704 - what could end the element was escaped
