"""What lists show of a whole queue, for people: every pack and ledger, and what is not ours.

Used by the other modules of this package. A survey is one LIST of the queue's top, and one for
every 1,000 objects in each of `keyed/`, `ready/`, `tasks/` and `unhurried/` that is there, at most
`PAGES_MAX` each: five for a small queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeVar

from penstock.kernel.errors import NotFound
from penstock.kernel.wire import Document, decode
from penstock.queue.access import Access
from penstock.queue.places import PackAt
from penstock.store.base import Entry, ObjectStore, pages

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


async def surveyed(access: Access, *, pages_max: int | None = None) -> Survey:
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
    known = {*tops, *others, replayed, layout.config, layout.control, layout.monitor, layout.bell}
    survey.notes += [foreign(key) for key in present if key not in known]
    for top in tops:
        if top in present:
            await _take_in(access, survey, top, pages_max=pages_max or PAGES_MAX)
    return survey


async def _take_in(access: Access, survey: Survey, top: str, *, pages_max: int) -> None:
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
            survey.notes.append(f"{top} has more objects than were looked at ({number} pages).")
            survey.is_whole = False
            return


def foreign(key: str) -> str:
    return f"{key} is not an object of this queue, and is left alone."


async def dead_keys(access: Access, notes: list[str]) -> list[str]:
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
