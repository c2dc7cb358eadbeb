"""Whatever way rows are written and read, a job finds those that Spark finds in memory.

On the way from a table to a result rows are skipped by others than Spark's own comparisons: whole
files by the bounds in manifests, row groups by those in their footers, rows by what Arrow makes of
a filter. So the same rows are published in every way there is, two in a file, and a job reads them
by many filters in one query, each over an input of its own. What Spark makes of the filters as
columns over rows in memory, which nobody can skip anything by, is the truth. What a time without a
zone is depends on the session, so those of the ways have several zones, and the truth with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
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
ZONE = "spark.sql.session.timeZone"
COMPOSED, FEW = 12, 3
DISTINCT_MIN = 22
TRAPS = ("`d` > 0.5D", "`d` = 0D", "o.`d` >= 0.5D", "`f` = float('nan')", "`c` = 'A'")
"""What went wrong once."""
ZONES = ("America/St_Johns", "UTC", "Asia/Kolkata")
DEEP: Mapping[str, tuple[str, str, Sequence[str]]] = {
    # A column: its type, what its values are made of, and how it is asked for one of them.
    "a": (
        "array<double>",
        "d",
        (
            "get(a, 0) {sign} {d}",
            "exists(a, e -> e {sign} {d})",
            "array_contains(a, {d})",
            "a {sign} array({d})",
        ),
    ),
    "p": (
        "map<string, timestamp>",
        "st",
        (
            "try_element_at(p, {s}) {sign} {t}",
            "map_contains_key(p, {s})",
            "exists(map_values(p), e -> e {sign} {t})",
        ),
    ),
    "l": (
        "array<struct<m: decimal(10,2), t: timestamp>>",
        "mt",
        ("exists(l, e -> e.m {sign} {m} OR e.t {sign} {t})", "get(l, 0).t {sign} {t}"),
    ),
}
EVERY = f"{SCHEMA}, {', '.join(f'{name} {kind}' for name, (kind, _, _) in DEEP.items())}"
SIGNS = ("=", "<", "<=", ">", ">=", "<=>", "<>")


def values(name: str) -> some.SearchStrategy[list[Any]]:
    """Every value of a column and null, in any order: each table has them all."""
    return some.permutations([*KINDS[name][1], *[None] * ROWS][:ROWS])


def deep_values(name: str) -> some.SearchStrategy[Any]:
    """A value of a column with elements: null, or of some of them, which may be null or none."""
    made_of = DEEP[name][1]
    inner = [some.sampled_from(KINDS[each][1]) for each in made_of]
    if name == "p":
        filled: some.SearchStrategy[Any] = some.dictionaries(
            inner[0], some.none() | inner[1], max_size=3
        )
    else:
        element = inner[0] if len(inner) == 1 else some.tuples(*(some.none() | e for e in inner))
        filled = some.lists(some.none() | element, max_size=3)
    return some.none() | filled


def deep_leaves(name: str) -> some.SearchStrategy[str]:
    """A filter on what is in a column."""
    plain = some.sampled_from([f"size({name}) > 1", f"{name} IS NULL", f"{name} IS NOT NULL"])
    literals = {each: some.sampled_from(KINDS[each][2]) for each in DEEP[name][1]}
    asked = some.tuples(
        some.sampled_from(DEEP[name][2]),
        some.fixed_dictionaries({**literals, "sign": some.sampled_from(SIGNS)}),
    )
    return asked.map(lambda each: each[0].format(**each[1])) | plain


@some.composite
def tables(draw: some.DrawFn) -> list[tuple[Any, ...]]:
    columns = [draw(values(name)) for name in KINDS]
    inner = [draw(values(name)) for name in NESTED]
    nested = [None, *list(zip(*inner, strict=True))[1:]]
    deep = [draw(some.lists(deep_values(n), min_size=ROWS, max_size=ROWS)) for n in DEEP]
    return list(zip(range(ROWS), *columns, nested, *deep, strict=True))


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
    some.sampled_from(list(KINDS)).flatmap(leaves)
    | some.sampled_from(list(DEEP)).flatmap(deep_leaves),
    lambda inner: some.one_of(
        some.tuples(inner, inner).map(lambda each: f"({each[0]} AND {each[1]})"),
        some.tuples(inner, inner).map(lambda each: f"({each[0]} OR {each[1]})"),
        inner.map("NOT ({})".format),
    ),
    max_leaves=3,
)
FILTERS = some.tuples(
    some.tuples(*map(leaves, KINDS), *map(deep_leaves, DEEP)),
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
    """Where work runs, if not on the bench; there the time zone is UTC."""


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
    @given(tables(), FILTERS, some.permutations(ZONES), some.randoms(use_true_random=False))
    def judge(
        rows: list[tuple[Any, ...]], wanted: list[str], zones: list[str], choice: Any
    ) -> None:
        # The first that hypothesis makes is the simplest: the same filter again and again.
        assume(len(set(wanted)) > DISTINCT_MIN)
        memory = spark.createDataFrame(rows, EVERY).coalesce(1).cache()
        memory.createOrReplaceTempView("memory")
        truths = {}
        for zone in zones:
            spark.conf.set(ZONE, zone)
            seen = memory.selectExpr("k", *(f"({each}) AS p{n}" for n, each in enumerate(wanted)))
            answers = seen.collect()
            truths[zone] = {
                place: sorted(row["k"] for row in answers if row[f"p{place}"])
                for place in range(len(wanted))
            }
        zone_of = cycle(zones)
        for way in ways_of(spark, memory, tmp_path_factory.mktemp("ways"), bucket, by_connect):
            asked = {
                place: each
                for place, each in enumerate(wanted)
                if way.has_collation or COLLATED not in each
            }
            if way.is_slow:
                kept = {0, *choice.sample(sorted(asked), FEW)}
                asked = {place: each for place, each in asked.items() if place in kept}
            zone = next(zone_of) if way.run is None else "UTC"
            spark.conf.set(ZONE, zone)
            truth = truths[zone]
            found = found_by(way, asked)
            wrong = {
                asked[place]: (rows, truth[place])
                for place, rows in found.items()
                if rows != truth[place]
            }
            assert wrong == {}, (way.name, zone)

    judge()
