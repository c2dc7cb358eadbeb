"""Tasks to look at: those that are in the queue, those that settled recently, dead letters.

| what | requests at the most |
|---|---|
| `list_tasks` | a survey, and 2 GETs a pack, for `READS_MAX` packs |
| `dead_letters` | a LIST for every 1,000 batches, and `BATCHES_MAX` GETs |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import UnreadableObject
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.inspection.survey import Survey, dead_keys, document, surveyed
from penstock.queue.ledger import Ledger, check_ledger
from penstock.queue.pack import Pack, check_pack
from penstock.queue.places import PackAt
from penstock.queue.views import STATES, TaskView, view_of_ledger, view_of_pack
from penstock.store.base import Entry
from penstock.store.metered import labelled

READS_MAX: Final = 500
BATCHES_MAX: Final = 50
_AT_ONCE: Final = 16
_SETTLED: Final = frozenset(STATES[-4:])


@dataclass(frozen=True, slots=True)
class Listing:
    """Tasks that were found. `is_whole` is false if there may be more."""

    tasks: tuple[TaskView, ...]
    notes: tuple[str, ...]
    is_whole: bool


async def list_tasks(
    access: Access,
    *,
    statuses: Collection[str] = STATES,
    type: str | None = None,
    limit: int = 50,
) -> Listing:
    """Tasks of these statuses that are in the queue or have settled recently.

    First what runs, retries or is in part done, then what waits, both oldest first, then what has
    settled, newest first. If failed tasks are asked for, by that word alone, the dead letters too.
    """
    with labelled("inspect"):
        now = access.now().middle
        survey = await surveyed(access)
        wanted = [
            at
            for at, (pack, ledger) in survey.pairs.items()
            if type in (None, at.type) and _may_have(pack, ledger, statuses)
        ]
        wanted.sort(key=lambda at: _rank(survey, at, now))
        found: list[TaskView] = []
        notes = list(survey.notes)
        reached = 0
        while reached < min(len(wanted), READS_MAX) and len(found) <= limit:
            some = wanted[reached : reached + _AT_ONCE]
            reached += len(some)
            read = await asyncio.gather(*(_views(access, at, survey, now) for at in some))
            for views in read:
                if isinstance(views, UnreadableObject):
                    notes.append(str(views))
                else:
                    found += [view for view in views if view.status in statuses]
    is_whole = survey.is_whole and reached == len(wanted) and len(found) <= limit
    if set(statuses) == {"failed"} and len(found) <= limit:
        dead = await dead_letters(access, type=type, limit=limit)
        known = {view.id for view in found}
        found += [view for view in dead.tasks if view.id not in known]
        notes += dead.notes
        is_whole = is_whole and dead.is_whole and len(found) <= limit
    return Listing(tuple(found[:limit]), tuple(notes), is_whole)


def _may_have(pack: Entry | None, ledger: Entry | None, statuses: Collection[str]) -> bool:
    """Whether there may be tasks of these statuses in a pack that is listed so."""
    if pack is not None and ledger is not None:
        return True
    alone = {"ready", "delayed"} if pack is not None else _SETTLED
    return not alone.isdisjoint(statuses)


def _rank(survey: Survey, at: PackAt, now: float) -> tuple[int, float]:
    pack, ledger = survey.pairs[at]
    if pack is None:
        return 3, -(ledger.modified if ledger else 0.0)
    if ledger is not None:
        return 0, survey.since(at)
    due = survey.minute(at) * 60
    return (1, survey.since(at)) if due <= now else (2, due)


async def _views(
    access: Access, at: PackAt, survey: Survey, now: float
) -> list[TaskView] | UnreadableObject:
    """The tasks of a pack, as `Queue.get` would show them."""
    listed_pack, listed_ledger = survey.pairs[at]
    pack: Pack | None = None
    ledger: Ledger | None = None
    try:
        if listed_ledger is not None:
            ledger = await document(access.store, access.layout.ledger(at), Ledger)
        if listed_pack is not None:
            pack = await document(access.store, access.layout.pack(at), Pack)
        if ledger is not None:
            check_ledger(at, ledger)
        if pack is not None:
            check_pack(at, pack)
    except UnreadableObject as error:
        return error
    if ledger is not None and ledger.settled and pack is not None:
        # A key that is used again: the pack is new if it came after the end of the other.
        is_new = ledger.key is not None and pack.submitted_ms >= ledger.key_ends_ms
        pack, ledger = (pack, None) if is_new else (None, ledger)
    if ledger is not None:
        return [view_of_ledger(at, place, ledger, pack) for place in range(at.count)]
    if pack is not None:
        return [view_of_pack(at, place, pack, now=now) for place in range(at.count)]
    return []


async def dead_letters(access: Access, *, type: str | None = None, limit: int = 50) -> Listing:
    """The failed tasks in the archive of dead letters, roughly the last first."""
    found: dict[str, TaskView] = {}
    notes: list[str] = []
    with labelled("inspect"):
        keys = await dead_keys(access, notes)
        for key in keys[:BATCHES_MAX]:
            if len(found) > limit:
                break
            try:
                async for at, ledger in archive.read(access.store, access.layout, key):
                    check_ledger(at, ledger)
                    views = (view_of_ledger(at, n, ledger, None) for n in range(at.count))
                    failed = [view for view in views if view.status == "failed"]
                    found.update({v.id: v for v in failed if type in (None, v.type)})
            except UnreadableObject as error:
                notes.append(str(error))
    is_whole = len(found) <= limit and len(keys) <= BATCHES_MAX
    newest = sorted(found.values(), key=lambda view: -(view.settled_at or 0.0))
    return Listing(tuple(newest[:limit]), tuple(notes), is_whole)
