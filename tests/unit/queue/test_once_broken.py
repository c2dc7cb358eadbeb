"""Stories in which the core of the queue once did not keep its promises; it must never again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    InvalidInput,
    NewerFormat,
    OutcomeUnknown,
    PenstockError,
    Unavailable,
)
from penstock.queue.attempt_outcomes import AttemptOutcome, Failed, GivenBack, Retried, Succeeded
from penstock.queue.canceller import CancelSession
from penstock.queue.ids import delayed, keyed_pack, new_pack, task_at
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, LedgerFailure, QueueTaskState, QueueTaskStatus, fresh
from penstock.queue.pack import Pack
from penstock.queue.pack_session import ListedPack
from penstock.queue.transitions import LedgerClaim, claim, close, next_due_ms, over, settle
from penstock.store.base import (
    CREATE,
    NO_METADATA,
    REPLACE,
    Object,
    PutMode,
    Swap,
    Version,
    Wrapper,
)
from penstock.store.time import Interval
from tests.unit.queue.test_claims import LAYOUT, WANTED, Bench

NOW = Interval(1000.0, 1000.5)
LATER = Interval(2000.0, 2000.5)
PACK = "0" * 24
OOPS = LedgerFailure("ValueError", "oops")


def _run(check: Callable[[Bench], Awaitable[None]], *, count: int = 2) -> None:
    async def main() -> None:
        await check(Bench(count=count))

    asyncio.run(main())


def _beside_ledger(seen: ListedPack) -> ListedPack:
    return dataclasses.replace(seen, has_ledger=True)


def _wanted(name: str, *, tasks_max: int = 1000, attempts_max: int = 3) -> LedgerClaim:
    return LedgerClaim(name, f"holder of {name}", 30_000, tasks_max, attempts_max)


def _inputs(count: int) -> tuple[msgspec.Raw, ...]:
    return tuple(msgspec.Raw(b"%d" % number) for number in range(count))


async def _settle_and_archive(bench: Bench, session: CancelSession, name: str) -> None:
    """Everything succeeds and, W having passed, the ledger is archived."""
    refused = await session.settle({n: (name, Succeeded()) for n in range(bench.at.count)})
    assert not refused
    assert not bench.has_pack
    await bench.store.delete(LAYOUT.ledger(bench.at))


# 1 ---------------------------------------------------------------------------------------------


def test_1_queue_1_a_claim_swapped_into_the_ghost_of_another_runs_what_has_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stale workers: one creates a ledger for the archived pack, the other swaps into it."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        first, ghost, late = bench.session(), bench.session(), bench.session()
        await first.claim(WANTED, seen)
        take = late._take

        async def archived_then_haunted(wanted: LedgerClaim, version: Version) -> Ledger | None:
            await _settle_and_archive(bench, first, "claim")
            assert await ghost._take(_wanted("ghost", tasks_max=1), version) is not None
            return await take(wanted, version)

        monkeypatch.setattr(late, "_take", archived_then_haunted)
        assert await late.claim(_wanted("late"), _beside_ledger(seen)) is None

    _run(check)


def test_1_queue_1_a_second_claim_of_one_hand_into_a_ghost_runs_what_has_settled() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        slept, other, ghost = bench.session(), bench.session(), bench.session()
        await slept.claim(LedgerClaim("slept", "s", -1000, 1, 9), seen)
        await other.claim(_wanted("other"), _beside_ledger(seen))
        await _settle_and_archive(bench, other, "other")
        await ghost._take(_wanted("ghost", tasks_max=1), seen.version)
        assert await slept.claim(_wanted("again"), seen) is None

    _run(check, count=1)


def test_1_queue_5_a_cancel_does_not_settle_the_ghost_of_what_has_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its swap lands in a ledger that the pack it read does not belong to."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        first, ghost, user = bench.session(), bench.session(), bench.session()
        await first.claim(WANTED, seen)
        check_pack = user._check

        async def read_then_archived(ledger: Ledger) -> object:
            monkeypatch.undo()
            found = await check_pack(ledger)
            await _settle_and_archive(bench, first, "claim")
            await ghost._take(_wanted("ghost", tasks_max=1), seen.version)
            return found

        monkeypatch.setattr(user, "_check", read_then_archived)
        try:
            ledger = await user.cancel(frozenset({1}), _wanted("user"))
        except PenstockError:
            return
        assert ledger.tasks[1].status is not QueueTaskStatus.CANCELLED

    _run(check)


# 2 ---------------------------------------------------------------------------------------------


def test_2_a_retry_that_is_used_up_is_settled_by_somebody() -> None:
    """The worker that asked for the retry allowed more attempts than the one that finds it."""
    ledger, _ = claim(fresh(pack_version="v", born="b", count=1), _wanted("a", attempts_max=5), NOW)
    ledger, _ = settle(ledger, {0: ("a", Retried(OOPS, 0))}, now=NOW, inputs=_inputs(1))
    _, taken = claim(ledger, _wanted("b", attempts_max=1), LATER)
    assert taken or over(ledger, attempts_max=1), "never claimed again and never settled"


def test_2_a_retry_that_is_used_up_does_not_keep_its_pack_for_ever() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        session = bench.session()
        await session.claim(_wanted("a", attempts_max=1), seen)
        await session.settle({0: ("a", Retried(OOPS, 0))})
        for look in range(5):
            await bench.session().claim(_wanted(f"{look}", attempts_max=1), _beside_ledger(seen))
        assert bench.ledger is not None
        assert bench.ledger.settled

    _run(check, count=1)


# 3 ---------------------------------------------------------------------------------------------


def test_3_an_id_that_lies_does_not_delete_a_live_ledger() -> None:
    """The id of a type that ends in `.ledger`: the ledger is taken for a void pack."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        await bench.session().claim(WANTED, seen)
        key = LAYOUT.ledger(bench.at)
        stored = bench.bucket.objects[key]
        # A heartbeat, ten minutes after the submit.
        bench.bucket.objects[key] = dataclasses.replace(stored, modified=stored.modified + 600)
        with suppress(PenstockError):
            at, place = task_at(bench.at.task(0) + ".ledger")
            lying = CancelSession(bench.store, LAYOUT, at, entropy=bench.entropy)
            await lying.cancel(frozenset({place}), _wanted("user"))
        assert bench.ledger is not None, "the live ledger was deleted"

    _run(check)


def test_3_a_ledger_has_no_ledger() -> None:
    key = f"queues/q/tasks/000/{PACK}~1~t.ledger.ledger"
    assert QueueLayout("q").read(key) is None


# 4 ---------------------------------------------------------------------------------------------


class Deaf(Wrapper):
    """A store that fails as it is told."""

    fails_deletes = False
    loses_puts = False

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        if self.fails_deletes:
            raise Unavailable("The store is away.", key=key)
        await super().delete(key, version=version)

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        version = await self.inner.put(key, body, mode, metadata=metadata)
        if self.loses_puts and isinstance(mode, Swap):
            raise OutcomeUnknown("The answer was lost.", key=key)
        return version

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        if self.loses_puts:
            raise Unavailable("The store is away.", key=key)
        return await super().get(key, unless=unless)


def test_4_what_was_settled_is_reported_although_the_pack_could_not_be_deleted() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        store = Deaf(bench.store)
        session = CancelSession(store, LAYOUT, bench.at, entropy=bench.entropy)
        await session.claim(WANTED, seen)
        store.fails_deletes = True
        try:
            refused = await session.settle({n: ("claim", Succeeded()) for n in range(2)})
        except Unavailable:
            assert bench.ledger is not None
            assert not bench.ledger.settled, "it took effect, and its sender was told it had not"
        else:
            assert not refused

    _run(check)


def test_4_a_settlement_of_unknown_outcome_that_is_sent_again_is_not_refused() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        store = Deaf(bench.store)
        session = CancelSession(store, LAYOUT, bench.at, entropy=bench.entropy)
        await session.claim(WANTED, seen)
        store.loses_puts = True
        with pytest.raises(OutcomeUnknown):
            await session.settle({0: ("claim", Succeeded())})
        store.loses_puts = False
        refused = await session.settle({0: ("claim", Succeeded())})
        assert bench.ledger is not None
        assert bench.ledger.tasks[0].status is QueueTaskStatus.SUCCEEDED
        assert not refused, "our own settlement stands and we are told that it was refused"

    _run(check)


# 5 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result", [b"NaN", b"", b"{oops", b"1,2", b'"\x01"', b"[" * 985 + b"]" * 985]
)
def test_5_a_result_that_is_no_json_never_makes_the_ledger_unreadable(result: bytes) -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=2), _wanted("a"), NOW)
    ending = Succeeded(msgspec.Raw(result))
    after, _ = settle(ledger, {0: ("a", ending)}, now=NOW, inputs=_inputs(2))
    read = decode(Ledger, encode(after), where="the ledger of a thousand others")
    assert read.tasks[0].status is QueueTaskStatus.FAILED
    assert read.tasks[1].status is QueueTaskStatus.CLAIMED


def test_5_a_failure_in_odd_letters_does_not_cost_its_neighbours_their_results() -> None:
    """The message of an exception about a file name that is not UTF-8."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        session = bench.session()
        await session.claim(WANTED, seen)
        odd = LedgerFailure("FileNotFoundError", b"caf\xe9.csv".decode(errors="surrogateescape"))
        endings: dict[int, tuple[str, AttemptOutcome]] = {
            0: ("claim", Succeeded()),
            1: ("claim", Failed(odd)),
        }
        assert await session.settle(endings) == frozenset()

    _run(check)


# 6 ---------------------------------------------------------------------------------------------


def test_6_cancelling_one_task_takes_no_attempt_from_its_neighbours() -> None:
    async def check(bench: Bench) -> None:
        await bench.submit()
        ledger = await bench.session().cancel(frozenset({1}), _wanted("user"))
        assert ledger.tasks[1].status is QueueTaskStatus.CANCELLED
        assert ledger.tasks[0] == QueueTaskState(), "claimed by the user, for a whole lease"

    _run(check)


def test_6_a_pack_of_a_newer_release_costs_no_attempt() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        body = bench.bucket.objects[LAYOUT.pack(bench.at)].body.replace(b"pack/1", b"pack/2")
        version = await bench.store.put(LAYOUT.pack(bench.at), body, REPLACE)
        with pytest.raises(NewerFormat):
            await bench.session().claim(WANTED, dataclasses.replace(seen, version=version))
        ledger = bench.ledger
        assert ledger is None or all(t.attempt == t.given_back for t in ledger.tasks)

    _run(check)


# 7 ---------------------------------------------------------------------------------------------


def test_7_a_zombie_does_not_write_to_the_record_of_what_has_settled() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=1), _wanted("a"), NOW)
    record, _ = settle(ledger, {0: ("a", Succeeded())}, now=NOW, inputs=_inputs(1))
    others = (msgspec.Raw(b'"of another pack"'),)
    after, refused = settle(record, {0: ("zombie", Succeeded())}, now=LATER, inputs=others)
    assert refused == {0}
    assert after is record


# 8 ---------------------------------------------------------------------------------------------


def test_8_a_lease_that_an_operator_removed_is_over() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=1), _wanted("a"), NOW)
    broken = msgspec.structs.replace(ledger, leases={})
    assert next_due_ms(broken) is not None
    assert claim(broken, _wanted("b"), LATER)[1] == (0,)


def test_8_an_ending_without_a_lease_is_accepted_or_refused() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=1), _wanted("a"), NOW)
    broken = msgspec.structs.replace(ledger, leases={})
    after, refused = settle(broken, {0: ("a", Succeeded())}, now=NOW, inputs=_inputs(1))
    assert not refused
    assert after.settled


# 9 ---------------------------------------------------------------------------------------------


def test_9_a_read_is_not_told_that_there_is_nothing_because_another_claims() -> None:
    """`Cell.assume_absent` comes in between a conditional read and its answer "unchanged"."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        session = bench.session()
        await session.claim(_wanted("a", tasks_max=1), seen)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(session._ledger.read())
            await bench.store.clock.machine.sleep(0)
            session._ledger.assume_absent()
        assert reading.result() is not None

    _run(check)


def test_9_a_hand_whose_second_claim_found_nothing_is_refused_and_does_not_break() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        slept, other = bench.session(), bench.session()
        await slept.claim(LedgerClaim("slept", "s", -1000, 1, 9), seen)
        await other.claim(_wanted("other"), _beside_ledger(seen))
        await _settle_and_archive(bench, other, "other")
        assert await slept.claim(_wanted("again"), seen) is None
        assert await slept.settle({0: ("slept", Succeeded())}) == {0}

    _run(check, count=1)


# 10 --------------------------------------------------------------------------------------------


def test_10_cancelling_beside_a_void_ledger_cancels_the_pack_that_is_there() -> None:
    async def check(bench: Bench) -> None:
        await bench.submit()
        old = fresh(pack_version="another", born="b", count=2)
        await bench.store.put(LAYOUT.ledger(bench.at), encode(old), CREATE)
        ledger = await bench.session().cancel(frozenset({0, 1}), _wanted("user"))
        assert ledger.settled

    _run(check)


def test_10_whoever_cancels_what_has_settled_deletes_the_pack_too() -> None:
    """QUEUE-3: whoever sees a settled ledger beside its pack."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        body = bench.bucket.objects[LAYOUT.pack(bench.at)].body
        session = bench.session()
        await session.claim(WANTED, seen)
        await session.settle({n: ("claim", Succeeded()) for n in range(2)})
        await bench.store.put(LAYOUT.pack(bench.at), body, CREATE)
        await bench.session().cancel(frozenset({0}), _wanted("user"))
        assert not bench.has_pack

    _run(check)


# 11 --------------------------------------------------------------------------------------------


def test_11_a_ledger_that_vanishes_does_not_take_its_pack_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the look and the closing of what is used up; its other tasks have never run."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        await bench.session().claim(LedgerClaim("a", "me", -1000, 1, 1), seen)
        session = bench.session()
        check_pack = session._check

        async def vanished(ledger: Ledger) -> object:
            found = await check_pack(ledger)
            await bench.store.delete(LAYOUT.ledger(bench.at))
            return found

        monkeypatch.setattr(session, "_check", vanished)
        await session.claim(_wanted("b", attempts_max=1), _beside_ledger(seen))
        assert bench.has_pack, "a task that never ran is lost"

    _run(check)


def test_11_what_is_used_up_is_closed_by_the_write_that_expires_it() -> None:
    wanted = replace(_wanted("a", attempts_max=1), exclusive=True)
    once = msgspec.structs.replace(
        fresh(pack_version="v", born="b", count=1), tasks=(QueueTaskState(window_max=1),)
    )
    ledger, _ = claim(once, wanted, NOW)
    after = close(ledger, attempts_max=1, who="b", now=LATER, inputs=_inputs(1))
    assert after.settled


# 12 --------------------------------------------------------------------------------------------


def test_12_who_has_less_than_no_room_takes_nothing() -> None:
    ledger = fresh(pack_version="v", born="b", count=5)
    assert claim(ledger, _wanted("a", tasks_max=-1), NOW)[1] == ()


def test_12_a_claim_that_is_sent_again_takes_no_more_than_it_may() -> None:
    """As after `OutcomeUnknown`: the first took effect."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        session = bench.session()
        await session.claim(_wanted("a", tasks_max=1), seen)
        again = await session.claim(_wanted("a", tasks_max=1), _beside_ledger(seen))
        assert again is None or len(again.attempts) <= 1

    _run(check)


def test_12_the_log_is_bounded() -> None:
    """A task that is given back does not count towards a limit, and may be for ever."""
    ledger = fresh(pack_version="v", born="b", count=1)
    for number in range(2000):
        ledger, _ = claim(ledger, _wanted(f"c{number}"), NOW)
        ledger, _ = settle(ledger, {0: (f"c{number}", GivenBack())}, now=NOW, inputs=())
    assert len(ledger.log) < 2000


def test_12_a_thousand_mixed_endings_are_few_lines() -> None:
    ledger, _ = claim(fresh(pack_version="v", born="b", count=1000), _wanted("a"), NOW)
    endings: dict[int, tuple[str, AttemptOutcome]] = {
        n: ("a", Succeeded() if n % 2 else Failed(OOPS)) for n in range(1000)
    }
    ledger, _ = settle(ledger, endings, now=NOW, inputs=_inputs(1000))
    assert len(ledger.log) < 500


# 13 --------------------------------------------------------------------------------------------


def test_13_a_delayed_pack_is_not_claimed_before_it_is_due() -> None:
    async def check(bench: Bench) -> None:
        stamp = bench.at.submitted_ms or 0
        due = stamp + 3_600_000
        at = delayed(
            new_pack(type="t", count=1, submitted_ms=stamp, entropy=bench.entropy), due_ms=due
        )
        pack = Pack(type="t", nonce="n", submitted_ms=stamp, due_ms=due, inputs=_inputs(1))
        version = await bench.store.put(LAYOUT.pack(at), encode(pack), CREATE)
        session = CancelSession(bench.store, LAYOUT, at, entropy=bench.entropy)
        seen = ListedPack(version, stamp / 1000, has_ledger=False)
        assert await session.claim(WANTED, seen) is None

    _run(check)


def test_13_a_pack_that_has_fewer_inputs_than_its_name_says_is_not_claimed() -> None:
    async def check(bench: Bench) -> None:
        stamp = bench.at.submitted_ms or 0
        pack = Pack(type="other", nonce="n", submitted_ms=stamp, inputs=_inputs(1))
        version = await bench.store.put(LAYOUT.pack(bench.at), encode(pack), CREATE)
        try:
            claimed = await bench.session().claim(WANTED, ListedPack(version, stamp / 1000, False))
        except PenstockError:
            return
        assert claimed is None or len(claimed.pack.inputs) > max(claimed.attempts)

    _run(check)


# 14 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("due_ms", [-1, 0, 10**16])
def test_14_a_delayed_can_be_found_again(due_ms: int) -> None:
    layout = QueueLayout("q")
    try:
        at = delayed(
            new_pack(type="t", count=1, submitted_ms=1, entropy=seeded_entropy(1)), due_ms=due_ms
        )
    except InvalidInput:
        return
    assert layout.read(layout.pack(at)) == (at, False), "written where nobody looks"


@pytest.mark.parametrize("count", [-1, 0, 1001])
def test_14_a_pack_can_be_found_again(count: int) -> None:
    layout = QueueLayout("q")
    try:
        at = new_pack(type="t", count=count, submitted_ms=1, entropy=seeded_entropy(1))
    except InvalidInput:
        return
    assert layout.read(layout.pack(at)) == (at, False), "written where nobody looks"


@pytest.mark.parametrize("numbers", ["01.0", "1.00", "\u0661.0"])
def test_14_a_task_has_one_id(numbers: str) -> None:
    with pytest.raises(InvalidInput):
        task_at(f"now.000.{PACK}.{numbers}.t")


def test_14_a_key_that_is_not_the_packs_own_is_not_read_as_it() -> None:
    assert QueueLayout("q").read(f"queues/q/tasks/000/{PACK}~01~t") is None


def test_14_a_key_that_is_no_unicode_is_invalid() -> None:
    with pytest.raises(InvalidInput):
        keyed_pack(type="t", key="\ud800")
