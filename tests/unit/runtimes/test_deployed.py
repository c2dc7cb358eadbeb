"""A deployed function sends as many heartbeats as a worker does: the policy stands in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.protocol.work import HEARTBEATS
from penstock.runtimes import deployed

ASSIGNMENT: dict[str, Any] = {
    "task_id": 7,
    "attempt": 1,
    "lease_token": "held",
    "token": "proof",
    "job": "clean",
    "operator": "a:clean",
    "root": "s3://bucket/lake",
    "folder": "7-1",
    "generation": "g1",
    "definition": {},
    "payload": {},
    "heartbeat_seconds": 60.0,
}


@pytest.mark.parametrize("beats", [HEARTBEATS.beats, 6])
def test_the_pause_between_heartbeats_follows_the_policy(
    beats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed, "HEARTBEATS", replace(HEARTBEATS, beats=beats))
    calls: Any = None
    assert deployed._Attempt(calls, ASSIGNMENT)._pause_seconds == 60.0 / beats
