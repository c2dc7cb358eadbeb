"""How far a run of the pipeline is: a picture that is drawn anew, or lines where nobody looks.

On a terminal, one line a dataset with a bar, in place of the last picture. Anywhere else, as in a
file, one line when a dataset is complete. Sentences in between stand above the picture.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from penstock.cli.terminal import unguarded

_BAR: Final = 24
_FULL, _EMPTY = "█", "·"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A dataset on the way, and the job that makes it."""

    dataset: str
    job: str
    partitions: int
    """How many it will have."""


class Display:
    """The picture, from the first `show` to the last."""

    def __init__(self, stages: Sequence[Stage], *, is_live: bool | None = None) -> None:
        self._stages = stages
        self._is_live = sys.stdout.isatty() if is_live is None else is_live
        self._drawn = 0
        self._complete: set[str] = set()

    def show(
        self, published: Mapping[str, int], running: Mapping[str, int], *, seconds: float
    ) -> None:
        """What there is of each dataset, how many tasks run of each job, and since when."""
        if self._is_live:
            lines = [self._line(each, published, running) for each in self._stages]
            # Nothing is as slow as the first of it.
            remark = "" if any(published.values()) else "  Spark is starting"
            room = shutil.get_terminal_size().columns - 1
            lines.append(f"  {seconds:5.1f} s{remark}")
            # At once with what erases the last one, so that nothing flickers.
            drawn = self._erasing() + "\n".join(line[:room] for line in lines)
            click.echo(drawn, file=unguarded(sys.stdout), color=True)
            self._drawn = len(lines)
            return
        for stage in self._stages:
            done = published.get(stage.dataset, 0)
            if done >= stage.partitions and stage.dataset not in self._complete:
                self._complete.add(stage.dataset)
                click.echo(f"  {seconds:5.1f} s  {stage.dataset:<15} {done:>4} by {stage.job}")

    def say(self, sentence: str) -> None:
        """A sentence that stays."""
        drawn = f"{self._erasing()}  {sentence}"
        click.echo(drawn, file=unguarded(sys.stdout), color=True)
        self._drawn = 0

    def end(self) -> None:
        """Leave the picture as it is."""
        self._drawn = 0

    def _erasing(self) -> str:
        """What erases the picture. These codes are no colours: nobody's wish for none is meant."""
        return f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""

    @staticmethod
    def _line(stage: Stage, published: Mapping[str, int], running: Mapping[str, int]) -> str:
        done = min(published.get(stage.dataset, 0), stage.partitions)
        full = _BAR * done // stage.partitions if stage.partitions else _BAR
        now = running.get(stage.job, 0)
        remark = f"  {now} running" if now and done < stage.partitions else ""
        bar = _FULL * full + _EMPTY * (_BAR - full)
        return f"  {stage.dataset:<15} {bar} {done:>4} of {stage.partitions}{remark}"
