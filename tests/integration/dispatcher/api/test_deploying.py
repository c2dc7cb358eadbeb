"""The DAG over HTTP: what is in force, what is wrong, what would break, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.dispatcher.dag.model import Job, JobFault
from penstock.dispatcher.tasks.model import Failure
from penstock.protocol.dags import DagAnswer, VersionsAnswer
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, ok, read, refused
from tests.integration.dispatcher.test_deployment import Pipeline, chain


def test_apply_and_show(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        assert "No DAG" in refused(await stage.public.get("/v1/dag"), 404).title
        applied = ok(await stage.apply(chain()))
        assert (applied["version"], applied["is_changed"], applied["building"]) == (1, True, [])
        assert len(stage.kicks) == 1
        assert ok(await stage.apply(chain()))["is_changed"] is False
        shown = read(await stage.public.get("/v1/dag"), DagAnswer)
        assert (shown.source, shown.version.hash) == (chain(), applied["hash"])
        ok(await stage.apply(chain(timing="2h")))
        found = read(await stage.public.get("/v1/dag/versions"), VersionsAnswer)
        assert [(each.id, each.is_current) for each in found.versions] == [(2, True), (1, False)]
        found = read(await stage.public.get("/v1/dag/versions?limit=1"), VersionsAnswer)
        assert [each.id for each in found.versions] == [2]

    on_stage(story)


def test_a_dag_that_is_wrong(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        text = "jobs:\n  a:\n    what: 1\n    runtime: process\n"
        problem = refused(await stage.apply(text, where="my.yaml"), 422)
        assert problem.type == "dag"
        assert problem.title.startswith("my.yaml has ")
        assert {each.line for each in problem.problems} >= {3}
        assert all(each.message for each in problem.problems)
        assert await stage.world.value("SELECT count(*) FROM dag_version") == 0

    on_stage(story)


SQL = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean:
    runtime: spark
    operator: spark.sql
    config: {sql_file: clean.sql}
    inputs: [raw]
    outputs: [tidy]
"""


def test_files_come_with_the_dag(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        problem = refused(await stage.apply(SQL), 422)
        (found,) = problem.problems
        assert (found.line, found.field) == (7, "jobs.clean.config.sql_file")
        assert found.message.startswith("The text of 'clean.sql' did not come with the DAG")
        files = {"clean.sql": "SELECT 1", "unused.sql": "SELECT 2"}
        assert ok(await stage.apply(SQL, files=files))["version"] == 1
        shown = read(await stage.public.get("/v1/dag"), DagAnswer)
        assert (shown.source, shown.files) == (SQL, {"clean.sql": "SELECT 1"})
        assert ok(await stage.apply(SQL, files=files))["is_changed"] is False
        edited = ok(await stage.apply(SQL, files={"clean.sql": "SELECT 3"}))
        assert edited["changes"]["changed"]["clean"]["fields"] == ["config"]
        body = await stage.world.value(
            "SELECT body -> 'config' FROM job_definition ORDER BY id DESC LIMIT 1"
        )
        assert body == {"sql": "SELECT 3", "sql_file": "clean.sql"}
        back = ok(await stage.public.post("/v1/dag/rollback", json={}))
        assert back["changes"]["changed"]["clean"]["fields"] == ["config"]
        # What measures queues reads the version that is in force, with its files.
        await stage.parts.pressures.turn()

    on_stage(story)


@pytest.mark.parametrize("source", ["", "jobs: {}", "[", "\x00", "a: &a [*a]", "jobs: 1", "\ufeff"])
def test_a_text_that_is_no_dag(on_stage: Perform, source: str) -> None:
    async def story(stage: Stage) -> None:
        problem = refused(await stage.public.post("/v1/dag", json={"source": source}), 422)
        assert problem.problems

    on_stage(story)


def test_runtimes_have_their_say(on_stage: Perform) -> None:
    class Few:
        def names(self) -> list[str]:
            return ["process"]

        def operators(self, runtime: str) -> None:
            return None

        def faults(self, job: Job) -> list[JobFault]:
            if job.name == "clean":
                return [JobFault("config.v", "It does not like this.")]
            return []

    async def story(stage: Stage) -> None:
        problem = refused(await stage.apply(), 422)
        assert [each.field for each in problem.problems] == ["jobs.clean.config.v"]

    on_stage(story, runtimes=Few())


def test_a_dag_that_breaks_work(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q")
        await stage.claim()
        gone = "\n".join(chain().split("\n")[:6])
        problem = refused(await stage.apply(gone), 409)
        assert problem.type == "breaks"
        assert "force" in problem.detail
        (broken,) = problem.breaks
        assert (broken.job, broken.waiting, broken.running) == ("clean", 1, 1)
        forced = ok(await stage.apply(gone, force=True))
        assert (forced["version"], forced["cancelled"]) == (2, 1)

    on_stage(story)


def test_rollback(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        async def back(**ask: Any) -> Any:
            return await stage.public.post("/v1/dag/rollback", json=ask)

        refused(await back(), 404)
        await stage.apply(chain())
        assert refused(await back(), 409).type == "first version"
        await stage.apply(chain(timing="2h"))
        await stage.apply(chain(timing="3h"))
        assert refused(await back(version=4), 404).title == "There is no version 4 of the DAG."
        assert ok(await back(version=1))["version"] == 1
        # Without a body it is what was in force before.
        foreseen = ok(await back(dry_run=True))
        assert (foreseen["is_dry_run"], foreseen["version"]) == (True, 3)
        moved = ok(await stage.public.post("/v1/dag/rollback"))
        assert (moved["version"], moved["before"], moved["is_dry_run"]) == (3, 1, False)
        changed = {"clean": {"fields": ["timeout"], "keeps_generation": True}}
        assert moved["changes"]["changed"] == foreseen["changes"]["changed"] == changed
        assert ok(await back())["version"] == 1
        assert refused(await back(version=0), 422).field == "version"

    on_stage(story)


def test_what_an_apply_did_is_told_by_job(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        changes = ok(await stage.apply(chain()))["changes"]
        assert changes["added"] == ["clean", "feed", "report"]
        same = ok(await stage.apply(chain()))["changes"]
        assert same == {"added": [], "removed": [], "changed": {}, "rebuilt": []}
        kicks = len(stage.kicks)
        dry = ok(await stage.apply(chain(clean="2"), dry_run=True))
        assert len(stage.kicks) == kicks
        assert (dry["version"], dry["is_dry_run"], dry["breaks"]) == (None, True, [])
        applied = ok(await stage.apply(chain(clean="2")))
        assert dry["changes"] == applied["changes"]
        assert applied["changes"]["rebuilt"] == ["report"]
        assert applied["changes"]["changed"] == {
            "clean": {"fields": ["config"], "keeps_generation": False}
        }
        # What this release cannot read is not compared.
        await stage.world.rows("UPDATE dag_version SET source = 'x' RETURNING id")
        assert ok(await stage.apply(chain()))["changes"] is None

    on_stage(story)


def test_a_dry_run_tells_what_would_break(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        gone = "\n".join(chain().split("\n")[:6])
        dry = ok(await stage.apply(gone, dry_run=True))
        assert [(each["job"], each["waiting"]) for each in dry["breaks"]] == [("clean", 1)]
        assert dry["changes"]["removed"] == ["clean", "report"]
        assert await stage.world.value("SELECT count(*) FROM dag_version") == 1

    on_stage(story)


def test_a_cut_over_by_hand(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        pipeline = Pipeline(stage.world)
        ok(await stage.apply(chain()))
        await pipeline.send("p")
        await pipeline.work("a:clean")
        path = "/v1/datasets/tidy/cut-over"
        assert refused(await stage.public.post("/v1/datasets/nothing/cut-over"), 404).title
        assert refused(await stage.public.post(path), 409).type == "nothing"
        ok(await stage.apply(chain(clean="2"), force=True))
        built = (await pipeline.generations())["clean"]
        assert refused(await stage.public.post(path), 409).type == "backfill"
        await pipeline.forget_rebuilds()
        assert "force" in refused(await stage.public.post(path), 409).detail
        answer = ok(await stage.public.post(path, json={"force": True}))
        told = {"kept": None, "is_waiting": False}
        assert answer == {"dataset": "tidy", "generation": built, **told}
        assert await pipeline.states("tidy") == ["current", "retired"]

    on_stage(story)


def test_what_cannot_be_built_is_kept_by_hand(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        pipeline = Pipeline(stage.world)
        ok(await stage.apply(chain()))
        await pipeline.send("p")
        await pipeline.work("a:clean")
        served = (await pipeline.generations())["clean"]
        ok(await stage.apply(chain(clean="2"), force=True))
        path = "/v1/datasets/tidy/cut-over"
        assert refused(await stage.public.post(path, json={"keep": True}), 409).type == "backfill"
        await pipeline.forget_rebuilds()
        assert (
            refused(await stage.public.post("/v1/datasets/daily/cut-over"), 409).type == "upstream"
        )
        answer = ok(await stage.public.post(path, json={"keep": True}))
        # What is downstream has to be computed of it first.
        assert answer == {"dataset": "tidy", "generation": served, "kept": 1, "is_waiting": True}
        ok(await stage.public.post(path, json={"keep": True, "force": True}))
        assert await pipeline.states("tidy") == ["current", "retired"]

    on_stage(story)


def test_what_was_kept_is_said_also_where_something_else_is_missing(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        pipeline = Pipeline(stage.world)
        ok(await stage.apply(chain()))
        await pipeline.send("p", "q")
        await pipeline.work("a:clean")
        await pipeline.work("a:report")
        ok(await stage.apply(chain(report="2")))
        await pipeline.backfills.turn()
        dead, cancelled = await pipeline.tasks.claim_next("a:report", worker="w", limit=9)
        await pipeline.tasks.fail([Failure(dead.fence, "broken", is_retried=False)])
        await pipeline.tasks.cancel([cancelled.task_id])
        await pipeline.finish(cancelled)
        await pipeline.backfills.turn()
        path = "/v1/datasets/daily/cut-over"
        problem = refused(await stage.public.post(path, json={"keep": True}), 409)
        assert (problem.type, "(1 publications)" in problem.detail) == ("uncovered", True)

    on_stage(story)
