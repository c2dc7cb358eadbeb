"""Untrusted work in processes of real users, as a worker that is root runs it.

The Python of these tests often lies where only its owner may go, and then another of the same
version is used, with the same packages; where there is none, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes import uid_pool
from penstock.runtimes.base import AttemptWork, WorkOutput
from penstock.runtimes.function import FunctionSettings, LambdaRuntime
from penstock.runtimes.guard import user_processes
from penstock.runtimes.privileges import hindrance
from penstock.runtimes.process import ChildSettings, ProcessRuntime
from penstock.runtimes.secrets import TOKEN_VARIABLE, AttemptFiles
from penstock.testing.runtime_contract import RecordingReporter
from penstock.worker.sandbox import AttemptSandbox

# Of this process, or of the one that has started it: see test_users.
FIRST = int(os.environ.get("FIRST_TEST_USER", 20_004 + os.getpid() % 4_000 * 10))
RANGE = f"{FIRST}-{FIRST + 3}"
SOURCE = Path(uid_pool.__file__).parents[2]
PACKAGES = Path(msgspec.__file__).parents[1]


def _python() -> str:
    """A Python that everybody can run, of the version of this one; empty if there is none."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for each in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        if os.access(each, os.X_OK) and hindrance(Path(each), FIRST) is None:
            return each
    return ""


PYTHON = _python()
pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="only root may become other users"
    ),
    pytest.mark.skipif(not PYTHON, reason="no Python of this version is there that others can run"),
    pytest.mark.skipif(
        hindrance(SOURCE, FIRST) is not None or hindrance(PACKAGES, FIRST) is not None,
        reason="other users cannot read Penstock or its packages here",
    ),
]

LOOKS = """
import json, os, pathlib, subprocess, sys

def tried(what):
    try:
        return what()
    except Exception as error:
        return type(error).__name__

def run(task):
    status = pathlib.Path("/proc/self/status").read_text().split("\\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    print("printed")
    subprocess.run(["/bin/echo", "by a program"])
    own = pathlib.Path(os.environ["PENSTOCK_TASK_TOKEN_FILE"])
    other = pathlib.Path(task.config["other"])
    said = {
        "user": fields["Uid"].split(),
        "group": fields["Gid"].split(),
        "groups": os.getgroups(),
        "no_new_privileges": fields["NoNewPrivs"].strip(),
        "capabilities": int(fields["CapEff"], 16) | int(fields["CapPrm"], 16),
        "token": own.read_text(),
        "change_token": tried(lambda: own.with_name("planted").symlink_to("/etc/passwd")),
        "worker": tried(lambda: pathlib.Path(f"/proc/{os.getppid()}/environ").read_bytes()),
        "other_token": tried(lambda: (other / "token").read_text()),
        "other_list": tried(lambda: os.listdir(other)),
        "all_list": tried(lambda: os.listdir(other.parent)),
        "secret": tried(lambda: pathlib.Path(task.config["secret"]).read_text()),
        "home": os.environ["HOME"],
        "temporary": tried(lambda: pathlib.Path(os.environ["TMPDIR"], "x").write_text("1")),
        "environment": sorted(os.environ),
    }
    (task.output.path / "said.json").write_text(json.dumps(said))
"""
ESCAPES = """
import os, signal, time

def run(task):
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(told, b"x")
            time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    if task.config.get("hangs"):
        os.write(os.open(task.config["pipe"], os.O_WRONLY), b"x")
        time.sleep(600)
"""


class Site:
    """A folder that everybody can enter, with a user's module, and work that runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = self.made()
        (folder / "handed").mkdir(mode=0o711)

    def made(self, **settings: Any) -> ProcessRuntime:
        """The runtime, with these settings."""
        said = {
            "path": (str(self.folder), str(SOURCE), str(PACKAGES)),
            "python": (PYTHON,),
            "uids": RANGE,
            "uids_folder": str(self.folder / "users"),
            "untrusted_on_files": True,
        }
        return ProcessRuntime(ChildSettings(**{**said, **settings}))

    def module(self, text: str) -> None:
        (self.folder / "mine.py").write_text(text)

    def work(self, attempt: int = 1, **config: Any) -> AttemptWork:
        place = (self.folder / "store" / str(attempt)).as_uri()
        return AttemptWork(
            task_id=7,
            attempt=attempt,
            job="job",
            operator="mine:run",
            generation="first",
            config=config,
            outputs={"out": WorkOutput(dataset="out", uuid="u", location=place)},
            log=str(self.folder / f"{attempt}.log"),
            scratch=(self.folder / "scratch" / str(attempt)).as_uri(),
            is_untrusted=True,
        )

    def belongings(self, work: AttemptWork) -> AttemptSandbox:
        folder = self.folder / "handed" / str(work.attempt)
        return AttemptSandbox(folder, work=work, users=self.process.users)

    def given(self, work: AttemptWork, belongings: AttemptSandbox) -> AttemptWork:
        """The work as the worker gives it to the runtime."""
        folder = str(belongings.folder)
        variables = {
            TOKEN_VARIABLE: f"{folder}/token",
            "HOME": f"{folder}/tmp",
            "TMPDIR": f"{folder}/tmp",
        }
        handed = AttemptFiles(folder=folder, variables=variables)
        return replace(work, user=belongings.user, handed=handed)

    def run(self, work: AttemptWork) -> int:
        """Run the work as a worker does; returns the user that it ran as."""

        async def main() -> int:
            belongings = self.belongings(work)
            belongings.prepare("the token")
            try:
                async with self.process:
                    await self.process.run(self.given(work, belongings), RecordingReporter())
                    assert user_processes(belongings.user) == [], "nothing runs after `run`"
                    return belongings.user
            finally:
                belongings.end()

        return asyncio.run(main())


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Site(Path(made))


def test_untrusted_work_has_its_own_and_nothing_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.module(LOOKS)
    monkeypatch.setenv("DATABASE_URL", "x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("PENSTOCK_WORKER_SECRET", "x")
    site.process = site.made()
    neighbour = site.belongings(site.work(attempt=2))
    neighbour.prepare("another's")
    secret = site.folder / "worker.secret"
    secret.write_text("the worker's")
    secret.chmod(0o600)
    number = site.run(site.work(other=str(neighbour.folder), secret=str(secret)))
    said = json.loads((site.folder / "store" / "1" / "said.json").read_text())
    told = set(said.pop("environment"))
    assert {"PENSTOCK_TASK_TOKEN_FILE", "AWS_CONFIG_FILE", "PATH"} <= told
    assert not {each for each in told if each.startswith("PENSTOCK_")} - {TOKEN_VARIABLE}
    assert told & {"AWS_ACCESS_KEY_ID", "DATABASE_URL"} == set()
    own = site.folder / "handed" / "1"
    four = [str(number)] * 4
    assert said == {
        "user": four,
        "group": four,
        "groups": [],
        "no_new_privileges": "1",
        "capabilities": 0,
        "token": "the token",
        "change_token": "PermissionError",
        "worker": "PermissionError",
        "other_token": "PermissionError",
        "other_list": "PermissionError",
        "all_list": "PermissionError",
        "secret": "PermissionError",
        "home": str(own / "tmp"),
        "temporary": 1,
    }
    neighbour.end()
    log = site.folder / "1.log"
    assert log.read_text() == "printed\nby a program\n"
    assert (log.stat().st_uid, not own.exists()) == (0, True)
    made = site.folder / "store" / "1"
    assert {made.stat().st_uid, (made / "said.json").stat().st_uid} == {0}, "it is the worker's now"


LIFTS = """
import os, pathlib, resource

def tried(deed):
    try:
        return deed() or "done"
    except (OSError, ValueError, MemoryError) as error:
        return type(error).__name__

def run(task):
    data, most = resource.RLIMIT_DATA, resource.RLIM_INFINITY
    said = [
        tried(lambda: resource.setrlimit(data, (most, most))),
        tried(lambda: resource.setrlimit(data, (2**30, most))),
        tried(lambda: bytearray(400 * 2**20)),
        *(
            tried(lambda: (each / "cgroup.procs").write_text("0"))
            for each in pathlib.Path("/sys/fs/cgroup").glob("*")
            if (each / "cgroup.procs").exists()
        ),
    ]
    (task.output.path / "said").write_text(" ".join(said))
"""


def test_a_bound_of_memory_cannot_be_lifted(site: Site) -> None:
    site.module(LIFTS)
    site.run(replace(site.work(), resources={"memory": "300MiB"}))
    first, second, *others = (site.folder / "store" / "1" / "said").read_text().split()
    assert (first, second, others[0]) == ("ValueError", "ValueError", "MemoryError")
    assert set(others[1:]) <= {"PermissionError"}


def test_each_has_a_process_and_a_user_of_its_own(site: Site) -> None:
    site.module(
        "import os\ndef run(task):\n    (task.output.path / 'said').write_text(str(os.getpid()))\n"
    )
    numbers = [site.run(site.work(attempt)) for attempt in (1, 2)]
    assert numbers == [FIRST, FIRST + 1]
    pids = {(site.folder / "store" / each / "said").read_text() for each in ("1", "2")}
    assert len(pids) == 2


def test_what_forks_and_hides_is_killed_with_its_work(site: Site) -> None:
    site.module(ESCAPES)
    number = site.run(site.work())
    assert user_processes(number) == []


def test_what_hides_is_killed_when_its_work_is_cancelled(site: Site) -> None:
    site.module(ESCAPES)
    pipe = site.folder / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)

    async def main() -> None:
        work = replace(site.work(hangs=True, pipe=str(pipe)), grace_seconds=0.1)
        belongings = site.belongings(work)
        belongings.prepare("the token")
        try:
            async with site.process:
                given = site.given(work, belongings)
                running = asyncio.get_running_loop().create_task(
                    site.process.run(given, RecordingReporter())
                )
                await asyncio.to_thread(_heard, pipe)
                assert len(user_processes(belongings.user)) == 2
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert user_processes(belongings.user) == []
        finally:
            belongings.end()

    asyncio.run(main())


WORKER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tests.unit.runtimes.test_untrusted import Site, RecordingReporter

async def main(folder):
    site = Site(folder)
    work = site.work(hangs=True, pipe=str(folder / "pipe"))
    belongings = site.belongings(work)
    belongings.prepare("the token")
    async with site.process:
        await site.process.run(site.given(work, belongings), RecordingReporter())

asyncio.run(main(Path(sys.argv[1])))
"""


def test_nothing_outlives_a_worker_that_is_killed(site: Site) -> None:
    site.module(ESCAPES)
    (site.folder / "handed").rmdir()
    pipe = site.folder / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    here = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", WORKER, str(site.folder), here, str(SOURCE)]
    environment = {**os.environ, "FIRST_TEST_USER": str(FIRST)}
    with subprocess.Popen(command, env=environment) as worker:
        _heard(pipe)
        (number,) = [each for each in range(FIRST, FIRST + 4) if user_processes(each)]
        left = [os.pidfd_open(each) for each in user_processes(number)]
        assert len(left) == 2
        worker.send_signal(signal.SIGKILL)
    for each in left:
        # A handle of a process is readable when the process has ended.
        _ended(each)
        os.close(each)
    assert (site.folder / "store" / "1").stat().st_uid == number
    # The next one to take that number ends all that is left of it.
    assert site.process.users is not None
    site.process.users.take().end()
    assert (site.folder / "store" / "1").stat().st_uid == 0


def test_a_python_that_the_user_cannot_run_is_one_sentence(site: Site) -> None:
    closed = site.folder / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").symlink_to(PYTHON)
    site.process = site.made(python=(str(closed / "python"),))
    with pytest.raises(WorkFailed) as caught:
        site.run(site.work())
    assert caught.value.message == (
        f"The user {FIRST} cannot run {closed}/python, because of {closed}: Permission denied."
        " Name a Python that everybody can run as `python` in the settings of the runtime."
    )


def test_code_that_the_user_cannot_read_is_one_sentence(site: Site) -> None:
    closed = site.folder / "closed"
    closed.mkdir(mode=0o700)
    (closed / "theirs.py").write_text("def run(task): ...")
    site.process = site.made(path=(str(closed), str(SOURCE), str(PACKAGES)))
    with pytest.raises(WorkFailed) as caught:
        site.run(replace(site.work(), operator="theirs:run"))
    assert "There is no module theirs" in caught.value.message
    assert caught.value.message.endswith(f" The user {FIRST} may not look into {closed}.")


def test_a_user_who_cannot_read_penstock_is_one_sentence(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.process = site.made(path=(str(site.folder / "nothing"),), python=(PYTHON, "-S"))
    monkeypatch.setattr("penstock.runtimes.process.hindrance", lambda path, number: Path("/x"))
    with pytest.raises(
        WorkFailed, match=rf"exit code 1 .* The user {FIRST} cannot read .* of /x\."
    ):
        site.run(site.work())
    assert "penstock" in (site.folder / "1.log").read_text()


def test_a_handler_of_lambda_is_somebody_else_too(site: Site) -> None:
    site.module(
        "import json, os\n"
        "def run(event, context):\n"
        "    place = event['outputs']['out']['location'].removeprefix('file://')\n"
        "    said = [os.getuid(), dict(os.environ), 'token' in json.dumps(event)]\n"
        "    open(place + '/said.json', 'w').write(json.dumps(said))\n"
    )
    made = site.process
    assert isinstance(made, ProcessRuntime)
    function = LambdaRuntime(msgspec.convert(msgspec.to_builtins(made._settings), FunctionSettings))
    work = site.work()
    belongings = AttemptSandbox(None, work=work, users=function.users)

    async def main() -> None:
        async with function:
            await function.run(replace(work, user=belongings.user), RecordingReporter())

    belongings.prepare("the token")
    try:
        asyncio.run(main())
    finally:
        belongings.end()
    said = json.loads((site.folder / "store" / "1" / "said.json").read_text())
    assert said == [FIRST, {}, False]


def test_untrusted_work_without_a_user_is_not_run(site: Site) -> None:
    async def main() -> None:
        async with site.process:
            with pytest.raises(WorkFailed, match="no user of its own"):
                await site.process.run(site.work(), RecordingReporter())

    asyncio.run(main())


def _heard(pipe: Path) -> None:
    with pipe.open("rb", buffering=0) as opened:
        assert opened.read(1) == b"x"


def _ended(handle: int) -> None:
    ready, _, _ = select.select([handle], [], [], 30)
    assert ready, "it goes on"
