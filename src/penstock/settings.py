"""What an installation of Penstock is set to, and where each value came from.

One table of settings, `Settings`. A value is the first that is there of: what the command line was
given, the variable `PENSTOCK_NAME`, the settings file (`penstock.toml` in the current directory, or
what `PENSTOCK_SETTINGS` names), the default. A name that is not in the table, or a value that
cannot be right, is an error that says where it stands. Called by the wiring in `app` and by the
command line; no other part of the pipeline reads settings of its own.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from penstock.dispatcher.alerts.reading import read_alerts
from penstock.dispatcher.dag.names import is_name
from penstock.kernel.errors import InvalidInput

DEFAULT_FILE: Final = "penstock.toml"
PREFIX: Final = "PENSTOCK_"
_OTHERS: Final = (
    *("URL", "QUEUE", "SETTINGS", "DISPATCHER"),
    *("WORKER_MODE", "WORKER_SHARDS", "WORKER_LEASE_TTL_SECS", "WORKER_LEASE_RENEW_SECS"),
    *("WORKER_TASK_LEASE_SECONDS", "WORKER_STOP_SECONDS"),
)
"""Variables that others read: the verbs that ask, deployed functions, workers of queues."""
_NEAR: Final = 0.75
TOKEN_CHARACTERS_MIN: Final = 16
"""Of the worker secret, and of tokens where others than this machine may try them."""
_PUBLISHED: Final = "only-for-trying-it-out"
"""What compose.yaml of 0.1.0 had."""
_MAKE_ONE: Final = "openssl rand -hex 32"
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_STORES: Final = frozenset({"s3", "file", "memory"})
_BOUNDS: Final = {
    "port": (0, 65_535),
    "internal_port": (0, 65_535),
    "webhook_port": (0, 65_535),
    "concurrency": (1, 1000),
    "connections": (2, 1000),
    "retention_days": (0.01, 36_500),
    "sweep_hours": (0.001, 87_600),
    "stop_seconds": (0, 86_400),
    "wait_seconds": (1, 50),
}
_OF_WEBHOOKS: Final = (
    *("webhook_host", "webhook_port", "webhook_token", "dispatchers"),
    *("secrets_folder", "secrets_prefix", "aws_region", "aws_endpoint"),
)
"""What the process of webhooks is told."""
_OF_QUEUES: Final = ("queue", "worker")
"""Tables of the file that workers of queues read themselves (`penstock.queue.settings_file`)."""
_TABLES: Final = ("runtimes", "alerts")
"""Settings that stand in the file only."""
_SPARK: Final = re.compile(r"local(\[.+\])?$|(spark|sc|k8s)://.+|yarn$")
Choice = TypeVar("Choice", bound=StrEnum)


class Profile(StrEnum):
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

    data: Path = Path("penstock-data")
    """The folder of everything that is kept on this machine."""
    profile: Profile = Profile.LITE
    """Which adapters are used: `lite` for this machine or any server, `aws` for AWS's services."""
    postgres: str = ""
    """The address of a Postgres, as libpq has it; empty for one of our own in the data folder."""
    store: str = ""
    """The URL of the bucket; empty for a folder in the data folder."""
    wakeups: Wakeups = Wakeups.LONG_POLL
    """How workers learn that there is work: by requests that wait at a dispatcher, through the
    bucket, or through queues of SQS. The same for dispatchers and workers."""
    wait_seconds: float = 50.0
    """How long such a request waits, 1 to 50: less than proxies between workers and dispatchers."""
    sqs_prefix: str = "penstock"
    """What the names of SQS queues begin with."""
    aws_region: str = ""
    """Empty for the one that the environment of AWS's tools says."""
    aws_endpoint: str = ""
    """Another address than AWS's own, for all of its services."""
    host: str = "127.0.0.1"
    """The address of the public listener."""
    port: int = 7070
    """The port of the public listener; 0 for any that is free."""
    internal_host: str = "127.0.0.1"
    """The address of the listener for workers and sources."""
    internal_port: int = 7071
    """The port of that listener; 0 for any that is free."""
    webhook_host: str = "127.0.0.1"
    """The address where webhooks are taken."""
    webhook_port: int = 7072
    """The port where webhooks are taken; 0 for any that is free."""
    webhook_token: str = ""
    """What the process of webhooks proves itself with: what `penstock source token` prints. Needed
    if it is not on loopback, where it holds neither `api_token` nor `worker_secret`."""
    api_token: str = ""
    """What callers of the public listener have to bring; needed if it is not on loopback, and then
    of 16 characters or more."""
    viewer_token: str = ""
    """What lets people look at the console and nothing else."""
    hosts: tuple[str, ...] = ()
    """The names by which browsers may ask for the console, besides that of `url` of alerts; empty
    for those of this machine if `host` is on loopback, and for any name if it is not."""
    worker_secret: str = ""
    """What the tokens of workers and sources are made from, of 16 characters or more; empty for a
    file in the data folder."""
    org: str = "default"
    """Whose tasks these are; every capability token says so."""
    signer: SignerKind = SignerKind.PEM
    """What signs capability tokens."""
    kms_key: str = ""
    """The KMS key that signs, if KMS does: its id, ARN or alias."""
    task_role: str = ""
    """The ARN of the role whose credentials are minted for tasks; empty mints none."""
    sts_endpoint: str = ""
    """Another address of STS than AWS's own, as of a VPC endpoint."""
    sts_region: str = ""
    """The region of STS; empty for `aws_region`."""
    secrets_folder: str = ""
    """The folder of files that jobs may name as secrets; empty for `secrets` in the data folder."""
    secrets_prefix: str = "penstock/"
    """What the names of secrets in AWS Secrets Manager begin with that jobs may name."""
    dispatchers: tuple[str, ...] = ()
    """The internal listeners, for workers and sources; empty for the one on this machine."""
    connections: int = 10
    """How many connections to Postgres a dispatcher has at most."""
    retention_days: float = 30.0
    """How long tasks and events are kept after they are over."""
    concurrency: int = 4
    """How many tasks a worker runs at a time."""
    queues: tuple[str, ...] = ()
    """The queues whose tasks a worker takes, as in gpu,default; empty for those of all. A runtime
    under a name of its own has a queue of that name; all others have the queue default."""
    spark: str = "local[*]"
    """Where Spark jobs run: local[*] or another master of Spark's, or sc://HOST for Connect."""
    sweep_hours: float = 24.0
    """How long files are kept that no reader can find any more."""
    runtimes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of runtimes, by their names; a table in the file."""
    alerts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What people are alerted of, and where notices are sent; see [docs/alerts.md](alerts.md)."""
    stop_seconds: float = 30.0
    """How long a worker that is asked to stop lets its tasks run."""

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidInput(f"{name} must be between {least:g} and {most:g}.")
        _check_tokens(self)
        _check_store(self.store)
        if not _SPARK.match(self.spark):
            raise InvalidInput(
                f"spark has {self.spark[:100]!r}, which is not where Spark could run.",
                hint="Write local[*], spark://HOST:7077, yarn, k8s://… or sc://HOST.",
            )
        read_alerts(self.alerts)
        for each in self.dispatchers:
            if urlsplit(each).scheme not in {"http", "https"}:
                raise InvalidInput(f"dispatchers has {each!r}, which is not an http URL.")
        for each in self.queues:
            if not is_name(each):
                raise InvalidInput(
                    f"queues has {each[:100]!r}, which is no name of a queue.",
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
        told = urlsplit(str(self.alerts.get("url", ""))).hostname
        names = {each.strip().lower().strip("[]") for each in self.hosts} | _LOOPBACK
        return frozenset(names | ({told} if told else set()))

    @property
    def secrets_path(self) -> Path:
        """Where files that jobs name as secrets are."""
        return Path(self.secrets_folder or self.data / "secrets").absolute()

    @property
    def is_webhook_on_loopback(self) -> bool:
        """Whether only this machine can call webhooks."""
        return self.webhook_host in _LOOPBACK

    @property
    def dispatcher_urls(self) -> tuple[str, ...]:
        """Where workers and sources find dispatchers."""
        return self.dispatchers or (f"http://{self.internal_host}:{self.internal_port}",)


@dataclass(frozen=True, slots=True)
class Told:
    """Settings, and where each came from, by name."""

    settings: Settings
    origins: Mapping[str, str]


def read_settings(
    given: Mapping[str, Any], *, environment: Mapping[str, str], folder: Path
) -> Told:
    """Put settings together. What is None in `given` was not given."""
    file = settings_file(environment, folder)
    said = _in_file(file) if file is not None else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for each in fields(Settings):
        variable = f"{PREFIX}{each.name.upper()}"
        if given.get(each.name) is not None:
            found, origin = given[each.name], "the command line"
        elif environment.get(variable):
            found, origin = environment[variable], variable
        elif each.name in said:
            found, origin = said[each.name], str(file)
        else:
            origins[each.name] = "default"
            continue
        values[each.name] = _as(each.name, found, origin=origin)
        origins[each.name] = origin
    try:
        return Told(Settings(**values), origins)
    except InvalidInput as error:
        raise _placed(error, origins) from None


def _placed(error: InvalidInput, origins: Mapping[str, str]) -> InvalidInput:
    """The same error, with where the setting stands that it begins with."""
    name = re.split(r"[^a-z_]", error.message, maxsplit=1)[0]
    origin = origins.get(name, "default")
    if origin == "default":
        return error
    return InvalidInput(f"{error.message.rstrip('.')} ({origin}).", hint=error.hint)


def bounds_of(name: str) -> tuple[float, float] | None:
    """From where to where a number may go."""
    return _BOUNDS.get(name)


def misspelt(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that nobody reads and that are nearly ones that are read, and those."""
    known = set(variables())
    known |= {f"{PREFIX}{each}" for each in _OTHERS}
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in known:
            continue
        # The prefix is the same in all, and would make all alike.
        endings = {each.removeprefix(PREFIX): each for each in sorted(known)}
        meant = difflib.get_close_matches(name.removeprefix(PREFIX), endings, n=1, cutoff=_NEAR)
        if meant:
            yield name, endings[meant[0]]


def settings_file(environment: Mapping[str, str], folder: Path) -> Path | None:
    """The file that settings are read from, if there is one."""
    named = environment.get(f"{PREFIX}SETTINGS")
    if named:
        return folder / named
    default = folder / DEFAULT_FILE
    return default if default.is_file() else None


def variables() -> Sequence[str]:
    """The variables of all settings."""
    return [f"{PREFIX}{each.name.upper()}" for each in fields(Settings)]


def variables_of(settings: Settings) -> Mapping[str, str]:
    """The settings as variables, for processes that are started with them."""
    return {
        f"{PREFIX}{each.name.upper()}": _text(getattr(settings, each.name))
        for each in fields(Settings)
        if each.name not in _TABLES and _text(getattr(settings, each.name))
    }


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
    said = {name: text for name, text in variables_of(needed).items() if name in names}
    return {**said, f"{PREFIX}SETTINGS": os.devnull}


def without_settings(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that are no settings."""
    known = frozenset(variables())
    return {name: value for name, value in environment.items() if name not in known}


def _in_file(file: Path) -> Mapping[str, Any]:
    try:
        said = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"There is no settings file {file}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{file} is not TOML: {error}",
            hint="A setting is a line such as port = 8080; a text is in quotes: host = '127.0.0.1'",
        ) from error
    names = [each.name for each in fields(Settings)]
    said = {name: value for name, value in said.items() if name not in _OF_QUEUES}
    for name in said:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
            raise InvalidInput(
                f"{file} has {name!r}, which is not a setting.",
                hint=f"Is {near[0]} meant?" if near else f"Settings are {', '.join(names)}.",
            )
    return said


def _check_tokens(settings: Settings) -> None:
    for name in ("api_token", "viewer_token", "worker_secret"):
        if getattr(settings, name) == _PUBLISHED:
            raise InvalidInput(
                f"{name} is a text that stands in our documentation, so everybody knows it.",
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
                    " can be asked from elsewhere.",
                    hint=f"Make one: {_MAKE_ONE}",
                )
    if settings.viewer_token and settings.viewer_token == settings.api_token:
        raise InvalidInput(
            "viewer_token and api_token are the same: who looks could steer as well.",
            hint="Give each of them a text of its own.",
        )
    if settings.viewer_token and not settings.api_token:
        raise InvalidInput(
            "viewer_token lets people look; without api_token anybody may steer.",
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
        said = f"{scheme[:40]}://" if separator else scheme[:40]
        raise InvalidInput(
            f"store has {said!r}, which is not the URL of a store.",
            hint="Write s3://BUCKET/PREFIX or file:///FOLDER.",
        )


def _as(name: str, found: Any, *, origin: str) -> Any:
    """A value in the type of its setting."""
    default = getattr(Settings(), name)
    if name == "alerts" and isinstance(found, dict):
        # Its own reader says what is wrong in it.
        return found
    try:
        return _converted(default, found)
    except (ValueError, TypeError):
        raise InvalidInput(
            f"{name} cannot be {found!r} ({origin}).", hint=_wanted(default)
        ) from None


def _converted(default: Any, found: Any) -> Any:
    match default:
        case StrEnum():
            return type(default)(found)
        case Path():
            return Path(found)
        case bool():
            raise TypeError
        case int() | float():
            if isinstance(found, bool):
                raise TypeError
            return type(default)(found)
        case tuple():
            return tuple(found.split(",")) if isinstance(found, str) else tuple(map(str, found))
        case str() if isinstance(found, str):
            return found
        case Mapping() if isinstance(found, dict):
            return {name: dict(table) for name, table in found.items()}
    raise TypeError


def _wanted(default: Any) -> str:
    match default:
        case StrEnum():
            return f"It is one of {', '.join(type(default))}."
        case int() | float():
            return "It is a number."
        case Mapping():
            return "It is a table, as in [runtimes.process] or [alerts], in the file only."
    return "It is a text."


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)
