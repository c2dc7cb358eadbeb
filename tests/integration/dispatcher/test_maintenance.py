"""Files that are rewritten in place, on a real Postgres: nobody hears of it, and all real news win.

`clean` makes `tidy`, whose partitions have fifty small files each. `report` reads its partitions,
and `tally` what has changed in them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from penstock.datasets.layout import attempt_name, attempt_prefix
from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.capabilities.tokens import grants_of
from penstock.dispatcher.datasets.maintainer import PASS_SECONDS, Maintainer
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    ClaimedTask,
    Completion,
    PublishOutcome,
    Refusal,
    TaskOutput,
    TaskRefusalReason,
)
from penstock.protocol.base import TaskStatus
from penstock.runtimes.base import Facts
from penstock.tokens.scopes import Root
from tests.integration.dispatcher.readers import ROOT, Library, columns
from tests.integration.dispatcher.test_deployment import Pipeline
from tests.integration.dispatcher.test_keeping import keep_all
from tests.integration.dispatcher.test_races import second_after_first
from tests.integration.dispatcher.world import Play, World, failed

COMPACT = "compact: {files: 10, below: 1KiB}"
MERGE = "update: merge\n    unique_key: [n]\n    "
ROWS = 100


def dag(maintain: str = COMPACT, *, clean: str = "", v: int = 1, keep: str = "") -> str:
    said = f", maintain: {{{maintain}}}" if maintain else ""
    return f"""
jobs:
  feed: {{activation: source, source: {{kind: manual}}, outputs: [raw]}}
  tick: {{activation: source, source: {{kind: manual}}, outputs: [ticks]}}
  clean:
    {clean}runtime: process
    operator: a:clean
    config: {{v: {v}, sort_by: [n], target_file_bytes: 64KiB}}
    retry: {{first: 0s}}
    secrets: {{key: "env:KEY"}}
    inputs: [raw]
    outputs: [{{name: tidy{said}{keep}}}]
  report: {{runtime: process, operator: a:report, inputs: [tidy], outputs: [daily]}}
  tally:
    runtime: process
    operator: a:tally
    inputs: [ticks, {{from: tidy, read: changes, trigger: false}}]
    outputs: [totals]
"""


def facts(*, files: int = 50, rows: int = ROWS, manifest: str = "a") -> Facts:
    size = 5000 + files
    return Facts(manifest=manifest * 64, files=files, rows=rows, bytes=size, columns=columns("n"))


@dataclass
class Site(Pipeline):
    """A pipeline with a bucket, and what attempts have written there."""

    library: Library = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.library = Library(self.world)

    async def claim(self, operator: str = "a:clean") -> ClaimedTask:
        (found,) = await self.tasks.claim_next(operator, worker="w")
        return found

    async def begun(self, key: str = "p") -> ClaimedTask:
        """A task that makes a partition, and has just begun."""
        self.count += 1
        await self.routing.accept([await self.event(f"e{self.count}", partition_key=key)])
        await self.route()
        return await self.claim()

    async def completion(
        self, claimed: ClaimedTask, *, base: int | None = None, **about: Any
    ) -> Completion:
        key = claimed.payload["partition_key"]
        name = attempt_name(
            task_id=claimed.task_id, attempt=claimed.attempt, lease_token=claimed.lease_token
        )
        prefix = attempt_prefix(
            "tidy", generation=claimed.generation, partition_key=key, attempt=name
        )
        await self.library.store.put(f"{prefix}/part-0.parquet", b"rows")
        if claimed.current is not None and base is None:
            parts = claimed.current.get("tidy", ())
            base = parts[0]["revision"] if parts else 0
        output = TaskOutput(
            dataset=claimed.definition["datasets"]["tidy"],
            location=f"{ROOT}/{prefix}",
            partition_key=key,
            base_revision=base,
            facts=facts(**about),
        )
        return Completion(claimed.fence, (output,))

    async def end(self, claimed: ClaimedTask, **about: Any) -> AttemptEnd | Refusal:
        (found,) = await self.tasks.complete([await self.completion(claimed, **about)])
        return found

    async def publish(self, *keys: str) -> None:
        for key in keys:
            assert isinstance(await self.end(await self.begun(key)), AttemptEnd)
        for operator in ("a:report",):
            await self.work(operator)

    async def passed(self) -> None:
        """A pass of a dispatcher, after what was published has been quiet for a while."""
        self.library.later(601)
        await Maintainer(self.world.database).turn()
        self.library.later(PASS_SECONDS)

    async def rewriting(self) -> ClaimedTask:
        """A task that rewrites, and has just begun."""
        await self.passed()
        return await self.claim()

    async def publication(self, key: str = "p") -> dict[str, Any]:
        (row,) = await self.world.rows(
            "SELECT publication.* FROM publication JOIN dataset ON dataset.id = dataset_id"
            " WHERE name = 'tidy' AND partition_key = %s",
            key,
        )
        return row

    async def news(self) -> tuple[int, int]:
        """How many events there are, and how many tasks that are of jobs."""
        events = await self.world.value("SELECT count(*) FROM event")
        tasks = await self.world.value("SELECT count(*) FROM task WHERE NOT payload ? 'maintain'")
        return events, tasks

    async def changes(self) -> list[str]:
        """What the job that reads changes is given, and consumes."""
        tick = await self.job("tick")
        self.count += 1
        place = {"dataset": tick.outputs["ticks"], "generation": tick.generation}
        await self.routing.accept([await self.event(f"t{self.count}", cursor=self.count, **place)])
        await self.route()
        claimed = await self.claim("a:tally")
        output = TaskOutput(dataset=claimed.definition["datasets"]["totals"], location="s3://b/t")
        (found,) = await self.tasks.complete([Completion(claimed.fence, (output,))])
        assert isinstance(found, AttemptEnd)
        return [each["partition_key"] for each in claimed.inputs["tidy"]["parts"]]


async def site(world: World, text: str = "") -> Site:
    found = Site(world)
    await found.apply(text or dag())
    return found


def outcome(answer: object) -> PublishOutcome:
    assert isinstance(answer, AttemptEnd)
    assert answer.status is TaskStatus.SUCCEEDED
    (one,) = answer.published
    assert one.event_seq is None
    return one.outcome


CHANGED = {"location", "place", "manifest", "files", "bytes", "rewrites", "rewritten", "edition"}


def test_rows_stay_and_nobody_hears_of_it(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p", "q")
        assert await it.changes() == ["p", "q"]
        await it.library.carry()
        before, news = await it.publication(), await it.news()
        claimed = await it.rewriting()
        assert claimed.definition["operator"] == "maintain"
        assert claimed.definition["config"] == {"sort_by": ["n"], "target_file_bytes": "64KiB"}
        assert "secrets" not in claimed.definition
        assert (claimed.inputs, claimed.payload) == ({}, {"partition_key": "p"})
        assert claimed.current is not None
        (part,) = claimed.current["tidy"]
        assert (part["location"], part["revision"]) == (before["location"], 1)
        # It may read what is published of its partition, and write where other attempts do.
        grants = grants_of(claimed, Root.parse(ROOT))
        assert any(before["location"].startswith(each) for each in grants.read[0].prefixes)
        completion = await it.completion(claimed, files=1, manifest="b")
        (answer,) = await it.tasks.complete([completion])
        assert outcome(answer) is PublishOutcome.REWRITTEN
        assert f"{completion.outputs[0].location}/" == grants.write[0].prefix
        # The same words again, as after an answer that was lost, change nothing.
        assert (await it.tasks.complete([completion]))[0] == answer
        after = await it.publication()
        assert {name for name in after if after[name] != before[name]} == CHANGED
        assert (after["files"], after["rows"], after["revision"]) == (1, ROWS, 1)
        assert await it.news() == news
        assert await it.route() == 0
        assert await it.changes() == []
        # Who is claimed from now on reads the new files.
        await it.publish("q")
        assert (await it.publication("q"))["revision"] == 2

    play(story)


def test_readers_of_the_bucket_follow_and_the_old_files_go_when_nobody_reads_them(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        library = it.library
        assert isinstance(await it.end(await it.begun()), AttemptEnd)
        await library.carry()
        old = (await it.publication())["location"]
        reading = await it.claim("a:report")
        assert reading.inputs["tidy"]["location"] == old
        assert outcome(await it.end(await it.rewriting(), files=1)) is PublishOutcome.REWRITTEN
        new = (await it.publication())["location"]
        sweeping = library.sweeping(grace_seconds=100)

        async def there() -> list[bool]:
            return await library.has([old, new])

        library.later(1000)
        await library.forget()
        await sweeping.sweep()
        # Readers of the bucket are still sent there.
        assert await there() == [True, True]
        await library.carry()
        key = f"datasets/tidy/{reading.inputs['tidy']['generation']}/p/current.json"
        assert new.encode() in library.bucket.objects[key].body
        assert (await it.publication())["projected"] == 2
        library.later(1000)
        await library.forget()
        await sweeping.sweep()
        # A task runs that was given them.
        assert await there() == [True, True]
        await it.finish(reading)
        await library.forget()
        await sweeping.sweep()
        assert await there() == [False, True]

    play(story)


def test_a_relay_that_is_late_does_not_free_the_old_files(play: Play) -> None:
    """What was read before the rewriting, and is written after it, says nothing of it."""

    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p")
        assert outcome(await it.end(await it.rewriting(), files=1)) is PublishOutcome.REWRITTEN
        await world.rows(
            "UPDATE publication SET projected = 1 WHERE partition_key = 'p' AND rewrites = 1"
        )
        left = await world.rows("SELECT revision, confirmed_at FROM departed")
        assert [(each["revision"], each["confirmed_at"]) for each in left] == [(2, None)]
        await it.library.carry()
        assert await world.value("SELECT confirmed_at IS NOT NULL FROM departed")

    play(story)


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_published_meanwhile_wins(play: Play, is_kept: bool) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p")
        rewriting, newer = await it.rewriting(), await it.begun()
        said = await it.completion(newer, manifest="c")
        (answer,) = await second_after_first(
            world,
            lambda other: other.complete([said]),
            it.tasks.complete([await it.completion(rewriting, files=1)]),
            is_kept=is_kept,
        )
        assert outcome(answer) is (
            PublishOutcome.SUPERSEDED if is_kept else PublishOutcome.REWRITTEN
        )
        if is_kept:
            row = await it.publication()
            assert (row["revision"], row["files"], row["rewrites"]) == (2, 50, 0)
            # Its files are nobody's.
            await it.work("a:report")
            await it.library.carry()
            it.library.later(2000)
            await it.library.forget()
            swept = await it.library.sweeping(grace_seconds=100).sweep()
            assert swept.files == 2

    play(story)


def test_what_is_being_rewritten_is_not_swept(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p")
        await it.library.carry()
        rewriting = await it.rewriting()
        old = (await it.publication())["location"]
        await it.publish("p")
        await it.library.carry()
        it.library.later(2000)
        sweeping = it.library.sweeping(grace_seconds=100)
        await it.library.forget()
        await sweeping.sweep()
        assert await it.library.has([old]) == [True]
        assert outcome(await it.end(rewriting, files=1)) is PublishOutcome.SUPERSEDED
        await it.library.forget()
        await sweeping.sweep()
        assert await it.library.has([old]) == [False]

    play(story)


def test_what_is_rewritten_first_is_replaced_by_what_comes(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p")
        rewriting, newer = await it.rewriting(), await it.begun()
        said = await it.completion(rewriting, files=1)
        (answer,) = await second_after_first(
            world,
            lambda other: other.complete([said]),
            it.tasks.complete([await it.completion(newer)]),
        )
        assert isinstance(answer, AttemptEnd)
        assert [each.outcome for each in answer.published] == [PublishOutcome.PUBLISHED]
        row = await it.publication()
        assert (row["revision"], row["files"], row["rewrites"], row["edition"]) == (2, 50, 1, 3)
        # Both folders that were left are told of by what readers have to know for it.
        left = await world.rows("SELECT revision FROM departed ORDER BY 1")
        assert [each["revision"] for each in left] == [2, 3]
        # And it is due again.
        again = await it.rewriting()
        assert outcome(await it.end(again, files=1)) is PublishOutcome.REWRITTEN

    play(story)


def test_merges_that_have_read_the_old_files_are_published(play: Play) -> None:
    """They are the same rows, so nobody merges again; and who has merged wins over who rewrites."""

    async def story(world: World) -> None:
        it = await site(world, dag(clean=MERGE))
        await it.publish("p")
        merging = await it.begun()
        assert outcome(await it.end(await it.rewriting(), files=1)) is PublishOutcome.REWRITTEN
        answer = await it.end(merging, rows=120)
        assert isinstance(answer, AttemptEnd)
        assert [each.revision for each in answer.published] == [2]
        rewriting, merging = await it.rewriting(), await it.begun()
        assert isinstance(await it.end(merging, rows=130), AttemptEnd)
        assert outcome(await it.end(rewriting, rows=120, files=1)) is PublishOutcome.SUPERSEDED
        assert (await it.publication())["rows"] == 130
        # Tasks that merged are judged by what is named of them, of which there is no more.
        assert await world.value("SELECT count(*) FROM appended") == 3

    play(story)


def test_other_rows_are_refused(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p", "q")
        claimed = await it.rewriting()
        answer = await it.end(claimed, rows=ROWS - 1)
        assert isinstance(answer, Refusal)
        assert answer.why is TaskRefusalReason.OUTPUTS
        assert "have 99 rows, and what is published has 100" in answer.detail
        # Nor may it write what it was not asked for.
        said = await it.completion(claimed)
        (output,) = said.outputs
        other = TaskOutput(dataset=output.dataset, location=output.location, partition_key="q")
        for outputs in [(other,), (output, other)]:
            (answer,) = await it.tasks.complete([Completion(claimed.fence, outputs)])
            assert isinstance(answer, Refusal)
            assert "not what was made of it" in answer.detail
        assert (await it.publication())["rewrites"] == 0
        assert outcome(await it.end(claimed, files=1)) is PublishOutcome.REWRITTEN

    play(story)


def test_the_schema_lets_nothing_else_change(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p")
        for fields in (
            "rewrites = 1, rewritten = 1, rows = 7",
            "rewrites = 1, rewritten = 1, task_id = task_id + 1",
            "rewrites = 1, rewritten = 1, published_at = penstock_now() + interval '1 day'",
            "rewrites = 2, rewritten = 1, location = 'x'",
            "rewrites = 1, rewritten = 2, location = 'x'",
            "rewrites = 1, revision = 2, task_id = task_id + 1",
            "location = 'x'",
        ):
            with pytest.raises(psycopg.errors.CheckViolation):
                await world.rows(f"UPDATE publication SET {fields} WHERE partition_key = 'p'")

    play(story)


def test_one_at_a_time_and_each_edition_once(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p", "q")
        it.library.later(601)

        async def one() -> None:
            await Maintainer(world.database, pass_seconds=0).turn()

        # Dispatchers that make their passes at once make one task.
        await asyncio.gather(*(one() for _ in range(8)))
        assert await world.value("SELECT count(*) FROM task WHERE payload ? 'maintain'") == 1
        first = await it.claim()
        await one()
        assert outcome(await it.end(first, files=1)) is PublishOutcome.REWRITTEN
        await one()
        second = await it.claim()
        assert {first.payload["partition_key"], second.payload["partition_key"]} == {"p", "q"}
        # It dies, and is not made again for what is published now.
        for _ in range(3):
            await it.tasks.fail(failed(second.fence))
            for _ in range(2):
                await one()
            found = await it.tasks.claim_next("a:clean", worker="w")
            second = found[0] if found else second
        assert await world.value("SELECT count(*) FROM task WHERE payload ? 'maintain'") == 2
        await it.publish(second.payload["partition_key"])
        it.library.later(601)
        await one()
        assert await world.value("SELECT count(*) FROM task WHERE payload ? 'maintain'") == 3

    play(story)


def test_what_is_due_and_what_is_not(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world, dag("compact: {files: 51, below: 1KiB}, cluster: [n]"))
        await it.publish("p")
        await Maintainer(world.database).turn()
        # Something was published of it a moment ago.
        assert await it.tasks.claim_next("a:clean", worker="w") == ()
        claimed = await it.rewriting()
        assert claimed.definition["config"] == {
            "cluster_by": ["n"],
            "target_file_bytes": "64KiB",
        }
        assert outcome(await it.end(claimed, files=4)) is PublishOutcome.REWRITTEN
        await it.passed()
        # It is clustered, also if it has several files.
        assert await it.tasks.claim_next("a:clean", worker="w") == ()
        await it.apply(dag("compact: {files: 51, below: 1KiB}"))
        await it.publish("p")
        await it.passed()
        # It has fifty, or they are not so small, or nobody asks for it.
        for maintain in ("compact: {files: 50, below: 1KiB}", ""):
            await world.rows(
                "UPDATE publication SET bytes = 60000, revision = revision + 1,"
                " task_id = task_id + 1"
            )
            await it.apply(dag(maintain))
            await it.passed()
        assert await it.tasks.claim_next("a:clean", worker="w") == ()

    play(story)


def test_people_may_ask_for_it(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world, dag("compact: {files: 51, below: 1KiB}"))
        await it.publish("p", "q", "r")
        ask = Maintainer(world.database).ask
        # At once, also of files that are neither many nor small, and each once.
        one = await ask("tidy", partition_key="q")
        rest = await ask("tidy", partition_key=None)
        assert one is not None
        assert rest is not None
        assert [len(one.tasks), len(rest.tasks), rest.is_all] == [1, 2, True]
        again = await ask("tidy", partition_key=None)
        assert again is not None
        assert again.tasks == ()
        claimed = await it.claim()
        assert claimed.payload == {"partition_key": "q"}
        assert outcome(await it.end(claimed, files=2)) is PublishOutcome.REWRITTEN
        # And once more, though it has been rewritten; but not where there is one file.
        again = await ask("tidy", partition_key="q")
        assert again is not None
        assert len(again.tasks) == 1
        for _ in range(3):
            await it.end(await it.claim(), files=1)
        again = await ask("tidy", partition_key=None)
        assert again is not None
        assert again.tasks == ()
        assert await ask("daily", partition_key=None) is None
        await it.apply(dag("compact: {files: 51, below: 1KiB}", v=2))
        assert await ask("tidy", partition_key=None) is None

    play(story)


def test_not_while_another_generation_is_built(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world)
        await it.publish("p", "q")
        await it.apply(dag(v=2))
        await it.send("p")
        for each in await it.tasks.claim_next("a:clean", worker="w", limit=10):
            assert isinstance(await it.end(each), AttemptEnd)
        assert await it.states("tidy") == ["building", "current"]
        assert await world.value("SELECT count(*) FROM publication WHERE files = 50") == 3
        await it.passed()
        assert await world.value("SELECT count(*) FROM task WHERE payload ? 'maintain'") == 0
        await it.apply(dag(), force=True)
        await it.passed()
        assert await world.value("SELECT count(*) FROM task WHERE payload ? 'maintain'") == 1
        # What waits to be rewritten is no work that somebody would lose.
        await it.forget_rebuilds()
        await world.rows("DELETE FROM task WHERE NOT payload ? 'maintain'")
        await it.apply(dag().split("  tick:")[0])
        assert await world.value("SELECT status FROM task") == "cancelled"

    play(story)


def test_what_was_published_or_removed_before_it_is_claimed_is_left_alone(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world, dag(keep=", keep: {partitions: 1}"))
        await it.publish("p")
        await it.passed()
        # Others go first.
        await it.publish("p")
        claimed = await it.claim()
        assert claimed.current == {"tidy": []}
        assert claimed.payload == {"partition_key": "p"}
        (answer,) = await it.tasks.complete([Completion(claimed.fence, ())])
        assert isinstance(answer, AttemptEnd)
        # Nothing was done, so it is due again; and is dropped while that runs.
        rewriting = await it.rewriting()
        assert rewriting.current != {"tidy": []}
        await it.publish("q")
        await it.library.carry()
        await keep_all(world)
        assert outcome(await it.end(rewriting, files=1)) is PublishOutcome.SUPERSEDED

    play(story)


def test_what_comes_back_after_a_removal_is_later_than_what_readers_were_told(play: Play) -> None:
    async def story(world: World) -> None:
        it = await site(world, dag(keep=", keep: {partitions: 1}"))
        await it.publish("p")
        assert outcome(await it.end(await it.rewriting(), files=1)) is PublishOutcome.REWRITTEN
        await it.library.carry()
        await it.publish("q")
        await keep_all(world)
        await it.library.carry()
        await it.publish("p")
        await it.library.carry()
        row = await it.publication()
        assert (row["revision"], row["projected"]) == (4, 4)
        key = f"datasets/tidy/{row['generation']}/p/current.json"
        assert row["location"].encode() in it.library.bucket.objects[key].body

    play(story)


def test_it_is_in_no_batch_and_presses_nobody(play: Play) -> None:
    async def story(world: World) -> None:
        text = dag(clean="coalesce: 10\n    max_queue_depth: 1\n    ")
        it = await site(world, text.replace("a:report,", "a:report, max_queue_depth: 1,"))
        await it.publish("p")
        await it.passed()
        await it.send("x")
        await Backpressure(world.database).turn()
        assert await world.value("SELECT count(*) FROM pressure WHERE pressed") == 0
        await it.send("y")
        found = await it.tasks.claim_next("a:clean", worker="w", limit=5, in_batches=True)
        batches = {each.payload["partition_key"]: each.batch for each in found}
        assert batches["p"] == ""
        assert batches["x"] == batches["y"] != ""
        # It comes last.
        assert [*batches][-1] == "p"

    play(story)
