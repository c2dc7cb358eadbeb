"""One application on a cluster of Spark, in a process of its own: loads tables, or queries them.

    python -m benchmarks.cluster_side load MASTER STORE TO TPCH FILES
    python -m benchmarks.cluster_side ask MASTER STORE FILES

`load` writes the tables below the location `TO`, through the access that Penstock takes there, and
what it wrote into the file `FILES`; it prints how many seconds that took. `ask` runs the queries
over those files, twice, and prints how long each took, a sum over its rows, and the CPU that the
executors used: first cold, in a new application, then warm. Files of a folder are read by bare
PySpark: a plain session with the same settings, without Penstock's jar and what Penstock does to
sessions.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.datasets.schema import Column
from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.base import FileSlice, WriteTarget
from penstock.runtimes.spark.access.choosing import AccessSelector
from penstock.runtimes.spark.classic import ClassicSessions
from penstock.runtimes.spark.columns import columns_of, ddl
from penstock.runtimes.spark.settings import SparkSettings, classic_conf, environment

QUERIES: Final = {
    "q1": ("lineitem",),
    "q3": ("customer", "orders", "lineitem"),
    "q5": ("customer", "orders", "lineitem", "supplier", "nation", "region"),
    "q10": ("customer", "orders", "lineitem", "nation"),
    "q18": ("customer", "orders", "lineitem"),
}
_EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
_FILE_COUNT: Final = {
    "lineitem": 4,
    "orders": 2,
    "customer": 1,
    "supplier": 1,
    "nation": 1,
    "region": 1,
}
_TPCH: Final = Path(__file__).resolve().parent / "tpch"


def _load(spark: Any, accesses: AccessSelector, to: str, tpch: str) -> tuple[dict[str, Any], float]:
    found: dict[str, Any] = {}
    began = time.monotonic()
    for table, count in _FILE_COUNT.items():
        frame = spark.read.parquet(f"file://{tpch}/{table}.parquet").repartition(count)
        location = f"{to}/{table}"
        target = WriteTarget(location=location, staging=f"{to}/staging", file_bytes=2**27)
        files = accesses.to(to).write(frame, target)
        found[table] = {
            "files": [(f"{location}/{each.name}", each.bytes, each.sha256) for each in files],
            "columns": [(each.name, each.type) for each in columns_of(frame.schema)],
        }
    return found, time.monotonic() - began


def _ask(spark: Any, accesses: AccessSelector | None, loaded: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"seconds": [], "sums": {}, "cpu": []}
    for _ in range(2):
        seconds, used = {}, _executors_cpu(spark)
        for query, tables in QUERIES.items():
            began = time.monotonic()
            with ExitStack() as held:
                for table in tables:
                    frame = _frame(spark, accesses, loaded[table], held)
                    frame.createOrReplaceTempView(table)
                rows = spark.sql((_TPCH / f"{query}.sql").read_text()).collect()
            seconds[query] = time.monotonic() - began
            said = "\n".join(sorted(map(str, rows)))
            found["sums"][query] = hashlib.sha256(said.encode()).hexdigest()
        found["seconds"].append(seconds)
        found["cpu"].append(_executors_cpu(spark) - used)
    return found


def _executors_cpu(spark: Any) -> float:
    """Seconds of CPU that the executors of this application have used, all of their threads."""
    words = (_EXECUTOR, spark.sparkContext.applicationId.encode())
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if all(each in (process / "cmdline").read_bytes() for each in words):
                ticks += sum(
                    map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13])
                )
    return ticks / os.sysconf("SC_CLK_TCK")


def _frame(spark: Any, accesses: AccessSelector | None, said: Any, held: ExitStack) -> Any:
    # As jobs have them, from manifests: neither side looks into files for them.
    files, columns = said["files"], [Column(name, kind) for name, kind in said["columns"]]
    if accesses is None:
        return spark.read.schema(ddl(columns)).parquet(*(where for where, _, _ in files))
    given = [DataFile(location=where, bytes=size, sha256=sum_) for where, size, sum_ in files]
    return accesses.to(given[0].location).frame(spark, [FileSlice(files=given)], columns, held)


@contextmanager
def _penstock(settings: SparkSettings) -> Iterator[Any]:
    sessions = ClassicSessions(settings, Path(settings.data), print)
    try:
        yield sessions.fresh()
    finally:
        sessions.stop()


@contextmanager
def _bare(settings: SparkSettings) -> Iterator[Any]:
    os.environ.update(environment(settings, os.environ, folder=settings.data))
    conf = classic_conf(settings, folder=settings.data, cores=os.cpu_count() or 1)
    builder = SparkSession.builder
    for name, value in conf.items():
        if name not in ("spark.jars", "spark.plugins"):
            builder = builder.config(name, value)
    with builder.getOrCreate() as session:
        yield session


def main() -> None:
    """Do one of the two."""
    verb, master, store, *words = sys.argv[1:]
    files = Path(words[-1])
    loaded = json.loads(files.read_text()) if verb == "ask" else {}
    is_bare = any(
        where.startswith("file:") for said in loaded.values() for where, _, _ in said["files"]
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        settings = SparkSettings(
            master=master, store_url=store, data=name, archive=False, driver_memory="1g"
        )
        with (_bare if is_bare else _penstock)(settings) as spark:
            # Executors are there before the clock starts, and have been used.
            spark.range(1000).repartition(4).selectExpr("sum(id)").collect()
            accesses = None if is_bare else AccessSelector(settings, Transfer(store), spark)
            if verb == "ask":
                print(json.dumps(_ask(spark, accesses, loaded)), flush=True)
                return
            assert accesses is not None
            loaded, seconds = _load(spark, accesses, *words[:-1])
            files.write_text(json.dumps(loaded))
            print(seconds, flush=True)


if __name__ == "__main__":
    main()
