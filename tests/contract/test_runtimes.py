"""The runtime contract, over every runtime that runs something in a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.runtimes.base import Runtime, Work
from penstock.runtimes.function import Function
from penstock.runtimes.process import Process
from penstock.testing.runtime_contract import (
    NEEDS,
    RUNTIME_CHECKS,
    Bench,
    Deed,
    plain_work,
    run_check,
)
from tests.contract import spark_standin


@dataclass
class ChildBench:
    """A runtime whose work is Python in a child process."""

    runtime: Runtime
    maker: str
    operator: str
    deeds: frozenset[Deed] = field(default=frozenset(Deed))

    def work(self, deed: Deed, *, pipe: Path, folder: Path) -> Work:
        return plain_work(self.operator, deed, pipe=pipe, folder=folder)


def process() -> Bench:
    return ChildBench(
        Process(), "penstock.runtimes.process:Process", "penstock.testing.runtime_deeds:work"
    )


def function() -> Bench:
    return ChildBench(
        Function(),
        "penstock.runtimes.function:Function",
        "penstock.testing.runtime_deeds.handle",
        # A handler has no line to the dispatcher.
        frozenset(Deed) - {Deed.TELLS, Deed.DRAINS},
    )


def spark() -> Bench:
    return ChildBench(
        spark_standin.runtime(),
        "tests.contract.spark_standin:runtime",
        "spark.python",
        # It sends no events; and what a transform starts ends with the host, not with the task.
        frozenset(Deed) - {Deed.TELLS, Deed.DRAINS, Deed.SPAWNS, Deed.LEAVES_BEHIND},
    )


RUNTIMES: dict[str, Callable[[], Bench]] = {
    "process": process,
    "lambda": function,
    "spark": spark,
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
