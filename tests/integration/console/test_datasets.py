"""Datasets, and what is missing of them, as a person sees it."""

from __future__ import annotations

import re
from urllib.parse import quote

from penstock.console.pages import dataset, partition
from penstock.console.pages.base import PageNotFound, PageRequest
from penstock.console.renderer import Renderer
from penstock.console.sessions import ConsoleRole
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.console.publishing import EVIL, cells, kill, publish
from tests.integration.dispatcher.api.stage import held, ok, output
from tests.integration.dispatcher.test_deployment import chain


def test_without_a_dag_the_list_says_what_to_do(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/datasets")
        assert status == 200
        assert "penstock dag apply" in words(page)

    console(story)


def test_the_list_shows_all_datasets_and_finds_by_name(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p", "q")
        page = (await visitor.get("/datasets"))[1]
        for name in ("raw", "tidy", "daily"):
            assert f'href="/datasets/{name}"' in page
        row = page[page.index('data-key="tidy"') :].split("</tr>")[0]
        assert "/jobs/clean" in row
        assert "tidy current clean 2" in words(row)
        told = page[page.index('data-key="raw"') :].split("</tr>")[0]
        assert "raw events only feed" in words(told)
        one = (await visitor.get("/datasets?name=tid"))[1]
        assert "/datasets/tidy" in one
        assert "/datasets/raw" not in one
        none = words((await visitor.get(f"/datasets?name={quote(EVIL)}"))[1])
        assert f"No dataset has “{EVIL}”" in none

    console(story)


def test_a_dataset_shows_its_snapshots_and_what_each_has_changed(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p", "q")
        assert "Snapshots" not in words((await visitor.get("/datasets/tidy"))[1])
        made = ok(await visitor.stage.public.get("/v1/datasets/tidy/snapshots"))["snapshots"]
        page = (await visitor.get("/datasets/tidy"))[1]
        said = words(page)
        assert f"{made[0]['id']} main" in said
        assert "2 parts added" in said
        first = made[0]["id"]
        assert f'href="/datasets/tidy/snapshot?id={first}"' in page

    console(story)


def test_a_dataset_shows_how_its_files_are_maintained(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        rule = "outputs: [{name: tidy, maintain: {cluster: [n, m], compact: true}}]"
        ok(await visitor.stage.apply(chain().replace("outputs: [tidy]", rule)))
        said = words((await visitor.get("/datasets/tidy"))[1])
        assert "Maintenance from 16 files below 32MiB on, clustered by n, m; 10m after" in said
        await publish(visitor, "p")
        made = ok(await visitor.stage.public.post("/v1/datasets/tidy/maintain"))
        # It stands in nobody's way, and can be looked at.
        missing = words((await visitor.get("/datasets/tidy/partitions"))[1])
        assert "No partition is missing" in missing
        status, page = await visitor.get(f"/tasks/{made['tasks'][0]}")
        assert status == 200
        assert "maintain" in words(page)
        assert "Maintenance" not in words((await visitor.get("/datasets/daily"))[1])

    console(story)


def test_a_dataset_shows_sums_generations_columns_and_lineage(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p", "q")
        status, page = await visitor.get("/datasets/tidy")
        assert status == 200
        said = words(page)
        assert "Partitions 2 published" in said
        assert "Rows 6 in all of them" in said
        assert "600 B in 4 files" in said
        # What came at the same time has the last of it first.
        recent = page[page.index("Latest publications") :]
        assert recent.index('data-key="p-q"') < recent.index('data-key="p-p"')
        assert "current" in said
        assert 'href="/datasets/raw"' in page
        assert 'href="/datasets/daily"' in page
        assert EVIL not in page
        assert EVIL in said
        assert 'data-heat="/datasets/tidy/partitions"' in page
        assert len(page) < 40_000

    console(story)


def test_what_a_source_tells_of_is_shown_by_its_events(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await visitor.stage.trigger("p", EVIL)
        status, page = await visitor.get("/datasets/raw")
        assert status == 200
        assert "Events 2 ingested" in words(page)
        listed = (await visitor.get("/datasets/raw/partitions?cells=1"))[1]
        assert cells(listed)["keys"] == [EVIL, "p"]
        assert EVIL not in listed
        path = f"/datasets/raw/partitions/{quote(EVIL, safe='')}"
        assert "publishes no data" in words((await visitor.get(path))[1])
        assert "Events Partition Range Last event p" in words(listed)
        assert "The last 2 partitions, by key." in words(listed)

    console(story)


def test_what_is_missing_is_told_with_its_reason(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "a")
        dead = await kill(visitor, "b", f"no disk {EVIL}")
        await visitor.stage.trigger("c")
        gone = "DELETE FROM task WHERE payload ->> 'partition_key' = 'd'"
        await visitor.stage.trigger("d")
        await visitor.world.rows(gone)
        page = (await visitor.get("/datasets/tidy/partitions?cells=1"))[1]
        found = cells(page)
        states = [found["names"][each] for each in found["states"]]
        assert dict(zip(found["keys"], states, strict=True)) == {
            "a": "published",
            "b": "dead",
            "c": "queued",
            "d": "missing",
        }
        assert found["rows"] == [3, None, None, None]
        assert found["tasks"]["1"] == dead
        assert EVIL not in page
        said = words(page)
        assert f"no disk {EVIL}" in said
        assert "The task waits for a worker." in said
        assert "No task." in said
        assert f'href="/tasks/{dead}"' in page
        assert f"no disk {EVIL}" in words((await visitor.get("/datasets/tidy"))[1])
        for key, why in (("b", "is dead"), ("c", "waits for a worker"), ("d", "No task")):
            shown = words((await visitor.get(f"/datasets/tidy/partitions/{key}"))[1])
            assert "Not published." in shown
            assert why in shown

    console(story)


def test_a_dead_task_that_a_later_one_has_made_good_is_not_shown(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await kill(visitor, "b", "no disk")
        again = {"job": "feed", "partition_key": "b", "event_id": "again"}
        ok(await visitor.stage.public.post("/v1/trigger", json=again))
        await visitor.stage.route()
        await publish(visitor)
        page = (await visitor.get("/datasets/tidy/partitions?cells=1"))[1]
        assert cells(page)["states"] == [0]
        assert "No partition is missing" in words(page)

    console(story)


def test_what_waits_for_another_input_is_told_which(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        extra = """
  side:
    activation: source
    source: {kind: manual}
    outputs: [other]
"""
        both = "    when: all\n    inputs: [tidy, other]"
        dag = chain(extra=extra).replace("    inputs: [tidy]", both)
        ok(await visitor.stage.apply(dag))
        await publish(visitor, "p")
        said = words((await visitor.get("/datasets/daily/partitions"))[1])
        assert "report waits for other, which has not published it yet." in said
        shown = words((await visitor.get("/datasets/daily/partitions/p"))[1])
        assert "Waits for other, which has not published it." in shown

    console(story)


def test_what_a_filter_refuses_is_not_missing(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        where = "    inputs: [{from: tidy, where: partition_key != 'p'}]"
        ok(await visitor.stage.apply(chain().replace("    inputs: [tidy]", where)))
        await publish(visitor, "p")
        said = words((await visitor.get("/datasets/daily/partitions"))[1])
        assert "No partition is missing" in said
        shown = words((await visitor.get("/datasets/daily/partitions/p"))[1])
        assert "The filter of tidy excludes this partition." in shown

    console(story)


def test_unknown_datasets_generations_and_partitions_are_not_there(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        other = "00000000-0000-0000-0000-000000000000"
        for path in (
            "/datasets/nothing",
            "/datasets/%00",
            "/datasets/nothing/partitions",
            "/datasets/nothing/partitions/p",
            "/datasets/tidy?generation=x",
            f"/datasets/tidy?generation={other}",
            "/datasets/tidy/partitions/%00",
            f"/datasets/tidy/partitions/{'k' * 501}",
            "/datasets/tidy/contents?key=none",
        ):
            assert (await visitor.get(path))[0] == 404, path

    console(story)


def test_ten_thousand_partitions_stay_small(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p")
        await visitor.world.rows(
            "INSERT INTO publication (dataset_id, generation, partition_key, range_start,"
            " range_end, mode, task_id, attempt, location, rows)"
            " SELECT dataset_id, generation, 'hour-' || n, n, n + 1, mode, task_id, attempt,"
            " location, n FROM publication, generate_series(1, 12000) AS n"
        )
        status, page = await visitor.get("/datasets/tidy")
        assert status == 200
        assert "Partitions 12,001 published" in words(page)
        assert len(page) < 40_000
        status, table = await visitor.get("/datasets/tidy/partitions")
        assert status == 200
        assert "data-cells" not in table
        assert len(table) < 200_000
        following = re.search(r'href="([^"]*after=[^"]*)"', table)
        assert following is not None
        assert (await visitor.get(following[1].replace("&amp;", "&")))[0] == 200
        found = cells((await visitor.get("/datasets/tidy/partitions?cells=1"))[1])
        assert len(found["keys"]) == 10_000
        # The newest ranges are there, and the oldest are not.
        assert "hour-12000" in found["keys"]
        assert "hour-1" not in found["keys"]
        assert found["leftOut"] > 0

    console(story)


def test_what_is_being_built_can_be_cut_over(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p")
        await visitor.stage.apply(chain(clean="2"))
        page = (await visitor.get("/datasets/tidy"))[1]
        assert 'action="/datasets/tidy/cut-over"' in page
        here = {"to": "/datasets/tidy"}
        refused = words((await visitor.post("/datasets/tidy/cut-over", here))[1])
        assert "is not over" in refused
        for each in (await visitor.parts.backfills.list()).backfills:
            await visitor.parts.backfills.cancel(each.id)
        refused = words((await visitor.post("/datasets/tidy/cut-over", here))[1])
        assert "does not have all that the current one has" in refused
        kept = await visitor.post("/datasets/tidy/cut-over", {**here, "keep": "yes"})
        assert "are carried over" in words(kept[1])
        done = await visitor.post("/datasets/tidy/cut-over", {**here, "force": "yes"})
        assert "are switched to the new generation" in words(done[1])
        after = (await visitor.get("/datasets/tidy"))[1]
        assert "cut-over" not in after
        assert 'href="/operations/versions?version=before"' in after
        row = next(each for each in after.split("<tr ") if "badge retired" in each)
        old = re.search(r"generation=[0-9a-f-]{36}", row)
        assert old is not None
        shown = words((await visitor.get(f"/datasets/tidy?{old[0]}"))[1])
        assert "This generation is retired" in shown

    console(story)


def test_live_blocks_stand_alone(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        await visitor.stage.apply()
        await publish(visitor, "p")
        await visitor.stage.apply(chain(clean="2"))
        await kill(visitor, "q", "no disk")
        rendering, session = Renderer(), visitor.sessions.begin(ConsoleRole.OPERATOR)
        whole = {"session": session, "form_token": "", "here": "/"}
        for page, path in (
            (dataset.DATASETS_PAGE, {}),
            (dataset.PAGE, {"name": "tidy"}),
            (dataset.PAGE, {"name": "raw"}),
            (partition.PAGE, {"name": "tidy", "key": "p"}),
            (partition.PAGE, {"name": "tidy", "key": "q"}),
        ):
            said = await page.load(visitor.parts, PageRequest(path, {}, session))
            assert not isinstance(said, PageNotFound)
            for name in page.live:
                rendering.block(page.name, name, {**whole, **said})

    console(story)


def test_a_digest_changes_with_what_the_map_shows(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        async def digest_now() -> str:
            found = re.search(r'data-digest="(\w+)"', (await visitor.get("/datasets/tidy"))[1])
            assert found is not None
            return found[1]

        await visitor.stage.apply()
        seen = [await digest_now()]
        await visitor.stage.trigger("p")
        seen.append(await digest_now())
        (task,) = await visitor.stage.claim()
        seen.append(await digest_now())
        ok(await visitor.stage.complete(held(task, outputs=[output(task)])))
        seen.append(await digest_now())
        assert len(set(seen)) == 4
        assert await digest_now() == seen[-1]

    console(story)
