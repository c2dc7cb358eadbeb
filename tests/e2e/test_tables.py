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

import boto3
import botocore.exceptions
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import ForbiddenError, UnauthorizedError
from pyiceberg.table import Table

from penstock.dispatcher.client import Client
from tests.conftest import Background, an_s3_server
from tests.e2e.reader import CLOCK, PAUSE, SECONDS_MAX, Reader, a_reader, section
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
    columns = {"shop": ["north", "south"], "total": [task.payload["north"], 7]}
    if "tax" in task.payload:
        columns["tax"] = [task.payload["tax"], None]
    rows = pa.table(columns)
    for output in task.outputs.values():
        pq.write_table(rows, output.path / "totals.parquet")
"""
DAYS = ("2026-01-01", "2026-01-02")
OLD = sorted([(shop, total, day) for day in DAYS for shop, total in (("north", 1), ("south", 7))])
NEW = sorted([("north", 10, DAYS[0]), *OLD[1:]])
MODES = ("server", "client")
"""Who plans a scan."""


class Typing:
    """Who types what the page shows, with an address, a token and a snapshot of their own."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.url = f"http://127.0.0.1:{reader.environment['PENSTOCK_PORT']}"
        self.filled = {"http://127.0.0.1:7070": self.url}
        self._names: dict[str, Any] = {}

    def table(self, mode: str, *, token: str = "any") -> Table:
        """The table, for scans that are planned by the server or the client."""
        uri = f"{self.url}/iceberg"
        catalog = load_catalog("p", uri=uri, token=token, **{"scan-planning-mode": mode})
        return catalog.load_table("penstock.totals")

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

    def publish(self, *days: str, north: int, **more: float) -> None:
        async def work() -> None:
            async with Client(self.url) as client:
                for day in days:
                    await client.trigger(
                        "delivered",
                        event_id=f"{day}-{north}",
                        partition_key=day,
                        payload={"north": north, **more},
                    )
                status = await client.wait(timeout_seconds=SECONDS_MAX)
                assert not any(each.dead for each in status.jobs), self.reader.logged()

        asyncio.run(work())

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


@pytest.mark.timeout(600)
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
        typing.publish(*DAYS, north=1)
        # Engines see what was the newest when one of them has loaded the table.
        assert rows(typing.table("server").scan()) == OLD
        first = typing.snapshots()[0]["id"]
        typing.publish(DAYS[0], north=10)
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
    for mode in MODES:
        assert rows(typing.table(mode).scan()) == NEW
    said = typing.reader.type("penstock audit --json")
    assert said.count('"purged"') >= 1


@pytest.mark.timeout(600)
def test_what_the_page_types_reads_a_bucket_with_credentials_for_one_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: Background
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    (tmp_path / "shop.yaml").write_text(PIPELINE)
    (tmp_path / "shop.py").write_text(FUNCTION)
    with (
        an_s3_server(background, tmp_path / "s3", mints=True) as server,
        a_reader(tmp_path) as reader,
    ):
        typing = Typing(reader)
        # What somebody has in their environment whose bucket is not AWS's.
        reader.environment |= {
            "AWS_ACCESS_KEY_ID": server.credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": server.credentials.secret_key,
            "AWS_ENDPOINT_URL": server.endpoint,
        }
        role = "arn:aws:iam::123456789012:role/penstock-task"
        typing.filled |= {"s3://my-lake/penstock": "s3://penstock/lake", role: server.task_role}
        reader.type(typing.block("On S3", language="sh"))
        reader.hears("Penstock is up")
        typing.publish(*DAYS, north=1)
        token = reader.type("penstock token create bi --dataset totals").strip()
        typing.filled |= {'"any"': f'"{token}"', "'any'": f"'{token}'"}
        assert rows(typing.table("client", token=token).scan()) == OLD
        first = typing.snapshots()[0]["id"]
        typing.filled["1769947200000"] = str(first)
        typing.publish(DAYS[0], north=10, tax=0.5)
        _in_a_bucket(typing, token)
        asyncio.run(_for_one_dataset(typing, token, server.endpoint))


def _in_a_bucket(typing: Typing, token: str) -> None:
    only, then = typing.python("load_catalog")
    assert rows(only) == [each for each in NEW if each[-1] == DAYS[0]]
    assert rows(then) == OLD
    assert [rows(each) for each in typing.python("storage_options")] == [NEW]
    now, before = typing.sql()
    # The column came with the second day; what is older has nothing in it.
    assert sorted(before) == OLD
    assert {each[:2] + each[3:]: each[2] for each in now} == {
        each: 0.5 if each[1] == 10 else None for each in NEW
    }
    for mode in MODES:
        table = typing.table(mode, token=token)
        assert sorted(table.scan().to_arrow()["tax"].to_pylist(), key=str) == [0.5] + 3 * [None]
        for wanted in (f"partition_key = '{DAYS[1]}'", "total > 9"):
            assert len(list(table.scan(row_filter=wanted).plan_files())) == 1, (mode, wanted)


async def _for_one_dataset(typing: Typing, token: str, endpoint: str) -> None:
    """What came with the table opens no file of another, though there is the same in it."""
    given = typing.table("server", token=token).io.properties
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=given["s3.region"],
        aws_access_key_id=given["s3.access-key-id"],
        aws_secret_access_key=given["s3.secret-access-key"],
        aws_session_token=given["s3.session-token"],
    )
    async with Client(typing.url) as penstock:
        for name in ("totals", "others"):
            part = (await penstock.table(name).snapshot()).parts[0]
            bucket, _, folder = part.location.removeprefix("s3://").partition("/")
            asked = {"Bucket": bucket, "Key": f"{folder.rstrip('/')}/totals.parquet"}
            for ask in (client.get_object, client.put_object):
                if (name, ask) == ("totals", client.get_object):
                    assert ask(**asked)["ContentLength"] > 0
                    continue
                with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
                    ask(**asked)
