"""Which worker is the monitor of a queue that nobody owns shards of.

One cell holds the name of the elected and the end of its term. Whoever finds the term over takes
the next. The elected trusts its term only while it has surely not ended, and lays it down when it
stops. It is no harm if two believe in it: the monitor's work is conditional.
"""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar, Final

import msgspec

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import NotFound, UnreadableObject, VersionConflict
from penstock.kernel.wire import Stamped
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.store.base import ObjectStore
from penstock.store.cell import Cell
from penstock.store.metered import labelled
from penstock.store.time import Interval

TERM_SECONDS: Final = 180.0
RENEW_SECONDS: Final = 60.0


class Elected(Stamped, frozen=True, kw_only=True):
    """Who is the monitor, and until when."""

    kind: ClassVar[str] = "monitor"

    holder: str
    expires_ms: int
    incarnation: str = ""


class Election:
    """One worker's part in it. Call `turn` every `RENEW_SECONDS`."""

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        holder: str,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._holder = holder
        self._cell = Cell(store, layout.monitor, Elected, entropy=entropy)
        self._expires_ms = 0

    @property
    def is_elected(self) -> bool:
        """Whether this worker's term has surely not ended."""
        now = self._store.clock.estimate()
        return now is not None and now.latest * 1000 < self._expires_ms

    async def turn(self) -> None:
        """Renew the own term, or take one that is over."""
        with labelled("leases"):
            now = await self._store.now()
            try:
                await self._turn(now)
            except UnreadableObject:
                await self._remove_damaged(now)

    async def _remove_damaged(self, now: Interval) -> None:
        """What cannot be read counts as over when its term must be, and makes room."""
        self._expires_ms = 0
        with suppress(NotFound, VersionConflict):
            head = await self._store.head(self._cell.key)
            if now.earliest >= head.modified + TERM_SECONDS:
                await self._store.delete(self._cell.key, version=head.version)

    async def _turn(self, now: Interval) -> None:
        if not self.is_elected:
            present = await self._cell.read()
            if present is not None and self._is_another(present, now):
                return
        term_ms = int((now.latest + TERM_SECONDS) * 1000)

        def change(present: Elected | None) -> Elected | None:
            if present is not None and self._is_another(present, now):
                return present
            mine = Elected(
                holder=self._holder, expires_ms=term_ms, incarnation=self._incarnation.id
            )
            if present is None:
                return mine
            return msgspec.structs.replace(
                present, holder=mine.holder, expires_ms=term_ms, incarnation=mine.incarnation
            )

        elected = await self._cell.update(change)
        is_mine = elected is not None and elected.holder == self._holder
        self._expires_ms = elected.expires_ms if elected and is_mine else 0

    async def resign(self) -> None:
        """Lay the term down, so that another can begin at once."""
        if not self.is_elected:
            return
        self._expires_ms = 0

        def change(present: Elected | None) -> Elected | None:
            if present is None or present.holder != self._holder:
                return present
            return msgspec.structs.replace(present, expires_ms=0)

        with labelled("leases"):
            await self._cell.update(change)

    def _is_another(self, present: Elected, now: Interval) -> bool:
        """Whether somebody else's term may not be over."""
        if present.holder == self._holder or self._incarnation.is_ended(present.incarnation):
            return False
        return present.expires_ms > now.earliest * 1000
