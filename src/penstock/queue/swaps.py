"""What one swap of a ledger does, all of it at once: reports, renewals, endings, and a claim. Pure.

A swap is applied to whatever ledger is present when it is written, again after every conflict; what
it found then is kept for whoever wrote it. Beside another ledger than the one it was made for it
changes nothing, and refuses all endings (`born`, see `claims`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from penstock.queue import transitions
from penstock.queue.endings import Ending
from penstock.queue.ledger import Ledger, Progress, Status
from penstock.queue.pack import Pack
from penstock.queue.transitions import Claim
from penstock.store.time import Interval

Endings = Mapping[int, tuple[str, Ending]]
"""Place → the claim that held it, and how its attempt ended."""
Reports = Mapping[int, tuple[str, Progress]]
"""Place → the claim that holds it, and what its attempt says of itself."""

NO_REPORTS: Final[Reports] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class LedgerSwap:
    """One swap. Called with the present ledger, it gives the next one."""

    born: str
    pack: Pack | None
    now: Interval
    endings: Endings
    claims: frozenset[str] = frozenset()
    lease_ms: int = 0
    touch_ms: int = 0
    more: Claim | None = None
    reports: Reports = field(default_factory=dict)
    refused: frozenset[int] = frozenset()
    """The endings that did not count, by the ledger that it was applied to last."""
    closed: dict[int, Status] = field(default_factory=dict)
    """What it settled without an attempt, likewise."""

    def __post_init__(self) -> None:
        self.refused = frozenset(self.endings)

    @property
    def ours(self) -> frozenset[str]:
        """Late or not, what is ours is not to be expired by our own write."""
        ended = {claim for claim, _ in self.endings.values()}
        return self.claims | ended | ({self.more.id} if self.more else set())

    def __call__(self, present: Ledger | None) -> Ledger | None:
        if present is None or present.born != self.born:
            self.refused = frozenset(self.endings)
            return None
        pack, now = self.pack, self.now
        after = transitions.tell(present, self.reports)
        if self.claims or self.more:
            after, _ = transitions.extend(
                after, self.ours, lease_ms=self.lease_ms, now=now, touch_ms=self.touch_ms
            )
        after, self.refused = transitions.settle(
            after,
            self.endings,
            now=now,
            inputs=pack.inputs if pack else (),
            expires_ms=pack.expires_ms if pack else 0,
        )
        self.closed = transitions.closed_by(present, after, self.endings)
        if self.more is not None:
            after, _ = transitions.claim(after, self.more, now, ours=self.ours)
        return transitions.recorded(after, pack, now) if pack else after
