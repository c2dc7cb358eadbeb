"""The pages of tasks, over HTTP: what somebody who looks at a task must see, and can do."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.console.pages import tasks as tasks_page
from penstock.protocol.work import Assignment
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.api.stage import held, ok, output
from tests.integration.dispatcher.test_deployment import chain

SCRIPT = "<script>alert('x')</script>"
TRACE = (
    "ValueError: could not convert 'twelve'\n  File \"shop.py\", line 17, in clean\n    parse(row)"
)


async def tried(visitor: Visitor, reason: str = TRACE, **fields: Any) -> Assignment:
    """One attempt of the next task, which fails."""
    (task,) = await visitor.stage.claim()
    failure = {"reason": reason, "is_retried": fields.pop("is_retried", True)}
    ok(await visitor.stage.complete(held(task, failure=failure, **fields)))
    visitor.world.later(3600)
    return task


async def dead(visitor: Visitor, key: str = "p1", reason: str = TRACE, **fields: Any) -> int:
    """A task without attempts left; its number."""
    await visitor.stage.trigger(key)
    task = await tried(visitor, reason, is_retried=False, **fields)
    return task.task_id


async def applied(visitor: Visitor) -> None:
    ok(await visitor.stage.apply(chain()))


def test_a_dead_task_begins_with_why_and_what_was_tried_and_how_to_replay(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        task, *_ = [await tried(visitor) for _ in range(3)]
        status, page = await visitor.get(f"/tasks/{task.task_id}")
        assert status == 200
        said = words(page)
        head = said.index("This task failed and will not be retried automatically.")
        reason = said.index("ValueError: could not convert 'twelve'")
        tries = said.index("Tried 3 times")
        assert head < reason < tries < said.index("Attempts No.")
        assert "failed for the same reason each time" in said
        assert "in clean" in said
        assert "up to 3 more attempts" in said
        assert f'action="/tasks/{task.task_id}/replay"' in page
        assert page.count(">Replay</button>") == 1
        assert ">Cancel</button>" not in page

    console(story)


def test_what_a_task_has_consumed_of_changes_is_said(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        text = chain().replace("inputs: [tidy]", "inputs: [{from: tidy, read: changes}]")
        ok(await visitor.stage.apply(text))
        await visitor.stage.trigger("p1")
        (task,) = await visitor.stage.claim()
        ok(await visitor.stage.complete(held(task, outputs=[output(task)])))
        (reader,) = await visitor.stage.claim("a:report")
        given = reader.inputs["tidy"]
        assert [(each.partition_key, each.revision) for each in given.parts] == [("p1", 1)]
        _, page = await visitor.get(f"/tasks/{reader.task_id}")
        assert "1 partition with changes, not consumed yet" in words(page)
        ok(await visitor.stage.complete(held(reader, outputs=[output(reader, "daily")])))
        _, page = await visitor.get(f"/tasks/{reader.task_id}")
        assert "1 partition with changes, consumed" in words(page)
        _, page = await visitor.get("/jobs/report")
        assert "reads changes" in words(page)

    console(story)


def test_a_replay_queues_it_again_and_says_so(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        number = await dead(visitor)
        here = f"/tasks/{number}"
        status, page = await visitor.post(f"{here}/replay", {"to": here})
        assert status == 200
        said = words(page)
        assert f"Task {number} is queued for replay." in said
        assert "This task was replayed, and waits for attempt 2." in said
        assert (
            await visitor.world.value("SELECT status FROM task WHERE id = %s", number) == "queued"
        )
        assert visitor.stage.kicks
        # Again, by the page that somebody else has open.
        status, page = await visitor.post(f"{here}/replay", {"to": here})
        assert "only dead tasks are replayed" in words(page)

    console(story)


def test_what_a_dead_task_holds_up_is_named(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        ok(
            await visitor.stage.apply(
                chain(
                    extra="""
  mail:
    runtime: process
    operator: a:mail
    inputs: [daily]
    outputs: [sent]
"""
                )
            )
        )
        number = await dead(visitor)
        _, page = await visitor.get(f"/tasks/{number}")
        said = words(page)
        assert "Until this task completes, report gets nothing new for this partition" in said
        assert "nor does, after it, mail" in said
        assert "report reads tidy waits for this task" in said

    console(story)


def test_every_text_of_others_is_escaped(console: Look, tmp_path: Path) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        key = f"p{SCRIPT}"
        await visitor.stage.trigger(key)
        (task,) = await visitor.stage.claim()
        ok(await visitor.stage.beat(held(task, progress={"phase": SCRIPT, SCRIPT: SCRIPT})))
        (tmp_path / f"{task.task_id}-1.log").write_text(f"printed {SCRIPT}\n")
        pages = [(await visitor.get(f"/tasks/{task.task_id}"))[1]]
        assert "printed &lt;script&gt;" in pages[0]
        failure = {"reason": f"{SCRIPT}\n{SCRIPT}", "is_retried": False}
        metrics = {SCRIPT: SCRIPT, "spark": {SCRIPT: 1}}
        ended = held(task, failure=failure, log=f"/{SCRIPT}", metrics=metrics)
        ok(await visitor.stage.complete(ended))
        pages.append((await visitor.get(f"/tasks/{task.task_id}"))[1])
        pages.append((await visitor.get("/tasks"))[1])
        for page in pages:
            assert "&lt;script&gt;alert(" in page
            assert "<script>alert(" not in page

    console(story, logs=tmp_path)


def test_the_log_of_an_attempt_that_runs_is_shown_with_its_progress(
    console: Look, tmp_path: Path
) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        (task,) = await visitor.stage.claim()
        here = f"/tasks/{task.task_id}"
        said = words((await visitor.get(here))[1])
        assert "Attempt 1 of at most 3 runs on worker worker." in said
        assert "No log on the dispatcher's machine yet." in said
        (tmp_path / f"{task.task_id}-1.log").write_text("row 1\nrow 2\n")
        beat = held(task, progress={"stages": 4, "stages_done": 1, "tasks": 200, "tasks_done": 50})
        ok(await visitor.stage.beat(beat))
        _, page = await visitor.get(here)
        assert "row 1\nrow 2\n</pre>" in page
        assert '<progress value="50" max="200"' in page
        assert "1 of 4 stages" in words(page)
        assert ">Cancel</button>" in page

    console(story, logs=tmp_path)


def test_a_worker_of_this_machine_has_printed_nothing(console: Look, tmp_path: Path) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1", "p2")
        hello = {"runtimes": ["process"], "about": {"host": platform.node()}}
        identity = visitor.stage.identity()
        ok(await visitor.stage.internal.post("/internal/hello", json=hello, headers=identity))
        (task,) = await visitor.stage.claim(limit=1)
        here = f"/tasks/{task.task_id}"
        assert "No output yet." in words((await visitor.get(here))[1])
        log = str(tmp_path / f"{task.task_id}-1.log")
        ok(await visitor.stage.complete(held(task, outputs=[output(task)], log=log)))
        assert "No output." in words((await visitor.get(here))[1])
        # Of one that is not known any more, as long as all others are here.
        await visitor.world.rows("UPDATE worker SET name = 'another'")
        assert "No output." in words((await visitor.get(here))[1])
        elsewhere = """UPDATE worker SET name = 'worker', about = '{"about": {"host": "other"}}'"""
        await visitor.world.rows(elsewhere)
        assert "or its log is on the machine of worker" in words((await visitor.get(here))[1])

    console(story, logs=tmp_path)


def test_logs_of_each_attempt_and_only_from_the_folder_of_logs(
    console: Look, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "secret").write_text("a secret of the dispatcher")

    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        first = await tried(visitor, log=str(logs / "1-1.log"))
        await tried(visitor, log=str(tmp_path / "secret"))
        (logs / f"{first.task_id}-1.log").write_text("of the first")
        (logs / f"{first.task_id}-2.log").write_text("of the second")
        here = f"/tasks/{first.task_id}"
        said = words((await visitor.get(here))[1])
        assert "a secret of the dispatcher" not in said
        assert f"in {tmp_path / 'secret'} ." in said
        assert f"penstock task logs {first.task_id} --attempt 2" in said
        assert "of the first" in words((await visitor.get(f"{here}?attempt=1"))[1])
        # What is no attempt is the last one.
        assert "Log of attempt 2" in words((await visitor.get(f"{here}?attempt=no"))[1])

    console(story, logs=logs)


def test_a_task_that_waits_says_for_what(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        said = words((await visitor.get("/tasks/1"))[1])
        assert "This task waits for its first attempt." in said
        assert "No worker that serves it was seen in the last 90 seconds" in said
        pause = {"reason": "The disks are full."}
        ok(await visitor.stage.public.post("/v1/jobs/clean/pause", json=pause))
        said = words((await visitor.get("/tasks/1"))[1])
        assert "The job is paused: The disks are full." in said
        ok(await visitor.stage.public.post("/v1/jobs/clean/resume"))
        hello = {"runtimes": ["process"]}
        identity = visitor.stage.identity()
        ok(await visitor.stage.internal.post("/internal/hello", json=hello, headers=identity))
        said = words((await visitor.get("/tasks/1"))[1])
        assert "The next worker with free capacity claims it." in said
        ok(await visitor.stage.public.put("/v1/operators/a:clean", json={"in_flight_max": 1}))
        await visitor.stage.trigger("p2")
        await visitor.stage.claim()
        said = words((await visitor.get("/tasks/2"))[1])
        assert "The operator is at its concurrency limit of 1;" in said

    console(story)


def test_a_task_that_is_tried_again_says_why_and_when(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        (task,) = await visitor.stage.claim()
        failure = {"reason": TRACE}
        ok(await visitor.stage.complete(held(task, failure=failure)))
        said = words((await visitor.get("/tasks/1"))[1])
        assert "Attempt 1 failed; attempt 2 of at most 3 follows. It is due" in said
        assert "could not convert" in said

    console(story)


def test_a_worker_that_vanished_is_explained(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        for _ in range(3):
            await visitor.stage.claim()
            visitor.world.later(3600)
            await visitor.world.tasks.reap(outage_seconds=10**9)
            visitor.world.later(3600)
        said = words((await visitor.get("/tasks/1"))[1])
        assert "The worker worker was not heard of in time." in said
        assert "ran out of memory" in said

    console(story)


def test_a_completed_task_names_what_it_published_and_who_reads_it(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        (task,) = await visitor.stage.claim()
        metrics = {"executor_run_ms": 1500, "input_bytes": 2048}
        ended = held(task, outputs=[output(task)], metrics=metrics)
        ok(await visitor.stage.complete(ended))
        await visitor.stage.route()
        _, page = await visitor.get("/tasks/1")
        said = words(page)
        assert "This task was completed by attempt 1" in said
        assert 'href="/datasets/tidy/partitions/p1"' in page
        assert "tidy p1 published revision 1" in said
        assert re.search(r"report reads tidy queued task \d+", said)
        assert "executor run 1.5 s" in said
        assert "Replay" not in said
        # The task that follows reads it.
        _, page = await visitor.get("/tasks/2")
        assert "published" in words(page)
        assert "triggered by tidy , by task 1" in words(page)

    console(story)


def test_who_reads_other_partitions_than_the_tasks_own_is_not_said_to_have_no_task(
    console: Look,
) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1")
        (task,) = await visitor.stage.claim()
        made = {**output(task), "partition_key": "2026-01"}
        ok(await visitor.stage.complete(held(task, outputs=[made])))
        await visitor.stage.route()
        _, page = await visitor.get("/tasks/1")
        assert "report reads tidy has tasks for the partitions of this task" in words(page)

    console(story)


def test_cancel_of_what_waits_and_of_what_runs(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        await visitor.stage.trigger("p1", "p2")
        await visitor.stage.claim()
        _, page = await visitor.post("/tasks/2/cancel", {"to": "/tasks/2"})
        said = words(page)
        assert "Task 2 is cancelled." in said
        assert "This task was cancelled." in said
        assert "Cancelled in the console." in said
        # Nothing of it is to come, and it is no error.
        assert 'class="reason"' not in page
        assert "No attempts." in said
        assert "No log: the task had no attempts." in said
        assert "report reads tidy no task created" in said
        _, page = await visitor.post("/tasks/1/cancel", {"to": "/tasks/1"})
        assert "Task 1 was asked to stop; its worker sees it" in words(page)
        assert "Cancellation requested" in words(page)
        _, page = await visitor.post("/tasks/2/cancel", {"to": "/tasks/2"})
        assert "Task 2 is cancelled" in words(page)

    console(story)


def test_who_may_only_look_cannot_replay(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        number = await dead(visitor)
        await visitor.sign_in("a token to look")
        _, page = await visitor.get(f"/tasks/{number}")
        assert re.search(r'<button class="primary" disabled[^>]*>Replay</button>', page)
        status, page = await visitor.post(f"/tasks/{number}/replay")
        assert status == 403
        assert await visitor.world.value("SELECT status FROM task WHERE id = %s", number) == "dead"

    console(story, viewer_token="a token to look")


def test_what_is_no_task(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        for path in ("1", "0", "-1", "abc", "9" * 19, "9" * 40, "1%00", "%D9%A1", SCRIPT[:24]):
            status, page = await visitor.get(f"/tasks/{path}")
            assert (status, "There is no task" in words(page)) == (404, True), path
            assert "<script>alert(" not in page
            assert "<code>retention_days</code>" in page
            _, page = await visitor.post(f"/tasks/{path}/replay")
            assert "There is no" in words(page)

    console(story)


def test_an_empty_list_says_what_to_do(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        said = words((await visitor.get("/tasks"))[1])
        assert "There are no tasks yet." in said
        assert "penstock trigger" in said
        assert "No dead tasks." in words((await visitor.get("/tasks?status=dead"))[1])

    console(story)


def test_the_list_is_filtered_and_paged(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        number = await dead(visitor, "a/b?c&d")
        await visitor.world.rows(
            "INSERT INTO task (job_id, definition_id, generation, dedupe_key, operator, priority,"
            " payload, attempt_limit, due_at)"
            " SELECT job_id, definition_id, generation, 'more' || n, operator, priority,"
            " jsonb_build_object('partition_key', 'k' || n), 3, penstock_now()"
            " FROM task, generate_series(1, 5000) AS n WHERE id = %s",
            number,
        )
        status, page = await visitor.get("/tasks")
        assert status == 200
        assert len(page) < 200_000
        assert len(re.findall(r"<tr data-key=", page)) == 50
        (older,) = re.findall(r'href="([^"]+)" rel="next"', page)
        _, second = await visitor.get(older.replace("&amp;", "&"))
        firsts = re.findall(r'<tr data-key="(\d+)"', page)
        seconds = re.findall(r'<tr data-key="(\d+)"', second)
        assert len(seconds) == 50
        assert int(seconds[0]) == int(firsts[-1]) - 1
        _, page = await visitor.get("/tasks?status=dead&job=clean")
        assert re.findall(r'<tr data-key="(\d+)"', page) == [str(number)]
        assert "could not convert" in words(page)
        assert "Dead 1" in words(page)
        (link,) = set(re.findall(r'href="(/tasks\?partition=[^"]+)"', page))
        _, page = await visitor.get(link)
        assert re.findall(r'<tr data-key="(\d+)"', page) == [str(number)]

    console(story)


def test_filters_that_make_no_sense_are_told(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        for asked in ("job=nobody", "status=lost", "partition=%00", "before=x", "before=0"):
            status, page = await visitor.get(f"/tasks?{asked}")
            assert status == 404, asked
            assert "Tasks" in page
        assert (await visitor.get("/tasks?job=&status=&partition="))[0] == 200

    console(story)


def test_all_dead_tasks_of_a_job_are_replayed_at_once(
    console: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_page, "_ROUND", 1)

    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        numbers = [await dead(visitor, key) for key in ("p1", "p2", "p3")]
        _, page = await visitor.get("/tasks?status=dead")
        assert "Replay all" in page
        _, page = await visitor.post("/tasks/replay", {"job": "report", "to": "/tasks"})
        assert "nothing was replayed" in words(page)
        _, page = await visitor.post("/tasks/replay", {"partition": "p2", "to": "/tasks"})
        assert "1 task is queued for replay." in words(page)
        _, page = await visitor.post("/tasks/replay", {"job": "clean", "to": "/tasks"})
        assert "2 tasks are queued for replay." in words(page)
        rows = await visitor.world.rows("SELECT id FROM task WHERE status = 'queued' ORDER BY id")
        assert [row["id"] for row in rows] == numbers

    console(story)


def test_very_many_attempts_are_cut_with_a_sentence(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await applied(visitor)
        number = await dead(visitor)
        for _ in range(30):
            ok(await visitor.stage.public.post("/v1/tasks/replay", json={"tasks": [number]}))
            await tried(visitor, is_retried=False)
        _, page = await visitor.get(f"/tasks/{number}")
        said = words(page)
        assert "The latest 25 of 31 attempts." in said
        assert len(re.findall(r'data-key="attempt-', page)) == 25
        assert "Tried 31 times" in said

    console(story)
