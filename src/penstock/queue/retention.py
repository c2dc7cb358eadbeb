"""Retention: what was settled long ago is forgotten, if the queue's settings say so.

`QueueConfig.archive_days` and `dead_letter_days` say how long records are kept; None, the default,
is for ever. Done by a chore, once a day; by `Queue.archive.retain`; and so by
`penstock queue archive retain`. Several at once delete the same things, which is no harm.

1. **Batches** go that were written longer ago than that, and whose last submit is. (A task that was
   delayed for a year was submitted long before it was archived.)
2. **Payloads** go that were submitted longer ago than `archive_days`, and that no pack, ledger or
   record needs (`penstock.queue.owners`). Among them are those of nobody, which a crash has left.

Batches go first: a crash between leaves payloads that no record refers to, for the next turn. So a
record that can be read has its payloads. Nothing else is ever deleted: no pack, no ledger.

What a day costs: a LIST of `archive/`, `dead/` and `payloads/` each, which is $0.0005 a month, and
a GET of the settings. For every day in which there are payloads that are old enough a LIST, at most
`DAYS_MAX`, two HEADs a pack that has some, a GET for every batch that is left of that day, and two
more LISTs of `archive/` and `dead/`. With no retention set: the GET. A worker begins ten minutes
after its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import StoreError
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.config import read_config
from penstock.queue.owners import Owners, days_of, ends_of
from penstock.queue.places import PackAt, payload_at
from penstock.queue.running.upkeep import Chore
from penstock.store.base import Entry, pages
from penstock.store.metered import labelled

DAY_SECONDS: Final = 86_400.0
TURN_SECONDS: Final = DAY_SECONDS
FIRST_SECONDS: Final = 600.0
MORE_SECONDS: Final = 60.0
BATCHES_MAX: Final = 5_000
PAYLOADS_MAX: Final = 20_000
DAYS_MAX: Final = 100
"""So much a turn deals with at the most; the next one comes sooner then."""
YOUNG_SECONDS: Final = 2 * DAY_SECONDS
"""A payload that is younger stays: what refers to it may still come."""
_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Retained:
    """What one turn has removed. `is_whole` is false if it did not get to the end."""

    batches: int = 0
    dead_letter_batches: int = 0
    payloads: int = 0
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class _Old:
    path: str
    day: str
    at: PackAt


class Retention:
    """Forgets what is old in one queue."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._owners = Owners(access)
        self._after = ""
        """The day up to which payloads were looked at, if the last turn did not see all."""

    async def retain(self, *, archive_days: int | None, dead_letter_days: int | None) -> Retained:
        """Delete what is older. May raise `StoreError`; what is deleted by then is deleted."""
        layout = self._access.layout
        with labelled("retention"):
            now = (await self._access.store.now()).earliest
            batches = await self._batches(layout.archive, now, archive_days)
            dead = await self._batches(layout.dead, now, dead_letter_days)
            payloads, is_all = 0, True
            if archive_days is not None:
                payloads, is_all = await self._payloads(now, now - archive_days * DAY_SECONDS)
        is_whole = is_all and max(batches, dead) < BATCHES_MAX
        return Retained(batches, dead, payloads, is_whole)

    async def _batches(self, prefix: str, now: float, days: int | None) -> int:
        """Delete the batches that were written, and submitted, before that."""
        if days is None:
            return 0
        before = now - days * DAY_SECONDS
        old: list[str] = []
        async for entry in archive.batches(self._access.store, self._access.layout, prefix):
            _, last_ms = self._access.layout.read_batch(entry.key) or (0, 0)
            # They are listed by their last submit, and were written after it.
            if last_ms >= before * 1000 or len(old) == BATCHES_MAX:
                break
            if entry.modified < before:
                old.append(entry.key)
        await self._delete(old)
        return len(old)

    async def _payloads(self, now: float, before: float) -> tuple[int, bool]:
        """Delete the payloads of days that ended before that, and that nobody needs."""
        days, is_all = await self._days(min(before, now - YOUNG_SECONDS))
        if not days:
            return 0, is_all
        old: list[_Old] = []
        for number, day in enumerate(days):
            old += await self._old(day, now - YOUNG_SECONDS)
            if len(old) > PAYLOADS_MAX and number + 1 < len(days):
                # The rest of the days is for the next turn.
                days, is_all = days[: number + 1], False
                break
        self._after = "" if is_all else days[-1]
        needless = await self._unowned(old)
        recorded = await self._owners.recorded(days) if needless else None
        gone = [
            each.path for each in needless if recorded and not recorded.needs(each.path, each.day)
        ]
        await self._delete([self._access.layout.payload(path) for path in gone])
        return len(gone), is_all

    async def _days(self, before: float) -> tuple[list[str], bool]:
        """The days with payloads that are long over, from where the last turn ended."""
        prefix = self._access.layout.payloads
        folders: list[str] = []
        async for page in pages(self._access.store, prefix, delimiter="/"):
            folders += page.folders
        days = [day for day in days_of(folders, prefix) if ends_of(day) <= before]
        left = [day for day in days if day > self._after]
        return left[:DAYS_MAX], len(left) <= DAYS_MAX

    async def _old(self, day: str, before: float) -> list[_Old]:
        """The payloads of a day; what is not ours is left alone."""
        layout = self._access.layout
        found: list[_Old] = []
        async for page in pages(self._access.store, f"{layout.payloads}{day}/"):
            found += _ours(page.entries, layout.root, before)
        return found

    async def _unowned(self, payloads: Sequence[_Old]) -> list[_Old]:
        """Those of which there is neither a pack nor a ledger any more."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(at: PackAt, day: str) -> bool:
            async with slots:
                return await self._owners.is_live(at, day)

        owners = list({(each.at, each.day) for each in payloads})
        answers = await asyncio.gather(*(ask(at, day) for at, day in owners))
        live = dict(zip(owners, answers, strict=True))
        return [each for each in payloads if not live[each.at, each.day]]

    async def _delete(self, keys: Sequence[str]) -> None:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def delete(key: str) -> StoreError | None:
            async with slots:
                try:
                    await self._access.store.delete(key)
                except StoreError as error:
                    return error
                return None

        for error in await asyncio.gather(*map(delete, keys)):
            if error is not None:
                raise error


def _ours(entries: Iterable[Entry], root: str, before: float) -> list[_Old]:
    found: list[_Old] = []
    for entry in entries:
        path = entry.key.removeprefix(root)
        owner = payload_at(path)
        if owner is not None and entry.modified < before:
            found.append(_Old(path, owner.day, owner.at))
    return found


class RetentionChore(Chore):
    """Keeps the archive as long as the queue's settings say."""

    name = "the retention of the archive"

    def __init__(self, access: Access) -> None:
        self._access = access
        self._retention = Retention(access)
        self._has_begun = False

    async def turn(self) -> float:
        """Forget what is old, once a day."""
        if not self._has_begun:
            # Workers that come and go must not list the archive each time.
            self._has_begun = True
            return FIRST_SECONDS
        with labelled("retention"):
            config = await read_config(self._access.store, self._access.layout)
        if config is None or config.archive_days is config.dead_letter_days is None:
            return TURN_SECONDS
        retained = await self._retention.retain(
            archive_days=config.archive_days, dead_letter_days=config.dead_letter_days
        )
        return TURN_SECONDS if retained.is_whole else MORE_SECONDS
