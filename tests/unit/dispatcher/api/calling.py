"""Applications of a few endpoints, called as a server would call them, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from penstock.dispatcher.api.application import Application
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, ApiEndpoint, HttpReply, RequiredProof
from penstock.dispatcher.api.requests import Message, RequestLimits
from penstock.kernel.errors import TokenRefused
from penstock.protocol.base import Answer, Ask
from penstock.protocol.identity import Identities
from penstock.protocol.problem import Problem
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE, Claims

SECRET = "a secret of the tests"


@dataclass
class Notes:
    """An audit that keeps what it is told."""

    notes: list[dict[str, Any]] = field(default_factory=list)

    def note(self, **fields: Any) -> None:
        self.notes.append(fields)

    @property
    def reasons(self) -> list[str]:
        return [each["reason"] for each in self.notes]


@dataclass
class FewTokens:
    """Knows tokens by heart, as `TASK-ATTEMPT`; those that end with `-old` have expired."""

    error: Exception | None = None
    asked: list[str] = field(default_factory=list)

    async def verify(self, token: str, *, audience: str, is_expiry_judged: bool) -> Claims:
        self.asked.append(token)
        if self.error is not None:
            raise self.error
        if not token[:1].isdigit():
            raise TokenRefused("The token is not whole.", kind="malformed")
        task, attempt, *rest = token.split("-")
        if rest == ["old"] and is_expiry_judged:
            raise TokenRefused("The token has expired.", kind="expired")
        found = claims(int(task), int(attempt))
        if found.aud != audience:
            raise TokenRefused("The token is for somebody else.", kind="wrong audience")
        return found


def claims(task_id: int, attempt: int, **fields: Any) -> Claims:
    """What a token says; attempt 0 is an invocation."""
    said: dict[str, Any] = {
        "iss": "penstock/default",
        "aud": TASK_AUDIENCE if attempt else INVOKE_AUDIENCE,
        "sub": f"task:{task_id}:{attempt}",
        "iat": 0,
        "nbf": 0,
        "exp": 0,
        "jti": "x",
        "org": "default",
        "task_id": task_id,
        "attempt": attempt,
    }
    return Claims(**{**said, **fields})


@dataclass
class FewParts:
    """As much of `Parts` as an application itself looks at."""

    identities: Identities = field(default_factory=lambda: Identities(SECRET))
    api_token: str | None = None
    viewer_token: str | None = None
    issuer: FewTokens = field(default_factory=FewTokens)
    audit: Notes = field(default_factory=Notes)


class Inner(Ask):
    number: Annotated[int, Meta(ge=1)]


class EchoAsk(Ask):
    items: list[Inner] = msgspec.field(default_factory=list)


class EchoParams(Ask):
    name: str
    limit: Annotated[int, Meta(ge=1)] = 10
    after: str | None = None
    before: int | None = None


class EchoAnswer(Answer):
    numbers: list[int] = msgspec.field(default_factory=list)
    name: str = ""
    limit: int = 0
    worker: str = ""
    subject: str = ""


async def echo(_: ApiContext, call: ApiCall) -> Answer:
    ask: EchoAsk | None = call.ask
    params: EchoParams | None = call.params
    return EchoAnswer(
        numbers=[each.number for each in ask.items] if ask else [],
        name=params.name if params else "",
        limit=params.limit if params else 0,
        worker=call.worker,
        subject=call.claims.sub if call.claims else "",
    )


async def text(_parts: ApiContext, _: ApiCall) -> HttpReply:
    return HttpReply(b"text", content_type=b"text/plain")


def post(path: str, handler: Any = echo, **fields: Any) -> ApiEndpoint:
    settings = {"ask": EchoAsk, "answer": EchoAnswer, "proof": RequiredProof.NONE, **fields}
    return ApiEndpoint("POST", path, "Says it again", handler, **settings)


def get(path: str, handler: Any = echo, **fields: Any) -> ApiEndpoint:
    settings = {"answer": EchoAnswer, "proof": RequiredProof.NONE, **fields}
    return ApiEndpoint("GET", path, "Says it", handler, **settings)


@dataclass
class Said:
    """What an application has answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> Problem:
        assert self.headers["content-type"] == "application/problem+json"
        found = msgspec.json.decode(self.body, type=Problem)
        assert found.status == self.status
        return found

    @property
    def echo(self) -> EchoAnswer:
        assert (self.status, self.headers["content-type"]) == (200, "application/json")
        return msgspec.json.decode(self.body, type=EchoAnswer)


def application(
    *endpoints: ApiEndpoint,
    limits: RequestLimits | None = None,
    api_token: str | None = None,
    parts: FewParts | None = None,
) -> Application:
    few = parts or FewParts(api_token=api_token)
    return Application("test", endpoints, cast("ApiContext", few), limits=limits)


@dataclass
class Caller:
    """Calls an application; `pieces` are the messages that bring the body."""

    app: Application

    async def __call__(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        headers: Sequence[tuple[str, str]] = (),
        messages: Sequence[Message] | None = None,
    ) -> Said | None:
        path, _, query = target.partition("?")
        sent_headers = list(headers)
        if not any(name.lower() == "host" for name, _ in headers):
            sent_headers.append(("Host", "localhost:7070"))
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent_headers],
            "client": ("1.2.3.4", 5),
        }
        coming = iter(messages if messages is not None else [whole(body)])
        sent: list[Message] = []

        async def receive() -> Message:
            return next(coming)

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        if not sent:
            return None
        start, content = sent
        found = {name.decode(): value.decode() for name, value in start["headers"]}
        assert int(found["content-length"]) == len(content["body"])
        return Said(start["status"], found, content["body"])


def whole(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}
