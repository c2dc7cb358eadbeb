"""What a queue has done in the last hour, and its dead letters: for somebody who looks often.

Nobody measures it for us. It is in the settled ledgers, which stay in the queue for five minutes or
so, and then in the archive; `penstock.queue.inspection.ended` says what one tells. A `Lately`
remembers what it has read, so that each ledger and each batch is read once, and what is taken away
between two looks is still known. What it has seen in a list and not read counts as settled.

What it cannot know: packs that left the queue unseen and are in no batch of the archive (the
dispatcher takes its wake-ups away itself), and those that were submitted more than
`SUBMITTED_SECONDS` ago and were archived before anybody looked.

A look is a LIST for every 1,000 batches of `archive/` from the last two hours, of `dead/` and of
`replayed/`, each if it is there and `PAGES_MAX` at the most, and GETs of what is new: `LEDGERS_MAX`
ledgers and `BATCHES_MAX` batches of each kind; the rest is for the next look. It only reads.
Remembered are `PACKS_MAX` packs and `LETTERS_MAX` dead letters, the newest. A crash forgets it, and
the next look reads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import UnreadableObject
from penstock.queue import archive
from penstock.queue.access import Access
from penstock.queue.inspection.ended import (
    MINUTES,
    DeadLetter,
    Ended,
    Minute,
    by_minute,
    dead_letters_of,
    ended,
    unread,
    within,
)
from penstock.queue.inspection.survey import Survey, document
from penstock.queue.ledger import Ledger, check_ledger
from penstock.queue.places import PackAt
from penstock.store.base import Entry, Version, pages
from penstock.store.metered import labelled

LEDGERS_MAX: Final = 120
BATCHES_MAX: Final = 6
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
"""Larger ones are not read: to unpack them takes too long for a look."""
PAGES_MAX: Final = 2
PACKS_MAX: Final = 10_000
LETTERS_MAX: Final = 1_000
SUBMITTED_SECONDS: Final = 7_200.0
_AT_ONCE: Final = 16
_RECORDS_A_TURN: Final = 50


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known after a look."""

    minutes: tuple[Minute, ...]
    """The last hour, oldest first."""
    settled: int
    starts: int
    median_seconds: float
    most_seconds: float
    tasks_read: int
    """Tasks whose ledgers were read: what the figures below are of."""
    puts: int
    gets: int
    unread: int
    """Packs that were seen in a list alone, and batches of the archive that were not read yet."""
    letters: tuple[DeadLetter, ...]
    """The last first."""
    are_letters_whole: bool
    """Whether these are all dead letters that there are."""
    replayed: frozenset[str]
    """The names of dead letters that were submitted again."""
    notes: tuple[str, ...]


class Lately:
    """What somebody who looks at one queue has seen of it."""

    def __init__(self) -> None:
        self._packs: dict[PackAt, Ended] = {}
        self._archived: dict[str, Version] = {}
        self._dead: dict[str, tuple[Version, tuple[DeadLetter, ...]]] = {}
        self._fresh: dict[PackAt, tuple[DeadLetter, ...]] = {}
        """Dead letters whose ledgers are still in the queue."""
        self._damaged: dict[PackAt, str] = {}
        """Ledgers that cannot be read, and why: they are not tried again."""
        self._notes: list[str] = []

    async def look(self, access: Access, survey: Survey) -> Seen:
        """Read what is new, as a survey that was just made shows it."""
        self._notes = []
        with labelled("inspect"):
            now = (await access.store.now()).middle
            await self._settled(access, survey, now)
            left = await self._archive(access, survey, now)
            are_whole = await self._dead_letters(access, survey)
            self._forget(survey, now)
            letters = self._letters()
            replayed = await self._replayed(access, survey) if letters else frozenset()
        return self._seen(
            now,
            left=left,
            letters=letters,
            are_whole=are_whole and survey.is_whole and not self._has_unread(survey),
            replayed=frozenset(replayed),
        )

    async def _settled(self, access: Access, survey: Survey, now: float) -> None:
        """Ledgers that are alone: what they were of is settled."""
        alone = [
            (at, ledger)
            for at, (pack, ledger) in survey.pairs.items()
            if pack is None and ledger is not None and now - ledger.modified < MINUTES * 60
        ]
        for at, ledger in alone:
            self._packs.setdefault(at, unread(at, settled_at=ledger.modified))
        wanted = [pair for pair in alone if self._is_unread(pair[0])]
        wanted.sort(key=lambda pair: -pair[1].modified)
        wanted = wanted[:LEDGERS_MAX]
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            await asyncio.gather(*(self._read(access, at) for at, _ in some))

    async def _read(self, access: Access, at: PackAt) -> None:
        try:
            ledger = await document(access.store, access.layout.ledger(at), Ledger)
            if ledger is not None:
                check_ledger(at, ledger)
                if ledger.settled:
                    self._take_in(at, ledger)
                    self._fresh[at] = tuple(dead_letters_of(at, ledger))
        except UnreadableObject as error:
            self._damaged[at] = str(error)

    def _is_unread(self, at: PackAt) -> bool:
        return not self._packs[at].is_read and at not in self._damaged

    async def _archive(self, access: Access, survey: Survey, now: float) -> int:
        """Batches of the last hour; how many of them were not read yet."""
        folder = access.layout.archive
        if folder not in survey.folders:
            return 0
        since_ms = int((now - SUBMITTED_SECONDS) * 1000)
        start = access.layout.after_submits_before(folder, since_ms)
        listed, _ = await self._listed(access, folder, start_after=start)
        lately = [each for each in listed if now - each.modified < MINUTES * 60]
        news = [each for each in lately if self._archived.get(each.key) != each.version]
        news.sort(key=lambda each: -each.modified)
        for each in news[:BATCHES_MAX]:
            await self._unpack(access, each)
            self._archived[each.key] = each.version
        keys = {each.key for each in lately}
        self._archived = {key: kept for key, kept in self._archived.items() if key in keys}
        return max(0, len(news) - BATCHES_MAX)

    async def _dead_letters(self, access: Access, survey: Survey) -> bool:
        """Batches of dead letters, the newest; whether all are known."""
        folder = access.layout.dead
        if folder not in survey.folders:
            self._dead.clear()
            return True
        listed, is_whole = await self._listed(access, folder)
        keys = {each.key for each in listed}
        self._dead = {key: kept for key, kept in self._dead.items() if key in keys}
        news = [each for each in listed if self._known(each.key) != each.version]
        for each in news[: -BATCHES_MAX - 1 : -1]:
            if sum(len(letters) for _, letters in self._dead.values()) >= LETTERS_MAX:
                return False
            self._dead[each.key] = (each.version, tuple(await self._unpack(access, each)))
        return is_whole and len(news) <= BATCHES_MAX

    def _known(self, key: str) -> Version | None:
        return self._dead[key][0] if key in self._dead else None

    async def _listed(
        self, access: Access, folder: str, *, start_after: str = ""
    ) -> tuple[list[Entry], bool]:
        found: list[Entry] = []
        number = 0
        async for page in pages(access.store, folder, start_after=start_after):
            found += [each for each in page.entries if access.layout.read_batch(each.key)]
            number += 1
            if number == PAGES_MAX and page.cursor is not None:
                self._notes.append(f"{folder} has more objects than were looked at.")
                return found, False
        return found, True

    async def _unpack(self, access: Access, batch: Entry) -> list[DeadLetter]:
        """Take in a batch of the archive, and return the dead letters in it."""
        letters: list[DeadLetter] = []
        if batch.size > BATCH_BYTES_MAX:
            self._notes.append(f"{batch.key} is too large to be read here.")
            return letters
        number = 0
        try:
            async for at, ledger in archive.read(access.store, access.layout, batch.key):
                check_ledger(at, ledger)
                self._take_in(at, ledger)
                letters += dead_letters_of(at, ledger)
                number += 1
                if number % _RECORDS_A_TURN == 0:
                    # To unpack thousands takes long: others have their turn meanwhile.
                    await access.store.clock.machine.sleep(0)
        except UnreadableObject as error:
            self._notes.append(str(error))
        return letters[-LETTERS_MAX:]

    async def _replayed(self, access: Access, survey: Survey) -> Collection[str]:
        prefix = access.layout.replayed("")
        names: set[str] = set()
        number = 0
        if prefix in survey.folders:
            async for page in pages(access.store, prefix):
                names |= {entry.key.removeprefix(prefix) for entry in page.entries}
                number += 1
                if number == PAGES_MAX:
                    break
        return names

    def _take_in(self, at: PackAt, ledger: Ledger) -> None:
        self._packs[at] = ended(at, ledger)

    def _forget(self, survey: Survey, now: float) -> None:
        first = int(now // 60) - MINUTES + 1
        kept = [(at, each) for at, each in self._packs.items() if each.last_minute >= first]
        if len(kept) > PACKS_MAX:
            kept.sort(key=lambda pair: -pair[1].last_minute)
            self._notes.append(f"Of the last hour, {PACKS_MAX:,} packs are counted, the newest.")
        self._packs = dict(kept[:PACKS_MAX])
        self._fresh = {at: each for at, each in self._fresh.items() if at in survey.pairs}
        self._damaged = {at: each for at, each in self._damaged.items() if at in self._packs}

    def _has_unread(self, survey: Survey) -> bool:
        """Whether a ledger is in the queue that may hold dead letters nobody has read."""
        return any(self._is_unread(at) and at in survey.pairs for at in self._packs)

    def _letters(self) -> list[DeadLetter]:
        found: dict[str, DeadLetter] = {}
        groups: Iterable[tuple[DeadLetter, ...]] = (
            *self._fresh.values(),
            *(letters for _, letters in self._dead.values()),
        )
        for letters in groups:
            found.update({each.name: each for each in letters})
        return sorted(found.values(), key=lambda each: -each.settled_at)[:LETTERS_MAX]

    def _seen(
        self,
        now: float,
        *,
        left: int,
        letters: list[DeadLetter],
        are_whole: bool,
        replayed: frozenset[str],
    ) -> Seen:
        minutes = by_minute(self._packs.values(), now=now)
        first = int(now // 60) - MINUTES + 1
        read = [each for each in self._packs.values() if each.is_read]
        starts = [
            (seconds, count)
            for each in read
            for minute, seconds, count in each.starts
            if minute >= first
        ]
        return Seen(
            minutes=minutes,
            settled=sum(count for minute in minutes for _, count in minute.outcomes),
            starts=sum(count for _, count in starts),
            median_seconds=within(starts, share=0.5),
            most_seconds=within(starts, share=0.95),
            tasks_read=sum(each.tasks for each in read),
            puts=sum(each.puts for each in read),
            gets=sum(each.gets for each in read),
            unread=left + len(self._packs) - len(read),
            letters=tuple(letters),
            are_letters_whole=are_whole,
            replayed=replayed,
            notes=(*self._damaged.values(), *self._notes),
        )
