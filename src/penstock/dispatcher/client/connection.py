"""Requests to one dispatcher over HTTP, and what their answers mean.

An answer is a struct of `dispatcher.wire`, or an error: `DispatcherUnavailable` if there was none,
or the dispatcher cannot serve now, `DispatcherRefused` if it said no, with its own sentence. A
request that may be repeated, because doing it twice is doing it once, is sent up to `TRIES` times
when its answer was lost or told to come later; so a dispatcher that is just being restarted costs
a moment. Where nobody listens, that is said at once.

Nothing is kept but the pool of httpx and the time of the last answer. Called by `client`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import TracebackType
from typing import Final, Self, TypeVar

import httpx
import msgspec

from penstock.dispatcher.dag.errors import DagError
from penstock.dispatcher.dag.errors import Problem as DagProblem
from penstock.dispatcher.wire.base import PROTOCOL, PROTOCOL_HEADER, Answer, Ask
from penstock.dispatcher.wire.problem import Problem
from penstock.dispatcher.wire.steering import TaskIdsAsk
from penstock.dispatcher.wire.work import ResultsAnswer, TaskResult
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.kernel.wire import UNREADABLE

TRIES: Final = 4
_CONNECT_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.25
_PAUSE_SECONDS_MAX: Final = 5.0

Told = TypeVar("Told", bound=Answer)

_HOST = re.compile(rb"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


@dataclass(frozen=True, slots=True)
class _Missed:
    """No answer that can be used. `pause_seconds` is None where asking again is of no use."""

    error: DispatcherUnavailable
    pause_seconds: float | None


class Connection:
    """A way to one dispatcher, or to whatever stands in front of several."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        clock: Clock,
        entropy: Entropy,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        found = _checked_url(url)
        self.url = str(found).rstrip("/")
        self._clock = clock
        self._entropy = entropy
        self._answered: tuple[float, float] | None = None
        headers = {"Accept": "application/json", PROTOCOL_HEADER: str(PROTOCOL)}
        if token is not None:
            headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(_REQUEST_SECONDS, connect=_CONNECT_SECONDS),
            transport=transport,
            # A proxy is the way out of a network; this machine is not out there.
            trust_env=not _is_here(found.host),
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    def now(self) -> float:
        """The dispatcher's time by its last answer, in seconds since the epoch, to the second."""
        if self._answered is None:
            return self._clock.wall()
        said, heard_at = self._answered
        return said + self._clock.monotonic() - heard_at

    async def get(
        self, path: str, told: type[Told], *, asked: Mapping[str, str | int | None] | None = None
    ) -> Told:
        """Ask for something; what is None is left out of the query."""
        query = {name: value for name, value in (asked or {}).items() if value is not None}
        request = self._request("GET", path, query=query)
        return self._read(await self._answer(request, is_repeatable=True), told)

    async def send(
        self,
        path: str,
        told: type[Told],
        ask: Ask | None = None,
        *,
        method: str = "POST",
        is_repeatable: bool = True,
        where: str = "",
    ) -> Told:
        """Ask for something to be done; `where` is what a DAG in the request is called."""
        request = self._request(method, path, ask=ask)
        response = await self._answer(request, is_repeatable=is_repeatable)
        return self._read(response, told, where=where)

    async def send_tasks(
        self, path: str, ask: TaskIdsAsk, *, is_repeatable: bool = True
    ) -> list[TaskResult]:
        """The same about several tasks, which are refused one by one: a refusal is an answer."""
        request = self._request("POST", path, ask=ask)
        response = await self._answer(request, is_repeatable=is_repeatable)
        if response.is_client_error:
            # A problem has them too, where all were refused and not the request as such.
            with suppress(*UNREADABLE):
                found = msgspec.json.decode(response.content, type=ResultsAnswer)
                if found.results:
                    return found.results
        return self._read(response, ResultsAnswer).results

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        ask: Ask | None = None,
    ) -> httpx.Request:
        try:
            body = None if ask is None else msgspec.json.encode(ask)
            headers = {} if ask is None else {"Content-Type": "application/json"}
            url = f"{self.url}{path}"
            return self._http.build_request(
                method, url, params=query or None, content=body, headers=headers
            )
        except (UnicodeEncodeError, httpx.InvalidURL) as error:
            raise InvalidInput("What was given has characters that are not text.") from error

    async def _answer(self, request: httpx.Request, *, is_repeatable: bool) -> httpx.Response:
        pause = _PAUSE_SECONDS
        for left in reversed(range(TRIES if is_repeatable else 1)):
            found = await self._sent(request, is_repeatable=is_repeatable)
            if isinstance(found, httpx.Response):
                return found
            if found.pause_seconds is None or not left:
                raise found.error
            wanted = max(pause, found.pause_seconds) * self._entropy.uniform(1.0, 1.5)
            await self._clock.sleep(min(wanted, _PAUSE_SECONDS_MAX))
            pause *= 2
        raise AssertionError("the last try answers or raises")

    async def _sent(
        self, request: httpx.Request, *, is_repeatable: bool
    ) -> httpx.Response | _Missed:
        unknown = "" if is_repeatable else "It may have been done all the same: look first. "
        again = f"{unknown}Try again, or see what the dispatcher's log says."
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                response = await self._http.send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # With TLS somebody may be there whose certificate is not trusted.
            why = f": {error}" if request.url.scheme == "https" and str(error) else ""
            nobody = DispatcherUnavailable(
                f"No dispatcher answers at {self.url}{why}.",
                hint="Start one with 'penstock up', or say where it is: --url or PENSTOCK_URL.",
            )
            return _Missed(nobody, None)
        except (httpx.TimeoutException, TimeoutError):
            silent = f"The dispatcher at {self.url} did not answer in {_REQUEST_SECONDS:.0f} s."
            return _Missed(DispatcherUnavailable(silent, hint=again), None)
        except (httpx.HTTPError, httpx.StreamError) as error:
            said = f": {error}" if str(error) else ""
            broken = f"The connection to the dispatcher at {self.url} broke off{said}."
            return _Missed(DispatcherUnavailable(broken, hint=again), 0.0)
        self._note_time(response)
        if response.is_server_error:
            return _Missed(self._not_now(response, again), _retry_after_seconds(response))
        return response

    def _note_time(self, response: httpx.Response) -> None:
        try:
            said = parsedate_to_datetime(response.headers["Date"]).timestamp()
        except (KeyError, ValueError):
            return
        self._answered = said, self._clock.monotonic()

    def _not_now(self, response: httpx.Response, again: str) -> DispatcherUnavailable:
        problem = _problem(response)
        if problem is not None:
            return DispatcherUnavailable(problem.title, hint=problem.detail or again)
        return DispatcherUnavailable(
            f"The dispatcher at {self.url} cannot serve now: it answered {_named(response)}.",
            hint=again,
        )

    def _read(self, response: httpx.Response, told: type[Told], *, where: str = "") -> Told:
        if not response.is_success:
            raise self._refusal(response, where=where)
        try:
            return msgspec.json.decode(response.content, type=told)
        except UNREADABLE as error:
            raise DispatcherRefused(
                f"The answer of {self.url} is not one that this release can read: {error}.",
                status=response.status_code,
                kind="unreadable",
                hint="Is it the public address of a dispatcher, of the same release as this?",
            ) from error

    def _refusal(self, response: httpx.Response, *, where: str) -> DispatcherRefused | InvalidInput:
        problem = _problem(response)
        if problem is None:
            return DispatcherRefused(
                f"{self.url} answered {_named(response)}, and not as a dispatcher does.",
                status=response.status_code,
                kind="unreadable",
                hint="Is it the public address of a dispatcher?",
            )
        if problem.problems:
            found = [
                DagProblem(each.line, 1, each.field, each.message) for each in problem.problems
            ]
            return DagError(found, where=where)
        return DispatcherRefused(
            _sentence(problem),
            status=problem.status,
            kind=problem.type,
            field=problem.field,
            hint=_next_step(problem),
        )


def _checked_url(url: str) -> httpx.URL:
    wrong = f"{url!r} is not the URL of a dispatcher."
    hint = "For example: http://127.0.0.1:7070"
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError, TypeError) as error:
        raise InvalidInput("That is not the URL of a dispatcher.", hint=hint) from error
    if found.userinfo:
        raise InvalidInput("Credentials do not go into the URL; there is a token for them.")
    is_whole = found.scheme in ("http", "https") and _HOST.fullmatch(found.raw_host)
    if not is_whole or found.query or found.fragment:
        raise InvalidInput(wrong, hint=hint)
    return found


def _checked_token(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput("A token has printable ASCII characters, and no spaces.")
    return token


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _problem(response: httpx.Response) -> Problem | None:
    try:
        return msgspec.json.decode(response.content, type=Problem)
    except UNREADABLE:
        return None


def _named(response: httpx.Response) -> str:
    try:
        return f"{response.status_code} {HTTPStatus(response.status_code).phrase}"
    except ValueError:
        return str(response.status_code)


def _retry_after_seconds(response: httpx.Response) -> float | None:
    """How long to wait before asking again; None if that is of no use."""
    if response.status_code not in (502, 503, 504):
        return None
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdecimal() and said.isascii() else 0.0


def _sentence(problem: Problem) -> str:
    """What the dispatcher says is wrong, with the work that a DAG would break."""
    field = f" (in {problem.field})" if problem.field and problem.field not in problem.title else ""
    lines = [
        f"{each.job}: {each.waiting:,} waiting, {each.running:,} running,"
        f" {each.backfills:,} backfill{'' if each.backfills == 1 else 's'}"
        for each in problem.breaks
    ]
    return "\n  ".join([f"{problem.title}{field}", *lines])


def _next_step(problem: Problem) -> str:
    if problem.breaks:
        return "Wait for it to end, or cancel it with --force, or force=True."
    if problem.type == "uncovered" and problem.detail:
        return "With --force, or force=True, they may be missing."
    if problem.detail:
        return problem.detail
    if problem.status == HTTPStatus.UNAUTHORIZED:
        return "Give the token of the API: --token or PENSTOCK_API_TOKEN."
    return ""
