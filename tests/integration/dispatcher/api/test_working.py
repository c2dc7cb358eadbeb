"""What workers ask of the API, from hello to complete."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.protocol.base import WORKER_HEADER
from penstock.protocol.work import HelloAnswer
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, place, read, refused
from tests.integration.dispatcher.test_deployment import chain

FAN_IN = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  whole: {activation: source, source: {kind: manual}, outputs: [rates]}
  rate: {runtime: process, operator: "a:rate", inputs: [rates], outputs: [table]}
  clean: {runtime: process, operator: "a:clean", inputs: [raw], outputs: [tidy]}
  report:
    runtime: process
    operator: a:report
    inputs: [tidy, {from: table, as: rates}]
    outputs: [daily]
"""


def test_a_task_from_news_to_publication(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        assert ok(await stage.apply())["version"] == 1
        await stage.trigger("p")
        (task,) = await stage.claim()
        assert (task.job, task.operator, task.attempt) == ("clean", "a:clean", 1)
        assert (task.runtime, task.timeout_seconds) == ("process", 3600)
        assert task.heartbeat_seconds == 60
        assert task.payload["partition_key"] == "p"
        kicks = len(stage.kicks)
        answer = ok(await stage.complete(held(task, outputs=[output(task)], log="file:///l")))
        assert len(stage.kicks) == kicks + 1
        (result,) = answer["results"]
        assert (result["status"], result["task_status"]) == (200, "completed")
        (published,) = result["published"]
        assert (published["outcome"], published["revision"]) == ("published", 1)
        assert await stage.world.value("SELECT log FROM attempt") == "file:///l"
        assert [each.job for each in await stage.claim("a:report")] == ["report"]

    on_stage(story)


def test_what_a_task_is_given_to_read(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply(FAN_IN)
        await stage.trigger("p")
        (clean,) = await stage.claim()
        raw = clean.inputs["raw"]
        # Nobody publishes what a source only tells of.
        assert (raw.dataset, raw.location, raw.revision) == ("raw", None, None)
        assert raw.uuid == clean.definition["datasets"]["raw"]
        ok(await stage.complete(held(clean, outputs=[output(clean)])))
        (report,) = await stage.claim("a:report")
        assert sorted(report.inputs) == ["rates", "tidy"]
        tidy, rates = report.inputs["tidy"], report.inputs["rates"]
        assert (tidy.location, tidy.revision) == (place(clean), 1)
        assert tidy.generation == clean.generation
        assert (rates.dataset, rates.location) == ("table", None)
        ok(await stage.complete(held(report, failure={"reason": "No rates."})))

        ok(await stage.public.post("/v1/trigger", json={"job": "whole"}))
        await stage.route()
        (rate,) = await stage.claim("a:rate")
        ok(await stage.complete(held(rate, outputs=[output(rate, "table", partition_key=None)])))
        stage.world.later(3600)
        given = {
            each.payload.get("partition_key"): each
            for each in await stage.claim("a:report", limit=9)
        }
        # A dataset without partitions is read as a whole, whatever the partition of the reader.
        assert given["p"].inputs["rates"].location == place(rate, "table")
        assert given["p"].inputs["tidy"].location == place(clean)
        assert given[None].inputs["rates"].location == place(rate, "table")
        assert given[None].inputs["tidy"].location is None

    on_stage(story)


def test_a_task_of_an_earlier_generation_reads_what_fed_it(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        (old,) = await stage.claim()
        ok(await stage.complete(held(old, outputs=[output(old)])))
        await stage.apply(chain(clean="2"))
        await stage.world.rows("DELETE FROM backfill")
        (report,) = await stage.claim("a:report")
        assert report.inputs["tidy"].generation == old.generation
        assert report.inputs["tidy"].location == place(old)

    on_stage(story)


def test_hello(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()

        async def hello(*runtimes: str, **fields: Any) -> list[str]:
            ask = {"runtimes": runtimes, **fields}
            answer = await stage.internal.post(
                "/internal/hello", json=ask, headers=stage.identity("w1")
            )
            return [each.name for each in read(answer, HelloAnswer).operators]

        assert await hello("process", about={"host": "h"}) == ["a:clean", "a:report"]
        assert await hello("lambda") == []
        (row,) = await stage.world.rows("SELECT * FROM worker")
        assert (row["name"], row["operators"]) == ("w1", [])
        first_seen = row["first_seen_at"]
        stage.world.later(5)
        # An operator that left the DAG is served as long as tasks wait for it.
        await stage.trigger("p")
        renamed = chain().replace("a:clean", "a:other")
        ok(await stage.apply(renamed))
        assert await hello("process", concurrency=3) == ["a:clean", "a:other", "a:report"]
        (row,) = await stage.world.rows("SELECT * FROM worker")
        assert row["about"] == {"runtimes": ["process"], "concurrency": 3, "about": {}}
        assert row["last_seen_at"] > first_seen == row["first_seen_at"]
        (task,) = await stage.claim()
        assert task.operator == "a:clean"
        assert "a:clean" not in await hello("process")

    on_stage(story)


def test_claims_by_number(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply(chain(extra="") + "")
        await stage.trigger("p", "q", "r")
        ids = [row["id"] for row in await stage.world.rows("SELECT id FROM task ORDER BY id")]

        async def claim(**ask: Any) -> Any:
            return await stage.internal.post(
                "/internal/task-claim", json=ask, headers=stage.identity("w2")
            )

        (task,) = ok(await claim(task_id=ids[0]))["tasks"]
        assert (task["task_id"], task["attempt"]) == (ids[0], 1)
        problem = refused(await claim(task_id=ids[0]), 409)
        assert problem.type == "running"
        assert problem.state is not None
        assert (problem.state.status, problem.state.worker) == ("running", "w2")
        assert refused(await claim(task_id=404), 404).type == "unknown"
        ok(await stage.public.post("/v1/tasks/cancel", json={"tasks": [ids[1]]}))
        assert refused(await claim(task_id=ids[1]), 409).type == "over"
        ok(await stage.public.post("/v1/jobs/clean/pause"))
        problem = refused(await claim(task_id=ids[2]), 409)
        assert (problem.type, problem.title) == ("paused", f"The job of task {ids[2]} is paused.")
        ok(await stage.public.post("/v1/jobs/clean/resume"))
        limit = await stage.public.put("/v1/operators/a:clean", json={"in_flight_max": 1})
        assert ok(limit) == {"name": "a:clean", "in_flight_max": 1}
        assert refused(await claim(task_id=ids[2]), 409).type == "full"
        proof = {name: task[name] for name in ("task_id", "attempt", "lease_token", "token")}
        ok(await stage.complete({**proof, "failure": {"reason": "broken"}}))
        assert refused(await claim(task_id=ids[0]), 409).type == "not due"

    on_stage(story)


def test_claims_of_an_operator(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        assert await stage.claim() == []
        await stage.trigger("p", "q", "r")
        assert [each.payload["partition_key"] for each in await stage.claim(limit=2)] == ["p", "q"]
        assert await stage.claim(job="report", limit=5) == []
        assert len(await stage.claim(job="clean", limit=5)) == 1

    on_stage(story)


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        ({}, 422),
        ({"task_id": 1, "operator": "a"}, 422),
        ({"task_id": 1, "limit": 2}, 422),
        ({"task_id": 1, "job": "a"}, 422),
        ({"task_id": 0}, 422),
        ({"task_id": "1"}, 422),
        ({"operator": ""}, 422),
        ({"operator": "a", "limit": 0}, 422),
        ({"operator": "a", "what": 1}, 422),
        ({"operator": "a\x00b"}, 422),
        ({"operator": "a", "job": "nobody"}, 404),
        ({"task_id": 2**63 - 1}, 404),
    ],
)
def test_claims_that_make_no_sense(on_stage: Perform, ask: dict[str, Any], status: int) -> None:
    async def story(stage: Stage) -> None:
        headers = stage.identity()
        answer = await stage.internal.post("/internal/task-claim", json=ask, headers=headers)
        refused(answer, status)

    on_stage(story)


@pytest.mark.parametrize("path", ["hello", "wait", "task-claim", "events", "sources"])
def test_who_calls_has_to_say_so(on_stage: Perform, path: str) -> None:
    async def story(stage: Stage) -> None:
        method = "GET" if path == "sources" else "POST"

        async def call(headers: dict[str, str]) -> Any:
            return await stage.internal.request(
                method, f"/internal/{path}", json={}, headers=headers
            )

        good = stage.identity("w1")
        assert refused(await call({}), 401).type == "unauthorized"
        assert refused(await call({WORKER_HEADER: "w1"}), 401).type == "unauthorized"
        another = refused(await call({**good, WORKER_HEADER: "w2"}), 403)
        assert another.type == "forbidden"
        assert "PENSTOCK_WORKER_SECRET, or --data, is not that" in another.detail
        # What is wrong with the body is told to those who may know.
        assert (await call(good)).status_code in (200, 422)
        assert await stage.world.value("SELECT count(*) FROM worker") == 0

    on_stage(story)


def test_progress_that_is_too_much_costs_no_lease_but_the_progress(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q")
        first, second = await stage.claim(limit=2)
        deep: dict[str, Any] = {}
        for _ in range(400):
            deep = {"a": deep}
        for said, why in ((deep, "32 levels deep"), ({"x": "y" * 20_000}, "16,384 are allowed")):
            beats = held(first, progress=said), held(second, progress={"step": 1})
            answer = ok(await stage.beat(*beats))
            assert [each["status"] for each in answer["results"]] == [200, 200]
            shown = ok(await stage.public.get(f"/v1/tasks/{first.task_id}"))
            assert why in shown["attempts"][0]["progress"]["omitted"]
        refused(await stage.beat(held(first, progress={"x": ["y"] * 300_000})), 413)
        endless = b'{"tasks":[{"progress":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}"
        refused(await stage.internal.post("/v1/task/heartbeat", content=endless), 400)

    on_stage(story)


def test_heartbeats(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q")
        first, second = await stage.claim(limit=2)
        beat = stage.beat
        stage.world.later(10)
        answer = ok(await beat(held(first, progress={"rows": 7}), held(second)))
        assert [each["status"] for each in answer["results"]] == [200, 200]
        assert answer["results"][0]["lease_expires_at"] > first.lease_expires_at.isoformat()
        ok(await stage.public.post("/v1/tasks/cancel", json={"tasks": [second.task_id]}))
        stale = {**held(first), "lease_token": "other"}
        mixed = await beat(held(second), stale)
        assert mixed.status_code == 207
        kept, lost = mixed.json()["results"]
        assert (kept["status"], kept["cancel_asked"]) == (200, True)
        assert (lost["status"], lost["why"], lost["state"]["status"]) == (409, "stale", "running")
        problem = refused(await beat(stale), 409)
        assert (problem.type, problem.results[0].task_id) == ("stale", first.task_id)
        assert problem.state is not None
        assert problem.state.attempt == 1
        gone = {**held(first), "task_id": 404, "token": await stage.token(404, 1)}
        refused(await beat(gone), 404)
        assert refused(await beat(held(first), held(first)), 422).type == "malformed"
        assert refused(await beat(), 422).field == "tasks"
        shown = ok(await stage.public.get(f"/v1/tasks/{first.task_id}"))
        assert shown["attempts"][0]["progress"] == {"rows": 7}

    on_stage(story)


@pytest.mark.parametrize(
    "progress",
    [
        '{"text": "\\u0000"}',
        '{"text": "\\\\u0000"}',
        '{"number": 1e999}',
        '{"number": 123456789012345678901234567890}',
        '{"a": %s}' % ("[" * 900 + "]" * 900),
        '{"text": "%s"}' % ("x" * 20_000),
        '{"\\u0000": 1}',
        "{}",
    ],
)
def test_strange_progress_costs_nobody_a_lease(on_stage: Perform, progress: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q")
        first, second = await stage.claim(limit=2)
        fences = [
            f'{{"task_id": {each.task_id}, "attempt": 1, "lease_token": "{each.lease_token}",'
            f' "token": "{each.token}"'
            for each in (first, second)
        ]
        body = f'{{"tasks": [{fences[0]}, "progress": {progress}}}, {fences[1]}}}]}}'
        answer = await stage.internal.post("/v1/task/heartbeat", content=body)
        if answer.status_code == 422:
            # It is no JSON that could be read at all; nothing was done.
            refused(answer, 422)
            assert "1e999" in progress
            return
        assert [each["status"] for each in ok(answer)["results"]] == [200, 200]
        kept = await stage.world.value(
            "SELECT progress FROM attempt WHERE task_id = %s", first.task_id
        )
        assert isinstance(kept, dict)

    on_stage(story)


def test_ends_of_several_kinds_in_one_call(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q", "r")
        good, bad, wrong = await stage.claim(limit=3)
        answer = await stage.complete(
            held(good, outputs=[output(good)]),
            held(bad, failure={"reason": "It broke.", "is_retried": False}, log="file:///b"),
            held(wrong, outputs=[output(wrong, "raw")]),
        )
        assert answer.status_code == 207
        first, second, third = answer.json()["results"]
        assert (first["status"], first["task_status"]) == (200, "completed")
        assert (second["status"], second["task_status"]) == (200, "dead")
        assert (third["status"], third["why"]) == (409, "outputs")
        assert "is not an output of this task" in third["detail"]
        again = await stage.complete(held(good, outputs=[output(good)]))
        assert ok(again)["results"] == [first]
        elsewhere = f"{place(good)}/z"
        other = await stage.complete(held(good, outputs=[output(good, location=elsewhere)]))
        assert refused(other, 409).type == "different"
        shown = ok(await stage.public.get(f"/v1/tasks/{bad.task_id}"))
        (attempt,) = shown["attempts"]
        assert (attempt["outcome"], attempt["reason"]) == ("failed", "It broke.")
        assert attempt["log"] == "file:///b"
        release = {"reason": "The worker was stopped."}
        both = held(wrong, failure=release, release=release)
        assert refused(await stage.complete(both), 422).field == "tasks[0].release"
        made = held(wrong, release=release, outputs=[output(wrong)])
        assert refused(await stage.complete(made), 422).field == "tasks[0].outputs"
        (result,) = ok(await stage.complete(held(wrong, release=release)))["results"]
        assert (result["task_status"], result["due_at"] is not None) == ("queued", True)
        (wrong,) = await stage.claim()
        assert wrong.attempt == 2
        retried = held(wrong, failure={"reason": "Again."})
        (result,) = ok(await stage.complete(retried))["results"]
        assert (result["task_status"], result["due_at"] is not None) == ("retrying", True)

    on_stage(story)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"failure": {"reason": "x"}, "outputs": [{"dataset": "d", "location": "l"}]}, "dataset"),
        ({"failure": {}}, "failure"),
        ({"outputs": [{"dataset": "x" * 36, "location": "l"}]}, "tasks[0].outputs[0].dataset"),
        ({"outputs": [{"location": "l"}]}, "tasks[0].outputs[0]"),
        ({"attempt": 0}, "tasks[0].attempt"),
        ({"lease_token": ""}, "tasks[0].lease_token"),
        ({"lease_token": "a\x00"}, "tasks[0].lease_token"),
        ({"log": "x" * 1001}, "tasks[0].log"),
    ],
)
def test_ends_that_make_no_sense(on_stage: Perform, fields: dict[str, Any], field: str) -> None:
    async def story(stage: Stage) -> None:
        end = {"task_id": 1, "attempt": 1, "lease_token": "x", **fields}
        problem = refused(await stage.complete(end), 422)
        assert field in problem.field

    on_stage(story)


def test_a_failure_has_no_outputs(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        made = {"dataset": "00000000-0000-0000-0000-000000000000", "location": "l"}
        end = {"task_id": 1, "attempt": 1, "lease_token": "x", "outputs": [made]}
        problem = refused(await stage.complete({**end, "failure": {"reason": "x"}}), 422)
        assert problem.field == "tasks[0].outputs"

    on_stage(story)


def test_claims_at_once_never_share_a_task(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*(f"p{n}" for n in range(12)))
        found = await asyncio.gather(*(stage.claim(limit=2) for _ in range(8)))
        ids = [task.task_id for each in found for task in each]
        assert len(ids) == len(set(ids))
        rest = await stage.claim(limit=12)
        assert len(ids) + len(rest) == 12

    on_stage(story)


def test_ends_at_once_are_each_answered(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*(f"p{n}" for n in range(10)))
        tasks = await stage.claim(limit=10)
        ends = [held(each, outputs=[output(each)]) for each in tasks]
        stale = {**ends[3], "lease_token": "other"}
        strange = {**ends[4], "lease_token": "\ud800"}
        good = asyncio.gather(*(stage.complete(each) for each in (*ends, ends[0])))
        lost = asyncio.gather(
            stage.complete(stale),
            stage.complete(ends[5], ends[5]),
            stage.internal.post("/v1/task/complete", content=json.dumps({"tasks": [strange]})),
        )
        results = [ok(each)["results"][0] for each in await good]
        assert [each["task_id"] for each in results[:10]] == [each.task_id for each in tasks]
        assert {each["task_status"] for each in results} == {"completed"}
        assert results[10] == results[0]
        first, twice, broken = await lost
        assert refused(first, 409).type in ("stale", "over")
        assert "twice" in refused(twice, 422).title
        refused(broken, 400)
        assert await stage.world.value("SELECT count(*) FROM publication") == 10

    on_stage(story)
