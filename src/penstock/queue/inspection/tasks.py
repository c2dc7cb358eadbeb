"""Tasks to look at: those that are in the queue, those that settled recently, dead letters.

| what | requests at the most |
|---|---|
| `list_tasks` | a survey, and 2 GETs a pack, for `READS_MAX` packs |
| `dead_letters` | a LIST for every 1,000 batches, and `BATCHES_MAX` GETs |

A filter by tags changes which tasks are shown, not how many packs are read for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.errors import InvalidInput, UnreadableObject
from penstock.kernel.words import listed, nearest, shown
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.inspection.filters import TagFilter, TagFilters, tag_filters, unknown_tags
from penstock.queue.inspection.survey import Survey, dead_keys, document, surveyed
from penstock.queue.ledger import Ledger, check_ledger
from penstock.queue.pack import Pack, check_pack
from penstock.queue.places import PackAt, check_name
from penstock.queue.views import STATES, TaskView, view_of_ledger, view_of_pack
from penstock.store.base import Entry
from penstock.store.metered import labelled

READS_MAX: Final = 500
BATCHES_MAX: Final = 50
LIMIT_MAX: Final = 10_000
_AT_ONCE: Final = 16
_SETTLED: Final = frozenset(STATES[-4:])


@dataclass(frozen=True, slots=True)
class Listing:
    """Tasks that were found. `is_whole` is false if there may be more."""

    tasks: tuple[TaskView, ...]
    notes: tuple[str, ...]
    is_whole: bool
    unknown_tags: tuple[str, ...] = ()
    """A sentence for each tag that was filtered by and that no task in sight has."""

    def __iter__(self) -> Iterator[TaskView]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


@dataclass(slots=True)
class _Sieve:
    """Which tasks are wanted, and the names of all tags that were met on the way."""

    statuses: Collection[str]
    filters: tuple[TagFilter, ...] = ()
    tags_met: set[str] = field(default_factory=set)

    def wanted(self, views: Iterable[TaskView]) -> list[TaskView]:
        found = []
        for view in views:
            self.tags_met.update(view.tags)
            if view.status in self.statuses and all(f.holds(view.tags) for f in self.filters):
                found.append(view)
        return found


async def list_tasks(
    access: Access,
    *,
    statuses: Collection[str] = STATES,
    type: str | None = None,
    tags: TagFilters | None = None,
    limit: int = 50,
    among: str = "in sight",
    packs_max: int | None = None,
    pages_max: int | None = None,
) -> Listing:
    """Tasks of these statuses that are in the queue or have settled recently.

    First what runs, retries or is in part done, then what waits, both oldest first, then what has
    settled, newest first. If failed tasks are asked for, by that word alone, the dead letters too.
    `among` is what they are called where none has a tag. At most `packs_max` packs are read, or
    `READS_MAX`, and `pages_max` pages of each folder are listed.
    """
    sieve = _Sieve(frozenset(statuses), tag_filters(tags))
    with labelled("inspect"):
        survey = await surveyed(access, pages_max=pages_max)
        found, notes, is_whole = await _in_the_queue(
            access, sieve, survey, type=type, limit=limit, packs_max=packs_max or READS_MAX
        )
        if sieve.statuses == {"failed"} and len(found) <= limit:
            dead = await _dead_letters(access, sieve, type=type, limit=limit)
            known = {view.id for view in found}
            found += [view for view in dead.tasks if view.id not in known]
            notes += dead.notes
            is_whole = is_whole and dead.is_whole and len(found) <= limit
    unknown = unknown_tags(sieve.filters, sieve.tags_met, among=among)
    return Listing(tuple(found[:limit]), tuple(notes), is_whole, tuple(unknown))


async def find_tasks(
    access: Access,
    *,
    status: str | Iterable[str] | None = None,
    type: str | None = None,
    tags: TagFilters | None = None,
    limit: int = 50,
    packs_max: int | None = None,
    pages_max: int | None = None,
) -> Listing:
    """`list_tasks` for words that somebody has typed: they are checked first."""
    statuses = (status,) if isinstance(status, str) else tuple(STATES if status is None else status)
    for word in statuses:
        if word not in STATES:
            meant = nearest(str(word), STATES)
            raise InvalidInput(
                f"{shown(str(word))} is not the status of a task.",
                hint=f"Is {meant!r} meant?" if meant else f"There are {listed(STATES)}.",
            )
    if type is not None:
        check_name(type, what="type")
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidInput(f"The limit of a list is 1 to {LIMIT_MAX:,}, not {limit}.")
    return await list_tasks(
        access,
        statuses=statuses,
        type=type,
        tags=tags,
        limit=limit,
        packs_max=packs_max,
        pages_max=pages_max,
    )


async def _in_the_queue(
    access: Access,
    sieve: _Sieve,
    survey: Survey,
    *,
    type: str | None,
    limit: int,
    packs_max: int,
) -> tuple[list[TaskView], list[str], bool]:
    """The tasks whose packs or ledgers are there, notes, and whether that is all of them."""
    now = access.now().middle
    wanted = [
        at
        for at, (pack, ledger) in survey.pairs.items()
        if type in (None, at.type) and _may_have(pack, ledger, sieve.statuses)
    ]
    wanted.sort(key=lambda at: _rank(survey, at, now))
    found: list[TaskView] = []
    notes = list(survey.notes)
    reached = 0
    while reached < min(len(wanted), packs_max) and len(found) <= limit:
        some = wanted[reached : reached + _AT_ONCE]
        reached += len(some)
        for views in await asyncio.gather(*(_views(access, at, survey, now) for at in some)):
            if isinstance(views, UnreadableObject):
                notes.append(str(views))
            else:
                found += sieve.wanted(views)
    is_whole = survey.is_whole and reached == len(wanted) and len(found) <= limit
    return found, notes, is_whole


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
    with labelled("inspect"):
        return await _dead_letters(access, _Sieve({"failed"}), type=type, limit=limit)


async def _dead_letters(access: Access, sieve: _Sieve, *, type: str | None, limit: int) -> Listing:
    found: dict[str, TaskView] = {}
    notes: list[str] = []
    keys = await dead_keys(access, notes)
    for key in keys[:BATCHES_MAX]:
        if len(found) > limit:
            break
        try:
            async for at, ledger in archive.read(access.store, access.layout, key):
                check_ledger(at, ledger)
                if type in (None, at.type):
                    views = [view_of_ledger(at, n, ledger, None) for n in range(at.count)]
                    found.update({view.id: view for view in sieve.wanted(views)})
        except UnreadableObject as error:
            notes.append(str(error))
    is_whole = len(found) <= limit and len(keys) <= BATCHES_MAX
    newest = sorted(found.values(), key=lambda view: -(view.settled_at or 0.0))
    return Listing(tuple(newest[:limit]), tuple(notes), is_whole)
