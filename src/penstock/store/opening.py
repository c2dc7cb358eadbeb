"""From a URL to a store that is ready for use.

    s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME&style=path|virtual&touch=copy|swap
                          &deletes=conditional|tombstone]
    file:///FOLDER[?fsync=off]
    memory://[NAME]

`open_store` builds backend, meter, tombstones where deletes are by them, and retries in that order,
shows that the store is there and keeps its conditions, and raises one clear error if not:
`InvalidInput` for the URL, `BucketNotFound`, `Refused` for credentials, `Unsupported` for missing
conditional writes, `Unavailable` when nobody answers.

Two `memory://` stores of one name in one process are one bucket; without a name each is its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import BucketNotFound, InvalidInput
from penstock.store.base import ObjectStore
from penstock.store.file.backend import FileStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.retrying import Retries, RetryingStore
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.signing import Credentials
from penstock.store.tombstoned import TombstonedStore

_AT_OPENING: Final = Retries(tries_max=4)
"""Enough for a busy server and for many workers at once; too few to wait for a dead one."""

_buckets: dict[str, MemoryBucket] = {}


@dataclass(frozen=True, slots=True)
class Opening:
    """What a store is opened with besides its URL. The defaults are what production uses."""

    clock: Clock = field(default_factory=SystemClock)
    entropy: Entropy = field(default_factory=system_entropy)
    credentials: Credentials | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    meter: Meter = field(default_factory=Meter)
    retries: Retries = field(default_factory=Retries)
    create: bool = True
    """Whether the folder of a `file://` store is made if it is not there."""


async def open_store(url: str, opening: Opening | None = None) -> ObjectStore:
    """Open the store at this URL. Close it when done.

    >>> import asyncio
    >>> async def main() -> bytes:
    ...     store = await open_store("memory://")
    ...     await store.put("greeting", b"hello")
    ...     found = await store.get("greeting")
    ...     return found.body
    >>> asyncio.run(main())
    b'hello'
    """
    opening = opening or Opening()
    backend = await open_backend(url, opening)
    store = wrapped(backend, opening)
    if isinstance(backend, S3Store):
        try:
            await store.repeat(backend.record_deletes)
        except BaseException:
            await backend.close()
            raise
    return store


def wrapped(
    backend: ObjectStore, opening: Opening, *, by_tombstone: bool | None = None
) -> RetryingStore:
    """A backend as it is used: counted, its deletes made safe, and what fails repeated.

    Deletes are by tombstone where the backend says so, unless the caller does.
    """
    store: ObjectStore = MeteredStore(backend, opening.meter)
    if is_by_tombstone(backend) if by_tombstone is None else by_tombstone:
        store = TombstonedStore(store, entropy=opening.entropy)
    return RetryingStore(store, entropy=opening.entropy, retries=opening.retries)


def is_by_tombstone(backend: ObjectStore) -> bool:
    """Whether deletes in the store of an open backend are by tombstone."""
    return isinstance(backend, S3Store) and backend.deletes_by_tombstone


async def open_backend(url: str, opening: Opening) -> ObjectStore:
    """The bare backend: nothing is repeated once it is open, nothing is counted.

    To be used with `wrapped`, which knows how its deletes are made safe.
    """
    scheme, separator, _ = url.partition("://")
    match scheme if separator else "":
        case "s3":
            return await _open_s3(url, opening)
        case "file":
            return _open_file(url, opening)
        case "memory":
            return _open_memory(url, opening)
    # What comes after the scheme may hold a secret, and is not repeated.
    said = f"{scheme[:40]}://" if separator else url[:40]
    raise InvalidInput(
        f"{said!r} is not the URL of a store.",
        hint="Write s3://BUCKET/PREFIX, file:///FOLDER or memory://.",
    )


async def _open_s3(url: str, opening: Opening) -> ObjectStore:
    config = s3_config(url, environment=opening.environment, credentials=opening.credentials)
    store = S3Store(config, clock=opening.clock)
    patient = RetryingStore(store, entropy=opening.entropy, retries=_AT_OPENING)
    try:
        await patient.repeat(store.verify)
    except BaseException:
        await store.close()
        raise
    return store


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInput(f"{url!r} cannot be read: {error}.") from error
    if parts.fragment:
        raise InvalidInput(f"A '#' in {url!r} must be written as %23.")
    return parts


def _open_file(url: str, opening: Opening) -> ObjectStore:
    parts = _split(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidInput(
            f"{url!r} must name an absolute folder.",
            hint="Write file:///FOLDER, with three slashes.",
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    fsync = options.pop("fsync", "on")
    if options or fsync not in ("on", "off"):
        raise InvalidInput("The only option of a file:// URL is fsync=on or fsync=off.")
    root = Path(unquote(parts.path))
    if "\0" in parts.path + str(root) or root == Path(root.anchor):
        raise InvalidInput(f"{url!r} does not name a folder that can hold a store.")
    if not opening.create and not root.exists():
        raise BucketNotFound(f"The folder {root} does not exist.", hint=f"mkdir -p {root}")
    try:
        root.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise BucketNotFound(
            f"The folder {root.parent} does not exist.", hint=f"mkdir -p {root}"
        ) from error
    except OSError as error:
        raise InvalidInput(
            f"{root} cannot be used as a folder: {error.strerror}.",
            hint="Name a folder that is there or can be made.",
        ) from error
    return FileStore(root, clock=opening.clock, entropy=opening.entropy, fsync=fsync == "on")


def _open_memory(url: str, opening: Opening) -> ObjectStore:
    parts = _split(url)
    name = parts.netloc + parts.path
    if parts.query:
        raise InvalidInput(f"{url!r} must not have options.")
    bucket = _buckets.get(name) or MemoryBucket(opening.clock)
    if name:
        _buckets[name] = bucket
    return MemoryStore(bucket, clock=opening.clock)
