"""`penstock completion SHELL`: what makes a shell complete the words of Penstock."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

_VARIABLE: Final = "_PENSTOCK_COMPLETE"
_INSTALL: Final = {
    "bash": "penstock completion bash > ~/.local/share/bash-completion/completions/penstock",
    "zsh": 'penstock completion zsh > "${fpath[1]}/_penstock"',
    "fish": "penstock completion fish > ~/.config/fish/completions/penstock.fish",
}


@click.command(
    short_help="Have the shell complete words.",
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
