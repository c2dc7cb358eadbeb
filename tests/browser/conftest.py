"""Debian's Chromium, and one installation for all tests of this folder.

Both are of this package alone: while Playwright runs, no other event loop can run in this thread,
and the tests after these have loops of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, expect, sync_playwright

from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.errors import PenstockError
from tests.browser.installation import Installation, bare, guarded, installed
from tests.browser.window import SECONDS_MAX, Window, profile, window
from tests.conftest import RUN, SERVERS, Background

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_AXE = "axe-core@4.11.4"
_FETCH_SECONDS_MAX = 60
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A Chromium without a window; `CHROMIUM` names another than the one that is found."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(
            "The console is not tested in a browser: there is no Chromium in PATH; install one"
            " (on Debian: apt-get install chromium), or name it in the variable CHROMIUM."
        )
    expect.set_options(timeout=1000 * SECONDS_MAX)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=list(_FLAGS))
        except Error as error:
            first = error.message.splitlines()[0]
            pytest.skip(f"The console is not tested in a browser: {found} does not start: {first}")
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def installation(browser: Browser, background: Background) -> Iterator[Installation]:
    """`penstock up` with a pipeline; not started where there is no browser."""
    with tempfile.TemporaryDirectory(prefix="browser-", dir=RUN) as folder:
        place = Path(folder)
        server = LocalPostgres(place / "postgres", settings={"fsync": "off"}, grace_seconds=5)
        try:
            background.run(server.start())
        except PenstockError as error:
            background.run(server.stop())
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no Postgres: {error.message} {error.hint}")
        SERVERS.extend((server.log, place / "up.err"))
        try:
            with installed(place, server.dsn) as installation:
                yield installation
        finally:
            background.run(server.stop())


@pytest.fixture(scope="package")
def guarded_url(installation: Installation) -> Iterator[str]:
    """A dispatcher of the installation that wants a token."""
    with guarded(installation) as url:
        yield url


@pytest.fixture(scope="package")
def bare_url(installation: Installation) -> Iterator[str]:
    """A dispatcher without a DAG, workers or anything else."""
    with bare(installation) as url:
        yield url


@pytest.fixture(scope="package")
def used(browser: Browser) -> Iterator[BrowserContext]:
    """The profile that windows of most tests have."""
    made = profile(browser)
    yield made
    made.close()


@pytest.fixture
def seen(used: BrowserContext, installation: Installation) -> Iterator[Window]:
    """A window on the console."""
    with window(used, installation.url) as opened:
        yield opened


@pytest.fixture
def seen_first(browser: Browser, installation: Installation) -> Iterator[Window]:
    """A window on the console with a profile of its own, for what a profile keeps."""
    own = profile(browser)
    with window(own, installation.url) as opened:
        yield opened
    own.close()


@pytest.fixture
def seen_bare(used: BrowserContext, bare_url: str) -> Iterator[Window]:
    """A window on a console that has nothing to show yet."""
    with window(used, bare_url) as opened:
        yield opened


@pytest.fixture
def stranger(used: BrowserContext, guarded_url: str) -> Iterator[Window]:
    """A window on the console that wants a token, with nobody signed in."""
    with window(used, guarded_url, is_checked=False) as opened:
        yield opened


@pytest.fixture(scope="package")
def axe_or_why(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The source of axe-core, fetched by npm into a folder of the test, or why there is none."""
    npm = shutil.which("npm")
    if npm is None:
        return "", "there is no npm to fetch axe-core with."
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
        return "", f"npm could not fetch axe-core: {why}"
    return source.read_text("utf-8"), ""


@pytest.fixture(scope="package")
def axe(axe_or_why: tuple[str, str]) -> str:
    """The source of axe-core; empty if there is none, of which `test_a_fault_is_found` tells."""
    return axe_or_why[0]
