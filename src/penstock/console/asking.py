"""What a browser asks, read within bounds: host, cookies, the fields of a form. Pure but `form`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final
from urllib.parse import parse_qsl

from penstock.dispatcher.api.requests import Admission, Limits, Receive
from penstock.dispatcher.wire.problem import Problem

Headers = Iterable[tuple[bytes, bytes]]

FORM_BYTES_MAX: Final = 256 * 1024
_FIELDS_MAX: Final = 200
FORM_LIMITS: Final = Limits(body_bytes_max=FORM_BYTES_MAX)


def header(headers: Headers, name: bytes) -> str:
    """A header; empty if there is none."""
    return next((value.decode("latin-1") for known, value in headers if known == name), "")


def cookie(headers: Headers, name: str) -> str:
    """The value of a cookie; empty if there is none."""
    # By hand: what another program of this host has put there must not hide ours.
    for each in header(headers, b"cookie").split(";"):
        known, _, value = each.strip().partition("=")
        if known == name:
            return value.strip('"')
    return ""


def is_of_our_page(headers: Headers) -> bool:
    """Whether a form comes from a page of ours, as far as the browser tells."""
    site = header(headers, b"sec-fetch-site")
    if site and site not in ("same-origin", "none"):
        return False
    origin = header(headers, b"origin")
    return not origin or origin.partition("://")[2].lower() == header(headers, b"host").lower()


def query(text: bytes, known: Collection[str]) -> Mapping[str, str]:
    """The parameters that are known, each once: the last one counts."""
    try:
        pairs = parse_qsl(text.decode("utf-8", "replace"), max_num_fields=_FIELDS_MAX)
    except ValueError:
        return {}
    return {name: value for name, value in pairs if name in known}


async def form(
    headers: Headers, receive: Receive, admission: Admission
) -> Mapping[str, str] | Problem | None:
    """The fields of a form; of a field that is there several times, all, one a line.

    None if the browser has left.
    """
    body = await admission.body(headers, receive)
    if not isinstance(body, bytes):
        return body
    if not header(headers, b"content-type").startswith("application/x-www-form-urlencoded"):
        title = "A form is sent as application/x-www-form-urlencoded."
        return Problem(type="form", title=title, status=415)
    try:
        pairs = parse_qsl(
            body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=_FIELDS_MAX
        )
    except ValueError:
        title = f"A form has {_FIELDS_MAX} fields at most."
        return Problem(type="form", title=title, status=422)
    found: dict[str, str] = {}
    for name, value in pairs:
        found[name] = f"{found[name]}\n{value}" if name in found else value
    return found
