"""The command line, imported once: each line runs in a process forked from the one that has it.

Such a process has the words, the folder, the environment and the files of its line, enters where
the installed command does, and ends by itself. It is spared the second that imports take.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.cli import main
from penstock.cli.verbs import PLACES
from tests.architecture.source import ROOT
from tests.e2e.command import PENSTOCK
from tests.e2e.reader import SECONDS_MAX


@dataclass
class Forked:
    """The process that has imported the command line."""

    process: subprocess.Popen[str]
    folder: Path

    def run(
        self, words: Sequence[str], *, folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run `penstock` with these words to its end."""
        out, errors = self.folder / "out", self.folder / "errors"
        files = {"out": str(out), "errors": str(errors)}
        asked = {"words": words, "folder": str(folder), "environment": dict(environment), **files}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        code = self.process.stdout.readline()
        assert code, f"It has ended with {self.process.wait()}."
        return subprocess.CompletedProcess(words, int(code), out.read_text(), errors.read_text())


@contextmanager
def forking(folder: Path) -> Iterator[Forked]:
    """Have the command line imported, until the block ends."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", __name__]
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Forked(process, folder)
        finally:
            process.kill()


def _become(told: Mapping[str, Any]) -> None:
    """Be the process of a line."""
    writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    files = ((os.devnull, os.O_RDONLY), (told["out"], writing), (told["errors"], writing))
    for number, (place, flags) in enumerate(files):
        os.dup2(os.open(place, flags), number)
    # What hangs is ended by it, and says so by its exit code.
    signal.alarm(round(SECONDS_MAX))
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = [str(PENSTOCK), *told["words"]]
    sys.path[0] = str(PENSTOCK.parent)


def _serve() -> None:
    for module in (*(place.module for place in PLACES.values()), "httpx", "penstock.queue"):
        import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
            main()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
