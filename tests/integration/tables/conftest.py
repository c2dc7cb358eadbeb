"""Worlds for the tests of tables."""

from __future__ import annotations

from tests.integration.dispatcher.conftest import play

__all__ = ["play"]
