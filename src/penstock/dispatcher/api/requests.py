"""What a request says, read within bounds: who calls, the parameters, the body.

Every function returns what it has read, or the `Problem` that it is. Called by the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from penstock.dispatcher.api.problems import malformed, not_as_declared
from penstock.dispatcher.wire.base import TASK_HEADER, WORKER_HEADER, Ask
from penstock.dispatcher.wire.problem import Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Headers = Iterable[tuple[bytes, bytes]]

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_PARAMETERS_MAX: Final = 100
_DRAINED_MAX: Final = 8
"""How many times the largest body is heard, and thrown away, so that its sender is answered."""
_WORKER: Final = WORKER_HEADER.lower().encode()
_TASK: Final = TASK_HEADER.lower().encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of every request."""

    body_bytes_max: int = 8 * 2**20
    body_seconds_max: float = 10.0
    """How long the body may take to arrive."""
    request_seconds_max: float = 20.0
    """How long the dispatcher may take to answer."""
    requests_max: int = 256
    """How many requests a listener works on at a time."""


def credentials(headers: Headers) -> tuple[str, str]:
    """The name of the worker and the bearer token; empty where there is none."""
    worker = bearer = ""
    for name, value in headers:
        if name == _WORKER:
            worker = value.decode("utf-8", "replace")
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].strip().decode("utf-8", "replace")
    return worker, bearer


def task_token(headers: Headers) -> str:
    """The capability token of the header; empty if there is none. Two are none that is known."""
    found = [value.strip() for name, value in headers if name == _TASK]
    return b", ".join(found).decode("utf-8", "replace")


def is_of_another_site(headers: Headers) -> bool:
    """Whether a browser asks this for a page that did not come from here."""
    origin: bytes | None = None
    host = b""
    for name, value in headers:
        if name == b"origin":
            origin = value
        elif name == b"host":
            host = value
    return origin is not None and origin.partition(b"://")[2].lower() != host.lower()


def is_of_this_machine(headers: Headers) -> bool:
    """Whether the host that was asked for is this machine by a name of its own.

    A page of another site can have its own name lead here, and its scripts would then be of the
    same site as this server. That name stands in `Host`.
    """
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
    try:
        return urlsplit(f"//{host}").hostname in _LOOPBACK
    except ValueError:
        return False


def parameters(
    kind: type[Ask], query: bytes, *, path: Mapping[str, str], names: Collection[str]
) -> Ask | Problem:
    """What stands in the path and the query, as one value. `names` are those of the path."""
    try:
        pairs = parse_qsl(
            query.decode("utf-8", "replace"),
            keep_blank_values=True,
            max_num_fields=_PARAMETERS_MAX,
        )
    except ValueError:
        return malformed(f"The query has {_PARAMETERS_MAX} parameters at most.")
    found = dict(path)
    for name, value in pairs:
        if name in names:
            return malformed(f"The parameter `{name}` stands in the path.", field=name)
        if name in found:
            return malformed(f"The parameter `{name}` stands there twice.", field=name)
        found[name] = value
    try:
        asked = msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        return not_as_declared(error, kind=kind)
    for name in found:
        # The word null is read as nothing, and nothing is said by leaving it out.
        if getattr(asked, name, "") is None:
            return malformed(f"The parameter `{name}` cannot be null; leave it out.", field=name)
    return asked


async def body_of(headers: Headers, receive: Receive, limits: Limits) -> bytes | Problem | None:
    """The body of a request; None if the caller has left before its end."""
    bytes_max = limits.body_bytes_max
    declared = next((value for name, value in headers if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared[:20]) > bytes_max * _DRAINED_MAX:
        return _too_large(bytes_max)
    try:
        async with asyncio.timeout(limits.body_seconds_max):
            return await _read(receive, bytes_max)
    except TimeoutError:
        return Problem(type="slow", title="The body did not arrive in time.", status=408)


async def _read(receive: Receive, bytes_max: int) -> bytes | Problem | None:
    pieces: list[bytes] = []
    size = 0
    while size <= bytes_max * _DRAINED_MAX:
        message = await receive()
        if message["type"] != "http.request":
            return None
        piece: bytes = message.get("body", b"")
        size += len(piece)
        # What is too large is heard to its end, within reason: a caller that is still sending
        # would not read the answer.
        if size <= bytes_max:
            pieces.append(piece)
        else:
            pieces.clear()
        if not message.get("more_body"):
            break
    return b"".join(pieces) if size <= bytes_max else _too_large(bytes_max)


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        type="too large",
        title=f"A body has {bytes_max} bytes at most.",
        status=413,
        detail="Send less at a time.",
    )
