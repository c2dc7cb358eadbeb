"""One application on a cluster of Spark, in a process of its own: loads tables, or queries them.

    python -m benchmarks.cluster_side load MASTER STORE TO TPCH FILES
    python -m benchmarks.cluster_side ask MASTER STORE FILES

`load` writes the tables below the location `TO`, through the access that Penstock takes there, and
what it wrote into the file `FILES`; it prints how many seconds that took. `ask` runs the queries
over those files, twice, and prints how long each took and a sum over its rows: first cold, in a new
application, then warm. Files of a folder are read as bare PySpark does, without a look at sums.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from penstock.datasets.snapshot import DataFile
from penstock.datasets.transfer import Transfer
from penstock.runtimes.spark.access.base import PathReader, Slice, Target
from penstock.runtimes.spark.access.choosing import Accesses
from penstock.runtimes.spark.classic import ClassicSessions
from penstock.runtimes.spark.settings import SparkSettings

QUERIES: Final = {
    "q1": ("lineitem",),
    "q3": ("customer", "orders", "lineitem"),
    "q18": ("customer", "orders", "lineitem"),
}
_FILE_COUNT: Final = {"lineitem": 4, "orders": 2, "customer": 1}
_TPCH: Final = Path(__file__).resolve().parent / "tpch"


def _load(spark: Any, accesses: Accesses, to: str, tpch: str) -> tuple[dict[str, Any], float]:
    found: dict[str, Any] = {}
    began = time.monotonic()
    for table, count in _FILE_COUNT.items():
        frame = spark.read.parquet(f"file://{tpch}/{table}.parquet").repartition(count)
        location = f"{to}/{table}"
        target = Target(location=location, staging=f"{to}/staging", file_bytes=2**27)
        files = accesses.to(to).write(frame, target)
        found[table] = [(f"{location}/{each.name}", each.bytes, each.sha256) for each in files]
    return found, time.monotonic() - began


def _ask(spark: Any, accesses: Accesses, files: dict[str, list[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"seconds": [], "sums": {}}
    for _ in range(2):
        seconds = {}
        for query, tables in QUERIES.items():
            began = time.monotonic()
            with ExitStack() as held:
                for table in tables:
                    frame = _frame(spark, accesses, files[table], held)
                    frame.createOrReplaceTempView(table)
                rows = spark.sql((_TPCH / f"{query}.sql").read_text()).collect()
            seconds[query] = time.monotonic() - began
            said = "\n".join(sorted(map(str, rows)))
            found["sums"][query] = hashlib.sha256(said.encode()).hexdigest()
        found["seconds"].append(seconds)
    return found


def _frame(spark: Any, accesses: Accesses, files: list[Any], held: ExitStack) -> Any:
    given = [DataFile(location=where, bytes=size, sha256=sum_) for where, size, sum_ in files]
    if given[0].location.startswith("file:"):
        return PathReader().frame(spark, [(each.location, None) for each in given], None)
    return accesses.to(given[0].location).frame(spark, [Slice(files=given)], None, held)


def main() -> None:
    """Do one of the two."""
    verb, master, store, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        settings = SparkSettings(
            master=master, store_url=store, data=name, archive=False, driver_memory="1g"
        )
        sessions = ClassicSessions(settings, Path(name), print)
        try:
            spark = sessions.fresh()
            # Executors are there before the clock starts, and have been used.
            spark.range(1000).repartition(4).selectExpr("sum(id)").collect()
            accesses = Accesses(settings, Transfer(store), spark)
            if verb == "load":
                to, tpch, files = words
                loaded, seconds = _load(spark, accesses, to, tpch)
                Path(files).write_text(json.dumps(loaded))
                print(seconds, flush=True)
            else:
                (files,) = words
                found = _ask(spark, accesses, json.loads(Path(files).read_text()))
                print(json.dumps(found), flush=True)
        finally:
            sessions.stop()


if __name__ == "__main__":
    main()
