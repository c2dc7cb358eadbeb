"""From settings to objects: the only place that knows which part is given to which.

Built here: a dispatcher, a pipeline worker, and sources. Each is started in the order of need and
stopped in the reverse. Called by the command line; `installation` runs all of them as processes.

A data folder holds `postgres/`, `store/`, `logs/` and `worker.secret`. Killing any process of an
installation, or all of them, leaves what Postgres and the bucket hold; starting again goes on.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import Any, Final

from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.api.table import internal_app, public_app
from penstock.dispatcher.aws import Aws
from penstock.dispatcher.backfills.backfills import Backfills
from penstock.dispatcher.building import Builder
from penstock.dispatcher.cloudwatch import CloudWatch
from penstock.dispatcher.dag.model import PlatformOperator
from penstock.dispatcher.database.local import LocalPostgres
from penstock.dispatcher.database.migrations import migrate_patiently
from penstock.dispatcher.database.pool import Database
from penstock.dispatcher.datasets.keeping import Keeping
from penstock.dispatcher.datasets.sweeping import Sweeping
from penstock.dispatcher.deployment.moves import Deployment
from penstock.dispatcher.identity import Identities, secret_of
from penstock.dispatcher.invoking import LambdaCarrier
from penstock.dispatcher.looping import Loop, Turn
from penstock.dispatcher.metrics.reading import Metrics
from penstock.dispatcher.outbox.carriers import InvokeAsWake, WakeCarrier
from penstock.dispatcher.outbox.outbox import Outbox
from penstock.dispatcher.outbox.projecting import ProjectCarrier
from penstock.dispatcher.outbox.reconciler import Reconciler
from penstock.dispatcher.outbox.relay import Relay
from penstock.dispatcher.outbox.values import Carrier, Kind
from penstock.dispatcher.pressure.pressures import Pressures
from penstock.dispatcher.ranges.operators import RangeOperators
from penstock.dispatcher.registry import RegisteredRuntimes
from penstock.dispatcher.retention import Retention
from penstock.dispatcher.routing.router import Routing, route_events
from penstock.dispatcher.serving import Listener as Listening
from penstock.dispatcher.serving import Serving
from penstock.dispatcher.sources.cron import CronSource
from penstock.dispatcher.sources.monitor import SourceMonitor
from penstock.dispatcher.sources.webhook import WebhookApp
from penstock.dispatcher.tasks.lifecycle import Tasks
from penstock.dispatcher.turns import reaping_turn, routing_turn
from penstock.dispatcher.views.views import Views
from penstock.dispatcher.wakeups.base import Heard, Listener, Sender
from penstock.dispatcher.wakeups.bucket import (
    BucketListener,
    BucketSender,
    polling_of,
    wake_up_queue,
)
from penstock.dispatcher.wakeups.sqs import SqsListener, SqsSender, SqsSettings
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import new_id, system_entropy
from penstock.kernel.service import Service, Services
from penstock.runtimes.base import Delivery
from penstock.runtimes.places import Places
from penstock.runtimes.registry import Registry
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.settings import Profile, Settings, Wakeups
from penstock.store.base import ObjectStore
from penstock.store.opening import open_store
from penstock.worker.client import InternalClient
from penstock.worker.pruning import LogPruning
from penstock.worker.settings import WorkerSettings
from penstock.worker.worker import PipelineWorker

_log = logging.getLogger(__name__)

_REAP_SECONDS: Final = 2.0


class Dispatcher(Service):
    """One dispatcher: its loops and its listeners, and a Postgres of its own if it has to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = f"{_machine()}-{new_id(system_entropy(), characters=6)}"
        self._stack = AsyncExitStack()
        self._serving: Serving | None = None

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
        sender = _sender(settings)
        await self._stack.enter_async_context(sender)
        parts, loops = self._parts(database, store, sender)
        await self._stack.enter_async_context(loops)
        self._serving = Serving(
            [
                Listening("public", public_app(parts), settings.host, settings.port),
                Listening(
                    "internal", internal_app(parts), settings.internal_host, settings.internal_port
                ),
            ]
        )
        await self._stack.enter_async_context(self._serving)

    async def stop(self) -> None:
        await self._stack.aclose()

    def _parts(
        self, database: Database, store: ObjectStore, sender: Sender
    ) -> tuple[Parts, Services]:
        """What answers requests, and what goes on beside them."""
        settings = self._settings
        sweeping = Sweeping(database, store, grace_seconds=settings.sweep_hours * 3600)
        tasks = Tasks(database, route=route_events)
        routing, deployment = Routing(database), Deployment(database)
        backfills, pressures = Backfills(database), Pressures(database)
        ranges = Loop(
            "range operators",
            RangeOperators(database, tasks, name=self._name).turn,
            idle_seconds=2.0,
        )
        backfiller = Loop("backfills", backfills.turn, idle_seconds=1.0)
        kicked: list[Loop] = []

        def kick() -> None:
            for each in kicked:
                each.kick()

        carriers = _carriers(settings, database, sender, ranges.kick, kick)
        carriers[Kind.PROJECT] = ProjectCarrier(database, store)
        relay = Relay(database, carriers=carriers)
        relaying = Loop("relay", relay.turn, idle_seconds=0.5)
        router = Loop("router", routing_turn(routing, [relaying, ranges]), idle_seconds=0.5)
        kicked += [router, relaying, backfiller, ranges]
        turns = _turns(settings, database, tasks=tasks, deployment=deployment, pressures=pressures)
        turns.append(("sweeping", sweeping.turn, 60.0))
        loops = [Loop(name, turn, idle_seconds=seconds) for name, turn, seconds in turns]
        parts = Parts(
            database=database,
            tasks=tasks,
            routing=routing,
            deployment=deployment,
            backfills=backfills,
            pressures=pressures,
            metrics=Metrics(database),
            outbox=Outbox(database),
            views=Views(database),
            identities=_identities(settings),
            runtimes=RegisteredRuntimes(make_registry(settings)),
            api_token=settings.api_token or None,
            kick=kick,
            sweeping=sweeping,
        )
        return parts, Services([relay, relaying, router, ranges, backfiller, *loops])


def _turns(
    settings: Settings,
    database: Database,
    *,
    tasks: Tasks,
    deployment: Deployment,
    pressures: Pressures,
) -> list[tuple[str, Turn, float]]:
    """What every dispatcher looks after by itself: what it is called, and how often it is done."""
    keeping = Keeping(database, grace_seconds=settings.sweep_hours * 3600)
    turns: list[tuple[str, Turn, float]] = [
        ("reaper", reaping_turn(tasks), _REAP_SECONDS),
        ("reconciler", Reconciler(database).turn, 5.0),
        ("pressure", pressures.turn, 2.0),
        ("builder", Builder(database, deployment).turn, 2.0),
        ("source monitor", SourceMonitor(database, tasks).turn, 2.0),
        ("retention", Retention(database, days=settings.retention_days).turn, 60.0),
        ("keeping", keeping.turn, 60.0),
    ]
    if settings.profile is Profile.AWS:
        turns.append(("cloudwatch", CloudWatch(database, aws=_aws(settings)).turn, 60.0))
    return turns


def make_worker(settings: Settings, *, name: str | None = None) -> PipelineWorker:
    """A worker of all runtimes that are not somebody else's."""
    settings.data.mkdir(parents=True, exist_ok=True)
    registry = make_registry(settings)
    made = {each: registry.runtime(each) for each in registry.names()}
    runtimes = {each: made[each] for each in made if made[each].delivery is Delivery.WAKE}
    if find_spec("pyspark") is None:
        _log.info("no Spark jobs are run here: pyspark is not installed ('penstock[spark]')")
        runtimes = {
            name: each for name, each in runtimes.items() if not isinstance(each, SparkRuntime)
        }
    known = name or f"{_machine()}-{os.getpid()}"
    return PipelineWorker(
        make_client(settings, known),
        runtimes,
        lambda heard: _listener(settings, heard, name=known),
        places=Places(settings.store_url.partition("?")[0], logs=settings.data.absolute() / "logs"),
        settings=WorkerSettings(
            concurrency=settings.concurrency, stop_seconds=settings.stop_seconds
        ),
    )


def make_log_pruning(settings: Settings) -> Service:
    """What removes the logs of a worker's attempts when they are old."""
    pruning = LogPruning(
        settings.data.absolute() / "logs", days=settings.retention_days, clock=SystemClock()
    )
    return Loop("log pruning", pruning.turn, idle_seconds=3600.0)


def make_cron_source(settings: Settings) -> Service:
    """What emits the events of cron sources."""
    client = make_client(settings, f"cron-{_machine()}-{os.getpid()}")
    source = CronSource(client, SystemClock())
    return Services([client, Loop("cron", source.turn, idle_seconds=10.0)])


def make_webhook_source(settings: Settings) -> Service:
    """What takes requests and emits events for them."""
    client = make_client(settings, f"webhook-{_machine()}-{os.getpid()}")
    app = WebhookApp(
        client,
        clock=SystemClock(),
        entropy=system_entropy(),
        token=settings.api_token or None,
    )
    listening = Listening("webhook", app, settings.webhook_host, settings.webhook_port)
    return Services([client, Serving([listening])])


def make_postgres(settings: Settings) -> LocalPostgres:
    """The Postgres of the data folder."""
    return LocalPostgres(settings.data / "postgres")


def _identities(settings: Settings) -> Identities:
    if settings.worker_secret:
        return Identities(settings.worker_secret)
    settings.data.mkdir(parents=True, exist_ok=True)
    return Identities(secret_of(settings.data / "worker.secret", entropy=system_entropy()))


def make_client(settings: Settings, name: str) -> InternalClient:
    """The way to the internal side of dispatchers, as the worker or source of this name."""
    identity = _identities(settings).identity(name)
    return InternalClient(
        settings.dispatcher_urls, identity, clock=SystemClock(), entropy=system_entropy()
    )


def make_registry(settings: Settings) -> Registry:
    """The runtimes there are."""
    said: dict[str, dict[str, Any]] = {
        name: dict(table) for name, table in settings.runtimes.items()
    }
    if settings.profile is Profile.AWS:
        said["lambda"] = {"is_invoked": True, **said.get("lambda", {})}
    said.setdefault("spark", {})
    for name, table in said.items():
        if table.get("uses", name) == "spark":
            said[name] = {
                "master": settings.spark,
                "data": str(settings.data.absolute()),
                "store_url": settings.store_url,
                **table,
            }
    return Registry(said)


def _aws(settings: Settings) -> Aws:
    return Aws(region=settings.aws_region or None, endpoint=settings.aws_endpoint or None)


def _sender(settings: Settings) -> Sender:
    match settings.wakeups:
        case Wakeups.BUCKET:
            return BucketSender(wake_up_queue(settings.store_url))
        case Wakeups.SQS:
            return SqsSender(_aws(settings), settings=SqsSettings(prefix=settings.sqs_prefix))


def _listener(settings: Settings, heard: Heard, *, name: str) -> Listener:
    url = settings.store_url
    match settings.wakeups:
        case Wakeups.BUCKET:
            return BucketListener(wake_up_queue(url), heard, name=name, polling=polling_of(url))
        case Wakeups.SQS:
            sqs = SqsSettings(prefix=settings.sqs_prefix)
            return SqsListener(heard, aws=_aws(settings), settings=sqs)


def _carriers(
    settings: Settings,
    database: Database,
    sender: Sender,
    own: Callable[[], None],
    kick: Callable[[], None],
) -> dict[str, Carrier]:
    platform_operators = {str(each): own for each in PlatformOperator}
    if settings.profile is Profile.LITE:
        wake = WakeCarrier(sender, own=platform_operators)
        return {Kind.WAKE: wake, Kind.INVOKE: InvokeAsWake(sender)}
    wake = WakeCarrier(sender, own=platform_operators, invokes=database, kick=kick)
    functions = LambdaCarrier(
        database, dispatcher_url=settings.dispatcher_urls[0], aws=_aws(settings)
    )
    return {Kind.WAKE: wake, Kind.INVOKE: functions}


def _machine() -> str:
    return platform.node().split(".")[0][:40] or "machine"
