"""What one dispatcher has counted since it started: attempts, durations, bytes, calls of its API.

Counters of the process, as Prometheus expects them: each dispatcher counts what it has committed or
answered itself, after the commit, so a sum over all instances is right with any number of them, and
a restart is a counter that begins anew. Nothing is read from tables, from which retention removes
rows, and nothing is asked of Postgres. What a dispatcher has committed in the moment in which it
was killed is counted by nobody.

Labels are bounded: jobs are those of the DAG, `JOBS_MAX` of them in the life of a process and
`OTHERS` for all more; paths are those of the table of endpoints, and `OTHERS` for what is none.
Called by `penstock.dispatcher.tasks.lifecycle` and by the application of each listener.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from penstock.dispatcher.tasks.values import Claimed, Measured
from penstock.kernel.exposition import Family, Histogram

JOBS_MAX: Final = 1_000
OTHERS: Final = "(others)"
_TASK_SECONDS: Final = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)
_CALL_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Counters:
    """The counters of one dispatcher."""

    def __init__(self) -> None:
        self._jobs: set[str] = set()
        self._attempts: Counter[tuple[str, str]] = Counter()
        self._ran: dict[str, Histogram] = {}
        self._waited: dict[str, Histogram] = {}
        self._published: dict[str, Counter[str]] = {"bytes": Counter(), "rows": Counter()}
        self._calls: Counter[tuple[str, str, str, str]] = Counter()
        self._took: dict[tuple[str, str, str], Histogram] = {}

    def note_begun(self, claimed: Iterable[Claimed]) -> None:
        """Attempts have begun."""
        for each in claimed:
            _histogram(self._waited, self._job(each.job)).note(each.waited_seconds)

    def note_ended(self, measured: Iterable[Measured]) -> None:
        """Attempts have ended."""
        for each in measured:
            job = self._job(each.job)
            self._attempts[job, each.outcome] += 1
            _histogram(self._ran, job).note(each.seconds)
            self._published["bytes"][job] += each.published_bytes
            self._published["rows"][job] += each.published_rows

    def note_call(
        self, *, listener: str, method: str, path: str, status: int, seconds: float
    ) -> None:
        """A call was answered. `path` is the one of the table of endpoints, if there is one."""
        method, path = (method, path) if path else (OTHERS, OTHERS)
        self._calls[listener, method, path, f"{status // 100}xx"] += 1
        if (found := self._took.get((listener, method, path))) is None:
            found = self._took[listener, method, path] = Histogram(_CALL_SECONDS)
        found.note(seconds)

    def families(self) -> Iterator[Family]:
        """All of it, for a scrape."""
        yield Family(
            "penstock_attempts_total",
            "Attempts that have ended, by job and outcome.",
            "counter",
            [
                ({"job": job, "outcome": outcome}, count)
                for (job, outcome), count in sorted(self._attempts.items())
            ],
        )
        for name, about, found in (
            ("attempt_seconds", "How long attempts ran, from claim to end.", self._ran),
            ("queue_seconds", "How long tasks that were due waited to be claimed.", self._waited),
        ):
            values = [({"job": job}, each) for job, each in sorted(found.items())]
            yield Family(f"penstock_{name}", about, "histogram", histograms=values)
        for unit, counts in self._published.items():
            yield Family(
                f"penstock_published_{unit}_total",
                f"{unit.title()} of what was published, as manifests have them.",
                "counter",
                [({"job": job}, count) for job, count in sorted(counts.items())],
            )
        yield Family(
            "penstock_http_requests_total",
            "Calls of the API that were answered, but probes.",
            "counter",
            [
                (dict(zip(("listener", "method", "path", "status"), key, strict=True)), count)
                for key, count in sorted(self._calls.items())
            ],
        )
        yield Family(
            "penstock_http_request_seconds",
            "How long calls of the API took, bodies and answers included.",
            "histogram",
            histograms=[
                (dict(zip(("listener", "method", "path"), key, strict=True)), each)
                for key, each in sorted(self._took.items())
            ],
        )

    def _job(self, name: str) -> str:
        if name not in self._jobs:
            if len(self._jobs) >= JOBS_MAX:
                return OTHERS
            self._jobs.add(name)
        return name


def _histogram(held: dict[str, Histogram], job: str) -> Histogram:
    if (found := held.get(job)) is None:
        found = held[job] = Histogram(_TASK_SECONDS)
    return found
