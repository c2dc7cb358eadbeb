"""What attempts say of themselves, for people to see: how far they are, and what they took. Pure.

Both are objects in JSON whose names and values are the worker's or the user's. Names end in their
units (`_bytes`, `_ms`, `_seconds`); progress of a Spark job counts its stages and tasks, and a
function mostly says `done` and `of`. Whatever else is said is shown as it is, within bounds.

A Spark task says what it read and wrote itself, and what Spark did for it. If Spark ran several
tasks together, the latter is of all of them, and told apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any, Final

from penstock.console.rendering import length, line, number, size

_COUNTS: Final[Sequence[tuple[str, str]]] = (
    ("stages_done", "stages"),
    ("tasks_done", "tasks"),
    ("done", "of"),
)
_FIGURES_MAX: Final = 60
_OWN: Final = {
    "rows_in": "Rows read",
    "bytes_in": "Data read",
    "rows_out": "Rows written",
    "bytes_out": "Data written",
    "files_out": "Files written",
}
_OF_SPARK: Final = {
    "reading_seconds": "Time for reading",
    "running_seconds": "Time for computing",
    "checking_seconds": "Time for checking",
    "writing_seconds": "Time for writing",
    "jobs": "Spark jobs",
    "stages": "Spark stages",
    "tasks": "Spark tasks",
    "executor_run_ms": "Time of executors, added up",
    "executor_cpu_ms": "Of that on processors",
    "gc_ms": "Of that collecting garbage",
    "input_rows": "Rows that Spark read",
    "input_bytes": "Data that Spark read",
    "output_rows": "Rows that Spark wrote",
    "output_bytes": "Data that Spark wrote",
    "shuffle_read_bytes": "Shuffled, read",
    "shuffle_write_bytes": "Shuffled, written",
    "spill_memory_bytes": "Spilled from memory",
    "spill_disk_bytes": "Spilled to disk",
}
_SHARED: Final = ("shared_by", "batched")
"""How many tasks Spark ran together."""
_DEPTH_MAX: Final = 4
_NUMBER_MAX: Final = 10.0**15
"""Larger ones, which nobody has measured, are shown as they are written."""
_TEXT_CHARACTERS_MAX: Final = 8_000


@dataclass(frozen=True, slots=True)
class Count:
    """So much of so much."""

    name: str
    done: float
    of: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Figures that belong together."""

    title: str
    """Empty where there is but one group."""
    note: str = ""
    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an attempt is."""

    phase: str
    counts: Sequence[Count]
    others: Sequence[tuple[str, str]]


def progress(said: Mapping[str, Any]) -> Progress:
    """What an attempt that runs says."""
    pairs = [
        (done, of)
        for done, of in _COUNTS
        if _is_counted(said.get(done)) and _is_counted(said.get(of)) and said[of] > 0
    ]
    counts = [Count("" if of == "of" else of, said[done], said[of]) for done, of in pairs]
    phase = said.get("phase")
    told = {name for pair in pairs for name in pair}
    if isinstance(phase, str):
        told.add("phase")
    others = {name: value for name, value in said.items() if name not in told}
    return Progress(
        phase=line(phase) if isinstance(phase, str) else "",
        counts=counts,
        others=figures(others),
    )


def figures(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names in words, and values with their units; those within others follow them."""
    return list(islice(_figures(measured, depth=_DEPTH_MAX), _FIGURES_MAX))


def groups(measured: Mapping[str, Any], *, runtime: str) -> list[Group]:
    """What an attempt took, by whether it is of this task or of all that ran with it."""
    if runtime != "spark":
        return [Group(title="", figures=figures(measured))]
    own = {name: value for name, value in measured.items() if name in _OWN}
    of_spark = {name: measured[name] for name in _OF_SPARK if name in measured}
    known = {*own, *of_spark, *_SHARED}
    others = {name: value for name, value in measured.items() if name not in known}
    together = max((_count(measured.get(name)) for name in _SHARED), default=1)
    title, note = "Spark", ""
    if together > 1:
        title = f"The batch of {number(together)} tasks"
        note = "Spark ran this task together with others. These figures are of all of them."
    found = [
        Group(title="This task", figures=[*_named(own, _OWN), *figures(others)]),
        Group(title=title, note=note, figures=_named(of_spark, _OF_SPARK)),
    ]
    return [each for each in found if each.figures]


def as_json(value: object) -> str:
    """A value as it is written, over several lines, and cut if it is very long."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= _TEXT_CHARACTERS_MAX else f"{text[:_TEXT_CHARACTERS_MAX]}\n…"


def _figures(measured: Mapping[str, Any], *, depth: int) -> Iterator[tuple[str, str]]:
    for name, value in measured.items():
        if isinstance(value, Mapping) and depth > 1:
            for inner, shown in _figures(value, depth=depth - 1):
                yield f"{_words(name)}: {inner}", shown
        elif value is not None:
            yield _words(name), _figure(name, value)


def _named(measured: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (shown, _figure(name, measured[name]))
        for name, shown in names.items()
        if measured.get(name) is not None
    ]


def _count(value: object) -> int:
    return int(value) if _is_counted(value) and isinstance(value, int | float) else 1


def _figure(name: str, value: object) -> str:
    if not _is_number(value):
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return line(shown)
    assert isinstance(value, int | float)
    if not isfinite(value) or abs(value) >= _NUMBER_MAX:
        return line(str(value), characters_max=40)
    if name.endswith("bytes") or name.startswith("bytes_"):
        return size(value)
    if name.endswith("_seconds"):
        return length(value)
    if name.endswith("_ms"):
        return length(value / 1000)
    return number(value)


def _words(name: str) -> str:
    for unit in ("_ms", "_seconds", "_bytes"):
        name = name.removesuffix(unit)
    return line(name.replace("_", " "), characters_max=60)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # What is too large for a figure of the machine is no figure.
    return not isinstance(value, int) or value.bit_length() <= 1_000


def _is_counted(value: object) -> bool:
    return _is_number(value) and isinstance(value, int | float) and 0 <= value < _NUMBER_MAX
