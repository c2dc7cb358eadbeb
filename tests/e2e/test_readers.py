"""Others read what is published: DuckDB, pandas and plain Spark, by the list of files alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from penstock.dispatcher.client import Client
from penstock.kernel.errors import DispatcherUnavailable
from penstock.runtimes.spark.java import find_java, packaged_java, spark_home_of
from tests.e2e.command import penstock
from tests.e2e.fleet import CLOCK, fleet_of

MODULE = '''
def squares(inputs, context):
    """So many numbers, with their squares."""
    wanted = context.payload
    numbers = context.session.range(wanted["first"], wanted["first"] + wanted["rows"])
    return numbers.selectExpr("id AS number", "id * id AS square", "concat('n', id) AS name")
'''
DAG = """
jobs:
  told:
    activation: source
    source: {kind: manual}
    outputs: [orders]
  make:
    runtime: spark
    operator: spark.python
    config:
      transform: squares:squares
      sort_by: [number]
    inputs: [told.orders]
    outputs: [squares]
"""
SETTINGS = """
[runtimes.spark]
driver_memory = "1g"
archive = false
"""
PLAIN_SPARK = """
import json, sys
from pyspark.sql import SparkSession

session = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
           .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
           .getOrCreate())
print(json.dumps([row.asDict() for row in session.read.parquet(*sys.argv[1:]).collect()]))
session.stop()
"""
# What was told of the partitions, in this order: c is told of twice, so its first rows are gone.
TOLD = [("a", 1, 3), ("b", 0, 0), ("c", 100, 5), ("c", 200, 2)]
PUBLISHED = [
    {"number": number, "square": number * number, "name": f"n{number}"}
    for number in (1, 2, 3, 200, 201)
]


def _numbered(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: row["number"])


async def _publish(client: Client) -> None:
    for _ in range(600):
        with suppress(DispatcherUnavailable):
            await client.apply(DAG)
            break
        await CLOCK.sleep(0.1)
    for number, (key, first, rows) in enumerate(TOLD):
        payload = {"first": first, "rows": rows}
        await client.trigger("told", event_id=f"e{number}", partition_key=key, payload=payload)
        status = await client.wait(timeout_seconds=200)
        assert not any(each.dead for each in status.jobs), await client.tasks(status="dead")


def _read_by_spark(paths: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    java = find_java("", os.environ, packaged=packaged_java())
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_SPARK, *paths],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "JAVA_HOME": str(spark_home_of(java, folder))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.timeout(600)
def test_others_read_exactly_what_is_published(tmp_path: Path) -> None:
    async def main() -> None:
        modules = {"squares.py": MODULE, "penstock.toml": SETTINGS}
        async with fleet_of(tmp_path, dispatchers=1, workers=1, modules=modules) as fleet:
            url = fleet.public_urls()[0]
            async with Client(url) as client:
                await _publish(client)
            await asyncio.to_thread(_check, url, tmp_path)
            for name in reversed(fleet.names()):
                assert await fleet.stop(name) == 0, fleet.said(name)

    asyncio.run(main())


def _check(url: str, folder: Path) -> None:
    listed = penstock("dataset", "files", "squares", "--json", "--url", url)
    assert listed.returncode == 0, listed.stderr
    said = json.loads(listed.stdout)
    assert [(each["name"], each["type"]) for each in said["columns"]] == [
        ("number", "bigint"),
        ("square", "bigint"),
        ("name", "string"),
    ]
    parts = {each["partition_key"]: each for each in said["parts"]}
    # The one that is empty is published, and has no file; the one that was replaced has the rows
    # of the second time.
    assert {key: part["revision"] for key, part in parts.items()} == {"a": 1, "b": 1, "c": 2}
    assert parts["b"]["files"] == []
    files = [file for part in said["parts"] for file in part["files"]]
    assert [file["rows"] for file in files] == [3, 2]
    paths = [file["location"] for file in files]

    plain = penstock("dataset", "files", "squares", "--url", url)
    assert plain.stdout.split() == paths

    by_duckdb = duckdb.read_parquet(paths).fetchdf().to_dict("records")
    assert _numbered(by_duckdb) == PUBLISHED
    by_pandas = pd.concat([pd.read_parquet(path) for path in paths]).to_dict("records")
    assert _numbered(by_pandas) == PUBLISHED
    assert _numbered(_read_by_spark(paths, folder)) == PUBLISHED

    verified = penstock("dataset", "verify", "squares", "--url", url)
    assert verified.returncode == 0, verified.stdout + verified.stderr
