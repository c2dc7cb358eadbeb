"""The store contract, over every backend, bare and wrapped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, seeded_entropy, system_entropy
from penstock.store.base import ObjectStore
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.file.backend import FileStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.retrying import Retries, RetryingStore
from penstock.store.s3.backend import S3Store
from penstock.store.s3.config import s3_config
from penstock.store.s3.local import LocalS3
from penstock.store.tombstoned import TombstonedStore
from penstock.testing.store_contract import STORE_CHECKS

_FAULTS = FaultPlan(
    latency_seconds_max=0.002,
    throttled=0.05,
    failed=0.05,
    lost_request=0.05,
    lost_answer=0.1,
)
_RACY_DELETES = FaultPlan(racy_delete_seconds_max=0.01)
_FEW_PAUSES = Retries(tries_max=12, first_pause_seconds=0.0005, pause_seconds_max=0.01)

OpenBackend = Callable[[], ObjectStore]


@dataclass(frozen=True)
class Place:
    """Where a backend keeps its objects: an empty store a test."""

    request: pytest.FixtureRequest
    folder: Path

    def memory(self) -> OpenBackend:
        bucket = MemoryBucket(SystemClock())
        return lambda: MemoryStore(bucket, clock=SystemClock())

    def memory_dated_like_s3(self) -> OpenBackend:
        bucket = MemoryBucket(SystemClock(), date_resolution_seconds=1.0)
        return lambda: MemoryStore(bucket, clock=SystemClock())

    def file(self) -> OpenBackend:
        return lambda: FileStore(
            self.folder, clock=SystemClock(), entropy=system_entropy(), fsync=False
        )

    def file_synced(self) -> OpenBackend:
        return lambda: FileStore(self.folder, clock=SystemClock(), entropy=system_entropy())

    def s3(self) -> OpenBackend:
        server: LocalS3 = self.request.getfixturevalue("local_s3")
        bucket, _, options = server.url.partition("?")
        url = f"{bucket}/{new_id(system_entropy())}?{options}"
        config = s3_config(url, environment={}, credentials=server.credentials)
        return lambda: S3Store(config, clock=SystemClock())

    def faulty(
        self, backend: OpenBackend, faults: FaultPlan = _FAULTS, *, tombstones: bool = False
    ) -> OpenBackend:
        entropy = seeded_entropy(str(self.request.node.name))
        meter = Meter()

        def opened() -> ObjectStore:
            store: ObjectStore = FaultyStore(backend(), faults, entropy=entropy)
            store = MeteredStore(store, meter)
            if tombstones:
                store = TombstonedStore(store, entropy=entropy)
            return RetryingStore(store, entropy=entropy, retries=_FEW_PAUSES)

        return opened

    def tombstoned(self, backend: OpenBackend) -> OpenBackend:
        """Over a server whose conditional deletes are not atomic."""
        entropy = seeded_entropy(str(self.request.node.name))
        return lambda: TombstonedStore(
            FaultyStore(backend(), _RACY_DELETES, entropy=entropy), entropy=entropy
        )


BACKENDS: dict[str, Callable[[Place], OpenBackend]] = {
    "memory": Place.memory,
    "memory_dated_like_s3": Place.memory_dated_like_s3,
    "file": Place.file,
    "file_synced": Place.file_synced,
    "s3": Place.s3,
    "faulty_memory": lambda place: place.faulty(place.memory()),
    "faulty_file": lambda place: place.faulty(place.file()),
    "faulty_s3": lambda place: place.faulty(place.s3()),
    "tombstoned_memory": lambda place: place.tombstoned(place.memory()),
    "tombstoned_file": lambda place: place.tombstoned(place.file()),
    "tombstoned_s3": lambda place: place.tombstoned(place.s3()),
    "faulty_tombstoned_memory": lambda place: place.faulty(
        place.memory(), replace(_FAULTS, racy_delete_seconds_max=0.01), tombstones=True
    ),
}


async def _exercise(check: Callable[..., Awaitable[None]], backend: OpenBackend) -> None:
    opened: list[ObjectStore] = []

    async def open_client() -> ObjectStore:
        opened.append(backend())
        return opened[-1]

    try:
        await check(open_client)
    finally:
        for store in opened:
            await store.close()


@pytest.mark.parametrize("name", STORE_CHECKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contract(backend: str, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = Place(request, tmp_path)
    asyncio.run(_exercise(STORE_CHECKS[name], BACKENDS[backend](place)))
