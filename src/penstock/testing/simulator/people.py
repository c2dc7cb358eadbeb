"""Those who use a queue from outside: producers, cancellers, an operator, a monitor on its own.

A producer submits tasks, one at a time or many, with and without keys and delays, again and again
under the same key. It tells the referee what it was told: an answer is a promise, an error is
none. The operator deletes, damages and doubles what the queue calls its index: pointers, leases of
shards, registrations. Never packs and ledgers, which are outside every promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import PenstockError, TaskNotFound
from penstock.queue.client import Queue
from penstock.queue.inspection.alone import run_monitor
from penstock.queue.places import NONCE_CHARACTERS, keyed_pack
from penstock.queue.submission import NotAllSubmitted
from penstock.queue.views import TaskView
from penstock.testing.simulator.deeds import TYPES, draw_deed, draw_poison
from penstock.testing.simulator.machines import Machine
from penstock.testing.simulator.plans import KEY_SECONDS, Profile
from penstock.testing.simulator.referee import OPERATOR
from penstock.testing.simulator.site import LAYOUT, Site
from penstock.testing.simulator.tracking import Input, Tracked

Drawn = Sequence[tuple[Tracked, dict[str, object]]]
"""Tasks, and what is submitted of each."""

_BATCH_MAX: Final = 7
_READS: Final = 2
_MONITOR_SECONDS: Final = (30.0, 80.0)
_SPOTS: Final = ("pack create", "pack create", "pointer create", "pointer delete", "pack delete")


class Producer:
    """Submits the tasks of a world."""

    def __init__(self, site: Site, machine: Machine, *, submits: int, poison: int = 0) -> None:
        """The first `poison` of its submits have a task that ends its worker."""
        self._site = site
        self._machine = machine
        self._submits = submits
        self._poison = poison
        self._entropy = site.world.entropy(f"producer {machine.name}")
        self._poisons = site.world.entropy(f"poisons of {machine.name}")
        self.ids: list[str] = []
        self.submitted: list[tuple[str, Tracked]] = []

    async def run(self, queue: Queue) -> None:
        plan = self._site.plan
        for number in range(self._submits):
            await self._machine.clock.sleep(self._pause_seconds(number))
            if self._site.is_peace:
                return
            chance = 0.3 if plan.profile is Profile.POINTERS else 0.15
            spots = (*_SPOTS, "inbox replace") if plan.direct else _SPOTS
            self._machine.triggers = plan.triggers(self._entropy, spots, chance=chance)
            try:
                if number < self._poison:
                    await self._submit_poison(queue)
                elif self._entropy.random() < plan.keyed:
                    await self._submit_keyed(queue)
                elif self._entropy.random() < plan.batch:
                    await self._submit_many(queue)
                else:
                    await self._submit(queue)
            except PenstockError as error:
                self._site.chronicle.note(self._machine.name, f"is told: {error}")

    def _pause_seconds(self, number: int) -> float:
        plan = self._site.plan
        match plan.profile:
            case Profile.ECHOES if number == self._submits // 2:
                # Until the records of the keys have left.
                return self._entropy.uniform(0.7, 0.95) * plan.storm_seconds
            case Profile.KEYS if self._entropy.random() < 0.5:
                # Around the end of the lifetime of what was submitted before.
                return self._entropy.uniform(KEY_SECONDS - 10, KEY_SECONDS + 30)
            case Profile.KEYS | Profile.LATE | Profile.ECHOES:
                return self._entropy.uniform(0, 50)
        return self._entropy.uniform(0, 1.5 * plan.storm_seconds / self._submits)

    def _delay(self) -> float:
        if self._entropy.random() >= self._site.plan.delayed:
            return 0.0
        if self._site.plan.profile is Profile.KEYS:
            return self._entropy.uniform(20, 120)
        return self._entropy.choice((2.0, 10.0, 40.0))

    def _task(
        self,
        *,
        type: str,
        key: str | None = None,
        draw: Callable[[Entropy, int], Input] = draw_deed,
    ) -> tuple[Tracked, dict[str, object]]:
        site = self._site
        deed = draw(self._entropy, site.next_number())
        task = Tracked(deed.n, self._machine.name, site.world.now(), key=key)
        if key is not None:
            task.place = LAYOUT.pack(keyed_pack(type=type, key=key))
        site.tracker.add(task)
        words = f"submits task {deed.n} of type {type}, which is to {deed.do}"
        site.chronicle.note(task.by, words + (f", key {key}" if key else ""), task.subject)
        return task, {"n": deed.n, "do": deed.do, "seconds": deed.seconds, "times": deed.times}

    async def _submit(self, queue: Queue) -> None:
        kind = self._entropy.choice(TYPES)
        task, value = self._task(type=kind)
        found = await queue.submit(kind, value, delay=self._delay())
        self._answered(task, found.id)

    async def _submit_keyed(self, queue: Queue) -> None:
        key = f"key {self._entropy.randrange(self._site.plan.keys)}"
        # The same key of another type is another key.
        kind = TYPES[0]
        task, value = self._task(type=kind, key=key)
        found = await queue.submit(kind, value, key=key, delay=self._delay())
        self._answered(task, found.id)

    async def _submit_many(self, queue: Queue) -> None:
        kind = self._entropy.choice(TYPES)
        drawn = [self._task(type=kind) for _ in range(self._entropy.randrange(2, _BATCH_MAX + 1))]
        await self._send_many(queue, kind, drawn)

    async def _submit_poison(self, queue: Queue) -> None:
        """A task that ends its workers, and others that must not suffer for it."""
        kind = self._entropy.choice(TYPES)
        count = self._entropy.randrange(1, _BATCH_MAX + 1)
        place = self._entropy.randrange(count)
        draws = [draw_poison if each == place else draw_deed for each in range(count)]
        tasks = [self._task(type=kind, draw=draw) for draw in draws]
        if self._poisons.random() < 0.5:
            await self._send_many(queue, kind, tasks)
            return
        # Each in a pack of its own, so that no ledger tells of the others.
        for task in tasks:
            await self._send_many(queue, kind, [task])

    async def _send_many(self, queue: Queue, kind: str, drawn: Drawn) -> None:
        try:
            found = await queue.submit_many(
                kind, [value for _, value in drawn], delay=self._delay()
            )
        except NotAllSubmitted as error:
            for (task, _), answer in zip(drawn, error.tasks, strict=True):
                if isinstance(answer, str):
                    self._answered(task, answer)
            return
        for (task, _), each in zip(drawn, found, strict=True):
            self._answered(task, each.id)

    def _answered(self, task: Tracked, id: str) -> None:
        self.ids.append(id)
        self.submitted.append((id, task))
        self._site.referee.answered(task)


class Canceller:
    """Cancels tasks that it has heard of."""

    def __init__(self, site: Site, machine: Machine, producers: list[Producer]) -> None:
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


class Reader:
    """Asks for tasks while things happen to them, and once more when all has ended."""

    def __init__(self, site: Site, machine: Machine, producers: list[Producer]) -> None:
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


class LoneMonitor:
    """A monitor that is no worker's, as `penstock queue monitor` runs it."""

    def __init__(self, site: Site, machine: Machine) -> None:
        self._site = site
        self._machine = machine

    async def run(self, queue: Queue) -> None:
        await run_monitor(
            queue.access,
            tell=lambda _: None,
            stopping=self._site.peace,
            period_seconds=self._machine.entropy.uniform(*_MONITOR_SECONDS),
        )


class Operator:
    """Damages what is only an index, by hand, with the bucket's own tools."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._entropy: Entropy = site.world.entropy("operator")

    async def run(self) -> None:
        pause = self._site.plan.storm_seconds / 8
        while not self._site.is_peace:
            await self._site.clock.sleep(self._entropy.uniform(0, pause))
            if not self._site.is_peace:
                self._act()

    def _act(self) -> None:
        bucket, entropy = self._site.bucket, self._entropy
        folders = [LAYOUT.shard_leases, LAYOUT.workers, LAYOUT.ready, LAYOUT.monitor]
        folder = entropy.choice([*folders, LAYOUT.inboxes] if self._site.plan.direct else folders)
        keys = [key for key in bucket.objects if key.startswith(folder)]
        if folder == LAYOUT.ready:
            keys = [key for key in keys if LAYOUT.read_pointer(key)]
        if not keys:
            return
        key = entropy.choice(sorted(keys))
        bucket.hand = OPERATOR
        if entropy.random() < 0.6:
            self._site.chronicle.note(OPERATOR, f"deletes {key}")
            bucket.remove(key)
        elif folder == LAYOUT.ready:
            head = key.rpartition("/")[2].partition("@")[0]
            nonce = new_id(entropy, characters=NONCE_CHARACTERS)
            self._site.chronicle.note(OPERATOR, f"doubles {key}")
            bucket.write(key.replace(head, nonce, 1), bucket.objects[key].body, {})
        else:
            self._site.chronicle.note(OPERATOR, f"damages {key}")
            bucket.write(key, b"\x00 not what it was", {})
