"""The `s3://` backend: a prefix of a bucket on any S3-compatible server.

Each method is one request of `bucket`. Two things are more:

- A condition is tried on the server before it is trusted (`trials`): once a client, at opening
  or
  at first use.
- `touch` is a self-copy, one request, only where that is known to be atomic: on AWS. Other
  servers
  check the condition of a copy and write later, so that a refresh could bring back a body that
  has been swapped meanwhile (SeaweedFS 4.48: 2 to 28 of 200 races). There `touch` reads the object
  and swaps it for itself with the new metadata: two requests, and as safe as every swap.
  `touch=copy` or `touch=swap` in the URL decides otherwise.

Requests to the objects of one bucket, below one prefix, and what their answers mean.

Between `transport`, which knows no buckets, and `backend`, which promises what a store promises:
here a key is only a key, a condition is only a header, and every failure is one of Penstock's
errors. Conditions are S3's own: `If-None-Match: *` to create, `If-Match` to swap, to delete, and
on both ends of a self-copy.

Whether a server minds its conditions, tried before they are trusted.

Some servers ignore a condition that they do not know, which would let two writers win. So each
is tried on a marker object of Penstock's own, with a version that cannot be right: CREATE and
swap when a store is opened, delete and the copy of `touch` before their first use, once a
client. A server that lets the wrong version pass raises `Unsupported`. What such a trial cannot
see, races, is for `penstock doctor`.

How deletes are made safe in a bucket: a record in it, so that all its clients agree.

A client that does not know of tombstones would take them for objects
(`penstock.store.tombstoned`). So whoever opens a store with `deletes=tombstone` leaves a record
below `.penstock/`, for good, and whoever opens it later goes by the record, with the option or
without. A client that was open before the record was written does not know of it: a bucket in
use is changed while nobody uses it. Release 0.1.0 knows no record, and refuses a URL that has
the option.

Buckets that keep former versions.

Whether one does, and how to remove every version below a prefix: the doctor leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from typing import ClassVar, Final
from urllib.parse import quote

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import Document, decode, encode
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import (
    CREATE,
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    RESERVED_FOLDER,
    Delimiter,
    Entry,
    Head,
    Object,
    ObjectStore,
    Page,
    Put,
    PutMode,
    Swap,
    Version,
    check_key,
    check_limit,
    check_metadata,
)
from penstock.store.s3.answers import (
    RequestSubject,
    bucket_not_found,
    copied_version,
    error_of,
    former_versions_of,
    keeps_versions,
    listing_of,
    not_s3,
    unmasked,
    version_of,
)
from penstock.store.s3.config import S3Config
from penstock.store.s3.connection import Headers, NoAnswer, NotSent, Response
from penstock.store.s3.signing import NoCredentials, SignedRequest
from penstock.store.s3.transport import Closed, S3Transport, TransportLimits, epoch_of
from penstock.store.time import StoreClock, TimeSample

METADATA_PREFIX: Final = "x-amz-meta-"


class S3Bucket:
    """One bucket, or a prefix in it, over one transport."""

    def __init__(self, config: S3Config, transport: S3Transport) -> None:
        self.config = config
        self._transport = transport

    async def ask(
        self,
        method: str,
        key: str | None,
        *,
        query: Headers = (),
        headers: Headers = (),
        body: bytes = b"",
        writes: bool = False,
    ) -> Response:
        """One request; `key` None is the bucket itself."""
        config = self.config
        path = config.path(None if key is None else config.root + key)
        try:
            return await self._transport.send(SignedRequest(method, path, query, headers, body))
        except Closed as error:
            raise StoreError(
                f"This client of bucket {config.bucket!r} has been closed.", key=key or ""
            ) from error
        except NoCredentials as error:
            raise Refused(
                f"There are no credentials for bucket {config.bucket!r} ({error}).",
                hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.",
            ) from error
        except NotSent as error:
            raise Unavailable(
                f"{config.where} cannot be reached ({error}).",
                key=key or "",
                hint=config.unreachable_hint,
            ) from error
        except NoAnswer as error:
            lost: type[StoreError] = OutcomeUnknown if writes else Unavailable
            raise lost(f"{config.where} did not answer ({error}).", key=key or "") from error

    async def put(
        self, key: str, body: bytes, mode: PutMode, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        headers = _metadata_headers(metadata)
        match mode:
            case Put.CREATE:
                headers.append(("If-None-Match", "*"))
            case Swap(version):
                headers.append(("If-Match", _condition(key, version)))
            case Put.REPLACE:
                pass
        response = await self.ask("PUT", key, headers=headers, body=body, writes=True)
        if response.status == 200:
            version = version_of(response.headers.get("etag", ""))
            if not version:
                raise not_s3(self.asked(key, writes=True), "a put without an ETag")
            return version
        error = self.error(response, key, writes=True)
        if mode is Put.CREATE and isinstance(error, VersionConflict):
            raise AlreadyExists(f"The object {key!r} already exists.", key=key)
        if isinstance(error, NotFound):
            if isinstance(mode, Swap):
                raise VersionConflict(f"The object {key!r} is gone.", key=key)
            raise bucket_not_found(self.config.bucket)
        raise error

    async def copy_onto_itself(
        self,
        key: str,
        *,
        target: Version,
        source: Version | None,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        """Replace the metadata of a key, if it is in these versions when read and when written."""
        path = quote(f"/{self.config.bucket}/{self.config.root}{key}", safe="/-_.~")
        headers = [
            ("x-amz-copy-source", path),
            ("If-Match", _condition(key, target)),
            ("x-amz-metadata-directive", "REPLACE"),
            *_metadata_headers(metadata),
        ]
        if source is not None:
            headers.append(("x-amz-copy-source-if-match", _condition(key, source)))
        response = await self.ask("PUT", key, headers=headers, writes=True)
        if response.status == 200:
            response = unmasked(response)
        if response.status == 200:
            copied = copied_version(response.body)
            if copied is None:
                raise not_s3(self.asked(key, writes=True), "a copy without a result")
            return copied
        error = self.error(response, key, writes=True)
        if isinstance(error, NotFound):
            raise VersionConflict(f"The object {key!r} is gone.", key=key)
        raise error

    async def delete(self, key: str, version: Version | None) -> None:
        headers = [("If-Match", _condition(key, version))] if version is not None else []
        response = await self.ask("DELETE", key, headers=headers, writes=True)
        if response.status in (200, 204):
            return
        error = self.error(response, key, writes=True)
        if not isinstance(error, NotFound):
            raise error

    def asked(self, key: str, *, writes: bool = False) -> RequestSubject:
        """What was asked for, for an error's sentence."""
        return RequestSubject(self.config.bucket, self.config.endpoint.region, key, writes)

    def error(self, response: Response, key: str, *, writes: bool = False) -> StoreError:
        """The error that an answer stands for."""
        return error_of(response, self.asked(key, writes=writes))


def is_etag(version: Version) -> bool:
    """Whether a version can be sent as a condition at all."""
    return bool(version) and version.isascii() and version.isprintable() and '"' not in version


def _condition(key: str, version: Version) -> str:
    """A version as a header. What no server ever gave is no object's version."""
    if not is_etag(version):
        raise VersionConflict(f"The object {key!r} is not there in the version named.", key=key)
    return f'"{version}"'


def _metadata_headers(metadata: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(METADATA_PREFIX + name, value) for name, value in metadata.items()]


MARKER: Final = f"{RESERVED_FOLDER}/marker"
_WRONG_VERSION: Final = Version("00000000000000000000000000000000")


class _Marker(Document, frozen=True):
    """What the trials are made on."""

    kind: ClassVar[str] = "marker"


class Trials:
    """What one client has found out about its server."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket
        self._marker = encode(_Marker())
        self._passed: set[str] = set()
        self._trying = asyncio.Lock()

    async def puts(self) -> None:
        """The bucket is there, may be written, and minds conditions on puts."""
        # Some servers make a missing bucket on the first put; that is not what was asked for.
        if (await self._bucket.ask("HEAD", None)).status == 404:
            raise bucket_not_found(self._bucket.config.bucket)
        try:
            await self._bucket.put(MARKER, self._marker, CREATE)
            await self._bucket.put(MARKER, self._marker, CREATE)
        except AlreadyExists:
            pass
        else:
            raise self._ignored("create-if-absent (If-None-Match)")
        swap = self._bucket.put(MARKER, self._marker, Swap(_WRONG_VERSION))
        await self._must_fail(swap, "compare-and-swap (If-Match)")

    async def deletes(self) -> None:
        """The server minds the condition on a delete."""
        async with self._trying:
            if "deletes" not in self._passed:
                await self._bucket.put(MARKER, self._marker, REPLACE)
                delete = self._bucket.delete(MARKER, _WRONG_VERSION)
                await self._must_fail(delete, "the condition on a delete")
                self._passed.add("deletes")

    async def copies(self) -> None:
        """The server minds the condition on a copy's destination.

        There is none on the source here: it could refuse in the place of the other.
        """
        async with self._trying:
            if "copies" not in self._passed:
                await self._bucket.put(MARKER, self._marker, REPLACE)
                copy = self._bucket.copy_onto_itself(MARKER, target=_WRONG_VERSION, source=None)
                await self._must_fail(copy, "the condition on a copy's destination")
                self._passed.add("copies")

    async def _must_fail(self, request: Awaitable[object], what: str) -> None:
        try:
            await request
        except VersionConflict:
            return
        raise self._ignored(what)

    def _ignored(self, what: str) -> Unsupported:
        bucket = self._bucket.config.bucket
        return Unsupported(
            f"The server of bucket {bucket!r} ignores {what}: two writers could win.",
            hint="Use a server with conditional writes; 'penstock doctor URL' tells more.",
        )


RECORD: Final = f"{RESERVED_FOLDER}/deletes"


class DeletesRecord(Document, frozen=True):
    """That deletes in this store are by tombstone. There is none where they are conditional."""

    kind: ClassVar[str] = "deletes-by-tombstone"


async def are_by_tombstone(bucket: S3Bucket) -> bool:
    """Whether deletes in this store are by tombstone: by its record, or by the URL."""
    wanted = bucket.config.deletes
    recorded = await _is_recorded(bucket)
    if recorded and wanted == "conditional":
        raise InvalidInput(
            f"Deletes in bucket {bucket.config.bucket!r} are by tombstone, and cannot be"
            " conditional any more.",
            hint="Drop deletes=conditional from the URL, or use another prefix.",
        )
    return recorded or wanted == "tombstone"


async def _is_recorded(bucket: S3Bucket) -> bool:
    response = await bucket.ask("GET", RECORD)
    if response.status == 200:
        decode(DeletesRecord, response.body, where=RECORD)
        return True
    # Who may not list is told that what is missing is forbidden.
    if response.status == 404 or isinstance(bucket.error(response, RECORD), Refused):
        return False
    raise bucket.error(response, RECORD)


async def record(bucket: S3Bucket) -> None:
    """Leave the record, unless it is there."""
    with suppress(AlreadyExists):
        await bucket.put(RECORD, encode(DeletesRecord()), CREATE)


class S3Store(ObjectStore):
    """One client of a bucket, or of a prefix in it."""

    def __init__(
        self, config: S3Config, *, clock: Clock, limits: TransportLimits | None = None
    ) -> None:
        self._clock = StoreClock(clock)
        self._transport = S3Transport(
            config.endpoint, keyring=config.keyring, clock=self._clock, limits=limits
        )
        self.bucket = S3Bucket(config, self._transport)
        self._trials = Trials(self.bucket)
        self.deletes_by_tombstone = config.deletes == "tombstone"
        """Whether this store must only be used through a `TombstonedStore`; known when verified."""

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def verify(self) -> None:
        """Show that the bucket is there, may be written, and keeps its conditions."""
        await self._trials.puts()
        self.deletes_by_tombstone = await are_by_tombstone(self.bucket)

    async def record_deletes(self) -> None:
        """Let all who open this store know how deletes are made safe in it."""
        if self.deletes_by_tombstone:
            await record(self.bucket)

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        check_key(key)
        headers = [("If-None-Match", f'"{unless}"')] if unless and is_etag(unless) else []
        response = await self.bucket.ask("GET", key, headers=headers)
        if response.status == 304 and headers:
            return None
        if response.status != 200:
            raise self.bucket.error(response, key)
        # A body whose length nobody states may have been cut off unseen.
        if "content-length" not in response.headers and "transfer-encoding" not in response.headers:
            raise not_s3(self.bucket.asked(key), "an object without a length")
        version, modified = self._dated_version(response, key)
        body = response.body
        return Object(key, version, len(body), modified, _metadata_of(response), body=body)

    async def head(self, key: str) -> Head:
        check_key(key)
        response = await self.bucket.ask("HEAD", key)
        if response.status != 200:
            raise self.bucket.error(response, key)
        length = response.headers.get("content-length", "")
        if not length.isdecimal():
            raise not_s3(self.bucket.asked(key), "an object without a length")
        version, modified = self._dated_version(response, key)
        return Head(key, version, int(length), modified, _metadata_of(response))

    def _dated_version(self, response: Response, key: str) -> tuple[Version, float]:
        version = version_of(response.headers.get("etag", ""))
        modified = epoch_of(response.headers.get("last-modified", ""))
        if not version:
            raise not_s3(self.bucket.asked(key), "an object without an ETag")
        if modified is None:
            raise not_s3(self.bucket.asked(key), "an object without a Last-Modified date")
        return version, modified

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        return await self.bucket.put(check_key(key), bytes(body), mode, check_metadata(metadata))

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        if not self.bucket.config.touch_by_copy:
            return await self._swap_for_itself(key, version, metadata)
        await self._trials.copies()
        return await self.bucket.copy_onto_itself(
            key, target=version, source=version, metadata=metadata
        )

    async def _swap_for_itself(
        self, key: str, version: Version, metadata: Mapping[str, str]
    ) -> Version:
        try:
            found = await self.get(key)
        except NotFound:
            raise VersionConflict(f"The object {key!r} is gone.", key=key) from None
        if found is None or found.version != version:
            raise VersionConflict(f"The object {key!r} is not there in the version named.", key=key)
        return await self.bucket.put(key, found.body, Swap(version), metadata)

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        check_key(key)
        if version is not None:
            await self._trials.deletes()
        await self.bucket.delete(key, version)

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        check_limit(limit)
        root = self.bucket.config.root
        query = [("encoding-type", "url"), ("list-type", "2"), ("max-keys", str(limit))]
        if root or prefix:
            query.append(("prefix", root + prefix))
        if delimiter:
            query.append(("delimiter", delimiter))
        if cursor:
            query.append(("continuation-token", cursor))
        elif start_after:
            query.append(("start-after", root + start_after))
        response = await self.bucket.ask("GET", None, query=query)
        if response.status == 200:
            response = unmasked(response)
        if response.status != 200:
            raise self.bucket.error(response, "")
        found = listing_of(response.body)
        if found is None:
            raise not_s3(self.bucket.asked(""), "a list that is not whole")
        return Page(
            entries=tuple(
                Entry(row.key[len(root) :], row.version, row.size, row.modified)
                for row in found.entries
                if self._is_listed(row.key[len(root) :], start_after)
            ),
            folders=tuple(
                folder[len(root) :]
                for folder in found.folders
                if self._is_listed(folder[len(root) :], start_after)
            ),
            cursor=found.token,
        )

    def _is_listed(self, name: str, start_after: str) -> bool:
        # Servers differ in whether a folder comes again when the start lies inside of it.
        return name > start_after and not name.startswith(f"{RESERVED_FOLDER}/")

    async def sample(self) -> TimeSample:
        response = await self.bucket.ask("HEAD", MARKER)
        if response.sample is not None:
            return response.sample
        if response.status >= 500:
            raise self.bucket.error(response, MARKER)
        raise Unavailable("The store's answer has no date of its own, so its time is not known.")

    async def close(self) -> None:
        await self._transport.close()


def _metadata_of(response: Response) -> Mapping[str, str]:
    return {
        name[len(METADATA_PREFIX) :]: value
        for name, value in response.headers.items()
        if name.startswith(METADATA_PREFIX)
    }


PAGES_MAX: Final = 10_000


async def is_versioned(bucket: S3Bucket) -> bool:
    """Whether the bucket keeps former versions; no, if we may not ask."""
    response = await bucket.ask("GET", None, query=[("versioning", "")])
    return response.status == 200 and keeps_versions(response.body)


async def purge(bucket: S3Bucket, prefix: str) -> None:
    """Remove every version and every delete marker below a prefix."""
    root = bucket.config.root
    marks: Iterable[tuple[str, str]] = ()
    for _ in range(PAGES_MAX):
        query = [("encoding-type", "url"), ("prefix", root + prefix), ("versions", ""), *marks]
        response = await bucket.ask("GET", None, query=query)
        if response.status != 200:
            raise bucket.error(response, "")
        found = former_versions_of(response.body)
        if found is None:
            raise not_s3(bucket.asked(""), "a list of versions that is not whole")
        for key, version in found.versions:
            which = [("versionId", version)]
            deleted = await bucket.ask("DELETE", key[len(root) :], query=which, writes=True)
            if deleted.status not in (200, 204, 404):
                raise bucket.error(deleted, key[len(root) :], writes=True)
        if found.next_key is None:
            return
        marks = [("key-marker", found.next_key), ("version-id-marker", found.next_version)]
