"""A transform has the secrets of its job, and nothing that is written shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.spark.bench import Bench

VALUE = "hunter2-hunter2"
CODE = """
def lengths(inputs, context):
    assert "hunter2" not in repr(context), repr(context)
    value = context.secrets["KEY"]
    rows = [(len(value), sorted(context.secrets))]
    return context.session.createDataFrame(rows, "n int, k array<string>")

def wrong(inputs, context):
    return context.secrets["OTHER"]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "transforms_with_secrets.py").write_text(CODE)
    yield "transforms_with_secrets"
    sys.modules.pop("transforms_with_secrets", None)


def test_a_transform_has_its_secrets(bench: Bench, module: str) -> None:
    config = {"transform": f"{module}:lengths"}
    work = bench.work("spark.python", config, secrets={"KEY": VALUE})
    made = bench.made(work)
    assert bench.rows(made) == [{"n": len(VALUE), "k": ["KEY"]}]
    manifest = bench.transfer.read_bytes(f"{made.location}/manifest.json")
    assert VALUE.encode() not in manifest
    assert VALUE not in repr(work)


def test_a_secret_that_the_job_does_not_name_is_told(bench: Bench, module: str) -> None:
    config = {"transform": f"{module}:wrong"}
    failed = bench.failure(bench.work("spark.python", config, secrets={"KEY": VALUE}))
    assert "The job has no secret 'OTHER'; it has KEY." in failed.reason
    assert VALUE not in failed.reason
