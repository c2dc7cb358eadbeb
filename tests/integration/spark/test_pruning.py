"""Pruning: a file that is left out has no row that the query wants, and is not touched at all."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.datasets.layout import path_of
from penstock.datasets.schema import Column
from penstock.datasets.snapshot import read
from penstock.runtimes.base import Part
from penstock.runtimes.spark import input_reader, internals, operators
from penstock.runtimes.spark.access.base import FileSlice, PathReader
from penstock.runtimes.spark.access.remote import RemoteAccess
from penstock.runtimes.spark.input_reader import InputFiles, InputReader, filters_of, pruned
from tests.integration.spark.bench import Bench

MONTHS = [f"2020-{month:02}" for month in range(1, 9)]
NAN = float("nan")
TYPES = {
    "n": pa.int64(),
    "i": pa.int32(),
    "f": pa.float64(),
    "s": pa.string(),
    "d": pa.date32(),
    "t": pa.timestamp("us", "UTC"),
    "l": pa.timestamp("us"),
    "m": pa.decimal128(10, 2),
    "b": pa.bool_(),
}
LONG = "x" * 40
LOCAL = datetime(2020, 1, 1, tzinfo=UTC).replace(tzinfo=None)
PILES: dict[str, Any] = {
    "n": [[1, 2], [2, None], [None, None], [-5, 9], [3, 3]],
    "i": [[0, 0], [7, None], [1, 2], [-1, -1], [None, 5]],
    "f": [[1.0, NAN], [-0.0, -0.0], [0.0, 5.0], [None, NAN], [math.inf, 1.0]],
    "s": [["a", "b"], [LONG + "a", LONG], ["", None], ["ü", "Z"], ["ab", "abc"]],
    "d": [[date(2020, 1, 1), date(2020, 1, 31)], [date(1969, 12, 31), None]] * 2
    + [[date(1582, 1, 1), date(9999, 12, 31)]],
    "t": [[datetime(2020, 1, 1, 0, 0, 0, 5, UTC), datetime(2020, 1, 2, tzinfo=UTC)], [None] * 2] * 2
    + [[datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), datetime(2020, 3, 1, tzinfo=UTC)]],
    "l": [[LOCAL, LOCAL.replace(hour=3, day=2)], [None, LOCAL.replace(year=1960)]] * 2
    + [[LOCAL.replace(year=2021), None]],
    "m": [
        [Decimal("1.50"), None],
        [Decimal("-3.25"), Decimal("0.00")],
        [None, None],
        [Decimal("99.99"), Decimal("1.5")],
        [Decimal(2), Decimal(2)],
    ],
    "b": [[True, None], [False, False], [None, None], [True, True], [True, False]],
}
LITERALS: dict[str, Sequence[str]] = {
    "n": ("0", "2", "-5", "3", "9", "2.0", "2.5D", "NULL", "'2'", "9000000000"),
    "i": ("0", "7", "-1", "7L", "1.5", "CAST(5 AS smallint)"),
    "f": ("0.0D", "-0.0D", "5", "1.0D", "double('NaN')", "double('inf')", "-1e300D", "0.5"),
    "s": ("'a'", "'ab'", "''", "'Z'", "'ü'", f"'{LONG}'", f"'{LONG}b'", "'zz'", "NULL"),
    "d": (
        "DATE '2020-01-31'",
        "'2019-06-01'",
        "DATE '1582-01-01'",
        "TIMESTAMP '2020-01-01 10:00:00'",
    ),
    "t": ("TIMESTAMP '2020-01-01 00:00:00.000005'", "DATE '2020-01-02'", "'2020-02-01'"),
    "l": (
        "TIMESTAMP_NTZ '2020-01-02 03:00:00'",
        "DATE '2020-06-01'",
        "TIMESTAMP '2020-01-01 00:00:00'",
    ),
    "m": ("1.5", "1.50", "2", "-3.25", "100", "0.001", "1.5D"),
    "b": ("true", "false"),
}


def _leaf() -> some.SearchStrategy[str]:
    def of(name: str) -> some.SearchStrategy[str]:
        literal = some.sampled_from(LITERALS[name])
        sign = some.sampled_from(["=", "<", "<=", ">", ">=", "<=>", "<>"])
        column = some.sampled_from([name, name.upper(), f"`{name}`", f"`in`.{name}"])
        kinds = [
            some.tuples(column, sign, literal).map(" ".join),
            some.tuples(literal, sign, column).map(" ".join),
            some.tuples(column, some.lists(literal, min_size=1, max_size=14)).map(
                lambda each: f"{each[0]} IN ({', '.join(each[1])})"
            ),
            some.tuples(column, literal, literal).map(
                lambda each: f"{each[0]} BETWEEN {each[1]} AND {each[2]}"
            ),
            column.map("{} IS NULL".format),
            column.map("{} IS NOT NULL".format),
        ]
        if name == "s":
            kinds += [
                some.sampled_from(
                    ["s LIKE 'a%'", "s LIKE '%b'", "startswith(s, 'xx')", "s LIKE '_b'"]
                ),
                some.tuples(sign, literal).map(
                    lambda each: f"s COLLATE UTF8_LCASE {each[0]} {each[1]}"
                ),
                some.tuples(sign, literal).map(lambda each: f"upper(s) {each[0]} {each[1]}"),
            ]
        if name in "dt":
            kinds += [
                some.sampled_from([f"date_trunc('month', {name}) = DATE '2020-01-01'"]),
                some.sampled_from([f"year({name}) = 2020", f"CAST({name} AS string) > '2020'"]),
            ]
        return some.one_of(kinds)

    return some.sampled_from(list(TYPES)).flatmap(of)


PREDICATES = some.recursive(
    _leaf(),
    lambda inner: some.one_of(
        some.tuples(inner, inner).map(lambda each: f"({each[0]} AND {each[1]})"),
        some.tuples(inner, inner).map(lambda each: f"({each[0]} OR {each[1]})"),
        inner.map("NOT ({})".format),
        some.tuples(inner, inner).map(lambda each: f"coalesce({each[0]}, {each[1]})"),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def piles(jvm: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, InputFiles, Any]:
    """A session, an input of several files, and their rows with the number of the file."""
    folder = tmp_path_factory.mktemp("piles")
    session = jvm.fresh()
    bench = Bench(session, folder / "root", folder)
    parts = [
        bench.publish(
            {name: pa.array(PILES[name][place], kind) for name, kind in TYPES.items()},
            key=str(place),
        )
        for place in range(5)
    ]
    work = bench.work("spark.sql", {}, inputs={"in": parts})
    found = InputReader(bench.transfer).inputs(work)["in"]
    without = {"b", "f"}
    """Files of Arrow say nothing of floats, since it would leave `NaN` out."""
    assert all(each.bounds.keys() == TYPES.keys() - without for each in found.files)
    paths = [(f"file://{path_of(each.location)}", each.partition_key) for each in found.files]
    return session, found, PathReader().frame(session, paths, found.columns).cache()


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
@given(some.lists(PREDICATES, min_size=30, max_size=30))
def test_no_file_with_a_wanted_row_is_left_out(
    piles: tuple[Any, InputFiles, Any], wanted: list[str]
) -> None:
    """Many filters in one plan, each over an input of its own; Spark says what they find."""
    session, found, rows = piles
    session.conf.set("spark.sql.ansi.enabled", "false")
    rows.createOrReplaceTempView("every")
    asked = " UNION ALL ".join(
        f"SELECT n FROM in{place} AS `in` WHERE {each}" for place, each in enumerate(wanted)
    )
    columns = {f"in{place}": found.columns or () for place in range(len(wanted))}
    filters = filters_of(session, asked, None, columns)
    counts = ", ".join(f"count_if({each}) AS c{place}" for place, each in enumerate(wanted))
    truth = session.sql(f"SELECT _partition, {counts} FROM every AS `in` GROUP BY 1").collect()
    used = 0
    for place, each in enumerate(wanted):
        kept = pruned(found, filters.get(f"in{place}"), lambda _: None).files
        used += len(kept) < len(found.files)
        needed = {row["_partition"] for row in truth if row[f"c{place}"]}
        assert needed <= {file.partition_key for file in kept}, (each, filters[f"in{place}"])
    assert used, "nothing is pruned, so nothing is shown"


@pytest.fixture
def months(bench: Bench) -> list[Part]:
    return [
        bench.publish({"month": [key] * 3, "n": [place, place + 1, None]}, key=key)
        for place, key in enumerate(MONTHS)
    ]


QUERIES: dict[str, tuple[str, int]] = {
    "a literal": ("SELECT * FROM sales WHERE month = '2020-03'", 1),
    "a parameter": ("SELECT * FROM sales WHERE month = :partition_key", 1),
    "a list": ("SELECT * FROM SALES WHERE Month IN ('2020-03', '2020-08', 'none')", 2),
    "a range": ("SELECT * FROM sales WHERE month BETWEEN '2020-02' AND '2020-04'", 3),
    "either column": ("SELECT * FROM sales WHERE month = '2020-03' OR n = 8", 2),
    "a view": (
        "WITH v AS (SELECT month AS m, n FROM sales) SELECT * FROM v WHERE m < '2020-02'",
        1,
    ),
    "two uses": (
        (
            "SELECT a.n, b.n AS o FROM sales a JOIN sales b ON a.n = b.n"
            " WHERE a.month = '2020-02' AND b.month = '2020-03'"
        ),
        2,
    ),
    "a use without a filter": (
        "SELECT * FROM sales WHERE month = '2020-02' AND n < (SELECT max(n) FROM sales)",
        8,
    ),
    "a filter of a subquery": (
        (
            "SELECT * FROM sales WHERE month = '2020-02' AND n <= (SELECT max(n) FROM sales"
            " WHERE month = '2020-01')"
        ),
        2,
    ),
    "the inner side": (
        (
            "SELECT a.n, b.month FROM sales a LEFT JOIN sales b"
            " ON a.n = b.n AND b.month = '2020-01' WHERE a.month = '2020-02'"
        ),
        2,
    ),
    "the outer side": (
        "SELECT a.n, b.month FROM sales a LEFT JOIN sales b ON a.n = b.n AND a.month = '2020-01'",
        8,
    ),
    "nothing": ("SELECT count(*) AS c FROM sales WHERE month = 'none'", 0),
    "the partition": ("SELECT n, _partition AS p FROM sales WHERE _partition = '2020-03'", 1),
    "of the partition": ("SELECT n FROM sales WHERE substr(_PARTITION, 6) = '03'", 8),
    "the time": ("SELECT n FROM sales WHERE month > cast(current_date() AS string)", 8),
    "luck": ("SELECT month FROM sales WHERE month = '2020-03' AND rand() < 2", 1),
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_has_the_same_answer_and_fewer_files(
    bench: Bench, months: list[Part], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql, files = QUERIES[name]

    def answer() -> tuple[list[str], int]:
        work = bench.work("spark.sql", {"sql": sql}, inputs={"sales": months}, key="2020-03")
        finished = bench.finished(work)
        rows = sorted(map(str, bench.rows(finished.made[0])))
        return rows, finished.metrics["rows_in"] // 3

    with monkeypatch.context() as patched:
        patched.setattr(operators, "FILES_MIN", 1_000)
        expected, whole = answer()
    assert whole == len(MONTHS)
    assert answer() == (expected, files)


def test_what_is_left_out_is_not_touched(bench: Bench, months: list[Part]) -> None:
    for part in months[1:]:
        path_of(f"{part.location}/part-00000.parquet").unlink()
    sql = "SELECT sum(n) AS n FROM sales WHERE month = :partition_key"
    work = bench.work("spark.sql", {"sql": sql}, inputs={"sales": months}, key=MONTHS[0])
    assert bench.rows(bench.made(work)) == [{"n": 1}]


def test_a_query_that_asks_for_nothing_runs_once(bench: Bench, months: list[Part]) -> None:
    """A text that does something would do it twice, and the first time over no rows."""
    for sql in ("INSERT INTO t SELECT * FROM a", "WITH a AS (SELECT 1) INSERT INTO t FROM a"):
        assert filters_of(bench.session, sql, None, {"a": (Column("n", "int"),)}) == {}


def test_plans_that_cannot_be_read_are_told_of_once_and_wrong_queries_are_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"a": (Column("n", "int"),)}
    monkeypatch.setattr(input_reader, "_is_told", threading.Event())
    assert filters_of(bench.session, "SELECT nope FROM a WHERE n > 1", None, columns) == {}
    assert not input_reader._is_told.is_set()
    monkeypatch.setattr(internals, "plan_leaves", lambda plan, **_: plan.leavesByAnotherName())
    for _ in range(2):
        assert filters_of(bench.session, "SELECT n FROM a WHERE n > 1", None, columns) == {}
    (said,) = [each for each in caplog.records if each.name == input_reader.__name__]
    assert "reads all files of its inputs" in said.message


def test_spark_reads_the_files_of_a_partition_and_no_others(
    bench: Bench, months: list[Part], tmp_path: Path
) -> None:
    """In whatever expression: that is also how transforms in Python are served."""
    work = bench.work("spark.sql", {}, inputs={"sales": months})
    found = InputReader(bench.transfer).inputs(work)["sales"]
    paths = [(f"file://{path_of(each.location)}", each.partition_key) for each in found.files]
    frame = PathReader().frame(bench.session, paths, found.columns)
    quarter = F.date_trunc("quarter", F.concat("_partition", F.lit("-01")))
    for wanted, files in (
        (F.col("_partition") == "2020-03", 1),
        (quarter == "2020-01-01", 3),
        ((F.col("_partition") > "2020-06") & (F.col("n") > 0), 2),
        ((F.col("_partition") == "2020-03") | (F.col("n") > 0), 8),
    ):
        asked = frame.where(wanted)
        assert asked.where("month <> _partition").count() == 0
        assert _files_read(asked) == files, wanted


def _files_read(frame: Any) -> int:
    frame.collect()
    leaves = frame._jdf.queryExecution().executedPlan().collectLeaves()
    return int(leaves.apply(0).metrics().apply("numFiles").value())


def test_a_filter_that_leaves_no_file_to_executors_finds_nothing(bench: Bench) -> None:
    """Spark has its executors read something all the same."""
    (contents,) = read([bench.publish({"n": [1, 2]}, key=None)], bench.transfer)
    with ExitStack() as held:
        slices = [FileSlice(files=contents.files)]
        frame = RemoteAccess(bench.transfer).frame(bench.session, slices, contents.columns, held)
        assert frame.where("n > 5").collect() == []
