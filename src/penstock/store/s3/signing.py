"""AWS Signature Version 4 for S3, and where the credentials come from.

A signature is a pure function from a request and a moment to its headers. Every header that is
sent is signed, and so is the body. The moment is the store's time, not this machine's: a
signature that is some minutes off is refused.

Credentials are given, or found by the chain that every AWS tool follows (environment, profile,
web identity, container, instance): that of Amazon's runtime, awscrt, which also renews what
expires, from ten seconds before. It is asked again every five seconds, which costs nothing while
its answer is good.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import gmtime, strftime
from typing import Any, Final
from urllib.parse import quote

from awscrt.auth import AwsCredentialsProvider
from awscrt.exceptions import AwsCrtError

from penstock.kernel.clock import Clock
from penstock.kernel.errors import InvalidInput
from penstock.store.s3.connection import NotSent

Headers = Sequence[tuple[str, str]]

_VISIBLE: Final = re.compile(r"[!-~]+")
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_UNRESERVED: Final = "-_.~"
_PLAIN_PATH: Final = re.compile(r"[A-Za-z0-9/_.~-]*")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key pair, with a session token if it is temporary."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # They go into headers, where a stray line break would begin another one.
        for what, text in (
            ("access key", self.access_key),
            ("secret key", self.secret_key),
            ("session token", self.session_token),
        ):
            if text is not None and not _VISIBLE.fullmatch(text):
                raise InvalidInput(
                    f"The {what} of the credentials is empty or has a space, a line break or a"
                    " letter in it that no key has.",
                    hint="Look at how it was copied; it is not shown here.",
                )


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """One request; `path` and the query are plain text, encoded on the way out."""

    method: str
    path: str
    query: Headers = ()
    headers: Headers = ()
    body: bytes = field(default=b"", repr=False)


def encoded_path(path: str) -> str:
    """The path as it is sent and signed."""
    return path if _PLAIN_PATH.fullmatch(path) else quote(path, safe="/" + _UNRESERVED)


def encoded_query(query: Headers) -> str:
    """The query as it is sent and signed: encoded and in order."""
    if not query:
        return ""
    pairs = sorted((quote(n, safe=_UNRESERVED), quote(v, safe=_UNRESERVED)) for n, v in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def signed_headers(
    request: SignedRequest, *, host: str, region: str, credentials: Credentials, at: float
) -> list[tuple[str, str]]:
    """All headers of the request, the signature among them; names are lower-case."""
    moment = _moment(int(at))
    day = moment[:8]
    body_hash = hashlib.sha256(request.body).hexdigest()
    headers = [(name.lower(), value) for name, value in request.headers]
    headers += [("host", host), ("x-amz-content-sha256", body_hash), ("x-amz-date", moment)]
    if credentials.session_token:
        headers.append(("x-amz-security-token", credentials.session_token))
    headers.sort()
    names = ";".join([name for name, _ in headers])
    canonical = "\n".join(
        (
            request.method,
            encoded_path(request.path),
            encoded_query(request.query),
            *[f"{name}:{_trimmed(value)}" for name, value in headers],
            "",
            names,
            body_hash,
        )
    )
    scope = f"{day}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{moment}\n{scope}\n{digest}"
    key = _signing_key(credentials.secret_key, day, region)
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    proof = f"SignedHeaders={names}, Signature={signature}"
    owner = f"{_ALGORITHM} Credential={credentials.access_key}/{scope}"
    headers.append(("authorization", f"{owner}, {proof}"))
    return headers


def _trimmed(value: str) -> str:
    """A header's value as it is signed: runs of blanks are one."""
    return value if value.isprintable() and " " not in value else " ".join(value.split())


@lru_cache(maxsize=8)
def _moment(second: int) -> str:
    return strftime("%Y%m%dT%H%M%SZ", gmtime(second))


@lru_cache(maxsize=64)
def _signing_key(secret_key: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


ASK_AGAIN_SECONDS: Final = 5.0
_CRT_ERRORS: Final = (AwsCrtError, OSError, ValueError, RuntimeError)


class NoCredentials(NotSent):
    """There is nothing to sign with."""


class Keyring:
    """The credentials to sign with now."""

    def __init__(
        self,
        given: Credentials | AwsCredentialsProvider | None,
        *,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._ask_again_seconds = ask_again_seconds
        self._given = given if isinstance(given, Credentials) else None
        self._chain = given if not isinstance(given, Credentials) else None
        self._found: Credentials | None = None
        self._found_at = 0.0

    @property
    def given(self) -> Credentials | None:
        """What it was given; None if it asks the chain."""
        return self._given

    async def credentials(self, clock: Clock, *, seconds: float) -> Credentials:
        """The credentials, looked for no longer than this."""
        if self._given is not None:
            return self._given
        if self._found is None or clock.monotonic() - self._found_at > self._ask_again_seconds:
            self._found = await self._look(seconds)
            self._found_at = clock.monotonic()
        return self._found

    async def _look(self, seconds: float) -> Credentials:
        chain = self._chain or AwsCredentialsProvider.new_default_chain()
        self._chain = chain
        try:
            async with asyncio.timeout(seconds):
                # The runtime cannot bear that its future is cancelled; ours may be.
                found: Any = await asyncio.shield(asyncio.wrap_future(chain.get_credentials()))
        except TimeoutError as error:
            raise NotSent("the credentials were not found in time") from error
        except _CRT_ERRORS as error:
            # What could be signed a moment ago can be signed again: a renewal failed in passing.
            said = str(getattr(error, "message", error)).rstrip(". ")
            if self._found is not None:
                raise NotSent(f"no new credentials: {said}") from error
            raise NoCredentials(said) from error
        return Credentials(found.access_key_id, found.secret_access_key, found.session_token)
