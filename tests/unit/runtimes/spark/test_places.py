"""The folders of hosts of Spark."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.runtimes.spark import places
from penstock.runtimes.spark.places import HostPlaces


def test_a_runtime_that_starts_is_not_taken_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = HostPlaces(str(tmp_path)), HostPlaces(str(tmp_path))
    other = threading.Thread(target=second.open)
    hold = places._held

    def held(folder: Path) -> int:
        if folder == first.folder and other.ident is None:
            # The other comes between the making of the folder and its lock, and looks around.
            other.start()
            other.join(0.2)
        return hold(folder)

    monkeypatch.setattr(places, "_held", held)
    first.open()
    other.join()
    assert first.folder.is_dir()
    assert second.folder.is_dir()
    first.close()
    second.close()
