"""The order of reads, writes and deletes around a claim: QUEUE-1 to -5, QUEUE-7, one by one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import NotFound
from penstock.queue.attempt_outcomes import Succeeded
from penstock.queue.canceller import CancelSession
from penstock.queue.ids import PackAt, new_pack
from penstock.queue.layout import QueueLayout
from penstock.queue.ledger import Ledger, QueueTaskStatus, fresh
from penstock.queue.pack import RESEND_SECONDS, Pack
from penstock.queue.pack_session import LedgerSwap, ListedPack, SwapResult
from penstock.queue.transitions import LedgerClaim
from penstock.store.base import CREATE, REPLACE, Version
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Kind, Meter, MeteredStore

LAYOUT = QueueLayout("q")
WANTED = LedgerClaim("claim", "me", 30_000, 1000, 3)


class Bench:
    """One pack in one bucket."""

    def __init__(self, *, count: int = 2) -> None:
        self.entropy = seeded_entropy(1)
        self.meter = Meter()
        self.bucket = MemoryBucket(SystemClock())
        self.store = MeteredStore(MemoryStore(self.bucket, clock=SystemClock()), self.meter)
        self.at: PackAt = new_pack(
            type="t",
            count=count,
            submitted_ms=int(SystemClock().wall() * 1000),
            entropy=self.entropy,
        )

    async def submit(self, nonce: str = "n", *, submitted_ms: int | None = None) -> ListedPack:
        stamp = self.at.submitted_ms or 0
        pack = Pack(
            type="t",
            nonce=nonce,
            submitted_ms=stamp if submitted_ms is None else submitted_ms,
            inputs=tuple(msgspec.Raw(b"%d" % number) for number in range(self.at.count)),
        )
        version = await self.store.put(LAYOUT.pack(self.at), encode(pack), REPLACE)
        return ListedPack(version, stamp / 1000, has_ledger=False)

    def session(self) -> CancelSession:
        return CancelSession(self.store, LAYOUT, self.at, entropy=self.entropy)

    @property
    def ledger(self) -> Ledger | None:
        stored = self.bucket.objects.get(LAYOUT.ledger(self.at))
        return decode(Ledger, stored.body, where="ledger") if stored else None

    @property
    def has_pack(self) -> bool:
        return LAYOUT.pack(self.at) in self.bucket.objects


def _run(check: Callable[[Bench], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        await check(Bench(**options))

    asyncio.run(main())


def _with_ledger(seen: ListedPack) -> ListedPack:
    return ListedPack(seen.version, seen.modified, has_ledger=True)


def test_a_task_costs_two_puts_a_read_and_a_delete() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        await bench.store.now()
        before = bench.meter.billed.copy()
        session = bench.session()
        claimed = await session.claim(WANTED, seen)
        assert claimed is not None
        assert claimed.attempts == {0: 1}
        assert await session.settle({0: ("claim", Succeeded())}) == frozenset()
        spent = bench.meter.billed - before
        kinds: Counter[Kind] = Counter()
        for (_, kind), count in spent.items():
            kinds[kind] += count
        assert kinds == {Kind.PUT: 2, Kind.GET: 1, Kind.DELETE: 1}
        assert bench.ledger is not None
        assert bench.ledger.settled
        assert not bench.has_pack

    _run(check, count=1)


def test_queue_1_a_pack_that_is_gone_runs_nothing_and_leaves_nothing() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        await bench.store.delete(LAYOUT.pack(bench.at))
        assert await bench.session().claim(WANTED, seen) is None
        assert bench.ledger is None

    _run(check)


def test_queue_1_a_ledger_that_goes_while_we_claim_is_no_leave_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything was settled and archived between our reads and our claim."""

    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        first = bench.session()
        await first.claim(LedgerClaim("claim", "me", 30_000, 1, 3), seen)
        late = bench.session()
        take = late._take

        async def archive_and_take(wanted: LedgerClaim, version: Version) -> Ledger | None:
            await bench.store.delete(LAYOUT.pack(bench.at))
            await bench.store.delete(LAYOUT.ledger(bench.at))
            return await take(wanted, version)

        monkeypatch.setattr(late, "_take", archive_and_take)
        other = LedgerClaim("other", "late", 30_000, 1000, 3)
        assert await late.claim(other, _with_ledger(seen)) is None
        assert bench.ledger is None

    _run(check)


def test_queue_2_a_pack_that_came_too_late_is_deleted_and_never_run() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        late = ListedPack(seen.version, seen.modified + RESEND_SECONDS, has_ledger=False)
        assert await bench.session().claim(WANTED, late) is None
        assert not bench.has_pack
        assert bench.ledger is None

    _run(check)


def test_queue_2_the_time_in_the_body_counts_too() -> None:
    async def check(bench: Bench) -> None:
        stamp = (bench.at.submitted_ms or 0) - int(RESEND_SECONDS * 1000) - 1000
        seen = await bench.submit(submitted_ms=stamp)
        assert await bench.session().claim(WANTED, seen) is None
        assert not bench.has_pack
        assert bench.ledger is None

    _run(check)


def test_queue_3_a_settled_ledger_beside_its_pack_deletes_the_pack() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit("n")
        body = bench.bucket.objects[LAYOUT.pack(bench.at)].body
        session = bench.session()
        await session.claim(WANTED, seen)
        await session.settle({n: ("claim", Succeeded()) for n in range(2)})
        await bench.store.put(LAYOUT.pack(bench.at), body, CREATE)
        assert await bench.session().claim(WANTED, _with_ledger(seen)) is None
        assert not bench.has_pack
        assert bench.ledger is not None

    _run(check)


def test_queue_4_another_pack_of_that_name_is_not_deleted() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit("n")
        session = bench.session()
        await session.claim(WANTED, seen)
        await bench.submit("another")
        await session.settle({n: ("claim", Succeeded()) for n in range(2)})
        assert bench.has_pack

    _run(check)


def test_queue_5_a_ledger_of_another_pack_is_void() -> None:
    async def check(bench: Bench) -> None:
        await bench.submit("n")
        old = fresh(pack_version="another", born="b", count=2)
        await bench.store.put(LAYOUT.ledger(bench.at), encode(old), CREATE)
        seen = await bench.submit("n")
        assert await bench.session().claim(WANTED, _with_ledger(seen)) is None
        assert bench.ledger is None
        claimed = await bench.session().claim(WANTED, seen)
        assert claimed is not None

    _run(check)


def test_queue_7_cancelling_what_nobody_claimed_settles_it_by_a_swap() -> None:
    async def check(bench: Bench) -> None:
        await bench.submit()
        claim = LedgerClaim("cancel", "user", 30_000, 1000, 3, frozenset({1}))
        ledger = await bench.session().cancel(frozenset({1}), claim)
        assert [task.status for task in ledger.tasks] == [
            QueueTaskStatus.READY,
            QueueTaskStatus.CANCELLED,
        ]
        assert bench.has_pack
        both = LedgerClaim("again", "user", 30_000, 1000, 3, frozenset({0}))
        ledger = await bench.session().cancel(frozenset({0}), both)
        assert ledger.settled
        assert not bench.has_pack

    _run(check)


def test_queue_14_what_was_claimed_in_one_ledger_counts_for_nothing_in_the_next() -> None:
    async def check(bench: Bench) -> None:
        session = bench.session()
        await session.claim(WANTED, await bench.submit())
        assert bench.ledger is not None
        next_one = msgspec.structs.replace(bench.ledger, born="another")
        await bench.store.put(LAYOUT.ledger(bench.at), encode(next_one), REPLACE)
        done = {0: ("claim", Succeeded())}
        swapped = await session.swap(done, claims=("claim",), lease_ms=30_000)
        assert swapped.refused == {0}
        assert not swapped.expires_ms, "the lease in it is no lease of ours"
        assert bench.ledger == next_one

    _run(check)


def test_queue_15_what_is_claimed_late_starts_only_if_the_pack_is_there_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All was settled and archived after we had looked, and the network brought the ledger back."""

    async def check(bench: Bench) -> None:
        session = bench.session()
        short = LedgerClaim("claim", "me", 0, 1, 3)
        assert await session.claim(short, await bench.submit()) is not None
        swap = session._swap

        async def archive_and_swap(wanted: LedgerSwap) -> SwapResult:
            await bench.store.delete(LAYOUT.pack(bench.at))
            return await swap(wanted)

        monkeypatch.setattr(session, "_swap", archive_and_swap)
        more = LedgerClaim("more", "me", 30_000, 1, 3)
        swapped = await session.swap({}, claims=("claim",), lease_ms=30_000, more=more)
        assert swapped.more is None

    _run(check)


def test_cancelling_what_runs_asks_its_holder() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        session = bench.session()
        await session.claim(WANTED, seen)
        await bench.session().cancel(frozenset({0}), LedgerClaim("x", "user", 30_000, 1000, 3))
        extended = await session.extend(["claim"], lease_ms=30_000)
        assert set(extended.expires_ms) == {"claim"}
        assert set(extended.asked_to_stop) == {0}

    _run(check)


def test_cancelling_nothing_is_not_found() -> None:
    async def check(bench: Bench) -> None:
        with pytest.raises(NotFound):
            await bench.session().cancel(frozenset({0}), LedgerClaim("x", "user", 30_000, 1000, 3))

    _run(check)


def test_what_is_used_up_is_closed_by_the_next_who_looks() -> None:
    async def check(bench: Bench) -> None:
        seen = await bench.submit()
        short = LedgerClaim("a", "me", -1000, 1000, 1)
        await bench.session().claim(short, seen)
        # What was lost beside others, for all that is known, runs once more, beside nothing.
        alone = LedgerClaim("c", "me", -1000, 1, 1, exclusive=True)
        assert await bench.session().claim(alone, _with_ledger(seen)) is not None
        once = LedgerClaim("b", "you", 30_000, 1000, 1)
        assert await bench.session().claim(once, _with_ledger(seen)) is None
        # The first look freed what was lost; this one sees that nothing may start again.
        await bench.session().claim(once, _with_ledger(seen))
        assert bench.ledger is not None
        assert {task.status for task in bench.ledger.tasks} == {QueueTaskStatus.FAILED}
        assert not bench.has_pack

    _run(check, count=1)
