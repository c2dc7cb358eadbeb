"""The settings of workers and producers in `penstock.toml`: a way to write the variables down.

Each name in the tables `[queue]`, `[queue.direct_dispatch]`, `[worker]` and
`[worker.shard_leasing]` stands for a variable of `penstock.queue.settings`, and counts where the
environment has neither that variable nor an alias of it. Whatever else is in the file is the
pipeline's (`penstock.settings`). The file is that of the current directory, or the one that
`PENSTOCK_SETTINGS` names; it is read when a queue or a worker is made.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.settings import ALIASES

TABLES: Final = ("queue", "worker")
"""The tables of the file that are read here."""
DEFAULT_FILE: Final = "penstock.toml"
_SETTINGS: Final = "PENSTOCK_SETTINGS"
_BYTES_MAX: Final = 1024 * 1024
_NUMBERS: Final[Mapping[str, str]] = {
    "worker.task_lease_seconds": "PENSTOCK_WORKER_TASK_LEASE_SECONDS",
    "worker.stop_seconds": "PENSTOCK_WORKER_STOP_SECONDS",
    "worker.sample_shards": "PENSTOCK_WORKER_SAMPLE_SHARDS",
    "worker.lease_duration_secs": "PENSTOCK_WORKER_LEASE_DURATION_SECS",
    "worker.lease_renewal_interval_secs": "PENSTOCK_WORKER_LEASE_RENEWAL_INTERVAL_SECS",
    "worker.overflow_scavenge_interval_secs": "PENSTOCK_WORKER_OVERFLOW_SCAVENGE_INTERVAL_SECS",
    "worker.shard_leasing.shards_per_worker": "PENSTOCK_WORKER_SHARDS",
    "worker.shard_leasing.lease_ttl_secs": "PENSTOCK_WORKER_LEASE_TTL_SECS",
    "worker.shard_leasing.lease_renew_interval_secs": "PENSTOCK_WORKER_LEASE_RENEW_SECS",
    "queue.direct_dispatch.worker_discovery_cache_ttl_secs": (
        "PENSTOCK_QUEUE_WORKER_DISCOVERY_CACHE_TTL_SECS"
    ),
}
_WORDS: Final[Mapping[str, str]] = {
    "queue.dispatch_mode": "PENSTOCK_QUEUE_DISPATCH_MODE",
    "queue.direct_dispatch.worker_selection": "PENSTOCK_QUEUE_WORKER_SELECTION",
    "worker.mode": "PENSTOCK_WORKER_MODE",
    "worker.heartbeat": "PENSTOCK_WORKER_HEARTBEAT",
}
_ENABLED: Final = "worker.shard_leasing.enabled"
_LEASING: Final = "QO_SHARD_LEASING"


def with_file(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment, and what the settings file says where that says nothing."""
    file = Path(environment.get(_SETTINGS) or DEFAULT_FILE)
    said = _said(file, must_be=bool(environment.get(_SETTINGS)))
    for names in ALIASES:
        if any(name in environment for name in names):
            said = {name: text for name, text in said.items() if name not in names}
    return {**said, **environment} if said else environment


def _said(file: Path, *, must_be: bool) -> dict[str, str]:
    try:
        with file.open("rb") as opened:
            found = tomllib.loads(opened.read(_BYTES_MAX).decode())
    except FileNotFoundError:
        if must_be:
            raise InvalidInput(f"There is no settings file {file}.") from None
        return {}
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} is not TOML: {error}") from error
    tables = {name: value for name, value in found.items() if name in TABLES}
    return dict(_variable(file, name, value) for name, value in _flat(tables))


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _variable(file: Path, name: str, value: object) -> tuple[str, str]:
    """A line of the file as the variable that it stands for."""
    if name == _ENABLED and isinstance(value, bool):
        return _LEASING, "1" if value else "0"
    if name in _WORDS and isinstance(value, str):
        return _WORDS[name], value
    if name in _NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
        return _NUMBERS[name], str(value)
    known = (*_WORDS, *_NUMBERS, _ENABLED)
    if name not in known:
        raise InvalidInput(
            f"{file} has {name!r}, which is not a setting of queues and their workers.",
            hint=f"There are {', '.join(known)}.",
        )
    kind = "true or false" if name == _ENABLED else "a text" if name in _WORDS else "a number"
    raise InvalidInput(f"{file}: {name} must be {kind}, not {value!r}.")
