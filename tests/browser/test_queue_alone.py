"""`penstock queue console` in a browser: in both themes and on a phone, live and steered."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from penstock.queue_console import SITE
from tests.browser.looks import look
from tests.browser.window import Window, window
from tests.e2e.command import PENSTOCK, penstock

SCRIPT = "<script>window.attacked = 'said'</script>"
STOP_SECONDS_MAX = 20.0


@dataclass
class Alone:
    """A console for one queue."""

    url: str
    store: str
    task: str

    def queue(self, *words: str) -> str:
        ran = penstock("queue", *words, "--store", self.store, "--queue", "seen")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()


@contextlib.contextmanager
def _console(store: str, *words: str) -> Iterator[str]:
    process = subprocess.Popen(
        [PENSTOCK, "queue", "console", store, "--queue", "seen", "--port", "0", "--json", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")},
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said, f"It has ended with {process.wait()}."
        yield json.loads(said)["url"]
    finally:
        process.terminate()
        assert process.wait(STOP_SECONDS_MAX) == 0
        process.stdout.close()


@pytest.fixture(scope="module")
def alone(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """A queue with something of every kind, and its console; not started without a browser."""
    assert browser.is_connected()
    folder: Path = tmp_path_factory.mktemp("alone")
    made = Alone("", f"file://{folder}", "")
    made.task = made.queue("submit", "mail", json.dumps({SCRIPT: SCRIPT}), "--tag", "env=prod")
    made.queue("submit", "later", "--delay", "2h", "--priority", "3")
    made.queue("limits", "set", "api", "--concurrency", "3")
    made.queue("schedule", "add", "nightly", "0 6 * * *", "report")
    with _console(made.store) as made.url:
        yield made


@pytest.fixture
def seen_alone(used: BrowserContext, alone: Alone) -> Iterator[Window]:
    with window(used, alone.url) as opened:
        yield opened


def _addresses(alone: Alone) -> list[str]:
    found = [each.path.replace("{id:path}", alone.task) for each in SITE.pages]
    return [f"{each}?name=seen" for each in found]


def test_every_page_in_both_themes_and_on_a_phone(
    seen_alone: Window, alone: Alone, axe: str
) -> None:
    for address in _addresses(alone):
        seen_alone.open(address)
        look(seen_alone, address, axe)


def test_a_task_is_found_cancelled_and_shown_as_it_changes(
    seen_alone: Window, alone: Alone
) -> None:
    page = seen_alone.page
    fresh = alone.queue("submit", "fresh", '{"n": 1}')
    seen_alone.open("/queue/tasks?name=seen")
    page.get_by_label("Find").fill(fresh)
    page.get_by_role("button", name="Show").click()
    page.get_by_role("link", name=fresh).click()
    expect(page.locator("h1")).to_contain_text("ready")
    seen_alone.until_live()
    seen_alone.mark()
    alone.queue("cancel", fresh, "--reason", "a typo")
    # It changes by itself.
    expect(page.locator("h1")).to_contain_text("cancelled")
    expect(page.locator("main")).to_contain_text("a typo")
    assert seen_alone.is_marked
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".told")).to_contain_text("Replayed as")


def test_a_read_only_console_has_no_lever(used: BrowserContext, alone: Alone) -> None:
    with _console(alone.store, "--read-only") as url, window(used, url) as opened:
        for address in _addresses(alone):
            opened.open(address)
            expect(opened.page.locator("form[method=post] button:not([disabled])")).to_have_count(0)
        expect(opened.page.locator(".corner")).to_contain_text("read-only")
