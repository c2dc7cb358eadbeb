"""The signing keys of capability tokens, and the audit."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from penstock.protocol.base import Answer, Ask, Name, Page, TaskNumber

KmsKeyName = Annotated[str, Meta(min_length=1, max_length=2048, pattern=r"^[A-Za-z0-9:/_-]*$")]
"""The id, the ARN or the alias of a key of KMS."""


class JwksAnswer(Answer):
    """A JSON Web Key Set: the public halves of all keys that may have signed a token."""

    keys: list[dict[str, Any]]


class KeyState(StrEnum):
    """The state of a signing key."""

    PUBLISHED = "published"
    """It is told to those who verify, and does not sign yet."""
    SIGNING = "signing"
    RETIRED = "retired"
    """It signs no more, and stays for what it has signed."""


class KeyAnswer(Answer):
    """A key, by its public half."""

    kid: str
    state: KeyState
    signer: str
    """pem, a file; or kms."""
    holder: str
    """Whose it is: the name of a dispatcher's folder of keys, or what the key is called in KMS."""
    reference: str
    """Where the private half is: a file, or the ARN of a key."""
    created_at: datetime
    signs_from: datetime
    seen_at: datetime
    """When one who has the private half was last heard of."""
    retired_at: datetime | None = None
    revoked_at: datetime | None = None
    """Since when what it has signed proves nothing; its state is retired then."""
    is_rotated: bool = True
    """Whether it is of the last rotation; if not, and it signs, its holder was not heard since."""


class KeysAnswer(Answer):
    """All keys, the newest first."""

    keys: list[KeyAnswer]
    rotation: int = 0
    """How often a rotation was asked for."""
    asked_at: datetime | None = None
    """When the last one was."""


class RotateAsk(Ask):
    """Rotate the signing key of every dispatcher."""

    kms_key: KmsKeyName | None = None
    """Where KMS signs: the key that does from then on. Null for the one of the settings, which may
    be an alias that points to another key by now."""


class RotateAnswer(Answer):
    rotation: int
    asked_at: datetime
    is_new: bool
    """False if one was asked for a moment ago, whose keys do not sign yet: it is the same one."""
    signs_from: datetime
    """About when the new keys sign."""


class RevokeAsk(Ask):
    """Revoke a signing key."""

    kid: Name


class RevokeAnswer(Answer):
    kid: str
    revoked_at: datetime
    is_new: bool
    """False if it was revoked before."""


class AuditOutcome(StrEnum):
    ALLOWED = "allowed"
    REFUSED = "refused"


class AuditParams(Ask):
    task: TaskNumber | None = None
    outcome: AuditOutcome | None = None
    limit: Page = 100
    before: TaskNumber | None = None
    """Only notes with a lower number."""


class AuditNote(Answer):
    """An audit record, with its count within a minute."""

    id: int
    first_at: datetime
    last_at: datetime
    times: int
    what: str
    outcome: str
    task_id: int | None
    attempt: int | None
    caller: str
    address: str
    reason: str
    detail: dict[str, Any]


class AuditAnswer(Answer):
    """Audit records, newest first."""

    notes: list[AuditNote]
    before: int | None = None
    """For the next page; null if there is none."""
