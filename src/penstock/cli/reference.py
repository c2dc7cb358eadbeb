"""The reference of settings as Markdown, and what a setting is for, from the source of `Settings`.

What stands below a field is what the field is for; nobody writes it twice. docs/settings.md is what
`markdown` says, and a test compares them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from penstock.settings import DEFAULT_FILE, PREFIX, Settings, bounds_of

_HEAD: Final = f"""# Settings

<!-- Made by `penstock settings --reference`; edit the docstrings in src/penstock/settings.py. -->

An installation is set by one file, by variables, or by options of the command line. A value is the
first that is there of: the option, the variable `{PREFIX}NAME`, the file (`{DEFAULT_FILE}` in the
current folder, or what `{PREFIX}SETTINGS` names), the default. A name that does not exist, or a
value that cannot be right, is an error that says where it stands.

```toml
# {DEFAULT_FILE}
data = "/var/lib/penstock"
port = 8080
concurrency = 8

[runtimes.process]
children_max = 4
```

`penstock settings` shows what holds here, and where each value came from. Secrets are shown as set
or not set, and are better given as variables than in a file that is kept. The tables `[queue]` and
`[worker]` of the file are for [the workers of queues](queue.md#modes-how-workers-find-tasks).
"""
_VARIABLES: Final = (
    f"The variable of a setting is `{PREFIX}` and its name in capitals; lists are separated by"
    " commas."
)
OTHERS: Final[Mapping[str, str]] = {
    "SETTINGS": "The settings file, instead of `penstock.toml` in the current folder.",
    "URL": "The dispatcher that verbs such as `penstock status` ask; by default the public listener"
    " of the settings.",
    "QUEUE": "The queue of `penstock queue`, instead of `default`.",
    "DISPATCHER": "The internal listener, for functions that are deployed elsewhere.",
}
"""Variables that are no settings, by the end of their names."""


@cache
def purposes() -> Mapping[str, str]:
    """What each setting is for, as the source says it."""
    (made,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(made, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(made.body, made.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        match after:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[node.target.id] = " ".join(text.split())
    return found


def markdown() -> str:
    """The whole reference."""
    rows = [_row(each.name, _default(each)) for each in fields(Settings)]
    heads = ["| setting | default | values | what it is for |", "|---|---|---|---|"]
    others = [f"| `{PREFIX}{name}` | {said} |" for name, said in OTHERS.items()]
    return "\n".join(
        [
            _HEAD,
            "## All of them",
            "",
            *heads,
            *rows,
            "",
            _VARIABLES,
            "",
            "## Variables that are no settings",
            "",
            "| variable | what it is for |",
            "|---|---|",
            *others,
            "",
            f"Workers of queues read `{PREFIX}WORKER_…`; see [docs/queue.md](queue.md).",
        ]
    )


def _row(name: str, default: Any) -> str:
    said = purposes()[name].replace("|", "\\|")
    shown = _shown(default)
    return f"| `{name}` | {f'`{shown}`' if shown else 'none'} | {_values(name, default)} | {said} |"


def _default(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


def _shown(value: Any) -> str:
    match value:
        case StrEnum() | str() | Path():
            return str(value)
        case int() | float():
            return f"{value:g}"
    return ""


def _values(name: str, default: Any) -> str:
    bounds = bounds_of(name)
    match default:
        case StrEnum():
            return ", ".join(f"`{each}`" for each in type(default))
        case int() | float() if bounds is not None:
            kind = "a number" if isinstance(default, float) else "a whole number"
            return f"{kind} from {bounds[0]:g} to {bounds[1]:g}"
        case Path():
            return "a folder"
        case tuple():
            return "a list of texts"
        case Mapping():
            return "a table, in the file only"
    return "a text"
