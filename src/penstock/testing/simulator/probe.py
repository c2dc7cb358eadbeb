"""When all has ended: shows how soon a worker that has the queue to itself starts what comes.

Three things are shown on a network that is sound, in this order.

1. In `leased`, on a worker that sleeps at the doorbell: a task starts within `PROMPT_SECONDS`, and
   within `DAMAGED_SECONDS` if somebody has deleted or damaged the doorbell a moment before.
2. In every mode, behind a backlog of single tasks or of a pack of many: what is urgent starts
   within `PROMPT_SECONDS` and a slot.
3. In `leased`, on two that each own a part: what has a key starts within `KEYED_SECONDS` and a
   slot, also if its producer has read just before they fell asleep that they are awake (QUEUE-24).

Bounds are what the documentation promises, and a second for the network.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.queue.client import Queue
from penstock.queue.doorbell import BELIEVED_SECONDS, asleep_in
from penstock.queue.ids import keyed_pack
from penstock.queue.settings import DiscoveryMode
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Submitter
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
KEYED_SECONDS: Final = 10.0
"""An owner of a part looks for keys every 5 s at most, with a list every 4."""
SLOT_SECONDS: Final = 1.0
_ROUNDS: Final = 12
_TRIES: Final = 3
_KEYS: Final = 4
_POLLS_MAX: Final = 3000
_LONG_SECONDS: Final = 5.0
"""Rounds of so long tasks call a second owner."""


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

    async def run_pair(self, queue: Queue) -> None:
        """Of two workers, the second of which becomes an owner for all that waits."""
        async with asyncio.TaskGroup() as group:
            for _ in range(2 * _ROUNDS * self._concurrency):
                group.create_task(self._submit(queue, seconds=_LONG_SECONDS))
        for _ in range(_POLLS_MAX):
            if not self._site.tracker.unsettled():
                break
            await self._site.clock.sleep(0.1)
        for number in range(0 if self._site.tracker.unsettled() else 2 * _TRIES):
            # One of them has nothing to do with this, and falls asleep soon.
            asleep, _ = await asyncio.gather(self._until_one_sleeps(), self._submit(queue))
            if asleep is not None:
                await self._ask_who_falls_asleep(queue, f"pair {number}", asleep)

    async def _ask_who_falls_asleep(self, queue: Queue, name: str, asleep_at: float) -> None:
        await self._site.clock.sleep(self._entropy.uniform(0.5, 0.85) * BELIEVED_SECONDS)
        async with asyncio.TaskGroup() as group:
            sent = [
                group.create_task(self._submit_silently(queue, f"{name} {each}"))
                for each in range(_KEYS)
            ]
        for task in [each.result() for each in sent]:
            if (task.answered_at or 0.0) < asleep_at + BELIEVED_SECONDS:
                words = "its producer believed that all were awake"
                await self._time(task, seconds=KEYED_SECONDS, words=words)

    async def _submit_silently(self, queue: Queue, key: str) -> TrackedTask:
        """As one who has just read that all are awake, and rings for nobody."""
        access = queue.access
        silent = Submitter(access.store, access.layout, access.entropy)
        task, value = self._task(key=key, seconds=0.0)
        await silent.submit_keyed(
            task.type,
            value,
            SubmitOptions(key=task.key),
            key_seconds=access.config.key_seconds,
        )
        self._site.referee.answered(task)
        return task

    async def _until_one_sleeps(self) -> float | None:
        """When an owner has written that it sleeps; None if none does soon."""
        was_asleep = True
        for _ in range(_POLLS_MAX):
            found = self._site.bucket.objects.get(LAYOUT.doorbell)
            is_asleep = found is not None and asleep_in(found.body)
            if is_asleep and not was_asleep:
                return self._site.world.now()
            was_asleep = is_asleep
            await self._site.clock.sleep(0.1)
        return None

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
        self,
        options: SimulatedOptions | None = None,
        key: str | None = None,
        *,
        seconds: float = SLOT_SECONDS,
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
        return task, {"n": number, "do": "quick", "seconds": seconds}

    async def _submit(
        self,
        queue: Queue,
        options: SimulatedOptions | None = None,
        *,
        key: str | None = None,
        seconds: float = SLOT_SECONDS,
    ) -> TrackedTask:
        task, value = self._task(options, key, seconds=seconds)
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
