"""The console without a mouse."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.installation import PICKY, Installation
from tests.browser.window import Window

_REACHABLE = """
    () => {
      const kinds = "a[href], button, summary, input, select, textarea, [tabindex='0']";
      const all = [...document.querySelectorAll(kinds)];
      window.reachable = all.filter((each) => each.checkVisibility() && !each.disabled);
      return window.reachable.length;
    }
"""
_FOCUSED = "() => window.reachable.indexOf(document.activeElement)"
_SHOWN = """
    () => {
      const style = getComputedStyle(document.activeElement);
      const box = document.activeElement.querySelector("rect.box");
      const drawn = box && parseFloat(getComputedStyle(box).strokeWidth) > 2;
      return drawn || (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0);
    }
"""
TABS_MAX = 200


def _missed(page: Page) -> list[str]:
    """What Tab does not reach of what there is to reach; where it is has to be seen."""
    count = page.evaluate(_REACHABLE)
    assert 0 < count < TABS_MAX
    reached: set[int] = set()
    for _ in range(count + 10):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(_FOCUSED))
        if page.evaluate("document.activeElement !== document.body"):
            assert page.evaluate(_SHOWN), page.evaluate("document.activeElement.outerHTML")
    left = sorted(set(range(count)) - reached)
    return [page.evaluate("place => window.reachable[place].outerHTML", each) for each in left]


def test_tab_reaches_everything_on_the_page_of_a_task(
    seen: Window, installation: Installation
) -> None:
    # Nothing moves on it: what is there has to be the same until the end.
    seen.open(f"/tasks/{installation.task('picky', PICKY)}")
    seen.until_live()
    expect(seen.page.get_by_role("button", name="Replay")).to_be_enabled()
    assert _missed(seen.page) == []


def test_enter_on_an_action_does_it(seen: Window, installation: Installation) -> None:
    installation.trigger("picky-keyed")
    task = installation.task("picky", "picky-keyed", "dead")
    (installation.there / "picky-keyed").touch()
    seen.open(f"/tasks/{task}")
    seen.until_live()
    for _ in range(TABS_MAX):
        seen.page.keyboard.press("Tab")
        if seen.page.evaluate("document.activeElement.textContent.trim()") == "Replay":
            break
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("h1 .badge")).to_have_text("completed")


def test_enter_on_a_node_opens_the_job(seen: Window) -> None:
    page = seen.page
    seen.open("/")
    seen.until_live()
    for _ in range(TABS_MAX):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.key ?? ''") == "slow":
            break
    assert page.evaluate(_SHOWN)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("slow")
    assert page.url.endswith("/jobs/slow")


def test_the_drawing_moves_with_the_keyboard(seen: Window) -> None:
    page = seen.page
    seen.open("/")
    drawing = page.locator("[data-panzoom] svg")
    before = drawing.get_attribute("style")
    page.locator("[data-panzoom]").focus()
    page.keyboard.press("ArrowRight")
    moved = drawing.get_attribute("style")
    assert moved != before
    page.keyboard.press("+")
    assert drawing.get_attribute("style") != moved


def test_the_first_tab_skips_to_the_content(seen: Window) -> None:
    page = seen.page
    seen.open("/tasks")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
