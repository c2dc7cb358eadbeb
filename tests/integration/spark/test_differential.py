"""Whatever way rows are written and read, a job finds those that Spark finds in memory.

On the way from a table to a result rows are skipped by others than Spark's own comparisons: whole
files by the bounds in manifests, row groups by those in their footers, rows by what Arrow makes of
a filter. So the same rows are published in every way there is, two in a file, and a job reads them
by many filters in one query, each over an input of its own. What Spark makes of the filters as
columns over rows in memory, which nobody can skip anything by, is the truth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as some

from penstock.runtimes.base import AttemptWork, Part, ProducedOutput
from penstock.runtimes.spark.access.remote import RemoteAccess
from tests.integration.spark.bench import Bench, part
from tests.integration.spark.test_access import CLUSTER, bench_at, bucket
from tests.integration.spark.test_connect import Run, by_connect
from tests.integration.spark.test_host_connect import server
from tests.integration.spark.test_semantics import KINDS, NESTED, ROWS, SCHEMA
from tests.sizes import SEED, SIZES

__all__ = ["bucket", "by_connect", "server"]

COLLATED = "`c`"
"""The column that does not leave through Arrow."""
COMPOSED, FEW = 12, 3
DISTINCT_MIN = 22
TRAPS = ("`d` > 0.5D", "`d` = 0D", "o.`d` >= 0.5D", "`f` = float('nan')", "`c` = 'A'")
"""What went wrong once."""
SIGNS = ("=", "<", "<=", ">", ">=", "<=>", "<>")


def values(name: str) -> some.SearchStrategy[list[Any]]:
    """Every value of a column and null, in any order: each table has them all."""
    return some.permutations([*KINDS[name][1], *[None] * ROWS][:ROWS])


@some.composite
def tables(draw: some.DrawFn) -> list[tuple[Any, ...]]:
    columns = [draw(values(name)) for name in KINDS]
    inner = [draw(values(name)) for name in NESTED]
    nested = [None, *list(zip(*inner, strict=True))[1:]]
    return list(zip(range(ROWS), *columns, nested, strict=True))


def leaves(name: str) -> some.SearchStrategy[str]:
    """A filter on one column, or on the nested one of its name."""
    literal = some.sampled_from([*KINDS[name][2], "NULL"])
    sign = some.sampled_from(SIGNS)
    column = some.sampled_from([f"`{name}`", *([f"o.`{name}`"] if name in NESTED else [])])
    kinds = [
        some.tuples(column, sign, literal).map(" ".join),
        some.tuples(literal, sign, column).map(" ".join),
        some.tuples(
            column,
            some.sampled_from(["IN", "NOT IN"]),
            some.lists(literal, min_size=1, max_size=3).map(", ".join),
        ).map(lambda each: f"{each[0]} {each[1]} ({each[2]})"),
        some.tuples(column, literal, literal).map(
            lambda each: f"{each[0]} BETWEEN {each[1]} AND {each[2]}"
        ),
        some.tuples(column, some.sampled_from(["IS NULL", "IS NOT NULL"])).map(" ".join),
    ]
    if name in "sc":
        like = some.sampled_from(["'a%'", "'%b'", "'%a%'", "'A_'", "''"])
        kinds.append(some.tuples(column, like).map(" LIKE ".join))
    return some.one_of(kinds)


COMPOSITES = some.recursive(
    some.sampled_from(list(KINDS)).flatmap(leaves),
    lambda inner: some.one_of(
        some.tuples(inner, inner).map(lambda each: f"({each[0]} AND {each[1]})"),
        some.tuples(inner, inner).map(lambda each: f"({each[0]} OR {each[1]})"),
        inner.map("NOT ({})".format),
    ),
    max_leaves=3,
)
FILTERS = some.tuples(
    some.tuples(*map(leaves, KINDS)),
    some.lists(COMPOSITES, min_size=COMPOSED, max_size=COMPOSED),
).map(lambda each: [*TRAPS, *each[0], *each[1]])


class Way(NamedTuple):
    """Something that is published, and who reads it."""

    name: str
    bench: Bench
    parts: Sequence[Part]
    has_collation: bool = True
    is_slow: bool = False
    """Whether each scan of an input starts a process."""
    run: Callable[[AttemptWork], ProducedOutput] | None = None
    """Where work runs, if not on the bench."""


def by_arrow(bench: Bench, memory: Any) -> list[Part]:
    """Two rows a part, written through Arrow."""
    table = memory.drop("c").toArrow()
    return [
        bench.publish(dict(zip(table.column_names, table.slice(start, 2).columns, strict=True)))
        for start in range(0, ROWS, 2)
    ]


def by_spark(bench: Bench) -> list[Part]:
    """The same, written by a task of Spark."""
    work = bench.work("spark.sql", {"sql": "SELECT * FROM memory"}, key=None)
    out = work.outputs["out"]
    location = out.location.replace("/~all/", "/~many/")
    place = replace(out, partition_by="k div 2", location=location)
    return [part(each) for each in bench.finished(replace(work, outputs={"out": place})).made]


def ways_of(session: Any, memory: Any, folder: Path, bucket: str, by_connect: Run) -> list[Way]:
    """The same rows in every way."""
    near = Bench(session, folder / "near", folder)
    fetching = bench_at(session, f"{bucket}/{folder.name}/fetched", folder)
    direct = bench_at(session, f"{bucket}/{folder.name}/direct", folder, master=CLUSTER)
    source = Bench(session, folder / "source", folder)
    source.engine._accesses._made["file"] = RemoteAccess(source.transfer)
    by_executors, by_jar = by_spark(source), by_spark(direct)
    return [
        Way("a folder, by Arrow", near, by_arrow(near, memory), has_collation=False),
        Way("a folder, by Spark", near, by_spark(near)),
        Way("fetched", fetching, by_arrow(fetching, memory), has_collation=False),
        Way("the jar", direct, by_jar),
        Way("a folder, by executors", near, by_executors),
        Way("the data source", source, by_executors, is_slow=True),
        Way("Connect", direct, by_jar, is_slow=True, run=lambda work: by_connect(work)[0].made[0]),
    ]


def found_by(way: Way, wanted: Mapping[int, str]) -> Mapping[int, list[int]]:
    """The rows that each filter finds in what is published."""
    sql = " UNION ALL ".join(
        f"SELECT {place} AS place, k FROM in{place} WHERE {each}" for place, each in wanted.items()
    )
    inputs = {f"in{place}": way.parts for place in wanted}
    work = way.bench.work("spark.sql", {"sql": sql}, inputs=inputs)
    made = way.bench.made(work) if way.run is None else way.run(work)
    found: defaultdict[int, list[int]] = defaultdict(list)
    for row in way.bench.rows(made):
        found[row["place"]].append(row["k"])
    return {place: sorted(found[place]) for place in wanted}


@pytest.mark.proof
@pytest.mark.timeout(900 * SIZES.tables_to_read)
def test_a_job_finds_the_same_rows_on_every_way(
    spark: Any,
    bucket: str,
    by_connect: Run,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    @seed(SEED)
    @settings(
        max_examples=SIZES.tables_to_read,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(tables(), FILTERS, some.randoms(use_true_random=False))
    def judge(rows: list[tuple[Any, ...]], wanted: list[str], choice: Any) -> None:
        # The first that hypothesis makes is the simplest: the same filter again and again.
        assume(len(set(wanted)) > DISTINCT_MIN)
        memory = spark.createDataFrame(rows, SCHEMA).coalesce(1).cache()
        memory.createOrReplaceTempView("memory")
        seen = memory.selectExpr("k", *(f"({each}) AS p{n}" for n, each in enumerate(wanted)))
        answers = seen.collect()
        truth = {
            place: sorted(row["k"] for row in answers if row[f"p{place}"])
            for place in range(len(wanted))
        }
        for way in ways_of(spark, memory, tmp_path_factory.mktemp("ways"), bucket, by_connect):
            asked = {
                place: each
                for place, each in enumerate(wanted)
                if way.has_collation or COLLATED not in each
            }
            if way.is_slow:
                kept = {0, *choice.sample(sorted(asked), FEW)}
                asked = {place: each for place, each in asked.items() if place in kept}
            found = found_by(way, asked)
            wrong = {
                asked[place]: (rows, truth[place])
                for place, rows in found.items()
                if rows != truth[place]
            }
            assert wrong == {}, way.name

    judge()
