"""The page of alerts, and the count of those that are open in the header of every page."""

from __future__ import annotations

from typing import Any

from penstock.dispatcher.views.status import AlertViews
from tests.integration.console.looking import Look, Visitor, words
from tests.integration.dispatcher.alerting import judge_of
from tests.integration.dispatcher.test_alerts import HOOK, die
from tests.integration.dispatcher.test_deployment import Pipeline

EVIL = "<script>alert(1)</script>"


async def died(visitor: Visitor, table: dict[str, Any] | None = None) -> list[int]:
    await visitor.stage.apply()
    dead = await die(Pipeline(visitor.world), reason=EVIL)
    await judge_of(visitor.world, table or {}).turn()
    return dead


def test_without_alerts_it_says_so_and_what_is_looked_at(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        status, page = await visitor.get("/alerts")
        assert status == 200
        assert "The rules were not evaluated yet." in words(page)
        await judge_of(visitor.world).turn()
        _, page = await visitor.get("/alerts")
        said = words(page)
        assert "No alert is open." in said
        assert "A task of a job has died." in said
        assert "None: alerts are shown here only." in said
        assert '<span class="count" data-live="open-alerts"></span>' in page

    console(story)


def test_what_is_open_is_shown_with_a_link_and_who_was_told(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        dead = await died(visitor, HOOK)
        status, page = await visitor.get("/alerts")
        assert status == 200
        assert f"1 task of job clean is dead: {EVIL}" in words(page)
        assert EVIL not in page
        assert "&lt;script&gt;" in page
        assert 'href="/tasks?status=dead&amp;job=clean"' in page
        assert "webhook: pending" in words(page)
        assert '<span class="count" data-live="open-alerts">1</span>' in page
        # On every page.
        _, page = await visitor.get("/tasks")
        assert '<span class="count" data-live="open-alerts">1</span>' in page
        await visitor.world.rows(
            "UPDATE alert_notice SET given_up_at = penstock_now(), last_error = %s", EVIL
        )
        await visitor.parts.tasks.replay(dead)
        await judge_of(visitor.world, HOOK).turn()
        _, page = await visitor.get("/alerts")
        assert "The condition cleared" in words(page)
        # It does not count where people look for what is the matter.
        assert await AlertViews(visitor.world.database).open_count() == 0
        assert "Failed to send alert 1 to webhook" in words(page)
        assert EVIL not in page
        visitor.world.later(60)
        await judge_of(visitor.world, HOOK).turn()
        _, page = await visitor.get("/alerts")
        said = words(page)
        assert "No alert is open." in said
        assert "The tasks were replayed" in said
        assert "1 min" in said

    console(story)


def test_many_are_cut_and_what_is_over_has_pages(console: Look) -> None:
    async def story(visitor: Visitor) -> None:
        for number, over in ((300, "NULL, NULL"), (120, "penstock_now(), 'so'")):
            await visitor.world.rows(
                "INSERT INTO alert (rule, kind, subject, summary, path, over_at, over_why)"
                f" SELECT 'r', 'k', n::text, 'alert ' || n, '/x', {over}"
                f" FROM generate_series(1, {number}) AS n"
            )
        _, page = await visitor.get("/alerts")
        assert page.count("<tr data-key") == 200 + 50
        assert "The first 200; penstock alerts lists all of them." in words(page)
        assert 'href="/alerts?before=371"' in page
        _, page = await visitor.get("/alerts?before=371")
        assert "alert 70" in words(page)
        assert "Newest" in words(page)
        for wrong in ("x", "0", "-1", "9" * 30, "²"):
            status, _ = await visitor.get(f"/alerts?before={wrong}")
            assert status == 404

    console(story)
