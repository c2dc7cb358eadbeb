"""Every state transition of a ledger, as pure functions of (ledger, now).

Every writer of a ledger reads, applies one of these and swaps; on a conflict it reads and
applies again. `now` is the store's time as an interval, in seconds. What could be too early
uses `earliest`, what must last uses `latest`: a challenger may take a lease only when
`earliest` is past its end. `LedgerChange` collects the new states and log lines of one
transition; without a change the result is the very same ledger.

Invariants, for any arguments:
- Attempt numbers only grow, and each is given once: they are fences. A settled task stays as it
  is (QUEUE-12).
- Only the claim that holds a task settles it, gives it back or sends it to a retry. A claim that
  was overtaken is refused for exactly those tasks; its neighbours are not (QUEUE-9).
- Every transition first expires the leases that are over, so that the heartbeats of one holder
  never hide the death of another (QUEUE-13).
- An expired task is settled only while nobody holds it (QUEUE-25): an attempt that began in time
  may end.
- A lost attempt counts only if its task was claimed alone in its pack (QUEUE-17), and is the last
  one only if its worker held nothing else at all (QUEUE-18).

**Windows: which tasks are claimed together, and what a lost lease says of them.** A task that
kills its worker (`os._exit`, out of memory, a crash in C) leaves no word: a lease ends, and any
task that the worker held may be the cause. So no attempt counts that had company of its own
pack, and no task fails that had company at all.

Within a pack:

- **A window** is what a worker holds of one pack, and nothing else of the pack may start there.
  Its size is written with the claim that changes it (`ClaimLease.window`): no write of its own. A
  task that waits for a slot is never alone: the holder of the slot runs.
- **When a lease ends**, all that it still holds become suspects. Each may be claimed again in a
  window of at most half as many (`QueueTaskState.window_max`). If the window had one place, the
  attempt counts; otherwise it does not (`given_back`). Nothing has run under a window of 0.
- **A claim** takes tasks that are not suspect, as many as it may. Suspects are for when there is
  nothing else: as many as the smallest bound among them, and among what the worker holds, allows,
  and no more than have a free slot.
- **An ending clears**: a result, a failure, a retry and a reschedule are the ends of attempts
  that
  did not end their worker. What is given back stays suspect.

Across packs, where a worker holds tasks of several and no ledger knows of the others:

- **A suspect** with a bound of 1 **on its last attempt** is claimed **exclusively** and in no
  other way (`needs_exclusive`): by a worker that holds nothing else, of any pack, and that claims
  nothing else until this attempt has ended and its outcome is written
  (`penstock.queue.execution.worker_loop` has the worker's side). The lease says so.
- **Only an exclusive loss is final.** It leaves `LOST_EXCLUSIVE`. A suspect without that mark is
  not over, however many attempts are counted; it runs exclusively once more.
- All other losses count, as long as attempts remain.

Every lost lease halves the window of each task in it, so a task that kills every worker is
alone after log2 of the window, and settled after as many leases more as it has attempts, and
one more if its last loss was in company: with 16 in a window and 3 attempts, 8 leases at most.
The others lose time, and at worst each runs exclusively once. They cannot lose their last
attempt to it.

A crash leaves what the ledger says, and whoever expires a lease computes the same. A release
that knows no windows drops them when it writes and counts as it did; its leases are not
exclusive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.queue.attempt_outcomes import (
    AttemptCancelled,
    AttemptOutcome,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
    sound,
)
from penstock.queue.ledger import (
    CANCELLED_ERROR,
    LOST_EXCLUSIVE,
    NULL,
    ClaimLease,
    Ledger,
    LedgerEvent,
    LedgerFailure,
    LedgerLogLine,
    LedgerProgress,
    QueueTaskState,
    QueueTaskStatus,
)
from penstock.queue.pack import Pack, forgotten_ms
from penstock.store.time import Interval

LOG_LINES_MAX: Final = 1000
"""The log keeps the last lines; a ledger is rewritten whole and must not grow for ever."""

_replace = msgspec.structs.replace

_HAPPENINGS = {
    QueueTaskStatus.SUCCEEDED: LedgerEvent.SUCCEEDED,
    QueueTaskStatus.FAILED: LedgerEvent.FAILED,
    QueueTaskStatus.CANCELLED: LedgerEvent.CANCELLED,
    QueueTaskStatus.EXPIRED: LedgerEvent.EXPIRED,
}


class LedgerChange:
    """A ledger being changed: states, leases, and the lines that the log will get."""

    def __init__(self, before: Ledger, now: Interval) -> None:
        self._before = before
        self._at_ms = ms_of(now.latest)
        self._lines: list[LedgerLogLine] = []
        self.tasks = list(before.tasks)
        self.leases = dict(before.leases)

    def set(
        self, place: int, state: QueueTaskState, what: LedgerEvent, *, who: str, note: str = ""
    ) -> None:
        self.tasks[place] = state
        line = LedgerLogLine(self._at_ms, what, (place, place), state.attempt, who, note)
        self._lines.append(line)

    def settle(
        self,
        place: int,
        status: QueueTaskStatus,
        *,
        who: str,
        result: msgspec.Raw = NULL,
        failure: LedgerFailure | None = None,
        is_ref: bool = False,
    ) -> None:
        task = self.tasks[place]
        state = QueueTaskState(
            status=status,
            attempt=task.attempt,
            given_back=task.given_back,
            claim=task.claim,
            at_ms=self._at_ms,
            result=result,
            failure=failure,
            is_ref=is_ref,
            progress=task.progress,
        )
        note = ""
        if failure is not None:
            note = failure.message if status is QueueTaskStatus.CANCELLED else failure.error
        self.set(place, state, _HAPPENINGS[status], who=who, note=note)

    def ledger(self) -> Ledger:
        if not self._lines:
            return self._before
        held = {task.claim for task in self.tasks if task.status is QueueTaskStatus.CLAIMED}
        return _replace(
            self._before,
            tasks=tuple(self.tasks),
            leases={name: lease for name, lease in self.leases.items() if name in held},
            log=(self._before.log + _merged(self._lines))[-LOG_LINES_MAX:],
        )


def _merged(lines: Sequence[LedgerLogLine]) -> tuple[LedgerLogLine, ...]:
    """One line for all to whom the same thing happened."""
    merged: dict[tuple[str, int, str, str], LedgerLogLine] = {}
    for line in sorted(lines, key=lambda line: line.runs):
        kind = (line.what, line.attempt, line.who, line.note)
        known = merged.get(kind)
        runs = _joined(known.runs, line.runs) if known else line.runs
        merged[kind] = _replace(line, runs=runs)
    return tuple(merged.values())


def _joined(runs: tuple[int, ...], later: tuple[int, ...]) -> tuple[int, ...]:
    if later[0] == runs[-1] + 1:
        return (*runs[:-1], *later[1:])
    return runs + later


def ms_of(seconds: float) -> int:
    """Milliseconds, as ledgers have them."""
    return int(seconds * 1000)


_UNBOUND: Final = 2**31


def chosen(
    tasks: Sequence[QueueTaskState],
    startable: Iterable[int],
    *,
    held: Collection[int],
    most: int = _UNBOUND,
    slots: int = _UNBOUND,
) -> tuple[int, ...]:
    """Of the places that may start, those that one who holds these may claim.

    Up to `most`; of suspects, no more than `slots`.
    """
    bounds = [abs(tasks[place].window_max) for place in held if tasks[place].window_max]
    bound = min(bounds, default=_UNBOUND)
    most = min(most, bound - len(held))
    plain: list[int] = []
    suspects: list[int] = []
    for place in startable:
        if len(plain) >= most:
            break
        if tasks[place].window_max:
            suspects.append(place)
        else:
            plain.append(place)
    if plain or most <= 0:
        return tuple(plain)
    taken: list[int] = []
    for place in suspects:
        size = len(held) + len(taken) + 1
        own = abs(tasks[place].window_max)
        if len(taken) < min(most, slots) and size <= min(bound, own):
            bound = min(bound, own)
            taken.append(place)
    return tuple(taken)


def needs_exclusive(task: QueueTaskState, attempts_max: int) -> bool:
    """Whether its next loss would be its last: then its worker must run nothing beside it.

    As long as it may come in a larger window, halves tell more.
    """
    return abs(task.window_max) == 1 and task.attempt - task.given_back + 1 >= attempts_max


def is_used_up(task: QueueTaskState, attempts_max: int) -> bool:
    """Whether it has no attempt left; a suspect has, until it was lost exclusively."""
    is_final = task.window_max in (0, LOST_EXCLUSIVE)
    return is_final and task.attempt - task.given_back >= attempts_max


def window_of(held: Collection[int], taken: Collection[int], *, slots: int) -> int:
    """The window of one who holds some and takes others, of which so many start at once."""
    return max(len(held) + len(taken), 2 if len(taken) > slots else 1)


def lost(task: QueueTaskState, lease: ClaimLease | None, *, together: int) -> QueueTaskState:
    """A task whose lease is over, with which its claim held so many; free to be claimed again."""
    window = lease.window if lease else together
    window_max = max(1, together // 2)
    if lease is not None and lease.exclusive:
        return msgspec.structs.replace(
            task, status=QueueTaskStatus.READY, claim="", window_max=LOST_EXCLUSIVE
        )
    if window == 0:
        return msgspec.structs.replace(task, status=QueueTaskStatus.READY, claim="")
    return msgspec.structs.replace(
        task,
        status=QueueTaskStatus.READY,
        claim="",
        # An earlier release writes no windows: then it is as large as what is left of it.
        given_back=task.given_back + (max(window, together) > 1),
        # `abs`: one that was lost exclusively, and in company since, has another chance.
        window_max=min(abs(task.window_max) or window_max, window_max),
    )


_WORKERS_LOST: Final = (
    "The worker of each attempt that counts was lost, and in the last one it ran nothing but this"
    " task: it was killed, ran out of memory, crashed, called os._exit, or could not renew its"
    " lease. If the task itself ends it, isolate=True gives the handler a process of its own."
)


@dataclass(frozen=True, slots=True)
class LedgerClaim:
    """Who wants how much, for how long."""

    id: str
    holder: str
    lease_ms: int
    tasks_max: int
    attempts_max: int
    places: frozenset[int] | None = None
    """Only these, if given."""
    is_provisional: bool = False
    """Nothing will run: the attempt does not count, whatever becomes of it."""
    touch_ms: int = 0
    """For one who renews by touching (`ledger`): how long after a touch the lease lasts."""
    slots: int = 2**31
    """How many can start at once: so many suspects at the most are taken (`transitions`)."""
    exclusive: bool = False
    """Its holder has nothing else: one task that needs that is taken, and nothing else."""
    incarnation: str = ""
    """The process of its holder (`penstock.queue.incarnation`)."""


def claim(
    ledger: Ledger, wanted: LedgerClaim, now: Interval, *, ours: frozenset[str] = frozenset()
) -> tuple[Ledger, tuple[int, ...]]:
    """Take up to `tasks_max` tasks that may start, beside what the claims `ours` hold.

    Returns the ledger and the places of the tasks taken; the ledger itself if nothing changes.
    """
    # If the claim is there already, its answer was lost: who asks again is alive.
    ledger, _ = extend(
        ledger, (wanted.id,), lease_ms=wanted.lease_ms, now=now, touch_ms=wanted.touch_ms
    )
    change = LedgerChange(ledger, now)
    ours |= {wanted.id}
    held = [
        place
        for place, task in enumerate(change.tasks)
        if task.status is QueueTaskStatus.CLAIMED and task.claim in ours
    ]
    most = wanted.tasks_max - sum(change.tasks[place].claim == wanted.id for place in held)
    startable = _startable(change.tasks, wanted.attempts_max, now, places=wanted.places)
    if wanted.is_provisional:
        taken = tuple(startable)[:most]
    elif wanted.exclusive:
        alone = _exclusive(change.tasks, startable, wanted.attempts_max, is_needed=True)
        taken = tuple(alone)[: 0 if held else 1]
    else:
        startable = _exclusive(change.tasks, startable, wanted.attempts_max, is_needed=False)
        taken = chosen(change.tasks, startable, held=held, most=most, slots=wanted.slots)
    for place in taken:
        task = change.tasks[place]
        state = QueueTaskState(
            status=QueueTaskStatus.CLAIMED,
            attempt=task.attempt + 1,
            given_back=task.given_back + wanted.is_provisional,
            claim=wanted.id,
            failure=task.failure,
            window_max=task.window_max,
        )
        change.set(place, state, LedgerEvent.CLAIMED, who=wanted.holder)
    if taken:
        expires = ms_of(now.latest) + wanted.lease_ms
        change.leases[wanted.id] = ClaimLease(
            wanted.holder, expires, wanted.touch_ms, incarnation=wanted.incarnation
        )
        window = 0 if wanted.is_provisional else window_of(held, taken, slots=wanted.slots)
        for name in ours & change.leases.keys():
            change.leases[name] = _replace(
                change.leases[name], window=window, exclusive=wanted.exclusive
            )
    return change.ledger(), taken


def extend(
    ledger: Ledger, claims: Iterable[str], *, lease_ms: int, now: Interval, touch_ms: int = 0
) -> tuple[Ledger, frozenset[str]]:
    """Move the ends of these leases; returns those that are still held, late or not."""
    claims = frozenset(claims)
    held = claims & ledger.leases.keys()
    end = ms_of(now.latest) + lease_ms
    # Who asks is alive: its lease counts as extended before what is over is looked at.
    leases = {
        name: _replace(lease, expires_ms=max(lease.expires_ms, end), touch_ms=touch_ms)
        if name in held
        else lease
        for name, lease in ledger.leases.items()
    }
    extended = _replace(ledger, leases=leases) if held else ledger
    return expire(extended, now), held


def settle(
    ledger: Ledger,
    endings: Mapping[int, tuple[str, AttemptOutcome]],
    *,
    now: Interval,
    inputs: Sequence[msgspec.Raw],
    expires_ms: int = 0,
) -> tuple[Ledger, frozenset[int]]:
    """Record how attempts ended: place → (claim id, ending). Returns the places refused.

    Refused is what another claim holds by now, or nobody. An ending counts although its lease is
    over, as long as nobody has noticed. The write that settles the last task takes the inputs in.
    What the pack's `expires_ms` forbids to start, now or when its retry is due, is settled too.
    """
    change = LedgerChange(ledger, now)
    refused: set[int] = set()
    for place, (claim_id, ending) in sorted(endings.items()):
        task = change.tasks[place]
        if not claim_id or task.claim != claim_id:
            refused.add(place)
        elif task.status is QueueTaskStatus.CLAIMED:
            _end(change, place, sound(ending, count=len(change.tasks)), expires_ms=expires_ms)
        # Otherwise it was settled by this very claim, whose answer was lost.
    after = lapse(expire(change.ledger(), now), expires_ms=expires_ms, now=now)
    return _completed(after, inputs), frozenset(refused)


def lapse(ledger: Ledger, *, expires_ms: int, who: str = "", now: Interval) -> Ledger:
    """Settle what nobody holds as expired, if the time of the pack is surely over."""
    if not has_expired(expires_ms, now):
        return ledger
    change = LedgerChange(ledger, now)
    for place, task in enumerate(change.tasks):
        if task.status in (QueueTaskStatus.READY, QueueTaskStatus.RETRYING) and not task.cancel:
            change.settle(place, QueueTaskStatus.EXPIRED, who=who, failure=task.failure)
    return change.ledger()


def has_expired(expires_ms: int, now: Interval) -> bool:
    """Whether nothing of a pack that names this time may start any more."""
    return 0 < expires_ms <= ms_of(now.earliest)


def closed_by(
    before: Ledger, after: Ledger, endings: Mapping[int, tuple[str, AttemptOutcome]]
) -> dict[int, QueueTaskStatus]:
    """What a change has settled besides the tasks whose attempts ended with it."""
    return {
        place: task.status
        for place, (old, task) in enumerate(zip(before.tasks, after.tasks, strict=True))
        if task.status.settled and not old.status.settled and place not in endings
    }


def tell(ledger: Ledger, reports: Mapping[int, tuple[str, LedgerProgress]]) -> Ledger:
    """Note what attempts say of themselves: place → (claim id, progress). Only who holds it may."""
    tasks = list(ledger.tasks)
    for place, (claim_id, progress) in reports.items():
        task = tasks[place]
        if claim_id and task.claim == claim_id and task.status is QueueTaskStatus.CLAIMED:
            tasks[place] = _replace(task, progress=progress)
    return _replace(ledger, tasks=tuple(tasks)) if reports else ledger


def expire(ledger: Ledger, now: Interval) -> Ledger:
    """Free the tasks whose lease is over. Whether they have attempts left is for the next claim."""
    over_ms = ms_of(now.earliest)
    live = {name for name, lease in ledger.leases.items() if lease.expires_ms > over_ms}
    # A claim without a lease is the work of an operator, and is over too.
    freed = [
        place
        for place, task in enumerate(ledger.tasks)
        if task.status is QueueTaskStatus.CLAIMED and task.claim not in live
    ]
    if not freed:
        return ledger
    change = LedgerChange(ledger, now)
    together = Counter(ledger.tasks[place].claim for place in freed)
    for place in freed:
        task = ledger.tasks[place]
        lease = ledger.leases.get(task.claim)
        state = lost(task, lease, together=together[task.claim])
        note = "not counted" if state.given_back > task.given_back else ""
        who = lease.holder if lease else ""
        change.set(place, state, LedgerEvent.LEASE_EXPIRED, who=who, note=note)
    return change.ledger()


def over(ledger: Ledger, *, attempts_max: int) -> tuple[int, ...]:
    """The tasks that nobody holds and that may not start again; `close` settles them."""
    return tuple(
        place
        for place, task in enumerate(ledger.tasks)
        if task.status in (QueueTaskStatus.READY, QueueTaskStatus.RETRYING)
        and _is_over(task, attempts_max)
    )


def close(
    ledger: Ledger,
    *,
    attempts_max: int,
    who: str,
    now: Interval,
    inputs: Sequence[msgspec.Raw],
    expires_ms: int = 0,
) -> Ledger:
    """Settle what is `over`: as cancelled if that was asked for, else as failed; and `lapse`."""
    expired = expire(ledger, now)
    change = LedgerChange(expired, now)
    for place in over(expired, attempts_max=attempts_max):
        task = change.tasks[place]
        if task.cancel:
            change.settle(place, QueueTaskStatus.CANCELLED, who=who, failure=_why_cancelled(task))
        else:
            failure = task.failure or LedgerFailure("LeaseExpired", _WORKERS_LOST)
            change.settle(place, QueueTaskStatus.FAILED, who=who, failure=failure)
    after = lapse(change.ledger(), expires_ms=expires_ms, who=who, now=now)
    return _completed(after, inputs)


def cancel(
    ledger: Ledger,
    places: Iterable[int],
    *,
    who: str,
    now: Interval,
    inputs: Sequence[msgspec.Raw],
    reason: str = "",
) -> Ledger:
    """Settle what has not started as cancelled, and ask running attempts to stop."""
    why = LedgerFailure(CANCELLED_ERROR, reason) if reason else None
    change = LedgerChange(expire(ledger, now), now)
    for place in sorted(places):
        task = change.tasks[place]
        match task.status:
            case QueueTaskStatus.READY | QueueTaskStatus.RETRYING:
                change.settle(place, QueueTaskStatus.CANCELLED, who=who, failure=why)
            case QueueTaskStatus.CLAIMED if not task.cancel:
                asked = _replace(task, cancel=True, failure=why or task.failure)
                change.set(place, asked, LedgerEvent.CANCEL_ASKED, who=who, note=reason)
            case _:
                pass
    return _completed(change.ledger(), inputs)


def recorded(ledger: Ledger, pack: Pack, now: Interval) -> Ledger:
    """With what the pack says of itself, once everything is settled: the pack will be gone."""
    if not ledger.settled or ledger.submitted_ms:
        return ledger
    ends_ms = max(ms_of(now.latest) + pack.key_seconds * 1000, forgotten_ms(pack.submitted_ms))
    return _replace(
        ledger,
        inputs=ledger.inputs or pack.inputs,
        submitted_ms=pack.submitted_ms,
        due_ms=pack.due_ms,
        key=pack.key,
        key_ends_ms=ends_ms if pack.key is not None else 0,
        refs=pack.refs,
        priority=pack.priority,
        limit=pack.limit,
        expires_ms=pack.expires_ms,
        tags=pack.tags,
        batch=pack.batch,
        trace=pack.trace,
    )


def next_due_ms(ledger: Ledger) -> int | None:
    """When this ledger is next worth a look: 0 for now, None for never."""
    instants: list[int] = [lease.expires_ms for lease in ledger.leases.values()]
    for task in ledger.tasks:
        if task.status is QueueTaskStatus.READY:
            return 0
        if task.status is QueueTaskStatus.CLAIMED and task.claim not in ledger.leases:
            return 0
        if task.status is QueueTaskStatus.RETRYING:
            instants.append(task.at_ms)
    return min(instants, default=None)


def claimable(
    ledger: Ledger,
    *,
    attempts_max: int,
    now: Interval,
    held: Collection[int] = (),
    slots: int = 2**31,
) -> int:
    """How many tasks one who holds these places may claim now, with so many free slots."""
    startable = _startable(ledger.tasks, attempts_max, now)
    plain = _exclusive(ledger.tasks, startable, attempts_max, is_needed=False)
    return len(chosen(ledger.tasks, plain, held=held, slots=slots))


def has_exclusive(ledger: Ledger, *, attempts_max: int, now: Interval) -> bool:
    """Whether a task may be claimed now by one who holds nothing else, and by nobody else."""
    startable = _startable(ledger.tasks, attempts_max, now)
    alone = _exclusive(ledger.tasks, startable, attempts_max, is_needed=True)
    return next(alone, None) is not None


def next_retry_ms(ledger: Ledger, now: Interval) -> int | None:
    """When the next task that is not due yet may start."""
    waiting = (task.at_ms for task in ledger.tasks if task.status is QueueTaskStatus.RETRYING)
    return min((at_ms for at_ms in waiting if at_ms > ms_of(now.earliest)), default=None)


def held_by(claim: str, ledger: Ledger) -> dict[int, int]:
    """The tasks that a claim holds, with the number of each attempt."""
    return {
        place: task.attempt
        for place, task in enumerate(ledger.tasks)
        if task.status is QueueTaskStatus.CLAIMED and task.claim == claim
    }


def asked_to_stop(claims: frozenset[str], ledger: Ledger) -> frozenset[int]:
    """The tasks of these claims whose attempts are asked to stop."""
    held = ((place, task) for place, task in enumerate(ledger.tasks) if task.claim in claims)
    return frozenset(
        p for p, task in held if task.status is QueueTaskStatus.CLAIMED and task.cancel
    )


def history(ledger: Ledger, place: int) -> tuple[LedgerLogLine, ...]:
    """The lines of the log that are about one task."""
    return tuple(line for line in ledger.log if line.is_about(place))


def _completed(ledger: Ledger, inputs: Sequence[msgspec.Raw]) -> Ledger:
    """With the inputs, once everything is settled: the complete record."""
    if ledger.settled and inputs and not ledger.inputs:
        return _replace(ledger, inputs=tuple(inputs))
    return ledger


def _is_over(task: QueueTaskState, attempts_max: int) -> bool:
    return task.cancel or is_used_up(task, attempts_max)


def _exclusive(
    tasks: Sequence[QueueTaskState], places: Iterable[int], attempts_max: int, *, is_needed: bool
) -> Iterator[int]:
    """Of these places, those that must be claimed exclusively, or those that must not."""
    return (p for p in places if needs_exclusive(tasks[p], attempts_max) is is_needed)


def _startable(
    tasks: Sequence[QueueTaskState],
    attempts_max: int,
    now: Interval,
    *,
    places: frozenset[int] | None = None,
) -> Iterator[int]:
    """The places that nobody holds and that may start, of these if they are given."""
    for place, task in enumerate(tasks):
        is_wanted = places is None or place in places
        if is_wanted and _may_start(task, now) and not _is_over(task, attempts_max):
            yield place


def _may_start(task: QueueTaskState, now: Interval) -> bool:
    return task.status is QueueTaskStatus.READY or (
        task.status is QueueTaskStatus.RETRYING and task.at_ms <= ms_of(now.earliest)
    )


def _end(change: LedgerChange, place: int, ending: AttemptOutcome, *, expires_ms: int) -> None:
    task = change.tasks[place]
    lease = change.leases.get(task.claim)
    who = lease.holder if lease else ""
    match ending:
        case Succeeded(result, is_ref):
            change.settle(place, QueueTaskStatus.SUCCEEDED, who=who, result=result, is_ref=is_ref)
        case Failed(failure):
            change.settle(place, QueueTaskStatus.FAILED, who=who, failure=failure)
        case AttemptCancelled(reason):
            why = LedgerFailure(CANCELLED_ERROR, reason) if reason else _why_cancelled(task)
            change.settle(place, QueueTaskStatus.CANCELLED, who=who, failure=why)
        case Retried() | Rescheduled() | GivenBack() | Expired() if task.cancel:
            change.settle(place, QueueTaskStatus.CANCELLED, who=who, failure=_why_cancelled(task))
        case Expired():
            change.tasks[place] = _replace(task, given_back=task.given_back + 1)
            change.settle(place, QueueTaskStatus.EXPIRED, who=who, failure=task.failure)
        case Retried(failure, due_ms) if 0 < expires_ms <= due_ms:
            change.settle(place, QueueTaskStatus.EXPIRED, who=who, failure=failure)
        case Retried(failure, due_ms):
            state = QueueTaskState(
                status=QueueTaskStatus.RETRYING,
                attempt=task.attempt,
                given_back=task.given_back,
                at_ms=due_ms,
                failure=failure,
                progress=task.progress,
            )
            change.set(place, state, LedgerEvent.RETRYING, who=who, note=failure.error)
        case Rescheduled():
            _reschedule(change, place, ending, who=who, expires_ms=expires_ms)
        case GivenBack():
            state = QueueTaskState(
                status=QueueTaskStatus.READY,
                attempt=task.attempt,
                given_back=task.given_back + 1,
                failure=task.failure,
                progress=task.progress,
                window_max=task.window_max,
            )
            change.set(place, state, LedgerEvent.GIVEN_BACK, who=who)


def _why_cancelled(task: QueueTaskState) -> LedgerFailure | None:
    """The reason that was given when a running task was asked to stop."""
    said = task.failure
    return said if said is not None and said.error == CANCELLED_ERROR else None


def _reschedule(
    change: LedgerChange, place: int, ending: Rescheduled, *, who: str, expires_ms: int
) -> None:
    """The attempt does not count; what would be due too late is settled at once."""
    task = change.tasks[place]
    state = QueueTaskState(
        status=QueueTaskStatus.RETRYING,
        attempt=task.attempt,
        given_back=task.given_back + 1,
        claim=task.claim,
        at_ms=ending.due_ms,
        progress=task.progress,
    )
    if 0 < expires_ms <= ending.due_ms:
        change.tasks[place] = state
        change.settle(place, QueueTaskStatus.EXPIRED, who=who)
    else:
        later = _replace(state, claim="")
        change.set(place, later, LedgerEvent.RESCHEDULED, who=who, note=ending.reason)
