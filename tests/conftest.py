"""The servers that tests need: started once a run, on free loopback ports, and stopped after it."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from penstock.kernel.errors import PenstockError
from penstock.store.s3.local import LocalS3
from tests.integration.aws_server import AwsServer
from tests.sizes import IS_PROOF, SEED, SIZES

Answer = TypeVar("Answer")

# The default credential chain would otherwise ask the network for an instance's role.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
# Workers of tests leave no lock files with the user, and find none.
_STATE = tempfile.TemporaryDirectory(prefix="penstock-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name
# What a shell starts in the background ignores it, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Folders that tests make for other users are open to them, also where ours is 077.
os.umask(0o022)


class Background:
    """An event loop in a thread, for services that outlive a single test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    loop = Background()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def local_s3(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A real S3 server. Without one, tests are skipped on a laptop and fail in CI."""
    server = LocalS3(Path(tmp_path_factory.mktemp("seaweedfs")), grace_seconds=1)
    try:
        background.run(server.start())
    except PenstockError as error:
        background.run(server.stop())
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no S3 server: {error.message} {error.hint}")
    yield server
    background.run(server.stop())


@pytest.fixture(scope="session")
def aws_server(
    background: Background, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AwsServer]:
    """A server that speaks AWS. Without one, tests are skipped on a laptop and fail in CI."""
    server = AwsServer(tmp_path_factory.mktemp("aws"))
    try:
        background.run(server.start())
    except PenstockError as error:
        background.run(server.stop())
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no AWS server: {error.message} {error.hint}")
    yield server
    background.run(server.stop())


_LONGEST_FIRST = ("browser", "e2e", "integration", "contract", "simulation", "unit")
_NO_PACKAGE_HELPS = ("no AWS: ",)
"""Why a test may be skipped in CI, too: what it needs cannot be installed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make proof` runs; what takes long begins first.

    So several processes (`-n`) end at about the same time.
    """
    left_out = [each for each in items if not IS_PROOF and _meanwhile(each)]
    if left_out:
        items[:] = [each for each in items if each not in left_out]
        config.hook.pytest_deselected(items=left_out)
    rank = {name: number for number, name in enumerate(_LONGEST_FIRST)}
    tests = Path(__file__).parent
    items.sort(key=lambda item: rank.get(item.path.relative_to(tests).parts[0], len(rank)))


def _meanwhile(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("proof")
    name: str | None = mark.kwargs.get("meanwhile") if mark else None
    if name:
        module = item.getparent(pytest.Module)
        assert module is not None
        assert hasattr(module.obj, name), f"{item.nodeid}: there is no {name}"
    return name


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, a skip that a package could have prevented is a failure."""
    if os.environ.get("CI") and not session.exitstatus and _preventable(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat what has failed, what a proof has proved, and what was skipped in vain."""
    say = terminalreporter.write_line
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        say(f"To repeat it alone: make test ARGS='-n 0 \"{report.nodeid}\"'")
    if IS_PROOF:
        say(f"Proved with PENSTOCK_PROOF_SEED={SEED} and {SIZES}.")
    if os.environ.get("CI"):
        for reason in sorted(_preventable(terminalreporter.config)):
            say(f"In CI this skip is a failure: {reason}")


def _preventable(config: pytest.Config) -> set[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in skipped}
    return {each for each in reasons if not each.startswith(_NO_PACKAGE_HELPS)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test has logged goes from process to process as UTF-8, which not every text can be."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
