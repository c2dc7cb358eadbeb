"""What a queue costs: the arithmetic, and the goals as request counts of small but real runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.cli.cost import figures_text
from penstock.kernel.errors import InvalidInput
from penstock.queue.settings import DiscoveryMode
from penstock.store.metered import Kind, Prices
from penstock.testing.cost import (
    CAUSES,
    Bill,
    Figures,
    Idle,
    Saturated,
    Steady,
    Window,
    Workload,
    percentile,
    price,
    run_idle,
    run_saturated,
    run_steady,
    saturate,
    window_of,
)
from tests.sizes import some

HOUR = 3600.0
DAY = 86_400.0
SMALL = Workload(workers=2, tasks_per_day=8_640, days=0.05, handler_seconds=0.5, concurrency=4)
FLEET = Workload()


def test_a_day_of_requests_is_a_thirtieth_of_a_month() -> None:
    bill = Bill(
        {
            ("submit", Kind.PUT): 100_000,
            ("discovery", Kind.LIST): 50_000,
            ("claim", Kind.GET): 100_000,
            ("settle", Kind.DELETE): 100_000,
            ("leases", Kind.COPY): 10_000,
        },
        DAY,
    )
    assert bill.dollars() == pytest.approx(0.50 + 0.25 + 0.04 + 0.0 + 0.05)
    assert bill.dollars_per_month() == pytest.approx(30 * 0.84)
    assert bill.dollars_per_month(cause="submit") == pytest.approx(15.0)
    assert bill.dollars_per_month(cause="settle") == 0
    assert bill.requests() == 360_000
    assert bill.requests(cause="claim") == bill.requests(kind=Kind.GET) == 100_000
    assert bill.requests(cause="claim", kind=Kind.PUT) == 0
    assert sum(bill.dollars(cause=cause) for cause in bill.causes) == pytest.approx(bill.dollars())


def test_half_a_day_counts_twice_and_other_prices_count() -> None:
    counts = {("submit", Kind.PUT): 1000}
    day, half = Bill(counts, DAY), Bill(counts, DAY / 2)
    assert half.dollars_per_month() == 2 * day.dollars_per_month() == pytest.approx(0.30)
    assert Bill(counts, DAY, Prices(put=0.01)).dollars() == 2 * day.dollars()


def test_a_bill_is_what_came_between_two_readings() -> None:
    before = Counter({("submit", Kind.PUT): 3, ("open", Kind.GET): 5})
    after = Counter({("submit", Kind.PUT): 10, ("open", Kind.GET): 5, ("heartbeat", Kind.PUT): 2})
    bill = Bill.between(before, after, seconds=60)
    assert bill.counts == {("submit", Kind.PUT): 7, ("heartbeat", Kind.PUT): 2}
    assert bill.seconds == 60
    assert bill.causes == (*CAUSES, "heartbeat")


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (25, 1), (50, 2), (51, 3), (99, 4), (100, 4)]
)
def test_percentiles_are_values_that_occurred(percent: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], percent) == expected


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workers": 0}, "--workers must be between 1 and 1,000, not 0."),
        ({"workers": 1001}, "--workers must be between"),
        ({"tasks_per_day": 0}, "--tasks-per-day must be between"),
        ({"batch": 0}, "--batch must be between"),
        ({"concurrency": 0}, "--concurrency must be between"),
        ({"handler_seconds": -1.0}, "--handler-seconds must be between 0 and"),
        ({"handler_seconds": float("nan")}, "--handler-seconds must be between 0 and"),
        ({"days": 0.0}, "--days must be between"),
        ({"workers": 1, "concurrency": 1}, "1.2 handlers busy, and the fleet has 1."),
        ({"tasks_per_day": 30_000_000}, "30,000,000 submits a day are more than can be simulated"),
        ({"keyed": True, "batch": 10}, "--keyed and --gather-seconds are for tasks"),
        ({"gather_seconds": 0.1, "keyed": True}, "Tasks with a key are not gathered"),
        ({"gather_seconds": 60.0}, "gathered for more than 0 and at most 10 s"),
        ({"tasks_per_day": 10, "batch": 100}, "Not one batch of 100 comes"),
    ],
)
def test_a_workload_that_cannot_be_is_one_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Workload(**wrong)
    assert said in caught.value.message


def test_tasks_that_take_no_time_cannot_saturate() -> None:
    with pytest.raises(InvalidInput, match="--handler-seconds must be more than 0"):
        run_saturated(replace(SMALL, handler_seconds=0.0), Window(10.0))


def test_of_a_large_load_a_part_is_simulated() -> None:
    small, reference = window_of(SMALL), window_of(FLEET)
    assert small.is_whole
    assert small.seconds == SMALL.days * DAY
    assert not reference.is_whole
    assert HOUR < reference.seconds < DAY
    assert window_of(FLEET, full=True) == Window(DAY)
    shared = window_of(replace(FLEET, mode=DiscoveryMode.SHARED))
    assert shared.seconds < reference.seconds
    assert window_of(replace(FLEET, tasks_per_day=5_000_000)).seconds < reference.seconds


def test_a_window_has_at_least_one_batch() -> None:
    rare = Workload(workers=1000, mode=DiscoveryMode.SHARED, tasks_per_day=1000, batch=1000, days=3)
    assert window_of(rare).seconds == DAY


@pytest.fixture(scope="module")
def small() -> Figures:
    return price(SMALL)


def test_a_small_load_costs_three_puts_a_task_and_what_the_fleet_costs(small: Figures) -> None:
    bill, tasks = small.steady.bill, small.steady.tasks
    assert tasks == 432
    assert bill.requests(cause="submit", kind=Kind.PUT) == tasks
    # Tasks in flight at the edges of the window are settled on the other side of it.
    assert bill.requests(cause="claim", kind=Kind.PUT) == pytest.approx(tasks, abs=5)
    assert bill.requests(cause="settle", kind=Kind.PUT) == pytest.approx(tasks, abs=5)
    assert bill.requests(cause="monitor", kind=Kind.DELETE) > tasks / 2
    assert bill.requests(cause="open") == 0
    assert bill.seconds == small.window.seconds == SMALL.days * DAY
    assert small.unstarted == 0
    assert 0 <= small.steady.start_seconds[0] < 0.2
    assert len(small.idle.first_seconds) == 3
    assert small.idle.bill.requests(cause="submit") == 0


def test_the_figures_for_programs_agree_with_each_other(small: Figures) -> None:
    said = small.as_dict()
    tasks_per_month = 30 * SMALL.tasks_per_day
    more = said["dollars_per_month"] - said["idle_dollars_per_month"]
    assert said["dollars_per_million"] == pytest.approx(more / tasks_per_month * 1e6)
    assert said["dollars_per_month"] > said["idle_dollars_per_month"] > 0
    for parts in ("requests_per_task_by_kind", "requests_per_task_by_cause"):
        assert sum(said[parts].values()) == pytest.approx(said["requests_per_task"])
    for total in ("dollars_per_month", "idle_dollars_per_month"):
        assert sum(said[f"{total}_by_cause"].values()) == pytest.approx(said[total])
    assert set(said["dollars_per_month_by_cause"]) >= set(CAUSES)
    assert said["mode"] == "leased"
    assert said["simulated_tasks"] == 432
    assert said["simulated_days"] == SMALL.days
    assert 0 < said["start_seconds_p50"] <= said["start_seconds_p99"] < 10
    assert said["first_start_seconds_after_idle_hour"] == max(small.idle.first_seconds) < 10


def test_a_fleet_that_cannot_keep_up_says_so() -> None:
    bill = Bill({("submit", Kind.PUT): 4}, HOUR)
    late = Figures(SMALL, Window(HOUR), Steady(bill, 4, (0.5,)), Idle(bill, ()))
    assert late.unstarted == 3
    assert late.start_seconds(50) == 0.5
    none = Figures(SMALL, Window(HOUR), Steady(bill, 4, ()), Idle(bill, ()))
    assert none.as_dict()["start_seconds_p99"] is None
    assert none.as_dict()["first_start_seconds_after_idle_hour"] is None


def test_the_same_seed_gives_the_same_figures() -> None:
    window = Window(300.0, warm_up_seconds=60.0)
    first = run_steady(SMALL, window)
    assert first == run_steady(SMALL, window)
    assert first != run_steady(replace(SMALL, seed=1), window)


# At S3 Standard's prices, for 50 workers: about 5 % above what these windows give. Figures of
# longer ones are in docs/cost.md.


def test_the_reference_load_costs_little_more_than_its_puts_and_starts_within_a_second() -> None:
    run = run_steady(FLEET, Window(200.0, warm_up_seconds=100.0))
    per_task = {kind: run.bill.requests(kind=kind) / run.tasks for kind in Kind}
    assert per_task[Kind.PUT] < 3.14
    assert per_task[Kind.LIST] < 0.56
    # 45 are the three puts of each task; the 5 % are of what is left.
    assert run.bill.dollars_per_month() <= 57.4
    assert percentile(run.start_seconds, 50) <= 1.0


@pytest.mark.proof
def test_batches_of_a_hundred_are_cheap_and_start_within_5_seconds() -> None:
    # Batches come as regularly as looks, so one world is a matter of luck.
    loads = [replace(FLEET, batch=100, seed=seed) for seed in range(some(4))]
    runs = [run_steady(load, Window(HOUR / 4)) for load in loads]
    assert max(run.bill.dollars_per_month() for run in runs) <= 4.6
    assert percentile(sorted(each for run in runs for each in run.start_seconds), 50) <= 5.0


@pytest.mark.proof
def test_a_million_tasks_in_batches_of_a_thousand_cost_little_beyond_idle() -> None:
    # Half an hour may have no moment in which three packs come at once: then it is far cheaper.
    load = replace(FLEET, tasks_per_day=1_000_000, batch=1000, seed=2)
    run = run_steady(load, Window(1.5 * HOUR))
    assert run.bill.dollars_per_month() <= 6.6


def test_a_pack_of_a_thousand_takes_few_puts() -> None:
    load = replace(FLEET, workers=5, batch=1000)
    run = run_steady(load, Window(2 * HOUR))
    packs = run.tasks / 1000
    assert packs == 8
    causes = ("submit", "claim", "settle", "heartbeat")
    puts = sum(run.bill.requests(cause=cause, kind=Kind.PUT) for cause in causes)
    assert puts / packs <= 20


def test_an_idle_fleet_costs_about_2_dollars_and_wakes_up_within_5_seconds() -> None:
    run = run_idle(FLEET, seconds=900.0, tries=1)
    assert run.bill.dollars_per_month() <= 2.1
    (first,) = run.first_seconds
    assert first <= 5


def test_requests_to_process_a_task_hardly_grow_with_the_fleet() -> None:
    load = replace(FLEET, concurrency=4, handler_seconds=2.0)
    told: list[str] = []
    window = Window(40.0, warm_up_seconds=60.0)
    growth = saturate(load, fleets=(1, 16), window=window, tell=told.append)
    assert told == ["a fleet of 1", "a fleet of 16"]
    (_, one), (_, many) = growth.by_workers
    assert (one.busy, many.busy) == (1, 16)
    assert many.tasks > 14 * one.tasks
    # A worker with enough to do reads the doorbell every four seconds, however many tasks it runs.
    doorbell = one.bill.requests(cause="bell", kind=Kind.GET)
    assert doorbell <= 40 / 4
    assert 4 <= one.requests_per_task - doorbell / one.tasks < 4.2
    assert growth.percent < 10
    said = growth.as_dict()
    assert said["growth_percent"] == growth.percent
    for fleet in said["fleets"]:
        by_cause = fleet["requests_per_task_by_cause"]
        assert "submit" not in by_cause
        assert sum(by_cause.values()) == pytest.approx(fleet["requests_per_task"])


def test_submits_do_not_count_as_processing() -> None:
    counts = {("submit", Kind.PUT): 50, ("claim", Kind.PUT): 20, ("settle", Kind.PUT): 10}
    assert Saturated(Bill(counts, 60.0), tasks=10, busy=1).requests_per_task == 3


def test_deletes_by_tombstone_cost_tasks_without_a_key_nothing() -> None:
    window = Window(600.0, warm_up_seconds=600.0)
    run = run_steady(SMALL, window)
    buried = run_steady(replace(SMALL, by_tombstone=True), window)
    assert run.bill.requests(kind=Kind.DELETE) > run.tasks
    assert buried.bill.counts == run.bill.counts


def test_the_price_of_the_tombstones_of_keys_is_told() -> None:
    figures = price(replace(SMALL, days=0.01, by_tombstone=True))
    # Two puts a key; and 2,000 lists more every ten minutes.
    assert figures.tombstone_dollars_per_million_keys == pytest.approx(10.0)
    assert figures.tombstone_dollars_per_month == pytest.approx(30 * 144 * 2_000 * 5e-6)
    text = figures_text(figures)
    assert "deletes by tombstone" in text.splitlines()[0]
    assert "Tombstones, a million keys $10.00, and $43.20 a month from then on" in text
    assert figures.as_dict()["deletes"] == "tombstone"


BUSY = replace(SMALL, tasks_per_day=864_000, days=0.01, handler_seconds=0.01)


def test_what_is_gathered_costs_as_batches_of_what_comes_in_that_time() -> None:
    run = run_steady(replace(BUSY, gather_seconds=1.0), Window(60.0, warm_up_seconds=60.0))
    puts = run.bill.requests(cause="submit", kind=Kind.PUT)
    # Ten come in a second; the first of a pack begins it.
    assert run.tasks / 13 < puts < run.tasks / 8
    assert len(run.start_seconds) == run.tasks


def test_a_key_costs_a_pointer() -> None:
    run = run_steady(replace(SMALL, keyed=True), Window(1200.0, warm_up_seconds=600.0))
    assert run.bill.requests(cause="submit", kind=Kind.PUT) == 2 * run.tasks
    assert "each with a key" in figures_text(price(replace(SMALL, days=0.01, keyed=True)))
