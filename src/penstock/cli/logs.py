"""`penstock logs`: what the processes of an installation say."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.log_lines import PROCESSES, LogFile, LogLine, in_order, log_of
from penstock.cli.options import json_option
from penstock.cli.queue.showing import as_json_line, iso, notes
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.signals import stopped_by_signals
from penstock.settings import read_settings

_LOOK_SECONDS: Final = 0.5
_FOLLOWED_SECONDS_MAX: Final = 366 * 86_400.0
_LINES_MAX: Final = 100_000
_COLOURS: Final = {"warning": "yellow", "error": "red", "critical": "red"}
_WIDTH: Final = max(map(len, PROCESSES))


@click.command(
    short_help="Show what the processes of an installation say.",
    epilog="Example: penstock logs worker --follow",
)
@click.argument("process", metavar="[PROCESS]", required=False, type=click.Choice(list(PROCESSES)))
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option(
    "--lines",
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(0, _LINES_MAX),
    default=50,
    show_default=True,
    help="The last so many.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="The data folder of the installation.  [default: as the settings say, penstock-data]",
)
@json_option
def logs(
    *, process: str | None, follow: bool, count: int, data: Path | None, as_json: bool
) -> None:
    """Show the logs that 'penstock up' keeps of its processes: dispatcher, worker, cron, webhook
    and postgres; of all of them by time, or of the one that is named.

    With --json, one JSON object a line. What attempts of tasks have printed is shown by 'penstock
    task logs'.

    Exit code 0: here it is. 1: there is no such log here.
    """
    told = read_settings({"data": data}, environment=os.environ, folder=Path.cwd()).settings
    folder = told.data.absolute()
    files = [LogFile(each, log_of(folder, each)) for each in ([process] if process else PROCESSES)]
    _check(folder, files, process)
    _show(_last(files, count, is_named=process is not None), as_json=as_json)
    if follow:
        asyncio.run(_follow(files, as_json=as_json))


def _check(folder: Path, files: Sequence[LogFile], process: str | None) -> None:
    # A folder that may not be opened is told when its log is read.
    if any(os.path.lexists(each.path) or _is_closed(each.path.parent) for each in files):
        return
    raise PenstockError(
        f"There is no log of {f'the process {process}' if process else 'any process'} in {folder}.",
        hint="'penstock up' keeps logs in its data folder; name it with --data. A process that was"
        " started by itself logs to its own standard error.",
    )


def _is_closed(folder: Path) -> bool:
    return folder.is_dir() and not os.access(folder, os.X_OK)


def _last(files: Iterable[LogFile], count: int, *, is_named: bool) -> list[LogLine]:
    """The last lines of all together."""
    found: list[LogLine] = []
    for each in files:
        try:
            found += each.tail(count)
        except FileNotFoundError:
            continue
        except OSError as error:
            said = f"{each.path} cannot be read: {error.strerror or error}."
            if is_named:
                raise PenstockError(said) from error
            notes([said])
    return in_order(found)[-count:] if count else []


async def _follow(files: Sequence[LogFile], *, as_json: bool) -> None:
    clock = SystemClock()
    ends_at = clock.monotonic() + _FOLLOWED_SECONDS_MAX
    stopped = asyncio.Event()
    with stopped_by_signals(stopped.set):
        while not stopped.is_set() and clock.monotonic() < ends_at:
            _show(in_order(line for each in files for line in each.more()), as_json=as_json)
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await stopped.wait()
            except TimeoutError:
                continue


def _show(lines: Iterable[LogLine], *, as_json: bool) -> None:
    for each in lines:
        if as_json:
            as_json_line(_object(each))
            continue
        first, *rest = _words(each).splitlines() or [""]
        when = (iso(each.at) if each.at is not None else None) or ""
        name = click.style(f"{each.process:<{_WIDTH}}", bold=True)
        word = each.level.upper()
        level = click.style(word, fg=_COLOURS.get(each.level)) if word else ""
        click.echo("  ".join(part for part in (f"{when:<20}", name, level, _plain(first)) if part))
        for line in rest:
            click.echo(f"{'':<20}  {name}  {_plain(line)}")


def _object(line: LogLine) -> dict[str, Any]:
    at = iso(line.at, precise=True)
    told = {"process": line.process, "at": at, "level": line.level or None}
    return {**line.fields, **told, "message": line.message}


def _words(line: LogLine) -> str:
    """The message, what else is said in one line, and the traceback below it."""
    # What has parts is for programs.
    said = {name: value for name, value in line.fields.items() if _is_short(name, value)}
    more = " ".join(f"{name}={value}" for name, value in said.items())
    trace = line.fields.get("traceback")
    text = f"{line.message}  {more}" if more else line.message
    return f"{text}\n{trace}" if isinstance(trace, str) else text


def _is_short(name: str, value: object) -> bool:
    return name not in ("logger", "traceback") and isinstance(value, str | int | float | bool)


def _plain(text: str) -> str:
    """Somebody's words without what a terminal would obey; what is indented stays so."""
    return "".join(each if each.isprintable() else " " for each in text).rstrip()
