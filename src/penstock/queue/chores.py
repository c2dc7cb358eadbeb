"""The chores of a queue: all that is done for it as a whole, in one list.

Workers do them, whichever guards the first slot, and so does a monitor that runs alone. A chore
that is new is added here and nowhere else.
"""

from __future__ import annotations

from penstock.queue.access import Access
from penstock.queue.batches.minding import BatchChore
from penstock.queue.bell import Bell
from penstock.queue.retention import RetentionChore
from penstock.queue.running.upkeep import Chore
from penstock.queue.schedules.minding import ScheduleChore


def chores_of(access: Access) -> tuple[Chore, ...]:
    """New chores for one worker, or one monitor."""
    bell = Bell(access)
    return (ScheduleChore(access, bell), BatchChore(access, bell), RetentionChore(access))
