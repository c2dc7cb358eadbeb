"""Functions that were deployed without their settings say so, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import functions
from penstock.kernel.errors import InvalidInput

HANDLERS = ((functions.cron, "WORKER_SECRET"), (functions.webhook, "WEBHOOK_TOKEN"))
EVENT = {"time": "2030-01-01T00:00:00Z", "rawPath": "/orders"}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DISPATCHERS", "WORKER_SECRET", "WEBHOOK_TOKEN", "API_TOKEN", "SETTINGS"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)


@pytest.mark.parametrize(("handler", "proof"), HANDLERS)
@pytest.mark.parametrize("only", ["DISPATCHERS", "the proof"])
def test_without_its_settings(
    handler: Callable[..., Any],
    proof: str,
    only: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if only == "DISPATCHERS":
        monkeypatch.setenv("PENSTOCK_DISPATCHERS", "http://d:1")
    else:
        monkeypatch.setenv(f"PENSTOCK_{proof}", "webhook.a-secret-of-the-tests")
    with pytest.raises(InvalidInput, match="has no address of a dispatcher") as raised:
        handler(EVENT, None)
    assert f"PENSTOCK_{proof}" in raised.value.hint
    # The folder of a function cannot be written: no secret is made there.
    assert list(tmp_path.iterdir()) == []


def test_with_a_secret_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DISPATCHERS", "http://d:1")
    monkeypatch.setenv("PENSTOCK_WORKER_SECRET", "short")
    with pytest.raises(InvalidInput, match="worker_secret has fewer than 16 characters"):
        functions.cron(EVENT, None)


@pytest.mark.parametrize("name", ["API_TOKEN", "WORKER_SECRET"])
def test_a_webhook_holds_no_more_than_its_own_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DISPATCHERS", "http://d:1")
    monkeypatch.setenv("PENSTOCK_WEBHOOK_TOKEN", "webhook.of-the-tests")
    monkeypatch.setenv(f"PENSTOCK_{name}", "a-secret-of-the-tests")
    with pytest.raises(InvalidInput, match=f"its settings have {name.lower()}"):
        functions.webhook(EVENT, None)
