"""What a world is like, drawn from its seed: how long, how many, how bad.

| profile | what it is harsh in |
|---|---|
| storm | short and dense: crashes, pauses longer than leases, lost answers |
| late | requests that arrive minutes late or twice, pauses longer than W, archived ledgers |
| keys | few keys, used again and again, around the ends of their lifetimes |
| pointers | keyed tasks, producers that crash between two writes, and nobody who sweeps |
| echoes | requests that arrive again after a quarter of an hour, when everything is archived |
| operator | leases, registrations and pointers deleted, damaged and doubled by hand |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.queue.pack import RESEND_SECONDS
from penstock.queue.running.polling import Polling
from penstock.queue.settings import Heartbeat, Mode, WorkerSettings
from penstock.store.faulty import FaultPlan
from penstock.testing.simulator.deeds import TYPES
from penstock.testing.simulator.machines import Blow, Trigger

KEY_SECONDS: Final = int(RESEND_SECONDS)
_OFF_SECONDS: Final = 86_400.0


class Fleet(StrEnum):
    """The modes of the workers of a world."""

    LEASED = "leased"
    SHARED = "shared"
    SAMPLED = "sampled"
    DIRECT = "direct"
    MIXED = "mixed"


class Profile(StrEnum):
    """What a world is harsh in."""

    STORM = "storm"
    LATE = "late"
    KEYS = "keys"
    POINTERS = "pointers"
    ECHOES = "echoes"
    OPERATOR = "operator"


_ORDER: Final = (
    Profile.STORM,
    Profile.KEYS,
    Profile.POINTERS,
    Profile.STORM,
    Profile.LATE,
    Profile.OPERATOR,
    Profile.STORM,
    Profile.ECHOES,
    Profile.POINTERS,
    Profile.STORM,
)


def profile_of(seed: int) -> Profile:
    """The profile of a seed: known before the world is run."""
    return _ORDER[seed % len(_ORDER)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The measures of one world. Times in seconds."""

    profile: Profile
    fleet: Fleet
    storm_seconds: float
    faults: FaultPlan
    linger_seconds: float
    """How long it goes on when all has ended, to see what comes late."""
    workers: int
    producers: int
    submits: int
    keys: int
    keyed: float
    """How likely a submit has a key; the same holds for the next ones."""
    batch: float
    delayed: float
    cancels: int
    crashes: bool
    freeze_seconds_max: float
    shards: int
    sweep_seconds: float
    with_operator: bool
    with_monitor: bool
    direct: tuple[str, ...] = ()
    """The types that are announced to workers."""
    poison: int = 0
    """How many tasks end whatever worker runs them, in a pack of their own with others."""
    racy_delete_seconds_max: float = 0.0
    """By how much conditional deletes come too late, where they are by tombstone therefore."""

    def mode(self, entropy: Entropy) -> Mode:
        """The mode of the next worker."""
        if self.fleet is Fleet.MIXED:
            return entropy.choice(tuple(Mode))
        return Mode(self.fleet)

    def triggers(self, entropy: Entropy, kinds: Sequence[str], *, chance: float) -> list[Trigger]:
        """What befalls the next machine, and at which of these kinds of requests."""
        if entropy.random() >= chance:
            return []
        kind = entropy.choice(kinds)
        reads = not kind or kind.endswith("get")
        blows: list[Blow] = []
        if self.freeze_seconds_max:
            blows += [Blow.FREEZES_AFTER if reads else Blow.FREEZES_BEFORE, Blow.FREEZES_AFTER]
        if self.crashes:
            blows += [Blow.DIES_AFTER if reads else Blow.DIES_DURING]
            blows += [] if self.is_long else [Blow.DIES_BEFORE, Blow.DIES_AFTER]
        if self.is_long and not reads:
            blows += [Blow.ECHOES] * 3
        if not blows:
            return []
        longest = self.freeze_seconds_max or self.storm_seconds
        skipped = entropy.randrange(0, 2 if kind else 150)
        seconds = entropy.uniform(longest * 0.6 if self.is_long else 0, longest)
        return [Trigger(entropy.choice(blows), kind, skipped, seconds)]

    @property
    def is_swept(self) -> bool:
        """Whether monitors look for packs without a pointer."""
        return self.sweep_seconds < _OFF_SECONDS

    @property
    def is_long(self) -> bool:
        """Whether it goes on until ledgers are archived and keys are free again."""
        return self.profile in (Profile.LATE, Profile.KEYS, Profile.ECHOES)

    def settings(self, entropy: Entropy) -> WorkerSettings:
        """The settings of the next worker."""
        long = self.is_long
        ttl = entropy.uniform(40, 90) if long else entropy.uniform(8, 25)
        return WorkerSettings(
            shards_per_worker=entropy.randrange(1, 4),
            lease_ttl_secs=ttl,
            lease_renew_interval_secs=max(1.0, ttl / 3),
            task_lease_seconds=entropy.uniform(3, 12),
            settle_seconds=entropy.choice((0.0, 0.5, 2.0)),
            stop_seconds=entropy.uniform(0, 10),
            sweep_seconds=self.sweep_seconds,
            sample_shards=entropy.choice((1, 3, 16)),
            heartbeat=entropy.choice((Heartbeat.SWAP, Heartbeat.TOUCH)),
            lease_duration_secs=ttl,
            lease_renewal_interval_secs=max(1.0, ttl / 3),
            overflow_scavenge_interval_secs=ttl * 1.5,
            polling=Polling(
                min_seconds=entropy.uniform(0.5, 2),
                max_seconds=entropy.uniform(15, 40) if long else entropy.uniform(5, 15),
                factor=2.0,
            ),
        )


def draw(seed: int, fleet: Fleet) -> Plan:
    """The plan of a world."""
    entropy = seeded_entropy(f"plan of world {seed}, {fleet}")
    profile = profile_of(seed)
    storm, late, keys, pointers, echoes, operator = (profile is each for each in Profile)
    long = late or keys or echoes
    freezes = (700.0,) if late else (0.0, 700.0, 700.0) if long else (0.0, 30.0, 60.0, 60.0)
    return Plan(
        profile=profile,
        fleet=fleet,
        storm_seconds=entropy.uniform(*_STORM_SECONDS.get(profile, (20.0, 60.0))),
        faults=_faults(entropy, profile),
        linger_seconds=entropy.uniform(0, 200) if long else 0.0,
        workers=1 if echoes else 2 if long else entropy.choice((1, 2, 2, 3, 4)),
        producers=2 if keys else 1 if echoes else entropy.randrange(1, 3),
        submits=5 if keys else entropy.randrange(2, 4),
        keys=1 if keys or echoes else entropy.randrange(1, 3),
        keyed=_KEYED.get(profile, 0.2),
        batch=0.4 if storm else 0.2,
        delayed=0.5 if keys else 0.2,
        cancels=entropy.choice((0, 1, 2, 4)),
        crashes=pointers or (not echoes and entropy.random() < 0.7),
        freeze_seconds_max=0.0 if echoes else entropy.choice(freezes),
        shards=entropy.choice((1, 2, 4)),
        sweep_seconds=_OFF_SECONDS if pointers else entropy.uniform(30, 90),
        with_operator=operator,
        with_monitor=not pointers and entropy.random() < (0.7 if late else 0.15),
        direct=_direct(seed, fleet),
        poison=_poison(seed, profile),
        racy_delete_seconds_max=_racy_delete_seconds_max(seed, profile),
    )


def _direct(seed: int, fleet: Fleet) -> tuple[str, ...]:
    """All types, one of them, or in a mixed fleet none. Drawn apart from everything else."""
    entropy = seeded_entropy(f"direct of world {seed}")
    match fleet:
        case Fleet.DIRECT:
            return entropy.choice((("*",), ("*",), TYPES[:1]))
        case Fleet.MIXED:
            return entropy.choice(((), ("*",), TYPES[:1]))
        case Fleet.LEASED | Fleet.SHARED | Fleet.SAMPLED:
            return ()


def _poison(seed: int, profile: Profile) -> int:
    """In every third of the short worlds one, rarely two. Drawn apart from everything else."""
    entropy = seeded_entropy(f"poison of world {seed}")
    is_short = profile in (Profile.STORM, Profile.POINTERS, Profile.OPERATOR)
    return entropy.choice((0, 0, 0, 0, 1, 1, 2)) if is_short else 0


def _racy_delete_seconds_max(seed: int, profile: Profile) -> float:
    """In every fourth world, and in half of those of keys. Drawn apart from everything else."""
    entropy = seeded_entropy(f"deletes of world {seed}")
    return entropy.choice((0.0, 5.0) if profile is Profile.KEYS else (0.0, 0.0, 0.0, 5.0))


_STORM_SECONDS: Final = {
    Profile.LATE: (650.0, 800.0),
    Profile.KEYS: (500.0, 800.0),
    Profile.ECHOES: (1050.0, 1250.0),
}
_KEYED: Final = {
    Profile.KEYS: 1.0,
    Profile.ECHOES: 0.9,
    Profile.POINTERS: 0.8,
    Profile.OPERATOR: 0.5,
}


def _faults(entropy: Entropy, profile: Profile) -> FaultPlan:
    harsh = entropy.choice((0.0, 0.5, 1.0))
    late = profile in (Profile.LATE, Profile.KEYS)
    return FaultPlan(
        latency_seconds_max=entropy.choice((0.05, 0.5, 2.0)),
        throttled=0.03 * harsh,
        failed=0.04 * harsh,
        lost_request=0.04 * harsh,
        lost_answer=0.08 * harsh,
        duplicate=0.15 if late else 0.05 * harsh,
        late_request=0.1 if late else 0.02 * harsh,
        late_seconds_max=entropy.uniform(400, 700) if late else 40.0,
    )
