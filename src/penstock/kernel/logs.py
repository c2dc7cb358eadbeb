"""Where the log of a process goes, and how its lines look.

To standard error: as text where people read it, as one JSON object a line where programs do. What
is logged with `extra` becomes fields of the object. Loggers below `penstock` are shown from INFO
on, others from WARNING. Called by the command line, once a process.
"""

from __future__ import annotations

import json
import logging
import time
from enum import StrEnum
from pathlib import Path
from typing import Final

_LINE: Final = "%(asctime)sZ %(levelname)s %(name)s: %(message)s"
_COMPLAINT: Final = "penstock: "
"""What the command line says of a failure begins so; the next step is indented below it."""
_NOTHING: Final = "nothing."
_TAIL_BYTES: Final = 16_384
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LogFormat(StrEnum):
    """How a line of the log looks."""

    TEXT = "text"
    JSON = "json"


class _Formatter(logging.Formatter):
    """Times are UTC, whatever the machine's zone is."""

    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "at": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str, ensure_ascii=False)


def log_to_stderr(form: LogFormat = LogFormat.TEXT) -> None:
    """Show the log, unless somebody has said already where it goes."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    match form:
        case LogFormat.TEXT:
            handler.setFormatter(_Formatter(_LINE, datefmt="%Y-%m-%dT%H:%M:%S"))
        case LogFormat.JSON:
            handler.setFormatter(_JsonFormatter())
    root.addHandler(handler)
    logging.getLogger("penstock").setLevel(logging.INFO)


def last_words(log: Path) -> tuple[str, str]:
    """What a process that has ended said of it, and the next step: its complaint, or the last line.

    Where there is no next step, it is where the log is.
    """
    where = f"Its log is {log}."
    lines = _last_lines(log)
    for place in range(len(lines) - 1, -1, -1):
        if lines[place].startswith(_COMPLAINT):
            after = [line.strip() for line in lines[place + 1 : place + 2] if line.startswith("  ")]
            return lines[place].removeprefix(_COMPLAINT), after[0] if after else where
    return (lines[-1].strip() if lines else _NOTHING), where


def last_complaint(log: Path) -> str:
    """What a process complained of with its last words; nothing if these were no complaint."""
    lines = _last_lines(log)
    while lines and lines[-1].startswith("  "):
        lines.pop()
    said = lines[-1] if lines else ""
    return said.removeprefix(_COMPLAINT) if said.startswith(_COMPLAINT) else ""


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - _TAIL_BYTES))
            lines = opened.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()]
