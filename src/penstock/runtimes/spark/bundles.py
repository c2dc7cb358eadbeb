"""Work on its way to a host: tickets, and the bundles that they travel in. Imports no Spark.

A *ticket* is one call of `run`: its work, its voice, and how it ends. A *bundle* is what one host
runs as one: a ticket, or those of a batch. Bundles are *gathering* until all tickets of the batch
have come or a moment has passed, then *waiting* for a place, *running* in a host, and *over*. A
ticket that is dropped leaves a bundle that is not running yet; in one that runs it stays, unwanted.
While it runs it is *serving* some of its tickets, or all: the time limits of the others wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Finished, Voice, Work

GATHER_SECONDS: Final = 0.05


@dataclass(eq=False, slots=True)
class Ticket:
    """One call of `run`."""

    work: Work
    voice: Voice
    end: asyncio.Future[Finished]
    """Cancelled if nobody waits for it any more."""

    def finish(self, finished: Finished) -> None:
        if not self.end.done():
            self.end.set_result(finished)

    def fail(self, error: WorkFailed) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def tell(self, said: Mapping[str, Any]) -> None:
        if not self.end.done():
            self.voice.progress(said)

    def time(self, *, is_running: bool) -> None:
        if not self.end.done():
            self.voice.timed(is_running=is_running)


@dataclass(eq=False, slots=True)
class Bundle:
    """Tickets that are run as one, by the id of their task."""

    number: int
    expected: int
    tickets: dict[int, Ticket] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing of it runs any more."""
    is_stuck: bool = False
    """It was asked to end, and has not."""
    serving: frozenset[int] = frozenset()
    """The tasks that it works for now."""
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def runs_alone(self) -> bool:
        """Whether nothing else may run in its host."""
        return any(ticket.work.runs_alone for ticket in self.tickets.values())

    @property
    def left(self) -> int:
        """How many tickets have not ended by themselves: they may run, wanted or not."""
        ends = (ticket.end for ticket in self.tickets.values())
        return sum(1 for end in ends if not end.done() or end.cancelled())

    @property
    def is_vain(self) -> bool:
        """Whether it works for nobody who waits, though others of it may."""
        ends = [ticket.end for number, ticket in self.tickets.items() if number in self.serving]
        return any(end.cancelled() for end in ends) and all(end.done() for end in ends)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for something of it."""
        return any(not ticket.end.done() for ticket in self.tickets.values())

    def serve(self, task_ids: Iterable[int]) -> None:
        """From now on it works for these: their time begins, and that of the others waits."""
        self.serving = frozenset(task_ids)
        for number, ticket in self.tickets.items():
            ticket.time(is_running=number in self.serving)
        self._move()

    def close(self) -> None:
        """Nothing of it runs any more."""
        self.over.set()
        self._move()

    async def let_go(self) -> None:
        """Return when it is over, or works for somebody who waits."""
        while self.is_vain and not self.over.is_set():
            await self._moved.wait()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def fail(self, error: WorkFailed) -> None:
        """End whatever of it has not ended."""
        for ticket in self.tickets.values():
            # Each raises one of its own: a traceback belongs to one.
            ticket.fail(copy(error))


class Gathering:
    """Puts tickets of one batch into one bundle."""

    def __init__(self, whole: Callable[[Bundle], None]) -> None:
        """`whole` is given every bundle that is to be run."""
        self._whole = whole
        self._bundles: dict[str, tuple[Bundle, asyncio.TimerHandle]] = {}
        self._number = 0

    def add(self, ticket: Ticket) -> Bundle:
        """The bundle that the ticket is in."""
        batch, task_id = ticket.work.batch, ticket.work.task_id
        if not batch or ticket.work.batch_size < 2 or ticket.work.runs_alone:
            bundle = self._new(1)
            bundle.tickets[task_id] = ticket
            self._whole(bundle)
            return bundle
        if batch in self._bundles and task_id in self._bundles[batch][0].tickets:
            self._close(batch)
        if batch not in self._bundles:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(GATHER_SECONDS, self._close, batch)
            self._bundles[batch] = (self._new(ticket.work.batch_size), timer)
        bundle, _ = self._bundles[batch]
        bundle.tickets[task_id] = ticket
        if len(bundle.tickets) >= bundle.expected:
            self._close(batch)
        return bundle

    def drop(self, ticket: Ticket) -> bool:
        """Take a ticket out, if it is in a bundle that is still gathering."""
        batch, task_id = ticket.work.batch, ticket.work.task_id
        bundle = self._bundles[batch][0] if batch in self._bundles else None
        if bundle is None or bundle.tickets.get(task_id) is not ticket:
            return False
        del bundle.tickets[task_id]
        bundle.expected -= 1
        if len(bundle.tickets) >= bundle.expected:
            self._close(batch)
        return True

    def close(self) -> None:
        """Gather no longer."""
        for batch in tuple(self._bundles):
            self._close(batch)

    def _new(self, expected: int) -> Bundle:
        self._number += 1
        return Bundle(self._number, expected)

    def _close(self, batch: str) -> None:
        bundle, timer = self._bundles.pop(batch)
        timer.cancel()
        if bundle.tickets:
            self._whole(bundle)
