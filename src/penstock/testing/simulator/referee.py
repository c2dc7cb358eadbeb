"""The referee: sees every change of the bucket and every start of a handler, on true time.

What it states, whatever the world does (the invariants of the queue, in words):

1. A pack never changes, and what was submitted under one key does not turn up under another.
2. A claim has one winner: no write comes over a ledger that it does not know. An attempt is in the
   ledger, by the machine that runs it, before its handler starts, and runs once.
3. A task is settled by the attempt that holds it, and by nobody else; once.
4. No task is lost whose submit was answered. None starts after it has settled, or on a lease that
   is over, or as a second one of a key whose lifetime has not ended.
5. Nobody takes over before the lease is over on the store's own clock, unless the process of its
   holder has ended and the one who takes over runs where it did.
6. Attempts never go back. What is settled is in its ledger with its input, or in the archive.
7. A task that ends its workers costs its neighbours time, and never their last attempt: none fails
   for want of attempts that were lost in company of the pack, or that never started; and none fails
   by a lost lease whose worker ran anything else, of any pack, while it had not ended.

Ledgers are read in `penstock.testing.simulator.ledgers`, shards in `…ownership`. Index entries
(pointers) are hints and are not judged: what they cost shows in tasks that do not end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.kernel.wire import decode
from penstock.queue.layout import QueueLayout
from penstock.queue.pack import Pack, is_void
from penstock.queue.places import LEDGER, task_at
from penstock.queue.views import TaskView
from penstock.store.base import Version
from penstock.testing.simulator.chronicle import Chronicle
from penstock.testing.simulator.ledgers import Ledgers
from penstock.testing.simulator.ownership import Ownership
from penstock.testing.simulator.tracking import Tracked, Tracker

OPERATOR: Final = "operator"


class Referee:
    """Judges one world."""

    def __init__(
        self, layout: QueueLayout, tracker: Tracker, chronicle: Chronicle, now: Callable[[], float]
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

        self._ledgers = Ledgers(tracker, chronicle, now, is_gone)
        self._nonces: dict[str, str] = {}
        self._dated: dict[str, float] = {}
        self._versions: dict[str, Version] = {}
        self._ownership = Ownership(layout, chronicle, now, is_gone)
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
        if folder in ("tasks", "keyed", "ready"):
            if "@" in path:
                self._pointer(who, path, after)
            elif path.endswith(LEDGER):
                self._ledgers.saw(who, key, after)
            else:
                self._pack(who, key, before, after, version or Version(""))
        elif folder in ("archive", "dead") and after is not None:
            self._ledgers.saw_archived(who, key, after)
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

    def _judge_loss(self, task: Tracked) -> None:
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
        self._ledgers.starts(who, task, attempt)

    def _start_problem(self, who: str, task: Tracked, attempt: int) -> str:
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

    def answered(self, task: Tracked) -> None:
        """A producer was told that its task is submitted."""
        task.answered_at = self._now()
        self._chronicle.note(task.by, "is told that it is submitted", task.subject)
        self._judge_loss(task)
        if task.written_at is None and task.key is None:
            self._chronicle.accuse(
                f"Task {task.number} was lost: its submit was answered and never arrived.",
                task.subject,
            )

    def was_shown(self, task: Tracked, view: TaskView | None, *, was_settled: bool) -> None:
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

    def packs_left(self) -> list[Sequence[Tracked]]:
        """The packs that are in the bucket and should not be, once everything has ended.

        Where nobody sweeps, a pack of a key that comes again without its pointer may stay: it is
        settled, or a duplicate, and is never run.
        """

        def is_over(task: Tracked) -> bool:
            if self.is_swept or task.key is None:
                return False
            return task.settled_at is not None or self._tracker.is_duplicate(task)

        left = (self._tracker.pack(self._versions[key]) for key in sorted(self.packs))
        return [tasks for tasks in left if not all(map(is_over, tasks))]
