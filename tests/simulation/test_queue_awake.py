"""The simulator is awake: each rule of the queue, broken on purpose, is found within its seeds.

A mutation is a set of replacements in the real code. Worlds are run in the order of their seeds,
those of the profiles that are harsh in the mutation's direction, and the first violation must say
what the broken rule leads to.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest

from penstock.kernel.clock import Clock
from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import new_id
from penstock.kernel.errors import AlreadyExists, NotFound, StoreError, VersionConflict
from penstock.queue import (
    archive,
    doorbell,
    ids,
    ledger,
    limits,
    maintenance,
    pack,
    pack_session,
    submitter,
    transitions,
)
from penstock.queue.attempt_outcomes import AttemptOutcome
from penstock.queue.canceller import CancelSession
from penstock.queue.discovery.direct import DirectDiscovery
from penstock.queue.discovery.leased import READY_SECONDS, LeasedDiscovery, _List
from penstock.queue.discovery.scanner import ALL, PackCandidate, Run, ScanResult
from penstock.queue.doorbell import DoorbellListener, DoorbellRinger, DoorbellState
from penstock.queue.execution import worker_loop
from penstock.queue.execution.pack_memory import PackMemory, PackTracker, _name
from penstock.queue.execution.pack_runner import PackRunner
from penstock.queue.execution.worker_loop import ExclusiveMode
from penstock.queue.ids import SLOTS, TaskId, new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import ClaimLease, Ledger, QueueTaskState, QueueTaskStatus, fresh
from penstock.queue.limits import LimitRequest, LimitState
from penstock.queue.pack import Pack, PackObject
from penstock.queue.pack_session import ListedPack, PackSession, _Checked, claimed
from penstock.queue.shards import allocation
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Pointer, SubmitGatherer, Submitter
from penstock.queue.transitions import LedgerClaim
from penstock.store import cell as cells
from penstock.store import retrying
from penstock.store.base import CREATE, REPLACE, ObjectStore, Version
from penstock.store.cell import Cell, _Sends
from penstock.store.time import Interval
from penstock.testing.simulator import environment
from penstock.testing.simulator.machines import MACHINE, Machine, MachineLocks
from penstock.testing.simulator.plans import WorkerModes, WorldProfile, profile_of
from penstock.testing.simulator.worlds import run_world
from tests.sizes import FULL

_settle = transitions.settle
_expire = transitions.expire
_as_of = ledger.as_of
_makes_room = PackSession._makes_room
_machine_init = Machine.__init__
_next_exclusive = ExclusiveMode.next
_lost = transitions.lost
_gather = SubmitGatherer.submit
_submit_encoded = Submitter.submit_encoded
_has_rung = DoorbellListener.has_rung


@dataclass(frozen=True, slots=True)
class Broken:
    """What is replaced by what, in which worlds it is looked for, and what must be said."""

    replaced: Sequence[tuple[object, str, object]]
    profiles: frozenset[WorldProfile]
    sentence: str
    fleets: Sequence[WorkerModes] = tuple(WorkerModes)
    first: int = 0
    """The seed to begin with: it has found it before. All others follow."""


# QUEUE-1


async def _claim_what_was_read_before(
    hand: PackSession, wanted: LedgerClaim, pack_version: Version
) -> object:
    try:
        found = await hand._store.get(hand._pack.key)
    except NotFound:
        return None
    assert found is not None
    pack = decode(Pack, found.body, where=hand._pack.key)
    ledger = await hand._take(wanted, pack_version)
    if ledger is None or not transitions.held_by(wanted.id, ledger):
        hand._note_due(ledger)
        return None
    hand._checked = _Checked(ledger.born, pack, found.version)
    return claimed(pack, wanted.id, ledger)


# QUEUE-2


def _is_never_void(_submitted_ms: object, _modified: object) -> bool:
    return False


# QUEUE-3


async def _leave_the_pack(_hand: object, _ledger: object) -> None:
    return


async def _leave_both(hand: PackSession, ledger: Ledger, seen: ListedPack) -> bool:
    if ledger.pack_version == seen.version:
        return False
    return await _makes_room(hand, ledger, seen)


def _forgotten_at_once(submitted_ms: int) -> int:
    return submitted_ms


# QUEUE-4


async def _delete_whatever_is_there(pack: PackObject, _version: object) -> None:
    with suppress(StoreError):
        await pack._store.delete(pack.key)
        pack.is_gone = True


def _without_tombstones(inner: ObjectStore, *, entropy: object) -> ObjectStore:
    del entropy
    return inner


async def _remove_whatever_is_there(cell: Cell[Any]) -> None:
    await cell._store.delete(cell.key)
    cell._last = None


# QUEUE-5


async def _check_any_pack(hand: PackSession, ledger: Ledger) -> object:
    try:
        found = await hand._store.get(hand._pack.key)
    except NotFound:
        hand._pack.is_gone = True
        return None
    assert found is not None
    pack = decode(Pack, found.body, where=hand._pack.key)
    hand._checked = _Checked(ledger.born, pack, found.version)
    return hand._checked


async def _take_beside_any_pack(
    hand: PackSession, wanted: LedgerClaim, pack_version: Version
) -> Ledger | None:
    now = await hand._store.now()
    born = new_id(hand._entropy, characters=12)
    new = fresh(pack_version=pack_version, born=born, count=hand.at.count)

    def change(present: Ledger | None) -> Ledger | None:
        after, taken = transitions.claim(present or new, wanted, now)
        return after if taken or present is not None else None

    return await hand._ledger.update(change)


# QUEUE-6


async def _make_room_for_any(hand: PackSession, ledger: Ledger, seen: ListedPack) -> bool:
    if ledger.key is None or ledger.pack_version == seen.version:
        await hand._pack.delete(seen.version)
        return False
    await archive.keep(hand._store, hand._layout, [(hand.at, ledger)], entropy=hand._entropy)
    with suppress(VersionConflict):
        await hand._ledger.remove()
    return await hand._ledger.read() is None


async def _leave_the_tombstone(hand: PackSession, ledger: Ledger, seen: ListedPack) -> bool:
    if ledger.pack_version == seen.version or seen.submitted_ms < ledger.key_ends_ms:
        await hand._pack.delete(seen.version)
        return False
    return True


async def _take_over_the_tombstone(
    hand: PackSession, wanted: LedgerClaim, pack_version: Version
) -> Ledger | None:
    now = await hand._store.now()
    born = new_id(hand._entropy, characters=12)
    new = fresh(pack_version=pack_version, born=born, count=hand.at.count)

    def change(present: Ledger | None) -> Ledger | None:
        ledger = new if present is None or present.settled else present
        after, taken = transitions.claim(ledger, wanted, now)
        return after if taken else None

    return await hand._ledger.update(change)


# QUEUE-7


async def _cancel_by_a_create(
    hand: CancelSession, places: frozenset[int], claim: LedgerClaim
) -> Ledger | None:
    found = await hand._store.get(hand._pack.key)
    assert found is not None
    pack = decode(Pack, found.body, where=hand._pack.key)
    now = await hand._store.now()
    born = new_id(hand._entropy, characters=12)
    new = fresh(pack_version=found.version, born=born, count=hand.at.count)
    settled = transitions.cancel(new, places, who=claim.holder, now=now, inputs=pack.inputs)
    settled = transitions.recorded(settled, pack, now)
    return await hand._ledger.update(lambda present: present or settled)


# QUEUE-8


async def _send_the_pointer_last(
    submitter: Submitter, at: Any, pack: Pack, **_more: object
) -> None:
    where = submitter.layout.pack(at)
    with suppress(AlreadyExists):
        await submitter.store.put(where, encode(pack), CREATE)
        due_ms = pack.due_ms or pack.submitted_ms
        pointer = submitter.layout.pointer(at, due_ms=due_ms, nonce=pack.nonce)
        await submitter.store.put(pointer, encode(Pointer(submitted_ms=due_ms)), CREATE)


async def _drop_the_pointer(
    learning: PackTracker, sight: Any, _hand: object, _nonce: object, *_more: object
) -> None:
    if sight.pointer is not None:
        await learning._access.store.delete(sight.pointer.key)


# QUEUE-9


def _refuse_all_after_a_conflict() -> Callable[..., tuple[Ledger, frozenset[int]]]:
    seen: dict[int, object] = {}

    def settle(
        ledger: Ledger,
        endings: Mapping[int, tuple[str, AttemptOutcome]],
        *,
        now: Interval,
        inputs: Sequence[msgspec.Raw],
        expires_ms: int = 0,
    ) -> tuple[Ledger, frozenset[int]]:
        if endings and seen.get(id(endings)) is endings and len(ledger.tasks) > 1:
            return _expire(ledger, now), frozenset(endings)
        seen[id(endings)] = endings
        return _settle(ledger, endings, now=now, inputs=inputs, expires_ms=expires_ms)

    return settle


def _settle_for_whoever_holds_it(
    ledger: Ledger,
    endings: Mapping[int, tuple[str, AttemptOutcome]],
    *,
    now: Interval,
    inputs: Sequence[msgspec.Raw],
    expires_ms: int = 0,
) -> tuple[Ledger, frozenset[int]]:
    forged = {place: (ledger.tasks[place].claim, end) for place, (_, end) in endings.items()}
    return _settle(ledger, forged, now=now, inputs=inputs, expires_ms=expires_ms)


# QUEUE-10


def _never_again(memory: PackMemory, sight: PackCandidate, *_now: object, **_more: object) -> bool:
    known = memory._known.get(_name(sight))
    return known is not None and known.ledger is not None


def _only_what_has_no_ledger(
    memory: PackMemory, now_ms: float, **_more: object
) -> list[PackCandidate]:
    due = [each for each in memory._known.values() if each.due_ms <= now_ms and not each.ledger]
    for known in due:
        memory.forget(known.sight)
    return [known.sight for known in due if known.blind]


def _keep_the_touch_leases(ledger: Ledger, modified: float) -> Ledger:
    plain = _as_of(ledger, modified).leases
    leases = {
        name: msgspec.structs.replace(plain[name], touch_ms=lease.touch_ms)
        for name, lease in ledger.leases.items()
    }
    return msgspec.structs.replace(ledger, leases=leases)


def _overlook_touches(ledger: Ledger, _modified: float) -> Ledger:
    return _as_of(ledger, 0.0)


# And besides


def _replace_whatever_is_there(_version: object) -> object:
    return REPLACE


def _by_the_machines_clock() -> Sequence[tuple[object, str, object]]:
    clocks: dict[str, Clock] = {}

    def init(machine: Machine, name: str, **more: Any) -> None:
        _machine_init(machine, name, **more)
        clocks[name] = machine.clock

    def expire(ledger: Ledger, now: Interval) -> Ledger:
        clock = clocks.get(MACHINE.get())
        return _expire(ledger, Interval(clock.wall(), clock.wall()) if clock else now)

    return [(Machine, "__init__", init), (transitions, "expire", expire)]


async def _delete_and_create(
    hand: PackSession, wanted: LedgerClaim, pack_version: Version
) -> Ledger | None:
    now = await hand._store.now()
    present = await hand._ledger.read()
    if present is not None and _expire(present, now) is not present:
        await _remove_whatever_is_there(hand._ledger)
        hand._ledger.assume_absent()
    born = new_id(hand._entropy, characters=12)
    new = fresh(pack_version=pack_version, born=born, count=hand.at.count)

    def change(present: Ledger | None) -> Ledger | None:
        after, taken = transitions.claim(present or new, wanted, now)
        return after if taken or present is not None else None

    return await hand._ledger.update(change)


def _forget_write_ids(_cell: object, sends: _Sends, *_snapshots: object) -> bool:
    sends.unsettled = False
    return False


def _nothing_is_remembered(*, sent: bytes, found: bytes) -> bool:
    return False


def _one_pointer_a_pack(
    layout: QueueLayout, at: Any, *, due_ms: int, nonce: str, **_more: object
) -> str:
    name = at.path.rpartition("/")[2]
    return f"{layout.ready}{due_ms // 60_000}/{at.slot:03x}/{'0' * len(nonce)}@{name}"


async def _send_with_one_pointer(
    submitter: Submitter, at: Any, pack: Pack, **_more: object
) -> None:
    where = submitter.layout.pack(at)
    due_ms = pack.due_ms or pack.submitted_ms
    pointer = submitter.layout.pointer(at, due_ms=due_ms, nonce=pack.nonce)
    body = encode(Pointer(submitted_ms=pack.submitted_ms))
    await submitter.store.put(pointer, body, REPLACE)
    try:
        await submitter.store.put(where, encode(pack), CREATE)
    except AlreadyExists:
        await submitter.store.delete(pointer)


def _start_retries_at_once(task: QueueTaskState, _now: Interval) -> bool:
    return task.status in (QueueTaskStatus.READY, QueueTaskStatus.RETRYING)


async def _is_always_due(_hand: object, _pack: object) -> bool:
    return True


def _trust_any_lease(_work: object, _held: object) -> bool:
    return True


async def _keep_nothing(*_things: object, **_more: object) -> None:
    return


def _count_from_one(*, previous: int, seen: int, earliest_ms: int) -> int:
    return previous + 1


# Windows


def _never_in_halves(
    task: QueueTaskState, lease: ClaimLease | None, *, together: int
) -> QueueTaskState:
    after = _lost(task, lease, together=together)
    is_one_of_many = together > 1 and after.given_back > task.given_back
    return msgspec.structs.replace(after, window_max=together) if is_one_of_many else after


def _count_whatever_is_lost(
    task: QueueTaskState, _lease: object, **_together: object
) -> QueueTaskState:
    return msgspec.structs.replace(task, status=QueueTaskStatus.READY, claim="")


def _never(_task: QueueTaskState, _attempts_max: int) -> bool:
    return False


def _by_the_count(task: QueueTaskState, attempts_max: int) -> bool:
    return task.attempt - task.given_back >= attempts_max


def _at_any_time(exclusive: ExclusiveMode, **_: bool) -> PackCandidate | None:
    return _next_exclusive(exclusive, is_empty=True, is_idle=True)


# Locks


def _of_the_same_host(locks: MachineLocks) -> frozenset[str]:
    mine = locks._machine
    return frozenset(each.incarnation for each in locks._locks if each._machine is not mine)


# Inboxes


async def _look_at_nothing(*_arguments: object, **_options: object) -> ScanResult:
    return ScanResult()


# Options, limits and gathering


def _are_all_alike(type: str, _options: object) -> object:
    return type


async def _send_what_was_withdrawn(gatherer: SubmitGatherer, *what: Any) -> Any:
    return await asyncio.shield(asyncio.get_running_loop().create_task(_gather(gatherer, *what)))


async def _answer_before_the_put(
    submitter: Submitter, type: str, bodies: Sequence[msgspec.Raw], options: SubmitOptions
) -> list[TaskId]:
    at = new_pack(type=type, count=len(bodies), submitted_ms=0, entropy=submitter.entropy)
    sent = asyncio.get_running_loop().create_task(_submit_encoded(submitter, type, bodies, options))
    sent.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return at.tasks(range(len(bodies)))


def _apart() -> Callable[..., int]:
    numbers = count()
    return lambda *_: next(numbers) % SLOTS


def _permits_for_all(
    _definition: object, _others: object, _mine: object, request: LimitRequest, _now: object
) -> int:
    return max(request.keeps, request.runs) + request.wants


def _follow_the_pointer(_sight: object, _pack: object) -> bool:
    return False


def _never_full(_definition: object, full_ms: float, _starts: int, _by_ms: int) -> float:
    return full_ms


def _without_all_others(
    state: LimitState, _now: Interval, *, but: str = "", **_more: object
) -> LimitState:
    mine = {name: share for name, share in state.shares.items() if name == but}
    return msgspec.structs.replace(state, shares=mine)


# Hints and promptness


def _read_the_doorbell(body: bytes, key: str) -> DoorbellState:
    return decode(DoorbellState, body, where=key)


async def _overlook_its_loss(listener: DoorbellListener) -> bool:
    before = listener._said
    rang = await _has_rung(listener)
    return rang and not (before is not None and listener._said is None)


async def _ring_for_nobody(_ringer: DoorbellRinger, *, is_urgent: bool) -> None:
    del is_urgent


def _leave_keys_to_chance(
    discovery: LeasedDiscovery, runs: Sequence[Run], instant: float, reason: _List
) -> bool:
    is_time = instant >= min(discovery._ready_at + READY_SECONDS, discovery._echo_at)
    return reason is not _List.AWAKE or runs == ALL or is_time


async def _see_nothing(_discovery: object, _wanted: object) -> None:
    return None


STORM = frozenset({WorldProfile.STORM})
LATE = frozenset({WorldProfile.LATE})
KEYS = frozenset({WorldProfile.KEYS})
POINTERS = frozenset({WorldProfile.POINTERS})
ECHOES = frozenset({WorldProfile.ECHOES})
OPERATOR = frozenset({WorldProfile.OPERATOR})
AFTER_IT_SETTLED = "started after it had settled|was settled twice|is not how it ended"
ANOTHER_ATTEMPT = "came from another attempt than the one that holds it"
LOST = "does not end"

BROKEN: dict[str, Broken] = {
    "QUEUE-1: run what was read before the claim": Broken(
        [(PackSession, "_claim", _claim_what_was_read_before)], LATE, AFTER_IT_SETTLED
    ),
    "QUEUE-2: run a void pack": Broken(
        [
            (pack_session, "is_void", _is_never_void),
            (pack, "is_void", _is_never_void),
            (submitter, "is_void", _is_never_void),
        ],
        LATE,
        AFTER_IT_SETTLED,
        first=34,
    ),
    "QUEUE-3: leave the pack beside its settled ledger": Broken(
        [(PackSession, "_tidy", _leave_the_pack), (PackSession, "_makes_room", _leave_both)],
        STORM,
        "stays although it is settled",
    ),
    "QUEUE-3: archive before W": Broken(
        [(maintenance, "forgotten_ms", _forgotten_at_once)], LATE, AFTER_IT_SETTLED
    ),
    "QUEUE-4: delete whatever pack is there": Broken(
        [(PackObject, "delete", _delete_whatever_is_there)],
        KEYS,
        "its pack was removed before it had settled",
        first=31,
    ),
    "QUEUE-4: delete whatever ledger is there": Broken(
        [(Cell, "remove", _remove_whatever_is_there)], KEYS | LATE, "was removed before it"
    ),
    "QUEUE-4: a store whose conditional deletes are not atomic": Broken(
        [(environment, "TombstonedStore", _without_tombstones)],
        KEYS,
        "was removed before it",
        first=181,
    ),
    "QUEUE-5: ignore the version of the pack": Broken(
        [
            (PackSession, "_check", _check_any_pack),
            (PackSession, "_take", _take_beside_any_pack),
        ],
        ECHOES,
        "before it was durable|was settled twice",
    ),
    "QUEUE-6: run a duplicate": Broken(
        [(PackSession, "_makes_room", _make_room_for_any)],
        KEYS,
        "although its key was still taken",
    ),
    "QUEUE-6: leave the tombstone": Broken(
        [
            (PackSession, "_makes_room", _leave_the_tombstone),
            (PackSession, "_take", _take_over_the_tombstone),
        ],
        KEYS,
        "A ledger was written over by another one",
    ),
    "QUEUE-7: cancel by a create": Broken(
        [(CancelSession, "_cancel_unclaimed", _cancel_by_a_create)], STORM, "settled by a create"
    ),
    "QUEUE-8: write the pointer last": Broken(
        [(Submitter, "_send_keyed", _send_the_pointer_last)],
        POINTERS,
        LOST,
        first=48,
    ),
    "QUEUE-8: remove the pointer at once": Broken(
        [(PackTracker, "_check_pointer", _drop_the_pointer)],
        POINTERS,
        LOST,
        first=12,
    ),
    "QUEUE-9: refuse all for a neighbour's change": Broken(
        [(transitions, "settle", _refuse_all_after_a_conflict())],
        STORM,
        "was refused although its attempt holds it",
    ),
    "QUEUE-9: settle for whoever holds it": Broken(
        [(transitions, "settle", _settle_for_whoever_holds_it)],
        STORM,
        ANOTHER_ATTEMPT,
        first=13,
    ),
    "QUEUE-10: never read a ledger again": Broken(
        [
            (PackMemory, "is_known_idle", _never_again),
            (PackMemory, "due", _only_what_has_no_ledger),
        ],
        STORM,
        LOST,
    ),
    "QUEUE-10: keep the touch leases of others": Broken(
        [(pack_session, "as_of", _keep_the_touch_leases)],
        STORM,
        "A lease was prolonged by another than its holder",
    ),
    "QUEUE-11: overlook touches": Broken(
        [(pack_session, "as_of", _overlook_touches)], STORM, "The live lease of task"
    ),
    "QUEUE-7: settle without the version": Broken(
        [(cells, "Swap", _replace_whatever_is_there)],
        STORM,
        "came over a ledger|was given twice or skipped",
    ),
    "QUEUE-13: take over by the machine's clock": Broken(
        _by_the_machines_clock(), STORM, "The live lease of task"
    ),
    "QUEUE-12: delete, then create": Broken(
        [(PackSession, "_take", _delete_and_create)], STORM, "its attempts go back"
    ),
    "QUEUE-20: drop the write ids": Broken(
        [
            (Cell, "_took_effect", _forget_write_ids),
            (retrying, "took_effect", _nothing_is_remembered),
        ],
        STORM,
        "took effect and was reported as refused",
    ),
    "QUEUE-8: use a pointer's key again": Broken(
        [
            (QueueLayout, "pointer", _one_pointer_a_pack),
            (Submitter, "_send_keyed", _send_with_one_pointer),
        ],
        POINTERS,
        LOST,
    ),
    "QUEUE-16: start retries at once": Broken(
        [(transitions, "_may_start", _start_retries_at_once)], STORM, "before its retry was due"
    ),
    "QUEUE-16: start before the delay is over": Broken(
        [(PackSession, "_is_due", _is_always_due)], STORM, "started before it was due"
    ),
    "QUEUE-16: start on a lease that is over": Broken(
        [(PackRunner, "_is_trusted", _trust_any_lease)],
        STORM,
        " started ",
        first=26,
    ),
    "QUEUE-19: archive nothing": Broken(
        [(maintenance, "keep", _keep_nothing)], LATE, "was removed before it was archived"
    ),
    "QUEUE-17: count what was lost in company": Broken(
        [(transitions, "lost", _count_whatever_is_lost)],
        STORM,
        "failed for want of attempts|failed by a lease that was lost with other tasks",
    ),
    "QUEUE-18: settle what was lost beside others": Broken(
        [(transitions, "needs_exclusive", _never), (transitions, "is_used_up", _by_the_count)],
        STORM,
        "failed by a lease that was lost with other tasks",
        first=20,
    ),
    "QUEUE-18: run others beside what is exclusive": Broken(
        [(ExclusiveMode, "next", _at_any_time), (ExclusiveMode, "is_reserved", False)],
        STORM,
        "failed by a lease that was lost with other tasks",
        first=20,
    ),
    "QUEUE-13: trust the name of the host instead of its lock": Broken(
        [(MachineLocks, "ended", _of_the_same_host)], STORM, "The live lease of task"
    ),
    "QUEUE-22: look into inboxes and nowhere else": Broken(
        [(DirectDiscovery, "_look_around", _look_at_nothing)], STORM, LOST, (WorkerModes.DIRECT,)
    ),
    "QUEUE-17: claim what was lost together again, never in halves": Broken(
        [(transitions, "lost", _never_in_halves)], STORM, LOST, first=6
    ),
    "QUEUE-22: trust what the doorbell says": Broken(
        [(doorbell, "_read", _read_the_doorbell)],
        STORM | OPERATOR,
        "A submit failed because of a hint|fell over|has not started after|" + LOST,
    ),
    "QUEUE-22: overlook that the doorbell is gone": Broken(
        [(DoorbellListener, "has_rung", _overlook_its_loss)],
        STORM | OPERATOR,
        "has not started after .* and the doorbell was damaged",
        (WorkerModes.LEASED,),
    ),
    "QUEUE-24: ring for nobody": Broken(
        [(DoorbellRinger, "submitted", _ring_for_nobody)],
        STORM | OPERATOR,
        "has not started after .* and (all was idle|the doorbell was damaged)",
        (WorkerModes.LEASED,),
    ),
    "QUEUE-24: fall asleep without a look for keys": Broken(
        [(LeasedDiscovery, "_wants_ready", _leave_keys_to_chance)],
        STORM | OPERATOR,
        "has not started after .* and its producer believed that all were awake",
        (WorkerModes.LEASED,),
        first=29,
    ),
    "Priorities: look for nothing urgent while there is enough to do": Broken(
        [(LeasedDiscovery, "peek", _see_nothing)],
        STORM | OPERATOR,
        "has not started after .* and it was urgent",
        (WorkerModes.LEASED,),
    ),
    "Gathering: send all in one pack": Broken(
        [(submitter, "_alike", _are_all_alike)],
        STORM,
        "lies under another priority or limit",
    ),
    "Gathering: send what was withdrawn": Broken(
        [(SubmitGatherer, "submit", _send_what_was_withdrawn)],
        STORM,
        "was withdrawn before it was sent, and arrives",
    ),
    "Gathering: answer before the put": Broken(
        [(Submitter, "submit_encoded", _answer_before_the_put)],
        STORM,
        "was lost: its submit was answered and never arrived",
    ),
    "Affinity: into any slot": Broken(
        [(ids, "slot_of_affinity", _apart())],
        STORM,
        "lies apart from others of its affinity",
        first=16,
    ),
    "LIMIT-1: remove the shares of others": Broken(
        [(limits, "without_ended", _without_all_others)],
        STORM,
        "run under the limit|than its rate and burst allow",
        first=20,
    ),
    "LIMIT-2: give whatever is asked for": Broken(
        [(limits, "_permits", _permits_for_all)], STORM, "run under the limit", first=26
    ),
    "LIMIT-7: start under the limit that a pointer names": Broken(
        [(worker_loop, "_is_misled", _follow_the_pointer)],
        KEYS,
        "starts without a share of its limit",
        first=121,
    ),
    "LIMIT-6: report no starts": Broken(
        [(limits, "_spent", _never_full)], STORM, "than its rate and burst allow", first=20
    ),
    "SHARD-5: count epochs from one": Broken(
        [(allocation, "next_epoch", _count_from_one)],
        OPERATOR,
        "The epoch of shard",
        (WorkerModes.LEASED,),
    ),
}


def first_problem(broken: Broken, seeds: Iterable[int]) -> tuple[int, str]:
    """The first seed that finds something, and what it says."""
    for seed in seeds:
        for fleet in broken.fleets if profile_of(seed) in broken.profiles else ():
            found = run_world(seed, fleet).violations
            if found:
                return seed, found[0].sentence
    return -1, ""


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[rule]
    for owner, name, replacement in broken.replaced:
        monkeypatch.setattr(owner, name, replacement)
    seeds = range(FULL.seeds_of_a_mode)
    found = first_problem(broken, (*seeds[broken.first :], *seeds[: broken.first]))
    assert re.search(broken.sentence, found[1])
