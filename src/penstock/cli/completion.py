"""`penstock completion SHELL`, and the names that the shell completes.

Names are asked of a running dispatcher, within a bound; where none answers nothing is completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from penstock.cli.start_page import glance, likely_address

LOOK_SECONDS: Final = 0.5
_SHOWN_MAX: Final = 50
_HELP_CHARACTERS_MAX: Final = 60
_OK: Final = 200

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Found = Iterator[tuple[object, object]]
"""Values, and what is worth knowing of each."""


def jobs(context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Jobs of the DAG in force."""
    return _items(_found(context, "/v1/status", "jobs", "name", "operator"), typed)


def datasets(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Datasets that there are."""
    return _items(_found(context, "/v1/datasets", "datasets", "name", "job"), typed)


def operators(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Operators of jobs."""
    return _items(_found(context, "/v1/operators", "operators", "name"), typed)


def backfills(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """The latest backfills."""
    return _items(_found(context, "/v1/backfills", "backfills", "id", "state", "job"), typed)


def versions(
    context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Versions of the DAG."""
    return _items(_found(context, "/v1/dag/versions", "versions", "id", "since"), typed)


def tasks(*, status: str | None = None) -> Complete:
    """The latest tasks, or those of one status."""
    asked = {"limit": str(_SHOWN_MAX), **({"status": status} if status else {})}

    def complete(
        context: click.Context, _parameter: click.Parameter, typed: str
    ) -> list[CompletionItem]:
        about = ("status", "job", "partition_key")
        return _items(_found(context, "/v1/tasks", "tasks", "id", *about, asked=asked), typed)

    return complete


def _found(
    context: click.Context,
    path: str,
    place: str,
    name: str,
    *about: str,
    asked: Mapping[str, str] | None = None,
) -> Found:
    """One field of each row of an answer, and others that say what it is."""
    url, token = context.params.get("url"), context.params.get("token")
    meant = likely_address(url if isinstance(url, str) else None, token or None)
    seen = glance(meant.url, path, token=meant.token, seconds=LOOK_SECONDS, asked=asked)
    rows: Any = seen.body.get(place) if seen is not None and seen.status == _OK else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get(name) is not None:
            yield row[name], " ".join(str(row[each]) for each in about if row.get(each))


def _items(found: Found, typed: str) -> list[CompletionItem]:
    items = []
    for value, about in found:
        word = str(value)
        # A shell would obey what is not printable, or take it for two words.
        if word.startswith(typed) and word.isprintable() and not word.isspace():
            said = str(about)[:_HELP_CHARACTERS_MAX]
            items.append(CompletionItem(word, help=said if said.isprintable() else None))
        if len(items) == _SHOWN_MAX:
            break
    return items


_VARIABLE: Final = "_PENSTOCK_COMPLETE"
_INSTALL: Final = {
    "bash": "penstock completion bash > ~/.local/share/bash-completion/completions/penstock",
    "zsh": 'penstock completion zsh > "${fpath[1]}/_penstock"',
    "fish": "penstock completion fish > ~/.config/fish/completions/penstock.fish",
}


@click.command(
    short_help="Set up shell completion.",
    epilog="Example: source <(penstock completion bash)",
)
@click.argument("shell", metavar="bash|zsh|fish", type=click.Choice(list(_INSTALL)))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print what makes a shell complete verbs, options and the names that there are.

    Jobs, datasets and tasks are asked of the dispatcher, for half a second at most; where none
    answers there are none. A comment in what is printed says how to install it for good.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(context.find_root().command, {}, "penstock", _VARIABLE)
    # Not its `source`, which runs the shell to find out how old it is.
    first, _, rest = (made.source_template % made.source_vars()).strip().partition("\n")
    # The first line of zsh's says whose words they are, and has to stay the first.
    head = [first, _comment(shell)] if first.startswith("#compdef") else [_comment(shell), first]
    click.echo("\n".join([*head, rest]))


def _comment(shell: str) -> str:
    return f"# For good: {_INSTALL[shell]}"
