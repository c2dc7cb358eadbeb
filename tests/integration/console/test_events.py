"""Events in the console: found by dataset, partition and id, with what each has made."""

from __future__ import annotations

import re

import pytest

from penstock.dispatcher.views import events as views
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.api.stage import held, ok, output
from tests.integration.dispatcher.test_deployment import chain

SCRIPT = "<script>alert(1)</script>"


def _rows(page: str) -> list[str]:
    """The numbers of the events of a page."""
    return re.findall(r'data-key="event-(\d+)"', page)


async def _tell(visitor: Visitor, *keys: str) -> None:
    for key in keys:
        asked = {"job": "feed", "partition_key": key, "event_id": f"id-{key}"}
        ok(await visitor.stage.public.post("/v1/trigger", json=asked))


def test_events_and_what_each_has_made(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        stage = visitor.stage
        await stage.apply()
        await _tell(visitor, "p", SCRIPT)
        _, page = await visitor.get("/operations/events")
        assert SCRIPT not in page
        assert "waiting not routed yet" in words(page)
        await stage.route()
        (task, _) = await stage.claim(limit=2)
        ok(await stage.complete(held(task, outputs=[output(task)])))
        await stage.route()
        _, page = await visitor.get("/operations/events")
        said = words(page)
        assert len(_rows(page)) == 3
        assert "tidy p task 1 routed report 3 queued" in said
        assert "raw p feed id-p routed clean 1 completed" in said
        for path in ("/events", "/events?dataset=tidy"):
            assert (await visitor.get(path))[0] == 200

    console(story)


def test_who_told_is_a_source_and_a_way_and_ranges_are_times(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        range_ = {"start": 1357344000, "end": 1357430400}
        for name, more in (("console:1", range_), ("trigger:1", {}), ("cron:1", {}), ("own", {})):
            asked = {"job": "feed", "partition_key": name, "event_id": name, **more}
            ok(await visitor.stage.public.post("/v1/trigger", json=asked))
        _, page = await visitor.get("/operations/events")
        said = words(page)
        for told in (
            "feed in the console console:1",
            "feed on the command line, or by a program trigger:1",
            "feed by its schedule cron:1",
            "feed own",
        ):
            assert told in said
        assert page.count('<a href="/jobs/feed">feed</a>') == 4
        assert "2013-01-05 00:00 \N{EN DASH} 2013-01-06 00:00 UTC" in said
        assert 'title="1357344000 to 1357430400' in page
        _, page = await visitor.get("/operations/sources/feed")
        assert "feed in the console console:1" in words(page)
        _, page = await visitor.get("/operations/events?id=none")
        assert "Events are kept for retention_days" in words(page)
        assert "<code>retention_days</code>" in page

    console(story)


def test_events_are_searched(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await _tell(visitor, "p", "q", "r")
        await visitor.stage.route()
        (task,) = await visitor.stage.claim()
        ok(await visitor.stage.complete(held(task, outputs=[output(task)])))

        async def found(query: str) -> list[str]:
            status, page = await visitor.get(f"/operations/events?{query}")
            assert status == 200
            return _rows(page)

        everything = await found("")
        assert everything == sorted(everything, key=int, reverse=True)
        assert len(everything) == 4
        assert len(await found("dataset=tidy")) == 1
        assert len(await found("dataset=raw")) == 3
        assert len(await found("partition=p")) == 2
        assert len(await found("partition=p&dataset=raw")) == 1
        assert len(await found("id=id-q")) == 1
        assert await found("id=id-q&dataset=tidy") == []
        assert await found("id=id-q&partition=q") == await found("id=id-q")
        assert await found("id=id-q&partition=p") == []
        assert await found(f"id={everything[0]}") == [everything[0]]
        assert len(await found(f"id=publication:{task.task_id}:0")) == 1
        assert await found("id=" + "9" * 500) == []
        assert await found("partition=%00") == []
        assert await found("dataset=nobody") == []
        _, page = await visitor.get("/operations/events?id=%3Cscript%3Ealert(1)%3C/script%3E")
        assert SCRIPT not in page
        assert "No matching events." in words(page)

    console(story)


def test_events_come_by_pages(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.world.rows(
            "INSERT INTO event (dataset_id, generation, partition_key, dedupe)"
            " SELECT dataset_id, version, 'p' || n, 'source:' || n FROM generation"
            " JOIN dataset ON dataset.id = dataset_id, generate_series(1, 120) AS n"
            " WHERE name = 'raw'"
        )
        seen: list[str] = []
        path = "/operations/events?dataset=raw"
        for _ in range(3):
            _, page = await visitor.get(path)
            seen += _rows(page)
            older = re.search(r'href="([^"]*before=[^"]*)">Older', page)
            path = older[1].replace("&amp;", "&") if older else ""
        assert len(seen) == len(set(seen)) == 120
        assert path == ""

    console(story)


def test_a_dataset_is_looked_for_a_piece_at_a_time(
    console: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "WINDOW", 10)

    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await _tell(visitor, "rare")
        await visitor.world.rows(
            "INSERT INTO event (dataset_id, generation, partition_key, dedupe)"
            " SELECT dataset_id, version, 'p' || n, 'source:' || n FROM generation"
            " JOIN dataset ON dataset.id = dataset_id, generate_series(1, 15) AS n"
            " WHERE name = 'tidy'"
        )
        _, page = await visitor.get("/operations/events?dataset=raw")
        assert _rows(page) == []
        assert "events searched matches" in words(page)
        further = re.search(r'href="([^"]*before=[^"]*)">Search further back', page)
        assert further is not None
        _, page = await visitor.get(further[1].replace("&amp;", "&"))
        assert _rows(page) == ["1"]

    console(story)


def test_events_that_became_part_of_one_task(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        merging = chain().replace("a:clean\n", "a:clean\n    merge_updates: true\n")
        ok(await visitor.stage.apply(merging))
        for number in range(3):
            asked = {"job": "feed", "partition_key": "p", "event_id": str(number)}
            ok(await visitor.stage.public.post("/v1/trigger", json=asked))
        await visitor.stage.route()
        _, page = await visitor.get("/operations/events")
        said = words(page)
        assert said.count("clean 1 queued") == 3
        assert "with others" in said

    console(story)


def test_events_that_nothing_is_made_of_say_why(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.world.rows(
            "INSERT INTO event (dataset_id, generation, cursor, dedupe, routed, why_not)"
            " SELECT id, gen_random_uuid(), 7, 'source:x', 'audited', %s FROM dataset"
            " WHERE name = 'raw'",
            SCRIPT,
        )
        _, page = await visitor.get("/operations/events")
        assert SCRIPT not in page
        assert f"raw 7 feed x kept {SCRIPT} no task" in words(page)

    console(story)
