"""Deletes by tombstone: what every reader takes for nothing, and what it costs to know it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.document_format import encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    StoreError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store import tombstoned
from penstock.store.base import (
    CREATE,
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    ObjectStore,
    Page,
    PutMode,
    Swap,
    Version,
    Wrapper,
    pages,
)
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.file.backend import FileStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.store.races import delete_against_swap
from penstock.store.retrying import RetryingStore
from penstock.store.tombstoned import (
    KEYS_PER_NONCE_MAX,
    TOMBSTONE_BYTES,
    Tombstone,
    TombstonedStore,
    declare_used_once,
)
from penstock.testing.virtual import World, simulate

KEY = "a"
_others = seeded_entropy("others")


class Office:
    """Clients of one bucket, each with tombstones and a meter of its own."""

    def __init__(self, bare: ObjectStore) -> None:
        self.bare = bare
        self._clients = 0

    def client(self) -> tuple[TombstonedStore, Meter]:
        self._clients += 1
        meter = Meter()
        store = MeteredStore(self.bare, meter)
        return TombstonedStore(store, entropy=seeded_entropy(str(self._clients))), meter

    async def bury(self, store: ObjectStore, *keys: str) -> None:
        for key in keys:
            version = await store.put(key, key.encode(), CREATE)
            await store.delete(key, version=version)


def in_memory(work: Callable[[Office], Coroutine[Any, Any, None]]) -> None:
    clock = SystemClock()
    asyncio.run(work(Office(MemoryStore(MemoryBucket(clock), clock=clock))))


@pytest.mark.parametrize("by_tombstone", [False, True])
def test_only_tombstones_make_deletes_of_a_racy_server_safe(by_tombstone: bool) -> None:
    async def main(world: World) -> bool:
        entropy = world.entropy("races")
        store: ObjectStore = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
        plan = FaultPlan(latency_seconds_max=1.0, racy_delete_seconds_max=1.0)
        store = FaultyStore(store, plan, entropy=entropy)
        if by_tombstone:
            store = TombstonedStore(store, entropy=entropy)
        rounds = [await delete_against_swap(store, store, KEY, entropy=entropy) for _ in range(40)]
        return all(rounds)

    assert simulate(main, seed="racy") is by_tombstone


def test_tombstones_of_many_keys_are_known_by_one_reading() -> None:
    async def work(office: Office) -> None:
        writer, wrote = office.client()
        reader, read = office.client()
        await office.bury(writer, *(f"gone/{number}" for number in range(30)))
        await writer.put("gone/same-size", b"x" * TOMBSTONE_BYTES)
        for _ in range(2):
            for store in (writer, reader):
                page = await store.list("gone/")
                assert [entry.key for entry in page.entries] == ["gone/same-size"]
                assert len(page.tombstones) == 30
        # The one that wrote them reads none; both have to read what only has their size.
        assert (wrote.requests(kind=Kind.GET), read.requests(kind=Kind.GET)) == (1, 2)

    in_memory(work)


def test_where_versions_are_not_of_bodies_each_tombstone_is_read_once(tmp_path: Path) -> None:
    async def work() -> None:
        files = FileStore(
            tmp_path, clock=SystemClock(), entropy=seeded_entropy("files"), fsync=False
        )
        office = Office(files)
        await office.bury(office.client()[0], *(f"gone/{number}" for number in range(10)))
        reader, read = office.client()
        for _ in range(3):
            assert (await reader.list("gone/")).entries == ()
            with pytest.raises(NotFound):
                await reader.head("gone/3")
        assert read.requests(kind=Kind.GET) == 10
        await files.close()

    asyncio.run(work())


def test_who_lists_more_than_can_be_remembered_reads_only_what_is_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tombstoned, "KNOWN_MAX", 12)
    monkeypatch.setattr(tombstoned, "RECENT_MAX", 5, raising=False)

    async def work() -> None:
        files = FileStore(
            tmp_path, clock=SystemClock(), entropy=seeded_entropy("files"), fsync=False
        )
        office = Office(files)
        await office.bury(office.client()[0], *(f"gone/{number}" for number in range(20)))
        reader, read = office.client()
        for sweep in range(3):
            page = await reader.list("gone/", limit=5)
            while page.cursor is not None:
                assert len(page.tombstones) == 5
                page = await reader.list("gone/", limit=5, cursor=page.cursor)
            assert read.requests(kind=Kind.GET) == 20 + 8 * sweep
        await files.close()

    asyncio.run(work())


def test_no_key_ever_has_the_same_tombstone_twice() -> None:
    async def work(office: Office) -> None:
        store, _ = office.client()
        seen = set()
        for _ in range(5):
            await office.bury(store, KEY, "b")
            seen.add((await office.bare.head(KEY)).version)
        assert len(seen) == 5
        await office.bury(store, *(f"c/{number}" for number in range(KEYS_PER_NONCE_MAX + 1)))
        async for page in pages(office.bare, "c/"):
            seen |= {entry.version for entry in page.entries}
        assert len(seen) == 6, "a new body is due after so many keys, and no sooner"

    in_memory(work)


def test_a_body_that_would_be_taken_for_nothing_is_refused() -> None:
    async def work(office: Office) -> None:
        store, meter = office.client()
        with pytest.raises(InvalidInput, match="that of a tombstone"):
            await store.put(KEY, encode(Tombstone(nonce="0" * 60)))
        assert meter.requests() == 0

    in_memory(work)


class Meddling(Wrapper):
    """Somebody else is faster than every swap."""

    def __init__(self, inner: ObjectStore, act: Callable[[ObjectStore], Awaitable[object]]) -> None:
        super().__init__(inner)
        self._act = act

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        if isinstance(mode, Swap):
            await self._act(self.inner)
        return await super().put(key, body, mode, metadata=metadata)


async def _remove(store: ObjectStore) -> None:
    await store.delete(KEY)


async def _create(store: ObjectStore) -> None:
    await store.put(KEY, b"other")


async def _create_and_delete(store: ObjectStore) -> None:
    other = TombstonedStore(store, entropy=_others)
    await other.delete(KEY, version=await other.put(KEY, b"other"))


@pytest.mark.parametrize(
    ("act", "error"),
    [(_remove, None), (_create, AlreadyExists), (_create_and_delete, Unavailable)],
)
def test_a_create_over_a_tombstone_that_others_were_faster_with(
    act: Callable[[ObjectStore], Awaitable[object]], error: type[StoreError] | None
) -> None:
    async def work(office: Office) -> None:
        await office.bury(office.client()[0], KEY)
        store = TombstonedStore(Meddling(office.bare, act), entropy=seeded_entropy("one"))
        with pytest.raises(error) if error else nullcontext():
            await store.put(KEY, b"one", CREATE)
        found = await office.bare.get(KEY)
        assert found is not None
        assert (found.body == b"one") is (error is None)

    in_memory(work)


class Replacing(Wrapper):
    """Somebody replaces the tombstone right after it was listed."""

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        page = await super().list(
            prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
        )
        await self.inner.put(KEY, b"new")
        return page


def test_a_list_shows_what_was_created_over_a_tombstone_meanwhile() -> None:
    async def work(office: Office) -> None:
        await office.bury(office.client()[0], KEY)
        store = TombstonedStore(Replacing(office.bare), entropy=seeded_entropy("lists"))
        page = await store.list()
        assert [(entry.key, entry.size) for entry in page.entries] == [(KEY, 3)]
        assert page.tombstones == ()

    in_memory(work)


class ChecksNothing(Wrapper):
    """A server that does not look at the version which a delete names."""

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        if version is not None:
            raise Unsupported("The server ignores the condition on a delete.")
        await super().delete(key)


@pytest.mark.parametrize("server", [Wrapper, ChecksNothing])
def test_names_that_are_used_once_leave_no_tombstone(
    server: Callable[[ObjectStore], ObjectStore],
) -> None:
    async def work(office: Office) -> None:
        office.bare = server(office.bare)
        store, _ = office.client()
        outer = RetryingStore(store, entropy=seeded_entropy("retries"))
        for _ in range(2):
            declare_used_once(outer, _is_below_once)
        await office.bury(outer, "once/a", "again/a")
        assert [entry.key for entry in (await office.bare.list()).entries] == ["again/a"]
        await outer.put("once/b", b"new")
        with pytest.raises(VersionConflict):
            await outer.delete("once/b", version=Version("0" * 32))
        await outer.delete("once/b")
        # Without a version there is no condition that could be broken.
        await outer.delete("again/a")
        assert (await office.bare.list()).entries == ()

    in_memory(work)


def _is_below_once(key: str) -> bool:
    return key.startswith("once/")
