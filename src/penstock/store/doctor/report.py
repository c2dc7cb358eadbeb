"""What the doctor says: one finding a check, and a verdict over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """How a check ended."""

    GOOD = "good"
    BAD = "bad"
    NOTE = "note"
    """Worth knowing, no reason for distrust."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was tried, how it ended, what was seen."""

    check: str
    mark: Mark
    seen: str


@dataclass(frozen=True, slots=True)
class Latency:
    """Round trips of one kind of request, in milliseconds."""

    kind: str
    median_ms: float
    slowest_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one examination found."""

    url: str
    findings: Sequence[Finding]
    latencies: Sequence[Latency]
    requests: int
    dollars: float

    @property
    def trusted(self) -> bool:
        """Whether nothing bad was found."""
        return all(finding.mark is not Mark.BAD for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.trusted:
            return "This store keeps every promise that Penstock builds on."
        broken = [finding.check for finding in self.findings if finding.mark is Mark.BAD]
        return (
            f"Do not use this store: it broke {len(broken)} of its promises ({'; '.join(broken)})."
        )

    @property
    def dollars_per_month(self) -> float:
        """The price of such an examination once a day, at S3 Standard's prices."""
        return 30 * self.dollars
