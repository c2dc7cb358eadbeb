"""Group commit: calls that come at the same time are made as one.

A call that finds a free lane is made at once. While all lanes are taken, calls gather; when a
lane gets free, the first of them makes one call for all, in a transaction of its own, and each
gets its own part. Under load the price of a call is shared; without load nothing is slower.

Invariants: - A call is made at most once by its gatherer, and answered with its own part, in
its own order. - Two calls about the same item are never made as one: each has its own answer. -
What is wrong with one call is no other's fault: if a gathered call fails for any reason but the
  database, all that took part are made one by one.
- A caller that is cancelled takes nobody with it. Whatever it has begun may be done or not, as
  with
  every call whose answer is lost; the others are made one by one.

`GroupedClaims` does so for claims of one operator: as many tasks are picked as the workers have
room for together, and given to them in the order in which they came, each with its worker's own
name, leases and tokens. Claims in batches, or of one job, are made by themselves. If nothing
can be signed the whole claim is undone, and each is made by itself; so it is if one of them is
repeated, whose answer was lost (`lifecycle.RepeatedClaim`). A claim is never made as one with a
repetition of itself, and a repetition is answered with all that the claim has begun. An operator
has a lane only while somebody waits for it. Called by `worker_endpoints`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from penstock.dispatcher.capabilities.tokens import TokenIssuer
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.model import ClaimedTask
from penstock.kernel.errors import DatabaseUnavailable

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Item, Result]):
    """A call that has not been made."""

    items: Sequence[Item]
    outcome: asyncio.Future[_Lead[Item, Result] | _Alone | Sequence[Result]]


@dataclass(frozen=True, slots=True)
class _Lead(Generic[Item, Result]):
    """You have a lane: make one call for these, yourself among them."""

    group: Sequence[_Waiting[Item, Result]]


@dataclass(frozen=True, slots=True)
class _Alone:
    """Nobody made your call: make it yourself."""


class GroupCommit(Generic[Item, Result]):
    """Makes calls, gathered where they would have to wait.

    `call` answers each item in its place. `key` says what an item is about, and `items_max` how
    many one call may have.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        key: Callable[[Item], Hashable],
        items_max: int,
        lanes: int = 2,
    ) -> None:
        self._call = call
        self._key = key
        self._items_max = items_max
        self._free = self._lanes = lanes
        self._waiting: deque[_Waiting[Item, Result]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._free == self._lanes

    async def __call__(self, items: Sequence[Item]) -> Sequence[Result]:
        """The answers to these items."""
        if self._free:
            self._free -= 1
            try:
                return await self._call(items)
            finally:
                self._pass_on()
        future = asyncio.get_running_loop().create_future()
        mine: _Waiting[Item, Result] = _Waiting(items, future)
        self._waiting.append(mine)
        try:
            outcome = await mine.outcome
        except asyncio.CancelledError:
            self._abandon(mine)
            raise
        if isinstance(outcome, _Lead):
            return await self._lead(mine, outcome.group)
        if isinstance(outcome, _Alone):
            return await self._call(items)
        return outcome

    async def _lead(
        self, mine: _Waiting[Item, Result], group: Sequence[_Waiting[Item, Result]]
    ) -> Sequence[Result]:
        try:
            return await self._make(mine, group)
        finally:
            # Whoever has no outcome by now was left behind.
            for each in group:
                _resolve(each, _Alone())
            self._pass_on()

    async def _make(
        self, mine: _Waiting[Item, Result], group: Sequence[_Waiting[Item, Result]]
    ) -> Sequence[Result]:
        try:
            answers = await self._call([item for each in group for item in each.items])
        except DatabaseUnavailable as error:
            for each in group:
                if each is not mine and not each.outcome.done():
                    each.outcome.set_exception(error)
            raise
        except Exception:
            if len(group) == 1:
                raise
            return await self._call(mine.items)
        if len(group) == 1:
            # All of it, also where that is more than was asked for.
            return answers
        first = 0
        found: Sequence[Result] = ()
        for each in group:
            part = answers[first : first + len(each.items)]
            first += len(each.items)
            _resolve(each, part)
            if each is mine:
                found = part
        return found

    def _pass_on(self) -> None:
        """Give a lane to those who wait, or set it free."""
        group: list[_Waiting[Item, Result]] = []
        left: deque[_Waiting[Item, Result]] = deque()
        keys: set[Hashable] = set()
        for each in self._waiting:
            if each.outcome.done():
                continue
            about = {self._key(item) for item in each.items}
            has_room = len(keys) + len(each.items) <= self._items_max
            if not group or (has_room and keys.isdisjoint(about)):
                group.append(each)
                keys |= about
            else:
                left.append(each)
        self._waiting = left
        if group:
            group[0].outcome.set_result(_Lead(group))
        else:
            self._free += 1

    def _abandon(self, mine: _Waiting[Item, Result]) -> None:
        """Leave; what was to be led is done by others."""
        future = mine.outcome
        if future.cancelled() or not future.done() or future.exception() is not None:
            return
        outcome = future.result()
        if isinstance(outcome, _Lead):
            for each in outcome.group:
                _resolve(each, _Alone())
            self._pass_on()


def _resolve(waiting: _Waiting[Item, Result], outcome: _Alone | Sequence[Result]) -> None:
    if not waiting.outcome.done():
        waiting.outcome.set_result(outcome)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Room of a worker for one task."""

    worker: str
    claim_id: str | None
    number: int
    """Among those of its claim."""

    @property
    def key(self) -> Hashable:
        """The same for every repetition of a claim."""
        return id(self) if self.claim_id is None else (self.worker, self.claim_id, self.number)


_Claims = GroupCommit[_Place, ClaimedTask | None]


class GroupedClaims:
    """Claims for the workers of one dispatcher."""

    def __init__(self, tasks: Tasks, issuer: TokenIssuer) -> None:
        self._tasks = tasks
        self._issuer = issuer
        self._operators: dict[str, _Claims] = {}

    async def __call__(
        self, operator: str, *, worker: str, limit: int, claim_id: str | None = None
    ) -> list[ClaimedTask]:
        """Claim the next tasks of an operator: `limit` at most."""
        gathering = self._operators.get(operator)
        if gathering is None:
            call = partial(self._claim, operator)
            gathering = GroupCommit(
                call, key=lambda place: place.key, items_max=self._issuer.claims_max
            )
            self._operators[operator] = gathering
        count = min(limit, self._issuer.claims_max)
        places = [_Place(worker, claim_id, number) for number in range(count)]
        try:
            found = await gathering(places)
        finally:
            if gathering.is_idle:
                self._operators.pop(operator, None)
        return [each for each in found if each is not None]

    async def _claim(self, operator: str, places: Sequence[_Place]) -> Sequence[ClaimedTask | None]:
        workers = [each.worker for each in places]
        return await self._tasks.claim_for(
            operator,
            workers,
            claim_ids=[each.claim_id for each in places],
            issue=self._issuer.tokens_for,
        )
