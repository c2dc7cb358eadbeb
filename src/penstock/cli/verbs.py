"""The table of all verbs: where each is and what it is for, in the order of the help.

`penstock` alone, its help and the completion of its words need names and purposes, and none of
what the verbs stand on; so both are in a table, and a verb is imported when it is asked for. A
test compares the table with the verbs' own help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from penstock.kernel.text import nearest, shown


@dataclass(frozen=True, slots=True)
class VerbPlace:
    """Where a verb is, and what it is for."""

    module: str
    attribute: str
    short_help: str


class Verbs(click.Group):
    """The verbs of a table, in its order."""

    def __init__(self, *words: Any, places: Mapping[str, VerbPlace], **options: Any) -> None:
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


_HERE: Final = "penstock.cli"

PLACES: Final = {
    # To try it, and to run an installation or a part of it.
    "demo": VerbPlace(f"{_HERE}.demo", "demo", "Run a demo pipeline on Spark."),
    "up": VerbPlace(f"{_HERE}.up", "up", "Run a whole installation on this machine."),
    "dispatcher": VerbPlace(f"{_HERE}.processes", "dispatcher", "Run a dispatcher."),
    "worker": VerbPlace(f"{_HERE}.processes", "worker", "Run a worker of the pipeline."),
    "sink": VerbPlace(f"{_HERE}.processes", "sink", "Run a sink of buffered datasets."),
    "source": VerbPlace(f"{_HERE}.processes", "source", "Run event sources: cron and webhooks."),
    "query-service": VerbPlace(f"{_HERE}.processes", "query_service", "Run a query service."),
    "deploy": VerbPlace(f"{_HERE}.deploy", "deploy", "Print deployment manifests for workers."),
    # To look at it and to steer it; these talk to a dispatcher.
    "status": VerbPlace(f"{_HERE}.status", "status", "Show jobs, queues, workers and backfills."),
    "logs": VerbPlace(f"{_HERE}.logs", "logs", "Show the logs of an installation."),
    "dag": VerbPlace(f"{_HERE}.dag", "dag", "Check, compare and deploy DAG files."),
    "task": VerbPlace(f"{_HERE}.task", "task", "List, show, cancel and replay tasks."),
    "dataset": VerbPlace(f"{_HERE}.dataset", "dataset", "Show published datasets."),
    "rejected": VerbPlace(
        f"{_HERE}.rejected", "rejected", "Show and give back rows that a sink has rejected."
    ),
    "query": VerbPlace(f"{_HERE}.query", "query", "Query datasets by SQL."),
    "trigger": VerbPlace(f"{_HERE}.trigger", "trigger", "Ingest an event of a source."),
    "backfill": VerbPlace(
        f"{_HERE}.backfill", "backfill", "Compute a range or list of partitions."
    ),
    "pause": VerbPlace(f"{_HERE}.control", "pause", "Pause a job: start no new tasks."),
    "resume": VerbPlace(f"{_HERE}.control", "resume", "Resume a paused job."),
    "pressure": VerbPlace(
        f"{_HERE}.control", "pressure", "Show backpressure: full queues and paused jobs."
    ),
    "operator": VerbPlace(
        f"{_HERE}.control", "operator", "Show and set concurrency limits of operators."
    ),
    "outbox": VerbPlace(f"{_HERE}.outbox", "outbox", "Show and retry failed outbox messages."),
    "token": VerbPlace(f"{_HERE}.keys", "token", "Manage tokens for reading datasets as tables."),
    "keys": VerbPlace(f"{_HERE}.keys", "keys", "Manage the keys that sign task tokens."),
    "alerts": VerbPlace(f"{_HERE}.alerts", "alerts", "Show alerts."),
    "audit": VerbPlace(f"{_HERE}.audit", "audit", "Show the audit log."),
    # The queue alone needs a bucket and nothing else.
    "queue": VerbPlace(f"{_HERE}.queue", "queue", "A task queue that needs only a bucket."),
    # To look after it.
    "doctor": VerbPlace(f"{_HERE}.doctor", "doctor", "Check that a store is safe to use."),
    "settings": VerbPlace(f"{_HERE}.settings", "settings", "Show settings and their sources."),
    "cost": VerbPlace(f"{_HERE}.cost", "cost", "Estimate the monthly cost of a queue."),
    "sim": VerbPlace(f"{_HERE}.sim", "sim", "Run the queue in a deterministic simulation."),
    "completion": VerbPlace(f"{_HERE}.completion", "completion", "Set up shell completion."),
}
