"""Buffered datasets, the rows that did not fit, and hot tables, as a person sees them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from penstock.console.pages import dataset
from penstock.console.pages.base import PageNotFound, PageRequest
from penstock.console.renderer import Renderer
from penstock.console.sessions import ConsoleRole
from penstock.runtimes.sink import SinkRuntime, SinkSettings
from penstock.store.opening import open_store
from tests.integration.console.looking import Look, Visitor, visiting, words
from tests.integration.console.publishing import EVIL, publish
from tests.integration.dispatcher.api.stage import held, ok
from tests.integration.dispatcher.api.test_buffers import DAG, Buffers, alert
from tests.integration.dispatcher.world import Worlds

Told = Callable[[Visitor, Buffers], Coroutine[Any, Any, None]]
PATH = "/datasets/alerts/rejected"


@pytest.fixture
def buffered(worlds: Worlds, tmp_path: Path) -> Callable[..., None]:
    """Runs a story with a visitor, a store, a DAG with a sink, and the sink."""

    def run(story: Told, **fields: Any) -> None:
        async def main() -> None:
            root = (tmp_path / "lake").as_uri()
            store = await open_store(f"{root}?fsync=off")
            async with (
                worlds.world() as world,
                visiting(world, root=root, store=store, **fields) as visitor,
                SinkRuntime(SinkSettings(store_url=f"{root}?fsync=off")) as runtime,
            ):
                ok(await visitor.stage.apply(DAG.replace("UPDATE", "append").replace("KEY", "")))
                await story(visitor, Buffers(visitor.stage, root, runtime))
            await store.close()

        asyncio.run(main())

    return run


def rows_of(page: str) -> list[str]:
    """The rows that a page lists, by sequence and place."""
    return re.findall(r'data-key="r-([0-9-]+)"', page)


def test_a_buffer_shows_what_waits_for_which_sink(buffered: Callable[..., None]) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        task = await made.task()
        ok(await made.publish(task, alert("a"), alert("b")))
        said = words((await visitor.get("/datasets/alerts"))[1])
        assert "Sink write , which puts rows that do not fit into alerts_rejected" in said
        assert "Waiting 0 batches Being written 0 batches Held 1 batch of tasks" in said
        assert "Rows 2 in all of these" in said
        ok(await made.stage.complete(held(task)))
        visitor.world.later(60)
        page = (await visitor.get("/datasets/alerts"))[1]
        said = words(page)
        assert "Waiting 1 batch, the oldest released" in said
        assert "Held 0 batches" in said
        assert 'href="/jobs/write"' in page
        assert f'data-fetched="{PATH}"' in page
        await made.stage.claim("sink.write")
        said = words((await visitor.get("/datasets/alerts"))[1])
        assert "Waiting 0 batches, the oldest" in said
        assert "Being written 1 batch" in said
        await visitor.world.rows(
            "INSERT INTO pressure (job_id, pressed, scope, depth, oldest_seconds, reason)"
            " SELECT id, true, 'all', 5, 1, %s FROM job WHERE name = 'write'",
            f"Too many wait. {EVIL}",
        )
        page = (await visitor.get("/datasets/alerts"))[1]
        assert EVIL not in page
        assert f"Nothing more is taken into the buffer. Too many wait. {EVIL}" in words(page)
        # The rows of a file, or of Arrow, are counted by nobody.
        await visitor.world.rows("UPDATE buffer_batch SET rows = NULL")
        said = words((await visitor.get("/datasets/alerts"))[1])
        assert "Rows 0 in all of these; those of 1 batch are not counted yet" in said

    buffered(story)


def test_rejected_rows_are_listed_and_what_they_say_is_not_believed(
    buffered: Callable[..., None],
) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        assert "No rejected rows." in words((await visitor.get(PATH))[1])
        first = await made.published(alert("a", EVIL), batch=f"b {EVIL}")
        await made.sunk()
        await made.published(alert("b", "loud"), alert("c" * 5_000, "loud"))
        await made.sunk()
        status, page = await visitor.get(PATH)
        assert status == 200
        assert rows_of(page) == ["2-0", "2-1", "1-0"]
        assert EVIL not in page
        said = words(page)
        assert f"level: '{EVIL}' does not satisfy in ['info', 'warning']." in said
        assert f"b {EVIL}" in said
        assert json.dumps(alert("a", EVIL), separators=(",", ":")) in said
        assert f'href="/tasks/{first.task_id}"' in page
        assert "penstock rejected mend alerts 2:0 row.json" in said
        # A row may be long, and there may be many.
        assert "c" * 1_000 in page
        assert "c" * 2_000 not in page
        for number in range(60):
            await made.published(alert(f"n{number}", "loud"))
        while await visitor.world.value(
            "SELECT count(*) FROM buffer_batch WHERE state <> 'done' AND sink_task IS NULL"
        ):
            await made.sunk()
        page = (await visitor.get(PATH))[1]
        assert len(rows_of(page)) == 50
        assert rows_of(page)[0] == "62-0"
        assert "There are more" in words(page)

    buffered(story)


def test_what_cannot_be_read_in_time_does_not_hold_the_page_up(
    buffered: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        await made.published(alert("a", "loud"))
        await made.sunk()
        monkeypatch.setattr(dataset, "_REJECTED_SECONDS", 0.0)
        status, page = await visitor.get(PATH)
        assert status == 200
        assert rows_of(page) == []
        said = words(page)
        assert "The rejected rows could not be read in time." in said
        assert "penstock rejected list alerts" in said

    buffered(story)


def test_a_batch_that_could_not_be_read_can_only_be_dropped(
    buffered: Callable[..., None],
) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        task = await made.task()
        ok(await made.publish(task, arrow="bm8gYXJyb3c=", batch="garbage"))
        ok(await made.stage.complete(held(task)))
        await made.sunk()
        page = (await visitor.get(PATH))[1]
        assert rows_of(page) == ["1--1"]
        assert "The batch as a whole" in words(page)
        assert f'action="{PATH}/drop"' in page
        assert f'action="{PATH}/replay"' not in page
        said = {"to": PATH, "sequence": "1", "place": "-1"}
        refused = words((await visitor.post(f"{PATH}/replay", said))[1])
        assert "was not kept" in refused
        dropped = words((await visitor.post(f"{PATH}/drop", said))[1])
        assert "Row 1:-1 is dropped." in dropped
        assert "No rejected rows." in dropped

    buffered(story)


def test_a_row_is_replayed_and_dropped_once(buffered: Callable[..., None]) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        await made.published(alert("a", "loud"), alert("b", "loud"))
        await made.sunk()
        said = {"to": PATH, "sequence": "1"}
        done = await visitor.post(f"{PATH}/replay", {**said, "place": "0"})
        assert "Row 1:0 is given back as batch 2; the sink judges it again." in words(done[1])
        assert rows_of(done[1]) == ["1-1"]
        again = words((await visitor.post(f"{PATH}/replay", {**said, "place": "0"}))[1])
        assert "Row 1:0 was dealt with before." in again
        assert (await made.sunk())["rejected"] == 1
        done = await visitor.post(f"{PATH}/drop", {**said, "place": "1"})
        assert "Row 1:1 is dropped." in words(done[1])
        assert rows_of(done[1]) == ["2-0"]
        for place, why in (("7", "No row 7 of batch 1"), ("x", "Place"), ("", "place")):
            wrong = words((await visitor.post(f"{PATH}/drop", {**said, "place": place}))[1])
            assert why in wrong, place
        assert await visitor.world.value("SELECT count(*) FROM rejected_mark") == 2

    buffered(story)


def test_only_operators_deal_with_rows_and_only_from_our_pages(
    buffered: Callable[..., None],
) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        await made.published(alert("a", "loud"))
        await made.sunk()
        said = {"to": PATH, "sequence": "1", "place": "0"}
        assert (await visitor.get(PATH))[0] == 401
        await visitor.sign_in("viewers")
        page = (await visitor.get(PATH))[1]
        assert rows_of(page) == ["1-0"]
        assert len(re.findall("<button[^>]* disabled", page)) == 2
        for deed in ("replay", "drop"):
            assert (await visitor.post(f"{PATH}/{deed}", said))[0] == 403
        await visitor.sign_in("operators")
        for deed in ("replay", "drop"):
            forged = {**said, "form_token": "guessed"}
            assert (await visitor.post(f"{PATH}/{deed}", forged))[0] == 403
            elsewhere = await visitor.browser.post(
                f"{PATH}/{deed}", data=said, headers={"Origin": "http://evil.example"}
            )
            assert elsewhere.status_code == 403
        assert await visitor.world.value("SELECT count(*) FROM rejected_mark") == 0
        assert "is dropped" in words((await visitor.post(f"{PATH}/drop", said))[1])

    buffered(story, api_token="operators", viewer_token="viewers")


def test_what_is_not_buffered_has_neither(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        page = (await visitor.get("/datasets/tidy"))[1]
        assert "Buffer" not in words(page)
        assert "Hot table" not in words(page)
        for path in ("/datasets/tidy/rejected", "/datasets/nothing/rejected"):
            assert (await visitor.get(path))[0] == 404

    console(story)


def test_a_hot_table_shows_how_far_it_is_and_how_to_connect(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p")
        await visitor.world.rows(
            "INSERT INTO hot_table (dataset_id, is_served)"
            " SELECT id, true FROM dataset WHERE name = 'tidy'"
        )

        async def said() -> str:
            page = (await visitor.get("/datasets/tidy"))[1]
            assert EVIL not in page
            return words(page)

        found = await said()
        assert "View hot.tidy State All that is published" in found
        assert "Readers have the current generation" in found
        assert "user=penstock_reader dbname=tables , with the password of that role" in found
        await visitor.world.rows(
            "INSERT INTO hot_partition (dataset_id, generation, partition_key, wanted, applied,"
            " since) SELECT dataset_id, version, 'p', 2, 1, penstock_now() FROM generation"
            " JOIN dataset ON dataset.id = dataset_id WHERE name = 'tidy' AND state = 'current'"
        )
        visitor.world.later(90)
        found = await said()
        assert "Not yet 1 partition of what is published, for 1 min 30 s" in found
        assert "Behind 1 of 1 partition; 0 events wait for it" in found
        await visitor.world.rows("UPDATE hot_table SET is_served = false, problem = %s", EVIL)
        found = await said()
        assert f"Not all that is published: {EVIL}" in found
        assert "Readers do not have the current generation yet" in found

    console(story, hot_url="user=penstock_reader dbname=tables")


def test_the_live_blocks_stand_alone(buffered: Callable[..., None]) -> None:
    async def story(visitor: Visitor, made: Buffers) -> None:
        await made.published(alert("a"))
        session = visitor.sessions.begin(ConsoleRole.OPERATOR)
        said = await dataset.PAGE.load(visitor.parts, PageRequest({"name": "alerts"}, {}, session))
        assert not isinstance(said, PageNotFound)
        whole = {"session": session, "form_token": "", "here": "/", **said}
        assert "1 batch" in words(Renderer().block("dataset", "buffer", whole))
        assert not words(Renderer().block("dataset", "table", whole))

    buffered(story)
