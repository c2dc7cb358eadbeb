"""What untrusted work has written is published whole and by itself, or not at all."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernel.errors import WorkFailed
from penstock.runtimes import guard, uid_pool
from penstock.runtimes.uid_pool import LeasedUid, UidPool
from tests.unit.runtimes.test_uid_pool import FIRST, as_user, folder, needs_root, of

__all__ = ["folder"]
pytestmark = needs_root
CHANGES = """
os.chdir(sys.argv[3])
def tried(what):
    try:
        what()
        print("done")
    except PermissionError:
        print("refused")
tried(lambda: open("file", "w"))
tried(lambda: os.rename("file", "other"))
tried(lambda: os.mkdir("in/new"))
tried(lambda: os.unlink("in/tool"))
"""


@pytest.fixture
def some(folder: Path) -> UidPool:
    return of(folder)


@pytest.fixture
def given(folder: Path) -> Path:
    """Where the output is, once it is given."""
    return folder / "store" / "deep" / "given"


def writes(user: LeasedUid, code: str, *arguments: object) -> str:
    """Run code as the user, to its end; what it has printed."""
    with as_user(user.number, code, *map(str, arguments)) as process:
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0
        return said


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_was_written_is_the_workers_and_nobody_else_changes_it(
    some: UidPool, given: Path
) -> None:
    user = some.take()
    user.give([given])
    assert given.stat().st_uid == user.number
    code = """
os.umask(0)
os.chdir(sys.argv[3])
open("file", "w").write("made")
os.mkdir("in")
open("in/tool", "w")
open("in/own", "w")
modes = {".": 0o7777, "file": 0o666, "in/tool": 0o6777, "in/own": 0, "in": 0o2007}
for name, mode in modes.items():
    os.chmod(name, mode)
"""
    writes(user, code, given)
    user.end()
    found = {str(each.relative_to(given)): each for each in [given, *given.rglob("*")]}
    assert {name: mode(each) for name, each in found.items()} == {
        ".": 0o755,
        "file": 0o644,
        "in": 0o705,
        "in/tool": 0o755,
        "in/own": 0o600,
    }
    assert {(each.stat().st_uid, each.stat().st_gid) for each in found.values()} == {(0, 0)}
    later = some.take()
    assert writes(later, CHANGES, given) == "refused\n" * 4
    later.end()
    assert (given / "file").read_text() == "made"


BAD = {
    "link": ("os.symlink('/etc/passwd', 'in/bad')", "a link, a pipe or another thing .*'in/bad'"),
    "link to a folder": ("os.symlink('/etc', 'in/bad')", "a link, a pipe"),
    "link to nothing": ("os.symlink('nothing', 'bad')", "a link, a pipe"),
    "pipe": ("os.mkfifo('bad')", "a link, a pipe"),
    "socket": ("socket.socket(socket.AF_UNIX).bind('bad')", "a link, a pipe"),
    "hard link": ("open('file', 'w'); os.link('file', 'bad')", "more than one name, by a hard"),
    "deep": (
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(1_500)]",
        "folders more than 64 deep",
    ),
    "many": ("[open(str(each), 'w') for each in range(60)]", "more than 50 files and folders"),
    "a name that is no text": (r"os.symlink('x', b'\xff\n')", r"'\\udcff\\n'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_published_fails_the_attempt_and_is_closed(
    some: UidPool, given: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    if bad == "many":
        monkeypatch.setattr(uid_pool, "FILES_MAX", 50)
    code, why = BAD[bad]
    user = some.take()
    user.give([given])
    writes(
        user, f"os.chdir(sys.argv[3]); os.mkdir('in'); {code}; os.chmod(sys.argv[3], 0o777)", given
    )
    with pytest.raises(WorkFailed, match=f"The output of untrusted work has .*{why}"):
        user.end()
    assert (given.stat().st_uid, mode(given)) == (0, 0o700)
    numbers = {some.take().number for _ in range(4)}
    assert user.number in numbers, "the number is free all the same"
    uid_pool.remove_tree(given)
    assert not given.exists()


def of_root(given: Path) -> None:
    """A hard link to a file of root's, as where the kernel lets anybody make one."""
    secret = given.parent / "secret"
    secret.write_text("of root")
    secret.chmod(0o666)
    os.link(secret, given / "bad")


def of_a_neighbour(given: Path) -> None:
    (given / "bad").write_text("")
    os.chown(given / "bad", FIRST + 9, FIRST + 9)


def in_a_neighbours(given: Path) -> None:
    (given / "bad").mkdir()
    os.chown(given / "bad", FIRST + 9, FIRST + 9)


@pytest.mark.parametrize("planted", [of_root, of_a_neighbour, in_a_neighbours])
def test_what_is_anothers_is_not_touched_and_not_published(
    some: UidPool, given: Path, planted: Callable[[Path], None]
) -> None:
    user = some.take()
    user.give([given])
    planted(given)
    before = (given / "bad").stat()
    with pytest.raises(WorkFailed, match=r"has a (file|folder) of another user: 'bad'"):
        user.end()
    after = (given / "bad").stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)
    assert mode(given) == 0o700


def test_what_a_neighbour_has_open_to_write_to_is_not_published(
    some: UidPool, given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uid_pool, "_LOOKS_MAX", 1)
    user, neighbour = some.take(), some.take()
    user.give([given])
    file = given / "file"
    writes(user, "open(sys.argv[3], 'w'); os.chmod(sys.argv[3], 0o666)", file)
    code = "opened = open(sys.argv[3], 'r+'); print('open', flush=True); sys.stdin.read()"
    with as_user(neighbour.number, code, str(file)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(WorkFailed, match="another process has open to write to: 'file'"):
            user.end()
        process.send_signal(signal.SIGKILL)
    neighbour.end()


def test_reading_it_meanwhile_is_no_fault(some: UidPool, given: Path) -> None:
    user = some.take()
    user.give([given])
    writes(user, "open(sys.argv[3], 'w').write('made')", given / "file")
    with (given / "file").open() as reading:
        user.end()
        assert reading.read() == "made"


def test_an_access_list_gives_nobody_the_right_to_write(some: UidPool, given: Path) -> None:
    user = some.take()
    user.give([given])
    (given / "in").mkdir()
    os.chown(given / "in", user.number, user.number)
    # Version 2; the owner, a named user, the group, the mask, others: tag, right, number.
    entries = [(1, 7, -1), (2, 7, FIRST + 3), (4, 7, -1), (16, 7, -1), (32, 5, -1)]
    packed = b"".join(struct.pack("<HHi", *each) for each in entries)
    try:
        for name in ("access", "default"):
            os.setxattr(given / "in", f"system.posix_acl_{name}", b"\2\0\0\0" + packed)
    except OSError as error:
        user.end()
        pytest.skip(f"no access lists here: {error}")
    user.end()
    assert os.listxattr(given / "in") == ["system.posix_acl_access"]
    assert mode(given / "in") & 0o070 == 0o050, "which is the mask"
    others = [some.take() for _ in range(4)]
    (named,) = [each for each in others if each.number == FIRST + 3]
    code = """
try:
    os.mkdir(sys.argv[3])
except PermissionError:
    print("refused")
"""
    assert writes(named, code, given / "in" / "new") == "refused\n"
    for each in others:
        each.end()


def test_a_folder_that_cannot_be_closed_keeps_the_number(some: UidPool, given: Path) -> None:
    user = some.take()
    user.give([given])
    given.rmdir()
    given.symlink_to("/etc")
    with pytest.raises(WorkFailed, match="untrusted work cannot be killed"):
        user.end()
    assert Path("/etc").stat().st_mode & 0o777 == 0o755
    assert user.number not in {some.take().number for _ in range(3)}
    given.unlink()
    user.end()


def test_the_script_that_kills_never_does_so_as_root() -> None:
    """Stood in for: it is not tried with the real one."""
    code = f"""
import os
exec(compile(open({guard.__file__!r}).read(), "guard", "exec"), said := {{"__name__": "guard"}})
os.kill = lambda *_: print("killed")
os.setgroups = os.setresgid = os.setresuid = lambda *_: None
said["strike"](0)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "refusing to kill every process as root" in ended.stderr
    assert ended.stdout == ""
