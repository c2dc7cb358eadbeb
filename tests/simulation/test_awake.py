"""The referee is awake: each rule, broken on purpose, is found within the seeds of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from penstock.queue import transitions
from penstock.queue.attempt_outcomes import AttemptOutcome
from penstock.queue.ledger import Ledger, QueueTaskState, QueueTaskStatus
from penstock.queue.pack import Pack
from penstock.queue.pack_session import PackSession, _Checked
from penstock.queue.transitions import LedgerClaim
from penstock.store.base import Version
from penstock.store.cell import Cell, _Sends
from penstock.store.time import Interval
from penstock.testing.virtual import simulate
from tests.simulation.test_claims import SEEDS, a_world

_settle = transitions.settle
_expire = transitions.expire
_may_start = transitions._may_start
_checked_claim = PackSession._checked_claim


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


def _expire_by_a_clock_that_is_ahead(ledger: Ledger, now: Interval) -> Ledger:
    return _expire(ledger, Interval(now.earliest + 60, now.latest + 60))


def _start_what_is_held(task: QueueTaskState, now: Interval) -> bool:
    return task.status is QueueTaskStatus.CLAIMED or _may_start(task, now)


def _start_what_is_settled(task: QueueTaskState, now: Interval) -> bool:
    return task.status is QueueTaskStatus.SUCCEEDED or _may_start(task, now)


def _forget_write_ids(_cell: object, sends: _Sends, *_snapshots: object) -> bool:
    sends.unsettled = False
    return False


async def _trust_what_was_read_before(
    hand: PackSession, ledger: Ledger, wanted: LedgerClaim
) -> object | None:
    return hand._checked or await _checked_claim(hand, ledger, wanted)


async def _run_without_reading_the_pack(
    hand: PackSession, ledger: Ledger, _wanted: LedgerClaim
) -> object:
    inputs = tuple(msgspec.Raw(b"0") for _ in ledger.tasks)
    pack = Pack(type="t", nonce="", submitted_ms=0, inputs=inputs)
    hand._checked = _Checked(ledger.born, pack, Version(ledger.pack_version))
    return hand._checked


BROKEN: dict[str, tuple[object, str, object, str]] = {
    "QUEUE-9: settle without the fence": (
        transitions,
        "settle",
        _settle_for_whoever_holds_it,
        "another claim than the holder's",
    ),
    "QUEUE-13: take over by another clock": (
        transitions,
        "expire",
        _expire_by_a_clock_that_is_ahead,
        "a live lease was taken over",
    ),
    "QUEUE-12: claim what is held": (
        transitions,
        "_may_start",
        _start_what_is_held,
        "a live lease was taken over",
    ),
    "QUEUE-12: start what is settled": (
        transitions,
        "_may_start",
        _start_what_is_settled,
        "a settled task changed",
    ),
    "QUEUE-1: trust the pack that was read before the claim": (
        PackSession,
        "_checked_claim",
        _trust_what_was_read_before,
        "a task ran again after it had settled",
    ),
    "QUEUE-1: run without reading the pack": (
        PackSession,
        "_checked_claim",
        _run_without_reading_the_pack,
        "a task ran again after it had settled",
    ),
    "QUEUE-20: drop the write ids": (
        Cell,
        "_took_effect",
        _forget_write_ids,
        "an ending took effect and was reported as refused",
    ),
}


def _first_problem() -> str:
    for seed in range(SEEDS):
        try:
            simulate(a_world, seed=seed)
        except (AssertionError, BaseExceptionGroup) as problem:
            first: BaseException = problem
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            return str(first)
    return ""


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, problem = BROKEN[rule]
    monkeypatch.setattr(owner, name, broken)
    assert problem in _first_problem()
