"""The test kit that ships with Penstock: contract suites, virtual time, seeded worlds.

For Penstock's own tests and for those of its users.
"""

from penstock.store.faulty import FaultPlan
from penstock.testing.bench import QueueBench, run_queue
from penstock.testing.queue_contract import QUEUE_CHECKS
from penstock.testing.store_contract import STORE_CHECKS
from penstock.testing.virtual import World, simulate

__all__ = [
    "QUEUE_CHECKS",
    "STORE_CHECKS",
    "FaultPlan",
    "QueueBench",
    "World",
    "run_queue",
    "simulate",
]
