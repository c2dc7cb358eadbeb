"""The simulator's own parts: machines that die and freeze, stories, reports, determinism."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from click.testing import CliRunner

from penstock.cli.sim import sim
from penstock.kernel.errors import NotFound
from penstock.queue import transitions
from penstock.queue.ledger import Ledger
from penstock.store.base import CREATE
from penstock.store.time import Interval
from penstock.testing.simulator.environment import NamedStore, ObservedBucket
from penstock.testing.simulator.history import EventLog, Subject
from penstock.testing.simulator.machines import (
    FaultTrigger,
    Machine,
    MachineFault,
    MachineStore,
    what_is,
)
from penstock.testing.simulator.plans import WorkerModes, WorldProfile, draw, profile_of
from penstock.testing.simulator.worlds import run_world
from penstock.testing.virtual import World, simulate

PACK = "queues/q/tasks/000/name"
Process = Callable[[Machine, MachineStore], Awaitable[None]]


def _run(
    process: Process, *, trigger: FaultTrigger | None = None, outside: float = 100.0
) -> tuple[Machine, dict[str, float], list[str]]:
    """Run a process on a machine; returns what is in the bucket, by when, and what was told."""

    async def main(world: World) -> tuple[Machine, dict[str, float], list[str]]:
        told: list[str] = []
        bucket = ObservedBucket(world.clock())
        machine = Machine(
            "m",
            clock=world.clock(),
            entropy=world.entropy("m"),
            tell=lambda _, what: told.append(what),
        )
        machine.triggers = [trigger] if trigger else []
        network = NamedStore(bucket, clock=machine.network_clock, name="m")
        store = MachineStore(network, machine)
        async with asyncio.TaskGroup() as group:

            async def live() -> None:
                await process(machine, store)

            machine.start(group, live)
            await world.clock().sleep(outside)
        began = world.epoch
        return machine, {k: o.modified - began for k, o in bucket.objects.items()}, told

    return simulate(main, seed=1)


async def _two_puts(machine: Machine, store: MachineStore) -> None:
    try:
        await store.put("first", b"1", CREATE)
        await machine.clock.sleep(5)
        await store.put("second", b"2", CREATE)
    finally:
        # What a process does on its way out reaches nobody if its machine is dead.
        await store.put("last words", b"3", CREATE)


def test_a_machine_that_lives_does_what_it_is_told() -> None:
    machine, found, told = _run(_two_puts)
    assert sorted(found) == ["first", "last words", "second"]
    assert machine.has_ended
    assert not told


@pytest.mark.parametrize(
    ("blow", "left"),
    [
        (MachineFault.DIES_BEFORE, []),
        (MachineFault.DIES_AFTER, ["first"]),
        (MachineFault.DIES_DURING, ["first"]),
    ],
)
def test_nothing_of_a_dead_machine_reaches_the_bucket(blow: MachineFault, left: list[str]) -> None:
    machine, found, told = _run(_two_puts, trigger=FaultTrigger(blow))
    assert sorted(found) == left
    assert machine.is_dead
    assert machine.problem is None
    assert told == [f"{blow} a first create", "crashes"]


def test_a_request_that_was_on_its_way_arrives_later() -> None:
    _, found, _ = _run(_two_puts, trigger=FaultTrigger(MachineFault.DIES_DURING))
    assert found["first"] > 0


@pytest.mark.parametrize(
    ("blow", "first_at", "second_at"),
    [(MachineFault.FREEZES_BEFORE, 50, 55), (MachineFault.FREEZES_AFTER, 0, 55)],
)
def test_a_frozen_machine_goes_on_where_it_was(
    blow: MachineFault, first_at: int, second_at: int
) -> None:
    _, found, told = _run(_two_puts, trigger=FaultTrigger(blow, seconds=50))
    assert found["first"] == first_at
    assert found["second"] == second_at
    assert told == [f"{blow} a first create", "freezes", "thaws"]


def test_an_echo_arrives_again() -> None:
    async def put_and_delete(machine: Machine, store: MachineStore) -> None:
        await store.put("first", b"1", CREATE)
        await store.delete("first")
        await machine.clock.sleep(10)
        with pytest.raises(NotFound):
            await store.get("first")

    _, found, _ = _run(put_and_delete, trigger=FaultTrigger(MachineFault.ECHOES, seconds=20))
    assert found == {"first": 20}


def test_a_sleep_of_a_dead_machine_does_not_return() -> None:
    woke: list[str] = []

    async def sleep(machine: Machine, _store: MachineStore) -> None:
        asyncio.get_running_loop().call_later(1, machine.die)
        try:
            await machine.clock.sleep(5)
        finally:
            await machine.clock.sleep(0)
            woke.append("alive")

    machine, _, told = _run(sleep)
    assert woke == []
    assert told == ["crashes"]
    assert machine.problem is None


def test_a_process_that_falls_over_is_noticed() -> None:
    async def fall(_machine: Machine, _store: MachineStore) -> None:
        raise ValueError("down")

    machine, _, _ = _run(fall)
    assert isinstance(machine.problem, ValueError)


def test_a_trigger_waits_for_its_kind_of_request() -> None:
    async def submit(_machine: Machine, store: MachineStore) -> None:
        for name in ("a", "b"):
            await store.put(f"{PACK}{name}", b"", CREATE)
            await store.put(f"{PACK}{name}.ledger", b"", CREATE)

    trigger = FaultTrigger(MachineFault.DIES_BEFORE, "ledger create", skipped=1)
    _, found, _ = _run(submit, trigger=trigger)
    assert sorted(found) == [f"{PACK}a", f"{PACK}a.ledger", f"{PACK}b"]


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (PACK, "pack"),
        (f"{PACK}.ledger", "ledger"),
        ("queues/q/ready/28928160/000/nonce@name", "pointer"),
        ("queues/q/archive/a-b-c", "archive"),
        ("queues/q/config.json", "queues/q/config.json"),
        ("", ""),
    ],
)
def test_requests_are_told_apart(key: str, what: str) -> None:
    assert what_is(key) == what


def test_a_story_has_only_what_concerns_its_task() -> None:
    times = iter(range(100))
    chronicle = EventLog(lambda: float(next(times)))
    chronicle.note("w1", "crashes before anything happened")
    chronicle.note("p0", "submits task 1", ("task", 1))
    chronicle.note("p0", "submits task 2", ("task", 2))
    chronicle.note("w1", "claims task 1", ("task", 1))
    chronicle.note("w2", "claims task 2", ("task", 2))
    chronicle.note("w1", "crashes")
    chronicle.note("w2", "crashes")
    chronicle.accuse("Task 1 was lost.", ("task", 1))
    (found,) = chronicle.violations
    assert [line.split(" s ")[1].split() for line in found.story] == [
        ["p0", "submits", "task", "1"],
        ["w1", "claims", "task", "1"],
        ["w1", "crashes"],
    ]


def test_every_profile_has_seeds() -> None:
    assert {profile_of(seed) for seed in range(10)} == set(WorldProfile)


@pytest.mark.parametrize("fleet", WorkerModes)
def test_a_seed_is_the_same_world_again(fleet: WorkerModes) -> None:
    assert draw(7, fleet) == draw(7, fleet)
    for seed in range(4):
        report = run_world(seed, fleet)
        assert report.tasks
        assert run_world(seed, fleet) == report


def test_worlds_are_not_kind() -> None:
    """Endings are refused in them, and the referee hears of it."""
    reports = [run_world(seed, WorkerModes.SHARED) for seed in range(60)]
    assert sum(report.refusals for report in reports) > 2
    assert sum(report.starts for report in reports) > sum(report.tasks for report in reports)


def test_the_command_shows_what_was_run() -> None:
    ran = CliRunner().invoke(sim, ["--seeds", "3", "--mode", "leased"])
    assert ran.exit_code == 0, ran.output
    assert "leased: 3 worlds, no violations" in ran.output
    assert "No invariant was violated." in ran.output


def test_the_command_tells_programs() -> None:
    ran = CliRunner().invoke(sim, ["--seeds", "2", "--first-seed", "5", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert (found["seeds"], found["worlds"]) == (2, 2 * len(WorkerModes))
    assert found["violations"] == []
    assert found["attempts"] > 0


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that end before their time."""
    expire = transitions.expire

    def early(ledger: Ledger, now: Interval) -> Ledger:
        return expire(ledger, Interval(now.earliest + 60, now.latest + 60))

    monkeypatch.setattr(transitions, "expire", early)


@pytest.mark.usefixtures("broken")
def test_the_command_tells_the_story_of_a_violation() -> None:
    ran = CliRunner().invoke(sim, ["--seeds", "8", "--mode", "shared"])
    assert ran.exit_code == 1
    assert "The live lease of task" in ran.output
    assert "Again: penstock sim --first-seed" in ran.output
    assert "claims attempt 1" in ran.output
    assert "violated an invariant" in ran.output


@pytest.mark.usefixtures("broken")
def test_programs_get_the_story_too() -> None:
    ran = CliRunner().invoke(sim, ["--seeds", "8", "--mode", "shared", "--json"])
    assert ran.exit_code == 1
    first = json.loads(ran.output)["violations"][0]
    assert first["mode"] == "shared"
    assert any("submits task" in line for line in first["story"])
    assert any("live lease" in each["sentence"] for each in json.loads(ran.output)["violations"])


EVENTS = (
    "changes its mode",
    "crashes",
    "dies during a",
    "freezes before a",
    "has an echo of a",
    "thaws",
    "is asked to stop",
    "is about to cancel it",
    "asks the attempt to stop",
    "the pack arrives (void",
    "archives it",
    "its handler is interrupted",
    "its handler raises Passing",
    "its handler ends the process",
    "writes that it is retrying",
    "writes that it is cancelled",
    "writes that it is failed",
    "writes that it is ready",
    "starts attempt 3",
    "claims attempt 1, for -",
    "deletes queues/sim/shard-leases/",
    "damages queues/sim/workers/",
    "doubles queues/sim/ready/",
)


def test_what_a_queue_must_survive_happens_in_the_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    note = EventLog.note

    def listen(chronicle: EventLog, who: str, what: str, *subjects: Subject) -> None:
        seen.update(event for event in EVENTS if what.startswith(event))
        note(chronicle, who, what, *subjects)

    monkeypatch.setattr(EventLog, "note", listen)
    for seed in range(120):
        run_world(seed, WorkerModes.MIXED)
        if len(seen) == len(EVENTS):
            break
    assert sorted(set(EVENTS) - seen) == []
