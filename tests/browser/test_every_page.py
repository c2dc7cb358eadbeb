"""Every page of the table, in both themes and on a phone: nothing goes wrong in any of them."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.installation import Installation
from tests.browser.places import PATHS, WHOLE_PATHS, addresses
from tests.browser.window import PHONE, THEMES, WIDE, Window


@pytest.mark.parametrize("path", PATHS)
def test_a_page(path: str, seen: Window, installation: Installation) -> None:
    for address in addresses(path, installation):
        seen.open(address)
        _looked_at(seen, address)


def test_pages_that_have_nothing_to_show_yet(seen_bare: Window) -> None:
    for path in WHOLE_PATHS:
        seen_bare.open(path)
        _looked_at(seen_bare, path)
        # It says what to do, or that nothing has to be done.
        assert len(seen_bare.page.locator("main").inner_text()) > 40, path


def test_a_page_that_is_not_there(seen: Window) -> None:
    for address in ("/nothing", "/tasks/999999", "/jobs/nothing", "/datasets/%3Cb%3E"):
        seen.open(address, status=404)
        # What the browser says of the status is no mistake of the page.
        seen.wrong[:] = [each for each in seen.wrong if "404" not in each]
        _looked_at(seen, address)


def _looked_at(seen: Window, address: str) -> None:
    page = seen.page
    expect(page.locator("h1")).to_have_count(1)
    assert page.locator("h1").inner_text().strip(), address
    assert page.title().endswith("· Penstock"), address
    seen.until_live()
    for size in (WIDE, PHONE):
        page.set_viewport_size(size)
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(16, 21, 27)") is (theme == "dark"), address
            assert seen.too_wide() == [], f"{address} at {size['width']}, {theme}"
    page.set_viewport_size(WIDE)
    seen.check()
