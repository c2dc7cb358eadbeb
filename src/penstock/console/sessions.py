"""Who looks at the console, as what, and that a form comes from a page of ours.

A session is a cookie: a role, when it began and a random number, signed by a key that is derived
from the installation's secret and from the tokens that let people in. So no session is stored,
every dispatcher takes those of the others, and a new token ends all of them. Cookies are for this
site alone (`SameSite=Strict`) and not for scripts.

A session is over after `SESSION_SECONDS`, or when somebody has signed out of it. That is stored, by
its number, where every dispatcher looks (`Ended`): before any page, form or stream, and of streams
that are open at every look, about once a second. So a cookie that was copied is good for nothing
from then on, whatever dispatcher it is shown to, and what it had opened ends. While that cannot be
asked nobody is let in, and nothing is sent. Where nobody has to sign in, nobody signs out either,
and nothing is asked. What is stored is kept twice as long as a session lasts, so that no clock that
is late takes it back; a crash leaves a session signed out of, or not.

| listener | without a session | who signs in |
|---|---|---|
| on loopback, no API token | an operator: whoever is on this machine | nobody has to |
| with an API token | the page to sign in | by the API token an operator, by another a viewer |

Where the console is read-only, everybody who is let in is a viewer, by whichever token.

A form has to bring the session's own number (`form_token`), which no other site can read, and an
`Origin` that is ours, if it has one. Pure, but for the clock and what is asked of `Ended`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id

COOKIE: Final = "penstock_session"
SESSION_SECONDS: Final = 12 * 3600
_COOKIE_CHARACTERS_MAX: Final = 500


class Role(StrEnum):
    """What somebody may do."""

    VIEWER = "viewer"
    """Look."""
    OPERATOR = "operator"
    """Look, and steer."""


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who looks."""

    role: Role
    began_at: int
    number: str

    @property
    def may_steer(self) -> bool:
        return self.role is Role.OPERATOR


class Ended(Protocol):
    """The numbers of the sessions that people have signed out of."""

    async def end(self, number: str, *, seconds: float) -> None:
        """Remember it, for so many seconds at least."""
        ...

    async def among(self, numbers: Collection[str]) -> Collection[str]:
        """Which of these it has."""
        ...


class Sessions:
    """Makes and judges sessions. Without an API token, everybody who gets here is an operator."""

    def __init__(
        self,
        secret: str,
        *,
        clock: Clock,
        entropy: Entropy,
        ended: Ended,
        api_token: str = "",
        viewer_token: str = "",
        is_read_only: bool = False,
    ) -> None:
        self.is_read_only = is_read_only
        self._clock = clock
        self._entropy = entropy
        self._ended = ended
        self._tokens = {Role.OPERATOR: api_token, Role.VIEWER: viewer_token}
        said = f"penstock console\x00{api_token}\x00{viewer_token}"
        # A session of before it was read-only is none.
        said += "\x00read-only" if is_read_only else ""
        self._key = hmac.digest(secret.encode(), said.encode(), hashlib.sha256)

    @property
    def is_open(self) -> bool:
        """Whether nobody has to sign in."""
        return not self._tokens[Role.OPERATOR]

    @property
    def highest(self) -> Role:
        """The most that anybody may be here."""
        return Role.VIEWER if self.is_read_only else Role.OPERATOR

    def begin(self, role: Role) -> Session:
        """A new session."""
        role = self.highest if role is Role.OPERATOR else role
        return Session(role, int(self._clock.wall()), new_id(self._entropy, characters=24))

    def role_of(self, token: str) -> Role | None:
        """Whom a token lets in; None for nobody."""
        found: Role | None = None
        for role, known in self._tokens.items():
            # All are compared, so that the time tells nothing.
            if known and hmac.compare_digest(known.encode(), token.encode("utf-8", "replace")):
                found = found or role
        return found

    def written(self, session: Session) -> str:
        """The session as a cookie has it."""
        body = f"{session.role}.{session.began_at}.{session.number}"
        signature = self._signature("session", body)
        return f"{body}.{signature}"

    def read(self, cookie: str) -> Session | None:
        """The session of a cookie; None if it is none, not ours, or too old.

        Whether somebody has signed out of it is another question: `over`.
        """
        body, _, signature = cookie.rpartition(".")
        if len(cookie) > _COOKIE_CHARACTERS_MAX or not hmac.compare_digest(
            self._signature("session", body).encode(), signature.encode("utf-8", "replace")
        ):
            return None
        role, began_at, number = body.split(".")
        session = Session(Role(role), int(began_at), number)
        return None if self._is_old(session) else session

    async def end(self, session: Session) -> None:
        """Sign out of a session: for all who have its cookie, at every dispatcher."""
        await self._ended.end(session.number, seconds=2 * SESSION_SECONDS)

    async def over(self, sessions: Collection[Session]) -> Collection[Session]:
        """Which of these are over. Raises `DatabaseUnavailable` if that is not known."""
        if self.is_open:
            return ()
        ended = await self._ended.among({each.number for each in sessions})
        return [each for each in sessions if each.number in ended or self._is_old(each)]

    def form_token(self, session: Session) -> str:
        """What a form of this session has to bring."""
        return self._signature("form", session.number)

    def is_from_here(self, session: Session, token: str) -> bool:
        """Whether a form is from a page of this session."""
        known = self.form_token(session)
        return hmac.compare_digest(known.encode(), token.encode("utf-8", "replace"))

    def signed(self, session: Session, told: str) -> str:
        """What proves that we have told this session so."""
        return self._signature("told", f"{session.number}\x00{told}")

    def is_signed(self, session: Session, told: str, signature: str) -> bool:
        """Whether we have told this session so."""
        known = self.signed(session, told)
        return hmac.compare_digest(known.encode(), signature.encode("utf-8", "replace"))

    def _is_old(self, session: Session) -> bool:
        """Whether it is older than sessions get, or of a time to come."""
        return not -60 <= self._clock.wall() - session.began_at <= SESSION_SECONDS

    def _signature(self, purpose: str, body: str) -> str:
        said = f"{purpose}\x00{body}".encode("utf-8", "replace")
        digest = hmac.digest(self._key, said, hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")
