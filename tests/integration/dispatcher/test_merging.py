"""Merges into one partition, on a real Postgres: whatever the order, nothing is lost or doubled.

What Spark does with rows is a dictionary here: each key has the version, the task and the value of
the row that wins, as `penstock.runtimes.spark.merger` has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.datasets.schema import Column
from penstock.dispatcher.database.pool import query
from penstock.dispatcher.tasks.completion import TRIES_MAX
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    NewTask,
    PublishOutcome,
    Refusal,
    TaskRefusalReason,
)
from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.runtimes.base import Facts
from tests.integration.dispatcher.test_races import second_after_first
from tests.integration.dispatcher.world import Job, Play, World, done, failed

Rows = dict[str, tuple[int, int, str]]
"""By key: the version, the task and the value."""


def merged(held: Mapping[str, tuple[int, int, str]], new: Rows) -> Rows:
    return {
        key: max(each for each in (held.get(key), new.get(key)) if each is not None)
        for key in {*held, *new}
    }


@dataclass
class Bucket:
    """What attempts have written, and who has merged with what."""

    world: World
    job: Job
    files: dict[str, Rows] = field(default_factory=dict)

    async def claimed(self, name: str, partition: str = "p") -> ClaimedTask:
        new = NewTask(
            definition_id=self.job.definition_id,
            generation=self.job.generation,
            dedupe_key=name,
            payload={"partition_key": partition},
        )
        (task_id,) = await self.world.tasks.create([new])
        assert task_id is not None
        found = await self.world.tasks.claim(task_id, worker="w")
        assert isinstance(found, ClaimedTask)
        return found

    def completion(
        self, task: ClaimedTask, rows: Mapping[str, tuple[int, str]], current: Any = None
    ) -> Completion:
        """The rows merged with what the claim, or a refusal, says is published."""
        current = task.current if current is None else current
        parts = current.get("job", ())
        base = parts[0] if parts else {}
        own = {key: (version, task.task_id, said) for key, (version, said) in rows.items()}
        location = f"s3://b/{task.task_id}-{task.attempt}-{len(self.files)}"
        self.files[location] = merged(self.files[base["location"]] if parts else {}, own)
        output = self.job.output(
            task.payload["partition_key"], location, base_revision=base.get("revision", 0)
        )
        return Completion(task.fence, (output,))

    async def published(self, partition: str = "p") -> Rows:
        location = await self.world.value(
            "SELECT location FROM publication WHERE partition_key = %s", partition
        )
        return self.files[location]


async def bucket(world: World) -> Bucket:
    return Bucket(world, await world.job(update_mode="merge", max_attempts=100))


def moved(answer: object) -> Any:
    assert isinstance(answer, Refusal)
    assert answer.why is TaskRefusalReason.MOVED
    return answer.current


def published(answer: object) -> int | None:
    assert isinstance(answer, AttemptEnd)
    (one,) = answer.published
    assert one.outcome is PublishOutcome.PUBLISHED
    return one.revision


def test_a_late_task_loses_nothing_and_takes_nothing(play: Play) -> None:
    """The later task merges first; the earlier one has to merge again, and its rows are there."""

    async def story(world: World) -> None:
        made = await bucket(world)
        early, late = [await made.claimed(name) for name in "ab"]
        assert early.current == {}
        first = made.completion(late, {"k": (1, "late"), "l": (1, "late")})
        assert published((await world.tasks.complete([first]))[0]) == 1
        said = made.completion(early, {"k": (1, "early"), "e": (1, "early")})
        (answer,) = await world.tasks.complete([said])
        current = moved(answer)
        assert [each["revision"] for each in current["job"]] == [1]
        again = made.completion(early, {"k": (1, "early"), "e": (1, "early")}, current)
        assert published((await world.tasks.complete([again]))[0]) == 2
        # The same words again, as after an answer that was lost, change nothing.
        assert published((await world.tasks.complete([again]))[0]) == 2
        rows = {key: row[2] for key, row in (await made.published()).items()}
        assert rows == {"k": "late", "l": "late", "e": "early"}
        assert await world.value("SELECT count(*) FROM event") == 2
        # What was merged with is left, and swept when nobody reads it.
        assert await world.value("SELECT revision FROM publication") == 2

    play(story)


def test_a_publication_names_an_attempt_of_the_task_that_it_names(play: Play) -> None:
    """The later task had two attempts, and the earlier one merges last, in its first."""

    async def story(world: World) -> None:
        made = await bucket(world)
        early, lost = [await made.claimed(name) for name in "ab"]
        await world.tasks.fail(failed(lost.fence))
        world.later(60)
        late = await world.tasks.claim(lost.task_id, worker="late")
        assert isinstance(late, ClaimedTask)
        await world.tasks.complete([made.completion(late, {"k": (1, "late")})])
        (answer,) = await world.tasks.complete([made.completion(early, {})])
        (answer,) = await world.tasks.complete([made.completion(early, {}, moved(answer))])
        assert published(answer) == 2
        asked = {"dataset": made.job.dataset, "generation": made.job.generation, "key": "p"}
        async with world.database.transaction() as connection:
            found = await connection.execute(query("partition_one"), asked)
            (shown,) = await found.fetchall()
        assert (shown["task_id"], shown["attempt"], shown["worker"]) == (late.task_id, 2, "late")

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
def test_two_that_complete_at_once(play: Play, is_there: bool, is_kept: bool) -> None:
    """Also the first ones of a partition, where there is no row to lock."""

    async def story(world: World) -> None:
        made = await bucket(world)
        if is_there:
            begun = made.completion(await made.claimed("begun"), {"a": (1, "a")})
            await world.tasks.complete([begun])
        one, two = [await made.claimed(name) for name in "ab"]
        first = made.completion(one, {"b": (1, "b")})
        second = made.completion(two, {"c": (1, "c")})
        (answer,) = await second_after_first(
            world,
            lambda other: other.complete([first]),
            world.tasks.complete([second]),
            is_kept=is_kept,
        )
        if is_kept:
            again = made.completion(two, {"c": (1, "c")}, moved(answer))
            (answer,) = await world.tasks.complete([again])
        published(answer)
        expected = {"c"} | ({"a"} if is_there else set()) | ({"b"} if is_kept else set())
        assert (await made.published()).keys() == expected

    play(story)


def test_two_of_one_call_never_share_a_base(play: Play) -> None:
    async def story(world: World) -> None:
        made = await bucket(world)
        one, two, other = [
            await made.claimed(name, partition) for name, partition in ("ap", "bp", "cq")
        ]
        said = [
            made.completion(two, {"b": (1, "b")}),
            made.completion(one, {"a": (1, "a")}),
            made.completion(other, {"c": (1, "c")}),
        ]
        second, first, neighbour = await world.tasks.complete(said)
        published(first)
        published(neighbour)
        assert moved(second) is None
        (answer,) = await world.tasks.complete(said[:1])
        again = made.completion(two, {"b": (1, "b")}, moved(answer))
        published((await world.tasks.complete([again]))[0])
        assert (await made.published()).keys() == {"a", "b"}

    play(story)


def test_who_was_too_late_often_has_its_turn(play: Play) -> None:
    """Others wait, until it has published, or until its lease has run out."""

    async def story(world: World) -> None:
        made = await bucket(world)
        await world.tasks.reap()
        slow = await made.claimed("slow")
        current: Any = None
        for number in range(TRIES_MAX):
            fast = made.completion(await made.claimed(f"fast{number}"), {"f": (number, "f")})
            published((await world.tasks.complete([fast]))[0])
            said = made.completion(slow, {"s": (1, "s")}, current)
            current = moved((await world.tasks.complete([said]))[0])
        other = await made.claimed("other")
        waiting = made.completion(other, {"o": (1, "o")})
        assert moved((await world.tasks.complete([waiting]))[0]) is None
        elsewhere = made.completion(await made.claimed("elsewhere", "q"), {"q": (1, "q")})
        published((await world.tasks.complete([elsewhere]))[0])
        published(
            (await world.tasks.complete([made.completion(slow, {"s": (1, "s")}, current)]))[0]
        )
        assert await world.value("SELECT count(*) FROM merge_lease") == 0
        current = moved((await world.tasks.complete([waiting]))[0])
        published(
            (await world.tasks.complete([made.completion(other, {"o": (1, "o")}, current)]))[0]
        )
        assert (await made.published()).keys() == {"f", "s", "o"}

    play(story)


def test_a_turn_ends_with_its_attempt(play: Play) -> None:
    async def story(world: World) -> None:
        made = await bucket(world)
        await world.tasks.reap()
        dying = await made.claimed("dying")
        for number in range(TRIES_MAX):
            fast = made.completion(await made.claimed(f"fast{number}"), {"f": (number, "f")})
            published((await world.tasks.complete([fast]))[0])
            await world.tasks.complete([made.completion(dying, {}, {})])
        waiting = made.completion(await made.claimed("other"), {"o": (1, "o")})
        assert moved((await world.tasks.complete([waiting]))[0]) is None
        world.later(11)
        await world.tasks.heartbeat([waiting.fence])
        await world.tasks.reap()
        published((await world.tasks.complete([waiting]))[0])

    play(story)


def test_what_a_merge_reads_is_not_swept_under_it(play: Play) -> None:
    """However short the grace is, and whatever was published meanwhile."""

    async def story(world: World) -> None:
        made = await bucket(world)
        folder = f"datasets/job/{made.job.generation}/p/1-1-{'a' * 24}"
        begun = await made.claimed("begun")
        first = made.job.output("p", f"s3://b/{folder}", base_revision=0)
        await world.tasks.complete(done(begun.fence, first))
        made.files[f"s3://b/{folder}"] = {}
        reading, other = [await made.claimed(name) for name in "ab"]
        published((await world.tasks.complete([made.completion(other, {})]))[0])
        await world.rows("UPDATE departed SET confirmed_at = '-infinity' RETURNING place")
        place = folder.removeprefix("datasets/")
        assert await world.value("SELECT count(*) FROM departed WHERE place = %s", place) == 1
        is_read = "SELECT penstock_is_read(%s, 0)"
        assert await world.value(is_read, place) is True
        current = moved((await world.tasks.complete([made.completion(reading, {})]))[0])
        published((await world.tasks.complete([made.completion(reading, {}, current)]))[0])
        assert await world.value(is_read, place) is False

    play(story)


def test_what_is_misplaced_costs_the_others_of_its_call_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        made, other = await bucket(world), await world.job("other")
        task, neighbour = await made.claimed("a"), await other.claimed("b")
        said = Completion(task.fence, (other.output(base_revision=0),))
        answers = await world.tasks.complete([said, *done(neighbour.fence, other.output())])
        assert isinstance(answers[0], Refusal)
        assert answers[0].why is TaskRefusalReason.OUTPUTS
        assert published(answers[1]) == 1

    play(story)


@pytest.mark.parametrize("is_merging", [True, False])
def test_tasks_of_one_call_are_locked_in_order(play: Play, is_merging: bool) -> None:
    """Who merges, or makes a schema grow, is not locked before the others: heartbeats are by id."""

    async def story(world: World) -> None:
        made, plain = await bucket(world), await world.job("plain")
        first = await plain.claimed("a")
        if is_merging:
            second = await made.claimed("b")
            said = made.completion(second, {"k": (1, "b")})
        else:
            second = await plain.claimed("b")
            facts = Facts(
                manifest="0" * 64, files=1, rows=1, bytes=1, columns=(Column("k", "string", True),)
            )
            said = Completion(second.fence, (plain.output(facts=facts),))
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            await other.heartbeat([first.fence])
            ending = group.create_task(world.tasks.end([*done(first.fence), said]))
            await world.until_waiting()
            free = "SELECT id FROM task WHERE id = %s FOR NO KEY UPDATE SKIP LOCKED"
            assert await world.value(free, second.task_id) == second.task_id
        assert all(isinstance(each, AttemptEnd) for each in ending.result())

    play(story)


def test_what_was_not_merged_is_refused(play: Play) -> None:
    """As by a worker of an earlier release, which would put its rows in the place of all others."""

    async def story(world: World) -> None:
        made = await bucket(world)
        task = await made.claimed("a")
        (answer,) = await world.tasks.complete(done(task.fence, made.job.output("p")))
        assert isinstance(answer, Refusal)
        assert answer.why is TaskRefusalReason.OUTPUTS
        assert "merge" in answer.detail
        assert await world.value("SELECT count(*) FROM publication") == 0

    play(story)


@dataclass
class Story:
    """Attempts that claim, die, merge again and complete in any order, several in a call."""

    made: Bucket
    chance: Entropy
    results: dict[str, dict[str, tuple[int, str]]]
    tasks: dict[str, ClaimedTask] = field(default_factory=dict)
    bases: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> dict[str, Rows]:
        found: dict[str, Rows] = {}
        for name, task in self.tasks.items():
            own = {key: (row[0], task.task_id, row[1]) for key, row in self.results[name].items()}
            partition = task.payload["partition_key"]
            found[partition] = merged(found.get(partition, {}), own)
        return found

    async def die(self, name: str) -> None:
        """Its worker is gone: another attempt begins, with what is there then."""
        world, task_id = self.made.world, self.tasks[name].task_id
        expire = "UPDATE task SET lease_expires_at = penstock_now() WHERE id = %s RETURNING id"
        await world.rows(expire, task_id)
        await world.tasks.reap()
        await world.rows("UPDATE task SET due_at = penstock_now() RETURNING id")
        again = await world.tasks.claim(task_id, worker="w")
        assert isinstance(again, ClaimedTask)
        self.tasks[name] = again
        self.bases.pop(name, None)

    async def complete(self, names: Sequence[str]) -> set[str]:
        """Those of these that have ended."""
        said = [
            self.made.completion(self.tasks[each], self.results[each], self.bases.get(each))
            for each in names
        ]
        answers = await self.made.world.tasks.complete(said)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, Refusal) and (current := moved(answer)) is not None:
                self.bases[name] = current
        ended = zip(names, answers, strict=True)
        return {name for name, answer in ended if isinstance(answer, AttemptEnd)}


@pytest.mark.parametrize("seed", range(5))
def test_every_order_of_merges_gives_the_same_rows(play: Play, seed: int) -> None:
    async def story(world: World) -> None:
        chance = seeded_entropy(seed)
        await world.tasks.reap()
        results = {
            f"t{number}": {chance.choice("abcd"): (chance.randrange(3), f"{number}") for _ in "123"}
            for number in range(8)
        }
        tale = Story(await bucket(world), chance, results)
        for name in results:
            tale.tasks[name] = await tale.made.claimed(name, chance.choice("pq"))
        expected, left = tale.expected(), set(results)
        for _ in range(500):
            some = sorted(left, key=lambda _: chance.random())[: chance.randrange(1, 4)]
            if some and chance.random() < 0.1:
                await tale.die(some[0])
            elif some:
                left -= await tale.complete(some)
        assert not left
        for partition, rows in expected.items():
            assert await tale.made.published(partition) == rows

    play(story)
