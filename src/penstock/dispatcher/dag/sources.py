"""The `source` of a source job: its kind, and the fields that belong to that kind."""

from __future__ import annotations

import re
from typing import Final

from penstock.dispatcher.dag.model import (
    AlwaysOnSource,
    AuthType,
    CronSource,
    Emits,
    ManualSource,
    Source,
    SourceKind,
    WebhookAuth,
    WebhookSource,
)
from penstock.dispatcher.dag.secrets import HOW, secret_reference
from penstock.dispatcher.dag.sections import Field, Section
from penstock.dispatcher.dag.units import duration_ms
from penstock.kernel.cron import is_time_zone, parse_cron, time_zones
from penstock.kernel.words import shown

PATH_CHARACTERS_MAX: Final = 200
AUTH_SECRETS_MAX: Final = 2
TOLERANCE_MS_MAX: Final = 3_600_000

_PATH = re.compile(r"(?:/[a-z0-9_-]+)+")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_AUTH_FIELDS: Final = ("type", "secret", "tolerance", "header")
_FIELDS: Final = {
    "kind": tuple(SourceKind),
    "cron": (SourceKind.CRON,),
    "time_zone": (SourceKind.CRON,),
    "emits": (SourceKind.CRON,),
    "catch_up": (SourceKind.CRON,),
    "path": (SourceKind.WEBHOOK,),
    "auth": (SourceKind.WEBHOOK,),
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
            given = section.get("auth")
            auth = _auth(given) if given is not None else None
            return WebhookSource(section.read("path", _path, f"/{job}"), auth)
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


def _auth(field: Field) -> WebhookAuth | None:
    """What requests have to show; None, with a problem noted, if that cannot be said."""
    section = field.section(_AUTH_FIELDS)
    named = section.need("type", f"write {' or '.join(AuthType)}")
    kind = named.choice(AuthType) if named is not None else None
    given = section.need("secret", HOW)
    secrets = _secrets(given) if given is not None else ()
    if kind is None or not secrets:
        return None
    default = WebhookAuth(type=kind, secrets=secrets)
    if (said := section.get("tolerance")) is not None and not kind.is_dated:
        said.wrong(f"It is for stripe and slack, which sign the time, and not {kind}; take it out.")
    if (said := section.get("header")) is not None and kind is not AuthType.HMAC:
        said.wrong(f"It is for hmac, and {kind} has a header of its own; take it out.")
    return WebhookAuth(
        type=kind,
        secrets=secrets,
        tolerance_ms=section.read("tolerance", _tolerance_ms, default.tolerance_ms),
        header=section.read("header", _header, default.header),
    )


def _secrets(field: Field) -> tuple[str, ...]:
    """Where secrets are. What stands there may be a secret by mistake: it is not repeated."""
    found: list[str] = []
    for each in field.items(most=AUTH_SECRETS_MAX):
        if not each.is_scalar:
            each.wrong(f"It is not where a secret is; {HOW}.")
        elif (text := each.text()) is not None:
            try:
                found.append(str(secret_reference(text)))
            except ValueError as error:
                each.wrong(f"It {error}.")
    if len(set(found)) < len(found):
        field.wrong("It names one place twice; take one out.")
    if not found and not field.findings.is_broken(field.path):
        field.wrong(f"It is empty; {HOW}.")
    return tuple(found)


def _tolerance_ms(text: str) -> int:
    found = duration_ms(text)
    if not 1000 <= found <= TOLERANCE_MS_MAX:
        raise ValueError("is not between 1s and 1h, as old as a request may be")
    return found


def _header(text: str) -> str:
    if not _HEADER.fullmatch(text):
        raise ValueError("cannot be a header; write its name in letters, digits and -")
    return text
