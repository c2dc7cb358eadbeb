"""What happens in a queue, as it happens: what is new since the last look.

A `Follower` remembers the versions that the lists showed. A pack that was not there before was
submitted; a ledger in a new version is read, and the lines of its log that were not told yet are
told. So nothing is told twice, and what happened before the first look is not told at all. A line
is one thing that happened to one task or to many of a pack at once. What is archived between two
looks is missed; that takes minutes.

A look is a survey (five LISTs for a small queue), a GET for each ledger that has changed, at most
`READS_MAX`, the others at the next look, and with a filter by tags one for each pack that is new.
It only reads. Used by `penstock queue tail`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import UnreadableObject
from penstock.queue.access import Access
from penstock.queue.inspection.filters import TagFilter
from penstock.queue.inspection.survey import Survey, document, surveyed
from penstock.queue.ledger import Happening, Ledger, LogLine, check_ledger
from penstock.queue.pack import Pack, check_pack
from penstock.queue.places import PackAt, TaskId
from penstock.queue.views import CANCELLER
from penstock.store.base import Entry, Version
from penstock.store.metered import labelled

READS_MAX: Final = 200
_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class Happened:
    """One thing that happened to a task, or to several of one pack at once."""

    at: float
    what: str
    type: str
    tasks: int
    """How many tasks it happened to."""
    id: TaskId
    """The first of them."""
    attempt: int = 0
    who: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """What one look found, oldest first."""

    events: tuple[Happened, ...]
    notes: tuple[str, ...] = ()


class Follower:
    """Tells what happens in one queue, from its first look on."""

    def __init__(
        self, access: Access, *, type: str | None = None, tags: Iterable[TagFilter] = ()
    ) -> None:
        self._access = access
        self._type = type
        self._filters = tuple(tags)
        self._since_ms: int | None = None
        self._packs: dict[PackAt, Version | None] = {}
        self._ledgers: dict[PackAt, Version] = {}
        self._told: dict[PackAt, frozenset[LogLine]] = {}
        self._tags: dict[PackAt, Mapping[str, str]] = {}
        self._notes: set[str] = set()

    async def look(self) -> Heard:
        """Look once. The first look only remembers what is there."""
        with labelled("inspect"):
            survey = await surveyed(self._access)
            if self._since_ms is None:
                self._since_ms = int((await self._access.store.now()).earliest * 1000)
                self._begin(survey)
                return Heard(())
            events: list[Happened] = []
            changed = [at for at in survey.pairs if self._is_news(survey, at)][:READS_MAX]
            for start in range(0, len(changed), _AT_ONCE):
                some = changed[start : start + _AT_ONCE]
                for found in await asyncio.gather(*(self._happened(at, survey) for at in some)):
                    events += found
        if survey.is_whole:
            self._forget(survey)
        events.sort(key=lambda event: event.at)
        return Heard(tuple(events), self._fresh(survey.notes))

    def _begin(self, survey: Survey) -> None:
        for at, (pack, ledger) in survey.pairs.items():
            self._packs[at] = pack.version if pack else None
            if ledger is not None:
                self._ledgers[at] = ledger.version
        self._fresh(survey.notes)

    def _is_news(self, survey: Survey, at: PackAt) -> bool:
        pack, ledger = survey.pairs[at]
        if self._type not in (None, at.type):
            return False
        is_changed = ledger is not None and self._ledgers.get(at) != ledger.version
        return is_changed or self._is_new(at, pack)

    def _is_new(self, at: PackAt, pack: Entry | None) -> bool:
        """Whether it was submitted since the last look; a key may be used again."""
        return at not in self._packs or (pack is not None and self._packs[at] != pack.version)

    async def _happened(self, at: PackAt, survey: Survey) -> list[Happened]:
        """What is new of one pack. Of what cannot be read there is a note."""
        pack, ledger = survey.pairs[at]
        events: list[Happened] = []
        if self._is_new(at, pack):
            self._tags.pop(at, None)
            events.append(Happened(survey.since(at), "submitted", at.type, at.count, at.task(0)))
        self._packs[at] = pack.version if pack else None
        try:
            if ledger is not None and self._ledgers.get(at) != ledger.version:
                self._ledgers[at] = ledger.version
                found = await document(self._access.store, self._access.layout.ledger(at), Ledger)
                if found is not None:
                    check_ledger(at, found)
                    events += self._news(at, found)
            return events if await self._is_wanted(at) else []
        except UnreadableObject as error:
            survey.notes.append(str(error))
            return []

    def _news(self, at: PackAt, ledger: Ledger) -> Iterator[Happened]:
        if ledger.submitted_ms:
            self._tags[at] = ledger.tags
        told, self._told[at] = self._told.get(at, frozenset()), frozenset(ledger.log)
        for line in ledger.log:
            # To cancel what nobody runs, it is held for a moment: no attempt was made.
            is_held = (line.who, line.what) == (CANCELLER, Happening.CLAIMED)
            if line in told or is_held or line.at_ms < (self._since_ms or 0):
                continue
            runs = list(zip(line.runs[::2], line.runs[1::2], strict=True))
            yield Happened(
                at=line.at_ms / 1000,
                what=str(line.what),
                type=at.type,
                tasks=sum(last - first + 1 for first, last in runs),
                id=at.task(runs[0][0] if runs else 0),
                attempt=line.attempt,
                who=line.who,
                note=line.note,
            )

    async def _is_wanted(self, at: PackAt) -> bool:
        if self._filters and at not in self._tags:
            pack = await document(self._access.store, self._access.layout.pack(at), Pack)
            if pack is not None:
                check_pack(at, pack)
                self._tags[at] = pack.tags
        tags = self._tags.get(at, {})
        return all(each.holds(tags) for each in self._filters)

    def _forget(self, survey: Survey) -> None:
        gone = [at for at in self._packs if at not in survey.pairs]
        for at in gone:
            self._packs.pop(at)
            self._ledgers.pop(at, None)
            self._told.pop(at, None)
            self._tags.pop(at, None)

    def _fresh(self, notes: Iterable[str]) -> tuple[str, ...]:
        fresh = tuple(note for note in dict.fromkeys(notes) if note not in self._notes)
        self._notes.update(fresh)
        return fresh
