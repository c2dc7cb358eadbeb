"""What is sent to a browser: answers with the headers that keep a page to itself, cookies, events.

Nothing from elsewhere is loaded, nobody may put a page into a frame, and no script runs but our
files. What became of a form travels in a cookie to the page that the browser is sent to, which
shows it once. It is signed for the session: what others have put there, who share the name of this
host, is not shown as our words.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from penstock.console import asking
from penstock.console.pages.base import Done
from penstock.console.sessions import Session, Sessions
from penstock.dispatcher.api.requests import Message, Receive

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
class Answer:
    """What is sent."""

    content: str | bytes = b""
    status: int = 200
    kind: str = HTML
    headers: list[Header] = field(default_factory=list)


def redirect(to: str) -> Answer:
    """To a page of ours. After a form it is read with GET, so that a reload does nothing twice."""
    return Answer(status=303, headers=[(b"location", quote(to, safe="/?&=%:~+,;@!$'()*").encode())])


def for_script(answer: Answer) -> Answer:
    """The same answer for a script that has sent a form: where to go, and it goes there itself."""
    to = next((value for name, value in answer.headers if name == b"location"), None)
    if to is None:
        return answer
    kept = [(name, value) for name, value in answer.headers if name != b"location"]
    return Answer(json.dumps({"to": to.decode()}), kind=JSON, headers=kept)


def is_ours(to: str) -> bool:
    """Whether this is a path of this site, and no way out of it."""
    return to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable()


def set_cookie(name: str, value: str, *, seconds: int, is_secure: bool) -> Header:
    """A cookie for this site alone, which scripts do not see."""
    secure = "; Secure" if is_secure else ""
    said = f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", said.encode()


def tell(done: Done, session: Session, sessions: Sessions, *, is_secure: bool) -> Header:
    """What became of a form, for the next page."""
    cut = done.told.encode("utf-8", "replace")[:_TOLD_BYTES_MAX].decode("utf-8", "ignore")
    said = json.dumps({"told": cut, "is_well": done.is_well}, ensure_ascii=False)
    value = base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")
    value = f"{value}.{sessions.signed(session, value)}"
    return set_cookie(_TOLD, value, seconds=_TOLD_SECONDS, is_secure=is_secure)


def forget_told(*, is_secure: bool) -> Header:
    """It was shown."""
    return set_cookie(_TOLD, "", seconds=0, is_secure=is_secure)


def told(headers: asking.Headers, session: Session, sessions: Sessions) -> Done | None:
    """What became of the form before; None if there was none, or somebody else says so."""
    cookie = asking.cookie(headers, _TOLD)
    value, _, signature = cookie.partition(".")
    if len(cookie) > _COOKIE_CHARACTERS_MAX or not sessions.is_signed(session, value, signature):
        return None
    try:
        said = json.loads(base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)))
        return Done(str(said["told"]), "", is_well=bool(said["is_well"]))
    except (binascii.Error, ValueError, KeyError, TypeError, RecursionError):
        return None


async def send_answer(send: Send, answer: Answer, *, is_head: bool = False) -> None:
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
