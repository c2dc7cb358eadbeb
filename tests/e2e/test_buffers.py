"""The proof of buffered datasets: sinks, workers, dispatchers and a Postgres, killed at random.

Each task publishes some batches of rows into a dataset that is appended to, and into one that is
merged; its first attempts may fail after that, or publish other rows. What is there in the end is
the sum of what the attempts have published that completed: every key of it, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import psycopg
import pyarrow.parquet as pq
import pytest
from psycopg.rows import dict_row

from penstock.kernel.entropy import seeded_entropy
from tests.e2e.command import penstock
from tests.e2e.fleet import CLOCK, Fleet, fleet_of
from tests.e2e.test_dispatcher_killed import _rage, _rows, _say
from tests.e2e.test_up import Up
from tests.e2e.test_up import _until as until_up
from tests.e2e.test_up import _up as up_of
from tests.sizes import SEED, SIZES

_log = logging.getLogger(__name__)

SECONDS_MAX = 300.0
ROWS = 30
MODULE = """
import os, pathlib, random

def publish(task):
    rows = [{"id": f"{task.partition_key}-{n}", "value": n, "attempt": task.attempt}
            for n in range(ROWS)]
    task.buffer("log", rows[:10], id="first")
    task.buffer("log", rows[10:] + [{"id": 7}], id="second")
    task.buffer("latest", [{**row, "id": f"k{n % 7}"} for n, row in enumerate(rows)], id="all")
    if task.attempt == 1 and random.random() < 0.3:
        raise ValueError("again, with rows of another attempt")
    (pathlib.Path(task.config["folder"]) / task.partition_key).write_text(str(task.attempt))
""".replace("ROWS", str(ROWS))
DAG = """
jobs:
  ingest: {activation: source, source: {kind: manual}, outputs: [hours]}
  publish:
    runtime: process
    operator: proof:publish
    config: {folder: "FOLDER"}
    inputs: [ingest.hours]
    buffers: [log, latest]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  write_log:
    runtime: sink
    operator: sink.write
    update: append
    config: {max_age: 200ms, max_rows: 100}
    outputs: [{name: log, buffered: true, columns: COLUMNS}, log_rejected]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
  write_latest:
    runtime: sink
    operator: sink.write
    update: merge
    unique_key: [id]
    config: {max_age: 200ms, max_rows: 100}
    outputs: [{name: latest, buffered: true, columns: COLUMNS}, latest_rejected]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
""".replace("COLUMNS", "{id: string, value: int, attempt: int}")
LEFT = """
    SELECT (SELECT count(*) FROM task JOIN job ON job.id = task.job_id
            WHERE job.name = 'publish' AND status = 'completed') AS published,
           (SELECT count(*) FROM task WHERE status <> 'completed') AS unfinished,
           (SELECT count(*) FROM buffer_batch WHERE state <> 'done') AS batches
"""


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(SEED, SEED + SIZES.fleets_of_sinks))
def test_what_was_accepted_is_written_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    asyncio.run(_proved(tmp_path, seed))


async def _proved(folder: Path, seed: int) -> None:
    tasks = SIZES.tasks_that_publish
    noted = folder / "completed"
    noted.mkdir()
    fleet = fleet_of(folder, dispatchers=2, workers=2, sinks=3, modules={"proof.py": MODULE})
    async with fleet as installation:
        entropy = seeded_entropy(seed)
        source = DAG.replace("FOLDER", str(noted))
        await _say(installation.public_urls(), "/v1/dag", {"source": source}, entropy)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            rage = group.create_task(_rage(installation, seeded_entropy(f"{seed} rage"), over))
            for number in range(tasks):
                event = {
                    "event_id": f"e{number}",
                    "dataset": "hours",
                    "partition_key": f"p{number:03d}",
                }
                urls = installation.internal_urls()
                await _say(urls, "/internal/events", {"events": [event]}, entropy)
                await CLOCK.sleep(entropy.uniform(0.0, 0.5))
            over.set()
            kills = await rage
        await _settled(installation, tasks)
        await _check(installation, noted, tasks=tasks)
        _log.info("seed %d: killed %s", seed, dict(kills))


async def _settled(fleet: Fleet, tasks: int) -> None:
    began = CLOCK.monotonic()
    while True:
        (left,) = await _rows(fleet, LEFT)
        if left == {"published": tasks, "unfinished": 0, "batches": 0}:
            return
        assert CLOCK.monotonic() - began < SECONDS_MAX, left
        await CLOCK.sleep(0.25)


async def _check(fleet: Fleet, noted: Path, *, tasks: int) -> None:
    attempts = await _rows(
        fleet,
        "SELECT task.payload ->> 'partition_key' AS key, task.id, attempt.number"
        " FROM task JOIN job ON job.id = task.job_id"
        " JOIN attempt ON attempt.task_id = task.id AND attempt.outcome = 'completed'"
        " WHERE job.name = 'publish'",
    )
    completed = {each["key"]: each["number"] for each in attempts}
    assert len(completed) == _count(noted) == tasks
    rows = await _published(fleet, "log")
    # Of every task each row, of the attempt that has completed, and once.
    assert Counter((row["id"], row["attempt"]) for row in rows) == Counter(
        (f"{key}-{number}", attempt) for key, attempt in completed.items() for number in range(ROWS)
    )
    rejected = await _published(fleet, "log_rejected")
    assert Counter(row["task"] for row in rejected) == Counter(each["id"] for each in attempts)
    assert await _published(fleet, "latest_rejected") == []
    # Of every key the row of the batch that was accepted last, and of that its last one.
    (last,) = await _rows(
        fleet,
        "SELECT batch.attempt, task.payload ->> 'partition_key' AS key FROM buffer_batch AS batch"
        " JOIN dataset ON dataset.id = batch.dataset_id JOIN task ON task.id = batch.task_id"
        " WHERE dataset.name = 'latest' ORDER BY batch.seq DESC LIMIT 1",
    )
    latest = await _published(fleet, "latest")
    assert Counter(row["id"] for row in latest) == Counter(f"k{number}" for number in range(7))
    assert {row["id"]: row["value"] for row in latest} == {
        f"k{number % 7}": number for number in range(ROWS)
    }
    assert {row["attempt"] for row in latest} == {last["attempt"]}


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def _published(fleet: Fleet, dataset: str) -> list[dict[str, Any]]:
    found = await _rows(
        fleet,
        "SELECT coalesce(part.location, publication.location) AS location"
        " FROM publication JOIN dataset ON dataset.id = publication.dataset_id"
        " LEFT JOIN part ON publication.mode = 'append'"
        "  AND part.dataset_id = publication.dataset_id"
        "  AND part.generation = publication.generation"
        f" WHERE dataset.name = '{dataset}'",
    )
    return [row for each in found for row in _rows_below(each["location"])]


def _rows_below(location: str) -> list[dict[str, Any]]:
    folder = Path(unquote(urlsplit(location).path))
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


PAGE = Path(__file__).parents[2] / "docs" / "buffers.md"
TITLE = "From a webhook to a table"
QUESTION = "SELECT a.id, m.value FROM alerts a JOIN measures m ON a.sensor = m.sensor"


@pytest.mark.timeout(600)
def test_a_webhook_feeds_alerts_that_are_joined_with_parquet(tmp_path: Path) -> None:
    """The DAG of the page, typed, with a worker that runs functions, sinks and Spark."""
    page = PAGE.read_text().split(f"## {TITLE}\n")[1]
    (dag,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (module,) = re.findall(r"```python\n(# alerting.py.*?)```", page, re.DOTALL)
    assert f'penstock query "{QUESTION}"' in page
    code = tmp_path / "code"
    code.mkdir()
    (code / "alerting.py").write_text(module)
    (code / "dag.yaml").write_text(dag)
    with up_of(tmp_path, str(code / "dag.yaml")) as up:
        words = up.process.args
        assert isinstance(words, list)
        up.ask("trigger", "readings", "--partition", "p1")
        hook = f"http://127.0.0.1:{words[words.index('--webhook-port') + 1]}/alerts"
        for level in ("warning", "loud"):
            said = {"id": f"a-{level}", "sensor": "s1", "level": level, "amount": "2.50"}
            answers: list[httpx.Response] = []

            def is_taken(said: dict[str, str] = said, answers: list[Any] = answers) -> bool:
                with contextlib.suppress(httpx.TransportError):
                    answers.append(httpx.post(hook, json=said, timeout=10))
                return bool(answers) and answers[-1].is_success

            until_up(is_taken, up)
        until_up(lambda: _answers(up, "SELECT id FROM alerts") == [{"id": "a-warning"}], up)
        until_up(lambda: _answers(up, QUESTION) == [{"id": "a-warning", "value": 1.0}], up)
        # It is a table of Postgres, too: without what a sink keeps of its own in the files.
        shown = json.loads(up.ask("dataset", "show", "alerts", "--json"))["table"]
        assert (shown["is_served"], shown["behind"], shown["problem"]) == (True, 0, None)
        with psycopg.connect(shown["url"], row_factory=dict_row) as connection:
            (found,) = connection.execute("SELECT * FROM hot.alerts").fetchall()
        assert {name: str(value) for name, value in found.items() if not name.startswith("_")} == {
            "id": "a-warning",
            "sensor": "s1",
            "level": "warning",
            "amount": "2.50",
            "at": "None",
        }
        explained = [{"id": "a-warning", "level": "warning", "value": 1.0}]
        until_up(lambda: _answers(up, "SELECT id, level, value FROM explained") == explained, up)
        (row,) = json.loads(up.ask("rejected", "list", "alerts", "--json"))["rows"]
        assert "'loud' does not satisfy" in row["reason"]
        name = f"{row['sequence']}:{row['place']}"
        assert json.loads(up.ask("rejected", "show", "alerts", name))["id"] == "a-loud"
        assert "1 row of 1 dropped" in up.ask("rejected", "drop", "alerts", name)
        assert json.loads(up.ask("rejected", "list", "alerts", "--json"))["rows"] == []
        (shown,) = json.loads(up.ask("rejected", "list", "--json"))["buffers"]
        assert (shown["dataset"], shown["job"]) == ("alerts", "write_alerts")


def _answers(up: Up, sql: str) -> list[dict[str, Any]] | None:
    """The rows of a query; None if it cannot be answered yet."""
    done = penstock("query", sql, "--format", "jsonl", environment={"PENSTOCK_URL": up.url})
    return None if done.returncode else [json.loads(line) for line in done.stdout.splitlines()]
