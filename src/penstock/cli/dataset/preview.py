"""`penstock dataset preview NAME`: the first rows of what is published."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import click

from penstock.cli.dataset.snapshots import Snapshot, on_a_snapshot, snapshot_of
from penstock.cli.telling import fitted, line
from penstock.cli.telling import lines as shown_lines
from penstock.datasets.snapshot import TEXTS, Contents, DataFile, first_lines
from penstock.datasets.snapshot import preview as first_rows
from penstock.kernel.errors import InvalidInput

PARTITION = "_partition"
"""As transforms of many partitions call it too."""
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
    """Show the first rows of what is published of a dataset, or of one partition of it.

    Of a dataset with partitions each row says which one it is of, as `_partition`. Of what has no
    rows, such as a report, the first lines of the first text are shown.
    """
    found = snapshot_of(
        name, generation=generation, partition=partition, store=store, url=url, token=token
    )
    if any(each.files for each in found.contents) and find_spec("pyarrow") is None:
        raise InvalidInput(
            "Parquet files are read with pyarrow, which is not installed.",
            hint="Install it: pip install 'penstock[spark]'",
        )
    shown = _first(found, rows=rows)
    if not shown and any(each.manifest is None or each.others for each in found.contents):
        _show_text(found, lines=rows, as_json=as_json)
        return
    if as_json:
        # A line for each row; what JSON has no word for is told as text.
        for row in shown:
            click.echo(json.dumps(row, ensure_ascii=False, default=str))
        return
    heads = [PARTITION] * any(PARTITION in row for row in shown)
    heads += [each.name for each in found.answer.columns]
    heads += sorted({head for row in shown for head in row} - set(heads))
    if not shown:
        click.echo("There are no rows.", err=True)
        return
    fitted(heads, [[_cell(row.get(head)) for head in heads] for row in shown])


def _first(found: Snapshot, *, rows: int) -> list[dict[str, Any]]:
    """The first rows of all parts; those of a partition begin with its key."""
    shown: list[dict[str, Any]] = []
    for part, contents in zip(found.answer.parts, found.contents, strict=True):
        if len(shown) >= rows:
            break
        said = {} if part.partition_key is None else {PARTITION: part.partition_key}
        more = first_rows(contents.files, found.transfer, rows=rows - len(shown))
        shown += [{**said, **row} for row in more]
    return shown


def _show_text(found: Snapshot, *, lines: int, as_json: bool) -> None:
    """The first lines of the first text of parts that have no rows."""
    texts = [
        (part.partition_key, each)
        for part, contents in zip(found.answer.parts, found.contents, strict=True)
        for each in contents.others
        if each.location.endswith(TEXTS)
    ]
    if not texts:
        click.echo(_why_nothing(found.contents), err=True)
        return
    key, file = texts[0]
    if not as_json:
        click.echo(f"The first lines of {file.location}:", err=True)
    for text in first_lines(file, found.transfer, lines=lines):
        click.echo(_text_line(key, file, text) if as_json else shown_lines(text))


def _text_line(key: str | None, file: DataFile, text: str) -> str:
    said = {} if key is None else {PARTITION: key}
    row = {**said, "_file": file.location, "line": text}
    return json.dumps(row, ensure_ascii=False)


def _why_nothing(contents: list[Contents]) -> str:
    for each in contents:
        if each.others:
            return (
                f"It has no rows and no text that could be shown; its files are in {each.location}."
            )
    bare = next(each for each in contents if each.manifest is None)
    return f"It has no manifest, and there are no files in {bare.location}."


def _cell(value: Any) -> str:
    return "" if value is None else line(str(value), characters_max=60)
