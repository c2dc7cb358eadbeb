"""Where an inbox is gone on with: never too far, never further back than a day."""

from __future__ import annotations

import pytest

from penstock.queue.inbox import BACK_MINUTES_MAX, IDLE_SAVE_SECONDS, LATE_MINUTES, SAVE_SECONDS
from penstock.store.metered import Kind
from tests.unit.queue.direct.office import LAYOUT, Office, run


def test_a_fresh_worker_starts_now_whatever_an_earlier_one_has_left() -> None:
    async def check(office: Office) -> None:
        old = await office.cursor("w", office.store())
        old.advance(handled_before=office.minute, now_minute=office.minute + LATE_MINUTES)
        await old.save(at_once=True)
        await office.clock.sleep(3 * 86_400)
        fresh = await office.cursor("w", office.store(), since=office.minute)
        assert fresh.minute == office.minute

    run(check)


def test_it_goes_on_from_where_it_was_saved_or_from_the_beginning() -> None:
    async def check(office: Office) -> None:
        since = office.minute
        cursor = await office.cursor("w", office.store())
        await office.clock.sleep(3600)
        unsaved = await office.cursor("w", office.store(), since=since)
        assert unsaved.minute == since
        cursor.advance(handled_before=since + 40, now_minute=office.minute)
        await cursor.save(at_once=True)
        assert (await office.cursor("w", office.store(), since=since)).minute == since + 40

    run(check)


def test_it_goes_no_further_back_than_a_day_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def check(office: Office) -> None:
        since = office.minute
        await office.clock.sleep(86_400 - 120)
        assert (await office.cursor("w", office.store(), since=since)).minute == since
        assert not caplog.records
        await office.clock.sleep(86_400)
        capped = await office.cursor("w", office.store(), since=since)
        assert capped.minute == office.minute - BACK_MINUTES_MAX

    run(check)
    assert "was away for 47 hours" in caplog.text


def test_it_never_goes_back_and_stays_behind_the_present() -> None:
    async def check(office: Office) -> None:
        now = office.minute
        cursor = await office.cursor("w", office.store(), since=now - 60)
        cursor.advance(handled_before=now - 30, now_minute=now)
        cursor.advance(handled_before=now - 50, now_minute=now)
        assert cursor.minute == now - 30
        cursor.advance(handled_before=now, now_minute=now)
        assert cursor.minute == now - LATE_MINUTES

    run(check)


def test_saving_it_never_takes_it_back() -> None:
    async def check(office: Office) -> None:
        now = office.minute
        one = await office.cursor("w", office.store(), since=now - 60)
        two = await office.cursor("w", office.store(), since=now - 60)
        one.advance(handled_before=now - 10, now_minute=now)
        two.advance(handled_before=now - 30, now_minute=now)
        await one.save(at_once=True)
        await two.save(at_once=True)
        assert office.saved("w") == now - 10

    run(check)


def test_it_is_saved_soon_after_work_and_rarely_otherwise() -> None:
    async def check(office: Office) -> None:
        cursor = await office.cursor("w", office.store(), since=office.minute - 60)
        puts = []
        for worked in (False, True):
            before = office.meter.requests(kind=Kind.PUT)
            for _ in range(int(2 * IDLE_SAVE_SECONDS / SAVE_SECONDS)):
                await office.clock.sleep(SAVE_SECONDS)
                cursor.has_worked = worked
                cursor.advance(handled_before=office.minute, now_minute=office.minute)
                await cursor.save()
            puts.append(office.meter.requests(kind=Kind.PUT) - before)
        assert puts[0] == 2
        assert puts[1] > 100

    run(check)


def test_a_damaged_cursor_costs_nothing_but_a_longer_list() -> None:
    async def check(office: Office) -> None:
        office.bucket.write(LAYOUT.inbox_cursor("w"), b"nonsense", {})
        since = office.minute - 60
        cursor = await office.cursor("w", office.store(), since=since)
        assert cursor.minute == since
        cursor.advance(handled_before=since + 5, now_minute=office.minute)
        await cursor.save(at_once=True)

    run(check)


def test_saving_the_cursor_does_not_touch_the_lease() -> None:
    async def check(office: Office) -> None:
        held = office.held("w")
        await held.take()
        before = office.bucket.objects[LAYOUT.inbox_lease("w")].version
        cursor = await office.cursor("w", office.store(), since=office.minute - 9)
        cursor.advance(handled_before=office.minute - 5, now_minute=office.minute)
        await cursor.save(at_once=True)
        assert office.saved("w") == office.minute - 5
        assert office.bucket.objects[LAYOUT.inbox_lease("w")].version == before

    run(check)
