"""What went wrong in Trace, the dispatcher before this one: each failure is a test, over HTTP.

Trace was read in code. Here every sentence about it is tried on the real API over a real Postgres:
claims of nobody and of nothing, zombies, outputs of others, ranges that stall, retries, words that
are lost, the outbox, replays, and the parts that existed on paper only. What is about capability
tokens is tested where they are.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.carriers import WakeCarrier
from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.deployment import CutOverController
from penstock.dispatcher.outbox import Reconciler, Relay
from penstock.dispatcher.range_operators import RangeOperators
from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.protocol.base import WORKER_HEADER
from penstock.protocol.work import Assignment
from tests.integration.dispatcher.api.stage import (
    Stage,
    held,
    ok,
    output,
    perform,
    refused,
)
from tests.integration.dispatcher.api.stage import place as place_of
from tests.integration.dispatcher.carrying import LIMITS, Still, Words
from tests.integration.dispatcher.test_deployment import chain
from tests.integration.dispatcher.world import Worlds

CLEAN = WakeUpChannel("a:clean", Priority.NORMAL)
SIDE = WakeUpChannel("a:side", Priority.NORMAL)
ATTEMPTS = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean:
    runtime: process
    operator: a:clean
    inputs: [raw]
    outputs: [tidy]
    heartbeat_timeout: 10s
    max_attempts: 3
    retry: {first: 4s, max: 6s, backoff: 2}
"""
RANGES = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean: {runtime: process, operator: "a:clean", inputs: [raw], outputs: [tidy]}
  days:
    runtime: dispatcher
    operator: range_aggregate
    config: {size: 20, step: 20}
    inputs: [tidy]
    outputs: [windows]
  report: {runtime: process, operator: "a:report", inputs: [windows], outputs: [daily]}
"""
FAN_OUT = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean: {runtime: process, operator: "a:clean", inputs: [raw], outputs: [tidy]}
  side: {runtime: process, operator: "a:side", inputs: [raw], outputs: [aside]}
"""
PRESSED = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  clean: {runtime: process, operator: "a:clean", inputs: [raw], outputs: [tidy]}
  report:
    runtime: process
    operator: a:report
    inputs: [tidy]
    outputs: [daily]
    max_queue_depth: 2
    resume_queue_depth: 0
"""


async def claim_by(stage: Stage, task_id: int, headers: dict[str, str]) -> Any:
    return await stage.internal.post(
        "/internal/task-claim", json={"task_id": task_id}, headers=headers
    )


async def counts(stage: Stage, *tables: str) -> list[int]:
    return [await stage.world.value(f"SELECT count(*) FROM {table}") for table in tables]


async def partitions(stage: Stage, dataset: str) -> dict[str, tuple[str, int]]:
    """Location and revision of what readers are served, by partition."""
    found = ok(await stage.public.get(f"/v1/datasets/{dataset}/partitions"))
    return {
        each["partition_key"]: (each["location"], each["revision"]) for each in found["partitions"]
    }


async def tasks_in(stage: Stage, status: str) -> list[int]:
    found = ok(await stage.public.get("/v1/tasks", params={"status": status}))
    return sorted(each["id"] for each in found["tasks"])


async def work(stage: Stage, operator: str = "a:clean", name: str = "tidy") -> list[Assignment]:
    """Claim and complete all that an operator can do now."""
    claimed = await stage.claim(operator, limit=100)
    for each in claimed:
        ok(await stage.complete(held(each, outputs=[output(each, name)])))
    return claimed


def test_a_claim_without_an_identity_begins_nothing(worlds: Worlds) -> None:
    """Trace: claim is unauthenticated."""

    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p")
        task_id = await stage.world.value("SELECT id FROM task")
        good = stage.identity("w1")
        named = {WORKER_HEADER: "w1"}
        assert refused(await claim_by(stage, task_id, {}), 401).type == "unauthorized"
        assert refused(await claim_by(stage, task_id, named), 401).type == "unauthorized"
        for wrong in (
            {**good, "Authorization": "Bearer x"},
            # A proof is one worker's.
            {**good, WORKER_HEADER: "w2"},
        ):
            assert refused(await claim_by(stage, task_id, wrong), 403).type == "forbidden"
        assert await counts(stage, "attempt", "worker") == [0, 0]
        # People's listener does not even have it.
        public = await stage.public.post("/internal/task-claim", json={"task_id": task_id})
        refused(public, 404)
        assert ok(await claim_by(stage, task_id, good))["tasks"][0]["attempt"] == 1

    perform(worlds, story)


def test_a_claim_of_an_unknown_task_creates_nothing(worlds: Worlds) -> None:
    """Trace: a claim creates task ids that nobody has made."""

    async def story(stage: Stage) -> None:
        await stage.apply()
        for number in (1, 10**6, 2**63 - 1):
            problem = refused(await claim_by(stage, number, stage.identity()), 404)
            assert (problem.type, problem.state) == ("unknown", None)
        fence = {"task_id": 1, "attempt": 1, "lease_token": "x" * 20}
        # Also not by whoever has a token of ours for a task that nobody has made.
        proof = {**fence, "token": await stage.token(1, 1)}
        refused(await stage.complete(proof), 404)
        refused(await stage.beat(proof), 404)
        assert await counts(stage, "task", "attempt", "publication", "event") == [0, 0, 0, 0]

    perform(worlds, story)


def test_a_zombie_changes_nothing_that_was_published(worlds: Worlds, tmp_path: Path) -> None:
    """Trace: outputs are not attempt-scoped, so that a zombie can overwrite committed files."""

    def write(task: Assignment, text: str) -> str:
        """What a worker writes for an attempt, in the place that it is given for it."""
        found = place_of(task)
        folder = Path(urlsplit(found).path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.csv").write_text(text)
        return found

    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS)
        await stage.trigger("p")
        await stage.world.tasks.reap()
        (zombie,) = await stage.claim()
        its_place = write(zombie, "half of it")
        stage.world.later(10)
        await stage.world.tasks.reap()
        stage.world.later(6)
        (successor,) = await stage.claim()
        assert (successor.task_id, successor.attempt) == (zombie.task_id, 2)
        place = write(successor, "all of it")
        # They are the same work for the same partition, and share no folder.
        assert place.rpartition("/")[0] == its_place.rpartition("/")[0]
        assert place != its_place
        late = held(zombie, outputs=[output(zombie, location=its_place)])
        # It comes back while its successor is at work, and again when that has published.
        assert refused(await stage.complete(late), 409).type == "stale"
        assert await partitions(stage, "tidy") == {}
        ok(await stage.complete(held(successor, outputs=[output(successor, location=place)])))
        write(zombie, "nonsense")
        problem = refused(await stage.complete(late), 409)
        assert (problem.type, problem.state and problem.state.status) == ("over", "completed")
        assert refused(await stage.beat(held(zombie)), 409).type == "over"
        assert await partitions(stage, "tidy") == {"p": (place, 1)}
        assert (Path(urlsplit(place).path) / "rows.csv").read_text() == "all of it"
        assert await counts(stage, "publication") == [1]

    perform(worlds, story, root=tmp_path.as_uri())


@pytest.mark.parametrize("whose", ["an input", "another job", "nobody"])
def test_a_task_publishes_its_own_datasets_only(worlds: Worlds, whose: str) -> None:
    """Trace: what is published is never checked. Here a dataset is its job's, or it is refused."""

    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q")
        first, second = await stage.claim(limit=2)
        daily = await stage.world.value("SELECT id::text FROM dataset WHERE name = 'daily'")
        dataset = {
            "an input": first.definition["datasets"]["raw"],
            "another job": daily,
            "nobody": "0" * 8 + "-0000-4000-8000-" + "0" * 12,
        }[whose]
        events = await counts(stage, "event")
        # Its own output beside it does not make it better.
        foreign = held(first, outputs=[output(first), output(first, dataset=dataset)])
        answer = await stage.complete(foreign, held(second, outputs=[output(second)]))
        assert answer.status_code == 207
        bad, good = answer.json()["results"]
        assert (bad["status"], bad["why"]) == (409, "outputs")
        assert dataset in bad["detail"]
        assert (good["status"], good["task_status"]) == (200, "completed")
        assert list(await partitions(stage, "tidy")) == ["q"]
        assert await counts(stage, "publication", "event") == [1, events[0] + 1]
        # The attempt goes on, and may still say the right thing.
        ok(await stage.complete(held(first, outputs=[output(first)])))
        assert list(await partitions(stage, "tidy")) == ["p", "q"]

    perform(worlds, story)


def test_a_range_that_fails_does_not_stall_its_stream(worlds: Worlds) -> None:
    """Trace: a failed range stays "scheduled", and what comes after it waits for ever."""

    async def story(stage: Stage) -> None:
        await stage.apply(RANGES)
        aggregate = RangeOperators(stage.world.database, stage.parts.tasks, name="d").turn
        for start in range(0, 60, 10):
            asked = {"job": "feed", "partition_key": f"{start}", "start": start, "end": start + 10}
            ok(await stage.public.post("/v1/trigger", json=asked))
        await stage.route()
        for task in await stage.claim(limit=9):
            start = task.payload["start"]
            piece = output(task, start=start, end=start + 10)
            failure = {"reason": "It is broken.", "is_retried": False}
            is_broken = start == 20
            end = {"failure": failure} if is_broken else {"outputs": [piece]}
            ok(await stage.complete(held(task, **end)))
        await aggregate()
        # The second window has a hole. Those before and after it do not wait for it.
        assert list(await partitions(stage, "windows")) == ["0-20", "40-60"]
        reports = await work(stage, "a:report", "daily")
        assert sorted(each.payload["partition_key"] for each in reports) == ["0-20", "40-60"]
        (dead,) = await tasks_in(stage, "dead")
        shown = ok(await stage.public.get(f"/v1/tasks/{dead}"))
        assert shown["task"]["reason"] == "It is broken."
        ok(await stage.public.post("/v1/tasks/replay", json={"tasks": [dead]}))
        (task,) = await stage.claim()
        assert (task.task_id, task.attempt) == (dead, 2)
        ok(await stage.complete(held(task, outputs=[output(task, start=20, end=30)])))
        await aggregate()
        assert sorted(await partitions(stage, "windows")) == ["0-20", "20-40", "40-60"]
        (report,) = await work(stage, "a:report", "daily")
        assert report.payload["partition_key"] == "20-40"

    perform(worlds, story)


@pytest.mark.parametrize("how", ["it fails", "it is silent"])
def test_retries_are_paced_and_bounded(worlds: Worlds, how: str) -> None:
    """Trace: retries are immediate and have no end."""

    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS)
        await stage.trigger("p")
        await stage.world.tasks.reap()
        task_id = await stage.world.value("SELECT id FROM task")
        waits = []
        for attempt in (1, 2, 3):
            (task,) = await stage.claim(limit=9)
            assert task.attempt == attempt
            if how == "it fails":
                ok(await stage.complete(held(task, failure={"reason": "It broke."})))
            else:
                stage.world.later(10)
                await stage.world.tasks.reap()
            if attempt == 3:
                break
            problem = refused(await claim_by(stage, task_id, stage.identity()), 409)
            assert problem.type == "not due"
            assert problem.state is not None
            assert problem.state.due_at is not None
            waits.append((problem.state.due_at - await now(stage)).total_seconds())
            stage.world.later(waits[-1] - 0.001)
            assert await stage.claim() == []
            stage.world.later(0.002)
        first, second = waits
        # Twice as long as the one before, up to the longest, and a quarter more or less by luck.
        assert 3 <= first <= 5
        assert 4.5 <= second <= 6
        stage.world.later(10**6)
        assert await stage.claim() == []
        assert await tasks_in(stage, "dead") == [task_id]
        assert await counts(stage, "attempt") == [3]

    perform(worlds, story)


async def now(stage: Stage) -> datetime:
    found: datetime = await stage.world.value("SELECT penstock_now()")
    return found


@pytest.mark.parametrize("what", ["news", "a retry", "a replay"])
def test_a_wake_up_that_is_lost_strands_nothing(worlds: Worlds, what: str) -> None:
    """Trace: a task whose wake-up is lost is never run."""

    async def story(stage: Stage) -> None:
        await stage.apply(ATTEMPTS)
        await stage.trigger("p")
        if what != "news":
            (task,) = await stage.claim()
            failure = {"reason": "It broke.", "is_retried": what == "a retry"}
            ok(await stage.complete(held(task, failure=failure)))
            if what == "a replay":
                ok(await stage.public.post("/v1/tasks/replay", json={"tasks": [task.task_id]}))
        assert await counts(stage, "outbox") != [0]
        await stage.world.rows("DELETE FROM outbox")
        heard = Words()
        relay = relay_to(stage, heard)
        reconciler = Reconciler(stage.world.database, waited_seconds=30)
        # By now also the retry is due, and waits for less than the reconciler allows.
        stage.world.later(5)
        await reconciler.turn()
        await relay.turn()
        assert heard.sent == []
        stage.world.later(30)
        await reconciler.turn()
        await relay.turn()
        assert heard.sent == [CLEAN]
        assert len(await work(stage)) == 1
        stage.world.later(60)
        await reconciler.turn()
        await relay.turn()
        assert heard.sent == [CLEAN]

    perform(worlds, story)


def relay_to(stage: Stage, words: Words, clock: Still | None = None) -> Relay:
    return Relay(
        stage.world.database,
        carriers={"wake": WakeCarrier(words)},
        limits=LIMITS,
        clock=clock or Still(),
    )


def test_a_row_of_the_outbox_that_fails_holds_back_no_other(worlds: Worlds) -> None:
    """Trace: one failing row rolls the whole batch back."""

    async def story(stage: Stage) -> None:
        await stage.apply(FAN_OUT)
        # What this relay does not know, and would park.
        await stage.world.rows("DELETE FROM outbox WHERE kind = 'project'")
        heard, clock = Words(refused={CLEAN: "The queue is gone."}), Still()
        relay = relay_to(stage, heard, clock)
        for turn, key in enumerate(("p", "q", "r"), start=1):
            await stage.trigger(key)
            await relay.turn()
            # Whatever becomes of the other word, this one is heard each time.
            assert heard.sent == [SIDE] * turn
            stage.world.later(20)
            clock.now += 20
        for _ in range(4):
            await relay.turn()
            stage.world.later(20)
            clock.now += 20
        assert heard.sent == [SIDE] * 3
        (parked,) = ok(await stage.public.get("/v1/outbox"))["parked"]
        assert (parked["target"], parked["tries"]) == ("a:clean/normal", 3)
        assert parked["last_error"] == "The queue is gone."
        heard.refused.clear()
        ok(await stage.public.post("/v1/outbox/retry", json={"ids": [parked["id"]]}))
        await relay.turn()
        assert heard.sent == [*[SIDE] * 3, CLEAN]
        assert await counts(stage, "outbox") == [0]
        # The tasks never depended on it.
        assert len(await work(stage)) == 3

    perform(worlds, story)


def test_a_completion_that_is_said_again_has_the_same_answer(worlds: Worlds) -> None:
    """Trace: a replayed completion answers 409, and the worker thinks that it has lost."""

    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q")
        done, broken = await stage.claim(limit=2)
        completion = held(done, outputs=[output(done)])
        failure = held(broken, failure={"reason": "It broke."})
        first = await stage.complete(completion, failure)
        ok(first)
        before = await counts(stage, "publication", "event", "task", "outbox")
        stage.world.later(3600)
        again = await stage.complete(completion, failure)
        assert (again.status_code, again.content) == (200, first.content)
        # Where its log is says nothing of what it has done.
        ok(await stage.complete({**completion, "log": "file:///elsewhere"}))
        others: list[dict[str, Any]] = [
            held(done, outputs=[output(done, location="file:///other")]),
            held(done, outputs=[]),
            held(done, failure={"reason": "No, it broke."}),
        ]
        for other in others:
            problem = refused(await stage.complete(other), 409)
            assert (problem.type, problem.state and problem.state.status) == (
                "different",
                "completed",
            )
        problem = refused(await stage.complete(held(broken, outputs=[output(broken)])), 409)
        assert (problem.type, problem.state and problem.state.status) == ("different", "retrying")
        assert await counts(stage, "publication", "event", "task", "outbox") == before
        assert await partitions(stage, "tidy") == {"p": (place_of(done), 1)}

    perform(worlds, story)


def test_there_is_routing(worlds: Worlds) -> None:
    """Trace: routing exists on paper only. Here news of a source runs down the DAG."""

    async def story(stage: Stage) -> None:
        await stage.apply()
        await stage.trigger("p", "q", "p")
        assert [each.payload["partition_key"] for each in await work(stage)] == ["p", "q"]
        # What was published is routed by the call that has published it.
        reports = await work(stage, "a:report", "daily")
        assert [each.payload["partition_key"] for each in reports] == ["p", "q"]
        assert sorted(await partitions(stage, "daily")) == ["p", "q"]
        assert await tasks_in(stage, "queued") == []

    perform(worlds, story)


def test_there_are_deployment_and_rollback(worlds: Worlds) -> None:
    """Trace: both exist on paper only. Here an edit is built beside what is served."""

    async def story(stage: Stage) -> None:
        builder = CutOverController(stage.world.database, stage.parts.deployment)
        await stage.apply()
        await stage.trigger("p")
        (old,) = await work(stage)
        await work(stage, "a:report", "daily")
        served = await partitions(stage, "tidy")
        applied = ok(await stage.apply(chain(clean="2")))
        assert (applied["version"], sorted(applied["building"])) == (2, ["clean", "report"])
        await Backfills(stage.world.database).turn()
        # Readers see what they saw, until all of the new is there.
        assert await partitions(stage, "tidy") == served
        (new,) = await work(stage)
        assert new.generation != old.generation
        await Backfills(stage.world.database).turn()
        await builder.turn()
        assert await partitions(stage, "tidy") == served
        await work(stage, "a:report", "daily")
        await builder.turn()
        assert await partitions(stage, "tidy") == {"p": (place_of(new), 1)}
        back = ok(await stage.public.post("/v1/dag/rollback"))
        assert back["version"] == 1
        # What was built before is still there, and is served again.
        await builder.turn()
        assert await partitions(stage, "tidy") == served
        assert ok(await stage.public.get("/v1/dag"))["source"] == chain()

    perform(worlds, story)


def test_there_is_backpressure(worlds: Worlds) -> None:
    """Trace: backpressure exists on paper only. Here a full queue stops what fills it."""

    async def story(stage: Stage) -> None:
        pressures = Backpressure(stage.world.database)
        await stage.apply(PRESSED)
        await stage.trigger("a", "b", "c", "d")
        done = await stage.claim(limit=3)
        for each in done:
            ok(await stage.complete(held(each, outputs=[output(each)])))
        await stage.route()
        await pressures.turn()
        told = ok(await stage.public.get("/v1/pressure"))
        pressed = {each["job"] for each in told["jobs"] if each["pressed"]}
        assert pressed == {"report"}
        assert await stage.claim(limit=9) == []
        # The task of the last partition is older than any report.
        waiting, *_ = await tasks_in(stage, "queued")
        problem = refused(await claim_by(stage, waiting, stage.identity()), 409)
        assert problem.type == "paused"
        said = ok(
            await stage.public.post("/v1/trigger", json={"job": "feed", "partition_key": "e"})
        )
        # Nothing is lost: the event is kept, and its source is told to wait.
        assert [each["outcome"] for each in said["results"]] == ["new"]
        assert "report" in said["results"][0]["paused"]
        assert len(await work(stage, "a:report", "daily")) == 3
        await pressures.turn()
        await stage.route()
        assert [each.payload["partition_key"] for each in await stage.claim(limit=9)] == ["d", "e"]

    perform(worlds, story)
