"""The other side of `benchmarks.pipeline`: the same work in bare PySpark, in a process of its own.

    python -m benchmarks.bare files --source FOLDER --to FOLDER --conf '{…}'
    python -m benchmarks.bare flights --days 365 --to FOLDER --conf '{…}'
    python -m benchmarks.bare join --folders '{"facts": FOLDER, …}' --to FOLDER --conf '{…}'
    python -m benchmarks.bare months --source FOLDER --to FOLDER --conf '{…}'
    python -m benchmarks.bare prune --folders '{"2020-05": FOLDER, …}' --to FOLDER --conf '{…}'
    python -m benchmarks.bare tpch --folders '{"lineitem": FOLDER, …}' --to FOLDER --conf '{…}'

The session is started and has run something before anything is timed. What is measured is a step,
or several, each of which waits for a line of its input, so that whoever asks may do something else
in between, and prints its seconds as a line of JSON; the first line is what the start took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import database

ROOT = Path(__file__).resolve().parents[1]
SQL = Path(__file__).resolve().parent / "tpch"
BY_MONTH = {
    "daily": (
        "SELECT {keys}, date(ts) AS day, count(*) AS trips, sum(fare) AS fares FROM {trips}"
        " GROUP BY {keys}, date(ts)"
    ),
    "zones": (
        "SELECT {keys}, zone, count(*) AS trips, max(miles) AS miles FROM {trips}"
        " GROUP BY {keys}, zone"
    ),
}
HASHED = "SELECT id, {hashes} AS hashed FROM {parts}"
"""Much to compute of little that is read."""
JOINED = (
    "SELECT f.id, f.shop, d.region, f.paid, f.paid * d.rate AS due"
    " FROM facts f JOIN shops d ON f.shop = d.shop"
)
CHECK = "due >= 0 AND region IS NOT NULL"
UNIQUE = "id"
SHOPS = "SELECT id % 97 AS shop, count(*) AS n, sum(id) AS ids FROM {parts} GROUP BY id % 97"
sys.path.insert(0, str(ROOT / "examples" / "flights"))


def hashed(parts: str) -> str:
    """The query that has much to compute."""
    hashes = "CAST(id AS STRING)"
    for _ in range(20):
        hashes = f"sha2({hashes}, 512)"
    return HASHED.format(hashes=hashes, parts=parts)


def files(session: Any, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """What is computed of little, of no known size, and sorted, twice; and how many files."""
    parts = f"parquet.`{options.source}`"
    took: dict[str, float] = {}
    for turn in range(2):
        for name in ("hashed", "database", "shops"):
            began = time.monotonic()
            match name:
                case "hashed":
                    frame = session.sql(hashed(parts))
                case "database":
                    frame = database.rows(session, options.rows)
                case _:
                    frame = session.sql(SHOPS.format(parts=parts)).sort("shop")
            frame.write.parquet(f"{options.to}/{turn}/{name}")
            took[f"{name}-{turn}"] = time.monotonic() - began
            took[f"{name}-files"] = len(list(Path(f"{options.to}/{turn}/{name}").glob("*.parquet")))
    yield took


def flights(session: Any, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """The pipeline of the demo, as its plain script has it."""
    plain = import_module("plain")
    # As on the other side, the small tables are there before the clock starts.
    plain.compute_references(session, options.to)
    began = time.monotonic()
    plain.compute_days(session, plain.days_of(options.days), options.to)
    yield {"flights": time.monotonic() - began}


def tpch(session: Any, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Queries of TPC-H, each a step, written to a file, as often as it is asked."""
    for name, folder in json.loads(options.folders).items():
        # Beside the files there is the manifest.
        session.read.parquet(f"{folder}/*.parquet").createOrReplaceTempView(name)
    for turn in range(options.turns):
        for query in sorted(SQL.glob("q[0-9]*.sql")):
            began = time.monotonic()
            session.sql(query.read_text()).write.parquet(f"{options.to}/{turn}/{query.stem}")
            yield {f"{query.stem}-{turn}": time.monotonic() - began}


def join(session: Any, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """A join that is written, and two questions to what was written; each time a step."""
    for name, folder in json.loads(options.folders).items():
        session.read.parquet(f"{folder}/*.parquet").createOrReplaceTempView(name)
    for turn in range(options.turns):
        began, to = time.monotonic(), f"{options.to}/{turn}"
        session.sql(JOINED).write.parquet(to)
        made = session.read.parquet(to)
        wrong = made.where(f"NOT coalesce({CHECK}, false)").count()
        twice = made.groupBy(UNIQUE).count().where("count > 1").count()
        if wrong or twice:
            raise RuntimeError(f"{wrong} rows are wrong, and {twice} ids are there twice")
        yield {f"join-{turn}": time.monotonic() - began}


def months(session: Any, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Files divided into months, and two queries of each month, twice."""
    took: dict[str, float] = {}
    for turn in range(2):
        began = time.monotonic()
        trips = session.read.parquet(str(options.source))
        keyed = trips.selectExpr("*", "date_format(ts, 'yyyy-MM') AS month")
        keyed.write.partitionBy("month").parquet(f"{options.to}/{turn}/trips")
        took[f"load-{turn}"] = time.monotonic() - began
        session.read.parquet(f"{options.to}/{turn}/trips").createOrReplaceTempView("trips")
        for name, text in BY_MONTH.items():
            found = session.sql(text.format(keys="month", trips="trips"))
            found.write.partitionBy("month").parquet(f"{options.to}/{turn}/{name}")
        took[f"all-{turn}"] = time.monotonic() - began
    yield took


def prune(session: Any, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """One month of a layout of Hive's, and all of it, each a step, written to files."""
    layout = options.to / "hive"
    for month, folder in json.loads(options.folders).items():
        home = layout / f"month={month}"
        home.mkdir(parents=True)
        for number, file in enumerate(sorted(Path(folder).glob("*.parquet"))):
            (home / f"part-{number:05}.parquet").symlink_to(file)
    for turn in range(options.turns):
        for name, where in (("one", "month = '2020-05'"), ("all", "month <> 'none'")):
            began = time.monotonic()
            columns = "id bigint, shop bigint, paid double, month string"
            frame = session.read.schema(columns).parquet(str(layout)).where(where)
            made = frame.groupBy("shop").agg({"*": "count", "id": "sum"})
            made.toDF("shop", "n", "ids").write.parquet(f"{options.to}/{turn}/{name}")
            yield {f"{name}-{turn}": time.monotonic() - began}


SECTIONS = {
    "files": files,
    "flights": flights,
    "join": join,
    "months": months,
    "prune": prune,
    "tpch": tpch,
}


def main() -> None:
    """Start a session, measure when asked, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=sorted(SECTIONS))
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--folders", default="{}", help="of tables, as JSON")
    parser.add_argument("--source", type=Path, help="of the files of months, or of what is hashed")
    parser.add_argument("--rows", type=int, default=1000, help="of the database")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--conf", default="{}", help="settings of Spark, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    began = time.monotonic()
    from pyspark.sql import SparkSession  # noqa: PLC0415 - so that --help needs no Spark

    builder = SparkSession.builder.master("local[*]")
    for name, value in json.loads(options.conf).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.range(1000).selectExpr("sum(id)").collect()
    started = time.monotonic() - began
    steps = SECTIONS[options.what](session, options)
    print(json.dumps({"start": started}), flush=True)
    for _ in sys.stdin:
        took = next(steps, None)
        print(json.dumps(took), flush=True)
        if took is None:
            break
    session.stop()


if __name__ == "__main__":
    main()
