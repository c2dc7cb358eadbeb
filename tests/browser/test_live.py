"""What happens is seen without a reload, and leaves alone what somebody types and reads."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from penstock.console.live import BEAT, QUIET_SECONDS
from tests.browser.installation import Installation
from tests.browser.window import Window

_SILENT = """
    // A stream that is open and says nothing by itself.
    window.EventSource = class extends EventTarget {
      constructor() {
        super();
        window.source = this;
        setTimeout(() => this.onopen());
      }
      close() {}
    };
"""


def test_a_task_appears_and_ends_without_a_reload(seen: Window, installation: Installation) -> None:
    seen.open("/tasks?job=quick")
    seen.until_live()
    seen.mark()
    installation.trigger("live-1")
    row = seen.page.locator("tr", has_text="live-1")
    expect(row.locator(".badge.completed")).to_be_visible()
    assert seen.is_marked


def test_the_log_and_the_state_of_a_task_follow_it(
    seen: Window, installation: Installation
) -> None:
    installation.trigger("slow-live")
    task = installation.task("slow", "slow-live")
    seen.open(f"/tasks/{task}")
    seen.mark()
    page = seen.page
    expect(page.locator("h1 .badge")).to_have_text("running")
    expect(page.locator("pre.log")).to_contain_text("It has begun.")
    expect(page.locator("#log progress")).to_have_attribute("value", "1")
    assert installation.client.post("/v1/tasks/cancel", json={"tasks": [task]}).status_code == 200
    expect(page.locator("h1 .badge")).to_have_text("cancelled")
    assert seen.is_marked


def test_the_drawing_shows_what_happens(seen: Window, installation: Installation) -> None:
    seen.open("/")
    seen.until_live()
    seen.mark()
    node = seen.page.locator("a.node[data-key=slow]")
    installation.trigger("slow-drawn")
    expect(node).to_have_class(re.compile(r"\brunning\b"))
    task = installation.task("slow", "slow-drawn")
    assert installation.client.post("/v1/tasks/cancel", json={"tasks": [task]}).status_code == 200
    expect(node).not_to_have_class(re.compile(r"\brunning\b"))
    assert seen.is_marked


def test_what_is_typed_and_open_stays(seen: Window, installation: Installation) -> None:
    seen.open("/jobs/slow")
    seen.until_live()
    page = seen.page
    page.locator("details.menu > summary").click()
    typed = page.get_by_label("Reason")
    typed.press_sequentially("The disk")
    installation.trigger("slow-typed")
    # The badge is in the same part of the page as the form.
    expect(page.locator("h1 .badge")).to_have_text("running")
    expect(typed).to_have_value("The disk")
    expect(typed).to_be_focused()
    task = installation.task("slow", "slow-typed")
    assert installation.client.post("/v1/tasks/cancel", json={"tasks": [task]}).status_code == 200


def test_a_page_on_which_nothing_changes_stays_live(seen_first: Window) -> None:
    page = seen_first.page
    page.clock.install()
    page.add_init_script(_SILENT)
    seen_first.open("/jobs")
    connection = page.locator("[data-connection]")
    page.clock.run_for(100)
    expect(connection).to_have_attribute("data-state", "live")
    for _ in range(12):
        page.clock.run_for(round(1000 * QUIET_SECONDS))
        page.evaluate("name => source.dispatchEvent(new MessageEvent(name, {data: '\"\"'}))", BEAT)
        assert connection.get_attribute("data-state") == "live"
    expect(page.locator("[data-trouble]")).to_be_hidden()
    # Without heartbeats it is not.
    page.clock.run_for(round(5000 * QUIET_SECONDS))
    expect(connection).to_have_attribute("data-state", "not connected")


def test_a_lost_connection_is_told_and_comes_back(seen: Window, installation: Installation) -> None:
    seen.open("/tasks?job=quick")
    seen.until_live()
    seen.mark()
    trouble = seen.page.locator("[data-trouble]")
    expect(trouble).to_be_hidden()
    installation.kill_dispatcher()
    expect(trouble).to_contain_text("Connection to the dispatcher lost.")
    expect(seen.page.locator("[data-connection]")).to_contain_text("not connected")
    expect(seen.page.locator("[data-connection][data-state=live]")).to_be_visible()
    expect(trouble).to_be_hidden()
    installation.trigger("live-again")
    row = seen.page.locator("tr", has_text="live-again")
    expect(row.locator(".badge.completed")).to_be_visible()
    assert seen.is_marked
    # What the browser says of a connection that was refused is no mistake of the page.
    seen.wrong[:] = [each for each in seen.wrong if "ERR_" not in each]
