"""Sessions of the console: who is signed in, with which role, and that a form comes from our page.

A session is a cookie: a role, its start and a random number, signed by a key derived from the
installation's secret and from the tokens that let people in. So no session is stored, every
dispatcher accepts those of the others, and a new token ends all of them. Cookies are for this
site alone (`SameSite=Strict`) and hidden from scripts.

A session is over after `SESSION_SECONDS`, or after a sign-out. Sign-outs are stored by the
session's number where every dispatcher looks (`SignOuts`): before any page, form or stream, and
for open streams at every load, about once a second. So a copied cookie is worthless from then
on at every dispatcher, and the streams that it opened end. While that cannot be looked up
nobody is let in, and nothing is sent. Where sign-in is not needed nothing is looked up. A
sign-out is kept twice as long as a session lasts, so that no late clock undoes it; a crash
leaves a session signed out, or not.

| listener | without a session | who signs in |
|---|---|---|
| on loopback, no API token | an operator: whoever is on this machine | nobody has to |
| with an API token | the sign-in page | by the API token an operator, by the other a viewer |

Where the console is read-only, everybody is a viewer, by either token.

A form has to bring the session's own token (`form_token`), which no other site can read, and our
`Origin`, if it has one. Pure, but for the clock and `SignOuts`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id

COOKIE: Final = "penstock_session"
SESSION_SECONDS: Final = 12 * 3600
_COOKIE_CHARACTERS_MAX: Final = 500
_FORGOTTEN_MAX: Final = 1000
"""How many old sign-outs one turn takes away."""


class ConsoleRole(StrEnum):
    """What somebody may do."""

    VIEWER = "viewer"
    """Look."""
    OPERATOR = "operator"
    """Look, and steer."""


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """Somebody who looks."""

    role: ConsoleRole
    began_at: int
    number: str

    @property
    def may_steer(self) -> bool:
        return self.role is ConsoleRole.OPERATOR


class SignOuts(Protocol):
    """The numbers of the sessions that people have signed out of."""

    async def end(self, number: str, *, seconds: float) -> None:
        """Remember it, for so many seconds at least."""
        ...

    async def among(self, numbers: Collection[str]) -> Collection[str]:
        """Which of these it has."""
        ...


class EndedSessions:
    """The sign-outs, as rows of Postgres. Each operation is one short transaction.

    A row has the number of a session, which proves nothing to anybody. It is removed when the
    cookie has long expired, by whoever signs out next, so there are as many as recent sign-outs.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def end(self, number: str, *, seconds: float) -> None:
        """End a session, whose cookie would be good for so many seconds at most."""

        async def work(connection: Connection) -> None:
            await connection.execute(query("end_session"), {"number": number, "seconds": seconds})
            await connection.execute(query("forget_ended_sessions"), {"limit": _FORGOTTEN_MAX})

        await self._database.transact(work)

    async def among(self, numbers: Collection[str]) -> frozenset[str]:
        """Which of these are ended."""
        if not numbers:
            return frozenset()

        async def work(connection: Connection) -> frozenset[str]:
            asked = {"numbers": list(numbers)}
            rows = await (await connection.execute(query("ended_sessions"), asked)).fetchall()
            return frozenset(row["number"] for row in rows)

        return await self._database.transact(work)


class ConsoleSessions:
    """Makes and judges sessions. Without an API token, everybody who gets here is an operator."""

    def __init__(
        self,
        secret: str,
        *,
        clock: Clock,
        entropy: Entropy,
        ended: SignOuts,
        api_token: str = "",
        viewer_token: str = "",
        is_read_only: bool = False,
    ) -> None:
        self.is_read_only = is_read_only
        self._clock = clock
        self._entropy = entropy
        self._ended = ended
        self._tokens = {ConsoleRole.OPERATOR: api_token, ConsoleRole.VIEWER: viewer_token}
        said = f"penstock console\x00{api_token}\x00{viewer_token}"
        # A session of before it was read-only is none.
        said += "\x00read-only" if is_read_only else ""
        self._key = hmac.digest(secret.encode(), said.encode(), hashlib.sha256)

    @property
    def is_open(self) -> bool:
        """Whether nobody has to sign in."""
        return not self._tokens[ConsoleRole.OPERATOR]

    @property
    def highest(self) -> ConsoleRole:
        """The most that anybody may be here."""
        return ConsoleRole.VIEWER if self.is_read_only else ConsoleRole.OPERATOR

    def begin(self, role: ConsoleRole) -> ConsoleSession:
        """A new session."""
        role = self.highest if role is ConsoleRole.OPERATOR else role
        return ConsoleSession(role, int(self._clock.wall()), new_id(self._entropy, characters=24))

    def role_of(self, token: str) -> ConsoleRole | None:
        """Whom a token lets in; None for nobody."""
        found: ConsoleRole | None = None
        for role, known in self._tokens.items():
            # All are compared, so that the time tells nothing.
            if known and hmac.compare_digest(known.encode(), token.encode("utf-8", "replace")):
                found = found or role
        return found

    def token_of(self, session: ConsoleSession) -> str:
        """What a session's role shows the API; empty where nothing has to be shown."""
        return self._tokens[session.role]

    def written(self, session: ConsoleSession) -> str:
        """The session as a cookie has it."""
        body = f"{session.role}.{session.began_at}.{session.number}"
        signature = self._signature("session", body)
        return f"{body}.{signature}"

    def read(self, cookie: str) -> ConsoleSession | None:
        """The session of a cookie; None if it is none, not ours, or too old.

        Whether somebody has signed out of it is another question: `over`.
        """
        body, _, signature = cookie.rpartition(".")
        if len(cookie) > _COOKIE_CHARACTERS_MAX or not hmac.compare_digest(
            self._signature("session", body).encode(), signature.encode("utf-8", "replace")
        ):
            return None
        role, began_at, number = body.split(".")
        session = ConsoleSession(ConsoleRole(role), int(began_at), number)
        return None if self._is_old(session) else session

    async def end(self, session: ConsoleSession) -> None:
        """Sign out of a session: for all who have its cookie, at every dispatcher."""
        await self._ended.end(session.number, seconds=2 * SESSION_SECONDS)

    async def over(self, sessions: Collection[ConsoleSession]) -> Collection[ConsoleSession]:
        """Which of these are over. Raises `DatabaseUnavailable` if that is not known."""
        if self.is_open:
            return ()
        ended = await self._ended.among({each.number for each in sessions})
        return [each for each in sessions if each.number in ended or self._is_old(each)]

    def form_token(self, session: ConsoleSession) -> str:
        """What a form of this session has to bring."""
        return self._signature("form", session.number)

    def is_from_here(self, session: ConsoleSession, token: str) -> bool:
        """Whether a form is from a page of this session."""
        known = self.form_token(session)
        return hmac.compare_digest(known.encode(), token.encode("utf-8", "replace"))

    def signed(self, session: ConsoleSession, told: str) -> str:
        """What proves that we have told this session so."""
        return self._signature("told", f"{session.number}\x00{told}")

    def is_signed(self, session: ConsoleSession, told: str, signature: str) -> bool:
        """Whether we have told this session so."""
        known = self.signed(session, told)
        return hmac.compare_digest(known.encode(), signature.encode("utf-8", "replace"))

    def _is_old(self, session: ConsoleSession) -> bool:
        """Whether it is older than sessions get, or of a time to come."""
        return not -60 <= self._clock.wall() - session.began_at <= SESSION_SECONDS

    def _signature(self, purpose: str, body: str) -> str:
        said = f"{purpose}\x00{body}".encode("utf-8", "replace")
        digest = hmac.digest(self._key, said, hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")
