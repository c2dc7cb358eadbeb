"""The `s3://` backend: a prefix of a bucket on any S3-compatible server.

Each method is one request of `bucket`. Two things are more:

- A condition is tried on the server before it is trusted (`trials`): once a client, at opening or
  at first use.
- `touch` is a self-copy, one request, only where that is known to be atomic: on AWS. Other servers
  check the condition of a copy and write later, so that a refresh could bring back a body that
  has been swapped meanwhile (SeaweedFS 4.48: 2 to 28 of 200 races). There `touch` reads the object
  and swaps it for itself with the new metadata: two requests, and as safe as every swap.
  `touch=copy` or `touch=swap` in the URL decides otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.kernel.clock import Clock
from penstock.kernel.errors import NotFound, Unavailable, VersionConflict
from penstock.store.base import (
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
    PutMode,
    Swap,
    Version,
    check_key,
    check_limit,
    check_metadata,
)
from penstock.store.s3.answers import listing_of, not_s3, unmasked, version_of
from penstock.store.s3.bucket import METADATA_PREFIX, Bucket, is_etag
from penstock.store.s3.config import S3Config
from penstock.store.s3.connection import Response
from penstock.store.s3.deletes import are_by_tombstone, record
from penstock.store.s3.transport import Limits, Transport, epoch_of
from penstock.store.s3.trials import MARKER, Trials
from penstock.store.time import StoreClock, TimeSample


class S3Store(ObjectStore):
    """One client of a bucket, or of a prefix in it."""

    def __init__(self, config: S3Config, *, clock: Clock, limits: Limits | None = None) -> None:
        self._clock = StoreClock(clock)
        self._transport = Transport(
            config.endpoint, keyring=config.keyring, clock=self._clock, limits=limits
        )
        self.bucket = Bucket(config, self._transport)
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
