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
from typing import Any, Final, Protocol

import msgspec

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import Finished, Made, News, Place, Runtime, Work
from penstock.runtimes.handed import TaskCredentials

BEGUN: Final = "begun\n"
PRINTED: Final = "printed\n"
_AT_ONCE: Final = 3
_WAIT_SECONDS: Final = 30.0
_SHORT_SECONDS: Final = 0.2
_STARTER: Final = """
import asyncio, importlib, sys
import msgspec
from penstock.runtimes.base import Work
from penstock.testing.runtime_contract import Ear

async def main(maker, work):
    module, _, name = maker.partition(":")
    async with getattr(importlib.import_module(module), name)() as runtime:
        await runtime.run(msgspec.json.decode(work, type=Work), Ear())

asyncio.run(main(*sys.argv[1:]))
"""


class Deed(StrEnum):
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
class Ear:
    """A voice that remembers what it was told."""

    pause: str = ""
    said: list[Mapping[str, Any]] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    is_timed: bool = True

    def progress(self, said: Mapping[str, Any]) -> None:
        self.said.append(said)

    def timed(self, *, is_running: bool) -> None:
        self.is_timed = is_running

    async def emit(self, news: Sequence[News]) -> str:
        self.news.extend(news)
        return self.pause

    async def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        raise WorkFailed(f"Nobody mints credentials for {', '.join(locations)}.")


class Bench(Protocol):
    """A runtime under trial."""

    runtime: Runtime
    """Started."""
    deeds: frozenset[Deed]
    maker: str
    """Where a runtime of the same kind is made: `module:function`, without arguments."""

    @abstractmethod
    def work(self, deed: Deed, *, pipe: Path, folder: Path) -> Work:
        """Work that does this. Its one output, `out`, and its log are below the folder."""


class Watch:
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
class Trial:
    """One check on one bench."""

    bench: Bench
    folder: Path
    watch: Watch

    def work(self, deed: Deed, *, grace_seconds: float = _WAIT_SECONDS, name: str = "") -> Work:
        folder = self.folder / (name or deed.value.replace(" ", "-"))
        made = self.bench.work(deed, pipe=self.watch.path, folder=folder)
        return replace(made, grace_seconds=grace_seconds)

    async def run(self, deed: Deed, **more: Any) -> Finished:
        return await self.bench.runtime.run(self.work(deed, **more), Ear())


Check = Callable[[Trial], Awaitable[None]]


async def what_was_made_comes_back(trial: Trial) -> None:
    work = trial.work(Deed.MAKES)
    location = work.outputs["out"].location
    for attempt in (1, 2):
        finished = await trial.bench.runtime.run(replace(work, attempt=attempt), Ear())
        made = Made(output="out", location=location, partition_key="p", start=1, end=2)
        # What a manifest says of it is the runtime's own.
        assert tuple(replace(each, facts=None) for each in finished.made) == (made,)
        assert msgspec.json.decode(msgspec.json.encode(finished.metrics)) == finished.metrics
    assert (trial.folder / "makes" / "out" / "made.txt").read_text() == "made"


async def a_failure_says_why(trial: Trial) -> None:
    failure = await _failure(trial, Deed.FAILS)
    assert failure.is_retried
    assert failure.message.startswith("ValueError: The number is wrong.")


async def a_failure_for_good_is_not_retried(trial: Trial) -> None:
    assert not (await _failure(trial, Deed.FAILS_FOR_GOOD)).is_retried


async def a_crash_is_a_failure_and_costs_nobody_else_anything(trial: Trial) -> None:
    failure = await _failure(trial, Deed.CRASHES)
    assert failure.is_retried
    assert "7" in failure.message
    assert (await trial.run(Deed.MAKES)).made


async def what_is_printed_is_in_the_log_of_its_task(trial: Trial) -> None:
    work = replace(trial.work(Deed.PRINTS), log=str(trial.folder / "log"))
    (trial.folder / "log").write_text("before\n")
    await trial.bench.runtime.run(work, Ear())
    await trial.bench.runtime.run(replace(work, log=""), Ear())
    assert (trial.folder / "log").read_text() == f"before\n{PRINTED}{PRINTED}"


async def work_is_heard_and_answered(trial: Trial) -> None:
    ear = Ear(pause="Too much is waiting.")
    await trial.bench.runtime.run(trial.work(Deed.TELLS), ear)
    assert ear.said == [{"part": 1, "of": 2}, {"paused": "Too much is waiting."}]
    assert [(each.output, each.cursor) for each in ear.news] == [("out", 7)]


async def several_run_at_once_and_cancelling_ends_each(trial: Trial) -> None:
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(trial.run(Deed.HANGS, name=str(number))) for number in range(_AT_ONCE)
        ]
        await trial.watch.begun(_AT_ONCE)
        for each in running:
            each.cancel()
    assert all(each.cancelled() for each in running)
    # It is over when `run` is, and not a moment later.
    assert trial.watch.is_gone()
    assert (await trial.run(Deed.MAKES)).made


async def what_will_not_stop_is_stopped(trial: Trial) -> None:
    await _cancelled(trial, Deed.IS_STUBBORN, grace_seconds=_SHORT_SECONDS)
    assert trial.watch.is_gone()


async def a_second_cancel_does_not_leave_anything(trial: Trial) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(trial.run(Deed.IS_STUBBORN))
        await trial.watch.begun()
        running.cancel()
        # The grace would be long; whoever is in a hurry says so.
        await asyncio.to_thread(os.stat, trial.watch.path)
        running.cancel()
    assert running.cancelled()
    assert trial.watch.is_gone()


async def what_work_has_started_is_stopped_with_it(trial: Trial) -> None:
    await _cancelled(trial, Deed.SPAWNS)
    await trial.watch.gone()


async def nothing_runs_on_after_work_has_returned(trial: Trial) -> None:
    await trial.run(Deed.LEAVES_BEHIND)
    await trial.watch.gone()


async def a_source_is_heard_while_it_drains(trial: Trial) -> None:
    ear = Ear()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(trial.bench.runtime.run(trial.work(Deed.DRAINS), ear))
        await trial.watch.begun()
        running.cancel()
    assert running.cancelled()
    assert [(each.event_id, each.cursor) for each in ear.news] == [("last words", 8)]
    assert trial.watch.is_gone()


async def stopping_the_runtime_ends_what_runs(trial: Trial) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_failure(trial, Deed.IS_STUBBORN))
        await trial.watch.begun()
        await trial.bench.runtime.stop()
        await running
    assert trial.watch.is_gone()


async def nothing_outlives_a_process_that_is_killed(trial: Trial) -> None:
    for deed in (Deed.IS_STUBBORN, Deed.SPAWNS):
        if deed not in trial.bench.deeds:
            continue
        folder = trial.folder / f"killed-{deed.name}"
        folder.mkdir()
        watch = Watch(folder)
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


async def many_small_ones_in_a_row(trial: Trial) -> None:
    for number in range(200):
        assert (await trial.run(Deed.MAKES, name=str(number % 10))).made


NEEDS: Final[Mapping[Check, Deed]] = {
    what_was_made_comes_back: Deed.MAKES,
    a_failure_says_why: Deed.FAILS,
    a_failure_for_good_is_not_retried: Deed.FAILS_FOR_GOOD,
    a_crash_is_a_failure_and_costs_nobody_else_anything: Deed.CRASHES,
    what_is_printed_is_in_the_log_of_its_task: Deed.PRINTS,
    work_is_heard_and_answered: Deed.TELLS,
    several_run_at_once_and_cancelling_ends_each: Deed.HANGS,
    what_will_not_stop_is_stopped: Deed.IS_STUBBORN,
    a_second_cancel_does_not_leave_anything: Deed.IS_STUBBORN,
    what_work_has_started_is_stopped_with_it: Deed.SPAWNS,
    nothing_runs_on_after_work_has_returned: Deed.LEAVES_BEHIND,
    a_source_is_heard_while_it_drains: Deed.DRAINS,
    stopping_the_runtime_ends_what_runs: Deed.IS_STUBBORN,
    nothing_outlives_a_process_that_is_killed: Deed.HANGS,
    many_small_ones_in_a_row: Deed.MAKES,
}
"""The deed without which a check has nothing to say."""

RUNTIME_CHECKS: Final[dict[str, Check]] = {getattr(check, "__name__", ""): check for check in NEEDS}


async def run_check(name: str, make: Callable[[], Bench], folder: Path) -> None:
    """Run a check in an empty folder. One that needs a deed that is not there is passed."""
    bench = make()
    if NEEDS[RUNTIME_CHECKS[name]] not in bench.deeds:
        return
    watch = Watch(folder)
    try:
        async with bench.runtime:
            await RUNTIME_CHECKS[name](Trial(bench, folder, watch))
    finally:
        watch.close()


def plain_work(operator: str, deed: Deed, *, pipe: Path, folder: Path) -> Work:
    """Work for a runtime that tells its work the config, and lets it write to a folder."""
    place = Place(dataset="out", uuid="0" * 8, location=(folder / "out").as_uri())
    return Work(
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


async def _failure(trial: Trial, deed: Deed) -> WorkFailed:
    try:
        await trial.run(deed)
    except WorkFailed as failure:
        return failure
    raise AssertionError(f"work that {deed} must raise WorkFailed")


async def _cancelled(trial: Trial, deed: Deed, **more: Any) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(trial.run(deed, **more))
        await trial.watch.begun()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert running.cancelled()
