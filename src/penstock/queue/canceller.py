"""Cancelling: tasks that have not started are settled, running ones are asked to stop.

An unclaimed task is claimed first, so that nobody starts it, the pack is checked as before any
start, and then it is settled by a swap (QUEUE-7). A crash between leaves a claim whose lease ends
by itself; the task is then as it was. All selected tasks of a pack are cancelled together: two to
four requests a pack.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from penstock.kernel.entropy import new_id
from penstock.kernel.errors import InvalidInput, NotFound, VersionConflict
from penstock.queue import transitions
from penstock.queue.attempt_outcomes import REASON_CHARACTERS_MAX, AttemptCancelled
from penstock.queue.context import QueueContext
from penstock.queue.ids import PackAt, TaskId, check_name, task_at
from penstock.queue.inspection.task_search import TagFilters, TaskListing, list_tasks
from penstock.queue.ledger import Ledger
from penstock.queue.pack_session import PackSession
from penstock.queue.task_views import CANCELLER, STATES, TaskView, view_of_ledger
from penstock.queue.transitions import LedgerClaim
from penstock.store.metered import labelled

CANCEL_LIMIT: Final = 1000
LIVE: Final = STATES[:4]
"""The words for tasks that have not ended."""
_LOOKS_MAX: Final = 10
_LEASE_MS: Final = 30_000
_ATTEMPTS_MAX: Final = 2**31


async def cancel_tasks(
    access: QueueContext, ids: Iterable[TaskId], *, reason: str = ""
) -> dict[TaskId, TaskView]:
    """Cancel these tasks, a pack at a time; returns what became of those that were there."""
    check_reason(reason)
    packs: dict[PackAt, set[int]] = {}
    for at, place in map(task_at, ids):
        packs.setdefault(at, set()).add(place)
    views: dict[TaskId, TaskView] = {}
    for at, places in packs.items():
        session = CancelSession(access.store, access.layout, at, entropy=access.entropy)
        session.reason = reason
        drawn = new_id(access.entropy, characters=16)
        claim = LedgerClaim(drawn, CANCELLER, _LEASE_MS, at.count, _ATTEMPTS_MAX)
        with labelled("cancel"), suppress(NotFound):
            ledger = await session.cancel(frozenset(places), claim)
            for place in sorted(places):
                views[at.task(place)] = view_of_ledger(at, place, ledger, None)
    return views


async def cancel_found(
    access: QueueContext,
    *,
    type: str | None = None,
    tags: TagFilters | None = None,
    limit: int = CANCEL_LIMIT,
    reason: str = "",
) -> TaskListing:
    """Cancel what has not ended of a type, or has these tags; the tasks as they are then.

    A tag that no task has, as one that is mistyped, cancels nothing: it raises `InvalidInput`.
    """
    check_reason(reason)
    if type is None and not tags:
        raise InvalidInput("Give a type or tags: they select the tasks to cancel.")
    if type is not None:
        check_name(type, what="type")
    found = await list_tasks(
        access, statuses=LIVE, type=type, tags=tags, limit=limit, among="that can be cancelled"
    )
    for sentence in found.unknown_tags:
        raise InvalidInput(f"Nothing was cancelled: {sentence}")
    views = await cancel_tasks(access, [view.id for view in found], reason=reason)
    return replace(found, tasks=tuple(views.values()))


def check_reason(reason: str) -> None:
    """Raises `InvalidInput` for a reason that a log has no room for."""
    if len(reason) > REASON_CHARACTERS_MAX:
        raise InvalidInput(f"A reason has at most {REASON_CHARACTERS_MAX} characters.")


class CancelSession(PackSession):
    """A pack and its ledger, in the hands of somebody who wants tasks of it cancelled."""

    reason = ""
    """Why, in words for people."""

    async def cancel(self, places: frozenset[int], claim: LedgerClaim) -> Ledger:
        """Cancel what has not started, ask the rest to stop. Raises `NotFound` for no such pack."""
        for _ in range(_LOOKS_MAX):
            ledger = await self._ledger.read()
            if ledger is None:
                ledger = await self._cancel_unclaimed(places, claim)
            elif ledger.settled and ledger.key is None:
                await self._tidy(ledger)
                return ledger
            elif ledger.settled:
                ledger = await self._cancel_after(ledger, places, claim)
            else:
                ledger = await self._cancel_beside(ledger, places, claim)
            if ledger is not None:
                return ledger
        raise VersionConflict(f"Pack {self.at.pack!r} is written too often.", key=self._pack.key)

    async def _cancel_unclaimed(self, places: frozenset[int], claim: LedgerClaim) -> Ledger | None:
        head = await self._store.head(self._pack.key)
        provisional = replace(claim, places=places, is_provisional=True)
        claimed = await self._claim(provisional, head.version)
        if claimed is None:
            return None
        await self.settle(
            {place: (claim.id, AttemptCancelled(self.reason)) for place in claimed.attempts}
        )
        return await self._ledger.read()

    async def _cancel_after(
        self, ledger: Ledger, places: frozenset[int], claim: LedgerClaim
    ) -> Ledger | None:
        """A key that was used before: the new pack is cancelled if there is one (QUEUE-6)."""
        seen = await self._look(only_due=False)
        if seen is None:
            return ledger
        if not await self._makes_room(ledger, seen):
            # Unless somebody else has begun the new one meanwhile: then look again.
            present, _ = self.ledger
            return ledger if present is None or present.born == ledger.born else None
        return await self._cancel_unclaimed(places, claim)

    async def _cancel_beside(
        self, ledger: Ledger, places: frozenset[int], claim: LedgerClaim
    ) -> Ledger | None:
        checked = await self._check(ledger)
        if checked is None:
            return None
        now = await self._store.now()

        def change(present: Ledger | None) -> Ledger | None:
            if present is None or present.born != checked.born:
                return None
            cancelled = transitions.cancel(
                present,
                places,
                who=claim.holder,
                now=now,
                inputs=checked.pack.inputs,
                reason=self.reason,
            )
            return transitions.recorded(cancelled, checked.pack, now)

        cancelled = await self._ledger.update(change)
        if cancelled is None or cancelled.born != checked.born:
            return None
        if cancelled.settled:
            await self._pack.delete(checked.version)
        return cancelled
