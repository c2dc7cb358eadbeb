"""What every `Runtime` must do, as checks that run on any of them.

A check gets a `Bench`: a runtime that has been started, and work for it that does one of a few
deeds. It raises `AssertionError` where a promise of `penstock.runtimes.base` does not hold. No test
framework is needed; with pytest:

    @pytest.mark.parametrize("name", RUNTIME_CHECKS)
    def test_my_runtime(name, tmp_path):
        asyncio.run(run_check(name, make_bench, tmp_path))

A deed that a runtime has no way to do is left out of `Bench.deeds`, and what needs it is passed.
Work that begins says so in a named pipe and holds it open; the pipe's end shows that nothing of it
runs any more. So the checks wait for signals, and not for time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import (
    AttemptWork,
    ProducedOutput,
    Runtime,
    WorkEvent,
    WorkOutput,
    WorkResult,
    renamed,
)
from penstock.runtimes.secrets import TaskCredentials

BEGUN: Final = "begun\n"
PRINTED: Final = "printed\n"
_AT_ONCE: Final = 3
_WAIT_SECONDS: Final = 30.0
_SHORT_SECONDS: Final = 0.2
_STARTER: Final = """
import asyncio, importlib, sys
import msgspec
from penstock.runtimes.base import AttemptWork
from penstock.testing.runtime_contract import RecordingReporter

async def main(maker, work):
    module, _, name = maker.partition(":")
    async with getattr(importlib.import_module(module), name)() as runtime:
        await runtime.run(msgspec.json.decode(work, type=AttemptWork), RecordingReporter())

asyncio.run(main(*sys.argv[1:]))
"""


class WorkKind(StrEnum):
    """What work may do. `HANGS`, and those like it, first write `BEGUN` to the pipe."""

    MAKES = "makes"
    """Writes `made.txt` to each of its places, and returns."""
    FAILS = "fails"
    """With a `ValueError` that says "The number is wrong."."""
    FAILS_FOR_GOOD = "fails for good"
    CRASHES = "crashes"
    """Ends its process without a word."""
    PRINTS = "prints"
    """`PRINTED` to its standard output, and to its standard error."""
    TELLS = "tells"
    """Progress, an event of cursor 7, and why it was told to pause, as progress."""
    HANGS = "hangs"
    """Until it is stopped."""
    IS_STUBBORN = "is stubborn"
    """And hangs, also when it is asked to stop."""
    DRAINS = "drains"
    """Hangs, and when it is asked to stop sends an event of cursor 8, and ends."""
    SPAWNS = "spawns"
    """Starts a process that holds the pipe, and hangs."""
    LEAVES_BEHIND = "leaves behind"
    """Starts a process that holds the pipe, and returns."""


@dataclass
class RecordingReporter:
    """A voice that remembers what it was told."""

    pause: str = ""
    said: list[Mapping[str, Any]] = field(default_factory=list)
    news: list[WorkEvent] = field(default_factory=list)
    is_timed: bool = True
    has_begun: bool = False

    def begins(self) -> None:
        self.has_begun = True

    def progress(self, said: Mapping[str, Any]) -> None:
        assert self.has_begun, "a runtime says that work begins before any of it runs"
        self.said.append(said)

    def timed(self, *, is_running: bool) -> None:
        self.is_timed = is_running

    async def emit(self, news: Sequence[WorkEvent]) -> str:
        self.news.extend(news)
        return self.pause

    async def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        raise WorkFailed(f"No credentials are minted for {', '.join(locations)}.")


class RuntimeBench(Protocol):
    """A runtime under trial."""

    runtime: Runtime
    """Started."""
    deeds: frozenset[WorkKind]
    maker: str
    """Where a runtime of the same kind is made: `module:function`, without arguments."""

    @abstractmethod
    def work(self, deed: WorkKind, *, pipe: Path, folder: Path) -> AttemptWork:
        """Work that does this. Its one output, `out`, and its log are below the folder."""


class PipeWatch:
    """The reading end of a named pipe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pipe"
        os.mkfifo(self.path)
        # Both ends are opened, so that opening does not wait; ours is closed as soon as somebody
        # else has it.
        self._reading = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open(self.path, os.O_WRONLY)
        self._read = ""

    async def begun(self, times: int = 1) -> None:
        """Until this many have begun."""
        await self._until(lambda more: self._read.count(BEGUN) >= times or not more)
        self._let_go()
        assert self._read == BEGUN * times

    async def gone(self) -> None:
        """Until nothing holds the pipe any more."""
        self._let_go()
        await self._until(lambda more: not more)

    def is_gone(self) -> bool:
        """Whether nothing holds the pipe any more, now."""
        self._let_go()
        try:
            return not os.read(self._reading, 1)
        except BlockingIOError:
            return False

    def close(self) -> None:
        self._let_go()
        os.close(self._reading)

    async def _until(self, is_enough: Callable[[bytes], bool]) -> None:
        """Read until it is enough. Not in a thread, which could not be given up."""
        loop = asyncio.get_running_loop()
        enough = asyncio.Event()

        def read() -> None:
            more = os.read(self._reading, 4096)
            self._read += more.decode()
            if is_enough(more):
                loop.remove_reader(self._reading)
                enough.set()

        loop.add_reader(self._reading, read)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await enough.wait()
        finally:
            loop.remove_reader(self._reading)

    def _let_go(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
        self._writing = -1


@dataclass(frozen=True)
class RuntimeTrial:
    """One check on one bench."""

    bench: RuntimeBench
    folder: Path
    watch: PipeWatch

    def work(
        self, deed: WorkKind, *, grace_seconds: float = _WAIT_SECONDS, name: str = ""
    ) -> AttemptWork:
        folder = self.folder / (name or deed.value.replace(" ", "-"))
        made = self.bench.work(deed, pipe=self.watch.path, folder=folder)
        return replace(made, grace_seconds=grace_seconds)

    async def run(self, deed: WorkKind, **more: Any) -> WorkResult:
        return await self.bench.runtime.run(self.work(deed, **more), RecordingReporter())


Check = Callable[[RuntimeTrial], Awaitable[None]]


async def what_was_made_comes_back(trial: RuntimeTrial) -> None:
    work = trial.work(WorkKind.MAKES)
    location = work.outputs["out"].location
    for attempt in (1, 2):
        finished = await trial.bench.runtime.run(
            replace(work, attempt=attempt), RecordingReporter()
        )
        made = ProducedOutput(output="out", location=location, partition_key="p", start=1, end=2)
        # What a manifest says of it is the runtime's own.
        assert tuple(replace(each, facts=None) for each in finished.made) == (made,)
        assert msgspec.json.decode(msgspec.json.encode(finished.metrics)) == finished.metrics
    assert (trial.folder / "makes" / "out" / "made.txt").read_text() == "made"


async def a_failure_says_why(trial: RuntimeTrial) -> None:
    failure = await _failure(trial, WorkKind.FAILS)
    assert failure.is_retried
    assert failure.message.startswith("ValueError: The number is wrong.")


async def a_failure_for_good_is_not_retried(trial: RuntimeTrial) -> None:
    assert not (await _failure(trial, WorkKind.FAILS_FOR_GOOD)).is_retried


async def a_crash_is_a_failure_and_costs_nobody_else_anything(trial: RuntimeTrial) -> None:
    failure = await _failure(trial, WorkKind.CRASHES)
    assert failure.is_retried
    assert "7" in failure.message
    assert (await trial.run(WorkKind.MAKES)).made


async def what_is_printed_is_in_the_log_of_its_task(trial: RuntimeTrial) -> None:
    work = replace(trial.work(WorkKind.PRINTS), log=str(trial.folder / "log"))
    (trial.folder / "log").write_text("before\n")
    await trial.bench.runtime.run(work, RecordingReporter())
    await trial.bench.runtime.run(replace(work, log=""), RecordingReporter())
    assert (trial.folder / "log").read_text() == f"before\n{PRINTED}{PRINTED}"


async def work_is_heard_and_answered(trial: RuntimeTrial) -> None:
    ear = RecordingReporter(pause="Too much is waiting.")
    await trial.bench.runtime.run(trial.work(WorkKind.TELLS), ear)
    assert ear.said == [{"part": 1, "of": 2}, {"paused": "Too much is waiting."}]
    assert [(each.output, each.cursor) for each in ear.news] == [("out", 7)]


async def several_run_at_once_and_cancelling_ends_each(trial: RuntimeTrial) -> None:
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(trial.run(WorkKind.HANGS, name=str(number)))
            for number in range(_AT_ONCE)
        ]
        await trial.watch.begun(_AT_ONCE)
        for each in running:
            each.cancel()
    assert all(each.cancelled() for each in running)
    # It is over when `run` is, and not a moment later.
    assert trial.watch.is_gone()
    assert (await trial.run(WorkKind.MAKES)).made


async def what_will_not_stop_is_stopped(trial: RuntimeTrial) -> None:
    await _cancelled(trial, WorkKind.IS_STUBBORN, grace_seconds=_SHORT_SECONDS)
    assert trial.watch.is_gone()


async def a_second_cancel_does_not_leave_anything(trial: RuntimeTrial) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(trial.run(WorkKind.IS_STUBBORN))
        await trial.watch.begun()
        running.cancel()
        # The grace would be long; whoever is in a hurry says so.
        await asyncio.to_thread(os.stat, trial.watch.path)
        running.cancel()
    assert running.cancelled()
    assert trial.watch.is_gone()


async def what_work_has_started_is_stopped_with_it(trial: RuntimeTrial) -> None:
    await _cancelled(trial, WorkKind.SPAWNS)
    await trial.watch.gone()


async def nothing_runs_on_after_work_has_returned(trial: RuntimeTrial) -> None:
    await trial.run(WorkKind.LEAVES_BEHIND)
    await trial.watch.gone()


async def a_source_is_heard_while_it_drains(trial: RuntimeTrial) -> None:
    ear = RecordingReporter()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(trial.bench.runtime.run(trial.work(WorkKind.DRAINS), ear))
        await trial.watch.begun()
        assert ear.has_begun
        running.cancel()
    assert running.cancelled()
    assert [(each.event_id, each.cursor) for each in ear.news] == [("last words", 8)]
    assert trial.watch.is_gone()


async def stopping_the_runtime_ends_what_runs(trial: RuntimeTrial) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_failure(trial, WorkKind.IS_STUBBORN))
        await trial.watch.begun()
        await trial.bench.runtime.stop()
        await running
    assert trial.watch.is_gone()


async def nothing_outlives_a_process_that_is_killed(trial: RuntimeTrial) -> None:
    for deed in (WorkKind.IS_STUBBORN, WorkKind.SPAWNS):
        if deed not in trial.bench.deeds:
            continue
        folder = trial.folder / f"killed-{deed.name}"
        folder.mkdir()
        watch = PipeWatch(folder)
        work = trial.bench.work(deed, pipe=watch.path, folder=folder)
        starting = (sys.executable, "-c", _STARTER, trial.bench.maker, msgspec.json.encode(work))
        process = await asyncio.create_subprocess_exec(*starting)
        try:
            await watch.begun()
        finally:
            process.kill()
            await process.wait()
        try:
            await watch.gone()
        finally:
            watch.close()


async def many_small_ones_in_a_row(trial: RuntimeTrial) -> None:
    for number in range(200):
        assert (await trial.run(WorkKind.MAKES, name=str(number % 10))).made


NEEDS: Final[Mapping[Check, WorkKind]] = {
    what_was_made_comes_back: WorkKind.MAKES,
    a_failure_says_why: WorkKind.FAILS,
    a_failure_for_good_is_not_retried: WorkKind.FAILS_FOR_GOOD,
    a_crash_is_a_failure_and_costs_nobody_else_anything: WorkKind.CRASHES,
    what_is_printed_is_in_the_log_of_its_task: WorkKind.PRINTS,
    work_is_heard_and_answered: WorkKind.TELLS,
    several_run_at_once_and_cancelling_ends_each: WorkKind.HANGS,
    what_will_not_stop_is_stopped: WorkKind.IS_STUBBORN,
    a_second_cancel_does_not_leave_anything: WorkKind.IS_STUBBORN,
    what_work_has_started_is_stopped_with_it: WorkKind.SPAWNS,
    nothing_runs_on_after_work_has_returned: WorkKind.LEAVES_BEHIND,
    a_source_is_heard_while_it_drains: WorkKind.DRAINS,
    stopping_the_runtime_ends_what_runs: WorkKind.IS_STUBBORN,
    nothing_outlives_a_process_that_is_killed: WorkKind.HANGS,
    many_small_ones_in_a_row: WorkKind.MAKES,
}
"""The deed without which a check has nothing to say."""

RUNTIME_CHECKS: Final[dict[str, Check]] = {getattr(check, "__name__", ""): check for check in NEEDS}


async def run_check(name: str, make: Callable[[], RuntimeBench], folder: Path) -> None:
    """Run a check in an empty folder. One that needs a deed that is not there is passed."""
    bench = make()
    if NEEDS[RUNTIME_CHECKS[name]] not in bench.deeds:
        return
    watch = PipeWatch(folder)
    try:
        async with bench.runtime:
            await RUNTIME_CHECKS[name](RuntimeTrial(bench, folder, watch))
    finally:
        watch.close()


def plain_work(operator: str, deed: WorkKind, *, pipe: Path, folder: Path) -> AttemptWork:
    """Work for a runtime that tells its work the config, and lets it write to a folder."""
    place = WorkOutput(dataset="out", uuid="0" * 8, location=(folder / "out").as_uri())
    return AttemptWork(
        task_id=1,
        attempt=1,
        job="trial",
        operator=operator,
        generation="first",
        config={"deed": deed.value, "pipe": str(pipe)},
        payload={"partition_key": "p", "start": 1, "end": 2},
        outputs={"out": place},
        log=str(folder / "log" / "1.log"),
    )


async def _failure(trial: RuntimeTrial, deed: WorkKind) -> WorkFailed:
    try:
        await trial.run(deed)
    except WorkFailed as failure:
        return failure
    raise AssertionError(f"work that {deed} must raise WorkFailed")


async def _cancelled(trial: RuntimeTrial, deed: WorkKind, **more: Any) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(trial.run(deed, **more))
        await trial.watch.begun()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert running.cancelled()


if not TYPE_CHECKING:
    # Tests of third parties' runtimes have imported these.
    __getattr__ = renamed(
        globals(),
        {
            "Bench": "RuntimeBench",
            "Deed": "WorkKind",
            "Ear": "RecordingReporter",
            "Trial": "RuntimeTrial",
            "Watch": "PipeWatch",
        },
    )
