"""Claims of several workers for one operator, made as one: see `gathering`.

A claim that finds a free lane is made at once. Those that come while the lanes of their operator
are taken are one transaction: as many tasks are picked as they have places together, and given to
them in the order in which they came. Each worker's attempts are its own, with its name, leases and
tokens. Claims in batches, or of one job alone, are made by themselves. What is raised, because
nothing could be signed, undoes the whole claim, and each is made by itself then.

Called by `api.working`. There is a gathering for each operator that somebody is waiting for, so
what workers make up costs nothing that stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.dispatcher.api.gathering import Gathering
from penstock.dispatcher.capabilities.issuing import Issuer
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.tasks.values import Claimed


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Room of a worker for one task."""

    worker: str


_Claims = Gathering[_Place, Claimed | None]


class GatheredClaims:
    """Claims for the workers of one dispatcher."""

    def __init__(self, tasks: Tasks, issuer: Issuer) -> None:
        self._tasks = tasks
        self._issuer = issuer
        self._operators: dict[str, _Claims] = {}

    async def __call__(self, operator: str, *, worker: str, limit: int) -> list[Claimed]:
        """Begin attempts of the next tasks of an operator: `limit` at most."""
        gathering = self._operators.get(operator)
        if gathering is None:
            call = partial(self._claim, operator)
            gathering = Gathering(call, key=id, items_max=self._issuer.claims_max)
            self._operators[operator] = gathering
        places = [_Place(worker) for _ in range(min(limit, self._issuer.claims_max))]
        try:
            found = await gathering(places)
        finally:
            if gathering.is_idle:
                self._operators.pop(operator, None)
        return [each for each in found if each is not None]

    async def _claim(self, operator: str, places: Sequence[_Place]) -> Sequence[Claimed | None]:
        workers = [each.worker for each in places]
        return await self._tasks.claim_for(operator, workers, issue=self._issuer.tokens_for)
