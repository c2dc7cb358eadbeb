"""Windows: which tasks are claimed together, and what a lost lease says of them. Pure.

A task that ends its worker (`os._exit`, out of memory, a crash in C) leaves no word: a lease ends,
and any of the tasks that the worker held may have been the one. So nobody is charged who was in
company of its own pack, and nobody fails who was in company at all.

Within a pack:

- **A window** is what a worker holds of one pack, and nothing else of the pack may start there. Its
  size is written with the claim that changes it (`Lease.window`): no write of its own.
  What waits for a slot is never alone: who has the slot is at work.
- **When a lease ends**, all that it still holds become suspects. Each may be claimed again in a
  window of at most half as many (`TaskState.window_max`). If the window had one place, the attempt
  counts; otherwise it does not (`given_back`). Nothing has run under a window of 0.
- **A claim** takes tasks that are not suspect, as many as it may. Suspects are for when there is
  nothing else: as many as the smallest bound among them, and among what the worker holds, allows,
  and no more than have a free slot.
- **Who ends is cleared**: a result, a failure, a retry and a reschedule are the ends of attempts
  that did not end their worker. What is given back stays suspect.

Numbers of attempts grow at every claim, whether it counts or not: they are fences.

Across packs, where a worker holds tasks of several and no ledger tells of the others:

- **A suspect** with a bound of 1 **on its last attempt**, by the `attempts` of whoever asks, is
  claimed **exclusively**
  and in no other way (`needs_exclusive`): by a worker that holds nothing else, of any pack, and
  that claims nothing else until this attempt has ended and its ending is written
  (`penstock.queue.running.exclusive` has the worker's side). The lease says so.
- **Only an exclusive loss is final.** It leaves `LOST_EXCLUSIVE`. A suspect without that mark is
  not over, however many attempts are counted; it runs exclusively once more.
- All other losses count as they did, as long as attempts remain.

Every lost lease halves the window of each task in it, so one that ends every worker is alone after
log2 of the window, and settled after as many leases more as it has attempts, and one more if its
last loss was in company: with 16 in a window and 3 attempts, 8 leases at the most. The others lose
time: what else its worker held is claimed again, and at the worst each of it runs exclusively once.
They cannot lose their last attempt to it.

A crash leaves what the ledger says, and whoever expires a lease does the same with it. A release
that knows no windows drops them when it writes, and counts as it did: one more start for each, and
what it closes itself it closes as it did. A lease that it wrote is not exclusive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from penstock.queue.ledger import LOST_EXCLUSIVE, Lease, Status, TaskState

_UNBOUND: Final = 2**31


def chosen(
    tasks: Sequence[TaskState],
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


def needs_exclusive(task: TaskState, attempts_max: int) -> bool:
    """Whether its next loss would be its last: then its worker must run nothing beside it.

    As long as it may come in a larger window, halves tell more.
    """
    return abs(task.window_max) == 1 and task.attempt - task.given_back + 1 >= attempts_max


def is_used_up(task: TaskState, attempts_max: int) -> bool:
    """Whether it has no attempt left; a suspect has, until it was lost exclusively."""
    is_final = task.window_max in (0, LOST_EXCLUSIVE)
    return is_final and task.attempt - task.given_back >= attempts_max


def window_of(held: Collection[int], taken: Collection[int], *, slots: int) -> int:
    """The window of one who holds some and takes others, of which so many start at once."""
    return max(len(held) + len(taken), 2 if len(taken) > slots else 1)


def lost(task: TaskState, lease: Lease | None, *, together: int) -> TaskState:
    """A task whose lease is over, with which its claim held so many; free to be claimed again."""
    window = lease.window if lease else together
    window_max = max(1, together // 2)
    if lease is not None and lease.exclusive:
        return msgspec.structs.replace(
            task, status=Status.READY, claim="", window_max=LOST_EXCLUSIVE
        )
    if window == 0:
        return msgspec.structs.replace(task, status=Status.READY, claim="")
    return msgspec.structs.replace(
        task,
        status=Status.READY,
        claim="",
        # An earlier release writes no windows: then it is as large as what is left of it.
        given_back=task.given_back + (max(window, together) > 1),
        # `abs`: one that was lost exclusively, and in company since, has another chance.
        window_max=min(abs(task.window_max) or window_max, window_max),
    )
