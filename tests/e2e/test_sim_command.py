"""`penstock sim`, as a user runs it."""

from __future__ import annotations

import json

from tests.e2e.command import penstock


def test_it_runs_worlds_and_says_that_all_held() -> None:
    ran = penstock("sim", "--seeds", "4", "--mode", "mixed")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "mixed: 4 worlds, no violations" in ran.stdout
    assert "No invariant was violated." in ran.stdout
    assert ran.stderr == ""


def test_a_seed_is_the_same_world_in_every_process() -> None:
    words = ("sim", "--seeds", "6", "--first-seed", "20", "--json")
    first = penstock(*words, environment={"PYTHONHASHSEED": "1"})
    second = penstock(*words, environment={"PYTHONHASHSEED": "2"})
    assert first.returncode == 0, first.stdout + first.stderr
    assert json.loads(first.stdout) == json.loads(second.stdout)


def test_a_mode_that_is_none_is_refused() -> None:
    ran = penstock("sim", "--mode", "telepathic")
    assert ran.returncode == 2
    assert "telepathic" in ran.stderr
