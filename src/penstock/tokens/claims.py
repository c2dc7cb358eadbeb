"""What a capability token says: whose attempt it proves, until when, and what that may touch.

A token is a JWT (ES256) for one `(task_id, attempt)`. Its grants are derived from the task's
own inputs and outputs, and from nothing else: what is not named is not granted. Prefixes are
canonical URLs of folders that end with a slash; see `penstock.tokens.scopes`. In a store of
files they are `file:///…/`, for which nobody mints credentials; they are judged all the same
when something is published.

A token as text has at most `TOKEN_BYTES_MAX` bytes, and `token_bytes` tells its length before
it is signed: see `penstock.tokens.claims`. Prefixes are texts here: whoever acts on one reads it
with `Scope.parse` first.

Pure values. Made by the dispatcher (`dispatcher.capabilities`), read by whoever verifies.

Tokens as text: a JSON Web Signature in its compact form, and one kind of it only.

    base64url(header) . base64url(claims) . base64url(signature)

The header is `{"alg":"ES256","kid":…,"typ":"JWT"}` and has no other member: nothing in a token
says how it is to be verified, nor brings a key along (`alg` of any other kind, `jwk`, `jku`,
`x5u`, `x5c`, `crit` and `b64` are refused). JSON has each member once. Base64url has one
spelling. The signature is looked at before the claims are: nothing in them is read that was not
signed.

Whose token it is, for whom and when is judged by `penstock.tokens.verifier`; here only that it
is whole. Errors are `TokenRefused` and repeat nothing of the token. No input is larger than
`TOKEN_BYTES_MAX`. Pure, but for the signer that `encode` asks: one request to it for one token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.kernel.errors import InvalidInput, TokenRefused
from penstock.tokens.signer import (
    ALGORITHM,
    KID_CHARACTERS_MAX,
    SIGNATURE_BYTES,
    PublicKey,
    Signer,
    from_base64url,
    is_signed,
    to_base64url,
)

TASK_AUDIENCE: Final = "penstock:task"
"""Tokens of attempts."""
INVOKE_AUDIENCE: Final = "penstock:invoke"
"""Tokens that come with the invocation of a function: they allow to claim one task."""
QUERY_AUDIENCE: Final = "penstock:query"
"""Tokens of people for one query: a dispatcher gives them to the query service."""


class ReadGrant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input: the folders of what is published of it for the task."""

    dataset: str
    """Its uuid."""
    version: str
    """Its generation."""
    prefixes: tuple[str, ...] = ()
    omitted: int = 0
    """How many folders there are, if there are too many to name: then none is granted."""


class WriteGrant(msgspec.Struct, frozen=True, kw_only=True):
    """An output: the folder of this attempt, in which no other writes."""

    dataset: str
    version: str
    prefix: str


class Grants(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an attempt may touch."""

    read: tuple[ReadGrant, ...] = ()
    write: tuple[WriteGrant, ...] = ()
    scratch: str = ""
    """A folder of its own for what is not published: read and written."""
    buffers: tuple[str, ...] = ()
    """The buffered datasets, by uuid, into which it may publish batches of rows."""

    @property
    def read_prefixes(self) -> tuple[str, ...]:
        """All that may be read: the inputs, and its own scratch folder."""
        named = [prefix for each in self.read for prefix in each.prefixes]
        return tuple(dict.fromkeys([*named, *([self.scratch] if self.scratch else [])]))

    @property
    def write_prefixes(self) -> tuple[str, ...]:
        """All that may be written: the outputs, and its own scratch folder."""
        named = [each.prefix for each in self.write]
        return tuple(dict.fromkeys([*named, *([self.scratch] if self.scratch else [])]))

    @property
    def digest(self) -> str:
        """What the dispatcher keeps of these grants, to tell them from all others."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


class Claims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a token. Times are seconds since 1970, of the database's clock."""

    iss: str
    aud: str
    sub: str
    """`task:7:2`, for attempt 2 of task 7."""
    iat: int
    nbf: int
    exp: int
    jti: str
    org: str
    task_id: int
    attempt: int
    """In the token of an invocation the one that it may begin."""
    grants: Grants = Grants()
    tables: tuple[str, ...] | None = None
    """In the token of a query the datasets that it may read; None is all."""


TOKEN_BYTES_MAX: Final = 16 * 1024
"""The longest token: it goes into one header of a request."""

_KID: Final = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{KID_CHARACTERS_MAX}}}")
_MEMBERS: Final = {"alg", "kid", "typ"}
_NUMBER_MAX: Final = 2**63 - 1
_COORDINATE_BYTES: Final = 32
_SIGNATURE_CHARACTERS: Final = 1 + len(to_base64url(bytes(SIGNATURE_BYTES)))
"""With the dot before it."""


@dataclass(frozen=True, slots=True)
class Unverified:
    """A token in parts. Nobody has looked at its signature yet."""

    kid: str
    """Which key is said to have signed it."""
    message: bytes
    """What was signed."""
    payload: str
    signature: bytes

    def __repr__(self) -> str:
        return f"Unverified(kid={self.kid!r})"


async def encode(claims: Claims, signer: Signer) -> str:
    """A token of these claims. Raises `SignerUnavailable`, and `InvalidInput` if it is too long."""
    message = _message(claims, kid=signer.kid)
    size = len(message) + _SIGNATURE_CHARACTERS
    if size > TOKEN_BYTES_MAX:
        raise InvalidInput(
            f"The token would have {size} bytes, and may have {TOKEN_BYTES_MAX}.",
            hint="Name fewer folders in it.",
        )
    return f"{message}.{to_base64url(await signer.sign(message.encode()))}"


def token_bytes(claims: Claims, *, kid: str) -> int:
    """How long a token of these claims is: at most `TOKEN_BYTES_MAX` can be encoded."""
    return len(_message(claims, kid=kid)) + _SIGNATURE_CHARACTERS


def decode(token: str, keys: Mapping[str, PublicKey]) -> Claims:
    """What a token says that one of these keys has signed. Raises `TokenRefused`.

    It may be of any time, issuer and audience: see `penstock.tokens.verifier`.
    """
    unverified = read(token)
    key = keys.get(unverified.kid)
    if key is None:
        raise TokenRefused("The token is signed by an unknown key.", kind="unknown key")
    return claims_of(unverified, key)


def read(token: str) -> Unverified:
    """The parts of a token, which may be anybody's: nothing of it is proved."""
    if not token:
        raise TokenRefused("There is no token.", kind="missing")
    if len(token) > TOKEN_BYTES_MAX:
        _refuse(f"is longer than {TOKEN_BYTES_MAX} bytes")
    if not token.isascii():
        _refuse("has invalid characters")
    parts = token.split(".")
    if len(parts) != 3:
        _refuse("does not have three parts")
    header, payload, signature = parts
    kid = _kid(_json_of(_bytes_of(header)))
    return Unverified(kid, f"{header}.{payload}".encode(), payload, _bytes_of(signature))


def claims_of(unverified: Unverified, key: PublicKey) -> Claims:
    """What a token says, if the key has signed it."""
    if not is_signed(unverified.message, signature=unverified.signature, key=key):
        raise TokenRefused("The signature of the token is wrong.", kind="bad signature")
    body = _bytes_of(unverified.payload)
    _json_of(body)
    try:
        claims = msgspec.json.decode(body, type=Claims)
    except (msgspec.MsgspecError, ValueError):
        _refuse("does not have the claims of a task's token")
    numbers = (claims.iat, claims.nbf, claims.exp, claims.task_id, claims.attempt)
    if not all(0 <= each <= _NUMBER_MAX for each in numbers):
        _refuse("has a number that is out of range")
    return claims


def public_key(jwk: Mapping[str, object]) -> PublicKey:
    """The key that a JSON Web Key is of. Raises `InvalidInput` unless it is one of P-256."""
    if jwk.get("kty") != "EC" or jwk.get("crv") != "P-256":
        raise InvalidInput("The key is not one of the curve P-256.")
    if "d" in jwk:
        raise InvalidInput("The key has its private half in it.", hint="Publish another one.")
    if jwk.get("alg", ALGORITHM) != ALGORITHM or jwk.get("use", "sig") != "sig":
        raise InvalidInput("The key is not for signatures by ES256.")
    x, y = (_coordinate(jwk.get(name)) for name in ("x", "y"))
    try:
        return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
    except ValueError as error:
        raise InvalidInput("The key is not a point of the curve P-256.") from error


def _message(claims: Claims, *, kid: str) -> str:
    if not _KID.fullmatch(kid):
        raise InvalidInput(f"{kid!r} cannot be the name of a key.")
    header = msgspec.json.encode({"alg": ALGORITHM, "kid": kid, "typ": "JWT"})
    return f"{to_base64url(header)}.{to_base64url(msgspec.json.encode(claims))}"


def _kid(header: dict[str, Any]) -> str:
    if header.keys() - _MEMBERS:
        _refuse("has unsupported members in its header")
    if header.get("alg") != ALGORITHM or header.get("typ", "JWT") != "JWT":
        _refuse(f"is not a JWT signed by {ALGORITHM}")
    kid = header.get("kid")
    if not isinstance(kid, str) or not _KID.fullmatch(kid):
        _refuse("does not name the key that has signed it")
    return kid


def _json_of(body: bytes) -> dict[str, Any]:
    """A JSON object in which no member is there twice, at any depth."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        _refuse("is not JSON, or has a duplicate member")
    if not isinstance(value, dict):
        _refuse("is not a JSON object")
    return value


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("a member is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _bytes_of(part: str) -> bytes:
    try:
        return from_base64url(part)
    except ValueError:
        _refuse("is not canonical base64url")


def _refuse(how: str) -> NoReturn:
    """Without the error that led here: it may quote the token."""
    raise TokenRefused(f"The token {how}.", kind="malformed") from None


def _coordinate(text: object) -> int:
    if isinstance(text, str):
        try:
            data = from_base64url(text)
        except ValueError:
            data = b""
        if len(data) == _COORDINATE_BYTES:
            return int.from_bytes(data, "big")
    raise InvalidInput("The coordinates of the key are not 32 bytes each in base64url.")
