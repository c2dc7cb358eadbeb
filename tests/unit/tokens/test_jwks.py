"""Key sets: their bounds, and how they are got from a dispatcher."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from penstock.kernel.errors import DispatcherUnavailable, InvalidInput
from penstock.tokens.verifier import JWKS_BYTES_MAX, KEYS_MAX, HttpKeys, document_of, keys_of
from tests.unit.tokens.forging import OTHER, SIGNER

URL = "http://dispatcher.example/internal/jwks/task"
DOCUMENT = json.dumps(document_of([SIGNER.jwk, OTHER.jwk])).encode()


def _document(*keys: Any) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def test_a_document_is_read_as_it_was_written() -> None:
    assert keys_of(DOCUMENT) == {SIGNER.kid: SIGNER.jwk, OTHER.kid: OTHER.jwk}
    assert keys_of(_document()) == {}


def test_only_what_is_public_is_written() -> None:
    secret = {**SIGNER.jwk, "d": "AAAA", "note": "x"}
    assert document_of([secret]) == {"keys": [SIGNER.jwk]}


def test_keys_of_other_kinds_are_passed_over() -> None:
    others: list[Any] = [
        *({"kty": "RSA", "kid": "r", "n": "AAAA", "e": "AQAB"}, {"kty": "oct", "kid": "o"}),
        *({**OTHER.jwk, "crv": "P-384"}, {**OTHER.jwk, "kid": 7}, {**OTHER.jwk, "kid": ""}),
        *({**OTHER.jwk, "kid": "x" * 201}, {}, [], "key", None, 7),
    ]
    assert list(keys_of(_document(*others, SIGNER.jwk))) == [SIGNER.kid]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b'{"keys":{}}', b'{"keys":null}', b"\xff"),
        b"[" * 100_000,
        _document(SIGNER.jwk, SIGNER.jwk),
        _document(SIGNER.jwk, {**OTHER.jwk, "kid": SIGNER.kid}),
        _document(*({**SIGNER.jwk, "kid": f"k{number}"} for number in range(KEYS_MAX + 1))),
        _document(SIGNER.jwk) + b" " * JWKS_BYTES_MAX,
    ],
)
def test_what_is_no_key_set_is_refused_as_a_whole(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        keys_of(body)


def test_as_many_keys_as_there_may_be() -> None:
    keys = [{**SIGNER.jwk, "kid": f"k{number}"} for number in range(KEYS_MAX)]
    assert len(keys_of(json.dumps(document_of(keys)).encode())) == KEYS_MAX
    with pytest.raises(InvalidInput):
        document_of([*keys, OTHER.jwk])


# Over HTTP


class Once(httpx.AsyncByteStream):
    """A body that comes over the wire, as it does from a server."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body


def _get(answer: Callable[[httpx.Request], httpx.Response], **how: Any) -> Any:
    return asyncio.run(HttpKeys(URL, transport=httpx.MockTransport(answer), **how).keys())


def test_keys_come_by_one_plain_request() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, stream=Once(DOCUMENT))

    assert set(_get(answer)) == {SIGNER.kid, OTHER.kid}
    [request] = asked
    assert (request.method, str(request.url)) == ("GET", URL)
    assert request.headers["Accept-Encoding"] == "identity"
    assert "Authorization" not in request.headers


@pytest.mark.parametrize("status", [201, 204, 301, 302, 303, 307, 308, 401, 403, 404, 500, 503])
def test_any_other_answer_is_none_and_redirects_are_not_followed(status: int) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        elsewhere = {"Location": "http://attacker.example/"} if 300 <= status < 400 else {}
        return httpx.Response(status, headers=elsewhere, stream=Once(DOCUMENT))

    with pytest.raises(DispatcherUnavailable, match=f"with status {status} instead"):
        _get(answer)
    assert asked == [URL]


def test_what_is_packed_is_not_unpacked() -> None:
    with pytest.raises(DispatcherUnavailable):
        _get(
            lambda _: httpx.Response(
                200, headers={"Content-Encoding": "gzip"}, stream=Once(DOCUMENT)
            )
        )


def test_no_more_is_read_than_a_key_set_may_have() -> None:
    sent = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 65_536
                yield b" " * 65_536

    with pytest.raises(DispatcherUnavailable, match="more than 1048576 bytes"):
        _get(lambda _: httpx.Response(200, stream=Endless()))
    assert sent <= JWKS_BYTES_MAX + 65_536


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", _document(SIGNER.jwk, SIGNER.jwk)])
def test_what_is_no_key_set_is_no_answer(body: bytes) -> None:
    with pytest.raises(DispatcherUnavailable, match=r"instead of keys|invalid key set"):
        _get(lambda _: httpx.Response(200, stream=Once(body)))


def test_who_does_not_answer_is_away() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(DispatcherUnavailable, match="cannot be reached"):
        _get(refuse)


def test_an_answer_that_never_ends_has_an_end() -> None:
    class Silent(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

    with pytest.raises(DispatcherUnavailable, match="did not answer within"):
        _get(lambda _: httpx.Response(200, stream=Silent()), seconds_max=0.01)


@pytest.mark.parametrize(
    "url", ["", "dispatcher", "ftp://a/b", "file:///etc/passwd", "http://", "http://u:p@a/b"]
)
def test_what_is_no_url_of_a_key_set(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpKeys(url)
    assert "u:p" not in caught.value.message
