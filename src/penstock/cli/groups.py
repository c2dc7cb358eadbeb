"""A group whose verbs are imported when they are asked for.

`penstock` alone, its help and the completion of its words need the names of verbs and what each is
for, and none of what the verbs stand on; so both are in a table, and a test compares the table with
the verbs. What is added to the group as a command is a verb of it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from penstock.kernel.words import nearest, shown


@dataclass(frozen=True, slots=True)
class Place:
    """Where a verb is, and what it is for."""

    module: str
    attribute: str
    short_help: str


class Verbs(click.Group):
    """The verbs of a table, in its order."""

    def __init__(self, *words: Any, places: Mapping[str, Place], **options: Any) -> None:
        super().__init__(*words, **options)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.places, *(each for each in super().list_commands(ctx) if each not in self)]

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self.places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        verb = getattr(import_module(place.module), place.attribute)
        assert isinstance(verb, click.Command)
        return verb

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not ctx.resilient_parsing and not args[0].startswith("-") and args[0] not in names:
            meant = nearest(args[0], names)
            rest = f" Did you mean {meant!r}?" if meant else ""
            ctx.fail(f"No such command {shown(args[0])}.{rest}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs with what they are for, as click shows them."""
        rows = [(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs that begin so; options, if that is what is being typed."""
        found = [
            CompletionItem(name, help=self._short_help(ctx, name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        # Not the group's own, which would import every verb.
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def _short_help(self, ctx: click.Context, name: str) -> str:
        place = self.places.get(name)
        if place is not None:
            return place.short_help
        verb = super().get_command(ctx, name)
        return verb.get_short_help_str(limit=100) if verb is not None else ""
