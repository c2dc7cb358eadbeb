"""Which ticks are due: what is caught up with, what is left out, and that choices only grow."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from penstock.queue.schedules import (
    CATCH_UP_MAX,
    GRACE_SECONDS,
    CatchUp,
    due_ticks,
    milliseconds,
    next_tick,
)

_DAY_MS = 86_400_000


def _ms(text: str) -> int:
    return milliseconds(datetime.fromisoformat(text).replace(tzinfo=UTC))


def _due(cron: str, cursor: str, now: str, catch_up: CatchUp, zone: str = "UTC") -> list[str]:
    ticks = due_ticks(
        cron, time_zone=zone, cursor_ms=_ms(cursor), now_ms=_ms(now), catch_up=catch_up
    )
    return [datetime.fromtimestamp(ms / 1000, tz=UTC).strftime("%dT%H:%M") for ms in ticks]


def test_a_tick_is_due_at_its_time_and_not_before_and_not_at_the_cursor() -> None:
    for catch_up in CatchUp:
        before = _due("0 3 * * *", "2030-01-01T00:00", "2030-01-01T02:59:59", catch_up)
        at = _due("0 3 * * *", "2030-01-01T00:00", "2030-01-01T03:00", catch_up)
        after = _due("0 3 * * *", "2030-01-01T03:00", "2030-01-01T03:01", catch_up)
        assert (before, at, after) == ([], ["01T03:00"], [])


def test_what_was_missed_is_left_out_or_caught_up_with() -> None:
    missed = ("0 3 * * *", "2030-01-01T03:00", "2030-01-05T12:00")
    assert _due(*missed, CatchUp.SKIP) == []
    assert _due(*missed, CatchUp.ONE) == ["05T03:00"]
    assert _due(*missed, CatchUp.ALL) == ["02T03:00", "03T03:00", "04T03:00", "05T03:00"]


def test_a_little_late_is_not_missed() -> None:
    late = ("* * * * *", "2030-01-01T03:00", "2030-01-01T04:00")
    assert _due(*late, CatchUp.SKIP) == [f"01T03:{n}" for n in range(55, 60)] + ["01T04:00"]
    assert GRACE_SECONDS == 300


def test_no_more_than_so_many_are_caught_up_with_the_last_of_them() -> None:
    ticks = due_ticks(
        "* * * * *",
        time_zone="UTC",
        cursor_ms=0,
        now_ms=_ms("2030-01-01T00:00"),
        catch_up=CatchUp.ALL,
    )
    assert len(ticks) == CATCH_UP_MAX
    assert ticks[-1] == _ms("2030-01-01T00:00")
    assert list(ticks) == sorted(ticks)


def test_a_time_of_day_is_that_of_the_zone() -> None:
    paris = ("0 3 * * *", "2030-03-29T12:00", "2030-04-01T12:00", CatchUp.ALL, "Europe/Paris")
    # On the 31st clocks are put forward: three o'clock comes an hour earlier.
    assert _due(*paris) == ["30T02:00", "31T01:00", "01T01:00"]
    assert next_tick("0 3 * * *", time_zone="Europe/Paris", after_ms=_ms("2030-07-01T00:00")) == (
        _ms("2030-07-01T01:00")
    )


@given(
    cron=st.sampled_from(["* * * * *", "*/7 * * * *", "0 3 * * *", "30 1 * * 0", "15 2,3 * * *"]),
    zone=st.sampled_from(["UTC", "Europe/Paris", "America/New_York"]),
    catch_up=st.sampled_from(list(CatchUp)),
    cursor_ms=st.integers(0, 20 * _DAY_MS),
    after_ms=st.tuples(st.integers(0, 3 * _DAY_MS), st.integers(0, 3 * _DAY_MS)),
)
def test_who_chooses_later_never_picks_an_earlier_tick(
    cron: str, zone: str, catch_up: CatchUp, cursor_ms: int, after_ms: tuple[int, int]
) -> None:
    """From one cursor; and from a later cursor, if it lies before the pick, the same."""
    first_ms, later_ms = after_ms
    base_ms = _ms("2030-03-20T00:00") + cursor_ms

    def picks(cursor_ms: int, now_ms: int) -> tuple[int, ...]:
        return due_ticks(
            cron, time_zone=zone, cursor_ms=cursor_ms, now_ms=now_ms, catch_up=catch_up
        )

    early = picks(base_ms, base_ms + first_ms)
    late = picks(base_ms, base_ms + first_ms + later_ms)
    if early:
        assert catch_up is CatchUp.SKIP or late
        assert not late or late[0] >= early[0]
        between_ms = (base_ms + early[0]) // 2
        assert picks(between_ms, base_ms + first_ms)[0] == early[0]
    assert all(base_ms < tick <= base_ms + first_ms for tick in early)
