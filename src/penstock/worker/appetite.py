"""Which operator to ask for work next, and who waits for the answer.

An operator is *hungry* when there is a reason to ask for its tasks: it is new here, a wake-up came,
the last answer was as many as were asked for, a task of it has ended, or nobody has asked for a
while. The hungry are asked one after the other, in the order in which they became so, so that none
keeps another waiting for long. An answer with fewer than asked for ends the hunger.

An operator of which this worker has handed a task back, because it cannot run it, *rests*: for a
while, longer each time, nothing of it is claimed here, and its wake-ups go to other workers.

A wake-up is settled by a claim that began after it was heard: an earlier one may have missed what
the wake-up is about. Used by `penstock.worker.worker`, from the event loop only; holds no tasks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherUnavailable
from penstock.worker.backoff import Backoff

_REST_SECONDS_MIN: Final = 2.0
_REST_SECONDS_MAX: Final = 60.0


@dataclass(slots=True)
class _Operator:
    look_at: float
    rests: Backoff
    rests_until: float = 0.0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asking:
    """The claim that is under way; there is one at a time."""

    operator: str
    waiting: tuple[asyncio.Future[None], ...]


class Appetite:
    """The operators that a worker serves, and their hunger."""

    def __init__(self, *, look_seconds: float, clock: Clock, entropy: Entropy) -> None:
        self._look_seconds = look_seconds
        self._clock = clock
        self._entropy = entropy
        self._operators: dict[str, _Operator] = {}
        # A dict as a queue that holds each once.
        self._hungry: dict[str, None] = {}
        self._asking: Asking | None = None

    @property
    def operators(self) -> Collection[str]:
        """What is served."""
        return self._operators.keys()

    def serve(self, operators: Collection[str]) -> bool:
        """Serve these from now on; new ones are hungry. Returns whether anything has changed."""
        gone = self._operators.keys() - set(operators)
        for name in gone:
            self._hungry.pop(name, None)
            _settle(self._operators.pop(name).waiting)
        new = [name for name in operators if name not in self._operators]
        for name in new:
            rests = Backoff(
                self._entropy, first_seconds=_REST_SECONDS_MIN, most_seconds=_REST_SECONDS_MAX
            )
            self._operators[name] = _Operator(self._next_look(), rests)
            self._hungry[name] = None
        return bool(gone or new)

    def hunger(self, operator: str) -> None:
        """There may be work."""
        known = self._operators.get(operator)
        if known is not None and known.rests_until <= self._clock.monotonic():
            self._hungry.setdefault(operator)

    def judge(self, operator: str, *, is_able: bool) -> None:
        """Whether this worker could run a task of an operator; if it could not, that rests."""
        known = self._operators.get(operator)
        if known is None:
            return
        if is_able:
            known.rests.succeeded()
        elif known.rests_until <= self._clock.monotonic():
            # Once for all that one claim has brought.
            known.rests_until = self._clock.monotonic() + known.rests.next_seconds()
            known.look_at = known.rests_until
            self._hungry.pop(operator, None)
            _refuse(known.waiting)
            known.waiting = []

    def hear(self, operator: str) -> asyncio.Future[None]:
        """A wake-up; the future is done when a claim was answered that began after this."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known = self._operators.get(operator)
        if known is None:
            # If there is work for it after all, the next hello says so.
            future.set_result(None)
            return future
        if known.rests_until > self._clock.monotonic():
            _refuse([future])
            return future
        # Those that have given up waiting are not kept.
        known.waiting = [*(each for each in known.waiting if not each.done()), future]
        self.hunger(operator)
        return future

    @property
    def is_hungry(self) -> bool:
        """Whether there is somebody to ask."""
        return bool(self._hungry) or self.seconds_to_look() <= 0

    def next(self) -> Asking | None:
        """The operator to ask now, which is taken out of the queue."""
        now = self._clock.monotonic()
        for name, operator in self._operators.items():
            if operator.look_at <= now:
                self._hungry.setdefault(name)
        if not self._hungry:
            return None
        name = next(iter(self._hungry))
        del self._hungry[name]
        operator = self._operators[name]
        operator.look_at = self._next_look()
        waiting, operator.waiting = tuple(operator.waiting), []
        self._asking = Asking(name, waiting)
        return self._asking

    def answered(self, asking: Asking, *, is_more: bool) -> None:
        """A claim was answered; `is_more` if it brought as many as were asked for."""
        _settle(asking.waiting)
        if is_more:
            self.hunger(asking.operator)

    def failed(self, asking: Asking) -> None:
        """A claim was not answered: whoever waits goes on waiting for the next."""
        operator = self._operators.get(asking.operator)
        if operator is None:
            _settle(asking.waiting)
            return
        operator.waiting[:0] = [each for each in asking.waiting if not each.done()]
        self.hunger(asking.operator)

    def refuse(self, error: Exception) -> None:
        """Send everybody who waits away, also those who wait for the claim that is under way."""
        waiting = [*self._asking.waiting] if self._asking is not None else []
        for operator in self._operators.values():
            waiting += operator.waiting
            operator.waiting = []
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def seconds_to_look(self) -> float:
        """When somebody becomes hungry by waiting."""
        first = min((each.look_at for each in self._operators.values()), default=math.inf)
        return max(0.0, first - self._clock.monotonic())

    def _next_look(self) -> float:
        seconds = self._look_seconds * self._entropy.uniform(0.8, 1.2)
        return self._clock.monotonic() + seconds


def _refuse(waiting: Collection[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            told = "This worker could not run tasks of this operator; another one may."
            future.set_exception(DispatcherUnavailable(told))


def _settle(waiting: Collection[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
