"""Repeats are bounded, and what a repeated write reports is true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from penstock.kernel.document_format import WRITERS_MAX, decode, encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import (
    AlreadyExists,
    BucketNotFound,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    Refused,
    StoreError,
    Superseded,
    Throttled,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import CREATE, REPLACE, ObjectStore, PutMode, Swap, Version
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.metered import Meter, MeteredStore
from penstock.store.races import Entrant
from penstock.store.retrying import Retries, RetryingStore
from penstock.testing.virtual import VirtualClock, World, simulate
from tests.unit.store.scripted import OK, Fault, FreshVersions, ScriptedStore, Step

KEY = "a/b"
TRIES = 4
LOST, GONE, LATE = Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.LATE
BUSY, DOWN, FORBIDDEN = Fault.THROTTLED, Fault.UNAVAILABLE, Fault.REFUSED


def stamped(writer: str, *, over: bytes | None = None) -> bytes:
    """A body of this writer, with the memory of the one it replaces."""
    before = decode(Entrant, over, where="over") if over else Entrant()
    return encode(before.stamped(writer=writer, write=f"write of {writer}"))


def crowded(body: bytes) -> bytes:
    """What is left when as many others as are remembered have written over a body."""
    for number in range(WRITERS_MAX):
        body = stamped(f"writer {number}", over=body)
    return body


OURS, THEIRS, OLD = stamped("me"), stamped("you"), stamped("old")


@dataclass
class Setting:
    """A bucket with a client of ours, whose requests are scripted, and one of somebody else."""

    world: World
    machine: VirtualClock
    other: ObjectStore
    scripted: ScriptedStore
    store: RetryingStore


Others = Callable[[Setting], Awaitable[object]]
"""What somebody else does in between."""
Script = Sequence[Fault | StoreError | Others]


def settle(
    main: Callable[[Setting], Coroutine[Any, Any, None]],
    *,
    retries: Retries | None = None,
    fresh_versions: bool = False,
    **scripts: Script,
) -> Setting:
    """Run `main` in a setting with these scripts, and see that they were played to the end."""

    async def run(world: World) -> Setting:
        machine = world.clock()
        bucket = MemoryBucket(world.clock())
        other: ObjectStore = MemoryStore(bucket, clock=machine)
        inner: ObjectStore = MemoryStore(bucket, clock=machine)
        if fresh_versions:
            other, inner = FreshVersions(other), FreshVersions(inner)

        def bound(step: Fault | StoreError | Others) -> Step:
            return step if isinstance(step, Fault | StoreError) else lambda: step(setting)

        scripted = ScriptedStore(
            inner, **{kind: [bound(step) for step in steps] for kind, steps in scripts.items()}
        )
        store = RetryingStore(
            scripted,
            entropy=world.entropy("retries"),
            retries=retries or Retries(tries_max=TRIES),
        )
        setting = Setting(world, machine, other, scripted, store)
        await main(setting)
        assert scripted.played
        return setting

    return simulate(run, seed=1)


def replacing(body: bytes) -> Others:
    return lambda setting: setting.other.put(KEY, body)


def deleting(setting: Setting) -> Awaitable[object]:
    return setting.other.delete(KEY)


async def replacing_twice(setting: Setting) -> None:
    second = stamped("you", over=OURS)
    await setting.other.put(KEY, second)
    await setting.other.put(KEY, stamped("they", over=second))


@dataclass(frozen=True)
class Case:
    """What happens to the sends, and what has to come of it."""

    puts: Script
    outcome: type[StoreError] | None
    gets: Script = ()
    found: bytes | None = OURS
    sent: str = ""


PUT_CASES = {
    "no fault": Case((OK,), None, sent="put"),
    "a lost request": Case((GONE,), None, sent="put put"),
    "a lost answer": Case((LOST,), None, sent="put put get"),
    "two lost answers": Case((LOST, LOST), None, sent="put put put get"),
    "lost, busy, down": Case((LOST, BUSY, DOWN), None, sent="put put put put get"),
    "busy and down": Case((BUSY, DOWN), None, sent="put put put"),
    "lost answers all along": Case((LOST,) * TRIES, OutcomeUnknown, sent="put put put put"),
    "lost requests all along": Case((GONE,) * TRIES, OutcomeUnknown, found=None),
    "down all along": Case((DOWN,) * TRIES, Unavailable, found=None),
    "busy all along": Case((BUSY,) * TRIES, Throttled, found=None),
    "lost, then busy": Case((LOST, BUSY, BUSY, BUSY), OutcomeUnknown),
    "lost, then down": Case((LOST, DOWN, DOWN, DOWN), OutcomeUnknown),
    "not allowed": Case((FORBIDDEN,), Refused, found=None, sent="put"),
    "lost, then not allowed": Case((LOST, FORBIDDEN), OutcomeUnknown, sent="put put"),
    "lost, reading down once": Case((LOST,), None, (DOWN,), sent="put put get get"),
    "lost, reading down": Case((LOST,), OutcomeUnknown, (DOWN,) * TRIES),
    "lost, reading busy": Case((LOST,), OutcomeUnknown, (BUSY,) * TRIES),
    "lost, reading not allowed": Case((LOST,), OutcomeUnknown, (FORBIDDEN,)),
    "lost, then replaced": Case(
        (LOST, replacing(stamped("you", over=OURS))),
        Superseded,
        found=stamped("you", over=OURS),
    ),
    "lost, then replaced twice": Case(
        (LOST, replacing_twice), Superseded, found=stamped("they", over=stamped("you", over=OURS))
    ),
    "lost, replaced before reading": Case(
        (LOST,),
        Superseded,
        (replacing(stamped("you", over=OURS)),),
        found=stamped("you", over=OURS),
    ),
    "lost, then replaced without a stamp": Case(
        (LOST, replacing(b"plain")), OutcomeUnknown, found=b"plain"
    ),
    "lost, then replaced by a crowd": Case(
        (LOST, replacing(crowded(OURS))), OutcomeUnknown, found=crowded(OURS)
    ),
    "lost, then deleted before reading": Case((LOST,), OutcomeUnknown, (deleting,), found=None),
    "overtaken without a stamp": Case((GONE, replacing(b"plain")), OutcomeUnknown, found=b"plain"),
}


def _run_put_case(case: Case, before: bytes | None) -> None:
    """Play a case with CREATE where there is nothing, or with a Swap of what is there."""

    async def main(setting: Setting) -> None:
        mode: PutMode = CREATE
        if before is not None:
            mode = Swap(await setting.other.put(KEY, before))
        if case.outcome is None:
            version = await setting.store.put(KEY, OURS, mode)
            assert version == (await setting.other.head(KEY)).version
        else:
            with pytest.raises(case.outcome) as caught:
                await setting.store.put(KEY, OURS, mode)
            assert type(caught.value) is case.outcome
        assert await _body(setting.other) == (before if case.found is None else case.found)

    played = settle(main, put=case.puts, get=case.gets)
    if case.sent:
        assert " ".join(played.scripted.sent) == case.sent


async def _body(store: ObjectStore) -> bytes | None:
    try:
        found = await store.get(KEY)
    except NotFound:
        return None
    assert found is not None
    return found.body


@pytest.mark.parametrize("name", PUT_CASES)
def test_create(name: str) -> None:
    _run_put_case(PUT_CASES[name], None)


@pytest.mark.parametrize("name", [name for name in PUT_CASES if "delete" not in name])
def test_swap(name: str) -> None:
    _run_put_case(PUT_CASES[name], OLD)


def test_create_that_never_arrived_and_was_overtaken_is_refused() -> None:
    _run_put_case(Case((GONE, replacing(THEIRS)), AlreadyExists, found=THEIRS), None)


def test_swap_that_never_arrived_and_was_overtaken_is_refused() -> None:
    theirs = stamped("you", over=OLD)
    _run_put_case(Case((GONE, replacing(theirs)), VersionConflict, found=theirs), OLD)


@pytest.mark.parametrize("fault", [GONE, LOST])
def test_swap_of_what_was_deleted_meanwhile_cannot_be_told(fault: Fault) -> None:
    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD)
        with pytest.raises(OutcomeUnknown):
            await setting.store.put(KEY, OURS, Swap(version))

    settle(main, put=[fault, deleting])


def test_create_of_what_was_deleted_meanwhile_is_made_again() -> None:
    _run_put_case(Case((LOST, deleting), None), None)


def test_after_a_delete_a_refusal_means_what_is_there_now() -> None:
    """The one exception: what an object remembers is gone when it is deleted."""
    _run_put_case(Case((LOST, deleting, replacing(THEIRS)), AlreadyExists, found=THEIRS), None)


@pytest.mark.parametrize("refusal", [AlreadyExists, VersionConflict])
def test_a_refusal_of_the_first_send_is_final(refusal: type[StoreError]) -> None:
    async def main(setting: Setting) -> None:
        await setting.other.put(KEY, OLD)
        mode = CREATE if refusal is AlreadyExists else Swap(Version("another"))
        with pytest.raises(refusal) as caught:
            await setting.store.put(KEY, OURS, mode)
        assert type(caught.value) is refusal
        assert setting.scripted.sent[-1] == "put"

    settle(main)
    settle(main, put=[BUSY, DOWN])


def test_a_send_that_arrives_late_does_not_take_effect_twice() -> None:
    async def main(setting: Setting) -> None:
        version = await setting.store.put(KEY, OURS, CREATE)
        later = await setting.store.put(KEY, stamped("me too", over=OURS), Swap(version))
        await setting.scripted.arrive()
        assert (await setting.other.head(KEY)).version == later

    settle(main, put=[LATE, OK, LATE, OK])


def test_replace_is_sent_until_it_is_answered() -> None:
    async def main(setting: Setting) -> None:
        version = await setting.store.put(KEY, b"plain", REPLACE, metadata={"a": "b"})
        found = await setting.other.head(KEY)
        assert (found.version, dict(found.metadata)) == (version, {"a": "b"})
        assert setting.scripted.sent == ["put"] * 4

    settle(main, put=[LOST, GONE, BUSY])


def test_the_reason_is_kept_with_an_unknown_outcome() -> None:
    async def main(setting: Setting) -> None:
        with pytest.raises(OutcomeUnknown) as caught:
            await setting.store.put(KEY, OURS)
        assert isinstance(caught.value.__cause__, Refused)
        assert caught.value.key == KEY

    settle(main, put=[LOST, FORBIDDEN])


@pytest.mark.parametrize(
    "error", [Refused("no"), BucketNotFound("no"), Unsupported("no"), StoreError("no")]
)
def test_other_errors_are_not_repeated_and_say_nothing_of_a_lost_send(error: StoreError) -> None:
    async def first(setting: Setting) -> None:
        with pytest.raises(type(error)) as caught:
            await setting.store.put(KEY, OURS)
        assert caught.value is error

    async def second(setting: Setting) -> None:
        for request in (
            lambda: setting.store.put(KEY, OURS),
            lambda: setting.store.touch(KEY, version=Version("x")),
            lambda: setting.store.delete(KEY),
        ):
            with pytest.raises(OutcomeUnknown):
                await request()

    settle(first, put=[error])
    settle(second, put=[GONE, error], touch=[GONE, error], delete=[GONE, error])


def test_wrong_input_is_not_repeated() -> None:
    async def main(setting: Setting) -> None:
        with pytest.raises(InvalidInput):
            await setting.store.put("", b"")
        assert setting.scripted.sent == ["put"]

    settle(main)


TOUCHES: dict[str, tuple[list[Fault], type[StoreError] | None]] = {
    "no fault": ([], None),
    "a lost answer": ([LOST], None),
    "a lost request": ([GONE], None),
    "lost, busy, down": ([LOST, BUSY, DOWN], None),
    "lost all along": ([LOST] * TRIES, OutcomeUnknown),
    "lost, then not allowed": ([LOST, FORBIDDEN], OutcomeUnknown),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh versions", "same versions"])
@pytest.mark.parametrize("name", TOUCHES)
def test_touch(name: str, fresh: bool) -> None:
    faults, outcome = TOUCHES[name]

    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD, metadata={"beat": "1"})
        if outcome is not None:
            with pytest.raises(outcome):
                await setting.store.touch(KEY, version=version, metadata={"beat": "2"})
            return
        touched = await setting.store.touch(KEY, version=version, metadata={"beat": "2"})
        found = await setting.other.head(KEY)
        assert (found.version, dict(found.metadata)) == (touched, {"beat": "2"})

    settle(main, fresh_versions=fresh, touch=faults)


@pytest.mark.parametrize(
    ("metadata", "outcome"), [({"beat": "2"}, VersionConflict), ({}, OutcomeUnknown)]
)
@pytest.mark.parametrize("fault", [LOST, GONE])
def test_touch_that_was_overtaken(
    metadata: dict[str, str], outcome: type[StoreError], fault: Fault
) -> None:
    async def overtaking(setting: Setting) -> None:
        await setting.other.put(KEY, THEIRS, metadata={"beat": "9"})

    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD, metadata={"beat": "1"})
        with pytest.raises(outcome) as caught:
            await setting.store.touch(KEY, version=version, metadata=metadata)
        assert type(caught.value) is outcome

    settle(main, touch=[fault, overtaking])


def test_touch_of_what_was_deleted_is_refused() -> None:
    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD)
        with pytest.raises(VersionConflict):
            await setting.store.touch(KEY, version=version, metadata={"beat": "2"})

    settle(main, touch=[LOST, deleting])


@pytest.mark.parametrize("step", [DOWN, BUSY, FORBIDDEN])
def test_touch_whose_reading_fails_cannot_be_told(step: Fault) -> None:
    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD)
        with pytest.raises(OutcomeUnknown):
            await setting.store.touch(KEY, version=version, metadata={"beat": "2"})

    heads = [step] * (1 if step is FORBIDDEN else TRIES)
    settle(main, fresh_versions=True, touch=[LOST], head=heads)


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("faults", [[], [LOST], [GONE], [LOST, BUSY, DOWN], [LOST, LOST]])
def test_delete(conditional: bool, faults: list[Fault]) -> None:
    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD)
        await setting.store.delete(KEY, version=version if conditional else None)
        assert await _body(setting.other) is None

    settle(main, delete=faults)


@pytest.mark.parametrize("faults", [[LOST] * TRIES, [LOST, FORBIDDEN], [GONE, DOWN, DOWN, DOWN]])
def test_delete_that_cannot_be_told(faults: list[Fault]) -> None:
    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD)
        with pytest.raises(OutcomeUnknown):
            await setting.store.delete(KEY, version=version)

    settle(main, delete=faults)


@pytest.mark.parametrize("fault", [LOST, GONE])
def test_delete_of_a_version_that_has_been_replaced_is_refused(fault: Fault) -> None:
    async def main(setting: Setting) -> None:
        version = await setting.other.put(KEY, OLD)
        with pytest.raises(VersionConflict):
            await setting.store.delete(KEY, version=version)
        assert await _body(setting.other) == THEIRS

    settle(main, delete=[fault, replacing(THEIRS)])


def test_reads_are_repeated() -> None:
    async def main(setting: Setting) -> None:
        await setting.other.put(KEY, OLD)
        found = await setting.store.get(KEY)
        assert found is not None
        assert await setting.store.get(KEY, unless=found.version) is None
        assert (await setting.store.head(KEY)).version == found.version
        assert len((await setting.store.list("a/", delimiter="/", limit=5)).entries) == 1
        assert (await setting.store.sample()).resolution == 0
        with pytest.raises(NotFound):
            await setting.store.get("nothing")

    twice = [BUSY, DOWN]
    settle(main, get=twice, head=twice, list=twice, sample=twice)


@pytest.mark.parametrize(("fault", "error"), [(DOWN, Unavailable), (BUSY, Throttled)])
def test_tries_are_bounded(fault: Fault, error: type[StoreError]) -> None:
    async def main(setting: Setting) -> None:
        for request in (
            lambda: setting.store.get(KEY),
            lambda: setting.store.head(KEY),
            setting.store.list,
            setting.store.sample,
        ):
            with pytest.raises(error):
                await request()
        assert setting.scripted.sent == [
            kind for kind in ("get", "head", "list", "sample") for _ in range(TRIES)
        ]

    always = [fault] * TRIES
    settle(main, get=always, head=always, list=always, sample=always)


def test_settling_is_bounded() -> None:
    async def main(setting: Setting) -> None:
        with pytest.raises(OutcomeUnknown):
            await setting.store.put(KEY, OURS, CREATE)
        assert setting.scripted.sent == ["put"] * TRIES + ["get"] * TRIES

    settle(main, put=[LOST, DOWN, DOWN, OK], get=[DOWN] * TRIES)


class Extreme:
    """Randomness that always draws the lowest or the highest."""

    def __init__(self, *, high: bool) -> None:
        self._high = high
        self._others = seeded_entropy("others")
        self.getrandbits = self._others.getrandbits
        self.randrange = self._others.randrange
        self.random = self._others.random
        self.choice = self._others.choice

    def uniform(self, a: float, b: float) -> float:
        return b if self._high else a


def _pauses(error: StoreError, *, high: bool, tries: int = 8) -> list[float]:
    """The seconds between the sends of a get that always fails."""
    instants: list[float] = []

    async def main(world: World) -> None:
        machine = world.clock()
        inner = MemoryStore(MemoryBucket(world.clock()), clock=machine)

        async def fail() -> None:
            instants.append(world.now())
            raise error

        scripted = ScriptedStore(inner, get=[fail] * tries)
        store = RetryingStore(
            scripted, entropy=Extreme(high=high), retries=Retries(tries_max=tries)
        )
        with pytest.raises(type(error)):
            await store.get(KEY)

    simulate(main, seed=1)
    return [round(after - before, 3) for before, after in pairwise(instants)]


def test_pauses_are_random_up_to_a_doubling_bound() -> None:
    down = Unavailable("down")
    assert _pauses(down, high=True) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert _pauses(down, high=False) == [0.0] * 7
    assert sum(_pauses(down, high=True)) < 12


def test_pauses_are_longer_when_the_store_asks_for_it() -> None:
    asked = Throttled("slow down", retry_after_seconds=2.0)
    assert _pauses(asked, high=False) == [2.05, 2.1, 2.2, 2.4, 2.8, 3.6, 4.5]
    assert _pauses(asked, high=True) == [2.1, 2.2, 2.4, 2.8, 3.6, 5.2, 7.0]
    plain = Throttled("slow down")
    assert _pauses(plain, high=False) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.5]
    for_ever = Throttled("slow down", retry_after_seconds=1e9)
    assert max(_pauses(for_ever, high=True)) == 10.0


def test_very_many_tries_do_not_overflow() -> None:
    retries = Retries(tries_max=5000, pause_seconds_max=1.0)
    pause = retries.pause(tries=4999, error=Unavailable("down"), entropy=Extreme(high=True))
    assert pause == 1.0


def test_two_clients_do_not_pause_in_step() -> None:
    pauses = [
        Retries().pause(tries=3, error=Unavailable("down"), entropy=seeded_entropy(seed))
        for seed in range(20)
    ]
    assert len(set(pauses)) == 20


def test_a_cancelled_pause_ends_the_repeats() -> None:
    async def main(setting: Setting) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(setting.store.get(KEY))
            await setting.machine.sleep(0.001)
            task.cancel()
        assert task.cancelled()

    settle(main, get=[Throttled("slow down", retry_after_seconds=5)])


def test_the_first_time_sample_is_repeated_and_refreshes_are_not() -> None:
    """`now()` costs at most one request in five minutes, also while the store is down."""

    async def main(setting: Setting) -> None:
        await setting.store.now()
        assert setting.scripted.sent == ["sample"] * 3
        await setting.machine.sleep(1000)
        await setting.store.now()
        assert setting.scripted.sent == ["sample"] * 4
        await setting.machine.sleep(1000)
        await setting.store.calibrate()
        assert len(setting.scripted.sent) <= 5 + 9

    settle(main, sample=[DOWN, BUSY, OK, DOWN, BUSY])


def test_samples_are_counted_where_they_are_sent() -> None:
    async def main(world: World) -> None:
        meter = Meter()
        inner = MemoryStore(MemoryBucket(world.clock()), clock=world.clock())
        scripted = ScriptedStore(inner, sample=[DOWN])
        store = RetryingStore(MeteredStore(scripted, meter), entropy=world.entropy("retries"))
        await store.now()
        assert meter.requests(label="time") == 2

    simulate(main, seed=1)
