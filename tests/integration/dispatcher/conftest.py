"""Worlds for the tests of the dispatcher."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.dispatcher.world import Play, Story, Worlds


@pytest.fixture
def play(worlds: Worlds) -> Play:
    """Runs a story in a world of its own."""

    def run(story: Story) -> None:
        async def main() -> None:
            async with worlds.world() as world:
                await story(world)

        asyncio.run(main())

    return run
