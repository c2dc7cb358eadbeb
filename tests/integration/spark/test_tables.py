"""What Spark has written is read as a table by others: the same rows, sums and types."""

from __future__ import annotations

import asyncio
import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyiceberg.catalog import load_catalog

from tests.integration.dispatcher.conftest import play
from tests.integration.dispatcher.world import Play, World, done
from tests.integration.spark.bench import Bench
from tests.integration.tables.duck import opened_duck
from tests.integration.tables.shop import Shop, opened_shop
from tests.integration.tables.test_clients import today

__all__ = ["play"]

SQL = """
SELECT id,
       CAST(id AS int) AS small,
       IF(id % 7 = 0, NULL, CAST(id * 1.25 AS decimal(9, 2))) AS price,
       CAST(id AS decimal(38, 10)) / 3 AS precise,
       id / 4.0D AS ratio,
       id % 2 = 0 AS is_even,
       concat('n', id) AS name,
       CAST(concat('b', id) AS binary) AS raw,
       date_add(DATE'2013-01-01', CAST(id AS int)) AS day,
       TIMESTAMP'2013-01-01 12:00:00.123456 UTC' + make_dt_interval(0, id) AS zoned,
       TIMESTAMP_NTZ'1999-12-31 23:59:59.999999' + make_dt_interval(0, id) AS local,
       named_struct('a', id, 'b', IF(id = 1, NULL, named_struct('c', CAST(id AS decimal(20, 3)))))
           AS nested,
       IF(id = 2, NULL, array(id, NULL, id + 1)) AS listed,
       array(named_struct('x', id, 'y', array('y'))) AS structs,
       IF(id = 3, NULL, map(concat('k', id), id)) AS mapped,
       -- PyIceberg has a NULL of these as an empty map.
       map(id, named_struct('v', id)) AS deep
FROM raw
"""
ROWS = 40
TABLE = "p.penstock.totals"
LATE = "zoned >= TIMESTAMP'2013-01-02T02:00:00+00:00'"


def test_others_read_what_spark_has_written_as_spark_reads_it(
    play: Play, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of Arrow, by Spark's own writer, and by one that has instants as INT96."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    files: list[str] = []

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await today(world)
            job = await world.job("totals")
            for key, arrow_bytes_max, stored in (
                ("arrow", 10_000_000, "TIMESTAMP_MICROS"),
                ("spark", 1000, "TIMESTAMP_MICROS"),
                ("int96", 1000, "INT96"),
            ):
                spark.conf.set("spark.sql.parquet.outputTimestampType", stored)
                bench = Bench(spark, tmp_path, tmp_path, arrow_bytes_max=arrow_bytes_max)
                files.extend(await _publish(shop, job, bench, key))
            await asyncio.to_thread(_compare, shop, spark, files)

    play(story)
    arrow, *others = [parquet.ParquetFile(each) for each in files]
    assert not arrow.metadata.created_by.startswith("parquet-mr")
    assert all(each.metadata.created_by.startswith("parquet-mr") for each in others)
    assert [_stored(each) for each in others] == ["INT64"] * (len(others) // 2) + ["INT96"] * (
        len(others) // 2
    )


def _stored(file: Any) -> str:
    (found,) = [
        file.schema.column(number).physical_type
        for number in range(len(file.schema))
        if file.schema.column(number).path == "zoned"
    ]
    return str(found)


async def _publish(shop: Shop, job: Any, bench: Bench, key: str) -> list[str]:
    """Have Penstock's engine make a partition, and publish it; its files."""
    held, prefix = await shop.claimed(job, key)
    raw = bench.publish({"id": list(range(ROWS))})
    work = bench.work(
        "spark.sql", {"sql": SQL}, inputs={"raw": [raw]}, outputs=("totals",), key=key
    )
    place = replace(work.outputs["totals"], location=f"{shop.root}/{prefix}")
    made = bench.made(replace(work, outputs={"totals": place}))
    output = job.output(key, made.location, facts=made.facts)
    await shop.world.tasks.complete(done(held.fence, output))
    folder = made.location.removeprefix("file://")
    return [f"{folder}/{each.name}" for each in bench.manifest(made).files]


def _compare(shop: Shop, spark: Any, files: list[str]) -> None:
    spark.read.parquet(*files).createOrReplaceTempView("written")
    sparks = spark.table("written").toArrow()
    assert sparks.num_rows == 3 * ROWS
    server, client = (
        load_catalog(
            "p", uri=f"{shop.url}/iceberg", token="any", **{"scan-planning-mode": mode}
        ).load_table("penstock.totals")
        for mode in ("server", "client")
    )
    connection = opened_duck(shop.url)
    found = {
        "server": server.scan().to_arrow(),
        "client": client.scan().to_arrow(),
        "polars": pl.scan_iceberg(client).collect().to_arrow(),
        "duckdb": connection.execute(f"FROM {TABLE}").to_arrow_table(),
    }
    for engine, table in found.items():
        ours = table.select(sparks.column_names)
        assert _types(ours) == _types(sparks), engine
        assert _rows(ours) == _rows(sparks), engine
    sums = "SELECT count(*), count(price), sum(price), sum(precise), sum(ratio), max(raw) FROM "
    (spark_says,) = spark.sql(f"{sums} written").collect()
    assert connection.execute(f"{sums} {TABLE}").fetchall() == [tuple(spark_says)]
    # Files are left out by bounds, and those without are read.
    for wanted in (LATE, "price > 45.00", "name = 'n7'", "id > 99", "nested.a = 5"):
        count = spark.table("written").where(wanted).count()
        (by_duckdb,) = connection.execute(f"SELECT count(*) FROM {TABLE} WHERE {wanted}").fetchall()
        plain = wanted.replace("TIMESTAMP", "")
        by_pyiceberg = [
            each.scan(row_filter=plain).to_arrow().num_rows for each in (server, client)
        ]
        assert [*by_duckdb, *by_pyiceberg] == [count] * 3, wanted


def _types(table: pa.Table) -> dict[str, str]:
    return {each.name: _word(each.type) for each in table.schema}


def _word(kind: pa.DataType) -> str:
    """A type, as all engines mean it: text is text, however long; Polars has lists for maps."""
    if pa.types.is_map(kind):
        return f"map<{_word(kind.key_type)}, {_word(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_type
        if pa.types.is_struct(item) and [each.name for each in item] == ["key", "value"]:
            return f"map<{_word(item[0].type)}, {_word(item[1].type)}>"
        return f"list<{_word(item)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ", ".join(f"{each.name}: {_word(each.type)}" for each in kind) + ">"
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}{', zoned' if kind.tz else ''}]"
    return str(kind).removeprefix("large_").removesuffix("_view")


def _rows(table: pa.Table) -> list[str]:
    return sorted(repr(_plain(row)) for row in table.to_pylist())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"key", "value"}:
            return (_plain(value["key"]), _plain(value["value"]))
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(dt.UTC).isoformat()
    return value
