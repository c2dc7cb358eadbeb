"""The pages of operations: the overview and its levers, sources, keys and the audit."""

from __future__ import annotations

from penstock.protocol.steering import EverythingAnswer
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.api.stage import held, ok, read
from tests.integration.dispatcher.test_deployment import chain

SCRIPT = "<script>alert(1)</script>"
CRON = """
  tick:
    activation: source
    source: {kind: cron, cron: "0 * * * *"}
    outputs: [ticks]
  watch:
    activation: source
    source: {kind: always_on}
    runtime: process
    operator: a:watch
    outputs: [seen]
"""


async def _hello(
    visitor: Visitor, name: str = "worker", *, is_leaving: bool = False, **about: str
) -> None:
    answer = await visitor.stage.internal.post(
        "/internal/hello",
        json={
            "runtimes": ["process"],
            "concurrency": 4,
            "about": about,
            "is_leaving": is_leaving,
        },
        headers=visitor.stage.identity(name),
    )
    ok(answer)


def test_an_empty_installation_says_what_to_do(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/operations")
        assert status == 200
        said = words(page)
        assert "penstock worker" in said
        assert "No job is paused." in said
        assert "No failed side effects." in said
        for path, hint in (
            ("/operations/sources", "has no sources"),
            ("/operations/backfills", "no job that computes partitions"),
            ("/operations/backfills/new", "no job that computes partitions"),
            ("/operations/events", "penstock trigger"),
            ("/operations/versions", "penstock dag apply"),
            ("/operations/versions?version=before", "No DAG is in force."),
            ("/operations/keys", "No request was refused"),
        ):
            status, page = await visitor.get(path)
            assert (status, hint in words(page)) == (200, True), path
        _, page = await visitor.post("/operations/pause-everything", {"to": "/operations"})
        assert "There is no job to pause." in words(page)

    console(story)


def test_everything_is_paused_and_resumed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage = visitor.stage
        await stage.apply()
        await stage.trigger("p", "q")
        ok(await stage.public.post("/v1/jobs/report/pause", json={"reason": SCRIPT}))
        _, page = await visitor.get("/operations")
        assert SCRIPT not in page
        assert "data-sure" in page.partition("Pause everything")[0]
        _, page = await visitor.post("/operations/pause-everything", {"to": "/operations"})
        said = words(page)
        assert "2 jobs are paused now. 1 job was already paused." in said
        assert "All jobs were paused in the console." in said
        assert SCRIPT in said  # What somebody has said before stays.
        assert await stage.claim() == []
        _, page = await visitor.post("/operations/pause-everything", {"to": "/operations"})
        assert "3 jobs are already paused; nothing was changed." in words(page)
        stage.kicks.clear()
        await visitor.world.wakes()
        _, page = await visitor.post("/operations/resume-everything", {"to": "/operations"})
        assert "3 jobs are resumed." in words(page)
        assert stage.kicks
        assert await visitor.world.wakes() == ["a:clean/normal"]
        assert len(await stage.claim(limit=2)) == 2
        _, page = await visitor.post("/operations/resume-everything")
        assert "nothing was changed" in words(page)

    console(story)


def test_pressure_stays_when_everything_is_resumed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply(chain().replace("a:report", "a:report\n    max_queue_depth: 1"))
        world = visitor.world
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason)"
            " SELECT id, 'pressure:report', 'all', 'Too much.' FROM job WHERE name = 'clean'"
        )
        paused = read(await visitor.stage.public.post("/v1/pause"), EverythingAnswer)
        assert (len(paused.jobs), paused.paused_by_people, paused.paused_by_pressure) == (3, 3, 1)
        _, page = await visitor.post("/operations/resume-everything", {"to": "/operations"})
        said = words(page)
        assert "3 jobs are resumed. 1 job is still paused by backpressure." in said
        assert "resumes automatically" in said
        answer = read(await visitor.stage.public.post("/v1/resume"), EverythingAnswer)
        assert (answer.jobs, answer.paused_by_pressure) == ([], 1)

    console(story)


def test_what_waits_of_a_job_that_has_left_is_paused_too(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage = visitor.stage
        await stage.apply()
        await stage.trigger("p")
        await visitor.world.rows("INSERT INTO job (name) VALUES ('gone') RETURNING id")
        answer = read(await stage.public.post("/v1/pause"), EverythingAnswer)
        assert answer.jobs == ["clean", "feed", "report"]
        ok(await stage.public.post("/v1/resume"))
        await visitor.world.rows("DELETE FROM dag_current")
        answer = read(await stage.public.post("/v1/pause"), EverythingAnswer)
        assert answer.jobs == ["clean"]

    console(story)


def test_one_job_is_paused_and_resumed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        fields = {"job": "clean", "reason": "The disk is full.", "to": "/operations"}
        _, page = await visitor.post("/operations/pause", fields)
        assert "clean is paused." in words(page)
        assert "The disk is full." in words(page)
        _, page = await visitor.post("/operations/resume", {"job": "clean", "to": "/operations"})
        assert "clean is resumed." in words(page)
        _, page = await visitor.post("/operations/pause", {"job": "nobody"})
        assert "There is no job 'nobody'." in words(page)
        _, page = await visitor.post("/operations/pause", {"job": " "})
        assert "The job is missing." in words(page)

    console(story)


def test_workers_and_limits_of_operators(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.stage.trigger("p")
        await _hello(visitor)
        await visitor.stage.claim()
        _, page = await visitor.get("/operations")
        said = words(page)
        assert "worker ok 1 4 process a:clean" in said
        visitor.world.later(120)
        await _hello(visitor, f"{SCRIPT[:20]}", note=SCRIPT)
        _, page = await visitor.get("/operations")
        assert "worker silent" in words(page)
        assert "<script>a" not in page
        # What is new about it is written at once, all else twice a minute.
        await _hello(visitor, note="back")
        assert ok(await visitor.stage.public.get("/v1/status"))["workers"] == 2
        await _hello(visitor, is_leaving=True)
        assert ok(await visitor.stage.public.get("/v1/status"))["workers"] == 1
        _, page = await visitor.get("/operations")
        assert "worker stopped" in words(page)
        visitor.world.later(3700)
        _, page = await visitor.get("/operations")
        assert "worker stopped" not in words(page)
        visitor.world.later(2 * 86400)
        _, page = await visitor.get("/operations")
        assert "No worker was seen in the last day." in words(page)

        async def limit(value: str, name: str = "a:clean") -> str:
            fields = {"operator": name, "in_flight_max": value, "to": "/operations"}
            return words((await visitor.post("/operations/limit", fields))[1])

        assert "At most 3 tasks of a:clean run at a time now." in await limit("3")
        assert "One task of a:clean runs" in await limit("1")
        assert "The limit has to be 1 or more." in await limit("0")
        assert "The limit has to be" in await limit("x")
        assert "a:clean has no limit now." in await limit("")
        assert "No job has ever had an operator 'nobody'." in await limit("1", "nobody")

    console(story)


def test_lists_are_cut(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.world.rows(
            "INSERT INTO worker (name) SELECT 'w' || n FROM generate_series(1, 5000) AS n"
        )
        await visitor.world.rows(
            "INSERT INTO outbox (kind, target, tries, last_error, parked_at)"
            " SELECT 'wake', 'x', 9, 'e', penstock_now() FROM generate_series(1, 5000)"
        )
        status, page = await visitor.get("/operations")
        assert status == 200
        assert len(page) < 200_000
        said = words(page)
        assert "the first 100" in said
        assert "The oldest 50 of 5,000." in said

    console(story)


def test_what_is_parked_is_tried_again(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        for target in ("first", SCRIPT):
            await visitor.world.rows(
                "INSERT INTO outbox (kind, target, tries, last_error, parked_at)"
                " VALUES ('wake', %s, 9, %s, penstock_now())",
                target,
                SCRIPT,
            )
        _, page = await visitor.get("/operations")
        assert SCRIPT not in page
        assert SCRIPT in words(page)
        _, page = await visitor.post("/operations/outbox/retry", {"ids": "1"})
        assert "One is being retried." in words(page)
        assert await visitor.world.value("SELECT count(*) FROM outbox WHERE parked_at IS NULL") == 1
        _, page = await visitor.post(
            "/operations/outbox/retry", {"ids": "1,2", "to": "/operations"}
        )
        assert "One is being retried." in words(page)
        _, page = await visitor.post("/operations/outbox/retry", {"ids": "1"})
        assert "No longer parked" in words(page)
        _, page = await visitor.post("/operations/outbox/retry", {"ids": "x"})
        assert "The messages to retry" in words(page)

    console(story)


def test_who_may_only_look_steers_nothing(console: Look) -> None:
    async def looking(visitor: Visitor) -> None:
        await visitor.sign_in("a token to look")
        status, page = await visitor.get("/operations")
        assert status == 200
        for path in (
            *("/operations/pause-everything", "/operations/resume-everything"),
            *("/operations/limit", "/operations/trigger", "/operations/backfills/start"),
            *(
                "/operations/keys/revoke",
                "/operations/keys/rotate",
                "/backfills/1/cancel",
                "/operations/outbox/retry",
            ),
            "/operations/versions/roll-back",
        ):
            status, page = await visitor.post(path)
            assert (status, "This session is read-only." in words(page)) == (403, True), path
        assert await visitor.world.value("SELECT count(*) FROM pause") == 0

    console(looking, api_token="a token to steer", viewer_token="a token to look")


def test_sources_and_how_they_are_doing(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage = visitor.stage
        ok(await stage.apply(chain(extra=CRON)))
        _, page = await visitor.get("/operations/sources")
        said = words(page)
        assert "feed ready manual none recently" in said
        assert "tick ready cron 0 * * * *" in said
        assert "watch pending" in said
        await stage.trigger("p")
        now = await visitor.world.value("SELECT penstock_now()")
        last = now.replace(minute=0, second=0, microsecond=0)
        events = [
            {"dataset": "ticks", "event_id": "cron:1", "cursor": int(last.timestamp() * 1000)}
        ]
        ok(
            await stage.internal.post(
                "/internal/events", json={"events": events}, headers=stage.identity()
            )
        )
        _, page = await visitor.get("/operations/sources")
        assert "tick ready" in words(page)
        visitor.world.later(2 * 3600)
        ok(await stage.public.post("/v1/jobs/feed/pause", json={"reason": SCRIPT}))
        _, page = await visitor.get("/operations/sources")
        assert SCRIPT not in page
        said = words(page)
        assert f"feed paused {SCRIPT}" in said
        assert "tick late" in said
        assert "penstock source cron" in said

    console(story)


def test_a_source_is_triggered(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        status, page = await visitor.get("/operations/sources/feed")
        assert status == 200
        assert "No recent events." in words(page)
        here = "/operations/sources/feed"
        fields = {"job": "feed", "partition_key": "2026-01-31", "event_id": "mine", "to": here}
        payload = f'{{"said": "{SCRIPT}"}}'
        _, page = await visitor.post("/operations/trigger", {**fields, "payload": payload})
        said = words(page)
        assert "The event mine was ingested; its tasks are being created." in said
        assert "2026-01-31" in said
        assert "not routed yet" in said
        assert SCRIPT not in page
        await visitor.stage.route()
        _, page = await visitor.get(here)
        assert "clean 1 queued" in words(page)
        _, page = await visitor.post("/operations/trigger", fields)
        assert "The event mine was a duplicate" in words(page)
        _, page = await visitor.post("/operations/trigger", {**fields, "cursor": "7"})
        assert "leave one of them empty" in words(page)
        _, page = await visitor.post("/operations/trigger", {"job": "clean"})
        assert "The job 'clean' is not a source." in words(page)
        assert (await visitor.get("/operations/sources/clean"))[0] == 404
        assert (await visitor.get("/operations/sources/%3Cscript%3E"))[0] == 404

    console(story)


def test_forms_by_the_kind_of_the_source(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        interval = CRON.replace('"0 * * * *"', '"0 * * * *", emits: interval')
        await visitor.stage.apply(chain(extra=interval))
        _, page = await visitor.get("/operations/sources/tick")
        assert 'name="until"' in page
        fields = {"job": "tick", "from": "2026-01-31T06:00", "until": "2026-01-31T07:00"}
        _, page = await visitor.post("/operations/trigger", {**fields, "to": "/events"})
        assert "was ingested" in words(page)
        day = "2026-01-31"
        assert f"{day}T06:00Z {day} 06:00 \N{EN DASH} {day} 07:00 UTC" in words(page)
        ok(await visitor.stage.apply(chain(extra=CRON)))
        _, page = await visitor.get("/operations/sources/tick")
        assert 'name="time"' in page

    console(story)


def test_keys_are_shown_and_rotated(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        _, page = await visitor.get("/operations/keys")
        assert "never rotated" in words(page)
        to = {"to": "/operations/keys"}
        _, page = await visitor.post("/operations/keys/rotate", to)
        said = words(page)
        assert "Every dispatcher creates a new key" in said
        assert "1 rotation" in said
        _, page = await visitor.post("/operations/keys/rotate", to)
        assert "A rotation was already requested" in words(page)
        await visitor.parts.audit.turn()
        _, page = await visitor.get("/operations/keys")
        assert "allowed Rotate the signing key POST /v1/keys/rotate" in words(page)
        assert "the console" in words(page)
        (key, *_) = (await visitor.parts.keys.listed()).keys
        _, page = await visitor.post("/operations/keys/revoke", {**to, "kid": key.kid})
        assert f"The key {key.kid} is revoked." in words(page)
        assert 'class="badge revoked"' in page

    console(story)


def test_the_audit_by_task_and_outcome(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        audit = visitor.parts.audit
        for task in range(1, 61):
            what = "POST /v1/task/heartbeat"
            audit.note(what=what, outcome="refused", task_id=task, reason="over")
        audit.note(what="mint", outcome="allowed", task_id=7, caller=SCRIPT, reason=SCRIPT)
        await audit.turn()
        _, page = await visitor.get("/operations/keys")
        assert SCRIPT not in page
        assert page.count('data-key="note-') == 50
        assert "before=" in page
        _, page = await visitor.get("/operations/keys?task=7")
        assert page.count('data-key="note-') == 2
        _, page = await visitor.get("/operations/keys?task=7&outcome=refused")
        assert page.count('data-key="note-') == 1
        assert "A heartbeat of an attempt POST /v1/task/heartbeat" in words(page)
        assert "Its attempt had ended (over)" in words(page)
        _, page = await visitor.get("/operations/keys?task=99")
        assert "No matching audit records." in words(page)
        status, page = await visitor.get("/operations/keys?task=%3Cscript%3E")
        assert status == 200
        assert "The number of the task has to be a whole number" in words(page)
        assert "<script>" not in page.partition("<main")[2]

    console(story)


def test_a_task_that_runs_is_counted_for_its_worker_only(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.stage.trigger("p", "q")
        await _hello(visitor)
        await _hello(visitor, "idle")
        first, _ = await visitor.stage.claim(limit=2)
        ok(await visitor.stage.complete(held(first, failure={"reason": "x"})))
        _, page = await visitor.get("/operations")
        assert "idle ok 0 4" in words(page)
        assert "worker ok 1 4" in words(page)

    console(story)
