"""When all has ended: shows how soon a worker that has the queue to itself starts what comes.

Two things are shown on a network that is sound, in this order.

1. In `leased`, on a worker that sleeps at the doorbell: a task starts within `PROMPT_SECONDS`, and
   within `DAMAGED_SECONDS` if somebody has deleted or damaged the doorbell a moment before.
2. In every mode, behind a backlog of single tasks or of a pack of many: what is urgent starts
   within `PROMPT_SECONDS` and a slot.

Bounds are what the documentation promises, and a second for the network.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.queue.client import Queue
from penstock.queue.ids import keyed_pack
from penstock.queue.settings import DiscoveryMode
from penstock.testing.simulator.environment import LAYOUT, WorldEnvironment
from penstock.testing.simulator.history import SimulatedOptions, TrackedTask
from penstock.testing.simulator.machines import Machine
from penstock.testing.simulator.plans import TYPES, UNLIMITED
from penstock.testing.simulator.referee import OPERATOR

ALONE_SECONDS: Final = 400.0
"""So long after the others have left, a worker has all that they had, and has gone to sleep."""
PROMPT_SECONDS: Final = 6.0
DAMAGED_SECONDS: Final = 16.0
"""An owner notices within 4 s, and may then go to sleep for lack of work."""
SLOT_SECONDS: Final = 1.0
_ROUNDS: Final = 12
_TRIES: Final = 3


class PromptnessProbe:
    """Gives tasks to the only worker, and takes the time."""

    def __init__(
        self, site: WorldEnvironment, machine: Machine, mode: DiscoveryMode, *, concurrency: int
    ) -> None:
        self._site = site
        self._machine = machine
        self._mode = mode
        self._concurrency = concurrency
        self._entropy = site.world.entropy("probe of the end")

    async def run(self, queue: Queue) -> None:
        if self._mode is DiscoveryMode.LEASED:
            await self._wake_a_sleeper(queue)
        await self._overtake_a_backlog(queue)

    async def _wake_a_sleeper(self, queue: Queue) -> None:
        for _ in range(_TRIES):
            is_damaged = self._damage()
            await self._site.clock.sleep(self._entropy.uniform(0, 6) if is_damaged else 0)
            seconds = DAMAGED_SECONDS if is_damaged else PROMPT_SECONDS
            words = "the doorbell was damaged" if is_damaged else "all was idle"
            await self._time(await self._submit(queue), seconds=seconds, words=words)
            # It goes to sleep again.
            await self._site.clock.sleep(60)

    def _damage(self) -> bool:
        """Delete or damage the doorbell, or leave it alone."""
        bucket, draw = self._site.bucket, self._entropy.random()
        if draw < 0.3 or LAYOUT.doorbell not in bucket.objects:
            return False
        bucket.hand = OPERATOR
        if draw < 0.65:
            bucket.remove(LAYOUT.doorbell)
        else:
            bucket.write(LAYOUT.doorbell, b"\x00 not what it was", {})
        self._site.chronicle.note(OPERATOR, "damages the doorbell")
        return True

    async def _overtake_a_backlog(self, queue: Queue) -> None:
        count = _ROUNDS * self._concurrency
        if self._entropy.random() < 0.5:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(self._submit(queue))
        else:
            tasks = [self._task() for _ in range(count)]
            await queue.submit_many(TYPES[0], [value for _, value in tasks])
            for task, _ in tasks:
                self._site.referee.answered(task)
        await self._until_one_runs(count)
        await self._site.clock.sleep(self._entropy.uniform(0, 3))
        limit = self._entropy.choice(("", UNLIMITED))
        key = self._entropy.choice((None, None, "urgent"))
        options = SimulatedOptions(priority=self._entropy.randrange(1, 10), limit=limit)
        urgent = await self._submit(queue, options, key=key)
        seconds = PROMPT_SECONDS + SLOT_SECONDS
        await self._time(urgent, seconds=seconds, words="it was urgent")

    async def _until_one_runs(self, count: int) -> None:
        tasks = [*self._site.tracker.tasks.values()][-count:]
        while all(task.started_at is None for task in tasks):
            await self._site.clock.sleep(0.5)

    def _task(
        self, options: SimulatedOptions | None = None, key: str | None = None
    ) -> tuple[TrackedTask, dict[str, object]]:
        number = self._site.next_number()
        task = TrackedTask(
            number,
            self._machine.name,
            self._site.world.now(),
            key=key,
            type=TYPES[0],
            options=options or SimulatedOptions(),
        )
        if key is not None:
            task.place = LAYOUT.pack(keyed_pack(type=task.type, key=key))
        self._site.tracker.add(task)
        words = f"submits task {number}{task.options.words}"
        self._site.chronicle.note(self._machine.name, words, task.subject)
        return task, {"n": number, "do": "quick", "seconds": SLOT_SECONDS}

    async def _submit(
        self, queue: Queue, options: SimulatedOptions | None = None, *, key: str | None = None
    ) -> TrackedTask:
        task, value = self._task(options, key)
        await queue.submit(task.type, value, key=key, **task.options.asked)
        self._site.referee.answered(task)
        return task

    async def _time(self, task: TrackedTask, *, seconds: float, words: str) -> None:
        """Wait until it starts, and accuse if that took longer than it may."""
        assert task.answered_at is not None, "its submit was answered"
        until = task.answered_at + seconds
        while task.started_at is None and self._site.world.now() < until:
            await self._site.clock.sleep(0.25)
        if task.started_at is None or task.started_at > until:
            self._site.chronicle.accuse(
                f"Task {task.number} has not started after {seconds:.0f} s, and {words}.",
                task.subject,
            )
