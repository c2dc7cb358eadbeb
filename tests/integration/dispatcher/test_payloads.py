"""What comes with an event, on a real Postgres: in the schema, and when data is rebuilt."""

from __future__ import annotations

import psycopg
import pytest

from tests.integration.dispatcher.test_deployment import Pipeline, chain
from tests.integration.dispatcher.world import Play, World


def test_a_rebuild_tells_what_came_with_the_latest_event(play: Play) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        for number in (1, 2):
            event = await pipeline.event(
                f"e{number}", partition_key="p", payload={"n": number, "null": None}
            )
            await pipeline.routing.accept([event, await pipeline.event(f"q{number}")])
        await pipeline.route()
        done = await pipeline.work("a:clean")
        assert [each.payload.get("payload", {}).get("n") for each in done] == [1, None, 2, None]
        await pipeline.apply(chain(clean="2"))
        await pipeline.backfills.turn()
        rebuilt = await pipeline.work("a:clean")
        assert {each.payload["partition_key"]: each.payload.get("payload") for each in rebuilt} == {
            "p": {"n": 2, "null": None},
            "q1": None,
            "q2": None,
        }

    play(story)


@pytest.mark.parametrize(
    ("columns", "value"),
    [
        ("payload = %s", "[1]"),
        ("payload = %s", '{"a": "' + "x" * 131_072 + '"}'),
        ("payload = %s, revision = 1, dedupe = 'publication:1'", "{}"),
    ],
)
def test_what_the_schema_refuses(play: Play, columns: str, value: str) -> None:
    async def story(world: World) -> None:
        pipeline = Pipeline(world)
        await pipeline.apply(chain())
        await pipeline.routing.accept([await pipeline.event("p", payload={"a": 1})])
        with pytest.raises(psycopg.errors.CheckViolation):
            await world.rows(f"UPDATE event SET {columns}", value)
        assert await world.value("SELECT payload FROM event") == {"a": 1}

    play(story)
