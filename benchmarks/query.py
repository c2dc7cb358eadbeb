"""TPC-H's 22 queries through the query service, against bare DuckDB on the same files.

    python -m benchmarks.query [--scale 1] [--rounds 2]

The eight tables of tpchgen-cli are published as datasets by functions of a `penstock up`. Every
result is fetched as Arrow and compared with DuckDB's own over the published files, which has the
same number of threads and the same memory. Told are the seconds of both, each the best of some
rounds, their ratio, and by how much the answer of a small query, and its first row, are later than
bare DuckDB's: the median of `SMALL_ROUNDS`. On a busy machine read the ratio of CPU instead: of the
query service with all of its processes, and of bare DuckDB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pyarrow as pa

from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port

CLOCK = SystemClock()
QUERIES = Path(__file__).parent / "tpch" / "queries.sql"
TABLES = ("customer", "lineitem", "nation", "orders", "part", "partsupp", "region", "supplier")
SMALL_ROUNDS = 21
SMALL = "SELECT n_name FROM nation ORDER BY n_name LIMIT 1"
FUNCTION = """
import shutil

def copy(task):
    for name, output in task.outputs.items():
        shutil.copy(task.payload["from"] + f"/{name}.parquet", output.path / "all.parquet")
"""


def pipeline() -> str:
    """A job for each table, which publishes the file that is there."""
    jobs = "\n".join(
        f"  copy_{name}: {{runtime: process, operator: 'copying:copy', inputs: [feed.raw],"
        f" outputs: [{name}]}}"
        for name in TABLES
    )
    feed = "  feed: {activation: source, source: {kind: manual}, outputs: [raw]}"
    return f"jobs:\n{feed}\n{jobs}\n"


@contextmanager
def installation(folder: Path, source: Path) -> Iterator[httpx.Client]:
    """`penstock up` with all tables published."""
    (folder / "copying.py").write_text(FUNCTION)
    (folder / "dag.yaml").write_text(pipeline())
    port = free_port()
    ports = {"PORT": port, "INTERNAL_PORT": free_port(), "WEBHOOK_PORT": free_port()}
    environment = {**os.environ, **{f"PENSTOCK_{name}": str(n) for name, n in ports.items()}}
    environment |= {"PENSTOCK_DATA": str(folder / "data"), "PENSTOCK_QUERY_MEMORY": "2GiB"}
    command = [sys.executable, "-m", "penstock", "up", "dag.yaml"]
    with (folder / "up.log").open("wb") as log:
        running = subprocess.Popen(command, cwd=folder, env=environment, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            until(lambda: bool(get(client, f"/v1/datasets/{TABLES[-1]}")))
            asked: dict[str, Any] = {"job": "feed", "event_id": "all", "partition_key": "all"}
            asked |= {"payload": {"from": str(source.absolute())}}
            client.post("/v1/trigger", json=asked).raise_for_status()
            until(lambda: all(published(client, name) for name in TABLES))
            yield client
    finally:
        running.terminate()
        running.wait(timeout=60)


def service_cpu(folder: Path) -> float:
    """CPU seconds of the query service of this installation, with all that it has started."""
    found: dict[int, tuple[int, int]] = {}
    ours = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            found[int(each.name)] = int(fields[1]), sum(int(x) for x in fields[11:15])
            command = (each / "cmdline").read_bytes()
            if (
                b"query-service" in command
                and str(folder).encode() in (each / "environ").read_bytes()
            ):
                ours.add(int(each.name))
        except OSError:
            continue
    while more := {pid for pid, (parent, _) in found.items() if parent in ours} - ours:
        ours |= more
    return sum(found[pid][1] for pid in ours) / os.sysconf("SC_CLK_TCK")


def until(holds: Callable[[], bool], seconds: float = 600) -> None:
    deadline = CLOCK.monotonic() + seconds
    pause = subprocess.run
    while not holds():
        if CLOCK.monotonic() > deadline:
            raise SystemExit("The installation did not get there in time.")
        pause(["sleep", "0.2"], check=True)


def get(client: httpx.Client, path: str) -> dict[str, Any]:
    try:
        answer = client.get(path)
    except httpx.TransportError:
        return {}
    return dict(answer.json()) if answer.status_code == 200 else {}


def published(client: httpx.Client, name: str) -> list[Any]:
    return list(get(client, f"/v1/datasets/{name}/partitions").get("partitions", []))


def asked(client: httpx.Client, sql: str) -> pa.Table:
    """A result of the service."""
    answer = client.post("/v1/query", json={"sql": sql, "format": "arrow"})
    if answer.status_code != 200:
        raise SystemExit(f"{answer.text}\n{sql}")
    return pa.ipc.open_stream(answer.content).read_all()


def bare(client: httpx.Client) -> duckdb.DuckDBPyConnection:
    """DuckDB itself over the published files."""
    connection = duckdb.connect(config={"threads": 2, "memory_limit": "2GiB"})
    for name in TABLES:
        where = published(client, name)[0]["location"].removeprefix("file://")
        source = f"read_parquet('{where}/all.parquet', hive_partitioning=false)"
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {source}")
    return connection


def timed(work: Callable[[], pa.Table], rounds: int) -> tuple[float, pa.Table]:
    """The least seconds, and the result."""
    best, found = float("inf"), pa.table({})
    for _ in range(rounds):
        began = CLOCK.monotonic()
        found = work()
        best = min(best, CLOCK.monotonic() - began)
    return best, found


def first_row(client: httpx.Client, sql: str) -> bytes:
    """The first row of a result of the service, as soon as it is here."""
    said = ""
    with client.stream("POST", "/v1/query", json={"sql": sql, "format": "rows"}) as answer:
        for number, said in enumerate(answer.iter_lines()):
            if number == 1:
                return said.encode()
    raise SystemExit(f"{said}\n{sql}")


def typical(work: Callable[[], object]) -> float:
    """The median of the seconds that something takes."""
    took = []
    for _ in range(SMALL_ROUNDS):
        began = CLOCK.monotonic()
        work()
        took.append(CLOCK.monotonic() - began)
    return statistics.median(took)


def same(one: pa.Table, other: pa.Table) -> bool:
    """Whether two results are equal; sums of fractions to what adding in another order leaves."""
    rows = zip(one.to_pylist(), other.to_pylist(), strict=True)
    return all(alike(mine.values(), theirs.values()) for mine, theirs in rows)


def alike(mine: Any, theirs: Any) -> bool:
    return all(
        abs(x - y) <= 1e-9 * max(1.0, abs(x)) if isinstance(x, float) else x == y
        for x, y in zip(mine, theirs, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", type=Path)
    said = parser.parse_args()
    every = QUERIES.read_text().partition("\n")[2].split("\n-----\n")
    with tempfile.TemporaryDirectory(prefix="query-") as place:
        folder = Path(place)
        source = said.data or folder / "tpch"
        if said.data is None:
            make = [
                str(Path(sys.executable).with_name("tpchgen-cli")),
                "parquet",
                "-s",
                f"{said.scale:g}",
                "--output-dir",
                str(source),
            ]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        with installation(folder, source) as client:
            compare(client, every, said.rounds, folder)


def compare(client: httpx.Client, every: list[str], rounds: int, folder: Path) -> None:
    connection = bare(client)
    asked(client, SMALL)
    ours, theirs = 0.0, 0.0
    bare_used, began = 0.0, service_cpu(folder)
    for number, sql in enumerate(every, start=1):
        mine, found = timed(lambda sql=sql: asked(client, sql), rounds)  # type: ignore[misc]
        used_before = time.process_time()
        own, expected = timed(lambda sql=sql: connection.execute(sql).to_arrow_table(), rounds)  # type: ignore[misc]
        bare_used += time.process_time() - used_before
        ours, theirs = ours + mine, theirs + own
        verdict = "equal" if same(found, expected) else "DIFFERENT"
        print(f"q{number:<3} service {mine:7.3f} s  bare {own:7.3f} s  {verdict}", flush=True)
    used = service_cpu(folder) - began
    small = typical(lambda: asked(client, SMALL))
    first = typical(lambda: first_row(client, SMALL))
    least = typical(lambda: connection.execute(SMALL).to_arrow_table())
    least_first = typical(lambda: connection.execute(SMALL).fetchone())
    print(f"all  service {ours:7.3f} s  bare {theirs:7.3f} s  ratio {ours / theirs:.2f}")
    print(f"CPU  service {used:7.3f} s  bare {bare_used:7.3f} s  ratio {used / bare_used:.2f}")
    print(f"the result of a small query is {1000 * (small - least):.0f} ms later")
    print(f"the first row of a small query is {1000 * (first - least_first):.0f} ms later")


if __name__ == "__main__":
    main()
