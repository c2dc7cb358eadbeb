"""What is started is stopped, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from penstock.kernel.service import Service, Services


class Scripted(Service):
    """Raises what it is told to, and writes down what was called."""

    def __init__(
        self,
        *,
        start_error: BaseException | None = None,
        stop_error: BaseException | None = None,
        hang: bool = False,
    ) -> None:
        self.calls: list[str] = []
        self.starting = asyncio.Event()
        self._start_error = start_error
        self._stop_error = stop_error
        self._hang = hang

    async def start(self) -> None:
        self.calls.append("start")
        self.starting.set()
        if self._hang:
            await asyncio.Event().wait()
        if self._start_error:
            raise self._start_error

    async def stop(self) -> None:
        self.calls.append("stop")
        if self._stop_error:
            raise self._stop_error


async def _enter(service: Service, error: BaseException | None = None) -> None:
    async with service as entered:
        assert entered is service
        if error:
            raise error


def test_started_and_stopped() -> None:
    service = Scripted()
    asyncio.run(_enter(service))
    assert service.calls == ["start", "stop"]


def test_stopped_after_a_failure_inside() -> None:
    service = Scripted()
    with pytest.raises(ValueError, match="inside"):
        asyncio.run(_enter(service, ValueError("inside")))
    assert service.calls == ["start", "stop"]


def test_stopped_after_a_start_that_failed_halfway() -> None:
    service = Scripted(start_error=ValueError("halfway"))
    with pytest.raises(ValueError, match="halfway"):
        asyncio.run(_enter(service))
    assert service.calls == ["start", "stop"]


def test_stopped_after_a_start_that_was_cancelled() -> None:
    async def main() -> Scripted:
        service = Scripted(hang=True, stop_error=OSError("stop"))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_enter(service))
            await service.starting.wait()
            task.cancel()
        assert task.cancelled()
        return service

    assert asyncio.run(main()).calls == ["start", "stop"]


def test_why_the_start_failed_is_not_hidden_by_the_stop() -> None:
    service = Scripted(start_error=ValueError("start"), stop_error=OSError("stop"))
    with pytest.raises(ValueError, match="start") as caught:
        asyncio.run(_enter(service))
    assert caught.value.__notes__ == ["Stopping it failed as well: OSError('stop')"]


def test_a_failure_to_stop_is_raised() -> None:
    service = Scripted(stop_error=OSError("stop"))
    with pytest.raises(OSError, match="stop"):
        asyncio.run(_enter(service))


def test_several_are_started_in_order_and_stopped_in_the_reverse() -> None:
    calls: list[str] = []

    class Named(Service):
        def __init__(self, name: str, *, fails: bool = False) -> None:
            self._name = name
            self._fails = fails

        async def start(self) -> None:
            calls.append(f"start {self._name}")
            if self._fails:
                raise OSError(self._name)

        async def stop(self) -> None:
            calls.append(f"stop {self._name}")

    async def main() -> None:
        async with Services([Named("a"), Named("b")]):
            calls.append("used")
        with pytest.raises(OSError, match="d"):
            async with Services([Named("c"), Named("d", fails=True), Named("e")]):
                calls.append("never")

    asyncio.run(main())
    both = ["start a", "start b", "used", "stop b", "stop a"]
    assert calls == [*both, "start c", "start d", "stop d", "stop c"]
