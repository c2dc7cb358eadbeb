"""What the handlers of the API work with.

Everything here is shared by all requests. `kick` is called after each call that may have made work
for the loops of this dispatcher; it returns at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.dispatcher.api.claiming import GatheredClaims
from penstock.dispatcher.api.gathering import Gathering
from penstock.dispatcher.backfills.backfills import Backfills
from penstock.dispatcher.capabilities.audit import Audit
from penstock.dispatcher.capabilities.issuing import Issuer
from penstock.dispatcher.capabilities.keys import Keys
from penstock.dispatcher.capabilities.minting import Minter
from penstock.dispatcher.dag.runtimes import Runtimes
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.datasets.sweeping import Sweeping
from penstock.dispatcher.deployment.moves import Deployment
from penstock.dispatcher.identity import Identities
from penstock.dispatcher.metrics.reading import Metrics
from penstock.dispatcher.outbox.outbox import Outbox
from penstock.dispatcher.pressure.pressures import Pressures
from penstock.dispatcher.queues.looks import Queues
from penstock.dispatcher.routing.router import Routing
from penstock.dispatcher.tasks.ending import Saying
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, Tasks
from penstock.dispatcher.tasks.values import Ended, Refusal
from penstock.dispatcher.views.datasets import DatasetViews
from penstock.dispatcher.views.views import Views
from penstock.dispatcher.wakeups.broker import Broker
from penstock.dispatcher.wakeups.bucket import QUEUE_NAME
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.store.base import ObjectStore

_FRESH_SECONDS: Final = 1.0


def no_kick() -> None:
    """Leave the loops to their own pace."""


class Readiness:
    """Whether the database answers, asked by one at a time and once a second at most.

    Probes need no identity, and must not take the connections of those who have one.
    """

    def __init__(self, views: Views) -> None:
        self._views = views
        self._asking = asyncio.Lock()
        self._clock = SystemClock()
        self._answered_at: float | None = None

    async def look(self) -> None:
        """Return if it answers. Raises `DatabaseUnavailable`."""
        async with self._asking:
            now = self._clock.monotonic()
            if self._answered_at is None or now - self._answered_at > _FRESH_SECONDS:
                self._answered_at = None
                await self._views.now()
                self._answered_at = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A dispatcher, as the API sees it."""

    database: Database
    tasks: Tasks
    routing: Routing
    deployment: Deployment
    backfills: Backfills
    pressures: Pressures
    metrics: Metrics
    outbox: Outbox
    views: Views
    identities: Identities
    keys: Keys
    issuer: Issuer
    """Capability tokens."""
    audit: Audit
    root: str
    """The URL below which attempts write, without a slash at its end."""
    runtimes: Runtimes | None = None
    """None judges no runtimes when a DAG is applied."""
    api_token: str | None = None
    """What callers of the public side have to show; None is nothing."""
    viewer_token: str | None = None
    """What those may show who only look; None is that there are none."""
    sweeping: Sweeping | None = None
    """What sweeps the store; None where there is none to be reached."""
    store: ObjectStore | None = None
    """Where datasets and queues lie, for people to see; None where there is none to be reached."""
    minter: Minter = field(default_factory=Minter)
    """Mints credentials of attempts; by itself it refuses all."""
    kick: Callable[[], None] = no_kick
    broker: Broker | None = None
    """Where workers wait for work; None where wake-ups go another way."""
    kick_after_ends: Callable[[], None] | None = None
    """The same after attempts have ended, which is most calls; None is `kick`."""
    entropy: Entropy = field(default_factory=system_entropy)
    logs: Path | None = None
    """The folder that workers of this machine write the logs of attempts to, if there is one."""
    end: Gathering[Saying, Ended | Refusal] = field(init=False)
    """Ends attempts: those of calls that come at the same time in one transaction."""
    claim: GatheredClaims = field(init=False)
    """Begins attempts: those of workers that ask at the same time in one transaction."""
    datasets: DatasetViews = field(init=False)
    readiness: Readiness = field(init=False)
    queues: Queues | None = field(init=False)
    """The queues in the store."""

    @property
    def first_queue(self) -> str:
        """The queue that pages show if none is named."""
        return QUEUE_NAME

    @property
    def has_pipeline(self) -> bool:
        """Whether there is more to look at than queues."""
        return True

    def __post_init__(self) -> None:
        end = Gathering(self.tasks.end, key=lambda said: said.fence.task_id, items_max=BATCH_MAX)
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "claim", GatheredClaims(self.tasks, self.issuer))
        object.__setattr__(self, "datasets", DatasetViews(self.database))
        object.__setattr__(self, "readiness", Readiness(self.views))
        store = self.store
        queues = Queues(store, entropy=self.entropy) if store is not None else None
        object.__setattr__(self, "queues", queues)
