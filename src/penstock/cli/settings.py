"""`penstock settings`: what is set here, where each value came from, and the reference as Markdown.

Everything that is said of a setting is read from where it is declared (`kernel.settings_schema`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.dispatcher_call import line
from penstock.cli.format import notes, print_json
from penstock.cli.installation import OPTIONS, has_password, set_by
from penstock.cli.options import json_option
from penstock.cli.output import table
from penstock.kernel.settings_schema import (
    DEFAULT_FILE,
    PREFIX,
    Declared,
    declared,
    settings_file,
)
from penstock.kernel.units import bytes_text
from penstock.queue.settings import QUEUE_SCHEMA
from penstock.settings import OTHERS, Settings, misspelt, read_settings

_HEAD: Final = f"""# Settings

<!-- Made by `penstock settings --reference`; edit the classes that have the settings. -->

An installation is set by one file, by variables, or by options of the command line. A value is the
first that is there of: the option, the variable `{PREFIX}NAME`, the file (`{DEFAULT_FILE}` in the
current folder, or what `{PREFIX}SETTINGS` names), the default. A name that does not exist, or a
value that cannot be right, is an error that says where it stands. What is a number of seconds,
hours or days by its name may be a text such as `90s`, `12h` or `30d` as well.

```toml
# {DEFAULT_FILE}
data = "/var/lib/penstock"
port = 8080
concurrency = 8

[runtimes.process]
idle_max = 4
```

`penstock settings` shows what holds here, and where each value came from. Secrets are shown as set
or not set, and are better given as variables than in a file that is kept. The tables `[queue]` and
`[worker]` of the file are for [the workers of queues](queue.md#modes-how-workers-find-tasks).
"""
_VARIABLES: Final = (
    f"The variable of a setting is `{PREFIX}` and its name in capitals; lists are separated by"
    " commas."
)


_QUEUES: Final = """## Queues and their workers

What code gives goes over these; [queue.md](queue.md#modes-how-workers-find-tasks) explains them. An
alias counts where the variable is not set."""
_RUNTIMES: Final = """## Runtimes

A table `[runtimes.NAME]` has these settings of the runtime that NAME is or `uses`, and `uses`,
`queue`, `image` and `command`; see [pipeline.md](pipeline.md)."""
_KIB: Final = 1024
_RUNTIME_CLASSES: Final = {
    "process": "process:ChildSettings",
    "lambda": "function:FunctionSettings",
    "thread": "thread:ThreadSettings",
    "sink": "sink:SinkSettings",
    "spark": "spark.settings:SparkSettings",
}


def markdown() -> str:
    """The whole reference."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield from (_HEAD, "## All of them", "")
    yield from _table(("setting",), [((f"`{each.name}`",), each) for each in declared(Settings)])
    yield from ("", _VARIABLES, "", _QUEUES, "")
    of_queues = [each for each in QUEUE_SCHEMA.settings if each.variable]
    cells = [((_code(each.keys), _code(each.variables)), each) for each in of_queues]
    yield from _table(("key in the file", "variable, alias"), cells)
    yield from ("", _RUNTIMES, "")
    rows: dict[str, tuple[list[str], Declared]] = {}
    for runtime, where in _RUNTIME_CLASSES.items():
        module, _, name = where.partition(":")
        for each in declared(getattr(import_module(f"penstock.runtimes.{module}"), name)):
            said = _row((each.name,), each)
            rows.setdefault(said, ([], each))[0].append(runtime)
    yield from _table(
        ("setting", "runtimes"),
        [((f"`{each.name}`", ", ".join(named)), each) for named, each in rows.values()],
    )
    yield from ("", "## Variables that are no settings", "")
    yield from ("| variable | what it is for |", "|---|---|")
    yield from (f"| `{PREFIX}{name}` | {said} |" for name, said in OTHERS.items())


def _table(
    heads: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Declared]]
) -> Iterator[str]:
    names = (*heads, "default", "values", "what it is for")
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    yield from (_row(cells, each) for cells, each in rows)


def _row(cells: tuple[str, ...], each: Declared) -> str:
    is_size = each.is_size and each.default >= _KIB
    shown = bytes_text(each.default) if is_size else _shown(each.default)
    said = each.purpose.replace("|", "\\|")
    return (
        f"| {' | '.join(cells)} | {f'`{shown}`' if shown else 'none'} | {_values(each)} | {said} |"
    )


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{each}`" for each in names) or "none"


def _shown(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case StrEnum() | str() | Path():
            return str(value)
        case int():
            return str(value)
        case float():
            return f"{value:g}"
    return ""


def _values(each: Declared) -> str:
    kind, bounds = each.type, each.bounds
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{one}`" for one in kind)
    if kind not in (int, float):
        return each.said.form[1] if each.said.form else each.wanted.partition(", as in")[0]
    noun = "a number" if kind is float else "a whole number"
    if bounds is None:
        return noun
    return f"{noun} from {bounds[0]:g}" + ("" if math.isinf(bounds[1]) else f" to {bounds[1]:g}")


SECRET: Final = frozenset(each.name for each in declared(Settings) if each.is_secret)
_HIDDEN: Final = re.compile(r"secret|password|token|credential|webhook|_key$|\.key$", re.IGNORECASE)
_SET, _NOT_SET = "set", "not set"


@click.command(
    short_help="Show settings and their sources.",
    epilog="Example: penstock settings",
)
@click.option("--reference", is_flag=True, help="Print the reference of all settings, as Markdown.")
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
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
        registry = import_module("penstock.runtimes.registry").RuntimeRegistry(
            told.settings.runtimes
        )
        for name in told.settings.runtimes:
            registry.runtime(name)
    rows = [
        {
            "name": each.name,
            "value": shown_value(each.name, getattr(told.settings, each.name)),
            "origin": told.origins[each.name],
            "variable": each.variable,
            "purpose": each.purpose,
        }
        for each in declared(Settings)
        if not changed or told.origins[each.name] != "default"
    ]
    wrong = [
        f"unknown setting {name}; did you mean {meant}?" for name, meant in misspelt(os.environ)
    ]
    if as_json:
        print_json(rows)
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
        click.echo("All settings have their defaults.", err=True)
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
