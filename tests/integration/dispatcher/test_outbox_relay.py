"""The relay, on a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from penstock.dispatcher.database.pool import Answer, Connection, Database
from penstock.dispatcher.outbox import LOOK_SECONDS_MAX, ROWS_MAX, Outbox, Relay, RelayLimits
from penstock.kernel.errors import DatabaseUnavailable
from tests.integration.dispatcher.carrying import LIMITS, Post, Script, Still
from tests.integration.dispatcher.world import Play, World


def test_what_is_due_is_carried_out_once(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await post.put("a", 1, 2)
        await post.put("b", 1)
        await post.put("a", 3, in_seconds=5)
        assert await post.relay.turn() == pytest.approx(5)
        assert script.said == ["a 1", "a 2", "b 1"]
        # One call a target.
        assert script.calls == 2
        assert await post.left() == ["a 3"]
        post.later(4.75)
        assert await post.relay.turn() == pytest.approx(0.25)
        post.later(0.25)
        await post.relay.turn()
        assert await post.left() == []
        assert len(script.carried) == 4

    play(story)


def test_rows_that_say_the_same_are_one(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await post.put("a", 1, 1, 1, 2)
        await post.put("b", 1)
        await post.relay.turn()
        assert script.said == ["a 1", "a 2", "b 1"]
        assert await post.left() == []

    play(story)


def test_more_than_one_turn_takes(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await world.rows(
            "INSERT INTO outbox (kind, target, body) SELECT 'say', 'a',"
            " jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            ROWS_MAX + 1,
        )
        assert await post.relay.turn() == 0
        assert len(script.carried) == ROWS_MAX
        assert await post.relay.turn() > 0
        assert len({row.id for row in script.carried}) == ROWS_MAX + 1

    play(story)


def test_a_row_that_fails_among_good_ones(play: Play) -> None:
    """Trace rolls the whole batch back."""

    async def story(world: World) -> None:
        script = Script(refused={2: "no \x00 way"})
        post = Post(world, script)
        await post.put("a", 1, 2, 3)
        await post.relay.turn()
        assert script.said == ["a 1", "a 3"]
        assert await post.left() == ["a 2"]
        (row,) = await world.rows(
            "SELECT tries, last_error, parked_at,"
            " extract(epoch FROM due_at - penstock_now())::float AS pause FROM outbox"
        )
        assert (row["tries"], row["parked_at"]) == (1, None)
        assert row["last_error"] == "no \N{REPLACEMENT CHARACTER} way"
        assert 0.75 <= row["pause"] <= 1.25
        # The target has not failed as a whole, so that others of it go on.
        await post.put("a", 4)
        await post.relay.turn()
        assert script.said == ["a 1", "a 3", "a 4"]
        script.refused.clear()
        post.later(1.25)
        await post.relay.turn()
        assert script.said == ["a 1", "a 2", "a 3", "a 4"]
        assert await post.left() == []

    play(story)


@pytest.mark.parametrize("how", ["raises", "refuses"])
def test_a_target_that_fails_is_left_alone_for_a_while(play: Play, how: str) -> None:
    async def story(world: World) -> None:
        script = Script(refused={"a": "away"} if how == "refuses" else {})
        script.raises = OSError("away") if how == "raises" else None
        post = Post(world, script)
        await post.put("a", 1)
        assert await post.relay.turn() <= 1.0
        assert script.calls == 1
        script.raises = None
        await post.put("a", 2)
        await post.put("b", 1)
        post.later(0.9)
        pause = await post.relay.turn()
        # The other goes on; this one is looked at when its rest is over.
        assert (script.said, script.calls) == (["b 1"], 2)
        assert pause == pytest.approx(0.1)
        assert await post.left() == ["a 1", "a 2"]
        script.refused.clear()
        post.later(0.4)
        await post.relay.turn()
        assert script.said == ["a 1", "a 2", "b 1"]
        assert await post.left() == []
        # And nothing of the rest is left: a turn that finds nothing waits.
        assert await post.relay.turn() == LOOK_SECONDS_MAX

    play(story)


def test_a_row_that_fails_too_often_is_parked(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script(refused={1: "never"})
        post = Post(world, script)
        outbox = Outbox(world.database)
        await post.put("a", 1, 2)
        for _ in range(3):
            await post.relay.turn()
            post.later(20)
        assert script.calls == 3
        await post.relay.turn()
        assert script.calls == 3
        (row,) = (await outbox.parked()).parked
        assert (row.kind, row.target, row.tries, row.last_error) == ("say", "a", 3, "never")
        assert row.parked_at is not None
        assert await outbox.counts() == (0, 1)

        assert await outbox.retry([row.id + 1]) == 0
        script.refused.clear()
        assert await outbox.retry([row.id]) == 1
        assert await outbox.counts() == (1, 0)
        await post.relay.turn()
        assert script.said == ["a 1", "a 2"]
        assert await outbox.counts() == (0, 0)

    play(story)


def test_what_is_sent_in_the_end_takes_the_parked_away(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script(refused={1: "never"})
        post = Post(world, script)
        outbox = Outbox(world.database)
        for _ in range(2):
            await post.put("a", 1)
            for _ in range(3):
                await post.relay.turn()
                post.later(20)
        # However often the same cannot be sent, it is shown once.
        assert await outbox.counts() == (0, 1)
        script.refused.clear()
        await post.put("a", 2)
        await post.put("b", 1)
        await post.relay.turn()
        assert await outbox.counts() == (0, 1)
        await post.put("a", 1)
        await post.relay.turn()
        assert await outbox.counts() == (0, 0)

    play(story)


def test_a_carrier_that_hangs_delays_its_target_only(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script(hanging={"a"})
        post = Post(world, script)
        await post.put("a", 1)
        await post.put("b", 1)
        assert await post.relay.turn() <= 0.1
        assert await post.left() == ["a 1"]
        await post.put("a", 2)
        await post.put("b", 2)
        await post.relay.turn()
        assert script.said == ["b 1", "b 2"]
        assert script.calls == 3
        script.go_on.set()
        for _ in range(3):
            await post.relay.turn()
        assert script.said == ["a 1", "a 2", "b 1", "b 2"]
        assert await post.left() == []
        await post.relay.stop()

    play(story)


def test_a_carrier_that_takes_too_long(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script(hanging={"a"})
        post = Post(world, script, limits=RelayLimits(carry_seconds_max=0.01, pace_seconds=0))
        await post.put("a", 1)
        await post.relay.turn()
        error = await world.value("SELECT last_error FROM outbox")
        assert error == "The delivery timed out after 0.01 s."
        await post.relay.stop()

    play(story)


def test_stopping_interrupts_what_hangs(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        monkeypatch.setattr("penstock.dispatcher.outbox._STOP_SECONDS_MAX", 0.05)
        script = Script(hanging={"a"})
        post = Post(world, script)
        await post.put("a", 1)
        await post.relay.turn()
        await post.relay.stop()
        await post.relay.stop()
        assert await post.left() == ["a 1"]
        # It is lent still, and comes again elsewhere.
        script.hanging.clear()
        other = post.another()
        await other.turn()
        assert script.said == []
        post.later(60)
        await other.turn()
        assert script.said == ["a 1"]

    play(story)


class Unreachable(Database):
    """A database that goes away as soon as something was carried out."""

    def __init__(self, world: World, script: Script) -> None:
        super().__init__(world.dsn, connections_max=1)
        self._world = world
        self._script = script
        self.is_away = True

    async def transact(self, work: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        if self._script.carried and self.is_away:
            raise DatabaseUnavailable("away")
        return await self._world.database.transact(work)

    async def fetch(
        self, name: str, asked: Mapping[str, object] | None = None
    ) -> list[dict[str, Any]]:
        if self._script.carried and self.is_away:
            raise DatabaseUnavailable("away")
        return await self._world.database.fetch(name, asked)


def test_an_outcome_is_recorded_when_the_database_is_back(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await post.put("a", 1)
        database = Unreachable(world, script)
        relay = Relay(database, carriers={"say": script}, limits=LIMITS, clock=post.clock)
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                await relay.turn()
        database.is_away = False
        await relay.turn()
        assert script.said == ["a 1"]
        assert await post.left() == []

    play(story)


def test_two_relays_share_the_work(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await world.rows(
            "INSERT INTO outbox (kind, target, body) SELECT 'say', 'a' || mod(n, 7),"
            " jsonb_build_object('n', n) FROM generate_series(1, 1500) AS n"
        )
        relays = [post.another() for _ in range(3)]
        for _ in range(4):
            await asyncio.gather(*(relay.turn() for relay in relays))
        assert await post.left() == []
        assert len(script.carried) == len({row.id for row in script.carried}) == 1500

    play(story)


def test_a_row_that_another_relay_is_taking_is_left_to_it(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await post.put("a", 1, 2)
        async with world.database.transaction() as connection:
            await connection.execute(
                b"SELECT FROM outbox WHERE body ->> 'n' = '1' FOR UPDATE SKIP LOCKED"
            )
            # Without waiting for the other.
            await post.relay.turn()
            assert script.said == ["a 2"]
        await post.relay.turn()
        assert script.said == ["a 1", "a 2"]

    play(story)


def test_a_kind_that_nobody_knows_is_parked(play: Play) -> None:
    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script)
        await post.put("a", 1, kind="sing")
        await post.put("a", 1)
        # Another dispatcher may know it.
        assert await post.relay.turn() == LOOK_SECONDS_MAX
        assert (await Outbox(world.database).parked()).parked == []
        post.later(61)
        await post.relay.turn()
        (row,) = (await Outbox(world.database).parked()).parked
        assert row.last_error == "No dispatcher knows how to carry out 'sing'."
        assert script.said == ["a 1"]

    play(story)


def test_what_is_committed_soon_after_goes_together(play: Play) -> None:
    class Resting(Still):
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            self.now += seconds

    async def story(world: World) -> None:
        script = Script()
        post = Post(world, script, clock=Resting(), limits=RelayLimits(pace_seconds=0.5))
        await post.relay.turn()
        await post.put("a", 1)
        await post.relay.turn()
        assert slept == []
        post.clock.now += 0.2
        await post.put("a", 2)
        await post.relay.turn()
        assert slept == [pytest.approx(0.3)]
        assert script.said == ["a 1", "a 2"]

    slept: list[float] = []
    play(story)


def test_a_rest_that_is_over_makes_no_turns(play: Play) -> None:
    """Another relay may have sent what this one could not."""

    async def story(world: World) -> None:
        script = Script(refused={"a": "away"})
        post = Post(world, script)
        await post.put("a", 1)
        await post.relay.turn()
        await world.rows("DELETE FROM outbox")
        post.later(5)
        assert await post.relay.turn() == LOOK_SECONDS_MAX

    play(story)
