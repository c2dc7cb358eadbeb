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
    by_tombstone: bool = False
    """Whether its deletes are by tombstone already."""
    tombstones_would_do: bool = False
    """Whether nothing is broken but its conditional deletes, and those by tombstone are not."""

    @property
    def trusted(self) -> bool:
        """Whether nothing bad was found."""
        return all(finding.mark is not Mark.BAD for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.trusted and self.by_tombstone:
            return "This store can be trusted, with deletes by tombstone."
        if self.trusted:
            return "This store keeps every promise that Penstock builds on."
        if self.tombstones_would_do:
            return (
                "Do not use this store as it is: its conditional deletes are not atomic. It can be"
                " trusted, with deletes by tombstone: add deletes=tombstone to its URL, wherever"
                " it stands."
            )
        broken = [finding.check for finding in self.findings if finding.mark is Mark.BAD]
        return (
            f"Do not use this store: it broke {len(broken)} of its promises ({'; '.join(broken)})."
        )

    @property
    def dollars_per_month(self) -> float:
        """The price of such an examination once a day, at S3 Standard's prices."""
        return 30 * self.dollars
