"""No serious fault by the rules of axe-core, on any page, in both themes.

axe-core is fetched by npm into a folder of the test; where it cannot be had, this is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.browser.installation import Installation
from tests.browser.places import PATHS, WHOLE_PATHS, addresses
from tests.browser.window import PHONE, THEMES, WIDE, Window

_AXE = "axe-core@4.11.4"
_FETCH_SECONDS_MAX = 60
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


@pytest.fixture(scope="package")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Accessibility is not judged: there is no npm to fetch axe-core with.")
    folder = tmp_path_factory.mktemp("axe")
    flags = ("--no-audit", "--no-fund", "--ignore-scripts", "--no-save", "--loglevel=error")
    try:
        fetched = subprocess.run(
            [npm, "install", *flags, f"--prefix={folder}", _AXE],
            capture_output=True,
            text=True,
            timeout=_FETCH_SECONDS_MAX,
            check=False,
        )
        why = "" if fetched.returncode == 0 else fetched.stderr.strip()[:300]
    except subprocess.TimeoutExpired:
        why = f"it took longer than {_FETCH_SECONDS_MAX} s"
    source = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not source.is_file():
        pytest.skip(f"Accessibility is not judged: npm could not fetch axe-core: {why}")
    return Path(source).read_text("utf-8")


def _faults(seen: Window, axe: str) -> list[Any]:
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
        assert _faults(seen, axe) == [], address


def test_pages_that_have_nothing_to_show_yet(axe: str, seen_bare: Window) -> None:
    for path in WHOLE_PATHS:
        seen_bare.open(path)
        assert _faults(seen_bare, axe) == [], path


def test_a_fault_is_found(axe: str, seen: Window) -> None:
    seen.open("/tasks")
    seen.page.evaluate("document.querySelector('label').remove()")
    seen.page.locator("h1").evaluate("each => { each.style = 'color: #777; background: #888'; }")
    found = {(each["theme"], each["rule"]) for each in _faults(seen, axe)}
    expected = {("light", "select-name"), ("light", "color-contrast"), ("dark", "color-contrast")}
    assert expected <= found


def test_the_page_to_sign_in_has_no_serious_fault(axe: str, stranger: Window) -> None:
    stranger.open("/", status=401)
    assert _faults(stranger, axe) == []
