"""Credentials for an attempt: its token's folders become an STS session of the role of tasks.

    minted = await minter.mint(claims)

Decided from the token alone: the folders that it grants, fewer of them, or folders below them.
Anything else is refused as `not granted`. Every folder has to lie below the root of the store.
Where nothing is minted (the store is not S3, or there is no role) every call is refused with
why. The caller checks before and after that the attempt is running: see `api.worker_endpoints`.
A session lives 15 minutes, the least that STS knows, and cannot be revoked: credentials outlive
their attempt by 15 minutes at most, in which they can fill the attempt's own folders and read
its inputs. What lies there then is published by nobody.

The same request within `SHARED_SECONDS` gets the same answer. Beyond that an attempt may have
`MINTS_MAX` in `WINDOW_SECONDS`, one at a time, and a reader of tables `READER_MINTS_MAX`; more is
`CredentialsUnavailable`.

`StsSessions` calls `sts:AssumeRole` in threads of its own pool: `at_once_max` at a time, no
more than `waiting_max` wait, each is answered within `seconds_max`. A thread that goes on after
that keeps its place until its client's bounds end it. `CredentialsRefused` is what would be
wrong with every such request: a policy that is too large or not understood. Everything else is
`CredentialsUnavailable`, also what is about the dispatcher (keys, clock, region, trust), which
is logged until it changes. STS's own text is not passed on, for it may hold the dispatcher's
session token; its error code is.

All state is in memory and bounded; a crash leaves a session whose keys nobody knows.

The policies are pure functions.

`session_policy` is an allow-list; what it does not name is denied, and it can only take away
from what the role of tasks may do. It holds:

- of each folder to read: `s3:GetObject` of what lies below it;
- of each folder to write: `s3:PutObject` of what lies below it, and the two actions that writers of
  large objects need besides, `s3:AbortMultipartUpload` and `s3:ListMultipartUploadParts`;
- of both: `s3:ListBucket` of their bucket, if `s3:prefix` is the folder or lies below it.

A folder is `PREFIX/*` and never `PREFIX*`. What means more in a policy than it says (`*`, `?`,
`$`) is in no scope; it is checked here once more and refused. A folder below another of its
kind is left out. STS takes 2,048 characters at most: more is a refusal that says so.

`bucket_policy` is defence in depth: set once, by people, and only denies. Of the role of tasks
it denies, in every session:

- everything outside of the folders `datasets/` and `scratch/` of the store: the queue, above
  all;
- every action but those that sessions are ever for, so also each way to delete or to open up;
- lists that are not of a folder below those two;
- if a VPC endpoint is named, every request that does not come through it, so that credentials
  that were carried out of the network are worth nothing.

Of everybody it denies what does not come over TLS. A role is named by the condition
`aws:PrincipalArn`, which is that of the role for all its sessions, and not as a principal, which
AWS would bind to the role that has the name today. `penstock keys` calls it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

from penstock.datasets.layout import DATASETS, SCRATCH
from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import (
    CredentialsRefused,
    CredentialsUnavailable,
    InvalidInput,
    TokenRefused,
)
from penstock.store.s3.config import s3_config
from penstock.tokens.claims import Claims
from penstock.tokens.scopes import S3, Root, Scope, without_covered

_log = logging.getLogger(__name__)

SESSION_SECONDS: Final = 900
"""The shortest that STS knows."""
_CONNECT_SECONDS_MAX: Final = 2.0
_READ_SECONDS_MAX: Final = 3.0
_TRIES_MAX: Final = 2
_PASSING: Final = frozenset(
    {
        *("Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException"),
        *("RequestLimitExceeded", "RequestThrottled", "SlowDown", "ServiceUnavailable"),
        *("InternalFailure", "InternalError", "IDPCommunicationError", "STSNotReady"),
    }
)
"""What is over soon by itself."""
_FINAL: Final = frozenset(
    {
        *("MalformedPolicyDocument", "MalformedPolicyDocumentException"),
        *("ValidationError", "ValidationException", "InvalidParameterValue"),
    }
)
_TOO_LARGE: Final = frozenset({"PackedPolicyTooLarge", "PackedPolicyTooLargeException"})
_NOT_TRUSTED: Final = (
    "Check the dispatcher's own credentials and clock, and the role's ARN and trust policy:"
    " docs/iam.md has one that serves."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSession:
    """Credentials that STS has made. No repr has the secrets."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StsBounds:
    """How much is asked of STS at a time, and for how long an answer is waited for."""

    at_once_max: int = 8
    waiting_max: int = 32
    seconds_max: float = 8.0


class RoleAssumer(Protocol):
    """Whoever makes sessions of a role."""

    async def assume(self, *, role: str, name: str, policy: str) -> RoleSession:
        """A session of this name that is allowed what the role and the policy both allow."""
        ...

    def close(self) -> None:
        """Wait for nothing any more."""
        ...


class StsSessions:
    """Asks STS."""

    def __init__(self, aws: Aws, *, bounds: StsBounds | None = None, client: Any = None) -> None:
        self._aws = aws
        self._bounds = bounds or StsBounds()
        self._client = client
        self._connecting = threading.Lock()
        self._counting = threading.Lock()
        self._count = 0
        self._names: set[str] = set()
        """The sessions that are being asked for."""
        self._last = ""
        """What the log was told last; empty since STS has answered well."""
        self._pool = ThreadPoolExecutor(self._bounds.at_once_max, thread_name_prefix="penstock-sts")

    async def assume(self, *, role: str, name: str, policy: str) -> RoleSession:
        bounds = self._bounds
        with self._counting:
            if name in self._names:
                raise CredentialsUnavailable(
                    "A credentials request of this attempt is already in progress.",
                    hint="Send one request at a time.",
                )
            if self._count >= bounds.at_once_max + bounds.waiting_max:
                raise CredentialsUnavailable("Too many concurrent requests to STS.")
            self._count += 1
            self._names.add(name)
        asked = self._pool.submit(self._ask, role=role, name=name, policy=policy)
        asked.add_done_callback(partial(self._done, name))
        try:
            async with asyncio.timeout(bounds.seconds_max):
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            raise CredentialsUnavailable(
                f"STS did not answer within {bounds.seconds_max:g} s."
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, name: str, _: Future[RoleSession]) -> None:
        """In the thread that has done it, or where it was cancelled before it began."""
        with self._counting:
            self._count -= 1
            self._names.discard(name)

    def _ask(self, *, role: str, name: str, policy: str) -> RoleSession:
        try:
            answer = self._connected().assume_role(
                RoleArn=role,
                RoleSessionName=name,
                Policy=policy,
                DurationSeconds=SESSION_SECONDS,
            )
        except (CredentialsRefused, CredentialsUnavailable):
            raise
        except Exception as error:
            found = _judged(error, role)
            if found is None:
                raise
            self._log_failure(found)
            # Not `from error`: its words may be shown with it.
            raise found from None
        self._last = ""
        made = answer["Credentials"]
        return RoleSession(
            access_key=made["AccessKeyId"],
            secret_key=made["SecretAccessKey"],
            session_token=made["SessionToken"],
            expires_at=made["Expiration"],
        )

    def _log_failure(self, found: CredentialsRefused | CredentialsUnavailable) -> None:
        """Tell the log of what somebody has to put right: no task gets credentials meanwhile."""
        if isinstance(found, CredentialsUnavailable) and found.hint and found.message != self._last:
            self._last = found.message
            _log.error("failed to mint task credentials: %s %s", found.message, found.hint)

    def _connected(self) -> Any:
        """The client, made when it is first needed; threads may share it."""
        with self._connecting:
            if self._client is None:
                try:
                    self._client = aws_client(
                        "sts",
                        aws=self._aws,
                        connect_seconds_max=_CONNECT_SECONDS_MAX,
                        read_seconds_max=_READ_SECONDS_MAX,
                        tries_max=_TRIES_MAX,
                        connections_max=self._bounds.at_once_max,
                    )
                except InvalidInput as error:
                    found = CredentialsUnavailable(error.message, hint=error.hint)
                    self._log_failure(found)
                    raise found from None
            return self._client


def _judged(error: Exception, role: str) -> CredentialsRefused | CredentialsUnavailable | None:
    """What an error of the client is to who asks; None for one that is a mistake of ours."""
    code = error_code(error)
    if code in _TOO_LARGE:
        return CredentialsRefused(
            "The session policy of so many folders is too large for STS.",
            kind="too many folders",
            hint="Request fewer folders at a time with `read` and `write`.",
        )
    if code:
        if code in _FINAL:
            return CredentialsRefused(f"STS refused to assume {role}: {code}.")
        if code in _PASSING or _status(error) >= 500 or _status(error) == 429:
            return CredentialsUnavailable(f"STS is unavailable ({code}).")
        return CredentialsUnavailable(f"STS cannot assume {role} now: {code}.", hint=_NOT_TRUSTED)
    kinds = importlib.import_module("botocore.exceptions")
    if isinstance(error, kinds.ParamValidationError):
        return CredentialsRefused(f"STS rejected the role {role!r}.", hint=_NOT_TRUSTED)
    if isinstance(error, kinds.NoCredentialsError | kinds.PartialCredentialsError):
        return CredentialsUnavailable(
            "The dispatcher has no AWS credentials for STS.",
            hint="Give it a role, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    if isinstance(error, kinds.BotoCoreError | OSError):
        return CredentialsUnavailable(f"Failed to reach STS: {type(error).__name__}.")
    return None


def _status(error: Exception) -> int:
    answer = getattr(error, "response", None)
    said = answer.get("ResponseMetadata") if isinstance(answer, dict) else None
    status = said.get("HTTPStatusCode") if isinstance(said, dict) else None
    return status if isinstance(status, int) else 0


SHARED_SECONDS: Final = 30.0
_SHARED_MAX: Final = 1_000
MINTS_MAX: Final = 32
"""How many mints an attempt may have in a window: as many as one input has folders in a token."""
READER_MINTS_MAX: Final = 300
"""The same of a reader, who is given those of one dataset at a time: engines that list the columns
of all tables load each of them."""
WINDOW_SECONDS: Final = 60.0
_ASKING_MAX: Final = 10_000

_Key = tuple[str, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedCredentials:
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
    minted: MintedCredentials
    at_seconds: float


@dataclass(slots=True)
class _Window:
    began_seconds: float
    mints: int = 0


class CredentialMinter:
    """Mints credentials, or says why it does not."""

    def __init__(
        self,
        store: MintedStore | None = None,
        sessions: RoleAssumer | None = None,
        *,
        why_not: str = "This dispatcher does not issue credentials.",
        hint: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._why_not = why_not
        self._hint = hint
        self._clock = clock or SystemClock()
        self._shared: dict[_Key, _Shared] = {}
        self._asking: dict[str, _Window] = {}
        """How much those have asked for that asked last; the oldest window comes first."""

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
    ) -> MintedCredentials:
        """Credentials for what a token grants, or for less: None is everything of its kind.

        Raises `CredentialsRefused`, `CredentialsUnavailable`, `TokenRefused` for more than the
        token grants, and `InvalidInput` for folders that are none.
        """
        store = self._store
        if store is None:
            raise CredentialsRefused(self._why_not, hint=self._hint)
        reads = _chosen(claims.grants.read_prefixes, read, store=store, verb="read")
        writes = _chosen(claims.grants.write_prefixes, write, store=store, verb="write")
        return await self._mint(f"{claims.task_id}-{claims.attempt}", reads, writes, "attempt")

    async def mint_reading(self, folder: str, *, who: str) -> MintedCredentials:
        """Credentials for reading what lies below a folder, for a reader of this name.

        Raises `CredentialsRefused` and `CredentialsUnavailable`.
        """
        if self._store is None:
            raise CredentialsRefused(self._why_not, hint=self._hint)
        return await self._mint(who, (_below_root(folder, self._store),), (), "reader")

    async def _mint(
        self, who: str, reads: tuple[Scope, ...], writes: tuple[Scope, ...], kind: str
    ) -> MintedCredentials:
        assert self._store is not None, "looked at by the caller"
        assert self._sessions is not None, "there is one with a store"
        key = (who, tuple(map(str, reads)), tuple(map(str, writes)))
        if (known := self._recent(key)) is not None:
            return known
        policy = session_policy(read=reads, write=writes, partition=self._store.partition)
        self._count(who, kind, mints_max=READER_MINTS_MAX if kind == "reader" else MINTS_MAX)
        session = await self._sessions.assume(
            role=self._store.role, name=f"penstock-{who}", policy=policy
        )
        minted = MintedCredentials(
            access_key=session.access_key,
            secret_key=session.secret_key,
            session_token=session.session_token,
            expires_at=session.expires_at,
            region=self._store.region,
            endpoint=self._store.endpoint,
            read=key[1],
            write=key[2],
        )
        self._keep(key, minted)
        return minted

    def close(self) -> None:
        """Ask for nothing any more."""
        if self._sessions is not None:
            self._sessions.close()
        self._shared.clear()
        self._asking.clear()

    def _count(self, who: str, kind: str, *, mints_max: int) -> None:
        """One more for this attempt or reader, or a refusal for now."""
        now = self._clock.monotonic()
        window = self._asking.get(who)
        if window is None or now - window.began_seconds >= WINDOW_SECONDS:
            self._asking.pop(who, None)
            if len(self._asking) >= _ASKING_MAX:
                del self._asking[next(iter(self._asking))]
            window = self._asking[who] = _Window(now)
        if window.mints >= mints_max:
            raise CredentialsUnavailable(
                f"This {kind} has reached the limit of {mints_max} credentials requests a minute.",
                hint="Retry in a minute, or request several folders at a time."
                if kind == "attempt"
                else "Retry in a minute.",
            )
        window.mints += 1

    def _recent(self, key: _Key) -> MintedCredentials | None:
        known = self._shared.get(key)
        if known is None or self._clock.monotonic() - known.at_seconds > SHARED_SECONDS:
            return None
        return known.minted

    def _keep(self, key: _Key, minted: MintedCredentials) -> None:
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
) -> CredentialMinter:
    """The minter of an installation: one that refuses, where there is nothing to mint.

    What is not said of STS is that of the store: its region, and its address if it is not AWS's.
    """
    if not store_url.startswith(f"{S3}://"):
        return CredentialMinter(
            why_not="Credentials are only issued for S3 stores.",
            hint="Tasks of this installation access the store directly.",
        )
    if not role:
        return CredentialMinter(
            why_not="This dispatcher has no role to issue credentials for.",
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
    return CredentialMinter(store, StsSessions(sts), clock=clock)


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
                hint="Request a folder that it grants, or one below that.",
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
            hint="The store changed since the attempt began; the next attempt uses the new one.",
        )
    return scope


POLICY_CHARACTERS_MAX: Final = 2_048
"""What STS takes as the policy of a session."""

READ_ACTIONS: Final = ("s3:GetObject",)
WRITE_ACTIONS: Final = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
LIST_ACTION: Final = "s3:ListBucket"
VERSION: Final = "2012-10-17"

_LITERAL: Final = re.compile(r"[A-Za-z0-9_.=~:@,!()/-]+")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def session_policy(*, read: Iterable[Scope], write: Iterable[Scope], partition: str = "aws") -> str:
    """The policy for these folders, as text. Raises `CredentialsRefused` if there can be none.

    `partition` is the one of the role's ARN: `aws`, `aws-cn` or `aws-us-gov`.
    """
    reads, writes = without_covered(read), without_covered(write)
    lists = without_covered((*reads, *writes))
    if not lists:
        # Without a policy a session may do all that its role may.
        raise CredentialsRefused(
            "The request matches no folder.",
            hint="The task reads nothing that is published, and was asked to write nothing.",
        )
    for each in (*reads, *writes):
        _check(each)
    statements = [
        *_of_objects(READ_ACTIONS, reads, partition),
        *_of_objects(WRITE_ACTIONS, writes, partition),
        *_of_lists(lists, partition),
    ]
    text = _encode({"Version": VERSION, "Statement": statements})
    if len(text) > POLICY_CHARACTERS_MAX:
        raise CredentialsRefused(
            f"A policy for {_counted(len(reads), 'folder')} to read and"
            f" {_counted(len(writes), 'folder')} to write has {len(text):,} characters, and STS"
            f" takes {POLICY_CHARACTERS_MAX:,}.",
            kind="too many folders",
            hint="Ask for fewer of them at a time, by task.credentials_for or with `read` and"
            " `write`; or declare the input with `read: all`, or compact its dataset.",
        )
    return text


def _of_objects(
    actions: Sequence[str], scopes: Sequence[Scope], partition: str
) -> list[Mapping[str, object]]:
    if not scopes:
        return []
    below = [f"arn:{partition}:s3:::{each.bucket}/{each.prefix}*" for each in scopes]
    return [{"Effect": "Allow", "Action": _short(actions), "Resource": _short(below)}]


def _of_lists(scopes: Sequence[Scope], partition: str) -> list[Mapping[str, object]]:
    """A statement for each bucket: the folders of one are not looked for in another."""
    buckets: dict[str, list[str]] = {}
    for each in scopes:
        buckets.setdefault(each.bucket, []).append(f"{each.prefix}*")
    return [
        {
            "Effect": "Allow",
            "Action": LIST_ACTION,
            "Resource": f"arn:{partition}:s3:::{bucket}",
            "Condition": {"StringLike": {"s3:prefix": _short(below)}},
        }
        for bucket, below in buckets.items()
    ]


def _short(values: Sequence[str]) -> str | Sequence[str]:
    """One value needs no list, and every character counts."""
    return values[0] if len(values) == 1 else list(values)


def _check(scope: Scope) -> None:
    """Look once more at what goes into a policy as it is."""
    is_literal = _LITERAL.fullmatch(scope.bucket) and _LITERAL.fullmatch(scope.prefix)
    if scope.scheme != S3 or not is_literal or not scope.prefix.endswith("/"):
        raise CredentialsRefused(f"{str(scope)[:200]!r} is not a folder that a policy can name.")


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


Statement = dict[str, Any]

_ROLE_ARN: Final = re.compile(r"arn:(aws[a-z-]*):iam::[0-9]{12}:role/[A-Za-z0-9_+=,.@/-]+")
_VPC_ENDPOINT: Final = re.compile(r"vpce-[0-9a-f]{8,32}")


def bucket_policy(*, store_url: str, role: str, vpc_endpoint: str = "") -> Mapping[str, Any]:
    """The policy for the bucket of a store; `role` is the ARN of the role of tasks."""
    root = _root(store_url)
    partition = partition_of(role)
    bucket = f"arn:{partition}:s3:::{root.bucket}"
    everything = [bucket, f"{bucket}/*"]
    folders = [f"{root.prefix}{each}*" for each in (DATASETS, SCRATCH)]
    of_tasks = {"ArnEquals": {"aws:PrincipalArn": role}}
    statements = [
        _denial(
            "TasksStayInTheirFolders",
            {"Action": "s3:*", "NotResource": [bucket, *(f"{bucket}/{each}" for each in folders)]},
            of_tasks,
        ),
        _denial(
            "TasksReadAndWriteOnly",
            {"NotAction": [*READ_ACTIONS, *WRITE_ACTIONS, LIST_ACTION], "Resource": everything},
            of_tasks,
        ),
        _denial(
            "TasksListTheirFoldersOnly",
            {"Action": LIST_ACTION, "Resource": bucket},
            {**of_tasks, "StringNotLike": {"s3:prefix": folders}},
        ),
    ]
    if vpc_endpoint:
        if not _VPC_ENDPOINT.fullmatch(vpc_endpoint):
            raise InvalidInput(
                f"{vpc_endpoint[:200]!r} is not the id of a VPC endpoint.",
                hint="Write it as vpce-1a2b3c4d.",
            )
        statements.append(
            _denial(
                "TasksComeThroughTheEndpoint",
                {"Action": "s3:*", "Resource": everything},
                {**of_tasks, "StringNotEquals": {"aws:SourceVpce": vpc_endpoint}},
            )
        )
    statements.append(
        _denial(
            "EverybodyComesOverTls",
            {"Action": "s3:*", "Resource": everything},
            {"Bool": {"aws:SecureTransport": "false"}},
        )
    )
    return {"Version": VERSION, "Statement": statements}


def partition_of(role: str) -> str:
    """The part of AWS that a role is in, as in `aws`; buckets are named with the same."""
    found = _ROLE_ARN.fullmatch(role)
    if found is None:
        raise InvalidInput(
            f"{role[:200]!r} is not the ARN of a role.",
            hint="Write PENSTOCK_TASK_ROLE as arn:aws:iam::ACCOUNT:role/NAME.",
        )
    return found[1]


def _denial(sid: str, what: Statement, condition: Statement) -> Statement:
    return {"Sid": sid, "Effect": "Deny", "Principal": "*", **what, "Condition": condition}


def _root(store_url: str) -> Root:
    root = Root.parse(store_url.partition("?")[0])
    if root.scheme != S3:
        raise InvalidInput(
            "Only a bucket has a policy, and the store is none.",
            hint="Name it with --store s3://BUCKET/PREFIX.",
        )
    return root
