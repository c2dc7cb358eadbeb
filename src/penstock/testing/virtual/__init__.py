"""Run real asyncio code in virtual time, as a function of a seed.

Sleeping takes no time here: when nothing can run, the clock jumps to the next timer. What can run
at the same instant runs in an order drawn from the seed. So a day of polling takes a second, a
race that shows up once in a thousand runs is found by trying a thousand seeds, and a seed that
has found one finds it again, on any machine:

    async def main(world: World) -> float:
        clock = world.clock(skew_seconds=86_400)   # a machine that is wrong by a day
        async with asyncio.timeout(3600):
            await clock.sleep(60)
        return world.now()                         # true time, for the referee

    for seed in range(500):
        simulate(main, seed=seed)

A simulation that waits for something that never comes raises `Deadlock`, with the tasks and where
they wait; one that goes on for ever raises `Exhausted`; an exception that nobody looked at raises
`Unhandled`; sockets, processes, signals and threads raise `NotSimulated`. Every error carries
the seed. What holds of the order, and what does not, is told in `penstock.testing.virtual.loop`.

Used by the simulator and `penstock cost`, and by users for tests of their own. Nothing outlives
`simulate`: tasks are cancelled, generators closed, and there is nothing outside memory;
failures of that are reported like all others.

A `VirtualClock` is a `penstock.kernel.clock.Clock` on the virtual loop. Each simulated machine
has its own, as wrong as the simulation wants it: a wall clock that is off by any amount, a
monotonic clock that runs a little fast or slow and began at an instant that means nothing to
others. True time is `epoch` plus the loop's time; only the referee of a simulation looks at it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Final, TypeVar

from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.testing.virtual.loop import (
    SECONDS_MAX,
    STEPS_MAX,
    Trace,
    VirtualLoop,
    collections_off,
    unhandled,
)
from penstock.testing.virtual.steps import (
    Deadlock,
    Exhausted,
    NotSimulated,
    SimulationError,
    Unhandled,
    tasks_of,
)


class VirtualClock:
    """A machine's clocks in virtual time.

    `drift` is the rate error of the monotonic clock: with 150e-6 it gains 150 microseconds in
    a true second, and a sleep is over so much earlier. `skew_seconds` is added to the wall
    clock and may be changed at any time, as an operator or a time service would.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        epoch: float = 0.0,
        skew_seconds: float = 0.0,
        drift: float = 0.0,
        start_seconds: float = 0.0,
    ) -> None:
        if not -1 < drift < math.inf:
            raise InvalidInput(f"A clock cannot drift by {drift!r}: it would not go forward.")
        self.skew_seconds = skew_seconds
        self._loop = loop
        self._epoch = epoch
        self._rate = 1 + drift
        self._start = start_seconds

    def monotonic(self) -> float:
        return self._start + self._loop.time() * self._rate

    def wall(self) -> float:
        return self._epoch + self._loop.time() + self.skew_seconds

    async def sleep(self, seconds: float) -> None:
        """Sleep for so many seconds of this clock; `monotonic` shows no less afterwards."""
        if seconds <= 0:
            await _Turn()
            return
        future = self._loop.create_future()
        timer = self._loop.call_at(self._instant_in(seconds), _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    def _instant_in(self, seconds: float) -> float:
        """The loop's time when this clock will have counted so many seconds."""
        target = self.monotonic() + seconds
        instant = self._loop.time() + seconds / self._rate
        # Rounding may leave the clock a trifle short of the target. Who then sleeps for the
        # rest would sleep for nothing, for ever.
        while self._start + instant * self._rate < target:
            instant += max(math.ulp(instant), math.ulp(target))
        return instant


class _Turn:
    """Lets others run once, without a timer."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


Result = TypeVar("Result")

EPOCH: Final = 1_735_689_600.0
"""True time when a simulation begins: 2025-01-01T00:00:00Z."""

_MONOTONIC_START_MAX: Final = 1e7
# What cancelled tasks may still take: they may sleep and retry on their way out, but not stay.
_WIND_DOWN_SECONDS: Final = 86_400.0
_WIND_DOWN_STEPS: Final = 1_000_000
_WIND_DOWN_ROUNDS: Final = 100


class World:
    """What a simulation hands to its main function: the loop, true time, clocks, randomness."""

    def __init__(self, loop: VirtualLoop, *, seed: int | str, epoch: float = EPOCH) -> None:
        self.loop = loop
        self.seed = seed
        self.epoch = epoch
        self._streams: dict[str, Entropy] = {}

    def now(self) -> float:
        """True time, in seconds since the epoch. For the referee: simulated parts have clocks."""
        return self.epoch + self.loop.time()

    def clock(self, *, skew_seconds: float = 0.0, drift: float = 0.0) -> VirtualClock:
        """The clocks of one more machine; its monotonic clock starts anywhere."""
        return VirtualClock(
            self.loop,
            epoch=self.epoch,
            skew_seconds=skew_seconds,
            drift=drift,
            start_seconds=self.entropy("clocks").uniform(0.0, _MONOTONIC_START_MAX),
        )

    def entropy(self, name: str) -> Entropy:
        """The randomness of this name: one stream a name, none of which moves another."""
        if name not in self._streams:
            self._streams[name] = seeded_entropy(f"stream {name} of {self.seed}")
        return self._streams[name]


def simulate(
    main: Callable[[World], Coroutine[Any, Any, Result]] | Coroutine[Any, Any, Result],
    *,
    seed: int | str,
    shuffle: bool = True,
    trace: Trace | None = None,
    seconds_max: float = SECONDS_MAX,
    steps_max: int = STEPS_MAX,
    epoch: float = EPOCH,
) -> Result:
    """Run `main(world)`, or a coroutine, in a virtual loop of its own and return its result.

    What is left when it ends is cancelled and closed. `shuffle=False` keeps the order in which
    things became ready. `trace`, say a list's `append`, is called with a line for every step.
    """
    with collections_off():
        loop = VirtualLoop(
            seed=seed, shuffle=shuffle, trace=trace, seconds_max=seconds_max, steps_max=steps_max
        )
        world = World(loop, seed=seed, epoch=epoch)
        try:
            result = loop.run_until_complete(main(world) if callable(main) else main)
        except BaseException as error:
            error.add_note(f"{_circumstances(world, shuffle=shuffle)}.")
            for problem in _wind_down(loop):
                error.add_note(f"While it was wound down: {problem}")
            raise
        problems = _wind_down(loop)
        if problems:
            first, *others = problems
            first.add_note(f"{_circumstances(world, shuffle=shuffle)}, after its end.")
            for problem in others:
                first.add_note(f"And: {problem}")
            raise first
        return result


def _circumstances(world: World, *, shuffle: bool) -> str:
    at = f"second {world.loop.time():.6f}, step {world.loop.steps:,}"
    return f"Simulated with seed={world.seed!r}, shuffle={shuffle}; it failed at {at}"


def _wind_down(loop: VirtualLoop) -> list[SimulationError]:
    """Cancel and close what is left, and return whatever goes wrong with it."""
    problems: list[SimulationError] = list(loop.take_failures())
    handler = loop.get_exception_handler()
    if handler is None:
        loop.set_exception_handler(lambda _loop, context: problems.append(unhandled(context)))
    loop.seconds_max = loop.time() + _WIND_DOWN_SECONDS
    loop.steps_max = loop.steps + _WIND_DOWN_STEPS
    for part in (_cancel_tasks, _close_generators, VirtualLoop.close):
        problem = _problem(part, loop)
        if problem is not None:
            problems.append(problem)
    loop.set_exception_handler(handler)
    return problems


def _problem(part: Callable[[VirtualLoop], None], loop: VirtualLoop) -> SimulationError | None:
    try:
        part(loop)
    except SimulationError as problem:
        return problem
    return None


def _cancel_tasks(loop: VirtualLoop) -> None:
    """Cancel all tasks, and those that are started on the way out, until nothing is left."""
    for _ in range(_WIND_DOWN_ROUNDS):
        tasks = tasks_of(loop)
        if not tasks and loop.is_idle:
            return
        if tasks:
            _cancel(loop, tasks)
        else:
            loop.run_until_complete(_drain(loop))
    raise Exhausted(f"Cancelled tasks have started others {_WIND_DOWN_ROUNDS} times in a row.")


def _cancel(loop: VirtualLoop, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended."""
    for task in tasks:
        if task not in loop.generators.closing:
            task.cancel()
    outcomes = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome, Exception):
            message = "A task failed when it was cancelled"
            loop.call_exception_handler({"message": message, "exception": outcome, "task": task})


async def _drain(loop: VirtualLoop) -> None:
    """Let callbacks run until none is ready."""
    while not loop.is_idle:
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def _close_generators(loop: VirtualLoop) -> None:
    loop.run_until_complete(loop.shutdown_asyncgens())


__all__ = [
    "EPOCH",
    "SECONDS_MAX",
    "STEPS_MAX",
    "Deadlock",
    "Exhausted",
    "NotSimulated",
    "SimulationError",
    "Unhandled",
    "VirtualClock",
    "VirtualLoop",
    "World",
    "simulate",
]
