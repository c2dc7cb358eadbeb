"""The edges of a DAG: who feeds whom, in which order, and where it goes round in a circle.

Made once from a `Dag`; every question is then a walk without recursion, so that a chain of a
thousand jobs is no deeper than one of two. Answers are in a fixed order: the same DAG always
gives the same order. The router asks for readers, backpressure for everything upstream.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from penstock.dispatcher.dag.model import Dag


class Graph:
    """The edges between the jobs of a DAG. Only `order` needs a DAG without cycles.

    With `by_triggers`, an input that makes nothing run is no edge.
    """

    def __init__(self, dag: Dag, *, by_triggers: bool = False) -> None:
        self.writers: Mapping[str, str] = {
            output.dataset: job.name for job in dag.jobs for output in job.outputs
        }
        """The job that writes each dataset."""
        self.feeders: Mapping[str, tuple[str, ...]] = {
            job.name: tuple(
                sorted(
                    {
                        self.writers[each.dataset]
                        for each in job.inputs
                        if each.dataset in self.writers and (each.is_trigger or not by_triggers)
                    }
                )
            )
            for job in dag.jobs
        }
        """The jobs that each job reads from."""
        readers: dict[str, list[str]] = {job.name: [] for job in dag.jobs}
        for name in sorted(self.feeders):
            for feeder in self.feeders[name]:
                readers[feeder].append(name)
        self.readers: Mapping[str, tuple[str, ...]] = {
            name: tuple(found) for name, found in readers.items()
        }
        """The jobs that read from each job."""

    def upstream(self, job: str) -> frozenset[str]:
        """Every job from which there is a way to this one, which is not among them."""
        return _closure(self.feeders, job)

    def downstream(self, job: str) -> frozenset[str]:
        """Every job to which there is a way from this one, which is not among them."""
        return _closure(self.readers, job)

    def order(self) -> tuple[str, ...]:
        """All jobs, each after those that it reads from; by name where that leaves a choice."""
        order, left = _sorted(self.feeders, self.readers)
        assert not left, "the order of a DAG with a cycle was asked for"
        return order

    def cycles(self) -> tuple[tuple[str, ...], ...]:
        """Ways that come back to where they begin, so that every cycle shares a job with one.

        Each begins with its first name, and follows the data.
        """
        feeders = {name: set(found) for name, found in self.feeders.items()}
        cycles = []
        for _ in range(len(feeders)):
            readers: dict[str, set[str]] = {name: set() for name in feeders}
            for name, found in feeders.items():
                for feeder in found:
                    readers[feeder].add(name)
            _, left = _sorted(feeders, readers)
            if not left:
                break
            cycle = _walk_back(feeders, left)
            cycles.append(cycle)
            feeders = {
                name: found - set(cycle) for name, found in feeders.items() if name not in cycle
            }
        return tuple(cycles)


def _closure(edges: Mapping[str, tuple[str, ...]], start: str) -> frozenset[str]:
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(edges[name])
    return frozenset(found - {start})


def _sorted(
    feeders: Mapping[str, tuple[str, ...] | set[str]],
    readers: Mapping[str, tuple[str, ...] | set[str]],
) -> tuple[tuple[str, ...], set[str]]:
    """The jobs in order, and those that are on a cycle or behind one."""
    missing = {name: len(found) for name, found in feeders.items()}
    ready = [name for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)
        order.append(name)
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    return tuple(order), set(feeders) - set(order)


def _walk_back(feeders: Mapping[str, set[str]], left: set[str]) -> tuple[str, ...]:
    """A cycle: every job that is left has a feeder that is left, so a walk back must repeat."""
    name = min(left)
    way: dict[str, None] = {}
    while name not in way:
        way[name] = None
        name = min(feeders[name] & left)
    names = list(way)
    cycle = names[names.index(name) :][::-1]
    first = cycle.index(min(cycle))
    return tuple(cycle[first:] + cycle[:first])
