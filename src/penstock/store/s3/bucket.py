"""Requests to the objects of one bucket, below one prefix, and what their answers mean.

Between `transport`, which knows no buckets, and `backend`, which promises what a store promises:
here a key is only a key, a condition is only a header, and every failure is one of Penstock's
errors. Conditions are S3's own: `If-None-Match: *` to create, `If-Match` to swap, to delete, and
on both ends of a self-copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import NO_METADATA, Put, PutMode, Swap, Version
from penstock.store.s3.answers import (
    Asked,
    bucket_not_found,
    copied_version,
    error_of,
    not_s3,
    unmasked,
    version_of,
)
from penstock.store.s3.config import S3Config
from penstock.store.s3.connection import Headers, NoAnswer, NotSent, Response
from penstock.store.s3.keyring import NoCredentials
from penstock.store.s3.signing import Request
from penstock.store.s3.transport import Closed, Transport

METADATA_PREFIX: Final = "x-amz-meta-"


class Bucket:
    """One bucket, or a prefix in it, over one transport."""

    def __init__(self, config: S3Config, transport: Transport) -> None:
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
            return await self._transport.send(Request(method, path, query, headers, body))
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

    def asked(self, key: str, *, writes: bool = False) -> Asked:
        """What was asked for, for an error's sentence."""
        return Asked(self.config.bucket, self.config.endpoint.region, key, writes)

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
