"""What lists show of a queue: packs that may be claimed, and ledgers that may be archived.

In a LIST of `tasks/` a pack alone is ready, a pack beside its ledger is in progress, a ledger
alone is settled. Packs that become due later are in `ready/`, by the minute; what is due there
is listed too, urgent packs before all else; low priorities, in `unhurried/`, only if the rest
was not enough. For a reader of the whole of a nearly empty queue one request is enough: the
list begins at `ready/`, goes on to `tasks/` and `unhurried/`, and skips what is not due yet.

Only whole pairs are judged: where a list ends behind a pack, that pack is left for next time. A
look that has found enough stops, and the next one goes on from there, so that nothing starves
behind what is always found first. Foreign keys are left alone and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.queue.ids import LEDGER, PRIORITY_MAX, SLOTS, URGENT_MINUTE, PackAt
from penstock.queue.layout import QueueLayout
from penstock.queue.pack_session import ListedPack
from penstock.store.base import Entry, ObjectStore, Version
from penstock.store.metered import labelled

Run = tuple[int, int]
"""The first and the last of neighbouring slots."""

ALL: Final[tuple[Run, ...]] = ((0, SLOTS - 1),)
_END: Final = "\U0010ffff"
PAGES_MAX: Final = 50
"""How many pages one look reads at the most; the next goes on from there."""


@dataclass(frozen=True, slots=True)
class PackCandidate:
    """A pack that was seen, in a list or through a pointer."""

    at: PackAt
    seen: ListedPack | None
    """None for a pack behind a pointer: only its key is known."""
    ledger: Version | None = None
    ledger_modified: float = 0.0
    pointer: PointerCandidate | None = None

    @property
    def priority(self) -> int:
        """How urgent it is: what is higher comes first."""
        return self.pointer.priority if self.pointer else self.at.priority

    @property
    def limit(self) -> str:
        """The key of the limit that its tasks fall under, if there is one."""
        return self.pointer.limit if self.pointer else self.at.limit

    @property
    def age_ms(self) -> float:
        """When it was submitted, or at least pointed to, in milliseconds since the epoch."""
        pointed_ms = self.pointer.modified * 1000 if self.pointer else 0.0
        return self.at.submitted_ms or pointed_ms

    def is_held(self, now: float, lease_seconds: float) -> bool:
        """Whether somebody runs it, as far as a list can tell: its ledger was written lately."""
        is_young = self.ledger_modified + min(lease_seconds, 60.0) > now
        return self.ledger is not None and self.at.count == 1 and is_young


@dataclass(frozen=True, slots=True)
class PointerCandidate:
    """The pointer by which a pack was found."""

    key: str
    nonce: str
    modified: float
    priority: int = 0
    limit: str = ""
    is_entry: bool = False
    """Whether it is an entry of an inbox: that may lead to any pack, not only to one with a key."""
    twins: tuple[str, ...] = ()
    """Of an entry: where the pointer of a pack with a key is."""


@dataclass(slots=True)
class ScanResult:
    """What one look has shown."""

    sights: list[PackCandidate] = field(default_factory=list)
    settled: list[tuple[PackAt, Entry]] = field(default_factory=list)
    """Ledgers whose pack is not there."""
    foreign: list[str] = field(default_factory=list)
    later_ms: int | None = None
    """When the next minute begins in which something becomes due."""
    pointers: dict[str, PackAt] = field(default_factory=dict)
    """Every pointer of `ready/` that was seen, of the slots that were asked for."""
    is_ready_whole: bool = False
    """Whether all that is due in `ready/` was seen."""
    is_cut: bool = True
    """Whether the look may have broken off because it had found enough."""
    is_news: bool = True
    """Whether lists were read; if not, all is as the last look has shown it."""


@dataclass(frozen=True, slots=True)
class _Area:
    """The keys from `first` to before `end`, and a prefix that they share."""

    prefix: str
    first: str
    end: str


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a list showed: every key behind `start` up to and including `reached`."""

    start: str
    reached: str
    entries: tuple[Entry, ...]


class Scanner:
    """Looks at a queue's lists, and remembers where it broke off."""

    def __init__(self, store: ObjectStore, layout: QueueLayout) -> None:
        self._store = store
        self._layout = layout
        self._resume: dict[Run, str] = {}
        self._resume_ready = self._resume_unhurried = ""
        self._known: _Stretch | None = None
        self.lists = 0
        """How many pages the last look has read."""

    @property
    def is_through(self) -> bool:
        """Whether the last look has broken off nowhere."""
        return not (self._resume or self._resume_ready or self._resume_unhurried)

    async def look(
        self,
        runs: Sequence[Run],
        *,
        minute: int,
        worth: Callable[[PackCandidate], int],
        wanted: int,
        with_ready: bool = True,
    ) -> ScanResult:
        """Look at these slots, and at what is due in `ready/` of them.

        `minute` is the present one on the store's clock. `worth` says how many tasks of a sight
        are of use; the look breaks off when there are as many as `wanted`.
        """
        view = ScanResult()
        self._known = None
        self.lists = 0
        self._resume = {run: start for run, start in self._resume.items() if run in runs}
        with labelled("discovery"):
            if with_ready:
                whole = tuple(runs) == ALL and not self._resume and not self._resume_ready
                await self._look_at_ready(
                    view, minute, runs, whole=whole, worth=worth, wanted=wanted
                )
            for run in runs:
                area = self._tasks(run)
                start = self._resume.pop(run, area.first)
                broke_off = await self._walk(
                    view, area, start=start, runs=(run,), worth=worth, wanted=wanted
                )
                if broke_off:
                    self._resume[run] = broke_off
            if with_ready and sum(map(worth, view.sights)) < wanted:
                # Only what is left over of the room is for what has a low priority.
                whole = tuple(runs) == ALL
                await self._look_at_unhurried(view, runs, whole=whole, worth=worth, wanted=wanted)
        self._known = None
        return view

    async def look_at_due(
        self, *, minute: int, worth: Callable[[PackCandidate], int], wanted: int
    ) -> ScanResult:
        """Look at what is due in `ready/`, of all slots, and at nothing else."""
        view = ScanResult()
        self._known = None
        with labelled("discovery"):
            await self._look_at_ready(view, minute, ALL, whole=False, worth=worth, wanted=wanted)
        return view

    async def look_at_urgent(
        self, runs: Sequence[Run], *, worth: Callable[[PackCandidate], int], wanted: int
    ) -> ScanResult:
        """Look at what is more urgent than most, of these slots, and at nothing else."""
        view = ScanResult()
        self._known = None
        area = self._urgent()
        with labelled("discovery"):
            await self._walk(view, area, start=area.first, runs=runs, worth=worth, wanted=wanted)
        self._known = None
        return view

    async def look_at_unhurried(
        self, *, worth: Callable[[PackCandidate], int], wanted: int
    ) -> ScanResult:
        """Look at what has a low priority, of all slots, and at nothing else."""
        view = ScanResult()
        self._known = None
        with labelled("discovery"):
            await self._look_at_unhurried(view, ALL, whole=False, worth=worth, wanted=wanted)
        return view

    async def _look_at_ready(
        self,
        view: ScanResult,
        minute: int,
        runs: Sequence[Run],
        *,
        whole: bool,
        worth: Callable[[PackCandidate], int],
        wanted: int,
    ) -> None:
        area = self._ready(minute, whole=whole)
        start = self._resume_ready or area.first
        self._resume_ready = await self._walk(
            view, area, start=start, runs=runs, worth=worth, wanted=wanted
        )
        view.is_ready_whole = start == area.first and not self._resume_ready
        self._note_later(view, minute)

    async def _look_at_unhurried(
        self,
        view: ScanResult,
        runs: Sequence[Run],
        *,
        whole: bool,
        worth: Callable[[PackCandidate], int],
        wanted: int,
    ) -> None:
        area = self._unhurried(whole=whole)
        start = self._resume_unhurried or area.first
        if start != area.first and await self._look_above(
            view, area, start, runs, worth=worth, wanted=wanted
        ):
            return
        self._resume_unhurried = await self._walk(
            view, area, start=start, runs=runs, worth=worth, wanted=wanted
        )

    async def _look_above(
        self,
        view: ScanResult,
        area: _Area,
        start: str,
        runs: Sequence[Run],
        *,
        worth: Callable[[PackCandidate], int],
        wanted: int,
    ) -> bool:
        """Look at priorities above that at which the last look broke off; whether that will do."""
        level = len(self._layout.unhurried) + 1
        above = replace(area, end=start[:level])
        before = len(view.sights)
        if above.first >= above.end:
            return False
        broke_off = await self._walk(
            view, above, start=area.first, runs=runs, worth=worth, wanted=wanted
        )
        return bool(broke_off) or sum(map(worth, view.sights[before:])) >= wanted

    def go_on_from(self, run: Run, slot: int) -> None:
        """Let the next look at a run that was broken off go on from another slot."""
        if run in self._resume:
            self._resume[run] = f"{self._layout.tasks}{slot:03x}/"

    def _ready(self, minute: int, *, whole: bool) -> _Area:
        ready = self._layout.ready
        # For one who looks at everything, the list may as well go on to what follows.
        return _Area(self._layout.root if whole else ready, ready, f"{ready}{minute + 1}/")

    def _urgent(self) -> _Area:
        first, last = (str(URGENT_MINUTE + n) for n in (0, PRIORITY_MAX - 1))
        ready = self._layout.ready
        return _Area(ready + first[:-1], f"{ready}{first}/", f"{ready}{last}/~")

    def _unhurried(self, *, whole: bool) -> _Area:
        first = self._layout.unhurried
        return _Area(self._layout.root if whole else first, first, f"{first}~")

    def _tasks(self, run: Run) -> _Area:
        first, last = (f"{slot:03x}/" for slot in run)
        shared = next(n for n in range(len(first), -1, -1) if first[:n] == last[:n])
        tasks = self._layout.tasks
        # As above: what is unhurried comes next.
        prefix = self._layout.root if (run,) == ALL else tasks + first[:shared]
        return _Area(prefix, tasks + first, f"{tasks}{last}~~")

    async def _walk(
        self,
        view: ScanResult,
        area: _Area,
        *,
        start: str,
        runs: Sequence[Run],
        worth: Callable[[PackCandidate], int],
        wanted: int,
    ) -> str:
        """Judge what is in the area; returns where it broke off, or nothing if it did not."""
        found = 0
        behind = start
        cut: list[Entry] = []
        for _ in range(PAGES_MAX):
            stretch = await self._list(area, start)
            start = stretch.reached
            entries = cut + [entry for entry in stretch.entries if entry.key < area.end]
            is_end = stretch.reached >= area.end
            # The ledger of a pack at the end of a page may be on the next one.
            cut = [] if is_end or not entries or entries[-1].key.endswith(LEDGER) else entries[-1:]
            judged = entries[: len(entries) - len(cut)]
            behind = judged[-1].key if judged else behind
            sights = self._judge(view, judged, runs)
            found += sum(worth(sight) for sight in sights)
            if is_end:
                return ""
            if found >= wanted:
                break
        # Behind the pair: a ledger that comes to its pack meanwhile must not look like one alone.
        return behind if behind.endswith((LEDGER, "/")) else behind + LEDGER

    async def _list(self, area: _Area, start: str) -> _Stretch:
        """The next keys behind `start`: from the last list, if it went that far, or a new one."""
        known = self._known
        if known is not None and known.start <= start < known.reached:
            later = tuple(entry for entry in known.entries if entry.key > start)
            return _Stretch(start, known.reached, later)
        self.lists += 1
        page = await self._store.list(area.prefix, start_after=start)
        for _ in range(PAGES_MAX):
            if page.entries or page.cursor is None:
                break
            page = await self._store.list(area.prefix, start_after=start, cursor=page.cursor)
        whole = page.cursor is None or not page.entries
        reached = area.prefix + _END if whole else page.entries[-1].key
        self._known = _Stretch(start, reached, page.entries)
        return self._known

    def _note_later(self, view: ScanResult, minute: int) -> None:
        for entry in self._known.entries if self._known else ():
            if not entry.key.startswith(self._layout.ready):
                return
            at_minute = self._layout.ready_minute(entry.key)
            if at_minute is not None and at_minute > minute:
                view.later_ms = at_minute * 60_000
                return

    def _judge(
        self, view: ScanResult, entries: Sequence[Entry], runs: Sequence[Run]
    ) -> list[PackCandidate]:
        """Sort these entries into the view; returns the packs among them."""
        before = len(view.sights)
        for at, pack, ledger in self._pairs(view, entries):
            if not any(first <= at.slot <= last for first, last in runs):
                continue
            if pack is not None:
                seen = ListedPack(pack.version, pack.modified, has_ledger=ledger is not None)
                version, modified = (ledger.version, ledger.modified) if ledger else (None, 0.0)
                view.sights.append(PackCandidate(at, seen, version, modified))
            elif ledger is not None:
                view.settled.append((at, ledger))
        for entry in entries:
            pointed = self._layout.read_pointer(entry.key)
            if pointed and any(first <= pointed.at.slot <= last for first, last in runs):
                pointer = PointerCandidate(
                    entry.key, pointed.nonce, entry.modified, pointed.priority, pointed.limit
                )
                view.sights.append(PackCandidate(pointed.at, None, pointer=pointer))
                if entry.key.startswith(self._layout.ready):
                    view.pointers[entry.key] = pointed.at
        return view.sights[before:]

    def _pairs(
        self, view: ScanResult, entries: Sequence[Entry]
    ) -> Iterator[tuple[PackAt, Entry | None, Entry | None]]:
        pairs: dict[PackAt, list[Entry | None]] = {}
        for entry in entries:
            read = self._layout.read(entry.key)
            if read is not None:
                at, is_ledger = read
                pairs.setdefault(at, [None, None])[is_ledger] = entry
            elif self._layout.read_pointer(entry.key) is None:
                view.foreign.append(entry.key)
        for at, (pack, ledger) in pairs.items():
            yield at, pack, ledger
