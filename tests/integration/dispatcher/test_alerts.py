"""Rules judged on a real Postgres: what opens an alert, what ends it, and who judges."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.dispatcher.alerts.evaluator import AWAY_SECONDS, OUTAGE_SECONDS, QUIET_SECONDS
from penstock.dispatcher.alerts.rules import DEFAULT_RULES
from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.outbox import Outbox
from penstock.dispatcher.sources.monitor import SourceMonitor
from penstock.dispatcher.tasks.model import Completion, Failure
from penstock.dispatcher.views.status import AlertViews
from penstock.protocol.steering import AlertState
from tests.integration.dispatcher.alerting import alerts, judge_of, notices
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.test_pressure import fill, line
from tests.integration.dispatcher.test_sources import stream
from tests.integration.dispatcher.world import Play, World

HOOK = {"webhook": "http://127.0.0.1:9/x"}


def rule(name: str, **fields: Any) -> dict[str, Any]:
    return {"rules": {"no_workers": {"enabled": False}, name: fields}}


async def die(pipeline: Pipeline, count: int = 1, *, reason: str = "boom") -> list[int]:
    """Dead tasks of `clean`."""
    made = await fill(pipeline, "clean", count)
    for claimed in await pipeline.tasks.claim_next("a:clean", worker="w", limit=count):
        await pipeline.tasks.end([Failure(claimed.fence, reason, is_retried=False)])
    return made


async def past_quiet(world: World, *judges: Any) -> None:
    """Have a judge go on for so long that what is about silence is believed."""
    for _ in range(round(QUIET_SECONDS / 30) + 1):
        for each in judges:
            await each.turn()
        world.later(30)


async def summary(world: World) -> str:
    found = await world.value("SELECT summary FROM alert ORDER BY id DESC LIMIT 1")
    assert isinstance(found, str)
    return found


def test_nothing_is_the_matter_without_a_dag(play: Play) -> None:
    async def story(world: World) -> None:
        judge = judge_of(world)
        await past_quiet(world, judge)
        world.later(86_400)
        await past_quiet(world, judge)
        assert await alerts(world) == []
        answer = await AlertViews(world.database).alerts()
        assert [each.name for each in answer.rules] == [each.name for each in DEFAULT_RULES]
        assert answer.destinations == []
        assert answer.judged_at is not None

    play(story)


def test_dead_tasks_are_an_alert_until_they_are_replayed(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world)
        await pipeline.apply(chain())
        dead = await die(pipeline, 1, reason="no such\x1b[31m table\nTraceback")
        await judge.turn()
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        assert await summary(world) == "1 task of job clean is dead: no such [31m table"
        dead += await die(pipeline, 2, reason="again")
        await judge.turn()
        await judge.turn()
        assert len(await alerts(world)) == 1
        assert await summary(world) == "3 tasks of job clean are dead, the last one: again"
        (found,) = (await AlertViews(world.database).alerts(state=AlertState.OPEN)).alerts
        assert found.path == "/tasks?status=dead&job=clean"
        assert found.detail["dead"] == 3
        assert (found.clear_since, found.notices) == (None, [])
        await pipeline.tasks.replay(dead)
        await judge.turn()
        (found,) = (await AlertViews(world.database).alerts()).alerts
        assert (found.state, found.clear_since is not None) == (AlertState.OPEN, True)
        world.later(59)
        await judge.turn()
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        world.later(1)
        await judge.turn()
        assert await alerts(world) == [("dead_tasks", "clean", False)]
        (found,) = (await AlertViews(world.database).alerts(state=AlertState.OVER)).alerts
        assert "replayed" in (found.over_why or "")
        await die(pipeline, 1)
        await judge.turn()
        assert [each[2] for each in await alerts(world)] == [False, True]

    play(story)


def test_what_comes_back_within_a_minute_is_the_same_alert(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world, HOOK)
        await pipeline.apply(chain())
        dead = await die(pipeline)
        await judge.turn()
        await pipeline.tasks.replay(dead)
        await judge.turn()
        world.later(30)
        (claimed,) = await pipeline.tasks.claim_next("a:clean", worker="w", limit=1)
        await pipeline.tasks.end([Failure(claimed.fence, "boom", is_retried=False)])
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        assert await world.value("SELECT clear_since FROM alert") is None
        assert [each[:2] for each in await notices(world)] == [("webhook", "opened")]

    play(story)


def test_a_rule_has_a_threshold_a_window_and_names(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        judge = judge_of(world, rule("dead_tasks", at_least=2, within="10m"))
        other = judge_of(world, rule("dead_tasks", jobs=["report", "f*"]))
        await die(pipeline, 1)
        await judge.turn()
        await other.turn()
        assert await alerts(world) == []
        await die(pipeline, 1)
        await judge.turn()
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        world.later(601)
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("dead_tasks", "clean", False)]

    play(story)


def test_a_rule_that_is_not_set_any_more_ends_its_alerts(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await die(pipeline)
        await judge_of(world).turn()
        await judge_of(world, rule("dead_tasks", enabled=False)).turn()
        assert await alerts(world) == [("dead_tasks", "clean", False)]
        assert await world.value("SELECT over_why FROM alert") == "The rule was removed."

    play(story)


def test_a_stale_dataset_is_an_alert_until_it_is_published(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        judge = judge_of(world, rule("late", when="stale_dataset", longer_than="1h"))
        await pipeline.apply(chain())
        await past_quiet(world, judge)
        world.later(3600 - 151)
        await past_quiet(world, judge)
        found = {each[1] for each in await alerts(world)}
        # Also what a source writes: it has told of nothing.
        assert found == {"raw", "tidy", "daily"}
        assert "nothing was ever published of it" in await summary(world)
        await pipeline.send("a")
        assert len(await pipeline.work("a:clean")) == 1
        await judge.turn()
        world.later(60)
        await judge.turn()
        opened = {each[1] for each in await alerts(world) if each[2]}
        assert opened == {"daily"}
        world.later(3600)
        await past_quiet(world, judge)
        assert "Nothing was published of dataset" in " ".join(
            row["summary"] for row in await world.rows("SELECT summary FROM alert")
        )

    play(story)


def test_a_silent_source_is_an_alert_unless_it_is_paused(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
        judge = judge_of(world, rule("quiet", when="silent_source", longer_than="30m"))
        await pipeline.apply(chain())
        await pipeline.routing.accept([await pipeline.event("a")])
        await past_quiet(world, judge)
        world.later(1800)
        await pressures.pause("feed", "by hand")
        await past_quiet(world, judge)
        assert await alerts(world) == []
        await pressures.resume("feed")
        await judge.turn()
        assert await alerts(world) == [("quiet", "feed", True)]
        assert "has sent no event since 2030-01-01 00:00:00 UTC" in await summary(world)
        # What cannot be said now leaves it as it is.
        await pressures.pause("feed", "by hand")
        world.later(120)
        await judge.turn()
        assert await alerts(world) == [("quiet", "feed", True)]
        await pipeline.routing.accept([await pipeline.event("b")])
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("quiet", "feed", False)]

    play(story)


def test_a_dead_source_is_an_alert_until_it_runs_steadily(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world)
        monitor = SourceMonitor(world.database, world.tasks)
        await pipeline.apply(stream())
        await monitor.turn()
        (claimed,) = await world.tasks.claim_next("a:feed", worker="w", limit=1)
        await judge.turn()
        assert await alerts(world) == []
        await world.tasks.end([Failure(claimed.fence, "lost the stream", is_retried=False)])
        await judge.turn()
        # Its task is not one of the dead tasks that somebody has to replay.
        assert await alerts(world) == [("dead_source", "feed", True)]
        assert await summary(world) == "The always-on source feed has died: lost the stream"
        await monitor.turn()
        world.later(15)
        await world.tasks.claim_next("a:feed", worker="w", limit=1)
        world.later(59)
        await judge.turn()
        assert await world.value("SELECT clear_since FROM alert") is None
        world.later(1)
        await judge.turn()
        assert await world.value("SELECT clear_since FROM alert") is not None
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("dead_source", "feed", False)]

    play(story)


def test_pressure_that_lasts_is_an_alert(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, pressures = Pipeline(world), Backpressure(world.database)
        judge = judge_of(world, rule("pressure", longer_than="10m"))
        await pipeline.apply(line())
        await fill(pipeline, "report", 5)
        await pressures.turn()
        world.later(599)
        await judge.turn()
        assert await alerts(world) == []
        world.later(1)
        await judge.turn()
        assert await alerts(world) == [("pressure", "report", True)]
        assert "5 tasks of report are queued; the limit is 4." in await summary(world)

    play(story)


def test_a_table_that_is_behind_is_an_alert_until_it_is_loaded(play: Play) -> None:
    async def story(world: World) -> None:
        judge = judge_of(world)
        job = await world.job()
        await world.rows(
            "INSERT INTO hot_table (dataset_id, problem) SELECT id, 'Away.' FROM dataset"
        )
        await world.rows(
            "INSERT INTO hot_partition (dataset_id, generation, partition_key, wanted)"
            " SELECT dataset_id, version, 'p', 1 FROM generation"
        )
        await judge.turn()
        assert await alerts(world) == []
        world.later(301)
        await judge.turn()
        assert await alerts(world) == [("table_behind", "job", True)]
        said = "The table of dataset job has been behind for over 5m: Away."
        assert await summary(world) == said
        await world.rows("UPDATE hot_partition SET applied = wanted")
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("table_behind", "job", False)]
        assert job.dataset

    play(story)


def test_parked_messages_are_an_alert_until_they_are_tried_again(play: Play) -> None:
    async def story(world: World) -> None:
        judge = judge_of(world)
        await world.rows("INSERT INTO outbox (kind, target) VALUES ('wake', 'x')")
        await judge.turn()
        assert await alerts(world) == []
        await world.rows(
            "INSERT INTO outbox (kind, target, parked_at, last_error)"
            " SELECT 'wake', 'q' || n, penstock_now(), 'no ' || n FROM generate_series(1, 2) AS n"
        )
        await judge.turn()
        assert await alerts(world) == [("parked_outbox", "outbox", True)]
        said = "2 messages of the outbox are parked, the last one to q2: no 2"
        assert await summary(world) == said
        outbox = Outbox(world.database)
        await outbox.retry([each.id for each in (await outbox.parked()).parked])
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("parked_outbox", "outbox", False)]

    play(story)


def test_a_job_whose_attempts_fail_is_an_alert(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        rules = rule("failure_rate", at_least=4, percent=50, within="10m")
        rules["rules"]["dead_tasks"] = {"enabled": False}
        judge = judge_of(world, rules)
        await pipeline.apply(chain())

        async def end(*outcomes: str) -> None:
            await fill(pipeline, "clean", len(outcomes))
            begun = await pipeline.tasks.claim_next("a:clean", worker="w", limit=len(outcomes))
            for claimed, outcome in zip(begun, outcomes, strict=True):
                if outcome == "cancelled":
                    await pipeline.tasks.cancel([claimed.task_id])
                is_well = outcome == "well"
                failure = Failure(claimed.fence, outcome, is_retried=False)
                await pipeline.tasks.end([Completion(claimed.fence) if is_well else failure])
            await judge.turn()

        # Of too few, and with those that people have cancelled, nothing is said.
        await end("bad", "bad", "cancelled", "cancelled")
        assert await alerts(world) == []
        await end("well", "worse")
        assert await alerts(world) == [("failure_rate", "clean", True)]
        said = "70% or more of the attempts of job clean failed within 10m, the last one: worse"
        assert await summary(world) == said
        await end(*["well"] * 3)
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("failure_rate", "clean", False)]
        await end(*["bad"] * 9)
        world.later(601)
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert [each[2] for each in await alerts(world)] == [False, False]

    play(story)


def test_no_workers_is_an_alert_if_the_dag_needs_them(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world)
        await pipeline.apply(chain())
        await past_quiet(world, judge)
        assert await alerts(world) == []
        world.later(150)
        await judge.turn()
        assert await alerts(world) == []
        await past_quiet(world, judge)
        assert await alerts(world) == [("no_workers", "workers", True)]
        assert await summary(world) == (
            "No worker was seen yet, and the DAG has jobs that need one."
        )
        await world.rows("INSERT INTO worker (name) VALUES ('w')")
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("no_workers", "workers", False)]

    play(story)


def test_workers_of_a_queue_are_missed_while_tasks_wait_for_them(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world)
        await pipeline.apply(chain())
        await past_quiet(world, judge)
        await fill(pipeline, "clean", 1)
        (operator,) = [each["operator"] for each in await world.rows("SELECT operator FROM task")]
        heard = "INSERT INTO worker (name, operators) VALUES (%s, %s) ON CONFLICT (name)"
        heard += " DO UPDATE SET last_seen_at = penstock_now()"
        await world.rows(heard, "able", [operator])
        for _ in range(12):
            world.later(30)
            await world.rows(heard, "other", ["another"])
            await judge.turn()
        assert await alerts(world) == [("no_workers", "workers", True)]
        assert f"takes tasks of {operator} was seen since" in await summary(world)
        await world.rows(heard, "able", [operator])
        await judge.turn()
        world.later(60)
        await judge.turn()
        assert await alerts(world) == [("no_workers", "workers", False)]

    play(story)


def test_workers_that_are_started_for_work_are_missed_while_there_is_some(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        judge = judge_of(world, {"rules": {"no_workers": {"if_waiting": True}}})
        invoked = judge_of(world, unserved=("process",))
        await pipeline.apply(chain())
        await past_quiet(world, judge)
        world.later(600)
        await past_quiet(world, judge, invoked)
        assert await alerts(world) == []
        await fill(pipeline, "clean", 1)
        await invoked.turn()
        assert await alerts(world) == []
        await judge.turn()
        assert await alerts(world) == [("no_workers", "workers", True)]

    play(story)


def test_after_an_outage_of_ours_nobody_is_missed_for_a_while(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world)
        await pipeline.apply(chain())
        await world.rows("INSERT INTO worker (name) VALUES ('w')")
        await past_quiet(world, judge)
        assert await alerts(world) == []
        world.later(86_400)
        await die(pipeline)
        await judge.turn()
        # What is written is believed; what was not heard is not.
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        for _ in range(3):
            world.later(30)
            await judge.turn()
        assert len(await alerts(world)) == 1
        world.later(30)
        await judge.turn()
        assert ("no_workers", "workers", True) in await alerts(world)

    play(story)


def test_one_of_two_dispatchers_judges_until_it_is_gone(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await die(pipeline)
        first, second = (
            judge_of(world),
            judge_of(world, rule("dead_tasks", enabled=False), name="b"),
        )
        await first.turn()
        for _ in range(5):
            # One that is set differently changes nothing while the other is there.
            await second.turn()
            world.later(20)
            await first.turn()
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        world.later(AWAY_SECONDS - 1)
        await second.turn()
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        world.later(1)
        await second.turn()
        assert await alerts(world) == [("dead_tasks", "clean", False)]
        assert OUTAGE_SECONDS > AWAY_SECONDS

    play(story)


def test_two_that_judge_at_once_open_one_alert(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await die(pipeline)
        # The same name, so that only the lock and the index are between them.
        judges = [judge_of(world, HOOK) for _ in range(8)]
        for _ in range(3):
            await asyncio.gather(*(each.turn() for each in judges))
        assert await alerts(world) == [("dead_tasks", "clean", True)]
        assert [each[:2] for each in await notices(world)] == [("webhook", "opened")]

    play(story)


def test_a_destination_that_is_new_is_told_of_what_is_open(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        dead = await die(pipeline)
        await judge_of(world).turn()
        assert await notices(world) == []
        mail = {"host": "127.0.0.1", "from": "a@example", "to": ["b@example"]}
        await judge_of(world, {**HOOK, "mail": mail}).turn()
        opened = [("mail", "opened"), ("webhook", "opened")]
        assert [each[:2] for each in await notices(world)] == opened
        # One that is not set any more is not told, and what was meant for it is given up.
        await pipeline.tasks.replay(dead)
        await judge_of(world, HOOK).turn()
        world.later(60)
        await judge_of(world, HOOK).turn()
        assert [each[:2] for each in await notices(world)] == [*opened, ("webhook", "over")]
        world.later(86_400)
        await judge_of(world, HOOK).turn()
        gone = "SELECT destination FROM alert_notice WHERE given_up_at IS NOT NULL"
        assert [row["destination"] for row in await world.rows(gone)] == ["mail"]

    play(story)


def test_what_is_over_is_forgotten_and_never_changed(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, judge = Pipeline(world), judge_of(world, days=2)
        await pipeline.apply(chain())
        dead = await die(pipeline)
        await judge.turn()
        await pipeline.tasks.replay(dead)
        await judge.turn()
        world.later(60)
        await judge.turn()
        world.later(2 * 86_400)
        await judge.turn()
        assert len(await alerts(world)) == 1
        world.later(1)
        await judge.turn()
        assert await world.value("SELECT count(*) FROM alert WHERE rule = 'dead_tasks'") == 0

    play(story)
