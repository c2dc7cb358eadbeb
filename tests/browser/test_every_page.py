"""Every page of the table, in both themes and on a phone: nothing goes wrong in any of them.

Nor is there a serious fault by the rules of axe-core, which is fetched by npm (`conftest`).
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import ViewportSize, expect

from tests.browser.installation import PLAIN, Installation
from tests.browser.looks import faults, look
from tests.browser.places import PATHS, WHOLE_PATHS, addresses
from tests.browser.window import PHONE, Window


@pytest.mark.parametrize("path", PATHS)
def test_a_page(path: str, axe: str, seen: Window, installation: Installation) -> None:
    for address in addresses(path, installation):
        seen.open(address)
        look(seen, address, axe)


def test_pages_that_have_nothing_to_show_yet(axe: str, seen_bare: Window) -> None:
    for path in WHOLE_PATHS:
        seen_bare.open(path)
        look(seen_bare, path, axe)
        # It says what to do, or that nothing has to be done.
        assert len(seen_bare.page.locator("main").inner_text()) > 40, path


def test_a_page_that_is_not_there(axe: str, seen: Window) -> None:
    for address in ("/nothing", "/tasks/999999", "/jobs/nothing", "/datasets/%3Cb%3E"):
        seen.open(address, status=404)
        # What the browser says of the status is no mistake of the page.
        seen.wrong[:] = [each for each in seen.wrong if "404" not in each]
        look(seen, address, axe)


def test_a_fault_is_found(axe_or_why: tuple[str, str], seen: Window) -> None:
    axe, why = axe_or_why
    if not axe:
        pytest.skip(f"Accessibility is not judged: {why}")
    seen.open("/tasks")
    seen.page.evaluate("document.querySelector('label').remove()")
    seen.page.locator("h1").evaluate("each => { each.style = 'color: #777; background: #888'; }")
    found = {(each["theme"], each["rule"]) for each in faults(seen, axe)}
    expected = {("light", "select-name"), ("light", "color-contrast"), ("dark", "color-contrast")}
    assert expected <= found


@pytest.mark.parametrize("width", [320, 390, 800])
def test_the_sections_and_the_count_of_alerts_are_in_sight_on_small_screens(
    width: int, seen: Window
) -> None:
    page = seen.page
    page.set_viewport_size({"width": width, "height": 844})
    seen.open("/operations")
    # There are dead tasks, and a rule of every installation is about them.
    expect(page.locator(".top .count")).to_have_text(re.compile(r"\d"))
    for each in (*page.locator(".top nav a").all(), page.locator(".top .count")):
        expect(each).to_be_in_viewport(ratio=1)


def test_nothing_of_a_completed_task_has_to_be_scrolled_for(
    seen: Window, installation: Installation
) -> None:
    seen.open(f"/tasks/{installation.task('quick', PLAIN, 'completed')}")
    tables = seen.page.locator(".beside .scroll").all()
    assert len(tables) >= 3
    for each in tables:
        assert each.evaluate("each => each.scrollWidth <= each.clientWidth"), each.inner_text()


def test_what_an_anchor_leads_to_is_below_the_header(
    seen: Window, installation: Installation
) -> None:
    page = seen.page
    task = installation.task("quick", PLAIN, "completed")
    for size, path, name in (
        (ViewportSize(width=1440, height=300), f"/tasks/{task}#log", "#log h2"),
        (ViewportSize(width=390, height=500), "/operations/sources/feed#trigger", "#trigger h2"),
    ):
        page.set_viewport_size(size)
        seen.open(path)
        page.wait_for_function("scrollY > 0")
        header, heading = page.locator(".top").bounding_box(), page.locator(name).bounding_box()
        assert header is not None
        assert heading is not None
        assert header["height"] <= heading["y"] < size["height"]


def test_lineage_on_a_phone_shows_the_dataset_itself(seen: Window) -> None:
    page = seen.page
    page.set_viewport_size(PHONE)
    seen.open("/datasets/_")
    frame = page.locator(".lineage").bounding_box()
    here = page.locator(".lineage [aria-current] rect").bounding_box()
    assert frame is not None
    assert here is not None
    assert page.locator(".lineage").evaluate("each => each.scrollWidth > each.clientWidth")
    assert frame["x"] <= here["x"]
    assert here["x"] + here["width"] <= frame["x"] + frame["width"] + 1
