"""What modes have in common in which nobody owns anything: several look at the same packs.

A pack in progress is left to its holder as long as its holder writes. One worker is elected to be
the monitor of the whole queue (`penstock.queue.election`); a term that nobody lays down ends by
itself. The election costs a request a minute for each worker: a read, or a put by the elected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.discovery.base import Discovery
from penstock.queue.discovery.scan import ALL, Run
from penstock.queue.election import RENEW_SECONDS, Election
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.owning.load import Load
from penstock.queue.places import PackAt
from penstock.store.base import ObjectStore

_log = logging.getLogger(__name__)

PATIENCE_SECONDS_MAX: Final = 12.0
RELEASE_SECONDS: Final = 5.0


class ElectedDiscovery(Discovery):
    """A mode whose monitor is elected; what it looks at is for the modes to say."""

    sight_seconds = 3.0
    reread_seconds = 3.0
    is_alone = False

    def __init__(
        self,
        store: ObjectStore,
        layout: QueueLayout,
        *,
        name: str,
        lease_seconds: float,
        entropy: Entropy,
        incarnation: Incarnation = NOBODY,
    ) -> None:
        super().__init__()
        self._lease_seconds = lease_seconds
        self.name = f"{name}-{new_id(entropy, characters=12)}"
        self._store = store
        self._entropy = entropy
        self._election = Election(
            store, layout, holder=self.name, entropy=entropy, incarnation=incarnation
        )

    def patience_seconds(self, at: PackAt) -> float:
        # Its holder writes at every third of a lease; of a pack of many there may be some left.
        return min(0.4 * self._lease_seconds, PATIENCE_SECONDS_MAX) if at.count == 1 else 0.0

    def guarded(self) -> Sequence[Run]:
        return ALL if self._election.is_elected else ()

    async def keep(self, load: Callable[[], Load]) -> None:  # noqa: ARG002 - nothing depends on it
        clock = self._store.clock.machine
        while True:
            try:
                await self._election.turn()
            except (StoreError, UnreadableObject) as error:
                _log.warning("the election of a monitor failed, trying again: %s", error)
            await clock.sleep(RENEW_SECONDS * self._entropy.uniform(0.8, 1.2))

    async def release(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._election.resign()
        except (StoreError, UnreadableObject, TimeoutError) as error:
            _log.info("the monitor's term ends by itself: %s", error)
