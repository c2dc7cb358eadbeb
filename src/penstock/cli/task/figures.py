"""What an attempt says of itself, for people: how far it is, and what it took.

Figures are named by whoever measured them, and their names end in their units (`_bytes`,
`_seconds`, `_ms`). Progress of a Spark job has stages and tasks; any other is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.cli.queue.showing import compact
from penstock.cli.telling import line

_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS: Final = (("stages_done", "stages"), ("tasks_done", "tasks"))


def progress_line(said: Mapping[str, Any]) -> str:
    """How far an attempt is."""
    counts = [
        f"{said[done]:,} of {said[of]:,} {of}"
        for done, of in _STEPS
        if isinstance(said.get(done), int) and isinstance(said.get(of), int)
    ]
    if not counts:
        return compact(said)
    phase = said.get("phase")
    told = ", ".join(counts)
    return f"{line(phase)}: {told}" if isinstance(phase, str) and phase else told


def figures(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values; those within others follow them, and what is nothing is left out."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            for inner, shown in figures(value):
                yield f"{line(name)}.{inner}", shown
        elif value is not None:
            yield line(name), _figure(name, value)


def size(count: float) -> str:
    """So many bytes, in the unit that they are best read in."""
    for unit in _SIZES[:-1]:
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} {_SIZES[-1]}"


def _figure(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return line(value if isinstance(value, str) else compact(value))
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("_seconds"):
        return f"{value:,.2f} s"
    if name.endswith("_ms"):
        return f"{value / 1000:,.2f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
