"""Capability tokens of attempts: what they grant, how they are issued, and how they are verified.

| token | is signed | lives | allows |
|---|---|---|---|
| of an attempt | in the transaction that begins it | as long as its lease | what `grants` derives |
| its next one | after a heartbeat was committed | as long as the longer lease | the same |
| of an invocation | before a function is invoked | `INVOCATION_SECONDS` | to begin one attempt |
| of a query | for somebody who may read datasets | `QUERY_SECONDS` | to have it run, over those |

| of a task | is granted |
|---|---|
| an input | to read the folders of the parts that are published of it for the task |
| an input with `read: all` | to read the folder of the generation: that is what the DAG says |
| what was kept in it of an earlier generation | to read the folders of those parts |
| an output | to write the folder of this attempt |
| one with `partition_by` | the same: one folder, for all the partitions that it will find |
| an output that is merged | to read the folder of its partition, and what was kept in that |
| one that is both | to read the folder of its generation: any partition may be one of its own |
| the attempt itself | to read and write its scratch folder |
| what its job `buffers` | to publish batches of rows into that dataset |

Deny by default: what cannot be named in the one spelling of `penstock.tokens.scopes`, or is not
below the folder of its own dataset, is not granted. An input of more than `FOLDERS_MAX` folders
has none granted; if all inputs are too long to name, the longest are left out. What is left out
is counted in the grant. Outputs come first: a job with more than a token can name is refused
when it is applied (`check_outputs`); with keys too long to fit it may not publish the last
ones, for a token that cannot be signed would keep all others of its operator from being
claimed.

A claim and its tokens are one: if nothing can be signed, the claim is undone and no attempt
spent. A heartbeat returns the next tokens that could be signed within `RENEW_SECONDS_MAX`. A
renewed token is the one that was shown, signed again with a later end. The digest of the grants
is written by the statement that begins the attempts, and compared in the statements that a
token is shown to.

Times are the database's. Expiry is checked where it matters, on `events` and `credentials`, by
one statement that also says whether the key was retired or revoked. The machine's clock decides
nothing.

With KMS a token costs one request, `AT_ONCE_MAX` at a time: it is renewed at half of its life,
or if a revoked key may have signed it, and a claim is of `KMS_CLAIMS_MAX` tasks at most, since
it holds locks while it is signed. With a key in a file it costs none. Verifying costs none
while the key is known; an unknown `kid` costs a look at the table, once a second at most.
Nothing is stored, and no token is logged. `capabilities_of` puts the parts of this package
together for the wiring.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.datasets.layout import (
    DATASETS,
    attempt_name,
    attempt_prefix,
    many_prefix,
    part,
    scratch_prefix,
)
from penstock.dispatcher.capabilities.audit import AuditLog
from penstock.dispatcher.capabilities.key_store import KeyStore, KmsKeyStore, PemKeyStore
from penstock.dispatcher.capabilities.signing_keys import TURN_SECONDS, SigningKeys
from penstock.dispatcher.dag.model import DISPATCHER_RUNTIME, Dag
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.loop import Loop
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, IssuedToken
from penstock.dispatcher.tasks.model import ClaimedTask, ExtendedLease
from penstock.kernel.aws import Aws
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, new_id, system_entropy
from penstock.kernel.errors import (
    DatabaseUnavailable,
    InvalidInput,
    SignerUnavailable,
    TokenRefused,
)
from penstock.kernel.service import Service
from penstock.tokens.claims import (
    INVOKE_AUDIENCE,
    QUERY_AUDIENCE,
    TASK_AUDIENCE,
    Claims,
    Grants,
    ReadGrant,
    WriteGrant,
    encode,
)
from penstock.tokens.scopes import Root, Scope, scope_of_location
from penstock.tokens.signer import Signer
from penstock.tokens.verifier import KeyCache, Verified, Verifier, judge_retired

FOLDERS_MAX: Final = 32
"""The most folders that are named of one input."""
GRANTS_BYTES_MAX: Final = 9_000
"""Room for the grants of a token, whose text is a third longer and goes into a header."""
WRITES_BYTES_MAX: Final = 11_000
"""Room for outputs, if there is nothing else."""
KEY_CHARACTERS: Final = 32
"""How long a partition's key is taken to be when a job is judged."""
_GENERATION_CHARACTERS: Final = 36
_ATTEMPT_CHARACTERS: Final = 40
_ALL: Final = "all"
_GRANT_BYTES: Final = 130
"""What a grant takes besides its prefixes: two uuids and the names of its fields."""
_QUOTE_BYTES: Final = 3


def grants_of(claimed: ClaimedTask, root: Root) -> Grants:
    """The grants of an attempt whose store is at `root`."""
    folder = attempt_name(
        task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
    )
    scratch = str(root.folder(scratch_prefix(folder)))
    write: list[WriteGrant] = []
    buffers = tuple(_buffers(claimed))
    taken = len(scratch) + sum(len(each) + _QUOTE_BYTES for each in buffers)
    for each in _writes(claimed, root, folder):
        taken += _GRANT_BYTES + len(each.prefix)
        if taken > WRITES_BYTES_MAX:
            break
        write.append(each)
    reads = [*_merges(claimed, root), *_reads(claimed, root)]
    read = _fitted(reads, room=GRANTS_BYTES_MAX - taken)
    return Grants(read=read, write=tuple(write), scratch=scratch, buffers=buffers)


def check_outputs(dag: Dag, root: Root) -> None:
    """Raise `InvalidInput` for a job with more outputs than a token can name.

    How long the keys of partitions are is not known here: they are taken to have `KEY_CHARACTERS`.
    """
    for job in dag.jobs:
        if not job.runs or job.runtime == DISPATCHER_RUNTIME:
            continue
        folders = [
            attempt_prefix(
                each.dataset,
                generation="g" * _GENERATION_CHARACTERS,
                partition_key="k" * KEY_CHARACTERS,
                attempt="a" * _ATTEMPT_CHARACTERS,
            )
            for each in job.outputs
        ]
        left = WRITES_BYTES_MAX - len(str(root)) - len(scratch_prefix("a" * _ATTEMPT_CHARACTERS))
        for named, folder in enumerate(folders):
            left -= _GRANT_BYTES + len(str(root)) + len(folder) + 1
            if left < 0:
                raise InvalidInput(
                    f"The job {job.name} has {len(folders)} outputs, and the token of a task has"
                    f" room for the folders of {named} of them.",
                    hint="Make several jobs of it.",
                )


def _buffers(claimed: ClaimedTask) -> Iterator[str]:
    uuids = _mapping(claimed.definition.get("datasets"))
    for each in _list(claimed.definition.get("buffers")):
        if isinstance(uuid := uuids.get(each), str):
            yield uuid


def _writes(claimed: ClaimedTask, root: Root, folder: str) -> Iterator[WriteGrant]:
    uuids = _mapping(claimed.definition.get("datasets"))
    key = claimed.payload.get("partition_key")
    for each in _list(claimed.definition.get("outputs")):
        said = _mapping(each)
        dataset = said.get("dataset", said.get("name"))
        uuid = uuids.get(dataset) if isinstance(dataset, str) else None
        if not isinstance(dataset, str) or not isinstance(uuid, str):
            continue
        prefix = attempt_prefix(
            dataset,
            generation=claimed.generation,
            partition_key=key if isinstance(key, str) else None,
            attempt=folder,
        )
        if said.get("partition_by"):
            prefix = many_prefix(dataset, generation=claimed.generation, attempt=folder)
        # The longest names do not fit into a folder of a bucket: then there is none to write.
        if (scope := _folder(root, prefix)) is not None:
            yield WriteGrant(dataset=uuid, version=claimed.generation, prefix=str(scope))


def _merges(claimed: ClaimedTask, root: Root) -> Iterator[ReadGrant]:
    """What is published of the task's own partitions: it may move while the task runs."""
    if claimed.current is None:
        return
    uuids = _mapping(claimed.definition.get("datasets"))
    key = claimed.payload.get("partition_key")
    for each in _list(claimed.definition.get("outputs")):
        said = _mapping(each)
        dataset = said.get("dataset", said.get("name"))
        uuid = uuids.get(dataset) if isinstance(dataset, str) else None
        if not isinstance(dataset, str) or not isinstance(uuid, str):
            continue
        own = attempt_prefix(
            dataset,
            generation=claimed.generation,
            partition_key=key if isinstance(key, str) else None,
            attempt="",
        )
        if said.get("partition_by"):
            own = f"{DATASETS}{part(dataset)}/{part(claimed.generation)}"
        found = _folder(root, own.rstrip("/"))
        home = _folder(root, DATASETS + part(dataset))
        kept = [one for one in claimed.current.get(dataset, ()) if not _is_below(one, found)]
        prefixes, omitted = _parts(kept, home)
        yield ReadGrant(
            dataset=uuid,
            version=claimed.generation,
            prefixes=(*([] if found is None else [str(found)]), *prefixes),
            omitted=omitted + int(found is None),
        )


def _reads(claimed: ClaimedTask, root: Root) -> Iterator[ReadGrant]:
    whole = set(_whole(claimed.definition))
    for name, given in sorted(claimed.inputs.items()):
        if not given.get("has_data", True):
            continue
        dataset, version = str(given["dataset"]), str(given["generation"])
        home = _folder(root, DATASETS + part(dataset))
        if name in whole:
            found = _folder(root, f"{DATASETS}{part(dataset)}/{part(version)}")
            # What was kept of earlier generations lies in their folders.
            kept = [each for each in _list(given.get("parts")) if not _is_below(each, found)]
            prefixes, omitted = _parts(kept, home)
            prefixes = [*([] if found is None else [str(found)]), *prefixes]
            omitted += int(found is None)
        else:
            prefixes, omitted = _parts(_list(given.get("parts")), home)
        yield ReadGrant(
            dataset=str(given["uuid"]), version=version, prefixes=tuple(prefixes), omitted=omitted
        )


def _whole(definition: Mapping[str, Any]) -> Iterator[str]:
    """The names of the inputs of which everything is read."""
    for each in _list(definition.get("inputs")):
        said = _mapping(each)
        if said.get("read") == _ALL:
            yield str(said.get("as", said.get("from")))


def _parts(parts: Sequence[Any], home: Scope | None) -> tuple[list[str], int]:
    """The folders of parts, each once, and how many could not be granted.

    If there are too many of either kind none is, and the others are not looked at: a claim holds
    locks while this goes on.
    """
    found: dict[str, None] = {}
    omitted = 0
    for each in parts:
        if len(found) > FOLDERS_MAX or omitted > FOLDERS_MAX:
            return [], len(parts)
        scope = _scope(_mapping(each).get("location"))
        # The dataset's own folder holds all generations: it is none of a part.
        if scope is not None and home is not None and home.covers(scope) and scope != home:
            found[str(scope)] = None
        else:
            omitted += 1
    if len(found) > FOLDERS_MAX:
        return [], omitted + len(found)
    return list(found), omitted


def _fitted(reads: list[ReadGrant], *, room: int) -> tuple[ReadGrant, ...]:
    """The grants, the longest of them without folders if there is no room for all."""
    lengths = [sum(len(each) + _QUOTE_BYTES for each in read.prefixes) for read in reads]
    for _ in reads:
        if sum(lengths) + _GRANT_BYTES * len(reads) <= room:
            return tuple(reads)
        longest = lengths.index(max(lengths))
        read = reads[longest]
        omitted = read.omitted + len(read.prefixes)
        reads[longest] = ReadGrant(dataset=read.dataset, version=read.version, omitted=omitted)
        lengths[longest] = 0
    # Now none of them grants anything.
    return tuple(reads[: max(0, room) // _GRANT_BYTES])


def _is_below(given: object, folder: Scope | None) -> bool:
    location = _mapping(given).get("location")
    if folder is None or not isinstance(location, str):
        return False
    # Mostly it is spelt as we do, and there may be thousands.
    scope = None if location.startswith(f"{str(folder).rstrip('/')}/") else _scope(location)
    return scope is None or folder.covers(scope)


def _scope(location: object) -> Scope | None:
    try:
        return scope_of_location(location) if isinstance(location, str) else None
    except InvalidInput:
        return None


def _folder(root: Root, key: str) -> Scope | None:
    try:
        return root.folder(key)
    except InvalidInput:
        return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


_log = logging.getLogger(__name__)

INVOCATION_SECONDS: Final = 900
QUERY_SECONDS: Final = 60
AT_ONCE_MAX: Final = 16
KMS_CLAIMS_MAX: Final = 128
"""What is signed within two seconds, if a signature takes a quarter of one."""
CLAIM_SECONDS_MAX: Final = 5.0
RENEW_SECONDS_MAX: Final = 3.0
LEEWAY_SECONDS: Final = 5
REFRESH_SECONDS_MIN: Final = 1.0
_REVOKED: Final = "revoked key"


class TokenIssuer:
    """Issues and verifies the tokens of an organization whose store is at `root`."""

    def __init__(
        self,
        database: Database,
        keys: SigningKeys,
        *,
        root: str,
        org: str = "default",
        refresh_seconds_min: float = REFRESH_SECONDS_MIN,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._database = database
        self._keys = keys
        self._root = Root.parse(root)
        self._org = org
        self._entropy = entropy or system_entropy()
        cache = KeyCache(
            keys, clock=clock or SystemClock(), refresh_seconds_min=refresh_seconds_min
        )
        self._verifiers = {
            audience: Verifier(cache, issuer=self.name, audience=audience)
            for audience in (TASK_AUDIENCE, INVOKE_AUDIENCE, QUERY_AUDIENCE)
        }

    @property
    def name(self) -> str:
        """What tokens call their issuer."""
        return f"penstock/{self._org}"

    @property
    def claims_max(self) -> int:
        """How many attempts may begin in one transaction."""
        return KMS_CLAIMS_MAX if self._keys.is_remote else BATCH_MAX

    async def tokens_for(
        self, claimed: Sequence[ClaimedTask], *, connection: Connection
    ) -> Sequence[IssuedToken]:
        """The tokens of attempts that this transaction is about to begin, one for each.

        Raises `SignerUnavailable`, which undoes the transaction.
        """
        signer = await self._keys.signer(connection=connection)
        claims = [self._claims(each) for each in claimed]
        tokens = await _signed(claims, signer)
        for token, each in zip(tokens, claims, strict=True):
            self._remember(token, each, signer)
        return [
            IssuedToken(token, each.grants.digest)
            for token, each in zip(tokens, claims, strict=True)
        ]

    async def renewed(self, extended: Sequence[tuple[ExtendedLease, Claims]]) -> Mapping[int, str]:
        """The next tokens of attempts, by task: what they have shown, until their new leases end.

        Without those that cannot be signed now, or need not be.
        """
        wanted = [
            self._next(claims, ends=math.ceil(each.lease_expires_at.timestamp()))
            for each, claims in extended
        ]
        if self._keys.is_remote:
            shown = {claims.task_id: claims for _, claims in extended}
            wanted = [
                each
                for each in wanted
                if shown[each.task_id].iat <= self._keys.revoked_until
                or _is_half_over(shown[each.task_id], each)
            ]
        if not wanted:
            return {}
        found: dict[int, str] = {}
        try:
            async with asyncio.timeout(RENEW_SECONDS_MAX):
                why = await _sign_some(wanted, await self._keys.signer(), found)
        except (SignerUnavailable, DatabaseUnavailable) as error:
            why = error.message
        except TimeoutError:
            why = f"it took longer than {RENEW_SECONDS_MAX:g} s"
        if len(found) < len(wanted):
            _log.warning("failed to renew %d tokens: %s", len(wanted) - len(found), why)
        return found

    async def invocation(self, task_id: int, attempt: int) -> str:
        """A token with which the function that is invoked for an attempt of a task may begin it."""
        now = math.floor((await self._row("database_seconds"))["seconds"])
        claims = Claims(
            iss=self.name,
            aud=INVOKE_AUDIENCE,
            sub=f"invocation:{task_id}:{attempt}",
            iat=now,
            nbf=now,
            exp=now + INVOCATION_SECONDS,
            jti=new_id(self._entropy),
            org=self._org,
            task_id=task_id,
            attempt=attempt,
        )
        (token,) = await _signed([claims], await self._keys.signer())
        return token

    async def query(self, who: str, tables: frozenset[str] | None) -> str:
        """A token with which the query service may ask for the files of one query of somebody."""
        now = math.floor((await self._row("database_seconds"))["seconds"])
        claims = Claims(
            iss=self.name,
            aud=QUERY_AUDIENCE,
            sub=who,
            iat=now,
            nbf=now,
            exp=now + QUERY_SECONDS,
            jti=new_id(self._entropy),
            org=self._org,
            task_id=0,
            attempt=0,
            tables=None if tables is None else tuple(sorted(tables)),
        )
        signer = await self._keys.signer()
        (token,) = await _signed([claims], signer)
        self._remember(token, claims, signer)
        return token

    async def verify(self, token: str, *, audience: str, is_expiry_judged: bool) -> Claims:
        """What a token says that one of our keys has signed. Raises `TokenRefused`."""
        found = await self._verifiers[audience].verified(token, is_expiry_judged=False)
        if is_expiry_judged:
            row = await self._row("judge_key", kid=found.kid)
            if row["is_revoked"]:
                raise TokenRefused("The token was signed by a revoked key.", kind=_REVOKED)
            judge_retired(found.claims, row["retired_at"])
            _judge_time(found.claims, now=row["seconds"])
        return found.claims

    def _remember(self, token: str, claims: Claims, signer: Signer) -> None:
        """What was signed here need not be verified here."""
        self._verifiers[claims.aud].remember(token, Verified(claims, signer.kid))

    def _next(self, claims: Claims, *, ends: int) -> Claims:
        """The same claims until a later end, of a life as long."""
        began = ends - (claims.exp - claims.iat)
        return msgspec.structs.replace(claims, iat=began, exp=ends, jti=new_id(self._entropy))

    def _claims(self, claimed: ClaimedTask) -> Claims:
        ends = claimed.lease_expires_at.timestamp()
        began = math.floor(ends - claimed.heartbeat_ms / 1000)
        return Claims(
            iss=self.name,
            aud=TASK_AUDIENCE,
            sub=f"task:{claimed.task_id}:{claimed.attempt}",
            iat=began,
            nbf=began,
            exp=math.ceil(ends),
            jti=new_id(self._entropy),
            org=self._org,
            task_id=claimed.task_id,
            attempt=claimed.attempt,
            grants=grants_of(claimed, self._root),
        )

    async def _row(self, statement: str, **asked: str) -> dict[str, Any]:
        async def work(connection: Connection) -> dict[str, Any]:
            row = await (await connection.execute(query(statement), asked)).fetchone()
            assert row is not None, "the statement has one row"
            return row

        return await self._database.transact(work)


def _judge_time(claims: Claims, *, now: float) -> None:
    if claims.exp <= now:
        raise TokenRefused("The token has expired.", kind="expired")
    if claims.nbf > now + LEEWAY_SECONDS:
        raise TokenRefused("The token is not valid yet.", kind="not yet valid")


def _is_half_over(shown: Claims, wanted: Claims) -> bool:
    """Whether at least half of the life of a token is over, when its next one begins."""
    return 2 * (wanted.iat - shown.iat) >= shown.exp - shown.iat


async def _sign_some(claims: Sequence[Claims], signer: Signer, found: dict[int, str]) -> str:
    """Put the tokens of these claims into `found`, by task; returns why some are not there.

    Who gives up has those that are there by then.
    """
    room = asyncio.Semaphore(AT_ONCE_MAX)
    why = ""

    async def one(each: Claims) -> None:
        nonlocal why
        async with room:
            try:
                found[each.task_id] = await encode(each, signer)
            except (SignerUnavailable, InvalidInput) as error:
                why = error.message

    async with asyncio.TaskGroup() as group:
        for each in claims:
            group.create_task(one(each))
    return why


async def _signed(claims: Sequence[Claims], signer: Signer) -> list[str]:
    """The tokens of these claims, all or none."""
    room = asyncio.Semaphore(AT_ONCE_MAX)

    async def one(each: Claims) -> str:
        async with room:
            return await encode(each, signer)

    try:
        async with asyncio.timeout(CLAIM_SECONDS_MAX), asyncio.TaskGroup() as group:
            signing = [group.create_task(one(each)) for each in claims]
    except TimeoutError:
        message = f"{len(claims)} tokens were not signed within {CLAIM_SECONDS_MAX:g} s."
        raise SignerUnavailable(message, hint="Ask again, for fewer at a time.") from None
    except ExceptionGroup as errors:
        # One speaks for all. `InvalidInput` is none of who claims: the key is gone from KMS, or a
        # job has more outputs than a token can name.
        error = errors.exceptions[0]
        if isinstance(error, SignerUnavailable | InvalidInput):
            raise SignerUnavailable(error.message, hint=error.hint) from error
        raise error from None
    return [each.result() for each in signing]


_AUDIT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a dispatcher issues, verifies and notes."""

    keys: SigningKeys
    issuer: TokenIssuer
    audit: AuditLog

    @property
    def services(self) -> list[Service]:
        """What has to run beside them, in the order of need."""
        return [
            *(self.audit, Loop("audit", self.audit.turn, idle_seconds=_AUDIT_SECONDS)),
            *(self.keys, Loop("keys", self.keys.turn, idle_seconds=TURN_SECONDS)),
        ]


def capabilities_of(database: Database, holding: KeyStore, *, root: str, org: str) -> Capabilities:
    """Those of a dispatcher whose store is at `root`."""
    keys = SigningKeys(database, holding)
    issuer = TokenIssuer(database, keys, root=root, org=org)
    return Capabilities(keys=keys, issuer=issuer, audit=AuditLog(database))


def holding_of(*, kms_key: str | None, folder: Path, aws: Aws) -> KeyStore:
    """Keys of KMS, or in a folder if there is no name of one."""
    return PemKeyStore(folder) if kms_key is None else KmsKeyStore(kms_key, aws=aws)
