"""Parsing of requests within bounds: who calls, the parameters, the body.

Every function returns what it has read, or the `Problem` that it is. `RequestAdmission` is how
many requests of one kind of callers are received and worked on at a time: each listener has one
for authenticated callers, a smaller one for those that hold no more than the token of an
attempt or of webhooks, which others may have written or may command, and the smallest for
everybody else. So none of these ever takes the places of workers. Called by the applications:
the API's, the console's and the webhook source's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import msgspec

from penstock.dispatcher.api.problems import malformed, not_as_declared
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER, Ask
from penstock.protocol.problem import Problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Headers = Iterable[tuple[bytes, bytes]]

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_PARAMETERS_MAX: Final = 100
_DRAINED_MAX: Final = 8
"""How many times the largest body is heard, and thrown away, so that its sender is answered."""
KNOWN: Final = "penstock.known"
"""What the state of a request has, where a server wants to be told that its caller is known."""
_BUSY: Final = Problem(
    type="busy",
    title="Too many requests: the dispatcher is at its limit.",
    status=503,
    detail="Retry in a moment.",
)
_WORKER: Final = WORKER_HEADER.lower().encode()
_TASK: Final = TASK_HEADER.lower().encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The bounds of every request."""

    body_bytes_max: int = 8 * 2**20
    body_seconds_max: float = 10.0
    """How long the body may take to arrive."""
    request_seconds_max: float = 20.0
    """How long the dispatcher may take to answer."""
    requests_max: int = 256
    """How many requests of known callers a listener works on at a time."""
    limited_requests_max: int = 64
    """How many of callers with the token of an attempt, or of webhooks, besides those."""
    attempt_requests_max: int = 4
    """How many of these one attempt may have: they wait for each other's locks in the database, and
    a connection waits with each."""
    anonymous_requests_max: int = 4
    """How many of all other callers, besides those: fewer than connections to the database."""
    arriving_max: int = 512
    """How many bodies may be on their way at a time, of each kind of callers."""
    arriving_bytes_max: int = 64 * 2**20
    """How many bytes bodies on their way may have together, of each."""


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
    return is_asked_as(headers, _LOOPBACK)


def is_asked_as(headers: Headers, names: Collection[str]) -> bool:
    """Whether the host that was asked for is one of these names, in lower case."""
    host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
    try:
        return urlsplit(f"//{host}").hostname in names
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
            return malformed(f"The parameter `{name}` belongs in the path.", field=name)
        if name in found:
            return malformed(f"The parameter `{name}` is given twice.", field=name)
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


def be_known(scope: Mapping[str, Any], *, is_limited: bool = False) -> None:
    """Tell the server that this caller has shown who it is: its connection is kept over others."""
    if (tell := scope.get("state", {}).get(KNOWN)) is not None:
        tell(is_limited=is_limited)


class RequestAdmission:
    """The requests of one kind of callers: bodies on their way, and those that are worked on.

    A body on its way takes no place in work. If there are too many, or they are too large together,
    the one that began first is given up: honest bodies are there at once, and those that are sent
    slowly to hold a place are the oldest.
    """

    def __init__(self, limits: RequestLimits, *, requests_max: int) -> None:
        self._limits = limits
        self._requests_max = requests_max
        self._active = 0
        self._attempts: Counter[str] = Counter()
        self._arriving: dict[asyncio.Timeout, int] = {}
        """How much of each body is here, by what ends it; the oldest first."""

    @contextmanager
    def place(self, attempt: str = "") -> Iterator[Problem | None]:
        """A place in work while it is entered, or the problem that there is none.

        `attempt` is the one whose token is all that the caller has shown.
        """
        held = self._attempts[attempt] if attempt else 0
        if self._active >= self._requests_max or held >= self._limits.attempt_requests_max:
            yield _BUSY
            return
        self._active += 1
        self._attempts[attempt] += 1
        try:
            yield None
        finally:
            self._active -= 1
            self._attempts[attempt] -= 1
            if not self._attempts[attempt]:
                del self._attempts[attempt]

    async def body(
        self, headers: Headers, receive: Receive, *, bytes_max: int | None = None
    ) -> bytes | Problem | None:
        """The body of a request; None if the caller has left before its end."""
        bytes_max = bytes_max or self._limits.body_bytes_max
        declared = next((value for name, value in headers if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared[:20]) > bytes_max * _DRAINED_MAX:
            return _too_large(bytes_max)
        patience = asyncio.timeout(self._limits.body_seconds_max)
        try:
            async with patience:
                return await self._read(receive, patience, bytes_max)
        except TimeoutError:
            return Problem(type="slow", title="The body did not arrive in time.", status=408)
        finally:
            self._arriving.pop(patience, None)

    async def _read(
        self, receive: Receive, patience: asyncio.Timeout, bytes_max: int
    ) -> bytes | Problem | None:
        pieces: list[bytes] = []
        size = 0
        self._note(patience, 0)
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
            self._note(patience, size if pieces else 0)
        return b"".join(pieces) if size <= bytes_max else _too_large(bytes_max)

    def _note(self, patience: asyncio.Timeout, size: int) -> None:
        """So much of a body is here; who makes it too much with it has the oldest given up."""
        self._arriving[patience] = size
        total = sum(self._arriving.values())
        while (
            len(self._arriving) > self._limits.arriving_max
            or total > self._limits.arriving_bytes_max
        ):
            oldest = next(iter(self._arriving))
            total -= self._arriving.pop(oldest)
            oldest.reschedule(asyncio.get_running_loop().time())


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        type="too large",
        title=f"A body has {bytes_max} bytes at most.",
        status=413,
        detail="Send less at a time.",
    )
