"""What an inbox shows, what it forgets, and that its cursor never passes what was not handled."""

from __future__ import annotations

import asyncio

import pytest

from penstock.queue import inbox as inboxes
from penstock.queue.ids import URGENT_MINUTE, PackAt, delayed, keyed_pack
from penstock.queue.inbox import LATE_MINUTES
from penstock.queue.inbox_announcer import bucket_of
from penstock.queue.layout import PointerAt
from penstock.store.metered import Kind
from tests.unit.queue.direct.office import LAYOUT, NONCE, Office, run


def test_a_look_is_one_list_and_reads_no_entry() -> None:
    async def check(office: Office) -> None:
        inbox, _ = await office.inbox("w")
        at = office.pack()
        await office.announced("w", at)
        before = office.meter.requests()
        (sight,) = await office.look(inbox)
        assert office.meter.requests() - before == office.meter.requests(kind=Kind.LIST) == 1
        assert sight.at == at
        assert sight.pointer is not None
        assert sight.pointer.is_entry
        assert not sight.pointer.twins

    run(check)


def test_what_was_handled_is_deleted_with_the_next_look_and_not_shown_before() -> None:
    async def check(office: Office) -> None:
        inbox, _ = await office.inbox("w")
        one, two = office.pack(), office.pack()
        await office.announced("w", one)
        await office.announced("w", two)
        assert len(await office.look(inbox)) == 2
        inbox.handled(one)
        assert set(office.entries("w")) == {one, two}
        assert [sight.at for sight in await office.look(inbox)] == [two]
        assert office.entries("w") == [two]

    run(check)


def test_what_is_handled_while_a_list_is_under_way_is_not_shown_again() -> None:
    async def check(office: Office) -> None:
        inbox, _ = await office.inbox("w")
        at = office.pack()
        await office.announced("w", at)
        await office.look(inbox)
        async with asyncio.TaskGroup() as group:
            group.create_task(office.look(inbox))
            await office.clock.sleep(0)
            inbox.handled(at)
        assert await office.look(inbox) == []
        assert office.entries("w") == []

    run(check, seeds=5)


def test_what_is_due_later_is_not_shown_before_its_minute() -> None:
    async def check(office: Office) -> None:
        inbox, _ = await office.inbox("w")
        at = delayed(office.pack(), due_ms=int(office.world.now() + 600) * 1000)
        await office.announced("w", at, minute=office.minute + 10)
        assert await office.look(inbox) == []
        await office.clock.sleep(601)
        assert [sight.at for sight in await office.look(inbox)] == [at]

    run(check)


def test_the_cursor_stays_at_what_is_not_handled() -> None:
    async def check(office: Office) -> None:
        began = office.minute
        inbox, cursor = await office.inbox("w")
        first = office.pack()
        await office.announced("w", first)
        for _ in range(30):
            await office.clock.sleep(60)
            later = office.pack()
            await office.announced("w", later)
            assert first in [sight.at for sight in await office.look(inbox)]
            inbox.handled(later)
            assert cursor.minute <= began
        inbox.handled(first)
        await office.look(inbox)
        assert cursor.minute == office.minute - LATE_MINUTES

    run(check)


def test_a_list_that_breaks_off_at_what_is_urgent_moves_no_cursor() -> None:
    async def check(office: Office) -> None:
        inbox, cursor = await office.inbox("w", since=office.minute - 100)
        before = cursor.minute
        for _ in range(1000):
            await office.announced("w", office.pack(priority=3), minute=URGENT_MINUTE + 6)
        old = office.pack()
        await office.announced("w", old, minute=office.minute - 90)
        sights = await office.look(inbox, wanted=10)
        assert {sight.priority for sight in sights} == {3}
        assert cursor.minute == before
        for sight in sights:
            inbox.handled(sight.at)
        assert [sight.at for sight in await office.look(inbox)] == [old]

    run(check)


def test_what_has_a_low_priority_does_not_break_a_look_off() -> None:
    async def check(office: Office) -> None:
        inbox, _ = await office.inbox("w", since=office.minute - 5)
        for _ in range(1000):
            await office.announced("w", office.pack(priority=-1), minute=office.minute - 4)
        usual = office.pack()
        await office.announced("w", usual)
        assert usual in [sight.at for sight in await office.look(inbox, wanted=1)]

    run(check)


def test_what_is_of_no_use_in_front_hides_nothing() -> None:
    async def check(office: Office) -> None:
        inbox, _ = await office.inbox("w", since=office.minute - 5)
        for _ in range(1500):
            await office.announced("w", office.pack(), minute=office.minute - 4)
        last = office.pack()
        await office.announced("w", last)
        sights = await inbox.look(
            now_minute=office.minute, worth=lambda sight: int(sight.at == last), wanted=1
        )
        assert last in [sight.at for sight in sights]

    run(check)


def test_no_number_of_what_is_of_no_use_hides_what_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look goes on where the last one broke off, after a page from the front."""
    monkeypatch.setattr(inboxes, "PAGES_MAX", 3)

    async def check(office: Office) -> None:
        inbox, cursor = await office.inbox("w", since=office.minute - 5)
        before = cursor.minute
        useless = [office.pack() for _ in range(6500)]
        for at in useless:
            await office.announced("w", at, minute=office.minute - 4)
        last = office.pack()
        await office.announced("w", last)

        async def look(*wanted: PackAt) -> set[PackAt]:
            lists = office.meter.requests(kind=Kind.LIST)
            sights = await inbox.look(
                now_minute=office.minute, worth=lambda sight: int(sight.at in wanted), wanted=1
            )
            assert office.meter.requests(kind=Kind.LIST) - lists <= 3
            return {sight.at for sight in sights}

        first = await look(last)
        assert last not in first
        urgent = office.pack(priority=3)
        await office.announced("w", urgent, minute=URGENT_MINUTE + 6)
        seen = await look(last)
        assert urgent in seen
        assert last in seen | await look(last)
        assert cursor.minute == before, "no look has seen all"
        # What an earlier look has shown is deleted when it is handled, and all is seen again.
        for at in (*first, urgent, last):
            inbox.handled(at)
        await inbox.tidy()
        left = set(office.entries("w"))
        assert left == set(useless) - first
        seen = set()
        for _ in range(3):
            seen |= await look(last)
        assert seen == left

    run(check)


def test_what_comes_late_or_to_the_wrong_worker_is_deleted_and_its_pack_stays() -> None:
    async def check(office: Office) -> None:
        inbox, cursor = await office.inbox("w")
        late, wrong = office.pack(), office.pack(type="other")
        await office.announced("w", late, minute=cursor.minute - 1)
        await office.announced("w", wrong)
        assert await office.look(inbox) == []
        await inbox.tidy()
        assert office.entries("w") == []
        assert LAYOUT.pack(late) in office.bucket.objects
        assert LAYOUT.pack(wrong) in office.bucket.objects

    run(check)


def test_the_entry_of_a_key_tells_where_its_pointer_is() -> None:
    async def check(office: Office) -> None:
        now_ms = int(office.world.now() * 1000)
        at = keyed_pack(type="t", key="k")
        for priority in (-2, 0, 4):
            for delay_ms in (0, 3_600_000):
                due_ms = now_ms + delay_ms if delay_ms else 0
                to = PointerAt(at, NONCE, priority, "api")
                pointer = LAYOUT.pointer(
                    at,
                    due_ms=due_ms or now_ms,
                    nonce=NONCE,
                    priority=priority,
                    limit="api",
                    is_delayed=due_ms > 0,
                )
                minute = bucket_of(priority, due_ms=due_ms, now_ms=now_ms)
                key = LAYOUT.inbox_entry("w", to, minute=minute)
                office.bucket.write(key, b"", {})
                inbox, _ = await office.inbox("w")
                (sight,) = await inbox.look(
                    now_minute=office.minute + 60, worth=lambda _: 1, wanted=1
                )
                assert sight.pointer is not None
                assert pointer in sight.pointer.twins
                assert (sight.priority, sight.limit) == (priority, "api")
                office.bucket.remove(key)

    run(check)
