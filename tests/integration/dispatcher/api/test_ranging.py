"""Events and outputs that come without a range have the one that is known, on a real Postgres."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, refused
from tests.integration.dispatcher.api.test_telling import tell

DAY = 86_400
NEW_YEAR = 1_356_998_400
"""The first of January 2013."""
FLIGHTS = """
jobs:
  feed: {activation: source, source: {kind: manual}, outputs: [raw, seen]}
  clean: {runtime: RUNTIME, operator: OPERATOR, inputs: [{from: raw, FILTER}], outputs: [tidy]}
  months:
    runtime: dispatcher
    operator: range_aggregate
    config: {size: SIZE}
    inputs: [tidy]
    outputs: [full]
"""


def dag(**words: str) -> str:
    """Flights by Spark and by months, but for what is said."""
    said = {
        "RUNTIME": "spark",
        "OPERATOR": "spark.sql, config: {sql: SELECT 1}",
        "FILTER": "as: raw",
        "SIZE": "month",
        **words,
    }
    text = FLIGHTS
    for word, by in said.items():
        text = text.replace(word, by)
    return text


BY_FUNCTION = {"RUNTIME": "process", "OPERATOR": '"a:clean"'}


async def trigger(stage: Stage, key: str | None = None, **fields: Any) -> httpx.Response:
    asked = {"job": "feed", **fields}
    if key is not None:
        asked["partition_key"] = key
    return await stage.public.post("/v1/trigger", json=asked)


async def ranges(stage: Stage, dataset: str = "raw") -> list[tuple[int | None, int | None]]:
    rows = await stage.world.rows(
        "SELECT range_start, range_end FROM event JOIN dataset ON dataset.id = dataset_id"
        " WHERE name = %s ORDER BY seq",
        dataset,
    )
    return [(row["range_start"], row["range_end"]) for row in rows]


def test_a_partition_keeps_its_range(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag(SIZE="10")))
        ok(await trigger(stage, "p", start=3, end=5, event_id="1"))
        ok(await trigger(stage, "p", event_id="2"))
        assert ok(await trigger(stage, "p", event_id="2"))["results"][0]["outcome"] == "duplicate"
        # Also for the functions that follow.
        assert await ranges(stage) == [(3, 5)] * 2
        await stage.route()
        payloads = await stage.world.rows("SELECT payload FROM task ORDER BY id")
        assert [(row["payload"]["start"], row["payload"]["end"]) for row in payloads] == [
            (3, 5)
        ] * 2
        # A range that is said counts, and then that one is kept.
        ok(await trigger(stage, "p", start=4, end=6))
        (found,) = await tell(stage, {"event_id": "3", "dataset": "raw", "partition_key": "p"})
        assert found["outcome"] == "new"
        assert await ranges(stage) == [(3, 5), (3, 5), (4, 6), (4, 6)]

    on_stage(story)


def test_what_has_lost_its_range_has_it_again(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag()))
        ok(await trigger(stage, "p", start=3, end=5))
        ok(await trigger(stage, "p"))
        await stage.world.rows(
            "UPDATE event SET range_start = NULL, range_end = NULL WHERE seq > 2"
        )
        ok(await stage.public.post("/v1/backfills", json={"job": "clean", "keys": ["p"]}))
        await stage.parts.backfills.turn()
        (task,) = await stage.world.rows("SELECT payload FROM task WHERE backfill_id IS NOT NULL")
        assert (task["payload"]["start"], task["payload"]["end"]) == (3, 5)
        ok(await trigger(stage, "p"))
        assert await ranges(stage) == [(3, 5), (None, None), (3, 5)]

    on_stage(story)


def test_events_of_one_call_know_each_other(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag()))
        at_p = {"dataset": "raw", "partition_key": "p"}
        found = await tell(
            stage,
            {"event_id": "0", **at_p},
            {"event_id": "1", **at_p, "start": 3, "end": 5},
            {"event_id": "2", **at_p},
        )
        assert [each["outcome"] for each in found] == ["refused", "new", "new"]
        assert await ranges(stage) == [(3, 5), (3, 5)]

    on_stage(story)


def test_a_generation_that_is_built_knows_what_the_current_one_does(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag()))
        ok(await trigger(stage, "p", start=3, end=5))
        await stage.world.rows(
            "INSERT INTO generation (dataset_id, version, state, lineage)"
            " SELECT id, gen_random_uuid(), 'building', 'x' FROM dataset WHERE name = 'raw'"
        )
        found = await tell(stage, {"event_id": "1", "dataset": "raw", "partition_key": "p"})
        assert [each["outcome"] for each in found] == ["new", "new"]
        assert await ranges(stage) == [(3, 5)] * 3

    on_stage(story)


@pytest.mark.parametrize(
    ("size", "key", "words"),
    [
        ("month", "2013-01-01", {}),
        ("month", "2013-01-01", BY_FUNCTION),
        (str(DAY), f"{NEW_YEAR}-{NEW_YEAR + DAY}", {"FILTER": "where: start >= 0"}),
    ],
)
def test_a_key_implies_its_range(
    on_stage: Perform, size: str, key: str, words: dict[str, str]
) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag(SIZE=size, **words)))
        ok(await trigger(stage, key))
        assert await ranges(stage) == [(NEW_YEAR, NEW_YEAR + DAY)]
        # Nobody reads the other dataset by ranges.
        assert await ranges(stage, "seen") == [(None, None)]

    on_stage(story)


def test_an_interval_of_a_cron_source(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        source = '{kind: cron, cron: "0 0 * * *", time_zone: Europe/Berlin, emits: interval}'
        ok(await stage.apply(dag(**BY_FUNCTION).replace("{kind: manual}", source)))
        # Clocks are put back: that day has 25 hours.
        ok(await trigger(stage, "2026-10-24T22:00Z"))
        # That is no beginning of an interval of it.
        ok(await trigger(stage, "2026-10-24T23:00Z"))
        begin = 1_792_879_200
        assert await ranges(stage) == [(begin, begin + 25 * 3600), (None, None)]

    on_stage(story)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"partition_key": "2013-13-01"},
            (
                "No range of the partition '2013-13-01' is known, and the job 'months' downstream"
                " (range_aggregate) works on ranges; send a start and an end with it."
            ),
        ),
        (
            {},
            (
                "This event has no partition, and the job 'months' downstream (range_aggregate)"
                " works on ranges; send a partition, with a start and an end."
            ),
        ),
    ],
)
def test_what_could_only_die_is_refused(
    on_stage: Perform, asked: dict[str, Any], told: str
) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag()))
        assert refused(await trigger(stage, **asked), 422).title == told
        # Not even where nobody would have minded it: it is one event, or none.
        assert await stage.world.value("SELECT count(*) FROM event") == 0
        event = {"event_id": "1", "dataset": "raw", "cursor": None if asked else 5, **asked}
        (found,) = await tell(stage, event)
        assert (found["outcome"], found["why"]) == ("refused", told)

    on_stage(story)


@pytest.mark.parametrize(
    "words",
    [BY_FUNCTION, {"FILTER": "where: start >= 0"}, {"FILTER": 'where: partition_key != "x"'}],
)
def test_what_may_have_ranges_of_its_own_is_taken(on_stage: Perform, words: dict[str, str]) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag(**words)))
        ok(await trigger(stage, "x"))
        assert await ranges(stage) == [(None, None)]

    on_stage(story)


def test_an_event_that_is_kept_is_never_refused(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag(**BY_FUNCTION)))
        ok(await trigger(stage, "x", event_id="1"))
        ok(await stage.apply(dag(), force=True))
        results = ok(await trigger(stage, "x", event_id="1"))["results"]
        assert {each["outcome"] for each in results} == {"duplicate"}

    on_stage(story)


def test_the_own_partition_of_a_task_has_its_range(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        ok(await stage.apply(dag(**BY_FUNCTION)))
        ok(await trigger(stage, "p", start=3, end=5))
        await stage.route()
        (task,) = await stage.claim()
        # As of a function that publishes its partition by the key alone.
        ok(
            await stage.complete(
                held(task, outputs=[output(task), output(task, partition_key="q")])
            )
        )
        assert await ranges(stage, "tidy") == [(3, 5), (None, None)]
        found = await stage.world.rows(
            "SELECT partition_key, range_start FROM publication ORDER BY partition_key"
        )
        assert [tuple(row.values()) for row in found] == [("p", 3), ("q", None)]

    on_stage(story)
