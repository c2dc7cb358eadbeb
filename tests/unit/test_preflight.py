"""Settings with which an installation could not run are told before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.installation import preflight
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.registry import RuntimeRegistry
from penstock.settings import Settings


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"postgres": "postgresql://me:secret@db/penstock"},
        {"postgres": "host=db dbname=penstock"},
        {"store": "s3://bucket/prefix?region=eu-central-1"},
        {"port": 0, "internal_port": 0, "webhook_port": 0},
        {"runtimes": {"process": {"idle_seconds": 3}}},
        {"runtimes": {"process": {"uids": "60800-60863"}}, "api_token": "t"},
    ],
)
def test_what_can_run(good: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data", **good)
    preflight(settings, RuntimeRegistry(settings.runtimes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"port": 7071}, "port and internal_port are both 7071"),
        ({"webhook_port": 7070}, "port and webhook_port are both 7070"),
        ({"postgres": "my secret"}, "postgres is not the address of a Postgres"),
        (
            {"postgres": "host=db", "postgres_direct": "my secret"},
            "postgres_direct is not the address of a Postgres",
        ),
        ({"postgres_direct": "host=db"}, "postgres_direct is set, and postgres is not"),
        ({"store": "memory://"}, "no place for outputs"),
        ({"store": "file:relative"}, "not the URL of a store"),
        ({"store": "s3://bucket?style=odd"}, "style 'odd'"),
        ({"worker_secret": "short"}, "16 characters"),
        ({"runtimes": {"process": {"nonsense": 1}}}, "nonsense"),
        ({"runtimes": {"nonsense": {}}}, "nonsense"),
        ({"runtimes": {"process": {"uids": "60800-60863"}}}, "needs no token"),
    ],
)
def test_what_cannot_run(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=words) as raised:  # noqa: PT012 - either may refuse
        settings = Settings(data=tmp_path / "data", **wrong)
        preflight(settings, RuntimeRegistry(settings.runtimes))
    assert "my secret" not in raised.value.message + raised.value.hint
    assert list(tmp_path.iterdir()) == []
