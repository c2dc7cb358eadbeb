"""Carries what is large to a handler and away from it: payloads, on the worker's side.

Before an attempt starts, a large input is fetched; when it has succeeded, a large result is stored
before the ending is written. Both happen while the task is held and its lease is renewed, and in
its slot, but not in the handler's time. What may come of it instead of a payload is an ending:

| | ending |
|---|---|
| the input is gone or damaged | failed, not retried: another attempt would find the same |
| the store does not give the input, for `FETCH_SECONDS` | given back: the attempt does not count |
| the store refuses the result, or it is nested too deep | failed, not retried |
| the store does not take the result, for `STORE_SECONDS` | given back: the lease is long over |

That the store refuses an input may pass as well, with its credentials or its policy: it is asked as
patiently. A crash between storing a result and the settlement leaves a payload of nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from penstock.kernel.errors import (
    OutcomeUnknown,
    PayloadLost,
    StoreError,
    Throttled,
    Unavailable,
)
from penstock.queue.endings import (
    DEPTH_MAX,
    Ending,
    Failed,
    GivenBack,
    Succeeded,
    is_too_deep,
    share_of,
)
from penstock.queue.ledger import Failure
from penstock.queue.pack import Pack
from penstock.queue.payloads import INLINE_BYTES_MAX, Payloads, raw, reference
from penstock.queue.places import PackAt
from penstock.queue.running.handlers import TaskContext

_log = logging.getLogger(__name__)

FETCH_SECONDS: Final = 60.0
STORE_SECONDS: Final = 600.0
_PAUSE_SECONDS_MAX: Final = 10.0
_PASSING: Final = (OutcomeUnknown, Throttled, Unavailable)

Answer = TypeVar("Answer")


class Carrier:
    """Carries the payloads of one pack's tasks."""

    def __init__(self, payloads: Payloads, at: PackAt) -> None:
        self._payloads = payloads
        self._at = at
        self._clock = payloads.store.clock.machine
        self._inline_bytes_max = min(INLINE_BYTES_MAX, share_of(at.count))

    def is_large(self, ending: Ending | None) -> bool:
        """Whether an attempt came to a result that is for a payload."""
        if not isinstance(ending, Succeeded) or ending.is_ref:
            return False
        return memoryview(ending.result).nbytes > self._inline_bytes_max

    async def bring(self, task: TaskContext, pack: Pack, place: int) -> Ending | None:
        """Fetch a task's input if it is large; the ending of an attempt that cannot have it.

        It is no longer tried when the attempt is asked to stop.
        """
        if place not in pack.refs:
            return None
        try:
            ref = reference(bytes(pack.inputs[place]))
            task.raw_input = await self._patiently(
                lambda: self._payloads.fetch(ref),
                what=f"the input of task {task.id} cannot be fetched",
                seconds=FETCH_SECONDS,
                # A task that is given back at once is claimed again at once, by all, for ever.
                passing=(StoreError,),
                is_wanted=lambda: not task.cancel_asked,
            )
        except (PayloadLost, msgspec.MsgspecError) as error:
            return Failed(Failure(type(error).__name__, str(error)))
        except StoreError as error:
            _log.warning("task %s is given back, its input cannot be had: %s", task.id, error)
            return GivenBack()
        return None

    async def store(self, ending: Ending | None, pack: Pack, place: int) -> Ending | None:
        """The ending, with its result as a payload if that is large."""
        if not isinstance(ending, Succeeded) or not self.is_large(ending):
            return ending
        body = bytes(ending.result)
        if is_too_deep(body):
            return _bad(f"it is nested more than {DEPTH_MAX} levels deep")
        task = self._at.task(place)
        try:
            ref = await self._patiently(
                lambda: self._payloads.put(task, body, submitted_ms=pack.submitted_ms),
                what=f"the result of task {task} cannot be stored",
                seconds=STORE_SECONDS,
            )
        except _PASSING:
            return GivenBack()
        except StoreError as error:
            return _bad(f"it has {len(body):,} bytes, and the store says: {error}")
        return Succeeded(raw(ref), is_ref=True)

    async def _patiently(
        self,
        ask: Callable[[], Awaitable[Answer]],
        *,
        what: str,
        seconds: float,
        passing: tuple[type[StoreError], ...] = _PASSING,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """Ask until there is an answer, or an error that does not pass by itself."""
        until = self._clock.monotonic() + seconds
        pause = 0.5
        while True:
            try:
                return await ask()
            except passing as error:
                if self._clock.monotonic() + pause >= until or not is_wanted():
                    raise
                _log.warning("%s, trying again: %s", what, error)
            await self._clock.sleep(self._payloads.entropy.uniform(pause / 2, pause))
            pause = min(_PAUSE_SECONDS_MAX, pause * 2)


def _bad(problem: str) -> Failed:
    return Failed(Failure("BadResult", f"The result cannot be stored: {problem}."))
