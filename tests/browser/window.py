"""A window of the browser that hears what goes wrong in it, and what tests look at in one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize, expect

Theme = Literal["light", "dark"]

WIDE = ViewportSize(width=1440, height=900)
PHONE = ViewportSize(width=390, height=844)
THEMES: tuple[Theme, ...] = ("light", "dark")
SECONDS_MAX = 30.0

_VIOLATIONS = """
    window.violations = [];
    addEventListener("securitypolicyviolation", (event) => {
      window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
    });
"""
_UNTRUE = """
    () => [
      ...document.querySelectorAll("script:not([src]):not([type='application/json'])"),
      ...document.querySelectorAll("img[src='x'], [onerror], [onclick], b:empty"),
    ].map((each) => each.outerHTML)
"""
_TOO_WIDE = """
    async () => {
      // What is drawn by scripts is drawn anew in the frame after a change of its size.
      for (const _ of [1, 2]) await new Promise((done) => requestAnimationFrame(done));
      const root = document.documentElement;
      const all = [...document.querySelectorAll("body *")];
      const outside = root.scrollWidth <= root.clientWidth
        ? [] : all.filter((each) => each.getBoundingClientRect().right > root.clientWidth + 1);
      // The drawing of the DAG is moved in its pane, and buttons zoom it.
      const cut = all.filter((each) => !each.closest("[data-panzoom], svg")
        && ["hidden", "clip"].includes(getComputedStyle(each).overflowX)
        && each.scrollWidth > each.clientWidth + 1);
      return [...outside, ...cut].slice(0, 8).map((each) => each.outerHTML.slice(0, 150));
    }
"""


@dataclass
class Window:
    """One page of the browser, for one installation."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)
    """What was told on the console, and what scripts have failed with."""

    def open(self, path: str, *, status: int = 200) -> None:
        """Go to a page; its scripts have run when this returns."""
        answer = self.page.goto(f"{self.url}{path}", wait_until="load")
        assert answer is not None
        assert answer.status == status, f"{path}: {answer.status} {answer.text()[:500]}"

    def until_live(self) -> None:
        """Wait until the page is connected to its stream, if it has one."""
        if self.page.locator("body[data-stream]").count():
            expect(self.page.locator("[data-connection][data-state=live]")).to_be_visible()

    def mark(self) -> None:
        """Remember this document: `is_marked` says whether it is still the same one."""
        self.page.evaluate("window.isMarked = true")

    @property
    def is_marked(self) -> bool:
        return bool(self.page.evaluate("window.isMarked === true"))

    def check(self) -> None:
        """Nothing went wrong, and nobody's words have become a part of the page."""
        violations = self.page.evaluate("window.violations")
        assert (self.wrong, violations) == ([], []), self.page.url
        assert self.page.evaluate("window.attacked") is None, self.page.url
        assert self.page.evaluate(_UNTRUE) == [], self.page.url

    def too_wide(self) -> list[str]:
        """What makes the page itself scroll sideways, or is cut off where nobody can scroll."""
        found: list[str] = self.page.evaluate(_TOO_WIDE)
        return found


def profile(browser: Browser) -> BrowserContext:
    """An empty profile: what it has loaded once is loaded sooner in its next window."""
    made = browser.new_context(viewport=WIDE, color_scheme=THEMES[0])
    made.add_init_script(_VIOLATIONS)
    return made


@contextmanager
def window(used: BrowserContext, url: str, *, is_checked: bool = True) -> Iterator[Window]:
    """A window in which nobody is signed in. In the end, nothing may have gone wrong in it."""
    page = used.new_page()
    page.set_default_timeout(1000 * SECONDS_MAX)
    opened = Window(page, url)

    def heard(said: ConsoleMessage) -> None:
        # Of an answer that is no page, browsers ask for an icon that is not there.
        is_icon = said.location["url"].endswith("/favicon.ico")
        if said.type in ("error", "warning") and not is_icon:
            opened.wrong.append(said.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: opened.wrong.append(str(error)))
    try:
        yield opened
        if is_checked:
            opened.check()
    finally:
        page.close()
        used.clear_cookies()
