"""`penstock dataset show NAME`: everything about one dataset."""

from __future__ import annotations

from collections.abc import Iterator

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.cli.dataset.showing import number, size
from penstock.cli.options import absolute_option
from penstock.cli.queue.showing import fields
from penstock.cli.telling import ago, counted, fitted, line, show_json
from penstock.dispatcher.wire.datasets import DatasetDetail, KeepAnswer, MaintainedAnswer


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
    if answer.generations and answer.generations[0].unknown:
        unknown = counted(answer.generations[0].unknown, "partition")
        yield "rows not known", f"{unknown}: no Parquet, or without a manifest"
    late = [] if answer.is_projected else ["which generation is current"]
    if answer.unprojected:
        late.append(counted(answer.unprojected, "partition"))
    if late:
        yield "not in current.json", " and ".join(late)


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
    return ", ".join(bounds)


def _maintained(maintain: MaintainedAnswer) -> str:
    said = []
    if maintain.compact is not None:
        said.append(f"from {maintain.compact.files} files below {maintain.compact.below} on")
    if maintain.cluster:
        said.append(f"clustered by {line(', '.join(maintain.cluster))}")
    return f"{', '.join(said)}; {maintain.after} after the last publication"
