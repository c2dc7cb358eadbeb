"""What the verbs that run an installation share: its options, its settings, its log."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import click

from penstock.kernel.errors import InvalidInput
from penstock.kernel.logs import LogFormat, log_to_stderr
from penstock.settings import Profile, Settings, Wakeups, misspelt, read_settings

Verb = TypeVar("Verb", bound=Callable[..., Any])

_FOLDER: Final = click.Path(file_okay=False, path_type=Path)
_PASSWORD: Final = re.compile(r"password|passfile|token=", re.IGNORECASE)
_PORT: Final = click.IntRange(0, 65_535)

OPTIONS: Final = {
    "data": click.option(
        "--data", type=_FOLDER, help="The folder of everything.  [default: penstock-data]"
    ),
    "profile": click.option(
        "--profile", type=click.Choice([str(each) for each in Profile]), help="[default: lite]"
    ),
    "postgres": click.option(
        "--postgres", metavar="DSN", help="Any Postgres, instead of one in the data folder."
    ),
    "store": click.option(
        "--store", metavar="URL", help="s3://BUCKET/PREFIX, instead of a folder in the data folder."
    ),
    "wakeups": click.option(
        "--wakeups",
        type=click.Choice([str(each) for each in Wakeups]),
        help="How workers learn that there is work.  [default: long-poll]",
    ),
    "host": click.option(
        "--host", help="The address of the public listener.  [default: 127.0.0.1]"
    ),
    "port": click.option("--port", type=_PORT, help="Its port; 0 for any.  [default: 7070]"),
    "internal_host": click.option(
        "--internal-host", help="The address of the listener for workers.  [default: 127.0.0.1]"
    ),
    "internal_port": click.option(
        "--internal-port", type=_PORT, help="Its port; 0 for any.  [default: 7071]"
    ),
    "webhook_host": click.option(
        "--webhook-host", help="The address for webhooks.  [default: 127.0.0.1]"
    ),
    "webhook_port": click.option(
        "--webhook-port", type=_PORT, help="Its port; 0 for any.  [default: 7072]"
    ),
    "dispatchers": click.option(
        "--dispatcher",
        "dispatchers",
        metavar="URL",
        multiple=True,
        help="The internal listener of a dispatcher; may be given several times.",
    ),
    "concurrency": click.option(
        "--concurrency", type=click.IntRange(1, 1000), help="Tasks at a time.  [default: 4]"
    ),
    "queues": click.option(
        "--queue",
        "queues",
        metavar="NAME",
        multiple=True,
        help="Take tasks of this queue alone; may be given several times.  [default: all queues]",
    ),
    "spark": click.option(
        "--spark",
        metavar="MASTER",
        help="spark://HOST:7077 or sc://HOST, instead of Spark on this machine.",
    ),
}
log_format_option: Final = click.option(
    "--log-format",
    type=click.Choice([str(each) for each in LogFormat]),
    help="How the log looks.  [default: text on a terminal, else json]",
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
        click.echo(f"penstock: Nobody reads {name}; is {meant} meant?", err=True)
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
