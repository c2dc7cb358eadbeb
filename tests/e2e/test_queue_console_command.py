"""`penstock queue console`: what it refuses before it listens, in one sentence each."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.command import penstock

_TOKEN = "a-token-of-more-than-16-characters"


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        ([], {}, "Which store?"),
        (["memory://"], {}, "A memory:// store lives in one process"),
        (
            ["{store}", "--host", "0.0.0.0"],
            {},
            "Without a token the public listener is on loopback",
        ),
        (
            ["{store}", "--host", "0.0.0.0"],
            {"PENSTOCK_API_TOKEN": "short"},
            "has fewer than 16 characters",
        ),
        (["{store}"], {"PENSTOCK_VIEWER_TOKEN": _TOKEN}, "so anybody may change things"),
        (["{store}", "--store", "file:///elsewhere"], {}, "The store is named twice"),
        (["{store}", "--queue", "a/b"], {}, "is not the name of a queue"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], environment: dict[str, str], told: str, tmp_path: Path
) -> None:
    given = [each.format(store=f"file://{tmp_path}") for each in words]
    ran = penstock("queue", "console", *given, environment={"PENSTOCK_STORE": "", **environment})
    assert ran.returncode == 2, ran.stderr
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = penstock("queue", "console", f"file://{tmp_path}", "--port", port)
    assert ran.returncode == 2, ran.stderr
    assert f"cannot have 127.0.0.1:{port}" in ran.stderr
