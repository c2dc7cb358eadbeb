"""No serious fault by the rules of axe-core, on any page, in both themes.

axe-core is fetched by npm (`conftest.axe`); where it cannot be had, this is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.installation import Installation
from tests.browser.places import PATHS, WHOLE_PATHS, addresses
from tests.browser.window import PHONE, THEMES, WIDE, Window

_RUN = """
    async () => {
      const found = await axe.run(document, { resultTypes: ["violations"] });
      return found.violations
        .filter((each) => ["serious", "critical"].includes(each.impact))
        .map((each) => ({
          rule: each.id,
          told: each.help,
          where: each.nodes.slice(0, 4).map((node) => `${node.html} ${node.failureSummary}`),
        }));
    }
"""


def faults(seen: Window, axe: str) -> list[Any]:
    """The faults of a page: in the light theme on a large screen, in the dark one on a phone."""
    found = []
    seen.until_live()
    seen.page.evaluate(axe)
    for theme, size in zip(THEMES, (WIDE, PHONE), strict=True):
        seen.page.set_viewport_size(size)
        seen.page.emulate_media(color_scheme=theme)
        found += [{"theme": theme, **each} for each in seen.page.evaluate(_RUN)]
    seen.page.set_viewport_size(WIDE)
    seen.page.emulate_media(color_scheme=THEMES[0])
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_page_has_no_serious_fault(
    path: str, axe: str, seen: Window, installation: Installation
) -> None:
    for address in addresses(path, installation):
        seen.open(address)
        assert faults(seen, axe) == [], address


def test_pages_that_have_nothing_to_show_yet(axe: str, seen_bare: Window) -> None:
    for path in WHOLE_PATHS:
        seen_bare.open(path)
        assert faults(seen_bare, axe) == [], path


def test_a_fault_is_found(axe: str, seen: Window) -> None:
    seen.open("/tasks")
    seen.page.evaluate("document.querySelector('label').remove()")
    seen.page.locator("h1").evaluate("each => { each.style = 'color: #777; background: #888'; }")
    found = {(each["theme"], each["rule"]) for each in faults(seen, axe)}
    expected = {("light", "select-name"), ("light", "color-contrast"), ("dark", "color-contrast")}
    assert expected <= found


def test_the_page_to_sign_in_has_no_serious_fault(axe: str, stranger: Window) -> None:
    stranger.open("/", status=401)
    assert faults(stranger, axe) == []
