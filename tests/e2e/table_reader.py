"""Somebody who reads a table again and again, while what answers is killed.

Each partition is two files of one attempt, each with a row that says so: so a reader sees whether a
snapshot shows none, half or both of what was published, or two generations at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import duckdb
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError, ServiceUnavailableError
from requests.exceptions import RequestException

from penstock.kernel.entropy import Entropy
from tests.e2e.fleet import CLOCK
from tests.integration.tables.duck import opened_duck

MODES = ("server", "client", "duckdb")
"""Who plans a scan for PyIceberg; or DuckDB reads, which plans for itself."""
MODULE = '''
import pyarrow as pa
import pyarrow.parquet as pq

def halves(task):
    """Two files of one row, which belong together."""
    (output,) = task.outputs.values()
    made = {"made": [f"{task.id}.{task.attempt}"], "version": [task.config["version"]]}
    for half in (0, 1):
        pq.write_table(pa.table({"half": [half], **made}), output.path / f"{half}.parquet")
'''
DAG = """
  again:
    activation: source
    source: {kind: manual}
    outputs: [news]
  halves:
    runtime: process
    operator: halves:halves
    config: {version: 1}
    inputs: [again.news]
    outputs: [halves]
    heartbeat_timeout: 5s
    max_attempts: 50
    retry: {first: 100ms, max: 1s, backoff: 2}
"""
NAMES = ("partition_key", "half", "made", "version")
_SECONDS_MAX = 300.0
_UNANSWERED = re.compile(r"error for HTTP (GET|HEAD|POST) to|ServiceUnavailable|\b503\b")
"""What DuckDB says of a dispatcher that does not answer, or has no Postgres."""

Rows = tuple[tuple[str, int, str, int], ...]


@dataclass(slots=True)
class TableReader:
    """What was seen: of each snapshot the rows, which are the same whenever it is read."""

    urls: Sequence[str]
    seen: dict[int, Rows] = field(default_factory=dict)
    reads: int = 0

    async def read_on(self, mode: str, entropy: Entropy) -> None:
        """Read the newest snapshot again and again, until this is cancelled."""
        while True:
            try:
                found = await asyncio.to_thread(_scanned, entropy.choice(self.urls), mode, None)
            except (RequestException, ServiceUnavailableError, duckdb.IOException) as error:
                # What answers is dead at the moment.
                if isinstance(error, duckdb.IOException) and not _UNANSWERED.search(str(error)):
                    raise
                await CLOCK.sleep(0.2)
            except NoSuchTableError:
                assert not self.seen, "a table that was there is not any more"
                await CLOCK.sleep(0.2)
            else:
                self._note(mode, *found)

    async def until_read(self, version: int) -> None:
        """Wait until what is read was made by a version of the DAG."""
        began = CLOCK.monotonic()
        while not self.seen or self.seen[max(self.seen)][0][-1] != version:
            assert CLOCK.monotonic() - began < _SECONDS_MAX, f"nothing of version {version}"
            await CLOCK.sleep(0.1)

    async def check(self) -> None:
        """All snapshots that were seen can be read again, and partitions never were away."""
        keys: set[str] = set()
        for number, (snapshot, rows) in enumerate(sorted(self.seen.items())):
            assert keys <= (keys := {each[0] for each in rows}), snapshot
            again = partial(_scanned, self.urls[0], MODES[number % len(MODES)], snapshot)
            assert (await asyncio.to_thread(again))[1] == rows, snapshot

    def _note(self, mode: str, snapshot: int, rows: Rows) -> None:
        self.reads += 1
        said = f"{mode}, snapshot {snapshot}: {rows}"
        assert self.seen.setdefault(snapshot, rows) == rows, f"{said}; was {self.seen[snapshot]}"
        assert len({version for *_, version in rows}) <= 1, f"two generations: {said}"
        for key in {each[0] for each in rows}:
            mine = [each for each in rows if each[0] == key]
            assert [each[1] for each in mine] == [0, 1], f"not one partition: {said}"
            assert mine[0][2] == mine[1][2], f"of two attempts: {said}"


def _scanned(url: str, mode: str, snapshot: int | None) -> tuple[int, Rows]:
    """A snapshot, the newest by default, and its rows."""
    more: dict[str, Any] = {"scan-planning-mode": "client" if mode == "duckdb" else mode}
    catalog = load_catalog("p", uri=f"{url}/iceberg", token="any", **more)
    table = catalog.load_table("penstock.halves")
    wanted = snapshot or table.metadata.current_snapshot_id
    assert wanted is not None
    if mode == "duckdb":
        with contextlib.closing(opened_duck(url)) as connection:
            asked = f"SELECT {', '.join(NAMES)} FROM p.penstock.halves AT (VERSION => {wanted})"
            return wanted, tuple(sorted(connection.execute(asked).fetchall()))
    found = table.scan(snapshot_id=wanted).to_arrow().to_pylist()
    return wanted, tuple(sorted(tuple(row[name] for name in NAMES) for row in found))
