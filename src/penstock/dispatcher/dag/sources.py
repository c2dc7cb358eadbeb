"""The `source` of a source job: its kind, and the fields that belong to that kind."""

from __future__ import annotations

import re
from typing import Final

from penstock.dispatcher.dag.model import (
    AlwaysOnSource,
    CronSource,
    Emits,
    ManualSource,
    Source,
    SourceKind,
    WebhookSource,
)
from penstock.dispatcher.dag.sections import Field, Section
from penstock.dispatcher.dag.units import duration_ms
from penstock.kernel.cron import is_time_zone, parse_cron, time_zones
from penstock.kernel.words import shown

PATH_CHARACTERS_MAX: Final = 200

_PATH = re.compile(r"(?:/[a-z0-9_-]+)+")
_FIELDS: Final = {
    "kind": tuple(SourceKind),
    "cron": (SourceKind.CRON,),
    "time_zone": (SourceKind.CRON,),
    "emits": (SourceKind.CRON,),
    "catch_up": (SourceKind.CRON,),
    "path": (SourceKind.WEBHOOK,),
    "drain_timeout": (SourceKind.ALWAYS_ON,),
}


def read_source(field: Field, *, job: str) -> Source | None:
    """What a source is; None, with a problem noted, if that cannot be said."""
    section = field.section(_FIELDS)
    kinds = " or ".join(SourceKind)
    named = section.need("kind", f"write {kinds}")
    kind = named.choice(SourceKind) if named is not None else None
    if kind is None:
        return None
    for name, owners in _FIELDS.items():
        given = section.get(name)
        if given is not None and kind not in owners:
            given.wrong(f"It is for {owners[0]} sources, and this one is {kind}; take it out.")
    match kind:
        case SourceKind.CRON:
            return _cron(section)
        case SourceKind.WEBHOOK:
            return WebhookSource(section.read("path", _path, f"/{job}"))
        case SourceKind.MANUAL:
            return ManualSource()
        case SourceKind.ALWAYS_ON:
            default = AlwaysOnSource().drain_timeout_ms
            return AlwaysOnSource(section.read("drain_timeout", duration_ms, default))


def _cron(section: Section) -> CronSource | None:
    given = section.need("cron", "write when it fires, as in cron: 0 6 * * mon-fri")
    cron = given.read(parse_cron) if given is not None else None
    zone = "UTC"
    named = section.get("time_zone")
    text = named.text() if named is not None else None
    if named is not None and text is not None:
        if is_time_zone(text):
            zone = text
        else:
            ask = named.findings.meant(text, time_zones())
            named.wrong(f"There is no time zone {shown(text)}; write one as Europe/Zurich.{ask}")
    emits = section.choice("emits", Emits.CURSOR)
    said = section.get("catch_up")
    catch_up = said.flag() if said is not None else None
    # What is not said, or not as it should be, is as by default.
    return None if cron is None else CronSource(cron, zone, emits, catch_up is not False)


def _path(text: str) -> str:
    if len(text) > PATH_CHARACTERS_MAX or not _PATH.fullmatch(text):
        raise ValueError("is not a path; write it as /orders or /shop/orders, in a-z, 0-9, _ and -")
    return text
