"""What the handlers of the API work with: the services of one dispatcher.

Shared by all requests. `kick` is called after each call that may have made work for the loops of
this dispatcher; it returns at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from penstock.dispatcher.announcer import Announcer
from penstock.dispatcher.api.group_commit import GroupCommit, GroupedClaims
from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.bucket_queues import QueueInspector
from penstock.dispatcher.capabilities.audit import AuditLog
from penstock.dispatcher.capabilities.credentials import CredentialMinter
from penstock.dispatcher.capabilities.signing_keys import SigningKeys
from penstock.dispatcher.capabilities.tokens import TokenIssuer
from penstock.dispatcher.catalog.metadata_writer import MetadataWriter
from penstock.dispatcher.catalog.queries import Queries, QueryRelay
from penstock.dispatcher.catalog.read_tokens import ReadTokens
from penstock.dispatcher.catalog.scan_planner import ScanPlanner
from penstock.dispatcher.catalog.snapshots import History, Snapshots
from penstock.dispatcher.catalog.tables import Tables
from penstock.dispatcher.dag.model import Runtimes
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.datasets.sweeper import GRACE_SECONDS, StoreSweeper
from penstock.dispatcher.deployment import Deployer
from penstock.dispatcher.metrics import MetricsReader
from penstock.dispatcher.outbox import Outbox
from penstock.dispatcher.router import Router
from penstock.dispatcher.tasks.batches import BufferedBatches
from penstock.dispatcher.tasks.completion import AttemptReport
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, Tasks
from penstock.dispatcher.tasks.model import AttemptEnd, Refusal
from penstock.dispatcher.views.datasets import DatasetViews
from penstock.dispatcher.views.status import StatusViews
from penstock.dispatcher.wakeups.bucket import QUEUE_NAME
from penstock.dispatcher.wakeups.long_poll import Broker
from penstock.dispatcher.worker_registry import WorkerRegistry
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.protocol.identity import Identities
from penstock.store.base import ObjectStore

_FRESH_SECONDS: Final = 1.0


def no_kick() -> None:
    """Leave the loops to their own pace."""


class Readiness:
    """Whether the database answers, asked by one at a time and once a second at most.

    Probes need no identity, and must not take the connections of those who have one.
    """

    def __init__(self, views: StatusViews) -> None:
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
class ApiContext:
    """A dispatcher, as the API sees it."""

    database: Database
    tasks: Tasks
    routing: Router
    deployment: Deployer
    backfills: Backfills
    pressures: Backpressure
    metrics: MetricsReader
    outbox: Outbox
    views: StatusViews
    identities: Identities
    keys: SigningKeys
    issuer: TokenIssuer
    """Capability tokens."""
    audit: AuditLog
    root: str
    """The URL below which attempts write, without a slash at its end."""
    runtimes: Runtimes | None = None
    """None judges no runtimes when a DAG is applied."""
    api_token: str | None = None
    """What callers of the public side have to show; None is nothing."""
    viewer_token: str | None = None
    """What those may show who only look; None is that there are none."""
    sweeping: StoreSweeper | None = None
    """What sweeps the store; None where there is none to be reached."""
    store: ObjectStore | None = None
    """Where datasets and queues lie, for people to see; None where there is none to be reached."""
    minter: CredentialMinter = field(default_factory=CredentialMinter)
    """Mints credentials of attempts; by itself it refuses all."""
    kick: Callable[[], None] = no_kick
    broker: Broker | None = None
    """Where workers wait for work; None where wake-ups go another way."""
    announcer: Announcer | None = None
    """Announces what is committed here; None where the relay does."""
    kick_after_ends: Callable[[], None] | None = None
    """The same after attempts have ended, which is most calls; None is `kick`."""
    entropy: Entropy = field(default_factory=system_entropy)
    hot_url: str = ""
    """Where hot tables are read, without a password; empty if there are none."""
    relay: QueryRelay | None = None
    """The way to the query service; None where there is none."""
    logs: Path | None = None
    """The folder that workers of this machine write the logs of attempts to, if there is one."""
    end: GroupCommit[AttemptReport, AttemptEnd | Refusal] = field(init=False)
    """Ends attempts: those of calls that come at the same time in one transaction."""
    claim: GroupedClaims = field(init=False)
    """Begins attempts: those of workers that ask at the same time in one transaction."""
    presence: WorkerRegistry = field(init=False)
    """Which workers are there."""
    datasets: DatasetViews = field(init=False)
    readiness: Readiness = field(init=False)
    tables: Tables = field(init=False)
    """Datasets as tables."""
    history: History = field(init=False)
    """Their snapshots, for readers of our own."""
    planner: ScanPlanner | None = field(init=False)
    """Plans scans of them; None where there is no store to be reached."""
    writer: MetadataWriter | None = field(init=False)
    """Writes their files, for clients that plan scans themselves."""
    readers: ReadTokens = field(init=False)
    """Who may read tables, and nothing else."""
    queries: Queries = field(init=False)
    """What queries may read, and the log of them."""
    batches: BufferedBatches = field(init=False)
    """What tasks publish into buffered datasets."""
    queues: QueueInspector | None = field(init=False)
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
        ending = partial(self.tasks.end, claims_next=self.announcer is not None)
        end = GroupCommit(ending, key=lambda said: said.fence.task_id, items_max=BATCH_MAX)
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "claim", GroupedClaims(self.tasks, self.issuer))
        changed = self.broker.interrupt if self.broker is not None else no_kick
        object.__setattr__(self, "presence", WorkerRegistry(self.database, changed=changed))
        object.__setattr__(self, "datasets", DatasetViews(self.database))
        object.__setattr__(self, "readiness", Readiness(self.views))
        store = self.store
        queues = QueueInspector(store, entropy=self.entropy) if store is not None else None
        object.__setattr__(self, "queues", queues)
        grace = GRACE_SECONDS if self.sweeping is None else self.sweeping.grace_seconds
        snapshots = Snapshots(self.database, grace_seconds=grace)
        tables = Tables(self.database, root=self.root, snapshots=snapshots)
        object.__setattr__(self, "tables", tables)
        queries = Queries(self.database, snapshots, entropy=self.entropy)
        object.__setattr__(self, "queries", queries)
        object.__setattr__(self, "batches", BufferedBatches(self.database, entropy=self.entropy))
        history = History(self.database, snapshots)
        object.__setattr__(self, "history", history)
        planner = ScanPlanner(self.database, store) if store is not None else None
        object.__setattr__(self, "planner", planner)
        writer = (
            MetadataWriter(self.database, store, self.tables, planner, entropy=self.entropy)
            if store is not None and planner is not None
            else None
        )
        object.__setattr__(self, "writer", writer)
        object.__setattr__(self, "readers", ReadTokens(self.database, entropy=self.entropy))
