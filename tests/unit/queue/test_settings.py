"""What a worker is set to: by default, by the code, and by its environment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.queue.client import Queue
from penstock.queue.settings import (
    DiscoveryMode,
    DispatchSettings,
    WorkerSelection,
    WorkerSettings,
    dispatch_from,
    mode_from,
    settings_from,
)
from penstock.queue.worker import Worker


def test_the_defaults_are_those_of_shard_leasing() -> None:
    default = WorkerSettings()
    assert default.shards_per_worker == 16
    assert default.lease_ttl_secs == 30
    assert default.lease_renew_interval_secs == 10
    assert mode_from(None, {}) is DiscoveryMode.LEASED
    assert settings_from({}) == default


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("PENSTOCK_WORKER_SHARDS", "shards_per_worker"),
        ("QO_SHARD_LEASING_SHARDS_PER_WORKER", "shards_per_worker"),
        ("PENSTOCK_WORKER_LEASE_RENEW_SECS", "lease_renew_interval_secs"),
        ("QO_SHARD_LEASING_RENEW_SECS", "lease_renew_interval_secs"),
        ("PENSTOCK_WORKER_TASK_LEASE_SECONDS", "task_lease_seconds"),
        ("PENSTOCK_WORKER_STOP_SECONDS", "stop_seconds"),
    ],
)
def test_a_variable_sets_its_field_and_no_other(variable: str, field: str) -> None:
    assert settings_from({variable: "7", "OTHER": "x"}) == WorkerSettings(**{field: 7})  # type: ignore[arg-type]  # the names are those of fields


@pytest.mark.parametrize(
    "variable", ["PENSTOCK_WORKER_LEASE_TTL_SECS", "QO_SHARD_LEASING_TTL_SECS"]
)
def test_the_lease_is_set_in_seconds(variable: str) -> None:
    assert settings_from({variable: "45.5"}) == WorkerSettings(lease_ttl_secs=45.5)


def test_the_variables_of_seed_001_together() -> None:
    environment = {
        "QO_SHARD_LEASING": "1",
        "QO_SHARD_LEASING_SHARDS_PER_WORKER": "4",
        "QO_SHARD_LEASING_TTL_SECS": "60",
        "QO_SHARD_LEASING_RENEW_SECS": "20",
    }
    assert mode_from(None, environment) is DiscoveryMode.LEASED
    assert settings_from(environment) == WorkerSettings(
        shards_per_worker=4, lease_ttl_secs=60, lease_renew_interval_secs=20
    )


def test_ours_win_over_the_aliases() -> None:
    environment = {
        "PENSTOCK_WORKER_SHARDS": "3",
        "QO_SHARD_LEASING_SHARDS_PER_WORKER": "5",
        "PENSTOCK_WORKER_MODE": "shared",
        "QO_SHARD_LEASING": "1",
    }
    assert settings_from(environment).shards_per_worker == 3
    assert mode_from(None, environment) is DiscoveryMode.SHARED


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("1", DiscoveryMode.LEASED),
        ("0", DiscoveryMode.SHARED),
        ("True", DiscoveryMode.LEASED),
        (" off ", DiscoveryMode.SHARED),
    ],
)
def test_the_alias_of_the_mode(text: str, mode: DiscoveryMode) -> None:
    assert mode_from(None, {"QO_SHARD_LEASING": text}) is mode


@pytest.mark.parametrize("text", ["", "2", "leased", "enabled"])
def test_an_alias_that_says_neither_yes_nor_no_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="QO_SHARD_LEASING must be 1 or 0"):
        mode_from(None, {"QO_SHARD_LEASING": text})


def test_the_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode_from("leased", {"PENSTOCK_WORKER_MODE": "shared"}) is DiscoveryMode.LEASED
    monkeypatch.setenv("PENSTOCK_WORKER_MODE", "shared")
    monkeypatch.setenv("PENSTOCK_WORKER_SHARDS", "5")
    queue = Queue("memory://", name="q")
    said = Worker(queue, mode="leased", settings=WorkerSettings(shards_per_worker=2))
    assert (said.mode, said.settings.shards_per_worker) == (DiscoveryMode.LEASED, 2)
    silent = Worker(queue)
    assert (silent.mode, silent.settings.shards_per_worker) == (DiscoveryMode.SHARED, 5)
    asyncio.run(queue.close())


@pytest.mark.parametrize("mode", ["Leased", "directly", "1"])
def test_what_is_no_mode_is_refused(mode: str) -> None:
    for given, environment in ((mode, {}), (None, {"PENSTOCK_WORKER_MODE": mode})):
        with pytest.raises(InvalidInput, match="is not a mode") as caught:
            mode_from(given, environment)
        assert caught.value.hint.startswith("Modes are leased, shared")


@pytest.mark.parametrize("text", ["", "many", "4.5", "0x10", "1,5"])
def test_a_number_of_shards_must_be_one(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^PENSTOCK_WORKER_SHARDS must be a number, not "):
        settings_from({"PENSTOCK_WORKER_SHARDS": text})


@pytest.mark.parametrize("text", ["soon", "", "nan", "inf", "-1", "1e9"])
def test_seconds_that_make_no_sense_are_refused(text: str) -> None:
    for variable in ("PENSTOCK_WORKER_STOP_SECONDS", "PENSTOCK_WORKER_TASK_LEASE_SECONDS"):
        with pytest.raises(InvalidInput):
            settings_from({variable: text})


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards_per_worker": 0},
        {"shards_per_worker": -1},
        {"lease_renew_interval_secs": 0.5},
        {"lease_renew_interval_secs": 15.1},
        {"lease_renew_interval_secs": math.nan},
        {"lease_ttl_secs": 19.9},
        {"lease_ttl_secs": 3601.0, "lease_renew_interval_secs": 10.0},
        {"lease_ttl_secs": math.inf},
        {"task_lease_seconds": 2.9},
        {"task_lease_seconds": 86_401.0},
        {"sweep_seconds": 0.0},
        {"settle_seconds": -0.1},
        {"settle_seconds": math.nan},
        {"stop_seconds": -1.0},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        WorkerSettings(**wrong)  # type: ignore[arg-type]  # the names are those of fields


def test_the_bounds_themselves_are_allowed() -> None:
    WorkerSettings(lease_renew_interval_secs=15.0)
    WorkerSettings(lease_ttl_secs=3600.0, lease_renew_interval_secs=1.0)
    WorkerSettings(task_lease_seconds=3.0, settle_seconds=0.0, stop_seconds=0.0)


def test_endings_of_large_packs_wait_longer_and_of_one_not_at_all() -> None:
    settings = WorkerSettings(settle_seconds=2.0)
    waits = [settings.settle_seconds_of(count) for count in (1, 2, 250, 500, 1000)]
    assert waits == [0.0, 2.0, 2.0, 4.0, 8.0]


def test_the_settings_of_direct_dispatch_have_the_names_and_values_of_its_design() -> None:
    worker, producer = WorkerSettings(), DispatchSettings()
    assert worker.lease_duration_secs == 60
    assert worker.lease_renewal_interval_secs == 20
    assert worker.overflow_scavenge_interval_secs == 120
    assert producer.worker_discovery_cache_ttl_secs == 30
    assert producer.worker_selection is WorkerSelection.ROUND_ROBIN
    environment = {
        "PENSTOCK_WORKER_LEASE_DURATION_SECS": "90",
        "PENSTOCK_WORKER_LEASE_RENEWAL_INTERVAL_SECS": "30",
        "PENSTOCK_WORKER_OVERFLOW_SCAVENGE_INTERVAL_SECS": "10",
        "PENSTOCK_QUEUE_WORKER_DISCOVERY_CACHE_TTL_SECS": "5",
        "PENSTOCK_QUEUE_WORKER_SELECTION": "hash",
    }
    assert settings_from(environment) == WorkerSettings(
        lease_duration_secs=90, lease_renewal_interval_secs=30, overflow_scavenge_interval_secs=10
    )
    assert dispatch_from(environment) == DispatchSettings(
        worker_discovery_cache_ttl_secs=5, worker_selection=WorkerSelection.HASH
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: WorkerSettings(lease_duration_secs=30), "at most half of lease_duration_secs"),
        (lambda: WorkerSettings(overflow_scavenge_interval_secs=0), "between 1 s and a day"),
        (lambda: DispatchSettings(worker_discovery_cache_ttl_secs=-1), "between 0 s and an hour"),
        (
            lambda: dispatch_from({"PENSTOCK_QUEUE_WORKER_SELECTION": "best"}),
            "WORKER_SELECTION must be one of round_robin, hash, random, not 'best'",
        ),
    ],
)
def test_settings_of_direct_dispatch_that_cannot_be_are_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        make()
