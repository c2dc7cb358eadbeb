"""What lists show of a whole queue: every pack and ledger, foreign keys, and what is left to run.

A survey is one LIST of the queue's top, and one for every 1,000 objects in each of `keyed/`,
`ready/`, `tasks/` and `unhurried/` that exists, at most `PAGES_MAX` each: five for a small
queue.

`wait_until_empty` waits for a queue that is drained, or that a worker empties. It counts tasks
that lists show as ready, delayed or in progress. A producer notices a drain within
`PRODUCER_SECONDS`, so a queue is not called empty before; a submit that was under way then may
still arrive, up to five minutes after it began. Surveys are 2 s apart at first, later a tenth of
the time waited, up to 30 s.

Used by `penstock.queue.inspection`, `penstock.queue.maintenance`, the client and the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, TypeVar

from penstock.kernel.document_format import Document, decode
from penstock.kernel.errors import NotFound, StoreError
from penstock.queue.context import QueueContext
from penstock.queue.control import PRODUCER_SECONDS, Control
from penstock.queue.ids import PackAt
from penstock.store.base import Entry, ObjectStore, pages
from penstock.store.metered import labelled

PAGES_MAX: Final = 50
_TOP_MAX: Final = 1000

Kind = TypeVar("Kind", bound=Document)


@dataclass(slots=True)
class Survey:
    """What the lists show: packs with their ledgers, and when pointers say a pack is due."""

    pairs: dict[PackAt, list[Entry | None]] = field(default_factory=dict)
    pointed: dict[PackAt, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_whole: bool = True
    folders: frozenset[str] = frozenset()
    """The folders of the queue that are there, also those that were not looked into."""

    def minute(self, at: PackAt) -> int:
        """The minute in which a pack becomes due, 0 if at once."""
        return at.due_minute or self.pointed.get(at, 0)

    def since(self, at: PackAt) -> float:
        """When a pack was submitted or last written, in seconds."""
        entry = self.pairs[at][0] or self.pairs[at][1]
        return (at.submitted_ms or 0) / 1000 or (entry.modified if entry else 0.0)


async def surveyed(access: QueueContext, *, pages_max: int | None = None) -> Survey:
    """Look at the whole queue: so many pages of each folder, or `PAGES_MAX`."""
    layout = access.layout
    survey = Survey()
    tops = (layout.keyed, layout.ready, layout.tasks, layout.unhurried)
    others = (
        layout.archive,
        layout.dead,
        layout.workers,
        layout.shard_leases,
        layout.inboxes,
        layout.limits,
        layout.schedules,
        layout.batches,
        layout.payloads,
    )
    replayed = layout.replayed("")
    present: list[str] = []
    async for page in pages(access.store, layout.root, delimiter="/"):
        present += [*page.folders, *(entry.key for entry in page.entries)]
        if len(present) > _TOP_MAX:
            break
    survey.folders = frozenset(each for each in present if each.endswith("/"))
    cells = {layout.config, layout.control, layout.monitor, layout.bell, layout.doorbell}
    known = {*tops, *others, replayed, *cells}
    survey.notes += [foreign(key) for key in present if key not in known]
    for top in tops:
        if top in present:
            await _take_in(access, survey, top, pages_max=pages_max or PAGES_MAX)
    return survey


async def _take_in(access: QueueContext, survey: Survey, top: str, *, pages_max: int) -> None:
    number = 0
    async for page in pages(access.store, top):
        for entry in page.entries:
            read = access.layout.read(entry.key)
            pointed = access.layout.read_pointer(entry.key)
            if read is not None:
                survey.pairs.setdefault(read[0], [None, None])[read[1]] = entry
            elif pointed is not None:
                minute = access.layout.ready_minute(entry.key) or 0
                survey.pointed[pointed[0]] = min(minute, survey.pointed.get(pointed[0], minute))
            else:
                survey.notes.append(foreign(entry.key))
        number += 1
        if number == pages_max and page.cursor is not None:
            survey.notes.append(f"{top} has more objects than were read ({number} pages).")
            survey.is_whole = False
            return


def foreign(key: str) -> str:
    return f"{key} is not an object of this queue, and is skipped."


async def dead_keys(access: QueueContext, notes: list[str]) -> list[str]:
    """The keys of the dead letters, those with the last submits first."""
    keys: list[str] = []
    number = 0
    async for page in pages(access.store, access.layout.dead):
        for entry in page.entries:
            if access.layout.read_batch(entry.key) is None:
                notes.append(foreign(entry.key))
            else:
                keys.append(entry.key)
        number += 1
        if number == PAGES_MAX:
            break
    return keys[::-1]


async def document(store: ObjectStore, key: str, kind: type[Kind]) -> Kind | None:
    """What is at a key; None if it has gone. Raises `UnreadableObject`."""
    try:
        found = await store.get(key)
    except NotFound:
        return None
    assert found is not None
    return decode(kind, found.body, where=key)


_PAUSE_SECONDS_MIN: Final = 2.0
_PAUSE_SECONDS_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class RemainingTasks:
    """How many tasks have not settled, as far as lists show."""

    tasks: int
    is_whole: bool
    """Whether everything was looked at; otherwise there may be more."""


async def left(access: QueueContext, type: str | None = None) -> RemainingTasks:
    """What is left of a type, or of the whole queue. Tasks of a pack in progress all count."""
    with labelled("inspect"):
        survey = await surveyed(access)
    waiting = (
        at.count
        for at, (pack, _) in survey.pairs.items()
        if pack is not None and type in (None, at.type)
    )
    return RemainingTasks(sum(waiting), survey.is_whole)


async def wait_until_empty(
    access: QueueContext,
    type: str | None = None,
    *,
    seconds: float | None = None,
    tell: Callable[[RemainingTasks], None] = lambda _: None,
) -> bool:
    """Wait until nothing is left, for at most so many seconds; whether nothing is.

    `tell` hears what every look has shown.
    """
    marks = [each for each in await Control(access).state() if each.type in (None, type)]
    since = max((each.drained_at or 0.0 for each in marks), default=0.0)
    clock = access.store.clock.machine
    began = clock.monotonic()
    try:
        async with asyncio.timeout(seconds):
            while True:
                now = await access.store.now()
                found = await left(access, type)
                tell(found)
                heard_seconds = since + PRODUCER_SECONDS - now.earliest
                if not found.tasks and found.is_whole and heard_seconds <= 0:
                    return True
                pause = min(_PAUSE_SECONDS_MAX, (clock.monotonic() - began) / 10)
                if not found.tasks:
                    pause = max(pause, heard_seconds)
                await clock.sleep(max(_PAUSE_SECONDS_MIN, pause))
    except TimeoutError:
        return False


async def until_done(
    access: QueueContext,
    types: Collection[str],
    *,
    is_idle: Callable[[], bool],
    failed: Callable[[StoreError], None],
) -> None:
    """Wait until no task of these types is ready or in progress, anywhere; looks only while idle.

    What waits for a retry is in progress. What is delayed and has never begun is not waited for,
    unless it is due within the minute.
    """
    clock = access.store.clock.machine
    idle_since = None
    while True:
        if not is_idle():
            idle_since = None
            await clock.sleep(_PAUSE_SECONDS_MIN / 4)
            continue
        idle_since = clock.monotonic() if idle_since is None else idle_since
        try:
            with labelled("inspect"):
                survey = await surveyed(access)
                now = await access.store.now()
        except StoreError as error:
            failed(error)
        else:
            waits = any(
                pack is not None
                and at.type in types
                and (ledger is not None or survey.minute(at) * 60 <= now.latest)
                for at, (pack, ledger) in survey.pairs.items()
            )
            if not waits and survey.is_whole and is_idle():
                return
        pause = min(_PAUSE_SECONDS_MAX, (clock.monotonic() - idle_since) / 10)
        await clock.sleep(max(_PAUSE_SECONDS_MIN, pause))
