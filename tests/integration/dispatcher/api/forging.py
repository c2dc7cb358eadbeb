"""Tokens of any kind, also wrong ones: signed by a key that dispatchers know, or by another.

The key that they know is published in Postgres, as the one of another dispatcher is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.tokens.claims import TASK_AUDIENCE, Claims, Grants, WriteGrant, encode
from penstock.tokens.signer import PemSigner
from tests.integration.dispatcher.world import World

KNOWN: Final = PemSigner.new()
UNKNOWN: Final = PemSigner.new()
LIVES_SECONDS: Final = 60
_BEGAN: Final = 1_893_456_000
"""When worlds begin: the first second of 2030."""


async def publish_key(world: World) -> None:
    """Have dispatchers know the key of these tests."""
    await world.rows(
        "INSERT INTO signing_key (kid, signer, holder, reference, jwk, signs_from)"
        " VALUES (%s, 'pem', 'tests', 'tests', %s, penstock_now()) ON CONFLICT DO NOTHING",
        KNOWN.kid,
        Jsonb(dict(KNOWN.jwk)),
    )


async def forged(
    world: World,
    task_id: int,
    attempt: int,
    *,
    write: Mapping[str, str] | None = None,
    signer: PemSigner = KNOWN,
    **fields: Any,
) -> str:
    """A token of these claims; `write` are locations by dataset."""
    now = _BEGAN + int(world.offset_seconds[0])
    grants = Grants(
        write=tuple(
            WriteGrant(dataset=dataset, version="0", prefix=f"{location}/")
            for dataset, location in (write or {}).items()
        )
    )
    said: dict[str, Any] = {
        "iss": "penstock/default",
        "aud": TASK_AUDIENCE,
        "sub": f"task:{task_id}:{attempt}",
        "iat": now,
        "nbf": now,
        "exp": now + LIVES_SECONDS,
        "jti": f"forged-{task_id}-{attempt}",
        "org": "default",
        "task_id": task_id,
        "attempt": attempt,
        "grants": grants,
    }
    return await encode(Claims(**{**said, **fields}), signer)
