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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, so that several processes (`-n`) end at about the same time."""
    rank = {name: number for number, name in enumerate(_LONGEST_FIRST)}
    tests = Path(__file__).parent
    items.sort(key=lambda item: rank.get(item.path.relative_to(tests).parts[0], len(rank)))


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
