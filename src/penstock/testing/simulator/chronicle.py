"""What happened in a world, and the part of it that concerns one task: the story of a violation.

Events are noted with the true time in seconds since the world began, with who did it, and with
what it is about: tasks by their numbers, shards, or the machine itself. The story of a violation is
what was noted about its subjects, and what happened to the machines that appear in it; the rest of
the world is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Subject = tuple[str, int]
"""`("task", number)` or `("shard", number)`."""


@dataclass(frozen=True, slots=True)
class Event:
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


class Chronicle:
    """All events of a world, and the first few violations."""

    VIOLATIONS_MAX = 5

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._events: list[Event] = []
        self.violations: list[Violation] = []

    def note(self, who: str, what: str, *subjects: Subject) -> None:
        """Note something; without subjects it is about the machine `who` itself."""
        self._events.append(Event(self._now(), who, what, subjects))

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
