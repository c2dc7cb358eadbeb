"""`penstock settings`: what is set here, and where each value came from.

Secrets are never shown, here as little as elsewhere: a setting that is one, a password within an
address, and whatever in a table has the name of one, is set or not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.installation import OPTIONS, has_password, set_by
from penstock.cli.options import json_option
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import notes
from penstock.cli.reference import markdown, purposes
from penstock.cli.tables import table
from penstock.cli.telling import line
from penstock.settings import (
    DEFAULT_FILE,
    PREFIX,
    Settings,
    misspelt,
    read_settings,
    settings_file,
)

SECRET: Final = frozenset({"api_token", "viewer_token", "worker_secret"})
_HIDDEN: Final = re.compile(r"secret|password|token|credential|webhook|_key$|\.key$", re.IGNORECASE)
_SET, _NOT_SET = "set", "not set"


@click.command(
    short_help="Show what is set, and where it came from.",
    epilog="Example: penstock settings",
)
@click.option("--reference", is_flag=True, help="Print the reference of all settings, as Markdown.")
@click.option("--changed", is_flag=True, help="Only what is not at its default.")
@json_option
@set_by(*OPTIONS, is_logging=False)
def settings(*, reference: bool, changed: bool, as_json: bool, **given: Any) -> None:
    """Show every setting, its value, where it came from, and what it is for.

    A value is the first that is there of: the command line, the variable, the settings file, the
    default. The options below are those of the verbs that run an installation: with them it is
    shown what 'penstock up' would do with the same options. Secrets are shown as set or not set.

    Exit code 0: here they are. 2: one of them cannot be right, and it is said which.
    """
    if reference:
        click.echo(markdown())
        return
    said = {name: None if value == () else value for name, value in given.items()}
    file = settings_file(os.environ, Path.cwd())
    told = read_settings(said, environment=os.environ, folder=Path.cwd())
    if told.settings.runtimes:
        # Imported here: it takes its time, and few settings have any.
        import_module("penstock.runtimes.registry").Registry(told.settings.runtimes)
    rows = [
        {
            "name": each.name,
            "value": shown_value(each.name, getattr(told.settings, each.name)),
            "origin": told.origins[each.name],
            "variable": f"{PREFIX}{each.name.upper()}",
            "purpose": purposes().get(each.name, ""),
        }
        for each in fields(Settings)
        if not changed or told.origins[each.name] != "default"
    ]
    wrong = [f"nobody reads {name}; is {meant} meant?" for name, meant in misspelt(os.environ)]
    if as_json:
        show_json(rows)
    else:
        _show(rows, file)
    notes(wrong)


def _show(rows: list[dict[str, Any]], file: Path | None) -> None:
    if rows:
        cells = [
            (row["name"], line(_words(row["value"])), line(_near(row["origin"])), row["purpose"])
            for row in rows
        ]
        table(("setting", "value", "from", "what it is for"), cells, whole=(0,))
    else:
        click.echo("Every setting has its default.", err=True)
    if file is None:
        click.echo(f"\nThere is no {DEFAULT_FILE} in {Path.cwd()}.", err=True)


def _near(origin: str) -> str:
    """A file of this folder by its name alone."""
    return Path(origin).name if Path(origin).parent == Path.cwd() else origin


def shown_value(name: str, value: Any) -> Any:
    """A value for people and programs, without what must not be seen."""
    match value:
        case _ if name in SECRET:
            return _SET if value else _NOT_SET
        case Mapping():
            return {key: _within(str(key), each) for key, each in value.items()}
        case tuple() | list():
            return [shown_value(name, each) for each in value]
        case str() if has_password(value):
            return f"{_SET}, with a password in it"
        case bool() | int() | float() | None:
            return value
    return str(value)


def _within(name: str, value: Any) -> Any:
    """A value of a table."""
    if _HIDDEN.search(name) and not isinstance(value, Mapping | bool):
        return _SET if value else _NOT_SET
    return shown_value(name, value)


def _words(value: Any) -> str:
    match value:
        case Mapping():
            return ", ".join(f"{key}: {_words(each)}" for key, each in value.items())
        case list():
            return ", ".join(map(_words, value))
        case float():
            return f"{value:g}"
    return str(value)
