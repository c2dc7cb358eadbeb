"""Files between this machine and wherever a dataset lies: a bucket, or a folder.

The object store of `penstock.store` is for small objects, conditions and time. This is for what is
large and plain: files of hundreds of megabytes, written once below a folder that nobody else writes
to, and read by checksum. So nothing here is conditional, every request may be repeated, and it
is: a server that is away for less than `patience_seconds` is only slow.

Calls block, and may come from any number of threads. Memory is bounded for each call, whatever
the size of the file. A `Transfer` holds plain values, so that it can be sent to other processes;
what it opens is opened where and when it is used. The keys that the environment has travel with
it: an executor of a cluster has to sign like the worker does. Where there are none in the
environment, the chain that every AWS tool follows is asked, in each process by itself, and renews
what expires.

A location is a URL, `s3://BUCKET/KEY` or `file:///PATH`. Which server and region `s3://` means is
told by the URL of the store, and by the environment, as in `penstock.store.s3.config`.

What a crash leaves: a file that was being fetched or written is there whole or not at all, perhaps
with a temporary file beside it, whose name begins with a dot. In a bucket, an upload in parts that
was never completed is seen by no list; a rule of the bucket's lifecycle removes it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final, Protocol
from urllib.parse import parse_qsl, urlsplit

from penstock.datasets.folders import Chunk, Folder, Listed
from penstock.datasets.layout import path_of
from penstock.kernel.errors import Damaged, InvalidInput, NotFound
from penstock.store.s3.signing import Credentials

READ_BYTES_MAX: Final = 256 * 1024 * 1024
"""The most that is read into memory at once."""
_NAMES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A file as it was sent, or found."""

    bytes: int
    sha256: str


class _Side(Protocol):
    """A bucket or the folders of this machine; a key is what a location names in it."""

    def chunks(self, key: str) -> Iterator[Chunk]: ...

    def send(self, path: Path, key: str) -> None: ...

    def write(self, key: str, body: bytes) -> None: ...

    def settle(self, folder: str, keys: Sequence[str]) -> None: ...

    def list(self, key: str) -> Iterator[Listed]: ...

    def delete(self, keys: Iterable[str]) -> None: ...

    def clear(self, key: str) -> None: ...

    def open(self, key: str) -> BinaryIO: ...


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _NAMES if name in os.environ}


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moves files. `store_url` says how buckets are reached, and whether folders are synced."""

    store_url: str
    credentials: Credentials | None = field(default=None, repr=False)
    environment: Mapping[str, str] = field(default_factory=_environment, repr=False)
    patience_seconds: float = 30.0
    """How long a server may be away before a call gives up; a call may try three times."""

    def fetch(self, location: str, to: Path, *, sha256: str | None = None) -> Sent:
        """Bring a file here, whole or not at all. Raises `Damaged` if its sum is another."""
        side, key = self._side(location)
        to.parent.mkdir(parents=True, exist_ok=True)
        with _arriving(to) as (file, path):
            sent = _sum(side.chunks(key), into=file)
            _check(location, sent, sha256)
            file.close()
            path.replace(to)
        return sent

    def send(self, path: Path, location: str) -> Sent:
        """Bring a file of this machine to a location, whole or not at all."""
        with path.open("rb") as file:
            sent = Sent(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
        side, key = self._side(location)
        side.send(path, key)
        return sent

    def sum(self, location: str) -> Sent:
        """Read a file through that is in its place, and see to it that it stays there.

        Where files are those of a folder, what another program wrote is on the disk afterwards.
        """
        side, key = self._side(location)
        sent = _sum(side.chunks(key))
        side.settle(key.rpartition("/")[0], [key])
        return sent

    def settle(self, location: str, names: Iterable[str]) -> None:
        """See to it that what is below a location is on the disk, many files at a time.

        For files of folders that another program wrote, and the folders that it made for them.
        """
        side, key = self._side(location)
        side.settle(key, [f"{key}/{name}" for name in names])

    def verify(self, location: str, *, sha256: str) -> Sent:
        """Read a file through. Raises `Damaged` if it is not there or its sum is another."""
        side, key = self._side(location)
        try:
            sent = _sum(side.chunks(key))
        except NotFound as error:
            raise Damaged(
                f"The file {location} is not there.", location=location, hint=_REMAKE
            ) from error
        _check(location, sent, sha256)
        return sent

    def read_bytes(self, location: str) -> bytes:
        """A small file. Raises `NotFound`."""
        side, key = self._side(location)
        chunks, size = [], 0
        for chunk in side.chunks(key):
            chunks.append(chunk)
            size += len(chunk)
            if size > READ_BYTES_MAX:
                raise InvalidInput(f"{location} is too large to be read at once.")
        return b"".join(chunks)

    def write_bytes(self, location: str, body: bytes) -> Sent:
        """Write a small file, whole or not at all."""
        side, key = self._side(location)
        side.write(key, body)
        return Sent(len(body), hashlib.sha256(body).hexdigest())

    def list(self, location: str) -> Iterator[Listed]:
        """What is below a location, in order; names are relative to it."""
        side, key = self._side(location)
        return side.list(key)

    def delete(self, locations: Iterable[str]) -> None:
        """Remove files. What is not there is no error."""
        keys: dict[str, tuple[_Side, list[str]]] = {}
        for location in locations:
            side, key = self._side(location)
            keys.setdefault(location[: -len(key)], (side, []))[1].append(key)
        for side, named in keys.values():
            side.delete(named)

    def clear(self, location: str) -> None:
        """Remove everything below a location. Nothing there is no error."""
        side, key = self._side(location)
        side.clear(key)

    def open(self, location: str) -> BinaryIO:
        """A file that can be read anywhere in it, with requests for what is read only."""
        side, key = self._side(location)
        return side.open(key)

    def change(self, location: str) -> BinaryIO:
        """A file in a folder, to be changed in place, before anybody knows its sum."""
        return Folder(is_synced=self.is_synced).change(str(path_of(location)))

    def _side(self, location: str) -> tuple[_Side, str]:
        if location.startswith("file:///"):
            return Folder(is_synced=self.is_synced), str(path_of(location))
        # By hand: what follows the bucket is the key, whatever characters it has.
        scheme, _, rest = location.partition("://")
        bucket, _, key = rest.partition("/")
        if scheme == "s3" and bucket:
            return self._bucket(bucket), key.lstrip("/")
        raise InvalidInput(
            f"{location!r} is no location of a file.",
            hint="A location is s3://BUCKET/KEY or file:///PATH.",
        )

    @property
    def is_synced(self) -> bool:
        """Whether what is written to folders survives a power cut."""
        parts = urlsplit(self.store_url)
        return parts.scheme != "file" or dict(parse_qsl(parts.query)).get("fsync") != "off"

    def bucket_url(self, name: str) -> str:
        """A bucket as `s3_config` reads it, reached as the store is."""
        parts = urlsplit(self.store_url)
        query = f"?{parts.query}" if parts.scheme == "s3" and parts.query else ""
        return f"s3://{name}{query}"

    def _bucket(self, name: str) -> _Side:
        try:
            # Only now: folders need no client of buckets.
            buckets = import_module("penstock.datasets.buckets")
        except ImportError as error:
            raise InvalidInput(
                f"Files in buckets need a package that is not here: {error}.",
                hint="Install Penstock with its requirements: pip install penstock[spark].",
            ) from error
        side: _Side = buckets.open_bucket(
            self.bucket_url(name),
            environment=tuple(sorted(self.environment.items())),
            credentials=self.credentials,
            patience_seconds=self.patience_seconds,
        )
        return side


_REMAKE: Final = "Make the partition again: a backfill of it writes new files."


def _sum(chunks: Iterator[Chunk], *, into: BinaryIO | None = None) -> Sent:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        if into is not None:
            into.write(chunk)
    return Sent(size, digest.hexdigest())


def _check(location: str, sent: Sent, sha256: str | None) -> None:
    if sha256 is not None and sent.sha256 != sha256:
        raise Damaged(
            f"The file {location} is not what its manifest says: its SHA-256 is {sent.sha256},"
            f" and it should be {sha256}.",
            location=location,
            hint=_REMAKE,
        )


@contextmanager
def _arriving(to: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A file beside the one that is to be; it is removed unless it was renamed."""
    handle, name = tempfile.mkstemp(dir=to.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, Path(name)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()
