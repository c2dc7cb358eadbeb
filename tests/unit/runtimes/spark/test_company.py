"""Who shares a host with whom, what its death costs them, and what a batch says one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.base import AttemptWork, WorkResult
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.runtimes.spark.settings import SparkSettings
from penstock.testing.runtime_contract import RecordingReporter
from tests.integration.spark.trial import a_moment, cancelled, until, until_gone
from tests.unit.runtimes.spark.test_runtime import ENGINE, _run, _work

Outcome = WorkResult | BaseException


def _runtime(*, parallel: int = 4) -> SparkRuntime:
    return SparkRuntime(SparkSettings(parallel=parallel), engine=ENGINE)


async def _outcomes(runtime: SparkRuntime, works: Sequence[AttemptWork]) -> list[Outcome]:
    running = [_run(runtime, work) for work in works]
    return await asyncio.gather(*running, return_exceptions=True)


def _batch(folder: Path, *deeds: str, **more: object) -> list[AttemptWork]:
    size = len(deeds)
    return [
        _work(number, do, folder=str(folder), batch="b", batch_size=size, **more)
        for number, do in enumerate(deeds, 1)
    ]


def test_a_death_in_company_is_charged_to_nobody_and_one_alone_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with _runtime() as runtime:
            folder = str(tmp_path)
            works = [
                _work(1, "hang", folder=folder),
                _work(2, "hang", folder=folder),
                _work(3, "die", folder=folder, after=[1, 2]),
            ]
            for error in await _outcomes(runtime, works):
                assert isinstance(error, WorkReleased)
                assert (error.runs_alone, error.is_delayed) == (True, False)
                assert "Other tasks ran in it" in error.message
            with pytest.raises(WorkFailed, match="exit code 9") as caught:
                await _run(runtime, replace(_work(3, "die"), runs_alone=True))
            assert not isinstance(caught.value, WorkReleased)
            assert caught.value.runs_alone

    asyncio.run(test())


def test_what_runs_alone_has_its_host_for_itself_and_its_turn(tmp_path: Path) -> None:
    async def test() -> None:
        async with _runtime() as runtime, asyncio.TaskGroup() as group:
            first = group.create_task(_run(runtime, _work(1, "hold", folder=str(tmp_path))))
            await until(tmp_path / "begun-1")
            alone = [
                group.create_task(_run(runtime, replace(_work(number, "crowd"), runs_alone=True)))
                for number in (2, 3)
            ]
            await a_moment()
            others = [group.create_task(_run(runtime, _work(number, "crowd"))) for number in (4, 5)]
            await a_moment()
            (tmp_path / "go").touch()
            await first
            at_once = [(await each).metrics["at_once"] for each in alone]
            assert at_once == [1, 1]
            assert not any(each.done() for each in others), "they came later, and waited"

    asyncio.run(test())


def test_what_waited_for_one_that_was_to_run_alone_goes_on_without_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with _runtime() as runtime, asyncio.TaskGroup() as group:
            folder = str(tmp_path)
            first = group.create_task(_run(runtime, _work(1, "hold", folder=folder)))
            await until(tmp_path / "begun-1")
            ear = RecordingReporter()
            alone = asyncio.get_running_loop().create_task(
                runtime.run(replace(_work(2), runs_alone=True), ear)
            )
            await a_moment()
            later = group.create_task(_run(runtime, _work(3, "hold", folder=folder)))
            await a_moment()
            assert not (tmp_path / "begun-3").exists()
            assert not ear.is_timed, "its time does not run while it waits"
            await cancelled(alone)
            await until(tmp_path / "begun-3")
            assert not first.done()
            (tmp_path / "go").touch()
            await asyncio.gather(first, later)

    asyncio.run(test())


def test_a_crash_at_the_end_of_a_batch_costs_what_has_not_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with _runtime() as runtime:
            ends = await _outcomes(runtime, _batch(tmp_path, "", "", "die", ""))
            assert [isinstance(each, WorkResult) for each in ends] == [True, True, False, False]
            assert all(isinstance(each, WorkReleased) for each in ends[2:])
            ends = await _outcomes(runtime, _batch(tmp_path, "", "", "die"))
            assert [type(each) for each in ends] == [WorkResult, WorkResult, WorkFailed]

    asyncio.run(test())


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_one_of_a_batch_that_is_given_up_lets_the_others_go_on_or_back(
    tmp_path: Path, is_stubborn: bool
) -> None:
    async def test() -> None:
        async with _runtime() as runtime:
            loop, ears = asyncio.get_running_loop(), [RecordingReporter() for _ in range(3)]
            works = _batch(tmp_path, "", "hang", "", is_stubborn=is_stubborn)
            grace = 0.1 if is_stubborn else 30.0
            running = [
                loop.create_task(runtime.run(replace(work, grace_seconds=grace), ear))
                for work, ear in zip(works, ears, strict=True)
            ]
            await until(tmp_path / "begun-2")
            assert isinstance(await running[0], WorkResult), "told before the others have ended"
            await a_moment()
            assert [ear.is_timed for ear in ears[1:]] == [True, False], "only whose turn it is"
            (host,) = runtime.pids
            await cancelled(running[1])
            if is_stubborn:
                with pytest.raises(
                    WorkReleased, match="of its batch did not stop in time"
                ) as caught:
                    await running[2]
                assert not caught.value.is_delayed
                await until_gone(host)
            else:
                assert isinstance(await running[2], WorkResult)
            assert isinstance(await _run(runtime, _work(9)), WorkResult)

    asyncio.run(test())
