"""`penstock query`: SQL over published datasets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import msgspec

from penstock.cli.dispatcher_call import (
    ago,
    asked,
    connected,
    counted,
    fitted,
    line,
    on_a_dispatcher,
    show_json,
)
from penstock.cli.format import print_json
from penstock.cli.options import absolute_option
from penstock.cli.output import unguarded
from penstock.kernel.errors import DispatcherRefused, InvalidInput, PenstockError
from penstock.protocol.queries import QueryAsk, QueryFormat

_SHOWN_ROWS: Final = 200
_BINARY: Final = ("parquet", "arrow")
_NUMBERS: Final = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE")


@click.command(
    short_help="Query datasets by SQL.",
    epilog='Example: penstock query "SELECT day, sum(amount) FROM sales GROUP BY day"',
)
@click.argument("sql", metavar="SQL", required=False)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "jsonl", "parquet", "arrow"]),
    default="table",
    show_default=True,
    help="Format of the result.",
)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result to this file.",
)
@click.option("--at", metavar="MOMENT", help="As it was then: a time, or the id of a snapshot.")
@click.option("--explain", is_flag=True, help="Show how it would be run.")
@click.option(
    "--rows",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Cut the result after N rows.  [default: {_SHOWN_ROWS} in a table, else all]",
)
@click.option("--log", "is_log", is_flag=True, help="List the latest queries instead.")
@absolute_option
@on_a_dispatcher
def query(
    *,
    sql: str | None,
    form: str,
    output: Path | None,
    at: str | None,
    explain: bool,
    rows: int | None,
    is_log: bool,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Run one SELECT of DuckDB's SQL over what is published of datasets, by their names.

    All datasets of a query are read as of one moment. A dataset with partitions has a column
    `partition_key` besides its own; by it, files are left out. With - for SQL it is read from
    standard input. Ctrl-C cancels the query.

    Exit code 1: it failed, or its result broke off. 2: the query is wrong; where is shown.
    """
    if is_log:
        _show_log(url, token, as_json=as_json)
        return
    text = sys.stdin.read() if sql == "-" else sql
    if not text or not text.strip():
        raise click.UsageError("Write a query: penstock query 'SELECT ...', or --log.")
    if form in _BINARY and output is None and sys.stdout.isatty():
        raise click.UsageError(f"{form} is not for a terminal: say --output FILE.")
    is_table = form == "table"
    if is_table and output is not None:
        raise click.UsageError("--output takes csv, jsonl, parquet or arrow: say --format.")
    ask = QueryAsk(
        sql=text,
        format=QueryFormat.ROWS if is_table else QueryFormat(form),
        at=at,
        explain=explain,
        rows=_SHOWN_ROWS if is_table and rows is None and not as_json else rows,
    )
    try:
        if is_table:
            _show(asyncio.run(_rows(url, token, ask)), as_json=as_json, explain=explain)
        else:
            asyncio.run(_copy(url, token, ask, output))
    except DispatcherRefused as error:
        if error.position is None:
            raise
        message = f"{error.message}\n{marked(text, error.position)}"
        raise InvalidInput(message, hint=error.hint) from error


def marked(sql: str, position: int) -> str:
    """The line of a text that has this place, with a mark below it."""
    position = min(position, len(sql))
    start = sql.rfind("\n", 0, position) + 1
    end = sql.find("\n", position)
    shown = sql[start : end if end >= 0 else len(sql)].expandtabs(1)
    number = sql.count("\n", 0, position) + 1
    before = f"  line {number}: "
    return f"{before}{shown}\n{'':<{len(before) + position - start}}^"


class _Told:
    """A result as it was told: columns, rows, and how it ended."""

    def __init__(self) -> None:
        self.columns: list[tuple[str, str]] = []
        self.rows: list[list[Any]] = []
        self.end: dict[str, Any] = {}


async def _rows(url: str, token: str | None, ask: QueryAsk) -> _Told:
    told, held = _Told(), b""
    async with connected(url, token) as client, client.query(ask) as pieces:
        async for piece in pieces:
            *whole, held = (held + piece).split(b"\n")
            for each in whole:
                said = msgspec.json.decode(each)
                if isinstance(said, list):
                    told.rows.append(said)
                elif "columns" in said:
                    told.columns = [(name, kind) for name, kind in said["columns"]]
                else:
                    told.end = said.get("end", {})
    if not told.end:
        raise PenstockError("The result ended early; the query log may have the reason.")
    return told


async def _copy(url: str, token: str | None, ask: QueryAsk, output: Path | None) -> None:
    async with connected(url, token) as client, client.query(ask) as pieces:
        if output is None:
            await _write(pieces, unguarded(sys.stdout).buffer)
            return
        part = output.with_name(f".{output.name}.part")
        try:
            with part.open("wb") as file:
                await _write(pieces, file)
                size = file.tell()
            part.replace(output)
        finally:
            part.unlink(missing_ok=True)
        click.echo(f"{output}: {size:,} bytes.", err=True)


async def _write(pieces: AsyncIterator[bytes], file: BinaryIO) -> None:
    async for piece in pieces:
        file.write(piece)
    file.flush()


def _show(told: _Told, *, as_json: bool, explain: bool) -> None:
    if as_json:
        columns = [{"name": name, "type": kind} for name, kind in told.columns]
        print_json({"columns": columns, "rows": told.rows, "end": told.end})
        return
    if explain:
        click.echo("".join(str(row[0]) for row in told.rows), nl=False)
        return
    heads = [line(name) for name, _ in told.columns]
    rows = [[_cell(value) for value in row] for row in told.rows]
    numbers = tuple(
        place
        for place, (_, kind) in enumerate(told.columns)
        if kind in _NUMBERS or kind.startswith("DECIMAL")
    )
    if heads:
        fitted(heads, rows, numbers=numbers)
    end = told.end
    more = "; cut, there are more: --rows N, or --format" if end.get("is_cut") else ""
    click.echo(f"{counted(len(rows), 'row')} in {end.get('seconds', 0):.2f} s{more}", err=True)


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return line(msgspec.json.encode(value).decode())
    return line(str(value))


def _show_log(url: str, token: str | None, *, as_json: bool) -> None:
    answer, now = asked(url, token, lambda client: client.queries())
    if as_json:
        show_json(answer)
        return
    if not answer.queries:
        click.echo("No queries.", err=True)
        return
    rows = [
        (
            str(each.id),
            ago(each.began_at, now=now),
            line(each.caller),
            each.outcome or "running",
            "" if each.rows is None else f"{each.rows:,}",
            line(", ".join(str(one.get("name")) for one in each.datasets)),
            line(each.sql),
            line(each.reason),
        )
        for each in answer.queries
    ]
    heads = ("id", "when", "caller", "outcome", "rows", "datasets", "query", "reason")
    fitted(heads, rows, numbers=(0, 4), least=(7, 6, 5))
