"""Recent activity of a queue: throughput and dead letters of the last hour, live events, and cost.

**The last hour** (`ActivityReader`), for a console that refreshes. All of it is in the settled
ledgers, which stay in the queue for five minutes or so, and then in the archive: a task's
outcome and when, and in the log when it was claimed first (`SettledPack`). Each ledger and each
batch is read once, and what is taken away between two looks is still known. A pack that was
listed and not read counts as settled. Unknown stay packs that left the queue unseen and are in
no batch of the archive (the dispatcher deletes its wake-ups itself), and those that were
submitted more than `SUBMITTED_SECONDS` ago and archived before the first look.

A look is a LIST for every 1,000 batches of `archive/` from the last two hours, of `dead/` and
of `replayed/`, each if it is there and `PAGES_MAX` at most, and GETs of what is new:
`LEDGERS_MAX` ledgers and `BATCHES_MAX` batches of each kind; the rest is for the next look. It
keeps the newest `PACKS_MAX` packs and `LETTERS_MAX` dead letters in memory; a crash forgets
them.

**Live events** (`QueueFollower`, `penstock queue tail`). It remembers the versions that lists
showed. A new pack was submitted; a ledger in a new version is read, and its new log lines are
returned. So nothing is reported twice, and nothing from before the first look. What is archived
between two looks is missed; that takes minutes. A look is a survey (five LISTs for a small
queue), a GET for each ledger that has changed, at most `READS_MAX`, the others at the next
look, and with a filter by tags one for each new pack.

**Cost.** Requests of a task are counted from its ledger: a put to submit (and one for the
pointer of a key), a put for each moment at which the log was written to, and a GET of the pack
for each claim. Looks, leases and heartbeats leave no log line and are not included; nor is the
archive, one put for hundreds of packs. The cost of present workers is computed from default
settings (`WorkerCost`). Workers of the modes `shared` and `sampled` are not registered, so
their looks are unknown here; their own `/metrics` count them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import UnreadableObject
from penstock.queue import archive
from penstock.queue.context import QueueContext
from penstock.queue.ids import PackAt, TaskId
from penstock.queue.inspection.task_search import TagFilter
from penstock.queue.ledger import Ledger, LedgerEvent, LedgerLogLine, QueueTaskStatus, check_ledger
from penstock.queue.pack import Pack, check_pack
from penstock.queue.replay import name_of
from penstock.queue.settings import Polling, ShardLeaseSettings
from penstock.queue.survey import Survey, document, surveyed
from penstock.queue.task_views import CANCELLER, view_of_ledger
from penstock.store.base import Entry, Version, pages
from penstock.store.metered import Kind, Prices, labelled

MINUTES: Final = 60
"""How far back is looked."""
UNREAD: Final = "settled"
"""The outcome of tasks whose ledger was seen in a list, and not read."""
OUTCOMES: Final = (*(each.word for each in QueueTaskStatus if each.settled), UNREAD)
_MESSAGE_CHARACTERS_MAX: Final = 1000
_TRACE_CHARACTERS_MAX: Final = 1500


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that has failed for good, and why. Times are the store's, in seconds."""

    id: TaskId
    type: str
    attempt: int
    error: str
    message: str
    trace: str
    """Its end, which says most."""
    submitted_at: float
    settled_at: float
    name: str
    """What `penstock.queue.replay` calls it."""


@dataclass(frozen=True, slots=True)
class SettledPack:
    """A settled pack, minute by minute."""

    outcomes: tuple[tuple[int, str, int], ...]
    """The minute since the epoch, one of `OUTCOMES`, and how many tasks."""
    starts: tuple[tuple[int, float, int], ...] = ()
    """The minute, how many seconds first attempts had waited, and how many."""
    puts: int = 0
    gets: int = 0
    is_read: bool = True

    @property
    def tasks(self) -> int:
        """How many tasks it has."""
        return sum(count for _, _, count in self.outcomes)

    @property
    def last_minute(self) -> int:
        """The minute in which its last task settled."""
        return max((minute for minute, _, _ in self.outcomes), default=0)


@dataclass(frozen=True, slots=True)
class MinuteCounts:
    """What ended and what started within one minute."""

    at: float
    """Its beginning, in seconds."""
    outcomes: tuple[tuple[str, int], ...]
    starts: int
    median_seconds: float
    """Half of those that started had waited no longer."""
    most_seconds: float
    """Nineteen of twenty had waited no longer."""


def unread(at: PackAt, *, settled_at: float) -> SettledPack:
    """A pack of which only a list was seen."""
    return SettledPack(((int(settled_at // 60), UNREAD, at.count),), is_read=False)


def ended(at: PackAt, ledger: Ledger) -> SettledPack:
    """What a settled ledger tells."""
    outcomes: Counter[tuple[int, str]] = Counter(
        (task.at_ms // 60_000, task.status.word) for task in ledger.tasks if task.status.settled
    )
    claims = [line for line in ledger.log if _is_claim(line)]
    could_ms = max(ledger.submitted_ms or at.submitted_ms or 0, ledger.due_ms)
    starts = tuple(
        (line.at_ms // 60_000, max(0.0, (line.at_ms - could_ms) / 1000), _count(line))
        for line in claims
        if line.attempt == 1
    )
    writes = {(line.at_ms, line.who) for line in ledger.log}
    return SettledPack(
        tuple((minute, what, count) for (minute, what), count in sorted(outcomes.items())),
        starts,
        puts=1 + len(writes) + (ledger.key is not None),
        gets=len({(line.at_ms, line.who) for line in claims}),
    )


def dead_letters_of(at: PackAt, ledger: Ledger) -> Iterator[DeadLetter]:
    """The tasks of a pack that have failed."""
    for place, task in enumerate(ledger.tasks):
        if task.status is not QueueTaskStatus.FAILED:
            continue
        view = view_of_ledger(at, place, ledger, None)
        yield DeadLetter(
            id=view.id,
            type=view.type,
            attempt=view.attempt,
            error=view.error[:_MESSAGE_CHARACTERS_MAX],
            message=view.message[:_MESSAGE_CHARACTERS_MAX],
            trace=view.trace[-_TRACE_CHARACTERS_MAX:],
            submitted_at=view.submitted_at,
            settled_at=view.settled_at or 0.0,
            name=name_of(view),
        )


def by_minute(packs: Iterable[SettledPack], *, now: float) -> tuple[MinuteCounts, ...]:
    """The last hour, oldest first."""
    last = int(now // 60)
    outcomes: dict[int, Counter[str]] = {}
    starts: dict[int, list[tuple[float, int]]] = {}
    for pack in packs:
        for minute, what, count in pack.outcomes:
            outcomes.setdefault(minute, Counter())[what] += count
        for minute, seconds, count in pack.starts:
            starts.setdefault(minute, []).append((seconds, count))
    return tuple(
        MinuteCounts(
            at=minute * 60.0,
            outcomes=tuple(sorted(outcomes.get(minute, Counter()).items())),
            starts=sum(count for _, count in starts.get(minute, ())),
            median_seconds=within(starts.get(minute, ()), share=0.5),
            most_seconds=within(starts.get(minute, ()), share=0.95),
        )
        for minute in range(last - MINUTES + 1, last + 1)
    )


def within(weighed: Sequence[tuple[float, int]], *, share: float) -> float:
    """The least value that this share of all does not exceed; each counts so many times."""
    left = share * sum(count for _, count in weighed)
    for value, count in sorted(weighed):
        left -= count
        if left <= 0:
            return value
    return 0.0


def _is_claim(line: LedgerLogLine) -> bool:
    # To cancel what nobody runs, it is held for a moment: no attempt was made.
    return line.what is LedgerEvent.CLAIMED and line.who != CANCELLER


def _count(line: LedgerLogLine) -> int:
    pairs = zip(line.runs[::2], line.runs[1::2], strict=True)
    return sum(last - first + 1 for first, last in pairs)


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
class RecentActivity:
    """What is known after a look."""

    minutes: tuple[MinuteCounts, ...]
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


class ActivityReader:
    """What somebody who looks at one queue has seen of it."""

    def __init__(self) -> None:
        self._packs: dict[PackAt, SettledPack] = {}
        self._archived: dict[str, Version] = {}
        self._dead: dict[str, tuple[Version, tuple[DeadLetter, ...]]] = {}
        self._fresh: dict[PackAt, tuple[DeadLetter, ...]] = {}
        """Dead letters whose ledgers are still in the queue."""
        self._damaged: dict[PackAt, str] = {}
        """Ledgers that cannot be read, and why: they are not tried again."""
        self._notes: list[str] = []

    async def look(self, access: QueueContext, survey: Survey) -> RecentActivity:
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

    async def _settled(self, access: QueueContext, survey: Survey, now: float) -> None:
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

    async def _read(self, access: QueueContext, at: PackAt) -> None:
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

    async def _archive(self, access: QueueContext, survey: Survey, now: float) -> int:
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

    async def _dead_letters(self, access: QueueContext, survey: Survey) -> bool:
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
        self, access: QueueContext, folder: str, *, start_after: str = ""
    ) -> tuple[list[Entry], bool]:
        found: list[Entry] = []
        number = 0
        async for page in pages(access.store, folder, start_after=start_after):
            found += [each for each in page.entries if access.layout.read_batch(each.key)]
            number += 1
            if number == PAGES_MAX and page.cursor is not None:
                self._notes.append(f"{folder} has more objects than were read.")
                return found, False
        return found, True

    async def _unpack(self, access: QueueContext, batch: Entry) -> list[DeadLetter]:
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

    async def _replayed(self, access: QueueContext, survey: Survey) -> Collection[str]:
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
    ) -> RecentActivity:
        minutes = by_minute(self._packs.values(), now=now)
        first = int(now // 60) - MINUTES + 1
        read = [each for each in self._packs.values() if each.is_read]
        starts = [
            (seconds, count)
            for each in read
            for minute, seconds, count in each.starts
            if minute >= first
        ]
        return RecentActivity(
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


READS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class TaskHappening:
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
class TailResult:
    """What one look found, oldest first."""

    events: tuple[TaskHappening, ...]
    notes: tuple[str, ...] = ()


class QueueFollower:
    """Tells what happens in one queue, from its first look on."""

    def __init__(
        self, access: QueueContext, *, type: str | None = None, tags: Iterable[TagFilter] = ()
    ) -> None:
        self._access = access
        self._type = type
        self._filters = tuple(tags)
        self._since_ms: int | None = None
        self._packs: dict[PackAt, Version | None] = {}
        self._ledgers: dict[PackAt, Version] = {}
        self._told: dict[PackAt, frozenset[LedgerLogLine]] = {}
        self._tags: dict[PackAt, Mapping[str, str]] = {}
        self._notes: set[str] = set()

    async def look(self) -> TailResult:
        """Look once. The first look only remembers what is there."""
        with labelled("inspect"):
            survey = await surveyed(self._access)
            if self._since_ms is None:
                self._since_ms = int((await self._access.store.now()).earliest * 1000)
                self._begin(survey)
                return TailResult(())
            events: list[TaskHappening] = []
            changed = [at for at in survey.pairs if self._is_news(survey, at)][:READS_MAX]
            for start in range(0, len(changed), _AT_ONCE):
                some = changed[start : start + _AT_ONCE]
                for found in await asyncio.gather(*(self._happened(at, survey) for at in some)):
                    events += found
        if survey.is_whole:
            self._forget(survey)
        events.sort(key=lambda event: event.at)
        return TailResult(tuple(events), self._fresh(survey.notes))

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

    async def _happened(self, at: PackAt, survey: Survey) -> list[TaskHappening]:
        """What is new of one pack. Of what cannot be read there is a note."""
        pack, ledger = survey.pairs[at]
        events: list[TaskHappening] = []
        if self._is_new(at, pack):
            self._tags.pop(at, None)
            events.append(
                TaskHappening(survey.since(at), "submitted", at.type, at.count, at.task(0))
            )
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

    def _news(self, at: PackAt, ledger: Ledger) -> Iterator[TaskHappening]:
        if ledger.submitted_ms:
            self._tags[at] = ledger.tags
        told, self._told[at] = self._told.get(at, frozenset()), frozenset(ledger.log)
        for line in ledger.log:
            # To cancel what nobody runs, it is held for a moment: no attempt was made.
            is_held = (line.who, line.what) == (CANCELLER, LedgerEvent.CLAIMED)
            if line in told or is_held or line.at_ms < (self._since_ms or 0):
                continue
            runs = list(zip(line.runs[::2], line.runs[1::2], strict=True))
            yield TaskHappening(
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


_HOUR_SECONDS: Final = 3600.0
_MONTH_HOURS: Final = 720.0


@dataclass(frozen=True, slots=True)
class TaskCost:
    """What a task costs, submitted and claimed and settled."""

    puts: float
    gets: float
    dollars: float

    @property
    def requests(self) -> float:
        """All of them."""
        return self.puts + self.gets

    @property
    def dollars_per_million(self) -> float:
        """What a million such tasks cost."""
        return self.dollars * 1_000_000


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """What workers cost in an hour, idle and always busy."""

    idle_requests: float
    idle_dollars: float
    busy_requests: float
    busy_dollars: float

    @property
    def idle_dollars_per_month(self) -> float:
        """A month of 30 days without work."""
        return self.idle_dollars * _MONTH_HOURS

    @property
    def busy_dollars_per_month(self) -> float:
        """A month of 30 days with nothing but work."""
        return self.busy_dollars * _MONTH_HOURS


def task_cost(*, puts: int, gets: int, tasks: int, prices: Prices | None = None) -> TaskCost | None:
    """What each of so many tasks cost that took these requests; None if there were none."""
    if tasks <= 0:
        return None
    paid = prices or Prices()
    dollars = puts * paid.of(Kind.PUT) + gets * paid.of(Kind.GET)
    return TaskCost(puts / tasks, gets / tasks, dollars / tasks)


def standing_cost(*, owners: int, prices: Prices | None = None) -> WorkerCost:
    """What so many owners of shards cost in an hour."""
    paid = prices or Prices()
    leases, polling = ShardLeaseSettings(), Polling()

    def hour(*, renew_seconds: float, look_seconds: float) -> tuple[float, float]:
        puts = owners * _HOUR_SECONDS / renew_seconds
        lists = owners * _HOUR_SECONDS / look_seconds
        return puts + lists, puts * paid.of(Kind.PUT) + lists * paid.of(Kind.LIST)

    idle = hour(
        renew_seconds=leases.renew_seconds * leases.idle_stretch, look_seconds=polling.max_seconds
    )
    busy = hour(renew_seconds=leases.renew_seconds, look_seconds=polling.min_seconds)
    return WorkerCost(*idle, *busy)
