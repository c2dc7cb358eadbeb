"""A runtime of a DAG is registered, or the DAG is refused: by `dag check` as by `dag apply`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import run

DAG = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw]}
  train: {runtime: gpu, operator: "penstock.version:nothing", inputs: [raw], outputs: [model],
          resources: {memory: MEMORY}}
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PENSTOCK_SETTINGS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dag.yaml").write_text(DAG.replace("MEMORY", "2GiB"))
    return tmp_path


def test_check_refuses_what_is_not_registered(
    somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dag", "check", "dag.yaml"]) == 2
    assert "There is no runtime 'gpu'" in capsys.readouterr().out
    (somewhere / "penstock.toml").write_text('[runtimes.gpu]\nuses = "process"\n')
    assert run(["dag", "check", "dag.yaml"]) == 0
    (somewhere / "dag.yaml").write_text(DAG.replace("MEMORY", "much"))
    assert run(["dag", "check", "dag.yaml"]) == 2
    assert "Write how much" in capsys.readouterr().out


def test_check_says_what_is_wrong_with_the_settings_here(
    somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (somewhere / "penstock.toml").write_text('[runtimes.gpu]\nuses = "proces"\n')
    assert run(["dag", "check", "dag.yaml"]) == 2
    assert "Is process meant?" in capsys.readouterr().err


def test_a_worker_is_told_of_queues_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["worker", "--queue", "A b"]) == 2
    assert "queues has 'A b', which is not the name of a queue" in capsys.readouterr().err
