"""How much the tests do: small in `make test`, full in `make proof`; said here and nowhere else.

What proves more by running longer is marked `proof` and has a size in each column. The small one
has every kind of step that the full one has (each victim is killed, each mode is simulated), only
fewer of them. What has no small version is marked `proof(meanwhile=...)`, which names the test of
the same file that holds its promise in `make test`.

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
    events_while_killed: int
    """Through the dispatcher, while it, its workers and its Postgres die."""
    events_of_other_senders: int
    """The same with wake-ups through the bucket, and through SQS."""
    partitions_while_killed: int
    """Through Spark, in each round."""
    rounds_of_kills: int
    fleets_of_sinks: int
    """Each with a plan of kills of its own."""
    tasks_that_publish: int
    """Batches of rows, in each of these fleets."""
    faults_of_a_job: int
    """On a cluster, each in the middle of a read or an upload of every kind of job."""
    workers_that_wait: int
    """In tens, at a dispatcher that is killed."""
    publishers_at_once: int
    """Into five partitions of one table."""
    tables_to_read: int
    """Random ones, published in every way and asked for by random filters."""
    folders_of_a_policy: int
    """Random ones, asked of policies."""
    share_of_draws: float
    """Of the seeds of other simulations, and of the examples that hypothesis draws."""


SMALL: Final = Sizes(
    seeds_of_a_mode=40,
    events_while_killed=500,
    events_of_other_senders=40,
    partitions_while_killed=12,
    rounds_of_kills=1,
    fleets_of_sinks=1,
    tasks_that_publish=25,
    faults_of_a_job=1,
    workers_that_wait=4,
    publishers_at_once=40,
    tables_to_read=1,
    folders_of_a_policy=100_000,
    share_of_draws=0.3,
)
FULL: Final = Sizes(
    seeds_of_a_mode=500,
    events_while_killed=2_000,
    events_of_other_senders=1_000,
    partitions_while_killed=40,
    rounds_of_kills=2,
    fleets_of_sinks=10,
    tasks_that_publish=100,
    faults_of_a_job=4,
    workers_that_wait=100,
    publishers_at_once=1_000,
    tables_to_read=10,
    folders_of_a_policy=1_000_000,
    share_of_draws=1.0,
)
SIZES: Final = FULL if IS_PROOF else SMALL


def seeds(count: int) -> range:
    """So many seeds of a simulation: others for each `PENSTOCK_PROOF_SEED`."""
    first = (SEED - 1) * 1_000_000
    return range(first, first + count)


def some(count: int) -> int:
    """How many of so many seeds or examples are drawn; all of them in `make proof`."""
    return max(1, round(SIZES.share_of_draws * count))
