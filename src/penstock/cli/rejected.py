"""`penstock rejected`: rows that did not fit a buffered dataset are shown, given back, dropped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, TextIO

import click

from penstock.cli.dispatcher_call import (
    asked,
    counted,
    fitted,
    gist,
    line,
    on_a_dispatcher,
    show_json,
)
from penstock.kernel.errors import InvalidInput
from penstock.protocol.datasets import RejectedPlace, RejectedRow

_ROW: Final = re.compile(r"([1-9][0-9]{0,18}):(-1|[0-9]{1,15})")
_LISTED_MAX: Final = 1_000


@click.group(
    invoke_without_command=True,
    short_help="Show and give back rows that a sink has rejected.",
    epilog="Example: penstock rejected list alerts",
)
@click.pass_context
def rejected(context: click.Context) -> None:
    """Rows that were published into a buffered dataset and do not fit its columns or checks.

    A row is named SEQUENCE:PLACE, by the batch that it came in and its place there. What is given
    back is a batch of its own, which the sink judges again; what is dropped stays in the dataset of
    rejected rows, and is listed no more.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@rejected.command(
    "list",
    short_help="List buffered datasets, or rejected rows.",
    epilog="Example: penstock rejected list alerts",
)
@click.argument("dataset", metavar="[DATASET]", required=False)
@click.option(
    "--limit",
    type=click.IntRange(1, _LISTED_MAX),
    default=100,
    show_default=True,
    help="How many rows to list.",
)
@on_a_dispatcher
def list_(*, dataset: str | None, limit: int, url: str, token: str | None, as_json: bool) -> None:
    """List the rows that a sink has rejected, those of the last batches first, and why.

    Without DATASET: the buffered datasets, and how many batches wait.
    """
    if dataset is None:
        _list_buffers(url, token, as_json=as_json)
        return
    answer, _ = asked(url, token, lambda client: client.rejected(dataset, limit=limit))
    if as_json:
        show_json(answer)
        return
    rows = [
        (f"{each.sequence}:{each.place}", str(each.task), line(each.batch), gist(each.reason))
        for each in answer.rows
    ]
    if rows:
        fitted(("row", "task", "batch", "reason"), rows, numbers=(1,))
        if answer.is_cut:
            click.echo(f"There are more than {limit:,}.", err=True)
    else:
        click.echo("No rejected rows.", err=True)
    if answer.unread:
        click.echo(f"{answer.unread} files of rejected rows could not be read wholly.", err=True)


def _list_buffers(url: str, token: str | None, *, as_json: bool) -> None:
    answer, _ = asked(url, token, lambda client: client.buffers())
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            line(each.dataset),
            line(each.job),
            f"{each.held:,}",
            f"{each.waiting:,}",
            f"{each.taken:,}",
            line(each.rejected),
            gist(each.pressed or ""),
        )
        for each in answer.buffers
    ]
    if rows:
        names = ("dataset", "sink", "held", "waiting", "writing", "rejected rows", "pressure")
        fitted(names, rows, numbers=(2, 3, 4))
    else:
        click.echo("No buffered datasets.", err=True)


@rejected.command(
    short_help="Show one rejected row.", epilog="Example: penstock rejected show alerts 17:3"
)
@click.argument("dataset", metavar="DATASET")
@click.argument("row", metavar="ROW")
@on_a_dispatcher
def show(*, dataset: str, row: str, url: str, token: str | None, as_json: bool) -> None:
    """Print the text of a row, as JSON; what is wrong with it goes to standard error."""
    (wanted,) = _places([row])
    answer, _ = asked(url, token, lambda client: client.rejected(dataset, limit=_LISTED_MAX))
    found = next((each for each in answer.rows if _is(each, wanted)), None)
    if found is None:
        raise InvalidInput(f"There is no rejected row {row} among the last {_LISTED_MAX:,}.")
    if as_json:
        show_json(found)
        return
    click.echo(line(found.reason, characters_max=2_000), err=True)
    click.echo(found.row if found.row is not None else "")


@rejected.command(
    short_help="Give a row back with another text.",
    epilog="Example: penstock rejected mend alerts 17:3 row.json",
)
@click.argument("dataset", metavar="DATASET")
@click.argument("row", metavar="ROW")
@click.argument("file", metavar="FILE", type=click.File("r"), default="-")
@on_a_dispatcher
def mend(
    *, dataset: str, row: str, file: TextIO, url: str, token: str | None, as_json: bool
) -> None:
    """Publish another row in the place of a rejected one: a JSON object in FILE, or in standard
    input.
    """
    (place,) = _places([row])
    place.row = file.read(256 * 1024 + 1).strip()
    _give_back(url, token, dataset, [place], as_json=as_json)


@rejected.command(
    short_help="Give rows back as they were.",
    epilog="Example: penstock rejected replay alerts 17:3 17:4",
)
@click.argument("dataset", metavar="DATASET")
@click.argument("rows", metavar="ROW...", nargs=-1, required=True)
@on_a_dispatcher
def replay(
    *, dataset: str, rows: tuple[str, ...], url: str, token: str | None, as_json: bool
) -> None:
    """Publish rejected rows again, as after the checks of the sink were corrected."""
    _give_back(url, token, dataset, _places(rows), as_json=as_json)


@rejected.command(
    short_help="Drop rejected rows.", epilog="Example: penstock rejected drop alerts 17:3"
)
@click.argument("dataset", metavar="DATASET")
@click.argument("rows", metavar="ROW...", nargs=-1, required=True)
@on_a_dispatcher
def drop(
    *, dataset: str, rows: tuple[str, ...], url: str, token: str | None, as_json: bool
) -> None:
    """List these rows no more. They stay in the dataset of rejected rows."""
    _give_back(url, token, dataset, _places(rows), as_json=as_json, is_dropped=True)


def _give_back(
    url: str,
    token: str | None,
    dataset: str,
    rows: Sequence[RejectedPlace],
    *,
    as_json: bool,
    is_dropped: bool = False,
) -> None:
    answer, _ = asked(
        url, token, lambda client: client.give_back(dataset, rows, is_dropped=is_dropped)
    )
    if as_json:
        show_json(answer)
        return
    done = "dropped" if is_dropped else "given back"
    click.echo(f"{counted(answer.rows, 'row')} of {len(rows):,} {done}.")
    if answer.rows < len(rows):
        click.echo("The others were dealt with before.", err=True)


def _places(rows: Sequence[str]) -> list[RejectedPlace]:
    found = []
    for each in dict.fromkeys(rows):
        said = _ROW.fullmatch(each)
        if said is None:
            raise click.UsageError(
                f"{line(each)!r} is no row; write SEQUENCE:PLACE, as 'penstock rejected list' does."
            )
        found.append(RejectedPlace(sequence=int(said[1]), place=int(said[2])))
    return found


def _is(row: RejectedRow, wanted: RejectedPlace) -> bool:
    return (row.sequence, row.place) == (wanted.sequence, wanted.place)
