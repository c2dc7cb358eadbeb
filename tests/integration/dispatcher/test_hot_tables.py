"""Hot tables follow what is published: whatever dies, hangs, is restored, or reads meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psycopg
import pyarrow as pa
import pytest
from psycopg.types.json import Jsonb
from pyarrow import parquet

from penstock.datasets import parquet_child
from penstock.datasets.layout import attempt_name, attempt_prefix
from penstock.datasets.manifest import File, Manifest, encode, sums
from penstock.datasets.schema import Column
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.dag.parser import parse
from penstock.dispatcher.database.pool import Connection
from penstock.dispatcher.datasets import applier as applying
from penstock.dispatcher.datasets import hot_tables
from penstock.dispatcher.datasets.applier import Applier
from penstock.dispatcher.datasets.hot_tables import HotLoad, PostgresData
from penstock.dispatcher.deployment import Deployer
from penstock.dispatcher.deployment_plan import DagApplied
from penstock.dispatcher.tasks.model import AttemptEnd
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput, PenstockError
from penstock.runtimes.base import facts_of
from tests.integration.dispatcher.world import Job, Play, World, Worlds, done

COLUMNS = (Column("id", "bigint"), Column("level", "string"))
ARROW = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "string": pa.string(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<double>": pa.list_(pa.float64()),
}
Row = tuple[Any, ...]


@dataclass
class Hot:
    """A world with a root for files, and Postgres data."""

    world: World
    root: str
    dsn: str
    released: int = 0

    def applier(self, **other: Any) -> Applier:
        def note() -> None:
            self.released += 1

        return Applier(
            self.world.database,
            PostgresData(other.pop("dsn", self.dsn), reader="penstock_reader"),
            Transfer(f"{self.root}?fsync=off"),
            root=self.root,
            released=note,
            **other,
        )

    async def turn(self) -> None:
        """What a dispatcher that has just begun does."""
        await self.applier().turn()

    async def job(
        self,
        mode: str = "replace",
        columns: Sequence[Column] = COLUMNS,
        keys: Sequence[str] = (),
        name: str = "alerts",
    ) -> Job:
        job = await self.world.job(name, update_mode=mode)
        await self.declare(job.generation, columns, mode, keys)
        return job

    async def declare(
        self, generation: str, columns: Sequence[Column], mode: str, keys: Sequence[str] = ()
    ) -> None:
        said = [{each.name: each.type} for each in columns]
        hot = Jsonb({"columns": said, "mode": mode, "keys": list(keys)})
        await self.world.rows("UPDATE generation SET hot = %s WHERE version = %s", hot, generation)
        for step in ("begin_hot", "await_serving"):
            await self.world.database.fetch(step)

    async def publish(
        self,
        job: Job,
        *rows: Row,
        key: str,
        partition: str | None = None,
        columns: Sequence[Column] = COLUMNS,
        **fields: Any,
    ) -> str:
        """A task that publishes these rows; returns where its folder is."""
        claimed = await job.claimed(key)
        attempt = attempt_name(
            task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
        )
        prefix = attempt_prefix(
            "alerts", generation=job.generation, partition_key=partition, attempt=attempt
        )
        location = f"{self.root}/{prefix}"
        arrays = {
            each.name: pa.array([row[place] for row in rows], ARROW[each.type])
            for place, each in enumerate(columns)
        }
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.table(arrays), sink)
        transfer = Transfer(f"{self.root}?fsync=off")
        sent = transfer.write_bytes(f"{location}/part-0.parquet", sink.getvalue().to_pybytes())
        files = (File(name="part-0.parquet", rows=len(rows), bytes=sent.bytes, sha256=sent.sha256),)
        manifest = Manifest(
            dataset="alerts",
            generation=job.generation,
            job="alerts",
            task_id=claimed.task_id,
            attempt=claimed.attempt,
            partition_key=partition,
            rows=len(rows),
            bytes=sums(files).bytes,
            columns=tuple(columns),
            files=files,
        )
        body = encode(manifest)
        transfer.write_bytes(f"{location}/manifest.json", body)
        output = job.output(partition, location, facts=facts_of(manifest, body), **fields)
        (answer,) = await self.world.tasks.complete(done(claimed.fence, output))
        assert isinstance(answer, AttemptEnd), answer
        return location

    async def rows(self, statement: str = "SELECT * FROM hot.alerts ORDER BY 1, 2") -> list[Row]:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            found = await connection.execute(statement.encode())
            return await found.fetchall() if found.description else []

    async def routed(self) -> list[str]:
        rows = await self.world.rows("SELECT routed FROM event ORDER BY seq")
        return [row["routed"] for row in rows]

    async def behind(self) -> int:
        found = await self.world.value("SELECT count(*) FROM hot_partition WHERE applied < wanted")
        assert isinstance(found, int)
        return found

    async def applied(self) -> list[Row]:
        return await self.rows(
            "SELECT partition_key, revision FROM hot_store.applied ORDER BY partition_key"
        )

    async def problem(self) -> str | None:
        found = await self.world.value("SELECT coalesce(problem, '') FROM hot_table")
        return str(found) or None

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """A reader in a long transaction, whose moment is now."""
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.execute(b"SELECT 1")
            yield connection


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read here, and not in a process that takes a second to begin; but for one test."""

    def here(file: BinaryIO, columns: Sequence[Column], **_: float) -> Iterator[bytes]:
        try:
            opened = parquet.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise PenstockError("The file cannot be read as Parquet.") from error
        for piece in parquet_child.copied_pieces(opened, [[x.name, x.type] for x in columns]):
            yield bytes(piece)

    if request.node.name != "test_rows_are_in_the_table_before_anybody_is_told":
        monkeypatch.setattr(applying, "copied", here)


class LeapingClock(SystemClock):
    """A clock that a test moves on."""

    leapt = 0.0

    def monotonic(self) -> float:
        return self.leapt


Told = Callable[[Hot], Coroutine[Any, Any, None]]


@pytest.fixture
def tell(play: Play, worlds: Worlds, tmp_path: Path) -> Callable[[Told], None]:
    """Runs a story with Postgres data that is empty."""

    def run(told: Told) -> None:
        async def story(world: World) -> None:
            dsn = worlds.dsn_of("penstock_data")
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                await connection.execute(b"DROP SCHEMA IF EXISTS hot, hot_store CASCADE")
            await told(Hot(world, tmp_path.as_uri(), dsn))

        play(story)

    return run


Tell = Callable[[Told], None]


def test_rows_are_in_the_table_before_anybody_is_told(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "low"), (2, None), key="a", partition="p")
        assert await hot.routed() == ["applying"]
        await hot.turn()
        assert await hot.rows() == [(1, "low"), (2, None)]
        assert await hot.routed() == ["pending"]
        assert hot.released == 1
        # Another of the same partition takes its place, one of another partition does not.
        await hot.publish(job, (3, "high"), key="b", partition="p")
        await hot.publish(job, (4, ""), key="c", partition="q")
        await hot.turn()
        assert await hot.rows() == [(3, "high"), (4, "")]
        assert await hot.applied() == [("p", 2), ("q", 1)]

    tell(story)


def test_what_is_cold_is_told_at_once(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        cold = await hot.world.job("cold")
        await hot.publish(cold, (1, "x"), key="a")
        assert await hot.routed() == ["pending"]
        assert await hot.applier().turn() is None
        # What becomes hot later is loaded whole, and what is hot no more leaves no table.
        await hot.declare(cold.generation, COLUMNS, "replace")
        await hot.turn()
        assert await hot.rows("SELECT * FROM hot.cold") == [(1, "x")]
        await hot.publish(cold, (2, "x"), key="b")
        await hot.world.rows("UPDATE generation SET hot = NULL")
        for step in ("begin_hot", "await_serving"):
            await hot.world.database.fetch(step)
        assert await hot.routed() == ["pending", "pending"]
        await hot.turn()
        left = "SELECT relname FROM pg_class WHERE relname LIKE 'cold%'"
        assert await hot.rows(left) == []
        assert await hot.world.rows("SELECT FROM hot_table") == []

    tell(story)


def test_only_parts_that_are_new_are_added(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("append")
        await hot.publish(job, (1, "a"), key="a")
        await hot.turn()
        await hot.rows("UPDATE hot_store.applied SET stamp = stamp")
        before = await hot.rows(f"SELECT xmin::text FROM hot_store.alerts__{await _name(hot)}")
        await hot.publish(job, (2, "b"), key="b")
        await hot.publish(job, (1, "a"), key="c")
        await hot.turn()
        assert await hot.rows() == [(1, "a"), (1, "a"), (2, "b")]
        after = await hot.rows(f"SELECT xmin::text FROM hot_store.alerts__{await _name(hot)}")
        assert set(before) < set(after)

    tell(story)


def test_parts_that_were_put_together_with_applied_ones_are_no_rows_twice(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("append")
        await hot.publish(job, (1, "a"), key="a")
        await hot.turn()
        await hot.publish(job, (2, "b"), key="b")
        run = await hot.publish(job, (1, "a"), (2, "b"), key="c")
        # As maintenance leaves it: one folder has the rows of the first two.
        await hot.world.rows("DELETE FROM appended WHERE location = %s", run)
        await hot.world.rows(
            "INSERT INTO compacted (dataset_id, generation, partition_key, task_id, attempt,"
            " first_revision, revision, append_key, appended_at, location, files, rows, bytes,"
            " manifest) SELECT dataset_id, generation, partition_key, task_id, attempt, 1, 2, 'x',"
            " published_at, location, 1, 2, 2, manifest FROM publication"
        )
        await hot.world.rows("UPDATE appended SET compacted_by = (SELECT task_id FROM compacted)")
        await hot.turn()
        assert await hot.rows() == [(1, "a"), (2, "b")]

    tell(story)


async def _name(hot: Hot) -> str:
    ((name,),) = await hot.rows("SELECT name FROM hot_store.relation")
    return str(name).rpartition("__")[2]


def test_what_is_merged_is_written_where_it_differs(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("merge", keys=["id"])
        every = "SELECT id, level, xmin::text FROM hot_store.alerts__{} ORDER BY id"
        await hot.publish(job, (1, "a"), (2, "b"), (3, "c"), key="a", base_revision=0)
        await hot.turn()
        every = every.format(await _name(hot))
        before = {row[0]: row[2] for row in await hot.rows(every)}
        await hot.publish(job, (1, "a"), (2, "B"), (4, "d"), key="b", base_revision=1)
        await hot.turn()
        after = await hot.rows(every)
        assert [row[:2] for row in after] == [(1, "a"), (2, "B"), (4, "d")]
        assert [before.get(row[0]) == row[2] for row in after] == [True, False, False]
        with pytest.raises(psycopg.errors.UniqueViolation):
            await hot.rows(
                f"SET penstock.partition = ''; INSERT INTO hot_store.alerts__{await _name(hot)}"
                " VALUES (1, 'x')"
            )

    tell(story)


def test_names_of_columns_may_be_odd(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        columns = (Column("id %s", "bigint"), Column('100 % "{x}', "string"))
        job = await hot.job("merge", columns, keys=["id %s"])
        await hot.publish(job, (1, "a"), (2, "b"), key="a", base_revision=0, columns=columns)
        await hot.turn()
        await hot.publish(job, (1, "A"), (3, "c"), key="b", base_revision=1, columns=columns)
        await hot.turn()
        assert await hot.problem() is None
        assert await hot.rows() == [(1, "A"), (3, "c")]

    tell(story)


def test_what_is_removed_leaves_and_may_come_back(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        for place, key in enumerate("pq"):
            await hot.publish(job, (place, key), key=key, partition=key)
        await hot.turn()
        await hot.world.rows("DELETE FROM publication WHERE partition_key = 'p'")
        assert await hot.behind() == 1
        await hot.turn()
        assert await hot.rows() == [(1, "q")]
        assert await hot.behind() == 0
        await hot.publish(job, (7, "p"), key="again", partition="p")
        await hot.turn()
        assert await hot.rows() == [(1, "q"), (7, "p")]
        assert await hot.routed() == ["pending"] * 3

    tell(story)


def test_what_is_removed_and_appended_to_again_between_two_turns_is_the_new_rows(
    tell: Tell,
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("append")
        await hot.publish(job, (1, "old"), key="a", partition="p")
        await hot.turn()
        await hot.world.rows("DELETE FROM publication WHERE partition_key = 'p'")
        await hot.publish(job, (2, "new"), key="b", partition="p")
        await hot.turn()
        assert await hot.rows() == [(2, "new")]
        # And what is appended later is added, as ever.
        await hot.publish(job, (3, "more"), key="c", partition="p")
        (planned,) = await hot.world.database.fetch(
            "unapplied_partitions", {"dataset": job.dataset, "limit": 2}
        )
        assert planned["is_added"]
        await hot.turn()
        assert await hot.rows() == [(2, "new"), (3, "more")]

    tell(story)


class Died(Exception):
    """The process is gone."""


@pytest.mark.parametrize(
    "step",
    [
        (Applier, "_load_one", False),
        (HotLoad, "_copy", False),
        (Applier, "_confirm", True),
        (Applier, "_serve", True),
        (Applier, "_release", True),
    ],
    ids=lambda step: step[1],
)
@pytest.mark.parametrize("mode", ["replace", "append", "merge"])
def test_one_that_dies_at_any_step_is_followed_by_the_next(
    tell: Tell,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[type, str, bool],
    mode: str,
) -> None:
    owner, name, is_applied = step

    async def story(hot: Hot) -> None:
        job = await hot.job(mode, keys=["id"])

        def base(revision: int) -> dict[str, Any]:
            return {"base_revision": revision} if mode == "merge" else {}

        await hot.publish(job, (1, "a"), key="a", **base(0))
        await hot.turn()
        await hot.publish(job, (1, "a"), (2, "b"), key="b", **base(1))

        async def dies(*_: object, **__: object) -> None:
            raise Died

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, dies)
            with pytest.raises(Died):
                await hot.turn()
        assert (await hot.applied() == [("", 2)]) is is_applied
        assert await hot.routed() == ["pending", "applying"]
        # More comes before anybody looks again.
        await hot.publish(job, (1, "a"), (2, "b"), (3, "c"), key="c", **base(2))
        await hot.turn()
        rows = [(1, "a"), (2, "b"), (3, "c")]
        doubled = [(1, "a"), (1, "a"), (1, "a"), (2, "b"), (2, "b"), (3, "c")]
        assert await hot.rows() == (doubled if mode == "append" else rows)
        assert await hot.routed() == ["pending"] * 3
        assert await hot.behind() == 0

    tell(story)


def test_of_two_appliers_one_waits(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("append")
        await hot.publish(job, (1, "a"), key="a")
        is_in, go_on = asyncio.Event(), asyncio.Event()
        real = HotLoad._copy

        async def slowly(self: HotLoad, *args: Any) -> None:
            is_in.set()
            await go_on.wait()
            await real(self, *args)

        monkeypatch.setattr(HotLoad, "_copy", slowly)
        second = hot.applier()
        async with asyncio.TaskGroup() as group:
            group.create_task(hot.turn())
            await is_in.wait()
            await second.turn()
            assert await hot.routed() == ["applying"]
            go_on.set()
        await hot.turn()
        assert await hot.rows() == [(1, "a")]
        assert await hot.routed() == ["pending"]

    tell(story)


def test_one_that_was_cut_off_commits_nothing(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("append")
        await hot.publish(job, (1, "a"), key="a")
        real = HotLoad._copy

        async def cut_off(self: HotLoad, *args: Any) -> None:
            await real(self, *args)
            await hot.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'penstock applier' AND datname = current_database()"
            )

        with monkeypatch.context() as patched:
            patched.setattr(HotLoad, "_copy", cut_off)
            with pytest.raises(DatabaseUnavailable, match="Postgres data does not answer"):
                await hot.turn()
        assert "does not answer" in (await hot.problem() or "")
        assert await hot.applied() == []
        await hot.turn()
        assert await hot.rows() == [(1, "a")]
        assert await hot.problem() is None

    tell(story)


async def _next_generation(hot: Hot, job: Job, columns: Sequence[Column] = COLUMNS) -> Job:
    version = await hot.world.value(
        "INSERT INTO generation (dataset_id, version, state, lineage)"
        " VALUES (%s, gen_random_uuid(), 'building', 'y') RETURNING version::text",
        job.dataset,
    )
    await hot.declare(version, columns, "replace")
    return Job(hot.world, job.id, job.definition_id, job.dataset, version, job.operator)


async def _cut_over(hot: Hot, job: Job, to: Job) -> None:
    await hot.world.rows(
        "UPDATE generation SET state = 'retired' WHERE version = %s", job.generation
    )
    await hot.world.rows(
        "UPDATE generation SET state = 'current', changed_at = penstock_now() WHERE version = %s",
        to.generation,
    )
    for step in ("begin_hot", "await_serving"):
        await hot.world.database.fetch(step)


@pytest.mark.parametrize(
    "columns",
    [COLUMNS, (*COLUMNS, Column("more", "double")), (Column("id", "string"), Column("x", "int"))],
)
def test_readers_follow_a_cut_over_and_hold_nobody_up(
    tell: Tell, columns: Sequence[Column], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_same = columns is COLUMNS

    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "old"), key="a")
        await hot.turn()
        async with hot.reader() as early, hot.reader() as late:
            await early.execute(b"SELECT * FROM hot.alerts")
            later = await _next_generation(hot, job, columns)
            row = ("2" if columns[0].type == "string" else 2, *(None for _ in columns[1:]))
            await hot.publish(later, row, key="b", columns=columns)
            await hot.turn()
            # Its table is whole before it is current, and who follows it has been told.
            assert await hot.rows() == [(1, "old")]
            assert await hot.routed() == ["pending", "pending"]
            await _cut_over(hot, job, later)
            await hot.turn()
            assert (await hot.rows() == [row]) is is_same
            if not is_same:
                assert "holds up a change" in (await hot.problem() or "")
            # Who began before reads on as before, whether it has read or not.
            for reader in (early, late) if is_same else (early,):
                found = await reader.execute(b"SELECT * FROM hot.alerts")
                assert await found.fetchall() == [(1, "old")]
        await hot.turn()
        assert await hot.rows() == [row]
        assert await hot.problem() is None
        # The old table goes when its time is over.
        assert len(await hot.rows("SELECT name FROM hot_store.relation")) == 2
        monkeypatch.setattr(hot_tables, "GRACE_SECONDS", 0)
        await hot.turn()
        assert len(await hot.rows("SELECT name FROM hot_store.relation")) == 1
        assert await hot.rows() == [row]

    tell(story)


def test_a_cut_over_waits_for_the_rows_and_its_events_with_it(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "old"), key="a")
        await hot.turn()
        later = await _next_generation(hot, job)
        for key in "pq":
            await hot.publish(later, (2, key), key=key, partition=key)
        await _cut_over(hot, job, later)
        real = Applier._load_one

        async def half(self: Applier, load: Any, relation: Any, planned: Any) -> None:
            if planned.partition_key == "q":
                raise psycopg.DataError("it does not fit")
            await real(self, load, relation, planned)

        with monkeypatch.context() as patched:
            patched.setattr(Applier, "_load_one", half)
            await hot.turn()
        assert await hot.rows() == [(1, "old")]
        assert "'q' cannot be loaded: it does not fit" in (await hot.problem() or "")
        assert await hot.routed() == ["pending", "applying", "applying"]
        await hot.turn()
        assert await hot.rows() == [(2, "p"), (2, "q")]
        assert await hot.routed() == ["pending"] * 3
        # And back: the earlier one is served again at once.
        await _cut_over(hot, later, job)
        await hot.turn()
        assert await hot.rows() == [(1, "old")]

    tell(story)


def test_a_cut_over_during_a_load_holds_its_events(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "old"), key="a")
        await hot.turn()
        later = await _next_generation(hot, job)
        await hot.publish(later, (2, "new"), key="b")
        real = Applier._load_one

        async def meanwhile(self: Applier, *args: Any) -> None:
            await _cut_over(hot, job, later)
            await real(self, *args)

        with monkeypatch.context() as patched:
            patched.setattr(Applier, "_load_one", meanwhile)
            await hot.turn()
        assert await hot.rows() == [(1, "old")]
        assert await hot.routed() == ["pending", "applying"]
        await hot.turn()
        assert await hot.rows() == [(2, "new")]
        assert await hot.routed() == ["pending", "pending"]

    tell(story)


def test_a_table_that_is_made_again_is_served_when_it_is_whole(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        for key in "pq":
            await hot.publish(job, (1, key), key=key, partition=key)
        later = await _next_generation(hot, job)
        await hot.publish(later, (2, "new"), key="b")
        await _cut_over(hot, job, later)
        await hot.turn()
        with monkeypatch.context() as patched:
            patched.setattr(hot_tables, "GRACE_SECONDS", 0)
            await hot.turn()
        assert len(await hot.rows("SELECT name FROM hot_store.relation")) == 1
        await _cut_over(hot, later, job)
        hot.world.later(1)
        real = Applier._load_one

        async def half(self: Applier, load: Any, relation: Any, planned: Any) -> None:
            if planned.partition_key == "q":
                raise psycopg.DataError("it does not fit")
            await real(self, load, relation, planned)

        with monkeypatch.context() as patched:
            patched.setattr(Applier, "_load_one", half)
            await hot.turn()
        assert await hot.rows() == [(2, "new")]
        await hot.turn()
        assert await hot.rows() == [(1, "p"), (1, "q")]

    tell(story)


@pytest.mark.parametrize("dies", [None, "forget_hot", "compare_applied"])
@pytest.mark.parametrize("is_seen", [False, True])
def test_what_is_removed_while_another_is_current_does_not_come_back(
    tell: Tell, is_seen: bool, dies: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        for key in "pq":
            await hot.publish(job, (1, key), key=key, partition=key)
        await hot.turn()
        later = await _next_generation(hot, job)
        await hot.publish(later, (2, "new"), key="b")
        await _cut_over(hot, job, later)
        for _ in range(2 * is_seen):
            await hot.turn()
            assert await hot.rows() == [(2, "new")]
        await hot.world.rows("DELETE FROM publication WHERE partition_key = 'p'")
        await _cut_over(hot, later, job)
        real = Applier._ask

        async def until(self: Applier, statement: str, **asked: object) -> Any:
            if statement == dies:
                raise Died
            return await real(self, statement, **asked)

        if dies is not None:
            with monkeypatch.context() as patched, suppress(Died):
                patched.setattr(Applier, "_ask", until)
                await hot.turn()
        await hot.turn()
        assert await hot.rows() == [(1, "q")]
        assert await hot.behind() == 0

    tell(story)


def test_a_compare_undoes_no_removal_that_comes_meanwhile(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "a"), key="a", partition="p")
        await hot.turn()
        held = await hot.rows("SELECT generation, revision, stamp FROM hot_store.applied")
        asked = {
            "dataset": job.dataset,
            "position": "x",
            "generations": [str(held[0][0])],
            "keys": ["p"],
            "revisions": [held[0][1]],
            "stamps": [held[0][2]],
        }
        waiting = "SELECT FROM pg_stat_activity, pg_sleep(0.02) WHERE wait_event_type = 'Lock'"
        async with (
            await psycopg.AsyncConnection.connect(hot.world.dsn) as other,
            asyncio.timeout(60),
            asyncio.TaskGroup() as group,
        ):
            await other.execute(b"DELETE FROM publication")
            group.create_task(hot.world.database.fetch("compare_applied", asked))
            while not await hot.world.rows(waiting):
                pass
            await other.commit()
        assert await hot.behind() == 1
        await hot.turn()
        assert await hot.rows() == []
        assert await hot.behind() == 0

    tell(story)


def test_a_partition_that_cannot_be_loaded_holds_back_no_other(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "p"), key="p", partition="p")
        location = await hot.publish(job, (2, "q"), key="q", partition="q")
        file = Path(location.removeprefix("file://")) / "part-0.parquet"
        whole = file.read_bytes()
        file.write_bytes(b"no parquet")
        await hot.turn()
        assert await hot.rows() == [(1, "p")]
        assert await hot.routed() == ["pending", "applying"]
        assert "'q' cannot be loaded: The file cannot be read" in (await hot.problem() or "")
        file.write_bytes(whole)
        await hot.turn()
        assert await hot.rows() == [(1, "p"), (2, "q")]

    tell(story)


def test_a_file_that_unpacks_to_far_more_than_its_size_is_not_loaded(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "COPIED_BYTES_MIN", 10_000)

    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, *[(1, "x" * 1_000)] * 20_000, key="p", partition="p")
        await hot.publish(job, (2, "q"), key="q", partition="q")
        await hot.turn()
        assert await hot.rows() == [(2, "q")]
        assert await hot.routed() == ["applying", "pending"]
        assert "part-0.parquet unpacks to more than" in (await hot.problem() or "")

    tell(story)


def test_a_dataset_that_fails_after_a_long_time_leaves_the_others_more_of_it(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "a"), key="a")
        clock, tried = LeapingClock(), list[str]()

        async def long(self: Applier, tables: object, dataset: str) -> str:
            tried.append(dataset)
            clock.leapt += 100
            return "It cannot be loaded."

        monkeypatch.setattr(Applier, "_bring_forward", long)
        applier = hot.applier(clock=clock)
        for seconds, count in ((0, 1), (390, 1), (20, 2)):
            clock.leapt += seconds
            await applier.turn()
            assert len(tried) == count

    tell(story)


def test_what_lies_elsewhere_is_not_read(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        location = await hot.publish(job, (1, "p"), key="p")
        await hot.world.rows("ALTER TABLE publication DISABLE TRIGGER USER")
        await hot.world.rows(
            "UPDATE publication SET location = replace(location, 'datasets', 'elsewhere')"
        )
        await hot.world.rows("ALTER TABLE publication ENABLE TRIGGER USER")
        await hot.turn()
        assert "is no folder of an attempt" in (await hot.problem() or "")
        assert location

    tell(story)


def test_columns_grow_beside_the_rows_that_are_there(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        narrow = (Column("id", "int"), Column("level", "string"))
        job = await hot.job("append", narrow)
        await hot.publish(job, (1, "a"), key="a", columns=narrow)
        await hot.turn()
        await hot.rows("CREATE VIEW public.mine AS SELECT level FROM hot.alerts")
        wide = (*narrow, Column("x", "double"))
        await hot.declare(job.generation, wide, "append")
        await hot.publish(job, (2, "b", 1.5), key="b", columns=wide)
        await hot.turn()
        assert await hot.rows() == [(1, "a", None), (2, "b", 1.5)]
        # A wider type is another view, which somebody's own may depend on.
        wider = (Column("id", "bigint"), *wide[1:])
        await hot.declare(job.generation, wider, "append")
        await hot.turn()
        assert "Something of others depends on the view hot.alerts" in (await hot.problem() or "")
        await hot.rows("DROP VIEW public.mine")
        await hot.publish(job, (2**40, "c", None), key="c", columns=wider)
        await hot.turn()
        assert (await hot.rows())[-1] == (2**40, "c", None)
        # A DAG that declares less again reads as it did.
        await hot.declare(job.generation, narrow, "append")
        await hot.turn()
        assert (await hot.rows())[0] == (1, "a")

    tell(story)


def test_a_state_that_was_restored_is_what_the_tables_follow(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "p"), key="p", partition="p")
        await hot.publish(job, (1, "q"), key="q", partition="q")
        await hot.turn()
        await _keep(hot.world)
        await hot.publish(job, (2, "p"), key="p2", partition="p")
        await hot.publish(job, (3, "p"), key="p3", partition="p")
        await hot.publish(job, (3, "r"), key="r", partition="r")
        await hot.turn()
        await _restore(hot.world)
        # In the other history there is another second revision, and a later one than this.
        await hot.publish(job, (9, "p"), key="other", partition="p")
        await hot.turn()
        assert await hot.rows() == [(1, "q"), (9, "p")]
        assert await hot.behind() == 0
        assert await hot.routed() == ["pending"] * 3
        await hot.publish(job, (10, "p"), key="more", partition="p")
        await hot.turn()
        assert await hot.rows() == [(1, "q"), (10, "p")]

    tell(story)


@pytest.mark.parametrize("has_left", [False, True])
def test_after_a_restore_a_partition_may_begin_again(
    tell: Tell, has_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "q"), key="q", partition="q")
        await hot.turn()
        await _keep(hot.world)
        for number in range(3):
            await hot.publish(job, (number, "p"), key=f"p{number}", partition="p")
        await hot.turn()
        await _restore(hot.world)

        async def dies(*_: object, **__: object) -> None:
            raise Died

        with monkeypatch.context() as patched, suppress(Died):
            patched.setattr(Applier, "_load", dies)
            await hot.turn()
        assert await hot.behind() == 1
        for _ in range(has_left):
            await hot.turn()
            assert await hot.rows() == [(1, "q")]
        await hot.publish(job, (9, "p"), key="other", partition="p")
        await hot.turn()
        assert await hot.rows() == [(1, "q"), (9, "p")]
        assert await hot.behind() == 0

    tell(story)


TABLES = (
    *("task", "attempt", "event", "publication", "appended", "removed", "hot_partition"),
    *("hot_table", "generation_schema"),
)


async def _keep(world: World) -> None:
    for each in TABLES:
        await world.rows(f"DROP TABLE IF EXISTS kept_{each}")
        await world.rows(f"CREATE TABLE kept_{each} AS SELECT * FROM {each}")


async def _restore(world: World) -> None:
    async def work(connection: Connection) -> None:
        await connection.execute(b"SET LOCAL session_replication_role = replica")
        for each in TABLES:
            found = await connection.execute(
                b"SELECT string_agg(quote_ident(attname), ', ') AS names FROM pg_attribute"
                b" WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
                b" AND attgenerated = ''",
                [each],
            )
            row = await found.fetchone()
            assert row is not None
            names = row["names"]
            await connection.execute(f"DELETE FROM {each}".encode())
            await connection.execute(
                f"INSERT INTO {each} ({names}) OVERRIDING SYSTEM VALUE"
                f" SELECT {names} FROM kept_{each}".encode()
            )
            await connection.execute(f"DROP TABLE kept_{each}".encode())

    await world.database.transact(work)


@pytest.mark.parametrize("is_lost", [False, True])
def test_postgres_data_that_was_restored_or_lost_is_loaded_anew(
    tell: Tell, is_lost: bool, worlds: Worlds
) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "p"), key="p", partition="p")
        await hot.publish(job, (1, "q"), key="q", partition="q")
        await hot.turn()
        names = ("applied", "dataset", f"alerts__{await _name(hot)}")
        saved = {name: await hot.rows(f"TABLE hot_store.{name}") for name in names}
        await hot.publish(job, (2, "p"), key="p2", partition="p")
        await hot.publish(job, (2, "r"), key="r", partition="r")
        await hot.world.rows("DELETE FROM publication WHERE partition_key = 'q'")
        await hot.turn()
        if is_lost:
            hot.dsn = await worlds.empty()
        else:
            async with await psycopg.AsyncConnection.connect(hot.dsn) as connection:
                for name, rows in saved.items():
                    await connection.execute(f"DELETE FROM hot_store.{name}".encode())
                    for row in rows:
                        marks = ", ".join("%s" for _ in row)
                        values = [Jsonb(x) if isinstance(x, list) else x for x in row]
                        await connection.execute(
                            f"INSERT INTO hot_store.{name} VALUES ({marks})".encode(), values
                        )
        await hot.turn()
        assert await hot.rows() == [(2, "p"), (2, "r")]
        assert await hot.behind() == 0

    tell(story)


def test_all_of_it_is_loaded_again_when_asked_for(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("append")
        await hot.publish(job, (1, "a"), key="a")
        await hot.publish(job, (2, "b"), key="b", partition="p")
        await hot.turn()
        await hot.rows(f"DELETE FROM hot_store.alerts__{await _name(hot)} WHERE id = 1")
        await hot.rows(f"UPDATE hot_store.alerts__{await _name(hot)} SET level = 'wrong'")
        ((found),) = await hot.world.database.fetch("load_anew", {"dataset": job.dataset})
        assert found["partitions"] == 2
        await hot.turn()
        assert await hot.rows() == [(1, "a"), (2, "b")]
        # A table that somebody has dropped is made again.
        await hot.rows(f"DROP TABLE hot_store.alerts__{await _name(hot)}")
        await hot.world.database.fetch("load_anew", {"dataset": job.dataset})
        await hot.turn()
        assert await hot.rows() == [(1, "a"), (2, "b")]

    tell(story)


def test_a_reader_reads_and_does_nothing_else(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job("merge", keys=["id"])
        await hot.publish(job, (1, "a"), key="a", base_revision=0)
        await hot.turn()
        role = "SET ROLE penstock_reader; "
        async with await psycopg.AsyncConnection.connect(hot.dsn, autocommit=True) as connection:
            await connection.execute(b"SET ROLE penstock_reader")
            found = await connection.execute(b"SELECT * FROM hot.alerts WHERE id = 1")
            assert await found.fetchall() == [(1, "a")]
            # A query of the view is one of the table: its key is used.
            await connection.execute(b"SET enable_seqscan = off")
            found = await connection.execute(b"EXPLAIN SELECT * FROM hot.alerts WHERE id = 1")
            plan = "\n".join(row[0] for row in await found.fetchall())
            assert "Index Scan" in plan or "Bitmap" in plan, plan
        for wrong in (
            f"DELETE FROM hot_store.alerts__{await _name(hot)}",
            "UPDATE hot_store.pointer SET generation = gen_random_uuid()",
            "CREATE TABLE hot.x (y int)",
            "CREATE TABLE hot_store.x (y int)",
            "INSERT INTO hot_store.applied SELECT * FROM hot_store.applied",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await hot.rows(role + wrong)

    tell(story)


def test_the_name_of_another_installation_is_not_taken(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        await hot.turn()
        job = await hot.job()
        await hot.publish(job, (1, "a"), key="a")
        await hot.turn()
        await hot.rows("UPDATE hot_store.dataset SET dataset_id = gen_random_uuid()")
        await hot.world.rows("UPDATE hot_table SET is_served = false")
        await hot.turn()
        assert "of another installation" in (await hot.problem() or "")

    tell(story)


def test_many_partitions_are_several_transactions(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "PARTITIONS_MAX", 2)

    async def story(hot: Hot) -> None:
        job = await hot.job()
        for number in range(5):
            await hot.publish(job, (number, "x"), key=str(number), partition=str(number))
        await hot.turn()
        assert len(await hot.rows()) == 5
        positions = await hot.rows("SELECT count(DISTINCT position) FROM hot_store.applied")
        assert positions == [(3,)]

    tell(story)


def dag(columns: str, *, storage: str = "postgres", config: int = 1) -> str:
    return f"""
jobs:
  bell:
    activation: source
    source: {{kind: manual}}
    outputs: [rings]
  watch:
    runtime: process
    operator: a:b
    config: {{v: {config}}}
    inputs: [rings]
    outputs: [{{name: alerts, storage: {storage}, columns: {columns}}}]
"""


async def applied(hot: Hot, text: str, **other: str) -> Job:
    """Put a DAG in force; the job that writes the table, as it is now."""
    done_ = await Deployer(hot.world.database, **other).apply(parse(text, "dag.yaml"), text)
    assert isinstance(done_, DagApplied), done_
    (row,) = await hot.world.rows(
        "SELECT job.id, dag_job.definition_id, dataset.id::text AS dataset,"
        " dag_job.generation::text FROM dag_current JOIN dag_job USING (dag_version_id)"
        " JOIN job ON job.id = dag_job.job_id JOIN dataset ON dataset.job_id = job.id"
        " WHERE job.name = 'watch'"
    )
    return Job(hot.world, row["id"], row["definition_id"], row["dataset"], row["generation"], "a:b")


def test_a_dag_says_what_is_hot_and_of_which_columns(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await applied(hot, dag("{id: bigint, level: string}"))
        await hot.publish(job, (1, "a"), key="a")
        await hot.turn()
        assert await hot.rows() == [(1, "a")]
        # What is published stays readable, so its columns stay declared.
        with pytest.raises(InvalidInput, match="What alerts has published does not fit") as caught:
            await applied(hot, dag("{id: int, level: string}"))
        assert "change the `config` of watch" in caught.value.hint
        # More of them are no new generation; another definition is one, with a table of its own.
        same = await applied(hot, dag("{id: bigint, x: double, level: string}"))
        assert same.generation == job.generation
        await hot.turn()
        assert await hot.rows("SELECT id, x, level FROM hot.alerts") == [(1, None, "a")]
        later = await applied(hot, dag("{id: string}", config=2))
        assert later.generation != job.generation
        await hot.turn()
        assert len(await hot.rows("SELECT name FROM hot_store.relation")) == 2
        await Deployer(hot.world.database).rollback()
        await hot.turn()
        assert await hot.rows("SELECT id, level FROM hot.alerts") == [(1, "a")]
        await applied(hot, dag("{id: bigint, level: string}", storage="files"))
        await hot.turn()
        assert await hot.rows("SELECT to_regclass('hot.alerts')") == [(None,)]

    tell(story)


def test_a_cut_over_of_the_state_is_followed(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await applied(hot, dag("{id: bigint, level: string}"))
        await hot.publish(job, (1, "old"), key="a")
        await hot.turn()
        later = await applied(hot, dag("{id: bigint, level: string}", config=2))
        await hot.publish(later, (2, "new"), key="b")
        await hot.turn()
        assert await hot.rows() == [(1, "old")]
        await Deployer(hot.world.database).cut_over(later.dataset, force=True)
        await hot.turn()
        assert await hot.rows() == [(2, "new")]
        await Deployer(hot.world.database).rollback()
        await hot.turn()
        assert await hot.rows() == [(1, "old")]

    tell(story)


def test_without_a_postgres_for_tables_there_are_none(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        text = dag("{id: bigint}")
        with pytest.raises(InvalidInput, match="has storage: postgres"):
            await applied(hot, text, why_not_hot="Nowhere.")
        await applied(hot, dag("{id: bigint}", storage="files"), why_not_hot="Nowhere.")
        # One that was there, and is not any more, is said to be missing.
        job = await hot.job(name="other")
        await hot.publish(job, (1, "a"), key="a")
        applier = Applier(hot.world.database, None, Transfer(hot.root), root=hot.root)
        assert await applier.turn() is None
        assert "set `postgres_data`" in (await hot.problem() or "")
        assert (await hot.routed())[-1] == "applying"

    tell(story)


def test_what_was_published_while_that_changed_is_found(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job = await hot.job()
        await hot.publish(job, (1, "a"), key="a", partition="p")
        await hot.turn()
        # As whoever publishes leaves it who has begun before it was hot, or while it still was.
        await hot.publish(job, (2, "b"), key="b", partition="q")
        await hot.publish(job, (3, "c"), key="c", partition="p")
        await hot.world.rows("DELETE FROM hot_partition WHERE partition_key = 'q'")
        await hot.world.rows("UPDATE hot_partition SET wanted = applied")
        cold = await hot.world.job("cold")
        await hot.publish(cold, (1, "x"), key="x")
        await hot.world.rows("UPDATE event SET routed = 'applying'")
        await hot.turn()
        assert await hot.rows() == [(2, "b"), (3, "c")]
        assert await hot.routed() == ["pending"] * 4

    tell(story)


def test_a_key_that_no_index_holds_holds_back_its_own_partition(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        columns = (Column("id", "string"), Column("level", "string"))
        job = await hot.job("merge", columns, keys=["id"])
        long = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(60))
        fields: dict[str, Any] = {"columns": columns, "base_revision": 0}
        await hot.publish(job, (long, "a"), key="a", partition="p", **fields)
        await hot.publish(job, ("short", "b"), key="b", partition="q", **fields)
        await hot.turn()
        assert await hot.rows() == [("short", "b")]
        assert "'p' cannot be loaded: index row" in (await hot.problem() or "")
        assert await hot.routed() == ["applying", "pending"]

    tell(story)


def test_odd_values_are_loaded_and_those_that_postgres_lacks_hold_back_their_own_partition(
    tell: Tell,
) -> None:
    async def story(hot: Hot) -> None:
        kinds = ("bigint", "date", "timestamp", "array<double>")
        columns = [Column(name, kind) for name, kind in zip("idtn", kinds, strict=True)]
        job = await hot.job("append", columns)
        old = -100_000_000_000_000_000
        rows: list[Row] = [(1, -800_000, old, [1.0, float("nan"), None]), (2, 2_932_897, None, [])]
        for day, at in ((-(2**31), 0), (2**31 - 1, 0), (0, -(2**62))):
            key = f"{day} {at}"
            odd = (9, day, at, None)
            await hot.publish(job, odd, key=key, partition=key, columns=columns)
        await hot.publish(job, *rows, key="good", partition="z", columns=columns)
        await hot.turn()
        assert await hot.rows("SELECT i, d::text, t::text, n FROM hot.alerts ORDER BY 1") == [
            (1, "0222-09-04 BC", "1200-02-15 14:13:20+00 BC", [1.0, "NaN", None]),
            (2, "10000-01-01", None, []),
        ]
        assert await hot.routed() == ["applying"] * 3 + ["pending"]
        assert "out of range" in (await hot.problem() or "")
        # Rows that can be loaded take the place of those that cannot.
        await hot.world.rows("DELETE FROM publication WHERE partition_key <> 'z'")
        await hot.turn()
        assert await hot.problem() is None
        assert await hot.routed() == ["pending"] * 4

    tell(story)


def test_while_postgres_data_is_away_only_its_events_wait(tell: Tell) -> None:
    async def story(hot: Hot) -> None:
        job, cold = await hot.job(), await hot.world.job("cold")
        await hot.publish(job, (1, "a"), key="a")
        await hot.publish(cold, (1, "a"), key="b")
        away = hot.applier(dsn="host=/nowhere dbname=penstock_data")
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable, match="Postgres data does not answer"):
                await away.turn()
        assert await hot.routed() == ["applying", "pending"]
        (status,) = await hot.world.database.fetch("hot_status", {"dataset": job.dataset})
        assert (status["behind"], status["events"]) == (1, 1)
        assert "Postgres data does not answer" in status["problem"]
        await hot.turn()
        assert await hot.rows() == [(1, "a")]
        assert await hot.routed() == ["pending", "pending"]
        assert await hot.problem() is None

    tell(story)
