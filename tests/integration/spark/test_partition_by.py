"""Many partitions from one pass: keys, files, manifests, and what is refused."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from penstock.datasets.bounds import Bound
from penstock.datasets.layout import path_of
from penstock.runtimes.base import AttemptWork, Part, ProducedOutput
from penstock.runtimes.spark.access.base import DataAccess
from penstock.runtimes.spark.access.folder import FolderAccess
from penstock.runtimes.spark.access.remote import RemoteAccess
from penstock.runtimes.spark.engine import Engine
from penstock.runtimes.spark.partition_keys import KEY, keyed
from tests.integration.spark.bench import Bench, part

UTC = dt.UTC
TRIPS = {
    "ts": [
        *(dt.datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC),),
        *(dt.datetime(2026, 1, 1, tzinfo=UTC), dt.datetime(2026, 1, 31, 23, tzinfo=UTC)),
        dt.datetime(2026, 2, 1, tzinfo=UTC),
    ],
    "day": [dt.date(2025, 12, 31), dt.date(2026, 1, 1), dt.date(2026, 1, 31), dt.date(2026, 2, 1)],
    "zone": ["a/b", "ü", "a b=%", "~many"],
    "n": [1, 2, 3, 4],
}


@pytest.fixture
def trips(bench: Bench) -> Part:
    return bench.publish(TRIPS, key=None)


def work_of(
    bench: Bench, trips: Part, by: str, sql: str = "SELECT * FROM trips", **config: Any
) -> AttemptWork:
    work = bench.work("spark.sql", {"sql": sql, **config}, inputs={"trips": [trips]}, key=None)
    out = work.outputs["out"]
    place = replace(out, partition_by=by, location=out.location.replace("/~all/", "/~many/"))
    return replace(work, outputs={"out": place})


def keys(made: tuple[ProducedOutput, ...]) -> list[str | None]:
    return [each.partition_key for each in made]


KEYS = {
    "date_trunc('month', ts)": ["2025-12", "2026-01", "2026-02"],
    "trunc(day, 'MM')": ["2025-12", "2026-01", "2026-02"],
    "date_trunc('WEEK', ts)": ["2026-W01", "2026-W05"],
    "date_trunc('quarter', ts)": ["2025-Q4", "2026-Q1"],
    "day": ["2025-12-31", "2026-01-01", "2026-01-31", "2026-02-01"],
    "date_trunc('hour', date_add(day, 0))": [
        *("2025-12-31T00:00Z", "2026-01-01T00:00Z", "2026-01-31T00:00Z", "2026-02-01T00:00Z"),
    ],
    "ts": [
        *("2025-12-31T23:59:59.000000Z", "2026-01-01T00:00Z", "2026-01-31T23:00Z"),
        "2026-02-01T00:00Z",
    ],
    "n % 2": ["0", "1"],
    "date_format(ts, 'yyyy')": ["2025", "2026"],
}


def test_keys_are_those_of_the_calendar_in_utc(bench: Bench) -> None:
    frame = bench.session.createDataFrame(pa.table(TRIPS))
    for place, by in enumerate(KEYS):
        made = keyed(bench.session, frame, by, output="out").frame
        frame = made.withColumnRenamed(KEY, f"k{place}")
    rows = frame.collect()
    found = {by: sorted({row[f"k{place}"] for row in rows}) for place, by in enumerate(KEYS)}
    assert found == KEYS


def test_an_hour_that_comes_twice_in_another_time_zone_is_two(bench: Bench) -> None:
    bench.session.conf.set("spark.sql.session.timeZone", "America/New_York")
    hours = "SELECT timestamp_seconds(1793509200 + 3600 * id) AS ts FROM range(3)"
    frame = bench.session.sql(f"{hours} UNION ALL SELECT timestamp_micros(1793509260500000)")
    by_hour = keyed(bench.session, frame, "date_trunc('hour', ts)", output="out")
    found = sorted(row[0] for row in by_hour.frame.select(KEY).distinct().collect())
    assert found == ["2026-11-01T05:00Z", "2026-11-01T06:00Z", "2026-11-01T07:00Z"]
    by_moment = keyed(bench.session, frame, "ts", output="out").frame
    assert by_moment.select(KEY).collect()[-1][0] == "2026-11-01T05:01:00.500000Z"


def test_each_value_is_a_partition_with_its_own_rows(bench: Bench, trips: Part) -> None:
    made = bench.finished(work_of(bench, trips, "zone")).made
    found = {each.partition_key: [row["n"] for row in bench.rows(each)] for each in made}
    assert found == {"a/b": [1], "ü": [2], "a b=%": [3], "~many": [4]}
    for each in made:
        manifest = bench.manifest(each)
        assert (manifest.partition_key, manifest.start) == (each.partition_key, None)
        assert [column.name for column in manifest.columns] == list(TRIPS)
        assert [one.dataset for one in manifest.inputs] == ["trips"]
    # The columns travel once.
    assert [bool(each.facts and each.facts.columns) for each in made] == [True, *[False] * 3]


def test_a_month_has_its_range_and_its_rows(bench: Bench, trips: Part) -> None:
    made = bench.finished(work_of(bench, trips, "date_trunc('month', ts)")).made
    january = next(each for each in made if each.partition_key == "2026-01")
    assert (january.start, january.end) == (1767225600, 1769904000)
    assert {row["n"] for row in bench.rows(january)} == {2, 3}


def test_equal_rows_are_equal_bytes_where_they_are_sorted(bench: Bench, trips: Part) -> None:
    sums = []
    for order in ("n", "-n"):
        sql = f"SELECT * FROM trips ORDER BY {order}"
        made = bench.finished(work_of(bench, trips, "n % 2", sql, sort_by=["n"])).made
        sums.append([[file.sha256 for file in bench.manifest(each).files] for each in made])
    assert sums[0] == sums[1]
    assert [len(each) for each in sums[0]] == [1, 1]


@pytest.mark.parametrize(
    ("by", "sql", "said"),
    [
        ("zone", "SELECT n, nullif(zone, 'ü') AS zone FROM trips", '"n":"2"'),
        ("repeat(zone, 40)", "SELECT * FROM trips", "1 to 80 bytes"),
        ("concat(zone, '\n')", "SELECT * FROM trips", "control characters"),
        ("n / 2", "SELECT * FROM trips", "is of the type double"),
        ("n", "SELECT n, zone AS _Penstock_Key FROM trips", "has a column _penstock_key; rename"),
        ("explode(array(1, 2))", "SELECT * FROM trips", "partition_by of the output out"),
        ("date_trunc('month', nothing)", "SELECT * FROM trips", "partition_by of the output out"),
        ("date_trunc('month', ", "SELECT * FROM trips", "partition_by of the output out"),
    ],
)
def test_what_is_no_key_is_refused_and_the_row_is_named(
    bench: Bench, trips: Part, by: str, sql: str, said: str
) -> None:
    failure = bench.failure(work_of(bench, trips, by, sql))
    assert said in failure.reason, failure.reason
    assert not failure.is_retried


def test_too_many_partitions_publish_none(bench: Bench, trips: Part) -> None:
    settings = replace(bench.settings, partitions_max=3)
    bench.engine = Engine(settings, bench.session)
    failure = bench.failure(work_of(bench, trips, "n"))
    assert "4 partitions" in failure.reason
    assert "3 are allowed" in failure.reason


def test_what_is_expected_is_of_all_rows_before_there_is_a_manifest(
    bench: Bench, trips: Part
) -> None:
    work = work_of(bench, trips, "n", expect=[{"check": "n < 4"}])
    assert "n < 4" in bench.failure(work).reason
    home = path_of(work.outputs["out"].location)
    assert not list(home.rglob("manifest.json"))


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
def test_checks_are_counted_while_partitions_are_written_and_else_in_the_files(
    bench: Bench, trips: Part, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    plain = bench.finished(work_of(bench, trips, "n % 2", sort_by=["zone"])).made
    if not is_counted:
        refusal = Mock(side_effect=AnalysisException("no such metric"))
        monkeypatch.setattr("penstock.runtimes.spark.expectations.observed", refusal)
    right: list[Any] = [{"check": "n > 1", "at_most": 1}, {"rows": {"min": 4, "max": 4}}]
    made = bench.finished(work_of(bench, trips, "n % 2", sort_by=["zone"], expect=right)).made
    assert ("checking" in bench.told.phases) is not is_counted
    sums = [[[f.sha256 for f in bench.manifest(m).files] for m in some] for some in (plain, made)]
    assert sums[0] == sums[1], "who watches changes the order of rows"
    failure = bench.failure(work_of(bench, trips, "n", expect=[{"check": "n > 2"}]))
    assert "'n > 2' fails for 2 of 4 rows, and none may" in failure.reason
    failure = bench.failure(work_of(bench, trips, "n", expect=[{"unique": ["n % 2"]}]))
    assert "names the column 'n % 2'" in failure.reason
    failure = bench.failure(work_of(bench, trips, "n", expect=[{"rows": {"max": 3}}]))
    assert "there are 4" in failure.reason


def test_no_rows_are_no_partitions(bench: Bench, trips: Part) -> None:
    work = work_of(bench, trips, "n", "SELECT * FROM trips WHERE n > 9")
    assert bench.finished(work).made == ()


def test_every_way_divides_alike(
    bench: Bench, trips: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    accesses, usual = bench.engine._accesses, bench.engine._accesses.to
    for way in (RemoteAccess(bench.transfer), FolderAccess(bench.transfer)):

        def to(location: str, way: DataAccess = way) -> DataAccess:
            return way if "/~many/" in location else usual(location)

        monkeypatch.setattr(accesses, "to", to)
        made = bench.finished(work_of(bench, trips, "zone")).made
        found = {each.partition_key: [row["n"] for row in bench.rows(each)] for each in made}
        assert found == {"a/b": [1], "ü": [2], "a b=%": [3], "~many": [4]}


def test_what_follows_reads_the_partitions(bench: Bench, trips: Part) -> None:
    made = bench.finished(work_of(bench, trips, "date_trunc('month', ts)")).made
    follows = bench.work(
        "spark.sql",
        {"sql": "SELECT sum(n) AS n FROM months"},
        inputs={"months": [part(each) for each in made]},
    )
    assert bench.rows(bench.made(follows)) == [{"n": 10}]


def test_many_small_partitions_are_written_on_all_cores(bench: Bench) -> None:
    """And have bounds, so that what follows leaves files out."""
    trips = bench.publish({"n": list(range(1000))}, key=None)
    made = bench.finished(work_of(bench, trips, "n % 20")).made
    assert len(made) == 20
    names = [file.name for each in made for file in bench.manifest(each).files]
    assert len({name.split("-")[1] for name in names}) == 2
    (file,) = bench.manifest(made[0]).files
    assert file.bounds["n"] == Bound(0, 980, 0)


def test_nothing_but_files_and_manifests_is_written(bench: Bench, trips: Part) -> None:
    """Hadoop's file system for folders would write a sum beside each, and start a process."""
    work = work_of(bench, trips, "n")
    made = bench.finished(work).made
    home = path_of(work.outputs["out"].location)
    wanted = {home / each.location.rpartition("/")[2] / "manifest.json" for each in made}
    wanted |= {
        path_of(f"{each.location}/{file.name}")
        for each in made
        for file in bench.manifest(each).files
    }
    assert {each for each in home.parent.rglob("*") if each.is_file()} == wanted
    assert len(wanted) == 8


def test_a_footer_that_is_too_large_to_be_told_is_read(bench: Bench, trips: Part) -> None:
    many = ", ".join(f"n + {each} AS a_column_with_a_long_name_{each}" for each in range(200))
    made = bench.finished(work_of(bench, trips, "n", f"SELECT n, {many} FROM trips")).made
    (file,) = bench.manifest(made[0]).files
    assert (file.rows, file.bounds["n"]) == (1, Bound(1, 1, 0))


LITTLE = 2**16
"""How large files are to be below."""


def large(bench: Bench, *, tasks: int = 1, by: str = "v", **config: Any) -> AttemptWork:
    """A partition of some 500 kB, and twenty of a few rows, of which Spark tasks make as many."""
    trips = bench.publish({"n": [1]}, key=None)
    sql = (
        "SELECT xxhash64(id) AS h, id % 7 AS k,"
        " IF(id < 60000, 'large', CAST(id % 20 AS STRING)) AS v"
        f" FROM range(0, 60100, 1, {tasks}) JOIN trips"
    )
    return work_of(bench, trips, by, sql, target_file_bytes="64KiB", **config)


def sizes(bench: Bench, made: tuple[ProducedOutput, ...]) -> dict[str | None, list[int]]:
    """Of the files of each partition, which are all that there is."""
    found = {}
    for each in made:
        files = bench.manifest(each).files
        folder = path_of(each.location)
        assert {path.name for path in folder.glob("*.parquet")} == {file.name for file in files}
        found[each.partition_key] = [file.bytes for file in files]
    return found


@pytest.mark.parametrize("tasks", [1, 8])
@pytest.mark.parametrize("way", ["", "sort_by", "cluster_by"])
def test_a_large_partition_is_several_files_and_small_ones_are_one(
    bench: Bench, tasks: int, way: str
) -> None:
    config: dict[str, Any] = {way: ["k", "h"]} if way else {}
    expect = [{"check": "h IS NOT NULL"}, {"rows": {"min": 60_100, "max": 60_100}}]
    work = large(bench, tasks=tasks, expect=expect, **config)
    made = bench.finished(work).made
    found = sizes(bench, made)
    assert len(found) == 21
    many = found.pop("large")
    assert all(len(some) == 1 for some in found.values())
    assert len(many) >= 4
    assert max(many) < 4 * LITTLE
    rows = [row["h"] for each in made for row in bench.rows(each)]
    assert len(set(rows)) == 60_100
    assert "checking" not in bench.told.phases


def test_a_partition_that_is_clustered_is_files_of_ranges_made_by_many_tasks(
    bench: Bench,
) -> None:
    made = bench.finished(large(bench, tasks=8, cluster_by=["h"])).made
    (one,) = (each for each in made if each.partition_key == "large")
    found = [file.bounds["h"] for file in bench.manifest(one).files]
    ends = sorted((int(each.low or 0), int(each.high or 0)) for each in found)
    assert len(ends) > 4
    assert all(before[1] < after[0] for before, after in pairwise(ends))


def test_sorted_partitions_have_equal_bytes_however_many_tasks_make_them(bench: Bench) -> None:
    sums = []
    for tasks in (1, 5):
        made = bench.finished(large(bench, tasks=tasks, sort_by=["k"])).made
        sums.append([[file.sha256 for file in bench.manifest(each).files] for each in made])
    assert sums[0] == sums[1]
    assert max(len(some) for some in sums[0]) > 4
