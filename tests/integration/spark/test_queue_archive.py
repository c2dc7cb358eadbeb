"""Spark reads the files of a queue's archive as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from penstock import Queue
from penstock.kernel.document_format import encode
from penstock.kernel.entropy import seeded_entropy
from penstock.queue import archive
from penstock.queue.archive_rows import SCHEMA, LegacyArchiveBatch
from penstock.queue.ids import PackAt, new_pack
from penstock.queue.ledger import (
    Ledger,
    LedgerEvent,
    LedgerFailure,
    LedgerLogLine,
    QueueTaskState,
    QueueTaskStatus,
)

MS = 1_900_000_000_123
COUNT = 20


def _record(number: int) -> tuple[PackAt, Ledger]:
    at = new_pack(type="resize", count=2, submitted_ms=MS + number, entropy=seeded_entropy(number))
    fails = number % 5 == 0
    last = QueueTaskState(
        QueueTaskStatus.FAILED, 3, at_ms=MS + 90, failure=LedgerFailure("OSError", "away", "Trace")
    )
    done = QueueTaskState(
        QueueTaskStatus.SUCCEEDED, 1, at_ms=MS + 50, result=msgspec.Raw(b'{"ok":true}')
    )
    ledger = Ledger(
        pack_version="v",
        born="b",
        tasks=(done, last if fails else done),
        inputs=(msgspec.Raw(f'{{"n":{number}}}'.encode()), msgspec.Raw(b'"17"')),
        submitted_ms=MS + number,
        tags={"customer": f"c{number % 3}"} if number % 2 else {},
        log=(LedgerLogLine(MS + 1, LedgerEvent.CLAIMED, (0, 1), 1, "w"),),
    )
    return at, ledger


async def _archived(folder: Path) -> None:
    async with await Queue.open(folder.as_uri(), name="q") as queue:
        access = queue.access
        members = [_record(number) for number in range(COUNT)]
        await archive.keep(access.store, access.layout, members, entropy=access.entropy)
        # One of an earlier release lies beside them, and is passed over by its name.
        await access.store.put(
            f"{access.layout.archive}{'0' * 9}-{'0' * 9}-abc",
            encode(LegacyArchiveBatch(records=())),
        )


def test_spark_reads_the_archive(spark: Any, tmp_path: Path) -> None:
    asyncio.run(_archived(tmp_path))
    files = str(tmp_path / "queues/q/*/*.jsonl.gz")
    inferred = spark.read.json(files)
    assert inferred.count() == COUNT * 2
    counts = {row["status"]: row["count"] for row in inferred.groupBy("status").count().collect()}
    assert counts == {"succeeded": 36, "failed": 4}
    ids = {row["id"] for row in inferred.select("id").collect()}
    assert ids == {_record(n)[0].task(place) for n in range(COUNT) for place in (0, 1)}

    frame = spark.read.schema(SCHEMA).json(files)
    frame.createOrReplaceTempView("tasks")
    (row,) = spark.sql(
        """
        SELECT count(*) AS tasks, sum(get_json_object(input, '$.n')) AS n,
               max(date_format(submitted_at, 'yyyy')) AS year,
               max(unix_millis(settled_at) - unix_millis(submitted_at)) AS most,
               count_if(tags['customer'] = 'c1') AS c1, count_if(error = 'OSError') AS failed,
               max(log[0].what) AS what, max(size(log)) AS lines
        FROM tasks
        """
    ).collect()
    assert (row["tasks"], row["n"], row["year"]) == (COUNT * 2, sum(range(COUNT)), "2030")
    assert (row["most"], row["failed"], row["what"], row["lines"]) == (90, 4, "claimed", 1)
    assert row["c1"] == 2 * sum(number % 2 == 1 and number % 3 == 1 for number in range(COUNT))
    (one,) = frame.where("error is not null and input = '\"17\"'").limit(1).collect()
    assert (one["attempt"], one["message"], one["traceback"]) == (3, "away", "Trace")
