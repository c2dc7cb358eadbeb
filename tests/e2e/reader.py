"""Somebody who does what a page says: saves its files, types its blocks, and waits.

A block of another language than a shell's, below a sentence that ends with the name of a file, is
that file; below one that says "at the end of" it is added to it. A block of commands is typed, by
bash, and its last command runs on in the background where it is one that stays. Ports and folders
are the test's own: the first by variables, so that the commands are those of the page.
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

from penstock.kernel.clock import SystemClock
from penstock.kernel.ports import free_port
from tests.architecture.source import ROOT
from tests.e2e.command import PENSTOCK
from tests.pages import Block, blocks

CLOCK = SystemClock()
PAUSE = threading.Event()
SECONDS_MAX = 240.0
PORTS = ("PORT", "INTERNAL_PORT", "WEBHOOK_PORT")
_STAYING = re.compile(r"penstock (up|queue worker|dispatcher|worker|source)\b")
_ITS_FOLDER = re.compile(r"/tmp/(bucket|penstock-data)\b")
_NAME = re.compile(r"`([\w./-]+\.\w+)`:$")


def section(page: str, title: str) -> list[Block]:
    """The blocks of one section of a page."""
    found = [each for each in blocks((ROOT / page).read_text()) if each.section == title]
    assert found, f"{page} has no blocks in a section {title!r}"
    return found


@dataclass
class Reader:
    """Somebody who does what a page says, in a folder."""

    folder: Path
    environment: dict[str, str]
    staying: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """What the one that was started last has said."""
        return self.folder / f"staying-{len(self.staying)}.log"

    def save(self, told: str, name: str, text: str) -> None:
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        before = place.read_text() if "at the end of" in told else ""
        place.write_text(before + self._own(text))

    def type(self, block: str) -> str:
        """Type a block; what it printed, or nothing of one that stays."""
        script = self._own(block)
        *lines, last = script.strip().splitlines()
        is_staying = _STAYING.match(last) is not None
        said = self._run("\n".join(lines) if is_staying else script)
        for assigned in re.findall(r"^export (.*)$", script, re.MULTILINE):
            self.environment |= dict(each.split("=", 1) for each in assigned.split())
        if is_staying:
            self._begin(last)
            return ""
        return said

    def until(self, block: str, said: str) -> str:
        """Type a block again and again until it prints something."""
        deadline = CLOCK.monotonic() + SECONDS_MAX
        while said not in (found := self.type(block)):
            assert CLOCK.monotonic() < deadline, f"{found}\n{self.logged()}"
            PAUSE.wait(0.2)
        return found

    def logged(self) -> str:
        return self.log.read_text()

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
        with (self.folder / f"staying-{len(self.staying) + 1}.log").open("wb") as log:
            words = ["bash", "-c", f"exec {line}"]
            self.staying.append(
                subprocess.Popen(
                    words, cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            )

    def _own(self, text: str) -> str:
        """With folders of the reader's own."""
        return _ITS_FOLDER.sub(rf"{self.folder}/\1", text)


@contextmanager
def a_reader(folder: Path) -> Iterator[Reader]:
    """Somebody with ports of their own; what they have started is stopped after the block."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    ports = {f"PENSTOCK_{name}": str(free_port()) for name in PORTS}
    path = f"{PENSTOCK.parent}{os.pathsep}{os.environ['PATH']}"
    reader = Reader(folder, {**own, **ports, "PATH": path})
    try:
        yield reader
    finally:
        # The last first: what was started before may be what it needs.
        for each in reversed(reader.staying):
            each.terminate()
            each.wait(SECONDS_MAX)


def to_type(reader: Reader, page: str, title: str) -> Iterator[str]:
    """Save the files of a section on the way, and give the blocks to type."""
    for block in section(page, title):
        named = _NAME.search(block.told)
        if block.is_typed:
            yield block.text
        elif block.language:
            assert named is not None, f"a block of {block.language} has no name: {block.told}"
            reader.save(block.told, named[1], block.text)
