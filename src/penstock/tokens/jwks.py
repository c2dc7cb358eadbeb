"""The public halves of keys, as a document (a JSON Web Key Set) and where they come from.

A document has at most `JWKS_BYTES_MAX` bytes and `KEYS_MAX` keys; one that has more, names a key
twice or is no JSON is refused as a whole, so that nobody verifies with a part of it. Keys of other
kinds than ours are passed over, as the standard says; each is judged again when it is used.

`HttpKeys` gets the document from a dispatcher, `GET /internal/jwks/task`: one request a call, with
a bound on its time and size, no redirects, no proxy, no compression. It keeps nothing: who asks how
often is decided by `penstock.tokens.verifying`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import httpx

from penstock.kernel.errors import DispatcherUnavailable, InvalidInput
from penstock.tokens.signing import KID_CHARACTERS_MAX

JWKS_PATH: Final = "/internal/jwks/task"
JWKS_BYTES_MAX: Final = 1024 * 1024
KEYS_MAX: Final = 1_000

RETIRED_AT: Final = "retired_at"
"""Of a key that signs no more: since when, in seconds since 1970. Others pass it over."""
_PUBLIC: Final = ("kty", "crv", "x", "y", "kid", "alg", "use", RETIRED_AT)

Jwk = Mapping[str, Any]


class KeySource(Protocol):
    """Where the keys are that may have signed a token."""

    async def keys(self) -> Mapping[str, Jwk]:
        """All keys, by their names. Raises a `PenstockError` if they cannot be had now."""
        ...


def document_of(keys: Iterable[Jwk]) -> dict[str, Any]:
    """The document of these keys: of each what is public, and nothing else."""
    found = [{name: each[name] for name in _PUBLIC if name in each} for each in keys]
    if len(found) > KEYS_MAX:
        raise InvalidInput(f"There are {len(found)} keys, and may be {KEYS_MAX} at most.")
    return {"keys": found}


def keys_of(body: bytes) -> dict[str, Jwk]:
    """The keys of a document, by their names. Raises `InvalidInput`."""
    if len(body) > JWKS_BYTES_MAX:
        raise InvalidInput(f"The key set has more than {JWKS_BYTES_MAX} bytes.")
    try:
        document = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidInput("The key set is not JSON.") from error
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise InvalidInput("The key set has no list of keys.")
    if len(listed) > KEYS_MAX:
        raise InvalidInput(f"The key set has more than {KEYS_MAX} keys.")
    found: dict[str, Jwk] = {}
    for each in listed:
        if not _is_ours(each):
            continue
        if each["kid"] in found:
            raise InvalidInput("The key set has two keys of one name.")
        found[each["kid"]] = each
    return found


def _is_ours(key: object) -> bool:
    if not isinstance(key, dict) or key.get("kty") != "EC" or key.get("crv") != "P-256":
        return False
    kid = key.get("kid")
    return isinstance(kid, str) and 0 < len(kid) <= KID_CHARACTERS_MAX


class HttpKeys:
    """The keys that a dispatcher publishes.

    >>> keys = HttpKeys("http://dispatcher:8081/internal/jwks/task")
    """

    def __init__(
        self,
        url: str,
        *,
        seconds_max: float = 3.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = _checked(url)
        self._seconds_max = seconds_max
        self._transport = transport

    async def keys(self) -> Mapping[str, Jwk]:
        try:
            async with asyncio.timeout(self._seconds_max):
                body = await self._body()
        except TimeoutError:
            raise DispatcherUnavailable(
                f"{self._url} did not answer within {self._seconds_max:g} s."
            ) from None
        except httpx.HTTPError as error:
            raise DispatcherUnavailable(
                f"{self._url} does not answer ({type(error).__name__})."
            ) from error
        try:
            return keys_of(body)
        except InvalidInput as error:
            raise DispatcherUnavailable(
                f"{self._url} does not answer with keys: {error.message}"
            ) from error

    async def _body(self) -> bytes:
        client = httpx.AsyncClient(
            timeout=self._seconds_max,
            follow_redirects=False,
            trust_env=False,
            transport=self._transport,
            # What is unpacked could be of any size.
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        )
        async with client, client.stream("GET", self._url) as answer:
            if answer.status_code != httpx.codes.OK or "Content-Encoding" in answer.headers:
                raise DispatcherUnavailable(
                    f"{self._url} does not answer with keys: its status is {answer.status_code}."
                )
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > JWKS_BYTES_MAX:
                    break
            return bytes(body)


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host or parsed.userinfo:
        raise InvalidInput(
            "This is not the URL of a key set.", hint=f"Write it as http://HOST:PORT{JWKS_PATH}."
        )
    return url
