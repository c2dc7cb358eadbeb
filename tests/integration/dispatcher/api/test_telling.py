"""News: of sources, of tasks, of people."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.protocol.events import PAYLOAD_BYTES_MAX, AuthAnswer, SourceAnswer, SourcesAnswer
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, read, refused
from tests.integration.dispatcher.test_deployment import chain

NOWHERE = "00000000-0000-0000-0000-000000000000"
SOURCES = """
jobs:
  tick: {activation: source, source: {kind: cron, cron: "5 * * * *"}, outputs: [ticks]}
  hook: {activation: source, source: {kind: webhook}, outputs: [hooks, errors]}
  listen:
    activation: source
    source: {kind: always_on}
    runtime: process
    operator: a:listen
    outputs: [heard]
  read: {runtime: process, operator: "a:read", inputs: [ticks, hooks, heard], outputs: [all]}
"""

INTERVALS = """
jobs:
  tick:
    activation: source
    source: {kind: cron, cron: "5 * * * *", emits: interval, catch_up: false}
    outputs: [ticks]
"""


async def tell(stage: Stage, *events: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await stage.internal.post(
        "/internal/events", json={"events": events}, headers=stage.identity("source")
    )
    results: list[dict[str, Any]] = ok(answer)["results"]
    return results


def test_events_of_sources(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        (row,) = await stage.world.rows(
            "SELECT dataset_id::text AS uuid, version::text FROM generation"
            " JOIN dataset ON dataset.id = dataset_id WHERE name = 'raw'"
        )
        by_uuid = {"dataset_uuid": row["uuid"], "dataset_version": row["version"]}
        kicks = len(stage.kicks)
        results = await tell(
            stage,
            {"event_id": "1", **by_uuid, "partition_key": "p"},
            {"event_id": "1", "dataset": "raw", "partition_key": "p"},
            {"event_id": "2", "dataset": "raw", "cursor": 5},
            {"event_id": "3", "dataset": "nothing", "cursor": 5},
            {"event_id": "4", "dataset": "raw"},
            {"event_id": "5", **by_uuid, "dataset_version": NOWHERE, "cursor": 1},
            {"event_id": "6", "dataset_uuid": NOWHERE, "dataset_version": NOWHERE, "cursor": 1},
        )
        assert len(stage.kicks) == kicks + 1
        outcomes = [each["outcome"] for each in results]
        assert outcomes == ["new", "duplicate", "new", "refused", "refused", "audited", "refused"]
        assert results[0]["seq"] == results[1]["seq"]
        assert results[3]["why"] == "There is no dataset 'nothing' that is live."
        assert results[5]["why"] == "This generation is not known."
        assert await stage.route() == 2

    on_stage(story)


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"dataset_uuid": NOWHERE},
        {"dataset_version": NOWHERE},
        {"dataset": "raw", "dataset_uuid": NOWHERE},
        {"dataset": "raw", "dataset_uuid": NOWHERE, "dataset_version": NOWHERE},
    ],
)
def test_an_event_names_its_dataset_in_one_way(on_stage: Perform, place: dict[str, str]) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        (result,) = await tell(stage, {"event_id": "1", "cursor": 1, **place})
        assert (result["outcome"], result["seq"]) == ("refused", None)
        assert "by its uuid and version, or by its name" in result["why"]

    on_stage(story)


def test_a_name_stands_for_all_generations_that_are_live(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.world.rows(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " SELECT id, gen_random_uuid(), 'building', 'x' FROM dataset WHERE name = 'raw'"
        )
        results = await tell(
            stage,
            {"event_id": "1", "dataset": "raw", "partition_key": "p"},
            {"event_id": "2", "dataset": "tidy", "partition_key": "p"},
        )
        assert [each["outcome"] for each in results] == ["new", "new", "new"]
        assert await stage.world.value("SELECT count(DISTINCT generation) FROM event") == 3

    on_stage(story)


def test_a_source_that_is_paused_is_told_so(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        asked = {"reason": "Somebody repairs it."}
        ok(await stage.public.post("/v1/jobs/feed/pause", json=asked))
        (result,) = await tell(stage, {"event_id": "1", "dataset": "raw", "cursor": 1})
        assert (result["outcome"], result["paused"]) == ("new", "Somebody repairs it.")
        answer = await stage.internal.get("/internal/sources", headers=stage.identity())
        assert ok(answer)["sources"][0]["paused"] == "Somebody repairs it."

    on_stage(story)


def test_the_sources_of_the_dag(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        async def sources() -> SourcesAnswer:
            answer = await stage.internal.get("/internal/sources", headers=stage.identity())
            return read(answer, SourcesAnswer)

        assert (await sources()).sources == []
        await stage.apply(SOURCES)
        hook, listen, tick = (await sources()).sources
        assert (tick.job, tick.kind, tick.cron, tick.time_zone) == (
            "tick",
            "cron",
            "5 * * * *",
            "UTC",
        )
        assert (hook.kind, hook.path, sorted(hook.datasets)) == (
            "webhook",
            "/hook",
            ["errors", "hooks"],
        )
        assert (listen.kind, listen.path, listen.last_cursor) == ("always_on", None, None)
        news = [{"event_id": f"cron:{n}", "dataset": "ticks", "cursor": n} for n in (5, 11, 7)]
        # Somebody's own trigger says nothing of the times that were told.
        news.append({"event_id": "by hand", "dataset": "ticks", "cursor": 99})
        await tell(stage, *news, {"event_id": "k", "dataset": "hooks", "partition_key": "k"})
        hook, listen, tick = (await sources()).sources
        assert (tick.last_cursor, hook.last_cursor) == (11, None)
        assert (tick.emits, tick.catch_up, tick.last_end) == ("cursor", True, None)

    on_stage(story)


def test_the_token_of_webhooks_opens_their_sources_and_nothing_else(on_stage: Perform) -> None:
    auth = "{kind: webhook, auth: {type: slack, secret: [file:new, env:OLD], tolerance: 1m}}"

    async def story(stage: Stage) -> None:
        await stage.apply(SOURCES.replace("{kind: webhook}", auth))
        token = stage.parts.identities.webhook().token
        # Whatever it calls itself.
        headers = {"X-Penstock-Worker": "source", "Authorization": f"Bearer {token}"}
        answer = await stage.internal.get("/internal/sources", headers=headers)
        (hook,) = read(answer, SourcesAnswer).sources
        assert hook.auth == AuthAnswer(
            type="slack",
            secrets=["file:new", "env:OLD"],
            tolerance_seconds=60.0,
            header="X-Signature",
        )
        (row,) = await stage.world.rows(
            "SELECT dataset_id::text AS dataset_uuid, version::text AS dataset_version"
            " FROM generation JOIN dataset ON dataset.id = dataset_id WHERE name = 'hooks'"
        )
        news = [
            {"event_id": "1", "dataset": "hooks", "cursor": 1},
            {"event_id": "1", "dataset": "ticks", "cursor": 1},
            {"event_id": "2", **row, "cursor": 2},
        ]
        answer = await stage.internal.post(
            "/internal/events", json={"events": news}, headers=headers
        )
        results = ok(answer)["results"]
        assert [each["outcome"] for each in results] == ["new", "refused", "refused"]
        assert "no dataset of a webhook source 'ticks'" in results[1]["why"]
        noted = {"refusals": [{"job": "hook", "reason": "too old", "address": "192.0.2.7"}]}
        path = "/internal/webhook-refusals"
        ok(await stage.internal.post(path, json=noted, headers=headers))
        for path, body in (
            ("/internal/hello", {"runtimes": ["process"], "concurrency": 1}),
            ("/internal/task-claim", {"operator": "a:read"}),
        ):
            answer = await stage.internal.post(path, json=body, headers=headers)
            assert "only send events of webhook sources" in refused(answer, 403).title
        forged = {**headers, "Authorization": f"Bearer {token[:-1]}"}
        refused(await stage.internal.get("/internal/sources", headers=forged), 403)
        await stage.parts.audit.turn()
        rows = await stage.world.rows("SELECT what, caller, address, reason FROM audit ORDER BY id")
        assert ("webhook hook", "", "192.0.2.7", "too old") in [tuple(row.values()) for row in rows]
        assert {
            (row["what"], row["caller"]) for row in rows if row["reason"] == "webhook token"
        } == {
            ("POST /internal/hello", "webhook"),
            ("POST /internal/task-claim", "webhook"),
        }

    on_stage(story)


def test_a_source_of_intervals(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        async def tick() -> SourceAnswer:
            answer = await stage.internal.get("/internal/sources", headers=stage.identity())
            (found,) = read(answer, SourcesAnswer).sources
            return found

        def interval(event_id: str, start: int, end: int) -> dict[str, Any]:
            range_ = {"partition_key": event_id, "start": start, "end": end}
            return {"event_id": event_id, "dataset": "ticks", **range_}

        await stage.apply(INTERVALS)
        found = await tick()
        assert (found.emits, found.catch_up, found.last_end) == ("interval", False, None)
        await tell(stage, interval("cron:1", 0, 10), interval("cron:2", 10, 20))
        # What somebody has told by hand is no time of the source. One that is late is not the last.
        await tell(stage, interval("by hand", 20, 99), interval("cron:0", -10, 0))
        assert (await tick()).last_end == 20
        assert (await tick()).last_cursor is None

    on_stage(story)


PAYLOAD = {"id": 1, "more": {"is": None, "list": [None, 1.5, "é", 10**30]}, "payload": {}}


def test_what_comes_with_an_event_reaches_its_tasks(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        results = await tell(
            stage,
            {"event_id": "1", "dataset": "raw", "partition_key": "p", "payload": PAYLOAD},
            {"event_id": "1", "dataset": "raw", "partition_key": "p", "payload": {"other": 1}},
            {"event_id": "2", "dataset": "raw", "partition_key": "q"},
            {"event_id": "3", "dataset": "raw", "partition_key": "r", "payload": {}},
        )
        assert [each["outcome"] for each in results] == ["new", "duplicate", "new", "new"]
        asked = {"job": "feed", "partition_key": "s", "payload": {"by": "hand"}}
        ok(await stage.public.post("/v1/trigger", json=asked))
        await stage.route()
        first, *others = await stage.claim(limit=9)
        assert first.payload["payload"] == PAYLOAD
        assert [each.payload.get("payload") for each in others] == [None, None, {"by": "hand"}]
        shown = ok(await stage.public.get(f"/v1/tasks/{first.task_id}"))
        assert shown["payload"]["payload"] == PAYLOAD
        # What is published has none: the next job is told by the data.
        ok(await stage.complete({**held(first), "outputs": [output(first)]}))
        (report,) = await stage.claim("a:report")
        assert (report.payload["partition_key"], "payload" in report.payload) == ("p", False)
        # A running task may say something with its own events.
        own = {"event_id": "x", "dataset": "tidy", "partition_key": "x", "payload": {"a": 1}}
        ok(await stage.task_events(held(others[0]), own))
        await stage.route()
        (report,) = await stage.claim("a:report")
        assert report.payload["payload"] == {"a": 1}

    on_stage(story)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"a": "x" * 66_000}, "has 65,536 bytes at most"),
        ({"a": "\0"}, "a NUL character"),
        ({"a": 10**400}, "320 digits"),
    ],
)
def test_a_payload_that_cannot_be_kept(
    on_stage: Perform, payload: dict[str, Any], why: str
) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        event = {"event_id": "1", "dataset": "raw", "cursor": 1}
        good, bad = await tell(stage, {**event, "event_id": "2"}, {**event, "payload": payload})
        assert (good["outcome"], bad["outcome"]) == ("new", "refused")
        assert why in bad["why"]
        asked = {"job": "feed", "payload": payload}
        assert why in refused(await stage.public.post("/v1/trigger", json=asked), 422).title
        not_an_object = {"job": "feed", "payload": [1]}
        found = refused(await stage.public.post("/v1/trigger", json=not_an_object), 422)
        assert found.field == "payload"

    on_stage(story)


def test_the_largest_payload_that_is_allowed_is_stored(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        # As many commas as there can be, which are stored with a space each, and long numbers.
        room = PAYLOAD_BYTES_MAX - len('{"a":[]}')
        short: list[float] = [1] * ((room + 1) // 2)
        long = [1e-300] * (room // 303)
        for number, value in enumerate((short, long)):
            event = {"event_id": str(number), "dataset": "raw", "partition_key": "p"}
            (result,) = await tell(stage, {**event, "payload": {"a": value}})
            assert result["outcome"] == "new", result
            (result,) = await tell(
                stage, {**event, "event_id": "x", "payload": {"a": value, "more": [*value][:9]}}
            )
            assert result["outcome"] == "refused"
        await stage.route()
        found = [each.payload["payload"]["a"] for each in await stage.claim(limit=9)]
        assert found == [short, long]

    on_stage(story)


def test_events_of_a_task(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        (task,) = await stage.claim()

        async def say(*events: dict[str, Any], **fields: Any) -> Any:
            return await stage.task_events(held(task, **fields), *events)

        own = {"event_id": "1", "dataset": "tidy", "partition_key": "x"}
        results = ok(
            await say(
                own,
                own,
                {**own, "dataset": "raw"},
                {"event_id": "2", "partition_key": "x"},
                {**own, "dataset_uuid": NOWHERE},
            )
        )["results"]
        outcomes = [each["outcome"] for each in results]
        assert outcomes == ["new", "duplicate", "refused", "refused", "refused"]
        assert results[2]["why"] == "Dataset 'raw' is not an output of this task."
        row = (await stage.world.rows("SELECT * FROM event WHERE dedupe = 'source:1'"))[0]
        assert (row["task_id"], str(row["generation"])) == (task.task_id, task.generation)
        problem = refused(await say(own, lease_token="other"), 409)
        assert problem.type == "stale"
        assert problem.state is not None
        gone = await stage.token(404, 1)
        assert refused(await say(own, task_id=404, token=gone), 404).type == "unknown"
        ok(await stage.complete(held(task)))
        late = {**own, "event_id": "late"}
        assert refused(await say(late), 409).type == "over"
        assert await stage.world.value("SELECT count(*) FROM event WHERE task_id > 0") == 1

    on_stage(story)


def test_an_attempt_does_not_end_while_its_events_are_kept(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        (task,) = await stage.claim()
        own = {"event_id": "1", "dataset": "tidy", "partition_key": "x"}
        async with asyncio.TaskGroup() as group, stage.world.database.transaction() as other:
            # Whoever is ending the attempt at this moment decides.
            await other.execute(
                b"UPDATE task SET status = 'completed', lease_token = NULL, worker = NULL,"
                b" lease_expires_at = NULL, claimed_at = NULL, settled_at = penstock_now()"
                b" WHERE id = %s",
                [task.task_id],
            )
            telling = group.create_task(stage.task_events(held(task), own))
            await stage.world.until_waiting()
        assert refused(telling.result(), 409).type == "over"
        assert await stage.world.value("SELECT count(*) FROM event WHERE task_id > 0") == 0

    on_stage(story)


def test_a_trigger(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()

        async def trigger(**ask: Any) -> Any:
            return await stage.public.post("/v1/trigger", json=ask)

        kicks = len(stage.kicks)
        first = ok(await trigger(job="feed"))
        assert len(stage.kicks) == kicks + 1
        assert [each["outcome"] for each in first["results"]] == ["new"]
        assert await stage.world.value("SELECT cursor FROM event") == 1893456000000
        again = ok(await trigger(job="feed", event_id=first["event_id"]))
        assert [each["outcome"] for each in again["results"]] == ["duplicate"]
        second = ok(await trigger(dataset="raw", partition_key="1-2", start=1, end=2))
        assert second["event_id"] != first["event_id"]
        assert await stage.route() == 2

    on_stage(story)


def test_many_triggers_are_taken_whole_or_not_at_all(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()

        async def trigger(*events: dict[str, Any], **ask: Any) -> Any:
            return await stage.public.post("/v1/triggers", json={"events": events, **ask})

        wrong = {"partition_key": "q", "start": 2, "end": 1}
        problem = refused(await trigger({"partition_key": "p"}, wrong, job="feed"), 422)
        assert problem.field == "events[1]"
        assert await stage.world.value("SELECT count(*) FROM event") == 0
        refused(await trigger(job="feed"), 422)
        refused(await trigger({"partition_key": "p"}, job="clean"), 409)
        events = [{"partition_key": f"p{n}", "event_id": f"e{n}"} for n in range(1000)]
        refused(await trigger(*events, {}, job="feed"), 422)
        found = ok(await trigger(*events, dataset="raw"))["events"]
        assert [each["event_id"] for each in found] == [each["event_id"] for each in events]
        assert {one["outcome"] for each in found for one in each["results"]} == {"new"}
        again = ok(await trigger(*events[:2], {"partition_key": "x"}, job="feed"))["events"]
        outcomes = [one["outcome"] for each in again for one in each["results"]]
        assert outcomes == ["duplicate", "duplicate", "new"]
        assert await stage.world.value("SELECT count(*) FROM event") == 1001

    on_stage(story)


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        ({}, 422),
        ({"job": "feed", "dataset": "raw"}, 422),
        ({"job": "nobody"}, 404),
        ({"dataset": "nothing"}, 404),
        ({"job": "clean"}, 409),
        ({"dataset": "tidy"}, 409),
        ({"job": "feed", "partition_key": "p", "cursor": 1}, 422),
        ({"job": "feed", "partition_key": "p", "start": 1}, 422),
        ({"job": "feed", "partition_key": "p", "start": 2, "end": 2}, 422),
        ({"job": "feed", "start": 1, "end": 2}, 422),
        ({"job": "feed", "partition_key": "a\x00"}, 422),
        ({"job": "fe\x00ed"}, 422),
        ({"job": "feed", "event_id": "\N{SNOWMAN}" * 900}, 422),
    ],
)
def test_triggers_that_make_no_sense(on_stage: Perform, ask: dict[str, Any], status: int) -> None:
    async def story(stage: Stage) -> None:
        await stage.apply()
        refused(await stage.public.post("/v1/trigger", json=ask), status)
        assert await stage.world.value("SELECT count(*) FROM event") == 0

    on_stage(story)


def test_a_trigger_before_there_is_a_dag(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        refused(await stage.public.post("/v1/trigger", json={"job": "feed"}), 404)
        await stage.apply(chain())
        ok(await stage.public.post("/v1/trigger", json={"job": "feed"}))

    on_stage(story)
