"""HTTP of the console: requests read within bounds, and responses that isolate a page.

`header`, `cookie_of`, `query` and `form` read what a browser sends; all but `form` are pure. An
`HttpResponse` has headers that let nothing be loaded from elsewhere, no other site frame the
page, and no script run but our files. The result of a form travels in a cookie to the page that
the browser is redirected to, which shows it once. The cookie is signed for the session, so a
message that another site on the same host name has set is not shown as ours. Called by
`application`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote

from penstock.console.pages.base import ActionResult
from penstock.console.sessions import ConsoleSession, ConsoleSessions
from penstock.dispatcher.api.requests import Message, Receive, RequestAdmission, RequestLimits
from penstock.protocol.problem import Problem

Headers = Iterable[tuple[bytes, bytes]]

FORM_BYTES_MAX: Final = 256 * 1024
_FIELDS_MAX: Final = 200
FORM_LIMITS: Final = RequestLimits(body_bytes_max=FORM_BYTES_MAX)


def header(headers: Headers, name: bytes) -> str:
    """A header; empty if there is none."""
    return next((value.decode("latin-1") for known, value in headers if known == name), "")


def cookie_of(headers: Headers, name: str) -> str:
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
    headers: Headers, receive: Receive, admission: RequestAdmission
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


Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

HTML: Final = "text/html; charset=utf-8"
JSON: Final = "application/json"
_UNREAD_SECONDS_MAX: Final = 30.0
_TOLD: Final = "penstock_told"
_TOLD_SECONDS: Final = 30
_TOLD_BYTES_MAX: Final = 2_500
"""Browsers keep cookies of 4,096 bytes."""
_COOKIE_CHARACTERS_MAX: Final = 4_096
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    b" connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_SAFE: Final = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


@dataclass(slots=True)
class HttpResponse:
    """What is sent."""

    content: str | bytes = b""
    status: int = 200
    kind: str = HTML
    headers: list[Header] = field(default_factory=list)


def redirect(to: str) -> HttpResponse:
    """To a page of ours. After a form it is read with GET, so that a reload does nothing twice."""
    return HttpResponse(
        status=303, headers=[(b"location", quote(to, safe="/?&=%:~+,;@!$'()*").encode())]
    )


def for_script(answer: HttpResponse) -> HttpResponse:
    """The same answer for a script that has sent a form: where to go, and it goes there itself."""
    to = next((value for name, value in answer.headers if name == b"location"), None)
    if to is None:
        return answer
    kept = [(name, value) for name, value in answer.headers if name != b"location"]
    return HttpResponse(json.dumps({"to": to.decode()}), kind=JSON, headers=kept)


def is_ours(to: str) -> bool:
    """Whether this is a path of this site, and no way out of it."""
    return to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable()


def set_cookie(name: str, value: str, *, seconds: int, is_secure: bool) -> Header:
    """A cookie for this site alone, which scripts do not see."""
    secure = "; Secure" if is_secure else ""
    said = f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", said.encode()


def set_message(
    done: ActionResult, session: ConsoleSession, sessions: ConsoleSessions, *, is_secure: bool
) -> Header:
    """What became of a form, for the next page."""
    cut = done.told.encode("utf-8", "replace")[:_TOLD_BYTES_MAX].decode("utf-8", "ignore")
    said = json.dumps({"told": cut, "is_well": done.is_well}, ensure_ascii=False)
    value = base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")
    value = f"{value}.{sessions.signed(session, value)}"
    return set_cookie(_TOLD, value, seconds=_TOLD_SECONDS, is_secure=is_secure)


def clear_message(*, is_secure: bool) -> Header:
    """It was shown."""
    return set_cookie(_TOLD, "", seconds=0, is_secure=is_secure)


def read_message(
    headers: Headers, session: ConsoleSession, sessions: ConsoleSessions
) -> ActionResult | None:
    """What became of the form before; None if there was none, or somebody else says so."""
    cookie = cookie_of(headers, _TOLD)
    value, _, signature = cookie.partition(".")
    if len(cookie) > _COOKIE_CHARACTERS_MAX or not sessions.is_signed(session, value, signature):
        return None
    try:
        said = json.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)))
        return ActionResult(str(said["told"]), "", is_well=bool(said["is_well"]))
    except (binascii.Error, ValueError, KeyError, TypeError, RecursionError):
        return None


async def send_answer(send: Send, answer: HttpResponse, *, is_head: bool = False) -> None:
    """Send an answer whole."""
    content = answer.content.encode() if isinstance(answer.content, str) else answer.content
    headers = [
        (b"content-type", answer.kind.encode()),
        (b"content-length", b"%d" % len(content)),
        *_SAFE,
        *answer.headers,
    ]
    if not any(name == b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if is_head else content})


async def send_events(
    events: AsyncIterator[bytes], receive: Receive, send: Send, *, first: bytes
) -> None:
    """Send events until they end, or the browser has left. `first` shows that they come."""
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), *_SAFE]

    async def write(message: Message) -> None:
        # Who does not read is let go, and comes back when it does.
        async with asyncio.timeout(_UNREAD_SECONDS_MAX):
            await send(message)

    async def until_left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def all_events() -> None:
        await write({"type": "http.response.start", "status": 200, "headers": headers})
        await write({"type": "http.response.body", "body": first, "more_body": True})
        async for each in events:
            await write({"type": "http.response.body", "body": each, "more_body": True})
        await write({"type": "http.response.body", "body": b""})

    loop = asyncio.get_running_loop()
    tasks = {loop.create_task(until_left()), loop.create_task(all_events())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await asyncio.gather(*tasks, return_exceptions=True)
