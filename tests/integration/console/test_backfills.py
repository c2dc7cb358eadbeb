"""Backfills in the console: the form, what it would create, and one as it goes on."""

from __future__ import annotations

import re

from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.api.stage import held, ok, output
from tests.integration.dispatcher.test_deployment import chain

SCRIPT = "<script>alert(1)</script>"
NEW = "/operations/backfills/new"


def _request(page: str) -> str:
    found = re.search(r'name="request_id" value="([^"]+)"', page)
    assert found is not None, words(page)
    return found[1]


def test_a_preview_says_what_will_be_created_and_creates_nothing(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.stage.trigger("2026-01-02")
        (task,) = await visitor.stage.claim()
        ok(await visitor.stage.complete(held(task, outputs=[output(task)])))
        days = "first_day=2026-01-01&last_day=2026-01-31"
        status, page = await visitor.get(f"{NEW}?preview=1&job=clean&by=days&{days}&concurrency=7")
        assert status == 200
        said = words(page)
        assert "Tasks 31 one per partition" in said
        assert "Existing 1" in said
        assert "New 30" in said
        assert "Concurrency 7" in said
        assert "First 2026-01-01, 2026-01-02, 2026-01-03, … Last 2026-01-31" in said
        assert "Start 31 tasks" in said
        assert await visitor.world.value("SELECT count(*) FROM backfill") == 0

    console(story)


def test_a_preview_says_what_has_no_input(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.stage.trigger("2026-01-02")
        (task,) = await visitor.stage.claim()
        ok(await visitor.stage.complete(held(task, outputs=[output(task)])))

        async def said(job: str, *keys: str) -> str:
            status, page = await visitor.get(
                f"{NEW}?preview=1&job={job}&by=keys&keys={'%0A'.join(keys)}"
            )
            assert status == 200
            return words(page)

        found = await said("report", "2026-01-02", "2013-02-30", "foo")
        assert (
            "2 of 3 have no input and will most likely fail:"
            " tidy has nothing for 2013-02-30 , foo ." in found
        )
        assert "no input" not in await said("report", "2026-01-02")
        # What only a source tells of has no data for anything.
        assert "no input" not in await said("clean", "foo")
        # Of what is known as a range, other partitions may be read.
        asked = {"job": "feed", "partition_key": "foo", "event_id": "e", "start": 1, "end": 2}
        ok(await visitor.stage.public.post("/v1/trigger", json=asked))
        await visitor.world.rows(
            "UPDATE event SET (dataset_id, generation) = (SELECT dataset_id, version"
            " FROM generation JOIN dataset ON dataset.id = dataset_id WHERE name = 'tidy')"
            " WHERE partition_key = 'foo'"
        )
        assert "no input" not in await said("report", "foo")

    console(story)


def test_ranges_that_are_there_already_are_counted(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        for start, end in ((0, 10), (10, 20), (30, 35), (5, 15), (100, 110)):
            await visitor.world.rows(
                "INSERT INTO publication (dataset_id, generation, partition_key, range_start,"
                " range_end, mode, task_id, attempt, location)"
                " SELECT generation.dataset_id, version, %s || '-' || %s, %s, %s, 'replace',"
                " 1, 1, 'x' FROM generation JOIN dataset ON dataset.id = dataset_id"
                " WHERE name = 'tidy'",
                *(start, end, start, end),
            )
        fields = "job=clean&by=ranges&start=0&end=35&step=10"
        _, page = await visitor.get(f"{NEW}?preview=1&{fields}")
        said = words(page)
        assert "Tasks 4" in said
        assert "Existing 3" in said
        assert "First 0-10, 10-20, 20-30, … Last 30-35" in said
        _, page = await visitor.get(f"{NEW}?preview=1&job=clean&start=0&end=1000000000&step=1")
        assert "Tasks 1,000,000,000" in words(page)

    console(story)


def test_what_is_wrong_is_said_above_the_form(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        for fields, sentence in (
            ("job=clean&by=keys&keys=", "Name at least one partition, one per line."),
            ("job=feed&by=keys&keys=a", "The job feed only emits events"),
            ("job=nobody&by=keys&keys=a", "The DAG in force has no job nobody."),
            ("job=clean&by=ranges&start=5&end=1&step=1", "The start, 5, must be lower"),
            ("job=&by=keys&keys=a", "Choose the job"),
            ("job=clean&by=keys&keys=a&concurrency=x", "Concurrency has to be"),
        ):
            status, page = await visitor.get(f"{NEW}?preview=1&{fields}")
            assert (status, sentence in words(page)) == (200, True), fields
            assert 'name="preview"' in page
        _, page = await visitor.get(f"{NEW}?job=clean&keys=%3Cscript%3Ealert(1)%3C/script%3E")
        assert SCRIPT not in page
        _, page = await visitor.get(
            f"{NEW}?preview=1&job=clean&keys=%3Cscript%3Ealert(1)%3C/script%3E"
        )
        assert SCRIPT not in page
        assert SCRIPT in words(page)

    console(story)


def test_a_backfill_is_started_once_however_often_its_form_is_sent(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        _, page = await visitor.get(f"{NEW}?preview=1&job=clean&by=keys&keys=a%0D%0Ab")
        fields = {"job": "clean", "by": "keys", "keys": "a\r\nb", "request_id": _request(page)}
        status, page = await visitor.post("/operations/backfills/start", fields)
        assert status == 200
        said = words(page)
        assert "The backfill of 2 partitions has started." in said
        assert "0 of 2 are settled, 0 %." in said
        assert visitor.stage.kicks
        await visitor.post("/operations/backfills/start", fields)
        assert await visitor.world.value("SELECT count(*) FROM backfill") == 1
        _, page = await visitor.get("/operations/backfills")
        assert "1 clean running 0 of 2" in words(page)
        fields = {**fields, "request_id": "", "keys": " ", "to": NEW}
        _, page = await visitor.post("/operations/backfills/start", fields)
        assert "Name at least one partition" in words(page)

    console(story)


def test_a_backfill_goes_on_and_its_dead_are_replayed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage = visitor.stage
        await stage.apply()
        fields = {"job": "clean", "by": "ranges", "start": "0", "end": "60", "step": "10"}
        await visitor.post("/operations/backfills/start", {**fields, "concurrency": "4"})
        await stage.parts.backfills.turn()
        done, dead, _running = await stage.claim(limit=3)
        ok(await stage.complete(held(done, outputs=[output(done, start=0, end=10)])))
        reason = f"{SCRIPT}\nand more"
        ok(await stage.complete(held(dead, failure={"reason": reason, "is_retried": False})))
        _, page = await visitor.get("/backfills/1")
        assert SCRIPT not in page
        said = words(page)
        assert "2 of 6 are settled, 33 %: 1 is dead." in said
        assert "Running 1 now Waiting 1 for a worker Not created 2" in said
        assert f'href="/tasks/{dead.task_id}"' in page
        assert f"{dead.task_id} 10-20 {SCRIPT}" in said
        assert "First 0-10 Last 50-60" in said
        _, page = await visitor.post("/backfills/1/replay", {"to": "/backfills/1"})
        assert "1 task is queued for replay." in words(page)
        assert "No dead tasks." in words(page)
        _, page = await visitor.post("/backfills/1/replay")
        assert "nothing was replayed" in words(page)

    console(story)


def test_what_was_cancelled_of_a_backfill_was_not_computed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage = visitor.stage
        await stage.apply()
        keys = {"job": "clean", "by": "keys", "keys": "a\nb\nc"}
        await visitor.post("/operations/backfills/start", keys)
        await stage.parts.backfills.turn()
        done, dead, cancelled = await stage.claim(limit=3)
        ok(await stage.public.post("/v1/tasks/cancel", json={"tasks": [cancelled.task_id]}))
        for task in (dead, cancelled):
            failure = {"reason": "x", "is_retried": False}
            ok(await stage.complete(held(task, failure=failure)))
        ok(await stage.complete(held(done, outputs=[output(done)])))
        await stage.parts.backfills.turn()
        _, page = await visitor.get("/backfills/1")
        said = words(page)
        assert "Completed. Of 3 partitions 1 was computed, 1 was cancelled, 1 is dead." in said
        assert '<span class="badge incomplete">incomplete</span>' in page
        assert "Computed 1 of 3" in said
        assert "Cancelled 1 not computed" in said
        _, page = await visitor.get("/operations/backfills")
        assert "1 clean incomplete 1 cancelled 3 of 3" in words(page)
        answer = (await stage.public.get("/v1/backfills/1")).json()
        assert (answer["state"], answer["dead"], answer["cancelled"]) == ("done", 1, 1)

    console(story)


def test_a_backfill_is_paused_resumed_and_cancelled(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage, to = visitor.stage, {"to": "/backfills/1"}
        await stage.apply()
        await visitor.post("/operations/backfills/start", {"job": "clean", "keys": "a\nb"})
        _, page = await visitor.post("/backfills/1/pause", to)
        assert "The backfill is paused" in words(page)
        assert 'action="/backfills/1/resume"' in page
        _, page = await visitor.post("/backfills/1/resume", to)
        assert "The backfill is resumed." in words(page)
        ok(await stage.public.post("/v1/jobs/clean/pause", json={"reason": "Not now."}))
        _, page = await visitor.get("/backfills/1")
        assert "The job is paused, so no task starts: Not now." in words(page)
        _, page = await visitor.get(f"{NEW}?preview=1&job=clean&keys=a")
        assert "The job is paused: no task runs until it is resumed. Not now." in words(page)
        _, page = await visitor.post("/backfills/1/cancel", to)
        assert "The backfill and its waiting tasks are cancelled" in words(page)
        assert 'action="/backfills/1/cancel"' not in page
        _, page = await visitor.post("/backfills/1/resume", to)
        assert "Backfill 1 is cancelled." in words(page)
        _, page = await visitor.post("/backfills/9/pause")
        assert "There is no backfill 9." in words(page)
        _, page = await visitor.post("/backfills/x/pause")
        assert "The backfill has to be a whole number" in words(page)

    console(story)


def test_unknown_backfills_and_long_lists(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        for path in ("/backfills/1", "/backfills/x", "/backfills/99999999999999999999"):
            status, page = await visitor.get(path)
            assert (status, "There is no backfill" in words(page)) == (404, True)
        await visitor.stage.apply(chain(extra=""))
        await visitor.post(
            "/operations/backfills/start",
            {"job": "clean", "start": "0", "end": "5000", "step": "1", "concurrency": "5000"},
        )
        while await visitor.parts.backfills.turn() == 0.0:
            pass
        await visitor.world.rows(
            "UPDATE task SET status = 'running', attempt = 1, lease_token = id::text, worker = 'w',"
            " lease_expires_at = penstock_now(), claimed_at = penstock_now()"
        )
        await visitor.world.rows(
            "UPDATE task SET status = 'dead', lease_token = NULL, worker = NULL,"
            " lease_expires_at = NULL, claimed_at = NULL, reason = 'x', settled_at = penstock_now()"
        )
        status, page = await visitor.get("/backfills/1")
        assert status == 200
        assert len(page) < 100_000
        assert "And 4,950 more: all dead tasks of clean" in words(page)
        _, page = await visitor.post("/backfills/1/replay")
        assert "5,000 tasks are queued for replay." in words(page)

    console(story)
