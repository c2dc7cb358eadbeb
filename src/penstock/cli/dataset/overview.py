"""`penstock dataset list|show|partitions|snapshots|diff`: what is published, and what was."""

from __future__ import annotations

from collections.abc import Iterator

import click

from penstock.cli import task
from penstock.cli.completion import datasets
from penstock.cli.dispatcher_call import (
    ago,
    asked,
    counted,
    fitted,
    line,
    on_a_dispatcher,
    show_json,
)
from penstock.cli.format import fields, length, notes
from penstock.cli.options import absolute_option
from penstock.protocol.datasets import (
    DatasetDetail,
    HotTableAnswer,
    KeepAnswer,
    MaintainedAnswer,
)


def number(count: int | None) -> str:
    """A count; nothing where it is not known."""
    return "" if count is None else f"{count:,}"


def size(size_bytes: int | None) -> str:
    """A number of bytes; nothing where it is not known."""
    return "" if size_bytes is None else task.size(size_bytes)


@click.command(
    "list",
    short_help="List datasets and their generations.",
    epilog="Example: penstock dataset list",
)
@absolute_option
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List datasets, who writes them, and their generations with the partitions in each.

    Readers read the current generation; one that is being built takes its place when it has all
    that the current one has.
    """
    answer, now = asked(url, token, lambda client: client.datasets())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            each.name,
            each.job or "",
            generation.state,
            f"{generation.partitions:,}",
            ago(generation.created_at, now=now),
            generation.version,
        )
        for each in answer.datasets
        for generation in each.generations
    ]
    if not rows:
        click.echo("There are no datasets; 'penstock dag apply FILE' makes them.", err=True)
        return
    heads = ("dataset", "written by", "state", "partitions", "made", "generation")
    fitted(heads, rows, numbers=(3,))


@click.command(
    short_help="Show a dataset, its generations and its columns.",
    epilog="Example: penstock dataset show sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@absolute_option
@on_a_dispatcher
def show(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """Show who writes a dataset, how much of it is kept, how its files are maintained, its
    generations with what they hold, and the columns of the one that readers read.
    """
    answer, now = asked(url, token, lambda client: client.dataset(name))
    if as_json:
        show_json(answer)
        return
    fields(_rows(answer))
    if answer.generations:
        click.echo()
        rows = [
            (
                "dropped" if each.is_dropped else each.state,
                number(each.partitions),
                number(each.rows),
                size(each.bytes),
                number(each.files),
                ago(each.changed_at, now=now),
                each.version,
            )
            for each in answer.generations
        ]
        heads = ("state", "partitions", "rows", "size", "files", "since", "generation")
        fitted(heads, rows, numbers=(1, 2, 3, 4))
    columns = answer.generations[0].columns if answer.generations else []
    if columns:
        click.echo()
        named = [
            (line(each.name), line(each.type), "" if each.is_nullable else "never null")
            for each in columns
        ]
        fitted(("column", "type", ""), named)


def _rows(answer: DatasetDetail) -> Iterator[tuple[str, str]]:
    yield "dataset", answer.name
    yield "uuid", answer.uuid
    yield "written by", answer.job or ""
    yield "kept", _kept(answer.keep)
    if answer.maintain is not None:
        yield "maintained", _maintained(answer.maintain)
    if answer.table is not None:
        yield "table", f"hot.{answer.name} in {answer.table.url or 'Postgres data'}"
        yield "table has", _table(answer.table)
    if answer.generations and answer.generations[0].unknown:
        unknown = counted(answer.generations[0].unknown, "partition")
        yield "rows not known", f"{unknown}: no Parquet, or without a manifest"
    late = [] if answer.is_projected else ["which generation is current"]
    if answer.unprojected:
        late.append(counted(answer.unprojected, "partition"))
    if late:
        yield "not in current.json", " and ".join(late)


def _table(table: HotTableAnswer) -> str:
    if table.problem:
        return f"not all that is published: {line(table.problem)}"
    if table.behind:
        waits = length(table.behind_seconds)
        return f"not yet {counted(table.behind, 'partition')} of what is published, for {waits}"
    return "all that is published" if table.is_served else "the generation before the current one"


def _kept(keep: KeepAnswer | None) -> str:
    if keep is None:
        return "all"
    bounds = []
    if keep.partitions is not None:
        bounds.append(counted(keep.partitions, "partition"))
    if keep.generations is not None:
        bounds.append(counted(keep.generations, "generation"))
    if keep.age is not None:
        bounds.append(f"{keep.age} at most")
    if keep.history is not None:
        bounds.append(f"history of {keep.history}")
    return ", ".join(bounds)


def _maintained(maintain: MaintainedAnswer) -> str:
    said = []
    if maintain.compact is not None:
        said.append(f"from {maintain.compact.files} files below {maintain.compact.below} on")
    if maintain.cluster:
        said.append(f"clustered by {line(', '.join(maintain.cluster))}")
    return f"{', '.join(said)}; {maintain.after} after the last publication"


@click.command(
    short_help="List the published partitions of a dataset.",
    epilog="Example: penstock dataset partitions sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option("--generation", metavar="UUID", help="By default the current one.")
@click.option("--after", metavar="KEY", help="Only partitions after this one (next page).")
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="Maximum number of entries.",
)
@absolute_option
@on_a_dispatcher
def partitions(
    *,
    name: str,
    generation: str | None,
    after: str | None,
    limit: int,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List the partitions of a dataset that are published, by key, how much each of them is, and
    where.
    """
    answer, now = asked(
        url,
        token,
        lambda client: client.partitions(name, generation=generation, after=after, limit=limit),
    )
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            line(each.partition_key) or "(whole)",
            ago(each.published_at, now=now),
            f"{each.revision:,}",
            number(each.rows),
            size(each.bytes),
            number(each.files),
            str(each.task_id),
            line(each.location, characters_max=1000),
        )
        for each in answer.partitions
    ]
    if rows:
        heads = ("partition", "published", "revision", "rows", "size", "files", "task", "location")
        fitted(heads, rows, numbers=(2, 3, 4, 5, 6), least=(7, 5))
    else:
        click.echo("Nothing is published.", err=True)
    if answer.after is not None:
        notes([f"there are more; continue with --after '{line(answer.after)}'."])


@click.command(
    short_help="List the snapshots of a dataset.",
    epilog="Example: penstock dataset snapshots sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@absolute_option
@on_a_dispatcher
def snapshots(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """List the snapshots of a dataset that are kept, the newest first, and what each has changed.

    `main` is the current generation, `building` one that is being built. The id is for --at, and
    for query engines.
    """
    answer, now = asked(url, token, lambda client: client.snapshots(name))
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            str(each.id),
            each.branch,
            each.operation,
            f"+{each.added} -{each.removed}",
            number(each.partitions),
            "" if each.rows is None else number(each.rows),
            "" if each.bytes is None else size(each.bytes),
            ago(each.made_at, now=now),
        )
        for each in answer.snapshots
    ]
    heads = ("id", "branch", "operation", "parts", "partitions", "rows", "bytes", "made")
    fitted(heads, rows)


@click.command(
    short_help="Show changes between two snapshots.",
    epilog="Example: penstock dataset diff sales 2026-01-31T12:00:00Z 1769947200000",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.argument("since", metavar="SINCE")
@click.argument("until", metavar="UNTIL")
@on_a_dispatcher
def diff(*, name: str, since: str, until: str, url: str, token: str | None, as_json: bool) -> None:
    """Show which parts of a dataset were put in place and removed from SINCE to UNTIL.

    Each is the id of a snapshot, or a time, which means the latest snapshot that is not after it.
    """
    answer, _ = asked(url, token, lambda client: client.changes(name, since=since, until=until))
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            each.change,
            line(each.partition_key or ""),
            "" if each.rows is None else number(each.rows),
            "" if each.task_id is None else str(each.task_id),
            line(each.location),
        )
        for each in answer.changes
    ]
    fitted(("change", "partition", "rows", "task", "location"), rows)
    if not answer.is_all:
        notes(["truncated; compare snapshots that are closer"])
