"""How a worker and a producer behave: every number that a user may set, its default and variable.

Settings are given in code, all together, or by environment variables `PENSTOCK_WORKER_…`, which
count where the code gives none, or by the tables `[queue]` and `[worker]` of `penstock.toml` in the
current directory, or where `PENSTOCK_SETTINGS` points; it is read when a queue or a worker is made.
The `QO_SHARD_LEASING…` variables are aliases; ours win over them. Producers have
`DispatchSettings`, for the types that are direct. `QUEUE_SCHEMA` is all of them; the rest of the
file is the pipeline's (`penstock.settings`).

`QueueModes` are settings too, but for `Queue` and `Worker` themselves: the argument `mode` of a
worker goes over them. `PENSTOCK_QUEUE_DISPATCH_MODE=direct` makes all types direct of a queue that
is created without a `config`, and `direct` the default mode of workers.

**Polling.** `Polling` bounds the interval between looks: work resets it to the least; every
look that finds nothing multiplies it by a factor, up to the most. Where work is rare the factor
is at least `_RARE_FACTOR`: a task that comes soon after is found soon, and a lone pack costs
three or four looks more. Jitter keeps workers apart. The most bounds how late the first task is
found after a long idle time, where looks are lists; `leased` has a doorbell for that.

`ShardLeaseSettings` are the times and targets that `penstock.queue.shards.leases` derives from
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput
from penstock.kernel.settings_schema import Alias, Place, Schema, SettingsFile, check, setting

_RARE: Final = 40
"""Work is rare that comes so many times the least interval apart."""
_RARE_FACTOR: Final = 1.5


@dataclass(frozen=True, slots=True)
class Polling:
    """The least and the most seconds between looks, the factor of growth, and the jitter."""

    min_seconds: float = 1.6
    max_seconds: float = 8.0
    factor: float = 1.1
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.min_seconds <= self.max_seconds <= 3600:
            raise InvalidInput(
                "Polling needs 0 < min_seconds <= max_seconds <= 3600,"
                f" not {self.min_seconds} and {self.max_seconds}."
            )
        if not 1 <= self.factor <= 100 or not 0 <= self.jitter < 1:
            raise InvalidInput(
                "Polling needs a factor of 1 to 100 and a jitter of 0 to below 1,"
                f" not {self.factor} and {self.jitter}."
            )


class PollPace:
    """One worker's present interval."""

    def __init__(self, polling: Polling, *, entropy: Entropy, clock: Clock) -> None:
        self._polling = polling
        self._entropy = entropy
        self._clock = clock
        self._seconds = polling.min_seconds
        self._factor = polling.factor
        self._worked_at = clock.monotonic()

    def reset(self) -> None:
        """There was work."""
        instant = self._clock.monotonic()
        gap, self._worked_at = instant - self._worked_at, instant
        is_rare = gap > _RARE * self._polling.min_seconds
        self._factor = max(self._polling.factor, _RARE_FACTOR if is_rare else 1.0)
        self._seconds = self._polling.min_seconds

    def next_seconds(self) -> float:
        """How long to wait now; the time after that is longer."""
        seconds = self._seconds
        self._seconds = min(self._polling.max_seconds, seconds * self._factor)
        spread = self._polling.jitter * seconds
        return self._entropy.uniform(seconds - spread, seconds + spread)


class DiscoveryMode(StrEnum):
    """How a worker finds tasks."""

    LEASED = "leased"
    SHARED = "shared"
    SAMPLED = "sampled"
    DIRECT = "direct"


class HeartbeatMode(StrEnum):
    """How a worker renews its claims."""

    SWAP = "swap"
    """The ledger is written again, which proves that the claim still holds."""
    TOUCH = "touch"
    """The ledger is only dated anew, where that will do: its body is not sent."""


class WorkerSelection(StrEnum):
    """Into whose inbox a pack of a direct type is announced."""

    ROUND_ROBIN = "round_robin"
    HASH = "hash"
    """The same worker for the same key, as long as it lives."""
    RANDOM = "random"


LEASE_SECONDS_MAX: Final = 86_400.0
"""No lease of any kind may last longer."""
SAMPLED_SHARDS: Final = 16
"""For sampling, a queue is cut into so many runs of slots, whatever its number of shards."""


_WORKER: Final = Place(table="worker.", prefix="PENSTOCK_WORKER_", is_empty_a_value=True)
_VARIABLE_ONLY: Final = Place(prefix="PENSTOCK_WORKER_", is_empty_a_value=True)
_LEASING: Final = Place(
    table="worker.shard_leasing.", prefix="PENSTOCK_WORKER_", is_empty_a_value=True
)
_QUEUE: Final = Place(table="queue.", prefix="PENSTOCK_QUEUE_", is_empty_a_value=True)
_DIRECT: Final = Place(
    table="queue.direct_dispatch.", prefix="PENSTOCK_QUEUE_", is_empty_a_value=True
)
_DAY: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The numbers of one worker. Times are the store's."""

    shards_per_worker: int = setting(
        16,
        place=_LEASING,
        least=1,
        variable="SHARDS",
        alias=Alias(variable="QO_SHARD_LEASING_SHARDS_PER_WORKER"),
    )
    """How many shards an owner keeps when it is saturated and others are free: a target, no cap."""
    lease_ttl_secs: float = setting(
        30.0, place=_LEASING, alias=Alias(variable="QO_SHARD_LEASING_TTL_SECS")
    )
    """How long an owner's lease on its shards lasts; tripled while it is idle."""
    lease_renew_interval_secs: float = setting(
        10.0,
        place=_LEASING,
        variable="LEASE_RENEW_SECS",
        alias=Alias(variable="QO_SHARD_LEASING_RENEW_SECS"),
    )
    """How often that lease is renewed: at most after half of it."""
    task_lease_seconds: float = setting(30.0, place=_WORKER, least=3, most=LEASE_SECONDS_MAX)
    """How long a claim lasts; renewed while its tasks run. Not a limit for how long they run."""
    settle_seconds: float = setting(2.0, least=0, most=_DAY)
    """How long endings of one pack wait for each other, to be written together; up to four times
    as long in packs of 250 to 1,000 tasks."""
    stop_seconds: float = setting(30.0, place=_WORKER, least=0, most=_DAY)
    """How long a worker that is asked to stop lets its tasks run before it gives them back."""
    sweep_seconds: float = setting(600.0, least=3, most=_DAY)
    """How often what is due is compared with what points to it, and repaired."""
    polling: Polling = field(default_factory=Polling)
    sample_shards: int = setting(3, place=_WORKER, least=1, most=SAMPLED_SHARDS)
    """In mode `sampled`: how many of 16 shards a look samples."""
    heartbeat: HeartbeatMode | Literal["swap", "touch"] = setting(HeartbeatMode.SWAP, place=_WORKER)
    """How claims are renewed: `swap` writes the ledger again, `touch` only dates it anew."""
    lease_duration_secs: float = setting(60.0, place=_WORKER)
    """In mode `direct`: how long a worker's lease on its inbox lasts; tripled while it is idle."""
    lease_renewal_interval_secs: float = setting(20.0, place=_WORKER)
    """How often that lease is renewed: at most after half of it."""
    overflow_scavenge_interval_secs: float = setting(120.0, place=_WORKER, least=1, most=_DAY)
    """In mode `direct`: how often a worker looks for what no inbox has led to."""
    lock_folder: str | None = setting(None, place=_VARIABLE_ONLY)
    """Where a lock file says that this process lives, for the one that follows it: a folder of a
    local file system, of this user's own. None: below the user's state folder. Empty: nowhere."""

    def settle_seconds_of(self, count: int) -> float:
        """How long endings of a pack of so many tasks wait: the more, the more a write carries."""
        return 0.0 if count == 1 else self.settle_seconds * min(4.0, max(1.0, count / 250))

    def __post_init__(self) -> None:
        check(self)
        if not 1 <= self.lease_renew_interval_secs <= self.lease_ttl_secs / 2 <= 1800:
            raise InvalidInput(
                "lease_renew_interval_secs must be at least 1 and at most half of lease_ttl_secs,"
                f" not {self.lease_renew_interval_secs} of {self.lease_ttl_secs}."
            )
        if not 1 <= self.lease_renewal_interval_secs <= self.lease_duration_secs / 2 <= 1800:
            raise InvalidInput(
                "lease_renewal_interval_secs must be at least 1 and at most half of"
                f" lease_duration_secs, not {self.lease_renewal_interval_secs} of"
                f" {self.lease_duration_secs}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """How packs of direct types are announced to workers, by whoever submits them."""

    worker_discovery_cache_ttl_secs: float = setting(30.0, place=_DIRECT, least=0, most=3600)
    """How old the picture of the workers may be."""
    worker_selection: WorkerSelection = setting(WorkerSelection.ROUND_ROBIN, place=_DIRECT)
    """Into whose inbox a pack is announced."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueModes:
    """How the workers of a queue find tasks, and how its producers announce them."""

    mode: str | None = setting(
        None,
        place=_WORKER,
        alias=Alias(
            variable="QO_SHARD_LEASING",
            key="worker.shard_leasing.enabled",
            switch=(DiscoveryMode.LEASED, DiscoveryMode.SHARED),
        ),
    )
    """How a worker finds tasks: `leased`, `shared`, `sampled` or `direct`."""
    dispatch_mode: str = setting(DiscoveryMode.SHARED, place=_QUEUE)
    """`shared`, or `direct`: all types of a queue that is made are direct, and its
    workers' mode."""

    def __post_init__(self) -> None:
        if self.dispatch_mode not in (DiscoveryMode.SHARED, DiscoveryMode.DIRECT):
            said = self.dispatch_mode
            raise InvalidInput(
                f"{said[:60]!r} is not a dispatch mode.", hint="Write shared or direct."
            )


QUEUE_SCHEMA: Final = Schema(WorkerSettings, DispatchSettings, QueueModes, is_whole=False)
MODE: Final = "PENSTOCK_WORKER_MODE"


def settings_from(
    environment: Mapping[str, str], file: SettingsFile | None = None
) -> WorkerSettings:
    """The defaults, with what the environment and the file say."""
    return QUEUE_SCHEMA.read(WorkerSettings, environment=environment, file=file).settings


def dispatch_from(
    environment: Mapping[str, str], file: SettingsFile | None = None
) -> DispatchSettings:
    """The defaults for those who submit, with what the environment and the file say."""
    return QUEUE_SCHEMA.read(DispatchSettings, environment=environment, file=file).settings


def mode_from(
    mode: str | None, environment: Mapping[str, str], file: SettingsFile | None = None
) -> DiscoveryMode:
    """The mode that was given, or the one that the environment or the file says, or `leased`."""
    if mode is None:
        said = QUEUE_SCHEMA.read(QueueModes, environment=environment, file=file).settings
        is_direct = said.dispatch_mode == DiscoveryMode.DIRECT
        mode = said.mode or (DiscoveryMode.DIRECT if is_direct else DiscoveryMode.LEASED)
    try:
        return DiscoveryMode(mode)
    except ValueError as error:
        raise InvalidInput(
            f"{mode!r} is not a mode.",
            hint=f"Modes are {', '.join(DiscoveryMode)}; {MODE} counts where none is given.",
        ) from error


def is_direct_from(environment: Mapping[str, str], file: SettingsFile | None = None) -> bool:
    """Whether a queue that is made has all types direct, and its workers that mode by default."""
    said = QUEUE_SCHEMA.read(QueueModes, environment=environment, file=file).settings
    return said.dispatch_mode == DiscoveryMode.DIRECT


_DEFAULT: Final = WorkerSettings()
_OWNER_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True)
class ShardLeaseSettings:
    """Times and targets."""

    ttl_seconds: float = _DEFAULT.lease_ttl_secs
    renew_seconds: float = _DEFAULT.lease_renew_interval_secs
    idle_stretch: float = 3.0
    """While idle, leases last and are renewed so many times longer."""
    shards_per_worker: int = _DEFAULT.shards_per_worker
    """A target: how many a saturated owner keeps. Not a cap."""
    calm_seconds: float = 20.0
    """After so long without work leases are stretched; after `idle_seconds` shards are offered."""
    idle_seconds: float = 60.0
    saturated_seconds: float = 5.0
    look_each_seconds: float = 2.0
    look_seconds_min: float = 2.5
    look_seconds_max: float = 75.0
    again_seconds: float = 5.0
    """How soon a worker looks again that knows that there is something to see."""
    standby_list_seconds: float = 7200.0
    owner_list_seconds: float = 60.0
    alone_list_seconds: float = 600.0
    verify_seconds: float = 600.0
    standby_seconds: float = 7200.0
    """How long a standby counts that does not refresh its registration."""
    forget_seconds: float = 3600.0
    release_seconds: float = 5.0
    patience_seconds: float = 60.0
    """How long a tenure leaves to the owners of another cut what they look at."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_seconds < self.ttl_seconds:
            raise InvalidInput("Shard leases must be renewed before they end.")
        if self.idle_stretch < 1 or self.shards_per_worker < 1:
            raise InvalidInput("The idle stretch and the shards per worker must be 1 or more.")

    @property
    def refresh_seconds(self) -> float:
        """How often a standby refreshes its registration."""
        return 0.75 * self.standby_seconds

    @property
    def longest_ttl_seconds(self) -> float:
        return self.ttl_seconds * self.idle_stretch

    def look_seconds(self, *, standbys: int) -> float:
        """How often one of so many standbys looks at an owner."""
        # Only now: whoever only reads settings, as every verb does, needs none of it.
        from penstock.queue.shards import allocation as decide  # noqa: PLC0415

        return decide.look_seconds(
            standbys=standbys,
            each_seconds=self.look_each_seconds,
            seconds_min=self.look_seconds_min,
            seconds_max=self.look_seconds_max,
        )

    def list_seconds(self, owners: int, *, is_owner: bool, is_idle: bool) -> float:
        """How often a worker lists all workers, beside so many other owners."""
        if not is_owner:
            return self.standby_list_seconds
        if is_idle:
            return self.owner_list_seconds if owners else self.alone_list_seconds
        # Of many busy owners each looks more rarely: together they look often enough.
        return max(self.owner_list_seconds, _OWNER_SECONDS * owners)
