"""The proof: three dispatchers, four workers and a Postgres, killed at random with `kill -9`.

Events go in doubled and shuffled while a seeded plan kills processes and starts them again. In the
end every (job, partition) has one completed task and one committed output, from the attempt that
completed it; no event is lost; and the outbox is empty.

The same for wake-ups through the bucket and through SQS, with fewer events and processes.

Meanwhile partitions of a table are made again and again, its generations are cut over and rolled
back, everything that may be is swept, and two readers look: see `table_reader`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.kernel.entropy import Entropy, new_id, seeded_entropy, system_entropy
from penstock.protocol.base import WORKER_HEADER
from penstock.protocol.identity import Identities
from penstock.settings import Wakeups
from tests.e2e import table_reader
from tests.e2e.fleet import CLOCK, SECRET, Fleet, fleet_of
from tests.e2e.table_reader import TableReader
from tests.integration.aws_server import AwsServer
from tests.sizes import IS_PROOF, SEED, SIZES

_log = logging.getLogger(__name__)

SECONDS_MAX = 600.0
MODULE = '''
import json
import logging
import pathlib

def note(task):
    """Write down who made this, and from what."""
    said = {"job": task.job, "partition": task.partition_key, "attempt": task.attempt,
            "task": task.id, "inputs": {n: g.location for n, g in task.inputs.items()}}
    for output in task.outputs.values():
        (pathlib.Path(output.path) / "made.json").write_text(json.dumps(said))
'''
DAG = (
    """
jobs:
  ingest:
    activation: source
    source: {kind: manual}
    outputs: [hours]
  clean:
    runtime: process
    operator: proof:note
    inputs: [ingest.hours]
    outputs: [sales]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  totals:
    runtime: process
    operator: proof:note
    inputs: [clean.sales]
    outputs: [totals]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  outliers:
    runtime: process
    operator: proof:note
    inputs:
      - from: clean.sales
        where: partition_key not glob "*7"
    outputs: [outliers]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
"""
    + table_reader.DAG
)
STARTING = 128 + signal.SIGTERM
ROUNDS = 3
"""How often the partitions of the table are made in each of its generations."""
KEYS = [f"t{number}" for number in range(6)]


async def _say(urls: Sequence[str], path: str, body: object, entropy: Entropy) -> dict[str, Any]:
    """Say something to some dispatcher, until one has answered."""
    identity = Identities(SECRET).identity("the test")
    headers = {WORKER_HEADER: identity.name, "Authorization": f"Bearer {identity.token}"}
    began = CLOCK.monotonic()
    async with httpx.AsyncClient(headers=headers, timeout=20) as client:
        while CLOCK.monotonic() - began < 120:
            try:
                answer = await client.post(entropy.choice(urls) + path, json=body)
            except httpx.TransportError:
                await CLOCK.sleep(0.1)
                continue
            # A dispatcher that has no time for it says so, as it does to every client.
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                assert answer.status_code == 200, answer.text
                found: dict[str, Any] = answer.json()
                return found
            await CLOCK.sleep(0.1)
    raise AssertionError(f"no dispatcher has answered {path}")


async def _send(fleet: Fleet, entropy: Entropy, *, count: int) -> None:
    """So many events, each once or twice, in a random order, a few at a time."""
    numbers = [number for number in range(count) for _ in range(1 + (entropy.random() < 0.2))]
    numbers.sort(key=lambda _: entropy.random())
    while numbers:
        some = [numbers.pop() for _ in range(min(len(numbers), entropy.randrange(1, 30)))]
        events = [
            {"event_id": f"e{number}", "dataset": "hours", "partition_key": f"p{number:05d}"}
            for number in some
        ]
        answer = await _say(fleet.internal_urls(), "/internal/events", {"events": events}, entropy)
        assert all(each["outcome"] in {"new", "duplicate"} for each in answer["results"])
        await CLOCK.sleep(entropy.uniform(0.0, 0.2))


async def _move(fleet: Fleet, reader: TableReader, entropy: Entropy) -> None:
    """Publish the partitions of the table again and again; cut it over, and roll it back."""
    public, number = fleet.public_urls(), 0
    for version, path, body in (
        (1, "/v1/dag", {"source": DAG}),
        (2, "/v1/dag", {"source": DAG.replace("version: 1", "version: 2")}),
        (1, "/v1/dag/rollback", {"version": 1}),
    ):
        await _say(public, path, body, entropy)
        for _ in range(ROUNDS):
            number += 1
            events = [
                {"event_id": f"{key}-{number}", "dataset": "news", "partition_key": key}
                for key in KEYS
            ]
            await _say(fleet.internal_urls(), "/internal/events", {"events": events}, entropy)
            await CLOCK.sleep(entropy.uniform(0.5, 1.5))
            await _say(public, "/v1/sweep", {"grace_seconds": 0}, entropy)
        await reader.until_read(version)


async def _rage(fleet: Fleet, entropy: Entropy, over: asyncio.Event) -> Counter[str]:
    """Kill something every second or so, everything at least once, and start it again."""
    kills: Counter[str] = Counter()
    victims: list[str] = []
    is_done = False
    while not is_done:
        await CLOCK.sleep(entropy.uniform(0.5, 2.5))
        victims = victims or sorted((*fleet.names(), "postgres"), key=lambda _: entropy.random())
        victim = victims.pop()
        is_done = over.is_set() and not victims
        kills[victim.partition("-")[0]] += 1
        if victim == "postgres":
            await fleet.kill_postgres()
            continue
        await fleet.kill(victim)
        await CLOCK.sleep(entropy.uniform(0.0, 1.5))
        await fleet.start(victim)
    return kills


async def _rows(fleet: Fleet, statement: str) -> list[dict[str, Any]]:
    for _ in range(100):
        try:
            async with await psycopg.AsyncConnection.connect(
                fleet.postgres.dsn, row_factory=dict_row, connect_timeout=5
            ) as connection:
                return await (await connection.execute(statement.encode())).fetchall()
        except psycopg.OperationalError:
            await CLOCK.sleep(0.1)
    raise AssertionError("Postgres does not answer")


UNFINISHED = """
    SELECT (SELECT count(*) FROM event WHERE routed = 'pending') AS events,
           -- A table that is rolled back cancels what still runs for the generation that it leaves.
           (SELECT count(*) FROM task JOIN job ON job.id = task.job_id
            WHERE status <> 'completed'
              AND (job.name, status) <> ('halves', 'cancelled')) AS tasks,
           (SELECT count(*) FROM task JOIN job ON job.id = task.job_id
            WHERE job.name <> 'halves') AS made, (SELECT count(*) FROM outbox) AS outbox
"""


async def _settled(fleet: Fleet, tasks: int) -> None:
    began = CLOCK.monotonic()
    while True:
        (left,) = await _rows(fleet, UNFINISHED)
        if left == {"events": 0, "tasks": 0, "made": tasks, "outbox": 0}:
            return
        assert CLOCK.monotonic() - began < SECONDS_MAX, f"seed {SEED}: {left}"
        await CLOCK.sleep(0.25)


async def _check(fleet: Fleet, *, events: int) -> None:
    partitions = {f"p{number:05d}" for number in range(events)}
    expected = {
        "clean": ("sales", partitions),
        "totals": ("totals", partitions),
        "outliers": ("outliers", {each for each in partitions if not each.endswith("7")}),
    }
    tasks = await _rows(
        fleet,
        """
        SELECT task.id, job.name AS job, task.payload ->> 'partition_key' AS partition,
               task.attempt, count(attempt.number) FILTER (WHERE attempt.outcome = 'completed')
                   AS completions, max(attempt.number) FILTER (WHERE attempt.outcome = 'completed')
                   AS completed
        FROM task JOIN job ON job.id = task.job_id JOIN attempt ON attempt.task_id = task.id
        WHERE job.name <> 'halves'
        GROUP BY task.id, job.name
        """,
    )
    made = Counter((each["job"], each["partition"]) for each in tasks)
    assert made == Counter((job, key) for job, (_, keys) in expected.items() for key in keys)
    assert all(each["completions"] == 1 for each in tasks)
    assert all(each["completed"] == each["attempt"] for each in tasks)
    published = await _rows(
        fleet,
        """
        SELECT dataset.name AS dataset, publication.*
        FROM publication JOIN dataset ON dataset.id = publication.dataset_id
        WHERE dataset.name <> 'halves'
        """,
    )
    outputs = Counter((each["dataset"], each["partition_key"]) for each in published)
    assert outputs == Counter((name, key) for name, keys in expected.values() for key in keys)
    by_id = {each["id"]: each for each in tasks}
    for each in published:
        task = by_id[each["task_id"]]
        assert each["revision"] == 1
        assert each["attempt"] == task["completed"]
        said = json.loads((_path(each["location"]) / "made.json").read_text())
        assert (said["task"], said["attempt"]) == (each["task_id"], each["attempt"])
        assert said["partition"] == each["partition_key"]
        for location in said["inputs"].values():
            assert location is None or (_path(location) / "made.json").exists()


def _path(location: str) -> Path:
    return Path(unquote(urlsplit(location).path))


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_everything_is_done_once_whatever_is_killed(tmp_path: Path) -> None:
    modules = {"proof.py": MODULE, "halves.py": table_reader.MODULE}
    fleet = fleet_of(tmp_path, dispatchers=3, workers=4, modules=modules)
    asyncio.run(_proved(fleet, events=SIZES.events_while_killed))


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wakeups", [Wakeups.BUCKET, Wakeups.SQS])
def test_everything_is_done_once_however_workers_are_woken(
    tmp_path: Path, wakeups: Wakeups, aws_server: AwsServer
) -> None:
    told: dict[str, Any] = {"wakeups": wakeups}
    if wakeups is Wakeups.SQS:
        prefix = f"{new_id(system_entropy(), characters=12)}-"
        told |= {"aws_endpoint": aws_server.endpoint, "aws_region": "us-east-1"}
        told |= {"sqs_prefix": prefix}
    fleet = fleet_of(
        tmp_path,
        dispatchers=2,
        workers=2,
        modules={"proof.py": MODULE, "halves.py": table_reader.MODULE},
        told=told,
        variables={"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest"},
    )
    asyncio.run(_proved(fleet, events=SIZES.events_of_other_senders, is_read=IS_PROOF))


async def _proved(
    installation: AbstractAsyncContextManager[Fleet], *, events: int, is_read: bool = True
) -> None:
    entropy = seeded_entropy(SEED)
    async with installation as fleet:
        public = fleet.public_urls()
        await _say(public, "/v1/dag", {"source": DAG}, seeded_entropy(SEED))
        reader = TableReader(public)
        sevens = sum(f"p{number:05d}".endswith("7") for number in range(events))
        tasks = 3 * events - sevens
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            rage = group.create_task(_rage(fleet, seeded_entropy(f"{SEED} rage"), over))
            moving = [_move(fleet, reader, seeded_entropy(f"{SEED} move"))] if is_read else []
            readers = [
                group.create_task(reader.read_on(mode, seeded_entropy(f"{SEED} {mode}")))
                for mode in (table_reader.MODES if is_read else ())
            ]
            await asyncio.gather(_send(fleet, entropy, count=events), *moving)
            over.set()
            kills = await rage
            for each in readers:
                each.cancel()
        await _settled(fleet, tasks)
        await _check(fleet, events=events)
        await _say(public, "/v1/sweep", {"grace_seconds": 0}, entropy)
        if is_read:
            await reader.check()
        for name in fleet.names():
            # Whoever was killed last may still be starting, and then has nothing to end in order.
            assert await fleet.stop(name) in {0, STARTING}, fleet.said(name)
        _log.info("seed %d: %d tasks, killed: %s", SEED, tasks, dict(kills))
        _log.info("%d reads of %d snapshots", reader.reads, len(reader.seen))
