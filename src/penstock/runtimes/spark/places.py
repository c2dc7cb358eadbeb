"""The folders of the hosts of one runtime, below its data folder. Imports no Spark.

    {data}/logs/spark-host-{name}.log       what a host, its JVM and Spark's workers say
    {data}/spark/hosts/{runtime}/{number}   what a host spills; removed after its end
    {data}/spark/hosts/{runtime}/held       locked as long as the runtime lives

`{data}/spark`, where fetched files are too, is closed to other users.

What a killed runtime has left behind is removed when the next one opens: nobody holds its lock. Of
logs the newest are kept.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.kernel.entropy import Entropy, new_id, system_entropy

LOGS_MAX: Final = 20
_HELD: Final = "held"


class HostPlaces:
    """Makes and removes folders. Its methods do not run at the same time."""

    def __init__(self, data: str, *, entropy: Entropy | None = None) -> None:
        self._data = Path(data).absolute()
        self._name = new_id(entropy or system_entropy(), characters=8)
        self._held: int | None = None
        self._hosts = 0

    @property
    def folder(self) -> Path:
        """That of this runtime."""
        return self._data / "spark" / "hosts" / self._name

    def open(self) -> None:
        """Make the folder of this runtime, and remove those of dead ones."""
        # Fetched files and what Spark spills are data, and no other user's to read.
        ours = self._data / "spark"
        ours.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours.chmod(0o700)
        hosts = self.folder.parent
        hosts.mkdir(exist_ok=True)
        gate = os.open(hosts, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One at a time: a folder that is made and not held yet looks like one of the dead.
            fcntl.flock(gate, fcntl.LOCK_EX)
            self.folder.mkdir(exist_ok=True)
            self._held = _held(self.folder)
            self._remove_dead(hosts)
        finally:
            os.close(gate)

    def _remove_dead(self, hosts: Path) -> None:
        for other in hosts.iterdir():
            if other == self.folder or not other.is_dir():
                continue
            with suppress(OSError):
                lock = _held(other)
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)

    def new_host(self) -> tuple[Path, Path]:
        """A folder and a log for another host."""
        self._hosts += 1
        folder = self.folder / str(self._hosts)
        folder.mkdir(parents=True, exist_ok=True)
        logs = self._data / "logs"
        logs.mkdir(mode=0o750, parents=True, exist_ok=True)
        kept = sorted(logs.glob("spark-host-*.log"), key=_changed_at, reverse=True)
        for old in kept[LOGS_MAX - 1 :]:
            old.unlink(missing_ok=True)
        return folder, logs / f"spark-host-{self._name}-{self._hosts}.log"

    def remove(self, folder: Path) -> None:
        """Remove the folder of a host that is gone."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all that is left of this runtime, but for logs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None


def temporary_data() -> str:
    """A data folder for a runtime that was given none."""
    return tempfile.mkdtemp(prefix="penstock-spark-")


def _held(folder: Path) -> int:
    """The lock of a folder; `OSError` if it is held."""
    opened = os.open(folder / _HELD, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        raise
    return opened


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
