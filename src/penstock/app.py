"""From settings to objects: with `dispatcher_app`, the only place that knows what is given to what.

Built here: a pipeline worker and sources, and what they share with a dispatcher, which is built in
`dispatcher_app`. Each is started in the order of need and stopped in the reverse. Called by the
command line; `installation` runs all of them as processes.

A data folder holds `postgres/`, `store/`, `logs/`, `keys/` and `worker.secret`. Killing any process
of an installation, or all of them, leaves what Postgres and the bucket hold; starting goes on.
"""

from __future__ import annotations

import logging
import os
import platform
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from penstock.dispatcher.loop import Loop
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service, Services
from penstock.kernel.units import byte_count
from penstock.protocol.identity import Identities, Identity, secret_of, webhook_identity
from penstock.runtimes.base import Delivery
from penstock.settings import InstallationProfile, Settings, Wakeups
from penstock.worker.settings import PipelineWorkerSettings

# Each process imports what it is made of, and no more: most of its memory is what it has imported.
# ruff: noqa: PLC0415
if TYPE_CHECKING:
    from penstock.dispatcher.database.local_server import LocalPostgres
    from penstock.dispatcher.sources.client import SourceProcess
    from penstock.dispatcher.wakeups.base import WakeUpListener
    from penstock.runtimes.registry import RuntimeRegistry
    from penstock.worker.claim_scheduler import ClaimScheduler
    from penstock.worker.client import InternalClient
    from penstock.worker.secrets import SecretResolver
    from penstock.worker.worker import PipelineWorker

_log = logging.getLogger(__name__)

_NOT_OF_WEBHOOKS: Final = (
    *("api_token", "viewer_token", "worker_secret"),
    *("postgres", "postgres_direct", "postgres_data"),
)
"""What a process that faces the internet does not hold."""


def make_worker(
    settings: Settings, *, name: str | None = None, only_sinks: bool = False
) -> PipelineWorker:
    """A worker of all runtimes that are not somebody else's; or of those alone that are sinks."""
    from penstock.runtimes.sink import SinkRuntime
    from penstock.runtimes.spark.runtime import SparkRuntime
    from penstock.worker.worker import PipelineWorker

    settings.data.mkdir(parents=True, exist_ok=True)
    registry = make_registry(settings)
    made = {each: registry.runtime(each) for each in registry.names()}
    runtimes = {each: made[each] for each in made if made[each].delivery is Delivery.WAKE}
    if find_spec("pyspark") is None:
        _log.info("no Spark jobs run here: pyspark is not installed ('penstock[spark]')")
        runtimes = {
            name: each for name, each in runtimes.items() if not isinstance(each, SparkRuntime)
        }
    if find_spec("pyarrow") is None:
        _log.info("no sinks run here: pyarrow is not installed ('penstock[spark]')")
        runtimes = {
            name: each for name, each in runtimes.items() if not isinstance(each, SinkRuntime)
        }
    if only_sinks:
        runtimes = {name: each for name, each in runtimes.items() if isinstance(each, SinkRuntime)}
        if not runtimes:
            raise InvalidInput(
                "A sink needs the package pyarrow, which is not installed.",
                hint="Install it with: pip install 'penstock[query]'",
            )
    known = name or f"{machine_name()}-{os.getpid()}"
    client = make_client(settings, known)
    return PipelineWorker(
        client,
        runtimes,
        lambda claiming: _listener(settings, client, claiming, name=known),
        logs=settings.data.absolute() / "logs",
        handed=settings.data.absolute() / "handed",
        locks=settings.data.absolute() / "workers",
        settings=_worker_settings(settings),
        secrets=make_resolver(settings),
        store_url=settings.store_url,
    )


def make_resolver(settings: Settings, *, who: str = "worker") -> SecretResolver:
    """What finds the secrets that jobs and webhooks name."""
    from penstock.worker.secrets import AwsSecretStore, SecretResolver

    return SecretResolver(
        environment=os.environ,
        folder=settings.secrets_path,
        prefix=settings.secrets_prefix,
        vault=AwsSecretStore(aws_of(settings)),
        who=who,
    )


def make_log_pruning(settings: Settings) -> Service:
    """What removes the logs of a worker's attempts when they are old."""
    from penstock.worker.worker import LogPruner

    pruning = LogPruner(
        settings.data.absolute() / "logs", days=settings.retention_days, clock=SystemClock()
    )
    return Loop("log pruning", pruning.turn, idle_seconds=3600.0)


def make_cron_source(settings: Settings) -> SourceProcess:
    """What emits the events of cron sources."""
    from penstock.dispatcher.sources.client import SourceProcess
    from penstock.dispatcher.sources.cron import CronEmitter

    client = make_client(settings, f"cron-{machine_name()}-{os.getpid()}")
    source = CronEmitter(client, SystemClock())
    loop = Loop("cron", source.turn, idle_seconds=10.0)
    return SourceProcess(client, [client, loop])


def make_webhook_source(settings: Settings) -> SourceProcess:
    """What takes requests and emits events for them."""
    from penstock.dispatcher.api.server import HttpListener, HttpServer
    from penstock.dispatcher.sources.client import SourceProcess
    from penstock.dispatcher.sources.webhook import WebhookApp, WebhookReceiver, check_open

    is_loopback = settings.is_webhook_on_loopback
    client = make_webhook_client(settings)
    clock = SystemClock()
    receiver = WebhookReceiver(
        client,
        clock=clock,
        entropy=system_entropy(),
        secret=make_resolver(settings, who="webhook").text,
        is_loopback=is_loopback,
    )
    app = WebhookApp(receiver)
    listening = HttpListener("webhook", app, settings.webhook_host, settings.webhook_port)
    noting = Loop("webhook refusals", receiver.note, idle_seconds=5.0)
    services = [client, noting, HttpServer([listening])]
    if is_loopback:
        return SourceProcess(client, services)
    return SourceProcess(client, services, check=check_open)


def make_webhook_client(settings: Settings) -> InternalClient:
    """The way to the internal side of dispatchers, for the process of webhooks.

    One that others than this machine can call is given the token of webhooks, and holds nothing
    that opens more.
    """
    if settings.webhook_token:
        identity = webhook_identity(settings.webhook_token)
    elif settings.is_webhook_on_loopback:
        identity = Identities(secret_of_settings(settings)).webhook()
    else:
        raise InvalidInput(
            f"A webhook on {settings.webhook_host} needs webhook_token.",
            hint="Set PENSTOCK_WEBHOOK_TOKEN to what 'penstock source token' prints.",
        )
    held = [name for name in _NOT_OF_WEBHOOKS if getattr(settings, name)]
    if held and not settings.is_webhook_on_loopback:
        raise InvalidInput(
            f"A webhook on {settings.webhook_host} is not on loopback, and its settings have"
            f" {' and '.join(held)}.",
            hint="Start it with PENSTOCK_WEBHOOK_TOKEN and remove these settings.",
        )
    return _client(settings, identity)


def make_query_service(settings: Settings, *, descriptor: int | None = None) -> Services:
    """What runs queries, and its listener; `descriptor` is a socket that listens already."""
    for name in ("duckdb", "fsspec", "pyarrow"):
        if find_spec(name) is None:
            raise InvalidInput(
                f"The query service needs the package {name}, which is not installed.",
                hint="Install it with: pip install 'penstock[dispatcher,query]'",
            )
    from penstock.dispatcher.api.server import HttpListener, HttpServer
    from penstock.query.engine import QueryBounds
    from penstock.query.service import QueryService, QueryServiceSettings
    from penstock.runtimes.uid_pool import FOLDER, UidPool

    bounds = QueryBounds(
        memory_bytes=byte_count(settings.query_memory),
        threads=settings.query_threads,
        spill_bytes=byte_count(settings.query_spill),
        seconds_max=settings.query_seconds,
        rows_max=settings.query_rows,
        bytes_max=byte_count(settings.query_bytes),
    )
    service = QueryService(
        QueryServiceSettings(
            name=f"{machine_name()}-{os.getpid()}",
            dispatchers=settings.dispatcher_urls,
            org=settings.org,
            store_url=settings.store_url,
            bounds=bounds,
            concurrency=settings.query_concurrency,
            uids=UidPool.of(settings.query_uids, FOLDER) if settings.query_uids else None,
            scan_bytes=byte_count(settings.query_scan),
        ),
        clock=SystemClock(),
    )
    listener = HttpListener(
        "query", service.app(), settings.query_host, settings.query_port, descriptor=descriptor
    )
    return Services([service, HttpServer([listener])])


def make_postgres(settings: Settings) -> LocalPostgres:
    """The Postgres of the data folder."""
    from penstock.dispatcher.database.local_server import LocalPostgres

    return LocalPostgres(settings.data / "postgres")


def secret_of_settings(settings: Settings) -> str:
    """What the dispatchers of an installation share; made, in the data folder, if there is none."""
    if settings.worker_secret:
        return settings.worker_secret
    settings.data.mkdir(parents=True, exist_ok=True)
    return secret_of(settings.data / "worker.secret", entropy=system_entropy())


def make_client(settings: Settings, name: str) -> InternalClient:
    """The way to the internal side of dispatchers, as the worker or source of this name."""
    return _client(settings, Identities(secret_of_settings(settings)).identity(name))


def _client(settings: Settings, identity: Identity) -> InternalClient:
    from penstock.worker.client import InternalClient

    return InternalClient(
        settings.dispatcher_urls, identity, clock=SystemClock(), entropy=system_entropy()
    )


def make_registry(settings: Settings) -> RuntimeRegistry:
    """The runtimes there are."""
    from penstock.runtimes.registry import RuntimeRegistry

    tables: dict[str, dict[str, Any]] = {
        name: dict(table) for name, table in settings.runtimes.items()
    }
    if settings.profile is InstallationProfile.AWS:
        tables["lambda"] = {"is_invoked": True, **tables.get("lambda", {})}
    tables.setdefault("spark", {})
    tables.setdefault("sink", {})
    for name, table in tables.items():
        if table.get("uses", name) == "sink":
            tables[name] = {"store_url": settings.store_url, **table}
        if table.get("uses", name) == "spark":
            tables[name] = {
                "master": settings.spark,
                "data": str(settings.data.absolute()),
                "store_url": settings.store_url,
                **table,
            }
    return RuntimeRegistry(tables)


def aws_of(settings: Settings) -> Aws:
    """Which AWS is meant."""
    return Aws(region=settings.aws_region or None, endpoint=settings.aws_endpoint or None)


def root_of(settings: Settings) -> str:
    """The URL below which attempts write."""
    return settings.store_url.partition("?")[0].rstrip("/")


def _worker_settings(settings: Settings) -> PipelineWorkerSettings:
    said = PipelineWorkerSettings(
        concurrency=settings.concurrency,
        stop_seconds=settings.stop_seconds,
        queues=settings.queues,
    )
    return said if settings.wakeups is Wakeups.LONG_POLL else said.by_queue()


def _listener(
    settings: Settings, client: InternalClient, claiming: ClaimScheduler, *, name: str
) -> WakeUpListener:
    url, heard = settings.store_url, claiming.heard
    match settings.wakeups:
        case Wakeups.LONG_POLL:
            from penstock.dispatcher.wakeups.long_poll import LongPollListener

            return LongPollListener(
                client.wait,
                heard,
                hello=claiming.hello,
                served=claiming.serve,
                wait_seconds=settings.wait_seconds,
            )
        case Wakeups.BUCKET:
            from penstock.dispatcher.wakeups.bucket import (
                BucketListener,
                polling_of,
                wake_up_queue,
            )

            return BucketListener(wake_up_queue(url), heard, name=name, polling=polling_of(url))
        case Wakeups.SQS:
            from penstock.dispatcher.wakeups.sqs import SqsListener, SqsSettings

            sqs = SqsSettings(prefix=settings.sqs_prefix)
            return SqsListener(heard, aws=aws_of(settings), settings=sqs)


def machine_name() -> str:
    """What this machine is called, in the names of what runs on it."""
    return platform.node().split(".")[0][:40] or "machine"
