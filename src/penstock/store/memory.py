"""The `memory://` backend: a bucket in this process, as strict as S3.

`MemoryBucket` is the bucket; a `MemoryStore` is one client of it, with that client's own clock.
So a simulation gives every machine a store of its own over one bucket. Like S3, a version is the
MD5 of the body, `touch` keeps it, and answers are dated to `date_resolution_seconds`.

Every request takes effect at one instant, between two awaits of `delay` when one is given. Others
get a turn before it in any case, as they would with a store that is elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.kernel.clock import Clock
from penstock.kernel.errors import AlreadyExists, NotFound, VersionConflict
from penstock.store.base import (
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
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
from penstock.store.time import StoreClock, TimeSample

Delay = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Stored:
    body: bytes
    version: Version
    modified: float
    metadata: Mapping[str, str]


class MemoryBucket:
    """Objects by key, in order, and the bucket's own clock."""

    def __init__(self, clock: Clock, *, date_resolution_seconds: float = 0.0) -> None:
        self.clock = clock
        self.date_resolution_seconds = date_resolution_seconds
        self.objects: dict[str, _Stored] = {}
        self._keys: list[str] = []

    def date(self) -> float:
        """The bucket's time as its answers show it."""
        resolution = self.date_resolution_seconds
        time = self.clock.wall()
        return math.floor(time / resolution) * resolution if resolution else time

    def write(self, key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
        if key not in self.objects:
            insort(self._keys, key)
        version = Version(hashlib.md5(body, usedforsecurity=False).hexdigest())
        self.objects[key] = _Stored(body, version, self.date(), MappingProxyType(dict(metadata)))
        return version

    def remove(self, key: str) -> None:
        del self.objects[key]
        del self._keys[bisect_left(self._keys, key)]

    def keys_from(self, key: str) -> Iterator[str]:
        """The keys at or after this one. The bucket must not change meanwhile."""
        for place in range(bisect_left(self._keys, key), len(self._keys)):
            yield self._keys[place]


class MemoryStore(ObjectStore):
    """One client of a `MemoryBucket`."""

    def __init__(self, bucket: MemoryBucket, *, clock: Clock, delay: Delay | None = None) -> None:
        self._bucket = bucket
        self._clock = StoreClock(clock)
        self._delay = delay

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        check_key(key)
        sent = await self._send()
        stored = self._bucket.objects.get(key)
        await self._receive(sent)
        if stored is None:
            raise NotFound(f"There is no object {key!r}.", key=key)
        if stored.version == unless:
            return None
        return Object(
            key=key,
            version=stored.version,
            size=len(stored.body),
            modified=stored.modified,
            metadata=stored.metadata,
            body=stored.body,
        )

    async def head(self, key: str) -> Head:
        found = await self.get(key)
        assert found is not None
        return Head(
            key=key,
            version=found.version,
            size=found.size,
            modified=found.modified,
            metadata=found.metadata,
        )

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        sent = await self._send()
        problem = self._refuse(key, mode)
        version = Version("") if problem else self._bucket.write(key, bytes(body), metadata)
        await self._receive(sent)
        if problem:
            raise problem
        return version

    def _refuse(self, key: str, mode: PutMode) -> AlreadyExists | VersionConflict | None:
        stored = self._bucket.objects.get(key)
        match mode:
            case Put.REPLACE:
                return None
            case Put.CREATE:
                if stored is not None:
                    return AlreadyExists(f"The object {key!r} already exists.", key=key)
                return None
            case Swap(version):
                if stored is None or stored.version != version:
                    return _conflict(key)
                return None

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        sent = await self._send()
        problem = self._refuse(key, Swap(version))
        if problem is None:
            self._bucket.write(key, self._bucket.objects[key].body, metadata)
        await self._receive(sent)
        if problem:
            raise problem
        return version

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        check_key(key)
        sent = await self._send()
        problem = None if version is None else self._refuse(key, Swap(version))
        if problem is None and key in self._bucket.objects:
            self._bucket.remove(key)
        await self._receive(sent)
        if problem:
            raise problem

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
        sent = await self._send()
        page = self._page(prefix, max(start_after, cursor or ""), delimiter, limit)
        await self._receive(sent)
        return page

    def _page(self, prefix: str, after: str, delimiter: Delimiter, limit: int) -> Page:
        entries: list[Entry] = []
        folders: list[str] = []
        last = after
        for key in self._bucket.keys_from(max(prefix, after)):
            if not key.startswith(prefix):
                break
            cut = key.find("/", len(prefix)) if delimiter else -1
            name = key[: cut + 1] if cut >= 0 else key
            if name <= last:
                continue
            if len(entries) + len(folders) == limit:
                return Page(tuple(entries), tuple(folders), cursor=last)
            if cut >= 0:
                folders.append(name)
            else:
                stored = self._bucket.objects[key]
                entries.append(Entry(key, stored.version, len(stored.body), stored.modified))
            last = name
        return Page(tuple(entries), tuple(folders), cursor=None)

    async def sample(self) -> TimeSample:
        sent = await self._send()
        return await self._receive(sent)

    async def _send(self) -> float:
        sent = self._clock.machine.monotonic()
        if self._delay is not None:
            await self._delay()
        else:
            await self._clock.machine.sleep(0)
        return sent

    async def _receive(self, sent: float) -> TimeSample:
        stamp = self._bucket.date()
        if self._delay is not None:
            await self._delay()
        sample = TimeSample(
            stamp=stamp,
            resolution=self._bucket.date_resolution_seconds,
            sent=sent,
            received=self._clock.machine.monotonic(),
        )
        self._clock.observe(sample)
        return sample


def _conflict(key: str) -> VersionConflict:
    return VersionConflict(f"The object {key!r} is not there in the version named.", key=key)
