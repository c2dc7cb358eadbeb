"""What stories about files share: attempts' folders, a store, and readers without Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.datasets.layout import attempt_name, attempt_prefix
from penstock.datasets.projection import CurrentPartition, read_dataset, read_partition
from penstock.datasets.schema import Column
from penstock.dispatcher.catalog.snapshots import Snapshots
from penstock.dispatcher.datasets.projector import ProjectCarrier
from penstock.dispatcher.datasets.sweeper import StoreSweeper
from penstock.dispatcher.outbox import Relay, RelayLimits
from penstock.dispatcher.tasks.model import AttemptEnd, ClaimedTask, Refusal, TaskOutput
from penstock.runtimes.base import Facts
from penstock.store.memory import MemoryBucket, MemoryStore
from tests.integration.dispatcher.carrying import Still
from tests.integration.dispatcher.world import Job, World, done

ROOT = "s3://bucket/root"
LIMITS = RelayLimits(pace_seconds=0, first_ms=1000)


def columns(*names: str, **types: str) -> tuple[Column, ...]:
    """Columns that may be null: by default numbers."""
    return tuple(Column(name, types.get(name, "bigint")) for name in names)


def facts(
    *, rows: int = 1, files: int = 1, manifest: str = "a", of: tuple[Column, ...] = ()
) -> Facts:
    return Facts(manifest=manifest * 64, files=files, rows=rows, bytes=rows * 10, columns=of)


@dataclass
class Moved(Still):
    """A clock that a test moves, for a store that lets others run."""

    async def sleep(self, seconds: float) -> None:
        assert seconds == 0, "nothing here waits"


@dataclass
class Library:
    """A world, a store, and what carries the one into the other."""

    world: World
    clock: Still = field(default_factory=Moved)

    def __post_init__(self) -> None:
        self.bucket = MemoryBucket(self.clock)
        self.store = MemoryStore(self.bucket, clock=self.clock)
        self.relay = self.another()

    def another(self) -> Relay:
        carrier = ProjectCarrier(self.world.database, self.store, clock=self.clock)
        return Relay(
            self.world.database, carriers={"project": carrier}, limits=LIMITS, clock=self.clock
        )

    def sweeping(self, *, grace_seconds: float = 100.0) -> StoreSweeper:
        return StoreSweeper(
            self.world.database, self.store, grace_seconds=grace_seconds, clock=self.clock
        )

    async def forget(self) -> None:
        """Have no history: what was replaced or removed is in no snapshot."""
        keeper = Snapshots(self.world.database, pace_seconds=0, history_ms=0, grace_seconds=0)
        for row in await self.world.rows("SELECT id::text FROM dataset"):
            await keeper.make(row["id"])
        await keeper.forget()

    def later(self, seconds: float) -> None:
        """Let time pass, for the database and the store."""
        self.world.later(seconds)
        self.clock.now += seconds

    async def carry(self) -> None:
        """Have everything written that is to be."""
        left = 1
        for _ in range(100):
            await self.relay.turn()
            left = await self.world.value("SELECT count(*) FROM outbox WHERE kind = 'project'")
            if not left:
                return
        raise AssertionError(f"{left} projections are not written")

    async def written(
        self, claimed: ClaimedTask, *, dataset: str = "job", partition: str | None = "p"
    ) -> str:
        """A file in the folder of an attempt; returns where the folder is."""
        name = attempt_name(
            task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
        )
        prefix = attempt_prefix(
            dataset, generation=claimed.generation, partition_key=partition, attempt=name
        )
        await self.store.put(f"{prefix}/part-0.parquet", b"rows")
        await self.store.put(f"scratch/{name}/spill", b"rest")
        return f"{ROOT}/{prefix}"

    async def publish(
        self, job: Job, claimed: ClaimedTask, *, partition: str | None = "p", **fields: object
    ) -> str:
        """Write and complete; returns the location."""
        location = await self.written(claimed, partition=partition)
        output = job.output(partition, location, **fields)
        (found,) = await self.world.tasks.complete(done(claimed.fence, output))
        assert isinstance(found, AttemptEnd)
        return location

    async def publish_row(self, job: Job, claimed: ClaimedTask) -> None:
        """Complete with something that has no folder."""
        await self.world.tasks.complete(done(claimed.fence, job.output()))

    async def seen(self, job: Job, *, partition: str | None = "p") -> CurrentPartition | None:
        """What a reader of the bucket is told of a partition."""
        return await read_partition(
            self.store, "job", generation=job.generation, partition_key=partition
        )

    async def locations(self, job: Job, *, partition: str | None = "p") -> list[str]:
        found = await self.seen(job, partition=partition)
        return [] if found is None else [each.location for each in found.parts]

    async def current(self) -> tuple[str, int] | None:
        found = await read_dataset(self.store, "job")
        return None if found is None else (found.generation, found.revision)

    def files(self, location: str) -> list[str]:
        """What is left of an attempt's folder and of its scratch."""
        prefix = location.removeprefix(f"{ROOT}/")
        scratch = f"scratch/{prefix.rpartition('/')[2]}"
        return [key for key in self.bucket.objects if key.startswith((f"{prefix}/", f"{scratch}/"))]

    async def has(self, locations: Sequence[str]) -> list[bool]:
        return [bool(self.files(each)) for each in locations]


async def completed(
    world: World, claimed: ClaimedTask, *outputs: TaskOutput
) -> AttemptEnd | Refusal:
    (found,) = await world.tasks.complete(done(claimed.fence, *outputs))
    return found
