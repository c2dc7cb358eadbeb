"""Datasets as files over HTTP: everything about one, snapshots, and sweeping."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.protocol.datasets import (
    DatasetDetail,
    MaintainAnswer,
    RebuildTableAnswer,
    SnapshotAnswer,
    SweepAnswer,
)
from penstock.protocol.steering import PartitionsAnswer, StatusAnswer
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import (
    Stage,
    held,
    ok,
    output,
    place,
    read,
    refused,
    staged,
)
from tests.integration.dispatcher.readers import Library
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import Worlds, failed

COLUMNS = [{"name": "day", "type": "date", "is_nullable": False}, {"name": "n", "type": "bigint"}]


def facts(rows: int, columns: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    said = {"manifest": f"{rows:064x}", "files": 2, "rows": rows, "bytes": rows * 100}
    return {**said, "columns": COLUMNS if columns is None else columns}


async def publish(stage: Stage, *, rows: int, **fields: Any) -> None:
    (task,) = await stage.claim()
    end = held(task, outputs=[output(task, facts=facts(rows), **fields)])
    ok(await stage.complete(end))


def test_files_are_rewritten_when_asked_for(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        rule = "outputs: [{name: tidy, maintain: {cluster: [n], compact: {files: 9}, after: 1h}}]"
        ok(await stage.apply(chain().replace("outputs: [tidy]", rule)))
        await stage.trigger("p", "q")
        for _ in range(2):
            await publish(stage, rows=3)
        shown = read(await stage.public.get("/v1/datasets/tidy"), DatasetDetail)
        assert shown.maintain is not None
        assert (shown.maintain.after, shown.maintain.cluster) == ("1h", ["n"])
        assert shown.maintain.compact is not None
        assert (shown.maintain.compact.files, shown.maintain.compact.below) == (9, "32MiB")
        path = "/v1/datasets/tidy/maintain"
        one = read(await stage.public.post(path, json={"partition_key": "q"}), MaintainAnswer)
        rest = read(await stage.public.post(path), MaintainAnswer)
        assert [len(one.tasks), one.is_all, len(rest.tasks)] == [1, True, 1]
        # A worker is told to run something else than the job does.
        (task,) = await stage.claim()
        assert (task.operator, task.payload) == ("maintain", {"partition_key": "q"})
        assert task.current is not None
        assert [each.revision for each in task.current["tidy"]] == [1]
        end = held(task, outputs=[output(task, facts=facts(3), base_revision=1)])
        (ended,) = ok(await stage.complete(end))["results"]
        assert [each["outcome"] for each in ended["published"]] == ["rewritten"]
        refused(await stage.public.post("/v1/datasets/nothing/maintain"), 404)
        told = refused(await stage.public.post("/v1/datasets/daily/maintain"), 409)
        assert told.type == "not maintained"

    on_stage(story)


def test_how_far_a_table_is_and_that_it_is_loaded_again(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        rule = "outputs: [{name: tidy, storage: postgres, columns: {day: date, n: bigint}}]"
        ok(await stage.apply(chain().replace("outputs: [tidy]", rule)))
        await stage.trigger("p")
        await publish(stage, rows=3)
        shown = read(await stage.public.get("/v1/datasets/tidy"), DatasetDetail)
        assert shown.table is not None
        # Nobody loads it here, so those that follow wait.
        assert (shown.table.partitions, shown.table.behind, shown.table.events) == (1, 1, 1)
        status = read(await stage.public.get("/v1/status"), StatusAnswer)
        assert [each.dataset for each in status.tables] == ["tidy"]
        assert status.events_pending == 1
        path = "/v1/datasets/tidy/rebuild-table"
        assert read(await stage.public.post(path), RebuildTableAnswer).partitions == 1
        refused(await stage.public.post("/v1/datasets/nothing/rebuild-table"), 404)
        told = refused(await stage.public.post("/v1/datasets/daily/rebuild-table"), 409)
        assert told.type == "no table"

    on_stage(story)


def test_a_dataset_its_partitions_and_a_snapshot(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        keep = "outputs: [{name: tidy, keep: {partitions: 9, age: 90d}}]"
        await stage.apply(chain().replace("outputs: [tidy]", keep))
        await stage.trigger("p", "q")
        await publish(stage, rows=3)
        await publish(stage, rows=4, start=5, end=6)
        shown = read(await stage.public.get("/v1/datasets/tidy"), DatasetDetail)
        assert (shown.name, shown.job, shown.revision) == ("tidy", "clean", 1)
        assert shown.keep is not None
        assert (shown.keep.partitions, shown.keep.age, shown.keep.generations) == (9, "90d", None)
        assert (shown.is_projected, shown.unprojected) == (False, 2)
        (generation,) = shown.generations
        assert (generation.state, generation.is_dropped) == ("current", False)
        sums = (generation.partitions, generation.files, generation.rows, generation.bytes)
        assert sums == (2, 4, 7, 700)
        assert [(each.name, each.is_nullable) for each in generation.columns] == [
            ("day", False),
            ("n", True),
        ]
        listed = read(await stage.public.get("/v1/datasets/tidy/partitions"), PartitionsAnswer)
        assert [(each.rows, each.bytes, each.files) for each in listed.partitions] == [
            (3, 300, 2),
            (4, 400, 2),
        ]
        snapshot = read(await stage.public.get("/v1/datasets/tidy/snapshot"), SnapshotAnswer)
        assert snapshot.generation == generation.version
        # Ranges come first, in their order.
        assert [(each.partition_key, each.start) for each in snapshot.parts] == [
            ("q", 5),
            ("p", None),
        ]
        assert snapshot.parts[1].manifest == f"{3:064x}"
        asked = {"partition_key": "p", "generation": generation.version}
        one = await stage.public.get("/v1/datasets/tidy/snapshot", params=asked)
        assert len(read(one, SnapshotAnswer).parts) == 1

    on_stage(story)


def test_a_snapshot_has_all_that_was_appended(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        append = "    update: append\n    inputs: [raw]"
        ok(await stage.apply(chain().replace("    inputs: [raw]", append)))
        await stage.trigger("p", "q")
        for rows in (1, 2):
            (task,) = await stage.claim()
            said = output(task, facts=facts(rows), append_key=f"k{rows}")
            ok(await stage.complete(held(task, outputs=[{**said, "partition_key": "same"}])))
        snapshot = read(await stage.public.get("/v1/datasets/tidy/snapshot"), SnapshotAnswer)
        assert [(each.append_key, each.rows) for each in snapshot.parts] == [("k1", 1), ("k2", 2)]
        assert {each.partition_key for each in snapshot.parts} == {"same"}

    on_stage(story)


def test_what_is_merged_is_told_what_to_merge_with(on_stage: Perform) -> None:
    """With the claim, and again when others were faster; both may be read by the token's grants."""

    async def story(stage: Stage) -> None:
        merge = "    update: merge\n    unique_key: [id]\n    inputs: [raw]"
        ok(await stage.apply(chain().replace("    inputs: [raw]", merge)))
        await stage.trigger("p")
        (early,) = await stage.claim()
        assert early.current == {}
        event = {"job": "feed", "partition_key": "p", "event_id": "again"}
        ok(await stage.public.post("/v1/trigger", json=event))
        await stage.route()
        (late,) = await stage.claim()
        first = output(late, facts=facts(1), base_revision=0)
        ok(await stage.complete(held(late, outputs=[first])))
        # To ask is to say that nothing was read.
        asked = output(early, base_revision=-1)
        (result,) = refused(await stage.complete(held(early, outputs=[asked])), 409).results
        assert result.current is not None
        assert [each.revision for each in result.current["tidy"]] == [1]
        said = output(early, facts=facts(2), base_revision=0)
        problem = refused(await stage.complete(held(early, outputs=[said])), 409)
        (result,) = problem.results
        assert (problem.type, result.why) == ("moved", "moved")
        assert result.current is not None
        ((part,),) = result.current.values()
        assert (part.location, part.revision, part.rows) == (place(late), 1, 1)
        assert part.manifest == f"{1:064x}"
        again = {**said, "location": f"{place(early)}/merge-1", "base_revision": 1}
        ok(await stage.complete(held(early, outputs=[again])))
        snapshot = read(await stage.public.get("/v1/datasets/tidy/snapshot"), SnapshotAnswer)
        assert [(each.location, each.rows) for each in snapshot.parts] == [(again["location"], 2)]
        ok(await stage.public.post("/v1/trigger", json={**event, "event_id": "third"}))
        await stage.route()
        (third,) = await stage.claim()
        assert third.current is not None
        assert [each.revision for each in third.current["tidy"]] == [2]

    on_stage(story)


def test_what_is_not_there(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        other = "00000000-0000-0000-0000-000000000000"
        for path in (
            "/v1/datasets/nothing",
            "/v1/datasets/nothing/snapshot",
            f"/v1/datasets/tidy/snapshot?generation={other}",
            "/v1/datasets/tidy/snapshot?partition_key=none",
        ):
            refused(await stage.public.get(path), 404)
        empty = await stage.public.get("/v1/datasets/tidy/snapshot")
        assert read(empty, SnapshotAnswer).parts == []
        refused(await stage.public.post("/v1/datasets/nothing/sweep"), 404)
        assert refused(await stage.public.post("/v1/sweep"), 409).type == "no store"
        refused(await stage.public.post("/v1/sweep", json={"grace_seconds": -1}), 422)

    on_stage(story)


def test_columns_that_do_not_fit_are_refused_one_by_one(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q", "r")
        await publish(stage, rows=1)
        bad, good = await stage.claim(limit=2)
        other = [{"name": "day", "type": "string"}]
        answer = await stage.complete(
            held(bad, outputs=[output(bad, facts=facts(1, other))]),
            held(good, outputs=[output(good, facts=facts(2))]),
        )
        assert answer.status_code == 207
        first, second = answer.json()["results"]
        assert (first["status"], first["why"], second["status"]) == (409, "schema", 200)
        assert "'day'" in first["detail"]
        assert "date" in first["detail"]

    on_stage(story)


def test_sweeping_over_http(worlds: Worlds) -> None:
    async def main() -> None:
        async with worlds.world() as world:
            library, job = Library(world), await world.job(max_attempts=1)
            folders = []
            for name in ("job", "other"):
                claimed = await job.claimed(name)
                folders.append(await library.written(claimed, dataset=name))
                await world.tasks.fail(failed(claimed.fence))
            library.later(1000)
            sweeping = library.sweeping(grace_seconds=5000)
            async with staged(world, sweeping=sweeping) as stage:
                path = "/v1/datasets/job/sweep"
                nothing = read(await stage.public.post(path), SweepAnswer)
                assert (nothing.files, nothing.is_over) == (0, True)
                asked: dict[str, Any] = {"grace_seconds": 10}
                dry = await stage.public.post("/v1/sweep", json={**asked, "dry_run": True})
                assert read(dry, SweepAnswer).files == 4
                assert await library.has(folders) == [True, True]
                swept = read(await stage.public.post(path, json=asked), SweepAnswer)
                assert (swept.attempts, swept.files, swept.bytes) == (1, 1, 4)
                rest = read(await stage.public.post("/v1/sweep", json=asked), SweepAnswer)
                assert (rest.files, rest.is_over) == (3, True)
            assert await library.has(folders) == [False, False]

    asyncio.run(main())
