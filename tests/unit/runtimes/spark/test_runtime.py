"""The runtime and the life of its hosts, with hosts that have no Spark."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.base import AttemptWork, WorkResult
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.runtimes.spark.settings import SparkSettings
from penstock.testing.runtime_contract import RecordingReporter
from tests.integration.spark.trial import a_moment, cancelled, until, until_gone

ENGINE = "tests.unit.runtimes.spark.engine:Engine"


@dataclass
class Hasty(SystemClock):
    """A clock whose pauses are remembered, and over at once."""

    paused: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.paused.append(seconds)


def _work(task_id: int, do: str = "", **more: Any) -> AttemptWork:
    batch = {name: more.pop(name) for name in ("batch", "batch_size") if name in more}
    return AttemptWork(
        task_id=task_id,
        attempt=1,
        job="job",
        operator="spark.sql",
        generation="first",
        config={"do": do, **more},
        **batch,
    )


async def _run(runtime: SparkRuntime, work: AttemptWork) -> WorkResult:
    async with asyncio.timeout(60):
        return await runtime.run(work, RecordingReporter())


def test_no_more_run_at_a_time_than_the_settings_say() -> None:
    async def test() -> None:
        async with SparkRuntime(SparkSettings(parallel=2), engine=ENGINE) as runtime:
            async with asyncio.TaskGroup() as group:
                works = [_work(number, "crowd") for number in range(5)]
                running = [group.create_task(_run(runtime, work)) for work in works]
            assert max(each.result().metrics["at_once"] for each in running) == 2
            assert len({each.result().metrics["pid"] for each in running}) == 1

    asyncio.run(test())


def test_a_host_is_replaced_after_its_tasks() -> None:
    async def test() -> None:
        settings = SparkSettings(recycle_tasks=2)
        async with SparkRuntime(settings, engine=ENGINE) as runtime:
            pids = [(await _run(runtime, _work(number))).metrics["pid"] for number in range(4)]
            assert pids[0] == pids[1] != pids[2] == pids[3]
            await until_gone(pids[0])

    asyncio.run(test())


def test_a_host_that_is_too_large_is_replaced() -> None:
    async def test() -> None:
        async with SparkRuntime(SparkSettings(recycle_bytes=2**40), engine=ENGINE) as runtime:
            first = (await _run(runtime, _work(1))).metrics["pid"]
            assert runtime.hosts is not None
            [host] = runtime.hosts.hosts
            host.resident_bytes = 2**40
            assert (await _run(runtime, _work(2))).metrics["pid"] == first
            assert (await _run(runtime, _work(3))).metrics["pid"] != first

    asyncio.run(test())


def test_a_session_that_does_not_start_is_one_sentence_and_tried_again_with_pauses() -> None:
    async def test() -> None:
        clock = Hasty()
        settings = SparkSettings(master="nowhere")
        async with SparkRuntime(settings, engine=ENGINE, clock=clock) as runtime:
            for _ in range(3):
                with pytest.raises(WorkReleased) as caught:
                    await _run(runtime, _work(1))
                assert caught.value.message == "Spark needs Java. Install one."
                assert caught.value.is_delayed, "another worker may have one"
        assert clock.paused == [0.0, 0.5, 1.0]

    asyncio.run(test())


def test_what_waits_is_dropped_where_it_waits(tmp_path: Path) -> None:
    async def test() -> None:
        async with SparkRuntime(SparkSettings(parallel=1), engine=ENGINE) as runtime:
            folder = str(tmp_path)
            async with asyncio.TaskGroup() as group:
                first = group.create_task(_run(runtime, _work(1, "hold", folder=folder)))
                await until(tmp_path / "begun-1")
                second = group.create_task(_run(runtime, _work(2, "hold", folder=folder)))
                third = group.create_task(_run(runtime, _work(3, "hold", folder=folder)))
                await asyncio.wait([second], timeout=0)
                await cancelled(second)
                (tmp_path / "go").touch()
                await asyncio.wait([first, third])
        assert not (tmp_path / "begun-2").exists()
        assert (tmp_path / "begun-3").exists()

    asyncio.run(test())


def test_a_batch_is_one_run_however_much_its_tasks_are_given() -> None:
    async def test() -> None:
        async with SparkRuntime(engine=ENGINE) as runtime:
            works = [
                _work(number, batch="b", batch_size=3, text="x" * size)
                for number, size in enumerate((1, 17 * 2**20, 1))
            ]
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(_run(runtime, work)) for work in works]
        for each in running:
            assert (each.result().metrics["of"], each.result().metrics["shared_by"]) == (3, 3)

    asyncio.run(test())


def test_a_host_is_made_when_work_is_expected_and_gone_with_its_folders(tmp_path: Path) -> None:
    async def test() -> None:
        runtime = SparkRuntime(SparkSettings(data=str(tmp_path)), engine=ENGINE)
        async with runtime:
            runtime.expect()
            runtime.expect()
            finished = await _run(runtime, _work(1))
            assert list(runtime.pids) == [finished.metrics["pid"]]
        assert not runtime.pids
        await until_gone(finished.metrics["pid"])
        assert not list((tmp_path / "spark" / "hosts").iterdir())
        with pytest.raises(WorkFailed, match="The runtime was stopped"):
            await _run(runtime, _work(2))

    asyncio.run(test())


def test_a_runtime_without_a_data_folder_leaves_none_behind() -> None:
    async def test() -> None:
        async with SparkRuntime(engine=ENGINE) as runtime:
            await _run(runtime, _work(1))
            folders.append(Path(runtime.data))
            assert await asyncio.to_thread(folders[0].is_dir)

    folders: list[Path] = []
    asyncio.run(test())
    assert not folders[0].exists()


def test_jobs_are_judged_without_spark() -> None:
    said = (
        "import sys\n"
        "from penstock.runtimes.registry import RuntimeRegistry\n"
        "faults = RuntimeRegistry().runtime('spark').faults('spark.sql', config={}, resources={})\n"
        "assert list(faults)\n"
        "assert not {'pyspark', 'py4j', 'pandas', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", said], check=True)


def _of(resources: dict[str, Any], task_id: int, do: str = "", **more: Any) -> AttemptWork:
    return replace(_work(task_id, do, **more), resources=resources)


def test_jobs_of_one_profile_share_a_host_and_others_do_not() -> None:
    async def test() -> None:
        async with SparkRuntime(SparkSettings(), engine=ENGINE) as runtime:
            big: dict[str, Any] = {"memory": "4GiB", "conf": {"spark.a": 1, "spark.b": 2}}
            same: dict[str, Any] = {"conf": {"spark.b": "2", "spark.a": "1"}, "memory": "4GiB"}
            works = [_work(1), _of(big, 2), _of(same, 3), _of({"cpu": 1}, 4), _of({}, 5)]
            ended = await asyncio.gather(*[_run(runtime, work) for work in works])
            first, second, third, fourth, fifth = (each.metrics["pid"] for each in ended)
            assert first == fifth
            assert second == third
            assert len({first, second, fourth}) == 3
            assert set(runtime.pids) == {first, second, fourth}
        for pid in {first, second, fourth}:
            await until_gone(pid)

    asyncio.run(test())


def test_a_profile_too_many_waits_until_another_has_nothing_to_do(tmp_path: Path) -> None:
    async def test() -> None:
        settings = SparkSettings(profiles_max=1)
        async with SparkRuntime(settings, engine=ENGINE) as runtime:
            held = _of({"cpu": 1}, 1, "hold", folder=str(tmp_path))
            first = asyncio.get_running_loop().create_task(_run(runtime, held))
            await until(tmp_path / "begun-1")
            second = asyncio.get_running_loop().create_task(_run(runtime, _of({"cpu": 2}, 2)))
            unwanted = asyncio.get_running_loop().create_task(_run(runtime, _of({"cpu": 3}, 3)))
            # Work without a profile does not wait for either.
            await _run(runtime, _work(4))
            assert not second.done()
            await cancelled(unwanted)
            (tmp_path / "go").touch()
            pids = [(await each).metrics["pid"] for each in (first, second)]
            await until_gone(pids[0])
            assert pids[1] in runtime.pids

    asyncio.run(test())


def test_a_profile_that_nobody_needs_is_ended() -> None:
    async def test() -> None:
        async with SparkRuntime(SparkSettings(idle_seconds=0), engine=ENGINE) as runtime:
            pid = (await _run(runtime, _of({"cpu": 1}, 1))).metrics["pid"]
            await until_gone(pid)
            # It is made anew when it is needed.
            assert (await _run(runtime, _of({"cpu": 1}, 2))).metrics["pid"] != pid

    asyncio.run(test())


def test_what_waits_for_a_profile_ends_with_the_runtime(tmp_path: Path) -> None:
    async def test() -> None:
        async with SparkRuntime(SparkSettings(profiles_max=1), engine=ENGINE) as runtime:
            held = _of({"cpu": 1}, 1, "hold", folder=str(tmp_path))
            running = [asyncio.get_running_loop().create_task(_run(runtime, held))]
            await until(tmp_path / "begun-1")
            running.append(
                asyncio.get_running_loop().create_task(_run(runtime, _of({"cpu": 2}, 2)))
            )
            await a_moment()
        for each in running:
            with pytest.raises(WorkReleased, match="was stopped"):
                await each

    asyncio.run(test())
