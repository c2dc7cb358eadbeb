"""A dispatcher from settings: its parts, its loops and its listeners, the console among them.

Started in the order of need and stopped in the reverse: those who look at the console are let go
before the listeners are closed. Called by the command line.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, closing
from importlib.metadata import version
from typing import Final

from penstock.app import (
    aws_of,
    machine_name,
    make_postgres,
    make_registry,
    root_of,
    secret_of_settings,
)
from penstock.console.alerting import OpenAlerts
from penstock.console.application import Console
from penstock.console.live import Live
from penstock.console.pages.table import SITE
from penstock.console.sessions import Sessions
from penstock.dispatcher.alerts.judging import PACE_SECONDS as JUDGING_SECONDS
from penstock.dispatcher.alerts.judging import Judge
from penstock.dispatcher.alerts.opening import destinations_of
from penstock.dispatcher.alerts.reading import read_alerts
from penstock.dispatcher.alerts.telling import PACE_SECONDS as TELLING_SECONDS
from penstock.dispatcher.alerts.telling import Teller
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.table import internal_app, public_app
from penstock.dispatcher.backfills.backfills import Backfills
from penstock.dispatcher.building import Builder
from penstock.dispatcher.capabilities.minting import Minter, make_minter
from penstock.dispatcher.capabilities.opening import Capabilities, capabilities_of, holding_of
from penstock.dispatcher.cloudwatch import CloudWatch
from penstock.dispatcher.dag.model import PlatformOperator
from penstock.dispatcher.database.migrations import migrate_patiently
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.datasets.keeping import Keeping
from penstock.dispatcher.datasets.maintainer import Maintainer
from penstock.dispatcher.datasets.sweeping import Sweeping
from penstock.dispatcher.deployment.moves import Deployment
from penstock.dispatcher.identity import Identities
from penstock.dispatcher.invoking import LambdaCarrier
from penstock.dispatcher.looping import Loop, Turn
from penstock.dispatcher.metrics.counters import Counters
from penstock.dispatcher.metrics.reading import Metrics
from penstock.dispatcher.outbox.carriers import InvokeAsWake, WakeCarrier
from penstock.dispatcher.outbox.outbox import Outbox
from penstock.dispatcher.outbox.projecting import ProjectCarrier
from penstock.dispatcher.outbox.reconciler import LOOK_SECONDS as RECONCILING_SECONDS
from penstock.dispatcher.outbox.reconciler import Reconciler
from penstock.dispatcher.outbox.relay import Relay
from penstock.dispatcher.outbox.values import Carrier, Kind
from penstock.dispatcher.polling import BY_ITSELF_SECONDS, LOOK_SECONDS, Poller, Watched, is_due
from penstock.dispatcher.pressure.pressures import Pressures
from penstock.dispatcher.ranges.operators import RangeOperators
from penstock.dispatcher.registry import RegisteredRuntimes
from penstock.dispatcher.retention import Retention
from penstock.dispatcher.routing.router import Routing, route_events
from penstock.dispatcher.serving import Listener as Listening
from penstock.dispatcher.serving import Serving
from penstock.dispatcher.sessions import EndedSessions
from penstock.dispatcher.sources.monitor import SourceMonitor
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.turns import reaping_turn, routing_turn
from penstock.dispatcher.views.views import Views
from penstock.dispatcher.wakeups.base import Sender
from penstock.dispatcher.wakeups.broker import Broker
from penstock.dispatcher.wakeups.bucket import (
    BucketSender,
    wake_up_queue,
)
from penstock.dispatcher.wakeups.long_poll import LongPollSender
from penstock.dispatcher.wakeups.notifications import Notifications
from penstock.dispatcher.wakeups.sqs import SqsSender, SqsSettings
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.service import Service, Services
from penstock.settings import Profile, Settings, SignerKind, Wakeups
from penstock.store.base import ObjectStore
from penstock.store.opening import open_store

_REAP_SECONDS: Final = 5.0


class _Kicks:
    """Kicks loops that are made after it: have the next turn of each begin at once."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def __call__(self) -> None:
        for each in self.loops:
            each.kick()


class Dispatcher(Service):
    """One dispatcher: its loops and its listeners, and a Postgres of its own if it has to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = f"{machine_name()}-{new_id(system_entropy(), characters=6)}"
        self._stack = AsyncExitStack()
        self._serving: Serving | None = None
        self._broker = Broker() if settings.wakeups is Wakeups.LONG_POLL else None

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
        await migrate_patiently(dsn)
        database = Database(dsn, connections_max=settings.connections)
        await self._stack.enter_async_context(database)
        store = await open_store(settings.store_url)
        self._stack.push_async_callback(store.close)
        sending = _sending(settings, dsn, database, self._broker)
        sender = await self._stack.enter_async_context(sending)
        secret = secret_of_settings(settings)
        parts, loops = self._parts(database, store, sender, secret)
        await self._stack.enter_async_context(loops)
        sessions = _sessions(settings, database, secret)
        live = Live(clock=SystemClock(), over=sessions.over)
        console = _console(parts, sessions, live, hosts=settings.console_hosts)
        self._serving = Serving(
            [
                Listening("public", console, settings.host, settings.port),
                Listening(
                    "internal", internal_app(parts), settings.internal_host, settings.internal_port
                ),
            ]
        )
        await self._stack.enter_async_context(self._serving)
        await self._stack.enter_async_context(live)
        if self._broker is not None:
            # Stopped first: workers that wait here go to another dispatcher.
            await self._stack.enter_async_context(self._broker)

    async def stop(self) -> None:
        await self._stack.aclose()

    def _parts(
        self, database: Database, store: ObjectStore, sender: Sender, secret: str
    ) -> tuple[Parts, Services]:
        """What answers requests, and what goes on beside them."""
        settings = self._settings
        after_calls, after_ends = _Kicks(), _Kicks()
        signing = _capabilities(settings, database)
        counters = Counters()
        parts = Parts(
            database=database,
            tasks=Tasks(database, route=route_events, counters=counters),
            routing=Routing(database),
            deployment=Deployment(database),
            backfills=Backfills(database),
            pressures=Pressures(database),
            metrics=Metrics(database, counters=counters),
            outbox=Outbox(database),
            views=Views(database),
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
            kick_after_ends=after_ends,
            store=store,
            sweeping=Sweeping(database, store, grace_seconds=settings.sweep_hours * 3600),
            minter=self._stack.enter_context(closing(_minter(settings))),
            logs=settings.data.absolute() / "logs",
        )
        working = self._working(
            parts, store, sender, after_calls=after_calls, after_ends=after_ends
        )
        others = [*_loops(settings, parts), *_alerting(settings, database, name=self._name)]
        return parts, Services([*signing.services, *working, *others])

    def _working(
        self,
        parts: Parts,
        store: ObjectStore,
        sender: Sender,
        *,
        after_calls: _Kicks,
        after_ends: _Kicks,
    ) -> list[Service]:
        """What works on what calls have committed: the relay, the loops, and who kicks them."""
        database = parts.database
        operators = RangeOperators(database, parts.tasks, name=self._name)
        ranges = Loop("range operators", operators.turn, idle_seconds=BY_ITSELF_SECONDS)
        carriers = _carriers(self._settings, parts, sender, own=ranges.kick)
        carriers[Kind.PROJECT] = ProjectCarrier(database, store)
        relay = Relay(database, carriers=carriers)
        relaying = Loop("relay", relay.turn, idle_seconds=BY_ITSELF_SECONDS)
        routing = routing_turn(parts.routing, [relaying, ranges])
        router = Loop("router", routing, idle_seconds=BY_ITSELF_SECONDS)
        backfiller = Loop("backfills", parts.backfills.turn, idle_seconds=BY_ITSELF_SECONDS)
        after_calls.loops += [router, relaying, backfiller, ranges]
        watched = [
            Watched(router, lambda found: found["is_pending"] or found["is_held"]),
            Watched(relaying, is_due),
            Watched(backfiller, lambda found: found["is_backfilling"]),
            Watched(ranges, lambda found: found["is_ranging"]),
            *_watched(parts),
        ]
        poller = Loop("poller", Poller(database, watched).turn, idle_seconds=LOOK_SECONDS)
        # Their events are routed already; what else follows from them, the poller finds.
        after_ends.loops += [relaying, poller]
        return [relay, *(each.loop for each in watched), poller]


def _watched(parts: Parts) -> list[Watched]:
    """What every dispatcher looks after as long as there is something to look after."""
    database = parts.database
    monitor = SourceMonitor(database, parts.tasks)

    def loop(name: str, turn: Turn, *, idle_seconds: float = BY_ITSELF_SECONDS) -> Loop:
        return Loop(name, turn, idle_seconds=idle_seconds)

    return [
        # By itself it says that it runs, for those who wonder whether workers could be heard.
        Watched(
            loop("reaper", reaping_turn(parts.tasks), idle_seconds=_REAP_SECONDS),
            lambda found: found["is_expired"],
        ),
        Watched(
            loop("reconciler", Reconciler(database).turn),
            lambda found: found["is_waiting"] or found["is_parked"],
            every_seconds=RECONCILING_SECONDS,
        ),
        Watched(
            loop("pressure", parts.pressures.turn),
            lambda found: found["is_waiting"],
            every_seconds=2.0,
        ),
        Watched(
            loop("builder", Builder(database, parts.deployment).turn),
            lambda found: found["is_building"],
            every_seconds=2.0,
        ),
        Watched(
            loop("source monitor", monitor.turn),
            lambda found: monitor.is_due(found["dag_version"]),
            every_seconds=2.0,
        ),
    ]


def _loops(settings: Settings, parts: Parts) -> list[Service]:
    """What every dispatcher looks after by itself."""
    database = parts.database
    keeping = Keeping(database, grace_seconds=settings.sweep_hours * 3600)
    turns: list[tuple[str, Turn, float]] = [
        ("retention", Retention(database, days=settings.retention_days).turn, 60.0),
        ("keeping", keeping.turn, 60.0),
        ("maintainer", Maintainer(database).turn, 10.0),
    ]
    if parts.sweeping is not None:
        turns.append(("sweeping", parts.sweeping.turn, 60.0))
    if settings.profile is Profile.AWS:
        turns.append(("cloudwatch", CloudWatch(database, aws=aws_of(settings)).turn, 60.0))
    return [Loop(name, turn, idle_seconds=seconds) for name, turn, seconds in turns]


def _alerting(settings: Settings, database: Database, *, name: str) -> list[Service]:
    """What judges the rules of alerts, and tells of them."""
    alerts = read_alerts(settings.alerts)
    destinations = destinations_of(alerts, environment=os.environ)
    teller = Teller(database, destinations, url=alerts.url)
    telling = Loop("alert notices", teller.turn, idle_seconds=TELLING_SECONDS)
    judge = Judge(
        database,
        alerts,
        name=name,
        unserved=("lambda",) if settings.profile is Profile.AWS else (),
        days=settings.retention_days,
        told=telling.kick,
    )
    judging = Loop("alerts", judge.turn, idle_seconds=JUDGING_SECONDS)
    return [judging, telling] if destinations else [judging]


def _capabilities(settings: Settings, database: Database) -> Capabilities:
    kms_key = settings.kms_key if settings.signer is SignerKind.KMS else None
    folder = settings.data.absolute() / "keys"
    holding = holding_of(kms_key=kms_key, folder=folder, aws=aws_of(settings))
    return capabilities_of(database, holding, root=root_of(settings), org=settings.org)


def _minter(settings: Settings) -> Minter:
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
    settings: Settings, dsn: str, database: Database, broker: Broker | None
) -> AsyncIterator[Sender]:
    """What sends wake-ups; `broker` is where workers wait, if they do."""
    async with AsyncExitStack() as stack:
        sender: Sender
        match settings.wakeups:
            case Wakeups.LONG_POLL:
                assert broker is not None, "made for it"
                notifications = Notifications(
                    dsn, database, heard=broker.send, has_waiters=lambda: broker.waiters > 0
                )
                await stack.enter_async_context(notifications)
                sender = LongPollSender(broker, notifications.publish)
            case Wakeups.BUCKET:
                sender = BucketSender(wake_up_queue(settings.store_url))
            case Wakeups.SQS:
                sqs = SqsSettings(prefix=settings.sqs_prefix)
                sender = SqsSender(aws_of(settings), settings=sqs)
        yield await stack.enter_async_context(sender)


def _carriers(
    settings: Settings, parts: Parts, sender: Sender, *, own: Callable[[], None]
) -> dict[str, Carrier]:
    platform_operators = {str(each): own for each in PlatformOperator}
    if settings.profile is Profile.LITE:
        wake = WakeCarrier(sender, own=platform_operators)
        return {Kind.WAKE: wake, Kind.INVOKE: InvokeAsWake(sender)}
    wake = WakeCarrier(sender, own=platform_operators, invokes=parts.database, kick=parts.kick)
    functions = LambdaCarrier(
        parts.database,
        dispatcher_url=settings.dispatcher_urls[0],
        token_for=parts.issuer.invocation,
        aws=aws_of(settings),
    )
    return {Kind.WAKE: wake, Kind.INVOKE: functions}


def _sessions(settings: Settings, database: Database, secret: str) -> Sessions:
    return Sessions(
        secret,
        clock=SystemClock(),
        entropy=system_entropy(),
        ended=EndedSessions(database),
        api_token=settings.api_token,
        viewer_token=settings.viewer_token,
    )


def _console(
    parts: Parts, sessions: Sessions, live: Live, *, hosts: Collection[str] | None
) -> Console[Parts]:
    clock = SystemClock()
    return Console(
        public_app(parts),
        parts,
        SITE,
        sessions=sessions,
        live=live,
        clock=clock,
        version=version("penstock"),
        alerts=OpenAlerts(parts.database, clock=clock),
        hosts=hosts,
    )
