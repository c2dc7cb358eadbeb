"""The settings of a pipeline installation, and where each value came from.

One class, `Settings`, by the rules of `kernel.settings_schema`, and with it `SCHEMA`: every setting
that a file or a variable may have, those of queues too. A name that is not in it, or a value that
cannot be right, is an error that says where it stands. Called by the wiring in `app` and by the
command line; no other part of the pipeline reads settings of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from penstock.dispatcher.alerts.rules import read_alerts
from penstock.dispatcher.dag.model import is_name
from penstock.kernel.errors import InvalidInput
from penstock.kernel.settings_schema import (
    PREFIX,
    Place,
    ReadSettings,
    Schema,
    check,
    declared,
    declared_in,
    setting,
)
from penstock.kernel.units import WAIT_SECONDS_MAX, byte_count
from penstock.queue.settings import QUEUE_SCHEMA
from penstock.runtimes import LOCAL_SPARK
from penstock.worker.settings import PipelineWorkerSettings

OTHERS: Final[Mapping[str, str]] = {
    "SETTINGS": "The settings file, instead of `penstock.toml` in the current folder.",
    "URL": "The dispatcher that verbs such as `penstock status` ask; by default the public listener"
    " of the settings.",
    "QUEUE": "The queue of `penstock queue`, instead of `default`.",
    "DISPATCHER": "The internal listener, for functions that are deployed elsewhere.",
    "LISTEN_FD": "Set for the query service by `penstock up`: the socket that it takes over.",
    "TASK_TOKEN_FILE": "Set for the code of a task: the file that has the capability token of the"
    " attempt.",
}
"""Variables that are no settings, by the end of their names, and what they are for."""
LISTEN_VARIABLE: Final = f"{PREFIX}LISTEN_FD"
TOKEN_CHARACTERS_MIN: Final = 16
"""Of the worker secret, and of tokens where others than this machine may try them."""
_PUBLISHED: Final = "only-for-trying-it-out"
"""What compose.yaml of 0.1.0 had."""
_MAKE_ONE: Final = "openssl rand -hex 32"
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_STORES: Final = frozenset({"s3", "file", "memory"})
_OF_WEBHOOKS: Final = (
    *("webhook_host", "webhook_port", "webhook_token", "dispatchers"),
    *("secrets_folder", "secrets_prefix", "aws_region", "aws_endpoint"),
)
"""Settings that the webhook process is given."""
_OF_QUERIES: Final = (
    *("query_host", "query_port", "query_concurrency", "query_memory", "query_threads"),
    *("query_spill", "query_seconds", "query_rows", "query_bytes", "query_scan", "query_uids"),
    *("dispatchers", "store", "data", "org"),
)
"""Settings that the query service is given."""
_TABLES: Final = ("runtimes", "alerts")
"""Settings that stand in the file only."""
_SPARK: Final = re.compile(r"local(\[.+\])?$|(spark|sc|k8s)://.+|yarn$")


class InstallationProfile(StrEnum):
    """Which adapters are used."""

    LITE = "lite"
    """Everything on this machine, or on any Postgres and bucket."""
    AWS = "aws"
    """Lambda functions are invoked, and metrics go to CloudWatch."""


class SignerKind(StrEnum):
    """What signs capability tokens."""

    PEM = "pem"
    """A key in a file of the data folder."""
    KMS = "kms"
    """A key of AWS KMS."""


class Wakeups(StrEnum):
    """What carries wake-ups."""

    LONG_POLL = "long-poll"
    """Requests of workers that wait at a dispatcher."""
    BUCKET = "bucket"
    SQS = "sqs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, with its default."""

    PLACE: ClassVar = Place(table="", prefix=PREFIX)

    data: Path = setting(Path("penstock-data"))
    """The folder for all data that is kept on this machine."""
    profile: InstallationProfile = setting(InstallationProfile.LITE)
    """Which adapters are used: `lite` for this machine or any server, `aws` for AWS's services."""
    postgres: str = setting("")
    """The libpq connection string of a Postgres; empty to run one in the data folder."""
    postgres_direct: str = setting("")
    """The connection string of the same Postgres without a pooler in between, for notifications
    and migrations; empty if `postgres` has no pooler."""
    postgres_data: str = setting("")
    """The connection string of a database for the tables of datasets with `storage: postgres`, as
    the role that owns it, without a pooler; empty for one beside the Postgres in the data folder,
    or for none."""
    hot_tables_reader: str = setting("penstock_reader")
    """The role that may read those tables, if there is one of this name."""
    store: str = setting("")
    """The URL of the bucket; empty for a folder in the data folder."""
    wakeups: Wakeups = setting(Wakeups.LONG_POLL)
    """How workers are woken up: by long polling of a dispatcher, through the bucket, or through
    SQS queues. The same for dispatchers and workers."""
    wait_seconds: float = setting(WAIT_SECONDS_MAX, least=1, most=WAIT_SECONDS_MAX)
    """How long a long poll waits, 1 to 50: less than the timeouts of proxies in between."""
    sqs_prefix: str = setting("penstock")
    """The prefix of the names of SQS queues."""
    aws_region: str = setting("")
    """The AWS region; empty for that of the environment, as for the AWS CLI."""
    aws_endpoint: str = setting("")
    """The endpoint of all AWS services; empty for AWS's own."""
    host: str = setting("127.0.0.1")
    """The address of the public listener."""
    port: int = setting(7070, least=0, most=65_535)
    """The port of the public listener; 0 for any free one."""
    internal_host: str = setting("127.0.0.1")
    """The address of the listener for workers and sources."""
    internal_port: int = setting(7071, least=0, most=65_535)
    """The port of that listener; 0 for any free one."""
    webhook_host: str = setting("127.0.0.1")
    """The address of the webhook receiver."""
    webhook_port: int = setting(7072, least=0, most=65_535)
    """The port of the webhook receiver; 0 for any free one."""
    webhook_token: str = setting("", is_secret=True)
    """The token of the webhook receiver, which `penstock source token` prints. Required if it is
    not on loopback, where it may have neither `api_token` nor `worker_secret`."""
    query_service: str = setting("")
    """Where dispatchers find the query service; empty for the one on this machine, `off` for
    none."""
    query_host: str = setting("127.0.0.1")
    """The address of the query service."""
    query_port: int = setting(7073, least=0, most=65_535)
    """The port of the query service; 0 for any free one."""
    query_concurrency: int = setting(2, least=1, most=64)
    """How many queries a query service runs at a time."""
    query_memory: str = setting("1GiB")
    """How much memory DuckDB may use for a query; its process may have 1 GiB more."""
    query_threads: int = setting(2, least=1, most=64)
    """How many threads a query has."""
    query_spill: str = setting("4GiB")
    """How much of a query may lie in temporary files when it does not fit into memory."""
    query_seconds: float = setting(60.0, least=1, most=3_600)
    """How long a query may take. It waits for others for 45 seconds at most."""
    query_rows: int = setting(1_000_000, least=1, most=10**9)
    """How many rows the result of a query may have."""
    query_bytes: str = setting("256MiB")
    """How large the result of a query may be."""
    query_scan: str = setting("64GiB")
    """How large the files may be together that a query is over."""
    query_uids: str = setting("60864-60879")
    """The users that the processes of queries run as, where the query service is root on Linux:
    numbers that no account has."""
    api_token: str = setting("", is_secret=True)
    """The token that callers of the public listener must send; required if it is not on loopback,
    and then of 16 characters or more."""
    viewer_token: str = setting("", is_secret=True)
    """The token for read-only access to the console."""
    hosts: tuple[str, ...] = setting(())
    """The host names that the console answers to, besides that of `url` of alerts; empty for those
    of this machine if `host` is on loopback, and for any name if it is not."""
    worker_secret: str = setting("", is_secret=True)
    """The secret that the tokens of workers and sources are derived from, of 16 characters or
    more; empty for a file in the data folder."""
    org: str = setting("default")
    """The name of the organization, which every capability token has."""
    signer: SignerKind = setting(SignerKind.PEM)
    """What signs capability tokens."""
    kms_key: str = setting("")
    """The KMS key if `signer` is `kms`: its id, ARN or alias."""
    task_role: str = setting("")
    """The ARN of the role that tasks get temporary credentials of; empty for no credentials."""
    sts_endpoint: str = setting("")
    """The endpoint of STS, such as a VPC endpoint; empty for AWS's own."""
    sts_region: str = setting("")
    """The region of STS; empty for `aws_region`."""
    secrets_folder: str = setting("")
    """The folder of files that jobs may name as secrets; empty for `secrets` in the data folder."""
    secrets_prefix: str = setting("penstock/")
    """The prefix of the secrets in AWS Secrets Manager that jobs may name."""
    dispatchers: tuple[str, ...] = setting(())
    """The internal listeners, for workers and sources; empty for the one on this machine."""
    connections: int = setting(10, least=2, most=1000)
    """The maximum number of connections from a dispatcher to Postgres."""
    retention_days: float = setting(30.0, least=0.01, most=36_500)
    """How long finished tasks and events are kept."""
    concurrency: int = declared_in(PipelineWorkerSettings, "concurrency")
    queues: tuple[str, ...] = declared_in(PipelineWorkerSettings, "queues")
    spark: str = setting(LOCAL_SPARK)
    """Where Spark jobs run: local[*] or another Spark master, or sc://HOST for Spark Connect."""
    sweep_hours: float = setting(24.0, least=0.001, most=87_600)
    """How long files are kept that nothing refers to any more."""
    runtimes: Mapping[str, Mapping[str, Any]] = setting({})
    """Settings of runtimes by name; a table in the file."""
    alerts: Mapping[str, Any] = setting({})
    """Rules of alerts, and where notices are sent; see [docs/alerts.md](alerts.md)."""
    stop_seconds: float = declared_in(PipelineWorkerSettings, "stop_seconds")

    def __post_init__(self) -> None:
        check(self)
        if self.postgres_direct and not self.postgres:
            raise InvalidInput(
                "postgres_direct is set, and postgres is not.",
                hint="Set postgres to the address of the pooler, or take postgres_direct away.",
            )
        _check_tokens(self)
        _check_query(self)
        _check_store(self.store)
        if not _SPARK.match(self.spark):
            raise InvalidInput(
                f"spark has {self.spark[:100]!r}, which is not a Spark master.",
                hint="Write local[*], spark://HOST:7077, yarn, k8s://… or sc://HOST.",
            )
        read_alerts(self.alerts)
        for each in self.dispatchers:
            if urlsplit(each).scheme not in {"http", "https"}:
                raise InvalidInput(f"dispatchers has {each!r}, which is not an http URL.")
        for each in self.queues:
            if not is_name(each):
                raise InvalidInput(
                    f"queues has {each[:100]!r}, which is not the name of a queue.",
                    hint="Write names of a-z, 0-9, _ and -, as in gpu,default.",
                )

    @property
    def store_url(self) -> str:
        """Where the bucket is."""
        return self.store or (self.data.absolute() / "store").as_uri()

    @property
    def console_hosts(self) -> frozenset[str] | None:
        """The names that the console answers to; None for any."""
        if not self.hosts and self.host not in _LOOPBACK:
            return None
        alerts_host = urlsplit(str(self.alerts.get("url", ""))).hostname
        names = {each.strip().lower().strip("[]") for each in self.hosts} | _LOOPBACK
        return frozenset(names | ({alerts_host} if alerts_host else set()))

    @property
    def secrets_path(self) -> Path:
        """Where files that jobs name as secrets are."""
        return Path(self.secrets_folder or self.data / "secrets").absolute()

    @property
    def query_url(self) -> str | None:
        """Where dispatchers find the query service; None if there is none."""
        if self.query_service == "off":
            return None
        return self.query_service or f"http://{self.query_host}:{self.query_port}"

    @property
    def is_webhook_on_loopback(self) -> bool:
        """Whether only this machine can call webhooks."""
        return self.webhook_host in _LOOPBACK

    @property
    def dispatcher_urls(self) -> tuple[str, ...]:
        """Where workers and sources find dispatchers."""
        return self.dispatchers or (f"http://{self.internal_host}:{self.internal_port}",)


SCHEMA: Final = Schema(
    Settings, *QUEUE_SCHEMA.kinds, others={f"{PREFIX}{name}": said for name, said in OTHERS.items()}
)
"""All settings that the file and the environment may have."""
SettingSource = ReadSettings[Settings]


def read_settings(
    given: Mapping[str, Any], *, environment: Mapping[str, str], folder: Path
) -> SettingSource:
    """Put settings together. What is None in `given` was not given."""
    file = SCHEMA.file(environment, folder)
    return SCHEMA.read(Settings, given=given, environment=environment, file=file)


def misspelt(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that nobody reads and that are nearly ones that are read, and those."""
    return SCHEMA.misspelt(environment)


def variables() -> Sequence[str]:
    """The variables of all settings."""
    return [each.variable for each in declared(Settings)]


def variables_of(settings: Settings) -> Mapping[str, str]:
    """The settings as variables, for processes that are started with them."""
    return {
        each.variable: _text(getattr(settings, each.name))
        for each in declared(Settings)
        if each.name not in _TABLES and _text(getattr(settings, each.name))
    }


def query_variables(settings: Settings) -> Mapping[str, str]:
    """The settings that the query service needs, as variables: none of them is a secret."""
    needed = replace(settings, dispatchers=settings.dispatcher_urls, store=settings.store_url)
    names = {f"{PREFIX}{each.upper()}" for each in _OF_QUERIES}
    given = {name: text for name, text in variables_of(needed).items() if name in names}
    return {**given, f"{PREFIX}SETTINGS": os.devnull}


def webhook_variables(settings: Settings, *, token: str) -> Mapping[str, str]:
    """The settings that the process of webhooks needs, as variables: none of them opens anything
    but events of webhook sources. Their file is not its business: it may have the others."""
    needed = replace(
        settings,
        webhook_token=token,
        dispatchers=settings.dispatcher_urls,
        secrets_folder=str(settings.secrets_path),
    )
    names = {f"{PREFIX}{each.upper()}" for each in _OF_WEBHOOKS}
    given = {name: text for name, text in variables_of(needed).items() if name in names}
    return {**given, f"{PREFIX}SETTINGS": os.devnull}


def without_settings(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that are no settings."""
    known = frozenset(variables())
    return {name: value for name, value in environment.items() if name not in known}


def _check_query(settings: Settings) -> None:
    for name in ("query_memory", "query_spill", "query_bytes", "query_scan"):
        try:
            byte_count(getattr(settings, name))
        except ValueError as error:
            raise InvalidInput(
                f"{name} has {getattr(settings, name)[:100]!r}, which {error}.",
            ) from None
    service = settings.query_service
    if service not in ("", "off") and urlsplit(service).scheme not in {"http", "https"}:
        raise InvalidInput(f"query_service has {service[:100]!r}, which is not an http URL.")


def _check_tokens(settings: Settings) -> None:
    for name in ("api_token", "viewer_token", "worker_secret"):
        if getattr(settings, name) == _PUBLISHED:
            raise InvalidInput(
                f"{name} is the example of the documentation, so everybody knows it.",
                hint=f"Make one: {_MAKE_ONE}",
            )
    if settings.host not in _LOOPBACK:
        if not settings.api_token:
            raise InvalidInput(
                f"Without a token the public listener is on loopback only, not on {settings.host}.",
                hint="Set PENSTOCK_API_TOKEN, or leave host at 127.0.0.1.",
            )
        for name in ("api_token", "viewer_token"):
            if 0 < len(getattr(settings, name)) < TOKEN_CHARACTERS_MIN:
                raise InvalidInput(
                    f"{name} has fewer than {TOKEN_CHARACTERS_MIN} characters, and {settings.host}"
                    " is reachable from other machines.",
                    hint=f"Make one: {_MAKE_ONE}",
                )
    if settings.viewer_token and settings.viewer_token == settings.api_token:
        raise InvalidInput(
            "viewer_token and api_token are the same, so viewers could change things as well.",
            hint="Give each of them a text of its own.",
        )
    if settings.viewer_token and not settings.api_token:
        raise InvalidInput(
            "viewer_token is set without api_token, so anybody may change things.",
            hint="Set PENSTOCK_API_TOKEN as well.",
        )
    if 0 < len(settings.worker_secret) < TOKEN_CHARACTERS_MIN:
        raise InvalidInput(
            f"worker_secret has fewer than {TOKEN_CHARACTERS_MIN} characters.",
            hint=f"Make one, the same for dispatchers, workers and sources: {_MAKE_ONE}",
        )


def _check_store(url: str) -> None:
    scheme, separator, _ = url.partition("://")
    if url and (not separator or scheme not in _STORES):
        # What comes after the scheme may hold a secret, and is not repeated.
        shown = f"{scheme[:40]}://" if separator else scheme[:40]
        raise InvalidInput(
            f"store has {shown!r}, which is not the URL of a store.",
            hint="Write s3://BUCKET/PREFIX or file:///FOLDER.",
        )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)
