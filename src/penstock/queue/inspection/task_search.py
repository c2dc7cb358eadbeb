"""Searching tasks: in the queue, recently settled, and dead letters; with filters by tags.

| what | requests at the most |
|---|---|
| `list_tasks` | a survey, and 2 GETs a pack, for `READS_MAX` packs |
| `dead_letters` | a LIST for every 1,000 batches, and `BATCHES_MAX` GETs |

| tag filter | matches a task that |
|---|---|
| `name=value` | has the tag with this value; the value may be empty |
| `name!=value` | has it with another value, or has it not |
| `name` | has the tag, whatever its value |

All filters must match. Tags are in packs and ledgers and not in keys: a filter by tags changes
which tasks are shown, not how many packs are read, and costs no write.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.kernel.errors import InvalidInput, UnreadableObject
from penstock.kernel.text import listed, nearest, shown
from penstock.queue import archive
from penstock.queue.context import QueueContext
from penstock.queue.ids import PackAt, check_name
from penstock.queue.ledger import Ledger, QueueTaskStatus, check_ledger
from penstock.queue.pack import Pack, check_pack
from penstock.queue.submit_options import TAG_CHARACTERS_MAX, TAG_NAME, TAGS_MAX
from penstock.queue.survey import Survey, dead_keys, document, surveyed
from penstock.queue.task_views import DELAYED, STATES, TaskView, view_of_ledger, view_of_pack
from penstock.store.base import Entry
from penstock.store.metered import labelled

_FORM: Final = re.compile(rf"({TAG_NAME.pattern})(?:(!?=)(.*))?", re.DOTALL)
_HINT: Final = "Write name=value, name!=value, or name alone. Names have letters, digits, _ - and ."

TagFilters = Mapping[str, str | None] | Sequence[str]
"""Tags to filter by: `{"env": "prod"}`, None for any value; or forms such as `"env!=prod"`."""


@dataclass(frozen=True, slots=True)
class TagFilter:
    """One condition on the tags of a task."""

    name: str
    value: str | None = None
    """None: any value."""
    is_not: bool = False

    def holds(self, tags: Mapping[str, str]) -> bool:
        if self.value is None:
            return self.name in tags
        return (tags.get(self.name) == self.value) is not self.is_not


def tag_filters(given: TagFilters | None) -> tuple[TagFilter, ...]:
    """The filters that were asked for, or `InvalidInput`."""
    if given is None:
        return ()
    if isinstance(given, str):
        raise InvalidInput(
            f"{shown(given)} is one filter and not several.", hint=f"Write tags=[{given!r}]."
        )
    if len(given) > TAGS_MAX:
        raise InvalidInput(f"At most {TAGS_MAX} filters by tags are taken, not {len(given)}.")
    if isinstance(given, Mapping):
        return tuple(_pair(name, value) for name, value in given.items())
    return tuple(map(parsed, given))


def parsed(text: Any) -> TagFilter:
    """A filter from its form, or `InvalidInput`."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidInput(f"{shown(str(text))} is not a tag filter.", hint=_HINT)
    if (found[3] or "").startswith("="):
        # Nobody means a value that begins so; who does can say it as a mapping.
        raise InvalidInput(
            f"{shown(text)} has one '=' too many.",
            hint=f"Write {found[1]}{found[2]}{found[3].lstrip('=')}.",
        )
    return _checked(TagFilter(found[1], found[3], is_not=found[2] == "!="))


def _pair(name: Any, value: Any) -> TagFilter:
    if not isinstance(name, str) or not TAG_NAME.fullmatch(name):
        raise InvalidInput(
            f"{shown(str(name))} is not the name of a tag.",
            hint="Names have 1 to 50 letters, digits, '_', '-' and '.'.",
        )
    if value is not None and not isinstance(value, str):
        raise InvalidInput(
            f"The tag {name!r} cannot have the value {shown(str(value))}: tags are texts."
        )
    return _checked(TagFilter(name, value))


def _checked(made: TagFilter) -> TagFilter:
    if made.value is not None and len(made.value) > TAG_CHARACTERS_MAX:
        raise InvalidInput(
            f"No tag {made.name!r} is that long: texts have at most {TAG_CHARACTERS_MAX}"
            " characters."
        )
    return made


def unknown_tags(
    filters: Iterable[TagFilter], names: Iterable[str], *, among: str = "in sight"
) -> list[str]:
    """A sentence for each tag that is filtered by and that no task has `among` those looked at."""
    known = sorted(names)
    sentences = []
    for name in dict.fromkeys(each.name for each in filters):
        if name in known:
            continue
        meant = nearest(name, known)
        rest = f"; is {meant!r} meant?" if meant else f"; there are {listed(known)}."
        sentences.append(f"no task {among} has a tag {name!r}{rest if known else '.'}")
    return sentences


READS_MAX: Final = 500
BATCHES_MAX: Final = 50
LIMIT_MAX: Final = 10_000
_AT_ONCE: Final = 16
_SETTLED: Final = frozenset(STATES[-4:])
_FAILED: Final = frozenset({QueueTaskStatus.FAILED.word})
_WAITING: Final = frozenset({QueueTaskStatus.READY.word, DELAYED})


@dataclass(frozen=True, slots=True)
class TaskListing:
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
    access: QueueContext,
    *,
    statuses: Collection[str] = STATES,
    type: str | None = None,
    tags: TagFilters | None = None,
    limit: int = 50,
    among: str = "in sight",
    packs_max: int | None = None,
    pages_max: int | None = None,
) -> TaskListing:
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
        if sieve.statuses == _FAILED and len(found) <= limit:
            dead = await _dead_letters(access, sieve, type=type, limit=limit)
            known = {view.id for view in found}
            found += [view for view in dead.tasks if view.id not in known]
            notes += dead.notes
            is_whole = is_whole and dead.is_whole and len(found) <= limit
    unknown = unknown_tags(sieve.filters, sieve.tags_met, among=among)
    return TaskListing(tuple(found[:limit]), tuple(notes), is_whole, tuple(unknown))


async def find_tasks(
    access: QueueContext,
    *,
    status: str | Iterable[str] | None = None,
    type: str | None = None,
    tags: TagFilters | None = None,
    limit: int = 50,
    packs_max: int | None = None,
    pages_max: int | None = None,
) -> TaskListing:
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
    access: QueueContext,
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
    alone = _WAITING if pack is not None else _SETTLED
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
    access: QueueContext, at: PackAt, survey: Survey, now: float
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


async def dead_letters(
    access: QueueContext, *, type: str | None = None, limit: int = 50
) -> TaskListing:
    """The failed tasks in the archive of dead letters, roughly the last first."""
    with labelled("inspect"):
        return await _dead_letters(access, _Sieve(_FAILED), type=type, limit=limit)


async def _dead_letters(
    access: QueueContext, sieve: _Sieve, *, type: str | None, limit: int
) -> TaskListing:
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
    return TaskListing(tuple(newest[:limit]), tuple(notes), is_whole)
