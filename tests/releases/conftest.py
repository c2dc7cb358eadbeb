"""The Postgres of integration tests, here too."""

from __future__ import annotations

from tests.integration.conftest import postgres, worlds

__all__ = ["postgres", "worlds"]
