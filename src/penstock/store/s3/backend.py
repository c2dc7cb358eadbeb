"""The `s3://` backend: a prefix of a bucket on any S3-compatible server.

Each method is one request of `transport`, and its answer goes through `answers`. Conditions are
S3's own: `If-None-Match: *` for CREATE, `If-Match` for swaps, deletes and, on both ends of a
self-copy, for `touch`.

Some servers ignore a condition that they do not know, which would let two writers win. So a
condition is tried on a marker object of Penstock's own, with a version that cannot be right,
before it is trusted: CREATE and swap when the store is opened (`verify`), delete and touch
before their first use, once a client. A server that lets the wrong version pass raises
`Unsupported`. What such a trial cannot see, races, is for `penstock doctor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar, Final
from urllib.parse import quote

from penstock.kernel.clock import Clock
from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.kernel.wire import Document, encode
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
    Asked,
    bucket_not_found,
    copied_version,
    error_of,
    listing_of,
    not_s3,
    unmasked,
    version_of,
)
from penstock.store.s3.config import S3Config
from penstock.store.s3.connection import Headers, NoAnswer, NotSent, Response
from penstock.store.s3.transport import (
    Closed,
    Limits,
    NoCredentials,
    Request,
    Transport,
    epoch_of,
)
from penstock.store.time import StoreClock, TimeSample

_MARKER: Final = f"{RESERVED_FOLDER}/marker"
_WRONG_VERSION: Final = Version("00000000000000000000000000000000")
_META: Final = "x-amz-meta-"


class _Marker(Document, frozen=True):
    """What the trials of conditions are made on."""

    kind: ClassVar[str] = "marker"


class S3Store(ObjectStore):
    """One client of a bucket, or of a prefix in it."""

    def __init__(self, config: S3Config, *, clock: Clock, limits: Limits | None = None) -> None:
        self._config = config
        self._clock = StoreClock(clock)
        self._transport = Transport(
            config.endpoint, credentials=config.credentials, clock=self._clock, limits=limits
        )
        self._trusted: set[str] = set()
        self._trying = asyncio.Lock()

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def verify(self) -> None:
        """Show that the bucket is there, may be written, and keeps its conditions."""
        marker = encode(_Marker())
        # Some servers make a missing bucket on the first put; that is not what was asked for.
        if (await self._ask("HEAD", None)).status == 404:
            raise bucket_not_found(self._config.bucket)
        try:
            await self._put(_MARKER, marker, CREATE)
            await self._put(_MARKER, marker, CREATE)
        except AlreadyExists:
            pass
        else:
            raise self._ignored("create-if-absent (If-None-Match)")
        try:
            await self._put(_MARKER, marker, Swap(_WRONG_VERSION))
        except VersionConflict:
            return
        raise self._ignored("compare-and-swap (If-Match)")

    def _ignored(self, what: str) -> Unsupported:
        return Unsupported(
            f"The server of bucket {self._config.bucket!r} ignores {what}: two writers could win.",
            hint="Use a server with conditional writes; 'penstock doctor URL' tells more.",
        )

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        check_key(key)
        headers = [("If-None-Match", f'"{unless}"')] if unless and _is_etag(unless) else []
        response = await self._ask("GET", key, headers=headers)
        if response.status == 304 and headers:
            return None
        if response.status != 200:
            raise self._error(response, key)
        # A body whose length nobody states may have been cut off unseen.
        if not {"content-length", "transfer-encoding"} & response.headers.keys():
            raise not_s3(self._asked(key), "an object without a length")
        head = self._head_of(response, key, size=len(response.body))
        return Object(
            key, head.version, head.size, head.modified, head.metadata, body=response.body
        )

    async def head(self, key: str) -> Head:
        check_key(key)
        response = await self._ask("HEAD", key)
        if response.status != 200:
            raise self._error(response, key)
        length = response.headers.get("content-length", "")
        if not length.isdecimal():
            raise not_s3(self._asked(key), "an object without a length")
        return self._head_of(response, key, size=int(length))

    def _head_of(self, response: Response, key: str, *, size: int) -> Head:
        version = version_of(response.headers.get("etag", ""))
        modified = epoch_of(response.headers.get("last-modified", ""))
        if not version:
            raise not_s3(self._asked(key), "an object without an ETag")
        if modified is None:
            raise not_s3(self._asked(key), "an object without a Last-Modified date")
        return Head(key, version, size, modified, _metadata_of(response))

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        return await self._put(check_key(key), bytes(body), mode, check_metadata(metadata))

    async def _put(
        self,
        key: str,
        body: bytes,
        mode: PutMode,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        headers = [(_META + name, value) for name, value in metadata.items()]
        match mode:
            case Put.CREATE:
                headers.append(("If-None-Match", "*"))
            case Swap(version):
                headers.append(("If-Match", _condition(key, version)))
            case Put.REPLACE:
                pass
        response = await self._ask("PUT", key, headers=headers, body=body, writes=True)
        if response.status == 200:
            version = version_of(response.headers.get("etag", ""))
            if not version:
                raise not_s3(self._asked(key, writes=True), "a put without an ETag")
            return version
        error = self._error(response, key, writes=True)
        if mode is Put.CREATE and isinstance(error, VersionConflict):
            raise AlreadyExists(f"The object {key!r} already exists.", key=key)
        if isinstance(error, NotFound):
            if isinstance(mode, Swap):
                raise VersionConflict(f"The object {key!r} is gone.", key=key)
            raise bucket_not_found(self._config.bucket)
        raise error

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        if "touch" not in self._trusted:
            await self._trust("touch", self._try_touch)
        condition = ("x-amz-copy-source-if-match", _condition(key, version))
        return await self._copy_onto_itself(key, version, metadata, condition)

    async def _copy_onto_itself(
        self, key: str, version: Version, metadata: Mapping[str, str], *conditions: tuple[str, str]
    ) -> Version:
        """Copy a key to itself if it is in this version there, and on these conditions."""
        path = quote(f"/{self._config.bucket}/{self._config.root}{key}", safe="/-_.~")
        headers = [
            ("x-amz-copy-source", path),
            *conditions,
            ("If-Match", _condition(key, version)),
            ("x-amz-metadata-directive", "REPLACE"),
            *((_META + name, value) for name, value in metadata.items()),
        ]
        response = await self._ask("PUT", key, headers=headers, writes=True)
        if response.status == 200:
            response = unmasked(response)
        if response.status == 200:
            copied = copied_version(response.body)
            if copied is None:
                raise not_s3(self._asked(key, writes=True), "a copy without a result")
            return copied
        error = self._error(response, key, writes=True)
        if isinstance(error, NotFound):
            raise VersionConflict(f"The object {key!r} is gone.", key=key)
        raise error

    async def _trust(self, what: str, trial: Callable[[], Awaitable[None]]) -> None:
        """Make a trial, once for all who wait for it."""
        async with self._trying:
            if what not in self._trusted:
                await trial()
                self._trusted.add(what)

    async def _try_touch(self) -> None:
        """See that the server minds the condition on a copy's destination.

        There is none on the source here: it could refuse in the place of the other.
        """
        await self._put(_MARKER, encode(_Marker()), REPLACE)
        try:
            await self._copy_onto_itself(_MARKER, _WRONG_VERSION, NO_METADATA)
        except VersionConflict:
            return
        raise self._ignored("the condition on a copy's destination, which touch needs")

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        check_key(key)
        if version is not None and "delete" not in self._trusted:
            await self._trust("delete", self._try_delete)
        await self._delete(key, version)

    async def _delete(self, key: str, version: Version | None) -> None:
        headers = [("If-Match", _condition(key, version))] if version is not None else []
        response = await self._ask("DELETE", key, headers=headers, writes=True)
        if response.status in (200, 204):
            return
        error = self._error(response, key, writes=True)
        if not isinstance(error, NotFound):
            raise error

    async def _try_delete(self) -> None:
        """See that the server minds the condition on a delete."""
        await self._put(_MARKER, encode(_Marker()), REPLACE)
        try:
            await self._delete(_MARKER, _WRONG_VERSION)
        except VersionConflict:
            return
        raise self._ignored("the condition on a delete")

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
        root = self._config.root
        query = [("encoding-type", "url"), ("list-type", "2"), ("max-keys", str(limit))]
        if root or prefix:
            query.append(("prefix", root + prefix))
        if delimiter:
            query.append(("delimiter", delimiter))
        if cursor:
            query.append(("continuation-token", cursor))
        elif start_after:
            query.append(("start-after", root + start_after))
        response = await self._ask("GET", None, query=query)
        if response.status == 200:
            response = unmasked(response)
        if response.status != 200:
            raise self._error(response, "")
        found = listing_of(response.body)
        if found is None:
            raise not_s3(self._asked(""), "a list that is not whole")
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
        response = await self._ask("HEAD", _MARKER)
        if response.sample is not None:
            return response.sample
        if response.status >= 500:
            raise self._error(response, _MARKER)
        raise Unavailable("The store's answer has no date of its own, so its time is not known.")

    async def _ask(
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
        path = self._config.path(None if key is None else self._config.root + key)
        request = Request(method, path, query, headers, body)
        try:
            return await self._transport.send(request)
        except Closed as error:
            raise StoreError(
                f"This client of bucket {self._config.bucket!r} has been closed.", key=key or ""
            ) from error
        except NoCredentials as error:
            raise Refused(
                f"There are no credentials for bucket {self._config.bucket!r} ({error}).",
                hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE.",
            ) from error
        except NotSent as error:
            raise Unavailable(
                f"{self._config.where} cannot be reached ({error}).",
                key=key or "",
                hint=self._config.unreachable_hint,
            ) from error
        except NoAnswer as error:
            lost: type[StoreError] = OutcomeUnknown if writes else Unavailable
            raise lost(f"{self._config.where} did not answer ({error}).", key=key or "") from error

    def _asked(self, key: str, *, writes: bool = False) -> Asked:
        return Asked(self._config.bucket, self._config.endpoint.region, key, writes)

    def _error(self, response: Response, key: str, *, writes: bool = False) -> StoreError:
        return error_of(response, self._asked(key, writes=writes))

    async def close(self) -> None:
        await self._transport.close()


def _is_etag(version: Version) -> bool:
    return bool(version) and version.isascii() and version.isprintable() and '"' not in version


def _condition(key: str, version: Version) -> str:
    """A version as a header. What no server ever gave is no object's version."""
    if not _is_etag(version):
        raise VersionConflict(f"The object {key!r} is not there in the version named.", key=key)
    return f'"{version}"'


def _metadata_of(response: Response) -> Mapping[str, str]:
    return {
        name[len(_META) :]: value
        for name, value in response.headers.items()
        if name.startswith(_META)
    }
