"""From settings to objects: with `dispatching`, the only place that knows what is given to what.

Built here: a pipeline worker and sources, and what they share with a dispatcher, which is built in
`dispatching`. Each is started in the order of need and stopped in the reverse. Called by the
command line; `installation` runs all of them as processes.

A data folder holds `postgres/`, `store/`, `logs/`, `keys/` and `worker.secret`. Killing any process
of an installation, or all of them, leaves what Postgres and the bucket hold; starting goes on.
"""

from __future__ import annotations

import logging
import os
import platform
from importlib.util import find_spec
from typing import Any, Final

from penstock.dispatcher.database.local import LocalPostgres
from penstock.dispatcher.identity import Identities, Identity, secret_of, webhook_identity
from penstock.dispatcher.looping import Loop
from penstock.dispatcher.serving import Listener as Listening
from penstock.dispatcher.serving import Serving
from penstock.dispatcher.sources.admission import Source
from penstock.dispatcher.sources.cron import CronSource
from penstock.dispatcher.sources.receiving import Receiver, check_open
from penstock.dispatcher.sources.webhook import WebhookApp
from penstock.dispatcher.wakeups.base import Heard, Listener
from penstock.dispatcher.wakeups.bucket import (
    BucketListener,
    polling_of,
    wake_up_queue,
)
from penstock.dispatcher.wakeups.long_poll import LongPollListener
from penstock.dispatcher.wakeups.sqs import SqsListener, SqsSettings
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service
from penstock.runtimes.base import Delivery
from penstock.runtimes.registry import Registry
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.settings import Profile, Settings, Wakeups
from penstock.worker.client import InternalClient
from penstock.worker.pruning import LogPruning
from penstock.worker.secrets import Resolver
from penstock.worker.settings import WorkerSettings
from penstock.worker.vault import AwsVault
from penstock.worker.worker import PipelineWorker

_log = logging.getLogger(__name__)

_NOT_OF_WEBHOOKS: Final = ("api_token", "viewer_token", "worker_secret", "postgres")
"""What a process that faces the internet does not hold."""


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
    known = name or f"{machine_name()}-{os.getpid()}"
    client = make_client(settings, known)
    return PipelineWorker(
        client,
        runtimes,
        lambda heard: _listener(settings, client, heard, name=known),
        logs=settings.data.absolute() / "logs",
        handed=settings.data.absolute() / "handed",
        settings=WorkerSettings(
            concurrency=settings.concurrency,
            stop_seconds=settings.stop_seconds,
            queues=settings.queues,
        ),
        secrets=make_resolver(settings),
        store_url=settings.store_url,
    )


def make_resolver(settings: Settings, *, who: str = "worker") -> Resolver:
    """What finds the secrets that jobs and webhooks name."""
    return Resolver(
        environment=os.environ,
        folder=settings.secrets_path,
        prefix=settings.secrets_prefix,
        vault=AwsVault(aws_of(settings)),
        who=who,
    )


def make_log_pruning(settings: Settings) -> Service:
    """What removes the logs of a worker's attempts when they are old."""
    pruning = LogPruning(
        settings.data.absolute() / "logs", days=settings.retention_days, clock=SystemClock()
    )
    return Loop("log pruning", pruning.turn, idle_seconds=3600.0)


def make_cron_source(settings: Settings) -> Source:
    """What emits the events of cron sources."""
    client = make_client(settings, f"cron-{machine_name()}-{os.getpid()}")
    source = CronSource(client, SystemClock())
    loop = Loop("cron", source.turn, idle_seconds=10.0)
    return Source(client, [client, loop])


def make_webhook_source(settings: Settings) -> Source:
    """What takes requests and emits events for them."""
    is_loopback = settings.is_webhook_on_loopback
    client = make_webhook_client(settings)
    clock = SystemClock()
    receiver = Receiver(
        client,
        clock=clock,
        entropy=system_entropy(),
        secret=make_resolver(settings, who="webhook").text,
        is_loopback=is_loopback,
    )
    app = WebhookApp(receiver)
    listening = Listening("webhook", app, settings.webhook_host, settings.webhook_port)
    noting = Loop("webhook refusals", receiver.note, idle_seconds=5.0)
    services = [client, noting, Serving([listening])]
    if is_loopback:
        return Source(client, services)
    return Source(client, services, check=check_open)


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
            f"A webhook on {settings.webhook_host} faces others, and its settings have"
            f" {' and '.join(held)}.",
            hint="Start it with PENSTOCK_WEBHOOK_TOKEN and without these; it needs none of them.",
        )
    return _client(settings, identity)


def make_postgres(settings: Settings) -> LocalPostgres:
    """The Postgres of the data folder."""
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


def aws_of(settings: Settings) -> Aws:
    """Which AWS is meant."""
    return Aws(region=settings.aws_region or None, endpoint=settings.aws_endpoint or None)


def root_of(settings: Settings) -> str:
    """The URL below which attempts write."""
    return settings.store_url.partition("?")[0].rstrip("/")


def _listener(settings: Settings, client: InternalClient, heard: Heard, *, name: str) -> Listener:
    url = settings.store_url
    match settings.wakeups:
        case Wakeups.LONG_POLL:
            return LongPollListener(client.wait, heard, wait_seconds=settings.wait_seconds)
        case Wakeups.BUCKET:
            return BucketListener(wake_up_queue(url), heard, name=name, polling=polling_of(url))
        case Wakeups.SQS:
            sqs = SqsSettings(prefix=settings.sqs_prefix)
            return SqsListener(heard, aws=aws_of(settings), settings=sqs)


def machine_name() -> str:
    """What this machine is called, in the names of what runs on it."""
    return platform.node().split(".")[0][:40] or "machine"
