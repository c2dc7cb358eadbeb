"""Figures in the text format of Prometheus. Pure.

Gauges are read from the tables as they are at the moment: any dispatcher gives the same, so take
the maximum over all instances. Counters and histograms are of the dispatcher that is asked: scrape
every one of them, and take the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.dispatcher.metrics.counters import Counters
from penstock.dispatcher.metrics.figures import Figures
from penstock.kernel.exposition import Family, Labels, exposed

QUEUE_DESIRED: Final = "penstock_queue_desired"


def _gauge(name: str, about: str, values: Sequence[tuple[Labels, float]]) -> Family:
    return Family(name, about, values=values)


def exposition(figures: Figures, counters: Counters) -> str:
    """The text that a scrape is answered."""
    gauges = (*_overall(figures), *_operators(figures), *_jobs(figures))
    return exposed((*gauges, *counters.families()))


def _overall(figures: Figures) -> Iterator[Family]:
    for name, about, value in (
        ("events_pending", "Events that are not routed yet.", figures.events_pending),
        (
            "events_oldest_seconds",
            "How long the oldest event has waited to be routed.",
            figures.events_oldest_seconds,
        ),
        (
            "events_last_minute",
            "Events that came in within the last minute.",
            figures.events_last_minute,
        ),
        ("outbox_pending", "Side effects that are due and not sent.", figures.outbox_pending),
        ("outbox_parked", "Side effects that were given up.", figures.outbox_parked),
        ("workers", "Workers that were heard of within the last minute.", figures.workers),
    ):
        yield _gauge(f"penstock_{name}", about, [({}, value)])
    yield _gauge(
        "penstock_tasks_settled_last_minute",
        "Tasks that have ended within the last minute.",
        [({"status": status}, count) for status, count in figures.settled_last_minute.items()],
    )


def _operators(figures: Figures) -> Iterator[Family]:
    def gauge(name: str, about: str, values: Iterable[tuple[str, float]]) -> Family:
        told: list[tuple[Labels, float]] = [({"operator": each}, value) for each, value in values]
        return _gauge(f"penstock_operator_{name}", about, told)

    loads = figures.operators
    yield gauge("in_flight", "Tasks that run.", [(each.name, each.in_flight) for each in loads])
    yield gauge(
        "in_flight_max",
        "How many tasks may run at a time, where that is limited.",
        [(each.name, each.in_flight_max) for each in loads if each.in_flight_max is not None],
    )
    yield gauge(
        "waiting",
        "Tasks that could run now, counted to 10,000.",
        [(each.name, each.waiting) for each in loads],
    )
    yield gauge(
        "desired",
        "How many tasks should run at once, for autoscalers.",
        [(each.name, each.desired) for each in loads],
    )
    yield _gauge(
        QUEUE_DESIRED,
        "How many tasks of a queue should run at once, for autoscalers of its workers.",
        [({"queue": name}, desired) for name, desired in figures.queues.items()],
    )


def _jobs(figures: Figures) -> Iterator[Family]:
    yield _gauge(
        "penstock_job_waiting",
        "Tasks that wait, counted to 10,000.",
        [
            ({"job": job.name, "priority": priority}, count)
            for job in figures.jobs
            for priority, count in (("normal", job.normal), ("bulk", job.bulk))
        ],
    )
    for name, about, values in (
        ("running", "Tasks that run.", [job.running for job in figures.jobs]),
        ("dead", "Tasks that are dead, counted to 10,000.", [job.dead for job in figures.jobs]),
        (
            "oldest_seconds",
            "How long the oldest task that is due has waited.",
            [job.oldest_seconds for job in figures.jobs],
        ),
        ("paused", "Whether it is paused.", [job.is_paused for job in figures.jobs]),
        ("pressed", "Whether its queue is over its limits.", [j.is_pressed for j in figures.jobs]),
    ):
        told: list[tuple[Labels, float]] = [
            ({"job": job.name}, float(value))
            for job, value in zip(figures.jobs, values, strict=True)
        ]
        yield _gauge(f"penstock_job_{name}", about, told)
