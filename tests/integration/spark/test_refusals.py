"""What cannot be published is refused by its plan, before anything is computed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.datasets.schema import Column
from penstock.runtimes.base import AttemptWork, Merge, WorkResult
from penstock.runtimes.spark.engine_protocol import WorkFailure
from tests.integration.spark.bench import Bench
from tests.queries import SAME_TOKENS

HELD = (Column("n", "int"), Column("name", "string"))
TWO = """
from pyspark.sql import functions as F
def both(inputs, context):
    wide = context.session.range(3).select(F.col("id").cast("int").alias("n"))
    return {"out": wide, "more": wide.withColumn("name", F.lit(True))}
"""


def work_of(bench: Bench, sql: str, *, merge: Merge | None = None, **said: Any) -> AttemptWork:
    place = {name: said.pop(name) for name in ("columns", "partition_by") if name in said}
    work = bench.work("spark.sql", {"sql": sql, **said}, merge=merge)
    return replace(work, outputs={"out": replace(work.outputs["out"], **place)})


def refused(bench: Bench, *works: AttemptWork) -> list[str]:
    """Why each of these was refused, for good and before Spark was to compute anything."""
    bench.told.phases.clear()
    ended = bench.ended(*works)
    assert set(bench.told.phases) == {"reading"}
    found = [
        each for each in ended.values() if isinstance(each, WorkFailure) and not each.is_retried
    ]
    assert len(found) == len(works), ended
    return [each.reason for each in found]


NOT_A_DATE = (
    "The column 'n' is int here, and date in what is published of this generation. Cast it to date."
    " Another schema needs a new generation: change the job's config and apply the DAG."
)
NO_COLUMN = "the result has no column 'nope'; it has n."


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"columns": (Column("n", "date"),)}, NOT_A_DATE),
        ({"columns": (Column("N", "int"),)}, "The columns 'n' and 'N' differ only in upper and"),
        ({"sort_by": ["nope"]}, f"config.sort_by: {NO_COLUMN}"),
        ({"cluster_by": ["nope"]}, f"config.cluster_by: {NO_COLUMN}"),
        ({"merge": Merge(key=("nope",))}, f"unique_key: {NO_COLUMN}"),
        ({"merge": Merge(key=("n",), version_by="nope")}, f"version_by: {NO_COLUMN}"),
        ({"merge": Merge(key=("n",), delete_when="nope = 1")}, "delete_when: A column"),
        ({"partition_by": "nope"}, "partition_by of the output out: A column"),
        ({"expect": [{"check": "nope > 1"}]}, "config.expect: A column"),
        ({"expect": [{"unique": ["nope"]}]}, "names the column 'nope', which the output does not"),
    ],
)
def test_what_the_plan_tells_is_told_before_it_runs(
    bench: Bench, said: dict[str, Any], words: str
) -> None:
    (reason,) = refused(bench, work_of(bench, "SELECT int(raise_error('it ran')) AS n", **said))
    assert words in reason


def test_what_the_generation_can_take_is_computed(bench: Bench) -> None:
    """Also what leaves out a column that may not be null: it may be when the task ends."""
    held = (*HELD, Column("there", "int", is_nullable=False))
    for sql in ("SELECT 1L AS n", "SELECT 1 AS n, 'a' AS name, date'2026-01-01' AS day"):
        work = work_of(bench, sql, columns=held)
        assert isinstance(bench.ended(work)[work.task_id], WorkResult)


def test_every_task_of_a_batch_is_refused_by_itself(bench: Bench) -> None:
    sql = "SELECT string(raise_error('it ran')) AS n"
    works = [replace(work_of(bench, sql, columns=HELD), batch="b", batch_size=2) for _ in range(2)]
    for reason in refused(bench, *works):
        assert reason.startswith("The column 'n' is string here, and int in")


def test_all_outputs_are_looked_at_before_the_first_is_computed(
    bench: Bench, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "both_of_them.py").write_text(TWO)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"transform": "both_of_them:both"}
    work = bench.work("spark.python", config, outputs=("out", "more"))
    outputs = {name: replace(place, columns=HELD) for name, place in work.outputs.items()}
    (reason,) = refused(bench, replace(work, outputs=outputs))
    assert reason.startswith("The column 'name' is boolean here, and string in what is published")


@pytest.mark.parametrize(("sql", "other"), SAME_TOKENS)
def test_queries_of_the_same_tokens_are_the_same_plan(spark: Any, sql: str, other: str) -> None:
    """What defines a job is known without Spark; here Spark's own parser is asked."""
    parser = spark._jsparkSession.sessionState().sqlParser()
    one, two = (re.sub(r"#\d+", "", parser.parsePlan(each).toString()) for each in (sql, other))
    assert one == two
