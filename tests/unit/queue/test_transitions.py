"""The transitions of a ledger keep their promises, whatever they are called with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kernel.document_format import decode, encode
from penstock.queue.attempt_outcomes import (
    AttemptCancelled,
    AttemptOutcome,
    Failed,
    GivenBack,
    Retried,
    Succeeded,
)
from penstock.queue.ledger import (
    Ledger,
    LedgerEvent,
    LedgerFailure,
    QueueTaskState,
    QueueTaskStatus,
    fresh,
)
from penstock.queue.transitions import (
    LedgerClaim,
    cancel,
    claim,
    close,
    expire,
    extend,
    history,
    next_due_ms,
    over,
    settle,
)
from penstock.store.time import Interval
from tests.sizes import some

LEASE_MS = 30_000
NOW = Interval(1000.0, 1000.5)
LATER = Interval(2000.0, 2000.5)
OOPS = LedgerFailure("ValueError", "oops")


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _inputs(count: int) -> list[msgspec.Raw]:
    return [_raw({"n": number}) for number in range(count)]


def _claim(name: str, *, tasks_max: int = 1000, attempts_max: int = 3) -> LedgerClaim:
    return LedgerClaim(name, f"holder of {name}", LEASE_MS, tasks_max, attempts_max)


def _claimed(count: int, name: str = "a") -> Ledger:
    ledger, taken = claim(fresh(pack_version="v", born="b", count=count), _claim(name), NOW)
    assert taken == tuple(range(count))
    return ledger


def _settled(
    ledger: Ledger, endings: Mapping[int, tuple[str, AttemptOutcome]]
) -> tuple[Ledger, set[int]]:
    after, refused = settle(ledger, endings, now=NOW, inputs=_inputs(len(ledger.tasks)))
    return after, set(refused)


def test_a_claim_takes_what_may_start_and_no_more() -> None:
    ledger, taken = claim(fresh(pack_version="v", born="b", count=5), _claim("a", tasks_max=2), NOW)
    assert taken == (0, 1)
    again, more = claim(ledger, _claim("b"), NOW)
    assert more == (2, 3, 4)
    assert [task.claim for task in again.tasks] == ["a", "a", "b", "b", "b"]
    assert {task.attempt for task in again.tasks} == {1}
    nothing, none = claim(again, _claim("c"), NOW)
    assert none == ()
    assert nothing is again


def test_a_settlement_of_the_holder_counts_and_a_zombies_does_not() -> None:
    ledger = _claimed(4, "old")
    overtaken, taken = claim(ledger, _claim("new"), LATER)
    assert taken == (0, 1)
    after, refused = _settled(
        overtaken, {0: ("old", Succeeded(_raw("zombie"))), 1: ("new", Succeeded(_raw("live")))}
    )
    assert refused == {0}
    assert after.tasks[0].status is QueueTaskStatus.CLAIMED
    assert after.tasks[1].result == _raw("live")


def test_a_neighbours_claim_costs_a_live_attempt_nothing() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=2), _claim("a", tasks_max=1), NOW)
    ledger, _ = claim(ledger, _claim("b", tasks_max=1), NOW)
    after, refused = _settled(ledger, {0: ("a", Succeeded())})
    assert not refused
    assert (after.tasks[0].status, after.tasks[1].status) == (
        QueueTaskStatus.SUCCEEDED,
        QueueTaskStatus.CLAIMED,
    )


def test_an_ending_counts_after_its_lease_if_nobody_noticed() -> None:
    ledger = _claimed(1)
    after, refused = settle(ledger, {0: ("a", Succeeded())}, now=LATER, inputs=_inputs(1))
    assert not refused
    assert after.settled


def test_a_heartbeat_of_one_never_hides_the_death_of_another() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=2), _claim("dead", tasks_max=1), NOW)
    ledger, _ = claim(ledger, _claim("live", tasks_max=1), NOW)
    after, held = extend(ledger, ["live"], lease_ms=LEASE_MS, now=LATER)
    assert held == {"live"}
    assert [task.status for task in after.tasks] == [QueueTaskStatus.READY, QueueTaskStatus.CLAIMED]
    assert next_due_ms(after) == 0


def test_a_late_heartbeat_is_good_until_somebody_else_has_claimed() -> None:
    ledger = _claimed(1)
    late, held = extend(ledger, ["a"], lease_ms=LEASE_MS, now=LATER)
    assert held == {"a"}
    assert late.tasks[0].status is QueueTaskStatus.CLAIMED
    overtaken, _ = claim(ledger, _claim("b"), LATER)
    _, held = extend(overtaken, ["a"], lease_ms=LEASE_MS, now=LATER)
    assert held == frozenset()


def test_a_lease_is_over_only_when_the_earliest_time_is_past_it() -> None:
    ledger = _claimed(1)
    end = ledger.leases["a"].expires_ms / 1000
    assert expire(ledger, Interval(end - 0.001, end + 60)) is ledger
    assert expire(ledger, Interval(end, end)).tasks[0].status is QueueTaskStatus.READY


def test_retries_wait_and_come_back_with_the_next_attempt() -> None:
    due = 1_500_000
    ledger, _ = _settled(_claimed(1), {0: ("a", Retried(OOPS, due))})
    assert ledger.tasks[0].status is QueueTaskStatus.RETRYING
    assert next_due_ms(ledger) == due
    assert claim(ledger, _claim("b"), NOW)[1] == ()
    again, taken = claim(ledger, _claim("b"), LATER)
    assert taken == (0,)
    assert again.tasks[0].attempt == 2


def test_attempts_are_used_up_by_lost_workers_too() -> None:
    ledger = fresh(pack_version="v", born="b", count=1)
    for number in range(3):
        moment = Interval(1000.0 * (number + 1), 1000.0 * (number + 1))
        wanted = replace(_claim(f"c{number}", attempts_max=3), exclusive=number == 2)
        ledger, taken = claim(ledger, wanted, moment)
        assert taken == (0,)
    end = Interval(9000.0, 9000.0)
    ledger, taken = claim(ledger, _claim("d", attempts_max=3), end)
    assert taken == ()
    assert over(ledger, attempts_max=3) == (0,)
    closed = close(ledger, attempts_max=3, who="d", now=end, inputs=_inputs(1))
    assert closed.tasks[0].status is QueueTaskStatus.FAILED
    assert closed.tasks[0].failure is not None
    assert closed.inputs == tuple(_inputs(1))


def test_what_is_given_back_does_not_count_towards_the_limit() -> None:
    ledger = fresh(pack_version="v", born="b", count=1)
    for number in range(10):
        ledger, taken = claim(ledger, _claim(f"c{number}", attempts_max=1), NOW)
        assert taken == (0,)
        ledger, _ = _settled(ledger, {0: (f"c{number}", GivenBack())})
    assert ledger.tasks[0] == QueueTaskState(attempt=10, given_back=10)


def test_cancelling_settles_what_waits_and_asks_what_runs() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=3), _claim("a", tasks_max=2), NOW)
    ledger, _ = _settled(ledger, {1: ("a", Retried(OOPS, 5_000_000))})
    after = cancel(ledger, [0, 1, 2], who="user", now=NOW, inputs=_inputs(3))
    assert [task.status for task in after.tasks] == [
        QueueTaskStatus.CLAIMED,
        QueueTaskStatus.CANCELLED,
        QueueTaskStatus.CANCELLED,
    ]
    assert after.tasks[0].cancel
    assert cancel(after, [0, 1, 2], who="user", now=NOW, inputs=_inputs(3)) is after


def test_a_running_task_that_was_cancelled_ends_cancelled_unless_it_ends_by_itself() -> None:
    asked = cancel(_claimed(1), [0], who="user", now=NOW, inputs=_inputs(1))
    ends: list[tuple[AttemptOutcome, QueueTaskStatus]] = [
        (AttemptCancelled(), QueueTaskStatus.CANCELLED),
        (Retried(OOPS, 0), QueueTaskStatus.CANCELLED),
        (GivenBack(), QueueTaskStatus.CANCELLED),
        (Failed(OOPS), QueueTaskStatus.FAILED),
        (Succeeded(), QueueTaskStatus.SUCCEEDED),
    ]
    for ending, status in ends:
        assert _settled(asked, {0: ("a", ending)})[0].tasks[0].status is status
    lost = expire(asked, LATER)
    assert claim(lost, _claim("b"), LATER)[1] == ()
    closed = close(lost, attempts_max=3, who="b", now=LATER, inputs=_inputs(1))
    assert closed.tasks[0].status is QueueTaskStatus.CANCELLED


def test_the_write_that_settles_the_last_task_holds_the_whole_record() -> None:
    ledger = _claimed(2)
    half, _ = _settled(ledger, {0: ("a", Succeeded())})
    assert half.inputs == ()
    whole, _ = _settled(half, {1: ("a", Failed(OOPS))})
    assert whole.settled
    assert whole.inputs == tuple(_inputs(2))
    assert whole.leases == {}
    assert next_due_ms(whole) is None


def test_the_log_tells_each_task_its_history_and_stays_short() -> None:
    ledger = _claimed(1000)
    ledger, _ = _settled(ledger, {n: ("a", Succeeded()) for n in range(1000) if n != 500})
    ledger, _ = _settled(ledger, {500: ("a", Retried(OOPS, 0))})
    assert len(ledger.log) == 3
    told = [(line.what, line.attempt) for line in history(ledger, 500)]
    assert told == [(LedgerEvent.CLAIMED, 1), (LedgerEvent.RETRYING, 1)]
    assert [line.what for line in history(ledger, 0)] == [
        LedgerEvent.CLAIMED,
        LedgerEvent.SUCCEEDED,
    ]


def test_a_ledger_survives_the_wire() -> None:
    ledger, _ = _settled(_claimed(3), {1: ("a", Failed(OOPS)), 2: ("a", Succeeded(_raw([1])))})
    stamped = ledger.stamped(writer="w", write="1")
    assert decode(Ledger, encode(stamped), where="ledger") == stamped


class LedgerMachine(RuleBasedStateMachine):
    """Claims, heartbeats, endings, cancellations and time, in any order, by living and dead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.ledger = fresh(pack_version="v", born="b", count=1)
        self.before = self.ledger
        self.claims: list[str] = []
        self.holds: dict[tuple[int, int], str] = {}

    @initialize(count=st.integers(1, 6))
    def begin(self, count: int) -> None:
        self.ledger = self.before = fresh(pack_version="v", born="b", count=count)

    def _moment(self, width: float) -> Interval:
        return Interval(self.now, self.now + width)

    @rule(seconds=st.floats(0, 50))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(tasks_max=st.integers(1, 6), width=st.floats(0, 2))
    def somebody_claims(self, tasks_max: int, width: float) -> None:
        name = f"c{len(self.claims)}"
        self.claims.append(name)
        moment = self._moment(width)
        before = expire(self.ledger, moment)
        self.ledger, taken = claim(self.ledger, _claim(name, tasks_max=tasks_max), moment)
        assert len(taken) <= tasks_max
        for place in taken:
            task = self.ledger.tasks[place]
            assert before.tasks[place].status in (QueueTaskStatus.READY, QueueTaskStatus.RETRYING)
            assert (place, task.attempt) not in self.holds, "an attempt was given twice"
            self.holds[place, task.attempt] = name

    @rule(data=st.data(), width=st.floats(0, 2))
    def somebody_beats(self, data: st.DataObject, width: float) -> None:
        names = data.draw(st.lists(st.sampled_from(self.claims), max_size=3)) if self.claims else []
        self.ledger, held = extend(self.ledger, names, lease_ms=LEASE_MS, now=self._moment(width))
        for name in held:
            assert name in self.ledger.leases

    @rule(data=st.data())
    def somebody_ends(self, data: st.DataObject) -> None:
        if not self.claims:
            return
        places = data.draw(st.sets(st.integers(0, len(self.ledger.tasks) - 1), min_size=1))
        endings: list[AttemptOutcome] = [Succeeded(), Failed(OOPS), GivenBack(), AttemptCancelled()]
        endings.append(Retried(OOPS, int(self.now * 1000)))
        ending = data.draw(st.sampled_from(endings))
        name = data.draw(st.sampled_from(self.claims))
        before = self.ledger
        after, refused = settle(
            before,
            dict.fromkeys(places, (name, ending)),
            now=self._moment(0),
            inputs=_inputs(len(before.tasks)),
        )
        for place in places:
            task = before.tasks[place]
            ours = task.claim == name
            assert (place in refused) is not ours
        self.ledger = after

    @rule(data=st.data())
    def somebody_cancels(self, data: st.DataObject) -> None:
        places = data.draw(st.sets(st.integers(0, len(self.ledger.tasks) - 1)))
        self.ledger = cancel(
            self.ledger,
            places,
            who="user",
            now=self._moment(0),
            inputs=_inputs(len(self.ledger.tasks)),
        )

    @rule()
    def somebody_closes(self) -> None:
        self.ledger = close(
            self.ledger,
            attempts_max=3,
            who="w",
            now=self._moment(0),
            inputs=_inputs(len(self.ledger.tasks)),
        )

    @invariant()
    def holds_what_it_promises(self) -> None:
        for old, new in zip(self.before.tasks, self.ledger.tasks, strict=False):
            assert new.attempt >= old.attempt
            if old.status.settled:
                assert new == old
        for task in self.ledger.tasks:
            if task.status is QueueTaskStatus.CLAIMED:
                assert task.claim in self.ledger.leases
            elif not task.status.settled:
                assert task.claim == ""
            assert task.attempt - task.given_back <= 3
        held = {task.claim for task in self.ledger.tasks if task.status is QueueTaskStatus.CLAIMED}
        assert set(self.ledger.leases) == held
        assert bool(self.ledger.inputs) == self.ledger.settled
        self._nothing_is_stuck()
        assert (next_due_ms(self.ledger) is None) == self.ledger.settled
        self.before = self.ledger

    def _nothing_is_stuck(self) -> None:
        """Given time, whatever is not settled can be claimed, or closed as over."""
        end = Interval(self.now + 1_000_000, self.now + 1_000_000)
        ledger, taken = claim(self.ledger, _claim("last 0"), end)
        every = set(taken)
        while taken:  # Suspects are claimed by one after the other.
            ledger, taken = claim(ledger, _claim(f"last {len(every)}"), end)
            every |= set(taken)
        for place in range(len(ledger.tasks)):  # And those that run with nothing beside them.
            alone = replace(_claim(f"alone {place}"), exclusive=True)
            ledger, taken = claim(ledger, alone, end)
            every |= set(taken)
        ended = close(ledger, attempts_max=3, who="w", now=end, inputs=_inputs(len(ledger.tasks)))
        for place, task in enumerate(ended.tasks):
            assert task.status.settled or place in every, task


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=some(150), stateful_step_count=30, deadline=None)
