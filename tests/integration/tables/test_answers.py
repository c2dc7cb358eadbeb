"""What clients are told of a table while its files are not all there, and what they read of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError, ServiceUnavailableError
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadataV2
from pyiceberg.table.snapshots import ancestors_of

from penstock.dispatcher.catalog import metadata_writer, scan_planner
from penstock.dispatcher.catalog.scan_planner import Manifests
from penstock.dispatcher.catalog.tables import CatalogTable
from penstock.dispatcher.database.pool import query
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput
from tests.integration.dispatcher.world import Job, Play, World
from tests.integration.tables.shop import Shop, opened_shop
from tests.integration.tables.test_clients import pairs, queried, rows, scanned, today

TABLE = "/iceberg/v1/namespaces/penstock/tables/totals"
UNFIT = pa.schema(
    [
        pa.field("name", pa.string(), metadata={"PARQUET:field_id": "7"}),
        pa.field("sum", pa.int64()),
    ]
)


async def asked(shop: Shop, path: str = "", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=shop.url, timeout=60) as client:
        return await (client.post(TABLE + path, json=body) if path else client.get(TABLE))


async def told(shop: Shop) -> dict[str, Any]:
    """The metadata of the table; every list that it names is there."""
    answer = await asked(shop)
    assert answer.status_code == 200, answer.text
    metadata: dict[str, Any] = answer.json()["metadata"]
    for each in metadata["snapshots"]:
        assert await shop.store.get(each["manifest-list"].removeprefix(f"{shop.root}/")) is not None
    named = {each["snapshot-id"] for each in metadata["snapshots"]}
    assert {each["snapshot-id"] for each in metadata["refs"].values()} <= named
    return metadata


async def listed(shop: Shop) -> list[str]:
    """The names of tables."""
    async with httpx.AsyncClient(base_url=shop.url, timeout=60) as client:
        found = (await client.get(TABLE.rpartition("/")[0])).json()["identifiers"]
    return [each["name"] for each in found]


def by_clients(shop: Shop, **scan: Any) -> pa.Table:
    """What PyIceberg reads that plans by itself."""
    mode = {"scan-planning-mode": "client"}
    catalog = load_catalog("p", uri=f"{shop.url}/iceberg", token="any", **mode)
    return catalog.load_table("penstock.totals").scan(**scan).to_arrow()


def by_polars(shop: Shop) -> pl.DataFrame:
    catalog = load_catalog("p", uri=f"{shop.url}/iceberg", token="any")
    return pl.scan_iceberg(catalog.load_table("penstock.totals")).collect()


def test_a_table_that_is_not_written_yet_is_told_to_nobody(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_writer, "WAITED_PARTS_MAX", 1)

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            assert shop.parts.writer is not None
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)), partition="a")
            await shop.publish(job, rows(("y", 2)), partition="b")
            answer = await asked(shop)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["type"] == "ServiceUnavailableException"
            with pytest.raises(ServiceUnavailableError, match="are not written yet"):
                await asyncio.to_thread(scanned, shop)
            planned = (await asked(shop, "/plan")).json()
            assert len(planned["file-scan-tasks"]) == 2
            await shop.parts.writer.turn()
            first = await told(shop)
            # What is too much to wait for is told when it is written; until then it is as it was.
            world.later(5)
            for partition in "abc":
                await shop.publish(job, rows(("z", 3)), partition=partition)
            assert (await told(shop))["refs"] == first["refs"]
            assert len((await asked(shop, "/plan")).json()["file-scan-tasks"]) == 3
            world.later(60)
            await shop.parts.writer.turn()
            assert (await told(shop))["current-snapshot-id"] > first["current-snapshot-id"]

    play(story)


def test_files_that_no_client_can_read_are_told_and_what_was_before_is_read(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)).cast(UNFIT), partition="a")
            with pytest.raises(NoSuchTableError, match="has field ids of another table"):
                await asyncio.to_thread(scanned, shop)
            for _ in range(2):
                error = (await asked(shop)).json()["error"]
                assert (error["code"], error["type"]) == (404, "NoSuchTableException")
                assert await listed(shop) == []
                assert "part-0.parquet' has field ids of another table" in error["message"]
                assert "without ids of another table" in error["message"], "and what to do"
            refused = (await asked(shop, "/plan")).json()["error"]
            assert (refused["code"], refused["type"]) == (400, "BadRequestException")
            world.later(5)
            await shop.publish(job, rows(("x", 2)), partition="a")
            assert await listed(shop) == ["totals"]
            first = await told(shop)
            assert await listed(shop) == ["totals"]
            world.later(5)
            await shop.publish(job, rows(("y", 1)).cast(UNFIT), partition="b")
            assert (await told(shop))["refs"] == first["refs"]
            only = {"type": "eq", "term": "partition_key", "value": "a"}
            planned = (await asked(shop, "/plan", filter=only)).json()
            assert len(planned["file-scan-tasks"]) == 1

    play(story)


def test_a_schema_that_is_no_tables_hides_its_own_snapshots_alone(
    play: Play, tmp_path: Path
) -> None:
    """From a bad one to a generation that mends it, and on to one that is bad again."""

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            odd = rows(("x", 1)).append_column("odd", pa.nulls(1))
            first = await world.job("totals")
            await shop.publish(first, odd)
            error = (await asked(shop)).json()["error"]
            assert error["code"] == 404
            assert "The column 'odd' is or has a void" in error["message"]
            mended = await begun(world, first)
            await shop.publish(mended, rows(("x", 2)))
            assert await listed(shop) == []
            await moved(world, mended.generation)
            assert await listed(shop) == ["totals"]
            metadata = await told(shop)
            assert set(metadata["refs"]) == {"main"}, "what was left cannot be read, so is no tag"
            assert await asyncio.to_thread(read, shop) == [("x", 2)]
            # A column that comes later, and a generation that is bad from its beginning.
            await shop.publish(mended, odd)
            assert await asyncio.to_thread(read, shop) == [("x", 2)]
            world.later(5)
            await shop.publish(mended, rows(("x", 3)))
            assert (await told(shop))["refs"] == metadata["refs"], "the column stays in the schema"
            bad = await begun(world, first)
            taken = rows(("x", 4)).append_column("partition_key", pa.array(["its own"]))
            await shop.publish(bad, taken)
            await moved(world, bad.generation)
            assert (await told(shop))["refs"] == metadata["refs"]
            assert await asyncio.to_thread(read, shop) == [("x", 2)]
            good = await begun(world, first)
            await shop.publish(good, rows(("x", 5)))
            await moved(world, good.generation)
            assert await asyncio.to_thread(read, shop) == [("x", 5)]

    play(story)


def read(shop: Shop) -> list[tuple[str, int]]:
    """What both ways of PyIceberg read of the table; they agree."""
    (found,) = by_ref(shop, "main")
    return found


TIME_OF_DAY = rows(("x", 1)).append_column("at", pa.array([0], pa.time64("ns")))


def test_files_whose_columns_nobody_knows_are_in_no_table(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            await shop.publish(job, TIME_OF_DAY)
            error = (await asked(shop)).json()["error"]
            assert (error["code"], error["type"]) == (404, "NoSuchTableException")
            assert "The columns of its files are not known" in error["message"]
            assert "such as a time of day" in error["message"]
            world.later(5)
            await shop.publish(job, rows(("x", 2)))
            before = await told(shop)
            world.later(5)
            await shop.publish(job, TIME_OF_DAY, partition="b")
            assert (await told(shop))["refs"] == before["refs"]
            assert await asyncio.to_thread(by_clients, shop) is not None
            refused = (await asked(shop, "/plan")).json()["error"]
            assert refused["code"] == 400
            assert "such as a time of day" in refused["message"]

    play(story)


def test_times_in_nanoseconds_are_read_as_those_in_microseconds(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pandas writes them: alone, and beside others."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")

    def timed(unit: str, micros: int) -> pa.Table:
        scale = {"us": 1, "ns": 1000}[unit]
        said = {
            zone: pa.array([micros * scale], pa.timestamp(unit, zone)) for zone in (None, "UTC")
        }
        return pa.table({"name": [unit], "then": said[None], "moment": said["UTC"]})

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await today(world)
            job = await world.job("totals")
            await shop.publish(job, timed("ns", 5), partition="a")
            for micros in ([5], [5, 7]):
                found = [
                    await asyncio.to_thread(each, shop, row_filter="name is not null")
                    for each in (by_clients, scanned)
                ]
                for each in found:
                    assert each.schema.field("then").type == pa.timestamp("us")
                    for name in ("then", "moment"):
                        assert sorted(each[name].cast(pa.int64()).to_pylist()) == micros
                said = 'SELECT epoch_us("then"), epoch_us(moment) FROM p.penstock.totals ORDER BY 1'
                assert await asyncio.to_thread(queried, shop, said) == [(n, n) for n in micros]
                lazily = await asyncio.to_thread(by_polars, shop)
                assert sorted(lazily["then"].cast(pl.Int64).to_list()) == micros
                world.later(2)
                await shop.publish(job, timed("us", 7), partition="b")

    play(story)


def test_a_decimal_that_grows_leaves_what_was_read_until_all_of_it_has_grown(
    play: Play, tmp_path: Path
) -> None:
    def priced(kind: pa.DataType) -> pa.Table:
        return pa.table({"name": ["x"], "sum": [1], "price": pa.array([Decimal("1.50")], kind)})

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            for partition in "ab":
                await shop.publish(job, priced(pa.decimal128(10, 2)), partition=partition)
            before = await told(shop)
            world.later(5)
            await shop.publish(job, priced(pa.decimal128(12, 4)), partition="a")
            assert (await told(shop))["refs"] == before["refs"]
            assert await asyncio.to_thread(read, shop) == [("x", 1), ("x", 1)]
            found = await asyncio.to_thread(by_clients, shop)
            assert found.schema.field("price").type == pa.decimal128(10, 2)
            world.later(5)
            await shop.publish(job, priced(pa.decimal128(12, 4)), partition="b")
            assert (await told(shop))["refs"] != before["refs"]
            assert await asyncio.to_thread(read, shop) == [("x", 1), ("x", 1)]
            found = await asyncio.to_thread(by_clients, shop)
            assert found.schema.field("price").type == pa.decimal128(12, 4)

    play(story)


def test_a_store_that_fails_leaves_what_was_written(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            metadata = tmp_path / "datasets" / "totals" / "metadata"
            metadata.parent.mkdir(parents=True)
            metadata.write_text("in the way")
            await shop.publish(job, rows(("x", 1)))
            assert (await asked(shop)).status_code == 503
            metadata.unlink()
            first = await told(shop)
            metadata.rename(tmp_path / "aside")
            metadata.write_text("in the way")
            world.later(5)
            await shop.publish(job, rows(("y", 2)), partition="b")
            answer = (await asked(shop)).json()["metadata"]
            assert answer["refs"] == first["refs"]

    play(story)


def test_files_are_noted_when_another_one_is_done(play: Play, tmp_path: Path) -> None:
    """A snapshot that is being made holds the lock of the dataset for a moment."""

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await shop.publish(await world.job("totals"), rows(("x", 1)))
            (row,) = await world.rows("SELECT id::text AS dataset FROM dataset")
            await shop.parts.tables.snapshots.make(row["dataset"])
            async with asyncio.TaskGroup() as group, world.database.transaction() as held:
                await held.execute(query("hold_table"), row)
                loading = group.create_task(asked(shop))
                await world.until_waiting()
            assert loading.result().status_code == 200

    play(story)


def test_refs_without_files_are_not_told(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)))
            await told(shop)
            await world.rows(
                "INSERT INTO generation (dataset_id, version, state, lineage)"
                " VALUES (%s, gen_random_uuid(), 'building', 'y')",
                job.dataset,
            )
            await world.rows(
                "UPDATE generation SET state = CASE state WHEN 'building' THEN 'current'"
                " ELSE 'retired' END"
            )
            await world.rows(
                "INSERT INTO table_snapshot (dataset_id, id, generation, branch, operation,"
                " schema_id, added, removed, partitions, parts, manifest_list, unfit)"
                " SELECT dataset_id, id + place, version, branch, operation, schema_id, 0, 0, 0, 0,"
                " CASE place WHEN 2 THEN manifest_list END, CASE place WHEN 1 THEN 'odd' END"
                " FROM table_snapshot JOIN generation USING (dataset_id)"
                " JOIN (VALUES ('retired', 1), ('current', 2)) AS said(state, place) USING (state)"
            )
            # The last of what was left has no files, and an earlier one is not what the tag means.
            assert list((await told(shop))["refs"]) == ["main"]

    play(story)


def test_partitions_may_come_later(play: Play, tmp_path: Path) -> None:
    """Manifests of before have no partition: they are read as such, and written again as others."""

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await today(world)
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)), partition=None)
            first = (await told(shop))["current-snapshot-id"]
            world.later(5)
            await shop.publish(job, rows(("y", 2)), partition="b")
            second = (await told(shop))["current-snapshot-id"]
            world.later(5)
            await shop.publish(job, rows(("z", 3)), partition=None)
            for snapshot, found in (
                (first, [("x", 1)]),
                (second, [("x", 1), ("y", 2)]),
                (None, [("y", 2), ("z", 3)]),
            ):
                for read in (by_clients, scanned):
                    seen = await asyncio.to_thread(read, shop, snapshot_id=snapshot)
                    assert pairs(seen) == found
            only = await asyncio.to_thread(by_clients, shop, row_filter="partition_key = 'b'")
            assert pairs(only) == [("y", 2)]
            for what, at, answer in (
                ("name, partition_key", "", [("y", "b"), ("z", None)]),
                ("name, partition_key", f" AT (VERSION => {second})", [("x", None), ("y", "b")]),
                ("*", f" AT (VERSION => {first})", [("x", 1)]),
            ):
                said = f"SELECT {what} FROM p.penstock.totals{at} ORDER BY name"
                assert await asyncio.to_thread(queried, shop, said) == answer

    play(story)


def test_a_busy_branch_hides_neither_main_nor_older_snapshots(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)))
            first = (await told(shop))["current-snapshot-id"]
            world.later(5)
            await shop.publish(job, rows(("y", 2)))
            second = (await told(shop))["current-snapshot-id"]
            await world.rows(
                "INSERT INTO generation (dataset_id, version, state, lineage)"
                " VALUES (%s, gen_random_uuid(), 'building', 'y')",
                job.dataset,
            )
            await world.rows(
                "INSERT INTO table_snapshot (dataset_id, id, generation, branch, operation,"
                " schema_id, added, removed, partitions, parts, manifest_list)"
                " SELECT made.dataset_id, made.id + number, version, state, 'append', schema_id, 0,"
                " 0, 0, 0, manifest_list FROM table_snapshot AS made, generation,"
                " generate_series(1, 1000) AS number WHERE state = 'building' AND made.id = %s",
                second,
            )
            metadata = await told(shop)
            assert 990 < len(metadata["snapshots"]) <= 1000
            assert {name: each["snapshot-id"] for name, each in metadata["refs"].items()} == {
                "main": second,
                "building": second + 1000,
            }
            assert first not in {each["snapshot-id"] for each in metadata["snapshots"]}
            planned = (await asked(shop, "/plan", **{"snapshot-id": first})).json()
            assert len(planned["file-scan-tasks"]) == 1

    play(story)


def left(folder: Path) -> set[str]:
    """The files of a table that are there, by their names."""
    return {each.name for each in (folder / "datasets/totals/metadata").iterdir()}


async def noted(world: World) -> set[str]:
    """Those that the database knows, and metadata beside lists."""
    lists = "SELECT manifest_list AS place FROM table_snapshot WHERE manifest_list IS NOT NULL"
    found = await world.rows(f"{lists} UNION SELECT location FROM table_manifest")
    places = [row["place"] for row in found]
    beside = await world.rows(f"{lists} AND branch = 'main'")
    places += [metadata_writer.metadata_location(row["place"]) for row in beside]
    return {each.rpartition("/")[2] for each in places}


async def cut_over(world: World, job: Job) -> None:
    """A generation of the dataset's own takes the place of the current one, which stays."""
    await world.rows(
        "INSERT INTO generation (dataset_id, version, state, lineage)"
        " VALUES (%s, gen_random_uuid(), 'building', 'y')",
        job.dataset,
    )
    await world.rows(
        "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id, attempt,"
        " location, manifest, files, rows, bytes) SELECT dataset_id, building.version,"
        " partition_key, mode, task_id, attempt, location, manifest, files, rows, bytes"
        " FROM publication JOIN generation AS building USING (dataset_id)"
        " WHERE building.state = 'building'"
    )
    await world.rows(
        "INSERT INTO generation_schema (dataset_id, version, columns)"
        " SELECT dataset_id, building.version, columns FROM generation_schema"
        " JOIN generation AS building USING (dataset_id) WHERE building.state = 'building'"
    )
    await world.rows(
        "UPDATE generation SET state = CASE state WHEN 'building' THEN 'current' ELSE 'retired' END"
        " WHERE state IN ('building', 'current')"
    )


def test_files_that_no_snapshot_names_are_swept_and_no_others(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_writer, "GRACE_SECONDS", -60.0)
    note = metadata_writer._note

    async def crashed(*_: object) -> bool:
        raise DatabaseUnavailable("gone between writing and noting")

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            writer, snapshots = shop.parts.writer, shop.parts.tables.snapshots
            assert writer is not None

            async def swept() -> set[str]:
                world.later(metadata_writer.SWEEP_SECONDS)
                await writer.turn()
                assert await noted(world) == left(tmp_path)
                return left(tmp_path)

            job = await world.job("totals")
            monkeypatch.setattr(metadata_writer, "_note", crashed)
            await shop.publish(job, rows(("x", 1)))
            assert (await asked(shop)).status_code == 503
            monkeypatch.setattr(metadata_writer, "_note", note)
            orphans = left(tmp_path)
            assert len(orphans) == 3, "a manifest, a list and metadata"
            first = (await told(shop))["current-snapshot-id"]
            kept = left(tmp_path) - orphans
            assert await swept() == kept
            # The manifest is written anew without what was replaced; the first list names it still.
            world.later(5)
            await shop.publish(job, rows(("x", 2)))
            await told(shop)
            assert kept < await swept()
            seen = await asyncio.to_thread(by_clients, shop, snapshot_id=first)
            assert pairs(seen) == [("x", 1)]
            world.later(8 * 86_400)
            assert await snapshots.forget() == 1
            assert kept < await swept(), "somebody may read it"
            world.later(86_400)
            await snapshots.forget()
            replaced = await swept()
            assert not kept & replaced
            # A generation that was left is a tag until it is dropped, and history until it ends.
            await cut_over(world, job)
            await told(shop)
            assert replaced < await swept()
            await world.rows(
                "UPDATE generation SET dropped_at = changed_at WHERE state = 'retired'"
            )
            await world.rows("DELETE FROM publication WHERE generation = %s", job.generation)
            world.later(5)
            await told(shop)
            assert await snapshots.forget() == 1
            assert replaced < await swept()
            world.later(86_400)
            await snapshots.forget()
            current = await swept()
            assert len(current) == 3
            assert not replaced & current
            assert pairs(await asyncio.to_thread(by_clients, shop)) == [("x", 2)]

    play(story)


async def begun(world: World, job: Job) -> Job:
    """The job, in a generation of its dataset that is being built."""
    version = await world.value(
        "INSERT INTO generation (dataset_id, version, state, lineage)"
        " VALUES (%s, gen_random_uuid(), 'building', 'y') RETURNING version::text",
        job.dataset,
    )
    return replace(job, generation=version)


async def moved(world: World, generation: str) -> None:
    """Have this generation be the current one."""
    await world.rows("UPDATE generation SET state = 'retired' WHERE state = 'current'")
    await world.rows("UPDATE generation SET state = 'current' WHERE version = %s", generation)
    world.later(5)


def by_ref(shop: Shop, *refs: str) -> list[list[tuple[str, int]]]:
    """What both ways of PyIceberg read of branches and tags; they agree."""
    found = []
    for mode in ("server", "client"):
        said = {"scan-planning-mode": mode}
        catalog = load_catalog("p", uri=f"{shop.url}/iceberg", token="any", **said)
        table = catalog.load_table("penstock.totals")
        scans = [table.scan(snapshot_id=table.refs()[each].snapshot_id) for each in refs]
        found.append([pairs(each.to_arrow()) for each in scans])
    assert found[0] == found[1]
    return found[0]


def test_branches_and_tags_are_read_by_name(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            old = await world.job("totals")
            await shop.publish(old, rows(("x", 1)))
            # The last of what is left is written, though nobody has asked for it as `main`.
            await told(shop)
            world.later(5)
            await shop.publish(old, rows(("x", 2)))
            await shop.parts.tables.snapshots.make(old.dataset)
            world.later(5)
            new = await begun(world, old)
            await shop.publish(new, rows(("x", 3)))
            await shop.publish(new, rows(("y", 4)), partition="b")
            now, anew = [("x", 2)], [("x", 3), ("y", 4)]
            assert await asyncio.to_thread(by_ref, shop, "main", "building") == [now, anew]
            # Who opens the file of metadata reads the same.
            location = (await asked(shop)).json()["metadata-location"]
            read = StaticTable.from_metadata(location).scan()
            assert pairs(await asyncio.to_thread(read.to_arrow)) == now
            await moved(world, new.generation)
            await shop.publish(old, rows(("late", 5)), partition="c")
            found = await asyncio.to_thread(by_ref, shop, "main", old.generation)
            assert found == [anew, now], "what comes late into what was left is not in its tag"
            await moved(world, old.generation)
            back = [("late", 5), *now]
            found = await asyncio.to_thread(by_ref, shop, "main", new.generation)
            assert found == [back, anew]
            assert set((await told(shop))["refs"]) == {"main", new.generation}

    play(story)


def test_incremental_readers_keep_their_ancestry_over_cut_overs_and_rollbacks(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            mains: list[int] = []

            async def read() -> None:
                """Load the table; what is `main` came from all that were `main` before."""
                found = TableMetadataV2.model_validate(await told(shop))
                mains.insert(0, found.refs["main"].snapshot_id)
                newest = found.snapshot_by_id(mains[0])
                assert [each.snapshot_id for each in ancestors_of(newest, found)] == mains
                # Who asks for what is named alone is told of the same parents.
                async with httpx.AsyncClient(base_url=shop.url, timeout=60) as client:
                    named = (await client.get(f"{TABLE}?snapshots=refs")).json()["metadata"]
                parents = {each.snapshot_id: each.parent_snapshot_id for each in found.snapshots}
                for each in named["snapshots"]:
                    assert each.get("parent-snapshot-id") == parents[each["snapshot-id"]]

            old = await world.job("totals")
            for number in (1, 2):
                await shop.publish(old, rows(("x", number)))
                await read()
                world.later(5)
            new = await begun(world, old)
            await shop.publish(new, rows(("x", 3)))
            building = (await told(shop))["refs"]["building"]["snapshot-id"]
            written = await world.value("SELECT count(*) FROM table_manifest")
            for generation in (new.generation, old.generation, new.generation):
                await moved(world, generation)
                await read()
            assert building not in mains
            assert sorted(mains, reverse=True) == mains
            count = await world.value("SELECT count(*) FROM table_manifest")
            assert count == written, "manifests are named again"
            # Nothing is new, and clients are told how old it is.
            world.later(40)
            answer = (await asked(shop)).json()
            assert answer["metadata"]["refs"]["main"]["snapshot-id"] == mains[0]
            assert 40 <= int(answer["config"]["penstock.snapshot-age-seconds"]) < 400

    play(story)


def test_a_scan_of_many_parts_goes_on_while_its_snapshot_is_forgotten(
    play: Play, tmp_path: Path
) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)), partition="k")
            await world.rows(
                "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
                " attempt, location, manifest, files, rows, bytes) SELECT dataset_id, generation,"
                " 'k' || number, mode, task_id, attempt, location, manifest, files, rows, bytes"
                " FROM publication, generate_series(1, 1200) AS number"
            )
            assert shop.parts.writer is not None
            await shop.parts.tables.snapshots.make(job.dataset)
            await shop.parts.writer.turn()
            found = await asyncio.to_thread(scanned, shop)
            assert len(set(found["partition_key"].to_pylist())) == found.num_rows == 1201
            page = (await asked(shop, "/plan")).json()
            page_snapshot = int(page["plan-id"])
            seen = [each["data-file"]["partition"] for each in page["file-scan-tasks"]]
            (task,) = page["plan-tasks"]
            # What is purged between two looks is not planned as if there were less of it.
            found_table = await shop.parts.tables.load("totals")
            assert isinstance(found_table, CatalogTable)
            assert shop.parts.planner is not None
            assert len(await shop.parts.planner.parts(found_table, found_table.main)) == 501
            gone_since = replace(found_table.main, id=found_table.main.id + 1)
            with pytest.raises(InvalidInput, match="no longer keeps it"):
                await shop.parts.planner.parts(found_table, gone_since)
            await world.rows("DELETE FROM publication WHERE partition_key <> 'k'")
            world.later(60)
            await shop.parts.tables.snapshots.make(job.dataset)
            await shop.parts.writer.turn()
            world.later(8 * 86_400)
            assert await shop.parts.tables.snapshots.forget() == 1
            following: str | None = task
            while following is not None:
                page = (await asked(shop, "/tasks", **{"plan-task": following})).json()
                seen += [each["data-file"]["partition"] for each in page["file-scan-tasks"]]
                (following,) = page["plan-tasks"] or [None]
            assert len(seen) == len({each for (each,) in seen}) == 1201
            await _by_a_large_filter(shop, page_snapshot)
            world.later(86_400)
            await shop.parts.tables.snapshots.forget()
            gone = (await asked(shop, "/tasks", **{"plan-task": task})).json()["error"]
            assert (gone["code"], gone["type"]) == (404, "NoSuchPlanTaskException")

    play(story)


def test_a_span_of_partitions_is_planned_without_a_look_at_others(
    play: Play, tmp_path: Path
) -> None:
    """As of a month among the days of years: one page, which reads the month's manifests alone."""
    month = "partition_key >= '2026-02-01' AND partition_key < '2026-03-01'"

    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            await today(world)
            job = await world.job("totals")
            for day in ("2026-01-31", "2026-02-01", "2026-02-28", "2026-03-01"):
                await shop.publish(job, rows((day, 1)), partition=day)
            await world.rows(
                "INSERT INTO publication (dataset_id, generation, partition_key, mode, task_id,"
                " attempt, location, manifest, files, rows, bytes) SELECT dataset_id, generation,"
                " '2025-' || number, mode, task_id, attempt, location, manifest, files, rows, bytes"
                " FROM publication, generate_series(1000, 1600) AS number"
                " WHERE partition_key = '2026-01-31'"
            )
            found = [("2026-02-01", 1), ("2026-02-28", 1)]
            assert pairs(await asyncio.to_thread(by_clients, shop, row_filter=month)) == found
            for day in ("2026-01-31", "2026-03-01"):
                place = f"datasets/totals/{job.generation}/{day}/"
                (kept,) = (await shop.store.list(place)).entries[:1]
                await shop.store.delete(f"{kept.key.rpartition('/')[0]}/manifest.json")
            assert shop.parts.planner is not None
            # As a dispatcher has it that was just started: no manifest was read yet.
            shop.parts.planner.manifests = Manifests(shop.store)
            wanted = {"type": "gt-eq", "term": "partition_key", "value": "2026-02-01"}
            below = {**wanted, "type": "lt", "value": "2026-03-01"}
            both = {"type": "and", "left": wanted, "right": below}
            page = (await asked(shop, "/plan", filter=both)).json()
            assert page["plan-tasks"] == []
            seen = [each["data-file"]["partition"] for each in page["file-scan-tasks"]]
            assert seen == [["2026-02-01"], ["2026-02-28"]]
            assert {each["residual-filter"] for each in page["file-scan-tasks"]} == {True}
            assert pairs(await asyncio.to_thread(scanned, shop, row_filter=month)) == found
            like = "partition_key LIKE '2026-02%'"
            assert pairs(await asyncio.to_thread(scanned, shop, row_filter=like)) == found
            # Of what no span says, the partition rules out all the same what is read.
            odd = {"type": "not", "child": {"type": "not", "child": below}}
            both = {"type": "and", "left": odd, "right": {"type": "not", "child": below}}
            assert (await asked(shop, "/plan", filter=both)).json()["file-scan-tasks"] == []
            # And what is read has to be there.
            assert (await asked(shop, "/plan", filter=below)).status_code == 500

    play(story)


async def _by_a_large_filter(shop: Shop, snapshot: int) -> None:
    """It is told of with each file, so its pages are shorter; and a part of many is too much."""
    wanted: Any = {"type": "eq", "term": "sum", "value": 1}
    every = [{**wanted, "value": number} for number in range(1, 1001)]
    while len(every) > 1:
        pairs = zip(every[::2], every[1::2], strict=False)
        rest = every[len(every) // 2 * 2 :]
        every = [{"type": "or", "left": one, "right": other} for one, other in pairs] + rest
    page = (await asked(shop, "/plan", filter=every[0], **{"snapshot-id": snapshot})).json()
    lengths = [len(page["file-scan-tasks"])]
    while page["plan-tasks"]:
        page = (await asked(shop, "/tasks", **{"plan-task": page["plan-tasks"][0]})).json()
        lengths.append(len(page["file-scan-tasks"]))
    assert (lengths[:-1], lengths[-1]) == ([100] * 12, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_planner, "TOLD_MAX", 999)
        more = {"snapshot-id": snapshot}
        refused = (await asked(shop, "/plan", filter=every[0], **more)).json()["error"]
    assert refused["code"] == 400
    assert "too large for a partition of 100 files" in refused["message"]


def test_a_column_may_have_the_name_of_the_partition(play: Play, tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            job = await world.job("totals")
            taken = rows(("x", 1)).append_column("Partition_Key", pa.array(["its own"]))
            await shop.publish(job, taken, partition="a")
            await shop.publish(job, taken, partition="b")
            for read in (by_clients, scanned):
                only = "_partition_key = 'b'"
                found = await asyncio.to_thread(read, shop, row_filter=only)
                assert found.to_pylist() == [
                    {"name": "x", "sum": 1, "Partition_Key": "its own", "_partition_key": "b"}
                ]

    play(story)


def test_readers_at_once_write_once_and_are_told_what_is_there(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        async with opened_shop(world, tmp_path) as shop:
            writer, snapshots = shop.parts.writer, shop.parts.tables.snapshots
            assert writer is not None
            job = await world.job("totals")
            await shop.publish(job, rows(("x", 1)))
            put = writer._put

            async def overtaken(table: CatalogTable, name: str, body: bytes) -> str:
                if name.startswith("snap-"):
                    # Somebody else makes another snapshot before the files of this one are noted.
                    monkeypatch.setattr(writer, "_put", put)
                    world.later(5)
                    await shop.publish(job, rows(("y", 2)), partition="b")
                    assert await snapshots.make(job.dataset)
                return await put(table, name, body)

            monkeypatch.setattr(writer, "_put", overtaken)
            first = (await told(shop))["current-snapshot-id"]
            assert first == await world.value("SELECT min(id) FROM table_snapshot")
            before = left(tmp_path)
            answers = await asyncio.gather(*(asked(shop) for _ in range(5)))
            found = {each.json()["metadata"]["current-snapshot-id"] for each in answers}
            assert found == {await world.value("SELECT max(id) FROM table_snapshot")} != {first}
            assert len(left(tmp_path) - before) == 3

    play(story)
