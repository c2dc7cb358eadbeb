"""`penstock dag show FILE`: a DAG as a tree, or as the definition that is stored."""

from __future__ import annotations

from collections.abc import Iterator

import click

from penstock.cli.dag.reading import FILE, read_dag
from penstock.cli.options import json_option
from penstock.cli.queue.showing import table
from penstock.dispatcher.dag.canonical import canonical, content_hash
from penstock.dispatcher.dag.filters import where_text
from penstock.dispatcher.dag.graph import Graph
from penstock.dispatcher.dag.model import Dag, Input, Job, Reads, When
from penstock.dispatcher.dag.show import show as tree
from penstock.dispatcher.dag.units import duration_text


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


def _how(job: Job, edge: Input) -> str:
    said = []
    if not edge.is_trigger:
        said.append("makes nothing run")
    elif job.when is When.ALL:
        said.append("waited for")
    if edge.reads is Reads.ALL:
        said.append("all partitions")
    if edge.reads is Reads.CHANGES:
        said.append("what has changed")
    if edge.lookback_ms is not None:
        said.append(f"and {duration_text(edge.lookback_ms)} before")
    return ", ".join(said)
