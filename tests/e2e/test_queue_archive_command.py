"""`penstock queue archive` and `penstock queue purge`: what they say, fetch and remove."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock import Queue
from penstock.cli import run
from penstock.kernel.document_format import encode
from penstock.queue import archive
from penstock.queue.archive_rows import LegacyArchiveBatch, LegacyArchiveRecord
from penstock.queue.ids import PackAt, new_pack
from penstock.queue.ledger import Ledger, LedgerFailure, QueueTaskState, QueueTaskStatus

DONE = QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, at_ms=1, result=msgspec.Raw(b"7"))
FAILED = QueueTaskState(QueueTaskStatus.FAILED, 1, at_ms=1, failure=LedgerFailure("E", "m"))


class Said(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


Say = Callable[..., Said]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs `penstock queue` with words, on a queue with four settled tasks and one that waits."""
    url = (tmp_path / "store").as_uri()
    monkeypatch.setenv("PENSTOCK_STORE", url)
    monkeypatch.setenv("PENSTOCK_QUEUE", "q")
    asyncio.run(_made(url))

    def command(*words: str) -> Said:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(["queue", *words])
        return Said(code, out.getvalue(), err.getvalue())

    return command


async def _made(url: str) -> None:
    async with await Queue.open(url, name="q") as queue:
        access = queue.access
        now_ms = int((await access.store.now()).latest * 1000)

        def record(type_: str, state: QueueTaskState) -> tuple[PackAt, Ledger]:
            at = new_pack(type=type_, count=1, submitted_ms=now_ms, entropy=access.entropy)
            ledger = Ledger(
                pack_version="v",
                born="b",
                tasks=(state,),
                inputs=(msgspec.Raw(b'{"n":1}'),),
                submitted_ms=now_ms,
            )
            return at, ledger

        members = [record("a", DONE), record("b", DONE), record("a", FAILED)]
        await archive.keep(access.store, access.layout, members, entropy=access.entropy)
        at, ledger = record("a", DONE)
        old = LegacyArchiveBatch(
            records=(LegacyArchiveRecord(at.path, msgspec.Raw(encode(ledger))),)
        )
        key = access.layout.batch(
            access.layout.archive, first_ms=now_ms, last_ms=now_ms, entropy=access.entropy
        )
        await access.store.put(key.removesuffix(".jsonl.gz"), encode(old))
        await queue.submit("a", 17)


def test_files_are_listed(say: Say) -> None:
    said = say("archive", "list")
    assert said.code == 0
    assert len(said.out.splitlines()) == 4
    found = json.loads(say("archive", "list", "--json").out)
    assert len(found) == 3
    assert sum(each["is_dead_letters"] for each in found) == 1
    assert {"key", "first_submitted_at", "archived_at", "bytes"} <= set(found[0])
    assert len(json.loads(say("archive", "list", "--dead", "--json").out)) == 1
    assert "2 older ones" in say("archive", "list", "--limit", "1").err


def test_files_are_fetched_once_and_old_ones_become_rows(say: Say, tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    assert "3 files are new" in say("archive", "fetch", "--to", str(folder)).out
    assert "0 files are new" in say("archive", "fetch", "--to", str(folder)).out
    rows: list[dict[str, Any]] = []
    assert [path.name for path in sorted(folder.iterdir())] == ["archive", "dead"]
    for path in sorted(folder.glob("*/*")):
        assert path.name.endswith(".jsonl.gz")
        rows += map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    assert sorted((row["type"], row["status"]) for row in rows) == [
        ("a", "failed"),
        ("a", "succeeded"),
        ("a", "succeeded"),
        ("b", "succeeded"),
    ]
    (letters,) = (folder / "dead").iterdir()
    assert b'"failed"' in gzip.decompress(letters.read_bytes())
    printed = say("archive", "fetch").out.splitlines()
    assert sorted(json.loads(line)["id"] for line in printed) == sorted(row["id"] for row in rows)
    (dead,) = json.loads(say("archive", "list", "--dead", "--json").out)
    (line,) = say("archive", "fetch", dead["key"]).out.splitlines()
    assert json.loads(line)["error"] == "E"
    assert json.loads(say("get", json.loads(line)["id"], "--json").out)["status"] == "failed"


def test_what_was_replayed_is_marked_in_the_list_of_what_failed(say: Say) -> None:
    words = ("list", "--status", "failed")
    (before,) = json.loads(say(*words, "--json").out)["tasks"]
    assert before["is_replayed"] is False
    assert "replayed" not in say(*words).out
    assert say("replay", before["id"]).code == 0
    (after,) = json.loads(say(*words, "--json").out)["tasks"]
    assert (after["id"], after["is_replayed"]) == (before["id"], True)
    assert "  replayed; E: m" in say(*words).out


def test_what_is_settled_just_now_is_not_flushed(say: Say) -> None:
    (task,) = json.loads(say("list", "--json").out)["tasks"]
    assert say("cancel", task["id"]).code == 0
    said = say("archive", "flush")
    assert said.out == "0 packs were archived. 1 more may not leave yet.\n"
    assert json.loads(say("archive", "flush", "--json").out) == {"archived": 0, "settled_seen": 1}


def test_retention_is_set_shown_and_kept(say: Say) -> None:
    assert "for ever, dead letters for ever" in say("archive", "retain").out
    said = say("archive", "retain", "--days", "30")
    assert "Records are kept for 30 days, dead letters for ever." in said.out
    found = json.loads(say("archive", "retain", "--dead-days", "90d", "--json").out)
    assert (found["archive_days"], found["dead_letter_days"]) == (30, 90)
    assert found["removed"]["batches"] == 0
    assert "for ever, dead letters for 90" in say("archive", "retain", "--days", "forever").out


def test_a_purge_asks_and_then_does_what_it_said(say: Say) -> None:
    refused = say("purge", "--type", "a")
    assert refused.code == 2
    assert "Tasks of 'q' that are of type a will be cancelled" in refused.err
    assert "--yes" in refused.err
    shown = json.loads(say("purge", "--type", "a", "--dry-run", "--json").out)
    assert (shown["cancelled"], shown["tasks_forgotten"]) == (1, 3)
    done = json.loads(say("purge", "--type", "a", "--yes", "--json").out)
    assert (done["cancelled"], done["tasks_forgotten"]) == (1, 3)
    (line,) = say("archive", "fetch").out.splitlines()
    assert json.loads(line)["type"] == "b"
    # What was cancelled a moment ago is too young to be forgotten.
    assert done["too_young"] == 1
    last = say("purge", "--all", "--yes")
    assert last.out.startswith("0 tasks cancelled, 0 asked to stop, 1 deleted, with 0 payloads.")
    assert "1 task has ended too recently to be deleted" in last.err


def test_a_file_that_is_not_there_is_a_failure(say: Say) -> None:
    answer = say("archive", "fetch", "nowhere")
    assert answer.code == 1
    assert "'nowhere' is not a file of this queue's archive" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("purge",), "Select tasks with"),
        (("purge", "--all", "--type", "a"), "Select tasks with"),
        (("purge", "--older-than", "x", "--yes"), "'x' is not a duration"),
        (("purge", "--status", "done", "--yes"), "is not one of"),
        (("archive", "retain", "--days", "0"), "'0' is not a number of days"),
        (("archive", "retain", "--days", "36h"), "'36h' is not a number of days"),
        (("archive", "retain", "--days", "some"), "'some' is not a number of days"),
        (("archive", "fetch", "--json"), "needs --to"),
    ],
)
def test_bad_words_are_one_sentence(say: Say, words: tuple[str, ...], said: str) -> None:
    answer = say(*words)
    assert answer.code == 2
    assert said in answer.err
    assert "Traceback" not in answer.err
