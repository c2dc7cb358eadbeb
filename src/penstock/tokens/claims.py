"""What a capability token says: whose attempt it proves, until when, and what that may touch.

A token is a JWT (ES256) for one `(task_id, attempt)`. Its grants are derived from the task's own
inputs and outputs, and from nothing else: what is not named is not granted. Prefixes are canonical
URLs of folders that end with a slash; see `penstock.tokens.scopes`. In a store of files they are
`file:///…/`, for which nobody mints credentials; they are judged all the same when something is
published.

A token as text has at most `TOKEN_BYTES_MAX` bytes, and `token_bytes` tells its length before it is
signed: see `penstock.tokens.jws`. Prefixes are texts here: whoever acts on one reads it with
`Scope.parse` first.

Pure values. Made by the dispatcher (`dispatcher.capabilities`), read by whoever verifies.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

TASK_AUDIENCE: Final = "penstock:task"
"""Tokens of attempts."""
INVOKE_AUDIENCE: Final = "penstock:invoke"
"""Tokens that come with the invocation of a function: they allow to claim one task."""


class ReadGrant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input: the folders of what is published of it for the task."""

    dataset: str
    """Its uuid."""
    version: str
    """Its generation."""
    prefixes: tuple[str, ...] = ()
    omitted: int = 0
    """How many folders there are, if there are too many to name: then none is granted."""


class WriteGrant(msgspec.Struct, frozen=True, kw_only=True):
    """An output: the folder of this attempt, in which no other writes."""

    dataset: str
    version: str
    prefix: str


class Grants(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an attempt may touch."""

    read: tuple[ReadGrant, ...] = ()
    write: tuple[WriteGrant, ...] = ()
    scratch: str = ""
    """A folder of its own for what is not published: read and written."""

    @property
    def read_prefixes(self) -> tuple[str, ...]:
        """All that may be read: the inputs, and its own scratch folder."""
        named = [prefix for each in self.read for prefix in each.prefixes]
        return tuple(dict.fromkeys([*named, *([self.scratch] if self.scratch else [])]))

    @property
    def write_prefixes(self) -> tuple[str, ...]:
        """All that may be written: the outputs, and its own scratch folder."""
        named = [each.prefix for each in self.write]
        return tuple(dict.fromkeys([*named, *([self.scratch] if self.scratch else [])]))

    @property
    def digest(self) -> str:
        """What the dispatcher keeps of these grants, to tell them from all others."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


class Claims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a token. Times are seconds since 1970, of the database's clock."""

    iss: str
    aud: str
    sub: str
    """`task:7:2`, for attempt 2 of task 7."""
    iat: int
    nbf: int
    exp: int
    jti: str
    org: str
    task_id: int
    attempt: int
    """In the token of an invocation the one that it may begin."""
    grants: Grants = Grants()
