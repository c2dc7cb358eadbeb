"""Work for tests of runtimes: users' modules in a folder, and tasks that call them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtimes.base import AttemptWork, ProducedOutput, WorkInput, WorkOutput
from penstock.runtimes.process import ChildSettings, ProcessRuntime
from penstock.testing.runtime_contract import RecordingReporter


@dataclass
class User:
    """Somebody with a folder of modules."""

    folder: Path

    def module(self, text: str, name: str = "mine") -> None:
        (self.folder / f"{name}.py").write_text(text)

    def process(self, **settings: Any) -> ProcessRuntime:
        return ProcessRuntime(ChildSettings(path=(str(self.folder),), **settings))

    def work(self, function: str = "mine:run", **more: Any) -> AttemptWork:
        return work(function, self.folder, **more)


def work(operator: str, folder: Path, **more: Any) -> AttemptWork:
    said: dict[str, Any] = {
        "task_id": 7,
        "attempt": 2,
        "job": "job",
        "operator": operator,
        "generation": "first",
        "payload": {"partition_key": "p", "start": 1, "end": 5},
        "inputs": {"raw": WorkInput(dataset="raw", generation="first")},
        "outputs": {"out": place("out", folder)},
        "log": str(folder / "log"),
    }
    return AttemptWork(**{**said, **more})


def place(name: str, folder: Path) -> WorkOutput:
    return WorkOutput(dataset=name, uuid=f"uuid-of-{name}", location=(folder / name).as_uri())


async def run(runtime: ProcessRuntime, task: AttemptWork) -> tuple[ProducedOutput, ...]:
    return (await runtime.run(task, RecordingReporter())).made
