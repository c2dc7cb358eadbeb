"""Where the server's socket is, and whom it runs as: what can be told without a server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.dispatcher.database import local_server
from penstock.dispatcher.database.local_server import LocalPostgres
from penstock.kernel.errors import PenstockError


@pytest.fixture(autouse=True)
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests, they are of a user who is not root, unless they say otherwise."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(local_server, "_name_of", lambda number: f"user-{number}")


def host(folder: Path) -> Path:
    return Path(str(conninfo_to_dict(LocalPostgres(folder).dsn)["host"]))


def test_the_socket_is_in_the_folder() -> None:
    assert host(Path("/short")) == Path("/short/socket")


@pytest.mark.parametrize("folder", ["/long/" + "x" * 90, "/with,comma"])
def test_a_path_that_cannot_be_a_socket_is_left(folder: str) -> None:
    first, again, other = host(Path(folder)), host(Path(folder)), host(Path(folder, "y"))
    assert first == again != other
    assert len(os.fsencode(first / ".s.PGSQL.5432")) <= 103
    assert "," not in str(first)


def test_a_long_place_for_temporary_files_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/long/" + "y" * 90)
    test_a_path_that_cannot_be_a_socket_is_left("/long/" + "x" * 90)


def test_roots_socket_is_where_only_root_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for folder in ("/short", "/long/" + "x" * 90):
        assert host(Path(folder)).is_relative_to("/var/lib/penstock-postgres")


def test_clients_believe_the_servers_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = conninfo_to_dict(LocalPostgres(Path("/short")).dsn)
    assert asked["requirepeer"] == "user-1000"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(local_server, "_owner", lambda _: "65534:65534")
    asked = conninfo_to_dict(LocalPostgres(Path("/short")).dsn)
    assert asked["requirepeer"] == "user-65534"


def test_a_user_without_a_name_is_told_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> str:
        raise PenstockError(f"Postgres needs a user with a name, and {number} has none.")

    monkeypatch.setattr(local_server, "_name_of", unknown)
    with pytest.raises(PenstockError, match="needs a user with a name"):
        asyncio.run(LocalPostgres(tmp_path).start())
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", os.getuid)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    async def check() -> None:
        server = LocalPostgres(tmp_path)
        with pytest.raises(PenstockError, match="There is no Postgres") as caught:
            await server.start()
        await server.stop()
        assert "pip install" in caught.value.hint

    asyncio.run(check())


def test_nobody_but_root_has_to_become_another() -> None:
    assert local_server._owner(Path("/nowhere")) == ""


def test_root_becomes_the_owner_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    owner = tmp_path.stat()
    expected = (
        f"{owner.st_uid}:{owner.st_gid}" if owner.st_uid else local_server._owner(Path("/nowhere"))
    )
    assert local_server._owner(tmp_path) == expected != "0:0"


def test_a_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", os.getuid)
    folder = tmp_path / "deep" / "er"
    local_server._make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    local_server._make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PenstockError, match="is not a folder"):
        local_server._make_private(tmp_path / "link")


@pytest.mark.parametrize("user", [0, 1000])
def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    # Whoever made it decides what is in it: root believes others as little as anybody does.
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = os.stat_result((0o40755, 0, 0, 2, 4711, 4711, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "lstat", lambda _: found)
    with pytest.raises(PenstockError, match="belongs to another user"):
        local_server._make_private(tmp_path / "theirs")
