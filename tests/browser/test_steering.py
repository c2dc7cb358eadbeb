"""Everything that people do to a pipeline, by clicking."""

from __future__ import annotations

import re

from playwright.sync_api import Dialog, expect

from tests.browser.installation import PIPELINE, Installation
from tests.browser.window import Window


def test_trigger(seen: Window) -> None:
    page = seen.page
    seen.open("/")
    page.locator("a.node[data-key=feed]").click()
    page.locator(".head").get_by_role("link", name="Trigger").click()
    page.get_by_label("Partition", exact=True).fill("clicked-1")
    page.get_by_role("button", name="Trigger").click()
    expect(page.locator(".told")).to_contain_text("was ingested")
    expect(page.locator("tr", has_text="clicked-1").locator("a", has_text="quick")).to_be_visible()
    page.locator("tr", has_text="clicked-1").locator("a", has_text="quick").click()
    expect(page.locator("h1 .badge")).to_have_text("completed")


def test_a_trigger_that_is_wrong_is_told(seen: Window) -> None:
    page = seen.page
    seen.open("/operations/sources/feed")
    page.locator("#trigger summary", has_text="Payload").click()
    page.get_by_label("A JSON object").fill("{wrong")
    page.get_by_role("button", name="Trigger").click()
    expect(page.locator(".told.bad")).to_contain_text("payload")


def test_backfill_with_its_preview(seen: Window, installation: Installation) -> None:
    page = seen.page
    seen.open("/jobs/quick")
    page.locator(".head").get_by_role("link", name="Backfill").click()
    expect(page.get_by_label("Job")).to_have_value("quick")
    page.get_by_label("days").check()
    page.get_by_label("First day").fill("2025-12-30")
    page.get_by_label("Last day (inclusive)").fill("2026-01-01")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("h1")).to_have_text("Preview of the backfill")
    expect(page.locator("main")).to_contain_text("2025-12-30, 2025-12-31, 2026-01-01")
    # One of them is there already, and nothing was started.
    expect(page.locator(".figure", has_text="Existing")).to_contain_text("1")
    expect(page.locator(".figure", has_text="New")).to_contain_text("2")
    before = len(installation.client.get("/v1/backfills").json()["backfills"])
    page.get_by_role("button", name="Start 3 tasks").click()
    expect(page.locator("h1")).to_have_text(re.compile(r"Backfill \d+"))
    expect(page.locator("main")).to_contain_text("All 3 computed.")
    expect(page.locator("h1 .badge")).to_have_text("done")
    assert len(installation.client.get("/v1/backfills").json()["backfills"]) == before + 1


def test_replay_of_a_dead_task_once_its_cause_is_gone(
    seen: Window, installation: Installation
) -> None:
    installation.trigger("picky-replayed")
    task = installation.task("picky", "picky-replayed", "dead")
    page = seen.page
    seen.open("/tasks?status=dead")
    page.locator("tr", has_text="picky-replayed").get_by_role("link", name=f"{task}").click()
    expect(page.locator(".standing")).to_contain_text("picky-replayed is not there.")
    (installation.there / "picky-replayed").touch()
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".told")).to_contain_text(f"Task {task} is queued for replay.")
    expect(page.locator("h1 .badge")).to_have_text("completed")
    expect(page.locator(".attempts tbody tr")).to_have_count(2)
    expect(page.get_by_role("button", name="Replay")).to_have_count(0)


def test_cancel_asks_first(seen: Window, installation: Installation) -> None:
    installation.trigger("slow-cancelled")
    task = installation.task("slow", "slow-cancelled", "running")
    page = seen.page
    seen.open("/tasks?job=slow")
    seen.open(f"/tasks/{task}")
    asked: list[str] = []

    def no(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    page.once("dialog", no)
    page.get_by_role("button", name="Cancel").click()
    assert asked == [f"Cancel task {task}? It will not be retried."]
    expect(page.locator("h1 .badge")).to_have_text("running")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".told")).to_contain_text(f"Task {task} was asked to stop")
    expect(page.locator("h1 .badge")).to_have_text("cancelled")
    # Back leads to where one came from, and not to the same page.
    page.go_back()
    expect(page).to_have_url(f"{seen.url}/tasks?job=slow")


def test_what_cannot_be_sent_is_told_and_nothing_that_was_typed_is_lost(seen: Window) -> None:
    page = seen.page
    seen.open("/jobs/held")
    seen.mark()
    page.locator("details.menu > summary").click()
    why = page.get_by_label("Reason")
    why.fill("The disk is full.")
    page.route("**/operations/pause", lambda route: route.abort("connectionrefused"))
    page.get_by_role("button", name="Pause held").click()
    expect(page.locator(".told.bad")).to_contain_text("The dispatcher does not answer")
    expect(why).to_have_value("The disk is full.")
    expect(page.get_by_role("button", name="Pause held")).to_be_enabled()
    # What is refused is told in its words.
    page.unroute("**/operations/pause")
    page.evaluate(
        "for (const each of document.querySelectorAll('[name=form_token]')) each.value = 'x'"
    )
    page.get_by_role("button", name="Pause held").click()
    told = "This form has expired. Reload the page and submit the form again."
    expect(page.locator(".told.bad")).to_have_text(told)
    assert seen.is_marked
    # What the browser says of both is no mistake of the page.
    seen.wrong[:] = [each for each in seen.wrong if "Failed to load resource" not in each]


def test_pause_and_resume_a_job(seen: Window) -> None:
    page = seen.page
    seen.open("/jobs/held")
    page.locator("details.menu > summary").click()
    page.get_by_label("Reason").fill("The disk is full.")
    page.get_by_role("button", name="Pause held").click()
    expect(page.locator("h1 .badge")).to_have_text("paused")
    expect(page.locator("main")).to_contain_text("The disk is full.")
    page.get_by_role("link", name="Operations").first.click()
    row = page.locator("#pauses tr", has_text="held")
    expect(row).to_contain_text("The disk is full.")
    row.get_by_role("button", name="Resume").click()
    # A page that is on its way out has no rows either; the sentence is of the page that follows.
    expect(page.locator(".told")).to_contain_text("held is resumed.")
    expect(page.locator("#pauses tr", has_text="held")).to_have_count(0)
    seen.open("/jobs/held")
    expect(page.locator("h1 .badge")).not_to_have_text("paused")


def test_pause_and_resume_everything(seen: Window, installation: Installation) -> None:
    page = seen.page
    page.on("dialog", lambda dialog: dialog.accept())
    seen.open("/operations")
    page.get_by_role("button", name="Pause everything").click()
    expect(page.locator("#pauses tr", has_text="quick")).to_be_visible()
    installation.trigger("paused-1")
    page.get_by_role("button", name="Resume everything").click()
    expect(page.locator(".told")).to_contain_text("resumed.")
    expect(page.locator("#pauses tr", has_text="quick")).to_have_count(0)
    installation.task("quick", "paused-1", "completed")


def test_roll_back_shows_what_it_does_and_asks(seen: Window, installation: Installation) -> None:
    client, source = installation.client, PIPELINE.read_text()
    present = client.get("/v1/dag").json()["version"]["id"]
    more = "  more:\n    runtime: process\n    operator: browsed:quick\n    inputs: [held.held]\n"
    applied = client.post("/v1/dag", json={"source": f"{source}\n{more}    outputs: [more]\n"})
    assert applied.status_code == 200, applied.text
    page = seen.page
    try:
        seen.open("/")
        page.get_by_role("link", name=f"Version {applied.json()['version']}").click()
        page.locator(".head").get_by_role("link", name="Roll back").click()
        expect(page.locator("main")).to_contain_text("Removed jobs")
        expect(page.locator("dd", has_text="more")).to_be_visible()
        asked: list[str] = []

        def no(dialog: Dialog) -> None:
            asked.append(dialog.message)
            dialog.dismiss()

        page.once("dialog", no)
        with page.expect_event("dialog"):
            page.get_by_role("button", name=f"Put version {present} in force").click()
        assert asked == [f"Put version {present} of the DAG in force, for all jobs?"]
        assert client.get("/v1/dag").json()["version"]["id"] == applied.json()["version"]
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name=f"Put version {present} in force").click()
        expect(page.locator(".told")).to_contain_text(f"Version {present} of the DAG is in force.")
        assert client.get("/v1/dag").json()["version"]["id"] == present
    finally:
        client.post("/v1/dag/rollback", json={"version": present})


def test_the_theme_that_is_chosen_stays(seen_first: Window) -> None:
    page = seen_first.page
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(16, 21, 27)'"
    seen_first.open("/")
    assert page.evaluate(dark) is False
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(dark) is True
    seen_first.open("/tasks")
    assert page.evaluate(dark) is True


def test_a_rejected_row_is_dropped_where_its_dataset_shows_it(
    seen: Window, installation: Installation
) -> None:
    rejected = "/v1/buffers/alerts/rejected"
    before = len(installation.client.get(rejected).json()["rows"])
    installation.trigger("2026-12-31")
    installation.until(lambda: len(installation.client.get(rejected).json()["rows"]) == before + 1)
    page = seen.page
    page.once("dialog", Dialog.accept)
    seen.open("/datasets/alerts")
    rows = page.locator("[data-fetched] tbody tr")
    expect(rows).to_have_count(before + 1)
    rows.first.get_by_role("button", name="Drop").click()
    expect(page.locator(".told")).to_contain_text("is dropped")
    expect(rows).to_have_count(0)
    expect(page.locator("tbody tr")).to_have_count(before)
