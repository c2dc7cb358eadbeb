"""The part of the referee that reads ledgers and the archive.

Every write of a ledger is compared with what was there: who wrote it, what became of each task, and
whether the writer was the one to do so at that moment, by true time and by the leases as they were
stored. A lease that is renewed by touches lasts as long as the date of its ledger says; whoever
takes it over may go by the date that it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from penstock.kernel.wire import WRITERS_MAX, decode
from penstock.queue.archive_rows import unpacked
from penstock.queue.heartbeats import as_of
from penstock.queue.ledger import Lease, Ledger, Status, TaskState
from penstock.queue.places import LEDGER
from penstock.testing.simulator.chronicle import Chronicle
from penstock.testing.simulator.tracking import (
    ATTEMPTS_MAX,
    LASTING,
    Result,
    Tracked,
    Tracker,
)

_READY: Final = TaskState()


class Ledgers:
    """Judges what is written into ledgers, and what leaves for the archive."""

    def __init__(
        self,
        tracker: Tracker,
        chronicle: Chronicle,
        now: Callable[[], float],
        is_gone: Callable[[str, str], bool],
    ) -> None:
        self._tracker = tracker
        self._chronicle = chronicle
        self._now = now
        self._is_gone = is_gone
        self._ledgers: dict[str, Ledger] = {}
        self._holders: dict[str, str] = {}
        self._dates: dict[str, float] = {}
        self._read: dict[tuple[str, str], float] = {}
        """Machine and ledger → the date of the ledger as the machine has read it last."""
        self.abilities: dict[str, frozenset[str]] = {}
        """Machine → the types that its worker has handlers for."""
        self._running: dict[str, dict[Tracked, int]] = {}
        """Machine → what its handlers run, with the number of the attempt."""
        self._unwritten: dict[str, dict[Tracked, int]] = {}
        """Machine → what it has run, and whose end is not in the ledger."""

    def lease(self, key: str, claim: str) -> Lease | None:
        """The lease of a claim, by the ledger as it is stored."""
        ledger = self._ledgers.get(key)
        return as_of(ledger, self._dates[key]).leases.get(claim) if ledger else None

    def was_read(self, who: str, key: str, modified: float) -> None:
        """A machine has read a ledger of this date."""
        self._read[who, key] = modified

    def holds(self, key: str, place: int, claim: str, attempt: int) -> bool:
        """Whether a task is held by, or was settled by, this attempt of a claim."""
        ledger = self._ledgers.get(key)
        if ledger is None:
            return False
        task = ledger.tasks[place]
        return (task.claim, task.attempt) == (claim, attempt)

    def starts(self, who: str, task: Tracked, attempt: int) -> None:
        """A handler begins: whatever else its machine runs is in company, and so is this."""
        running = self._running.setdefault(who, {})
        unwritten = self._unwritten.setdefault(who, {})
        if running:
            task.beside.add(attempt)
        for other, number in (*running.items(), *unwritten.items()):
            claim = other.claims.get(number, ("", ""))[1]
            lease = self.lease(other.place + LEDGER, claim)
            # What is lost already is not lost by what starts now.
            if lease is not None and lease.expires_ms > self._now() * 1000:
                other.beside.add(number)
        running[task] = unwritten[task] = attempt

    def ends(self, who: str, task: Tracked) -> None:
        """A handler has ended; what came of it may not be written yet."""
        self._running.get(who, {}).pop(task, None)

    def saw(self, who: str, key: str, after: bytes | None) -> None:
        """A ledger was written, or removed."""
        old = self._ledgers.pop(key, None)
        dated, self._dates[key] = self._dates.get(key, 0.0), float(int(self._now()))
        if after is None:
            if old is not None:
                self._ledger_removed(who, old)
            return
        new = self._ledgers[key] = decode(Ledger, after, where=key)
        tasks = self._tracker.pack(new.pack_version)
        if not tasks:
            self._chronicle.accuse("A ledger names a pack that never was.")
            return
        if old is not None:
            self._judge_descent(tasks, old, new)
            self._judge_leases(who, tasks, as_of(old, dated), as_of(new, self._dates[key]))
            # What it takes over it takes by the date that it has read.
            old = as_of(old, self._read.get((who, key), dated))
        same = old if old is not None and old.pack_version == new.pack_version else None
        states = same.tasks if same else (_READY,) * len(new.tasks)
        self._judge_ability(who, key, tasks, new)
        for place, (was, is_) in enumerate(zip(states, new.tasks, strict=True)):
            if was != is_:
                self._state(who, tasks[place], (same, was), (new, is_))
        self._note_company(tasks, new)
        if new.settled and len(new.inputs) != len(tasks):
            self._accuse_all("A settled ledger lacks the inputs.", tasks)

    def _accuse_all(self, sentence: str, tasks: Sequence[Tracked]) -> None:
        self._chronicle.accuse(sentence, *(task.subject for task in tasks))

    def _judge_descent(self, tasks: Sequence[Tracked], old: Ledger, new: Ledger) -> None:
        last = next(reversed(old.writes.items()), None)
        if old.born != new.born:
            self._accuse_all("A ledger was written over by another one.", tasks)
        elif last is not None and len(new.writes) < WRITERS_MAX:
            # The same writer may have written again; then its last write is another one.
            is_known = new.writes.get(last[0]) == last[1] or next(reversed(new.writes)) == last[0]
            if not is_known:
                self._accuse_all("A write came over a ledger that it did not know.", tasks)

    def _judge_leases(self, who: str, tasks: Sequence[Tracked], old: Ledger, new: Ledger) -> None:
        """Only the holder of a lease moves its end to a later time."""
        for claim, lease in new.leases.items():
            before = old.leases.get(claim)
            is_later = before is not None and before.expires_ms < lease.expires_ms
            if is_later and self._holders.get(claim, who) != who:
                self._accuse_all("A lease was prolonged by another than its holder.", tasks)

    def _judge_ability(self, who: str, key: str, tasks: Sequence[Tracked], new: Ledger) -> None:
        kind = key.rpartition("~")[2].removesuffix(LEDGER)
        if who in self.abilities and kind not in self.abilities[who]:
            claims = new.leases.keys() - self._holders.keys()
            if any(task.claim in claims for task in new.tasks):
                self._accuse_all("A worker claimed a task that it has no handler for.", tasks)

    def _state(
        self,
        who: str,
        task: Tracked,
        before: tuple[Ledger | None, TaskState],
        after: tuple[Ledger, TaskState],
    ) -> None:
        """One task of a ledger has changed."""
        old, was = before
        new, is_ = after
        self._tell_change(who, task, was, after)
        if was.status.settled:
            self._chronicle.accuse(f"Settled task {task.number} changed.", task.subject)
            return
        if is_.attempt < was.attempt:
            self._chronicle.accuse(f"An attempt of task {task.number} went back.", task.subject)
        was_held = was.status is Status.CLAIMED
        if was_held and (is_.claim != was.claim or is_.status is not Status.CLAIMED):
            self._unwritten.get(self._holders.get(was.claim, ""), {}).pop(task, None)
        if (was_held and is_.claim != was.claim) or is_.status.settled:
            self._judge_end(who, task, (old, was), is_)
        if is_.status is Status.CLAIMED and is_.claim != was.claim:
            if is_.attempt != was.attempt + 1:
                self._chronicle.accuse(
                    f"An attempt of task {task.number} was given twice or skipped.", task.subject
                )
            if was.status is Status.RETRYING and was.at_ms > self._now() * 1000:
                self._chronicle.accuse(
                    f"Task {task.number} was claimed before its retry was due.", task.subject
                )
            self._holders.setdefault(is_.claim, who)
            task.claims[is_.attempt] = (who, is_.claim)
        if is_.status.settled:
            self._settled(task, new, is_)

    def _tell_change(
        self, who: str, task: Tracked, was: TaskState, after: tuple[Ledger, TaskState]
    ) -> None:
        new, is_ = after
        if is_.status is Status.CLAIMED and is_.claim != was.claim:
            lease = new.leases.get(is_.claim)
            left = lease.expires_ms / 1000 - self._now() if lease else 0.0
            words = f"claims attempt {is_.attempt}, for {left:.1f} s"
        elif is_.status is Status.CLAIMED:
            words = "asks the attempt to stop"
        else:
            words = f"writes that it is {is_.status.name.lower()} (attempt {is_.attempt})"
        self._chronicle.note(who, words, task.subject)

    def _judge_end(
        self, who: str, task: Tracked, before: tuple[Ledger | None, TaskState], is_: TaskState
    ) -> None:
        """A claim has ended, or the task was settled without one."""
        old, was = before
        if old is None:
            self._chronicle.accuse(
                f"Task {task.number} was settled by a create: nobody had claimed it.", task.subject
            )
            return
        if was.status is not Status.CLAIMED:
            if is_.status is Status.SUCCEEDED:
                self._accuse_settlement(task)
            return
        is_own = self._holders.get(was.claim) == who
        lease = old.leases.get(was.claim)
        is_over = lease is None or lease.expires_ms <= self._now() * 1000
        is_over = is_over or self._is_gone(self._holders.get(was.claim, ""), who)
        by_claim = is_.status.settled and is_.claim == was.claim
        # What is lost with others is not counted either, and has another bound from then on, unless
        # the same write settles it.
        is_given_back = (
            is_.given_back > was.given_back
            and is_.window_max == was.window_max
            and not is_.status.settled
        )
        if is_own:
            (task.spared if is_given_back else task.failed).add(was.attempt)
        if by_claim or is_.status is Status.RETRYING or is_given_back:
            task.endings[was.claim] = is_.status.name
        if not is_own and not is_over:
            if is_.status.settled or was.claim in task.endings:
                self._accuse_settlement(task)
            else:
                self._chronicle.accuse(
                    f"The live lease of task {task.number} was taken over.", task.subject
                )
        elif is_.status is Status.SUCCEEDED:
            result = msgspec.json.decode(bytes(is_.result), type=Result)
            if result != Result(task.number, was.attempt, who) or not is_own:
                self._accuse_settlement(task)

    def _accuse_settlement(self, task: Tracked) -> None:
        self._chronicle.accuse(
            f"An ending of task {task.number} came from another attempt than the one that"
            " holds it.",
            task.subject,
        )

    def _settled(self, task: Tracked, ledger: Ledger, state: TaskState) -> None:
        if task.settled_at is not None:
            # The same writes may arrive once more, when everything is archived: that is no harm.
            if state != task.state:
                self._chronicle.accuse(f"Task {task.number} was settled twice.", task.subject)
            return
        task.settled_at, task.state = self._now(), state
        if state.status is Status.CANCELLED and not task.cancel_asked:
            self._chronicle.accuse(
                f"Task {task.number} was cancelled, and nobody asked for it.", task.subject
            )
        error = state.failure.error if state.failure else ""
        is_used_up = state.attempt - state.given_back >= ATTEMPTS_MAX
        if state.status is Status.FAILED and error != LASTING and not is_used_up:
            self._chronicle.accuse(
                f"Task {task.number} failed although it had attempts left.", task.subject
            )
        elif state.status is Status.FAILED and error != LASTING:
            self._judge_attempts(task)
            if not state.claim and state.attempt in task.beside:
                self._chronicle.accuse(
                    f"Task {task.number} failed by a lease that was lost with other tasks.",
                    task.subject,
                )
        task.key_ends_ms = ledger.key_ends_ms

    def _note_company(self, tasks: Sequence[Tracked], ledger: Ledger) -> None:
        """Remember which attempts one machine holds at the same time."""
        held: dict[str, list[tuple[Tracked, int]]] = {}
        for task, state in zip(tasks, ledger.tasks, strict=True):
            if state.status is Status.CLAIMED:
                by = self._holders.get(state.claim, "")
                held.setdefault(by, []).append((task, state.attempt))
        for together in held.values():
            for task, attempt in together if len(together) > 1 else ():
                task.in_company.add(attempt)

    def _judge_attempts(self, task: Tracked) -> None:
        """Whether so many attempts failed, or were lost alone, as a task has.

        By what was seen, and not by what the ledger counts.
        """
        lost_alone = task.claims.keys() - task.in_company - task.spared
        if len(task.failed | lost_alone) < ATTEMPTS_MAX:
            words = "it was lost with others" if task.started else "it never started"
            self._chronicle.accuse(
                f"Task {task.number} failed for want of attempts although {words}.", task.subject
            )

    def _ledger_removed(self, who: str, old: Ledger) -> None:
        tasks = self._tracker.pack(old.pack_version)
        self._chronicle.note(who, "removes the ledger", *(task.subject for task in tasks))
        for task, state in zip(tasks, old.tasks, strict=True):
            if old.settled and not task.archived:
                self._chronicle.accuse(
                    f"The record of task {task.number} was removed before it was archived.",
                    task.subject,
                )
            elif not old.settled and (state.status.settled or task.started) and (not task.archived):
                self._chronicle.accuse(
                    f"The ledger of task {task.number} was removed before it had settled:"
                    " its attempts go back.",
                    task.subject,
                )

    def saw_archived(self, who: str, key: str, body: bytes) -> None:
        """A batch of records was written."""
        for _, ledger in unpacked(body, where=key):
            tasks = self._tracker.pack(ledger.pack_version)
            self._chronicle.note(who, "archives it", *(task.subject for task in tasks))
            for task, state in zip(tasks, ledger.tasks, strict=True):
                task.archived = True
                if state != task.state or len(ledger.inputs) != len(tasks):
                    self._chronicle.accuse(
                        f"The archive has another end of task {task.number} than its ledger had.",
                        task.subject,
                    )
