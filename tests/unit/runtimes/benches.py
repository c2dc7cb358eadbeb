"""Work for tests of runtimes: users' modules in a folder, and tasks that call them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtimes.base import Given, Made, Place, Work
from penstock.runtimes.child_settings import ChildSettings
from penstock.runtimes.process import Process
from penstock.testing.runtime_contract import Ear


@dataclass
class User:
    """Somebody with a folder of modules."""

    folder: Path

    def module(self, text: str, name: str = "mine") -> None:
        (self.folder / f"{name}.py").write_text(text)

    def process(self, **settings: Any) -> Process:
        return Process(ChildSettings(path=(str(self.folder),), **settings))

    def work(self, function: str = "mine:run", **more: Any) -> Work:
        return work(function, self.folder, **more)


def work(operator: str, folder: Path, **more: Any) -> Work:
    said: dict[str, Any] = {
        "task_id": 7,
        "attempt": 2,
        "job": "job",
        "operator": operator,
        "generation": "first",
        "payload": {"partition_key": "p", "start": 1, "end": 5},
        "inputs": {"raw": Given(dataset="raw", generation="first")},
        "outputs": {"out": place("out", folder)},
        "log": str(folder / "log"),
    }
    return Work(**{**said, **more})


def place(name: str, folder: Path) -> Place:
    return Place(dataset=name, uuid=f"uuid-of-{name}", location=(folder / name).as_uri())


async def run(runtime: Process, task: Work) -> tuple[Made, ...]:
    return (await runtime.run(task, Ear())).made
