"""A function's rows in a table of Postgres, of an installation as `penstock up` runs it."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from tests.e2e.test_up import Up, _asked, _kill, _until, _up

DAG = """\
jobs:
  bell:
    activation: source
    source: {kind: manual}
    outputs: [rings]
  watch:
    runtime: process
    operator: alerting:watch
    inputs: [rings]
    outputs:
      - name: alerts
        storage: postgres
        columns: {id: bigint, at: timestamp, level: string, amount: "decimal(12,2)"}
    update: append
  judge:
    runtime: process
    operator: alerting:judge
    inputs: [alerts]
    outputs: [verdicts]
"""
CODE = """\
from datetime import datetime, timezone
from decimal import Decimal
import pyarrow.parquet as parquet


def watch(task):
    at = datetime(2026, 1, 2, 3, tzinfo=timezone.utc)
    task.write_rows("alerts", [
        {"id": task.payload["id"], "at": at, "level": "high", "amount": Decimal("1.20")},
        {"id": -task.payload["id"], "level": None},
    ])


def judge(task):
    rows = sum(parquet.read_table(path).num_rows for path in task.inputs["alerts"].paths)
    (task.output.path / "verdict.txt").write_text(str(rows))
"""


@pytest.mark.timeout(600)
def test_rows_of_a_function_are_in_a_table_that_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dag.yaml").write_text(DAG)
    (tmp_path / "alerting.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    with _up(tmp_path, str(tmp_path / "dag.yaml")) as up:
        for number in (1, 2):
            payload = json.dumps({"id": number})
            up.ask("trigger", "bell", "--payload", payload)
        _until(lambda: _completed(up, "judge") == 2, up)
        shown = json.loads(up.ask("dataset", "show", "alerts", "--json"))["table"]
        assert (shown["is_served"], shown["behind"], shown["problem"]) == (True, 0, None)
        # Who was told finds the rows; the address is the one that people are shown.
        with psycopg.connect(shown["url"]) as connection:
            found = connection.execute(
                "SELECT id, level, amount FROM alerts ORDER BY id"
            ).fetchall()
            assert [(row[0], row[1], str(row[2])) for row in found] == [
                (-2, None, "None"),
                (-1, None, "None"),
                (1, "high", "1.20"),
                (2, "high", "1.20"),
            ]
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                connection.execute("CREATE TABLE hot.mine (x int)")
        # Queries read its files, so they are of one moment with all that is cold.
        counted = "SELECT count(*) AS n FROM alerts WHERE level = 'high'"
        assert up.ask("query", counted, "--format", "csv").split() == ["n", "2"]
        # Neither of these roles is let into the state.
        for role in ("penstock_reader", "penstock_data"):
            state = psycopg.conninfo.make_conninfo(shown["url"], dbname="penstock", user=role)
            with pytest.raises(psycopg.OperationalError, match="pg_hba"):
                psycopg.connect(state)
        assert "4 " not in up.ask("dataset", "rebuild-table", "alerts")
        _until(lambda: "all that is published" in up.ask("dataset", "show", "alerts"), up)
        # Whatever is killed while rows are on their way: each is there once.
        for number in range(3, 9):
            told = {"job": "bell", "cursor": number, "event_id": str(number)}
            ask = {**told, "payload": {"id": number}}
            _until(lambda ask=ask: _asked(up, "POST", "/v1/trigger", ask) is not None, up)  # type: ignore[misc]
            words = "penstock dispatcher" if number % 2 else "/postgres -D"
            _kill(up, words, is_leash=False)
        _until(lambda: _rows(up) == sorted([*range(-8, 0), *range(1, 9)]), up)


def _rows(up: Up) -> list[int]:
    """The ids that a reader finds; none while nobody answers."""
    try:
        shown = _asked(up, "GET", "/v1/datasets/alerts", None)
        with psycopg.connect(shown["table"]["url"] if shown else "") as connection:
            found = connection.execute("SELECT id FROM alerts ORDER BY id").fetchall()
    except psycopg.OperationalError:
        return []
    return [row[0] for row in found]


def _completed(up: Up, job: str) -> int:
    return sum(each["job"] == job and each["status"] == "completed" for each in up.tasks())
