"""Every change that a ledger can undergo, as pure functions of (ledger, now).

Whoever writes a ledger does it with these: read, apply, swap; on a conflict read and apply again.
`now` is the store's time as an interval, in seconds. What could be too early uses `earliest`, what
must last uses `latest`: a lease is over for a challenger only when `earliest` is past it.

What they keep, whatever they are called with:
- Attempts only grow, and each number is given once.
- What is settled stays as it is.
- A task is settled, given back or sent to a retry only by the claim that holds it. A claim that
  was overtaken is refused for exactly those tasks; its neighbours are not.
- Every change first expires the leases that are over, so that the heartbeats of one holder never
  hide the death of another.
- What has expired is settled only while nobody holds it: who has begun in time may end.
- An attempt that is lost counts only if its task was claimed alone in its pack, and is the last one
  only if its worker held nothing else at all (`windows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.queue.changes import Change, ms_of
from penstock.queue.endings import (
    Ending,
    Expired,
    Failed,
    GivenBack,
    Rescheduled,
    Retried,
    Stopped,
    Succeeded,
    sound,
)
from penstock.queue.ledger import (
    CANCELLED_ERROR,
    Failure,
    Happening,
    Lease,
    Ledger,
    LogLine,
    Progress,
    Status,
    TaskState,
)
from penstock.queue.pack import Pack, forgotten_ms
from penstock.queue.windows import chosen, is_used_up, lost, needs_exclusive, window_of
from penstock.store.time import Interval

_WORKERS_LOST: Final = (
    "The worker of each attempt that counts was lost, and in the last one it ran nothing but this"
    " task: it was killed, ran out of memory, crashed, called os._exit, or could not renew its"
    " lease. If the task itself ends it, isolate=True gives the handler a process of its own."
)

_replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Claim:
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
    """For one who renews by touching (`heartbeats`): how long after a touch the lease lasts."""
    slots: int = 2**31
    """How many can start at once: so many suspects at the most are taken (`windows`)."""
    exclusive: bool = False
    """Its holder has nothing else: one task that needs that is taken, and nothing else."""
    incarnation: str = ""
    """The process of its holder (`penstock.queue.incarnation`)."""


def claim(
    ledger: Ledger, wanted: Claim, now: Interval, *, ours: frozenset[str] = frozenset()
) -> tuple[Ledger, tuple[int, ...]]:
    """Take up to `tasks_max` tasks that may start, beside what the claims `ours` hold.

    Returns the ledger and the places of the tasks taken; the ledger itself if nothing changes.
    """
    # If the claim is there already, its answer was lost: who asks again is alive.
    ledger, _ = extend(
        ledger, (wanted.id,), lease_ms=wanted.lease_ms, now=now, touch_ms=wanted.touch_ms
    )
    change = Change(ledger, now)
    ours |= {wanted.id}
    held = [
        place
        for place, task in enumerate(change.tasks)
        if task.status is Status.CLAIMED and task.claim in ours
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
        state = TaskState(
            status=Status.CLAIMED,
            attempt=task.attempt + 1,
            given_back=task.given_back + wanted.is_provisional,
            claim=wanted.id,
            failure=task.failure,
            window_max=task.window_max,
        )
        change.set(place, state, Happening.CLAIMED, who=wanted.holder)
    if taken:
        expires = ms_of(now.latest) + wanted.lease_ms
        change.leases[wanted.id] = Lease(
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
    endings: Mapping[int, tuple[str, Ending]],
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
    change = Change(ledger, now)
    refused: set[int] = set()
    for place, (claim_id, ending) in sorted(endings.items()):
        task = change.tasks[place]
        if not claim_id or task.claim != claim_id:
            refused.add(place)
        elif task.status is Status.CLAIMED:
            _end(change, place, sound(ending, count=len(change.tasks)), expires_ms=expires_ms)
        # Otherwise it was settled by this very claim, whose answer was lost.
    after = lapse(expire(change.ledger(), now), expires_ms=expires_ms, now=now)
    return _completed(after, inputs), frozenset(refused)


def lapse(ledger: Ledger, *, expires_ms: int, who: str = "", now: Interval) -> Ledger:
    """Settle what nobody holds as expired, if the time of the pack is surely over."""
    if not has_expired(expires_ms, now):
        return ledger
    change = Change(ledger, now)
    for place, task in enumerate(change.tasks):
        if task.status in (Status.READY, Status.RETRYING) and not task.cancel:
            change.settle(place, Status.EXPIRED, who=who, failure=task.failure)
    return change.ledger()


def has_expired(expires_ms: int, now: Interval) -> bool:
    """Whether nothing of a pack that names this time may start any more."""
    return 0 < expires_ms <= ms_of(now.earliest)


def closed_by(
    before: Ledger, after: Ledger, endings: Mapping[int, tuple[str, Ending]]
) -> dict[int, Status]:
    """What a change has settled besides the tasks whose attempts ended with it."""
    return {
        place: task.status
        for place, (old, task) in enumerate(zip(before.tasks, after.tasks, strict=True))
        if task.status.settled and not old.status.settled and place not in endings
    }


def tell(ledger: Ledger, reports: Mapping[int, tuple[str, Progress]]) -> Ledger:
    """Note what attempts say of themselves: place → (claim id, progress). Only who holds it may."""
    tasks = list(ledger.tasks)
    for place, (claim_id, progress) in reports.items():
        task = tasks[place]
        if claim_id and task.claim == claim_id and task.status is Status.CLAIMED:
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
        if task.status is Status.CLAIMED and task.claim not in live
    ]
    if not freed:
        return ledger
    change = Change(ledger, now)
    together = Counter(ledger.tasks[place].claim for place in freed)
    for place in freed:
        task = ledger.tasks[place]
        lease = ledger.leases.get(task.claim)
        state = lost(task, lease, together=together[task.claim])
        note = "not counted" if state.given_back > task.given_back else ""
        who = lease.holder if lease else ""
        change.set(place, state, Happening.LEASE_EXPIRED, who=who, note=note)
    return change.ledger()


def over(ledger: Ledger, *, attempts_max: int) -> tuple[int, ...]:
    """The tasks that nobody holds and that may not start again; `close` settles them."""
    return tuple(
        place
        for place, task in enumerate(ledger.tasks)
        if task.status in (Status.READY, Status.RETRYING) and _is_over(task, attempts_max)
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
    change = Change(expired, now)
    for place in over(expired, attempts_max=attempts_max):
        task = change.tasks[place]
        if task.cancel:
            change.settle(place, Status.CANCELLED, who=who, failure=_why_cancelled(task))
        else:
            failure = task.failure or Failure("LeaseExpired", _WORKERS_LOST)
            change.settle(place, Status.FAILED, who=who, failure=failure)
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
    why = Failure(CANCELLED_ERROR, reason) if reason else None
    change = Change(expire(ledger, now), now)
    for place in sorted(places):
        task = change.tasks[place]
        match task.status:
            case Status.READY | Status.RETRYING:
                change.settle(place, Status.CANCELLED, who=who, failure=why)
            case Status.CLAIMED if not task.cancel:
                asked = _replace(task, cancel=True, failure=why or task.failure)
                change.set(place, asked, Happening.CANCEL_ASKED, who=who, note=reason)
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
        if task.status is Status.READY:
            return 0
        if task.status is Status.CLAIMED and task.claim not in ledger.leases:
            return 0
        if task.status is Status.RETRYING:
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
    waiting = (task.at_ms for task in ledger.tasks if task.status is Status.RETRYING)
    return min((at_ms for at_ms in waiting if at_ms > ms_of(now.earliest)), default=None)


def held_by(claim: str, ledger: Ledger) -> dict[int, int]:
    """The tasks that a claim holds, with the number of each attempt."""
    return {
        place: task.attempt
        for place, task in enumerate(ledger.tasks)
        if task.status is Status.CLAIMED and task.claim == claim
    }


def asked_to_stop(claims: frozenset[str], ledger: Ledger) -> frozenset[int]:
    """The tasks of these claims whose attempts are asked to stop."""
    held = ((place, task) for place, task in enumerate(ledger.tasks) if task.claim in claims)
    return frozenset(p for p, task in held if task.status is Status.CLAIMED and task.cancel)


def history(ledger: Ledger, place: int) -> tuple[LogLine, ...]:
    """The lines of the log that are about one task."""
    return tuple(line for line in ledger.log if line.is_about(place))


def _completed(ledger: Ledger, inputs: Sequence[msgspec.Raw]) -> Ledger:
    """With the inputs, once everything is settled: the complete record."""
    if ledger.settled and inputs and not ledger.inputs:
        return _replace(ledger, inputs=tuple(inputs))
    return ledger


def _is_over(task: TaskState, attempts_max: int) -> bool:
    return task.cancel or is_used_up(task, attempts_max)


def _exclusive(
    tasks: Sequence[TaskState], places: Iterable[int], attempts_max: int, *, is_needed: bool
) -> Iterator[int]:
    """Of these places, those that must be claimed exclusively, or those that must not."""
    return (p for p in places if needs_exclusive(tasks[p], attempts_max) is is_needed)


def _startable(
    tasks: Sequence[TaskState],
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


def _may_start(task: TaskState, now: Interval) -> bool:
    return task.status is Status.READY or (
        task.status is Status.RETRYING and task.at_ms <= ms_of(now.earliest)
    )


def _end(change: Change, place: int, ending: Ending, *, expires_ms: int) -> None:
    task = change.tasks[place]
    lease = change.leases.get(task.claim)
    who = lease.holder if lease else ""
    match ending:
        case Succeeded(result, is_ref):
            change.settle(place, Status.SUCCEEDED, who=who, result=result, is_ref=is_ref)
        case Failed(failure):
            change.settle(place, Status.FAILED, who=who, failure=failure)
        case Stopped(reason):
            why = Failure(CANCELLED_ERROR, reason) if reason else _why_cancelled(task)
            change.settle(place, Status.CANCELLED, who=who, failure=why)
        case Retried() | Rescheduled() | GivenBack() | Expired() if task.cancel:
            change.settle(place, Status.CANCELLED, who=who, failure=_why_cancelled(task))
        case Expired():
            change.tasks[place] = _replace(task, given_back=task.given_back + 1)
            change.settle(place, Status.EXPIRED, who=who, failure=task.failure)
        case Retried(failure, due_ms) if 0 < expires_ms <= due_ms:
            change.settle(place, Status.EXPIRED, who=who, failure=failure)
        case Retried(failure, due_ms):
            state = TaskState(
                status=Status.RETRYING,
                attempt=task.attempt,
                given_back=task.given_back,
                at_ms=due_ms,
                failure=failure,
                progress=task.progress,
            )
            change.set(place, state, Happening.RETRYING, who=who, note=failure.error)
        case Rescheduled():
            _reschedule(change, place, ending, who=who, expires_ms=expires_ms)
        case GivenBack():
            state = TaskState(
                status=Status.READY,
                attempt=task.attempt,
                given_back=task.given_back + 1,
                failure=task.failure,
                progress=task.progress,
                window_max=task.window_max,
            )
            change.set(place, state, Happening.GIVEN_BACK, who=who)


def _why_cancelled(task: TaskState) -> Failure | None:
    """The reason that was given when a running task was asked to stop."""
    said = task.failure
    return said if said is not None and said.error == CANCELLED_ERROR else None


def _reschedule(
    change: Change, place: int, ending: Rescheduled, *, who: str, expires_ms: int
) -> None:
    """The attempt does not count; what would be due too late is settled at once."""
    task = change.tasks[place]
    state = TaskState(
        status=Status.RETRYING,
        attempt=task.attempt,
        given_back=task.given_back + 1,
        claim=task.claim,
        at_ms=ending.due_ms,
        progress=task.progress,
    )
    if 0 < expires_ms <= ending.due_ms:
        change.tasks[place] = state
        change.settle(place, Status.EXPIRED, who=who)
    else:
        later = _replace(state, claim="")
        change.set(place, later, Happening.RESCHEDULED, who=who, note=ending.reason)
