"""Batches through the API, written by the real sink: into files that the next one merges with."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.datasets.layout import path_of
from penstock.datasets.manifest import decode
from penstock.datasets.sweeper import Verdict
from penstock.dispatcher.datasets.sweeper import PostgresFolderLedger
from penstock.dispatcher.tasks.model import NewTask
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.work import Assignment
from penstock.runtimes.sink import SinkRuntime, SinkSettings
from penstock.store.opening import open_store
from penstock.testing.runtime_contract import RecordingReporter
from penstock.worker import assignment_codec
from tests.integration.dispatcher.api.stage import Stage, held, ok, place, refused, staged
from tests.integration.dispatcher.world import Worlds

DAG = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  note:
    {runtime: process, operator: "a:note", inputs: [raw], outputs: [noted], buffers: [alerts]}
  other: {runtime: process, operator: "a:other", inputs: [raw], outputs: [others]}
  write:
    runtime: sink
    operator: sink.write
    update: UPDATE
    KEY
    config:
      max_age: 0s
      expect: {level: {in: [info, warning]}, amount: {min: 0}, id: {required: true}}
    outputs:
      - name: alerts
        buffered: true
        columns: {id: string, level: string, amount: "decimal(10,2)", at: timestamp}
      - alerts_rejected
"""
Told = Callable[["Buffers"], Coroutine[Any, Any, None]]


class Buffers:
    """A stage with a store, a DAG with a sink, and the sink."""

    def __init__(self, stage: Stage, root: str, runtime: SinkRuntime) -> None:
        self.stage = stage
        self.root = root
        self.runtime = runtime
        self._keys = 0

    async def task(self, operator: str = "a:note") -> Assignment:
        self._keys += 1
        await self.stage.trigger(f"k{self._keys}")
        (task,) = await self.stage.claim(operator)
        return task

    async def publish(
        self, task: Assignment, *rows: Any, batch: str = "b", token: str = "", **more: Any
    ) -> httpx.Response:
        said: dict[str, Any] = {"dataset": "alerts", "batch": batch, **more}
        if rows:
            said["rows"] = list(rows)
        return await self.stage.internal.post(
            "/v1/task/buffer-publish", json=said, headers={TASK_HEADER: token or task.token}
        )

    async def published(self, *rows: Any, **more: Any) -> Assignment:
        """A task that has published these and completed."""
        task = await self.task()
        ok(await self.publish(task, *rows, **more))
        ok(await self.stage.complete(held(task)))
        return task

    async def sunk(self) -> dict[str, Any]:
        """Run the next task of the sink; what it has taken."""
        (task,) = await self.stage.claim("sink.write")
        return await self.write(task)

    async def write(self, task: Assignment) -> dict[str, Any]:
        work = assignment_codec.work_of(task, logs=None, grace_seconds=1)
        finished = await self.runtime.run(work, RecordingReporter())
        end = assignment_codec.succeeded(
            work, finished, lease_token=task.lease_token, token=task.token
        )
        ok(await self.stage.complete(msgspec.to_builtins(end)))
        return dict(finished.metrics)

    async def rows(self, dataset: str = "alerts") -> list[dict[str, Any]]:
        """What is published."""
        found = await self.stage.world.rows(
            "SELECT coalesce(part.location, publication.location) AS location"
            " FROM publication JOIN dataset ON dataset.id = publication.dataset_id"
            " LEFT JOIN part ON publication.mode = 'append'"
            "  AND part.dataset_id = publication.dataset_id"
            "  AND part.partition_key = publication.partition_key"
            " WHERE dataset.name = %s ORDER BY 1",
            dataset,
        )
        rows: list[dict[str, Any]] = []
        for each in found:
            folder = path_of(each["location"])
            manifest = decode((folder / "manifest.json").read_bytes())
            for file in manifest.files:
                body = (folder / file.name).read_bytes()
                assert hashlib.sha256(body).hexdigest() == file.sha256
                table = pq.read_table(pa.BufferReader(body))
                assert table.num_rows == file.rows
                rows += [
                    {name: value for name, value in row.items() if not name.startswith("_")}
                    for row in table.to_pylist()
                ]
        return rows

    async def rejected(self) -> list[dict[str, Any]]:
        answer = ok(await self.stage.public.get("/v1/buffers/alerts/rejected"))
        found: list[dict[str, Any]] = answer["rows"]
        return found

    async def give_back(self, *rows: dict[str, Any], **more: Any) -> httpx.Response:
        said = {"rows": list(rows), **more}
        return await self.stage.public.post("/v1/buffers/alerts/rejected", json=said)


@pytest.fixture
def buffers(worlds: Worlds, tmp_path: Path) -> Callable[..., None]:
    def run(story: Told, *, update: str = "append") -> None:
        async def main() -> None:
            root = (tmp_path / "lake").as_uri()
            store = await open_store(f"{root}?fsync=off")
            settings = SinkSettings(store_url=f"{root}?fsync=off")
            async with (
                worlds.world() as world,
                staged(world, root=root, store=store) as stage,
                SinkRuntime(settings) as runtime,
            ):
                key = "unique_key: [id]" if update == "merge" else ""
                ok(await stage.apply(DAG.replace("UPDATE", update).replace("KEY", key)))
                await story(Buffers(stage, root, runtime))
            await store.close()

        asyncio.run(main())

    return run


def alert(name: str, level: str = "info", **more: Any) -> dict[str, Any]:
    return {"id": name, "level": level, **more}


def test_rows_are_published_checked_and_written(buffers: Callable[..., None]) -> None:
    async def story(made: Buffers) -> None:
        task = await made.task()
        answer = ok(
            await made.publish(
                task,
                alert("a", amount="1.50", at="2026-01-02T03:04:05Z"),
                alert("b", "loud"),
                {"id": "c", "size": 1},
                alert("d", amount="-1"),
                alert("e", at="soon"),
            )
        )
        assert answer == {"sequence": 1, "state": "held", "is_new": True}
        second = ok(await made.publish(task, alert("f"), batch="second"))
        assert second == {"sequence": 2, "state": "held", "is_new": True}
        again = ok(await made.publish(task, alert("f"), batch="second"))
        assert again == {**second, "is_new": False}
        assert await made.stage.claim("sink.write") == []
        ok(await made.stage.complete(held(task)))
        assert await made.sunk() == {"batches": 2, "rows": 2, "rejected": 4}
        assert [row["id"] for row in await made.rows()] == ["a", "f"]
        found = await made.rejected()
        assert [(row["sequence"], row["place"]) for row in found] == [
            (1, 1),
            (1, 2),
            (1, 3),
            (1, 4),
        ]
        assert found[0]["reason"] == "level: 'loud' does not satisfy in ['info', 'warning']."
        assert "size" in found[1]["reason"]
        assert found[2]["reason"].startswith("amount: Decimal('-1.00') does not satisfy min 0")
        assert json.loads(found[3]["row"]) == alert("e", at="soon")
        assert {row["task"] for row in found} == {task.task_id}
        # The events of what was published make what follows run.
        told = await made.stage.world.rows(
            "SELECT dataset_id FROM event WHERE revision IS NOT NULL"
        )
        assert len(told) == 2

    buffers(story)


def test_rejected_rows_are_mended_replayed_and_dropped_once(
    buffers: Callable[..., None],
) -> None:
    async def story(made: Buffers) -> None:
        await made.published(*(alert(name, "loud") for name in "abc"))
        await made.sunk()
        first, second, third = await made.rejected()
        at = {name: first[name] for name in ("sequence", "place")}
        mended = {**at, "row": json.dumps(alert("a", "warning"))}
        done = ok(await made.give_back(mended))
        assert done["rows"] == 1
        # Asked again, as after an answer that was lost: it is done already.
        assert ok(await made.give_back(mended)) == {"rows": 0, "batches": []}
        assert await made.sunk() == {"batches": 1, "rows": 1, "rejected": 0}
        assert [row["id"] for row in await made.rows()] == ["a"]
        replayed = {name: second[name] for name in ("sequence", "place")}
        ok(await made.give_back(replayed))
        assert (await made.sunk())["rejected"] == 1
        dropped = {name: third[name] for name in ("sequence", "place")}
        assert ok(await made.give_back(dropped, is_dropped=True))["rows"] == 1
        # What was replayed was judged again, as a row of another batch.
        (left,) = await made.rejected()
        assert left["sequence"] > third["sequence"]
        assert left["batch"].startswith("rejected:")
        refused(await made.give_back({"sequence": 99, "place": 0}), 404)
        shown = ok(await made.stage.public.get("/v1/buffers"))["buffers"]
        assert [(each["dataset"], each["job"], each["rejected"]) for each in shown] == [
            ("alerts", "write", "alerts_rejected")
        ]
        refused(await made.stage.public.get("/v1/buffers/noted/rejected"), 404)

    buffers(story)


def test_many_long_rejected_rows_are_all_within_reach(buffers: Callable[..., None]) -> None:
    """Together they are more than one look takes; a file that cannot be read is counted."""

    async def story(made: Buffers) -> None:
        task = await made.task()
        folder = place(task, "noted")
        path = path_of(f"{folder}/rows.parquet")
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": ["x" * 1_000_000] * 70, "level": ["loud"] * 70}), path)
        file = {
            "location": f"{folder}/rows.parquet",
            "format": "parquet",
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        ok(await made.publish(task, file=file))
        ok(await made.stage.complete(held(task)))
        assert (await made.sunk())["rejected"] == 70
        listed = "/v1/buffers/alerts/rejected?limit=2"
        answer = ok(await made.stage.public.get(listed))
        assert [each["place"] for each in answer["rows"]] == [0, 1]
        assert (answer["is_cut"], answer["unread"]) == (True, 0)
        last = {"sequence": answer["rows"][0]["sequence"], "place": 69}
        assert ok(await made.give_back(last, is_dropped=True))["rows"] == 1
        (row,) = await made.stage.world.rows(
            "SELECT part.location FROM part JOIN dataset ON dataset.id = part.dataset_id"
            " WHERE dataset.name = 'alerts_rejected'"
        )
        (path_of(row["location"]) / "part-00000.parquet").write_bytes(b"none")
        answer = ok(await made.stage.public.get(listed))
        assert (answer["rows"], answer["unread"]) == ([], 1)
        refused(await made.give_back(last, is_dropped=True), 404)

    buffers(story)


@pytest.mark.parametrize("why", ["too much", "over"])
def test_nothing_is_stored_for_who_may_publish_no_more(
    buffers: Callable[..., None], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def story(made: Buffers) -> None:
        task = await made.task()
        ok(await made.publish(task, alert("a"), batch="a"))
        if why == "over":
            ok(await made.stage.complete(held(task)))
        else:
            monkeypatch.setattr("penstock.dispatcher.tasks.batches.HELD_MAX", 1)
            # What was accepted is accepted again.
            assert not ok(await made.publish(task, alert("a"), batch="a"))["is_new"]
        refused(await made.publish(task, alert("b"), batch="b"), 409)
        bodies = list((path_of(made.root) / "buffers").rglob("*.jsonl"))
        assert len(bodies) == 1

    buffers(story)


def test_an_upsert_wins_with_a_higher_sequence_alone(buffers: Callable[..., None]) -> None:
    """Whatever the order in which sinks write: the batch that was accepted later counts."""

    async def story(made: Buffers) -> None:
        early = await made.task()
        ok(await made.publish(early, alert("k", amount="1"), alert("k", amount="2"), alert("x")))
        late = await made.task()
        ok(await made.publish(late, alert("k", amount="3"), alert("y", "loud")))
        # The later batch is released, and written, first.
        ok(await made.stage.complete(held(late)))
        assert (await made.sunk())["rejected"] == 1
        ok(await made.stage.complete(held(early)))
        await made.sunk()
        rows = {row["id"]: row["amount"] for row in await made.rows()}
        assert {name: str(amount) for name, amount in rows.items()} == {"k": "3.00", "x": "None"}
        (aside,) = await made.rejected()
        assert aside["batch"] == "b"

    buffers(story, update="merge")


def test_two_sinks_that_merge_at_once_lose_nothing(buffers: Callable[..., None]) -> None:
    async def story(made: Buffers) -> None:
        await made.published(alert("a"))
        (first,) = await made.stage.claim("sink.write")
        await made.published(alert("b"))
        # One task merges at a time; there may be more, as when a dead one is played again.
        assert await made.stage.claim("sink.write") == []
        (row,) = await made.stage.world.rows(
            "SELECT definition_id, generation::text FROM task WHERE id = %s", first.task_id
        )
        payload = {"buffer": {"dataset": "alerts"}}
        await made.stage.parts.tasks.create([NewTask(**row, dedupe_key="x", payload=payload)])
        (second,) = await made.stage.claim("sink.write")
        await made.write(first)
        work = assignment_codec.work_of(second, logs=None, grace_seconds=1)
        finished = await made.runtime.run(work, RecordingReporter())
        end = assignment_codec.succeeded(
            work, finished, lease_token=second.lease_token, token=second.token
        )
        answer = await made.stage.complete(msgspec.to_builtins(end))
        told = answer.json()["results"][0]
        assert told["why"] == "moved"
        # It merges again, with what is published now.
        again = msgspec.structs.replace(
            second, current=msgspec.convert(told["current"], dict[str, list[Any]])
        )
        again = msgspec.convert(msgspec.to_builtins(again), Assignment)
        await made.write(again)
        assert sorted(row["id"] for row in await made.rows()) == ["a", "b"]

    buffers(story, update="merge")


def test_arrow_and_files_are_batches_too(buffers: Callable[..., None]) -> None:
    async def story(made: Buffers) -> None:
        table = pa.table({"id": ["a", "b"], "level": ["info", "loud"]})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        task = await made.task()
        body = base64.b64encode(sink.getvalue().to_pybytes()).decode()
        ok(await made.publish(task, arrow=body, batch="arrow"))
        folder = place(task, "noted")
        path = path_of(f"{folder}/rows.parquet")
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": ["c"], "amount": [1.5]}), path)
        file = {
            "location": f"{folder}/rows.parquet",
            "format": "parquet",
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        ok(await made.publish(task, file=file, batch="file"))
        # The folders of both are kept, though the attempt is over for long.
        ok(await made.stage.complete(held(task)))
        rows = await made.stage.world.rows("SELECT place FROM buffer_batch ORDER BY seq")
        places = [row["place"] for row in rows]
        ledger = PostgresFolderLedger(made.stage.world.database, grace_seconds=60)
        made.stage.world.later(600)
        assert set((await ledger.verdicts(places)).values()) == {Verdict.KEEP}
        assert await made.sunk() == {"batches": 2, "rows": 2, "rejected": 1}
        assert sorted(row["id"] for row in await made.rows()) == ["a", "c"]
        (aside,) = await made.rejected()
        assert json.loads(aside["row"]) == {"id": "b", "level": "loud"}
        # Once they are written nobody needs them.
        made.stage.world.later(600)
        assert set((await ledger.verdicts(places)).values()) == {Verdict.GONE}

    buffers(story)


def test_a_body_that_is_damaged_is_rejected_as_a_whole(buffers: Callable[..., None]) -> None:
    async def story(made: Buffers) -> None:
        task = await made.task()
        for number in range(3):
            ok(await made.publish(task, alert(f"k{number}"), batch=f"b{number}"))
        garbage = base64.b64encode(b"no arrow at all").decode()
        ok(await made.publish(task, arrow=garbage, batch="garbage"))
        ok(await made.stage.complete(held(task)))
        rows = await made.stage.world.rows("SELECT location FROM buffer_batch ORDER BY seq")
        path_of(rows[0]["location"]).unlink()
        path_of(rows[1]["location"]).write_bytes(b"something else")
        assert await made.sunk() == {"batches": 4, "rows": 1, "rejected": 3}
        assert [row["id"] for row in await made.rows()] == ["k2"]
        found = await made.rejected()
        assert [(row["batch"], row["place"]) for row in found] == [
            ("garbage", -1),
            ("b1", -1),
            ("b0", -1),
        ]
        # Such a batch has no rows that could be given back as they were.
        told = await made.give_back({"sequence": found[1]["sequence"], "place": -1})
        assert refused(told, 409).type == "no text"
        ok(await made.give_back({"sequence": found[1]["sequence"], "place": -1}, is_dropped=True))
        assert len(await made.rejected()) == 2

    buffers(story)


def test_whoever_may_not_publish_is_refused(buffers: Callable[..., None]) -> None:
    async def story(made: Buffers) -> None:
        other = await made.task("a:other")
        told = refused(await made.publish(other, alert("a")), 403)
        assert told.type == "not granted"
        task = await made.task()
        # A dataset that is not there, one that is not buffered, and one that is not granted.
        for dataset in ("nothing", "noted", "alerts_rejected"):
            refused(await made.publish(task, alert("a"), dataset=dataset), 403)
        refused(await made.publish(task, alert("a"), token="none"), 403)
        refused(await made.publish(task), 422)
        refused(await made.publish(task, alert("a"), arrow="AAAA"), 422)
        refused(await made.publish(task, alert("x" * 300_000)), 413)
        # A file of another task, one outside of every folder, and one that is not there.
        for where in (
            f"{place(other, 'others')}/rows.parquet",
            "file:///etc/passwd",
            f"{place(task, 'noted')}/../../x",
            f"{place(task, 'noted')}/%2e%2e/x",
        ):
            file = {"location": where, "format": "jsonl", "bytes": 1, "sha256": "0" * 64}
            refused(await made.publish(task, file=file), 403)
        missing = f"{place(task, 'noted')}/missing.jsonl"
        file = {"location": missing, "format": "jsonl", "bytes": 1, "sha256": "0" * 64}
        refused(await made.publish(task, file=file), 422)
        # A token that is over.
        ok(await made.publish(task, alert("a")))
        assert refused(await made.publish(task, alert("b")), 409).type == "different"
        ok(await made.stage.complete(held(task)))
        assert refused(await made.publish(task, alert("a")), 409).type == "over"
        made.stage.world.later(3_600)
        assert refused(await made.publish(task, alert("a")), 403).type == "token expired"
        notes = await made.stage.world.value("SELECT count(*) FROM buffer_batch")
        assert notes == 1

    buffers(story)


def test_writers_are_held_back_while_the_sink_is_behind(buffers: Callable[..., None]) -> None:
    async def story(made: Buffers) -> None:
        task = await made.task()
        await made.stage.world.rows(
            "INSERT INTO pressure (job_id, pressed, scope, depth, oldest_seconds, reason)"
            " SELECT id, true, 'all', 5, 1, 'Too many batches wait.' FROM job WHERE name = 'write'"
        )
        answer = await made.publish(task, alert("a"))
        told = refused(answer, 429)
        assert "Too many batches wait." in told.title
        assert answer.headers["retry-after"] == "5"
        await made.stage.world.rows("DELETE FROM pressure")
        ok(await made.publish(task, alert("a")))

    buffers(story)
