"""How far an attempt is, and what it took, as people read it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.task import figures, progress_line, size


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            {"stages": 5, "stages_done": 3, "tasks": 1200, "tasks_done": 1100, "phase": "writing"},
            "writing: 3 of 5 stages, 1,100 of 1,200 tasks",
        ),
        ({"tasks": 4, "tasks_done": 0}, "0 of 4 tasks"),
        ({"tasks": 4, "tasks_done": 1, "phase": "a\x1b[2Jb"}, "a [2Jb: 1 of 4 tasks"),
        ({"rows": 5}, '{"rows": 5}'),
        ({"tasks": "many", "tasks_done": 1}, '{"tasks": "many", "tasks_done": 1}'),
    ],
)
def test_progress(said: dict[str, Any], shown: str) -> None:
    assert progress_line(said) == shown


def test_figures_have_their_units() -> None:
    metrics = {
        "rows_out": 1234567,
        "shuffle_read_bytes": 3 * 2**20,
        "executor_ms": 1500,
        "phases": {"read_seconds": 0.256, "write_seconds": 2},
        "share": 0.12345,
        "is_cached": True,
        "engine": "native\n",
        "nothing": None,
        "files": ["a"],
    }
    assert list(figures(metrics)) == [
        ("rows_out", "1,234,567"),
        ("shuffle_read_bytes", "3.0 MiB"),
        ("executor_ms", "1.50 s"),
        ("phases.read_seconds", "0.26 s"),
        ("phases.write_seconds", "2.00 s"),
        ("share", "0.123"),
        ("is_cached", "true"),
        ("engine", "native"),
        ("files", '["a"]'),
    ]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**60, "1,024.0 PiB"),
    ],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown
