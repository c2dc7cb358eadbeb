"""Where the server's socket is, and whom it runs as: what can be told without a server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from penstock.dispatcher.database import local
from penstock.dispatcher.database.local import LocalPostgres
from penstock.kernel.errors import PenstockError


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


def test_a_machine_without_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    async def check() -> None:
        server = LocalPostgres(tmp_path)
        with pytest.raises(PenstockError, match="There is no Postgres") as caught:
            await server.start()
        await server.stop()
        assert "pip install" in caught.value.hint

    asyncio.run(check())


def test_nobody_but_root_has_to_become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert local._owner(Path("/nowhere")) == ""


def test_root_becomes_the_owner_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    owner = tmp_path.stat()
    expected = f"{owner.st_uid}:{owner.st_gid}" if owner.st_uid else local._owner(Path("/nowhere"))
    assert local._owner(tmp_path) == expected != "0:0"


def test_programs_in_a_closed_folder_are_told(tmp_path: Path) -> None:
    closed = tmp_path / "closed to others"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(PenstockError, match=r"is closed to other users") as caught:
        local._check_reachable(closed / "bin")
    assert f"chmod o+x '{closed}', or" in caught.value.hint
    assert "normal user" in caught.value.hint


def test_a_folder_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    local._make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    local._make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PenstockError, match="is not a folder"):
        local._make_private(tmp_path / "link")
