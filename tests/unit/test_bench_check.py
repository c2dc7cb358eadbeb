"""`make bench-check`: a peer that cannot be had is no failure, and is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from benchmarks import check, queue

_OURS = {"process singles": queue.Figure(tasks=10, requests={"PUT": 42}, cpu_seconds=0.02)}
_THEIRS = {"process singles": queue.Figure(tasks=10, requests={"PUT": 90}, cpu_seconds=0.08)}
_CPU = f"queue on S3: CPU of process singles, {queue.PEER} 1"
_REQUESTS = "queue on S3: requests a task, process singles"
_BOTH: Mapping[str, Mapping[str, queue.Figure]] = {"penstock": _OURS, queue.PEER: _THEIRS}
_ALONE: Mapping[str, Mapping[str, queue.Figure]] = {"penstock": _OURS, queue.PEER: {}}


def _accepted(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cpu: float) -> None:
    ratios = folder / "ratios.json"
    ratios.write_text(
        json.dumps(
            {
                _CPU: {"ratio": cpu, "why": "A test."},
                _REQUESTS: {"ratio": 4.2, "why": "A test."},
                "tables: a figure": {"ratio": 1, "why": "Of another area."},
            }
        )
    )
    monkeypatch.setattr(check, "ACCEPTED", ratios)
    monkeypatch.setattr("sys.argv", ["check", "queue-on-s3"])


def _measures(
    monkeypatch: pytest.MonkeyPatch, measured: Mapping[str, Mapping[str, queue.Figure]]
) -> None:
    shown = {"queue-on-s3": lambda: check.figures_on_s3(measured)}
    monkeypatch.setattr(check, "SHORT", shown)


def test_cpu_is_compared_with_the_peers() -> None:
    assert check.figures_on_s3(_BOTH) == pytest.approx({_CPU: 0.25, _REQUESTS: 4.2})


def test_a_ratio_to_the_peer_that_has_become_worse_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _accepted(tmp_path, monkeypatch, cpu=0.2)
    _measures(monkeypatch, _BOTH)
    assert check.main() == 1
    assert f"{_CPU}: 0.25, worse than 0.2" in capsys.readouterr().out


def test_without_the_peer_its_ratios_are_named_and_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _accepted(tmp_path, monkeypatch, cpu=0.2)
    _measures(monkeypatch, _ALONE)
    assert check.main() == 0
    assert f"1 accepted ratios could not be measured here: {_CPU}" in capsys.readouterr().out
