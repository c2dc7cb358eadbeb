"""What a worker has done, in figures for Prometheus. Counted in memory; it costs no requests.

Counters begin at nought with the worker. What a task cost is what this process has spent on
requests, looks and leases included, divided by what it has settled: over a fleet, divide the sum of
the dollars by the sum of the tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from penstock.kernel.exposition import Family, Histogram, Labels, exposed
from penstock.store.base import ObjectStore, Wrapper
from penstock.store.metered import Meter, MeteredStore

HANDLER_SECONDS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600)
START_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class Metrics:
    """The figures of one worker."""

    def __init__(self) -> None:
        self.tasks: Counter[tuple[str, str]] = Counter()
        """Tasks that this worker has settled, by type and status."""
        self.attempts: Counter[tuple[str, str]] = Counter()
        """Attempts that have ended here, by type and ending."""
        self.running: Counter[str] = Counter()
        self._handler: dict[str, Histogram] = {}
        self._start: dict[str, Histogram] = {}

    def note_start(self, type: str, seconds: float) -> None:
        """A first attempt starts, so long after its task could."""
        if type not in self._start:
            self._start[type] = Histogram(START_SECONDS)
        self._start[type].note(seconds)

    def note_end(self, type: str, ending: str, seconds: float) -> None:
        """A handler has ended, after so long."""
        self.attempts[type, ending] += 1
        if type not in self._handler:
            self._handler[type] = Histogram(HANDLER_SECONDS)
        self._handler[type].note(seconds)

    def text(self, meter: Meter | None) -> str:
        """As Prometheus reads it; with the requests on this meter."""
        families = [*self._work(), *(self._requests(meter) if meter else ())]
        return exposed(families)

    def _work(self) -> Iterator[Family]:
        yield Family(
            "penstock_queue_tasks_total",
            "Tasks that this worker has settled.",
            "counter",
            _by(("type", "outcome"), self.tasks.items()),
        )
        yield Family(
            "penstock_queue_attempts_total",
            "Attempts that have ended.",
            "counter",
            _by(("type", "ending"), self.attempts.items()),
        )
        yield Family(
            "penstock_queue_attempts_running",
            "Handlers that run.",
            values=[({"type": kind}, count) for kind, count in sorted(self.running.items())],
        )
        yield Family(
            "penstock_queue_handler_seconds",
            "How long handlers run.",
            "histogram",
            histograms=[({"type": kind}, each) for kind, each in sorted(self._handler.items())],
        )
        yield Family(
            "penstock_queue_start_seconds",
            "How long after a task could start its first attempt does.",
            "histogram",
            histograms=[({"type": kind}, each) for kind, each in sorted(self._start.items())],
        )

    def _requests(self, meter: Meter) -> Iterator[Family]:
        requests = meter.billed + meter.unbilled
        yield Family(
            "penstock_queue_requests_total",
            "Requests to the store, by kind and by what they are for.",
            "counter",
            _by(("cause", "kind"), ((key, count) for key, count in requests.items())),
        )
        causes = [({"cause": each}, meter.dollars(label=each)) for each in meter.labels()]
        yield Family(
            "penstock_queue_dollars_total", "What the requests cost.", "counter", values=causes
        )
        settled = self.tasks.total()
        yield Family(
            "penstock_queue_dollars_per_task",
            "What the requests of this worker cost, for each task that it has settled.",
            values=[({}, meter.dollars() / settled)] if settled else [],
        )


def _by(
    names: tuple[str, str], counts: Iterable[tuple[tuple[str, str], int]]
) -> list[tuple[Labels, float]]:
    return [
        (dict(zip(names, map(str, key), strict=True)), float(count))
        for key, count in sorted(counts)
    ]


def meter_of(store: ObjectStore) -> Meter | None:
    """The meter that counts the requests of a store, if one does."""
    while isinstance(store, Wrapper):
        if isinstance(store, MeteredStore):
            return store.meter
        store = store.inner
    return None
