"""A console for each test: `console(story)` runs a story with a visitor, see `looking`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.console.looking import Look, Story, look
from tests.integration.dispatcher.world import Worlds


@pytest.fixture
def console(worlds: Worlds) -> Look:
    """Runs a story with a visitor in an empty world; further arguments are of `visiting`."""

    def run(story: Story, **fields: Any) -> None:
        look(worlds, story, **fields)

    return run
