"""The referee: sees every change of the bucket and every start of a handler, on true time.

What it states, whatever the world does (the invariants of the queue, in words):

1. A pack never changes, and what was submitted under one key does not turn up under another. 2.
A claim has one winner: no write replaces a ledger version that its writer has not read. An
attempt is in
   the ledger, by the machine that runs it, before its handler starts, and runs once.
3. A task is settled by the attempt that holds it, and by nobody else; once. 4. No task is lost
whose submit was answered. None starts after it has settled, or on a lease that
   is over, or as a second one of a key whose lifetime has not ended.
5. Nobody takes over before the lease is over on the store's own clock, unless the process of its
   holder has ended and the one who takes over runs where it did.
6. Attempts never go back. What is settled is in its ledger with its input, or in the archive.
7. A task that ends its workers costs its neighbours time, and never their last attempt: none
fails
   for want of attempts that were lost in company of the pack, or that never started; and none fails
   by a lost lease whose worker ran anything else, of any pack, while it had not ended.

`LedgerReferee` compares every write of a ledger with what was there: who wrote it, what became
of each task, and whether the writer was the one to do so at that moment, by true time and by
the leases as they were stored. A lease that is renewed by touches lasts as long as the date of
its ledger says; whoever takes it over may go by the date that it has read.

`OwnershipReferee` judges shards: epochs only grow, and no live owner is ended. Deletes and
damage by the operator are not judged, what follows from them is. One thing is allowed: after a
delete by hand the network may deliver the create and the swap of an earlier take once more,
byte for byte, and so bring that take back. It gives nobody anything, since its worker is gone,
and the next take is beyond it.

`OptionsReferee`, in a module of its own, judges priorities, limits and affinities.

Index entries (pointers) and the doorbell are hints and are not judged: what they cost shows in
tasks that do not end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from penstock.kernel.document_format import WRITERS_MAX, decode
from penstock.kernel.errors import UnreadableObject
from penstock.queue.archive_rows import unpacked
from penstock.queue.ids import LEDGER, SLOTS, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import ClaimLease, Ledger, QueueTaskState, QueueTaskStatus, as_of
from penstock.queue.pack import RESEND_SECONDS, Pack, is_void
from penstock.queue.shards.registry import OwnerRole, Registration, ShardLease
from penstock.queue.task_views import TaskView
from penstock.store.base import Version
from penstock.testing.simulator.history import (
    ATTEMPTS_MAX,
    LASTING,
    EventLog,
    SimulatedResult,
    TaskTracker,
    TrackedTask,
)
from penstock.testing.simulator.machines import HELD_BACK_SECONDS
from penstock.testing.simulator.options_referee import OptionsReferee

_READY: Final = QueueTaskState()


class LedgerReferee:
    """Judges what is written into ledgers, and what leaves for the archive."""

    def __init__(
        self,
        tracker: TaskTracker,
        chronicle: EventLog,
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
        self._running: dict[str, dict[TrackedTask, int]] = {}
        """Machine → what its handlers run, with the number of the attempt."""
        self._unwritten: dict[str, dict[TrackedTask, int]] = {}
        """Machine → what it has run, and whose end is not in the ledger."""

    def lease(self, key: str, claim: str) -> ClaimLease | None:
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

    def starts(self, who: str, task: TrackedTask, attempt: int) -> None:
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

    def ends(self, who: str, task: TrackedTask) -> None:
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
        self._judge_ability(who, tasks, new)
        for place, (was, is_) in enumerate(zip(states, new.tasks, strict=True)):
            if was != is_:
                self._state(who, tasks[place], (same, was), (new, is_))
        self._note_company(tasks, new)
        if new.settled and len(new.inputs) != len(tasks):
            self._accuse_all("A settled ledger lacks the inputs.", tasks)

    def _accuse_all(self, sentence: str, tasks: Sequence[TrackedTask]) -> None:
        self._chronicle.accuse(sentence, *(task.subject for task in tasks))

    def _judge_descent(self, tasks: Sequence[TrackedTask], old: Ledger, new: Ledger) -> None:
        last = next(reversed(old.writes.items()), None)
        if old.born != new.born:
            self._accuse_all("A ledger was written over by another one.", tasks)
        elif last is not None and len(new.writes) < WRITERS_MAX:
            # The same writer may have written again; then its last write is another one.
            is_known = new.writes.get(last[0]) == last[1] or next(reversed(new.writes)) == last[0]
            if not is_known:
                self._accuse_all("A write came over a ledger that it did not know.", tasks)

    def _judge_leases(
        self, who: str, tasks: Sequence[TrackedTask], old: Ledger, new: Ledger
    ) -> None:
        """Only the holder of a lease moves its end to a later time."""
        for claim, lease in new.leases.items():
            before = old.leases.get(claim)
            is_later = before is not None and before.expires_ms < lease.expires_ms
            if is_later and self._holders.get(claim, who) != who:
                self._accuse_all("A lease was prolonged by another than its holder.", tasks)

    def _judge_ability(self, who: str, tasks: Sequence[TrackedTask], new: Ledger) -> None:
        if who in self.abilities and tasks[0].type not in self.abilities[who]:
            claims = new.leases.keys() - self._holders.keys()
            if any(task.claim in claims for task in new.tasks):
                self._accuse_all("A worker claimed a task that it has no handler for.", tasks)

    def _state(
        self,
        who: str,
        task: TrackedTask,
        before: tuple[Ledger | None, QueueTaskState],
        after: tuple[Ledger, QueueTaskState],
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
        was_held = was.status is QueueTaskStatus.CLAIMED
        if was_held and (is_.claim != was.claim or is_.status is not QueueTaskStatus.CLAIMED):
            self._unwritten.get(self._holders.get(was.claim, ""), {}).pop(task, None)
        if (was_held and is_.claim != was.claim) or is_.status.settled:
            self._judge_end(who, task, (old, was), is_)
        if is_.status is QueueTaskStatus.CLAIMED and is_.claim != was.claim:
            if is_.attempt != was.attempt + 1:
                self._chronicle.accuse(
                    f"An attempt of task {task.number} was given twice or skipped.", task.subject
                )
            if was.status is QueueTaskStatus.RETRYING and was.at_ms > self._now() * 1000:
                self._chronicle.accuse(
                    f"Task {task.number} was claimed before its retry was due.", task.subject
                )
            self._holders.setdefault(is_.claim, who)
            task.claims[is_.attempt] = (who, is_.claim)
        if is_.status.settled:
            self._settled(task, new, is_)

    def _tell_change(
        self, who: str, task: TrackedTask, was: QueueTaskState, after: tuple[Ledger, QueueTaskState]
    ) -> None:
        new, is_ = after
        if is_.status is QueueTaskStatus.CLAIMED and is_.claim != was.claim:
            lease = new.leases.get(is_.claim)
            left = lease.expires_ms / 1000 - self._now() if lease else 0.0
            words = f"claims attempt {is_.attempt}, for {left:.1f} s"
        elif is_.status is QueueTaskStatus.CLAIMED:
            words = "asks the attempt to stop"
        else:
            words = f"writes that it is {is_.status.name.lower()} (attempt {is_.attempt})"
        self._chronicle.note(who, words, task.subject)

    def _judge_end(
        self,
        who: str,
        task: TrackedTask,
        before: tuple[Ledger | None, QueueTaskState],
        is_: QueueTaskState,
    ) -> None:
        """A claim has ended, or the task was settled without one."""
        old, was = before
        if old is None:
            self._chronicle.accuse(
                f"Task {task.number} was settled by a create: nobody had claimed it.", task.subject
            )
            return
        if was.status is not QueueTaskStatus.CLAIMED:
            if is_.status is QueueTaskStatus.SUCCEEDED:
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
        if by_claim or is_.status is QueueTaskStatus.RETRYING or is_given_back:
            task.endings[was.claim] = is_.status.name
        if not is_own and not is_over:
            if is_.status.settled or was.claim in task.endings:
                self._accuse_settlement(task)
            else:
                self._chronicle.accuse(
                    f"The live lease of task {task.number} was taken over.", task.subject
                )
        elif is_.status is QueueTaskStatus.SUCCEEDED:
            result = msgspec.json.decode(bytes(is_.result), type=SimulatedResult)
            if result != SimulatedResult(task.number, was.attempt, who) or not is_own:
                self._accuse_settlement(task)

    def _accuse_settlement(self, task: TrackedTask) -> None:
        self._chronicle.accuse(
            f"An ending of task {task.number} came from another attempt than the one that"
            " holds it.",
            task.subject,
        )

    def _settled(self, task: TrackedTask, ledger: Ledger, state: QueueTaskState) -> None:
        if task.settled_at is not None:
            # The same writes may arrive once more, when everything is archived: that is no harm.
            # A settlement that is sent later than W after it was decided is not covered (0009).
            if state != task.state and HELD_BACK_SECONDS.get() < RESEND_SECONDS:
                self._chronicle.accuse(f"Task {task.number} was settled twice.", task.subject)
            return
        task.settled_at, task.state = self._now(), state
        if state.status is QueueTaskStatus.CANCELLED and not task.cancel_asked:
            self._chronicle.accuse(
                f"Task {task.number} was cancelled, and nobody asked for it.", task.subject
            )
        error = state.failure.error if state.failure else ""
        is_used_up = state.attempt - state.given_back >= ATTEMPTS_MAX
        if state.status is QueueTaskStatus.FAILED and error != LASTING and not is_used_up:
            self._chronicle.accuse(
                f"Task {task.number} failed although it had attempts left.", task.subject
            )
        elif state.status is QueueTaskStatus.FAILED and not task.started:
            # It may be, if every worker that claims it is lost before it starts: no seed is so.
            self._chronicle.accuse(
                f"Task {task.number} failed although it never started.", task.subject
            )
        elif state.status is QueueTaskStatus.FAILED and error != LASTING:
            self._judge_attempts(task)
            if not state.claim and state.attempt in task.beside:
                self._chronicle.accuse(
                    f"Task {task.number} failed by a lease that was lost with other tasks.",
                    task.subject,
                )
        task.key_ends_ms = ledger.key_ends_ms

    def _note_company(self, tasks: Sequence[TrackedTask], ledger: Ledger) -> None:
        """Remember which attempts one machine holds at the same time."""
        held: dict[str, list[tuple[TrackedTask, int]]] = {}
        for task, state in zip(tasks, ledger.tasks, strict=True):
            if state.status is QueueTaskStatus.CLAIMED:
                by = self._holders.get(state.claim, "")
                held.setdefault(by, []).append((task, state.attempt))
        for together in held.values():
            for task, attempt in together if len(together) > 1 else ():
                task.in_company.add(attempt)

    def _judge_attempts(self, task: TrackedTask) -> None:
        """Whether so many attempts failed, or were lost alone, as a task has.

        By what was seen, and not by what the ledger counts.
        """
        lost_alone = task.claims.keys() - task.in_company - task.spared
        if len(task.failed | lost_alone) < ATTEMPTS_MAX:
            self._chronicle.accuse(
                f"Task {task.number} failed for want of attempts although it was lost with others.",
                task.subject,
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


_OPERATOR = "operator"


class OwnershipReferee:
    """Judges registrations and shard leases."""

    def __init__(
        self,
        layout: QueueLayout,
        chronicle: EventLog,
        now: Callable[[], float],
        is_gone: Callable[[str, str], bool],
    ) -> None:
        self._layout = layout
        self._chronicle = chronicle
        self._now = now
        self._is_gone = is_gone
        self._epochs: dict[int, int] = {}
        self._takes: set[bytes] = set()

    def saw(self, who: str, key: str, *, before: bytes | None, after: bytes | None) -> None:
        """One change."""
        if who == _OPERATOR or after is None:
            return
        if key.startswith(self._layout.shard_leases):
            name = key.removeprefix(self._layout.shard_leases).removesuffix(".json")
            era, _, shard = name.rpartition("/")
            number = _number(int(shard), era=int(era or 0))
            self._lease(who, number, decode(ShardLease, after, where=key), after)
        elif before is not None:
            self._registration(who, key, before, after)

    def _lease(self, who: str, shard: int, lease: ShardLease, body: bytes) -> None:
        if not lease.worker:
            return
        subject = ("shard", shard)
        self._chronicle.note(who, f"{lease.worker} owns it, epoch {lease.epoch}", subject)
        if lease.epoch <= self._epochs.get(shard, 0) and body not in self._takes:
            self._chronicle.accuse(f"The epoch of shard {shard} went back.", subject)
        self._epochs[shard] = max(lease.epoch, self._epochs.get(shard, 0))
        self._takes.add(body)

    def _registration(self, who: str, key: str, before: bytes, after: bytes) -> None:
        try:
            was = decode(Registration, before, where=key)
        except UnreadableObject:
            return
        is_ = decode(Registration, after, where=key)
        worker = self._layout.read_worker(key) or ""
        ended = was.role is OwnerRole.OWNER and is_.role is OwnerRole.GONE
        # Machine and worker have the same name, but for what makes each incarnation unique.
        machine = worker.rpartition("-")[0]
        is_live = was.expires_ms > self._now() * 1000 and not self._is_gone(machine, who)
        if ended and is_live and machine != who:
            shards = [("shard", _number(shard, era=was.era)) for shard in was.shards]
            self._chronicle.accuse(f"The owner {worker} was ended while its lease ran.", *shards)


def _number(shard: int, *, era: int) -> int:
    """One number for a shard of an era: that of another era is another one."""
    return era * SLOTS + shard


OPERATOR: Final = "operator"


class Referee:
    """Judges one world."""

    def __init__(
        self,
        layout: QueueLayout,
        tracker: TaskTracker,
        chronicle: EventLog,
        now: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._root = layout.root
        self._tracker = tracker
        self._chronicle = chronicle
        self._now = now
        self.is_provably_gone: Callable[[str, str], bool] = lambda _machine, _to: False
        """Whether a machine's process has ended, and another machine can know it."""

        def is_gone(machine: str, to: str) -> bool:
            return self.is_provably_gone(machine, to)

        self._ledgers = LedgerReferee(tracker, chronicle, now, is_gone)
        self._nonces: dict[str, str] = {}
        self._dated: dict[str, float] = {}
        self._versions: dict[str, Version] = {}
        self._ownership = OwnershipReferee(layout, chronicle, now, is_gone)
        self.freezes: Callable[[str], int | None] = lambda _machine: 0
        """How often a machine was frozen; None of one that is dead, or frozen now."""

        def freezes(machine: str) -> int | None:
            return self.freezes(machine)

        self._options = OptionsReferee(layout, chronicle, now, freezes)
        self.packs: set[str] = set()
        """The keys of the packs that are in the bucket."""
        self.is_swept = True
        """Whether somebody looks for packs without a pointer."""
        self.starts = 0
        self.refusals = 0
        self.doubted: set[tuple[str, str]] = set()
        """Machines and packs whose endings were sent again after an answer was lost for good."""

    def saw(
        self,
        who: str,
        key: str,
        *,
        before: bytes | None,
        after: bytes | None,
        version: Version | None,
    ) -> None:
        """One change of the bucket."""
        path = key.removeprefix(self._root)
        folder = path.partition("/")[0]
        if folder in ("tasks", "keyed", "ready", "unhurried"):
            if "@" in path:
                self._pointer(who, path, after)
            elif path.endswith(LEDGER):
                self._ledgers.saw(who, key, after)
            else:
                self._pack(who, key, before, after, version or Version(""))
        elif folder in ("archive", "dead") and after is not None:
            self._ledgers.saw_archived(who, key, after)
        elif folder == "limits" and after is not None:
            self._options.written(who, key, after)
        elif folder in ("workers", "shard-leases"):
            self._ownership.saw(who, key, before=before, after=after)

    def read(self, who: str, key: str, modified: float) -> None:
        """Somebody has read an object."""
        if key.endswith(LEDGER):
            self._ledgers.was_read(who, key, modified)

    # Packs and pointers

    def _pack(
        self, who: str, key: str, before: bytes | None, after: bytes | None, version: Version
    ) -> None:
        if after is None:
            self.packs.discard(key)
            self._versions.pop(key, None)
            self._pack_removed(who, key, before or b"", version)
            return
        self.packs.add(key)
        self._versions[key] = version
        pack = decode(Pack, after, where=key)
        tasks = self._tracker.take_in(key, version, pack.inputs)
        subjects = [task.subject for task in tasks]
        if before is not None and before != after:
            self._chronicle.accuse("A pack changed.", *subjects)
        if self._nonces.setdefault(pack.nonce, key) != key:
            self._chronicle.accuse("A pack's key moved.", *subjects)
        modified = self._dated[key] = float(int(self._now()))
        for task in tasks:
            task.submitted_ms, task.due_ms, task.removed = pack.submitted_ms, pack.due_ms, ""
            if task.written_at is None:
                task.written_at = self._now()
        late = " (void: it comes after W)" if is_void(pack.submitted_ms, modified) else ""
        self._chronicle.note(who, f"the pack arrives{late}", *subjects)
        self._options.pack_came(key, pack, tasks)

    def _pack_removed(self, who: str, key: str, before: bytes, version: Version) -> None:
        tasks = self._tracker.pack(version)
        subjects = [task.subject for task in tasks]
        self._chronicle.note(who, "removes the pack", *subjects)
        pack, modified = decode(Pack, before, where=key), self._dated.pop(key, 0.0)
        for task in tasks:
            if task.settled_at is not None or self._tracker.is_duplicate(task):
                continue
            task.removed = "void" if is_void(pack.submitted_ms, modified) else "lost"
            self._judge_loss(task)

    def _judge_loss(self, task: TrackedTask) -> None:
        if task.removed == "lost" and task.answered_at is not None:
            self._chronicle.accuse(
                f"Task {task.number} was lost: its pack was removed before it had settled.",
                task.subject,
            )

    def _pointer(self, who: str, path: str, after: bytes | None) -> None:
        found = self._layout.read_pointer(self._root + path)
        if found is None:
            return
        key = self._layout.pack(found[0])
        latest = [task for task in self._tracker.at_place(key) if task.settled_at is None]
        words = "writes a pointer" if after is not None else "removes a pointer"
        self._chronicle.note(who, words, *(task.subject for task in latest))

    # Handlers

    def can(self, who: str, types: Sequence[str]) -> None:
        """A worker says which types it has handlers for."""
        self._ledgers.abilities[who] = frozenset(types)

    def runs(self, who: str, running: int, *, concurrency: int) -> None:
        """How many handlers run on a machine now."""
        if running > concurrency:
            self._chronicle.accuse(f"{running} handlers run on {who}, not {concurrency}.")

    def starts_attempt(self, who: str, number: int, attempt: int) -> None:
        """A handler begins to run."""
        self.starts += 1
        task = self._tracker.tasks[number]
        self._chronicle.note(who, f"starts attempt {attempt}", task.subject)
        sentence = self._start_problem(who, task, attempt)
        if sentence:
            others = [other.subject for other in self._tracker.others_of_key(task)]
            key = others if "key" in sentence else []
            self._chronicle.accuse(sentence, task.subject, *key)
        task.started[attempt] = who
        task.started_at = self._now() if task.started_at is None else task.started_at
        self._ledgers.starts(who, task, attempt)
        self._options.starts(who, task)

    def _start_problem(self, who: str, task: TrackedTask, attempt: int) -> str:
        number = task.number
        if task.settled_at is not None:
            return f"Task {number} started after it had settled."
        machine, claim = task.claims.get(attempt, ("", ""))
        if machine != who:
            return f"Attempt {attempt} of task {number} started before it was durable."
        if attempt in task.started:
            return f"Attempt {attempt} of task {number} ran twice."
        if task.due_ms > self._now() * 1000:
            return f"Task {number} started before it was due."
        if self._tracker.is_duplicate(task):
            return f"Task {number} ran although its key was still taken by a settled task."
        lease = self._ledgers.lease(task.place + LEDGER, claim)
        if lease is None:
            return f"Attempt {attempt} of task {number} started on a claim that nobody holds."
        if lease.expires_ms <= self._now() * 1000:
            return f"Attempt {attempt} of task {number} started on a lease that is over."
        return ""

    def ends_attempt(self, who: str, number: int, how: str) -> None:
        """A handler has ended."""
        self._chronicle.note(who, f"its handler {how}", ("task", number))
        self._ledgers.ends(who, self._tracker.tasks[number])
        self._options.ends(who, self._tracker.tasks[number])

    def was_refused(self, who: str, id: str, attempt: int) -> None:
        """A machine believes that the ending of its attempt did not count."""
        at, place = task_at(id)
        key = self._layout.pack(at)
        self.refusals += 1
        if (who, at.path) in self.doubted:
            return  # It was sent again, and the second time refused: that is as it should be.
        tasks = self._tracker.at_place(key)
        chosen = tasks if at.place == "key" else tasks[place : place + 1]
        mine = [task for task in chosen if task.claims.get(attempt, ("",))[0] == who]
        if len(mine) != 1:
            return  # Tasks of one key have one id: which of them is meant cannot be told.
        (task,) = mine
        claim = task.claims[attempt][1]
        # What a ledger remembers goes with it: who comes after the archive cannot be told.
        if claim in task.endings and not task.archived:
            self._chronicle.accuse(
                f"An ending of task {task.number} took effect and was reported as refused.",
                task.subject,
            )
        is_ghost = task.settled_at is not None
        if not is_ghost and self._ledgers.holds(key + LEDGER, place, claim, attempt):
            self._chronicle.accuse(
                f"An ending of task {task.number} was refused although its attempt holds it.",
                task.subject,
            )

    # Submits

    def asked_to_cancel(self, id: str) -> None:
        """Somebody is about to cancel a task."""
        at, place = task_at(id)
        index = None if at.place == "key" else place
        for task in self._tracker.cancel(self._layout.pack(at), index):
            self._chronicle.note("canceller", "is about to cancel it", task.subject)

    def answered(self, task: TrackedTask) -> None:
        """A producer was told that its task is submitted."""
        task.answered_at = self._now()
        self._chronicle.note(task.by, "is told that it is submitted", task.subject)
        self._judge_loss(task)
        if task.written_at is None and task.key is None:
            self._chronicle.accuse(
                f"Task {task.number} was lost: its submit was answered and never arrived.",
                task.subject,
            )

    def was_shown(self, task: TrackedTask, view: TaskView | None, *, was_settled: bool) -> None:
        """What a client was shown of a task that was submitted, and had settled before or not."""
        if view is None:
            sentence = f"Task {task.number} is submitted, and a client is told that it is not."
        elif was_settled and (not view.is_settled or view.attempt != task.state.attempt):
            sentence = f"Task {task.number} is shown as {view.status}, which is not how it ended."
        elif view.input is None or view.input["n"] != task.number:
            sentence = f"Task {task.number} is shown with another input than its own."
        else:
            return
        self._chronicle.accuse(sentence, task.subject)

    def check_the_end(self) -> None:
        """Nothing happens any more: what should have?"""
        for task in self._tracker.unsettled():
            others = [other.subject for other in self._tracker.others_of_key(task)]
            self._chronicle.accuse(
                f"Task {task.number} was lost: it is submitted and does not end.",
                task.subject,
                *others,
            )
        for tasks in self.packs_left():
            is_open = any(task.settled_at is None for task in tasks)
            words = "and does not end" if is_open else "although it is settled"
            self._chronicle.accuse(
                f"The pack of task {tasks[-1].number} stays {words}.",
                *(task.subject for task in tasks),
            )

    def packs_left(self) -> list[Sequence[TrackedTask]]:
        """The packs that are in the bucket and should not be, once everything has ended.

        Where nobody sweeps, a pack of a key that comes again without its pointer may stay: it is
        settled, or a duplicate, and is never run.
        """

        def is_over(task: TrackedTask) -> bool:
            if self.is_swept or task.key is None:
                return False
            return task.settled_at is not None or self._tracker.is_duplicate(task)

        left = (self._tracker.pack(self._versions[key]) for key in sorted(self.packs))
        return [tasks for tasks in left if not all(map(is_over, tasks))]
