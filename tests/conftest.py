"""The servers that tests need: started once a run, on free loopback ports, and stopped after it."""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from xdist.scheduler import LoadFileScheduling

from penstock.kernel.errors import PenstockError
from penstock.store.s3.local import LocalS3
from penstock.tokens.kms import KmsSigner
from tests import leftovers
from tests.integration.aws_server import AwsServer
from tests.sizes import IS_PROOF, SEED, SIZES, some

Answer = TypeVar("Answer")

# The default credential chain would otherwise ask the network for an instance's role.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
# The first process of a run looks after what the run leaves.
_GUARD = None if leftovers.VARIABLE in os.environ else leftovers.Guard()
RUN = os.environ[leftovers.VARIABLE]
"""A folder that is removed when the run has ended, in whatever way."""
# Workers of tests leave no lock files with the user, and find none.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-", dir=RUN)
# What a shell starts in the background ignores it, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if _GUARD:
    # Whoever ends a run is waited for: what it has started ends first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
# Folders that tests make for other users are open to them, also where ours is 077.
os.umask(0o022)


SERVERS: list[Path] = []
"""The logs of the servers that the tests of this process share: a failure shows their ends."""


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


@contextmanager
def an_s3_server(background: Background, folder: Path, *, mints: bool) -> Iterator[LocalS3]:
    """A real S3 server. Without one, tests are skipped on a laptop and fail in CI."""
    server = LocalS3(folder, mints=mints, grace_seconds=1)
    try:
        background.run(server.start())
    except PenstockError as error:
        background.run(server.stop())
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no S3 server: {error.message} {error.hint}")
    SERVERS.append(server.log)
    try:
        yield server
    finally:
        background.run(server.stop())


@pytest.fixture(scope="session")
def local_s3(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A real S3 server."""
    folder = Path(tmp_path_factory.mktemp("seaweedfs"))
    with an_s3_server(background, folder, mints=False) as server:
        yield server


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
    # The server has one thread, and others may have the machine: how long it takes says nothing.
    with pytest.MonkeyPatch.context() as patient:
        opened = vars(KmsSigner)["open"].__func__
        patient.setitem(opened.__kwdefaults__, "seconds_max", 60.0)
        patient.setattr("penstock.tokens.kms._CONNECT_SECONDS_MAX", 30.0)
        patient.setattr("penstock.tokens.kms._READ_SECONDS_MAX", 30.0)
        yield server
    background.run(server.stop())


_TOGETHER = ("tests/integration/spark/", "tests/browser/", "tests/architecture/")
"""Folders that one process runs: their files share a JVM, an installation and its browser, or what
was parsed."""
_LONGEST_FIRST = (*_TOGETHER, "tests/e2e/", "tests/integration/", "tests/contract/", "tests/sim")
_ALONE = tuple(f"tests/integration/spark/test_{each}" for each in ("connect", "host", "packages"))
"""Files of these folders that another process may run: they start JVMs of their own."""
_NO_PACKAGE_HELPS = (
    "no AWS: ",
    "no control groups can be made here",
    "the folder of the tests is not on a local file system",
    "the jar was made by ",
)
"""Why a test may be skipped in CI, too: what it needs cannot be installed."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What was imported and collected stays, so the garbage collector need not look at it.

    There is much of it, and each simulated world collects when it ends."""
    gc.disable()
    answer = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return answer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make proof` runs; what takes long begins first.

    So several processes (`-n`) end at about the same time. What hypothesis draws is a proof, too.
    """
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.function):
            item.add_marker("proof")
    left_out = [each for each in items if not IS_PROOF and _meanwhile(each)]
    if left_out:
        items[:] = [each for each in items if each not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: [not item.nodeid.startswith(each) for each in _LONGEST_FIRST])


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a file to a process, and some folders as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        is_alone = nodeid.startswith(_ALONE)
        together = (each for each in _TOGETHER if nodeid.startswith(each) and not is_alone)
        return next(together, super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def _meanwhile(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("proof")
    name: str | None = mark.kwargs.get("meanwhile") if mark else None
    if name:
        module = item.getparent(pytest.Module)
        assert module is not None
        assert hasattr(module.obj, name), f"{item.nodeid}: there is no {name}"
    return name


_LEFT = pytest.StashKey[list[str]]()
_SECONDS = pytest.StashKey[dict[str, dict[str, float]]]()
"""What each file took, by phase; and in CPU time, its children's too once they have ended."""
_FILES_SHOWN = 25
_PHASES = ("setup", "call", "teardown")


class _Stopwatch:
    """Adds up what files take, in the process that all others report to."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds = config.stash.setdefault(_SECONDS, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = self._seconds.setdefault(report.location[0], dict.fromkeys((*_PHASES, "cpu"), 0.0))
        file[report.when] += report.duration
        file["cpu"] += getattr(report, "cpu_seconds", 0.0)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Stopwatch(config))


def _report_times(say: Callable[[str], None], seconds: dict[str, dict[str, float]]) -> None:
    """Where the time went, so that whoever adds a test sees what it costs."""
    longest = sorted(seconds.items(), key=lambda one: -sum(one[1][each] for each in _PHASES))
    say("The files that took longest; seconds of set-up, tests, tear-down, and of CPU time:")
    for file, took in longest[:_FILES_SHOWN]:
        figures = " ".join(f"{took[each]:7.1f}" for each in (*_PHASES, "cpu"))
        say(f"{figures}  {file}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What outlives the run fails it; in CI, so does a skip that a package could have prevented."""
    if _GUARD:
        left = leftovers.until_none(RUN)
        session.config.stash[_LEFT] = list(left.values())
        leftovers.end(RUN, left)
        _GUARD.close()
        if left and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if os.environ.get("CI") and not session.exitstatus and _preventable(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left, how to repeat what has failed, and what was skipped in vain."""
    say = terminalreporter.write_line
    for each in terminalreporter.config.stash.get(_LEFT, []):
        say(f"It outlived the tests, and was killed: {each}")
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        say(f"To repeat it alone: {_again(report.nodeid)}")
    _report_times(say, terminalreporter.config.stash.get(_SECONDS, {}))
    if IS_PROOF:
        say(f"Proved with PENSTOCK_PROOF_SEED={SEED} and {SIZES}.")
    if os.environ.get("CI"):
        for reason in sorted(_preventable(terminalreporter.config)):
            say(f"In CI this skip is a failure: {reason}")


def _again(nodeid: str) -> str:
    """A command of a shell that runs one test as it was run here."""
    words = shlex.quote("-n 0 " + shlex.quote(nodeid).replace("$", "$$"))
    if IS_PROOF:
        return f"PENSTOCK_PROOF_SEED={SEED} make proof ARGS={words}"
    release = Path(sys.prefix).name.removeprefix("spark-")
    if release != Path(sys.prefix).name:
        return f"make spark SPARK={release} ARGS={words}"
    return f"make test ARGS={words}"


def _preventable(config: pytest.Config) -> set[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in skipped}
    return {each for each in reasons if not each.startswith(_NO_PACKAGE_HELPS)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure comes with the ends of its servers' logs.

    What a test has logged goes from process to process as UTF-8, which not every text can be."""
    report = yield
    spent = sum(os.times()[:4])
    vars(report)["cpu_seconds"] = spent - _CPU.get("spent", spent)
    _CPU["spent"] = spent
    if report.failed:
        report.sections += [(f"end of {log}", _end_of(log)) for log in SERVERS]
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


_CPU: dict[str, float] = {}


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2_000:] if log.exists() else "(it is not there)"


# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile(
    "patient",
    deadline=None,
    max_examples=some(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
