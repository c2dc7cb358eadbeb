"""Tokens of any form, right and wrong, for tests."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any

from penstock.kernel.errors import TokenRefused
from penstock.tokens.claims import Claims, decode, encode, public_key
from penstock.tokens.signer import PemSigner, Signer
from tests.contract.signer_contract import claims_of_task

SIGNER = PemSigner.new()
OTHER = PemSigner.new()
KEYS = {each.kid: public_key(each.jwk) for each in (SIGNER, OTHER)}
HEADER = {"alg": "ES256", "kid": SIGNER.kid, "typ": "JWT"}


def b64(data: bytes | str) -> str:
    """Base64url without padding, by other means than those that are tested."""
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).decode().replace("=", "")


def token_of(claims: Claims | None = None, *, signer: Signer = SIGNER) -> str:
    """A right token."""
    return asyncio.run(encode(claims or claims_of_task(), signer))


def body_of(**changes: Any) -> dict[str, Any]:
    """The claims of a right token as JSON, with these instead; None takes a member away."""
    body: dict[str, Any] = json.loads(_unb64(token_of().split(".")[1]))
    return {name: each for name, each in {**body, **changes}.items() if each is not None}


def forged(
    header: Mapping[str, Any] | str | None = None,
    body: Mapping[str, Any] | str | bytes | None = None,
    *,
    signer: Signer = SIGNER,
) -> str:
    """A token that is rightly signed, whatever is in it."""
    first = header if isinstance(header, str) else json.dumps(HEADER if header is None else header)
    second = body if isinstance(body, str | bytes) else json.dumps(body or body_of())
    message = f"{b64(first)}.{b64(second)}"
    return f"{message}.{b64(asyncio.run(signer.sign(message.encode())))}"


def refusal(token: str) -> str:
    """Why a token is refused; empty if it is taken. Nothing of the token is in what is said."""
    try:
        decode(token, KEYS)
    except TokenRefused as error:
        said = f"{error.message} {error.hint} {error!r} {error.__cause__!r}"
        parts = [part for part in token.split(".") if len(part) > 8]
        leaked = [part for part in parts if part in said]
        return error.kind if not leaked else "it was repeated"
    return ""


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
