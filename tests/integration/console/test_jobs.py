"""The pages of jobs and of the pipeline, over HTTP: what somebody must see, and can do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.console.pages import jobs as jobs_page
from penstock.console.pages import pipeline as pipeline_page
from penstock.protocol.work import Assignment
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.api.stage import held, ok, output
from tests.integration.dispatcher.test_deployment import chain

SCRIPT = "<script>alert('x')</script>"
REASON = "ValueError: the amount of {} is no number\n  File shop.py, line 3"
NARROW = """
  mail:
    runtime: process
    operator: a:mail
    inputs: [tidy]
    max_queue_depth: 1
    max_concurrency: 1
    max_attempts: 2
    secrets: {password: "env:MAIL_PASSWORD"}
"""


async def applied(visitor: Visitor, **fields: Any) -> None:
    ok(await visitor.stage.apply(chain(**fields)))


async def completed(visitor: Visitor, *keys: str) -> None:
    await visitor.stage.trigger(*keys)
    for _ in keys:
        (task,) = await visitor.stage.claim()
        ok(await visitor.stage.complete(held(task, outputs=[output(task)])))
    await visitor.stage.route()


async def failed(visitor: Visitor, reason: str, **fields: Any) -> Assignment:
    (task,) = await visitor.stage.claim()
    failure = {"reason": reason, "is_retried": fields.get("is_retried", False)}
    ok(await visitor.stage.complete(held(task, failure=failure)))
    return task


async def dead(visitor: Visitor, *keys: str) -> list[int]:
    """Tasks without attempts left; their numbers."""
    await visitor.stage.trigger(*keys)
    return [(await failed(visitor, REASON.format(key))).task_id for key in keys]


def test_what_is_read_and_how_it_is_divided_is_said(console: Look) -> None:
    extra = """
  late:
    runtime: spark
    operator: spark.sql
    config: {sql: SELECT * FROM tidy}
    inputs: [{from: tidy, lookback: 3d}]
    outputs: [{name: made, dataset: months, partition_by: "date_trunc('month', ts)"}]
"""

    async def story(visitor: Visitor) -> None:
        await applied(visitor, extra=extra)
        said = words((await visitor.get("/jobs/late"))[1])
        assert "tidy and 3d before its partition" in said
        assert "months partitioned by date_trunc('month', ts)" in said

    console(story)


def test_a_job_with_dead_tasks_says_why_and_leads_to_them(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        number, latest = await dead(visitor, "p1", "p2")
        status, page = await visitor.get("/jobs/clean")
        assert status == 200
        said = words(page)
        assert said.index("2 tasks have failed and will not be retried") < said.index("Retrying")
        assert "ValueError: the amount of p1 is no number" in said
        assert "line 3" not in said
        assert f'href="/tasks/{number}"' in page
        assert 'href="/tasks?job=clean&amp;status=dead"' in page
        # From the page of the whole, it is one click to the task.
        status, page = await visitor.get("/")
        assert "2 tasks of clean the latest is" in words(page)
        assert page.count('data-key="dead-') == 1
        assert f'href="/tasks/{latest}"' in page
        assert 'class="node dead" href="/jobs/clean"' in page
        _, page = await visitor.post("/tasks/replay", {"job": "clean", "to": "/jobs/clean"})
        assert "2 tasks are queued for replay." in words(page)
        assert "Dead tasks" not in words(page)

    console(story)


def test_reasons_that_differ_in_the_partition_alone_are_one(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await dead(visitor, *(f"p{number}" for number in range(7)))
        await visitor.stage.trigger("other")
        await failed(visitor, "OSError: the disk is full", is_retried=True)
        _, page = await visitor.get("/jobs/clean")
        said = words(page)
        assert re.findall(r'data-key="cause-', page) == ['data-key="cause-'] * 2
        assert re.search(r"the amount of p\d is no number and similar ones 7 7 ", said)
        assert re.search(r"OSError: the disk is full 1 1 ", said)
        assert "8 attempts in the last hour" in said

    console(story)


def test_what_has_ended_is_drawn_and_told(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await completed(visitor, "p1", "p2", "p3")
        await dead(visitor, "p4")
        _, page = await visitor.get("/jobs/clean")
        told = re.findall(r'role="img" aria-label="([^"]+)"', page)
        assert told[0].startswith(
            "Attempts that ended in the last hour, by 2 minutes: 3 completed, 1 failed"
        )
        assert "p50 " in told[1]
        assert page.count('<rect class="series completed"') == 2
        assert page.count('<rect class="series failed"') == 2
        # What others have done is not its own.
        _, page = await visitor.get("/jobs/report")
        assert "No attempt ended in the last hour." in words(page)
        visitor.world.later(3700)
        _, page = await visitor.get("/jobs/clean")
        assert "No attempt ended in the last hour." in words(page)
        # A task that is dead stays so.
        assert "1 task has failed" in words(page)

    console(story)


def test_a_job_is_paused_and_resumed_with_a_reason(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        _, page = await visitor.get("/jobs/clean")
        assert 'action="/operations/pause"' in page
        asked = {"job": "clean", "reason": f"{SCRIPT} is why.", "to": "/jobs/clean"}
        status, page = await visitor.post("/operations/pause", asked)
        assert status == 200
        said = words(page)
        assert f"It is paused: {SCRIPT} is why." in said
        assert "clean paused" in said
        assert "<script>alert(" not in page
        for path in ("/", "/jobs"):
            _, page = await visitor.get(path)
            assert f"{SCRIPT} is why." in words(page)
            assert "<script>alert(" not in page
        _, page = await visitor.post("/operations/resume", {"job": "clean", "to": "/jobs/clean"})
        assert "It is paused" not in words(page)

    console(story)


def test_a_job_says_what_it_is_and_whom_it_reads(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor, extra=NARROW)
        await completed(visitor, "p1")
        _, page = await visitor.get("/jobs/mail")
        said = words(page)
        assert "Runs on new data of tidy." in said
        assert "Concurrency one task" in said
        assert "Queue limit 1 tasks that wait; beyond it, upstream jobs are paused" in said
        assert "password from env:MAIL_PASSWORD" in said
        assert "1 task waits, and no worker that serves a:mail was seen" in said
        assert "max_queue_depth: 1" in said
        assert 'href="/operations/backfills/new?job=mail"' in page
        assert 'href="/datasets/tidy"' in page
        assert 'href="/jobs/clean"' in page
        # Whom clean feeds, and that feed only tells.
        _, page = await visitor.get("/jobs/clean")
        said = words(page)
        assert "raw feed events only" in said
        assert re.search(r"tidy 1 \S+ mail , report", said)
        _, page = await visitor.get("/jobs/feed")
        said = words(page)
        assert "A source. Waits to be triggered." in said
        assert 'href="/operations/sources/feed#trigger"' in page
        assert "Backfill" not in said
        assert "Workers" not in said

    console(story)


def test_pressure_is_told_on_the_edges_and_in_words(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor, extra=NARROW)
        await completed(visitor, "p1", "p2", "p3")
        await visitor.parts.pressures.turn()
        _, page = await visitor.get("/")
        said = words(page)
        assert 'class="edge pressed"' in page
        assert (
            "mail reads tidy of clean, and its queue exceeds its limit: 2 tasks of mail are queued"
            in said
        )
        assert "2 waiting, limit 1" in said
        assert "Paused until its queue is shorter: clean , feed ." in said
        _, page = await visitor.get("/jobs/mail")
        assert "Paused until it is shorter: clean and feed." in words(page)
        _, page = await visitor.get("/jobs/clean")
        assert "It is paused by backpressure until the queue of mail is shorter:" in words(page)
        assert "Show mail" in words(page)
        _, page = await visitor.get("/jobs?state=pressed")
        assert re.findall(r'<tr data-key="([^"]+)"', page) == ["mail"]

    console(story)


def test_every_text_of_others_is_escaped(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        config = f'{{x: "{SCRIPT}", "{SCRIPT}": 1}}'
        ok(await visitor.stage.apply(chain().replace("{v: 1}", config)))
        await visitor.stage.trigger(f"p{SCRIPT}")
        await failed(visitor, f"{SCRIPT}\n{SCRIPT}")
        for path in ("/", "/jobs", "/jobs/clean"):
            status, page = await visitor.get(path)
            assert status == 200
            assert "<script>alert(" not in page
            if path != "/jobs":
                assert "&lt;script&gt;alert(" in page

    console(story)


def test_an_unknown_job_is_missing_and_one_of_before_is_told(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor, extra=NARROW)
        for path in ("/jobs/nobody", "/jobs/%00", f"/jobs/{'x' * 5000}"):
            status, page = await visitor.get(path)
            assert status == 404, path
            assert "There is no job" in words(page)
        await applied(visitor)
        status, page = await visitor.get("/jobs/mail")
        assert status == 200
        said = words(page)
        assert "The DAG in force has no such job. This is what version 1 had." in said
        assert "mail retired" in said
        assert ">Backfill<" not in page
        _, page = await visitor.get("/jobs")
        assert "mail" not in words(page)

    console(story)


def test_the_table_of_jobs_has_the_worst_first_and_filters(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        _, page = await visitor.get("/jobs")
        assert "There are no jobs yet." in words(page)
        await applied(visitor, extra=NARROW)
        await dead(visitor, "p1")
        await completed(visitor, "p2")
        _, page = await visitor.get("/jobs")
        # What report and mail have to do waits; by name then.
        assert re.findall(r'<tr data-key="([^"]+)"', page) == ["clean", "mail", "report", "feed"]
        assert "Dead 1" in words(page)
        _, page = await visitor.get("/jobs?name=REP")
        assert re.findall(r'<tr data-key="([^"]+)"', page) == ["report"]
        _, page = await visitor.get("/jobs?name=rep&state=dead")
        assert "No matching jobs." in words(page)

    console(story)


def test_a_dag_that_is_too_large_is_a_table_that_is_cut(
    console: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_page, "DRAWN_MAX", 2)
    monkeypatch.setattr(jobs_page, "JOBS_MAX", 2)

    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        _, page = await visitor.get("/")
        said = words(page)
        assert "This DAG is too large to be drawn." in said
        assert "Show the table of its 3 jobs" in said
        assert 'class="node' not in page
        _, page = await visitor.get("/jobs")
        assert "And 1 more: search by name." in words(page)

    console(story)


def test_very_many_dead_tasks_make_no_large_page(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        number, *_ = await dead(visitor, "p1")
        await visitor.world.rows(
            "INSERT INTO task (job_id, definition_id, generation, dedupe_key, operator, priority,"
            " payload, status, attempt, attempt_limit, due_at, reason, settled_at)"
            " SELECT job_id, definition_id, generation, 'copy' || n, operator, priority, payload,"
            " 'dead', 1, 1, due_at, reason, settled_at FROM task, generate_series(1, 5000) AS n"
            " WHERE id = %s RETURNING id",
            number,
        )
        _, page = await visitor.get("/jobs/clean")
        assert len(page) < 40_000
        assert "The latest 5 of 5,001." in words(page)
        _, page = await visitor.get("/")
        assert len(page) < 40_000
        assert "All 5,001 dead tasks" in words(page)

    console(story)
