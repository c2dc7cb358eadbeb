"""What an object store is to Penstock.

A store maps keys to objects. Six requests reach it: `get`, `head`, `put`, `touch`, `delete` and
`list`; a seventh, `sample`, asks for nothing but the time. Each call is one request (but see
`touch`), so that what is counted is what is paid. Backends and wrappers alike are an
`ObjectStore`; the suite `penstock.testing.store_contract` says what each of them must do, and
runs on all of them.

What every caller may rely on
- A put is atomic: a reader sees the old object or the new one, body and metadata together.
- A read that starts after a write was answered sees it, and so does a list.
- Of any number of `CREATE`s of one key, or `Swap`s from one version, exactly one succeeds.
- A version is opaque. It changes with every put, and never returns to a former value as long as
  the bodies differ. (S3's is a function of the body: a body that must have one winner, or must
  not be mistaken for an earlier one, carries something unique.)
- A write whose answer is lost raises `OutcomeUnknown`; it is never reported as a failure.
- `now()` is the store's time, as an interval that holds it. No machine's wall clock matters.

What no caller may rely on
- The order of keys where one folder's name is the beginning of a sibling's (`a/x` and `a-b/x`):
  S3 orders by the bytes of the whole key, some servers by folder. Everywhere else a list is in
  the order of the keys' UTF-8 bytes, also across pages.
- That a folder is no longer shown when its last object is gone; some servers keep it a while.
- A key that is also the folder of another key (`a` and `a/b`): a file system cannot have it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import Final, Literal, NewType, TypeVar

from penstock.kernel.errors import InvalidInput, NotFound
from penstock.store.time import Interval, StoreClock, TimeSample

Answer = TypeVar("Answer")
Version = NewType("Version", str)
Delimiter = Literal["", "/"]

KEY_BYTES_MAX: Final = 1024
SEGMENT_BYTES_MAX: Final = 255
METADATA_BYTES_MAX: Final = 2048
PAGE_KEYS_MAX: Final = 1000
RESERVED_FOLDER: Final = ".penstock"
_PLAIN_KEY: Final = re.compile(r"[\w=~@-][\w.=~@-]{0,254}(?:/[\w=~@-][\w.=~@-]{0,254})*", re.ASCII)
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\\]")
_METADATA_NAME: Final = re.compile(r"[a-z0-9_-]+")
NO_METADATA: Final[Mapping[str, str]] = {}


class Put(Enum):
    """How a put treats what is already there; the third way is `Swap`."""

    CREATE = "create"
    REPLACE = "replace"


CREATE: Final = Put.CREATE
REPLACE: Final = Put.REPLACE


@dataclass(frozen=True, slots=True)
class Swap:
    """Put only if the object is there in this version."""

    version: Version


PutMode = Put | Swap


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a list."""

    key: str
    version: Version
    size: int
    modified: float
    """Seconds since the epoch on the store's clock, to the precision that the store gives."""


@dataclass(frozen=True, slots=True)
class Head(Entry):
    """An object without its body."""

    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Object(Head):
    """An object."""

    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a list. `cursor` asks for the next page; None says that this is the last."""

    entries: tuple[Entry, ...]
    folders: tuple[str, ...]
    cursor: str | None
    tombstones: tuple[Entry, ...] = ()
    """What stands for deleted objects, where deletes leave that (`penstock.store.tombstoned`)."""


class ObjectStore(ABC):
    """A backend, or a wrapper around one. Used by one event loop; close it when done."""

    @property
    @abstractmethod
    def clock(self) -> StoreClock:
        """What is known of the store's time. A wrapper's is the one of what it wraps."""

    @abstractmethod
    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        """The object; None if it is still in the version `unless`. Raises `NotFound`."""

    @abstractmethod
    async def head(self, key: str) -> Head:
        """The object without its body. Raises `NotFound`."""

    @abstractmethod
    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        """Write the whole object and return its version.

        `CREATE` raises `AlreadyExists`; `Swap` raises `VersionConflict`, also when the object
        is gone.
        """

    @abstractmethod
    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        """Replace the metadata and move `modified` to now, without sending the body.

        Raises `VersionConflict` unless the object is in `version`, so that the refresh of
        someone who has been overtaken never brings an old body back. Returns the version
        afterwards, which may be the same. Metadata that names who touched lets a lost answer
        be settled. Where a server cannot refresh atomically this is a read and a put.
        """

    @abstractmethod
    async def delete(self, key: str, *, version: Version | None = None) -> None:
        """Remove the object. Without a version, a missing object is no error.

        With a version, raises `VersionConflict` if the object is there in another one. If it is
        missing, either nothing happens or `VersionConflict` is raised: servers differ, and
        both mean that the version named is gone.
        """

    @abstractmethod
    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        """One page of what is below `prefix`, a plain string prefix, in order.

        Everything returned sorts after `start_after`. With the delimiter, keys that have a
        further `/` are folded into folders, which end in `/`. A page has at most `limit`
        entries and folders; it may have fewer, or none, and still not be the last.
        """

    @abstractmethod
    async def sample(self) -> TimeSample:
        """Ask for the store's time with the cheapest request there is, and observe the answer."""

    async def now(self) -> Interval:
        """The store's time. Mostly free; at most one request in five minutes."""
        return await self.clock.read(self.sample)

    async def calibrate(self) -> Interval:
        """Narrow the store's time with at most ten well-timed requests. Takes seconds."""
        return await self.clock.calibrate(self.sample)

    async def close(self) -> None:
        """Release connections and files. Nothing may be asked afterwards."""
        return


class StoreOperation(StrEnum):
    """What is asked of a store; a put is told apart by its mode."""

    GET = "get"
    HEAD = "head"
    CREATE = "create"
    REPLACE = "replace"
    SWAP = "swap"
    TOUCH = "touch"
    DELETE = "delete"
    LIST = "list"
    SAMPLE = "sample"

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        return self in _WRITING


_PUTS: Final = {Put.CREATE: StoreOperation.CREATE, Put.REPLACE: StoreOperation.REPLACE}
_WRITING: Final = frozenset(
    {*_PUTS.values(), StoreOperation.SWAP, StoreOperation.TOUCH, StoreOperation.DELETE}
)


class Wrapper(ObjectStore):
    """An `ObjectStore` around an `ObjectStore` that passes everything on.

    What is done about every request alike overrides `request`, through which all of them go.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self._clock = inner.clock  # Asked for many times a task, through all wrappers.

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def request(
        self, operation: StoreOperation, key: str, ask: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Make a request of the inner store; `key` is the prefix of a list."""
        del operation, key
        return await ask()

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        ask = partial(self.inner.get, key, unless=unless)
        return await self.request(StoreOperation.GET, key, ask)

    async def head(self, key: str) -> Head:
        return await self.request(StoreOperation.HEAD, key, partial(self.inner.head, key))

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        operation = StoreOperation.SWAP if isinstance(mode, Swap) else _PUTS[mode]
        ask = partial(self.inner.put, key, body, mode, metadata=metadata)
        return await self.request(operation, key, ask)

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        ask = partial(self.inner.touch, key, version=version, metadata=metadata)
        return await self.request(StoreOperation.TOUCH, key, ask)

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        ask = partial(self.inner.delete, key, version=version)
        await self.request(StoreOperation.DELETE, key, ask)

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        ask = partial(
            self.inner.list,
            prefix,
            start_after=start_after,
            delimiter=delimiter,
            limit=limit,
            cursor=cursor,
        )
        return await self.request(StoreOperation.LIST, prefix, ask)

    async def sample(self) -> TimeSample:
        return await self.request(StoreOperation.SAMPLE, "", self.inner.sample)

    async def close(self) -> None:
        await self.inner.close()


async def find(store: ObjectStore, key: str) -> Object | None:
    """The object, or None if there is none."""
    try:
        return await store.get(key)
    except NotFound:
        return None


async def pages(
    store: ObjectStore,
    prefix: str = "",
    *,
    start_after: str = "",
    delimiter: Delimiter = "",
    page_keys: int = PAGE_KEYS_MAX,
) -> AsyncIterator[Page]:
    """Every page of a list, one request each, as far as the caller goes on asking."""
    cursor: str | None = None
    while True:
        page = await store.list(
            prefix, start_after=start_after, delimiter=delimiter, limit=page_keys, cursor=cursor
        )
        yield page
        cursor = page.cursor
        if cursor is None:
            return


def check_key(key: str) -> str:
    """The key, or `InvalidInput` if some backend could not hold it."""
    if _PLAIN_KEY.fullmatch(key) and len(key) <= KEY_BYTES_MAX:
        return key
    problem = _key_problem(key)
    if problem:
        raise InvalidInput(f"The key {key[:100]!r} {problem}.")
    return key


def _key_problem(key: str) -> str:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if not 0 < size <= KEY_BYTES_MAX:
        return f"must have 1 to {KEY_BYTES_MAX} bytes"
    if _UNSAFE.search(key):
        return "must not contain a backslash or a control character"
    if key == RESERVED_FOLDER or key.startswith(f"{RESERVED_FOLDER}/"):
        return f"is in '{RESERVED_FOLDER}/', which Penstock keeps for itself"
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            return "must not contain an empty part, '.' or '..' between slashes"
        if len(segment.encode()) > SEGMENT_BYTES_MAX:
            return f"must not have more than {SEGMENT_BYTES_MAX} bytes between slashes"
    return ""


def check_limit(limit: int) -> int:
    """The number of keys to list at once, or `InvalidInput`."""
    if not 0 < limit <= PAGE_KEYS_MAX:
        raise InvalidInput(f"A list takes a limit of 1 to {PAGE_KEYS_MAX} keys, not {limit}.")
    return limit


def check_metadata(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """The metadata, or `InvalidInput` if it would not survive a trip in HTTP headers."""
    size = 0
    for name, value in metadata.items():
        size += len(name) + len(value)
        if not _METADATA_NAME.fullmatch(name):
            raise InvalidInput(
                f"The metadata name {name!r} must be lower-case ASCII letters, digits, '-' and '_'."
            )
        if not value.isascii() or not value.isprintable() or value != value.strip():
            raise InvalidInput(
                f"The metadata value of {name!r} must be printable ASCII without outer spaces."
            )
    if size > METADATA_BYTES_MAX:
        raise InvalidInput(f"The metadata has {size} bytes; at most {METADATA_BYTES_MAX} are kept.")
    return metadata
