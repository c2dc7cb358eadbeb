"""What docs/getting-started.md says to save and to type, saved and typed.

A block with a language below a sentence that ends with the name of a file is that file; below one
that says "at the end of" it is added to it. A block of `sh` is typed, by bash, and its last command
runs on in the background where it is one that stays. Ports and the folder of the queue are the
test's own: the first by variables, so that the commands are those of the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port
from tests.architecture.source import ROOT
from tests.e2e.command import PENSTOCK

PAGE = (ROOT / "docs" / "getting-started.md").read_text()
CLOCK = SystemClock()
PAUSE = threading.Event()
SECONDS_MAX = 120.0
_STAYING = ("penstock up", "penstock queue worker")
_BLOCK = re.compile(r"([^\n]+)\n\n```(\w+)\n(.*?)```", re.DOTALL)
_NAME = re.compile(r"`([\w./-]+\.\w+)`:$")


def _section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


@dataclass
class Reader:
    """Somebody who does what a page says, in a folder."""

    folder: Path
    environment: dict[str, str]
    staying: list[subprocess.Popen[bytes]] = field(default_factory=list)
    log: str = "staying.log"

    def save(self, told: str, name: str, text: str) -> None:
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        before = place.read_text() if "at the end of" in told else ""
        place.write_text(before + text.replace("/tmp/bucket", f"{self.folder}/bucket"))

    def type(self, block: str) -> str:
        """Type a block; what it printed, or nothing of one that stays."""
        script = block.replace("/tmp/bucket", f"{self.folder}/bucket")
        *lines, last = script.strip().splitlines()
        if last.startswith(_STAYING):
            if lines:
                self._run("\n".join(lines))
            self._begin(last)
            return ""
        said = self._run(script)
        for assigned in re.findall(r"^export (.*)$", script, re.MULTILINE):
            self.environment |= dict(each.split("=", 1) for each in assigned.split())
        return said

    def until(self, block: str, said: str) -> str:
        """Type a block again and again until it prints something."""
        deadline = CLOCK.monotonic() + SECONDS_MAX
        while said not in (found := self.type(block)):
            assert CLOCK.monotonic() < deadline, f"{found}\n{self.logged()}"
            PAUSE.wait(0.2)
        return found

    def logged(self) -> str:
        return (self.folder / self.log).read_text()

    def hears(self, said: str) -> None:
        deadline = CLOCK.monotonic() + SECONDS_MAX
        while said not in self.logged():
            assert self.staying[-1].poll() is None, self.logged()
            assert CLOCK.monotonic() < deadline, self.logged()
            PAUSE.wait(0.1)

    def _run(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _begin(self, line: str) -> None:
        with (self.folder / self.log).open("wb") as log:
            words = ["bash", "-c", f"exec {line}"]
            self.staying.append(
                subprocess.Popen(
                    words, cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            )


@contextmanager
def _reader(folder: Path) -> Iterator[Reader]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    ports = {
        f"PENSTOCK_{name}": str(free_port()) for name in ("PORT", "INTERNAL_PORT", "WEBHOOK_PORT")
    }
    path = f"{PENSTOCK.parent}{os.pathsep}{os.environ['PATH']}"
    reader = Reader(folder, {**own, **ports, "PATH": path})
    try:
        yield reader
    finally:
        for each in reader.staying:
            each.terminate()
        for each in reader.staying:
            each.wait(60)


def _typed(reader: Reader, section: str) -> Iterator[str]:
    """Save the files of a section on the way, and give the blocks to type."""
    for told, language, text in _BLOCK.findall(section):
        named = _NAME.search(told)
        if language == "sh":
            yield text
        else:
            assert named is not None, f"a block of {language} has no name: {told}"
            reader.save(told, named[1], text)


def test_the_queue_alone(tmp_path: Path) -> None:
    with _reader(tmp_path) as reader:
        blocks = _typed(reader, _section("Five minutes: the queue alone"))
        reader.type(next(blocks))
        assert "submitted" in reader.type(next(blocks))
        stats = reader.until(next(blocks), "succeeded")
        assert "count" in stats
        many = next(blocks)
        assert len(reader.type(many).split()) == 5
        assert next(blocks, None) is None


@pytest.mark.timeout(300)
def test_a_whole_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    with _reader(tmp_path) as reader:
        blocks = _typed(reader, _section("Five minutes: a pipeline"))
        reader.type(next(blocks))
        reader.hears("Penstock is up")
        shown = reader.type(next(blocks))
        assert "12.5" in shown
        assert "-1" not in shown.rpartition("shop")[2]
        assert "19.75" in reader.type(next(blocks))
        assert "2026-01-02" in next(blocks)
        assert next(blocks, None) is None
