"""Figures in the text format of Prometheus. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """All values of one name. `kind` is gauge, counter or histogram."""

    name: str
    about: str
    kind: str = "gauge"
    values: Sequence[tuple[Labels, float]] = ()
    histograms: Sequence[tuple[Labels, Histogram]] = ()

    def lines(self) -> list[str]:
        """As text."""
        told = [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} {self.kind}"]
        told += [f"{self.name}{_labels(labels)} {value:.15g}" for labels, value in self.values]
        for labels, histogram in self.histograms:
            told += histogram.lines(self.name, labels)
        return told


@dataclass(slots=True)
class Histogram:
    """How many values were at most as large as each bound; and all of them, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def note(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: Labels) -> list[str]:
        """As text."""
        told, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            edge = "+Inf" if bound == float("inf") else f"{bound:g}"
            told.append(f"{name}_bucket{_labels({**labels, 'le': edge})} {total}")
        told.append(f"{name}_sum{_labels(labels)} {self.sum:.15g}")
        told.append(f"{name}_count{_labels(labels)} {total}")
        return told


def exposed(families: Iterable[Family]) -> str:
    """The text that a scrape is answered."""
    return "\n".join(line for family in families for line in family.lines()) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
