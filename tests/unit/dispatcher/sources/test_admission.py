"""Whether a source is let in, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cli.processes import _run_source
from penstock.dispatcher.sources.client import SourceProcess
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable
from penstock.testing.virtual import World, simulate
from tests.unit.dispatcher.sources.scripted import ScriptedDispatcher


def test_a_dispatcher_that_is_away_is_waited_for() -> None:
    dispatcher = ScriptedDispatcher([], failures=[DispatcherUnavailable("away")] * 5)

    async def main(world: World) -> None:
        began = world.now()
        await SourceProcess(dispatcher, []).until_let_in(asyncio.Event())
        assert dispatcher.asked == 6
        assert world.now() - began > 10

    simulate(main, seed=1)


def test_who_is_told_to_stop_waits_for_nobody() -> None:
    dispatcher = ScriptedDispatcher([], failures=[DispatcherUnavailable("away")] * 5)

    async def main(world: World) -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, stopped.set)
        began = world.now()
        await SourceProcess(dispatcher, []).until_let_in(stopped)
        assert world.now() - began == pytest.approx(1.0)

    simulate(main, seed=1)


def test_a_source_that_is_not_let_in_ends() -> None:
    refusal = DispatcherRefused("The token is not the one of cron-1.", status=401)
    dispatcher = ScriptedDispatcher([], failures=[DispatcherUnavailable("away"), refusal])
    with pytest.raises(DispatcherRefused, match="not the one of cron-1"):
        asyncio.run(_run_source(SourceProcess(dispatcher, []), "Emitting"))
