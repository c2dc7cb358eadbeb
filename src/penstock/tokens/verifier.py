"""Who verifies tokens: signature, issuer, audience and time, with keys that are remembered.

    verifier = Verifier(HttpKeys(url), issuer="penstock/default", audience=TASK_AUDIENCE)
    claims = await verifier.verify(token)

Here, and nowhere else in Penstock, something is decided by a wall clock: a verifier elsewhere
has no other. It is the one of the `Clock` that it is given, and `leeway_seconds` forgive what
it is wrong by. Where Postgres fences the attempt anyway, no time is judged at all.

Keys are asked for when there are none, when they have become `KEYS_SECONDS_MAX` old, and when a
token names one that is not known; but never more often than every `refresh_seconds_min`,
whatever came of it, and by one caller at a time, for whom the others wait. So names that
somebody makes up cost one request in ten seconds, and no key is missed for it: a new one is
published a minute before it signs. While the source is away keys go on to serve for
`KEYS_SECONDS_TRUSTED`; after that, and for a name that is not known, the source's own error is
raised: the token may be right, and whoever has it may ask again. A key that is no longer
published is forgotten with the next answer, as one that was revoked is. One that is retired is
believed for what it can have signed before.

A signature is verified once: a verifier remembers the last `REMEMBERED_MAX` tokens whose
signatures were right, by their whole text, and those that its own process has signed.
Everything else is judged each time: whether the key is still published, the issuer, the
audience and the time.

The public halves of keys, as a document (a JSON Web Key Set) and where they come from.

A document has at most `JWKS_BYTES_MAX` bytes and `KEYS_MAX` keys; one that has more, names a
key twice or is no JSON is refused as a whole, so that nobody verifies with a part of it. Keys
of other kinds than ours are passed over, as the standard says; each is judged again when it is
used.

`HttpKeys` gets the document from a dispatcher, `GET /internal/jwks/task`: one request a call,
with a bound on its time and size, no redirects, no proxy, no compression. It keeps nothing: who
asks how often is decided by `penstock.tokens.verifier`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, PenstockError, TokenRefused
from penstock.tokens.claims import Claims, claims_of, public_key, read
from penstock.tokens.signer import KID_CHARACTERS_MAX, PublicKey

# ruff: noqa: PLC0415 - workers import this module, and httpx is a tenth of what they would hold.
if TYPE_CHECKING:
    import httpx

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
        import httpx

        try:
            async with asyncio.timeout(self._seconds_max):
                body = await self._body()
        except TimeoutError:
            raise DispatcherUnavailable(
                f"{self._url} did not answer within {self._seconds_max:g} s."
            ) from None
        except httpx.HTTPError as error:
            raise DispatcherUnavailable(
                f"{self._url} cannot be reached ({type(error).__name__})."
            ) from error
        try:
            return keys_of(body)
        except InvalidInput as error:
            raise DispatcherUnavailable(
                f"{self._url} answered with an invalid key set: {error.message}"
            ) from error

    async def _body(self) -> bytes:
        import httpx

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
                    f"{self._url} answered with status {answer.status_code} instead of keys."
                )
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > JWKS_BYTES_MAX:
                    break
            return bytes(body)


def _checked(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host or parsed.userinfo:
        raise InvalidInput(
            "This is not the URL of a key set.", hint=f"Write it as http://HOST:PORT{JWKS_PATH}."
        )
    return url


_log = logging.getLogger(__name__)

REFRESH_SECONDS_MIN: Final = 10.0
KEYS_SECONDS_MAX: Final = 60.0
KEYS_SECONDS_TRUSTED: Final = 3600.0
RETIRED_SECONDS: Final = 60.0
"""How long after its retirement a key may have signed: who signs learns of it a moment later."""
REMEMBERED_MAX: Final = 2_048
"""How many tokens a verifier remembers: a few megabytes."""
LIFE_SECONDS_MAX: Final = 86_400.0
"""The longest life of a token, which is that of a lease."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key, and when it was retired, in seconds since 1970."""

    public: PublicKey
    retired_at: float | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What a token says, and the name of the key that has signed it."""

    claims: Claims
    kid: str


def judge_retired(claims: Claims, retired_at: float | None) -> None:
    """Raise `TokenRefused` if a key that was retired then cannot have signed this in its time."""
    if retired_at is None:
        return
    last = retired_at + RETIRED_SECONDS
    if claims.iat > last or claims.exp > last + LIFE_SECONDS_MAX:
        raise TokenRefused("The token is signed by a retired key.", kind="retired key")


class KeyCache:
    """The keys of a source, remembered. Several verifiers may share one."""

    def __init__(
        self,
        source: KeySource,
        *,
        clock: Clock,
        refresh_seconds_min: float = REFRESH_SECONDS_MIN,
    ) -> None:
        self._source = source
        self._clock = clock
        self._refresh_seconds_min = refresh_seconds_min
        self._keys: dict[str, KnownKey] = {}
        self._asked_at: float | None = None
        self._answered_at: float | None = None
        self._failure: PenstockError | None = None
        self._asking = asyncio.Lock()

    async def find(self, kid: str) -> KnownKey:
        """The key of this name. Raises `TokenRefused`, or the source's error if it is away."""
        if not self._is_known(kid, seconds_max=KEYS_SECONDS_MAX):
            await self._refresh(kid)
        if self._is_known(kid, seconds_max=KEYS_SECONDS_TRUSTED):
            return self._keys[kid]
        if self._failure is not None:
            # It is raised more than once, and must not remember each time.
            raise self._failure.with_traceback(None)
        raise TokenRefused("The token is signed by an unknown key.", kind="unknown key")

    def _is_known(self, kid: str, *, seconds_max: float) -> bool:
        if self._answered_at is None or kid not in self._keys:
            return False
        return self._clock.monotonic() - self._answered_at < seconds_max

    async def _refresh(self, kid: str) -> None:
        # Whoever can go on with what there is does not wait for the one who asks.
        if self._asking.locked() and self._is_known(kid, seconds_max=KEYS_SECONDS_TRUSTED):
            return
        async with self._asking:
            now = self._clock.monotonic()
            if self._asked_at is not None and now - self._asked_at < self._refresh_seconds_min:
                return
            if self._is_known(kid, seconds_max=KEYS_SECONDS_MAX):
                return
            self._asked_at = now
            await self._ask(now)

    async def _ask(self, now: float) -> None:
        # Said first: a caller that gives up half way must leave neither an open door nor a lie.
        self._failure = DispatcherUnavailable("Failed to fetch the keys that sign tokens; retry.")
        try:
            listed = await self._source.keys()
        except PenstockError as error:
            _log.warning("failed to fetch the keys that sign tokens: %s", error.message)
            self._failure = error
            return
        found = {}
        for kid, jwk in listed.items():
            try:
                found[kid] = KnownKey(public_key(jwk), _retired_at(jwk))
            except InvalidInput as error:
                _log.warning("The key %.60r is passed over: %s", kid, error.message)
        self._keys, self._answered_at, self._failure = found, now, None


class Verifier:
    """Verifies the tokens of one issuer for one audience."""

    def __init__(
        self,
        keys: KeySource | KeyCache,
        *,
        issuer: str,
        audience: str,
        clock: Clock | None = None,
        leeway_seconds: float = 5.0,
    ) -> None:
        self._clock = clock or SystemClock()
        self._keys = keys if isinstance(keys, KeyCache) else KeyCache(keys, clock=self._clock)
        self._issuer = issuer
        self._audience = audience
        self._leeway_seconds = leeway_seconds
        self._remembered: OrderedDict[str, Verified] = OrderedDict()

    def remember(self, token: str, signed: Verified) -> None:
        """Take it that this key has signed this token: who calls has signed or verified it."""
        self._remembered[token] = signed
        self._remembered.move_to_end(token)
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    async def verify(self, token: str, *, is_expiry_judged: bool = True) -> Claims:
        """What a token says, if it is right. Raises `TokenRefused`.

        Without `is_expiry_judged` no time is looked at: something else decides whether it is over.
        """
        return (await self.verified(token, is_expiry_judged=is_expiry_judged)).claims

    async def verified(self, token: str, *, is_expiry_judged: bool) -> Verified:
        """The same, with the name of the key."""
        found = self._remembered.get(token)
        if found is None:
            unverified = read(token)
            key = await self._keys.find(unverified.kid)
            found = Verified(claims_of(unverified, key.public), unverified.kid)
            self.remember(token, found)
        else:
            key = await self._keys.find(found.kid)
        claims = found.claims
        if claims.iss != self._issuer:
            raise TokenRefused("The token is of another issuer.", kind="wrong issuer")
        if claims.aud != self._audience:
            raise TokenRefused("The token is for another use.", kind="wrong audience")
        judge_retired(claims, key.retired_at)
        if is_expiry_judged:
            self._judge_time(claims)
        return found

    def _judge_time(self, claims: Claims) -> None:
        now = self._clock.wall()
        if claims.exp <= now - self._leeway_seconds:
            raise TokenRefused("The token has expired.", kind="expired")
        if claims.nbf > now + self._leeway_seconds:
            raise TokenRefused("The token is not valid yet.", kind="not yet valid")


def _retired_at(jwk: Jwk) -> float | None:
    said = jwk.get(RETIRED_AT)
    if said is None:
        return None
    # What cannot be read is no reason to trust the key longer.
    return (
        float(said) if isinstance(said, int | float) and not isinstance(said, bool) else -math.inf
    )
