"""Waiting for a task to end, in this process or in any other.

Nothing tells when a task ends: the bucket is asked, at first every tenth of a second and then more
and more rarely. Who waits for tasks of one pack shares the answers (`penstock.queue.watching`).
While the store is away the wait goes on: to wait is what was asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final

from penstock.kernel.errors import (
    NotFound,
    NotSettled,
    TaskCancelled,
    TaskFailed,
    Throttled,
    Unavailable,
)
from penstock.queue.places import PackAt, task_at
from penstock.queue.reading import Reader, not_found
from penstock.queue.views import TaskView, view_of_ledger
from penstock.queue.watching import Watch
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

_SECONDS_MIN: Final = 0.1
_SECONDS_MAX: Final = 5.0


class Waiter:
    """Waits for the tasks of one queue."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        access = reader.access
        self._clock = access.store.clock.machine
        self._watch = Watch(access.store, access.layout)

    async def result(self, id: str, *, seconds: float | None) -> Any:
        """What the task's handler returned, once it has; raises how it ended otherwise.

        Raises `NotSettled` if that takes longer than so many seconds.
        """
        at, place = task_at(id)
        began = self._clock.monotonic()
        pause = _SECONDS_MIN
        while True:
            left = None if seconds is None else max(0.0, began + seconds - self._clock.monotonic())
            view, result = None, None
            try:
                # Once at least, also without a timeout that would allow it.
                async with asyncio.timeout(None if left is None else max(left, 1.0)):
                    view = await self._settled(at, place, seconds=pause / 2)
                # What is large may take longer to fetch than there was to wait.
                result = await self._result(view)
            except TimeoutError:
                view = None
            except (Throttled, Unavailable) as error:
                view = None
                _log.warning("waiting for task %s, the store is away: %s", id, error)
            if view is not None:
                return _outcome(view, result)
            left = None if seconds is None else began + seconds - self._clock.monotonic()
            if left is not None and left <= 0:
                raise NotSettled(f"The task {id!r} has not ended in {seconds} s.", task=id)
            await self._clock.sleep(pause if left is None else min(pause, left))
            pause = min(_SECONDS_MAX, pause * 1.5)

    async def _result(self, view: TaskView | None) -> Any:
        """What a task has returned, fetched if it is large. Raises `PayloadLost`."""
        if view is None or view.result_ref is None:
            return view.result if view else None
        return json.loads(bytes(await self._reader.payloads.fetch(view.result_ref)))

    async def _settled(self, at: PackAt, place: int, *, seconds: float) -> TaskView | None:
        """The task if it is settled. Those of one pack share a reading that is recent enough."""
        with labelled("get"):
            if at.submitted_ms is None:
                # A key may have been used again: the pack tells.
                view = await self._reader.view(at, place)
                return view if view.is_settled else None
            try:
                ledger = await self._watch.ledger(at, seconds=seconds)
            except NotFound as error:
                raise not_found(at) from error
        settled = ledger is not None and ledger.tasks[place].status.settled
        return view_of_ledger(at, place, ledger, None) if ledger and settled else None


def _outcome(view: TaskView, result: Any) -> Any:
    match view.status:
        case "succeeded":
            return result
        case "cancelled":
            why = f": {view.message}" if view.message else "."
            raise TaskCancelled(f"The task {view.id!r} was cancelled{why}", task=view.id)
        case "expired":
            raise TaskFailed(
                f"The task {view.id!r} has expired: it had not begun in time.",
                task=view.id,
                error="Expired",
            )
    raise TaskFailed(
        f"The task {view.id!r} failed: {view.error}: {view.message}",
        task=view.id,
        error=view.error,
    )
