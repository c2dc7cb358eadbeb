"""Merges into partitions that tasks find by themselves, on a real Postgres: all, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from penstock.dispatcher.database.pool import query
from penstock.dispatcher.tasks.completion import TRIES_MAX
from penstock.dispatcher.tasks.model import AttemptEnd, ClaimedTask, Completion, NewTask, Refusal
from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.runtimes.base import NOT_READ
from tests.integration.dispatcher.test_merging import Bucket, Rows, merged, moved
from tests.integration.dispatcher.world import Play, World

Result = Mapping[str, Mapping[str, tuple[int, str]]]
"""By partition and key: the version and the value."""


@dataclass
class Many(Bucket):
    """What attempts have written that find their partitions when they have computed."""

    async def begun(self, name: str) -> ClaimedTask:
        new = NewTask(
            definition_id=self.job.definition_id,
            generation=self.job.generation,
            dedupe_key=name,
            payload={"cursor": 1},
        )
        (task_id,) = await self.world.tasks.create([new])
        assert task_id is not None
        found = await self.world.tasks.claim(task_id, worker="w")
        assert isinstance(found, ClaimedTask)
        return found

    def asked(self, task: ClaimedTask, result: Result) -> Completion:
        """Which partitions it has rows of."""
        return Completion(
            task.fence,
            tuple(
                self.job.output(key, f"s3://b/asked/{key}", base_revision=NOT_READ)
                for key in result
            ),
        )

    def merged(self, task: ClaimedTask, result: Result, current: Any) -> Completion:
        """Its rows, each partition merged with what is said to be published of it."""
        parts = {each["partition_key"]: each for each in current.get("job", ())}
        outputs = []
        for key, rows in result.items():
            own = {name: (version, task.task_id, said) for name, (version, said) in rows.items()}
            base = parts.get(key, {})
            location = f"s3://b/{task.task_id}-{task.attempt}-{len(self.files)}"
            self.files[location] = merged(self.files[base["location"]] if base else {}, own)
            outputs.append(self.job.output(key, location, base_revision=base.get("revision", 0)))
        return Completion(task.fence, tuple(outputs))

    async def say(self, said: Completion) -> AttemptEnd | Refusal:
        (answer,) = await self.world.tasks.complete([said])
        return answer

    async def take(self, name: str, result: Result) -> None:
        """A task that nobody is in the way of."""
        task = await self.begun(name)
        current = moved(await self.say(self.asked(task, result)))
        assert isinstance(await self.say(self.merged(task, result, current)), AttemptEnd)

    async def revisions(self) -> dict[str, int]:
        rows = await self.world.rows("SELECT partition_key, revision FROM publication ORDER BY 1")
        return {row["partition_key"]: row["revision"] for row in rows}


async def many(world: World) -> Many:
    return Many(world, await world.job(update_mode="merge", max_attempts=100))


def of(*partitions: str, said: str = "x") -> Result:
    return {each: {"k": (1, said)} for each in partitions}


def test_it_asks_what_is_published_and_publishes_all_at_once(play: Play) -> None:
    async def story(world: World) -> None:
        made = await many(world)
        await made.take("first", of("p", "q"))
        task = await made.begun("second")
        current = moved(await made.say(made.asked(task, of("q", "r"))))
        assert [each["partition_key"] for each in current["job"]] == ["q"]
        assert await made.revisions() == {"p": 1, "q": 1}
        # To ask is no conflict, however often it is said.
        for _ in range(2 * TRIES_MAX):
            current = moved(await made.say(made.asked(task, of("q", "r"))))
        assert await world.value("SELECT max(conflicts) FROM attempt") == 0
        assert await world.value("SELECT count(*) FROM merge_lease") == 0
        said = made.merged(task, of("q", "r", said="y"), current)
        assert isinstance(await made.say(said), AttemptEnd)
        assert await made.say(said) == await made.say(said)
        assert await made.revisions() == {"p": 1, "q": 2, "r": 1}
        assert await world.value("SELECT count(*) FROM event") == 4
        # Whoever has ended is not told anything but that.
        assert not isinstance(await made.say(made.asked(task, of("q"))), AttemptEnd)

    play(story)


def test_if_one_has_moved_none_is_published(play: Play) -> None:
    async def story(world: World) -> None:
        made = await many(world)
        slow = await made.begun("slow")
        current = moved(await made.say(made.asked(slow, of("p", "q", "r"))))
        await made.take("fast", of("q"))
        stale = made.merged(slow, of("p", "q", "r"), current)
        current = moved(await made.say(stale))
        assert [each["revision"] for each in current["job"]] == [1]
        assert await made.revisions() == {"q": 1}
        assert isinstance(await made.say(made.merged(slow, of("p", "q", "r"), current)), AttemptEnd)
        assert await made.revisions() == {"p": 1, "q": 2, "r": 1}
        assert (await made.published("q"))["k"][1] > slow.task_id

    play(story)


def test_the_turn_is_one_for_all_of_its_partitions(play: Play) -> None:
    """Those that share one of them wait, also to be told; others go on."""

    async def story(world: World) -> None:
        made = await many(world)
        slow = await made.begun("slow")
        current = moved(await made.say(made.asked(slow, of("p", "q"))))
        for number in range(TRIES_MAX):
            await made.take(f"fast{number}", of("q"))
            current = moved(await made.say(made.merged(slow, of("p", "q"), current)))
        other = await made.begun("other")
        assert moved(await made.say(made.asked(other, of("p", "r")))) is None
        await made.take("neighbour", of("r"))
        assert isinstance(await made.say(made.merged(slow, of("p", "q"), current)), AttemptEnd)
        assert await world.value("SELECT count(*) FROM merge_lease") == 0
        current = moved(await made.say(made.asked(other, of("p", "r"))))
        assert isinstance(await made.say(made.merged(other, of("p", "r"), current)), AttemptEnd)
        assert await made.revisions() == {"p": 2, "q": TRIES_MAX + 1, "r": 2}

    play(story)


@dataclass
class Story:
    """Attempts that ask, merge, merge again and die, several at a time."""

    made: Many
    results: Mapping[str, Result]
    tasks: dict[str, ClaimedTask] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def expected(self) -> dict[str, Rows]:
        found: dict[str, Rows] = {}
        for name, result in self.results.items():
            task_id = self.tasks[name].task_id
            for key, rows in result.items():
                own = {each: (row[0], task_id, row[1]) for each, row in rows.items()}
                found[key] = merged(found.get(key, {}), own)
        return found

    async def step(self, name: str) -> None:
        task, result = self.tasks[name], self.results[name]
        is_known = name in self.known
        answer = await self.made.say(
            self.made.merged(task, result, self.known[name])
            if is_known
            else self.made.asked(task, result)
        )
        if isinstance(answer, AttemptEnd):
            assert is_known
            self.ended.add(name)
        elif (current := moved(answer)) is not None:
            self.known[name] = current

    async def die(self, name: str) -> None:
        """Its worker is gone: another attempt begins, and knows nothing."""
        world, task_id = self.made.world, self.tasks[name].task_id
        expire = "UPDATE task SET lease_expires_at = penstock_now() WHERE id = %s RETURNING id"
        await world.rows(expire, task_id)
        await world.tasks.reap()
        await world.rows("UPDATE task SET due_at = penstock_now() RETURNING id")
        again = await world.tasks.claim(task_id, worker="w")
        assert isinstance(again, ClaimedTask)
        self.tasks[name] = again
        self.known.pop(name, None)


def chosen(chance: Entropy, number: int) -> Result:
    some = sorted("pqrs", key=lambda _: chance.random())[: chance.randrange(1, 4)]
    return {
        each: {chance.choice("abc"): (chance.randrange(3), f"{number}") for _ in "12"}
        for each in some
    }


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_overlapping_merges_gives_the_same_rows(play: Play, seed: int) -> None:
    """Several at the same time, some of which die; nobody waits for ever, or for each other."""

    async def story(world: World) -> None:
        chance = seeded_entropy(seed)
        await world.tasks.reap()
        tale = Story(await many(world), {f"t{n}": chosen(chance, n) for n in range(8)})
        for name in tale.results:
            tale.tasks[name] = await tale.made.begun(name)
        for _ in range(200):
            left = sorted(set(tale.results) - tale.ended, key=lambda _: chance.random())
            some = left[:3]
            if some and chance.random() < 0.1:
                await tale.die(some.pop())
            await asyncio.gather(*map(tale.step, some))
        assert tale.ended == set(tale.results)
        for partition, rows in tale.expected().items():
            assert await tale.made.published(partition) == rows

    play(story)


def test_partitions_are_looked_up_by_their_keys_also_before_there_are_statistics(
    play: Play,
) -> None:
    """By dataset alone, ten thousand partitions would each be found among ten thousand."""

    async def story(world: World) -> None:
        statement = query("merge_heads").decode()
        for place, name in enumerate(("places", "tasks", "datasets", "generations", "keys")):
            statement = statement.replace(f"%({name})s", f"${place + 1}")
        kinds = "bigint[], bigint[], uuid[], uuid[], text[]"
        async with await psycopg.AsyncConnection.connect(world.dsn) as connection:
            await connection.execute(b"SET plan_cache_mode = force_generic_plan")
            await connection.execute(f"PREPARE heads({kinds}) AS {statement}".encode())
            found = await connection.execute(b"EXPLAIN EXECUTE heads('{}', '{}', '{}', '{}', '{}')")
            plan = "\n".join(row[0] for row in await found.fetchall())
        assert "using publication_pkey on publication" in plan

    play(story)
