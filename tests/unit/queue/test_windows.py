"""What ends its worker is found in halves, and costs its neighbours time and no attempts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.document_format import decode, encode
from penstock.queue.attempt_outcomes import (
    AttemptCancelled,
    AttemptOutcome,
    GivenBack,
    Rescheduled,
    Retried,
    Succeeded,
)
from penstock.queue.ledger import (
    ClaimLease,
    Ledger,
    LedgerEvent,
    LedgerFailure,
    QueueTaskState,
    QueueTaskStatus,
    as_of,
    fresh,
)
from penstock.queue.transitions import (
    LedgerClaim,
    cancel,
    chosen,
    claim,
    claimable,
    close,
    expire,
    extend,
    has_exclusive,
    settle,
)
from penstock.store.time import Interval

LEASE_MS = 30_000
ATTEMPTS = 3


def _at(second: float) -> Interval:
    return Interval(second, second)


def _claim(
    name: str, tasks_max: int = 1000, *, slots: int = 1000, attempts: int = ATTEMPTS
) -> LedgerClaim:
    return LedgerClaim(name, f"holder of {name}", LEASE_MS, tasks_max, attempts, slots=slots)


def _exclusive(name: str, *, attempts: int = ATTEMPTS) -> LedgerClaim:
    return LedgerClaim(name, f"holder of {name}", LEASE_MS, 1, attempts, slots=1, exclusive=True)


def _fresh(count: int) -> Ledger:
    return fresh(pack_version="v", born="b", count=count)


def _inputs(ledger: Ledger) -> list[msgspec.Raw]:
    return [msgspec.Raw(b"1")] * len(ledger.tasks)


def _lost(count: int, *, second: float = 1000.0) -> Ledger:
    """A pack of so many, all of them lost under one claim by a minute later."""
    ledger, _ = claim(_fresh(count), _claim("lost"), _at(second))
    return expire(ledger, _at(second + 60))


def _settled(ledger: Ledger, name: str, places: Collection[int], second: float) -> Ledger:
    after, refused = settle(
        ledger,
        dict.fromkeys(places, (name, Succeeded())),
        now=_at(second),
        inputs=_inputs(ledger),
    )
    assert not refused
    return after


def _worked_off(ledger: Ledger, *, poison: int, window: int) -> tuple[Ledger, int]:
    """Claimed and worked off, one worker at a time; returns how many of them a poison ended."""
    ended = 0
    for turn in range(1000):
        second = 1000.0 + 60 * turn
        name = f"c{turn}"
        ledger, taken = claim(ledger, _claim(name, window), _at(second))
        if not taken:
            ledger, taken = claim(ledger, _exclusive(name), _at(second))
        if poison in taken:
            ended += 1
        elif taken:
            ledger = _settled(ledger, name, taken, second)
        else:
            break
    return close(
        ledger, attempts_max=ATTEMPTS, who="w", now=_at(1e6), inputs=_inputs(ledger)
    ), ended


@pytest.mark.parametrize(("count", "window"), [(200, 16), (200, 128), (1000, 1000), (7, 7), (1, 9)])
def test_a_poison_fails_alone_within_the_leases_that_are_stated(count: int, window: int) -> None:
    poison = count // 2
    ledger, ended = _worked_off(_fresh(count), poison=poison, window=window)
    assert ended <= math.ceil(math.log2(min(window, count))) + ATTEMPTS
    failed = [
        place for place, task in enumerate(ledger.tasks) if task.status is QueueTaskStatus.FAILED
    ]
    assert failed == [poison]
    assert ledger.settled
    state = ledger.tasks[poison]
    assert (state.attempt, state.attempt - state.given_back) == (ended, ATTEMPTS)
    assert state.failure is not None
    assert state.failure.error == "LeaseExpired"
    assert "os._exit" in state.failure.message
    assert "isolate=True" in state.failure.message


@given(
    count=st.integers(1, 40),
    windows=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    data=st.data(),
)
def test_only_poison_fails_whatever_is_poison(
    count: int, windows: list[int], data: st.DataObject
) -> None:
    """Workers of different sizes, several poisons, and numbers of attempts that only grow."""
    poisons = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    ledger = _fresh(count)
    for turn in range(2000):
        second, name = 1000.0 + 60 * turn, f"c{turn}"
        before = expire(ledger, _at(second))
        most = windows[turn % len(windows)]
        ledger, taken = claim(ledger, _claim(name, most), _at(second))
        if not taken:
            ledger, taken = claim(ledger, _exclusive(name), _at(second))
        for place in taken:
            assert ledger.tasks[place].attempt == before.tasks[place].attempt + 1
            assert len(taken) <= (abs(before.tasks[place].window_max) or most)
        if not taken:
            break
        if not poisons & set(taken):
            ledger = _settled(ledger, name, taken, second)
    ledger = close(ledger, attempts_max=ATTEMPTS, who="w", now=_at(1e6), inputs=_inputs(ledger))
    assert ledger.settled
    failed = {
        place for place, task in enumerate(ledger.tasks) if task.status is QueueTaskStatus.FAILED
    }
    assert failed == poisons


def test_what_is_lost_in_company_is_not_counted_and_comes_again_in_halves() -> None:
    ledger = _lost(16)
    assert {(task.attempt, task.given_back) for task in ledger.tasks} == {(1, 1)}
    assert ledger.log[-1].what is LedgerEvent.LEASE_EXPIRED
    assert ledger.log[-1].note == "not counted"
    ledger, taken = claim(ledger, _claim("a"), _at(1060))
    assert taken == tuple(range(8))
    # Another worker may have the other half at the same time.
    ledger, taken = claim(ledger, _claim("b"), _at(1060))
    assert taken == tuple(range(8, 16))
    assert {lease.window for lease in ledger.leases.values()} == {8}
    again = expire(_settled(ledger, "a", range(8), 1061), _at(2000))
    assert {task.window_max for task in again.tasks[8:]} == {4}


def test_what_is_lost_alone_counts() -> None:
    ledger, _ = claim(_fresh(2), _claim("a", 1), _at(1000))
    after = expire(ledger, _at(2000))
    assert (after.tasks[0].attempt, after.tasks[0].given_back) == (1, 0)
    assert after.log[-1].note == ""


def test_what_was_claimed_with_others_is_not_counted_when_they_have_ended() -> None:
    """It may not have started: the slots of a worker are for all its packs."""
    ledger, _ = claim(_fresh(3), _claim("a"), _at(1000))
    after = expire(_settled(ledger, "a", (0, 1), 1001), _at(2000))
    assert (after.tasks[2].given_back, after.tasks[2].window_max) == (1, 1)


def test_claims_of_one_worker_are_one_window() -> None:
    ledger, _ = claim(_fresh(2), _claim("a", 1), _at(1000))
    ledger, taken = claim(ledger, _claim("b", 1), _at(1000), ours=frozenset({"a"}))
    assert taken == (1,)
    after = expire(ledger, _at(2000))
    assert [task.given_back for task in after.tasks] == [1, 1]
    # Of two workers, each is alone.
    ledger, _ = claim(_fresh(2), _claim("a", 1), _at(1000))
    ledger, _ = claim(ledger, _claim("b", 1), _at(1000))
    assert [task.given_back for task in expire(ledger, _at(2000)).tasks] == [0, 0]


def test_what_nobody_suspects_comes_first_and_is_not_mixed() -> None:
    ledger, _ = claim(_fresh(6), _claim("lost", 4), _at(1000))
    ledger, taken = claim(ledger, _claim("a"), _at(2000))
    assert taken == (4, 5)
    # Beside what it holds, a worker takes no suspects until their window has room for them.
    assert claim(ledger, _claim("b"), _at(2000), ours=frozenset({"a"}))[1] == ()
    assert claimable(ledger, attempts_max=ATTEMPTS, now=_at(2000), held=(4, 5)) == 0
    assert claimable(ledger, attempts_max=ATTEMPTS, now=_at(2000), held=(5,)) == 1
    assert claimable(ledger, attempts_max=ATTEMPTS, now=_at(2000)) == 2


def test_beside_a_suspect_nothing_more_is_claimed_than_its_window_takes() -> None:
    ledger, taken = claim(_lost(4), _claim("a"), _at(1060))
    assert taken == (0, 1)
    assert claim(ledger, _claim("b"), _at(1060), ours=frozenset({"a"}))[1] == ()
    # One that was given back, which nobody suspects, waits as well.
    tasks = (*ledger.tasks[:3], QueueTaskState(attempt=1, given_back=1))
    mixed = msgspec.structs.replace(ledger, tasks=tasks)
    assert claim(mixed, _claim("b"), _at(1060), ours=frozenset({"a"}))[1] == ()
    assert claim(mixed, _claim("b"), _at(1060))[1] == (3,)


def test_suspects_are_not_claimed_ahead() -> None:
    ledger = _lost(16)
    assert claim(ledger, _claim("a", 1000, slots=3), _at(1060))[1] == (0, 1, 2)
    assert claim(ledger, _claim("a", 1000, slots=0), _at(1060))[1] == ()
    assert len(claim(_fresh(16), _claim("a", 1000, slots=0), _at(1060))[1]) == 16


def test_what_waits_for_a_slot_is_not_alone() -> None:
    """Another pack's task has the slot, and may be what ends the worker before this one starts."""
    ledger, _ = claim(_fresh(2), _claim("a", 1, slots=0), _at(1000))
    after = expire(ledger, _at(2000))
    assert (after.tasks[0].given_back, after.tasks[0].window_max) == (1, 1)


@pytest.mark.parametrize(
    ("ending", "window_max"),
    [
        (GivenBack(), 1),
        (Retried(LedgerFailure("ValueError", "oops"), 0), 0),
        (Rescheduled(0), 0),
        (AttemptCancelled(), 0),
    ],
    ids=["given back", "retried", "rescheduled", "stopped"],
)
def test_who_ends_is_cleared_and_who_is_given_back_is_not(
    ending: AttemptOutcome, window_max: int
) -> None:
    ledger, _ = claim(_lost(2), _claim("a"), _at(1060))
    after, _ = settle(ledger, {0: ("a", ending)}, now=_at(1061), inputs=_inputs(ledger))
    assert after.tasks[0].window_max == window_max


def test_a_suspect_that_is_cancelled_is_settled() -> None:
    after = cancel(_lost(2), (0,), who="user", now=_at(1060), inputs=[])
    assert after.tasks[0].status is QueueTaskStatus.CANCELLED
    assert claim(after, _claim("a"), _at(1060))[1] == (1,)


def test_whoever_cancels_claims_suspects_as_they_are_and_makes_none() -> None:
    wanted = LedgerClaim("x", "user", LEASE_MS, 1000, 2**31, is_provisional=True)
    ledger, taken = claim(_lost(4), wanted, _at(1060))
    assert taken == (0, 1, 2, 3)
    after = expire(ledger, _at(2000))
    # It has run nothing: neither counted, nor taken for a loss.
    assert {(task.attempt, task.given_back, task.window_max) for task in after.tasks} == {(2, 2, 2)}


def _renewed(ledger: Ledger) -> Ledger:
    return extend(ledger, ("a",), lease_ms=LEASE_MS, now=_at(1010), touch_ms=LEASE_MS)[0]


@pytest.mark.parametrize(
    "kept",
    [
        _renewed,
        lambda ledger: as_of(_renewed(ledger), 1020.0),
        lambda ledger: decode(Ledger, encode(ledger), where="here"),
    ],
    ids=["renewed", "touched", "stored"],
)
def test_a_lease_keeps_its_window(kept: Callable[[Ledger], Ledger]) -> None:
    ledger, _ = claim(_fresh(3), _claim("a"), _at(1000))
    assert kept(ledger).leases["a"].window == 3


def test_a_lease_of_an_earlier_release_has_the_window_that_is_left_of_it() -> None:
    ledger, _ = claim(_fresh(3), _claim("a"), _at(1000))
    old = msgspec.structs.replace(ledger, leases={"a": ClaimLease("w", 1_030_000)})
    assert {task.given_back for task in expire(old, _at(2000)).tasks} == {1}
    left = _settled(old, "a", (0, 1), 1001)
    assert expire(left, _at(2000)).tasks[2].given_back == 0


def test_the_smallest_bound_of_a_window_holds() -> None:
    bounds = (4, 1, 4, 4, 2, 4)
    tasks = [QueueTaskState(window_max=each) for each in bounds]
    assert chosen(tasks, range(6), held=()) == (0, 2, 3, 5)
    assert chosen(tasks, range(1, 6), held=()) == (1,)
    assert chosen(tasks, (1, 3, 4, 5), held=(0, 2)) == (3, 5)
    assert chosen(tasks, (0, 1, 2, 3, 5), held=(4,)) == (0,)


def _lost_in_company(times: int, *, attempts: int = ATTEMPTS) -> Ledger:
    """A pack of one, lost so often by workers that held other packs too; at second 9000."""
    ledger = _fresh(1)
    for turn in range(times):
        ledger, taken = claim(
            ledger, _claim(f"c{turn}", attempts=attempts), _at(1000.0 + 60 * turn)
        )
        assert taken == (0,)
    return expire(ledger, _at(9000))


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_only_the_loss_of_an_exclusive_attempt_is_final(attempts: int) -> None:
    ledger = _lost_in_company(max(1, attempts - 1), attempts=attempts)
    closed = close(ledger, attempts_max=attempts, who="w", now=_at(9000), inputs=_inputs(ledger))
    assert not closed.settled
    # Nobody takes it who holds, or may hold, anything else.
    assert claim(ledger, _claim("x", attempts=attempts), _at(9000))[1] == ()
    assert claimable(ledger, attempts_max=attempts, now=_at(9000)) == 0
    assert has_exclusive(ledger, attempts_max=attempts, now=_at(9000))
    ledger, taken = claim(ledger, _exclusive("x", attempts=attempts), _at(9000))
    assert taken == (0,)
    assert ledger.leases["x"].exclusive
    stored = decode(Ledger, encode(ledger), where="here")
    lost = close(stored, attempts_max=attempts, who="w", now=_at(9900), inputs=_inputs(ledger))
    assert lost.tasks[0].status is QueueTaskStatus.FAILED
    assert lost.tasks[0].failure is not None
    assert lost.tasks[0].failure.error == "LeaseExpired"
    assert "ran nothing but this task" in lost.tasks[0].failure.message


def test_fewer_attempts_on_another_worker_settle_nothing_that_was_lost_in_company() -> None:
    ledger = _lost_in_company(3, attempts=5)
    assert not close(ledger, attempts_max=2, who="w", now=_at(9000), inputs=_inputs(ledger)).settled
    assert claim(ledger, _exclusive("x", attempts=2), _at(9000))[1] == (0,)


def test_an_exclusive_claim_is_of_one_task_that_needs_it_and_beside_nothing() -> None:
    assert claim(_fresh(2), _exclusive("x"), _at(1000))[1] == ()
    tasks = (
        QueueTaskState(attempt=2, window_max=1),
        QueueTaskState(attempt=2, window_max=1),
        QueueTaskState(),
    )
    ledger = msgspec.structs.replace(_fresh(3), tasks=tasks)
    held, _ = claim(ledger, _claim("a"), _at(1000))
    assert claim(held, _exclusive("x"), _at(1000), ours=frozenset({"a"}))[1] == ()
    assert claim(ledger, _exclusive("x"), _at(1000))[1] == (0,)


def test_what_is_given_back_waits_to_be_claimed_exclusively_again() -> None:
    ledger, _ = claim(_lost_in_company(2), _exclusive("x"), _at(9000))
    after, _ = settle(ledger, {0: ("x", GivenBack())}, now=_at(9001), inputs=_inputs(ledger))
    assert has_exclusive(after, attempts_max=ATTEMPTS, now=_at(9001))
    assert claim(after, _claim("y"), _at(9001))[1] == ()


def test_a_loss_under_an_earlier_release_is_not_final_for_this_one() -> None:
    ledger, _ = claim(_lost_in_company(2), _exclusive("x"), _at(9000))
    old = msgspec.structs.replace(ledger, leases={"x": ClaimLease("w", 9_030_000)})
    closed = close(old, attempts_max=ATTEMPTS, who="w", now=_at(9900), inputs=_inputs(ledger))
    assert not closed.settled
