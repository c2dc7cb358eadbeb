"""What docs/spark.md says to type, typed: a pipeline of two SQL files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.e2e.command import penstock
from tests.e2e.test_up import _up

PAGE = (ROOT / "docs" / "spark.md").read_text()
FILES = ("orders/2026-01-01.csv", "orders.sql", "totals.sql", "shop.yaml")


def _write_files(folder: Path) -> None:
    """The files of the page, each of which stands below the line that ends with its name."""
    for name in FILES:
        found = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
        assert found is not None, name
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(found[1])


@pytest.mark.timeout(300)
def test_the_pipeline_of_two_sql_files(tmp_path: Path) -> None:
    _write_files(tmp_path)
    blocks = [
        each.strip().splitlines() for each in re.findall(r"```\n(penstock .*?)```", PAGE, re.DOTALL)
    ]
    (checked, begun), typed = blocks[0], blocks[1]
    assert begun == "penstock up shop.yaml"
    done = penstock(*_words(checked, tmp_path))
    assert done.returncode == 0, done.stderr
    with _up(tmp_path, str(tmp_path / "shop.yaml")) as up:
        said = [up.ask(*_words(line, tmp_path)) for line in typed]
        assert "north" in said[-1]
        assert "19.75" in said[-1]
        # What was right stays when what comes is wrong, and what comes says why.
        day = tmp_path / "orders" / "2026-01-01.csv"
        day.write_text(day.read_text() + "west,-1\n")
        for line in typed[:2]:
            up.ask(*_words(line, tmp_path))
        dead = up.ask("task", "list", "--status", "dead", "--json")
        assert "amounts are above zero" in dead
        assert "19.75" in up.ask(*_words(typed[-1], tmp_path))


def _words(line: str, folder: Path) -> list[str]:
    """A line of the page as words, with its file where it is now."""
    words = shlex.split(line, comments=True)[1:]
    return [str(folder / each) if each == "shop.yaml" else each for each in words]
