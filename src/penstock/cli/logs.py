"""`penstock logs`: what the processes of an installation log, in the order of their times."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.format import iso, notes, print_json_line
from penstock.cli.options import json_option
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import stopped_by_signals
from penstock.settings import read_settings

PROCESSES: Final = ("dispatcher", "worker", "webhook", "postgres")
TAIL_BYTES_MAX: Final = 16 * 1024 * 1024
_PIECE_BYTES: Final = 64 * 1024
_LINE_BYTES_MAX: Final = 1024 * 1024
_TEXT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"(Z| ?[+-]\d\d(?::?\d\d)?| [A-Z]{3,5}(?= \[))?\s+(.*)",
    re.DOTALL,
)
_LEVEL: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+(.*)", re.DOTALL)
_UTC: Final = ("", "Z", "UTC", "GMT")


def log_of(data: Path, process: str) -> Path:
    """Where the log of a process of `penstock up` is."""
    if process == "postgres":
        return data / "postgres" / "postgres.log"
    return data / "logs" / f"{process}.log"


@dataclass(frozen=True, slots=True)
class ProcessLogLine:
    """One line of a log."""

    process: str
    at: float | None
    """When it was written; None if it does not say."""
    message: str
    level: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    """What else it says."""


def parsed(process: str, text: str) -> ProcessLogLine:
    """What a line says, in whichever of the forms it is."""
    if text.startswith("{"):
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict) and isinstance(said.get("message"), str):
            at = _instant(str(said.pop("at", "")), "")
            message, level = said.pop("message"), str(said.pop("level", ""))
            return ProcessLogLine(process, at, message, level, said)
    found = _TEXT.fullmatch(text)
    if found is None:
        return ProcessLogLine(process, None, text)
    at = _instant(found[1].replace(",", "."), (found[2] or "").strip())
    named = _LEVEL.fullmatch(found[3])
    if named is None:
        return ProcessLogLine(process, at, found[3])
    return ProcessLogLine(process, at, named[2], named[1].lower())


def _instant(text: str, zone: str) -> float | None:
    try:
        found = datetime.fromisoformat(text + (zone if zone[:1] in ("+", "-") else ""))
    except ValueError:
        return None
    if found.tzinfo is None:
        # The name of another zone is this machine's, as Postgres was told at its making.
        found = found.replace(tzinfo=UTC) if zone in _UTC else found.astimezone()
    return found.timestamp()


def in_order(lines: Iterable[ProcessLogLine]) -> list[ProcessLogLine]:
    """Lines of several processes by time; each process's own stay in their order."""
    last: dict[str, float] = {}
    placed = []
    for each in lines:
        # A clock that was set back must not tear the lines of one process apart.
        at = max(each.at or 0.0, last.get(each.process, 0.0))
        last[each.process] = at
        placed.append((at, each))
    return [each for _, each in sorted(placed, key=lambda pair: pair[0])]


class LogFile:
    """The log of one process: its last lines first, and then what comes."""

    def __init__(self, process: str, path: Path) -> None:
        self.process = process
        self.path = path
        self._place = 0
        self._file: tuple[int, int] | None = None
        self._rest = b""

    def tail(self, lines: int) -> Sequence[ProcessLogLine]:
        """The last so many lines. Raises `OSError`."""
        with self.path.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            wanted = _PIECE_BYTES
            while True:
                start = max(0, size - wanted)
                opened.seek(start)
                body = opened.read(size - start)
                if body.count(b"\n") > lines or start == 0 or wanted >= TAIL_BYTES_MAX:
                    break
                wanted *= 2
            self._file, self._place = _identity(os.fstat(opened.fileno())), size
        if start > 0:
            body = body.partition(b"\n")[2]
        # Whoever died within a line has said as much; nothing is waited for.
        found = list(self._lines(body if body.endswith(b"\n") else body + b"\n"))
        return found[-lines:] if lines else []

    def more(self) -> list[ProcessLogLine]:
        """What was written since; all of it, if the file is another one or was cut."""
        try:
            with self.path.open("rb") as opened:
                about = os.fstat(opened.fileno())
                if _identity(about) != self._file or about.st_size < self._place:
                    self._file, self._place, self._rest = _identity(about), 0, b""
                opened.seek(self._place)
                body = opened.read(TAIL_BYTES_MAX)
        except OSError:
            return []
        self._place += len(body)
        return list(self._lines(body))

    def _lines(self, body: bytes) -> Iterator[ProcessLogLine]:
        """Whole lines; what follows the last of them is kept until the rest of it comes."""
        *whole, self._rest = (self._rest + body).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            whole, self._rest = [*whole, self._rest], b""
        for each in whole:
            text = each.decode("utf-8", "replace").rstrip("\r")
            if text.strip():
                yield parsed(self.process, text)


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


_LOOK_SECONDS: Final = 0.5
_FOLLOWED_SECONDS_MAX: Final = 366 * 86_400.0
_LINES_MAX: Final = 100_000
_COLOURS: Final = {"warning": "yellow", "error": "red", "critical": "red"}
_WIDTH: Final = max(map(len, PROCESSES))


@click.command(
    short_help="Show the logs of an installation.",
    epilog="Example: penstock logs worker --follow",
)
@click.argument("process", metavar="[PROCESS]", required=False, type=click.Choice(list(PROCESSES)))
@click.option("--follow", "-f", is_flag=True, help="Follow the logs until Ctrl-C.")
@click.option(
    "--lines",
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(0, _LINES_MAX),
    default=50,
    show_default=True,
    help="Number of last lines.",
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


def _last(files: Iterable[LogFile], count: int, *, is_named: bool) -> list[ProcessLogLine]:
    """The last lines of all together."""
    found: list[ProcessLogLine] = []
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


def _show(lines: Iterable[ProcessLogLine], *, as_json: bool) -> None:
    for each in lines:
        if as_json:
            print_json_line(_object(each))
            continue
        first, *rest = _words(each).splitlines() or [""]
        when = (iso(each.at) if each.at is not None else None) or ""
        name = click.style(f"{each.process:<{_WIDTH}}", bold=True)
        word = each.level.upper()
        level = click.style(word, fg=_COLOURS.get(each.level)) if word else ""
        click.echo("  ".join(part for part in (f"{when:<20}", name, level, _plain(first)) if part))
        for line in rest:
            click.echo(f"{'':<20}  {name}  {_plain(line)}")


def _object(line: ProcessLogLine) -> dict[str, Any]:
    at = iso(line.at, precise=True)
    told = {"process": line.process, "at": at, "level": line.level or None}
    return {**line.fields, **told, "message": line.message}


def _words(line: ProcessLogLine) -> str:
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
