"""The example of docs/dag.md, from its cron source to its report, on a real Postgres."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.dispatcher.range_operators import RangeOperators
from penstock.dispatcher.sources.cron import CronEmitter
from penstock.protocol.events import EventsAnswer, EventsAsk, SourcesAnswer
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, perform, read
from tests.integration.dispatcher.world import Worlds

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "dag.md"
HOUR = 3600
DAY = 24 * HOUR
BEGIN = 1_893_456_000
"""2030-01-01, when worlds begin."""


class StillClock:
    """A clock of a machine on which no time passes between two looks at the dispatcher's."""

    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps")


@dataclass
class Flights:
    """The example on a stage."""

    stage: Stage

    async def sources(self) -> SourcesAnswer:
        identity = self.stage.identity("cron")
        return read(
            await self.stage.internal.get("/internal/sources", headers=identity), SourcesAnswer
        )

    async def events(self, ask: EventsAsk, /) -> EventsAnswer:
        said = {
            "events": [
                {name: getattr(each, name) for name in each.__struct_fields__}
                for each in ask.events
            ]
        }
        identity = self.stage.identity("cron")
        answer = await self.stage.internal.post("/internal/events", json=said, headers=identity)
        return read(answer, EventsAnswer)

    async def hours(self, count: int, source: CronEmitter) -> None:
        """Let hours pass, and have all done that follows, but for the report."""
        self.stage.world.later(count * HOUR)
        await source.turn()
        await self.stage.route()
        await self._work("flights.fetch:departures", "departures")
        await self._work("flights.clean:clean", "flights")
        parts = self.stage.parts
        await RangeOperators(parts.database, parts.tasks, name="d").turn()

    async def _work(self, operator: str, dataset: str) -> None:
        while tasks := await self.stage.claim(operator, limit=4):
            for task in tasks:
                # As a function's task does by default.
                range_ = {name: task.payload[name] for name in ("start", "end")}
                made = output(task, dataset, **range_)
                ok(await self.stage.complete({**held(task), "outputs": [made]}))
            # What leads to a job with a limit is for the router, also if a task has published it.
            await self.stage.route()

    async def days(self) -> list[tuple[str, int, int]]:
        """The days of which a report is due now."""
        tasks = await self.stage.claim("flights.report:daily", limit=9)
        return [
            (each.payload["partition_key"], each.payload["start"], each.payload["end"])
            for each in tasks
        ]


def example() -> str:
    found = re.search(r"```yaml\n(.*?)```", DOCUMENTATION.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_a_report_is_due_when_all_hours_of_a_day_are_there(worlds: Worlds) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(example()))
        flights = Flights(stage)
        source = CronEmitter(flights, StillClock())
        await flights.hours(0, source)
        await flights.hours(1, source)
        await flights.hours(22, source)
        assert await flights.days() == []
        rows = await stage.world.rows(
            "SELECT partition_key, range_start, range_end FROM event JOIN dataset"
            " ON dataset.id = dataset_id WHERE name = 'flights' ORDER BY range_start"
        )
        assert [tuple(row.values()) for row in rows] == [
            (f"2030-01-01T{n:02}:00Z", BEGIN + n * HOUR, BEGIN + (n + 1) * HOUR) for n in range(23)
        ]
        await flights.hours(1, source)
        assert await flights.days() == [(f"{BEGIN}-{BEGIN + DAY}", BEGIN, BEGIN + DAY)]
        # One that was away for a day goes on where the last one has left off.
        await flights.hours(25, CronEmitter(flights, StillClock()))
        assert await flights.days() == [
            (f"{BEGIN + DAY}-{BEGIN + 2 * DAY}", BEGIN + DAY, BEGIN + 2 * DAY)
        ]
        ends = await stage.world.value(
            "SELECT count(DISTINCT range_end) FROM event WHERE starts_with(dedupe, 'source:cron:')"
        )
        assert ends == 49

    perform(worlds, story)
