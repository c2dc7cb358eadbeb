"""What a dead worker has left is given to others: by anyone, by two at once, after any crash."""

from __future__ import annotations

import asyncio

import pytest

from penstock.kernel.document_format import encode
from penstock.queue.ids import PackAt, delayed
from penstock.queue.inbox import UNREADABLE_SECONDS, HeldWorkerLease
from penstock.queue.inbox_announcer import LINGER_SECONDS
from penstock.queue.ledger import fresh
from tests.unit.queue.direct.office import (
    LAYOUT,
    LEASE_SECONDS,
    Dies,
    Mortal,
    Office,
    run,
)


async def _dead(office: Office, *, packs: int = 3) -> tuple[list[PackAt], HeldWorkerLease]:
    """A worker that died with so many pending packs in its inbox, and one that lives."""
    held = office.held("dead")
    await held.take()
    ats = [office.pack() for _ in range(packs)]
    for at in ats:
        await office.announced("dead", at)
    await office.clock.sleep(LEASE_SECONDS + 3)
    await office.held("lives").take()
    return ats, held


def _claim(office: Office, at: PackAt) -> None:
    version = office.bucket.objects[LAYOUT.pack(at)].version
    ledger = fresh(pack_version=version, born="born", count=1)
    office.bucket.write(LAYOUT.ledger(at), encode(ledger), {})


def test_what_is_pending_moves_and_what_was_claimed_is_left_to_its_lease() -> None:
    async def check(office: Office) -> None:
        (pending, claimed, gone), _ = await _dead(office)
        _claim(office, claimed)
        office.bucket.remove(LAYOUT.pack(gone))
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover_all(but="lives")
        assert office.entries("dead") == []
        assert office.entries("lives") == [pending]
        lease = office.lease("dead")
        assert lease is not None
        assert lease.is_gone

    run(check)


def test_what_is_due_later_moves_into_its_minute_and_what_is_urgent_stays_so() -> None:
    async def check(office: Office) -> None:
        await office.held("dead").take()
        urgent = office.pack(priority=5)
        await office.announced("dead", urgent, minute=10_000_004)
        later = delayed(office.pack(), due_ms=int(office.world.now() + 6000) * 1000)
        office.bucket.write(LAYOUT.pack(later), b"", {})
        minute = office.minute + 100
        await office.announced("dead", later, minute=minute)
        await office.clock.sleep(LEASE_SECONDS + 3)
        await office.held("lives").take()
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("dead")
        moved = {
            entry.to.at: entry.minute
            for key in office.bucket.objects
            if (entry := LAYOUT.read_inbox_entry(key)) is not None
        }
        assert moved == {urgent: 10_000_004, later: minute}

    run(check)


def test_a_live_worker_is_left_alone() -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        await held.take()
        at = office.pack()
        await office.announced("w", at)
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("w")
        await recovery.recover_all(but="other")
        assert office.entries("w") == [at]
        await held.renew(is_idle=False)
        assert held.is_live

    run(check)


def test_whoever_was_recovered_hears_it_and_stops() -> None:
    async def check(office: Office) -> None:
        _, held = await _dead(office)
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("dead")
        await held.renew(is_idle=False)
        assert held.is_lost

    run(check)


def test_if_it_renews_first_nothing_happens() -> None:
    async def check(office: Office) -> None:
        ats, held = await _dead(office)
        recovery, roster = office.recovery()
        await roster.look()
        await held.renew(is_idle=False)
        await recovery.recover("dead")
        assert office.entries("dead") == ats
        assert held.is_live

    run(check)


def test_two_at_once_lose_nothing() -> None:
    async def check(office: Office) -> None:
        ats, _ = await _dead(office, packs=20)
        pairs = [office.recovery() for _ in range(2)]
        for _, roster in pairs:
            await roster.look()
        await asyncio.gather(*(recovery.recover("dead") for recovery, _ in pairs))
        assert office.entries("dead") == []
        assert set(office.entries("lives")) == set(ats)

    run(check, seeds=10)


@pytest.mark.parametrize("writes", range(12))
def test_a_recovery_that_dies_at_any_point_is_gone_on_with(writes: int) -> None:
    async def check(office: Office) -> None:
        ats, _ = await _dead(office, packs=4)
        mortal, its_roster = office.recovery(Mortal(office.store(), writes))
        await its_roster.look()
        try:
            await mortal.recover("dead")
        except* Dies:
            pass
        # At no time is a pending pack told to nobody.
        assert set(office.entries("dead")) | set(office.entries("lives")) == set(ats)
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover_all(but="lives")
        assert office.entries("dead") == []
        assert set(office.entries("lives")) == set(ats)

    run(check)


def test_lease_and_cursor_go_when_nobody_can_know_the_worker_any_more() -> None:
    async def check(office: Office) -> None:
        await _dead(office)
        cursor = await office.cursor("dead", office.store(), since=office.minute - 9)
        cursor.advance(handled_before=office.minute - 5, now_minute=office.minute)
        await cursor.save(at_once=True)
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("dead")
        # A producer has not heard of it yet.
        late = office.pack()
        await office.announced("dead", late)
        await office.clock.sleep(LINGER_SECONDS / 2)
        await office.held("lives-too").take()
        await roster.look()
        await recovery.recover_all(but="lives")
        assert late in office.entries("lives") + office.entries("lives-too")
        assert office.lease("dead") is not None
        await office.clock.sleep(LINGER_SECONDS)
        await roster.look()
        await recovery.recover("dead")
        assert office.lease("dead") is None
        assert office.saved("dead") is None

    run(check)


def test_a_worker_that_comes_back_in_between_keeps_its_lease() -> None:
    async def check(office: Office) -> None:
        await _dead(office)
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("dead")
        await office.clock.sleep(LINGER_SECONDS + 3)
        back = office.held("dead")
        await back.take()
        # The other's picture is an old one.
        await recovery.recover("dead")
        await back.renew(is_idle=False)
        assert back.is_live

    run(check)


def test_without_anyone_to_give_it_to_the_pack_is_left_to_scavenging() -> None:
    async def check(office: Office) -> None:
        await office.held("dead").take()
        at = office.pack()
        await office.announced("dead", at)
        await office.clock.sleep(LEASE_SECONDS + 3)
        await office.held("other", handles=frozenset({"u"})).take()
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("dead")
        assert office.entries("dead") == office.entries("other") == []
        assert LAYOUT.pack(at) in office.bucket.objects

    run(check)


def test_a_damaged_lease_is_recovered_when_it_must_be_over() -> None:
    async def check(office: Office) -> None:
        ats, _ = await _dead(office)
        office.bucket.write(LAYOUT.inbox_lease("dead"), b"nonsense", {})
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover("dead")
        assert office.entries("dead") == ats
        await office.clock.sleep(UNREADABLE_SECONDS + 3)
        await office.held("lives").take()
        await roster.look()
        await recovery.recover_all(but="lives")
        assert set(office.entries("lives")) == set(ats)

    run(check)


def test_what_lies_in_an_inbox_without_a_lease_is_given_away() -> None:
    async def check(office: Office) -> None:
        await office.held("lives").take()
        mine, at = office.pack(), office.pack()
        await office.announced("lives", mine)
        await office.announced("never-was", at)
        recovery, roster = office.recovery()
        await roster.look()
        await recovery.recover_orphans()
        assert office.entries("never-was") == []
        assert set(office.entries("lives")) == {mine, at}

    run(check)
