"""A worker's inbox: what it lists, and what it deletes because it was handled.

An entry is *handled* when its pack was claimed, by whomever, or is over; what is not due yet, or
could not be tried, is not. Handled entries are deleted with the next look, and until then are not
shown again: a crash before leaves them for the next who lists. The list is always from the
beginning on, where what is urgent is; whatever was handled is not there any more, so that costs
nothing. A look breaks off when it has found enough of a usual priority; what is always in front and
of no use does not count, so nothing starves behind it.

One look is a LIST for every 1,000 entries, and a delete for each that was handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from penstock.kernel.errors import StoreError
from penstock.queue.direct.cursor import Cursor
from penstock.queue.discovery.scan import Pointed, Sight
from penstock.queue.layout import InboxAt, QueueLayout
from penstock.queue.places import URGENT_MINUTE, PackAt
from penstock.store.base import Entry, ObjectStore
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

PAGES_MAX: Final = 50
_AT_ONCE: Final = 16
_URGENT_END: Final = 2 * URGENT_MINUTE


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
        sights: list[Sight] = []
        entries: dict[PackAt, set[str]] = {}
        oldest = now_minute
        found = 0
        with labelled("discovery"):
            cursor: str | None = None
            for _ in range(PAGES_MAX):
                page = await self._store.list(self._prefix, cursor=cursor)
                cursor = page.cursor
                for entry in page.entries:
                    read = self._layout.read_inbox_entry(entry.key)
                    if read is None or entry.key in self._finished:
                        continue
                    if read.minute > now_minute:
                        cursor = None
                        break
                    if self._is_of_no_use(read):
                        self._finished.add(entry.key)
                        continue
                    sight = self._sight(read, entry)
                    sights.append(sight)
                    entries.setdefault(read.to.at, set()).add(entry.key)
                    # What is urgent is in minutes of its own, which the cursor does not count.
                    oldest = min(oldest, read.minute) if read.minute >= _URGENT_END else oldest
                    found += worth(sight) if sight.priority >= 0 else 0
                if cursor is None or found >= wanted:
                    break
        self._take_over(entries)
        if cursor is None:
            self._cursor.advance(handled_before=oldest, now_minute=now_minute)
        return sights

    def _take_over(self, entries: dict[PackAt, set[str]]) -> None:
        """What was listed is what there is, but for what was handled since the list began."""
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
