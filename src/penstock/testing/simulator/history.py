"""The history of a world: the log of its events, and the known state of every task.

Events are logged with the true time in seconds since the world began, with who acted, and with
their subjects: tasks by their numbers, shards, or the machine itself. The story of a violation
is the events of its subjects, and of the machines that appear in it; the rest is left out.

A task is known by its number, which its input carries: `{"n": number, …}`. So it is the same
task wherever it turns up: in a pack, in a ledger, in the archive, in a handler. A key that is
used again is another task with another number, although the queue gives both the same id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from penstock.queue.ledger import QueueTaskState

Subject = tuple[str, int]
"""`("task", number)` or `("shard", number)`."""


@dataclass(frozen=True, slots=True)
class WorldEvent:
    """Something that happened, at so many seconds after the beginning."""

    at: float
    who: str
    what: str
    subjects: tuple[Subject, ...] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never happen, with its story."""

    sentence: str
    at: float
    story: tuple[str, ...]


class EventLog:
    """All events of a world, and the first few violations."""

    VIOLATIONS_MAX = 5

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._events: list[WorldEvent] = []
        self.violations: list[Violation] = []

    def note(self, who: str, what: str, *subjects: Subject) -> None:
        """Note something; without subjects it is about the machine `who` itself."""
        self._events.append(WorldEvent(self._now(), who, what, subjects))

    def accuse(self, sentence: str, *subjects: Subject) -> None:
        """Note a violation. The story ends here."""
        if len(self.violations) >= self.VIOLATIONS_MAX:
            return
        found = Violation(sentence, self._now(), tuple(self._story(subjects)))
        self.violations.append(found)

    def _story(self, subjects: Iterable[Subject]) -> Iterable[str]:
        wanted = frozenset(subjects)
        about = [event for event in self._events if wanted.intersection(event.subjects)]
        machines = {event.who for event in about}
        first = about[0].at if about else 0.0
        for event in self._events:
            on_machine = not event.subjects and (event.who in machines or not wanted)
            if wanted.intersection(event.subjects) or (on_machine and event.at >= first):
                yield f"{event.at:10.3f} s  {event.who:<12} {event.what}"


SLACK_SECONDS: Final = 1.5
"""Stores date to the second, and what is decided is written a moment later."""

ATTEMPTS_MAX: Final = 4
"""How many attempts every simulated task has."""

LASTING: Final = "Lasting"
"""The name of the error that is not retried."""

_READY: Final = QueueTaskState()


class SimulatedInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The input of every simulated task: its number, and what its handler is to do."""

    n: int
    do: str = "quick"
    seconds: float = 0.0
    times: int = 0
    """For how many attempts; afterwards it succeeds."""


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    """What a submit says besides type, input and time."""

    priority: int = 0
    limit: str = ""
    affinity: str = ""

    @property
    def asked(self) -> dict[str, Any]:
        """As arguments of `submit`."""
        return {"priority": self.priority, "limit": self.limit, "affinity": self.affinity}

    @property
    def words(self) -> str:
        """What of it is set, for a story."""
        return "".join(f", {name} {value}" for name, value in self.asked.items() if value)


class SimulatedResult(msgspec.Struct, frozen=True):
    """What every simulated handler returns: which attempt it was, and on which machine."""

    n: int
    attempt: int
    by: str


@dataclass(slots=True, eq=False)
class TrackedTask:
    """One task, by all that was seen of it."""

    number: int
    by: str
    asked_at: float
    key: str | None = None
    type: str = ""
    options: SimulatedOptions = SimulatedOptions()
    is_withdrawn: bool = False
    """Whether its submit was cancelled before anything of it can have been sent."""
    place: str = ""
    """The key of its pack in the bucket, as soon as it is known."""
    answered_at: float | None = None
    written_at: float | None = None
    """When its pack first came into the bucket."""
    cancel_asked: bool = False
    due_ms: int = 0
    submitted_ms: int = 0
    """When it was submitted, as its pack says."""
    claims: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Attempt → the machine and the claim that have it."""
    started: dict[int, str] = field(default_factory=dict)
    started_at: float | None = None
    """When its first attempt did."""
    in_company: set[int] = field(default_factory=set)
    """The attempts beside which their machine held other tasks of the pack."""
    beside: set[int] = field(default_factory=set)
    """The attempts beside which their machine ran others, of any pack."""
    spared: set[int] = field(default_factory=set)
    """The attempts that their own machine gave back."""
    failed: set[int] = field(default_factory=set)
    """The attempts of which their own machine said that they failed."""
    endings: dict[str, str] = field(default_factory=dict)
    """Claim → what it ended its attempt with."""
    settled_at: float | None = None
    state: QueueTaskState = _READY
    """How it was settled."""
    key_ends_ms: int = 0
    archived: bool = False
    removed: str = ""
    """Why it is lost, if its pack was removed without a reason."""

    @property
    def subject(self) -> Subject:
        return ("task", self.number)


class TaskTracker:
    """All tasks of a world, by number, by the version of their pack, and by key."""

    def __init__(self) -> None:
        self.tasks: dict[int, TrackedTask] = {}
        self._packs: dict[str, tuple[TrackedTask, ...]] = {}
        self._keys: dict[str, list[TrackedTask]] = {}
        self._places: dict[str, list[TrackedTask]] = {}
        self._cancelled: set[str] = set()

    def add(self, task: TrackedTask) -> TrackedTask:
        self.tasks[task.number] = task
        if task.key is not None:
            self._keys.setdefault(task.key, []).append(task)
            self._places.setdefault(task.place, []).append(task)
            # A cancel that takes long may meet the next task of the key.
            task.cancel_asked = task.place in self._cancelled
        return task

    def cancel(self, place: str, index: int | None) -> tuple[TrackedTask, ...]:
        """Note that somebody wants a task cancelled; without an index, the task of a key."""
        tasks = self.at_place(place)
        if index is None:
            self._cancelled.add(place)
        else:
            tasks = tasks[index : index + 1]
        for task in tasks:
            task.cancel_asked = True
        return tasks

    def at_place(self, place: str) -> tuple[TrackedTask, ...]:
        """The tasks whose pack is, was, or is to be under this key."""
        return tuple(self._places.get(place, ()))

    def pack(self, version: str) -> tuple[TrackedTask, ...]:
        """The tasks of the pack that has, or had, this version."""
        return self._packs.get(version, ())

    def take_in(
        self, place: str, version: str, inputs: Sequence[msgspec.Raw]
    ) -> tuple[TrackedTask, ...]:
        """Learn which tasks a pack holds."""
        if version in self._packs:
            return self._packs[version]
        numbers = tuple(msgspec.json.decode(bytes(each), type=SimulatedInput).n for each in inputs)
        tasks = tuple(self.tasks[number] for number in numbers)
        for task in tasks:
            if task.key is None:
                task.place = place
                self._places.setdefault(place, []).append(task)
        self._packs[version] = tasks
        return tasks

    def others_of_key(self, task: TrackedTask) -> Iterator[TrackedTask]:
        """The other tasks that were submitted with the same key."""
        if task.key is not None:
            yield from (other for other in self._keys[task.key] if other is not task)

    def is_excused(self, task: TrackedTask) -> bool:
        """Whether a submit that was answered may have been a duplicate: its key was taken."""
        answered = task.answered_at
        assert answered is not None
        for other in self.others_of_key(task):
            if other.written_at is None or other.written_at > answered + SLACK_SECONDS:
                continue
            if other.settled_at is None:
                if not other.removed:
                    return True
            elif other.key_ends_ms / 1000 + SLACK_SECONDS >= task.asked_at:
                return True
        return False

    def unsettled(self) -> list[TrackedTask]:
        """The tasks that were submitted for sure, are no duplicates, and are not settled."""
        return [
            task
            for task in self.tasks.values()
            if task.answered_at is not None
            and task.settled_at is None
            and not (self.is_excused(task) if task.written_at is None else self.is_duplicate(task))
        ]

    def is_duplicate(self, task: TrackedTask) -> bool:
        """Whether it was submitted while the key of an earlier, settled task was still taken."""
        return any(
            other.settled_at is not None
            and (other.written_at or 0.0) <= (task.written_at or 0.0)
            and task.submitted_ms < other.key_ends_ms
            for other in self.others_of_key(task)
        )
