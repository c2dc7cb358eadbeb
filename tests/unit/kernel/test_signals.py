"""A signal is heard, whenever it comes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from penstock import cli
from penstock.kernel.service import forget, note, stopped_by_signals


def test_a_signal_stops_what_listens() -> None:
    async def main() -> None:
        stopped = asyncio.Event()
        with stopped_by_signals(stopped.set):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(30):
                await stopped.wait()

    asyncio.run(main())


def test_a_signal_that_came_before_stops_what_listens_later_once() -> None:
    stops: list[int] = []

    async def main() -> None:
        note(signal.SIGTERM)
        for _ in range(2):
            with stopped_by_signals(lambda: stops.append(1)):
                pass

    asyncio.run(main())
    assert stops == [1]


def test_a_signal_whose_exception_is_lost_during_start_up_stops_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    def command(**_: object) -> int:
        # As in a callback during an import, where Python ignores what is raised.
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            heard.append("lost")

        async def serve() -> None:
            with stopped_by_signals(lambda: heard.append("stopped")):
                pass

        asyncio.run(serve())
        return 0

    monkeypatch.setattr(cli.cli, "main", command)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert cli.run([]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        forget()
    assert heard == ["lost", "stopped"]
