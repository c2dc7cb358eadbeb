"""Requests to an application, or a script, in this process: by transports of httpx."""

from __future__ import annotations

import httpx

from penstock.protocol.client import DispatcherRequest
from penstock.store.s3.connection import NoAnswer, NotSent, Response


class OverHttpx:
    """A `penstock.protocol.client.DispatcherTransport` around one of httpx."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._http = httpx.AsyncClient(transport=transport, trust_env=False)

    async def send(self, request: DispatcherRequest) -> Response:
        try:
            answer = await self._http.request(
                request.method,
                request.url + request.path,
                content=request.body,
                headers=dict(request.headers),
                timeout=None,
            )
        except httpx.ConnectError as error:
            raise NotSent(str(error)) from error
        except httpx.HTTPError as error:
            raise NoAnswer(str(error)) from error
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return Response(answer.status_code, headers, answer.content)

    async def close(self) -> None:
        await self._http.aclose()
