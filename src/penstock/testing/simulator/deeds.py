"""What the handlers of a simulated worker do: what their input tells them.

| deed | what the handler does |
|---|---|
| quick | succeeds at once, or after a moment |
| slow | takes longer than leases last |
| retry | raises an error that is retried, for its first attempts |
| fail | raises an error that is not |
| hang | never ends by itself |
| deaf | does not heed an interruption for a while, and then succeeds |
| poison | ends its worker's process, in its first attempts or in all; another is started |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.queue.running.handlers import TaskContext
from penstock.queue.running.retry import Retry
from penstock.queue.worker import Worker
from penstock.testing.simulator.machines import Machine
from penstock.testing.simulator.referee import Referee
from penstock.testing.simulator.tracking import ATTEMPTS_MAX, Input, Result

TYPES: Final = ("a", "b")
_HANG_SECONDS: Final = 1e6


class Passing(Exception):
    """An error that is retried."""


class Lasting(Exception):
    """An error that is not."""


RETRY: Final = Retry(
    attempts=ATTEMPTS_MAX, backoff=1.3, first_seconds=0.5, on=(Passing, TimeoutError)
)


def draw_deed(entropy: Entropy, number: int) -> Input:
    """What a task of this number is to do."""
    draw = entropy.random()
    if draw < 0.35:
        return Input(number, "quick", seconds=entropy.choice((0.0, 1.0)))
    if draw < 0.65:
        return Input(number, "slow", seconds=entropy.uniform(3, 10))
    if draw < 0.77:
        return Input(number, "retry", times=entropy.randrange(1, 4))
    if draw < 0.82:
        return Input(number, "fail")
    if draw < 0.92:
        return Input(number, "hang", times=entropy.choice((0, 1, 1)))
    return Input(number, "deaf", seconds=entropy.uniform(1, 8))


def draw_poison(entropy: Entropy, number: int) -> Input:
    """What a task of this number is to do that ends whatever worker runs it."""
    seconds = entropy.choice((0.0, 0.0, entropy.uniform(0, 4)))
    return Input(number, "poison", seconds=seconds, times=entropy.choice((0, 0, 1, 3)))


class Deeds:
    """The handlers of one machine."""

    def __init__(
        self,
        machine: Machine,
        referee: Referee,
        *,
        concurrency: int,
        poisoned: Callable[[], None],
    ) -> None:
        """`poisoned` is called when a task has ended the process."""
        self._machine = machine
        self._poisoned = poisoned
        self._referee = referee
        self._concurrency = concurrency
        self._running = 0

    def register(self, worker: Worker, types: tuple[str, ...], *, timeout_seconds: float) -> None:
        """Give a worker its handlers."""
        self._referee.can(self._machine.name, types)
        for kind in types:
            worker.handler(kind, timeout=timeout_seconds, retry=RETRY)(self.handle)

    async def handle(self, task: TaskContext) -> dict[str, Any]:
        """One attempt."""
        if self._machine.is_dead:
            raise asyncio.CancelledError
        what = msgspec.json.decode(bytes(task.raw_input), type=Input)
        self._referee.starts_attempt(self._machine.name, what.n, task.attempt)
        how = "is interrupted"
        self._running += 1
        self._referee.runs(self._machine.name, self._running, concurrency=self._concurrency)
        try:
            await self._do(what, task.attempt)
            how = "returns"
        except (Passing, Lasting) as error:
            how = f"raises {type(error).__name__}"
            raise
        finally:
            self._running -= 1
            if not self._machine.is_dead:
                self._referee.ends_attempt(self._machine.name, what.n, how)
        return msgspec.to_builtins(Result(what.n, task.attempt, self._machine.name))  # type: ignore[no-any-return]  # a dict

    async def _do(self, what: Input, attempt: int) -> None:
        clock = self._machine.clock
        match what.do:
            case "quick" | "slow":
                if what.seconds:
                    await clock.sleep(what.seconds)
            case "retry" if attempt <= what.times:
                raise Passing
            case "fail":
                raise Lasting
            case "hang" if attempt <= (what.times or attempt):
                await clock.sleep(_HANG_SECONDS)
            case "poison" if attempt <= (what.times or attempt):
                await self._end_the_process(what)
            case "deaf":
                until = clock.monotonic() + what.seconds
                while clock.monotonic() < until and not self._machine.is_dead:
                    try:
                        await clock.sleep(until - clock.monotonic())
                    except asyncio.CancelledError:
                        continue

    async def _end_the_process(self, what: Input) -> None:
        await self._machine.clock.sleep(what.seconds)
        self._referee.ends_attempt(self._machine.name, what.n, "ends the process")
        self._poisoned()
        self._machine.die()
        raise asyncio.CancelledError
