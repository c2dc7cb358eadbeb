"""What is looked at on every page, in one visit: in both themes, on a large screen and a phone."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

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


def look(seen: Window, address: str, axe: str) -> None:
    """Nothing is wrong on a page that is open; without axe-core, its rules are left out."""
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
    seen.check()
    assert faults(seen, axe) == [], address
    assert seen.wrong == [], address


def faults(seen: Window, axe: str) -> list[Any]:
    """The faults of a page: in the light theme on a large screen, in the dark one on a phone."""
    found = []
    if axe:
        seen.until_live()
        seen.page.evaluate(axe)
        for theme, size in zip(THEMES, (WIDE, PHONE), strict=True):
            seen.page.set_viewport_size(size)
            seen.page.emulate_media(color_scheme=theme)
            told = {"theme": theme, "width": size["width"]}
            found += [{**told, **each} for each in seen.page.evaluate(_RUN)]
    seen.page.set_viewport_size(WIDE)
    seen.page.emulate_media(color_scheme=THEMES[0])
    return found
