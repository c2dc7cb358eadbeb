"""The deeds of the runtime contract in a host of the runtime `spark`, without Spark.

What the contract asks of is the host, its threads and their ends; that these also hold with a JVM
is tested in tests/integration/spark. Work runs in threads here, so a deed that hangs waits in a way
that can be interrupted there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.datasets.layout import path_of
from penstock.kernel.errors import DoNotRetry
from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkResult
from penstock.runtimes.spark.engine_protocol import JobGroup, RunReporter
from penstock.runtimes.spark.runtime import SparkRuntime
from penstock.runtimes.spark.settings import SparkSettings
from penstock.testing.runtime_contract import BEGUN, PRINTED, WorkKind

_never = threading.Event()


class NoSessions:
    """Sessions of nothing."""

    spark, java, jvm = "none", "", 0
    base: Any = None

    def fresh(self) -> Any:
        return object()

    def enter(self, session: Any, group: JobGroup) -> None:
        pass

    def leave(self, session: Any) -> None:
        pass

    def cancel(self, group: str) -> None:
        pass

    def progress(self, groups: Sequence[str]) -> Mapping[str, int]:
        return {}

    def metrics(self, groups: Sequence[str]) -> Mapping[str, Any]:
        return {}

    def why_dead(self) -> str:
        return ""

    def stop(self) -> None:
        pass


def open_sessions(settings: SparkSettings) -> NoSessions:
    return NoSessions()


class Engine:
    def __init__(self, settings: SparkSettings, session: Any) -> None:
        pass

    def run(self, session: Any, works: Sequence[AttemptWork], tell: RunReporter) -> None:
        for work in works:
            tell.end(work.task_id, _run(work))


def runtime() -> SparkRuntime:
    return SparkRuntime(SparkSettings(), engine="tests.contract.spark_standin:Engine")


def _run(work: AttemptWork) -> WorkResult:
    deed = WorkKind(work.config["deed"])
    if deed is WorkKind.FAILS:
        raise ValueError("The number is wrong.")
    if deed is WorkKind.FAILS_FOR_GOOD:
        raise DoNotRetry("The number will always be wrong.")
    if deed is WorkKind.CRASHES:
        os._exit(7)
    if deed is WorkKind.PRINTS:
        sys.stdout.write(PRINTED)
        sys.stderr.write(PRINTED)
    if deed in (WorkKind.HANGS, WorkKind.IS_STUBBORN):
        _hang(work, is_stubborn=deed is WorkKind.IS_STUBBORN)
    for place in work.outputs.values():
        folder = path_of(place.location)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "made.txt").write_text("made")
    told = {name: work.payload[name] for name in ("partition_key", "start", "end")}
    made = [
        ProducedOutput(output=name, location=at.location, **told)
        for name, at in work.outputs.items()
    ]
    return WorkResult(made=tuple(made))


def _hang(work: AttemptWork, *, is_stubborn: bool) -> None:
    with _held(work.config["pipe"]):
        while True:
            try:
                _never.wait(0.05)
            except BaseException:
                if not is_stubborn:
                    raise


@contextmanager
def _held(pipe: str) -> Iterator[None]:
    opened = os.open(pipe, os.O_WRONLY)
    try:
        os.write(opened, BEGUN.encode())
        yield
    finally:
        os.close(opened)
