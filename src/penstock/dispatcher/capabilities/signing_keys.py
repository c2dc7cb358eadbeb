"""The signing keys of capability tokens: publication, rotation, retirement, revocation.

Private halves are elsewhere (`key_store`); Postgres has the public halves of all dispatchers,
so each verifies what any other has signed. A key is in one of these states, by the database's
clock:

| state | means | moved by |
|---|---|---|
| published | all verifiers have it; `signs_from` is to come | time → signing |
| signing | the newest one of its holder signs | the next key of its holder, when that signs; no |
| | | sign of its holder for as long as it was there → retired |
| retired | signs no more, and verifies what it has | time, when nothing can be shown any more |
| | signed before | → removed; `revoke` |
| revoked | retired, and what it has signed proves nothing | nobody for a year: no copy comes back |
| removed | its row is gone | nobody |

Rotation: `rotate` counts one up; every holder whose newest key is of an earlier rotation makes
one, at its next turn, or when it is back. Asked again before the new keys sign, it is the same
rotation.

Invariants:
- A key signs `PUBLISH_SECONDS` after it was published if another of its holder signs meanwhile;
  else `JOIN_SECONDS` after, in which time every other dispatcher looks twice; and at once if there
  is no other dispatcher: nobody verifies yet.
- A holder makes one key for a rotation, however many processes it is: it is made and published
  under the lock of the holder, after another look at the table under the table's lock.
- A key is removed an hour after the last attempt was over that began before it was retired, and
  longer than an invocation's token lives. So a completion can be repeated as long as that.
- A holder that is away keeps its key for as long as it was there before, which is five minutes
  at
  least and two hours at most. So dispatchers that come and go leave no heap of keys.
- The dispatcher itself verifies with all keys. The key set for others has the `KEYS_MAX` that
  are
  needed most: those in use first, then those that were in use last.
- A file whose row is gone, as after a failover that has lost the last moments, is published
  again,
  retired: what it has signed is verified, and a new key signs.
- Who signs has looked at the table less than `CHOICE_SECONDS_MAX` ago. Attempts that begin
  within
  `SLACK_SECONDS` after a retirement count as begun before it.
- A private key is in no row, no log and no message.

A crash after a file was made and before its key is published leaves a useless file, whose key
is published as a lost one; after that, the key signs when the holder is back. Called by a loop
of every dispatcher, every few seconds: a look of two statements at a table of a few rows, and
mostly no more where there is one dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.capabilities.key_store import (
    HeldKeys,
    KeyRotation,
    KeyRow,
    KeyStore,
    KeyTable,
    KmsKeyStore,
)
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput, SignerUnavailable
from penstock.kernel.service import Service
from penstock.protocol.keys import KeyAnswer, KeysAnswer, KeyState, RevokeAnswer, RotateAnswer
from penstock.tokens.signer import Signer
from penstock.tokens.verifier import KEYS_MAX, LIFE_SECONDS_MAX, RETIRED_SECONDS

_log = logging.getLogger(__name__)

TURN_SECONDS: Final = 7.0
PUBLISH_SECONDS: Final = 60.0
JOIN_SECONDS: Final = 15.0
CHOICE_SECONDS_MAX: Final = 30.0
LIVE_SECONDS: Final = 30.0
TENDED_SECONDS: Final = 12.0
"""How long the only key is left alone; twice that is less than `LIVE_SECONDS`."""
AWAY_SECONDS_MIN: Final = 300.0
AWAY_SECONDS: Final = 7_200.0
SLACK_SECONDS: Final = 600.0
KEPT_SECONDS: Final = 3_600.0
TOLD_SECONDS: Final = RETIRED_SECONDS + LIFE_SECONDS_MAX + 60.0
"""How long others are told of a key that was retired: what it has signed is over by then."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What signs, as of some moment of this machine's."""

    signer: Signer
    at: float


class SigningKeys(Service):
    """The keys of a dispatcher, and the public halves of all."""

    def __init__(
        self, database: Database, holding: KeyStore, *, clock: Clock | None = None
    ) -> None:
        self._database = database
        self._holding = holding
        self._clock = clock or SystemClock()
        self._turning = asyncio.Lock()
        self._choice: _Choice | None = None
        self._why = "The signing keys have not been loaded yet."
        self._published: Mapping[str, Mapping[str, Any]] = {}
        self._published_at: float | None = None
        self.revoked_until = -math.inf
        """Until when keys that are revoked can have signed, in seconds since 1970."""

    @property
    def is_remote(self) -> bool:
        """Whether each signature is a request to somebody else."""
        return self._holding.kind == KmsKeyStore.kind

    async def start(self) -> None:
        """Have a key, if one can be had now. Raises `InvalidInput` for what has to be mended."""
        try:
            await self.turn()
        except (SignerUnavailable, DatabaseUnavailable) as error:
            _log.warning("cannot sign tokens yet: %s", error.message)

    async def stop(self) -> None:
        self._choice = None
        await self._holding.close()

    async def turn(self) -> float | None:
        """Make, publish, retire and remove keys, as it is time to, and choose the one that signs.

        Raises `InvalidInput` if a person has to mend something; what signed goes on signing for a
        moment.
        """
        async with self._turning:
            try:
                await self._turn()
            except (InvalidInput, SignerUnavailable) as error:
                self._why = error.message
                raise
        return None

    async def signer(self, *, connection: Connection | None = None) -> Signer:
        """What signs now. Raises `SignerUnavailable`.

        Who is in a transaction gives its connection, so as not to wait for a second one.
        """
        if (choice := self._fresh()) is not None:
            return choice
        if connection is not None:
            # Nothing is made here: it would be undone with the transaction.
            await self._choose(await _book(connection))
        else:
            try:
                await self.turn()
            except InvalidInput as error:
                raise SignerUnavailable(error.message, hint=error.hint) from error
        if (choice := self._fresh()) is None:
            raise SignerUnavailable(self._why, hint="Retry in a moment.")
        return choice

    async def keys(self) -> Mapping[str, Mapping[str, Any]]:
        """The public halves by their names, as they are now: all of them."""
        book = await self._database.transact(_book)
        self._note_published(book)
        return {row.kid: row.public for row in book.rows}

    async def published(self) -> Mapping[str, Mapping[str, Any]]:
        """Those for others, as of some seconds ago: anybody may ask, as often as they like.

        `KEYS_MAX` at most: the ones that are needed most.
        """
        at = self._published_at
        if at is None or self._clock.monotonic() - at > TURN_SECONDS:
            await self.keys()
        return self._published

    async def rotate(self, *, kms_key: str | None = None) -> RotateAnswer:
        """Have every holder make a new key."""
        kid = await self._holding.check(kms_key)
        asked = {"kms_key": kms_key, "publish_seconds": PUBLISH_SECONDS}

        async def work(connection: Connection) -> tuple[KeyRotation, bool]:
            rows = (await _book(connection)).rows
            if any(row.kid == kid and row.revoked_at is not None for row in rows):
                raise InvalidInput(
                    f"The key {kid} that {kms_key} means was revoked and no longer signs.",
                    hint="Rotate to another key of KMS.",
                )
            made = await (await connection.execute(query("ask_rotation"), asked)).fetchone()
            if made is not None:
                return KeyRotation(**made), True
            return (await _book(connection)).rotation, False

        rotation, is_new = await self._database.transact(work)
        assert rotation.asked_at is not None, "it was asked for"
        return RotateAnswer(
            rotation=rotation.number,
            asked_at=rotation.asked_at,
            is_new=is_new,
            signs_from=rotation.asked_at + timedelta(seconds=PUBLISH_SECONDS),
        )

    async def revoke(self, kid: str) -> RevokeAnswer | None:
        """End a key at once, and have its holder sign with a new one; None if there is no such key.

        Raises `InvalidInput` for the key of KMS that signs.
        """

        async def work(connection: Connection) -> dict[str, Any] | None:
            await connection.execute(query("lock_keys"))
            return await (await connection.execute(query("revoke_key"), {"kid": kid})).fetchone()

        row = await self._database.transact(work)
        if row is None:
            return None
        if row["is_needed"]:
            raise InvalidInput(
                f"The key {kid} of KMS signs, and this dispatcher cannot make another.",
                hint="Sign with another one first: penstock keys rotate --kms-key KEY",
            )
        if row["is_new"]:
            _log.warning("revoked signing key %s", kid)
        self._choice = None
        try:
            # If it was ours, there is a new one when this is answered; others see it at their turn.
            await self.turn()
        except (InvalidInput, SignerUnavailable) as error:
            _log.warning("cannot sign tokens: %s", error.message)
        return RevokeAnswer(kid=kid, revoked_at=row["revoked_at"], is_new=row["is_new"])

    async def listed(self) -> KeysAnswer:
        """All keys, for people."""
        book = await self._database.transact(_book)
        return KeysAnswer(
            keys=[_answer(row, book.rotation) for row in book.rows],
            rotation=book.rotation.number,
            asked_at=book.rotation.asked_at,
        )

    def _fresh(self) -> Signer | None:
        choice = self._choice
        if choice is None or self._clock.monotonic() - choice.at > CHOICE_SECONDS_MAX:
            return None
        return choice.signer

    async def _turn(self) -> None:
        at = self._clock.monotonic()
        book = await self._database.transact(_book)
        held = await self._holding.look(book)
        if held.is_new_wanted or held.lost:
            async with self._holding.alone():
                await self._publish()
            book = await self._database.transact(_book)
            held = await self._holding.look(book)
        is_over = False
        # One key that was looked after not long ago needs nothing more.
        if len(book.rows) != 1 or not book.rows[0].is_tended:
            is_over = await self._database.transact(lambda connection: _tend(connection, held))
        # Also what another dispatcher has retired.
        if is_over or any(row.is_useless and row.kid in held.kids for row in book.rows):
            async with self._holding.alone():
                book = await self._database.transact(_book)
                await self._holding.tidy(book)
        self._note_published(book)
        await self._choose(book, held=held, at=at)

    async def _publish(self) -> None:
        """Make a key and publish it, unless somebody of the same holder has just done so.

        And publish what was lost, so that what it has signed can be verified.
        """
        book = await self._database.transact(_book)
        held = await self._holding.look(book)
        for lost, name in held.lost:
            await self._publish_lost(lost, name, held.holder)
        if not held.is_new_wanted:
            return
        await self._holding.tidy(book)
        signer, reference = await self._holding.make(book)
        row = {
            "kid": signer.kid,
            "signer": self._holding.kind,
            "holder": held.holder,
            "reference": reference,
            "jwk": Jsonb(dict(signer.jwk)),
            "rotation": book.rotation.number,
            "held": list(held.kids),
            "publish_seconds": PUBLISH_SECONDS,
            "join_seconds": JOIN_SECONDS,
            "live_seconds": LIVE_SECONDS,
        }

        async def work(connection: Connection) -> None:
            await connection.execute(query("lock_keys"))
            if await (await connection.execute(query("publish_key"), row)).fetchone():
                _log.info("published signing key %s (%s)", signer.kid, reference)
            elif await (await connection.execute(query("keep_key"), row)).fetchone():
                _log.warning("rotation kept the KMS key: %s still names the same one", held.holder)

        await self._database.transact(work)

    async def _publish_lost(self, signer: Signer, reference: str, holder: str) -> None:
        row = {
            "kid": signer.kid,
            "signer": self._holding.kind,
            "holder": holder,
            "reference": reference,
            "jwk": Jsonb(dict(signer.jwk)),
        }

        async def work(connection: Connection) -> None:
            await connection.execute(query("publish_lost_key"), row)

        await self._database.transact(work)
        _log.warning("the row of key %s was gone; it is published to verify only", signer.kid)

    async def _choose(
        self, book: KeyTable, *, held: HeldKeys | None = None, at: float | None = None
    ) -> None:
        """Find what signs: the newest key of this holder whose time has come."""
        at = self._clock.monotonic() if at is None else at
        held = held or await self._holding.look(book)
        own = [row for row in book.rows if row.retired_at is None and row.kid in held.kids]
        for row in own:
            if row.may_sign:
                self._choice = _Choice(await self._holding.signer(row), at)
                return
        self._choice = None
        self._why = "This dispatcher has no key that signs tokens."
        if own:
            first = min(row.signs_from for row in own).astimezone(UTC)
            self._why = f"The key of this dispatcher signs tokens from {first:%H:%M:%S} UTC on."

    def _note_published(self, book: KeyTable) -> None:
        needed = sorted(
            book.rows,
            key=lambda row: (row.is_live, row.retired_at is None, row.seen_at),
            reverse=True,
        )
        told = [row for row in needed if row.is_told]
        self._published = {row.kid: row.public for row in told[:KEYS_MAX]}
        self._published_at = self._clock.monotonic()
        self.revoked_until = RETIRED_SECONDS + max(
            (row.retired_at.timestamp() for row in book.rows if row.revoked_at and row.retired_at),
            default=-math.inf,
        )


async def _book(connection: Connection) -> KeyTable:
    asked = {
        "live_seconds": LIVE_SECONDS,
        "told_seconds": TOLD_SECONDS,
        "tended_seconds": TENDED_SECONDS,
    }
    return _read(await (await connection.execute(query("signing_keys"), asked)).fetchall())


def _read(rows: Sequence[dict[str, Any]]) -> KeyTable:
    rotation = KeyRotation()
    for row in rows:
        number, asked_at, kms_key = (
            row.pop(f"asked_{name}") for name in ("number", "at", "kms_key")
        )
        if number is not None:
            rotation = KeyRotation(number=number, asked_at=asked_at, kms_key=kms_key)
    return KeyTable([KeyRow(**row) for row in rows if row["kid"] is not None], rotation)


async def _tend(connection: Connection, held: HeldKeys) -> bool:
    """Say what is held, and let go of what is over; whether anything was."""
    await connection.execute(query("see_keys"), {"held": list(held.kids)})
    away = {"away_seconds_min": AWAY_SECONDS_MIN, "away_seconds": AWAY_SECONDS}
    found = await connection.execute(query("retire_keys"), away)
    retired = [row["kid"] for row in await found.fetchall()]
    await connection.execute(query("note_idle_keys"), {"slack_seconds": SLACK_SECONDS})
    found = await connection.execute(query("remove_keys"), {"kept_seconds": KEPT_SECONDS})
    removed = [row["kid"] for row in await found.fetchall()]
    for kid in retired:
        _log.info("retired signing key %s", kid)
    for kid in removed:
        _log.info("removed signing key %s", kid)
    return bool(retired or removed)


def _answer(row: KeyRow, rotation: KeyRotation) -> KeyAnswer:
    if row.retired_at is not None:
        state = KeyState.RETIRED
    else:
        state = KeyState.SIGNING if row.may_sign else KeyState.PUBLISHED
    return KeyAnswer(
        kid=row.kid,
        state=state,
        signer=row.signer,
        holder=row.holder,
        reference=row.reference,
        created_at=row.created_at,
        signs_from=row.signs_from,
        seen_at=row.seen_at,
        retired_at=row.retired_at,
        revoked_at=row.revoked_at,
        is_rotated=row.rotation >= rotation.number,
    )
