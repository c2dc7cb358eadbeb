"""Who uses a simulated queue from outside: producers, cancellers, readers.

A producer submits tasks, one at a time, many in one call, or many at the same moment, with and
without keys, delays, priorities, limits and affinities, again and again under the same key. It
reports to the referee: an answer is a promise, an error is none, and what it withdraws before it
can have been sent must never run. What goes wrong with the doorbell is never told to a producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import PenstockError, TaskNotFound, UnreadableObject
from penstock.queue.client import Queue
from penstock.queue.ids import keyed_pack
from penstock.queue.submitter import NotAllSubmitted
from penstock.queue.task_views import TaskView
from penstock.testing.simulator.environment import LAYOUT, WorldEnvironment
from penstock.testing.simulator.history import SimulatedInput, SimulatedOptions, TrackedTask
from penstock.testing.simulator.machines import Machine
from penstock.testing.simulator.plans import (
    KEY_SECONDS,
    TYPES,
    WorldProfile,
    draw_input,
    draw_poison_input,
)

Drawn = Sequence[tuple[TrackedTask, dict[str, object]]]
"""Tasks, and what is submitted of each."""

_BATCH_MAX: Final = 7
_BURST_MAX: Final = 8
_READS: Final = 2
_READER_SPOTS: Final = (
    "pack create",
    "pack create",
    "pointer create",
    "pointer delete",
    "pack delete",
)


class Producer:
    """Submits the tasks of a world."""

    def __init__(
        self, site: WorldEnvironment, machine: Machine, *, submits: int, poison: int = 0
    ) -> None:
        """The first `poison` of its submits have a task that ends its worker."""
        self._site = site
        self._machine = machine
        self._submits = submits
        self._poison = poison
        self._entropy = site.world.entropy(f"producer {machine.name}")
        self._poisons = site.world.entropy(f"poisons of {machine.name}")
        self._wishes = site.world.entropy(f"options of {machine.name}")
        self.ids: list[str] = []
        self.submitted: list[tuple[str, TrackedTask]] = []

    async def run(self, queue: Queue) -> None:
        plan = self._site.plan
        for number in range(self._submits):
            await self._machine.clock.sleep(self._pause_seconds(number))
            if self._site.is_peace:
                return
            chance = 0.3 if plan.profile is WorldProfile.POINTERS else 0.15
            spots = (*_READER_SPOTS, "inbox replace") if plan.direct else _READER_SPOTS
            self._machine.triggers = plan.triggers(self._entropy, spots, chance=chance)
            try:
                if number < self._poison:
                    await self._submit_poison(queue)
                elif plan.features.gather_seconds and self._wishes.random() < 0.6:
                    await self._submit_burst(queue, plan.features.gather_seconds)
                elif self._entropy.random() < plan.keyed:
                    await self._submit_keyed(queue)
                elif self._entropy.random() < plan.batch:
                    await self._submit_many(queue)
                else:
                    await self._submit(queue)
            except PenstockError as error:
                self._is_told(error)

    def _is_told(self, error: PenstockError) -> None:
        self._site.chronicle.note(self._machine.name, f"is told: {error}")
        if isinstance(error, UnreadableObject):
            # Hints alone are damaged in these worlds, and a submit can do without them.
            self._site.chronicle.accuse(f"A submit failed because of a hint: {error}")

    def _pause_seconds(self, number: int) -> float:
        plan = self._site.plan
        match plan.profile:
            case WorldProfile.ECHOES if number == self._submits // 2:
                # Until the records of the keys have left.
                return self._entropy.uniform(0.7, 0.95) * plan.storm_seconds
            case WorldProfile.KEYS if self._entropy.random() < 0.5:
                # Around the end of the lifetime of what was submitted before.
                return self._entropy.uniform(KEY_SECONDS - 10, KEY_SECONDS + 30)
            case WorldProfile.KEYS | WorldProfile.LATE | WorldProfile.ECHOES:
                return self._entropy.uniform(0, 50)
        return self._entropy.uniform(0, 1.5 * plan.storm_seconds / self._submits)

    def _delay(self) -> float:
        if self._entropy.random() >= self._site.plan.delayed:
            return 0.0
        if self._site.plan.profile is WorldProfile.KEYS:
            return self._entropy.uniform(20, 120)
        return self._entropy.choice((2.0, 10.0, 40.0))

    def _task(
        self,
        *,
        type: str,
        key: str | None = None,
        draw: Callable[[Entropy, int], SimulatedInput] = draw_input,
        options: SimulatedOptions,
    ) -> tuple[TrackedTask, dict[str, object]]:
        site = self._site
        deed = draw(self._entropy, site.next_number())
        task = TrackedTask(
            deed.n, self._machine.name, site.world.now(), key=key, type=type, options=options
        )
        if key is not None:
            task.place = LAYOUT.pack(keyed_pack(type=type, key=key))
        site.tracker.add(task)
        words = f"submits task {deed.n} of type {type}, which is to {deed.do}"
        words += f", key {key}" if key else ""
        site.chronicle.note(task.by, words + options.words, task.subject)
        return task, {"n": deed.n, "do": deed.do, "seconds": deed.seconds, "times": deed.times}

    async def _submit(self, queue: Queue) -> None:
        kind, options = self._entropy.choice(TYPES), self._options()
        task, value = self._task(type=kind, options=options)
        found = await queue.submit(kind, value, delay=self._delay(), **options.asked)
        self._answered(task, found.id)

    def _options(self) -> SimulatedOptions:
        return self._site.plan.features.options(self._wishes)

    async def _submit_burst(self, queue: Queue, gather_seconds: float) -> None:
        """Many at the same moment, of which some are withdrawn before they can be sent."""
        kinds = [(self._entropy.choice(TYPES), self._options(), self._delay()) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            for _ in range(self._wishes.randrange(2, _BURST_MAX + 1)):
                kind, options, delay = self._wishes.choice(kinds)
                task, value = self._task(type=kind, options=options)
                # What is gathered is sent so long after the first of it, and none is earlier.
                part = self._wishes.choice((0.5, 0.9, 0.0, 0.0, 0.0))
                seconds = part * gather_seconds or None
                group.create_task(
                    self._submit_in_burst(queue, task, value, delay=delay, seconds=seconds)
                )

    async def _submit_in_burst(
        self,
        queue: Queue,
        task: TrackedTask,
        value: dict[str, object],
        *,
        delay: float,
        seconds: float | None,
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                found = await queue.submit(task.type, value, delay=delay, **task.options.asked)
        except TimeoutError:
            self._site.chronicle.note(task.by, "withdraws it before it is sent", task.subject)
            task.is_withdrawn = True
        except PenstockError as error:
            self._is_told(error)
        else:
            self._answered(task, found.id)

    async def _submit_keyed(self, queue: Queue) -> None:
        key = f"key {self._entropy.randrange(self._site.plan.keys)}"
        # The same key of another type is another key.
        kind, options = TYPES[0], self._options()
        task, value = self._task(type=kind, key=key, options=options)
        found = await queue.submit(kind, value, key=key, delay=self._delay(), **options.asked)
        self._answered(task, found.id)

    async def _submit_many(self, queue: Queue) -> None:
        kind, options = self._entropy.choice(TYPES), self._options()
        count = self._entropy.randrange(2, _BATCH_MAX + 1)
        await self._send_many(
            queue, kind, [self._task(type=kind, options=options) for _ in range(count)]
        )

    async def _submit_poison(self, queue: Queue) -> None:
        """A task that ends its workers, and others that must not suffer for it."""
        kind, options, plan = self._entropy.choice(TYPES), self._options(), self._site.plan
        count = self._entropy.randrange(1, _BATCH_MAX + 1)
        if plan.poison_company:
            count = self._poisons.randrange(_BATCH_MAX, plan.poison_company + 1)
        place = self._entropy.randrange(count)
        draws = [draw_poison_input if each == place else draw_input for each in range(count)]
        tasks = [self._task(type=kind, draw=draw, options=options) for draw in draws]
        if plan.poison_company or self._poisons.random() < 0.5:
            await self._send_many(queue, kind, tasks)
            return
        # Each in a pack of its own, so that no ledger tells of the others.
        for task in tasks:
            await self._send_many(queue, kind, [task])

    async def _send_many(self, queue: Queue, kind: str, drawn: Drawn) -> None:
        ((first, _), *_), values = drawn, [value for _, value in drawn]
        try:
            found = await queue.submit_many(
                kind, values, delay=self._delay(), **first.options.asked
            )
        except NotAllSubmitted as error:
            for (task, _), answer in zip(drawn, error.tasks, strict=True):
                if isinstance(answer, str):
                    self._answered(task, answer)
            return
        for (task, _), each in zip(drawn, found, strict=True):
            self._answered(task, each.id)

    def _answered(self, task: TrackedTask, id: str) -> None:
        self.ids.append(id)
        self.submitted.append((id, task))
        self._site.referee.answered(task)


class Canceller:
    """Cancels tasks that it has heard of."""

    def __init__(self, site: WorldEnvironment, machine: Machine, producers: list[Producer]) -> None:
        self._site = site
        self._machine = machine
        self._producers = producers

    async def run(self, queue: Queue) -> None:
        entropy, plan = self._machine.entropy, self._site.plan
        for _ in range(plan.cancels):
            await self._machine.clock.sleep(entropy.uniform(0, plan.storm_seconds))
            known = [each for producer in self._producers for each in producer.ids]
            if known:
                chosen = entropy.choice(known)
                self._site.referee.asked_to_cancel(chosen)
                try:
                    await queue.cancel(chosen)
                except PenstockError:
                    continue  # It may be too late for it, or the store away.


class ReadingClient:
    """Asks for tasks while things happen to them, and once more when all has ended."""

    def __init__(self, site: WorldEnvironment, machine: Machine, producers: list[Producer]) -> None:
        self._site = site
        self._machine = machine
        self._producers = producers

    async def run(self, queue: Queue) -> None:
        entropy, plan = self._machine.entropy, self._site.plan
        for _ in range(_READS):
            await self._machine.clock.sleep(entropy.uniform(0, plan.storm_seconds))
            await self._read(queue)

    async def read_all(self, queue: Queue) -> None:
        """One task of each producer."""
        for producer in self._producers:
            await self._read(queue, producer)

    async def _read(self, queue: Queue, producer: Producer | None = None) -> None:
        # A key's id is the same for all its tasks: what is shown of it cannot be judged.
        known = [
            (id_, task)
            for each in ([producer] if producer else self._producers)
            for id_, task in each.submitted
            if task.key is None
        ]
        if not known:
            return
        id_, task = self._machine.entropy.choice(known)
        was_settled = task.settled_at is not None
        view: TaskView | None = None
        try:
            view = await queue.get(id_)
        except TaskNotFound:
            view = None
        except PenstockError:
            return  # The store is away.
        self._site.referee.was_shown(task, view, was_settled=was_settled)
