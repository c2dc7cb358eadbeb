"""Plots of a queue say in words what they show, and what an amount of money looks like."""

from __future__ import annotations

from penstock.console.pages.queue import ages_plot, ended_plot, starts_plot
from penstock.console.pages.queue_base import money
from penstock.queue.inspection.activity import SettledPack, by_minute
from penstock.queue.inspection.stats import AgeStats


def test_tasks_by_age_have_a_name_for_each_age() -> None:
    drawn = ages_plot([AgeStats(10.0, ready=3), AgeStats(60.0, in_progress=2), AgeStats(None)])
    assert [each.text for each in drawn.marks] == ["< 10 s", "< 1 min", "over 1 min"]
    assert drawn.told == (
        "By age. < 10 s: 3 waiting and 0 in progress; < 1 min: 0 waiting and 2 in progress."
    )
    assert [(each.series, each.told) for each in drawn.bars] == [
        ("waiting", "< 10 s: 3 waiting"),
        ("running", "< 1 min: 2 running"),
    ]
    assert "No tasks are waiting" in ages_plot([AgeStats(None)] * 2).told


def test_what_ended_is_drawn_by_outcome_and_what_started_by_how_long_it_waited() -> None:
    pack = SettledPack(((160, "succeeded", 2), (159, "failed", 1)), ((160, 0.5, 9), (160, 4.0, 1)))
    minutes = by_minute([pack], now=160 * 60)
    drawn = ended_plot(minutes)
    assert drawn.told == "Settled in the last hour: 2 succeeded, 1 failed."
    assert [each.told for each in drawn.bars] == ["1 min ago: 1 failed", "now: 2 succeeded"]
    assert "No task was settled" in ended_plot(by_minute([], now=0)).told
    waited = starts_plot(minutes, told="All of it.")
    told = "now: 10 started, p50 500 ms, p95 4.0 s"
    assert [(each.series, each.told) for each in waited.bars] == [("half", told), ("most", told)]
    # The median, and what is beyond it.
    assert waited.bars[1].height > 6 * waited.bars[0].height


def test_money_has_two_digits_that_count() -> None:
    amounts = [0.0, 0.000037, 0.00013, 0.045, 0.99, 1.0, 19.02, 12345.678]
    assert [money(each) for each in amounts] == [
        "$0.00",
        "$0.000037",
        "$0.00013",
        "$0.045",
        "$0.99",
        "$1.00",
        "$19.02",
        "$12,345.68",
    ]
