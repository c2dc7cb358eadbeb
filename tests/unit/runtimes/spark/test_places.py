"""The folders of hosts of Spark."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.runtimes.spark import host_process
from penstock.runtimes.spark.host_process import HostFolders


def test_a_runtime_that_starts_is_not_taken_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = HostFolders(str(tmp_path)), HostFolders(str(tmp_path))
    other = threading.Thread(target=second.open)
    hold = host_process._held

    def held(folder: Path) -> int:
        if folder == first.folder and other.ident is None:
            # The other comes between the making of the folder and its lock, and looks around.
            other.start()
            other.join(0.2)
        return hold(folder)

    monkeypatch.setattr(host_process, "_held", held)
    first.open()
    other.join()
    assert first.folder.is_dir()
    assert second.folder.is_dir()
    first.close()
    second.close()
