"""Removes the logs of attempts that are old, so that a worker's disk does not fill up.

One file an attempt, named by `runtimes.places`; other files in the folder are not ours. Which are
old is told by the machine's own clock, which is good enough for what nobody needs any more. Called
by a loop beside the worker; several workers may share a folder.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

from penstock.kernel.clock import Clock

_ATTEMPT: Final = re.compile(r"\d+-\d+\.log")
_DAY_SECONDS: Final = 86_400.0
_REMOVED_MAX: Final = 10_000


class LogPruning:
    """Looks through one folder of logs."""

    def __init__(self, folder: Path, *, days: float, clock: Clock) -> None:
        self._folder = folder
        self._seconds = days * _DAY_SECONDS
        self._clock = clock

    async def turn(self) -> float | None:
        """Remove what is old; at once again if there may be more."""
        before = self._clock.wall() - self._seconds
        removed = await asyncio.to_thread(_removed, self._folder, before)
        return 0.0 if removed == _REMOVED_MAX else None


def _removed(folder: Path, before: float) -> int:
    count = 0
    if not folder.is_dir():
        return count
    for file in folder.iterdir():
        if _ATTEMPT.fullmatch(file.name) and _is_older(file, before):
            file.unlink(missing_ok=True)
            count += 1
            if count == _REMOVED_MAX:
                break
    return count


def _is_older(file: Path, before: float) -> bool:
    try:
        return file.stat().st_mtime < before
    except FileNotFoundError:
        return False
