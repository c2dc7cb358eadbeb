"""Query engines of others read what is published, by name: PyIceberg, DuckDB and Polars."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.exceptions
import httpx
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from tests.conftest import Background, an_s3_server
from tests.integration.dispatcher.world import Play, World
from tests.integration.minting_place import Place, refusal, seaweedfs_place
from tests.integration.tables.duck import opened_duck
from tests.integration.tables.shop import Shop, opened_shop


def rows(*pairs: tuple[str, int]) -> pa.Table:
    return pa.table({"name": [name for name, _ in pairs], "sum": [each for _, each in pairs]})


def scanned(shop: Shop, *, token: str = "any", name: str = "totals", **asked: Any) -> pa.Table:
    """What PyIceberg reads of a table."""
    catalog = load_catalog("p", uri=f"{shop.url}/iceberg", token=token)
    return catalog.load_table(f"penstock.{name}").scan(**asked).to_arrow()


async def today(world: World) -> None:
    """Have the time of a world be that of this machine: DuckDB reads nothing of a later time."""
    seconds = "SELECT extract(epoch FROM clock_timestamp() - penstock_now())"
    world.later(float(await world.value(seconds)) - 60)


def pairs(found: pa.Table) -> list[tuple[str, int]]:
    return sorted(zip(found["name"].to_pylist(), found["sum"].to_pylist(), strict=True))


def test_pyiceberg_reads_what_the_server_plans(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1), ("y", 2)), partition="a")
            await shop.publish(job, rows(("z", 3)), partition="b")
            found = await asyncio.to_thread(scanned, shop)
            assert pairs(found) == [("x", 1), ("y", 2), ("z", 3)]
            assert sorted(found["partition_key"].to_pylist()) == ["a", "a", "b"]
            only = await asyncio.to_thread(scanned, shop, row_filter="partition_key = 'b'")
            assert pairs(only) == [("z", 3)]
            with pytest.raises(NoSuchTableError, match="no table 'other'"):
                await asyncio.to_thread(scanned, shop, name="other")

    play(story)


def queried(shop: Shop, *statements: str) -> list[tuple[Any, ...]]:
    """What DuckDB answers to the last of these."""
    connection = opened_duck(shop.url)
    *before, last = statements
    for each in before:
        connection.execute(each)
    return connection.execute(last).fetchall()


def test_duckdb_reads_manifests_that_are_written_when_it_asks(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await today(world)
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1), ("y", 2)), partition="a")
            await shop.publish(job, rows(("z", 3)), partition="b")
            every = "SELECT name, sum FROM p.penstock.totals ORDER BY name"
            assert await asyncio.to_thread(queried, shop, every) == [("x", 1), ("y", 2), ("z", 3)]
            first = await world.value("SELECT max(id) FROM table_snapshot")
            world.later(2)
            await shop.publish(job, rows(("x", 10)), partition="a")
            assert await asyncio.to_thread(queried, shop, every) == [("x", 10), ("z", 3)]
            known = "SELECT snapshot_id FROM iceberg_snapshots(p.penstock.totals)"
            latest = await world.value("SELECT max(id) FROM table_snapshot")
            assert await asyncio.to_thread(queried, shop, known) == [(latest,)]
            then = f"SELECT name, sum FROM p.penstock.totals AT (VERSION => {first}) ORDER BY name"
            assert await asyncio.to_thread(queried, shop, then) == [("x", 1), ("y", 2), ("z", 3)]
            only = "SELECT partition_key, name FROM p.penstock.totals WHERE partition_key = 'b'"
            assert await asyncio.to_thread(queried, shop, only) == [("b", "z")]

    play(story)


@pytest.fixture(scope="module")
def bucket(
    background: Background, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Place, str]]:
    """A bucket with an STS, and the URL of a store in it."""
    folder: Path = tmp_path_factory.mktemp("tables")
    with an_s3_server(background, folder, mints=True) as server:
        place = seaweedfs_place(server, folder)
        yield place, f"{place.url('')[:-1]}?region={place.region}&endpoint={place.endpoint}"


def by_polars(shop: Shop) -> list[tuple[str, int]]:
    """What Polars reads with the credentials that came with the table."""
    catalog = load_catalog("p", uri=f"{shop.url}/iceberg", token="any")
    table = catalog.load_table("penstock.totals")
    said = table.io.properties.items()
    keys = {name: value for name, value in said if name.startswith("s3.")}
    return pairs(pl.scan_iceberg(table, storage_options=keys).collect().to_arrow())


def test_a_bucket_is_read_with_credentials_for_one_dataset(
    play: Play, bucket: tuple[Place, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, url = bucket
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    for name, value in place.own.items():
        monkeypatch.setenv(name.upper(), value)

    async def story(world: World) -> None:
        async with opened_shop(world, url, minter=place.minter()) as shop:
            for name in place.own:
                monkeypatch.delenv(name.upper())
            await today(world)
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1), ("y", 2)))
            found = await asyncio.to_thread(scanned, shop)
            assert pairs(found) == [("x", 1), ("y", 2)]
            every = "SELECT name, sum FROM p.penstock.totals ORDER BY name"
            assert await asyncio.to_thread(queried, shop, every) == [("x", 1), ("y", 2)]
            assert await asyncio.to_thread(by_polars, shop) == [("x", 1), ("y", 2)]
            path = "/iceberg/v1/namespaces/penstock/tables/totals/credentials"
            async with httpx.AsyncClient(base_url=shop.url) as client:
                (given,) = (await client.get(path)).json()["storage-credentials"]
            said = given["config"]
            vended = place.client(
                aws_access_key_id=said["s3.access-key-id"],
                aws_secret_access_key=said["s3.secret-access-key"],
                aws_session_token=said["s3.session-token"],
            )
            key = f"{place.root}datasets/totalsother/x"
            place.client().put_object(Bucket=place.bucket, Key=key, Body=b"x")
            for ask in (vended.get_object, vended.put_object):
                with pytest.raises(botocore.exceptions.ClientError) as refused:
                    ask(Bucket=place.bucket, Key=key)
                assert refusal(refused.value)[0] == 403
            with pytest.raises(botocore.exceptions.ClientError) as refused:
                vended.put_object(Bucket=place.bucket, Key=f"{place.root}datasets/totals/x")
            assert refusal(refused.value)[0] == 403

    play(story)


def test_every_client_reads_the_same_of_what_has_changed(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended, evolved, empty and removed: planned by the server, by clients, and by Polars."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await today(world)
            job = await world.job("totals", update_mode="append")
            await shop.publish(job, rows(("a", 1)), partition="p", key="1")
            before, _ = await asyncio.to_thread(read_by_all, shop)
            world.later(2)
            await shop.publish(job, rows(("b", 2)), partition="p", key="2")
            await shop.publish(job, rows(("gone", 0)), partition="q", key="3")
            await shop.publish(job, rows(("", 0))[:0], partition="empty", key="4")
            await asyncio.to_thread(read_by_all, shop)
            first = await world.value("SELECT min(id) FROM table_snapshot")
            world.later(2)
            wide = rows(("c", 3)).append_column("more", pa.array([0.5]))
            await shop.publish(job, wide, partition="p", key="5")
            await world.rows("DELETE FROM publication WHERE partition_key = 'q'")
            after, then = await asyncio.to_thread(read_by_all, shop, first)
            assert before == [("a", 1, None)]
            assert after == [("a", 1, None), ("b", 2, None), ("c", 3, 0.5)]
            assert then == [("a", 1, None)]
            # One manifest has all that came, for each snapshot one more or the same again.
            assert await world.value("SELECT count(*) FROM table_manifest WHERE gone IS NULL") <= 3

    play(story)


def read_by_all(shop: Shop, snapshot: int | None = None) -> tuple[list[Any], list[Any]]:
    """The rows now, and in a snapshot, by every client; they agree."""
    server, table = (
        load_catalog(
            "p", uri=f"{shop.url}/iceberg", token="any", **{"scan-planning-mode": mode}
        ).load_table("penstock.totals")
        for mode in ("server", "client")
    )
    found = [(told(each.scan().to_arrow()), then(each, snapshot)) for each in (server, table)]
    lazily = pl.scan_iceberg(table).collect().to_arrow()
    assert told(lazily) == found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    names = "name, sum" + (", more" if "more" in lazily.column_names else ", NULL")
    answer = queried(shop, f"SELECT {names} FROM p.penstock.totals ORDER BY name")
    assert answer == found[0][0]
    return found[0]


def then(table: Table, snapshot: int | None) -> list[Any]:
    return [] if snapshot is None else told(table.scan(snapshot_id=snapshot).to_arrow())


def told(found: pa.Table) -> list[Any]:
    return sorted((row["name"], row["sum"], row.get("more")) for row in found.to_pylist())
