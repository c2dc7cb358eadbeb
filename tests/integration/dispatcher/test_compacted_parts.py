"""Parts that are put together in place, on a real Postgres: no consumer loses or doubles rows.

`clean` appends a part of one small file for each event; `tally` reads what has changed in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.dispatcher.datasets import maintainer
from penstock.dispatcher.datasets.maintainer import Maintainer
from penstock.dispatcher.deployment_plan import CutOverOutcome, PartsKept, PartsNotKept
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    Failure,
    PublishOutcome,
    Refusal,
    TaskOutput,
    TaskRefusalReason,
)
from penstock.kernel.entropy import seeded_entropy
from penstock.runtimes.base import Facts
from tests.integration.dispatcher.test_append_rebuilds import Log, texts
from tests.integration.dispatcher.test_keeping import keep_all
from tests.integration.dispatcher.test_maintenance import ROWS, Site, dag, outcome
from tests.integration.dispatcher.test_races import second_after_first
from tests.integration.dispatcher.world import Play, World

COMPACT = "compact: {files: 3, below: 10KiB}"
APPEND = "update: append\n    "


@dataclass
class Parts(Site):
    """A dataset that is appended to, and which parts are in which folder."""

    parts: dict[str, list[str]] = field(default_factory=dict)
    """By location, the parts that are there: each part was once a location."""

    async def append(self, count: int = 1, key: str = "p") -> None:
        for _ in range(count):
            completion = await self.completion(await self.begun(key), files=1)
            (answer,) = await self.tasks.complete([completion])
            assert isinstance(answer, AttemptEnd)
            location = completion.outputs[0].location
            self.parts[location] = [location]
        await self.work("a:report")

    async def rewritten(self, claimed: ClaimedTask) -> AttemptEnd | Refusal:
        """The end of a task that has put its parts together."""
        given = _parts(claimed)
        rows = sum(each["rows"] for each in given)
        completion = await self.completion(claimed, files=1, rows=rows, manifest="b")
        location = completion.outputs[0].location
        self.parts[location] = self.resolved(given)
        (answer,) = await self.tasks.complete([completion])
        return answer

    def resolved(self, given: Sequence[Any]) -> list[str]:
        return [one for each in given for one in self.parts[each["location"]]]

    async def compact(self) -> bool:
        """A pass, and its task; whether there was one."""
        await self.passed()
        found = await self.tasks.claim_next("a:clean", worker="w")
        for each in found:
            assert outcome(await self.rewritten(each)) is PublishOutcome.REWRITTEN
        return bool(found)

    async def reading(self) -> ClaimedTask:
        """A task of the job that reads changes, which has just begun."""
        tick = await self.job("tick")
        self.count += 1
        place = {"dataset": tick.outputs["ticks"], "generation": tick.generation}
        await self.routing.accept([await self.event(f"t{self.count}", cursor=self.count, **place)])
        await self.route()
        return await self.claim("a:tally")

    async def read(self, claimed: ClaimedTask) -> list[str]:
        """The parts that it was given, which are consumed."""
        output = TaskOutput(dataset=claimed.definition["datasets"]["totals"], location="s3://b/t")
        (found,) = await self.tasks.complete([Completion(claimed.fence, (output,))])
        assert isinstance(found, AttemptEnd)
        return self.resolved(claimed.inputs["tidy"]["parts"])

    async def there(self, key: str = "p") -> list[dict[str, Any]]:
        return await self.world.rows(
            "SELECT part.* FROM part JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = 'tidy' AND partition_key = %s ORDER BY revision",
            key,
        )

    async def spans(self, key: str = "p") -> list[tuple[int, int]]:
        return [(each["first_revision"], each["revision"]) for each in await self.there(key)]


def _parts(claimed: ClaimedTask) -> Sequence[Any]:
    assert claimed.current is not None
    return claimed.current["tidy"]


async def parts(world: World, *, keep: str = "", compact: str = COMPACT) -> Parts:
    found = Parts(world)
    await found.apply(dag(compact, clean=APPEND, keep=keep))
    return found


def test_parts_become_one_and_nobody_hears_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(3)
        assert len(await it.read(await it.reading())) == 3
        await it.library.carry()
        old, before = await it.there(), await it.publication()
        claimed = await it.rewriting()
        assert claimed.definition["operator"] == "maintain"
        assert [each["location"] for each in _parts(claimed)] == [one["location"] for one in old]
        # What is appended meanwhile is not in it, and stays.
        await it.append()
        late, news = (await it.there())[-1], await it.news()
        assert outcome(await it.rewritten(claimed)) is PublishOutcome.REWRITTEN
        run, last = await it.there()
        assert (run["first_revision"], run["revision"], run["rows"]) == (1, 3, 3 * ROWS)
        assert last == late
        after = await it.publication()
        assert (after["rows"], after["files"], after["revision"]) == (4 * ROWS, 2, 4)
        assert after["location"] == late["location"] != before["location"]
        assert await it.news() == news
        # The consumer is given what is new to it; one that begins, all of it, in two parts.
        assert await it.read(await it.reading()) == [late["location"]]
        everything = [each["location"] for each in (*old, late)]
        await world.rows("DELETE FROM consumed")
        again = await it.reading()
        assert len(again.inputs["tidy"]["parts"]) == 2
        assert await it.read(again) == everything
        # And so are readers of partitions, and those of the bucket, who let go of the old files.
        await it.library.carry()
        it.library.later(2000)
        await it.library.forget()
        await it.library.sweeping(grace_seconds=100).sweep()
        here = await it.library.has([*everything, run["location"]])
        assert here == [False, False, False, True, True]
        key = f"datasets/tidy/{after['generation']}/p/current.json"
        body = it.library.bucket.objects[key].body
        assert [each["location"].encode() in body for each in (*old, run, late)] == [
            *[False] * 3,
            *[True] * 2,
        ]

    play(story)


def test_what_was_appended_is_known_by_its_task(play: Play) -> None:
    """What it is known by stays: nothing is appended twice because its files are elsewhere."""

    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(2)
        claimed = await it.begun()
        completion = await it.completion(claimed, files=1)
        (first,) = await it.tasks.complete([completion])
        it.parts[completion.outputs[0].location] = [completion.outputs[0].location]
        assert await it.compact()
        assert (await it.tasks.complete([completion])) == (first,)
        assert await world.value("SELECT count(*) FROM appended WHERE compacted_by IS NULL") == 0
        assert (await it.publication())["rows"] == 3 * ROWS

    play(story)


def test_no_run_reaches_over_a_consumer(play: Play) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(3)
        first = await it.read(await it.reading())
        await it.append(2)
        running = await it.reading()
        await it.append(4)
        # Consumed are three; a task has the next two, and may complete or not.
        while await it.compact():
            pass
        assert await it.spans() == [(1, 3), (4, 4), (5, 5), (6, 9)]
        second = await it.read(running)
        third = await it.read(await it.reading())
        assert [len(first), len(second), len(third)] == [3, 2, 4]
        assert len({*first, *second, *third}) == 9
        # It has gone on, and nothing is between them any more.
        await it.append(3)
        assert len(await it.read(await it.reading())) == 3
        while await it.compact():
            pass
        assert await it.spans() == [(1, 12)]

    play(story)


def test_a_run_is_chosen_when_no_claim_is_under_way(play: Play) -> None:
    """A claim that is not committed has found revisions that nobody sees yet."""

    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(2)
        tick = await it.job("tick")
        place = {"dataset": tick.outputs["ticks"], "generation": tick.generation}
        await it.routing.accept([await it.event("t", cursor=1, **place)])
        await it.route()
        found: list[ClaimedTask] = []
        async with asyncio.TaskGroup() as group, world.unfinished() as other:
            found += await other.claim_next("a:tally", worker="w")
            await it.append(2)
            it.library.later(601)
            waiting = group.create_task(Maintainer(world.database).turn())
            await world.until_waiting()
        await waiting
        (reading,) = found
        # Two, and the two that came after it: neither is worth it.
        assert await it.tasks.claim_next("a:clean", worker="w") == ()
        assert len(await it.read(reading)) == 2
        assert len(await it.read(await it.reading())) == 2

    play(story)


def test_a_consumer_that_is_between_parts_after_all_keeps_them_apart(play: Play) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(3)
        assert len(await it.read(await it.reading())) == 3
        claimed = await it.rewriting()
        # As a dispatcher of an earlier release might have it, which waits for nobody.
        await world.rows("UPDATE consumed SET revision = 2")
        assert outcome(await it.rewritten(claimed)) is PublishOutcome.SUPERSEDED
        assert await it.spans() == [(1, 1), (2, 2), (3, 3)]

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_that_put_the_same_parts_together(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(3)
        small = await it.rewriting()
        await it.append(3)
        asked = await Maintainer(world.database).ask("tidy", partition_key="p")
        assert asked is not None
        assert len(asked.tasks) == 1
        large = await it.claim()
        assert [len(_parts(each)) for each in (small, large)] == [3, 6]
        said = await it.completion(large, files=1, rows=6 * ROWS)
        (answer,) = await second_after_first(
            world,
            lambda other: other.complete([said]),
            it.tasks.complete([await it.completion(small, files=1, rows=3 * ROWS)]),
            is_kept=is_kept,
        )
        assert outcome(answer) is (
            PublishOutcome.SUPERSEDED if is_kept else PublishOutcome.REWRITTEN
        )
        spans = [(1, 6)] if is_kept else [(1, 3), (4, 4), (5, 5), (6, 6)]
        assert await it.spans() == spans
        assert (await it.publication())["rows"] == 6 * ROWS

    play(story)


def test_who_dies_between_writing_and_publishing_has_done_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(3)
        before = await it.there()
        dead = await it.rewriting()
        # The files are written, and the lease is over.
        late = await it.completion(dead, files=1, rows=3 * ROWS)
        for _ in range(30):
            it.library.later(10)
            await it.tasks.reap()
        (answer,) = await it.tasks.complete([late])
        assert isinstance(answer, Refusal)
        assert answer.why is TaskRefusalReason.STALE
        assert await it.there() == before
        again = await it.claim()
        assert (again.task_id, again.attempt) == (dead.task_id, 2)
        assert outcome(await it.rewritten(again)) is PublishOutcome.REWRITTEN
        await it.library.carry()
        it.library.later(2000)
        await it.library.forget()
        await it.library.sweeping(grace_seconds=100).sweep()
        (run,) = await it.there()
        locations = [late.outputs[0].location, run["location"]]
        assert await it.library.has(locations) == [False, True]

    play(story)


def test_other_rows_are_refused_and_a_dead_run_is_tried_again_when_it_has_grown(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        await it.append(3)
        claimed = await it.rewriting()
        answer = await it.end(claimed, files=1, rows=3 * ROWS - 1)
        assert isinstance(answer, Refusal)
        assert answer.why is TaskRefusalReason.OUTPUTS
        await it.tasks.fail([Failure(claimed.fence, "It cannot be read.", is_retried=False)])
        assert not await it.compact()
        await it.append()
        assert await it.compact()
        assert await it.spans() == [(1, 4)]

    play(story)


def test_what_was_put_together_is_taken_in_until_it_is_large(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        it = await parts(world)
        for _ in range(2):
            await it.append(3)
            assert await it.compact()
        assert await it.spans() == [(1, 6)]
        # Of the size that a file is to have: it stays as it is.
        await world.rows("UPDATE compacted SET bytes = 10240")
        await it.append(3)
        assert await it.compact()
        assert await it.spans() == [(1, 6), (7, 9)]
        # New files are what makes it worth it, and what came lately does not count.
        await it.append(2)
        assert not await it.compact()
        await it.append()
        await Maintainer(world.database).turn()
        assert await it.tasks.claim_next("a:clean", worker="w") == ()
        monkeypatch.setattr(maintainer, "RUN_PARTS_MAX", 4)
        await it.append(2)
        assert await it.compact()
        assert await it.spans() == [(1, 6), (7, 12), (13, 13), (14, 14)]
        # Nor does a part of which nothing is known.
        await world.rows("UPDATE appended SET rows = NULL WHERE revision = 14")
        await it.append(4)
        assert await it.compact()
        assert await it.spans() == [(1, 6), (7, 12), (13, 13), (14, 14), (15, 18)]

    play(story)


def test_what_is_removed_takes_all_along(play: Play) -> None:
    async def story(world: World) -> None:
        it = await parts(world, keep=", keep: {partitions: 1}")
        await it.append(3)
        assert await it.compact()
        (run,) = await it.there()
        await it.append(1, "q")
        await keep_all(world)
        assert await it.there() == []
        await it.library.carry()
        it.library.later(2000)
        await it.library.forget()
        await it.library.sweeping(grace_seconds=100).sweep()
        assert await it.library.has([run["location"]]) == [False]

    play(story)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_each_part_is_consumed_once(play: Play, seed: int) -> None:
    """Appends, consumers that die or not, and runs that are put together, in any order."""

    async def story(world: World) -> None:
        chance = seeded_entropy(seed)
        it = await parts(world)
        consumed: list[str] = []
        reading: ClaimedTask | None = None
        rewriting: ClaimedTask | None = None
        for _ in range(60):
            match chance.choice("aaarcccm"):
                case "a":
                    await it.append(chance.randrange(1, 3))
                case "r" if reading is None:
                    reading = await it.reading()
                case "c" if reading is not None:
                    if chance.random() < 0.3:
                        await it.tasks.fail([Failure(reading.fence, "It died.")])
                        it.library.later(3600)
                        reading = await it.claim("a:tally")
                    else:
                        consumed += await it.read(reading)
                        reading = None
                case "m" if rewriting is None:
                    await it.passed()
                    rewriting = next(iter(await it.tasks.claim_next("a:clean", worker="w")), None)
                case "m" if rewriting is not None:
                    assert outcome(await it.rewritten(rewriting)) is PublishOutcome.REWRITTEN
                    rewriting = None
                case _:
                    pass
        if reading is not None:
            consumed += await it.read(reading)
        consumed += await it.read(await it.reading())
        published = it.resolved(await it.there())
        assert sorted(consumed) == sorted(published) == sorted(set(published))
        assert await world.value("SELECT count(*) FROM appended WHERE compacted_by > 0") > 0

    play(story)


def test_a_run_is_kept_whole_by_a_rebuild_or_not_at_all(play: Play) -> None:
    async def story(world: World) -> None:
        it = Log(world)
        rule = "{name: entries, maintain: {compact: {files: 2, below: 1KiB}}}"
        text = texts().replace("outputs: [entries]", f"outputs: [{rule}]")
        await it.apply(text)
        await it.bring("p", *range(3))
        await it.labour()
        await _put_together(it)
        await it.bring("p", 3)
        await it.labour()
        assert await _served(world) == ["3", "run"]
        await it.retain()
        entries = await it.dataset("entries")
        await it.apply(text.replace("v: 1", "v: 2", 1))
        await it.build()
        assert await it.deployment.keep(entries) == PartsKept(3)
        await it.build()
        assert await it.states("entries") == ["current", "retired"]
        assert await _served(world) == ["3", "run"]
        head = "SELECT files, rows FROM publication WHERE dataset_id = %s AND location LIKE '%%3'"
        assert [tuple(each.values()) for each in await world.rows(head, entries)] == [(2, 4)] * 2
        # One of its parts was made anew: the others cannot be had without it.
        await it.apply(text.replace("v: 1", "v: 3", 1))
        await it.build()
        await world.rows(
            "INSERT INTO appended (dataset_id, generation, partition_key, append_key, task_id,"
            " attempt, location) SELECT old.dataset_id, next.version, 'p', old.append_key, 9, 1,"
            " 's3://b/x' FROM appended AS old JOIN generation AS next USING (dataset_id)"
            " WHERE next.state = 'building' AND old.compacted_by > 0 LIMIT 1"
        )
        assert await it.deployment.keep(entries) == PartsNotKept(CutOverOutcome.COMPACTED)

    play(story)


async def _put_together(it: Log) -> None:
    asked = await Maintainer(it.world.database).ask("entries", partition_key=None)
    assert asked is not None
    (task_id,) = asked.tasks
    claimed = await it.tasks.claim(task_id, worker="w")
    assert isinstance(claimed, ClaimedTask)
    assert claimed.current is not None
    given = claimed.current["entries"]
    output = TaskOutput(
        dataset=claimed.definition["datasets"]["entries"],
        location="s3://b/run",
        partition_key="p",
        base_revision=given[0]["revision"],
        facts=Facts(files=1, rows=len(given), bytes=9, columns=(), manifest="1" * 64),
    )
    (answer,) = await it.tasks.complete([Completion(claimed.fence, (output,))])
    assert outcome(answer) is PublishOutcome.REWRITTEN


async def _served(world: World) -> list[str]:
    rows = await world.rows(
        "SELECT location FROM part JOIN generation"
        " ON (generation.dataset_id, version) = (part.dataset_id, generation)"
        " WHERE state = 'current' ORDER BY 1"
    )
    return [row["location"].removeprefix("s3://b/") for row in rows]
