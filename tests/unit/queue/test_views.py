"""What users are shown of a task, from its pack, its ledger, or both."""

from __future__ import annotations

import msgspec
import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.queue.ids import PackAt, keyed_pack, new_pack
from penstock.queue.ledger import (
    Ledger,
    LedgerEvent,
    LedgerFailure,
    LedgerLogLine,
    QueueTaskState,
    QueueTaskStatus,
)
from penstock.queue.pack import Pack
from penstock.queue.task_views import STATES, events_of, view_of_ledger, view_of_pack

MS = 1_735_689_600_000
AT = new_pack(type="resize", count=2, submitted_ms=MS, entropy=seeded_entropy(1))


def _pack(*, due_ms: int = 0, key: str | None = None) -> Pack:
    inputs = (msgspec.Raw(b'{"n":0}'), msgspec.Raw(b'{"n":1}'))
    return Pack(type="resize", nonce="n", submitted_ms=MS, due_ms=due_ms, inputs=inputs, key=key)


def _ledger(*tasks: QueueTaskState, log: tuple[LedgerLogLine, ...] = ()) -> Ledger:
    return Ledger(pack_version="v", born="b", tasks=tasks, log=log)


def test_a_task_that_nobody_has_touched() -> None:
    view = view_of_pack(AT, 1, _pack(), now=MS / 1000)
    assert (view.id, view.type, view.status) == (AT.task(1), "resize", "ready")
    assert (view.attempt, view.input, view.result) == (0, {"n": 1}, None)
    assert (view.submitted_at, view.due_at, view.settled_at) == (MS / 1000, None, None)
    assert not view.is_settled
    assert not view.cancel_asked


def test_delayed_until_it_is_due() -> None:
    pack = _pack(due_ms=MS + 5000)
    early = view_of_pack(AT, 0, pack, now=MS / 1000 + 4.9)
    assert (early.status, early.due_at) == ("delayed", MS / 1000 + 5)
    assert view_of_pack(AT, 0, pack, now=MS / 1000 + 5).status == "ready"


@pytest.mark.parametrize("status", list(QueueTaskStatus))
def test_every_status_has_a_word(status: QueueTaskStatus) -> None:
    view = view_of_ledger(
        AT, 0, _ledger(QueueTaskState(status, 1, at_ms=MS + 1), QueueTaskState()), _pack()
    )
    assert view.status in STATES
    assert view.is_settled == status.settled
    assert view.is_settled == (view.status in ("succeeded", "failed", "cancelled", "expired"))


def test_a_running_task_is_told_by_ledger_and_pack() -> None:
    state = QueueTaskState(
        QueueTaskStatus.CLAIMED, 3, claim="c", cancel=True, failure=LedgerFailure("E", "m", "t")
    )
    view = view_of_ledger(AT, 1, _ledger(QueueTaskState(), state), _pack(key="k"))
    assert (view.status, view.attempt, view.input) == ("running", 3, {"n": 1})
    assert (view.error, view.message, view.trace) == ("E", "m", "t")
    assert (view.key, view.submitted_at, view.cancel_asked) == ("k", MS / 1000, True)


def test_a_retry_says_when_it_is_due() -> None:
    state = QueueTaskState(
        QueueTaskStatus.RETRYING, 1, at_ms=MS + 9000, failure=LedgerFailure("E", "m")
    )
    view = view_of_ledger(AT, 0, _ledger(state, QueueTaskState()), _pack(due_ms=MS + 1000))
    assert (view.status, view.due_at, view.settled_at) == ("retrying", MS / 1000 + 9, None)


def test_a_settled_record_needs_no_pack() -> None:
    ledger = Ledger(
        pack_version="v",
        born="b",
        tasks=(
            QueueTaskState(
                QueueTaskStatus.SUCCEEDED, 2, at_ms=MS + 3000, result=msgspec.Raw(b"[1,2]")
            ),
            QueueTaskState(
                QueueTaskStatus.FAILED, 1, at_ms=MS + 4000, failure=LedgerFailure("E", "m", "t")
            ),
        ),
        inputs=_pack().inputs,
        submitted_ms=MS,
        due_ms=MS + 1000,
        key="k",
    )
    good, bad = (view_of_ledger(AT, place, ledger, None) for place in range(2))
    assert (good.status, good.result, good.input) == ("succeeded", [1, 2], {"n": 0})
    assert (good.settled_at, good.due_at, good.key) == (MS / 1000 + 3, MS / 1000 + 1, "k")
    assert (bad.status, bad.result, bad.error) == ("failed", None, "E")
    assert bad.submitted_at == MS / 1000


def test_a_ledger_whose_pack_is_gone_says_what_the_id_says() -> None:
    view = view_of_ledger(AT, 0, _ledger(QueueTaskState(), QueueTaskState()), None)
    assert (view.submitted_at, view.input, view.due_at) == (MS / 1000, None, None)
    keyed = keyed_pack(type="resize", key="k")
    assert view_of_ledger(keyed, 0, _ledger(QueueTaskState()), None).submitted_at == 0


def test_a_result_of_null_is_none_and_of_what_failed_too() -> None:
    ledger = _ledger(
        QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, at_ms=1),
        QueueTaskState(QueueTaskStatus.FAILED, 1, at_ms=1),
    )
    assert view_of_ledger(AT, 0, ledger, _pack()).result is None
    assert view_of_ledger(AT, 1, ledger, _pack()).result is None


def test_the_history_begins_with_the_submit_and_tells_only_of_this_task() -> None:
    log = (
        LedgerLogLine(MS + 1000, LedgerEvent.CLAIMED, (0, 1), 1, "w"),
        LedgerLogLine(MS + 2000, LedgerEvent.RETRYING, (0, 0), 1, "w", "OSError"),
        LedgerLogLine(MS + 3000, LedgerEvent.SUCCEEDED, (1, 1), 1, "w"),
    )
    ledger = _ledger(QueueTaskState(), QueueTaskState(), log=log)
    view = view_of_ledger(AT, 0, ledger, _pack(key="k"))
    first, *others = events_of(view, ledger, 0)
    assert (first.at, first.what, first.attempt, first.note) == (MS / 1000, "submitted", 0, "key k")
    assert [(event.at, event.what, event.who, event.note) for event in others] == [
        (MS / 1000 + 1, "claimed", "w", ""),
        (MS / 1000 + 2, "retrying", "w", "OSError"),
    ]
    assert [event.what for event in events_of(view, ledger, 1)][-1] == "succeeded"


def test_the_history_of_what_nobody_has_touched() -> None:
    at: PackAt = AT
    (event,) = events_of(view_of_pack(at, 0, _pack(), now=0.0), None, 0)
    assert (event.what, event.note) == ("submitted", "")
