"""Identities of the callers of the internal listener: workers and sources, by name and token.

Dispatchers share a secret. A caller's token is made from it and from the caller's name, so a
token proves one name and no other, nothing has to be stored for it, and whoever hands out
tokens need not hand out the secret. A new secret ends all tokens. This is for claiming and for
sending events; what an attempt may do is proved by its lease.

The process of webhooks faces the internet, so it has a token of its own kind, which begins with
`webhook.`: it sends events of webhook sources, and nothing else. Neither the secret nor the
token of a worker can be found from it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import InvalidInput

NAME_CHARACTERS_MAX: Final = 200
SECRET_CHARACTERS_MIN: Final = 16
WEBHOOK: Final = "webhook"
"""What the process of webhooks is called."""
_WEBHOOK_PREFIX: Final = f"{WEBHOOK}."


class Identified(StrEnum):
    """What became of a caller's proof."""

    KNOWN = "known"
    WEBHOOK = "webhook"
    """It is the process of webhooks, whatever it calls itself."""
    MISSING = "missing"
    """There is no name, or no token."""
    WRONG = "wrong"
    """The token is not the one of this name."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, and the proof that it is this one."""

    name: str
    token: str = field(repr=False)


class Identities:
    """Makes and judges identities."""

    def __init__(self, secret: str) -> None:
        if len(secret) < SECRET_CHARACTERS_MIN:
            raise InvalidInput(
                f"A secret has {SECRET_CHARACTERS_MIN} characters or more; this one of workers and"
                " sources has fewer.",
                hint="It is PENSTOCK_WORKER_SECRET, or worker.secret in the data folder. Make one:"
                " openssl rand -hex 32",
            )
        self._secret = secret.encode()

    def identity(self, name: str) -> Identity:
        """The identity of this name."""
        return Identity(name, self._token(name))

    def webhook(self) -> Identity:
        """The identity of the process of webhooks."""
        return webhook_identity(_WEBHOOK_PREFIX + self._mac(b"penstock webhook\x00"))

    def judge(self, name: str | None, token: str | None) -> Identified:
        """Whether a caller is who it says to be."""
        if not name or not token or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
            return Identified.MISSING
        is_webhook = token.startswith(_WEBHOOK_PREFIX)
        right = self.webhook().token if is_webhook else self._token(name)
        if not hmac.compare_digest(right.encode(), token.encode("utf-8", "replace")):
            return Identified.WRONG
        return Identified.WEBHOOK if is_webhook else Identified.KNOWN

    def _token(self, name: str) -> str:
        return self._mac(b"penstock worker\x00" + name.encode())

    def _mac(self, message: bytes) -> str:
        digest = hmac.new(self._secret, message, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def webhook_identity(token: str) -> Identity:
    """The identity of a process of webhooks that was given its token."""
    if not token.startswith(_WEBHOOK_PREFIX):
        # Most likely the secret itself, which is what must not be there.
        raise InvalidInput(
            "webhook_token is not a webhook token.",
            hint="Set PENSTOCK_WEBHOOK_TOKEN to what 'penstock source token' prints.",
        )
    return Identity(WEBHOOK, token)


def secret_of(file: Path, *, entropy: Entropy) -> str:
    """The secret that a file holds; made, for its owner alone, if there is none.

    Of several processes that make it at once, all get the same.
    """
    mine = file.with_name(f"{file.name}.{new_id(entropy)}")
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(new_id(entropy, characters=48))
        # A link never replaces: the first wins, and everybody reads what it wrote.
        os.link(mine, file)
    except FileExistsError:
        pass
    finally:
        mine.unlink(missing_ok=True)
    return file.read_text().strip()
