"""What people see and steer over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.steering import (
    BackfillAnswer,
    DatasetsAnswer,
    PartitionsAnswer,
    StatusAnswer,
    TaskAnswer,
    TasksAnswer,
)
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, place, read, refused
from tests.integration.dispatcher.test_deployment import chain


def test_status(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        empty = read(await stage.public.get("/v1/status"), StatusAnswer)
        assert (empty.dag_version, empty.jobs, empty.workers) == (None, [], 0)
        await stage.apply(chain())
        await stage.trigger("p", "q", "r", "s")
        first, _ = await stage.claim(limit=2)
        dead = held(first, failure={"reason": "x", "is_retried": False})
        ok(await stage.complete(dead))
        ok(
            await stage.internal.post(
                "/internal/hello", json={"runtimes": []}, headers=stage.identity()
            )
        )
        await stage.public.post("/v1/jobs/clean/pause", json={"reason": "Why not."})
        await stage.public.post("/v1/trigger", json={"job": "feed"})
        stage.world.later(30)
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        clean, feed, report = seen.jobs
        assert (seen.dag_version, seen.events_pending, seen.workers) == (1, 1, 1)
        assert seen.outbox_pending > 0 == seen.outbox_parked
        assert (clean.name, clean.activation, clean.runtime) == ("clean", "reactive", "process")
        assert (clean.queued, clean.running, clean.dead) == (2, 1, 1)
        assert (clean.oldest_seconds, clean.paused) == (30.0, ["Why not."])
        assert (clean.outputs, clean.is_building) == (["tidy"], False)
        assert (feed.activation, feed.runtime, feed.queued) == ("source", "", 0)
        assert (report.queued, report.oldest_seconds, report.paused) == (0, 0.0, [])
        stage.world.later(61)
        assert read(await stage.public.get("/v1/status"), StatusAnswer).workers == 0

    on_stage(story)


def test_status_tells_of_tasks_that_no_worker_can_run(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*"pqr")
        (first,) = await stage.claim()
        back = {"reason": "There is no module a.", "is_delayed": True}
        ok(await stage.complete(held(first, release=back)))
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        clean = next(each for each in seen.jobs if each.name == "clean")
        assert (clean.handed_back, clean.is_unserved) == ("There is no module a.", True)
        hello, ours = {"runtimes": ["process"]}, stage.identity()
        ok(await stage.internal.post("/internal/hello", json=hello, headers=ours))
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        assert not any(each.is_unserved for each in seen.jobs)
        shown = read(await stage.public.get(f"/v1/tasks/{first.task_id}"), TaskAnswer).task
        assert shown.attempts == f"1 of {shown.attempt_limit}, 1 not counted"

    on_stage(story)


def test_status_counts_what_waits_for_an_earlier_operator(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        ok(await stage.apply(chain().replace("a:clean", "a:other")))
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        clean = next(each for each in seen.jobs if each.name == "clean")
        assert (clean.operator, clean.queued) == ("a:other", 1)

    on_stage(story)


def test_lists_of_tasks(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*"pqrst")
        done, broken, running = await stage.claim(limit=3)
        ok(await stage.complete(held(done, outputs=[output(done)])))
        ok(await stage.complete(held(broken, failure={"reason": "x"})))

        async def ids(**asked: Any) -> tuple[list[int], int | None]:
            found = read(await stage.public.get("/v1/tasks", params=asked), TasksAnswer)
            return [each.id for each in found.tasks], found.before

        everything, _ = await ids()
        assert everything == sorted(everything, reverse=True)
        assert len(everything) == 6
        first, before = await ids(limit=4)
        second, end = await ids(limit=4, before=before)
        assert (first + second, end) == (everything, None)
        assert await ids(limit=6) == (everything, None)
        assert await ids(status="running") == ([running.task_id], None)
        assert await ids(status="retrying") == ([broken.task_id], None)
        assert await ids(status="completed") == ([done.task_id], None)
        assert len((await ids(status="queued"))[0]) == 3
        assert len((await ids(status="queued", job="clean"))[0]) == 2
        assert await ids(status="dead") == ([], None)
        assert len((await ids(job="report"))[0]) == 1
        refused(await stage.public.get("/v1/tasks?job=nobody"), 404)
        of_p, _ = await ids(partition_key="p")
        assert len(of_p) == 2
        assert await ids(partition_key="p", limit=1) == (of_p[:1], of_p[0])
        assert await ids(partition_key="p", before=of_p[0]) == (of_p[1:], None)
        assert await ids(partition_key="p", status="completed") == ([done.task_id], None)
        assert await ids(partition_key="p", job="clean") == ([done.task_id], None)
        assert await ids(partition_key="nope") == ([], None)

    on_stage(story)


@pytest.mark.parametrize(
    "query",
    [
        *(
            "limit=0",
            "limit=1001",
            "status=lost",
            "before=0",
            "before=x",
            "job=",
            "what=1",
            "limit=",
        ),
        *("partition_key=", "partition_key=%00"),
    ],
)
def test_lists_that_make_no_sense(on_stage: Perform, query: str) -> None:
    async def story(stage: Stage) -> None:
        problem = refused(await stage.public.get(f"/v1/tasks?{query}"), 422)
        assert query.partition("=")[0] in problem.field + problem.title

    on_stage(story)


def test_one_task(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        (task,) = await stage.claim()
        ok(await stage.complete(held(task, failure={"reason": "x"})))
        stage.world.later(3600)
        (task,) = await stage.claim()
        ok(await stage.complete(held(task, outputs=[output(task)])))
        answer = await stage.public.get(f"/v1/tasks/{task.task_id}")
        found = read(answer, TaskAnswer)
        assert (found.task.status, found.task.attempt) == ("completed", 2)
        assert found.task.partition_key == found.payload["partition_key"] == "p"
        assert [each.outcome for each in found.attempts] == ["failed", "completed"]
        assert [(each.dataset, each.outcome) for each in found.published] == [("tidy", "published")]
        # The proof of an attempt is nobody's but its worker's.
        assert task.lease_token not in answer.text
        assert "lease_token" not in answer.text
        refused(await stage.public.get("/v1/tasks/404"), 404)
        refused(await stage.public.get("/v1/tasks/x"), 422)
        refused(await stage.public.get(f"/v1/tasks/{2**63}"), 422)

    on_stage(story)


def test_cancel_and_replay(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q", "r")
        dead, running = await stage.claim(limit=2)
        ok(await stage.complete(held(dead, failure={"reason": "x", "is_retried": False})))
        waiting = await stage.world.value("SELECT id FROM task WHERE status = 'queued'")

        async def call(verb: str, *ids: int, **fields: Any) -> Any:
            return await stage.public.post(f"/v1/tasks/{verb}", json={"tasks": ids, **fields})

        first, second = ok(await call("cancel", running.task_id, waiting, reason="Enough."))[
            "results"
        ]
        assert (first["task_status"], first["cancel_asked"]) == ("running", True)
        assert second["task_status"] == "cancelled"
        shown = read(await stage.public.get(f"/v1/tasks/{waiting}"), TaskAnswer)
        assert shown.task.reason == "Enough."
        mixed = await call("replay", dead.task_id, waiting, 404)
        assert mixed.status_code == 207
        assert [each["status"] for each in mixed.json()["results"]] == [200, 409, 404]
        assert [each["why"] for each in mixed.json()["results"]] == ["", "not dead", "unknown"]
        problem = refused(await call("replay", waiting), 409)
        assert (problem.type, len(problem.results)) == ("not dead", 1)
        assert problem.title == f"Task {waiting} is cancelled, and only dead tasks are replayed."
        both = refused(await call("cancel", 404, 405), 404)
        assert len(both.results) == 2
        refused(await call("cancel", 1, 1), 422)
        refused(await call("cancel"), 422)

    on_stage(story)


def test_backfills(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()

        async def post(path: str, **ask: Any) -> Any:
            return await stage.public.post(f"/v1/backfills{path}", json=ask)

        plan = read(await post("", job="clean", keys=["a", "b"]), BackfillAnswer)
        assert (plan.job, plan.kind, plan.state, plan.partitions) == ("clean", "keys", "running", 2)
        assert read(await stage.public.get(f"/v1/backfills/{plan.id}"), BackfillAnswer) == plan
        (listed,) = ok(await stage.public.get("/v1/backfills"))["backfills"]
        assert listed["id"] == plan.id
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        assert [each.id for each in seen.backfills] == [plan.id]
        assert ok(await post(f"/{plan.id}/pause"))["state"] == "paused"
        assert ok(await post(f"/{plan.id}/resume"))["state"] == "running"
        assert ok(await post(f"/{plan.id}/cancel"))["state"] == "cancelled"
        assert refused(await post(f"/{plan.id}/resume"), 409).type == "over"
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        assert seen.backfills == []
        refused(await post("/404/pause"), 404)
        refused(await stage.public.get("/v1/backfills/404"), 404)
        refused(await post("", job="nobody", keys=["a"]), 404)
        refused(await post("", job="clean"), 422)
        refused(await post("", job="feed", keys=["a"]), 409)

    on_stage(story)


def test_pauses_of_jobs(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        paused = ok(await stage.public.post("/v1/jobs/clean/pause", json={"reason": "Tea."}))
        assert [(each["cause"], each["reason"]) for each in paused["pauses"]] == [
            ("operator", "Tea.")
        ]
        await stage.trigger("p")
        assert await stage.claim() == []
        pressure = ok(await stage.public.get("/v1/pressure"))
        assert [each["job"] for each in pressure["pauses"]] == ["clean"]
        assert ok(await stage.public.post("/v1/jobs/clean/resume"))["pauses"] == []
        assert len(await stage.claim()) == 1
        refused(await stage.public.post("/v1/jobs/nobody/pause"), 404)
        refused(await stage.public.post("/v1/jobs/nobody/resume"), 404)
        refused(await stage.public.post("/v1/jobs/clean/pause", json={"reason": ""}), 422)

    on_stage(story)


def test_limits_of_operators(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()

        async def limit(name: str, most: int | None) -> Any:
            return await stage.public.put(f"/v1/operators/{name}", json={"in_flight_max": most})

        ok(await limit("a:clean", 1))
        await stage.trigger("p", "q")
        assert len(await stage.claim("a:clean", limit=5)) == 1
        loads = {
            each["name"]: each for each in ok(await stage.public.get("/v1/operators"))["operators"]
        }
        assert loads["a:clean"]["in_flight_max"] == 1
        assert loads["a:clean"]["in_flight"] == 1
        ok(await limit("a:clean", None))
        assert len(await stage.claim("a:clean", limit=5)) == 1
        assert "'no/body'" in refused(await limit("no/body", 1), 404).title
        refused(await limit("a:clean", 0), 422)
        refused(await stage.public.put("/v1/operators/a", json={}), 422)

    on_stage(story)


def test_datasets_and_partitions(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger(*"pqr")
        tasks = await stage.claim(limit=3)
        ok(await stage.complete(*(held(each, outputs=[output(each)]) for each in tasks)))
        found = read(await stage.public.get("/v1/datasets"), DatasetsAnswer)
        by_name = {each.name: each for each in found.datasets}
        assert sorted(by_name) == ["daily", "raw", "tidy"]
        tidy = by_name["tidy"]
        assert (tidy.job, tidy.uuid) == ("clean", tasks[0].definition["datasets"]["tidy"])
        (generation,) = tidy.generations
        assert (generation.state, generation.partitions) == ("current", 3)

        async def page(**asked: Any) -> PartitionsAnswer:
            path = "/v1/datasets/tidy/partitions"
            return read(await stage.public.get(path, params=asked), PartitionsAnswer)

        first = await page(limit=2)
        assert [each.partition_key for each in first.partitions] == ["p", "q"]
        assert first.partitions[0].location == place(tasks[0])
        assert (first.generation, first.after) == (generation.version, "q")
        second = await page(limit=2, after="q", generation=generation.version)
        assert ([each.partition_key for each in second.partitions], second.after) == (["r"], None)
        refused(await stage.public.get("/v1/datasets/nothing/partitions"), 404)
        nowhere = "generation=00000000-0000-0000-0000-000000000000"
        refused(await stage.public.get(f"/v1/datasets/tidy/partitions?{nowhere}"), 404)
        refused(await stage.public.get("/v1/datasets/tidy/partitions?generation=x"), 422)
        refused(await stage.public.get("/v1/datasets/tidy/partitions?after=%00"), 422)

    on_stage(story)


def test_a_generation_that_is_being_built(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        (task,) = await stage.claim()
        ok(await stage.complete(held(task, outputs=[output(task)])))
        applied = ok(await stage.apply(chain(clean="2")))
        assert applied["building"] == ["clean", "report"]
        seen = read(await stage.public.get("/v1/status"), StatusAnswer)
        assert [each.is_building for each in seen.jobs] == [True, False, True]
        found = read(await stage.public.get("/v1/datasets"), DatasetsAnswer)
        tidy = next(each for each in found.datasets if each.name == "tidy")
        states = [(each.state, each.partitions) for each in tidy.generations]
        assert states == [("current", 1), ("building", 0)]
        # Readers read what is current.
        shown = ok(await stage.public.get("/v1/datasets/tidy/partitions"))
        assert shown["generation"] == task.generation

    on_stage(story)


def test_the_outbox(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        assert ok(await stage.public.get("/v1/outbox")) == {"parked": []}
        row = await stage.world.value(
            "INSERT INTO outbox (kind, target, parked_at, last_error)"
            " VALUES ('wake', 't', penstock_now(), 'No.') RETURNING id"
        )
        (parked,) = ok(await stage.public.get("/v1/outbox"))["parked"]
        assert (parked["id"], parked["last_error"]) == (row, "No.")
        retried = await stage.public.post("/v1/outbox/retry", json={"ids": [row, 404]})
        assert ok(retried) == {"retried": 1}
        assert len(stage.kicks) == 1
        assert ok(await stage.public.get("/v1/outbox")) == {"parked": []}
        refused(await stage.public.post("/v1/outbox/retry", json={"ids": []}), 422)

    on_stage(story)


def test_figures(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        answer = await stage.public.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "penstock_" in answer.text

    on_stage(story)
