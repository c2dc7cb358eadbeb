"""What docs/getting-started.md says to save and to type, saved and typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.reader import a_reader, to_type

PAGE = "docs/getting-started.md"


def test_the_queue_alone(tmp_path: Path) -> None:
    with a_reader(tmp_path) as reader:
        blocks = to_type(reader, PAGE, "Five minutes: the queue alone")
        reader.type(next(blocks))
        assert "submitted" in reader.type(next(blocks))
        stats = reader.until(next(blocks), "succeeded")
        assert "count" in stats
        many = next(blocks)
        assert len(reader.type(many).split()) == 5
        assert next(blocks, None) is None


@pytest.mark.timeout(600)
def test_a_whole_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    with a_reader(tmp_path) as reader:
        blocks = to_type(reader, PAGE, "Five minutes: a pipeline")
        reader.type(next(blocks))
        reader.hears("Penstock is up")
        shown = reader.type(next(blocks))
        assert "12.5" in shown
        assert "-1" not in shown.rpartition("shop")[2]
        assert "19.75" in reader.type(next(blocks))
        assert "is new" in reader.type(next(blocks))
        assert next(blocks, None) is None
