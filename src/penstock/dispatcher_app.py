"""A dispatcher from settings: its parts, its loops and its listeners, the console among them.

Started in the order of need and stopped in the reverse: those who look at the console are let go
before the listeners are closed. Called by the command line.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.app import (
    aws_of,
    machine_name,
    make_cron_source,
    make_postgres,
    make_registry,
    root_of,
    secret_of_settings,
)
from penstock.console.application import Console, OpenAlertCount
from penstock.console.live import LivePages
from penstock.console.pages.table import SITE
from penstock.console.sessions import ConsoleSessions, EndedSessions
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.alerts.evaluator import EVALUATION_PACE_SECONDS, AlertEvaluator
from penstock.dispatcher.alerts.notifier import NOTIFIER_PACE_SECONDS, Notifier, destinations_of
from penstock.dispatcher.alerts.rules import read_alerts
from penstock.dispatcher.announcer import Announcer
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.routes import internal_app, public_app
from penstock.dispatcher.api.server import HttpListener, HttpServer
from penstock.dispatcher.backfills import Backfills
from penstock.dispatcher.backpressure import Backpressure
from penstock.dispatcher.capabilities.credentials import CredentialMinter, make_minter
from penstock.dispatcher.capabilities.tokens import Capabilities, capabilities_of, holding_of
from penstock.dispatcher.carriers import LambdaCarrier, LocalInvokeCarrier, WakeCarrier
from penstock.dispatcher.catalog.queries import QueryRelay
from penstock.dispatcher.cloudwatch import CloudWatch
from penstock.dispatcher.dag.model import PlatformOperator
from penstock.dispatcher.database.migrations import migrate_patiently
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.datasets.applier import COMPARE_SECONDS, Applier
from penstock.dispatcher.datasets.hot_tables import PostgresData
from penstock.dispatcher.datasets.maintainer import PASS_SECONDS as MAINTAINING_SECONDS
from penstock.dispatcher.datasets.maintainer import Maintainer
from penstock.dispatcher.datasets.projector import ProjectCarrier
from penstock.dispatcher.datasets.sweeper import StoreSweeper
from penstock.dispatcher.deployment import CutOverController, Deployer
from penstock.dispatcher.loop import Loop, Turn
from penstock.dispatcher.metrics import Counters, MetricsReader
from penstock.dispatcher.outbox import LOOK_SECONDS as RECONCILING_SECONDS
from penstock.dispatcher.outbox import (
    Outbox,
    OutboxCarrier,
    OutboxKind,
    Reconciler,
    Relay,
    RelayLimits,
)
from penstock.dispatcher.poller import (
    BY_ITSELF_SECONDS,
    LOOK_SECONDS,
    Poller,
    WatchedLoop,
    is_due,
    reaping_turn,
    routing_turn,
)
from penstock.dispatcher.range_operators import RangeOperators
from penstock.dispatcher.retention import PartitionExpirer, RowPruner
from penstock.dispatcher.router import Router, route_events
from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.dispatcher.sources.monitor import SourceMonitor
from penstock.dispatcher.tasks.batches import PASS_SECONDS as BATCHES_SECONDS
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.views.status import StatusViews
from penstock.dispatcher.wakeups.base import WakeUpSender
from penstock.dispatcher.wakeups.bucket import (
    BucketSender,
    wake_up_queue,
)
from penstock.dispatcher.wakeups.long_poll import WAITERS_MAX, Broker, LongPollSender
from penstock.dispatcher.wakeups.notifications import Notifications
from penstock.dispatcher.wakeups.sqs import SqsSender, SqsSettings
from penstock.dispatcher.worker_registry import WRITE_SECONDS
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.service import Service, Services
from penstock.protocol.identity import Identities
from penstock.settings import InstallationProfile, Settings, SignerKind, Wakeups
from penstock.store.base import ObjectStore
from penstock.store.opening import open_store

_REAP_SECONDS: Final = 5.0
_APPLY_SECONDS: Final = 0.2
_CONNECTIONS_PER_WAITER: Final = 3
"""Half of them are for workers: one that waits, and what they say besides."""


class _Kicks:
    """Kicks loops that are made after it: have the next turn of each begin at once."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def __call__(self) -> None:
        for each in self.loops:
            each.kick()


class Dispatcher(Service):
    """One dispatcher: its loops and its listeners, and a Postgres of its own if it has to."""

    def __init__(self, settings: Settings, *, emits_cron: bool = False) -> None:
        self._settings = settings
        self._emits_cron = emits_cron
        self._name = f"{machine_name()}-{new_id(system_entropy(), characters=6)}"
        self._stack = AsyncExitStack()
        self._serving: HttpServer | None = None
        self._broker = Broker() if settings.wakeups is Wakeups.LONG_POLL else None
        self._kick_ranges = _Kicks()

    @property
    def public_url(self) -> str:
        """Where people and programs find it."""
        assert self._serving is not None, "it is started"
        return self._serving.url("public")

    @property
    def internal_url(self) -> str:
        """Where workers and sources find it."""
        assert self._serving is not None, "it is started"
        return self._serving.url("internal")

    @property
    def bound(self) -> tuple[str, str]:
        """The addresses that the public and the internal listener have taken."""
        assert self._serving is not None, "it is started"
        return self._serving.bound("public"), self._serving.bound("internal")

    async def start(self) -> None:
        settings = self._settings
        settings.data.mkdir(parents=True, exist_ok=True)
        dsn = settings.postgres
        if not dsn:
            postgres = make_postgres(settings)
            await self._stack.enter_async_context(postgres)
            dsn = postgres.dsn
            data = settings.postgres_data or postgres.data_dsn
            settings = self._settings = replace(settings, postgres_data=data)
        # A pooler keeps neither the lock of migrations nor who listens.
        direct = settings.postgres_direct or dsn
        await migrate_patiently(direct)
        database = Database(dsn, connections_max=settings.connections)
        await self._stack.enter_async_context(database)
        store = await open_store(settings.store_url)
        self._stack.push_async_callback(store.close)
        own = dict.fromkeys(map(str, PlatformOperator), self._kick_ranges)
        sending = _sending(settings, direct, database, self._broker, own=own)
        sender, announcer = await self._stack.enter_async_context(sending)
        secret = secret_of_settings(settings)
        parts, loops = self._parts(database, store, sender, secret, announcer)
        await self._stack.enter_async_context(loops)
        sessions = _sessions(settings, database, secret)
        live = LivePages(clock=SystemClock(), over=sessions.over)
        console = _console(parts, sessions, live, hosts=settings.console_hosts)
        self._serving = HttpServer(
            [
                HttpListener("public", console, settings.host, settings.port),
                HttpListener(
                    "internal",
                    internal_app(parts),
                    settings.internal_host,
                    settings.internal_port,
                    connections_max=_CONNECTIONS_PER_WAITER * WAITERS_MAX,
                ),
            ]
        )
        await self._stack.enter_async_context(self._serving)
        await self._stack.enter_async_context(live)
        if self._broker is not None:
            # Of a process with few files fewer may wait: they are told so, not cut off.
            most = self._serving.connections_max("internal") // _CONNECTIONS_PER_WAITER
            self._broker.waiters_max = max(1, most)
            # Stopped first: workers that wait here go to another dispatcher.
            await self._stack.enter_async_context(self._broker)
        if self._emits_cron:
            here = replace(settings, dispatchers=(self.internal_url,))
            await self._stack.enter_async_context(make_cron_source(here))

    async def stop(self) -> None:
        await self._stack.aclose()

    def _parts(
        self,
        database: Database,
        store: ObjectStore,
        sender: WakeUpSender,
        secret: str,
        announcer: Announcer | None,
    ) -> tuple[ApiContext, Services]:
        """What answers requests, and what goes on beside them."""
        settings = self._settings
        after_calls, after_ends = _Kicks(), _Kicks()
        signing = _capabilities(settings, database)
        counters = Counters()
        relay = QueryRelay(settings.query_url) if settings.query_url is not None else None
        if relay is not None:
            self._stack.push_async_callback(relay.close)
        parts = ApiContext(
            database=database,
            tasks=Tasks(database, route=route_events, counters=counters),
            routing=Router(database),
            deployment=Deployer(database, why_not_hot=_why_not_hot(settings)),
            backfills=Backfills(database),
            pressures=Backpressure(database),
            metrics=MetricsReader(database, counters=counters),
            outbox=Outbox(database),
            views=StatusViews(database),
            identities=Identities(secret),
            runtimes=RegisteredRuntimes(make_registry(settings)),
            keys=signing.keys,
            issuer=signing.issuer,
            audit=signing.audit,
            root=root_of(settings),
            api_token=settings.api_token or None,
            viewer_token=settings.viewer_token or None,
            kick=after_calls,
            broker=self._broker,
            announcer=announcer,
            kick_after_ends=after_ends,
            store=store,
            sweeping=StoreSweeper(database, store, grace_seconds=settings.sweep_hours * 3600),
            minter=self._stack.enter_context(closing(_minter(settings))),
            hot_url=_hot_url(settings),
            relay=relay,
            logs=settings.data.absolute() / "logs",
        )
        working = self._working(
            parts, store, sender, after_calls=after_calls, after_ends=after_ends
        )
        others = [*_loops(settings, parts), *_alerting(settings, database, name=self._name)]
        return parts, Services([*signing.services, *working, *others])

    def _working(
        self,
        parts: ApiContext,
        store: ObjectStore,
        sender: WakeUpSender,
        *,
        after_calls: _Kicks,
        after_ends: _Kicks,
    ) -> list[Service]:
        """What works on what calls have committed: the relay, the loops, and who kicks them."""
        database = parts.database
        operators = RangeOperators(database, parts.tasks, name=self._name)
        ranges = Loop("range operators", operators.turn, idle_seconds=BY_ITSELF_SECONDS)
        self._kick_ranges.loops.append(ranges)
        carriers = _carriers(self._settings, parts, sender, own=ranges.kick)
        carriers[OutboxKind.PROJECT] = ProjectCarrier(database, store)
        relay = Relay(database, carriers=carriers, limits=_relay_limits(database))
        relaying = Loop("relay", relay.turn, idle_seconds=BY_ITSELF_SECONDS)
        routing = routing_turn(parts.routing, [relaying, ranges])
        router = Loop("router", routing, idle_seconds=BY_ITSELF_SECONDS)
        backfiller = Loop("backfills", parts.backfills.turn, idle_seconds=BY_ITSELF_SECONDS)
        after_calls.loops += [router, relaying, backfiller, ranges]
        watched = [
            WatchedLoop(router, lambda found: found["is_pending"] or found["is_held"]),
            WatchedLoop(relaying, is_due),
            WatchedLoop(backfiller, lambda found: found["is_backfilling"]),
            WatchedLoop(ranges, lambda found: found["is_ranging"]),
            _applying(self._settings, parts, router),
            *_watched(parts),
        ]
        poller = Loop("poller", Poller(database, watched).turn, idle_seconds=LOOK_SECONDS)
        # Their events are routed already; what else follows from them, the poller finds.
        after_ends.loops += [relaying, poller]
        return [relay, *dict.fromkeys(each.loop for each in watched), poller]


def _applying(settings: Settings, parts: ApiContext, router: Loop) -> WatchedLoop:
    """What has hot tables follow what is published; their events are routed then."""
    dsn, reader = settings.postgres_data, settings.hot_tables_reader
    applier = Applier(
        parts.database,
        PostgresData(dsn, reader=reader) if dsn else None,
        Transfer(settings.store_url),
        root=parts.root,
        released=router.kick,
    )
    loop = Loop("applier", applier.turn, idle_seconds=COMPARE_SECONDS)
    return WatchedLoop(loop, lambda found: found["is_applying"], every_seconds=_APPLY_SECONDS)


def _hot_url(settings: Settings) -> str:
    """How whoever reads tables gets to them, as a libpq connection string without a password."""
    if not settings.postgres_data:
        return ""
    said = conninfo_to_dict(settings.postgres_data)
    wanted = ("host", "port", "dbname", "requirepeer")
    kept = {name: str(said[name]) for name in wanted if said.get(name)}
    return make_conninfo(**kept, user=settings.hot_tables_reader)


def _why_not_hot(settings: Settings) -> str:
    """Why no dataset can have a table; empty if it can."""
    if not settings.postgres_data:
        return "This installation has no Postgres for tables: set `postgres_data`."
    if find_spec("pyarrow") is None:
        return "The dispatcher reads Parquet with pyarrow: pip install 'penstock[spark]'."
    return ""


def _watched(parts: ApiContext) -> list[WatchedLoop]:
    """What every dispatcher looks after as long as there is something to look after."""
    database = parts.database
    monitor = SourceMonitor(database, parts.tasks)
    presence = parts.presence

    def loop(name: str, turn: Turn, *, idle_seconds: float = BY_ITSELF_SECONDS) -> Loop:
        return Loop(name, turn, idle_seconds=idle_seconds)

    reaper = loop("reaper", reaping_turn(parts.tasks))
    return [
        # While anything runs it says that it does, for those who wonder whether workers could be
        # heard; what has expired waits for no more than a moment.
        WatchedLoop(reaper, lambda found: found["is_running"], every_seconds=_REAP_SECONDS),
        WatchedLoop(reaper, lambda found: found["is_expired"]),
        WatchedLoop(
            loop("reconciler", Reconciler(database).turn),
            lambda found: found["is_waiting"] or found["is_parked"],
            every_seconds=RECONCILING_SECONDS,
        ),
        WatchedLoop(
            loop("pressure", parts.pressures.turn),
            lambda found: found["is_waiting"],
            every_seconds=2.0,
        ),
        WatchedLoop(
            loop("batches", parts.batches.turn),
            lambda found: found["is_buffered"],
            every_seconds=BATCHES_SECONDS,
        ),
        WatchedLoop(
            loop("builder", CutOverController(database, parts.deployment).turn),
            lambda found: found["is_building"],
            every_seconds=2.0,
        ),
        WatchedLoop(
            loop("presence", presence.turn, idle_seconds=WRITE_SECONDS),
            lambda found: presence.is_due(found["dag_version"]),
        ),
        WatchedLoop(
            loop("source monitor", monitor.turn),
            lambda found: monitor.is_due(found["dag_version"]),
            every_seconds=2.0,
        ),
    ]


def _loops(settings: Settings, parts: ApiContext) -> list[Service]:
    """What every dispatcher looks after by itself."""
    database = parts.database
    keeping = PartitionExpirer(database, grace_seconds=settings.sweep_hours * 3600)
    turns: list[tuple[str, Turn, float]] = [
        ("retention", RowPruner(database, days=settings.retention_days).turn, 60.0),
        ("keeping", keeping.turn, 60.0),
        ("maintainer", Maintainer(database).turn, MAINTAINING_SECONDS),
        ("snapshots", parts.tables.snapshots.turn, 15.0),
    ]
    if parts.writer is not None:
        turns.append(("table files", parts.writer.turn, 15.0))
    if parts.sweeping is not None:
        turns.append(("sweeping", parts.sweeping.turn, 60.0))
    if settings.profile is InstallationProfile.AWS:
        turns.append(("cloudwatch", CloudWatch(database, aws=aws_of(settings)).turn, 60.0))
    return [Loop(name, turn, idle_seconds=seconds) for name, turn, seconds in turns]


def _alerting(settings: Settings, database: Database, *, name: str) -> list[Service]:
    """The evaluator of alert rules and, where there are destinations, the notifier."""
    alerts = read_alerts(settings.alerts)
    destinations = destinations_of(alerts, environment=os.environ)
    notifier = Notifier(database, destinations, url=alerts.url)
    notices = Loop("alert notices", notifier.turn, idle_seconds=NOTIFIER_PACE_SECONDS)
    evaluator = AlertEvaluator(
        database,
        alerts,
        name=name,
        unserved=("lambda",) if settings.profile is InstallationProfile.AWS else (),
        days=settings.retention_days,
        told=notices.kick,
    )
    alerting = Loop("alerts", evaluator.turn, idle_seconds=EVALUATION_PACE_SECONDS)
    return [alerting, notices] if destinations else [alerting]


def _capabilities(settings: Settings, database: Database) -> Capabilities:
    kms_key = settings.kms_key if settings.signer is SignerKind.KMS else None
    folder = settings.data.absolute() / "keys"
    holding = holding_of(kms_key=kms_key, folder=folder, aws=aws_of(settings))
    return capabilities_of(database, holding, root=root_of(settings), org=settings.org)


def _minter(settings: Settings) -> CredentialMinter:
    return make_minter(
        store_url=settings.store_url,
        role=settings.task_role,
        sts=Aws(
            region=settings.sts_region or settings.aws_region or None,
            endpoint=settings.sts_endpoint or settings.aws_endpoint or None,
        ),
        environment=os.environ,
        clock=SystemClock(),
    )


@asynccontextmanager
async def _sending(
    settings: Settings,
    direct: str,
    database: Database,
    broker: Broker | None,
    *,
    own: Mapping[str, Callable[[], None]],
) -> AsyncIterator[tuple[WakeUpSender, Announcer | None]]:
    """What sends wake-ups; `broker` is where workers wait, if they do.

    Where nobody else has to be told, work is announced after its commit, without the relay.
    """
    async with AsyncExitStack() as stack:
        sender: WakeUpSender
        announcer = None
        match settings.wakeups:
            case Wakeups.LONG_POLL:
                assert broker is not None, "made for it"
                notifications = Notifications(
                    direct, database, heard=broker.send, has_waiters=lambda: broker.waiters > 0
                )
                await stack.enter_async_context(notifications)
                sender = LongPollSender(broker, notifications.publish)
                if settings.profile is InstallationProfile.LITE:
                    announcer = Announcer(
                        here=broker.send, elsewhere=notifications.publish, own=own
                    )
                    await stack.enter_async_context(announcer)
                    database.announce = announcer.announce
            case Wakeups.BUCKET:
                sender = BucketSender(wake_up_queue(settings.store_url))
            case Wakeups.SQS:
                sqs = SqsSettings(prefix=settings.sqs_prefix)
                sender = SqsSender(aws_of(settings), settings=sqs)
        yield await stack.enter_async_context(sender), announcer


def _carriers(
    settings: Settings, parts: ApiContext, sender: WakeUpSender, *, own: Callable[[], None]
) -> dict[str, OutboxCarrier]:
    platform_operators = {str(each): own for each in PlatformOperator}
    if settings.profile is InstallationProfile.LITE:
        wake = WakeCarrier(sender, own=platform_operators)
        return {OutboxKind.WAKE: wake, OutboxKind.INVOKE: LocalInvokeCarrier(sender)}
    wake = WakeCarrier(sender, own=platform_operators, invokes=parts.database, kick=parts.kick)
    functions = LambdaCarrier(
        parts.database,
        dispatcher_url=settings.dispatcher_urls[0],
        token_for=parts.issuer.invocation,
        aws=aws_of(settings),
    )
    return {OutboxKind.WAKE: wake, OutboxKind.INVOKE: functions}


def _relay_limits(database: Database) -> RelayLimits:
    """Where wake-ups need no relay, what is left to it waits for more of the same."""
    return RelayLimits() if database.announce is None else RelayLimits(pace_seconds=0.25)


def _sessions(settings: Settings, database: Database, secret: str) -> ConsoleSessions:
    return ConsoleSessions(
        secret,
        clock=SystemClock(),
        entropy=system_entropy(),
        ended=EndedSessions(database),
        api_token=settings.api_token,
        viewer_token=settings.viewer_token,
    )


def _console(
    parts: ApiContext, sessions: ConsoleSessions, live: LivePages, *, hosts: Collection[str] | None
) -> Console[ApiContext]:
    clock = SystemClock()
    return Console(
        public_app(parts),
        parts,
        SITE,
        sessions=sessions,
        live=live,
        clock=clock,
        version=version("penstock"),
        alerts=OpenAlertCount(parts.database, clock=clock),
        hosts=hosts,
    )
