"""What a look shows of a pack, and what a claim and a swap give: values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.queue.ledger import Ledger
from penstock.queue.pack import Pack
from penstock.queue.transitions import held_by
from penstock.store.base import Version


@dataclass(frozen=True, slots=True)
class Seen:
    """What a list showed of a pack."""

    version: Version
    modified: float
    has_ledger: bool
    submitted_ms: int = 0
    """Of a pack with a key, which was read: when it was first sent."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gave: the pack, the places taken with the number of each attempt, the lease.

    A handler may start only while the store's time is surely before `expires_ms`.
    """

    pack: Pack
    attempts: Mapping[int, int]
    expires_ms: int
    given_back: Mapping[int, int]
    """How many attempts of each place do not count."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a swap did."""

    refused: frozenset[int]
    """The endings that did not count, because another claim, or none, holds the task by now."""
    expires_ms: Mapping[str, int]
    """The claims that are still held, with the end of each lease."""
    asked_to_stop: frozenset[int]
    more: Claimed | None
    """What was claimed with the same write."""


def claimed(pack: Pack, claim: str, ledger: Ledger) -> Claimed | None:
    """What a claim holds in a ledger; None if nothing."""
    held = held_by(claim, ledger)
    if not held:
        return None
    given_back = {place: ledger.tasks[place].given_back for place in held}
    return Claimed(pack, held, ledger.leases[claim].expires_ms, given_back)
