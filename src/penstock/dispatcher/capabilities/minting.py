"""Credentials for an attempt: its token's folders become a session of the role of tasks.

    minted = await minter.mint(claims)

What is minted for is decided from the token alone: the folders that it grants, or fewer of them, or
folders below them, if the attempt asks for those. Whatever else it asks for is refused as `not
granted`. Every folder has to lie below the root of the store, whatever a token says. Where nothing
is minted (the store is not S3, or there is no role) everything is refused, with a sentence why.

Who calls has looked whether the attempt is running, before and after: see `api.credentials`. A
session lives for 15 minutes, the least that STS knows, and cannot be taken back; so credentials
outlive their attempt by 15 minutes at most, in which they can fill the attempt's own folders and
read its inputs. What lies there then is published by nobody.

The same attempt that asks for the same folders again within `SHARED_SECONDS` is given the same
answer: one that was lost on the way, say. Beyond that an attempt may have `MINTS_MAX` in
`WINDOW_SECONDS`, and one at a time (see `assuming`), so that none takes STS from the others; more
is `CredentialsUnavailable`. That is all state, it is in memory and bounded, and a crash loses
nothing by it. One mint is one request to STS, and none to the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from penstock.dispatcher.capabilities.assuming import Assuming, StsSessions
from penstock.dispatcher.capabilities.bucket_policies import partition_of
from penstock.dispatcher.capabilities.policies import session_policy
from penstock.kernel.aws import Aws
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    InvalidInput,
    TokenRefused,
)
from penstock.store.s3.config import s3_config
from penstock.tokens.claims import Claims
from penstock.tokens.scopes import S3, Root, Scope

SHARED_SECONDS: Final = 30.0
_SHARED_MAX: Final = 1_000
MINTS_MAX: Final = 32
"""How many mints an attempt may have in a window: as many as one input has folders in a token."""
WINDOW_SECONDS: Final = 60.0
_ASKING_MAX: Final = 10_000

_Key = tuple[int, int, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Minted:
    """Credentials, and what they are for. No repr has the secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime
    region: str
    endpoint: str
    """Of the store, if it is not AWS's own."""
    read: tuple[str, ...]
    write: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedStore:
    """The store that credentials are for, and the role whose they are."""

    root: Root
    region: str
    endpoint: str
    role: str

    @property
    def partition(self) -> str:
        """The part of AWS that the role is in; buckets are named with the same."""
        return partition_of(self.role)


@dataclass(frozen=True, slots=True)
class _Shared:
    minted: Minted
    at_seconds: float


@dataclass(slots=True)
class _Window:
    began_seconds: float
    mints: int = 0


class Minter:
    """Mints credentials, or says why it does not."""

    def __init__(
        self,
        store: MintedStore | None = None,
        sessions: Assuming | None = None,
        *,
        why_not: str = "This dispatcher mints no credentials.",
        hint: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._why_not = why_not
        self._hint = hint
        self._clock = clock or SystemClock()
        self._shared: dict[_Key, _Shared] = {}
        self._asking: dict[tuple[int, int], _Window] = {}
        """How much the attempts have asked for that asked last; the oldest window comes first."""

    @property
    def mints(self) -> bool:
        """Whether credentials can be had at all."""
        return self._store is not None

    async def mint(
        self,
        claims: Claims,
        *,
        read: Sequence[str] | None = None,
        write: Sequence[str] | None = None,
    ) -> Minted:
        """Credentials for what a token grants, or for less: None is everything of its kind.

        Raises `CredentialsRefused`, `CredentialsUnavailable`, `TokenRefused` for more than the
        token grants, and `InvalidInput` for folders that are none.
        """
        if self._store is None or self._sessions is None:
            raise CredentialsRefused(self._why_not, hint=self._hint)
        reads = _chosen(claims.grants.read_prefixes, read, store=self._store, verb="read")
        writes = _chosen(claims.grants.write_prefixes, write, store=self._store, verb="write")
        key = (claims.task_id, claims.attempt, tuple(map(str, reads)), tuple(map(str, writes)))
        if (known := self._recent(key)) is not None:
            return known
        policy = session_policy(read=reads, write=writes, partition=self._store.partition)
        self._count(claims)
        session = await self._sessions.assume(
            role=self._store.role,
            name=f"penstock-{claims.task_id}-{claims.attempt}",
            policy=policy,
        )
        minted = Minted(
            access_key=session.access_key,
            secret_key=session.secret_key,
            session_token=session.session_token,
            expires_at=session.expires_at,
            region=self._store.region,
            endpoint=self._store.endpoint,
            read=key[2],
            write=key[3],
        )
        self._keep(key, minted)
        return minted

    def close(self) -> None:
        """Ask for nothing any more."""
        if self._sessions is not None:
            self._sessions.close()
        self._shared.clear()
        self._asking.clear()

    def _count(self, claims: Claims) -> None:
        """One more for this attempt, or a refusal for now."""
        now, who = self._clock.monotonic(), (claims.task_id, claims.attempt)
        window = self._asking.get(who)
        if window is None or now - window.began_seconds >= WINDOW_SECONDS:
            self._asking.pop(who, None)
            if len(self._asking) >= _ASKING_MAX:
                del self._asking[next(iter(self._asking))]
            window = self._asking[who] = _Window(now)
        if window.mints >= MINTS_MAX:
            raise CredentialsUnavailable(
                f"This attempt has had credentials {MINTS_MAX} times within a minute.",
                hint="Ask again in a minute, or for several folders at a time.",
            )
        window.mints += 1

    def _recent(self, key: _Key) -> Minted | None:
        known = self._shared.get(key)
        if known is None or self._clock.monotonic() - known.at_seconds > SHARED_SECONDS:
            return None
        return known.minted

    def _keep(self, key: _Key, minted: Minted) -> None:
        now = self._clock.monotonic()
        self._shared.pop(key, None)
        # The oldest come first.
        while self._shared:
            oldest = next(iter(self._shared))
            is_old = now - self._shared[oldest].at_seconds > SHARED_SECONDS
            if not is_old and len(self._shared) < _SHARED_MAX:
                break
            del self._shared[oldest]
        self._shared[key] = _Shared(minted, now)


def make_minter(
    *, store_url: str, role: str, sts: Aws, environment: Mapping[str, str], clock: Clock
) -> Minter:
    """The minter of an installation: one that refuses, where there is nothing to mint.

    What is not said of STS is that of the store: its region, and its address if it is not AWS's.
    """
    if not store_url.startswith(f"{S3}://"):
        return Minter(
            why_not="There are no credentials for a store that is not S3.",
            hint="Tasks of this installation read and write the folder of the store by themselves.",
        )
    if not role:
        return Minter(
            why_not="This dispatcher has no role to mint credentials of.",
            hint="Set PENSTOCK_TASK_ROLE to the ARN of a role for tasks; docs/iam.md has one.",
        )
    partition_of(role)
    config = s3_config(store_url, environment=environment)
    endpoint = ""
    if not config.endpoint.is_amazon:
        host = config.endpoint.host_header
        if not config.path_style:
            host = host.removeprefix(f"{config.bucket}.")
        endpoint = f"{'https' if config.endpoint.tls else 'http'}://{host}"
    store = MintedStore(
        root=Root.parse(store_url.partition("?")[0]),
        region=config.endpoint.region,
        endpoint=endpoint,
        role=role,
    )
    sts = replace(
        sts, region=sts.region or config.endpoint.region, endpoint=sts.endpoint or endpoint or None
    )
    return Minter(store, StsSessions(sts), clock=clock)


def _chosen(
    granted: Iterable[str], asked: Sequence[str] | None, *, store: MintedStore, verb: str
) -> tuple[Scope, ...]:
    """The folders to mint for: all that are granted, or those of them that are asked for."""
    scopes = tuple(_below_root(each, store) for each in granted)
    if asked is None:
        return scopes
    wanted = tuple(dict.fromkeys(Scope.parse(each) for each in asked))
    for each in wanted:
        if not any(scope.covers(each) for scope in scopes):
            raise TokenRefused(
                f"The token does not grant to {verb} {str(each)[:500]}.",
                kind="not granted",
                hint="Ask for a folder that it grants, or for one below that.",
            )
    return wanted


def _below_root(prefix: str, store: MintedStore) -> Scope:
    try:
        scope = Scope.parse(prefix)
    except InvalidInput as error:
        # The token is ours, so this is nothing that the caller could say differently.
        raise CredentialsRefused(error.message, hint=error.hint) from error
    if not store.root.covers(scope):
        raise CredentialsRefused(
            f"{prefix[:500]} is granted, and is not below the store {store.root}.",
            hint="The store was changed since the attempt began; its next attempt is right.",
        )
    return scope
