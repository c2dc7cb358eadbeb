"""How much the tests do: small in `make test`, full in `make proof`, both said here and nowhere else.

What proves more by running longer has a size in each column. The small one has every kind of step
that the full one has (each victim is killed, each mode is simulated), only fewer of them. What no
small version can stand for is marked `proof`, and names the test that holds its promise meanwhile.

`PENSTOCK_PROOF_SEED` chooses another plan of kills, and `PENSTOCK_PROOF=1` the full sizes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

IS_PROOF: Final = os.environ.get("PENSTOCK_PROOF") == "1"
SEED: Final = int(os.environ.get("PENSTOCK_PROOF_SEED", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one kind of run does."""

    seeds_of_a_mode: int
    """Simulated worlds of the queue, in each of its modes."""
    seeds_of_datasets: int
    seeds_of_claims: int
    seeds_of_leases: int
    events_while_killed: int
    """Through the dispatcher, while it, its workers and its Postgres die."""
    partitions_while_killed: int
    """Through Spark, in each round."""
    rounds_of_kills: int
    flights_days: int
    folders_of_a_policy: int
    """Random ones, asked of policies."""


SMALL: Final = Sizes(
    seeds_of_a_mode=60,
    seeds_of_datasets=10,
    seeds_of_claims=100,
    seeds_of_leases=40,
    events_while_killed=500,
    partitions_while_killed=12,
    rounds_of_kills=1,
    flights_days=4,
    folders_of_a_policy=100_000,
)
FULL: Final = Sizes(
    seeds_of_a_mode=500,
    seeds_of_datasets=25,
    seeds_of_claims=500,
    seeds_of_leases=120,
    events_while_killed=2_000,
    partitions_while_killed=40,
    rounds_of_kills=2,
    flights_days=31,
    folders_of_a_policy=1_000_000,
)
SIZES: Final = FULL if IS_PROOF else SMALL
