"""The client of the dispatcher's internal API, for workers, sources and query services.

Every call may be repeated. `DispatcherUnavailable` is that no
dispatcher answered, or none can serve now: whether the call was carried out is then unknown.
`DispatcherRefused` is an answer: no, and why. A call about several tasks has a result for each, so
a refused task raises nothing: it is in the results. How one that answers is found says
`penstock.protocol.client`. `Backoff` is the pause before the next try: exponential, with jitter,
up to a bound. A query service has no identity of its own: it shows the proof of whoever queries.
Called by the worker, sources and `query.service`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import UNREADABLE
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import (
    DispatcherRefused,
    DispatcherUnavailable,
    InvalidInput,
)
from penstock.kernel.service import Service
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER, Ask
from penstock.protocol.client import (
    DispatcherCaller,
    DispatcherMiss,
    DispatcherReply,
    DispatcherTransport,
    MissKind,
    NoReply,
    refusal,
)
from penstock.protocol.events import (
    EventsAnswer,
    EventsAsk,
    RefusalsAnswer,
    RefusalsAsk,
    SourcesAnswer,
    TaskEventsAsk,
)
from penstock.protocol.identity import Identity
from penstock.protocol.queries import QueryBeginAnswer, QueryBeginAsk, QueryEndAnswer, QueryEndAsk
from penstock.protocol.work import (
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    CredentialsAnswer,
    CredentialsAsk,
    HeartbeatAsk,
    HelloAnswer,
    HelloAsk,
    ResultsAnswer,
    WaitAnswer,
    WaitAsk,
)

if TYPE_CHECKING:
    from penstock.tokens.verifier import Jwk

CALL_SECONDS: Final = 25.0
"""How long one dispatcher has to answer: a little longer than it gives itself."""
_FAULT: Final = 500
_QUERY_SECONDS: Final = 15.0
_KEYS_SECONDS: Final = 3.0
_WAITED_SECONDS_MORE: Final = 10.0
"""How much longer than it was asked to wait a dispatcher may take."""

AnswerType = TypeVar("AnswerType")


class Backoff:
    """Pauses that double up to a bound, each made shorter at random so that many spread out."""

    def __init__(
        self, entropy: Entropy, *, first_seconds: float = 0.25, most_seconds: float = 10.0
    ) -> None:
        self._entropy = entropy
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self.failures = 0

    def next_seconds(self, *, most_seconds: float | None = None) -> float:
        """The pause after one more failure."""
        most = self._most_seconds if most_seconds is None else min(self._most_seconds, most_seconds)
        pause = min(most, self._first_seconds * 2.0 ** min(self.failures, 20))
        self.failures += 1
        return self._entropy.uniform(pause / 2, pause)

    def succeeded(self) -> bool:
        """Begin anew; returns whether this ends a row of failures."""
        had_failed = self.failures > 0
        self.failures = 0
        return had_failed


class InternalClient(Service):
    """Calls the internal API of whichever dispatcher answers."""

    def __init__(
        self,
        urls: Sequence[str],
        identity: Identity | None,
        *,
        clock: Clock,
        entropy: Entropy,
        transport: DispatcherTransport | None = None,
    ) -> None:
        self._name = "" if identity is None else identity.name
        headers = (
            {}
            if identity is None
            else {WORKER_HEADER: identity.name, "Authorization": f"Bearer {identity.token}"}
        )
        self._caller = DispatcherCaller(
            urls, headers, clock=clock, entropy=entropy, transport=transport
        )
        self._is_started = False
        self._encode = msgspec.json.Encoder().encode

    @property
    def name(self) -> str:
        """Who calls."""
        return self._name

    @property
    def urls(self) -> tuple[str, ...]:
        """The dispatchers that it calls."""
        return tuple(self._caller.urls)

    async def start(self) -> None:
        self._is_started = True

    async def stop(self) -> None:
        self._is_started = False
        await self._caller.close()

    async def hello(self, ask: HelloAsk) -> HelloAnswer:
        """Say that a worker is there, and learn what it should serve."""
        return await self._call("POST", "/internal/hello", ask, HelloAnswer)

    async def wait(self, ask: WaitAsk) -> WaitAnswer:
        """Wait until an operator has work."""
        seconds = ask.seconds + _WAITED_SECONDS_MORE
        return await self._call("POST", "/internal/wait", ask, WaitAnswer, call_seconds=seconds)

    async def claim(self, ask: ClaimAsk) -> ClaimAnswer:
        """Begin attempts. One whose answer is lost brings the same ones, if it has an id."""
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

    async def begin_query(self, ask: QueryBeginAsk, proof: Mapping[str, str]) -> QueryBeginAnswer:
        """What a query may read by the proof of who asks; the same ticket begins the same query."""
        path = "/internal/query/begin"
        return await self._call(
            "POST", path, ask, QueryBeginAnswer, proof=proof, call_seconds=_QUERY_SECONDS
        )

    async def end_query(self, ask: QueryEndAsk, proof: Mapping[str, str]) -> QueryEndAnswer:
        """Say what became of a query."""
        path = "/internal/query/end"
        return await self._call(
            "POST", path, ask, QueryEndAnswer, proof=proof, call_seconds=_QUERY_SECONDS
        )

    async def keys(self) -> Mapping[str, Jwk]:
        """The keys that sign tokens, by their names: this is a `KeySource`."""
        # Only now: workers verify nothing, and need no cryptography.
        from penstock.tokens.verifier import JWKS_PATH, keys_of  # noqa: PLC0415

        answered = await self._send("GET", JWKS_PATH, None, _KEYS_SECONDS)
        try:
            if answered.status >= 400:
                raise refusal(answered, side="internal")
            return keys_of(answered.body)
        except (DispatcherRefused, InvalidInput) as error:
            raise DispatcherUnavailable(
                f"Failed to fetch the keys that sign tokens: {error.message}", hint=error.hint
            ) from error

    async def _call(
        self,
        method: str,
        path: str,
        ask: Ask | None,
        answer: type[AnswerType],
        *,
        token: str = "",
        proof: Mapping[str, str] | None = None,
        call_seconds: float = CALL_SECONDS,
    ) -> AnswerType:
        headers = {TASK_HEADER: token} if token else proof
        answered = await self._send(method, path, ask, call_seconds, headers=headers)
        if answered.status >= 400:
            raise refusal(answered, side="internal")
        return _decoded(answered, answer)

    async def _results(self, path: str, ask: Ask, count: int, call_seconds: float) -> ResultsAnswer:
        answered = await self._send("POST", path, ask, call_seconds)
        if answered.status < 400:
            return _checked_results(_decoded(answered, ResultsAnswer), count, answered)
        try:
            # A problem that has a result for each task is an answer to each.
            results = msgspec.json.decode(answered.body, type=ResultsAnswer)
        except UNREADABLE:
            raise refusal(answered, side="internal") from None
        if len(results.results) != count:
            raise refusal(answered, side="internal")
        return results

    async def _send(
        self,
        method: str,
        path: str,
        ask: Ask | None,
        call_seconds: float,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> DispatcherReply:
        if not self._is_started:
            raise InvalidInput("The client is not started.", hint="Use it as `async with client:`.")
        body = b"" if ask is None else self._encode(ask)
        try:
            return await self._caller.send(
                method, path, body, seconds=call_seconds, headers=headers
            )
        except NoReply as error:
            raise DispatcherUnavailable(
                " ".join(_told(each, call_seconds) for each in error.misses),
                hint="Check that the dispatcher runs and that its URL is right.",
                is_faulty=any(
                    each.reply is not None and each.reply.status == _FAULT for each in error.misses
                ),
            ) from error


def _told(miss: DispatcherMiss, call_seconds: float) -> str:
    match miss.kind:
        case MissKind.SILENT:
            return f"{miss.url} did not answer within {call_seconds:g} s."
        case MissKind.NOBODY | MissKind.LOST:
            return f"{miss.url} does not answer ({miss.why})."
        case MissKind.NOT_NOW:
            assert miss.reply is not None, "it was said"
            problem = miss.reply.problem
            why = problem.title if problem is not None else f"it answered {miss.reply.status}."
            return f"{miss.url} cannot serve now: {why}"


def _decoded(answered: DispatcherReply, answer: type[AnswerType]) -> AnswerType:
    try:
        return msgspec.json.decode(answered.body, type=answer)
    except UNREADABLE as error:
        raise DispatcherUnavailable(
            f"{answered.url} answered {answered.status} with an invalid body: {error}.",
            is_faulty=True,
        ) from error


def _checked_results(
    results: ResultsAnswer, count: int, answered: DispatcherReply
) -> ResultsAnswer:
    if len(results.results) != count:
        raise DispatcherUnavailable(
            f"{answered.url} answered for {len(results.results)} tasks instead of {count}."
        )
    return results
