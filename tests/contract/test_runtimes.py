"""The runtime contract, over every runtime that runs something in a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, Runtime
from penstock.runtimes.function import FunctionSettings, LambdaRuntime
from penstock.runtimes.process import ChildSettings, ProcessRuntime
from penstock.runtimes.thread import ThreadRuntime, ThreadSettings
from penstock.testing.runtime_contract import (
    NEEDS,
    RUNTIME_CHECKS,
    RecordingReporter,
    RuntimeBench,
    WorkKind,
    plain_work,
    run_check,
)
from tests.contract import spark_standin
from tests.unit.runtimes.benches import work


@dataclass
class ChildBench:
    """A runtime whose work is Python in a child process."""

    runtime: Runtime
    maker: str
    operator: str
    deeds: frozenset[WorkKind] = field(default=frozenset(WorkKind))

    def work(self, deed: WorkKind, *, pipe: Path, folder: Path) -> AttemptWork:
        return plain_work(self.operator, deed, pipe=pipe, folder=folder)


def process() -> RuntimeBench:
    return ChildBench(
        ProcessRuntime(),
        "penstock.runtimes.process:ProcessRuntime",
        "penstock.testing.runtime_work:work",
    )


def function() -> RuntimeBench:
    return ChildBench(
        LambdaRuntime(),
        "penstock.runtimes.function:LambdaRuntime",
        "penstock.testing.runtime_work.handle",
        # A handler has no line to the dispatcher.
        frozenset(WorkKind) - {WorkKind.TELLS, WorkKind.DRAINS},
    )


def _thread(function: str) -> RuntimeBench:
    return ChildBench(
        ThreadRuntime(),
        "penstock.runtimes.thread:ThreadRuntime",
        f"penstock.testing.runtime_work:{function}",
        # What a function starts, and leaves, ends with the process that it shares.
        frozenset(WorkKind) - {WorkKind.SPAWNS, WorkKind.LEAVES_BEHIND},
    )


def thread() -> RuntimeBench:
    return _thread("share")


def thread_async() -> RuntimeBench:
    return _thread("share_async")


def spark() -> RuntimeBench:
    return ChildBench(
        spark_standin.runtime(),
        "tests.contract.spark_standin:runtime",
        "spark.python",
        # It sends no events; and what a transform starts ends with the host, not with the task.
        frozenset(WorkKind)
        - {WorkKind.TELLS, WorkKind.DRAINS, WorkKind.SPAWNS, WorkKind.LEAVES_BEHIND},
    )


RUNTIMES: dict[str, Callable[[], RuntimeBench]] = {
    "process": process,
    "lambda": function,
    "spark": spark,
    "thread": thread,
    "thread-async": thread_async,
}


@pytest.mark.parametrize(
    ("runtime", "name"),
    [
        (runtime, name)
        for runtime, make in RUNTIMES.items()
        for name, check in RUNTIME_CHECKS.items()
        if NEEDS[check] in make().deeds
    ],
)
def test_contract(runtime: str, name: str, tmp_path: Path) -> None:
    asyncio.run(run_check(name, RUNTIMES[runtime], tmp_path))


class _Noting(RecordingReporter):
    """Notes that the work has begun where its module looks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def begins(self) -> None:
        super().begins()
        (self._folder / "begun").touch()


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (lambda path: ProcessRuntime(ChildSettings(path=path)), "crashing:run"),
        (lambda path: ProcessRuntime(ChildSettings(path=path, templates_max=0)), "crashing:run"),
        (lambda path: LambdaRuntime(FunctionSettings(path=path)), "crashing.run"),
        (lambda path: ThreadRuntime(ThreadSettings(path=path)), "crashing:run"),
    ],
    ids=["process", "process-spawned", "lambda", "thread"],
)
def test_work_has_begun_before_its_module_is_imported(
    make: Callable[[tuple[str, ...]], Runtime], operator: str, tmp_path: Path
) -> None:
    # Or what kills its process, and the worker's, while it is imported is tried for free for ever.
    (tmp_path / "crashing.py").write_text(
        "import os, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "with (here / 'imported').open('a') as file:\n"
        "    file.write('begun ' if (here / 'begun').exists() else 'not begun ')\n"
        "os._exit(7)\n"
    )

    async def main() -> None:
        async with make((str(tmp_path),)) as runtime:
            with pytest.raises(WorkFailed, match="7"):
                await runtime.run(work(operator, tmp_path), _Noting(tmp_path))

    asyncio.run(main())
    assert set((tmp_path / "imported").read_text().split(" ")[:-1]) == {"begun"}
