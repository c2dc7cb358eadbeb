"""`penstock dag check FILE...`: everything that is wrong with DAG files."""

from __future__ import annotations

import click

from penstock.cli.dag.reading import FILE, judge_dag
from penstock.cli.installation import settings_of, wiring
from penstock.cli.options import json_option
from penstock.cli.queue.showing import as_json as show_json
from penstock.cli.queue.showing import complain, notes
from penstock.cli.telling import counted
from penstock.dispatcher.dag.errors import DagError
from penstock.dispatcher.dag.model import Dag
from penstock.dispatcher.registry import RegisteredRuntimes
from penstock.kernel.errors import InvalidInput


@click.command(
    short_help="List everything that is wrong with files.",
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
                _show(error)
        except InvalidInput as error:
            complain([error])
    problems = sum(len(error.problems) for error in found)
    if as_json:
        show_json([problem for error in found for problem in _objects(error)])
        context.exit(0 if len(dags) == len(files) else 2)
    if len(dags) == len(files):
        click.echo(_summary(dags))
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


def _show(error: DagError) -> None:
    """All problems, also where the error's own message would be cut."""
    for each in error.problems:
        field = f"{each.field}: " if each.field else ""
        click.echo(f"{error.where}:{each.line}: {field}{each.message}")


def _summary(dags: list[Dag]) -> str:
    jobs = sum(len(dag.jobs) for dag in dags)
    datasets = sum(len(job.outputs) for dag in dags for job in dag.jobs)
    counts = f"{counted(jobs, 'job')}, {counted(datasets, 'dataset')}"
    return f"No problems in {counted(len(dags), 'file')}: {counts}."
