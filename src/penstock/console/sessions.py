"""Who looks at the console, as what, and that a form comes from a page of ours.

A session is a cookie: a role, when it began and a random number, signed by a key that is derived
from the installation's secret and from the tokens that let people in. So nothing is stored, every
dispatcher takes the sessions of the others, and a new token ends all sessions. Cookies are for this
site alone (`SameSite=Strict`) and not for scripts.

| listener | without a session | who signs in |
|---|---|---|
| on loopback, no API token | an operator: whoever is on this machine | nobody has to |
| with an API token | the page to sign in | by the API token an operator, by another a viewer |

A form has to bring the session's own number (`form_token`), which no other site can read, and an
`Origin` that is ours, if it has one. Pure, but for the clock.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

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


class Sessions:
    """Makes and judges sessions. Without an API token, everybody who gets here is an operator."""

    def __init__(
        self,
        secret: str,
        *,
        clock: Clock,
        entropy: Entropy,
        api_token: str = "",
        viewer_token: str = "",
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._tokens = {Role.OPERATOR: api_token, Role.VIEWER: viewer_token}
        said = f"penstock console\x00{api_token}\x00{viewer_token}"
        self._key = hmac.digest(secret.encode(), said.encode(), hashlib.sha256)

    @property
    def is_open(self) -> bool:
        """Whether nobody has to sign in."""
        return not self._tokens[Role.OPERATOR]

    def begin(self, role: Role) -> Session:
        """A new session."""
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
        """The session of a cookie; None if it is none, not ours, or too old."""
        body, _, signature = cookie.rpartition(".")
        if len(cookie) > _COOKIE_CHARACTERS_MAX or not hmac.compare_digest(
            self._signature("session", body).encode(), signature.encode("utf-8", "replace")
        ):
            return None
        role, began_at, number = body.split(".")
        session = Session(Role(role), int(began_at), number)
        age = self._clock.wall() - session.began_at
        return session if -60 <= age <= SESSION_SECONDS else None

    def form_token(self, session: Session) -> str:
        """What a form of this session has to bring."""
        return self._signature("form", session.number)

    def is_from_here(self, session: Session, token: str) -> bool:
        """Whether a form is from a page of this session."""
        known = self.form_token(session)
        return hmac.compare_digest(known.encode(), token.encode("utf-8", "replace"))

    def _signature(self, purpose: str, body: str) -> str:
        said = f"{purpose}\x00{body}".encode("utf-8", "replace")
        digest = hmac.digest(self._key, said, hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")
