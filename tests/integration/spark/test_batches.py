"""Tasks that run as one Spark job: each has what it would have had alone, and an end of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.runtimes.base import AttemptWork, Part, ProducedOutput, WorkResult
from penstock.runtimes.spark.engine_protocol import WorkFailure
from tests.integration.spark.bench import Bench

COUNT = {"sql": "SELECT count(*) AS n, :partition_key AS day FROM raw"}
WISE = {
    "sql": "SELECT _partition, k, count(*) AS n FROM raw GROUP BY _partition, k",
    "partition_wise": True,
    "sort_by": ["k"],
}


def days(bench: Bench, counts: Sequence[int]) -> list[Part]:
    return [
        bench.publish(
            {
                "k": pa.array([each % 2 for each in range(count)], pa.int64()),
                "v": pa.array(range(count), pa.int64()),
            },
            key=f"day/{place}",
        )
        for place, count in enumerate(counts)
    ]


def works(
    bench: Bench, operator: str, config: Mapping[str, Any], parts: Sequence[Part], **more: Any
) -> list[AttemptWork]:
    return [
        bench.work(operator, config, inputs={"raw": [part]}, key=part.partition_key, **more)
        for part in parts
    ]


def made_of(bench: Bench, batch: Sequence[AttemptWork]) -> list[ProducedOutput]:
    ended = bench.ended(*batch)
    found = []
    for work in batch:
        each = ended[work.task_id]
        assert isinstance(each, WorkResult), each
        (made,) = each.made
        assert made.partition_key == work.payload["partition_key"]
        found.append(made)
    return found


def test_a_count_gives_one_row_a_partition(bench: Bench) -> None:
    batch = works(bench, "spark.sql", COUNT, days(bench, [3, 0, 5]))
    made = made_of(bench, batch)
    assert [bench.rows(each) for each in made] == [
        [{"n": count, "day": f"day/{place}"}] for place, count in enumerate([3, 0, 5])
    ]
    assert bench.told.begun == [[each.task_id for each in batch]]
    assert len({each.location for each in made}) == 3


@pytest.mark.parametrize(
    ("operator", "config"),
    [
        ("spark.sql", WISE),
        ("compact", {"sort_by": ["v"]}),
        ("rollup", {"by": ["k"], "measures": {"n": "sum(v)"}, "sort_by": ["k"]}),
        ("rollup", {"measures": {"n": "count(*)"}}),
        ("spark.sql", {"sql": "SELECT k, v * 2 AS w FROM raw WHERE v > 1", "sort_by": ["w"]}),
    ],
)
def test_a_batch_makes_the_bytes_that_its_tasks_make_alone(
    bench: Bench, operator: str, config: Mapping[str, Any]
) -> None:
    parts = days(bench, [4, 0, 7])
    together = made_of(bench, works(bench, operator, config, parts))
    assert len(bench.told.begun) == 1
    alone = [bench.made(each) for each in works(bench, operator, config, parts)]
    for one, other in zip(together, alone, strict=True):
        assert bench.manifest(one).files == bench.manifest(other).files
        assert bench.manifest(one).columns == bench.manifest(other).columns
    assert bench.rows(together[0])


def test_an_input_that_all_share_has_no_partition(bench: Bench) -> None:
    names = bench.publish({"k": [0, 1], "name": ["even", "odd"]}, key=None)
    config = {
        "sql": "SELECT _partition, name, count(*) AS n FROM raw JOIN names USING (k)"
        " GROUP BY _partition, name",
        "partition_wise": True,
        "sort_by": ["name"],
    }
    batch = [
        bench.work(
            "spark.sql", config, inputs={"raw": [each], "names": [names]}, key=each.partition_key
        )
        for each in days(bench, [2, 3])
    ]
    assert [bench.rows(each) for each in made_of(bench, batch)] == [
        [{"name": "even", "n": 1}, {"name": "odd", "n": 1}],
        [{"name": "even", "n": 2}, {"name": "odd", "n": 1}],
    ]
    assert len(bench.told.begun) == 1


def test_a_month_is_one_member_though_it_has_many_parts(bench: Bench) -> None:
    months = []
    for month in range(2):
        parts = [
            bench.publish({"k": [0], "v": [day]}, key=f"{month}-{day}", start=start, end=start + 1)
            for day in range(2)
            for start in [month * 10 + day]
        ]
        work = bench.work("spark.sql", WISE, inputs={"raw": parts}, key=f"month {month}")
        payload = {**work.payload, "start": month * 10, "end": month * 10 + 10}
        months.append(replace(work, payload=payload))
    assert [bench.rows(each) for each in made_of(bench, months)] == [[{"k": 0, "n": 2}]] * 2


def test_a_day_is_part_of_its_month_and_of_its_year(bench: Bench) -> None:
    parts = [
        bench.publish({"v": [place]}, key=f"day {place}", start=place * 10, end=place * 10 + 10)
        for place in range(3)
    ]
    batch = []
    for key, end in (("month", 20), ("year", 30)):
        config = {"by": ["v"], "measures": {"n": "count(*)"}, "sort_by": ["v"]}
        work = bench.work("rollup", config, inputs={"raw": parts[: end // 10]}, key=key)
        batch.append(replace(work, payload={**work.payload, "start": 0, "end": end}))
    found = [[row["v"] for row in bench.rows(each)] for each in made_of(bench, batch)]
    assert found == [[0, 1], [0, 1, 2]]
    assert len(bench.told.begun) == 1


def test_one_bad_partition_costs_its_neighbours_nothing(bench: Bench) -> None:
    parts = days(bench, [3, 4, 5])
    config = {"sql": "SELECT 10 / (4 - count(*)) AS q FROM raw"}
    batch = works(bench, "spark.sql", config, parts)
    ended = bench.ended(*batch)
    first, bad, last = (ended[each.task_id] for each in batch)
    assert isinstance(first, WorkResult)
    assert isinstance(last, WorkResult)
    assert isinstance(bad, WorkFailure)
    assert "Division by zero" in bad.reason
    assert not bad.is_retried
    ids = [each.task_id for each in batch]
    assert bench.told.begun == [ids, *([each] for each in ids)]


def test_what_is_not_as_expected_fails_alone_and_nothing_runs_again(bench: Bench) -> None:
    config = {**COUNT, "expect": [{"check": "n > 3", "name": "enough"}]}
    batch = works(bench, "spark.sql", config, days(bench, [3, 4]))
    ended = bench.ended(*batch)
    few, enough = (ended[each.task_id] for each in batch)
    assert isinstance(few, WorkFailure)
    assert "'enough' fails for 1 of 1 rows" in few.reason
    assert isinstance(enough, WorkResult)
    assert len(bench.told.begun) == 1


def test_a_missing_input_fails_alone(bench: Bench) -> None:
    (part,) = days(bench, [3])
    there = bench.work("spark.sql", COUNT, inputs={"raw": [part]}, key=part.partition_key)
    missing = bench.work("spark.sql", COUNT, inputs={"raw": []}, key="never")
    ended = bench.ended(there, missing)
    assert isinstance(ended[there.task_id], WorkResult)
    failed = ended[missing.task_id]
    assert isinstance(failed, WorkFailure)
    assert "Nothing is published of the input raw (dataset raw) for the partition" in failed.reason


def test_a_dropped_member_is_not_written(bench: Bench) -> None:
    batch = works(bench, "spark.sql", COUNT, days(bench, [3, 4, 5]))
    dropped = batch[1]

    def phase(name: str) -> None:
        if name == "running":
            bench.told.dropped.add(dropped.task_id)

    bench.told.phase = phase  # type: ignore[method-assign]
    ended = bench.ended(*batch)
    assert sorted(ended) == [batch[0].task_id, batch[2].task_id]
    assert not list(bench.transfer.list(dropped.outputs["out"].location))


def test_members_of_which_nobody_wants_any_do_not_end_those_after_them(bench: Bench) -> None:
    parts = [
        bench.publish({name: [1] for name in columns}, key=columns)
        for columns in ("a", "ab", "abc")
    ]
    batch = works(bench, "spark.sql", {"sql": "SELECT * FROM raw"}, parts)
    bench.told.dropped.add(batch[1].task_id)
    ended = bench.ended(*batch)
    assert {task_id: type(each) for task_id, each in ended.items()} == {
        batch[0].task_id: WorkResult,
        batch[2].task_id: WorkResult,
    }


def test_members_that_are_too_much_together_run_in_turn(spark: Any, tmp_path: Path) -> None:
    bench = Bench(spark, tmp_path / "root", tmp_path)
    parts = days(bench, [30, 30, 30])
    size = parts[0].bytes or 0
    bench = Bench(spark, tmp_path / "root", tmp_path, arrow_bytes_max=2 * size)
    bench.number = 10
    batch = works(bench, "spark.sql", COUNT, parts)
    assert [bench.rows(each)[0]["n"] for each in made_of(bench, batch)] == [30, 30, 30]
    assert bench.told.begun == [[11, 12], [13]]


def test_members_with_other_columns_run_apart(bench: Bench) -> None:
    one = bench.publish({"a": [1]}, key="one")
    two = bench.publish({"a": [2], "b": ["x"]}, key="two")
    batch = works(bench, "spark.sql", {"sql": "SELECT * FROM raw"}, [one, two])
    first, second = made_of(bench, batch)
    assert [each.name for each in bench.manifest(first).columns] == ["a"]
    assert bench.rows(second) == [{"a": 2, "b": "x"}]


def test_columns_that_each_task_reads_in_its_own_order_are_not_mixed_up(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "one.csv").write_text("shop,amount\nnorth,1\n")
    (tmp_path / "two.csv").write_text("amount,shop\n2,south\n")
    path = f"IDENTIFIER('csv.`{tmp_path}/' || :partition_key || '.csv`') WITH ('header' = 'true')"
    config = {"sql": f"SELECT days.* FROM {path} AS days CROSS JOIN rates"}
    rates = [bench.publish({"rate": [1]}, key=None)]
    batch = [
        bench.work("spark.sql", config, inputs={"rates": rates}, key=key) for key in ("one", "two")
    ]
    assert [bench.rows(each) for each in made_of(bench, batch)] == [
        [{"shop": "north", "amount": "1"}],
        [{"amount": "2", "shop": "south"}],
    ]


def test_a_function_that_exits_ends_its_own_task_alone(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting.py").write_text(
        "import sys\n"
        "def clean(inputs, context):\n"
        "    return sys.exit('no') if context.partition_key == 'day/1' else inputs['raw']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    batch = works(bench, "spark.python", {"transform": "exiting:clean"}, days(bench, [1, 2, 3]))
    ended = bench.ended(*batch)
    first, bad, last = (ended[each.task_id] for each in batch)
    assert isinstance(first, WorkResult)
    assert isinstance(last, WorkResult)
    assert isinstance(bad, WorkFailure)
    assert bad.reason == "exiting:clean ended by SystemExit: 'no'."


def test_rows_of_a_partition_that_nobody_asked_for_are_refused(bench: Bench) -> None:
    config = {
        "sql": "SELECT concat(_partition, '!') AS _partition, v FROM raw",
        "partition_wise": True,
    }
    batch = works(bench, "spark.sql", config, days(bench, [1, 1]))
    for each in bench.ended(*batch).values():
        assert isinstance(each, WorkFailure)
        assert "whose _partition is 'day/" in each.reason
        assert not each.is_retried


def test_a_job_that_is_partition_wise_has_the_column(bench: Bench) -> None:
    config = {"sql": "SELECT count(*) AS n FROM raw", "partition_wise": True}
    for work in works(bench, "spark.sql", config, days(bench, [2])):
        failure = bench.failure(work)
        assert "has no column _partition" in failure.reason
        assert not failure.is_retried
