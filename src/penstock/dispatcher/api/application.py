"""The ASGI application of a listener: a request becomes a call of a handler, failures a `Problem`.

No middleware: fixed paths are found in a dict, decoders are made once, nothing is done twice.
The order: the protocol's number (a caller of a release that cannot be served is told which side
to upgrade), path (404) and method (405), proof (401, 403), parameters (422), the body within
its bounds (408, 413), its form (400, 422), room (503), the handler within its time (503). A
handler whose time is over is cancelled, and with it its transaction.

A request takes a place only when it is here whole, and one of those that its caller may have:
an unauthenticated caller never takes a place that workers need. A crash loses the answer, never
what was done: every operation may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import msgspec

from penstock.dispatcher.api.auth import Authenticator
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import (
    PARAMETER,
    ApiCall,
    ApiEndpoint,
    HttpReply,
    RequiredProof,
    pattern_of,
)
from penstock.dispatcher.api.problems import not_as_declared, not_json, problem_of, unknown
from penstock.dispatcher.api.requests import (
    Headers,
    Message,
    Receive,
    RequestAdmission,
    RequestLimits,
    be_known,
    parameters,
)
from penstock.dispatcher.metrics import Counters
from penstock.kernel.clock import Clock, SystemClock
from penstock.protocol.base import PROTOCOL, PROTOCOL_HEADER, PROTOCOL_MIN, Answer
from penstock.protocol.problem import Problem

_HEADER: Final = PROTOCOL_HEADER.lower().encode()
_NUMBER: Final = re.compile(rb"[1-9][0-9]{0,8}")


def unserved(
    headers: Headers, *, least: int = PROTOCOL_MIN, most: int = PROTOCOL
) -> Problem | None:
    """Why a caller of this release cannot be served; None if it can, or does not say."""
    said = next((value.strip() for name, value in headers if name == _HEADER), None)
    if said is None or (_NUMBER.fullmatch(said) and least <= int(said) <= most):
        return None
    if not _NUMBER.fullmatch(said):
        title = f"`{PROTOCOL_HEADER}` must be a number from 1."
        return Problem(type="malformed", title=title, status=400)
    number = int(said)
    if number < least:
        title = "The caller runs an earlier release of Penstock than this dispatcher supports"
        detail = "Upgrade it to the release of the dispatcher, and restart it."
    else:
        title = "The caller runs a later release of Penstock than this dispatcher"
        detail = "Upgrade the dispatchers to that release first, then their callers."
    known = f"{least}" if least == most else f"{least} to {most}"
    return Problem(
        type="release",
        title=f"{title} (protocol {number}; it supports {known}).",
        status=426,
        detail=detail,
    )


class Prover(Protocol):
    """Who judges what callers show."""

    async def refusal(
        self, proof: RequiredProof, headers: Headers, call: ApiCall
    ) -> Problem | None:
        """Why a caller may not go on; None if it may, and then `call` says who it is."""
        ...


Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Found = TypeVar("Found")

_log = logging.getLogger(__name__)
_access = logging.getLogger("penstock.dispatcher.access")

_JSON: Final = b"application/json"
_PROBLEM: Final = b"application/problem+json"
# What msgspec raises for bytes that are not JSON: nesting that is too deep and text that is not
# UTF-8 are not among its own errors.
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LEFT: Final = 499
"""What the log says of callers that have left before they could be answered."""
_MIXED_UP: Final = "There is nothing at this path of the {} listener; it is one of the {} listener."
_PUBLIC_PORT: Final = "Its port is 7070, or what --port or PENSTOCK_PORT of the dispatcher says."
_INTERNAL_PORT: Final = (
    "Its port is 7071, or what --internal-port or PENSTOCK_INTERNAL_PORT of the dispatcher says."
)
_encode = msgspec.json.Encoder().encode


class _Route:
    """An endpoint, with what it needs for each request made beforehand."""

    __slots__ = ("decoder", "endpoint", "names", "seconds_max")

    def __init__(self, endpoint: ApiEndpoint, limits: RequestLimits) -> None:
        self.endpoint = endpoint
        self.decoder = msgspec.json.Decoder(endpoint.ask) if endpoint.ask is not None else None
        self.seconds_max = endpoint.request_seconds_max or limits.request_seconds_max
        self.names = frozenset(name for name, _ in PARAMETER.findall(endpoint.path))


Routes = Mapping[str, _Route]
"""The endpoints of a path, by method."""


class Application:
    """The ASGI application of one listener."""

    def __init__(
        self,
        name: str,
        endpoints: Iterable[ApiEndpoint],
        parts: ApiContext,
        *,
        counters: Counters | None = None,
        limits: RequestLimits | None = None,
        clock: Clock | None = None,
        under: Mapping[str, Application] | None = None,
        proving: Prover | None = None,
    ) -> None:
        """`under` are others, by what the paths begin with that they answer.

        `proving` judges proofs; None is as dispatchers do.
        """
        self.name = name
        self._under = under or {}
        self._parts = parts
        self._counters = counters or Counters()
        self._limits = limits or RequestLimits()
        self._clock = clock or SystemClock()
        self._known = RequestAdmission(self._limits, requests_max=self._limits.requests_max)
        self._limited = RequestAdmission(
            self._limits, requests_max=self._limits.limited_requests_max
        )
        self._anonymous = RequestAdmission(
            self._limits, requests_max=self._limits.anonymous_requests_max
        )
        self._proving: Prover = proving or Authenticator(parts)
        self._fixed: dict[str, dict[str, _Route]] = {}
        patterns: dict[str, dict[str, _Route]] = {}
        for each in endpoints:
            table = patterns if "{" in each.path else self._fixed
            table.setdefault(each.path, {})[each.method] = _Route(each, self._limits)
        self._patterns = [(pattern_of(path), routes) for path, routes in patterns.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is served, not {scope['type']}")
        for prefix, other in self._under.items():
            if scope["path"].startswith(prefix):
                await other(scope, receive, send)
                return
        began = self._clock.monotonic()
        call = ApiCall(address=(scope.get("client") or ("",))[0])
        is_probe = False
        routes, call.path = self._find(scope["path"])
        route = routes.get(scope["method"])
        if route is None and scope["method"] == "HEAD":
            route = routes.get("GET")
        if route is not None:
            is_probe = route.endpoint.is_probe
            call.what = f"{route.endpoint.method} {route.endpoint.path}"
            answer = await self._answer(route, scope, receive, call)
        else:
            answer = self.not_routed(routes, scope["method"], scope["path"])
        if isinstance(answer, Problem):
            answer = self.refusal(answer)
        if isinstance(answer, HttpReply) and answer.stream is not None:
            status = await _send_stream(send, receive, answer, answer.stream)
        else:
            status = _LEFT if answer is None else await _send(send, answer, routes)
        if not is_probe:
            took_seconds = self._clock.monotonic() - began
            method, path = ("", "") if route is None else (scope["method"], route.endpoint.path)
            self._counters.note_call(
                listener=self.name, method=method, path=path, status=status, seconds=took_seconds
            )
            self._note(scope, call, status, took_seconds)

    def not_routed(self, routes: Routes, method: str, path: str) -> Problem:
        """What to say of a path, or of a method of it, that nothing answers."""
        return _not_routed(self.name, routes, method, path)

    def refusal(self, problem: Problem) -> Problem | HttpReply:
        """How a problem is told."""
        return problem

    def _find(self, path: str) -> tuple[Routes, Mapping[str, str]]:
        if (routes := self._fixed.get(path)) is not None:
            return routes, {}
        for pattern, routes in self._patterns:
            if (found := pattern.fullmatch(path)) is not None:
                return routes, found.groupdict()
        return {}, {}

    async def _answer(
        self, route: _Route, scope: Scope, receive: Receive, call: ApiCall
    ) -> Answer | HttpReply | None:
        """What to say; None to nobody."""
        headers = scope["headers"]
        endpoint = route.endpoint
        if (problem := unserved(headers)) is not None:
            return problem
        if (problem := await self._unproved(route, headers, call)) is not None:
            return problem
        if call.is_known:
            be_known(scope, is_limited=call.is_limited)
        admission = self._admission(call)
        if endpoint.params is not None:
            query = scope["query_string"]
            call.params = parameters(endpoint.params, query, path=call.path, names=route.names)
            if isinstance(call.params, Problem):
                return call.params
        if route.decoder is not None:
            bytes_max = endpoint.body_bytes_max
            body = await admission.body(headers, receive, bytes_max=bytes_max)
            if not isinstance(body, bytes):
                return body
            if (problem := _decode(route, body, call)) is not None:
                return problem
        return await self._carry_out(route, call, receive, admission)

    async def _carry_out(
        self, route: _Route, call: ApiCall, receive: Receive, admission: RequestAdmission
    ) -> Answer | HttpReply | None:
        if route.endpoint.is_wait:
            return await self._handle_until_left(route, call, receive)
        if route.endpoint.is_stream:
            return await self._begin_stream(route, call, receive, admission)
        return await self._handle_in_turn(route, call, admission)

    def _admission(self, call: ApiCall) -> RequestAdmission:
        if not call.is_known:
            return self._anonymous
        return self._limited if call.is_limited else self._known

    async def _handle(self, route: _Route, call: ApiCall) -> Answer | HttpReply:
        return await self._within_time(route, route.endpoint.handler(self._parts, call))

    async def _handle_in_turn(
        self, route: _Route, call: ApiCall, admission: RequestAdmission
    ) -> Answer | HttpReply:
        if route.endpoint.is_probe:
            return await self._handle(route, call)
        attempt = call.claims.sub if call.is_limited and call.claims is not None else ""
        with admission.place(attempt) as busy:
            return busy or await self._handle(route, call)

    async def _begin_stream(
        self, route: _Route, call: ApiCall, receive: Receive, admission: RequestAdmission
    ) -> Answer | HttpReply | None:
        """An answer that may go on; its place is held until its stream is closed."""
        with ExitStack() as stack:
            attempt = call.claims.sub if call.is_limited and call.claims is not None else ""
            if (busy := stack.enter_context(admission.place(attempt))) is not None:
                return busy
            answer = await self._handle_until_left(route, call, receive)
            if not isinstance(answer, HttpReply) or answer.stream is None:
                return answer
            return replace(answer, stream=_holding(answer.stream, stack.pop_all()))

    async def _handle_until_left(
        self, route: _Route, call: ApiCall, receive: Receive
    ) -> Answer | HttpReply | None:
        """The answer, or None as soon as the caller has left."""
        async with asyncio.TaskGroup() as group:
            handling = group.create_task(self._handle(route, call))
            leaving = group.create_task(_left(receive))
            await asyncio.wait({handling, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_answered = handling.done()
            handling.cancel()
            leaving.cancel()
        return handling.result() if is_answered else None

    async def _unproved(self, route: _Route, headers: Headers, call: ApiCall) -> Problem | None:
        """Why this caller may not go on, or why that is not known; None if it may."""
        judging = self._proving.refusal(route.endpoint.proof, headers, call)
        return await self._within_time(route, judging)

    async def _within_time(self, route: _Route, work: Awaitable[Found]) -> Found | Problem:
        try:
            async with asyncio.timeout(route.seconds_max):
                return await work
        except Exception as error:  # noqa: BLE001 - every error has an answer
            if (found := problem_of(error)) is not None:
                return found
            _log.exception("%s %s failed", route.endpoint.method, route.endpoint.path)
            title = "Internal error of the dispatcher; its log has the traceback."
            return Problem(type="mistake", title=title, status=500)

    def _note(self, scope: Scope, call: ApiCall, status: int, took_seconds: float) -> None:
        # Workers call all the time: what went well is worth a line to nobody.
        is_routine = self.name == "internal" and status < 400
        level = logging.DEBUG if is_routine else logging.INFO
        if not _access.isEnabledFor(level):
            return
        said = {
            "listener": self.name,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "took_ms": round(took_seconds * 1000, 1),
            "client": call.address,
            "worker": call.worker,
        }
        # The path is quoted: it may have anything in it, also ends of lines.
        _access.log(
            level,
            "%s %r %d in %.1f ms",
            *(scope["method"], scope["path"], status, said["took_ms"]),
            extra={"request": said},
        )


async def _holding(stream: AsyncGenerator[bytes], held: ExitStack) -> AsyncGenerator[bytes]:
    with held:
        async with aclosing(stream):
            yield b""
            async for piece in stream:
                yield piece


async def _send_stream(
    send: Send, receive: Receive, answer: HttpReply, stream: AsyncGenerator[bytes]
) -> int:
    """Send an answer that goes on, until its end or until its caller leaves.

    An error cuts it off, so that nobody takes what was sent for the whole.
    """
    async with aclosing(stream):
        # From here on closing it gives its place back.
        await anext(stream)
        headers = [*answer.headers, (b"content-type", answer.content_type)]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})

        async def sent() -> None:
            async for piece in stream:
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        async with asyncio.TaskGroup() as group:
            sending = group.create_task(sent())
            leaving = group.create_task(_left(receive))
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_sent = sending.done()
            sending.cancel()
            leaving.cancel()
    return answer.status if is_sent else _LEFT


async def _left(receive: Receive) -> None:
    """Return when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _not_routed(listener: str, routes: Routes, method: str, path: str) -> Problem:
    if not routes:
        is_internal = path.startswith(("/internal/", "/v1/task/"))
        is_public = path.startswith(("/v1/", "/metrics")) and not is_internal
        if listener == "public" and is_internal:
            return unknown(_MIXED_UP.format("public", "internal"), detail=_INTERNAL_PORT)
        if listener == "internal" and is_public:
            return unknown(_MIXED_UP.format("internal", "public"), detail=_PUBLIC_PORT)
        return unknown("No such path.", detail="`/openapi.json` has all paths.")
    title = f"This path has no {method[:20]}; it has {' and '.join(routes)}."
    return Problem(type="method", title=title, status=405)


def _decode(route: _Route, body: bytes, call: ApiCall) -> Problem | None:
    assert route.decoder is not None, "looked at by the caller"
    if not body and route.endpoint.may_omit_body:
        body = b"{}"
    try:
        call.ask = route.decoder.decode(body)
    except msgspec.ValidationError as error:
        return not_as_declared(error, kind=route.endpoint.ask)
    except _UNREADABLE as error:
        return not_json(error)
    return None


async def _send(send: Send, answer: Answer | HttpReply, routes: Routes) -> int:
    status, kind = 200, _JSON
    headers: list[tuple[bytes, bytes]] = []
    body: Answer | bytes
    if isinstance(answer, HttpReply):
        status, kind, body = answer.status, answer.content_type, answer.body
        headers += answer.headers
    else:
        body = answer
    if isinstance(body, Problem):
        status, kind = body.status, _PROBLEM
        headers += _problem_headers(status, routes)
    content = body if isinstance(body, bytes) else _encode(body)
    headers.append((b"content-type", kind))
    headers.append((b"content-length", b"%d" % len(content)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
    return status


def _problem_headers(status: int, routes: Routes) -> list[tuple[bytes, bytes]]:
    match status:
        case 401:
            return [(b"www-authenticate", b"Bearer")]
        case 405:
            return [(b"allow", ", ".join(routes).encode())]
        case 408 | 413:
            # What is left of the body is not waited for.
            return [(b"connection", b"close")]
        case 426:
            return [(b"upgrade", b"penstock/%d" % PROTOCOL)]
        case 503:
            return [(b"retry-after", b"1")]
    return []
