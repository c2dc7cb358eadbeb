"""What tasks, people and programs say is shown as they said it: tags and all, as text."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from penstock.console.pages.dataset import partition_path
from tests.browser.installation import ODD, RUDE, SCRIPT, Installation
from tests.browser.window import Window


def test_the_page_of_a_task_shows_its_words(seen: Window, installation: Installation) -> None:
    seen.open(f"/tasks/{installation.task('rude', RUDE)}")
    page = seen.page
    expect(page.locator("pre.reason")).to_contain_text(SCRIPT)
    expect(page.locator("pre.log")).to_contain_text(f"</pre></script><!-- {SCRIPT}")
    expect(page.locator(".head")).to_contain_text(RUDE)
    page.locator("summary", has_text="Payload").click()
    expect(page.locator("details[open] pre").last).to_contain_text(SCRIPT)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/tasks?status=dead",
        "/jobs/rude",
        "/jobs/nightly",
        "/operations",
        f"/operations/events?partition={quote(RUDE)}",
        "/datasets/rude/partitions",
        partition_path("rude", RUDE),
    ],
)
def test_a_page_shows_it(path: str, seen: Window, installation: Installation) -> None:
    installation.pause("nightly")
    seen.open(path)
    seen.until_live()
    expect(seen.page.locator("main")).to_contain_text(SCRIPT)


def test_the_rows_of_a_partition_are_shown(seen: Window) -> None:
    seen.open(partition_path("fresh", ODD))
    # They are fetched by a script, and put into the page.
    expect(seen.page.locator("main")).to_contain_text("somebody")
    expect(seen.page.locator("main")).to_contain_text(SCRIPT)


def test_odd_names_and_keys_lead_where_they_should(seen: Window) -> None:
    page = seen.page
    seen.open("/")
    page.locator("a.node[data-key='-odd_-name-']").click()
    expect(page.locator("h1")).to_contain_text("-odd_-name-")
    page.locator(".head").get_by_role("link", name="Tasks").click()
    page.locator("tr", has_text=ODD).locator("td").first.get_by_role("link").click()
    expect(page.locator(".head")).to_contain_text(ODD)
    page.locator("main").get_by_role("link", name=ODD).last.click()
    expect(page.locator("h1")).to_contain_text(ODD)
    page.get_by_role("link", name="All tasks of this key").click()
    expect(page.locator("tbody tr")).to_have_count(2)


def test_the_heat_map_leads_to_an_odd_partition(seen: Window) -> None:
    seen.open("/datasets/_")
    frame = seen.page.locator("[data-frame]")
    frame.scroll_into_view_if_needed()
    expect(seen.page.locator("[data-told]")).to_contain_text("From ")
    frame.focus()
    told = seen.page.locator("[data-told]")
    for _ in range(20):
        if ODD in told.inner_text():
            break
        frame.press("ArrowLeft")
    expect(told).to_contain_text(ODD)
    frame.press("Enter")
    expect(seen.page.locator("h1")).to_contain_text(ODD)
