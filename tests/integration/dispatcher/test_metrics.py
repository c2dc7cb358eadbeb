"""Figures of a real Postgres, as Prometheus and autoscalers get them."""

from __future__ import annotations

from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.metrics import Counters, MetricsReader, exposition, take_turn
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import Completion, Failure, TaskOutput
from penstock.kernel.prometheus import exposed
from penstock.protocol.steering import OperatorLoad
from penstock.runtimes.base import Facts
from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.test_pressure import fill
from tests.integration.dispatcher.world import Play, World, either_way
from tests.unit.dispatcher.metrics.test_counters import parse


async def load(world: World, operator: str) -> OperatorLoad:
    found = await MetricsReader(world.database).operators()
    (one,) = [each for each in found.operators if each.name == operator]
    return one


def test_what_runs_waits_and_should_run(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, metrics = Pipeline(world), MetricsReader(world.database)
        assert (await metrics.operators()).operators == []
        await pipeline.apply(chain())
        await fill(pipeline, "clean", 5)
        await fill(pipeline, "clean", 1, delay_ms=60_000)
        await pipeline.tasks.claim_next("a:clean", worker="w", limit=2)
        assert [each.name for each in (await metrics.operators()).operators] == [
            "a:clean",
            "a:report",
        ]
        clean = await load(world, "a:clean")
        assert (clean.in_flight, clean.waiting, clean.desired) == (2, 3, 5)
        assert clean.in_flight_max is None
        await metrics.limit_operator("a:clean", 4)
        clean = await load(world, "a:clean")
        assert (clean.in_flight_max, clean.waiting, clean.desired) == (4, 3, 4)
        await world.rows("UPDATE job SET max_concurrency = 3 WHERE name = 'clean'")
        assert (await load(world, "a:clean")).desired == 3
        await Backpressure(world.database).pause("clean", "x")
        clean = await load(world, "a:clean")
        assert (clean.waiting, clean.desired) == (0, 2)

    play(story)


def test_an_operator_that_has_left_is_shown_while_it_has_work(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, metrics = Pipeline(world), MetricsReader(world.database)
        await pipeline.apply(chain())
        await fill(pipeline, "report", 1)
        (claimed,) = await pipeline.tasks.claim_next("a:report", worker="w")
        await pipeline.apply(chain().split("  report:")[0], force=True)
        assert (await load(world, "a:report")).in_flight == 1
        await pipeline.tasks.complete([Completion(claimed.fence)])
        names = [each.name for each in (await metrics.operators()).operators]
        assert names == ["a:clean"]

    play(story)


@either_way
def test_a_limit_that_is_raised_tells_of_what_may_run(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, metrics = Pipeline(world), MetricsReader(world.database)
        await pipeline.apply(chain())
        await fill(pipeline, "clean", 3)
        assert not await metrics.limit_operator("a:other", 1)
        assert await world.value("SELECT count(*) FROM operator") == 0
        assert await metrics.limit_operator("a:clean", 1)
        await world.wakes()
        assert len(await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)) == 1
        assert await metrics.limit_operator("a:clean", 1)
        assert await world.wakes() == []
        assert await metrics.limit_operator("a:clean", 2)
        assert await world.wakes() == ["a:clean/normal"]
        assert await metrics.limit_operator("a:clean", None)
        assert await world.wakes() == ["a:clean/normal"]
        assert len(await pipeline.tasks.claim_next("a:clean", worker="w", limit=9)) == 2

    play(story)


def test_the_text_of_a_scrape(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, metrics = Pipeline(world), MetricsReader(world.database)
        empty = await metrics.text()
        assert "penstock_events_pending 0\n" in empty
        await pipeline.apply(chain())
        await fill(pipeline, "clean", 4)
        await fill(pipeline, "clean", 1, priority="bulk")
        one, two = await pipeline.tasks.claim_next("a:clean", worker="w", limit=2)
        await pipeline.tasks.complete([Completion(one.fence)])
        await pipeline.tasks.fail([Failure(two.fence, "no", is_retried=False)])
        await pipeline.routing.accept([await pipeline.event("a"), await pipeline.event("b")])
        await Backpressure(world.database).pause("report", "x")
        await world.rows("DELETE FROM outbox")
        await world.rows("INSERT INTO outbox (kind, target) VALUES ('wake', 'x')")
        await world.rows(
            "INSERT INTO outbox (kind, target, parked_at, last_error)"
            " SELECT 'wake', 'x', penstock_now(), 'no' FROM generate_series(1, 2)"
        )
        await world.rows("INSERT INTO worker (name) VALUES ('w')")
        world.later(30)
        told = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in (await metrics.text()).splitlines()
            if not line.startswith("#")
        }
        assert (
            told.items()
            >= {
                "penstock_events_pending": 2,
                "penstock_events_oldest_seconds": 30,
                "penstock_events_last_minute": 2,
                "penstock_outbox_pending": 1,
                "penstock_outbox_parked": 2,
                "penstock_hot_tables_behind": 0,
                "penstock_hot_tables_behind_seconds": 0,
                "penstock_workers": 1,
                'penstock_tasks_settled_last_minute{status="completed"}': 1,
                'penstock_tasks_settled_last_minute{status="dead"}': 1,
                'penstock_tasks_settled_last_minute{status="cancelled"}': 0,
                'penstock_operator_in_flight{operator="a:clean"}': 0,
                'penstock_operator_waiting{operator="a:clean"}': 3,
                'penstock_operator_desired{operator="a:clean"}': 3,
                'penstock_job_waiting{job="clean",priority="normal"}': 2,
                'penstock_job_waiting{job="clean",priority="bulk"}': 1,
                'penstock_job_oldest_seconds{job="clean"}': 30,
                'penstock_job_dead{job="clean"}': 1,
                'penstock_job_paused{job="clean"}': 0,
                'penstock_job_paused{job="report"}': 1,
                'penstock_job_pressed{job="clean"}': 0,
            }.items()
        )
        assert 'penstock_operator_in_flight_max{operator="a:clean"}' not in told
        assert not any("feed" in name for name in told), "a source that runs nothing"
        world.later(31)
        later = await metrics.text()
        assert 'settled_last_minute{status="completed"} 0\n' in later
        world.later(30)
        assert "penstock_workers 0\n" in await metrics.text()

    play(story)


def test_names_are_escaped(play: Play) -> None:
    async def story(world: World) -> None:
        await world.job("strange", operator='a"b\\c\nd')
        await world.rows("INSERT INTO operator VALUES (E'a\"b\\\\c\\nd', 3)")
        text = await MetricsReader(world.database).text()
        assert 'penstock_operator_in_flight_max{operator="a\\"b\\\\c\\nd"} 3\n' in text
        figures = await MetricsReader(world.database).figures()
        assert exposition(figures, Counters()) == text
        parse(text)
        kinds = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(kinds) == len(set(kinds)) > 10

    play(story)


def test_attempts_are_counted_when_they_have_ended_and_once(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline, counters = Pipeline(world), Counters()
        tasks = Tasks(world.database, counters=counters)
        await pipeline.apply(chain())
        await fill(pipeline, "clean", 4)
        world.later(7)
        done, failed, cancelled, lost = await tasks.claim_next("a:clean", worker="w", limit=4)
        await tasks.cancel([cancelled.task_id])
        world.later(20)
        dataset = await world.value("SELECT id::text FROM dataset WHERE name = 'tidy'")
        facts = Facts(manifest="0" * 64, files=1, rows=3, bytes=1000, columns=())
        output = TaskOutput(dataset=dataset, location="x", partition_key="p", facts=facts)
        ends: list[Completion | Failure] = [
            Completion(done.fence, (output,)),
            Failure(failed.fence, "no"),
        ]
        for _ in range(2):
            # Said again because the answer was lost, it is answered again and counted no more.
            await tasks.end([*ends, Completion(cancelled.fence, (output,))])
        await tasks.reap()
        world.later(1000)
        assert [each.task_id for each in (await tasks.reap(outage_seconds=1e6)).reaped] == [
            lost.task_id
        ]
        told = parse(exposed(counters.families()))
        assert told["penstock_attempts_total"] == {
            f'penstock_attempts_total{{job="clean",outcome="{each}"}}': 1
            for each in ("cancelled", "completed", "expired", "failed")
        }
        assert told["penstock_published_bytes_total"].popitem()[1] == 1000
        assert told["penstock_published_rows_total"].popitem()[1] == 3
        assert told["penstock_queue_seconds"]['penstock_queue_seconds_sum{job="clean"}'] == 28
        assert told["penstock_attempt_seconds"]['penstock_attempt_seconds_sum{job="clean"}'] == 1080

    play(story)


def test_one_dispatcher_takes_the_turn(play: Play) -> None:
    async def story(world: World) -> None:
        assert await take_turn(world.database, "x", seconds=60)
        assert await take_turn(world.database, "y", seconds=60)
        assert not await take_turn(world.database, "x", seconds=60)
        world.later(59)
        assert not await take_turn(world.database, "x", seconds=60)
        world.later(1)
        assert await take_turn(world.database, "x", seconds=60)

    play(story)
