"""`penstock dag check|show|diff`: DAG files, before anything is deployed.

Reading YAML needs a package that not every installation has, so this module is imported when
one of its verbs is called. Exit code 1 of `check` and `diff` says that there are problems or
differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import click

from penstock.cli.dispatcher_call import asked, counted, on_a_dispatcher
from penstock.cli.format import complain, notes, print_json
from penstock.cli.installation import settings_of, wiring
from penstock.cli.options import json_option
from penstock.cli.output import table
from penstock.dispatcher.client.dag_files import named_files, read_text
from penstock.dispatcher.dag.canonical import (
    DagDiff,
    canonical,
    content_hash,
    lineage_hashes,
    queries,
    with_sql_of,
)
from penstock.dispatcher.dag.canonical import diff as compared
from penstock.dispatcher.dag.canonical import show as tree
from penstock.dispatcher.dag.files import missing_functions
from penstock.dispatcher.dag.filters import where_text
from penstock.dispatcher.dag.model import (
    Dag,
    Graph,
    InputCondition,
    InputSpec,
    Job,
    ReadMode,
    Runtimes,
)
from penstock.dispatcher.dag.parser import parse, parse_stored
from penstock.dispatcher.dag.yaml_reader import BYTES_MAX
from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.kernel.text import listed
from penstock.kernel.units import duration_text
from penstock.protocol.problem import DagDiagnostic, DagError

FILE: Final = click.Path(readable=False)
"""What a verb's argument is. Only `read_dag` judges it, so that every verb says the same."""


def read_dag(file: str, *, runtimes: Runtimes | None = None) -> Dag:
    """The DAG in a file. Without `runtimes`, those that it names are not judged."""
    return _read(file, runtimes)[0]


def judge_dag(file: str, *, runtimes: Runtimes) -> tuple[Dag, Sequence[DagDiagnostic]]:
    """The DAG in a file, and what workers will need that is not found here.

    A function that is not in the file where it should be is a `DagError` as anything else is.
    """
    dag, text, where = _read(file, runtimes)
    missing = missing_functions(text, dag, (Path(file).parent, Path.cwd()))
    if missing.functions:
        raise DagError(missing.functions, where=where)
    return dag, missing.modules


def _read(file: str, runtimes: Runtimes | None) -> tuple[Dag, str, str]:
    # A name that is no text in this locale could not be printed.
    where = click.format_filename(file)
    text = read_text(file, where=where, bytes_max=BYTES_MAX)
    files = named_files(text, Path(file).parent)
    return parse(text, where, runtimes=runtimes, files=files), text, where


@click.command(
    short_help="List all problems in DAG files.",
    epilog="Example: penstock dag check pipeline.yaml",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@json_option
@click.pass_context
def check(context: click.Context, *, files: tuple[str, ...], as_json: bool) -> None:
    """List everything that is wrong with DAG files, each of which is a DAG of its own.

    A problem is a line on standard output: FILE:LINE: FIELD: what is wrong and what to do; with
    --json all of them are an array of objects, which is empty if nothing is wrong. A file
    that cannot be read at all is a line on standard error, and the others are checked all the same.

    Runtimes are those that come with Penstock, those of installed packages, and those of the
    settings here (penstock.toml, or what PENSTOCK_SETTINGS names): have the dispatcher's settings
    here, and a job is judged as 'apply' does.

    A function of yours is looked for in the file of its module, beside the DAG or in this folder;
    nothing is imported. A module that is not found there is a note on standard error.

    Exit code 0: nothing is wrong. 2: something is.
    """
    runtimes = RegisteredRuntimes(wiring().make_registry(settings_of({})))
    dags: list[Dag] = []
    found: list[DagError] = []
    for file in files:
        try:
            dag, needed = judge_dag(file, runtimes=runtimes)
            dags.append(dag)
            where = click.format_filename(file)
            notes([f"{where}:{each.line}: {each.field}: {each.message}" for each in needed])
        except DagError as error:
            found.append(error)
            if not as_json:
                _show_problems(error)
        except InvalidInput as error:
            complain([error])
    problems = sum(len(error.problems) for error in found)
    if as_json:
        print_json([problem for error in found for problem in _objects(error)])
        context.exit(0 if len(dags) == len(files) else 2)
    if len(dags) == len(files):
        click.echo(_checked(dags))
        return
    if problems:
        wrong = f"{len(files) - len(dags)} of {counted(len(files), 'file')}"
        click.echo(f"penstock: {counted(problems, 'problem')}; {wrong} cannot be used.", err=True)
    context.exit(2)


def _objects(error: DagError) -> list[dict[str, object]]:
    """The problems of a file for programs."""
    return [
        {"file": error.where, "line": each.line, "field": each.field, "message": each.message}
        for each in error.problems
    ]


def _show_problems(error: DagError) -> None:
    """All problems, also where the error's own message would be cut."""
    for each in error.problems:
        field = f"{each.field}: " if each.field else ""
        click.echo(f"{error.where}:{each.line}: {field}{each.message}")


def _checked(dags: list[Dag]) -> str:
    jobs = sum(len(dag.jobs) for dag in dags)
    datasets = sum(len(job.outputs) for dag in dags for job in dag.jobs)
    counts = f"{counted(jobs, 'job')}, {counted(datasets, 'dataset')}"
    return f"No problems in {counted(len(dags), 'file')}: {counts}."


@click.command(
    short_help="Show the jobs of a file as a tree.",
    epilog="Example: penstock dag show pipeline.yaml",
)
@click.argument("file", metavar="FILE", type=FILE)
@json_option
def show(*, file: str, as_json: bool) -> None:
    """Show the jobs of a DAG as a tree, what each of them reads, and the version of the file.

    A job stands below one of those that it reads from; its line says what it runs and writes, and
    whether its priority is bulk. The version is the SHA-256 of the canonical definition: a file
    that says the same in other words is the same version.

    With --json, the canonical definition itself is printed. It is a DAG file too.

    Exit code 0: here it is. 2: the file is wrong.
    """
    found = read_dag(file)
    if as_json:
        click.echo(canonical(found).decode())
        return
    click.echo(tree(found))
    rows = list(_inputs(found))
    if rows:
        # What most DAGs have nothing of would only make the others hard to read.
        columns = ("job", "reads", "written by", "as", "where", "how")
        width = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
        table(columns[:width], [row[:width] for row in rows])
        click.echo()
    click.echo(f"version {content_hash(found)}")


def _inputs(dag: Dag) -> Iterator[tuple[str, ...]]:
    graph = Graph(dag)
    jobs = {job.name: job for job in dag.jobs}
    for name in graph.order():
        for each in jobs[name].inputs:
            alias = each.name if each.name != each.dataset else ""
            where = where_text(each.where) if each.where is not None else ""
            how = _how(jobs[name], each)
            yield name, each.dataset, graph.writers[each.dataset], alias, where, how


def _how(job: Job, edge: InputSpec) -> str:
    said = []
    if not edge.is_trigger:
        said.append("no trigger")
    elif job.when is InputCondition.ALL:
        said.append("waited for")
    if edge.reads is ReadMode.ALL:
        said.append("all partitions")
    if edge.reads is ReadMode.CHANGES:
        said.append("what has changed")
    if edge.lookback_ms is not None:
        said.append(f"and {duration_text(edge.lookback_ms)} before")
    return ", ".join(said)


Causes = Mapping[str, tuple[str, ...]]
"""The jobsbecause of which others are rebuilt, by the job that is."""

_NEW: Final = "new generation"
_KEPT: Final = "keeps its generation"
_FILES_MAX: Final = 2


@click.command(
    short_help="Compare a DAG file with another or the applied one.",
    epilog="Example: penstock dag diff running.yaml edited.yaml",
)
@click.argument("files", metavar="[OLD] NEW", nargs=-1, required=True, type=FILE)
@on_a_dispatcher
@click.pass_context
def diff(
    context: click.Context, *, files: tuple[str, ...], url: str, token: str | None, as_json: bool
) -> None:
    """Show what happens to each job when the DAG of NEW replaces that of OLD.

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
        print_json({**versions, **as_dict(found, causes)})
    else:
        _show_diff(found, causes, is_in_force=len(files) < _FILES_MAX)
    context.exit(0 if found.is_empty else 1)


def as_dict(found: DagDiff, causes: Causes) -> dict[str, object]:
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


def _causes(before: Dag, after: Dag, found: DagDiff) -> Causes:
    """For each job that is only rebuilt, the edited or new jobs upstream of it."""
    graph = Graph(after)
    known = set(lineage_hashes(before).values())
    # A job that was only renamed writes the same data and is nobody's cause.
    lineages = lineage_hashes(with_sql_of(after, queries(before)))
    fresh = {name for name, lineage in lineages.items() if lineage not in known}
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


def _show_diff(found: DagDiff, causes: Causes, *, is_in_force: bool) -> None:
    if not found.is_empty:
        table(("change", "job", "what"), _rows(found, causes))
        click.echo()
    if found.unchanged:
        click.echo(f"Unchanged: {listed(found.unchanged)}.")
    click.echo(_changed(found, is_in_force=is_in_force))


def _rows(found: DagDiff, causes: Causes) -> Iterator[tuple[str, str, str]]:
    for name in found.added:
        yield "added", name, _NEW
    for name in found.removed:
        yield "removed", name, ""
    for name, change in found.changed.items():
        effect = _KEPT if change.keeps_generation else _NEW
        yield "changed", name, f"{', '.join(change.fields)}; {effect}"
    for name in found.rebuilt:
        yield "rebuilt", name, f"because of {listed(causes[name])}; {_NEW}"


def _changed(found: DagDiff, *, is_in_force: bool) -> str:
    if found.is_empty:
        return (
            "The file is identical to the DAG in force."
            if is_in_force
            else "The files are identical."
        )
    fresh = len(found.new_generations())
    if not fresh:
        return "No job gets a new generation."
    return "1 job gets a new generation." if fresh == 1 else f"{fresh:,} jobs get a new generation."
