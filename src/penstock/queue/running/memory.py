"""What a worker remembers of packs that gave it nothing: when each is worth another try.

A list shows that a ledger has changed, by its version, but not what it says. So a ledger is read
when its version is new, or when the time has come that was read from it (R10), and not otherwise.
What is due can be tried without a list. A pack with a key is known by the pointer that led to it:
its place has many lives, and a new pointer is news.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.queue.discovery.scan import Sight
from penstock.store.base import Version

PACKS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Known:
    sight: Sight
    ledger: Version | None
    due_ms: int
    noted_ms: int
    blind: bool


class Memory:
    """Packs by place or pointer. Forgetting one costs a request, never a task."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._soonest_ms: int | None = None
        """Not later than the next due time: what was forgotten since is still counted."""

    def note(
        self,
        sight: Sight,
        *,
        ledger: Version | None,
        due_ms: int,
        noted_ms: int = 0,
        blind: bool = True,
    ) -> None:
        """This pack, with this ledger, is worth nothing before `due_ms`.

        Then it is tried, if `blind`; otherwise it waits for a list to show that it is still there.
        """
        self.forget(sight)
        if len(self._known) >= PACKS_MAX:
            del self._known[next(iter(self._known))]
        self._known[_name(sight)] = _Known(sight, ledger, due_ms, noted_ms, blind)
        self._soonest_ms = due_ms if self._soonest_ms is None else min(due_ms, self._soonest_ms)

    def forget(self, sight: Sight) -> None:
        self._known.pop(_name(sight), None)

    def forget_all(self) -> None:
        self._known.clear()
        self._soonest_ms = None

    def is_known_idle(self, sight: Sight, now_ms: float, *, reread_ms: float = 0.0) -> bool:
        """Whether there is no reason to try this pack.

        A ledger with a new version is one, but not sooner than `reread_ms` after the last reading.
        """
        known = self._known.get(_name(sight))
        if known is None or known.due_ms <= now_ms:
            return False
        if now_ms < known.noted_ms + reread_ms:
            return True
        return sight.seen is None or sight.ledger == known.ledger

    def due(self, now_ms: float) -> list[Sight]:
        """The packs whose time has come; they are forgotten."""
        if self._soonest_ms is None or self._soonest_ms > now_ms:
            return []
        ready = [known for known in self._known.values() if known.due_ms <= now_ms]
        for known in ready:
            self.forget(known.sight)
        self._soonest_ms = min((known.due_ms for known in self._known.values()), default=None)
        return [known.sight for known in ready if known.blind]

    def next_due_ms(self) -> int | None:
        """When the next pack's time comes, or earlier."""
        return self._soonest_ms if self._known else None


def _name(sight: Sight) -> str:
    return sight.pointer.key if sight.pointer else sight.at.path
