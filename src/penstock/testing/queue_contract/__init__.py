"""What every mode of the bucket queue must do on every store, as checks that run on any of them.

A check works with queues and workers of one mode on one empty store, and raises `AssertionError`
where a promise of `penstock.queue` does not hold. No test framework is needed; in virtual time:

    async def main(world):
        bench = Bench(open_client, Mode.LEASED, world.entropy("bench"), world.clock())
        await QUEUE_CHECKS["a_key_is_one_task"](bench)

    simulate(main, seed=1)

where `open_client` is an async function that opens another client of the same store each time it
is called, and the store is empty at first. The checks close no client. `THREADED_CHECKS` run plain
functions in threads, which virtual time does not have. `PATIENT_CHECKS` wait until leases have
ended, or longer: they are meant for virtual time and take from ten seconds to minutes elsewhere.
"""

from __future__ import annotations

from typing import Final

from penstock.testing.queue_contract import tasks, workers
from penstock.testing.queue_contract.bench import Bench, QueueCheck

__all__ = ["PATIENT_CHECKS", "QUEUE_CHECKS", "THREADED_CHECKS", "Bench", "Check"]

Check = QueueCheck
QUEUE_CHECKS: Final[dict[str, QueueCheck]] = {
    check.__name__: check
    for check in (*tasks.RUN_CHECKS, *tasks.END_CHECKS, *workers.CHECKS, *tasks.REFUSAL_CHECKS)
}
PATIENT_CHECKS: Final = frozenset(
    check.__name__
    for check in (*tasks.PATIENT_RUN_CHECKS, *tasks.PATIENT_END_CHECKS, *workers.PATIENT)
)
THREADED_CHECKS: Final = frozenset(check.__name__ for check in tasks.THREADED_RUN_CHECKS)
