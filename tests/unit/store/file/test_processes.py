"""Several processes that share one folder: one winner each, and no update lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.unit.store.file.stores import files_below, names_in, opened

CHILD = Path(__file__).with_name("child.py")
PROCESSES = 4


def answers(*arguments: str) -> list[str]:
    """What each of several processes prints that are started together."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(CHILD), *arguments],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(PROCESSES)
        ]
        ends = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert [(error, code) for _, error, code in ends] == [("", 0)] * PROCESSES
    return [out.strip() for out, _, _ in ends]


async def read(root: Path, key: str) -> bytes:
    async with opened(root) as store:
        found = await store.get(key)
        assert found is not None
        return found.body


def test_no_increment_is_lost(tmp_path: Path) -> None:
    async def prepare() -> None:
        async with opened(tmp_path) as store:
            await store.put("a/counter", b"0")

    asyncio.run(prepare())
    answers("count", str(tmp_path), "a/counter", "100")
    assert asyncio.run(read(tmp_path, "a/counter")) == str(100 * PROCESSES).encode()
    assert files_below(tmp_path / ".penstock/tmp") == []


def test_one_of_all_tasks_of_all_processes_creates_a_key(tmp_path: Path) -> None:
    won = answers("create", str(tmp_path), "a/key", "16")
    assert sorted(won) == ["0"] * (PROCESSES - 1) + ["1"]
    assert asyncio.run(read(tmp_path, "a/key"))


def test_puts_and_deletes_in_one_folder_do_not_hinder_each_other(tmp_path: Path) -> None:
    answers("churn", str(tmp_path), "deep/in/a/folder", "150")
    assert names_in(tmp_path) == [".penstock"]
