"""The cursor of an inbox: the minute before which everything in it was handled.

An object of its own, so that whatever becomes of it the worker keeps its lease. It only ever
grows, whoever saves it: a holder that was overtaken has handled what it says, too. It is saved a
minute after something was handled, and once an hour otherwise: 720 puts or $0.004 a month
idle, $0.22 at work. A crash leaves an older cursor; what was handled since is not in the inbox.
"""

from __future__ import annotations

import logging
from typing import ClassVar, Final

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import UnreadableObject
from penstock.kernel.wire import Stamped
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
from penstock.store.cell import Cell
from penstock.store.metered import labelled

_log = logging.getLogger(__name__)

BACK_MINUTES_MAX: Final = 24 * 60
"""A cursor that is older than this is not gone on from."""
LATE_MINUTES: Final = 2
"""The cursor stays so far behind the present: entries may come that late."""
SAVE_SECONDS: Final = 60.0
IDLE_SAVE_SECONDS: Final = 3600.0


class CursorAt(Stamped, frozen=True, kw_only=True):
    """Up to which minute an inbox was worked off."""

    kind: ClassVar[str] = "inbox-cursor"

    minute: int


class Cursor:
    """One inbox's cursor, in the hands of its worker."""

    def __init__(
        self, store: ObjectStore, layout: QueueLayout, *, worker: str, entropy: Entropy
    ) -> None:
        self._worker = worker
        self._clock = store.clock.machine
        self._cell = Cell(store, layout.inbox_cursor(worker), CursorAt, entropy=entropy)
        self._saved = 0
        self._saved_at = self._clock.monotonic()
        self.minute = 0
        """Everything in earlier minutes was handled."""
        self.has_worked = False
        """Whether something was handled since it was saved."""

    async def load(self, *, since_minute: int, now_minute: int) -> None:
        """Find out where to go on: the inbox began at `since_minute`. Raises `StoreError`."""
        saved: CursorAt | None = None
        with labelled("leases"):
            try:
                saved = await self._cell.read()
            except UnreadableObject as error:
                _log.warning("the inbox is read from its beginning: %s", error)
        minute = max(saved.minute, since_minute) if saved else since_minute
        self._saved = saved.minute if saved else 0
        least = now_minute - BACK_MINUTES_MAX
        if minute < least:
            _log.warning(
                "worker %s was away for %d hours: its inbox is read from 24 hours back, and what"
                " is older is found by scavenging",
                self._worker,
                (now_minute - minute) // 60,
            )
        self.minute = max(minute, least)

    def advance(self, *, handled_before: int, now_minute: int) -> None:
        """Everything before this minute was handled, by a list that began at `now_minute`."""
        self.minute = max(self.minute, min(handled_before, now_minute - LATE_MINUTES))

    async def save(self, *, at_once: bool = False) -> None:
        """Write it down if that is due, or `at_once`. Raises `StoreError`."""
        pause = SAVE_SECONDS if self.has_worked else IDLE_SAVE_SECONDS
        if self.minute <= self._saved:
            return
        if not at_once and self._clock.monotonic() < self._saved_at + pause:
            return
        minute = self.minute

        def change(present: CursorAt | None) -> CursorAt | None:
            if present is None:
                return CursorAt(minute=minute)
            if present.minute >= minute:
                return None
            return msgspec.structs.replace(present, minute=minute)

        self._saved_at = self._clock.monotonic()
        self.has_worked = False
        with labelled("leases"):
            try:
                await self._cell.update(change)
            except UnreadableObject as error:
                _log.warning("the cursor cannot be saved: %s", error)
        self._saved = minute
