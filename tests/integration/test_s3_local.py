"""The local S3 server: started, stopped, and never left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernel.errors import PenstockError
from penstock.store.opening import Opening, open_store
from penstock.store.s3 import local
from penstock.store.s3.local import LocalS3

_LONG_MILLISECONDS = 60_000
_PARENT = """
import asyncio, pathlib, sys
from penstock.store.s3.local import LocalS3

async def main():
    async with LocalS3(pathlib.Path(sys.argv[1]), grace_seconds=1) as server:
        print(server.endpoint, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")


def processes_naming(text: str) -> set[int]:
    """The processes that have this text on their command line."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue  # It has just ended.
            if text.encode() in command:
                found.add(int(folder.name))
    return found


def wait_for_the_end_of(watched: list[int]) -> None:
    """Wait until each of these processes has ended; they are given as pidfds."""
    for pidfd in watched:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(_LONG_MILLISECONDS), "a process goes on"
        os.close(pidfd)


def skip_without_a_server(error: PenstockError) -> None:
    if os.environ.get("CI"):
        raise error
    pytest.skip(f"no S3 server: {error.message} {error.hint}")


def _in_tmp(ends: tuple[str, ...]) -> list[Path]:
    return [each for each in Path("/tmp").iterdir() if each.name.endswith(ends)]


@needs_proc
def test_it_starts_serves_stops_and_keeps_what_it_has(tmp_path: Path) -> None:
    async def check() -> list[int]:
        async with LocalS3(tmp_path, bucket="a-bucket", grace_seconds=1) as server:
            store = await open_store(server.url, Opening(credentials=server.credentials))
            await store.put("k", b"kept")
            await store.close()
            assert server.url.startswith("s3://a-bucket?endpoint=http://127.0.0.1:")
            secrets = tmp_path / "identities.json"
            assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
            pids = processes_naming(str(tmp_path))
            assert len(pids) == 2
            watched = [os.pidfd_open(pid) for pid in pids]
        await server.stop()
        # It was killed; of its own accord it leaves sockets and logs with those of the machine.
        ends = (*(f"{port}.sock" for port in server._ports), *(f".{pid}" for pid in pids))
        assert not _in_tmp(ends)
        return watched

    async def check_again() -> None:
        async with LocalS3(tmp_path, bucket="a-bucket", grace_seconds=1) as server:
            store = await open_store(server.url, Opening(credentials=server.credentials))
            found = await store.get("k")
            assert found is not None
            assert found.body == b"kept"
            await store.close()

    try:
        watched = asyncio.run(check())
    except PenstockError as error:
        skip_without_a_server(error)
        return
    wait_for_the_end_of(watched)
    assert processes_naming(str(tmp_path)) == set()
    asyncio.run(check_again())


@needs_proc
def test_one_that_was_killed_comes_back_where_it_was_with_what_it_had(tmp_path: Path) -> None:
    async def check() -> None:
        async with LocalS3(tmp_path, grace_seconds=1) as server:
            store = await open_store(server.url, Opening(credentials=server.credentials))
            await store.put("k", b"kept")
            address = server.endpoint
            for pid in processes_naming(str(tmp_path)):
                os.kill(pid, signal.SIGKILL)
            await server.stop()
            await server.start()
            assert server.endpoint == address
            found = await store.get("k")
            assert found is not None
            assert found.body == b"kept"
            await store.close()

    try:
        asyncio.run(check())
    except PenstockError as error:
        skip_without_a_server(error)


@needs_proc
def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        if not parent.stdout.readline().startswith("http://127.0.0.1:"):
            skip_without_a_server(PenstockError("The server did not start."))
        pids = processes_naming(str(tmp_path)) - {parent.pid}
        assert len(pids) == 2
        watched = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    wait_for_the_end_of(watched)
    assert processes_naming(str(tmp_path)) == set()


def test_a_server_that_ends_at_once_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_command", lambda *_: [sys.executable, "-c", "print('Bad day.')"])

    async def check() -> None:
        server = LocalS3(tmp_path)
        with pytest.raises(PenstockError, match="did not start") as caught:
            await server.start()
        await server.stop()
        assert str(server.log) in caught.value.hint
        assert "Bad day." in server.log.read_text()

    asyncio.run(check())


def test_a_machine_without_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    async def check() -> None:
        server = LocalS3(tmp_path)
        with pytest.raises(PenstockError, match="There is no SeaweedFS") as caught:
            await server.start()
        await server.stop()
        assert "pip install" in caught.value.hint

    asyncio.run(check())
