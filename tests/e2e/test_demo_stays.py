"""`penstock demo` on a terminal: it says where to look, and a task is mended and replayed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_terminal import Terminal

CTRL_C = "\x03"


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "TERM": "xterm", "TMPDIR": str(folder)}


def _replay(url: str, task: int) -> None:
    assert httpx.post(f"{url}/v1/tasks/replay", json={"tasks": [task]}).status_code == 200


@pytest.mark.timeout(300)
def test_a_newcomer_finds_out_why_and_replays(tmp_path: Path) -> None:
    with Terminal(
        "demo", "--days", "1", environment=_environment(tmp_path), columns=100
    ) as terminal:
        terminal.until("Watch it at ")
        terminal.until("Find out why at ")
        terminal.until("Ctrl-C ends.")
        # Failures is not of the run.
        assert "were published exactly once" in terminal.shown
        found = re.search(r"Find out why at (http://127\.0\.0\.1:\d+)/tasks/(\d+)", terminal.shown)
        assert found is not None
        url, task = found[1], int(found[2])
        assert f"Watch it at {url}" in terminal.shown
        page = httpx.get(f"{url}/tasks/{task}").text
        assert "The remarks of January 2013 were not delivered: there is no file" in page
        assert f'action="/tasks/{task}/replay"' in page
        assert f'href="/tasks/{task}"' in httpx.get(url).text
        _replay(url, task)
        terminal.until("the file is still missing. Enter delivers it.")
        terminal.types("\r")
        terminal.until("The remarks are delivered")
        _replay(url, task)
        terminal.until(f"Task {task} is completed, by attempt 3")
        terminal.types(CTRL_C)
        assert terminal.end() == 0, terminal.shown
        assert "Stopping ..." in terminal.shown
        assert "Go on:" in terminal.shown
    assert not list(tmp_path.glob("penstock-demo-*"))
