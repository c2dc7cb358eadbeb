"""What a worker remembers of packs, when it tries them again, and what it forgets."""

from __future__ import annotations

import pytest

from penstock.queue.discovery.scanner import PackCandidate, PointerCandidate
from penstock.queue.execution import pack_memory as module
from penstock.queue.execution.pack_memory import PackMemory
from penstock.queue.ids import PackAt, PackId
from penstock.queue.pack_session import ListedPack
from penstock.store.base import Version

OLD, NEW = Version("old"), Version("new")


def _sight(number: int = 0, *, ledger: Version | None = OLD) -> PackCandidate:
    at = PackAt("now", number, PackId(f"{number:024d}"), 1, "t")
    return PackCandidate(
        at, ListedPack(Version("pack"), 0.0, has_ledger=ledger is not None), ledger
    )


def _pointed(key: str = "key") -> PackCandidate:
    return PackCandidate(_sight().at, None, pointer=PointerCandidate(key, "nonce", 0.0))


def test_what_is_not_remembered_is_worth_a_try() -> None:
    memory = PackMemory()
    assert not memory.is_known_idle(_sight(), 0)
    assert memory.due(10**15) == []
    assert memory.next_due_ms() is None


def test_a_pack_is_idle_until_its_time_comes() -> None:
    memory = PackMemory()
    memory.note(_sight(), ledger=OLD, due_ms=1000)
    assert memory.is_known_idle(_sight(), 999)
    assert not memory.is_known_idle(_sight(), 1000)
    assert not memory.is_known_idle(_sight(1), 999)


def test_a_ledger_that_has_changed_is_read_again() -> None:
    memory = PackMemory()
    memory.note(_sight(), ledger=OLD, due_ms=1000)
    assert not memory.is_known_idle(_sight(ledger=NEW), 0)
    assert not memory.is_known_idle(_sight(ledger=None), 0)
    memory.note(_sight(ledger=None), ledger=None, due_ms=1000)
    assert memory.is_known_idle(_sight(ledger=None), 0)
    assert not memory.is_known_idle(_sight(ledger=OLD), 0)


def test_a_ledger_that_changes_often_is_not_read_as_often() -> None:
    memory = PackMemory()
    memory.note(_sight(), ledger=OLD, due_ms=9000, noted_ms=1000)
    assert memory.is_known_idle(_sight(ledger=NEW), 2999, reread_ms=2000)
    assert not memory.is_known_idle(_sight(ledger=NEW), 3000, reread_ms=2000)
    assert memory.is_known_idle(_sight(ledger=OLD), 3000, reread_ms=2000)
    # What has been read from it counts sooner than that.
    assert not memory.is_known_idle(_sight(ledger=OLD), 9000, reread_ms=20_000)


def test_the_next_time_is_never_told_too_late() -> None:
    memory = PackMemory()
    memory.note(_sight(0), ledger=OLD, due_ms=5000)
    memory.note(_sight(1), ledger=OLD, due_ms=3000)
    memory.forget(_sight(1))
    memory.note(_sight(2), ledger=OLD, due_ms=4000)
    assert (memory.next_due_ms() or 0) <= 4000
    assert memory.due(3500) == []
    assert memory.next_due_ms() == 4000
    assert len(memory.due(4000)) == 1
    assert memory.next_due_ms() == 5000


def test_a_pointer_tells_nothing_of_the_ledger() -> None:
    memory = PackMemory()
    memory.note(_pointed(), ledger=OLD, due_ms=1000)
    assert memory.is_known_idle(_pointed(), 999)
    assert not memory.is_known_idle(_pointed(), 1000)


def test_another_pointer_to_the_same_place_is_news() -> None:
    memory = PackMemory()
    memory.note(_pointed("one"), ledger=None, due_ms=1000)
    assert not memory.is_known_idle(_pointed("two"), 0)
    memory.note(_pointed("two"), ledger=None, due_ms=2000)
    assert memory.is_known_idle(_pointed("one"), 999)
    memory.forget(_pointed("one"))
    assert memory.is_known_idle(_pointed("two"), 1999)
    assert memory.due(2000) == [_pointed("two")]


def test_what_is_due_is_given_once() -> None:
    memory = PackMemory()
    for number, due_ms in enumerate((3000, 1000, 2000)):
        memory.note(_sight(number), ledger=OLD, due_ms=due_ms)
    assert memory.next_due_ms() == 1000
    assert [sight.at.slot for sight in memory.due(2000)] == [1, 2]
    assert memory.due(2000) == []
    assert memory.next_due_ms() == 3000
    assert not memory.is_known_idle(_sight(1), 0)


def test_what_others_may_have_taken_waits_for_a_list() -> None:
    memory = PackMemory()
    memory.note(_sight(), ledger=OLD, due_ms=1000, blind=False)
    assert memory.is_known_idle(_sight(), 999)
    assert memory.due(1000) == []
    assert not memory.is_known_idle(_sight(), 0)


def test_the_last_note_counts() -> None:
    memory = PackMemory()
    memory.note(_sight(), ledger=OLD, due_ms=1000)
    memory.note(_sight(), ledger=NEW, due_ms=500)
    assert memory.next_due_ms() == 500
    assert memory.is_known_idle(_sight(ledger=NEW), 0)
    assert not memory.is_known_idle(_sight(ledger=OLD), 0)
    assert len(memory.due(1000)) == 1


def test_to_forget_is_harmless() -> None:
    memory = PackMemory()
    memory.note(_sight(), ledger=OLD, due_ms=1000)
    memory.forget(_sight())
    memory.forget(_sight())
    assert not memory.is_known_idle(_sight(), 0)
    assert memory.next_due_ms() is None


def test_the_oldest_notes_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKS_MAX", 3)
    memory = PackMemory()
    for number in range(3):
        memory.note(_sight(number), ledger=OLD, due_ms=1000)
    memory.note(_sight(0), ledger=OLD, due_ms=2000)
    memory.note(_sight(3), ledger=OLD, due_ms=1000)
    kept = [number for number in range(4) if memory.is_known_idle(_sight(number), 0)]
    assert kept == [0, 2, 3]
