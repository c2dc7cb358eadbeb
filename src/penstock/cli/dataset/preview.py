"""`penstock dataset preview NAME`: the first rows of what is published."""

from __future__ import annotations

import json
from typing import Any

import click

from penstock.cli.dataset.snapshots import on_a_snapshot, snapshot_of
from penstock.cli.telling import fitted, line
from penstock.datasets.snapshot import preview as first_rows
from penstock.kernel.errors import InvalidInput

_ROWS_MAX = 1000


@click.command(
    short_help="Show some rows of a dataset.",
    epilog="Example: penstock dataset preview sales --partition 2026-01-01 --rows 20",
)
@on_a_snapshot
@click.option(
    "--rows",
    type=click.IntRange(1, _ROWS_MAX),
    default=10,
    show_default=True,
    help="At most so many.",
)
def preview(
    *,
    name: str,
    generation: str | None,
    partition: str | None,
    store: str,
    rows: int,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Show the first rows of what is published of a dataset, or of one partition of it."""
    found = snapshot_of(
        name, generation=generation, partition=partition, store=store, url=url, token=token
    )
    try:
        shown = first_rows(found.files, found.transfer, rows=rows)
    except ImportError as error:
        raise InvalidInput(
            "Parquet files are read with pyarrow, which is not installed.",
            hint="Install it: pip install 'penstock[spark]'",
        ) from error
    if as_json:
        # A line for each row; what JSON has no word for is told as text.
        for row in shown:
            click.echo(json.dumps(row, ensure_ascii=False, default=str))
        return
    heads = [each.name for each in found.answer.columns]
    heads += sorted({head for row in shown for head in row} - set(heads))
    if not shown:
        click.echo("There are no rows.", err=True)
        return
    fitted(heads, [[_cell(row.get(head)) for head in heads] for row in shown])


def _cell(value: Any) -> str:
    return "" if value is None else line(str(value), characters_max=60)
