"""Who lives, as far as a list can tell, for one LIST and few reads."""

from __future__ import annotations

from penstock.queue.inbox import IDLE_STRETCH, UNREADABLE_SECONDS, WorkerRoster
from penstock.store.metered import Kind
from tests.unit.queue.direct.office import LAYOUT, LEASE_SECONDS, Office, run


def test_live_workers_with_a_handler_are_known() -> None:
    async def check(office: Office) -> None:
        await office.held("b", handles=frozenset({"t", "u"})).take()
        await office.held("a").take()
        store = office.store()
        roster = WorkerRoster(store, LAYOUT)
        await roster.look()
        now = await store.now()
        assert roster.live(now) == ["a", "b"]
        assert roster.live(now, type="u") == ["b"]
        assert roster.live(now, type="x") == []

    run(check)


def test_renewals_are_seen_in_the_list_alone() -> None:
    async def check(office: Office) -> None:
        held = [office.held(str(number)) for number in range(5)]
        for each in held:
            await each.take()
        store = office.store()
        roster = WorkerRoster(store, LAYOUT)
        await roster.look()
        for _ in range(20):
            await office.clock.sleep(20)
            for each in held:
                await each.renew(is_idle=False)
            gets = office.meter.requests(kind=Kind.GET)
            await roster.look()
            assert office.meter.requests(kind=Kind.GET) == gets
            assert len(roster.live(await store.now())) == 5

    run(check)


def test_where_there_is_doubt_the_lease_is_read() -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        await held.take()
        store = office.store()
        roster = WorkerRoster(store, LAYOUT)
        await roster.look()
        await held.renew(is_idle=True)
        await office.clock.sleep(LEASE_SECONDS * IDLE_STRETCH - 5)
        await roster.look()
        assert roster.live(await store.now()) == ["w"]

    run(check)


def test_who_left_died_or_was_forgotten_does_not_live() -> None:
    async def check(office: Office) -> None:
        left, died, forgotten = (office.held(name) for name in ("left", "died", "forgotten"))
        for each in (left, died, forgotten):
            await each.take()
        store = office.store()
        roster = WorkerRoster(store, LAYOUT)
        await roster.look()
        await left.leave()
        await forgotten.renew(is_idle=False)
        office.bucket.remove(LAYOUT.inbox_lease("forgotten"))
        await office.clock.sleep(LEASE_SECONDS + 3)
        await roster.look()
        now = await store.now()
        assert roster.live(now) == []
        assert {name for name, seen in roster.seen.items() if seen.may_be_over(now)} == {
            "left",
            "died",
        }

    run(check)


def test_a_damaged_lease_is_nobody_and_may_be_over_in_the_end() -> None:
    async def check(office: Office) -> None:
        office.bucket.write(LAYOUT.inbox_lease("w"), b"nonsense", {})
        store = office.store()
        roster = WorkerRoster(store, LAYOUT)
        await roster.look()
        assert roster.live(await store.now()) == []
        assert not roster.seen["w"].may_be_over(await store.now())
        await office.clock.sleep(UNREADABLE_SECONDS + 3)
        await roster.look()
        assert roster.seen["w"].may_be_over(await store.now())

    run(check)
