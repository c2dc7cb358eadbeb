"""What docs/spark.md says to type, typed: a pipeline of two SQL files, and who else reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.reader import a_reader, section, to_type

PAGE = "docs/spark.md"


@pytest.mark.timeout(600)
def test_the_pipeline_of_two_sql_files(tmp_path: Path) -> None:
    with a_reader(tmp_path) as reader:
        blocks = to_type(reader, PAGE, "Ten minutes: a pipeline of two SQL files")
        reader.type(next(blocks))
        reader.hears("Penstock is up")
        typed = next(blocks)
        said = reader.type(typed)
        assert "north" in said
        assert "19.75" in said
        assert next(blocks, None) is None
        # What was right stays when what comes is wrong, and what comes says why.
        day = tmp_path / "orders" / "2026-01-01.csv"
        day.write_text(day.read_text() + "west,-1\n")
        assert "19.75" in reader.type(typed)
        assert "amounts are above zero" in reader.type("penstock task list --status dead --json")
        kept = section(PAGE, "What is written")
        (to_read,) = [each.text for each in kept if each.is_typed]
        assert "all as they were written" in reader.type(to_read)
        (program,) = [each.text for each in kept if each.language == "python"]
        read = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert read.returncode == 0, read.stderr
        assert "19.75" in read.stdout
