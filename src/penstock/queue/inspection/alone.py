"""A monitor that runs alone, for queues that no worker looks after at the moment.

Workers repair and archive what they guard, so this is needed where none runs for long, or to
have it done now. Beside workers it does no harm: `penstock.queue.monitor` says why, and what a
crash leaves. It also does the chores that it is given: each when it wants its turn, not only when
there is a pass; or, if only so many passes are wanted, once before the first.

A pass is one LIST for every 1,000 objects in `tasks/` and what is due of `ready/`, one of
`keyed/`, and one of `ready/` if there are packs with a key: three for a small queue. A settled
pack costs a GET, and a put for every 500 or so. At the default period of 600 s that is 13,000
LISTs or seven cents a month, and $0.41 per million settled tasks that were submitted one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.errors import StoreError, UnreadableObject
from penstock.queue.access import Access
from penstock.queue.discovery.scan import ALL, Scanner
from penstock.queue.inspection.survey import foreign
from penstock.queue.monitor import Monitor
from penstock.queue.running.saying import Saying
from penstock.queue.running.upkeep import Chore, mind

_log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 600.0
"""How often a monitor that runs alone looks."""
_CLEARS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class MonitorPass:
    """What one pass of a monitor has seen and done."""

    settled_seen: int
    """Packs without a key that are settled and not archived; keyed ones come on top."""
    ledgers_archived: int
    """Or removed, because they were void."""
    pointers_written: int
    notes: tuple[str, ...]


async def run_monitor(
    access: Access,
    *,
    tell: Callable[[MonitorPass], None],
    stopping: asyncio.Event,
    period_seconds: float = PERIOD_SECONDS,
    passes_max: int | None = None,
    chores: Sequence[Chore] = (),
) -> None:
    """Look at everything, archive what is settled, write missing pointers; then again.

    Ends when `stopping` is set, between two passes, or after `passes_max`. Of a store that fails,
    the last pass raises the error; before it, the next pass comes in time. A pass looks at 50,000
    objects of `tasks/` at the most; the next goes on from there.
    """
    if passes_max is not None:
        for chore in chores:
            await chore.turn()
        await _passes(access, tell, stopping, period_seconds, passes_max)
        return
    try:
        await _beside(access, chores, _passes(access, tell, stopping, period_seconds, passes_max))
    except ExceptionGroup as group:
        # As it is, not as one of a group.
        raise group.exceptions[0] from None


async def _beside(
    access: Access, chores: Sequence[Chore], passes: Coroutine[Any, Any, None]
) -> None:
    """Do the chores beside the passes, until those end."""
    clock = access.store.clock.machine
    async with asyncio.TaskGroup() as group:
        minding = [
            group.create_task(mind(each, clock=clock, say=Saying(clock), is_ours=lambda: True))
            for each in chores
        ]
        await passes
        for task in minding:
            task.cancel()
    for chore in chores:
        await chore.release()


async def _passes(
    access: Access,
    tell: Callable[[MonitorPass], None],
    stopping: asyncio.Event,
    period_seconds: float,
    passes_max: int | None,
) -> None:
    scanner = Scanner(access.store, access.layout)
    monitor = Monitor(
        access.store,
        access.layout,
        key_seconds=access.config.key_seconds,
        entropy=access.entropy,
    )
    number = 0
    while not stopping.is_set():
        number += 1
        try:
            tell(await _pass(access, scanner, monitor))
        except (StoreError, UnreadableObject) as error:
            if number == passes_max:
                raise
            _log.warning("the queue cannot be repaired, trying again: %s", error)
        if number == passes_max:
            return
        try:
            async with asyncio.timeout(period_seconds):
                await stopping.wait()
        except TimeoutError:
            continue


async def _pass(access: Access, scanner: Scanner, monitor: Monitor) -> MonitorPass:
    looked = await access.store.now()
    view = await scanner.look(ALL, minute=int(looked.earliest // 60), worth=lambda _: 0, wanted=1)
    monitor.note(view.settled, looked)
    pointers = await monitor.sweep(ALL)
    left = 0
    for _ in range(_CLEARS_MAX):
        some = await monitor.clear(at_once=True)
        left += some
        if not some:
            break
    return MonitorPass(
        settled_seen=len(view.settled),
        ledgers_archived=left,
        pointers_written=pointers,
        notes=tuple(foreign(key) for key in view.foreign),
    )
