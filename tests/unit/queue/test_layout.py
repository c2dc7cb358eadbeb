"""Keys and ids can be read back, say what they must, and refuse what is not theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.ids import SLOTS, PackAt, delayed, keyed_pack, new_pack, task_at
from penstock.queue.layout import InboxAt, PointerAt, QueueLayout
from penstock.store.base import check_key

LAYOUT = QueueLayout("images")
NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", fullmatch=True).filter(
    lambda name: not name.endswith(".ledger")
)
MOMENTS = st.integers(1_600_000_000_000, 4_000_000_000_000)


@st.composite
def packs(draw: st.DrawFn) -> PackAt:
    entropy = seeded_entropy(draw(st.integers()))
    name = draw(NAMES)
    moment = draw(MOMENTS)
    count = draw(st.integers(1, 1000))
    match draw(st.sampled_from(["now", "later", "keyed"])):
        case "now":
            return new_pack(type=name, count=count, submitted_ms=moment, entropy=entropy)
        case "later":
            return delayed(
                new_pack(type=name, count=count, submitted_ms=moment, entropy=entropy),
                due_ms=moment + draw(st.integers(0, 10**10)),
            )
    return keyed_pack(type=name, key=draw(st.text(min_size=1, max_size=50)))


@given(packs(), st.data())
def test_keys_and_ids_are_read_back(at: PackAt, data: st.DataObject) -> None:
    assert LAYOUT.read(check_key(LAYOUT.pack(at))) == (at, False)
    assert LAYOUT.read(check_key(LAYOUT.ledger(at))) == (at, True)
    index = data.draw(st.integers(0, at.count - 1))
    assert task_at(at.task(index)) == (at, index)


@given(packs())
def test_a_pack_and_its_ledger_are_neighbours_in_a_list(at: PackAt) -> None:
    assert LAYOUT.ledger(at).startswith(LAYOUT.pack(at))
    assert 0 <= at.slot < SLOTS


@given(MOMENTS, MOMENTS, st.integers())
def test_names_sort_by_age(one: int, other: int, seed: int) -> None:
    entropy = seeded_entropy(seed)
    first = new_pack(type="t", count=1, submitted_ms=one, entropy=entropy)
    second = new_pack(type="t", count=1, submitted_ms=other, entropy=entropy)
    assert first.submitted_ms == one
    if one < other:
        assert first.pack < second.pack


def test_a_key_always_leads_to_the_same_pack() -> None:
    assert keyed_pack(type="t", key="k") == keyed_pack(type="t", key="k")
    assert keyed_pack(type="t", key="k") != keyed_pack(type="t", key="l")
    assert keyed_pack(type="t", key="k").submitted_ms is None
    slots = {keyed_pack(type="t", key=str(number)).slot for number in range(1000)}
    assert len(slots) > 800


@pytest.mark.parametrize(
    "key",
    [
        "queues/other/tasks/000/x",
        "queues/images/tasks/000/readme.txt",
        "queues/images/tasks/xyz/" + "0" * 24 + "~1~t",
        "queues/images/tasks/000/" + "0" * 24 + "~0~t",
        "queues/images/tasks/000/" + "0" * 24 + "~1001~t",
        "queues/images/tasks/000/" + "i" * 24 + "~1~t",
        "queues/images/tasks/000/" + "0" * 24 + "~1~.t",
        "queues/images/ready/soon/000/" + "0" * 24 + "~1~t",
        "queues/images/config.json",
    ],
)
def test_a_key_that_is_not_a_packs_is_told_apart(key: str) -> None:
    assert LAYOUT.read(key) is None


@pytest.mark.parametrize(
    "task", ["", "resize", "now.000.short.1.0.t", "now.000." + "0" * 24 + ".1.1.t"]
)
def test_a_wrong_id_is_refused(task: str) -> None:
    with pytest.raises(InvalidInput, match="is not the id of a task"):
        task_at(task)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "ä", "x" * 101, "x.ledger"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not the name of a queue"):
        QueueLayout(name)
    with pytest.raises(InvalidInput, match="is not the name of a type"):
        keyed_pack(type=name, key="k")


@given(at=packs(), minute=st.integers(20_000_000, 99_999_999), priority=st.integers(-9, 9))
def test_the_entry_of_an_inbox_tells_its_pack_and_nothing_else_is_one(
    at: PackAt, minute: int, priority: int
) -> None:
    is_keyed = at.submitted_ms is None
    to = PointerAt(
        at,
        "0123456789abcde",
        priority if is_keyed else at.priority,
        "api" if is_keyed else at.limit,
    )
    key = LAYOUT.inbox_entry("worker-1", to, minute=minute)
    assert LAYOUT.read_inbox_entry(check_key(key)) == InboxAt("worker-1", minute, to)
    assert LAYOUT.read(key) is None
    assert LAYOUT.read_pointer(key) is None
    for other in (key + "/x", key.replace("inbox/", "ready/"), key.replace("@", "/", 1)):
        assert LAYOUT.read_inbox_entry(other) is None


@pytest.mark.parametrize("limit", ["x.ledger", ".ledger"])
def test_what_points_to_a_limit_that_cannot_be_is_not_ours(limit: str) -> None:
    at = keyed_pack(type="t", key="k")
    pointer = LAYOUT.pointer(at, due_ms=1_800_000_000_000, nonce="0123456789abcde", limit="LIMIT")
    assert LAYOUT.read_pointer(pointer.replace("LIMIT", "x.ledge")) is not None
    assert LAYOUT.read_pointer(pointer.replace("LIMIT", limit)) is None
    to = PointerAt(at, "0123456789abcde", limit="LIMIT")
    entry = LAYOUT.inbox_entry("worker-1", to, minute=30_000_000)
    assert LAYOUT.read_inbox_entry(entry.replace("LIMIT", "x.ledge")) is not None
    assert LAYOUT.read_inbox_entry(entry.replace("LIMIT", limit)) is None


def test_the_documents_of_inboxes_are_nobodys_inbox() -> None:
    assert LAYOUT.read_inbox_lease(LAYOUT.inbox_lease("a.b")) == "a.b"
    assert LAYOUT.read_inbox_lease(LAYOUT.inbox_cursor("a")) is None
    assert LAYOUT.inbox_of(LAYOUT.inbox("a")) == "a"
    assert LAYOUT.inbox_of(LAYOUT.inbox_leases) is None
    with pytest.raises(InvalidInput):
        LAYOUT.inbox_lease("@leases")
