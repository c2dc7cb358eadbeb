"""A window of the browser that hears what goes wrong in it, and what tests look at in one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from playwright.sync_api import Browser, Page, ViewportSize, expect

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
        """What makes the page itself scroll sideways; empty if nothing does."""
        found: list[str] = self.page.evaluate("""
            () => {
              const width = document.documentElement.clientWidth;
              if (document.documentElement.scrollWidth <= width) return [];
              return [...document.querySelectorAll("body *")]
                .filter((each) => each.getBoundingClientRect().right > width + 1)
                .slice(0, 8)
                .map((each) => each.outerHTML.slice(0, 120));
            }
        """)
        return found


def window(browser: Browser, url: str, *, theme: Theme = "light") -> Window:
    """A window with an empty profile."""
    context = browser.new_context(viewport=WIDE, color_scheme=theme)
    context.add_init_script(_VIOLATIONS)
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS_MAX)
    opened = Window(page, url)
    page.on(
        "console",
        lambda said: opened.wrong.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: opened.wrong.append(str(error)))
    return opened
