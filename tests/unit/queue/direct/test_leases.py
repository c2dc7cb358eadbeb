"""A name has one holder, which knows when it is not the holder any more."""

from __future__ import annotations

import asyncio

import pytest

from penstock.kernel.errors import InvalidInput, WorkerIdConflict
from penstock.queue.inbox import IDLE_STRETCH, UNREADABLE_SECONDS
from penstock.store.metered import Kind
from tests.unit.queue.direct.office import LAYOUT, LEASE_SECONDS, LosesAnswers, Office, run


def test_a_name_that_is_free_is_taken_with_one_put_and_begins_now() -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        believes = [held.is_live]
        await held.take()
        believes.append(held.is_live)
        lease = office.lease("w")
        assert believes == [False, True]
        assert lease is not None
        assert lease.handles == ("t",)
        assert abs(held.since_ms / 1000 - office.world.now()) < 2
        assert office.meter.requests(kind=Kind.PUT) == 1

    run(check)


def test_a_name_in_use_is_refused_with_a_clear_sentence() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()
        await office.clock.sleep(LEASE_SECONDS - 3)
        with pytest.raises(WorkerIdConflict, match="'w' is in use by another worker") as caught:
            await office.held("w").take()
        assert "a name of its own" in caught.value.hint
        # Its own holder is not in its way.
        await office.held("other").take()

    run(check)


def test_a_name_that_cannot_be_one_is_refused() -> None:
    async def check(office: Office) -> None:
        with pytest.raises(InvalidInput, match="is not the name of a worker"):
            office.held("a/b")

    run(check)


def test_of_many_at_once_one_has_the_name() -> None:
    async def check(office: Office) -> None:
        rivals = [office.held("w") for _ in range(5)]
        answers = await asyncio.gather(*(each.take() for each in rivals), return_exceptions=True)
        assert [each.is_live for each in rivals].count(True) == 1
        assert [type(answer) for answer in answers].count(WorkerIdConflict) == 4

    run(check, seeds=10)


def test_another_takes_the_name_after_the_lease_and_not_before() -> None:
    async def check(office: Office) -> None:
        one, two = office.held("w"), office.held("w")
        began = office.world.now()
        await one.take()
        while not two.is_live:
            try:
                await two.take()
            except WorkerIdConflict:
                await office.clock.sleep(0.5)
            assert not (one.is_live and two.is_live)
        assert LEASE_SECONDS <= office.world.now() - began <= LEASE_SECONDS + 4
        # The inbox is as old as it was: what is in it counts.
        assert two.since_ms == one.since_ms

    run(check, seeds=5)


def test_who_was_overtaken_hears_it_at_its_renewal_and_never_renews_again() -> None:
    async def check(office: Office) -> None:
        one, two = office.held("w"), office.held("w")
        await one.take()
        await office.clock.sleep(LEASE_SECONDS + 3)
        assert not one.is_live
        await two.take()
        await one.renew(is_idle=False)
        assert one.is_lost
        assert not one.is_live
        await one.leave()
        await two.renew(is_idle=False)
        assert two.is_live

    run(check)


def test_a_lease_that_ran_out_and_that_nobody_touched_is_simply_renewed() -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        await held.take()
        await office.clock.sleep(10 * LEASE_SECONDS)
        assert not held.is_live
        await held.renew(is_idle=False)
        assert held.is_live

    run(check)


@pytest.mark.parametrize("body", [None, b"nonsense"])
def test_a_lease_that_was_deleted_or_damaged_is_lost(body: bytes | None) -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        await held.take()
        if body is None:
            office.bucket.remove(LAYOUT.inbox_lease("w"))
        else:
            office.bucket.write(LAYOUT.inbox_lease("w"), body, {})
        await held.renew(is_idle=False)
        assert held.is_lost

    run(check)


def test_a_damaged_lease_makes_room_when_it_must_be_over() -> None:
    async def check(office: Office) -> None:
        office.bucket.write(LAYOUT.inbox_lease("w"), b"nonsense", {})
        with pytest.raises(WorkerIdConflict, match="cannot be read"):
            await office.held("w").take()
        await office.clock.sleep(UNREADABLE_SECONDS + 3)
        held = office.held("w")
        await held.take()
        assert held.is_live

    run(check)


def test_idle_leases_last_longer() -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        await held.take()
        await held.renew(is_idle=True)
        lease = office.lease("w")
        assert lease is not None
        assert lease.seconds == LEASE_SECONDS * IDLE_STRETCH
        await office.clock.sleep(LEASE_SECONDS * IDLE_STRETCH - 3)
        assert held.is_live

    run(check)


def test_a_renewal_whose_answer_is_lost_counts() -> None:
    async def check(office: Office) -> None:
        store = LosesAnswers(office.store())
        held = office.held("w", store=store)
        await held.take()
        await office.clock.sleep(LEASE_SECONDS / 2)
        store.lost = 1
        await held.renew(is_idle=False)
        assert not store.lost
        await office.clock.sleep(LEASE_SECONDS - 3)
        assert held.is_live

    run(check)


def test_a_takeover_whose_answer_is_lost_keeps_the_inbox() -> None:
    async def check(office: Office) -> None:
        one = office.held("w")
        await one.take()
        await office.clock.sleep(LEASE_SECONDS + 3)
        store = LosesAnswers(office.store())
        store.lost = 1
        two = office.held("w", store=store)
        await two.take()
        assert two.since_ms == one.since_ms

    run(check)


def test_who_leaves_makes_room_at_once() -> None:
    async def check(office: Office) -> None:
        one, two = office.held("w"), office.held("w")
        await one.take()
        await one.leave()
        assert not one.is_live
        await two.take()
        assert two.is_live
        assert two.since_ms == one.since_ms

    run(check)
