"""The doctor trusts a good store, and finds and names what is wrong with a bad one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    NotFound,
    PenstockError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import (
    CREATE,
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    Head,
    Object,
    ObjectStore,
    Page,
    PutMode,
    Swap,
    Version,
    Wrapper,
)
from penstock.store.doctor import CheckMark, Patient, StoreFinding, StoreReport, examine
from penstock.store.doctor_process import SecondProcess
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.tombstoned import TombstonedStore


class Decent(Wrapper):
    """A store that is as it should be."""


class IgnoresCreate(Wrapper):
    """A server that does not know If-None-Match."""

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        return await super().put(key, body, REPLACE if mode is CREATE else mode, metadata=metadata)


class IgnoresSwap(Wrapper):
    """A server that does not know If-Match."""

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        mode = REPLACE if isinstance(mode, Swap) else mode
        return await super().put(key, body, mode, metadata=metadata)


class ChecksThenWrites(Wrapper):
    """A server that is right for one writer at a time, and lets two of a crowd win."""

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        try:
            found = await self.inner.get(key)
        except NotFound:
            found = None
        await self.clock.machine.sleep(0)
        allowed = (
            mode is REPLACE
            or (mode is CREATE and found is None)
            or (isinstance(mode, Swap) and found is not None and found.version == mode.version)
        )
        return await super().put(key, body, REPLACE if allowed else mode, metadata=metadata)


class IgnoresDeleteCondition(Wrapper):
    async def delete(self, key: str, *, version: Version | None = None) -> None:
        del version
        await super().delete(key)


class IgnoresUnless(Wrapper):
    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        del unless
        return await super().get(key)


class TouchesByCopy(Wrapper):
    """A server whose self-copy reads, checks, and writes later: an old body can come back."""

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        found = await self.inner.get(key)
        if found is None or found.version != version:
            return await super().touch(key, version=version, metadata=metadata)
        for _ in range(3):
            await self.clock.machine.sleep(0)
        return await self.inner.put(key, found.body, metadata=metadata)


class CannotTouch(Wrapper):
    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        raise Unsupported("The server ignores the condition on a copy's destination.")


class ListsLate(Wrapper):
    """A server whose lists lag one write behind."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._last: Page | None = None

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
        shown, self._last = self._last or page, page
        return shown


class DatesWrongly(Wrapper):
    async def head(self, key: str) -> Head:
        found = await super().head(key)
        return Head(
            key=found.key,
            version=found.version,
            size=found.size,
            modified=found.modified - 3600,
            metadata=found.metadata,
        )


class GoesAway(Wrapper):
    async def delete(self, key: str, *, version: Version | None = None) -> None:
        raise Unavailable("Nobody answers.")


class DeletesLater(Wrapper):
    """A server that checks the condition of a delete, and removes what is there a while later."""

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        if version is not None and (await self.inner.head(key)).version != version:
            raise VersionConflict("It is there in another version.", key=key)
        for _ in range(3):
            await self.clock.machine.sleep(0)
        await super().delete(key)


class DeletesLaterAndIgnoresSwap(DeletesLater, IgnoresSwap):
    pass


def _examined(
    make: Callable[[ObjectStore], ObjectStore], *, by_tombstone: bool = False
) -> tuple[StoreReport, MemoryBucket]:
    bucket = MemoryBucket(SystemClock())
    meter = Meter()

    async def run() -> StoreReport:
        clients = [
            MeteredStore(make(MemoryStore(bucket, clock=SystemClock())), meter) for _ in range(4)
        ]
        buried = [TombstonedStore(each, entropy=seeded_entropy(2)) for each in clients]
        patient = Patient(
            "memory://",
            buried if by_tombstone else clients,
            meter,
            seeded_entropy(1),
            with_tombstones=buried,
            by_tombstone=by_tombstone,
        )
        return await examine(patient)

    return asyncio.run(run()), bucket


def _bad(report: StoreReport) -> set[str]:
    return {finding.check for finding in report.findings if finding.mark is CheckMark.BAD}


def test_a_good_store_is_trusted_and_left_clean() -> None:
    report, bucket = _examined(Decent)
    assert report.trusted
    assert _bad(report) == set()
    assert len(report.findings) >= 14
    assert report.requests > 0
    assert report.dollars > 0
    assert report.dollars_per_month == pytest.approx(30 * report.dollars)
    assert {each.kind for each in report.latencies} == {"put", "get", "list", "delete"}
    assert bucket.objects == {}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (IgnoresCreate, "create only if absent"),
        (IgnoresCreate, "one of 16 creators wins"),
        (IgnoresSwap, "swap only from the version named"),
        (IgnoresSwap, "swap only what is there"),
        (IgnoresSwap, "16 writers count exactly"),
        (ChecksThenWrites, "one of 16 creators wins"),
        (ChecksThenWrites, "one of 16 swappers wins"),
        (IgnoresUnless, "get unless unchanged"),
        (TouchesByCopy, "touch against swap"),
        (ListsLate, "lists follow writes"),
        (DatesWrongly, "dates can be trusted"),
    ],
)
def test_a_bad_store_is_found_and_named(
    make: Callable[[ObjectStore], ObjectStore], named: str
) -> None:
    report, _ = _examined(make)
    assert not report.trusted
    assert named in _bad(report)
    assert named in report.verdict


def test_a_store_that_is_right_alone_and_wrong_in_a_crowd_fails_only_in_the_crowd() -> None:
    report, bucket = _examined(ChecksThenWrites)
    assert "create only if absent" not in _bad(report)
    winners = [f.seen for f in report.findings if f.check == "one of 16 creators wins"]
    assert "of 16 writers won" in winners[0]
    assert bucket.objects == {}


@pytest.mark.parametrize(
    ("make", "broken"),
    [
        (DeletesLater, {"delete against swap"}),
        (IgnoresDeleteCondition, {"delete only the version named", "delete against swap"}),
    ],
)
def test_a_store_whose_deletes_are_not_atomic_is_trusted_with_tombstones(
    make: Callable[[ObjectStore], ObjectStore], broken: set[str]
) -> None:
    report, bucket = _examined(make)
    assert (report.trusted, _bad(report)) == (False, broken)
    assert "trusted, with deletes by tombstone: add deletes=tombstone" in report.verdict
    assert bucket.objects == {}
    report, bucket = _examined(make, by_tombstone=True)
    assert (report.trusted, _bad(report)) == (True, set())
    assert report.verdict == "This store can be trusted, with deletes by tombstone."
    assert bucket.objects == {}, "tombstones are removed, too"


def test_tombstones_mend_nothing_but_deletes() -> None:
    report, _ = _examined(DeletesLaterAndIgnoresSwap)
    assert not report.tombstones_would_do
    assert "swap only from the version named" in report.verdict
    assert not [each for each in report.findings if "by tombstone" in each.check]


def test_a_store_without_touch_is_trusted_with_a_note() -> None:
    report, _ = _examined(CannotTouch)
    assert report.trusted
    notes = [f for f in report.findings if f.mark is CheckMark.NOTE and f.check.startswith("touch")]
    assert len(notes) == 2


def test_a_versioned_bucket_is_examined_twice() -> None:
    bucket = MemoryBucket(SystemClock())
    told: list[StoreFinding] = []
    purged: list[str] = []

    async def purge(prefix: str) -> None:
        purged.append(prefix)

    async def run() -> StoreReport:
        clients = [MemoryStore(bucket, clock=SystemClock()) for _ in range(2)]
        patient = Patient("memory://", clients, Meter(), seeded_entropy(1), purge=purge)
        return await examine(patient, tell=told.append)

    report = asyncio.run(run())
    assert report.trusted
    assert [f for f in told if "again on a versioned key" in f.check]
    assert told == list(report.findings)
    assert [prefix.startswith("doctor/") for prefix in purged] == [True]


def test_a_store_that_goes_away_is_no_verdict() -> None:
    with pytest.raises(Unavailable):
        _examined(GoesAway)


def test_a_second_process_that_cannot_open_the_store_says_why() -> None:
    async def run() -> None:
        async with SecondProcess("file:///nowhere/at/all", environment=os.environ):
            pytest.fail("it has opened a folder that is not there")

    with pytest.raises(PenstockError, match=r"second process .* failed: The folder /nowhere/at"):
        asyncio.run(run())


def test_a_second_process_that_dies_says_so_in_the_next_race(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore(MemoryBucket(SystemClock()), clock=SystemClock())
        async with SecondProcess(f"file://{tmp_path}/b", environment=os.environ) as second:
            assert second._process is not None
            second._process.kill()
            await second._process.wait()
            await second.race([store], "key", swap=False, entropy=seeded_entropy(1))

    with pytest.raises(PenstockError, match=r"second process .* failed: it did not answer"):
        asyncio.run(run())
