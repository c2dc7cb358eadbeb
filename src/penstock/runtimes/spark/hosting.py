"""One host process, as the runtime sees it. Imports no Spark.

*Starting* until it says that it is ready, then *ready*, *retired* when it gets no more work, and
gone. It hears what the host says and passes it to the tickets that it is about. When the host is
gone, in whatever way, every ticket in it that has not ended fails with the reason: it was alone in
there, or it is handed back, because nobody knows whose fault it was, and runs alone the next time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.runtimes.offspring import Offspring
from penstock.runtimes.spark.bundles import Bundle, Ticket
from penstock.runtimes.spark.frames import (
    Begun,
    Broken,
    Bye,
    Drop,
    Ended,
    FromHost,
    Give,
    Hello,
    Over,
    Ready,
    Resident,
    Start,
    Told,
)

_log = logging.getLogger(__name__)

_WHO: Final = "The process of Spark"
_IN_COMPANY: Final = " Other tasks ran in it, so it is not counted, and runs alone the next time."
_SILENT: Final = "The process of Spark said nothing of this task."
_BYE_SECONDS: Final = 10.0


class HostProcess:
    """A host, and the bundles in it."""

    def __init__(
        self, child: Offspring[FromHost], *, folder: Path, log: Path, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when a bundle is over."""
        self.folder = folder
        self.log = log
        self.bundles: dict[int, Bundle] = {}
        self.is_retired = False
        self.is_leaving = False
        self.tasks_begun = 0
        self.resident_bytes = 0
        self.ready: Ready | None = None
        self._child = child
        self._changed = changed

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_gone(self) -> bool:
        return self._child.ended.is_set()

    @property
    def live(self) -> int:
        """How many bundles run in it, without those that are stuck."""
        return sum(1 for bundle in self.bundles.values() if not bundle.is_stuck)

    async def greet(self, hello: Hello, *, seconds: float) -> Ready:
        """Have it make a session; `WorkFailed` if it does not."""
        try:
            async with asyncio.timeout(seconds):
                await self._child.say(hello)
                heard = await self._child.hear()
        except TimeoutError:
            raise WorkFailed(
                f"The session of Spark did not start within {seconds:g} s; see {self.log}."
            ) from None
        match heard:
            case Ready():
                self.ready = heard
                return heard
            case Broken(reason=reason):
                raise WorkFailed(reason)
            case _:
                raise WorkFailed(f"{await self._child.why_ended(_WHO)} See {self.log}.")

    async def attend(self) -> str:
        """Hear it until it is gone; returns why that is."""
        while True:
            try:
                heard = await self._child.hear()
            except WorkFailed as error:
                return error.message
            match heard:
                case None:
                    return f"{await self._child.why_ended(_WHO)} See {self.log}."
                case Broken(reason=reason):
                    return reason
                case Over(run=number):
                    self._over(number)
                case Resident(bytes=size):
                    self.resident_bytes = size
                case Told() | Begun() | Ended():
                    self._pass_on(heard)
                case Ready():
                    pass

    def begin(self, bundle: Bundle) -> None:
        """Have it run a bundle."""
        self.bundles[bundle.number] = bundle
        self.tasks_begun += len(bundle.tickets)
        for ticket in bundle.tickets.values():
            try:
                self._child.tell(Give(run=bundle.number, work=ticket.work))
            except InvalidInput as error:
                ticket.fail(WorkFailed(error.message, is_retried=False))
        if bundle.is_wanted:
            # Until it says otherwise.
            bundle.serve(bundle.tickets)
            self._child.tell(Start(run=bundle.number))
        else:
            self._over(bundle.number)

    def drop(self, bundle: Bundle, ticket: Ticket) -> None:
        """Tell it that nobody wants this any more."""
        if bundle.number in self.bundles:
            self._child.tell(Drop(run=bundle.number, task_id=ticket.work.task_id))

    def kill(self) -> None:
        """End it by force, without waiting."""
        self._child.send_signal(signal.SIGKILL)

    async def leave(self) -> None:
        """End it politely, within a bound."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_BYE_SECONDS):
                await self._child.say(Bye())
                await self._child.ended.wait()
        await self.destroy()

    async def destroy(self) -> None:
        """End it by force; returns when it is gone."""
        await self._child.destroy()

    def lose(self, error: WorkFailed) -> None:
        """It is gone: fail what was in it, or hand it back."""
        if not isinstance(error, WorkReleased):
            error = self._died(error.message)
        for bundle in tuple(self.bundles.values()):
            bundle.fail(error)
            bundle.close()
        self.bundles.clear()

    def _died(self, reason: str) -> WorkFailed:
        if sum(bundle.left for bundle in self.bundles.values()) > 1:
            return WorkReleased(f"{reason}{_IN_COMPANY}", is_delayed=False, runs_alone=True)
        return WorkFailed(reason, runs_alone=True)

    def _over(self, number: int) -> None:
        bundle = self.bundles.pop(number, None)
        if bundle is not None:
            bundle.fail(WorkFailed(_SILENT))
            bundle.close()
            self._changed()

    def _pass_on(self, heard: Told | Begun | Ended) -> None:
        bundle = self.bundles.get(heard.run)
        tickets = bundle.tickets if bundle is not None else {}
        if isinstance(heard, Begun):
            if bundle is not None:
                bundle.serve(heard.task_ids)
        elif isinstance(heard, Told):
            for task_id in heard.task_ids:
                if task_id in tickets:
                    tickets[task_id].tell(heard.said)
        elif heard.task_id in tickets:
            ticket = tickets[heard.task_id]
            if heard.finished is not None:
                ticket.finish(heard.finished)
            elif heard.is_released:
                ticket.fail(WorkReleased(heard.reason))
            else:
                ticket.fail(WorkFailed(heard.reason, is_retried=heard.is_retried))
