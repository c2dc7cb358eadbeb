"""Functions that were deployed without their settings say so, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import functions
from penstock.kernel.errors import InvalidInput

HANDLERS = (functions.cron, functions.webhook)
EVENT = {"time": "2030-01-01T00:00:00Z", "rawPath": "/orders"}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DISPATCHERS", "WORKER_SECRET", "API_TOKEN", "SETTINGS"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("only", ["DISPATCHERS=http://d:1", "WORKER_SECRET=a-secret-of-the-tests"])
def test_without_its_settings(
    handler: Callable[..., Any], only: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, _, value = only.partition("=")
    monkeypatch.setenv(f"PENSTOCK_{name}", value)
    with pytest.raises(InvalidInput, match="does not know its dispatchers") as raised:
        handler(EVENT, None)
    assert "PENSTOCK_WORKER_SECRET" in raised.value.hint
    # The folder of a function cannot be written: no secret is made there.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("handler", HANDLERS)
def test_with_a_secret_that_is_too_short(
    handler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DISPATCHERS", "http://d:1")
    monkeypatch.setenv("PENSTOCK_WORKER_SECRET", "short")
    with pytest.raises(InvalidInput, match="worker_secret has fewer than 16 characters"):
        handler(EVENT, None)
