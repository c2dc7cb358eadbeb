"""What the verbs that run an installation share: its options, its settings, its log."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click

from penstock.kernel.errors import InvalidInput
from penstock.kernel.logs import LogFormat, log_to_stderr
from penstock.kernel.settings_schema import declared
from penstock.settings import Settings, misspelt, read_settings

Verb = TypeVar("Verb", bound=Callable[..., Any])

_PASSWORD: Final = re.compile(r"password|passfile|token=", re.IGNORECASE)


def _option(name: str, help: str, **more: Any) -> Callable[[Verb], Verb]:  # click's
    """The option of a setting: its type, bounds and default are those that it was declared with."""
    (each,) = (each for each in declared(Settings) if each.name == name)
    kind: Any = None
    if isinstance(each.type, type) and issubclass(each.type, StrEnum):
        kind = click.Choice([str(one) for one in each.type])
    elif each.type is int and each.bounds is not None:
        kind = click.IntRange(int(each.bounds[0]), int(each.bounds[1]))
    elif each.type is Path:
        kind = click.Path(file_okay=False, path_type=Path)
    if not more and each.default not in ("", ()):
        help = f"{help}  [default: {each.default}]".strip()  # noqa: A001
    flag = more.pop("flag", f"--{name.replace('_', '-')}")
    return click.option(flag, name, type=kind, help=help, **more)


OPTIONS: Final = {
    "data": _option("data", "The data folder."),
    "profile": _option("profile", ""),
    "postgres": _option(
        "postgres", "Postgres URL, instead of a local server in the data folder.", metavar="DSN"
    ),
    "store": _option(
        "store", "s3://BUCKET/PREFIX, instead of a folder in the data folder.", metavar="URL"
    ),
    "wakeups": _option("wakeups", "How workers are woken up."),
    "host": _option("host", "The address of the public listener."),
    "port": _option("port", "Its port; 0 for any."),
    "internal_host": _option("internal_host", "The address of the listener for workers."),
    "internal_port": _option("internal_port", "Its port; 0 for any."),
    "webhook_host": _option("webhook_host", "The address for webhooks."),
    "webhook_port": _option("webhook_port", "Its port; 0 for any."),
    "query_host": _option("query_host", "Its address."),
    "query_port": _option("query_port", "Its port; 0 for any."),
    "dispatchers": _option(
        "dispatchers",
        "The internal listener of a dispatcher; may be repeated.",
        flag="--dispatcher",
        metavar="URL",
        multiple=True,
    ),
    "concurrency": _option("concurrency", "Concurrency."),
    "queues": _option(
        "queues",
        "Take tasks only of this queue; may be repeated.  [default: all queues]",
        flag="--queue",
        metavar="NAME",
        multiple=True,
    ),
    "spark": _option(
        "spark",
        "spark://HOST:7077 or sc://HOST, instead of Spark on this machine.",
        metavar="MASTER",
    ),
}
log_format_option: Final = click.option(
    "--log-format",
    type=click.Choice([str(each) for each in LogFormat]),
    help="Log format.  [default: text on a terminal, else json]",
)


def set_by(*names: str, is_logging: bool = True) -> Callable[[Verb], Verb]:
    """Give a verb the options of these names, in their order, and `--log-format` if it logs."""

    def decorate(verb: Verb) -> Verb:
        if is_logging:
            verb = log_format_option(verb)
        for name in reversed(names):
            verb = OPTIONS[name](verb)
        return verb

    return decorate


def begun(given: dict[str, Any]) -> Settings:
    """The settings of a verb that runs for long, whose log is shown from now on."""
    show_log(given.pop("log_format", None))
    return settings_of(given)


def show_log(form: str | None) -> None:
    """Show the log of this process from now on: as asked, or as whoever reads it wants it."""
    log_to_stderr(LogFormat(form or (LogFormat.TEXT if sys.stderr.isatty() else LogFormat.JSON)))


def settings_of(given: dict[str, Any]) -> Settings:
    """The settings of a verb."""
    # An option that may be given several times is an empty tuple if it was not.
    said = {name: None if value == () else value for name, value in given.items()}
    for name in ("postgres", "spark"):
        # The name of a file that has it is no secret.
        if has_password((said.get(name) or "").replace("passfile=", "")):
            raise InvalidInput(
                f"--{name} has a password, which every user of this machine could read there.",
                hint=f"Set PENSTOCK_{name.upper()}, or {name} in the settings file.",
            )
    for name, meant in misspelt(os.environ):
        click.echo(f"penstock: Unknown setting {name}; did you mean {meant}?", err=True)
    return read_settings(said, environment=os.environ, folder=Path.cwd()).settings


def wiring(module: str = "penstock.app") -> ModuleType:
    """The wiring, imported when it is needed: it takes its time, and not all have its parts."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            raise
        raise InvalidInput(
            f"This needs the package {error.name}, which is not installed.",
            hint="Install it with: pip install 'penstock[dispatcher]'",
        ) from error


def has_password(text: str) -> bool:
    """Whether an address holds more than an address; in doubt it does."""
    try:
        parts = urlsplit(text)
        is_user = parts.scheme.startswith("postgres")
        has_one = bool(parts.password) or ("@" in parts.netloc and not is_user)
    except ValueError:
        return True
    return has_one or bool(_PASSWORD.search(text))
