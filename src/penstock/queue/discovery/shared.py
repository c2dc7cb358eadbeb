"""`shared`: every worker looks at everything.

The simplest mode, for one worker or a few: nothing to own and nothing to take over. Every worker
pays for its own looks, and two that look at the same time may want the same pack; one of them
loses a request. A pack in progress is left to its holder as long as its holder writes. Each
tries what it finds in an order of its own, the most urgent first, and in a long list goes on from a
slot of its own choice. One worker is elected to be the monitor.
"""

from __future__ import annotations

from penstock.kernel.entropy import Entropy
from penstock.queue.discovery.base import Wanted
from penstock.queue.discovery.elected import ElectedDiscovery
from penstock.queue.discovery.scan import ALL, Scanner, View
from penstock.queue.incarnation import NOBODY, Incarnation
from penstock.queue.layout import QueueLayout
from penstock.queue.places import SLOTS
from penstock.store.base import ObjectStore


class SharedDiscovery(ElectedDiscovery):
    """Looks at all slots."""

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
        super().__init__(
            store,
            layout,
            name=name,
            lease_seconds=lease_seconds,
            entropy=entropy,
            incarnation=incarnation,
        )
        self._scanner = Scanner(store, layout)

    async def look(self, wanted: Wanted) -> View:
        minute = int((await self._store.now()).earliest // 60)
        view = await self._scanner.look(ALL, minute=minute, worth=wanted.worth, wanted=wanted.tasks)
        self._scanner.go_on_from(ALL[0], self._entropy.randrange(SLOTS))
        drawn = [(-each.priority, self._entropy.random(), each) for each in view.sights]
        view.sights = [each for _, _, each in sorted(drawn, key=lambda of: of[:2])]
        return view
