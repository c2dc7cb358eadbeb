"""Issues capability tokens, and verifies those that are shown to this dispatcher.

| token | is signed | lives | allows |
|---|---|---|---|
| of an attempt | in the transaction that begins it | as long as its lease | what `grants` derives |
| its next one | after a heartbeat was committed | as long as the longer lease | the same |
| of an invocation | before a function is invoked | `INVOCATION_SECONDS` | to begin one attempt |

A claim and its tokens are one: if nothing can be signed, the claim is undone, and no attempt is
spent. Of a heartbeat those have a next token for which one could be signed, within
`RENEW_SECONDS_MAX`; the others are in the next one. A renewed token is the one that was shown,
signed again with a later end: its grants are looked up nowhere, and are those of the claim for as
long as the attempt runs. Their digest is written by the statement that begins the attempts of a
claim, and compared in the statements that a token is shown to.

Times are the database's. When a token is over is judged by it too, where it is judged at all: on
`events` and `credentials`, at the cost of one statement, which also says whether its key was
retired or revoked meanwhile. The machine's clock decides nothing.

Signing costs one request to KMS for each token, `AT_ONCE_MAX` at a time. So with KMS a token is
renewed when half of its life is over, or if a key that is revoked may have signed it; and a claim
is of `KMS_CLAIMS_MAX` tasks at most: it holds locks while it is signed. With a key in a file it
costs none. Verifying costs none either, as long as the key is known: see `tokens.verifying`. An
unknown name of a key costs a look at the table, once in a second at most. Nothing is stored, and no
token is logged. Called by the API and by the carrier of invocations.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.dispatcher.capabilities.grants import grants_of
from penstock.dispatcher.capabilities.keys import Keys
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, Issued
from penstock.dispatcher.tasks.values import Claimed, Extended
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import (
    DatabaseUnavailable,
    InvalidInput,
    SignerUnavailable,
    TokenRefused,
)
from penstock.tokens.claims import INVOKE_AUDIENCE, TASK_AUDIENCE, Claims
from penstock.tokens.jws import encode
from penstock.tokens.scopes import Root
from penstock.tokens.signing import Signer
from penstock.tokens.verifying import KeyCache, Verified, Verifier, judge_retired

_log = logging.getLogger(__name__)

INVOCATION_SECONDS: Final = 900
AT_ONCE_MAX: Final = 16
KMS_CLAIMS_MAX: Final = 128
"""What is signed within two seconds, if a signature takes a quarter of one."""
CLAIM_SECONDS_MAX: Final = 5.0
RENEW_SECONDS_MAX: Final = 3.0
LEEWAY_SECONDS: Final = 5
REFRESH_SECONDS_MIN: Final = 1.0
_REVOKED: Final = "revoked key"


class Issuer:
    """Issues and verifies the tokens of an organization whose store is at `root`."""

    def __init__(
        self,
        database: Database,
        keys: Keys,
        *,
        root: str,
        org: str = "default",
        refresh_seconds_min: float = REFRESH_SECONDS_MIN,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._database = database
        self._keys = keys
        self._root = Root.parse(root)
        self._org = org
        self._entropy = entropy or system_entropy()
        cache = KeyCache(
            keys, clock=clock or SystemClock(), refresh_seconds_min=refresh_seconds_min
        )
        self._verifiers = {
            audience: Verifier(cache, issuer=self.name, audience=audience)
            for audience in (TASK_AUDIENCE, INVOKE_AUDIENCE)
        }

    @property
    def name(self) -> str:
        """What tokens call their issuer."""
        return f"penstock/{self._org}"

    @property
    def claims_max(self) -> int:
        """How many attempts may begin in one transaction."""
        return KMS_CLAIMS_MAX if self._keys.is_remote else BATCH_MAX

    async def tokens_for(
        self, claimed: Sequence[Claimed], *, connection: Connection
    ) -> Sequence[Issued]:
        """The tokens of attempts that this transaction is about to begin, one for each.

        Raises `SignerUnavailable`, which undoes the transaction.
        """
        signer = await self._keys.signer(connection=connection)
        claims = [self._claims(each) for each in claimed]
        tokens = await _signed(claims, signer)
        for token, each in zip(tokens, claims, strict=True):
            self._remember(token, each, signer)
        return [
            Issued(token, each.grants.digest) for token, each in zip(tokens, claims, strict=True)
        ]

    async def renewed(self, extended: Sequence[tuple[Extended, Claims]]) -> Mapping[int, str]:
        """The next tokens of attempts, by task: what they have shown, until their new leases end.

        Without those that cannot be signed now, or need not be.
        """
        wanted = [
            self._next(claims, ends=math.ceil(each.lease_expires_at.timestamp()))
            for each, claims in extended
        ]
        if self._keys.is_remote:
            shown = {claims.task_id: claims for _, claims in extended}
            wanted = [
                each
                for each in wanted
                if shown[each.task_id].iat <= self._keys.revoked_until
                or _is_half_over(shown[each.task_id], each)
            ]
        if not wanted:
            return {}
        found: dict[int, str] = {}
        try:
            async with asyncio.timeout(RENEW_SECONDS_MAX):
                why = await _sign_some(wanted, await self._keys.signer(), found)
        except (SignerUnavailable, DatabaseUnavailable) as error:
            why = error.message
        except TimeoutError:
            why = f"it took longer than {RENEW_SECONDS_MAX:g} s"
        if len(found) < len(wanted):
            _log.warning("%d tokens were not renewed: %s", len(wanted) - len(found), why)
        return found

    async def invocation(self, task_id: int, attempt: int) -> str:
        """A token with which the function that is invoked for an attempt of a task may begin it."""
        now = math.floor((await self._row("database_seconds"))["seconds"])
        claims = Claims(
            iss=self.name,
            aud=INVOKE_AUDIENCE,
            sub=f"invocation:{task_id}:{attempt}",
            iat=now,
            nbf=now,
            exp=now + INVOCATION_SECONDS,
            jti=new_id(self._entropy),
            org=self._org,
            task_id=task_id,
            attempt=attempt,
        )
        (token,) = await _signed([claims], await self._keys.signer())
        return token

    async def verify(self, token: str, *, audience: str, is_expiry_judged: bool) -> Claims:
        """What a token says that one of our keys has signed. Raises `TokenRefused`."""
        found = await self._verifiers[audience].verified(token, is_expiry_judged=False)
        if is_expiry_judged:
            row = await self._row("judge_key", kid=found.kid)
            if row["is_revoked"]:
                raise TokenRefused("The token is signed by a key that was revoked.", kind=_REVOKED)
            judge_retired(found.claims, row["retired_at"])
            _judge_time(found.claims, now=row["seconds"])
        return found.claims

    def _remember(self, token: str, claims: Claims, signer: Signer) -> None:
        """What was signed here need not be verified here."""
        self._verifiers[claims.aud].remember(token, Verified(claims, signer.kid))

    def _next(self, claims: Claims, *, ends: int) -> Claims:
        """The same claims until a later end, of a life as long."""
        began = ends - (claims.exp - claims.iat)
        return msgspec.structs.replace(claims, iat=began, exp=ends, jti=new_id(self._entropy))

    def _claims(self, claimed: Claimed) -> Claims:
        ends = claimed.lease_expires_at.timestamp()
        began = math.floor(ends - claimed.heartbeat_ms / 1000)
        return Claims(
            iss=self.name,
            aud=TASK_AUDIENCE,
            sub=f"task:{claimed.task_id}:{claimed.attempt}",
            iat=began,
            nbf=began,
            exp=math.ceil(ends),
            jti=new_id(self._entropy),
            org=self._org,
            task_id=claimed.task_id,
            attempt=claimed.attempt,
            grants=grants_of(claimed, self._root),
        )

    async def _row(self, statement: str, **asked: str) -> dict[str, Any]:
        async def work(connection: Connection) -> dict[str, Any]:
            row = await (await connection.execute(query(statement), asked)).fetchone()
            assert row is not None, "the statement has one row"
            return row

        return await self._database.transact(work)


def _judge_time(claims: Claims, *, now: float) -> None:
    if claims.exp <= now:
        raise TokenRefused("The token has expired.", kind="expired")
    if claims.nbf > now + LEEWAY_SECONDS:
        raise TokenRefused("The token is not valid yet.", kind="not yet valid")


def _is_half_over(shown: Claims, wanted: Claims) -> bool:
    """Whether at least half of the life of a token is over, when its next one begins."""
    return 2 * (wanted.iat - shown.iat) >= shown.exp - shown.iat


async def _sign_some(claims: Sequence[Claims], signer: Signer, found: dict[int, str]) -> str:
    """Put the tokens of these claims into `found`, by task; returns why some are not there.

    Who gives up has those that are there by then.
    """
    room = asyncio.Semaphore(AT_ONCE_MAX)
    why = ""

    async def one(each: Claims) -> None:
        nonlocal why
        async with room:
            try:
                found[each.task_id] = await encode(each, signer)
            except (SignerUnavailable, InvalidInput) as error:
                why = error.message

    async with asyncio.TaskGroup() as group:
        for each in claims:
            group.create_task(one(each))
    return why


async def _signed(claims: Sequence[Claims], signer: Signer) -> list[str]:
    """The tokens of these claims, all or none."""
    room = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(each: Claims) -> str:
        async with room:
            return await encode(each, signer)

    try:
        async with asyncio.timeout(CLAIM_SECONDS_MAX), asyncio.TaskGroup() as group:
            signing = [group.create_task(one(each)) for each in claims]
    except TimeoutError:
        message = f"{len(claims)} tokens were not signed within {CLAIM_SECONDS_MAX:g} s."
        raise SignerUnavailable(message, hint="Ask again, for fewer at a time.") from None
    except ExceptionGroup as errors:
        # One speaks for all. `InvalidInput` is none of who claims: the key is gone from KMS, or a
        # job has more outputs than a token can name.
        error = errors.exceptions[0]
        if isinstance(error, SignerUnavailable | InvalidInput):
            raise SignerUnavailable(error.message, hint=error.hint) from error
        raise error from None
    return [each.result() for each in signing]
