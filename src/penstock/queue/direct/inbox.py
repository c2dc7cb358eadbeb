"""A worker's inbox: what it lists, and what it deletes because it was handled.

An entry is *handled* when its pack was claimed, by whomever, or is over; what is not due yet, or
could not be tried, is not. Handled entries are deleted with the next look, and until then are not
shown again: a crash before leaves them for the next who lists. The list is always from the
beginning on, where what is urgent is; whatever was handled is not there any more, so that costs
nothing. A look breaks off when it has found enough of a usual priority; what is always in front and
of no use does not count. After `PAGES_MAX` pages it breaks off as well, and the next one goes on
from there behind its first page, so nothing starves behind any number of them. Only a look that has
seen all of the inbox moves the cursor.

One look is a LIST for every 1,000 entries, `PAGES_MAX` at the most, and a delete for each that was
handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from penstock.kernel.errors import StoreError
from penstock.queue.direct.cursor import Cursor
from penstock.queue.discovery.scan import Pointed, Sight
from penstock.queue.layout import InboxAt, QueueLayout
from penstock.queue.places import URGENT_MINUTE, PackAt
from penstock.store.base import Entry, ObjectStore
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

PAGES_MAX: Final = 10
"""How many pages one look reads at the most; the next goes on from there."""
_ENTRIES_MAX: Final = 50_000
_AT_ONCE: Final = 16
_URGENT_END: Final = 2 * URGENT_MINUTE


@dataclass(slots=True)
class _Listed:
    """What one look has listed so far."""

    oldest: int
    """The first minute of which something is left."""
    sights: list[Sight] = field(default_factory=list)
    entries: dict[PackAt, set[str]] = field(default_factory=dict)
    found: int = 0
    reached: str = ""


class Inbox:
    """One inbox, in the hands of its worker."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        worker: str,
        handles: frozenset[str],
        cursor: Cursor,
    ) -> None:
        self._store = store
        self._layout = layout
        self._prefix = layout.inbox(worker)
        self._handles = handles
        self._cursor = cursor
        self._entries: dict[PackAt, set[str]] = {}
        self._finished: set[str] = set()
        """What is to be deleted."""
        self._meanwhile: set[PackAt] = set()
        """What was handled since the last list began."""
        self._resume = ""
        """Behind which key the next look goes on, after its first page."""

    def handled(self, at: PackAt) -> None:
        """A pack was claimed, or is over: what is in the inbox of it may go. Asks for nothing."""
        self._meanwhile.add(at)
        keys = self._entries.pop(at, None)
        if keys:
            self._finished |= keys
            self._cursor.has_worked = True

    async def tidy(self) -> None:
        """Delete what was handled. What cannot be deleted now is tried again with the next look."""
        await delete_all(self._store, self._finished)

    async def look(
        self, *, now_minute: int, worth: Callable[[Sight], int], wanted: int
    ) -> list[Sight]:
        """What is in the inbox and due in this minute or before, as it is listed."""
        await self.tidy()
        self._meanwhile.clear()
        listed = _Listed(oldest=now_minute)
        is_whole = True
        start = ""
        cursor: str | None = None
        with labelled("discovery"):
            for _ in range(PAGES_MAX):
                page = await self._store.list(self._prefix, start_after=start, cursor=cursor)
                cursor = page.cursor
                if self._judge(page.entries, listed, now_minute=now_minute, worth=worth):
                    cursor = None
                if cursor is None or listed.found >= wanted:
                    break
                if is_whole and self._resume > listed.reached:
                    # What is urgent was in front; the last looks have seen what comes next.
                    is_whole, start, cursor = False, self._resume, None
            else:
                self._resume = listed.reached
        if cursor is None:
            self._resume = ""
        is_whole = is_whole and cursor is None
        self._take_over(listed.entries, is_whole=is_whole)
        if is_whole:
            self._cursor.advance(handled_before=listed.oldest, now_minute=now_minute)
        return listed.sights

    def _judge(
        self,
        entries: Iterable[Entry],
        listed: _Listed,
        *,
        now_minute: int,
        worth: Callable[[Sight], int],
    ) -> bool:
        """Note what is of use among these entries; returns whether all that follow are not due."""
        for entry in entries:
            listed.reached = entry.key
            read = self._layout.read_inbox_entry(entry.key)
            if read is None or entry.key in self._finished:
                continue
            if read.minute > now_minute:
                return True
            if self._is_of_no_use(read):
                self._finished.add(entry.key)
                continue
            sight = self._sight(read, entry)
            listed.sights.append(sight)
            listed.entries.setdefault(read.to.at, set()).add(entry.key)
            # What is urgent is in minutes of its own, which the cursor does not count.
            if read.minute >= _URGENT_END:
                listed.oldest = min(listed.oldest, read.minute)
            listed.found += worth(sight) if sight.priority >= 0 else 0
        return False

    def _take_over(self, entries: dict[PackAt, set[str]], *, is_whole: bool) -> None:
        """What was listed is what there is, but for what was handled since the list began.

        What other looks have listed is remembered, unless this one has seen all or it is too much.
        """
        if not is_whole and len(self._entries) < _ENTRIES_MAX:
            for at, keys in self._entries.items():
                entries.setdefault(at, set()).update(keys)
        self._entries = entries
        for at in self._meanwhile:
            self._finished |= entries.pop(at, set())

    def _sight(self, read: InboxAt, entry: Entry) -> Sight:
        at, nonce, priority, limit = read.to
        twins = self._twins(read) if at.submitted_ms is None else ()
        pointer = Pointed(
            entry.key, nonce, entry.modified, priority, limit, is_entry=True, twins=twins
        )
        return Sight(at, None, pointer=pointer)

    def _twins(self, read: InboxAt) -> tuple[str, ...]:
        """Where the pointer of a pack with a key may be: whether it has a delay, no key tells."""
        at, nonce, priority, limit = read.to
        ways = [True] * (read.minute >= _URGENT_END) + [False] * (priority != 0)
        return tuple(
            self._layout.pointer(
                at,
                due_ms=read.minute * 60_000,
                nonce=nonce,
                priority=priority,
                limit=limit,
                is_delayed=is_delayed,
            )
            for is_delayed in ways
        )

    def _is_of_no_use(self, read: InboxAt) -> bool:
        """Whether it came too late, or to the wrong worker: its pack is found by scavenging."""
        is_late = _URGENT_END <= read.minute < self._cursor.minute
        return is_late or read.to.at.type not in self._handles


async def delete_all(store: ObjectStore, keys: set[str]) -> None:
    """Delete these keys, a few at once; those that are deleted leave the set."""

    async def delete(key: str) -> None:
        try:
            await store.delete(key)
        except StoreError as error:
            _log.info("an entry of an inbox is deleted later: %s", error)
        else:
            keys.discard(key)

    with labelled("discovery"):
        for some in _cut(sorted(keys)):
            async with asyncio.TaskGroup() as group:
                for key in some:
                    group.create_task(delete(key))


def _cut(keys: list[str]) -> Iterable[list[str]]:
    return (keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE))
