"""Users for untrusted work: one for each, whatever is killed, and nothing of the former is left.

What needs root and users of its own is skipped for others, with the reason.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput, WorkFailed
from penstock.runtimes import guard, uid_pool
from penstock.runtimes.privileges import hindrance
from penstock.runtimes.uid_pool import UidPool

# Of this process: two runs of the tests on one machine would end each other's users.
FIRST = 20_000 + os.getpid() % 4_000 * 10
LAST = FIRST + 3
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root may become other users"
)
LOWERED = """
import ctypes, os, signal, socket, sys, threading
sys.path.insert(0, sys.argv[2])
from penstock.runtimes.privileges import drop_privileges
drop_privileges(int(sys.argv[1]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody can enter, as the temporary ones of pytest are not."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def of(folder: Path, *, first: int = FIRST, last: int = LAST) -> UidPool:
    return UidPool(first=first, last=last, folder=folder / "users")


def as_user(number: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of the user, which lives until it is killed or its standard input ends."""
    source = str(Path(uid_pool.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", LOWERED + code, str(number), source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "said", ["", "5", "0-5", "999-1010", "60806-60800", "60800-99999", "a-b", "60800:60806", "-1-5"]
)
def test_a_range_that_cannot_be_meant_is_one_sentence(said: str) -> None:
    with pytest.raises(InvalidInput, match="no range of users for untrusted work"):
        UidPool.of(said, "/nowhere")


@pytest.mark.parametrize(
    ("said", "whose"),
    [
        ("61184-61247", "61184-61247 may become somebody else's: they are for services with Dyn"),
        ("61000-61200", "61184-61200 may become"),
        ("65530-65540", "for nobody"),
        ("600000-600003", "for containers"),
        ("70005-70010", "70005-70009 may become somebody else's: they are joe's in "),
    ],
)
def test_numbers_that_the_machine_gives_to_others_are_refused(
    said: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subuid").write_text("# none\njoe:70000:10\nann:x:5\n\n")
    monkeypatch.setattr(uid_pool, "_SUBORDINATE", (tmp_path / "subuid", tmp_path / "subgid"))
    with pytest.raises(InvalidInput, match=whose):
        UidPool.of(said, "/nowhere")
    UidPool.of("60800-60863", "/nowhere")


def test_whoever_is_not_root_keeps_nothing_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WorkFailed, match="does not run as root on Linux") as caught:
        of(tmp_path).take()
    assert caught.value.is_retried, "another worker may be able to"


@needs_root
def test_no_two_have_one_number_and_all_are_used_in_turn(folder: Path) -> None:
    one, other = of(folder), of(folder)
    taken = [each.take() for each in (one, other, one, other)]
    assert sorted(each.number for each in taken) == [FIRST, FIRST + 1, FIRST + 2, LAST]
    with pytest.raises(WorkFailed, match="All 4 users for untrusted work are taken"):
        one.take()
    taken[2].end()
    assert other.take().number == taken[2].number
    for each in (taken[0], taken[1], taken[3]):
        each.end()
    # The one that was used longest ago, and not the last one again.
    turns = []
    for _ in range(3):
        user = one.take()
        turns.append(user.number)
        user.end()
    assert len(set(turns)) == 3


@needs_root
def test_a_number_is_free_only_when_nothing_of_it_runs(folder: Path) -> None:
    user = of(folder).take()
    # In a session of its own, and with its first thread ended while another goes on.
    code = """
os.setsid()
threading.Thread(target=sys.stdin.read).start()
print("lives", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
    with as_user(user.number, code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "lives\n"
        assert guard.user_processes(user.number) == [process.pid]
        user.end()
        assert process.wait(30) == -signal.SIGKILL


HOPS = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("lives", flush=True)
for hop in range(5_000):
    if os.fork():
        os._exit(0)
print("survived", flush=True)
"""


@needs_root
def test_what_is_always_another_process_is_ended_too(folder: Path) -> None:
    user = of(folder).take()
    with as_user(user.number, HOPS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "lives\n"
        user.end()
        # It ends when the last one that could write to it has.
        assert process.stdout.read() == ""


@needs_root
def test_that_none_is_seen_counts_only_after_a_kill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = of(folder).take()
    with as_user(user.number, "print('lives', flush=True); sys.stdin.read()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setattr(guard, "user_processes", lambda _: [])
        assert guard.kill_user(user.number)
        assert process.wait(30) == -signal.SIGKILL
    user.end()


@needs_root
def test_a_kill_that_did_not_happen_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_USER_LOOKS_MAX", 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert not guard.kill_user(FIRST)


@needs_root
def test_a_user_cannot_end_what_ends_it_nor_look_into_it(folder: Path) -> None:
    """The one that kills is somebody else's, as the kernel sees it, when it is to be killed."""
    user = of(folder).take()
    code = f"""
sys.path.insert(0, sys.argv[1])
from penstock.runtimes import guard
def kill(process, number):
    print(os.getpid(), *os.getresuid(), *os.getgroups(), flush=True)
    sys.stdin.read()
os.kill = kill
guard.strike({user.number})
"""
    source = str(Path(uid_pool.__file__).parents[2])
    command = [sys.executable, "-c", "import os, sys" + code, source]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killer:
        assert killer.stdout is not None
        said = [int(each) for each in killer.stdout.readline().split()]
        nobody = 2**31 + user.number
        assert said == [killer.pid, nobody, user.number, nobody]
        tries = """
for what in (lambda: os.kill(int(sys.argv[3]), 9), lambda: open(f"/proc/{sys.argv[3]}/mem")):
    try:
        what()
    except PermissionError:
        print("refused")
"""
        with as_user(user.number, tries, str(killer.pid)) as hostile:
            assert hostile.communicate(timeout=60)[0] == "refused\nrefused\n"
        killer.communicate(timeout=60)
        assert killer.returncode == 0
    user.end()


@needs_root
def test_a_user_has_no_groups_of_the_workers_and_no_way_back(folder: Path) -> None:
    del folder
    source = str(Path(uid_pool.__file__).parents[2])
    code = """
try:
    os.setresuid(0, 0, 0)
except PermissionError:
    print(os.getgroups(), os.getresuid() == os.getresgid(), os.umask(0))
"""
    said = subprocess.run(
        [sys.executable, "-c", LOWERED + code, str(FIRST), source],
        extra_groups=[4, 27],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == f"[] True {0o022}\n"


@needs_root
def test_a_number_stays_taken_if_something_of_it_cannot_be_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = of(folder, last=FIRST)
    user = some.take()
    with monkeypatch.context() as patched:
        patched.setattr(uid_pool, "kill_user", lambda _: False)
        with pytest.raises(
            WorkFailed, match=f"untrusted work cannot be killed: Processes of the user {FIRST}"
        ):
            user.end()
    with pytest.raises(WorkFailed, match="All 1 users for untrusted work are taken"):
        some.take()
    user.end()
    some.take().end()


@needs_root
def test_what_a_killed_worker_left_is_taken_back_before_the_number_is_used(folder: Path) -> None:
    some = of(folder, last=FIRST)
    left, given = some.take(), folder / "given"
    left.give([given])
    (given / "file").write_text("")
    os.chown(given / "file", left.number, left.number)
    with as_user(left.number, "print('lives', flush=True); sys.stdin.read()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        # As the kernel does for whoever is killed.
        left.unlock()
        user = some.take()
        assert process.wait(30) == -signal.SIGKILL
    status = given.stat()
    assert (user.number, status.st_uid, status.st_mode & 0o777) == (FIRST, 0, 0o700), "closed"
    user.end()


@needs_root
def test_a_list_that_was_cut_off_gave_nothing(folder: Path) -> None:
    of(folder).take().end()
    (folder / "users" / str(FIRST)).write_text('["/etc", "/us')
    of(folder).take().end()
    assert Path("/etc").stat().st_uid == 0


@needs_root
def test_a_folder_that_cannot_be_reached_is_one_sentence(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o700)
    user = of(folder).take()
    with pytest.raises(WorkFailed, match=rf"cannot reach .*closed/in, because of {folder}/closed"):
        user.give([folder / "closed" / "in"])
    user.end()


@needs_root
def test_an_account_is_nobody_elses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Account:
        pw_name = "joe"

    monkeypatch.setattr(pwd, "getpwuid", lambda _: Account)
    with pytest.raises(WorkFailed, match=f"The user {FIRST} of `uids` is joe"):
        of(folder).take()


@needs_root
@pytest.mark.parametrize("spoilt", ["writable", "another's"])
def test_locks_that_others_could_change_are_none(folder: Path, spoilt: str) -> None:
    locks = folder / "users"
    locks.mkdir(mode=0o700)
    if spoilt == "writable":
        locks.chmod(0o777)
    else:
        os.chown(locks, FIRST, FIRST)
    with pytest.raises(WorkFailed, match="is not root's alone"):
        of(folder).take()


def test_what_hinders_a_user(folder: Path) -> None:
    file = folder / "a" / "b" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert hindrance(file, FIRST) is None
    (folder / "link").symlink_to(file)
    file.chmod(0o600)
    assert hindrance(folder / "link", FIRST) == file
    file.chmod(0o644)
    (folder / "a").chmod(0o750)
    assert hindrance(file, FIRST) == folder / "a"
    assert hindrance(folder / "none", FIRST) == folder / "none"
