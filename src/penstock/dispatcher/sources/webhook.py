"""The webhook source: a small server that turns requests into events.

A process of its own. `POST` to the path of a webhook source is an event of it; see `reading` for
what may be sent and `receiving` for what is answered. `GET /healthz` says that the process is
there. Bodies are bounded in size and in the time that they may take. A request has a place among
those that are worked on, and its connection is kept over others, once it is proved: whoever has no
secret can hold up nobody who has one. Any number may run behind a
load balancer. The process faces the internet: it has the token of webhooks (`dispatcher.identity`)
and the secrets of its sources, and neither the API's token nor the secret of workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from penstock.dispatcher.api.requests import Admission, Limits, Message, Receive, be_known
from penstock.dispatcher.sources.reading import BODY_BYTES_MAX, Reply, Request, problem
from penstock.dispatcher.sources.receiving import Receiver
from penstock.dispatcher.wire.problem import Problem

Send = Callable[[Message], Awaitable[None]]

_LIMITS: Final = Limits(body_bytes_max=BODY_BYTES_MAX)
_HEALTHY: Final = Reply(200, b"ok\n", {"content-type": "text/plain"})


class WebhookApp:
    """The server's ASGI application."""

    def __init__(self, receiver: Receiver) -> None:
        self._admission = Admission(_LIMITS, requests_max=_LIMITS.requests_max)
        self._receiver = receiver

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (scope["method"], scope["path"]) == ("GET", "/healthz"):
            await _send(send, _HEALTHY)
            return
        body = await self._admission.body(scope["headers"], receive)
        if body is not None:
            await _send(send, await self._reply(scope, body))

    async def _reply(self, scope: Any, body: bytes | Problem) -> Reply:
        if isinstance(body, Problem):
            return _refused(body)
        headers = {
            name.decode("latin-1").lower(): text.decode("utf-8", "replace")
            for name, text in scope["headers"]
        }
        query = scope["query_string"].decode("latin-1")
        address = (scope.get("client") or ("",))[0]
        asked = Request(scope["method"], scope["path"], headers, body, query, address)
        judged = await self._receiver.judge(asked)
        if isinstance(judged, Reply):
            return judged
        be_known(scope)
        with self._admission.place() as busy:
            return await self._receiver.accept(judged) if busy is None else _refused(busy)


def _refused(why: Problem) -> Reply:
    headers = {"retry-after": "1"} if why.status == 503 else None
    return problem(why.status, why.type, why.title, detail=why.detail, headers=headers)


async def _send(send: Send, reply: Reply) -> None:
    headers = [(name.lower().encode(), text.encode()) for name, text in reply.headers.items()]
    headers.append((b"content-length", str(len(reply.body)).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
