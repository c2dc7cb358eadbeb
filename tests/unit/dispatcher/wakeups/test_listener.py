"""A listener that waits at a dispatcher goes on, whatever a request of it raises."""

from __future__ import annotations

import pytest

from penstock.dispatcher.wakeups.base import WakeUpChannel
from penstock.dispatcher.wakeups.long_poll import LongPollListener
from penstock.kernel.errors import DispatcherUnavailable
from penstock.protocol.work import WaitAnswer, WaitAsk, WakeUpAnswer
from penstock.testing.virtual import World, simulate


@pytest.mark.parametrize("error", [DispatcherUnavailable("It is away."), RuntimeError("A bug.")])
def test_a_listener_that_has_failed_waits_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        heard: list[str] = []
        requests = 0

        async def wait(ask: WaitAsk) -> WaitAnswer:
            nonlocal requests
            requests += 1
            if requests <= 3:
                raise error
            await world.clock().sleep(1)
            given = [WakeUpAnswer(id=requests, operator="clean", priority="normal")]
            return WaitAnswer(wake_ups=given if not heard else [])

        async def answer(channel: WakeUpChannel) -> None:
            heard.append(channel.operator)

        listener = LongPollListener(
            wait, answer, clock=world.clock(), entropy=world.entropy("listener")
        )
        listener.listen_to(["clean"])
        async with listener:
            await world.clock().sleep(60)
        assert heard == ["clean"]
        (failed,) = (each for each in caplog.records if "failed to wait" in each.getMessage())
        # A mistake of ours has its traceback.
        assert (failed.exc_info is None) == isinstance(error, DispatcherUnavailable)

    simulate(main, seed=1)
