"""What docs/deployment.md says to type for an installation of separate processes, typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.e2e.documented.tables import STAYS
from tests.e2e.reader import a_reader, to_type


@pytest.mark.timeout(600)
def test_separate_processes_on_one_machine(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples)
    with a_reader(examples) as reader:
        blocks = to_type(reader, "docs/deployment.md", "Separate processes on one machine")
        for part in ("dispatcher", "worker", "source cron", "source webhook"):
            reader.type(next(blocks))
            reader.hears(STAYS[part])
        assert "2026-01-01T00" in reader.type(next(blocks))
        assert next(blocks, None) is None
    # Each has ended well when it was told to.
    assert [each.returncode for each in reader.staying] == [0, 0, 0, 0]
