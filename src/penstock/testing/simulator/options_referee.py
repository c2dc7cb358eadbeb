"""Judges what submits say besides their input: priorities, limits, affinities, and gathering.

What it states, whatever the world does:

1. A task lies under the priority and the limit that its submit named, also if others were sent
   in one pack with it.
2. Of a limit with a concurrency no more handlers run at a time; of one with a rate no more start
   in any t seconds than `burst + rate * t` (LIMIT-1 to LIMIT-6). A handler starts only while its
   machine has a share of the limit that its task lies under (LIMIT-3, LIMIT-7).
3. Packs of one type and affinity, without a key, lie in one slot.
4. A submit that was withdrawn before it can have been sent does not arrive.

Counted are handlers of machines that live and have not been frozen since the handler began: one
that was frozen for longer than its lease is interrupted when it thaws, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kernel.document_format import decode
from penstock.queue.layout import QueueLayout
from penstock.queue.limits import LimitDefinition, LimitState
from penstock.queue.pack import Pack
from penstock.testing.simulator.history import EventLog, TrackedTask

_SLACK: Final = 0.01
"""Of a token: clocks drift."""


@dataclass(frozen=True, slots=True)
class _Running:
    """One handler that runs under a limit."""

    task: TrackedTask
    who: str
    freezes: int
    """How often its machine had been frozen when it began."""


class OptionsReferee:
    """Judges the options of submits in one world."""

    def __init__(
        self,
        layout: QueueLayout,
        chronicle: EventLog,
        now: Callable[[], float],
        freezes: Callable[[str], int | None],
    ) -> None:
        """`freezes` tells how often a machine was frozen; None of one that is dead, or frozen."""
        self._layout = layout
        self._chronicle = chronicle
        self._now = now
        self._freezes = freezes
        self._slots: dict[tuple[str, str], int] = {}
        self._limits: dict[str, LimitState] = {}
        self._holders: dict[str, str] = {}
        """Name of a share → the machine that has written it first."""
        self._running: dict[str, list[_Running]] = {}
        self._starts: dict[str, tuple[float, float]] = {}
        """Limit → starts that have not flowed off, and when that was counted."""

    def written(self, who: str, key: str, body: bytes) -> None:
        """A limit was written: its definition, or somebody's share of it."""
        limit = key.removeprefix(self._layout.limits).removesuffix(".json")
        state = self._limits[limit] = decode(LimitState, body, where=key)
        for name in state.shares:
            self._holders.setdefault(name, who)

    def pack_came(self, key: str, pack: Pack, tasks: Sequence[TrackedTask]) -> None:
        """A pack has come into the bucket."""
        read = self._layout.read(key)
        assert read is not None, "a pack has the key of a pack"
        for task in tasks:
            asked = task.options
            if (pack.priority, pack.limit) != (asked.priority, asked.limit):
                self._chronicle.accuse(
                    f"Task {task.number} lies under another priority or limit than was asked for.",
                    task.subject,
                )
            if task.is_withdrawn:
                self._chronicle.accuse(
                    f"Task {task.number} was withdrawn before it was sent, and arrives.",
                    task.subject,
                )
            if asked.affinity and task.key is None:
                slot = self._slots.setdefault((pack.type, asked.affinity), read[0].slot)
                if slot != read[0].slot:
                    self._chronicle.accuse(
                        f"Task {task.number} lies apart from others of its affinity.", task.subject
                    )

    def starts(self, who: str, task: TrackedTask) -> None:
        """A handler begins."""
        limit = task.options.limit
        state = self._limits.get(limit)
        if state is None:
            return
        definition = state.definition
        running = [each for each in self._running.get(limit, []) if self._counts(each)]
        freezes = self._freezes(who)
        if freezes is not None and not self._has_share(who, state):
            self._chronicle.accuse(
                f"Task {task.number} starts without a share of its limit {limit!r}.", task.subject
            )
        running += [] if freezes is None else [_Running(task, who, freezes)]
        self._running[limit] = running
        if definition.concurrency is not None and len(running) > definition.concurrency:
            self._chronicle.accuse(
                f"{len(running)} tasks run under the limit {limit!r} of {definition.concurrency}.",
                *(each.task.subject for each in running),
            )
        if definition.rate is not None:
            self._count_start(limit, definition, task)

    def _has_share(self, who: str, state: LimitState) -> bool:
        return any(
            self._holders[name] == who and share.ends_ms > self._now() * 1000
            for name, share in state.shares.items()
        )

    def _count_start(self, limit: str, definition: LimitDefinition, task: TrackedTask) -> None:
        now = self._now()
        count, at = self._starts.get(limit, (0.0, now))
        count = max(0.0, count - (now - at) * definition.starts_a_second) + 1
        self._starts[limit] = count, now
        if count > definition.burst + _SLACK:
            self._chronicle.accuse(
                f"More tasks start under the limit {limit!r} than its rate and burst allow.",
                task.subject,
            )

    def _counts(self, running: _Running) -> bool:
        return self._freezes(running.who) == running.freezes

    def ends(self, who: str, task: TrackedTask) -> None:
        """A handler has ended."""
        running = self._running.get(task.options.limit, [])
        self._running[task.options.limit] = [
            each for each in running if (each.task, each.who) != (task, who)
        ]
