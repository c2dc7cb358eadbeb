"""A process that dies between any two changes of the disk leaves the old object or the new one."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.kernel.errors import NotFound
from penstock.store.base import Object, Version
from penstock.store.file.backend import FileStore
from tests.unit.store.file.stores import NotingDisk, files_below, names_in, opened

CHILD = Path(__file__).with_name("child.py")
KEY = "some/folder/the key"
CALLS_MAX = 60


@dataclass(frozen=True)
class State:
    """What is under the key."""

    body: bytes
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """What is there, what is done, and what is there afterwards."""

    name: str
    operation: str
    old: State | None
    new: State | None
    swap: bool = False


PLAIN = State(b"old body")
RICH = State(b"old body", {"owner": "old"})
CASES = [
    Case("create in a new folder", "create", None, State(b"new")),
    Case("create with metadata", "create", None, State(b"new", {"owner": "new"})),
    Case("replace", "replace", PLAIN, State(b"new")),
    Case("replace with metadata", "replace", RICH, State(b"new", {"owner": "new"})),
    Case("swap", "swap", PLAIN, State(b"new"), swap=True),
    Case("swap to metadata", "swap", PLAIN, State(b"new", {"owner": "new"}), swap=True),
    Case("swap from metadata", "swap", RICH, State(b"new"), swap=True),
    Case("swap to the same size", "swap", RICH, State(b"new body", {"owner": "new"}), swap=True),
    Case("touch", "touch", PLAIN, PLAIN, swap=True),
    Case("touch with metadata", "touch", RICH, State(b"old body", {"owner": "new"}), swap=True),
    Case("delete", "delete", PLAIN, None),
    Case("delete a version with metadata", "delete", RICH, None, swap=True),
]


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(CHILD), "crash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


async def _prepare(root: Path, old: State | None) -> Version | None:
    async with opened(root) as store:
        if old is None:
            return None
        return await store.put(KEY, old.body, metadata=old.metadata)


def _order(
    child: subprocess.Popen[str], root: Path, case: Case, version: Version | None, dies_at: int
) -> str:
    new = case.new or State(b"")
    order = {
        "root": str(root),
        "key": KEY,
        "operation": case.operation,
        "body": new.body.decode(),
        "metadata": dict(new.metadata),
        "version": version if case.swap else None,
        "dies_at": dies_at,
    }
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(order) + "\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


async def _read(store: FileStore) -> Object | None:
    """What is under the key, as get, head and list agree."""
    page = await store.list()
    try:
        found = await store.get(KEY)
    except NotFound:
        assert page.entries == ()
        assert (await store.list(delimiter="/")).folders == ()
        with pytest.raises(NotFound):
            await store.head(KEY)
        return None
    assert found is not None
    head = await store.head(KEY)
    assert page.folders == ()
    assert [(entry.key, entry.version, entry.size, entry.modified) for entry in page.entries] == [
        (KEY, found.version, len(found.body), found.modified)
    ]
    assert (head.version, head.size, head.modified, head.metadata) == (
        found.version,
        found.size,
        found.modified,
        found.metadata,
    )
    assert (await store.list(delimiter="/")).folders == ("some/",)
    return found


async def _judge(root: Path, case: Case, version: Version | None) -> bool:
    """Whether the operation took effect; fails if it did so by half."""
    async with opened(root) as store:
        found = await _read(store)
        state = None if found is None else State(found.body, found.metadata)
        same_version = (found.version if found else None) == version
        assert (state, same_version) in [(case.old, True), (case.new, False)]
        await _go_on(store, root)
        return not same_version


async def _go_on(store: FileStore, root: Path) -> None:
    """The store works as before, and what the dead process left is gone."""
    last = State(b"after", {"owner": "survivor"})
    version = await store.put(KEY, last.body, metadata=last.metadata)
    found = await _read(store)
    assert found is not None
    assert (found.version, State(found.body, found.metadata)) == (version, last)
    own = root / ".penstock"
    assert files_below(own / "tmp") == []
    assert len(files_below(own / "meta")) == 1
    await store.delete(KEY)
    assert names_in(root) == [".penstock"]
    assert names_in(own / "meta") == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kill_leaves_the_old_object_or_the_new_one(
    case: Case, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    took_effect = []
    for dies_at in itertools.count(1):
        root = tmp_path / str(dies_at)
        root.mkdir()
        version = asyncio.run(_prepare(root, case.old))
        answer = _order(child, root, case, version, dies_at)
        assert answer in ("killed", "done")
        took_effect.append(asyncio.run(_judge(root, case, version)))
        if answer == "done":
            break
        assert dies_at < CALLS_MAX
    # It dies at least before its lock, its change and the sync after it, and is never undone.
    assert len(took_effect) > 5
    assert took_effect == sorted(took_effect)
    assert took_effect[0] is False
    assert took_effect[-1] is True


def _notes(root: Path, disk: NotingDisk, metadata: Mapping[str, str]) -> list[str]:
    """The calls of a put after the first, with open files named by what they became."""

    async def put() -> None:
        async with opened(root, disk=disk) as store:
            await store.put("warm", b"")
            disk.notes.clear()
            await store.put(KEY, b"new", metadata=metadata)

    asyncio.run(put())
    names: dict[bytes | int, str] = {
        path.stat().st_ino: str(path.relative_to(root)) for path in root.rglob("*")
    }
    names[root.stat().st_ino] = "root"
    meta = next((root / ".penstock" / "meta").glob("*"), None)
    if meta is not None:
        names[meta.stat().st_ino] = "meta folder"
        names[next(meta.iterdir()).stat().st_ino] = "metadata"
    return [
        f"{call} {names[noted]}" if isinstance(noted, int) else call for call, noted in disk.notes
    ]


def test_a_put_is_synced_before_it_is_seen_and_before_it_is_answered(tmp_path: Path) -> None:
    assert _notes(tmp_path, NotingDisk(), {}) == [
        "open_shared",
        "create",
        f"write {KEY}",
        f"set_time {KEY}",
        f"sync {KEY}",
        "mkdir",
        "sync root",
        "mkdir",
        "sync some",
        "rename",
        "sync some/folder",
    ]


def test_metadata_is_synced_before_the_body_is_seen(tmp_path: Path) -> None:
    notes = _notes(tmp_path, NotingDisk(), {"owner": "me"})
    start = notes.index(f"sync {KEY}") + 1
    assert notes[start : notes.index("rename")] == [
        "mkdir",
        "sync .penstock/meta",
        "create",
        "write metadata",
        "sync metadata",
        "sync meta folder",
        "mkdir",
        "sync root",
        "mkdir",
        "sync some",
    ]
    assert notes[notes.index("rename") + 1 :] == ["sync some/folder"]


def test_a_delete_is_synced_before_metadata_goes(tmp_path: Path) -> None:
    disk = NotingDisk()

    async def delete() -> list[str]:
        async with opened(tmp_path, disk=disk) as store:
            await store.put(KEY, b"", metadata={"owner": "me"})
            disk.notes.clear()
            await store.delete(KEY)
            return [call for call, _ in disk.notes]

    assert asyncio.run(delete()) == [
        "open_shared",
        "unlink",
        "sync",
        "unlink",
        "rmdir",
        "rmdir",
        "rmdir",
    ]


def test_without_fsync_nothing_waits_for_the_disk(tmp_path: Path) -> None:
    notes = _notes(tmp_path, NotingDisk(fsync=False), {"owner": "me"})
    assert "rename" in notes
    assert [note for note in notes if note.startswith("sync")] == []
