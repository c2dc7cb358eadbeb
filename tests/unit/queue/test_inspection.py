"""What is shown of a queue is what is in it; what cannot be read is named; the price is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.kernel.document_format import decode
from penstock.kernel.errors import Unavailable
from penstock.queue.archive import keep
from penstock.queue.client import Queue, Task
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.ids import TaskId, task_at
from penstock.queue.inspection import (
    MonitorPass,
    TaskListing,
    dead_letters,
    list_tasks,
    run_monitor,
    stats,
)
from penstock.queue.inspection.stats import TypeStats
from penstock.queue.ledger import Ledger
from penstock.queue.worker import Worker
from penstock.store.base import Delimiter, Page, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore
from penstock.testing.virtual import World, simulate


@dataclass
class Scene:
    """A queue in memory, on virtual time."""

    world: World
    queue: Queue
    bucket: MemoryBucket
    meter: Meter = field(default_factory=Meter)

    async def wait(self, seconds: float) -> None:
        await self.queue.access.store.clock.machine.sleep(seconds)

    def key(self, task: Task, *, ledger: bool = False) -> str:
        layout, (at, _) = self.queue.access.layout, task_at(task.id)
        return layout.ledger(at) if ledger else layout.pack(at)

    def requests(self) -> dict[Kind, int]:
        counts: dict[Kind, int] = {}
        for (label, kind), count in self.meter.billed.items():
            if label in ("inspect", "monitor", "discovery"):
                counts[kind] = counts.get(kind, 0) + count
        self.meter.billed.clear()
        return counts

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Worker]:
        """A worker beside: `ok` ends at once, `slow` later, `bad` fails, `again` retries."""
        worker = Worker(self.queue, concurrency=8, name="w")
        clock = self.world.clock()

        @worker.handler("ok")
        async def ok(task: TaskContext) -> Any:
            return task.input

        @worker.handler("slow")
        async def slow(task: TaskContext) -> None:
            await clock.sleep(task.input)

        @worker.handler("bad", retry=Retry(attempts=1))
        async def bad(task: TaskContext) -> None:
            raise ValueError(f"no good: {task.input}")

        @worker.handler("again", retry=Retry(attempts=9, first_seconds=600))
        async def again(task: TaskContext) -> None:
            raise OSError("not yet")

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(signals=False))
            yield worker
            worker.stop()
            worker.stop()


def _play(act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        bucket, meter = MemoryBucket(clock), Meter()
        store = MeteredStore(MemoryStore(bucket, clock=clock), meter)
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        await act(Scene(world, queue, bucket, meter))

    simulate(main, seed=1)


def _shown(listing: TaskListing) -> list[tuple[str, str, int]]:
    return [(view.status, view.type, view.attempt) for view in listing.tasks]


def _ids(listing: TaskListing) -> set[TaskId]:
    return {view.id for view in listing.tasks}


def test_tasks_of_every_status_are_listed_what_runs_first_and_what_is_over_last() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        await queue.submit("ok", 3, delay=3600)
        soon = await queue.submit("unhandled", 3, delay=100)
        unhandled = await queue.submit("unhandled", 1)
        await scene.wait(1)
        keyed = await queue.submit("unhandled", 2, key="k")
        cancelled = await queue.submit("unhandled", 4)
        await queue.cancel(cancelled.id)
        for kind, value in (("slow", 60), ("again", 0), ("bad", 7), ("ok", 8)):
            await queue.submit(kind, value)
        async with scene.working():
            await scene.wait(20)
            listing = await list_tasks(queue.access)
            assert listing.notes == ()
            assert listing.is_whole
            assert sorted(_shown(listing)[:2]) == [("retrying", "again", 1), ("running", "slow", 1)]
            assert [view.id for view in listing.tasks[2:4]] == [unhandled.id, keyed.id]
            assert [view.status for view in listing.tasks[2:6]] == ["ready"] * 2 + ["delayed"] * 2
            assert listing.tasks[4].id == soon.id
            over = {(view.status, view.type) for view in listing.tasks[6:]}
            assert over == {("cancelled", "unhandled"), ("failed", "bad"), ("succeeded", "ok")}
            for view in listing.tasks:
                assert view == await queue.get(view.id)

    _play(act)


def test_what_is_not_asked_for_is_not_listed_and_mostly_not_read() -> None:
    async def act(scene: Scene) -> None:
        for number in range(40):
            await scene.queue.submit("ok", number)
        async with scene.working():
            await scene.wait(20)
        await scene.queue.submit_many("other", [1, 2, 3])
        await scene.queue.submit("ok", 4)
        scene.requests()
        access = scene.queue.access
        assert (
            _shown(await list_tasks(access, statuses=["ready"], type="other"))
            == [("ready", "other", 0)] * 3
        )
        # The top, and `tasks/`; one pack.
        assert scene.requests() == {Kind.LIST: 2, Kind.GET: 1}
        assert len((await list_tasks(access, statuses=["succeeded"])).tasks) == 40
        assert len((await list_tasks(access, statuses=["succeeded", "ready"])).tasks) == 44
        assert (await list_tasks(access, statuses=["running"])).tasks == ()

    _play(act)


def test_a_limit_is_kept_and_told() -> None:
    async def act(scene: Scene) -> None:
        access = scene.queue.access
        await scene.queue.submit_many("ok", list(range(1000)))
        await scene.queue.submit_many("ok", list(range(5)))
        part = await list_tasks(access, limit=10)
        assert len(part.tasks) == 10
        assert not part.is_whole
        whole = await list_tasks(access, limit=1005)
        assert len(_ids(whole)) == 1005
        assert whole.is_whole

    _play(act)


def test_no_list_reads_more_packs_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.queue.inspection.task_search.READS_MAX", 32)

    async def act(scene: Scene) -> None:
        for number in range(40):
            await scene.queue.submit("ok", number)
        scene.requests()
        listing = await list_tasks(scene.queue.access)
        assert scene.requests()[Kind.GET] == 32
        assert len(listing.tasks) == 32
        assert not listing.is_whole

    _play(act)


def test_a_survey_that_breaks_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.queue.survey.PAGES_MAX", 1)

    async def act(scene: Scene) -> None:
        for number in range(1001):
            await scene.queue.submit("ok", number)
        listing = await list_tasks(scene.queue.access, type="other")
        assert not listing.is_whole
        assert listing.notes == ("queues/q/tasks/ has more objects than were read (1 pages).",)
        assert (await stats(scene.queue.access)).types[0].ready == 1000

    _play(act)


def test_what_cannot_be_read_is_named_and_the_rest_is_listed() -> None:
    async def act(scene: Scene) -> None:
        queue, store = scene.queue, scene.queue.access.store
        for key in ("notes.txt", "tasks/what", "ready/x/y", "workers/joe.json", "dead/x"):
            await store.put(f"queues/q/{key}", b"hello")
        good = await queue.submit("ok", 1)
        newer, damaged, short = [await queue.submit("ok", number) for number in range(3)]
        body = scene.bucket.objects[scene.key(newer)].body
        await store.put(scene.key(newer), body.replace(b"pack/1", b"pack/9"))
        await store.put(scene.key(damaged, ledger=True), b"garbage")
        body = scene.bucket.objects[scene.key(short)].body
        await store.put(scene.key(short), body.replace(b"[2]", b"[]"))

        listing = await list_tasks(queue.access)
        assert _ids(listing) == {good.id}
        notes = "\n".join(listing.notes)
        for key in ("q/notes.txt", "q/tasks/what", "q/ready/x/y"):
            assert f"queues/{key} is not an object of this queue" in notes
        assert "has format 9 of 'pack'" in notes
        assert f"{scene.key(damaged, ledger=True)} was not written by Penstock." in notes
        assert "does not match its name" in notes
        assert len(listing.notes) == 6

        seen = await stats(queue.access)
        assert [(each.ready, each.in_progress) for each in seen.types] == [(3, 1)]
        notes = "\n".join(seen.notes)
        assert "queues/q/workers/joe.json is a registration that this release cannot" in notes
        assert "queues/q/dead/x is not an object" in notes
        assert len(seen.notes) == 5

    _play(act)


def test_a_key_that_is_used_again_shows_the_new_task() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        async with scene.working():
            first = await queue.submit("ok", 1, key="k")
            assert await first.result(timeout=60) == 1
        await scene.wait(10)
        await queue.submit("ok", 2, key="k")
        (settled,) = (await list_tasks(queue.access)).tasks
        assert (settled.status, settled.input) == ("succeeded", 1)
        await scene.wait(2 * 86_400)
        await queue.access.store.delete(scene.key(first))
        again = await queue.submit("ok", 3, key="k")
        assert again.id == first.id
        (new,) = (await list_tasks(queue.access)).tasks
        assert (new.status, new.input) == ("ready", 3)

    _play(act)


def test_failed_tasks_are_listed_from_the_queue_and_from_the_archive_once() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        async with scene.working():
            old = []
            for number in range(3):
                old.append(await queue.submit("bad", number))
                await scene.wait(10)
            await queue.submit("ok", 1)
            await scene.wait(900)
            assert not any(scene.key(task, ledger=True) in scene.bucket.objects for task in old)
            new = await queue.submit_many("bad", [7, 8])
            await scene.wait(20)
        access = queue.access
        listing = await list_tasks(access, statuses=["failed"])
        assert [view.id for view in listing.tasks[:2]] == [task.id for task in new]
        assert _ids(listing) == {task.id for task in (*old, *new)}
        assert {view.error for view in listing.tasks} == {"ValueError"}
        letters = await dead_letters(access)
        assert _ids(letters) == {task.id for task in old}
        ends = [view.settled_at or 0.0 for view in letters.tasks]
        assert ends == sorted(ends, reverse=True)
        assert ends[0] > ends[-1]
        assert (await dead_letters(access, type="ok")).tasks == ()
        part = await dead_letters(access, limit=2)
        assert len(part.tasks) == 2
        assert not part.is_whole
        # Of all statuses, only what is in the queue.
        assert _ids(await list_tasks(access)) == {task.id for task in new}
        assert (await stats(access)).dead_letter_objects >= 1
        (bad,) = (await stats(access)).types
        assert bad.failed_recently is None
        (bad,) = (await stats(access, failures_of=1)).types
        assert (bad.settled_recently, bad.failed_recently) == (2, 2)

        # A crash after the archive was written leaves a record in both places.
        at, _ = task_at(new[0].id)
        key = access.layout.ledger(at)
        ledger = decode(Ledger, scene.bucket.objects[key].body, where=key)
        await keep(access.store, access.layout, [(at, ledger)], entropy=access.entropy)
        assert len((await dead_letters(access)).tasks) == 5
        twice = await list_tasks(access, statuses=["failed"])
        assert len(twice.tasks) == len(_ids(twice)) == 5

    _play(act)


def test_figures_are_counted_from_few_lists() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        began = scene.world.now()
        await queue.submit_many("other", [1] * 300)
        # Simulations begin with a minute: what comes 20 s later is due in the same one.
        await scene.wait(95)
        await queue.submit("other", 1)
        await queue.submit("other", 2, delay=20)
        await queue.submit("other", 3, delay=3600)
        await queue.submit("other", 4, key="now")
        await queue.submit("other", 5, key="later", delay=3600)
        scene.requests()
        seen = await stats(queue.access)
        # The top, keyed, ready, tasks, workers, dead; what is due within this minute is read, and
        # who is the monitor, what is paused, and the settings.
        requests = scene.requests()
        assert requests[Kind.LIST] == 6
        assert requests[Kind.GET] <= 5
        (other,) = seen.types
        assert other.ready == 302
        assert other.delayed == 3
        assert other.oldest_ready_at == pytest.approx(began, abs=1)
        assert seen.at == pytest.approx(scene.world.now(), abs=1)
        assert seen.workers == ()
        assert len(seen.unowned) == seen.shards == 64
        await scene.wait(30)
        (other,) = (await stats(queue.access)).types
        assert (other.ready, other.delayed) == (303, 2)

    _play(act)


def test_figures_show_who_works_on_what() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        await queue.submit("slow", 500)
        await queue.submit("other", 1)
        await queue.submit("ok", 1)
        async with scene.working():
            await scene.wait(30)
            seen = await stats(queue.access)
            assert seen.types == (
                TypeStats("ok", settled_recently=1),
                TypeStats("other", ready=1, oldest_ready_at=seen.types[1].oldest_ready_at),
                TypeStats("slow", in_progress=1),
            )
            (worker,) = seen.workers
            assert (worker.role, worker.concurrency) == ("owner", 8)
            assert worker.shards == tuple(range(64))
            assert worker.handles == ("again", "bad", "ok", "slow")
            assert worker.help_wanted == ("other",)
            assert worker.ends_at > seen.at
            assert seen.unowned == ()
        gone = await stats(queue.access)
        assert gone.workers == ()
        assert len(gone.unowned) == 64

    _play(act)


async def _passes(scene: Scene, number: int, *, period: float = 600.0) -> list[MonitorPass]:
    made: list[MonitorPass] = []
    await run_monitor(
        scene.queue.access,
        tell=made.append,
        stopping=asyncio.Event(),
        period_seconds=period,
        passes_max=number,
    )
    return made


def test_a_lone_monitor_archives_what_may_leave() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        tasks = await queue.submit_many("gone", [1, 2, 3])
        for task in tasks:
            await queue.cancel(task.id)
        keyed = await queue.submit("gone", 4, key="k")
        await queue.cancel(keyed.id)
        scene.requests()
        (early,) = await _passes(scene, 1)
        assert (early.settled_seen, early.ledgers_archived) == (1, 0)
        assert scene.requests() == {Kind.LIST: 2}
        _, late = await _passes(scene, 2)
        assert (late.settled_seen, late.ledgers_archived) == (1, 1)
        assert scene.key(tasks[0], ledger=True) not in scene.bucket.objects
        assert (await queue.get(tasks[2].id)).status == "cancelled"
        await scene.wait(2 * 86_400)
        (last,) = await _passes(scene, 1)
        assert (last.settled_seen, last.ledgers_archived) == (0, 1)

    _play(act)


def test_a_lone_monitor_writes_a_lost_pointer_again_and_a_worker_finds_the_task() -> None:
    async def act(scene: Scene) -> None:
        queue = scene.queue
        task = await queue.submit("ok", 5, key="k")
        (pointer,) = [key for key in scene.bucket.objects if "/ready/" in key]
        await queue.access.store.delete(pointer)
        made = await _passes(scene, 2)
        assert [each.pointers_written for each in made] == [0, 1]
        async with scene.working():
            assert await task.result(timeout=60) == 5

    _play(act)


def test_a_lone_monitor_ends_when_it_is_asked_to() -> None:
    async def act(scene: Scene) -> None:
        stopping = asyncio.Event()
        made: list[MonitorPass] = []
        async with asyncio.TaskGroup() as group:
            running = group.create_task(
                run_monitor(scene.queue.access, tell=made.append, stopping=stopping)
            )
            await scene.wait(1500)
            assert len(made) == 3
            assert not running.done()
            stopping.set()
        assert len(made) == 3
        assert scene.world.now() - scene.world.epoch == pytest.approx(1500, abs=10)

    _play(act)


class _Away(Wrapper):
    """A store that does not answer lists while it is away."""

    away = True

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = 1000,
        cursor: str | None = None,
    ) -> Page:
        if self.away:
            raise Unavailable("Nobody answers.")
        return await super().list(
            prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
        )


def test_a_lone_monitor_outlives_a_store_that_is_away_for_a_while() -> None:
    async def main(world: World) -> None:
        clock = world.clock()
        store = _Away(MemoryStore(MemoryBucket(clock), clock=clock))
        queue = await Queue.on(store, name="q", entropy=world.entropy("q"))
        made: list[MonitorPass] = []
        stopping = asyncio.Event()

        async def run(passes: int) -> None:
            await run_monitor(queue.access, tell=made.append, stopping=stopping, passes_max=passes)

        with pytest.raises(Unavailable):
            await run(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(run(3))
            await clock.sleep(900)
            store.away = False
        assert len(made) == 1

    simulate(main, seed=1)
