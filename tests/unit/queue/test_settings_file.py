"""What a queue and its workers find in `penstock.toml`, and what goes over it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.settings import QUEUE_SCHEMA, DiscoveryMode, WorkerSettings
from penstock.queue.worker import Worker
from penstock.settings import read_settings
from tests.architecture.source import ROOT


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_SETTINGS", raising=False)
    return tmp_path / "penstock.toml"


def _worker() -> Worker:
    return Worker(Queue("memory://", name="q"))


def test_what_the_page_shows_is_what_holds_by_default(file: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/queue.md").read_text(), re.DOTALL)
    file.write_text(shown)
    worker = _worker()
    assert (worker.mode, worker.settings) == (DiscoveryMode.LEASED, WorkerSettings())
    shown = QUEUE_SCHEMA.file({}, file.parent)
    assert shown is not None
    assert (
        sum(shown.find(key) is not None for each in QUEUE_SCHEMA.settings for key in each.keys)
        == 11
    )


def test_a_file_says_what_the_environment_does_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "port = 8080\n[worker]\nstop_seconds = 5\nlease_duration_secs = '1m30s'\n"
        "[worker.shard_leasing]\nenabled = false\nlease_ttl_secs = 60\nshards_per_worker = 4\n"
    )
    worker = _worker()
    assert worker.mode is DiscoveryMode.SHARED
    assert worker.settings == WorkerSettings(
        stop_seconds=5, lease_duration_secs=90, lease_ttl_secs=60, shards_per_worker=4
    )
    monkeypatch.setenv("PENSTOCK_WORKER_MODE", "sampled")
    monkeypatch.setenv("QO_SHARD_LEASING_TTL_SECS", "40")
    monkeypatch.setenv("PENSTOCK_WORKER_SHARDS", "7")
    worker = _worker()
    assert worker.mode is DiscoveryMode.SAMPLED
    assert worker.settings.lease_ttl_secs == 40
    assert worker.settings.shards_per_worker == 7
    assert worker.settings.stop_seconds == 5
    assert (
        Worker(worker.queue, mode="direct", settings=WorkerSettings()).mode is DiscoveryMode.DIRECT
    )
    # The pipeline reads the rest of the same file.
    told = read_settings({}, environment={}, folder=file.parent)
    assert told.settings.port == 8080


def test_a_queue_that_is_made_where_dispatch_is_direct_has_direct_types(file: Path) -> None:
    file.write_text("[queue]\ndispatch_mode = 'direct'\n")
    queue = Queue("memory://", name="q")
    assert queue._wanted.direct == ("*",)
    assert Worker(queue).mode is DiscoveryMode.DIRECT
    file.write_text("[queue]\ndispatch_mode = 'shared'\n")
    assert Queue("memory://", name="q")._wanted.direct == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[worker]\nlease = 5", "'worker.lease', which is not a setting"),
        ("worker = 5", "'worker', which is not a setting"),
        ("[wroker]\nstop_seconds = 5", "'wroker', which is not a setting"),
        ("[worker]\nstop_seconds = 'x5'", "worker.stop_seconds must be a number"),
        ("[worker]\nstop_seconds = '5 parsecs'", "must be a number of seconds, or a time"),
        ("[worker]\nsample_shards = '3s'", "worker.sample_shards must be a number, not"),
        ("[worker]\nmode = 5", "worker.mode must be a text"),
        ("[worker.shard_leasing]\nenabled = 'yes'", "enabled must be true or false"),
        ("[queue]\ndispatch_mode = 'inbox'", "'inbox' is not a dispatch mode"),
        ("[worker", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_sentence(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidInput, match=re.escape(words)):
        _worker()


def test_a_file_that_is_named_must_be_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SETTINGS", str(file))
    with pytest.raises(InvalidInput, match="There is no settings file"):
        _worker()
