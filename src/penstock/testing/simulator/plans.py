"""What a world is like, drawn from its seed: how long, how many, how bad.

| profile | what it is harsh in |
|---|---|
| storm | short and dense: crashes, pauses longer than leases, lost answers |
| late | requests that arrive minutes late or twice, pauses longer than W, archived ledgers |
| keys | few keys, used again and again, around the ends of their lifetimes |
| pointers | keyed tasks, producers that crash between two writes, and nobody who sweeps |
| echoes | requests that arrive again after a quarter of an hour, when everything is archived |
| operator | leases, registrations, pointers and doorbell deleted, damaged and doubled by hand |

In every second world submits also have priorities, limits and affinities, or are gathered; in
every fifth the doorbell is damaged, whatever the profile; in some of each profile a task ends
its worker.

The handlers of a simulated worker. Each task's input says how its handler behaves.

| input | what the handler does |
|---|---|
| quick | succeeds at once, or after a moment |
| slow | takes longer than leases last |
| retry | raises an error that is retried, for its first attempts |
| fail | raises an error that is not |
| hang | never ends by itself |
| deaf | ignores an interruption for a while, and then succeeds |
| poison | ends its worker's process, in its first attempts or in all; another is started |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from penstock.kernel.entropy import Entropy, seeded_entropy
from penstock.queue.execution.handlers import TaskContext
from penstock.queue.execution.retry import Retry
from penstock.queue.limits import limit_definition
from penstock.queue.pack import RESEND_SECONDS
from penstock.queue.settings import DiscoveryMode, HeartbeatMode, Polling, WorkerSettings
from penstock.queue.worker import Worker
from penstock.store.faulty import FaultPlan
from penstock.testing.simulator.history import (
    ATTEMPTS_MAX,
    SimulatedInput,
    SimulatedOptions,
    SimulatedResult,
)
from penstock.testing.simulator.machines import FaultTrigger, Machine, MachineFault
from penstock.testing.simulator.referee import Referee

TYPES: Final = ("a", "b")
_HANG_SECONDS: Final = 1e6


class Passing(Exception):
    """An error that is retried."""


class Lasting(Exception):
    """An error that is not."""


RETRY: Final = Retry(
    attempts=ATTEMPTS_MAX, backoff=1.3, first_seconds=0.5, on=(Passing, TimeoutError)
)


def draw_input(entropy: Entropy, number: int) -> SimulatedInput:
    """What a task of this number is to do."""
    draw = entropy.random()
    if draw < 0.35:
        return SimulatedInput(number, "quick", seconds=entropy.choice((0.0, 1.0)))
    if draw < 0.65:
        return SimulatedInput(number, "slow", seconds=entropy.uniform(3, 10))
    if draw < 0.77:
        return SimulatedInput(number, "retry", times=entropy.randrange(1, 4))
    if draw < 0.82:
        return SimulatedInput(number, "fail")
    if draw < 0.92:
        return SimulatedInput(number, "hang", times=entropy.choice((0, 1, 1)))
    return SimulatedInput(number, "deaf", seconds=entropy.uniform(1, 8))


def draw_poison_input(entropy: Entropy, number: int) -> SimulatedInput:
    """What a task of this number is to do that ends whatever worker runs it."""
    seconds = entropy.choice((0.0, 0.0, entropy.uniform(0, 4)))
    return SimulatedInput(number, "poison", seconds=seconds, times=entropy.choice((0, 0, 1, 3)))


class SimulatedHandlers:
    """The handlers of one machine."""

    def __init__(
        self,
        machine: Machine,
        referee: Referee,
        *,
        concurrency: int,
        poisoned: Callable[[], None],
    ) -> None:
        """`poisoned` is called when a task has ended the process."""
        self._machine = machine
        self._poisoned = poisoned
        self._referee = referee
        self._concurrency = concurrency
        self._running = 0

    def register(self, worker: Worker, types: tuple[str, ...], *, timeout_seconds: float) -> None:
        """Give a worker its handlers."""
        self._referee.can(self._machine.name, types)
        for kind in types:
            worker.handler(kind, timeout=timeout_seconds, retry=RETRY)(self.handle)

    async def handle(self, task: TaskContext) -> dict[str, Any]:
        """One attempt."""
        if self._machine.is_dead:
            raise asyncio.CancelledError
        what = msgspec.json.decode(bytes(task.raw_input), type=SimulatedInput)
        self._referee.starts_attempt(self._machine.name, what.n, task.attempt)
        how = "is interrupted"
        self._running += 1
        self._referee.runs(self._machine.name, self._running, concurrency=self._concurrency)
        try:
            await self._do(what, task.attempt)
            how = "returns"
        except (Passing, Lasting) as error:
            how = f"raises {type(error).__name__}"
            raise
        finally:
            self._running -= 1
            if not self._machine.is_dead:
                self._referee.ends_attempt(self._machine.name, what.n, how)
        return msgspec.to_builtins(SimulatedResult(what.n, task.attempt, self._machine.name))  # type: ignore[no-any-return]  # a dict

    async def _do(self, what: SimulatedInput, attempt: int) -> None:
        clock = self._machine.clock
        match what.do:
            case "quick" | "slow":
                if what.seconds:
                    await clock.sleep(what.seconds)
            case "retry" if attempt <= what.times:
                raise Passing
            case "fail":
                raise Lasting
            case "hang" if attempt <= (what.times or attempt):
                await clock.sleep(_HANG_SECONDS)
            case "poison" if attempt <= (what.times or attempt):
                await self._end_the_process(what)
            case "deaf":
                until = clock.monotonic() + what.seconds
                while clock.monotonic() < until and not self._machine.is_dead:
                    try:
                        await clock.sleep(until - clock.monotonic())
                    except asyncio.CancelledError:
                        continue

    async def _end_the_process(self, what: SimulatedInput) -> None:
        await self._machine.clock.sleep(what.seconds)
        self._referee.ends_attempt(self._machine.name, what.n, "ends the process")
        self._poisoned()
        self._machine.die()
        raise asyncio.CancelledError


KEY_SECONDS: Final = int(RESEND_SECONDS)
_OFF_SECONDS: Final = 86_400.0


class WorkerModes(StrEnum):
    """The modes of the workers of a world."""

    LEASED = "leased"
    SHARED = "shared"
    SAMPLED = "sampled"
    DIRECT = "direct"
    MIXED = "mixed"


class WorldProfile(StrEnum):
    """What a world is harsh in."""

    STORM = "storm"
    LATE = "late"
    KEYS = "keys"
    POINTERS = "pointers"
    ECHOES = "echoes"
    OPERATOR = "operator"


_ORDER: Final = (
    WorldProfile.STORM,
    WorldProfile.KEYS,
    WorldProfile.POINTERS,
    WorldProfile.STORM,
    WorldProfile.LATE,
    WorldProfile.OPERATOR,
    WorldProfile.STORM,
    WorldProfile.ECHOES,
    WorldProfile.POINTERS,
    WorldProfile.STORM,
)


def profile_of(seed: int) -> WorldProfile:
    """The profile of a seed: known before the world is run."""
    return _ORDER[seed % len(_ORDER)]


PRIORITIES: Final = (-9, -1, 1, 5, 9)
AFFINITIES: Final = ("x", "y")
LIMITS: Final = {
    "one": limit_definition(concurrency=1),
    "few": limit_definition(concurrency=3),
    "slow": limit_definition(rate=1, per_seconds=3, burst=2),
}
"""What is limited, in a world with limits."""
UNLIMITED: Final = "none"
"""The key of a limit that is never defined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFeatures:
    """How likely a submit says more than its type, its input and its time."""

    prioritized: float = 0.0
    limited: float = 0.0
    affine: float = 0.0
    gather_seconds: float | None = None
    """For how long producers gather what they submit at the same moment, if they do."""

    def options(self, entropy: Entropy) -> SimulatedOptions:
        """What the next submit says. Nothing is drawn for what is off."""

        def is_drawn(chance: float) -> bool:
            return chance > 0 and entropy.random() < chance

        return SimulatedOptions(
            priority=entropy.choice(PRIORITIES) if is_drawn(self.prioritized) else 0,
            limit=entropy.choice((*LIMITS, UNLIMITED)) if is_drawn(self.limited) else "",
            affinity=entropy.choice(AFFINITIES) if is_drawn(self.affine) else "",
        )


class DamagedHints(StrEnum):
    """What the operator of a world deletes and damages by hand."""

    NONE = "none"
    DOORBELL = "doorbell"
    ALL = "all"
    """Pointers, leases of shards, registrations, inboxes, the term of the monitor, doorbell."""


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The measures of one world. Times in seconds."""

    profile: WorldProfile
    fleet: WorkerModes
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
    with_monitor: bool
    direct: tuple[str, ...] = ()
    """The types that are announced to workers."""
    poison: int = 0
    """How many tasks end whatever worker runs them, in a pack of their own with others."""
    poison_company: int = 0
    """Of how many tasks their packs are at the most, where these are large; 0 where not."""
    features: SubmitFeatures = SubmitFeatures()
    damaged: DamagedHints = DamagedHints.NONE
    is_probed: bool = False
    """Whether, when all has ended, one worker shows how prompt it is."""
    racy_delete_seconds_max: float = 0.0
    """By how much conditional deletes come too late, where they are by tombstone therefore."""

    def mode(self, entropy: Entropy) -> DiscoveryMode:
        """The mode of the next worker."""
        if self.fleet is WorkerModes.MIXED:
            return entropy.choice(tuple(DiscoveryMode))
        return DiscoveryMode(self.fleet)

    def triggers(
        self, entropy: Entropy, kinds: Sequence[str], *, chance: float
    ) -> list[FaultTrigger]:
        """What befalls the next machine, and at which of these kinds of requests."""
        if entropy.random() >= chance:
            return []
        kind = entropy.choice(kinds)
        reads = not kind or kind.endswith("get")
        blows: list[MachineFault] = []
        if self.freeze_seconds_max:
            blows += [
                MachineFault.FREEZES_AFTER if reads else MachineFault.FREEZES_BEFORE,
                MachineFault.FREEZES_AFTER,
            ]
        if self.crashes:
            blows += [MachineFault.DIES_AFTER if reads else MachineFault.DIES_DURING]
            blows += [] if self.is_long else [MachineFault.DIES_BEFORE, MachineFault.DIES_AFTER]
        if self.is_long and not reads:
            blows += [MachineFault.ECHOES] * 3
        if not blows:
            return []
        longest = self.freeze_seconds_max or self.storm_seconds
        skipped = entropy.randrange(0, 2 if kind else 150)
        seconds = entropy.uniform(longest * 0.6 if self.is_long else 0, longest)
        return [FaultTrigger(entropy.choice(blows), kind, skipped, seconds)]

    @property
    def is_swept(self) -> bool:
        """Whether monitors look for packs without a pointer."""
        return self.sweep_seconds < _OFF_SECONDS

    @property
    def is_long(self) -> bool:
        """Whether it goes on until ledgers are archived and keys are free again."""
        return self.profile in (WorldProfile.LATE, WorldProfile.KEYS, WorldProfile.ECHOES)

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
            heartbeat=entropy.choice((HeartbeatMode.SWAP, HeartbeatMode.TOUCH)),
            lease_duration_secs=ttl,
            lease_renewal_interval_secs=max(1.0, ttl / 3),
            overflow_scavenge_interval_secs=ttl * 1.5,
            polling=Polling(
                min_seconds=entropy.uniform(0.5, 2),
                max_seconds=entropy.uniform(15, 40) if long else entropy.uniform(5, 15),
                factor=2.0,
            ),
        )


def draw(seed: int, fleet: WorkerModes) -> WorldPlan:
    """The plan of a world."""
    entropy = seeded_entropy(f"plan of world {seed}, {fleet}")
    profile = profile_of(seed)
    storm, late, keys, pointers, echoes, operator = (profile is each for each in WorldProfile)
    long = late or keys or echoes
    freezes = (700.0,) if late else (0.0, 700.0, 700.0) if long else (0.0, 30.0, 60.0, 60.0)
    return WorldPlan(
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
        with_monitor=not pointers and entropy.random() < (0.7 if late else 0.15),
        direct=_direct(seed, fleet),
        poison=_poison(seed, profile),
        poison_company=_poison_company(seed),
        features=_features(seed),
        damaged=DamagedHints.ALL if operator else _damaged(seed),
        is_probed=_is_probed(seed, profile),
        racy_delete_seconds_max=_racy_delete_seconds_max(seed, profile),
    )


def _direct(seed: int, fleet: WorkerModes) -> tuple[str, ...]:
    """All types, one of them, or in a mixed fleet none. Drawn apart from everything else."""
    entropy = seeded_entropy(f"direct of world {seed}")
    match fleet:
        case WorkerModes.DIRECT:
            return entropy.choice((("*",), ("*",), TYPES[:1]))
        case WorkerModes.MIXED:
            return entropy.choice(((), ("*",), TYPES[:1]))
        case WorkerModes.LEASED | WorkerModes.SHARED | WorkerModes.SAMPLED:
            return ()


def _poison(seed: int, profile: WorldProfile) -> int:
    """In every third of the short worlds one, rarely two; in every sixth of the long ones.

    Drawn apart from everything else.
    """
    entropy = seeded_entropy(f"poison of world {seed}")
    is_short = profile in (WorldProfile.STORM, WorldProfile.POINTERS, WorldProfile.OPERATOR)
    return entropy.choice((0, 0, 0, 0, 1, 1, 2) if is_short else (0, 0, 0, 0, 0, 1))


def _poison_company(seed: int) -> int:
    """Large packs in every third world that has poison. Drawn apart from everything else."""
    return seeded_entropy(f"company of world {seed}").choice((0, 0, 16, 40))


def _features(seed: int) -> SubmitFeatures:
    """In every second world nothing. Drawn apart from everything else."""
    entropy = seeded_entropy(f"features of world {seed}")
    if entropy.random() < 0.5:
        return SubmitFeatures()
    return SubmitFeatures(
        prioritized=entropy.choice((0.0, 0.6)),
        limited=entropy.choice((0.0, 0.6)),
        affine=entropy.choice((0.0, 0.6)),
        gather_seconds=entropy.choice((None, 0.1, 1.0, 4.0)),
    )


def _damaged(seed: int) -> DamagedHints:
    """The doorbell alone in every fifth world. Drawn apart from everything else."""
    entropy = seeded_entropy(f"damage of world {seed}")
    return DamagedHints.DOORBELL if entropy.random() < 0.2 else DamagedHints.NONE


def _is_probed(seed: int, profile: WorldProfile) -> bool:
    """Every sixth of the short worlds. Drawn apart from everything else."""
    is_storm = profile in (WorldProfile.STORM, WorldProfile.OPERATOR)
    return is_storm and seeded_entropy(f"probe of world {seed}").random() < 0.17


def _racy_delete_seconds_max(seed: int, profile: WorldProfile) -> float:
    """In every fourth world, and in half of those of keys. Drawn apart from everything else."""
    entropy = seeded_entropy(f"deletes of world {seed}")
    return entropy.choice((0.0, 5.0) if profile is WorldProfile.KEYS else (0.0, 0.0, 0.0, 5.0))


_STORM_SECONDS: Final = {
    WorldProfile.LATE: (650.0, 800.0),
    WorldProfile.KEYS: (500.0, 800.0),
    WorldProfile.ECHOES: (1050.0, 1250.0),
}
_KEYED: Final = {
    WorldProfile.KEYS: 1.0,
    WorldProfile.ECHOES: 0.9,
    WorldProfile.POINTERS: 0.8,
    WorldProfile.OPERATOR: 0.5,
}


def _faults(entropy: Entropy, profile: WorldProfile) -> FaultPlan:
    harsh = entropy.choice((0.0, 0.5, 1.0))
    late = profile in (WorldProfile.LATE, WorldProfile.KEYS)
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
