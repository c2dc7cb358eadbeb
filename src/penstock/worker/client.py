"""The way to the dispatcher's internal side, for workers and sources.

There may be several dispatchers, all equal. A call goes to the one that answered last, and to the
next when it does not answer or cannot serve now. Only when none does is it `DispatcherUnavailable`:
then whether the call was carried out is not known, and it may be made again, for every call may.
`DispatcherRefused` is an answer: no, and why. One that does not serve our release (426) is passed
over like one that is away, since a fleet that is being upgraded has others; if all that answer say
so, that is the refusal. Of a call about several tasks each has an answer of
its own, so a refused task raises nothing: it is in the results.

One pool of connections that are kept alive; every try has a bound of its own. Nothing is kept here
but which dispatcher answered last, so a crash leaves nothing. Called by the worker and by sources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import httpx
import msgspec

from penstock.dispatcher.identity import Identity
from penstock.dispatcher.wire.base import (
    PROTOCOL,
    PROTOCOL_HEADER,
    TASK_HEADER,
    WORKER_HEADER,
    Ask,
)
from penstock.dispatcher.wire.credentials import CredentialsAnswer, CredentialsAsk
from penstock.dispatcher.wire.events import (
    EventsAnswer,
    EventsAsk,
    RefusalsAnswer,
    RefusalsAsk,
    SourcesAnswer,
    TaskEventsAsk,
)
from penstock.dispatcher.wire.problem import Problem
from penstock.dispatcher.wire.work import (
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    HeartbeatAsk,
    HelloAnswer,
    HelloAsk,
    ResultsAnswer,
    WaitAnswer,
    WaitAsk,
)
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    DispatcherError,
    DispatcherRefused,
    DispatcherUnavailable,
    InvalidInput,
)
from penstock.kernel.service import Service
from penstock.kernel.wire import UNREADABLE

CALL_SECONDS: Final = 25.0
"""How long one dispatcher has to answer: a little longer than it gives itself."""
_WAITED_SECONDS_MORE: Final = 10.0
"""How much longer than it was asked to wait a dispatcher may take."""
_CONNECT_SECONDS: Final = 3.0
# Shorter than a dispatcher keeps idle connections, so that hardly a request meets a closed one.
_IDLE_SECONDS: Final = 30.0
_CONNECTIONS_MAX: Final = 16
_AWAY_SECONDS: Final = 60.0
UNSERVED: Final = 426
"""The status of a dispatcher that does not serve callers of our release."""
_NOT_NOW: Final = frozenset({408, 425, 429})
_DROPPED: Final = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

AnswerType = TypeVar("AnswerType")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    method: str
    path: str
    body: bytes = field(repr=False)
    call_seconds: float
    token: str = field(repr=False)
    """The capability token of an attempt, where the call is one of an attempt's."""


@dataclass(frozen=True, slots=True)
class _Answered:
    url: str
    status: int
    body: bytes = field(repr=False)


class InternalClient(Service):
    """Calls the internal API of whichever dispatcher answers."""

    def __init__(
        self,
        urls: Sequence[str],
        identity: Identity,
        *,
        clock: Clock,
        entropy: Entropy,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not urls:
            raise InvalidInput("There is no URL of a dispatcher.", hint="Give one or more.")
        self._urls = [_checked(url) for url in urls]
        self._identity = identity
        self._clock = clock
        # Workers that start together do not all begin with the same dispatcher, and each goes
        # back to its own after a while: a dispatcher that is back gets its share again.
        self._home = self._preferred = entropy.randrange(len(self._urls))
        self._left_at = clock.monotonic()
        self._transport = transport
        self._http: httpx.AsyncClient | None = None
        self._encode = msgspec.json.Encoder().encode

    @property
    def name(self) -> str:
        """Who calls."""
        return self._identity.name

    async def start(self) -> None:
        self._http = httpx.AsyncClient(
            headers={
                WORKER_HEADER: self._identity.name,
                PROTOCOL_HEADER: str(PROTOCOL),
                "Authorization": f"Bearer {self._identity.token}",
                "Content-Type": "application/json",
            },
            limits=httpx.Limits(
                max_connections=_CONNECTIONS_MAX,
                max_keepalive_connections=_CONNECTIONS_MAX,
                keepalive_expiry=_IDLE_SECONDS,
            ),
            transport=self._transport,
            # Dispatchers are named; a proxy for the internet has no part in this.
            trust_env=False,
        )

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def hello(self, ask: HelloAsk) -> HelloAnswer:
        """Say that a worker is there, and learn what it should serve."""
        return await self._call("POST", "/internal/hello", ask, HelloAnswer)

    async def wait(self, ask: WaitAsk) -> WaitAnswer:
        """Wait until an operator has work."""
        seconds = ask.seconds + _WAITED_SECONDS_MORE
        return await self._call("POST", "/internal/wait", ask, WaitAnswer, call_seconds=seconds)

    async def claim(self, ask: ClaimAsk) -> ClaimAnswer:
        """Begin attempts. One whose answer is lost is a lease that nobody renews."""
        return await self._call("POST", "/internal/task-claim", ask, ClaimAnswer)

    async def heartbeat(
        self, ask: HeartbeatAsk, *, call_seconds: float = CALL_SECONDS
    ) -> ResultsAnswer:
        """Extend leases; the results are in the order of the tasks."""
        return await self._results("/v1/task/heartbeat", ask, len(ask.tasks), call_seconds)

    async def complete(self, ask: CompleteAsk) -> ResultsAnswer:
        """End attempts; the results are in the order of the tasks."""
        return await self._results("/v1/task/complete", ask, len(ask.tasks), CALL_SECONDS)

    async def task_events(self, ask: TaskEventsAsk, *, token: str = "") -> EventsAnswer:
        """Send events of a running attempt."""
        return await self._call("POST", "/v1/task/events", ask, EventsAnswer, token=token)

    async def credentials(self, token: str, ask: CredentialsAsk | None = None) -> CredentialsAnswer:
        """Credentials for what a token grants, or for less."""
        return await self._call("POST", "/v1/task/credentials", ask, CredentialsAnswer, token=token)

    async def events(self, ask: EventsAsk) -> EventsAnswer:
        """Send events of a source."""
        return await self._call("POST", "/internal/events", ask, EventsAnswer)

    async def sources(self) -> SourcesAnswer:
        """The sources of the DAG in force."""
        return await self._call("GET", "/internal/sources", None, SourcesAnswer)

    async def webhook_refusals(self, ask: RefusalsAsk) -> RefusalsAnswer:
        """Have it noted that a webhook has refused requests."""
        return await self._call("POST", "/internal/webhook-refusals", ask, RefusalsAnswer)

    async def _call(
        self,
        method: str,
        path: str,
        ask: Ask | None,
        answer: type[AnswerType],
        *,
        token: str = "",
        call_seconds: float = CALL_SECONDS,
    ) -> AnswerType:
        answered = await self._send(method, path, ask, call_seconds, token=token)
        if answered.status >= 400:
            raise _refused(answered)
        return _decoded(answered, answer)

    async def _results(self, path: str, ask: Ask, count: int, call_seconds: float) -> ResultsAnswer:
        answered = await self._send("POST", path, ask, call_seconds)
        if answered.status < 400:
            return _checked_results(_decoded(answered, ResultsAnswer), count, answered)
        try:
            # A problem that has a result for each task is an answer to each.
            results = msgspec.json.decode(answered.body, type=ResultsAnswer)
        except UNREADABLE:
            raise _refused(answered) from None
        if len(results.results) != count:
            raise _refused(answered)
        return results

    async def _send(
        self, method: str, path: str, ask: Ask | None, call_seconds: float, *, token: str = ""
    ) -> _Answered:
        """The first answer of a dispatcher that can serve."""
        body = b"" if ask is None else self._encode(ask)
        asked = _Asked(method=method, path=path, body=body, call_seconds=call_seconds, token=token)
        count = len(self._urls)
        if self._clock.monotonic() - self._left_at >= _AWAY_SECONDS:
            self._preferred = self._home
        order = [(self._preferred + step) % count for step in range(count)]
        failures: list[str] = []
        unserved: _Answered | None = None
        for number in order:
            url = self._urls[number]
            try:
                answered = await self._try(url, asked)
            except DispatcherUnavailable as error:
                failures.append(error.message)
                continue
            if answered.status == UNSERVED:
                unserved = answered
                continue
            self._prefer(number)
            return answered
        # Whoever did not answer now is not the one to begin with next time.
        self._prefer(order[1 % count])
        if unserved is not None:
            raise _refused(unserved)
        raise DispatcherUnavailable(
            " ".join(failures), hint="Check that the dispatcher runs and that its URL is right."
        )

    def _prefer(self, number: int) -> None:
        if number != self._preferred:
            self._left_at = self._clock.monotonic()
            self._preferred = number

    async def _try(self, url: str, asked: _Asked) -> _Answered:
        try:
            try:
                response = await self._request(url, asked)
            except _DROPPED:
                # Most likely a kept connection that the other side has just closed.
                response = await self._request(url, asked)
        except TimeoutError:
            raise DispatcherUnavailable(
                f"{url} did not answer within {asked.call_seconds:g} s."
            ) from None
        except httpx.HTTPError as error:
            told = f": {error}" if str(error) else ""
            raise DispatcherUnavailable(
                f"{url} does not answer ({type(error).__name__}{told})."
            ) from error
        answered = _Answered(url, response.status_code, response.content)
        if answered.status >= 500 or answered.status in _NOT_NOW:
            raise DispatcherUnavailable(f"{url} cannot serve now: {_told(answered)}")
        return answered

    async def _request(self, url: str, asked: _Asked) -> httpx.Response:
        if self._http is None:
            raise InvalidInput("The client is not started.", hint="Use it as `async with client:`.")
        headers = {TASK_HEADER: asked.token} if asked.token else {}
        async with asyncio.timeout(asked.call_seconds):
            return await self._http.request(
                asked.method,
                url + asked.path,
                content=asked.body,
                headers=headers,
                timeout=httpx.Timeout(asked.call_seconds, connect=_CONNECT_SECONDS),
            )


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise InvalidInput(
            f"{url!r} is not the URL of a dispatcher.", hint="Write it as http://HOST:PORT."
        )
    return url.rstrip("/")


def _problem(answered: _Answered) -> Problem | None:
    try:
        return msgspec.json.decode(answered.body, type=Problem)
    except UNREADABLE:
        return None


def _told(answered: _Answered) -> str:
    problem = _problem(answered)
    return problem.title if problem is not None else f"it answered {answered.status}."


def _refused(answered: _Answered) -> DispatcherError:
    problem = _problem(answered)
    if problem is None:
        # Not our dispatcher's words: a proxy, or something else on that port.
        return DispatcherRefused(
            f"{answered.url} answered {answered.status}, and not as a dispatcher does.",
            status=answered.status,
            hint="Check that this is the URL of a dispatcher's internal side.",
        )
    where = f" ({problem.field})" if problem.field else ""
    return DispatcherRefused(
        f"{problem.title}{where}", status=answered.status, kind=problem.type, hint=problem.detail
    )


def _decoded(answered: _Answered, answer: type[AnswerType]) -> AnswerType:
    try:
        return msgspec.json.decode(answered.body, type=answer)
    except UNREADABLE as error:
        raise DispatcherUnavailable(
            f"{answered.url} answered {answered.status} with what is not an answer: {error}."
        ) from error


def _checked_results(results: ResultsAnswer, count: int, answered: _Answered) -> ResultsAnswer:
    if len(results.results) != count:
        raise DispatcherUnavailable(
            f"{answered.url} answered for {len(results.results)} tasks where {count} were asked."
        )
    return results
