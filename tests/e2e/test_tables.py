"""What docs/tables.md says to type, typed: engines of others read what `penstock up` publishes."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import ForbiddenError, UnauthorizedError

from penstock.dispatcher.client import Client
from tests.e2e.reader import CLOCK, PAUSE, Reader, a_reader, section
from tests.integration.tables.duck import opened_duck

PAGE = "docs/tables.md"
PIPELINE = """
jobs:
  delivered: {activation: source, source: {kind: manual}, outputs: [days]}
  totals:
    runtime: process
    operator: shop:totals
    inputs: [delivered.days]
    outputs: [totals, others]
"""
FUNCTION = """
import pyarrow as pa
import pyarrow.parquet as pq

def totals(task):
    rows = pa.table({"shop": ["north", "south"], "total": [task.payload["north"], 7]})
    for output in task.outputs.values():
        pq.write_table(rows, output.path / "totals.parquet")
"""
DAYS = ("2026-01-01", "2026-01-02")
OLD = sorted([(shop, total, day) for day in DAYS for shop, total in (("north", 1), ("south", 7))])
NEW = sorted([("north", 10, DAYS[0]), *OLD[1:]])


class Typing:
    """Who types what the page shows, with an address, a token and a snapshot of their own."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.url = f"http://127.0.0.1:{reader.environment['PENSTOCK_PORT']}"
        self.filled = {"http://127.0.0.1:7070": self.url}
        self._names: dict[str, Any] = {}

    def block(self, title: str, *, told: str = "", language: str = "") -> str:
        """A block of the page, with what is ours in it."""
        text, *_ = [
            each.text
            for each in section(PAGE, title)
            if each.language == language and told in each.text
        ]
        for theirs, ours in self.filled.items():
            text = text.replace(theirs, ours)
        return text

    def python(self, told: str) -> list[Any]:
        """Type a block of Python; what its lines have shown."""
        shown = []
        for line in ast.parse(self.block("Engines", told=told, language="python")).body:
            if isinstance(line, ast.Expr):
                shown.append(eval(ast.unparse(line), self._names))
            else:
                exec(ast.unparse(line), self._names)
        return shown

    def sql(self) -> list[list[Any]]:
        """Type the block of SQL, of which the first line attaches the catalog."""
        connection = opened_duck()
        _, *rest = [
            connection.execute(each).fetchall()
            for each in self.block("Engines", language="sql").strip().split(";")
            if each.strip()
        ]
        return rest

    def publish(self, day: str, north: int) -> None:
        payload = json.dumps({"north": north})
        self.reader.type(
            f"penstock trigger delivered --partition {day} --payload '{payload}'"
            f" --event-id {day}-{north}\npenstock status --wait"
        )

    def snapshots(self) -> list[Any]:
        said = self.reader.type("penstock dataset snapshots totals --json")
        found: list[Any] = json.loads(said)["snapshots"]
        return found


def rows(found: Any) -> list[tuple[Any, ...]]:
    """The rows of what an engine has answered, in an order of their own."""
    if not isinstance(found, pa.Table):
        found = found.to_arrow()
    by_row = found.select(["shop", "total", "partition_key"]).to_pylist()
    return sorted(tuple(each.values()) for each in by_row)


def until_refused(ask: Callable[[], object], *, seconds: float) -> None:
    deadline = CLOCK.monotonic() + seconds
    while True:
        try:
            ask()
        except UnauthorizedError:
            return
        assert CLOCK.monotonic() < deadline, "a token that was removed still opens the catalog"
        PAUSE.wait(0.2)


@pytest.mark.timeout(300)
def test_what_the_page_types_reads_what_is_published_and_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    (tmp_path / "shop.yaml").write_text(PIPELINE)
    (tmp_path / "shop.py").write_text(FUNCTION)
    with a_reader(tmp_path) as reader:
        typing = Typing(reader)
        reader.type("penstock up shop.yaml")
        reader.hears("Penstock is up")
        for day in DAYS:
            typing.publish(day, 1)
        # Engines see what was the newest when one of them has loaded the table.
        catalog = load_catalog("p", uri=f"{typing.url}/iceberg", token="any")
        assert rows(catalog.load_table("penstock.totals").scan()) == OLD
        first = typing.snapshots()[0]["id"]
        typing.publish(DAYS[0], 10)
        latest, before, *_ = typing.snapshots()
        assert (before["id"], latest["operation"]) == (first, "overwrite")
        assert (latest["added"], latest["removed"], latest["rows"]) == (1, 1, 4)
        _commands(typing, first=first, latest=latest["id"])
        asyncio.run(_by_client(typing.url, first))
        _engines(typing, first)
        _erased(typing, first)


def _commands(typing: Typing, *, first: int, latest: int) -> None:
    moment = datetime.fromtimestamp(first / 1000, UTC).isoformat()
    typing.filled |= {"2026-01-31T12:00:00Z": moment, "1769947200000": str(latest)}
    listed, differs, previewed = typing.block("Snapshots", told="penstock dataset").splitlines()
    assert re.search(rf"{latest} +main +overwrite +\+1 -1", typing.reader.type(listed))
    said = typing.reader.type(differs)
    assert sorted(each.split()[:2] for each in said.splitlines()[1:]) == [
        ["put", DAYS[0]],
        ["removed", DAYS[0]],
    ]
    said = typing.reader.type(previewed)
    assert "10" not in said.split()
    assert said.count("north") == 2
    assert "10" in typing.reader.type("penstock dataset preview totals").split()


async def _by_client(url: str, first: int) -> None:
    async with Client(url) as client:
        table = client.table("totals")
        then, now = await table.snapshot(at=first), await table.snapshot()
        places = [{each.partition_key: each.location for each in it.parts} for it in (then, now)]
        assert [key for key in DAYS if places[0][key] != places[1][key]] == [DAYS[0]]
        assert then.snapshot == first
        by_time = await table.snapshot(at=datetime.fromtimestamp(first / 1000, UTC))
        assert by_time.parts == then.parts


def _engines(typing: Typing, first: int) -> None:
    create, listed, remove = typing.block("Who may read", told="penstock token").splitlines()
    token = typing.reader.type(create).strip()
    assert re.search(r"^bi +totals ", typing.reader.type(listed), re.MULTILINE)
    typing.filled |= {'"any"': f'"{token}"', "'any'": f"'{token}'", "1769947200000": str(first)}
    only, then = typing.python("load_catalog")
    assert rows(only) == [each for each in NEW if each[-1] == DAYS[0]]
    assert rows(then) == OLD
    assert [rows(each) for each in typing.python("polars")] == [NEW]
    assert [sorted(each) for each in typing.sql()] == [NEW, OLD]
    catalog = load_catalog("p", uri=f"{typing.url}/iceberg", token=token)
    with pytest.raises(ForbiddenError):
        catalog.load_table("penstock.others")
    typing.reader.type(remove)
    # Refused everywhere within five seconds, on a machine that is busy.
    until_refused(lambda: catalog.load_table("penstock.totals"), seconds=30)


def _erased(typing: Typing, first: int) -> None:
    folder = typing.reader.folder / "penstock-data/store/datasets/totals"
    partition, every, sweep = typing.block("Erasing", told="penstock dataset").splitlines()
    assert len(list(folder.rglob("*.parquet"))) == 3
    assert "Forgotten: 1 snapshot." in typing.reader.type(partition)
    assert first not in [each["id"] for each in typing.snapshots()]
    assert "Forgotten: " in typing.reader.type(every)
    assert len(typing.snapshots()) == 1
    # Readers without Postgres are told of another file before the one is removed.
    deadline = CLOCK.monotonic() + 60
    while len(list(folder.rglob("*.parquet"))) != 2:
        assert CLOCK.monotonic() < deadline, "what was purged is not swept"
        typing.reader.type(sweep)
    for mode in ("server", "client"):
        catalog = load_catalog(
            "p", uri=f"{typing.url}/iceberg", token="any", **{"scan-planning-mode": mode}
        )
        assert rows(catalog.load_table("penstock.totals").scan()) == NEW
    said = typing.reader.type("penstock audit --json")
    assert said.count('"purged"') >= 1
