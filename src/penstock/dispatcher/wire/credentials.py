"""What an attempt says to have credentials for the store, and what it is given."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from penstock.dispatcher.wire.base import HELD, Answer, Ask

Folder = Annotated[str, Meta(min_length=1, max_length=2_000, pattern=HELD)]
Folders = Annotated[list[Folder], Meta(max_length=100)]


class CredentialsAsk(Ask):
    """Credentials for folders that the token grants, or for folders below those.

    What is not said is everything that the token grants; an empty list is nothing of it.
    """

    read: Folders | None = None
    write: Folders | None = None


class CredentialsAnswer(Answer):
    """Credentials of a session that is for these folders and nothing else."""

    access_key: str
    secret_key: str
    session_token: str
    expires_at: datetime
    """They live for 15 minutes, whatever becomes of the attempt. Ask again in time."""
    region: str
    read: list[str]
    write: list[str]
    endpoint: str = ""
    """The address of the store, if it is not AWS's own."""

    def __repr__(self) -> str:
        # Neither a log line nor a traceback is to have the secrets.
        return f"CredentialsAnswer(access_key={self.access_key!r}, expires_at={self.expires_at!r})"
