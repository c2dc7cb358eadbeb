"""The proof: workers, their JVMs, a dispatcher and the S3 server, killed at random with `kill -9`,
and the executors where there is a cluster.

The same partitions are computed in several rounds, by a chain of Spark jobs; what is in them
depends on the number in their keys, not on the round. Nobody disturbs the first round. In the
others a seeded plan kills processes on the way, and starts them again; and one worker stands still
until its tasks are those of others, and comes back. In the end every partition of every round is
published once, by the one task that completed; its files have the checksums of the first round, or
its rows are those, where nothing sorts them or the round is in them; and after a sweep the bucket
holds the folders that publications and the history name, and no others.

The first job runs in batches and leaves Spark through Arrow, the second runs partition by partition
and is written by Spark itself, the third has one plan for many partitions, and what the fourth
makes is written by Spark unsorted. The fifth divides what it makes, and all tasks of a round of the
sixth merge their rows into one partition.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.layout import attempt_of, place_of
from penstock.datasets.snapshot import FileContents, files, read, verify
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.client import Client
from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, PenstockError
from penstock.protocol.datasets import SnapshotPart
from penstock.store.s3.local import LocalS3
from tests.e2e.fleet import CLOCK
from tests.e2e.spark_cluster import SparkCluster
from tests.e2e.spark_fleet import SparkFleet, Victim, patiently, spark_fleet_of
from tests.sizes import SEED, SIZES

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)

PARTITIONS = SIZES.partitions_while_killed
ROUNDS = SIZES.rounds_of_kills
ROUND_SECONDS_MAX = 240.0 + 3 * PARTITIONS
SWEEPS_MAX = 30
FROZEN_SECONDS = 8.0
"""Longer than the jobs' heartbeat_timeout."""
DATASETS = ("readings", "totals", "ranking", "copies", "halves", "latest")
ROWS_OF = {
    "copies": ("number", "sensor", "value"),
    "halves": ("number", "sensor"),
    "latest": ("sensor", "day", "total"),
}
"""Of what is compared by its rows, the columns that are the same in every round."""
JOBS = ("measure", "add_up", "rank", "copy", "halve", "keep_latest")
FULL_DAYS = [day for day in range(PARTITIONS) if day % 10 != 3]
"""Those that have readings."""

SPARK = """
driver_memory = "1g"
parallel = 2
tiny = true
archive = false
arrow_bytes_max = "8KiB"
conf = {"spark.sql.shuffle.partitions" = "2"}
"""
SPARK_ON_A_CLUSTER = """
driver_memory = "1g"
parallel = 2
tiny = true
archive = false
arrow_bytes_max = "8KiB"
conf = {"spark.sql.shuffle.partitions" = "2", "spark.cores.max" = "1"}
"""
"""Each worker has an executor to itself."""
DAG = """
jobs:
  ingest:
    activation: source
    source: {kind: manual}
    outputs: [days]
  measure:
    runtime: spark
    operator: spark.sql
    config:
      # One day in ten has no readings.
      sql: >
        SELECT CAST(id AS INT) AS number,
               'sensor-' || pmod(xxhash64(id, day), 7) AS sensor,
               pmod(xxhash64(day, id), 10000) AS value
        FROM (SELECT id, CAST(substring(:partition_key, 4) AS INT) AS day FROM range(2000))
        WHERE day % 10 <> 3
      sort_by: [number]
    inputs: [ingest.days]
    outputs: [readings]
    coalesce: 8
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  add_up:
    runtime: spark
    operator: spark.sql
    config:
      sql: SELECT sensor, count(*) AS readings, sum(value) AS total FROM readings GROUP BY sensor
      sort_by: [sensor]
    inputs: [measure.readings]
    outputs: [totals]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  rank:
    runtime: spark
    operator: spark.sql
    config:
      sql: >
        SELECT _partition, sensor, total,
               rank() OVER (PARTITION BY _partition ORDER BY total DESC) AS place
        FROM totals
        WHERE readings > 250
      partition_wise: true
      sort_by: [sensor]
    inputs: [add_up.totals]
    outputs: [ranking]
    coalesce: 20
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  copy:
    runtime: spark
    operator: compact
    inputs: [measure.readings]
    outputs: [copies]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  halve:
    runtime: spark
    operator: spark.sql
    config:
      sql: SELECT :partition_key || '-' || number % 2 AS half, number, sensor FROM readings
      expect: [{check: number >= 0}]
    inputs: [measure.readings]
    outputs: [{name: halves, partition_by: half}]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  keep_latest:
    runtime: spark
    operator: spark.sql
    config:
      sql: >
        SELECT substring(:partition_key, 1, 2) AS round, sensor,
               CAST(substring(:partition_key, 4) AS INT) AS day, sum(value) AS total
        FROM readings GROUP BY sensor
    update: merge
    unique_key: [sensor]
    version_by: day
    inputs: [measure.readings]
    outputs: [{name: latest, partition_by: round}]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
"""


@dataclass(frozen=True, slots=True)
class Round:
    """The partitions of one round."""

    number: int

    def key(self, day: int) -> str:
        return f"{self.number:02d}-{day:04d}"

    def all_keys(self) -> list[str]:
        return [self.key(day) for day in range(PARTITIONS)]

    def published(self, dataset: str) -> tuple[list[str], int]:
        """The keys that there are in the end, and how often each was published."""
        match dataset:
            case "halves":
                return [f"{self.key(day)}-{half}" for day in FULL_DAYS for half in range(2)], 1
            case "latest":
                return [f"{self.number:02d}"], len(FULL_DAYS)
        return self.all_keys(), 1

    async def send(self, client: Client) -> None:
        for key in self.all_keys():
            tell = partial(client.trigger, "ingest", event_id=key, partition_key=key)
            await patiently(tell)

    async def done(self, fleet: SparkFleet) -> float:
        """Which share of its tasks is completed."""
        (found,) = await fleet.rows(
            """
            SELECT count(*) FILTER (WHERE status = 'completed') AS completed,
                   count(*) FILTER (WHERE status IN ('dead', 'cancelled')) AS lost
            FROM task WHERE starts_with(payload ->> 'partition_key', %s)
            """,
            f"{self.number:02d}-",
        )
        assert not found["lost"], await _lost(fleet)
        return float(found["completed"]) / (len(DATASETS) * PARTITIONS)

    async def until(self, fleet: SparkFleet, share: float) -> None:
        """Wait until so much of it is done."""
        began = CLOCK.monotonic()
        while (done := await self.done(fleet)) < share:
            left = f"seed {SEED}, round {self.number}: {done:.0%} of {share:.0%} is done"
            assert CLOCK.monotonic() - began < ROUND_SECONDS_MAX, left
            await CLOCK.sleep(0.1)


async def _lost(fleet: SparkFleet) -> str:
    rows = await fleet.rows(
        """
        SELECT DISTINCT attempt.reason FROM attempt JOIN task ON task.id = attempt.task_id
        WHERE task.status IN ('dead', 'cancelled') LIMIT 5
        """
    )
    return f"seed {SEED}: a task has no attempts left: {[each['reason'] for each in rows]}"


async def _rage(fleet: SparkFleet, this: Round, entropy: Entropy) -> tuple[Counter[str], int]:
    """Kill everything at least once, each when some random share of the round is done.

    Returns how often what was killed, and how many attempts were swept meanwhile.
    """
    there = fleet.victims()
    victims: list[Victim] = []
    while len(victims) < max(len(there), PARTITIONS // 20):
        victims += sorted(there, key=lambda _: entropy.random())
    shares = sorted(entropy.uniform(0.0, 0.8) for _ in victims)
    kills, swept = Counter[str](), 0

    async def kill(victim: Victim, entropy: Entropy, done: float) -> None:
        killed = await fleet.kill(victim, entropy)
        kills[killed] += 1
        _log.info("round %d: %s killed at %d %%", this.number, killed, 100 * done)

    # What comes next may die while what died before is still away.
    async with fleet.client() as client, asyncio.TaskGroup() as group:
        for number, (victim, share) in enumerate(zip(victims, shares, strict=True)):
            await this.until(fleet, share)
            await CLOCK.sleep(entropy.uniform(0.0, 0.5))
            fate = seeded_entropy(f"{SEED} round {this.number} kill {number}")
            group.create_task(kill(victim, fate, await this.done(fleet)))
            # What sweeps in the middle of all that takes nothing that anybody needs. It is refused
            # while the bucket is away.
            with suppress(DispatcherUnavailable, DispatcherRefused):
                swept += (await client.sweep(grace_seconds=0)).attempts
    return kills, swept


async def _checksums(fleet: SparkFleet, client: Client, this: Round) -> dict[str, object]:
    """What is published in a round, by dataset and day; the files are what their manifests say."""
    found: dict[str, object] = {}
    for dataset in DATASETS:
        snapshot = await patiently(partial(client.snapshot, dataset))
        of_round = f"{this.number:02d}"
        parts = [
            each
            for each in snapshot.parts
            if (each.partition_key or "").partition("-")[0] == of_round
        ]
        contents = await asyncio.to_thread(_verified, parts, fleet.transfer)
        keys, revision = this.published(dataset)
        assert [each.partition_key for each in parts] == keys, dataset
        assert {each.revision for each in parts} == {revision}, dataset
        for part, held in zip(parts, contents, strict=True):
            day = (part.partition_key or "").partition("-")[2]
            found[f"{dataset}/{day}"] = (
                await asyncio.to_thread(_rows, held, ROWS_OF[dataset], fleet.transfer)
                if dataset in ROWS_OF
                else [(each.rows, each.sha256) for each in held.files]
            )
    return found


def _rows(held: FileContents, columns: Sequence[str], transfer: Transfer) -> object:
    """What is in files, however it is cut and ordered."""
    tables = []
    for each in held.files:
        with transfer.open(each.location) as file:
            tables.append(parquet.ParquetFile(file).read(columns=list(columns)))
    if not tables:
        return []
    table = pa.concat_tables(tables)
    return table.sort_by([(name, "ascending") for name in table.column_names]).to_pydict()


def _verified(parts: Sequence[SnapshotPart], transfer: Transfer) -> Sequence[FileContents]:
    contents = read(parts, transfer)
    assert not list(verify(files(contents), transfer))
    return contents


async def _check_once(fleet: SparkFleet) -> None:
    """Every task was made once and has completed once, and that is what is published."""
    tasks = await fleet.rows(
        """
        SELECT job.name AS job, task.payload ->> 'partition_key' AS key,
               array_agg(DISTINCT attempt.number)
                   FILTER (WHERE attempt.outcome = 'completed') AS completed,
               array_agg(DISTINCT publication.attempt) AS published
        FROM task
        JOIN job ON job.id = task.job_id
        JOIN attempt ON attempt.task_id = task.id
        LEFT JOIN publication ON publication.task_id = task.id
        GROUP BY task.id, job.name
        """
    )
    made = Counter((each["job"], each["key"]) for each in tasks)
    assert made == Counter(
        (job, key)
        for number in range(ROUNDS + 1)
        for key in Round(number).all_keys()
        for job in JOBS
    )
    for each in tasks:
        assert len(each["completed"]) == 1, each
        if each["job"] == "keep_latest":
            continue  # All merge into one publication, whose revisions are counted elsewhere.
        is_empty = each["job"] == "halve" and int(each["key"][3:]) not in FULL_DAYS
        assert each["published"] == ([None] if is_empty else each["completed"]), each


async def _check_swept(fleet: SparkFleet, client: Client) -> int:
    """Sweep; returns how many attempts were swept. Then only what is published is there."""
    published: set[str] = set()
    for dataset in DATASETS:
        snapshot = await patiently(partial(client.snapshot, dataset))
        published |= {place_of(each.location) or "" for each in snapshot.parts}
    swept, there, named = 0, {""}, published
    for _ in range(SWEEPS_MAX):
        try:
            swept += (await client.sweep(grace_seconds=0)).attempts
        except DispatcherRefused as error:
            raise AssertionError(error.message) from error
        there = await asyncio.to_thread(lambda: set(_folders(fleet)))
        # What a merge has replaced, and a snapshot of the history shows, or the next one will.
        shown = await fleet.rows(
            """
            SELECT place FROM (
                SELECT place FROM table_part UNION SELECT place FROM publication_log
            ) AS logged
            WHERE penstock_is_shown(place)
            """
        )
        named = published | {each["place"] for each in shown}
        if there == named:
            break
        # The clock of the bucket is only good to a second.
        await CLOCK.sleep(1.0)
    assert there == named, f"seed {SEED}: {sorted(there ^ named)[:10]}"
    return swept


def _folders(fleet: SparkFleet) -> Iterator[str]:
    """The folders of attempts in the bucket, and of each partition that one has made of many."""
    for each in fleet.transfer.list(f"{fleet.bucket}/datasets"):
        parts = each.name.split("/")
        if len(parts) > 4 and attempt_of(parts[3]) is not None:
            yield "/".join(parts[:-1] if parts[2] == "~many" else parts[:4])
    for each in fleet.transfer.list(f"{fleet.bucket}/scratch"):
        yield f"scratch/{each.name.partition('/')[0]}"


async def _settled(fleet: SparkFleet) -> None:
    """Wait until nothing is left to be told, to readers without Postgres either."""
    began = CLOCK.monotonic()
    while True:
        (left,) = await fleet.rows(
            """
            SELECT (SELECT count(*) FROM outbox) AS outbox,
                   (SELECT count(*) FROM publication
                    WHERE projected < revision AND NOT starts_with(location, 'range:')) AS untold
            """
        )
        if not any(left.values()):
            return
        assert CLOCK.monotonic() - began < 120, f"seed {SEED}: {left}"
        await CLOCK.sleep(0.25)


async def _proof(fleet: SparkFleet) -> None:
    async with fleet.client() as client:
        await patiently(lambda: client.apply(DAG))
        calm = Round(0)
        began = CLOCK.monotonic()
        await calm.send(client)
        await calm.until(fleet, 1.0)
        _log.info("seed %d: undisturbed in %.1f s", SEED, CLOCK.monotonic() - began)
        expected = await _checksums(fleet, client, calm)
        # There is something to compare, and nothing in some.
        assert expected["readings/0003"] == []
        assert expected["readings/0000"]
        assert expected["halves/0000-1"]
        assert expected["latest/"]
        kills, swept = Counter[str](), 0
        for number in range(1, ROUNDS + 1):
            this = Round(number)
            entropy = seeded_entropy(f"{SEED} round {number}")
            async with asyncio.TaskGroup() as group:
                rage = group.create_task(_rage(fleet, this, entropy))
                frozen = seeded_entropy(f"{SEED} frozen {number}")
                group.create_task(fleet.freeze(frozen, seconds=FROZEN_SECONDS))
                await this.send(client)
            killed, gone = rage.result()
            kills, swept = kills + killed, swept + gone
            await this.until(fleet, 1.0)
            assert await _checksums(fleet, client, this) == expected, f"seed {SEED}, round {number}"
        await _settled(fleet)
        await _check_once(fleet)
        swept += await _check_swept(fleet, client)
        await _check_once(fleet)
    _log.info("seed %d: killed %s, ended by themselves %s", SEED, dict(kills), dict(fleet.ended))
    _log.info("seed %d: %d swept, %.0f s", SEED, swept, CLOCK.monotonic() - began)


TIMEOUT = int((ROUNDS + 1) * ROUND_SECONDS_MAX + 300)


@pytest.mark.proof
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_partitions_are_published_once_whatever_is_killed(tmp_path: Path) -> None:
    asyncio.run(_killed(tmp_path, None))


@pytest.mark.proof(meanwhile="test_partitions_are_published_once_whatever_is_killed")
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_partitions_of_a_cluster_are_published_once_whatever_is_killed(tmp_path: Path) -> None:
    asyncio.run(_killed(tmp_path, SparkCluster(tmp_path / "cluster")))


async def _killed(folder: Path, cluster: SparkCluster | None) -> None:
    server = LocalS3(folder / "s3", grace_seconds=1)
    try:
        await server.start()
    except PenstockError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no S3 server: {error.message} {error.hint}")
    try:
        if cluster is None:
            async with spark_fleet_of(folder, server, workers=2, spark=SPARK) as fleet:
                await _proof(fleet)
                await fleet.stop()
            return
        async with (
            cluster,
            spark_fleet_of(
                folder,
                server,
                workers=2,
                spark=SPARK_ON_A_CLUSTER,
                master=cluster.url,
                executors=cluster.executors,
            ) as fleet,
        ):
            await _proof(fleet)
            await fleet.stop()
    finally:
        await server.stop()
