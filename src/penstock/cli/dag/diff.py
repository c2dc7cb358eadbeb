"""`penstock dag diff OLD NEW`: what would become of each job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import click

from penstock.cli.dag.reading import FILE, read_dag
from penstock.cli.queue.connection import json_option
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import table
from penstock.dispatcher.dag.canonical import content_hash, lineage_hashes
from penstock.dispatcher.dag.diffing import Diff
from penstock.dispatcher.dag.diffing import diff as compared
from penstock.dispatcher.dag.graph import Graph
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.names import listed

Causes = Mapping[str, tuple[str, ...]]
"""The jobs because of which others are rebuilt, by the job that is."""

_NEW: Final = "new generation"
_KEPT: Final = "keeps its generation"


@click.command(
    short_help="Compare two files, job by job.",
    epilog="Example: penstock dag diff running.yaml edited.yaml",
)
@click.argument("old", metavar="OLD", type=FILE)
@click.argument("new", metavar="NEW", type=FILE)
@json_option
@click.pass_context
def diff(context: click.Context, *, old: str, new: str, as_json: bool) -> None:
    """Tell what becomes of each job when the DAG of NEW takes the place of that of OLD.

    Jobs are compared by what they say, not by how it is written. A job whose data would come out
    different gets a new generation, and so does every job downstream of it.

    Exit code 0: both say the same. 1: they differ. 2: one of the files is wrong.
    """
    before, after = read_dag(old), read_dag(new)
    found = compared(before, after)
    causes = _causes(before, after, found)
    if as_json:
        versions = {"old_version": content_hash(before), "new_version": content_hash(after)}
        show_json({**versions, **as_dict(found, causes)})
    else:
        _show(found, causes)
    context.exit(0 if found.is_empty else 1)


def as_dict(found: Diff, causes: Causes) -> dict[str, object]:
    """The comparison for programs."""
    return {
        "same": found.is_empty,
        "added": list(found.added),
        "removed": list(found.removed),
        "changed": {
            name: {"fields": list(each.fields), "keeps_generation": each.keeps_generation}
            for name, each in found.changed.items()
        },
        "rebuilt": {name: {"because_of": list(causes[name])} for name in found.rebuilt},
        "unchanged": list(found.unchanged),
        "new_generations": sorted(found.new_generations()),
    }


def _causes(before: Dag, after: Dag, found: Diff) -> Causes:
    """For each job that is only rebuilt, the edited or new jobs upstream of it."""
    graph = Graph(after)
    known = set(lineage_hashes(before).values())
    # A job that was only renamed writes the same data and is nobody's cause.
    fresh = {name for name, lineage in lineage_hashes(after).items() if lineage not in known}
    causes = fresh.difference(found.rebuilt)
    return {name: tuple(sorted(causes & graph.upstream(name))) for name in found.rebuilt}


def _show(found: Diff, causes: Causes) -> None:
    if not found.is_empty:
        table(("change", "job", "what"), _rows(found, causes))
        click.echo()
    if found.unchanged:
        click.echo(f"Unchanged: {listed(found.unchanged)}.")
    click.echo(_summary(found))


def _rows(found: Diff, causes: Causes) -> Iterator[tuple[str, str, str]]:
    for name in found.added:
        yield "added", name, _NEW
    for name in found.removed:
        yield "removed", name, ""
    for name, change in found.changed.items():
        effect = _KEPT if change.keeps_generation else _NEW
        yield "changed", name, f"{', '.join(change.fields)}; {effect}"
    for name in found.rebuilt:
        yield "rebuilt", name, f"because of {listed(causes[name])}; {_NEW}"


def _summary(found: Diff) -> str:
    if found.is_empty:
        return "Both files say the same."
    fresh = len(found.new_generations())
    if not fresh:
        return "No job gets a new generation."
    return "1 job gets a new generation." if fresh == 1 else f"{fresh:,} jobs get a new generation."
