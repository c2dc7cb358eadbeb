"""How a worker behaves: every number that a user may set, with its default and its variable.

Settings are given in code, all together, or by environment variables `PENSTOCK_WORKER_…`, which
count where the code gives none. The `QO_SHARD_LEASING…` variables are aliases; ours win over them.

| setting | variable | alias |
|---|---|---|
| `mode` | `PENSTOCK_WORKER_MODE` | `QO_SHARD_LEASING`: 1 is leased, 0 is shared |
| `shards_per_worker` | `PENSTOCK_WORKER_SHARDS` | `QO_SHARD_LEASING_SHARDS_PER_WORKER` |
| `lease_ttl_secs` | `PENSTOCK_WORKER_LEASE_TTL_SECS` | `QO_SHARD_LEASING_TTL_SECS` |
| `lease_renew_interval_secs` | `PENSTOCK_WORKER_LEASE_RENEW_SECS` | `QO_SHARD_LEASING_RENEW_SECS` |
| `task_lease_seconds` | `PENSTOCK_WORKER_TASK_LEASE_SECONDS` | |
| `stop_seconds` | `PENSTOCK_WORKER_STOP_SECONDS` | |
| `sample_shards` | `PENSTOCK_WORKER_SAMPLE_SHARDS` | |
| `heartbeat` | `PENSTOCK_WORKER_HEARTBEAT` | |
| `lock_folder` | `PENSTOCK_WORKER_LOCK_FOLDER` | |
| `lease_duration_secs` | `PENSTOCK_WORKER_LEASE_DURATION_SECS` | |
| `lease_renewal_interval_secs` | `PENSTOCK_WORKER_LEASE_RENEWAL_INTERVAL_SECS` | |
| `overflow_scavenge_interval_secs` | `PENSTOCK_WORKER_OVERFLOW_SCAVENGE_INTERVAL_SECS` | |

Those who submit have `DispatchSettings`, for the types that are direct:

| setting | variable |
|---|---|
| `worker_discovery_cache_ttl_secs` | `PENSTOCK_QUEUE_WORKER_DISCOVERY_CACHE_TTL_SECS` |
| `worker_selection` | `PENSTOCK_QUEUE_WORKER_SELECTION` |

`PENSTOCK_QUEUE_DISPATCH_MODE=direct` makes all types of a queue direct that is made without a
`config`, and `direct` the mode of workers that are given none. Variables may be written down in
`penstock.toml` (`penstock.queue.settings_file`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal

from penstock.kernel.errors import InvalidInput
from penstock.queue.running.polling import Polling


class Mode(StrEnum):
    """How a worker finds tasks."""

    LEASED = "leased"
    SHARED = "shared"
    SAMPLED = "sampled"
    DIRECT = "direct"


class Heartbeat(StrEnum):
    """How a worker renews its claims."""

    SWAP = "swap"
    """The ledger is written again, which proves that the claim still holds."""
    TOUCH = "touch"
    """The ledger is only dated anew, where that will do: its body is not sent."""


class Selection(StrEnum):
    """Into whose inbox a pack of a direct type is announced."""

    ROUND_ROBIN = "round_robin"
    HASH = "hash"
    """The same worker for the same key, as long as it lives."""
    RANDOM = "random"


LEASE_SECONDS_MAX: Final = 86_400.0
"""No lease of any kind may last longer."""
SAMPLED_SHARDS: Final = 16
"""For sampling, a queue is cut into so many runs of slots, whatever its number of shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The numbers of one worker. Times are the store's."""

    shards_per_worker: int = 16
    """How many shards an owner keeps when it is saturated and others are free: a target, no cap."""
    lease_ttl_secs: float = 30.0
    """How long an owner's lease on its shards lasts; tripled while it is idle."""
    lease_renew_interval_secs: float = 10.0
    task_lease_seconds: float = 30.0
    """How long a claim lasts; renewed while its tasks run. Not a limit for how long they run."""
    settle_seconds: float = 2.0
    """How long endings of one pack wait for each other, to be written together; up to four times
    as long in packs of 250 to 1,000 tasks."""
    stop_seconds: float = 30.0
    """How long a worker that is asked to stop lets its tasks run before it gives them back."""
    sweep_seconds: float = 600.0
    """How often what is due is compared with what points to it, and repaired."""
    polling: Polling = field(default_factory=Polling)
    sample_shards: int = 3
    """In mode `sampled`: how many of 16 shards a look samples."""
    heartbeat: Heartbeat | Literal["swap", "touch"] = Heartbeat.SWAP
    """How claims are renewed: see `penstock.queue.heartbeats`."""
    lease_duration_secs: float = 60.0
    """In mode `direct`: how long a worker's lease on its inbox lasts; tripled while it is idle."""
    lease_renewal_interval_secs: float = 20.0
    overflow_scavenge_interval_secs: float = 120.0
    """In mode `direct`: how often a worker looks for what no inbox has led to."""
    lock_folder: str | None = None
    """Where a lock file says that this process lives, for the one that follows it: a folder of a
    local file system, of this user's own. None: below the user's state folder. Empty: nowhere."""

    def settle_seconds_of(self, count: int) -> float:
        """How long endings of a pack of so many tasks wait: the more, the more a write carries."""
        return 0.0 if count == 1 else self.settle_seconds * min(4.0, max(1.0, count / 250))

    def __post_init__(self) -> None:
        if self.shards_per_worker < 1:
            raise InvalidInput("shards_per_worker must be at least 1.")
        if not 1 <= self.lease_renew_interval_secs <= self.lease_ttl_secs / 2 <= 1800:
            raise InvalidInput(
                "lease_renew_interval_secs must be at least 1 and at most half of lease_ttl_secs,"
                f" not {self.lease_renew_interval_secs} of {self.lease_ttl_secs}."
            )
        if not 1 <= self.sample_shards <= SAMPLED_SHARDS:
            raise InvalidInput(
                f"sample_shards must be between 1 and {SAMPLED_SHARDS}, not {self.sample_shards}."
            )
        if not 1 <= self.lease_renewal_interval_secs <= self.lease_duration_secs / 2 <= 1800:
            raise InvalidInput(
                "lease_renewal_interval_secs must be at least 1 and at most half of"
                f" lease_duration_secs, not {self.lease_renewal_interval_secs} of"
                f" {self.lease_duration_secs}."
            )
        if not 1 <= self.overflow_scavenge_interval_secs <= 86_400:
            raise InvalidInput("overflow_scavenge_interval_secs must be between 1 s and a day.")
        # As text it is welcome too.
        object.__setattr__(self, "heartbeat", heartbeat_from(self.heartbeat))
        for name in ("task_lease_seconds", "sweep_seconds"):
            if not 3 <= getattr(self, name) <= LEASE_SECONDS_MAX:
                raise InvalidInput(f"{name} must be between 3 s and a day.")
        for name in ("settle_seconds", "stop_seconds"):
            if not 0 <= getattr(self, name) <= 86_400:
                raise InvalidInput(f"{name} must be between 0 s and a day.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """How packs of direct types are announced to workers, by whoever submits them."""

    worker_discovery_cache_ttl_secs: float = 30.0
    """How old the picture of the workers may be."""
    worker_selection: Selection = Selection.ROUND_ROBIN

    def __post_init__(self) -> None:
        if not 0 <= self.worker_discovery_cache_ttl_secs <= 3600:
            raise InvalidInput("worker_discovery_cache_ttl_secs must be between 0 s and an hour.")
        try:
            # As text it is welcome too.
            object.__setattr__(self, "worker_selection", Selection(self.worker_selection))
        except ValueError as error:
            raise InvalidInput(
                f"{str(self.worker_selection)[:60]!r} is not a way to select a worker.",
                hint=f"worker_selection is one of {', '.join(Selection)}.",
            ) from error


_VARIABLES: Final = {
    "shards_per_worker": ("PENSTOCK_WORKER_SHARDS", "QO_SHARD_LEASING_SHARDS_PER_WORKER"),
    "lease_ttl_secs": ("PENSTOCK_WORKER_LEASE_TTL_SECS", "QO_SHARD_LEASING_TTL_SECS"),
    "lease_renew_interval_secs": (
        "PENSTOCK_WORKER_LEASE_RENEW_SECS",
        "QO_SHARD_LEASING_RENEW_SECS",
    ),
    "task_lease_seconds": ("PENSTOCK_WORKER_TASK_LEASE_SECONDS",),
    "stop_seconds": ("PENSTOCK_WORKER_STOP_SECONDS",),
    "sample_shards": ("PENSTOCK_WORKER_SAMPLE_SHARDS",),
    "lease_duration_secs": ("PENSTOCK_WORKER_LEASE_DURATION_SECS",),
    "lease_renewal_interval_secs": ("PENSTOCK_WORKER_LEASE_RENEWAL_INTERVAL_SECS",),
    "overflow_scavenge_interval_secs": ("PENSTOCK_WORKER_OVERFLOW_SCAVENGE_INTERVAL_SECS",),
}
ALIASES: Final = (("PENSTOCK_WORKER_MODE", "QO_SHARD_LEASING"), *_VARIABLES.values())
"""Variables that say the same: where one of them is set, the settings file says nothing of it."""
DISPATCH_MODE: Final = "PENSTOCK_QUEUE_DISPATCH_MODE"
_WHOLE: Final = frozenset({"shards_per_worker", "sample_shards"})


def settings_from(environment: Mapping[str, str]) -> WorkerSettings:
    """The defaults, with what the environment says."""
    said: dict[str, float | int | str] = {}
    for name, variables in _VARIABLES.items():
        for variable in variables:
            if variable in environment:
                said[name] = _number(variable, environment[variable], whole=name in _WHOLE)
                break
    if "PENSTOCK_WORKER_HEARTBEAT" in environment:
        said["heartbeat"] = environment["PENSTOCK_WORKER_HEARTBEAT"]
    if "PENSTOCK_WORKER_LOCK_FOLDER" in environment:
        said["lock_folder"] = environment["PENSTOCK_WORKER_LOCK_FOLDER"]
    return replace(WorkerSettings(), **said)  # type: ignore[arg-type]  # names are those of fields


def dispatch_from(environment: Mapping[str, str]) -> DispatchSettings:
    """The defaults for those who submit, with what the environment says."""
    said: dict[str, float | str] = {}
    ttl = "PENSTOCK_QUEUE_WORKER_DISCOVERY_CACHE_TTL_SECS"
    if ttl in environment:
        said["worker_discovery_cache_ttl_secs"] = _number(ttl, environment[ttl], whole=False)
    if "PENSTOCK_QUEUE_WORKER_SELECTION" in environment:
        said["worker_selection"] = environment["PENSTOCK_QUEUE_WORKER_SELECTION"]
    return replace(DispatchSettings(), **said)  # type: ignore[arg-type]  # names are those of fields


def mode_from(mode: str | None, environment: Mapping[str, str]) -> Mode:
    """The mode that was given, or the one that the environment says, or `leased`."""
    if mode is None:
        mode = environment.get("PENSTOCK_WORKER_MODE")
    if mode is None and "QO_SHARD_LEASING" in environment:
        mode = _yes_or_no("QO_SHARD_LEASING", environment["QO_SHARD_LEASING"])
    if mode is None and is_direct_from(environment):
        mode = Mode.DIRECT
    try:
        return Mode(mode or Mode.LEASED)
    except ValueError as error:
        raise InvalidInput(
            f"{mode!r} is not a mode.",
            hint=f"Modes are {', '.join(Mode)}; PENSTOCK_WORKER_MODE counts where none is given.",
        ) from error


def is_direct_from(environment: Mapping[str, str]) -> bool:
    """Whether a queue that is made has all types direct, and its workers that mode by default."""
    said = environment.get(DISPATCH_MODE, Mode.SHARED)
    if said not in (Mode.SHARED, Mode.DIRECT):
        raise InvalidInput(f"{said[:60]!r} is not a dispatch mode.", hint="Write shared or direct.")
    return said == Mode.DIRECT


def heartbeat_from(text: str) -> Heartbeat:
    """How claims are renewed, or `InvalidInput`."""
    try:
        return Heartbeat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r} is not a heartbeat.",
            hint=f"Heartbeats are {' and '.join(Heartbeat)}; see PENSTOCK_WORKER_HEARTBEAT.",
        ) from error


def _yes_or_no(variable: str, text: str) -> Mode:
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return Mode.LEASED
        case "0" | "false" | "no" | "off":
            return Mode.SHARED
    raise InvalidInput(f"{variable} must be 1 or 0, not {text!r}.")


def _number(variable: str, text: str, *, whole: bool) -> float | int:
    try:
        return int(text) if whole else float(text)
    except ValueError as error:
        raise InvalidInput(f"{variable} must be a number, not {text!r}.") from error
