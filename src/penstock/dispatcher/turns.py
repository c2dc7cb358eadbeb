"""Turns of loops that are more than one call: what comes after routing, and how reaping goes on.

Called by the wiring, which gives them to `looping.Loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.dispatcher.looping import Loop, Turn
from penstock.dispatcher.routing.router import Routing
from penstock.dispatcher.tasks.lifecycle import BATCH_MAX, Tasks

_OUTAGE_SECONDS: Final = 15.0
"""Without a reaper for so long, workers could not be heard either; far above the reapers' pace."""
_ROUTED_MAX: Final = 2000


def routing_turn(routing: Routing, followers: Sequence[Loop]) -> Turn:
    """Route events; what may have become of them is looked at by `followers`."""

    async def turn() -> float | None:
        routed = await routing.route(limit=_ROUTED_MAX)
        if not routed.routed and not routed.audited:
            return None
        for each in followers:
            each.kick()
        return 0.0

    return turn


def reaping_turn(tasks: Tasks) -> Turn:
    """End attempts that nobody hears of any more."""

    async def turn() -> float | None:
        reaping = await tasks.reap(outage_seconds=_OUTAGE_SECONDS)
        return 0.0 if len(reaping.reaped) == BATCH_MAX else None

    return turn
