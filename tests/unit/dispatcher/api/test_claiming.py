"""Claims of several workers for one operator, made as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from penstock.dispatcher.api.group_commit import GroupedClaims
from penstock.kernel.clock import SystemClock
from penstock.testing.virtual import World, simulate


class Slow:
    """Has so many tasks of each operator, and takes a second to hand them out."""

    def __init__(self, tasks: int) -> None:
        self.left = {"a": list(range(tasks)), "b": list(range(tasks))}
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    async def claim_for(self, operator: str, workers: Sequence[str], **_: Any) -> Any:
        self.calls.append((operator, tuple(workers)))
        await SystemClock().sleep(1)
        left = self.left[operator]
        return tuple((worker, left.pop(0)) if left else None for worker in workers)


def claims_of(slow: Slow, *, claims_max: int = 100) -> GroupedClaims:
    issuer: Any = SimpleNamespace(claims_max=claims_max, tokens_for=None)
    tasks: Any = slow
    return GroupedClaims(tasks, issuer)


def test_workers_that_ask_at_once_are_one_claim_and_each_has_its_own() -> None:
    async def main(world: World) -> None:
        slow = Slow(8)
        claim = claims_of(slow)

        async def ask(operator: str, number: int) -> Any:
            await SystemClock().sleep(number / 10)
            return await claim(operator, worker=f"w{number}", limit=2)

        *found, of_other = await asyncio.gather(*(ask("a", each) for each in range(5)), ask("b", 5))
        # Two find a lane, and those who come meanwhile are one, but for those of other operators.
        assert slow.calls == [
            ("a", ("w0", "w0")),
            ("a", ("w1", "w1")),
            ("b", ("w5", "w5")),
            ("a", ("w2", "w2", "w3", "w3", "w4", "w4")),
        ]
        each_own = [[(f"w{each}", 2 * each), (f"w{each}", 2 * each + 1)] for each in range(4)]
        assert found == [*each_own, []]
        assert of_other == [("w5", 0), ("w5", 1)]

    simulate(main, seed=1)


def test_no_claim_is_of_more_than_may_be_signed_at_once() -> None:
    async def main(world: World) -> None:
        slow = Slow(100)
        claim = claims_of(slow, claims_max=3)
        await asyncio.gather(*(claim("a", worker=str(each), limit=9) for each in range(4)))
        assert [len(workers) for _, workers in slow.calls] == [3, 3, 3, 3]

    simulate(main, seed=1)
