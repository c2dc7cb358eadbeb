"""The registry of workers: which workers are there and what each should serve.

Kept in memory, written in bulk. A worker reports with every request that waits for work, or by
a `hello` every half minute while none is open. A worker that is new, has changed or leaves is
written before it is answered, all that come together by one statement. Everybody else who was
seen or waits here is written once in `WRITE_SECONDS`: two statements for any number of workers.
What is to be served is read for a `hello`, once for all that come together; waiting requests
are judged by what was read with the last write, and all are answered when that has changed, as
with another DAG.

Two dispatchers may know of one worker, after one of them has died. Each writes when it saw the
worker last, and an older time changes nothing: a worker that has left does not come back that
way. A worker is silent after 90 s: a `hello`, a write and a little. A crash costs one write:
workers go to another dispatcher, for which they are new. Called by the API; the wiring runs
`turn` in a loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.dag.model import queue_of
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.kernel.clock import Clock, SystemClock
from penstock.protocol.work import HelloAnswer, HelloAsk, OperatorAnswer

WRITE_SECONDS: Final = 30.0
_SILENT_SECONDS: Final = 90.0
_ROWS_MAX: Final = 2_000

Operators = Sequence[tuple[str, str]]
"""Operators to serve, each with its runtime."""


@dataclass(slots=True)
class _Worker:
    ask: HelloAsk
    operators: Operators
    seen_at: float
    written_at: float | None = None
    waits: int = 0
    """How many of its requests are open."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What the workers of some runtimes should serve, and when that was so."""

    operators: Operators
    now: datetime
    at: float


class WorkerRegistry:
    """The workers that this dispatcher has seen. `changed` is called when they should ask."""

    def __init__(
        self, database: Database, *, changed: Callable[[], None], clock: Clock | None = None
    ) -> None:
        self._database = database
        self._changed = changed
        self._clock = clock or SystemClock()
        self._workers: dict[str, _Worker] = {}
        self._served: dict[frozenset[str], _Served] = {}
        self._urgent: dict[str, _Worker] = {}
        """Those that are to be written before they are answered."""
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()
        self._dag_version: int | None = None

    async def hello(self, name: str, ask: HelloAsk, *, is_waiting: bool = False) -> HelloAnswer:
        """Note that a worker is there, or leaves, and tell it what it should serve."""
        since = -math.inf if is_waiting else self._clock.monotonic()
        served = await self._to_serve(frozenset(ask.runtimes), since=since)
        wanted = [
            each for each in served.operators if not ask.queues or queue_of(each[0]) in ask.queues
        ]
        before = self._workers.get(name)
        worker = _Worker(ask, wanted, self._clock.monotonic())
        if before is not None:
            worker.waits = before.waits
        self._workers[name] = worker
        is_as_before = before is not None and (before.ask, before.operators) == (ask, wanted)
        if before is not None and is_as_before and before.written_at is not None:
            worker.written_at = before.written_at
        else:
            self._urgent[name] = worker
            await self._write_urgent(name, worker)
        if ask.is_leaving and self._workers.get(name) is worker:
            del self._workers[name]
        passed = timedelta(seconds=self._clock.monotonic() - served.at)
        operators = [] if ask.is_leaving else [OperatorAnswer(*each) for each in wanted]
        return HelloAnswer(operators=operators, now=served.now + passed)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Within this, a request of the worker is open, and it is there."""
        if (worker := self._workers.get(name)) is not None:
            worker.waits += 1
        try:
            yield
        finally:
            # It may have said something else meanwhile.
            if worker is not None and (worker := self._workers.get(name, worker)).waits > 0:
                worker.waits -= 1
                worker.seen_at = self._clock.monotonic()

    def is_due(self, dag_version: int | None) -> bool:
        """Whether another DAG is in force than when this was asked last."""
        is_other, self._dag_version = dag_version != self._dag_version, dag_version
        return is_other

    async def turn(self) -> float:
        """Write who is there, and see what there is to serve; returns when to do it again."""
        now = self._clock.monotonic()
        seen = {
            name: each
            for name, each in self._workers.items()
            if each.waits or each.written_at is None or each.seen_at > each.written_at
        }
        async with self._writing:
            await self._write(seen)
        for name, each in list(self._workers.items()):
            if not each.waits and each.seen_at < now - _SILENT_SECONDS:
                del self._workers[name]
        await self._refresh({frozenset(each.ask.runtimes) for each in self._workers.values()})
        return WRITE_SECONDS

    async def _refresh(self, needed: Collection[frozenset[str]]) -> None:
        self._served = {each: found for each, found in self._served.items() if each in needed}
        for each in needed:
            await self._to_serve(each, since=self._clock.monotonic())

    async def _to_serve(self, runtimes: frozenset[str], *, since: float) -> _Served:
        """What these runtimes should serve, read at or after some time."""
        async with self._reading:
            before = self._served.get(runtimes)
            if before is not None and before.at >= since:
                return before
            found = self._served[runtimes] = await self._read(runtimes)
        if before is not None and before.operators != found.operators:
            self._changed()
        return found

    async def _read(self, runtimes: frozenset[str]) -> _Served:
        at = self._clock.monotonic()
        rows = await self._database.fetch("operators_to_serve", {"runtimes": sorted(runtimes)})
        operators = [(row["name"], row["runtime"]) for row in rows if row["name"] is not None]
        return _Served(operators, rows[0]["now"], at)

    async def _write_urgent(self, name: str, worker: _Worker) -> None:
        async with self._writing:
            # Whoever was first has written all that had come by then, unless it was cancelled.
            if worker.written_at is None:
                urgent, self._urgent = {**self._urgent, name: worker}, {}
                await self._write(urgent, is_now=True)

    async def _write(self, workers: Mapping[str, _Worker], *, is_now: bool = False) -> None:
        names = sorted(workers)
        for first in range(0, len(names), _ROWS_MAX):
            some = {name: workers[name] for name in names[first : first + _ROWS_MAX]}
            at = self._clock.monotonic()
            rows = [_row(name, each, at=None if is_now else at) for name, each in some.items()]

            async def work(connection: Connection, rows: Sequence[object] = rows) -> None:
                await connection.execute(query("hear_workers"), {"workers": Jsonb(rows)})

            await self._database.transact(work)
            for each in some.values():
                each.written_at = at


def _row(name: str, worker: _Worker, *, at: float | None) -> Mapping[str, object]:
    """What is written of a worker at some time, or when it was just seen."""
    ask, served = worker.ask, [operator for operator, _ in worker.operators]
    about = {"runtimes": ask.runtimes, "concurrency": ask.concurrency, "about": ask.about}
    if ask.is_leaving:
        # Who serves nothing is counted for no job; and it is told apart from the silent.
        about, served = {**about, "has_left": True, "served": served}, []
    silent_seconds = 0.0 if worker.waits or at is None else max(0.0, at - worker.seen_at)
    return {"name": name, "operators": served, "about": about, "silent_seconds": silent_seconds}
