"""What a settled pack tells of the time that its tasks took, how they ended and what it cost. Pure.

All of it is in the ledger: a task's outcome and when, and in the log when it was claimed first. So
throughput and the time until a task starts are known without anybody having measured them.

Requests are counted by what the ledger shows: a put to submit (and one for the pointer of a key), a
put for each moment at which the log was written to, and a GET of the pack for each claim. Looks,
leases and heartbeats leave no line in a log, and are not in it; nor is the archive, which is one
put for hundreds of packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.queue.ledger import Happening, Ledger, LogLine, Status
from penstock.queue.places import PackAt, TaskId
from penstock.queue.replays import name_of
from penstock.queue.views import CANCELLER, WORDS, view_of_ledger

MINUTES: Final = 60
"""How far back is looked."""
UNREAD: Final = "settled"
"""The outcome of tasks whose ledger was seen in a list, and not read."""
OUTCOMES: Final = ("succeeded", "failed", "cancelled", "expired", UNREAD)
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
    """What `penstock.queue.replays` calls it."""


@dataclass(frozen=True, slots=True)
class Ended:
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
class Minute:
    """What ended and what started within one minute."""

    at: float
    """Its beginning, in seconds."""
    outcomes: tuple[tuple[str, int], ...]
    starts: int
    median_seconds: float
    """Half of those that started had waited no longer."""
    most_seconds: float
    """Nineteen of twenty had waited no longer."""


def unread(at: PackAt, *, settled_at: float) -> Ended:
    """A pack of which only a list was seen."""
    return Ended(((int(settled_at // 60), UNREAD, at.count),), is_read=False)


def ended(at: PackAt, ledger: Ledger) -> Ended:
    """What a settled ledger tells."""
    outcomes: Counter[tuple[int, str]] = Counter(
        (task.at_ms // 60_000, WORDS[task.status]) for task in ledger.tasks if task.status.settled
    )
    claims = [line for line in ledger.log if _is_claim(line)]
    could_ms = max(ledger.submitted_ms or at.submitted_ms or 0, ledger.due_ms)
    starts = tuple(
        (line.at_ms // 60_000, max(0.0, (line.at_ms - could_ms) / 1000), _count(line))
        for line in claims
        if line.attempt == 1
    )
    writes = {(line.at_ms, line.who) for line in ledger.log}
    return Ended(
        tuple((minute, what, count) for (minute, what), count in sorted(outcomes.items())),
        starts,
        puts=1 + len(writes) + (ledger.key is not None),
        gets=len({(line.at_ms, line.who) for line in claims}),
    )


def dead_letters_of(at: PackAt, ledger: Ledger) -> Iterator[DeadLetter]:
    """The tasks of a pack that have failed."""
    for place, task in enumerate(ledger.tasks):
        if task.status is not Status.FAILED:
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


def by_minute(packs: Iterable[Ended], *, now: float) -> tuple[Minute, ...]:
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
        Minute(
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


def _is_claim(line: LogLine) -> bool:
    # To cancel what nobody runs, it is held for a moment: no attempt was made.
    return line.what is Happening.CLAIMED and line.who != CANCELLER


def _count(line: LogLine) -> int:
    pairs = zip(line.runs[::2], line.runs[1::2], strict=True)
    return sum(last - first + 1 for first, last in pairs)
