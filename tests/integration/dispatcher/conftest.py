"""Worlds for the tests of the dispatcher."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.dispatcher.world import Play, Story, Worlds


@pytest.fixture
def play(worlds: Worlds, request: pytest.FixtureRequest) -> Play:
    """Runs a story in a world of its own; see `either_way`."""

    def run(story: Story) -> None:
        async def main() -> None:
            async with worlds.world() as world:
                if getattr(request, "param", "rows") == "announced":
                    world.announce()
                await story(world)

        asyncio.run(main())

    return run
