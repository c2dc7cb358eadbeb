"""What a worker does for batches: it marks the packs that it settles, and ends what is complete.

Whether a mark was the last is found out by a try to end the batch: each time while few packs are
missing, so that small batches end at once, and otherwise at most once in `PAUSE_SECONDS`. Whatever
fails here is made up for by the chore.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import PenstockError
from penstock.queue.access import Access
from penstock.queue.batches import marks
from penstock.queue.batches.documents import OpenBatch
from penstock.queue.batches.ending import Ender
from penstock.queue.layout import is_batch
from penstock.queue.ledger import Ledger
from penstock.queue.places import PackAt
from penstock.queue.running.saying import Saying
from penstock.store.cell import Cell
from penstock.store.metered import labelled

PAUSE_SECONDS: Final = 5.0
FEW: Final = 16
_KNOWN_MAX: Final = 64


@dataclass(slots=True)
class _Known:
    """A batch that this worker has marked packs of."""

    cell: Cell[OpenBatch]
    is_nearly_done: bool = True
    try_at: float = float("-inf")


class BatchHearing:
    """Hears of the packs that one worker settles."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._ender = Ender(access)
        self._clock = access.store.clock.machine
        self._say = Saying(self._clock)
        self._known: dict[str, _Known] = {}

    async def settled(self, at: PackAt, ledger: Ledger) -> None:
        """Mark a pack that is settled, if it is of a batch. Never fails."""
        if not is_batch(ledger.batch):
            return
        try:
            with labelled("batches"):
                await marks.write(
                    self._access.store, self._access.layout, marks.mark_of(at, ledger)
                )
                await self._try_to_end(ledger.batch)
        except PenstockError as error:
            self._say(f"the batch {ledger.batch} is left to the chore: {error}")

    async def _try_to_end(self, batch: str) -> None:
        known = self._known.pop(batch, None) or _Known(self._ender.cell(batch))
        self._known[batch] = known
        while len(self._known) > _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if not known.is_nearly_done and self._clock.monotonic() < known.try_at:
            return
        tried = await self._ender.try_to_end(batch, known.cell)
        is_sealed = tried.batch is not None and tried.batch.sealed_ms > 0
        known.is_nearly_done = is_sealed and len(tried.missing) <= FEW
        known.try_at = self._clock.monotonic() + PAUSE_SECONDS
