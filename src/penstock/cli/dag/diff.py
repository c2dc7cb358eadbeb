"""`penstock dag diff [OLD] NEW`: what would become of each job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Final

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.dag.reading import FILE, read_dag
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import table
from penstock.dispatcher.dag.canonical import content_hash, lineage_hashes
from penstock.dispatcher.dag.diffing import Diff
from penstock.dispatcher.dag.diffing import diff as compared
from penstock.dispatcher.dag.graph import Graph
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.dag.parsing import parse_stored
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.kernel.words import listed

Causes = Mapping[str, tuple[str, ...]]
"""The jobs because of which others are rebuilt, by the job that is."""

_NEW: Final = "new generation"
_KEPT: Final = "keeps its generation"
_FILES_MAX: Final = 2


@click.command(
    short_help="Compare a file with another, or with what is in force.",
    epilog="Example: penstock dag diff running.yaml edited.yaml",
)
@click.argument("files", metavar="[OLD] NEW", nargs=-1, required=True, type=FILE)
@on_a_dispatcher
@click.pass_context
def diff(
    context: click.Context, *, files: tuple[str, ...], url: str, token: str | None, as_json: bool
) -> None:
    """Tell what becomes of each job when the DAG of NEW takes the place of that of OLD.

    With one file, OLD is what is in force at the dispatcher; with two, no dispatcher is asked.

    Jobs are compared by what they say, not by how it is written. A job whose data would come out
    different gets a new generation, and so does every job downstream of it.

    Exit code 0: both say the same. 1: they differ. 2: one of the files is wrong, or the dispatcher
    cannot be asked.
    """
    if len(files) > _FILES_MAX:
        raise InvalidInput(f"Two files can be compared, not {len(files)}.")
    after = read_dag(files[-1])
    before = read_dag(files[0]) if len(files) == _FILES_MAX else _in_force(url, token)
    found = compared(before, after)
    causes = _causes(before, after, found)
    if as_json:
        versions = {"old_version": content_hash(before), "new_version": content_hash(after)}
        show_json({**versions, **as_dict(found, causes)})
    else:
        _show(found, causes, is_in_force=len(files) < _FILES_MAX)
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


def _in_force(url: str, token: str | None) -> Dag:
    """What is in force; nothing is, before the first."""
    try:
        answer, _ = asked(url, token, lambda client: client.dag())
    except DispatcherRefused as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return Dag(())
        raise InvalidInput(error.message, hint=error.hint) from error
    except DispatcherUnavailable as error:
        # Not a failure with exit code 1, which would tell of differences.
        raise InvalidInput(error.message, hint=error.hint) from error
    return parse_stored(answer.source, f"version {answer.version.id}", files=answer.files)


def _show(found: Diff, causes: Causes, *, is_in_force: bool) -> None:
    if not found.is_empty:
        table(("change", "job", "what"), _rows(found, causes))
        click.echo()
    if found.unchanged:
        click.echo(f"Unchanged: {listed(found.unchanged)}.")
    click.echo(_summary(found, is_in_force=is_in_force))


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


def _summary(found: Diff, *, is_in_force: bool) -> str:
    if found.is_empty:
        return "The file says what is in force." if is_in_force else "Both files say the same."
    fresh = len(found.new_generations())
    if not fresh:
        return "No job gets a new generation."
    return "1 job gets a new generation." if fresh == 1 else f"{fresh:,} jobs get a new generation."
