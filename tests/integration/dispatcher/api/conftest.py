"""A stage for the tests of the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.dispatcher.api.stage import Story, perform
from tests.integration.dispatcher.world import Worlds

Perform = Callable[..., None]


@pytest.fixture
def on_stage(worlds: Worlds) -> Perform:
    """Runs a story on a stage of its own."""

    def run(story: Story, **fields: Any) -> None:
        perform(worlds, story, **fields)

    return run
