"""What a run of a worker does with gates: what waits at one stands in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from penstock.kernel.errors import Unavailable
from penstock.queue.client import Queue
from penstock.queue.discovery.base import Discovery, DiscoveryRequest
from penstock.queue.discovery.scanner import ALL, PackCandidate, Run, Scanner, ScanResult
from penstock.queue.execution.gates import CombinedAdmission, admit
from penstock.queue.execution.handlers import Handler, HandlerRegistry, TaskContext
from penstock.queue.execution.worker_loop import WorkerLoop
from penstock.queue.layout import QueueLayout
from penstock.queue.settings import Polling, WorkerSettings
from penstock.queue.shards.allocation import WorkerLoad
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

RARELY = Polling(min_seconds=3600, max_seconds=3600, jitter=0)


class UnlimitedAdmission:
    """Leave that nothing bounds; it counts."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks

    def more(self, tasks: int) -> int:
        self.tasks += tasks
        return tasks

    def give(self, tasks: int) -> None:
        self.tasks -= tasks

    def may_start(self) -> bool:
        return True

    def begin(self) -> None:
        pass

    def may_run(self) -> bool:
        return True

    def has_more(self) -> bool:
        return True

    def watch(self, *, over: Callable[[], None], freed: Callable[[], None]) -> None:
        pass


class Barrier:
    """A gate that is told which types may pass, and when it is worth asking again."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.known: set[str] = set()
        """What it says is shut: what was refused, as long as it is."""
        self.seconds = 5.0
        self.asked: list[str] = []
        self.fails = False
        self.given: list[UnlimitedAdmission] = []

    def concerns(self, _: PackCandidate) -> bool:
        return True

    def is_shut(self, sight: PackCandidate) -> bool:
        return sight.at.type in self.known & self.refused

    def seconds_to_open(self) -> float | None:
        return self.seconds if self.known & self.refused else None

    async def admit(self, sight: PackCandidate, tasks: int) -> UnlimitedAdmission | None:
        self.asked.append(sight.at.type)
        if self.fails:
            raise Unavailable("away")
        if sight.at.type in self.refused:
            self.known.add(sight.at.type)
            return None
        self.given.append(UnlimitedAdmission(tasks))
        return self.given[-1]

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        pass


class Everything(Discovery):
    """Looks at all slots, one page a look, and counts."""

    sight_seconds = 30.0
    is_alone = True
    name = "w"

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._store = queue.access.store
        self._scanner = Scanner(self._store, QueueLayout("q"))
        self.looks = 0
        self.worths: dict[str, int] = {}
        self.is_blind = False

    async def look(self, wanted: DiscoveryRequest) -> ScanResult:
        self.looks += 1
        if self.is_blind:
            return ScanResult()
        minute = int((await self._store.now()).earliest // 60)
        view = await self._scanner.look(ALL, minute=minute, worth=wanted.worth, wanted=wanted.tasks)
        self.worths = {sight.at.type: wanted.worth(sight) for sight in view.sights}
        return view

    def guarded(self) -> Sequence[Run]:
        return ()

    async def keep(self, load: Callable[[], WorkerLoad]) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        pass


class Bench:
    """A queue, and one run of a worker behind a barrier."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock()
        self.started: list[str] = []

    async def open(self, *refused: str, polling: Polling = RARELY) -> None:
        store = MemoryStore(MemoryBucket(self.world.clock()), clock=self.world.clock())
        self.queue = await Queue.on(store, name="q", entropy=self.world.entropy("q"))
        self.gate = Barrier(*refused)
        self.discovery = Everything(self.queue)
        handlers = HandlerRegistry()
        for kind in ("a", "b"):
            handlers.add(Handler(type=kind, function=self._handle))
        self.shift = WorkerLoop(
            self.queue.access,
            handlers,
            self.discovery,
            concurrency=2,
            settings=WorkerSettings(polling=polling),
            gates=(self.gate,),
        )

    async def _handle(self, task: TaskContext) -> None:
        self.started.append(task.type)
        await self.clock.sleep(task.input)


def _run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        await check(Bench(world))

    simulate(main, seed=1)


class Running:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> None:
        await self._group.__aenter__()
        self._task = self._group.create_task(self._bench.shift.run())

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._group.__aexit__(None, None, None)


def test_what_waits_at_a_gate_is_tried_when_it_opens_without_another_look() -> None:
    async def check(bench: Bench) -> None:
        await bench.open("a")
        for _ in range(5):
            await bench.queue.submit("a", 1)
        async with Running(bench):
            await bench.clock.sleep(12)
            # Two at the most were refused; the others were not even tried.
            assert len(bench.gate.asked) <= 2
            looks = bench.discovery.looks
            bench.gate.refused.clear()
            await bench.clock.sleep(8)
            assert bench.started == ["a"] * 5
            assert bench.discovery.looks == looks

    _run(check)


def test_what_was_seen_long_ago_is_looked_for_again_when_the_gate_opens() -> None:
    async def check(bench: Bench) -> None:
        await bench.open("a")
        task = await bench.queue.submit("a", 1)
        async with Running(bench):
            await bench.clock.sleep(60)
            looks = bench.discovery.looks
            bench.gate.refused.clear()
            await task.result(timeout=8)
            assert bench.discovery.looks == looks + 1

    _run(check)


def test_what_no_look_shows_any_more_waits_on() -> None:
    """Nothing may lead to it a second time: it is tried when the gate opens, however old it is."""

    async def check(bench: Bench) -> None:
        await bench.open("a", polling=Polling(min_seconds=40, max_seconds=40, jitter=0))
        task = await bench.queue.submit("a", 1)
        async with Running(bench):
            await bench.clock.sleep(5)
            bench.discovery.is_blind = True
            # Another look, and then so long that what it showed would be old.
            await bench.clock.sleep(70)
            assert bench.discovery.looks == 2
            bench.gate.refused.clear()
            await task.result(timeout=8)

    _run(check)


def test_a_look_that_broke_off_because_of_what_is_shut_goes_on_at_once() -> None:
    """A page is full of packs that may not start: what lies behind it is found all the same."""

    async def check(bench: Bench) -> None:
        await bench.open("a")
        for _ in range(1100):
            await bench.queue.submit("a", 1, priority=1)
        other = await bench.queue.submit("b", 1, priority=1)
        async with Running(bench):
            await other.result(timeout=5)
            assert bench.discovery.worths == {"a": 0, "b": 1}
            assert len(bench.gate.asked) <= 4

    _run(check)


def test_a_gate_that_fails_costs_a_try_and_no_room() -> None:
    async def check(bench: Bench) -> None:
        await bench.open()
        bench.gate.fails = True
        tasks = [await bench.queue.submit("a", 1) for _ in range(4)]
        async with Running(bench):
            await bench.clock.sleep(30)
            bench.gate.fails = False
            for task in tasks:
                await task.result(timeout=120)
        assert all(each.tasks == 0 for each in bench.gate.given)

    _run(check)


def test_the_strictest_of_several_gates_counts() -> None:
    class Narrow(Barrier):
        async def admit(self, sight: PackCandidate, tasks: int) -> UnlimitedAdmission | None:
            return await super().admit(sight, min(tasks, 3))

    async def check(bench: Bench) -> None:
        await bench.open()
        await bench.queue.submit("a", 1)
        scanner = Scanner(bench.queue.access.store, QueueLayout("q"))
        view = await scanner.look(ALL, minute=10**8, worth=lambda sight: 1, wanted=1)
        (sight,) = view.sights
        wide, narrow, shut = Barrier(), Narrow(), Barrier("a")
        leave = await admit((wide, narrow), sight, 8)
        assert isinstance(leave, CombinedAdmission)
        assert leave.tasks == wide.given[0].tasks == narrow.given[0].tasks == 3
        leave.give(3)
        assert await admit((wide, shut), sight, 8) is None
        assert [each.tasks for each in wide.given] == [0, 0]

    _run(check)
