"""The times and targets of shard leases; `penstock.queue.owning.leases` tells what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.kernel.errors import InvalidInput
from penstock.queue.owning import shards as decide

_OWNER_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Times and targets."""

    ttl_seconds: float = 30.0
    renew_seconds: float = 10.0
    idle_stretch: float = 3.0
    """While idle, leases last and are renewed so many times longer."""
    shards_per_worker: int = 16
    """A target: how many a saturated owner keeps. Not a cap."""
    calm_seconds: float = 20.0
    """After so long without work leases are stretched; after `idle_seconds` shards are offered."""
    idle_seconds: float = 60.0
    saturated_seconds: float = 5.0
    look_each_seconds: float = 1.0
    look_seconds_min: float = 5.0
    look_seconds_max: float = 45.0
    standby_list_seconds: float = 1800.0
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
    def longest_ttl_seconds(self) -> float:
        return self.ttl_seconds * self.idle_stretch

    def look_seconds(self, *, standbys: int) -> float:
        """How often one of so many standbys looks at an owner."""
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
