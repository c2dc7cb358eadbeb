"""What waits too long is announced again, and what a wake-up means for functions."""

from __future__ import annotations

import asyncio

from penstock.dispatcher.carriers import LocalInvokeCarrier, WakeCarrier
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.outbox import Outbox, OutboxCarrier, OutboxEntry, Reconciler, Relay
from penstock.dispatcher.tasks.model import ClaimedTask
from penstock.dispatcher.wakeups.base import TASKS_COUNTED_MAX, WakeUpChannel
from tests.integration.dispatcher.carrying import LIMITS, Script, Still, Words
from tests.integration.dispatcher.world import Play, World, done, either_way

OPERATOR = WakeUpChannel("operator", Priority.NORMAL)


def wake(number: int = 1, operator: str = "operator", priority: str = "normal") -> OutboxEntry:
    body = {"operator": operator, "priority": priority}
    return OutboxEntry(number, "wake", f"{operator}/{priority}", body, 0)


async def invocations(world: World) -> list[int]:
    """The tasks that are to be invoked; their rows are taken away."""
    rows = await world.rows(
        "DELETE FROM outbox WHERE kind = 'invoke' AND parked_at IS NULL"
        " RETURNING (body ->> 'task_id')::bigint AS task, target"
    )
    assert {row["target"] for row in rows} <= {"operator"}
    return sorted(row["task"] for row in rows)


async def functions(world: World, count: int, *, at_once: int | None = None) -> list[int]:
    """Tasks of a job that is a function, whose invocations are lost."""
    job = await world.job(runtime="lambda", max_concurrency=at_once)
    tasks = await job.make(*(f"{number}" for number in range(count)))
    assert await invocations(world) == tasks
    return tasks


@either_way
def test_tasks_whose_word_was_lost_are_announced_again(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job()
        other = await world.job("other", operator="other", priority="bulk")
        reconciler = Reconciler(world.database, waited_seconds=30)
        await job.make("one")
        world.later(29)
        await other.make("two", "three")
        await reconciler.turn()
        assert await world.wakes() == []
        world.later(1)
        await reconciler.turn()
        await reconciler.turn()
        assert await world.wakes() == ["operator/normal"]
        world.later(29)
        # However many look, it is said once in that time.
        await asyncio.gather(*(Reconciler(world.database).turn() for _ in range(5)))
        assert await world.wakes() == ["other/bulk"]
        world.later(1)
        await asyncio.gather(*(Reconciler(world.database).turn() for _ in range(5)))
        assert await world.wakes() == ["operator/normal"]
        assert len(await world.tasks.claim_next("operator", worker="w", limit=5)) == 1
        world.later(60)
        await reconciler.turn()
        assert await world.wakes() == ["other/bulk"]

    play(story)


@either_way
def test_what_could_not_be_claimed_is_not_announced(play: Play) -> None:
    async def story(world: World) -> None:
        job = await world.job(max_concurrency=1)
        paused = await world.job("paused", operator="paused")
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason) VALUES (%s, 'x', 'all', 'x')",
            paused.id,
        )
        await paused.make("one")
        claimed = await job.claimed("running")
        await job.make("waiting")
        world.later(100)
        await Reconciler(world.database).turn()
        assert await world.wakes() == []
        await world.tasks.complete(done(claimed.fence))
        await world.wakes()
        await world.rows("DELETE FROM pause")
        await Reconciler(world.database).turn()
        assert await world.wakes() == ["operator/normal", "paused/normal"]

    play(story)


def test_a_wake_up_is_sent_or_kicks(play: Play) -> None:
    async def story(world: World) -> None:
        kicks: list[str] = []
        refused = WakeUpChannel("broken", Priority.BULK)
        words = Words({refused: "away"})
        carrier = WakeCarrier(words, own={"range_split": lambda: kicks.append("split")})
        rows = [wake(1), wake(2), wake(3, "broken", "bulk"), wake(4, "range_split")]
        assert await carrier.carry(rows) == {3: "away"}
        assert (words.sent, kicks) == ([OPERATOR], ["split"])

    play(story)


def test_a_wake_up_says_how_many_tasks_can_be_claimed(play: Play) -> None:
    async def story(world: World) -> None:
        words = Words()
        relay = Relay(world.database, carriers={"wake": WakeCarrier(words)}, limits=LIMITS)

        async def told() -> dict[str, int]:
            words.tasks_of.clear()
            await relay.turn()
            return {
                f"{each.operator}/{each.priority}": tasks for each, tasks in words.tasks_of.items()
            }

        job = await world.job()
        narrow = await world.job("narrow", max_concurrency=2)
        bulk = await world.job("bulk", operator="other", priority="bulk")
        limited = await world.job("limited", operator="limited")
        await world.rows("INSERT INTO operator (name, in_flight_max) VALUES ('limited', 3)")
        held = await world.job("held", operator="held")
        await world.rows(
            "INSERT INTO pause (job_id, cause, scope, reason) VALUES (%s, 'x', 'all', 'x')", held.id
        )
        for each, count in ((job, 4), (narrow, 9), (bulk, 1500), (limited, 5), (held, 2)):
            await world.tasks.create([each.new(f"{number}") for number in range(count)])
        assert await told() == {
            "operator/normal": 4 + 2,
            "other/bulk": TASKS_COUNTED_MAX,
            "limited/normal": 3,
            "held/normal": 1,
        }
        # What is left is announced by the claim, and counted again.
        assert len(await world.tasks.claim_next("operator", worker="w", limit=5)) == 5
        assert await told() == {"operator/normal": 1}

    play(story)


def test_where_there_is_no_lambda_an_invocation_wakes(play: Play) -> None:
    async def story(world: World) -> None:
        words = Words()
        rows = [
            OutboxEntry(number, "invoke", "operator", {"task_id": number}, 0) for number in (1, 2)
        ]
        assert await LocalInvokeCarrier(words).carry(rows) == {}
        assert words.sent == [OPERATOR]
        assert words.tasks_of == {OPERATOR: 2}
        words = Words({OPERATOR: "away"})
        assert await LocalInvokeCarrier(words).carry(rows) == {1: "away", 2: "away"}

    play(story)


def test_a_wake_up_invokes_functions(play: Play) -> None:
    """A function whose claim was refused is gone: the end of what refused it invokes the next."""

    async def story(world: World) -> None:
        tasks = await functions(world, 4, at_once=2)
        words, kicks = Words(), list[str]()
        carrier = WakeCarrier(words, invokes=world.database, kick=lambda: kicks.append("kick"))
        running = [await world.tasks.claim(task, worker="w") for task in tasks[:2]]
        await carrier.carry([wake()])
        assert (await invocations(world), kicks) == ([], [])
        assert isinstance(running[0], ClaimedTask)
        await world.tasks.complete(done(running[0].fence))
        assert await world.wakes() == ["operator/normal"]
        await carrier.carry([wake()])
        await carrier.carry([wake()])
        assert (await invocations(world), kicks) == ([tasks[2]], ["kick"])
        # No worker has anything to do with it.
        assert words.sent == []

    play(story)


def test_an_operator_of_workers_and_functions(play: Play) -> None:
    async def story(world: World) -> None:
        tasks = await functions(world, 2)
        other = await world.job("other")
        await other.make("one")
        words = Words()
        carrier = WakeCarrier(words, invokes=world.database)
        await carrier.carry([wake(), wake(2, priority="bulk"), wake(3, "nobody")])
        assert await invocations(world) == tasks
        nobody = WakeUpChannel("nobody", Priority.NORMAL)
        assert words.sent == [nobody, WakeUpChannel("operator", Priority.BULK), OPERATOR]

    play(story)


def test_a_function_that_never_claimed_is_invoked_again(play: Play) -> None:
    async def story(world: World) -> None:
        tasks = await functions(world, 1)
        # What these carriers do not know, and would park.
        await world.rows("DELETE FROM outbox WHERE kind = 'project'")
        script, clock = Script(), Still()
        waking = WakeCarrier(Words(), invokes=world.database)
        carriers: dict[str, OutboxCarrier] = {"wake": waking, "invoke": script}
        relay = Relay(world.database, carriers=carriers, limits=LIMITS, clock=clock)
        reconciler = Reconciler(world.database)
        world.later(31)
        await reconciler.turn()
        await relay.turn()
        await relay.turn()
        assert [row.body["task_id"] for row in script.carried] == tasks
        # A function that cannot be invoked is parked once, and tried again from time to time.
        script.refused["operator"] = "There is no such function."
        for _ in range(60):
            world.later(31)
            clock.now += 31
            await reconciler.turn()
            await relay.turn()
            await relay.turn()
        counts = await Outbox(world.database).counts()
        assert counts.parked == 1
        assert script.calls == 1 + 3 * 3
        await world.tasks.cancel(tasks)
        await world.rows("DELETE FROM outbox WHERE parked_at IS NULL")
        await reconciler.turn()
        assert await Outbox(world.database).counts() == (0, 0)

    play(story)
