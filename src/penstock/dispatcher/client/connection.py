"""Requests of `penstock.Client` to one dispatcher, and what their answers mean.

An answer is a struct of `penstock.protocol`, or an error: `DispatcherUnavailable` if there was
none, or the dispatcher cannot serve now, `DispatcherRefused` if it refused, with its own
message. A request that may be repeated, because doing it twice is doing it once, is sent up to
`TRIES` times when its answer was lost or told to come later; so a dispatcher that is just being
restarted costs a moment. Where nobody listens, that is said at once. The requests themselves are
those of `penstock.protocol.client`.

Nothing is kept but connections and the time of the last answer. Called by `client`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Final, TypeVar
from urllib.parse import urlencode

import msgspec

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import UNREADABLE
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.protocol.base import Answer, Ask
from penstock.protocol.client import (
    DispatcherCaller,
    DispatcherMiss,
    DispatcherReply,
    DispatcherTransport,
    MissKind,
    NoReply,
    proxy_of,
    refusal,
)
from penstock.protocol.problem import DagDiagnostic as DagProblem
from penstock.protocol.problem import DagError, Problem
from penstock.protocol.steering import TaskIdsAsk
from penstock.protocol.work import ResultsAnswer, TaskResult

TRIES: Final = 4
_CONNECT_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.25
_PAUSE_SECONDS_MAX: Final = 5.0

Told = TypeVar("Told", bound=Answer)


class DispatcherConnection:
    """A way to one dispatcher, or to whatever stands in front of several."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        clock: Clock,
        entropy: Entropy,
        transport: DispatcherTransport | None = None,
    ) -> None:
        headers = {"Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._caller = DispatcherCaller(
            [url],
            headers,
            clock=clock,
            entropy=entropy,
            transport=transport,
            lost_tries=1,
            connect_seconds=_CONNECT_SECONDS,
            # A proxy is the way out of a network.
            uses_proxies=True,
        )
        (self.url,) = self._caller.urls
        self._clock = clock
        self._entropy = entropy
        self._answered: tuple[float, float] | None = None

    async def close(self) -> None:
        """End what is in flight."""
        await self._caller.close()

    def now(self) -> float:
        """The dispatcher's time by its last answer, in seconds since the epoch, to the second."""
        if self._answered is None:
            return self._clock.wall()
        said, received_at = self._answered
        return said + self._clock.monotonic() - received_at

    async def get(
        self, path: str, told: type[Told], *, asked: Mapping[str, str | int | None] | None = None
    ) -> Told:
        """Ask for something; what is None is left out of the query."""
        query = {name: value for name, value in (asked or {}).items() if value is not None}
        try:
            whole = f"{path}?{urlencode(query)}" if query else path
        except UnicodeEncodeError as error:
            raise InvalidInput("What was given has characters that are not text.") from error
        return self._read(await self._answer("GET", whole, None, is_repeatable=True), told)

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
        reply = await self._answer(method, path, ask, is_repeatable=is_repeatable)
        return self._read(reply, told, where=where)

    @asynccontextmanager
    async def stream(self, path: str, ask: Ask) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pieces of an answer that goes on. It is not repeated: it may take long.

        By httpx: the connections of `penstock.protocol.client` have answers whole.
        """
        try:
            import httpx  # noqa: PLC0415 - nothing else needs it
        except ModuleNotFoundError as error:
            raise InvalidInput(
                "Answers of queries need httpx, which is not installed.",
                hint="Install it with: pip install 'penstock[dispatcher]'",
            ) from error
        try:
            async with (
                httpx.AsyncClient(
                    headers=self._caller.headers,
                    timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                    trust_env=proxy_of(self.url) is not None,
                ) as http,
                http.stream(
                    "POST", f"{self.url}{path}", content=msgspec.json.encode(ask)
                ) as answer,
            ):
                if not answer.is_success:
                    await answer.aread()
                    said = DispatcherReply(
                        self.url, answer.status_code, answer.headers, answer.content
                    )
                    self._read(said, Answer)
                yield answer.aiter_bytes()
        except httpx.HTTPError as error:
            raise DispatcherUnavailable(
                f"The answer of {self.url} broke off ({type(error).__name__}).",
                hint="Ask again; 'penstock logs query-service' may say why.",
            ) from error

    async def send_tasks(
        self, path: str, ask: TaskIdsAsk, *, is_repeatable: bool = True
    ) -> list[TaskResult]:
        """The same about several tasks, which are refused one by one: a refusal is an answer."""
        reply = await self._answer("POST", path, ask, is_repeatable=is_repeatable)
        if 400 <= reply.status < 500:
            # A problem has them too, where all were refused and not the request as such.
            with suppress(*UNREADABLE):
                found = msgspec.json.decode(reply.body, type=ResultsAnswer)
                if found.results:
                    return found.results
        return self._read(reply, ResultsAnswer).results

    async def _answer(
        self, method: str, path: str, ask: Ask | None, *, is_repeatable: bool
    ) -> DispatcherReply:
        try:
            body = b"" if ask is None else msgspec.json.encode(ask)
        except UnicodeEncodeError as error:
            raise InvalidInput("What was given has characters that are not text.") from error
        pause = _PAUSE_SECONDS
        for left in reversed(range(TRIES if is_repeatable else 1)):
            try:
                reply = await self._caller.send(method, path, body, seconds=_REQUEST_SECONDS)
            except NoReply as error:
                (miss,) = error.misses
            else:
                self._note_time(reply)
                return reply
            if miss.reply is not None:
                self._note_time(miss.reply)
                if miss.reply.status < 500:
                    return miss.reply
            wait_seconds = _wait_seconds(miss)
            if wait_seconds is None or not left:
                raise self._unavailable(miss, is_repeatable=is_repeatable)
            wanted = max(pause, wait_seconds) * self._entropy.uniform(1.0, 1.5)
            await self._clock.sleep(min(wanted, _PAUSE_SECONDS_MAX))
            pause *= 2
        raise AssertionError("the last try answers or raises")

    def _unavailable(self, miss: DispatcherMiss, *, is_repeatable: bool) -> DispatcherUnavailable:
        unknown = "" if is_repeatable else "The request may have succeeded: check first. "
        again = f"{unknown}Retry, or look into the dispatcher's log."
        match miss.kind:
            case MissKind.NOBODY:
                # With TLS somebody may be there whose certificate is not trusted.
                why = f": {miss.why}" if self.url.startswith("https:") and miss.why else ""
                said = f"No dispatcher answers at {self.url}{why}."
                again = "Start one with 'penstock up', or say where it is: --url or PENSTOCK_URL."
            case MissKind.SILENT:
                seconds = f"{_REQUEST_SECONDS:.0f} s"
                said = f"The dispatcher at {self.url} timed out after {seconds}."
            case MissKind.LOST:
                why = f": {miss.why}" if miss.why else ""
                said = f"The connection to the dispatcher at {self.url} was lost{why}."
            case _:
                assert miss.reply is not None, "it was said"
                problem = miss.reply.problem
                named = miss.reply.named
                said = f"The dispatcher at {self.url} is unavailable: it answered {named}."
                if problem is not None:
                    said, again = problem.title, problem.detail or again
        return DispatcherUnavailable(said, hint=again)

    def _note_time(self, reply: DispatcherReply) -> None:
        try:
            said = parsedate_to_datetime(reply.headers["date"]).timestamp()
        except (KeyError, ValueError):
            return
        self._answered = said, self._clock.monotonic()

    def _read(self, reply: DispatcherReply, told: type[Told], *, where: str = "") -> Told:
        if not 200 <= reply.status < 300:
            raise _refusal(reply, where=where)
        try:
            return msgspec.json.decode(reply.body, type=told)
        except UNREADABLE as error:
            raise DispatcherRefused(
                f"The answer of {self.url} cannot be decoded by this release: {error}.",
                status=reply.status,
                kind="unreadable",
                hint="Is it the public address of a dispatcher, of the same release as this?",
            ) from error


def _refusal(reply: DispatcherReply, *, where: str) -> DispatcherRefused | InvalidInput:
    problem = reply.problem
    refused = refusal(reply, side="public")
    if problem is None:
        return refused
    if problem.problems:
        found = [DagProblem(each.line, 1, each.field, each.message) for each in problem.problems]
        return DagError(found, where=where)
    # With the work that a DAG would break.
    lines = [
        f"{each.job}: {each.waiting:,} waiting, {each.running:,} running,"
        f" {each.backfills:,} backfill{'' if each.backfills == 1 else 's'}"
        for each in problem.breaks
    ]
    return DispatcherRefused(
        "\n  ".join([refused.message, *lines]),
        status=refused.status,
        kind=refused.kind,
        field=refused.field,
        hint=_next_step(problem),
        position=refused.position,
    )


def _checked_token(token: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidInput("A token has printable ASCII characters, and no spaces.")
    return token


def _wait_seconds(miss: DispatcherMiss) -> float | None:
    """How long to wait before asking again; None if that is of no use."""
    if miss.kind is MissKind.LOST:
        return 0.0
    if miss.reply is None or miss.reply.status not in (502, 503, 504):
        return None
    said = miss.reply.headers.get("retry-after", "")
    return float(said) if said.isdecimal() and said.isascii() else 0.0


def _next_step(problem: Problem) -> str:
    if problem.breaks:
        return "Wait for them to end, or cancel them with --force, or force=True."
    if problem.type == "uncovered" and problem.detail:
        return "With --force, or force=True, they may be missing."
    if problem.detail:
        return problem.detail
    if problem.status == HTTPStatus.UNAUTHORIZED:
        return "Give the API token: --token or PENSTOCK_API_TOKEN."
    return ""
