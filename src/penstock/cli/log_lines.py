"""Lines of the logs of processes: where each file is, what a line says, and which comes first.

Our own processes write an object of JSON a line where nobody looks, text with a time in front where
somebody does, and a traceback or a complaint as it is; Postgres has its own form. A line without a
time belongs to the one before it. Reading is bounded: of a file at most its last `TAIL_BYTES_MAX`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

PROCESSES: Final = ("dispatcher", "worker", "cron", "webhook", "postgres")
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
class LogLine:
    """One line of a log."""

    process: str
    at: float | None
    """When it was written; None if it does not say."""
    message: str
    level: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    """What else it says."""


def parsed(process: str, text: str) -> LogLine:
    """What a line says, in whichever of the forms it is."""
    if text.startswith("{"):
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict) and isinstance(said.get("message"), str):
            at = _instant(str(said.pop("at", "")), "")
            message, level = said.pop("message"), str(said.pop("level", ""))
            return LogLine(process, at, message, level, said)
    found = _TEXT.fullmatch(text)
    if found is None:
        return LogLine(process, None, text)
    at = _instant(found[1].replace(",", "."), (found[2] or "").strip())
    named = _LEVEL.fullmatch(found[3])
    if named is None:
        return LogLine(process, at, found[3])
    return LogLine(process, at, named[2], named[1].lower())


def _instant(text: str, zone: str) -> float | None:
    try:
        found = datetime.fromisoformat(text + (zone if zone[:1] in ("+", "-") else ""))
    except ValueError:
        return None
    if found.tzinfo is None:
        # The name of another zone is this machine's, as Postgres was told at its making.
        found = found.replace(tzinfo=UTC) if zone in _UTC else found.astimezone()
    return found.timestamp()


def in_order(lines: Iterable[LogLine]) -> list[LogLine]:
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

    def tail(self, lines: int) -> Sequence[LogLine]:
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

    def more(self) -> list[LogLine]:
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

    def _lines(self, body: bytes) -> Iterator[LogLine]:
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
