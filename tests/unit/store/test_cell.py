"""An update takes effect once, whatever happens to its requests and whoever else is writing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from penstock.kernel.document_format import WRITERS_MAX, decode, encode
from penstock.kernel.errors import (
    NotOurs,
    OutcomeUnknown,
    Refused,
    StoreError,
    Superseded,
    Throttled,
    Unavailable,
    VersionConflict,
)
from penstock.store.base import ObjectStore
from penstock.store.cell import TRIES_MAX, Cell
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.store.races import Entrant
from penstock.store.retrying import Retries, RetryingStore
from penstock.testing.virtual import World, simulate
from tests.unit.store.scripted import OK, Fault, ScriptedStore, Step

KEY = "counter"
LOST, GONE, LATE = Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.LATE


def increment(present: Entrant | None) -> Entrant:
    return Entrant(count=present.count + 1 if present else 1)


@dataclass
class Setting:
    """A cell whose requests are scripted, and a client of somebody else."""

    world: World
    other: ObjectStore
    scripted: ScriptedStore
    cell: Cell[Entrant]
    others_wrote: int = 0

    async def count(self) -> int:
        found = await self.other.get(KEY)
        assert found is not None
        return decode(Entrant, found.body, where=KEY).count

    async def others_write(self, writers: int = 1) -> None:
        """Others count up, as cells do."""
        for _ in range(writers):
            cell = Cell(self.other, KEY, Entrant, entropy=self.world.entropy("others"))
            await cell.update(increment)
            self.others_wrote += 1


Others = Callable[[Setting], Coroutine[Any, Any, None]]
Script = Sequence[Fault | StoreError | Others]


def play(main: Callable[[Setting], Coroutine[Any, Any, None]], **scripts: Script) -> None:
    async def run(world: World) -> None:
        machine = world.clock()
        bucket = MemoryBucket(world.clock())
        other = MemoryStore(bucket, clock=machine)

        def bound(step: Fault | StoreError | Others) -> Step:
            return step if isinstance(step, Fault | StoreError) else lambda: step(setting)

        scripted = ScriptedStore(
            MemoryStore(bucket, clock=machine),
            **{kind: [bound(step) for step in steps] for kind, steps in scripts.items()},
        )
        cell = Cell(scripted, KEY, Entrant, entropy=world.entropy("cell"))
        setting = Setting(world, other, scripted, cell)
        await main(setting)
        assert scripted.played

    simulate(run, seed=1)


def others(writers: int) -> Others:
    return lambda setting: setting.others_write(writers)


async def deleting(setting: Setting) -> None:
    await setting.other.delete(KEY)


def test_read_and_update() -> None:
    async def main(setting: Setting) -> None:
        cell = setting.cell
        assert await cell.read() is None
        first = await cell.update(increment)
        assert first is not None
        assert first.count == 1
        second = await cell.update(increment)
        assert await cell.read() == second
        assert await setting.count() == 2

    play(main)


def test_requests_are_few() -> None:
    async def main(setting: Setting) -> None:
        await setting.cell.update(increment)
        assert setting.scripted.sent == ["get", "put"]
        await setting.cell.update(increment)
        assert setting.scripted.sent == ["get", "put", "put"]
        await setting.others_write()
        await setting.cell.update(increment)
        assert setting.scripted.sent[3:] == ["put", "get", "put"]

    play(main)


def test_the_first_reading_is_not_made_twice() -> None:
    async def main(setting: Setting) -> None:
        await setting.cell.update(lambda present: present)
        assert setting.scripted.sent == ["get"]

    play(main)


def test_updates_of_one_cell_wait_for_each_other() -> None:
    async def main(setting: Setting) -> None:
        await asyncio.gather(*(setting.cell.update(increment) for _ in range(20)))
        assert await setting.count() == 20
        assert setting.scripted.sent == ["get"] + ["put"] * 20

    play(main)


@pytest.mark.parametrize(
    ("leave", "count"),
    [(lambda present: present, 4), (lambda _: None, 4)],
    ids=["the same", "none"],
)
def test_leaving_it_writes_nothing(
    leave: Callable[[Entrant | None], Entrant | None], count: int
) -> None:
    async def main(setting: Setting) -> None:
        await setting.cell.update(increment)
        await setting.others_write(3)
        left = await setting.cell.update(leave)
        assert left is not None
        assert left.count == count, "what is left is what is there"
        assert setting.scripted.sent == ["get", "put", "get"]

    play(main)


def test_leaving_it_does_not_rest_on_an_old_reading() -> None:
    def up_to_three(present: Entrant | None) -> Entrant | None:
        assert present is not None
        return increment(present) if present.count > 1 else None

    async def main(setting: Setting) -> None:
        await setting.cell.update(increment)
        await setting.others_write()
        await setting.cell.update(up_to_three)
        assert await setting.count() == 3

    play(main)


def test_raising_does_not_rest_on_an_old_reading() -> None:
    def strict(present: Entrant | None) -> Entrant:
        assert present is not None
        if present.count < 2:
            raise LookupError(f"{present.count} is too few")
        return increment(present)

    async def main(setting: Setting) -> None:
        await setting.cell.update(increment)
        with pytest.raises(LookupError, match="1 is too few"):
            await setting.cell.update(strict)
        await setting.others_write()
        await setting.cell.update(strict)
        assert await setting.count() == 3

    play(main)


def test_a_change_sees_what_others_wrote() -> None:
    seen: list[int] = []

    def noting(present: Entrant | None) -> Entrant:
        seen.append(present.count if present else 0)
        return increment(present)

    async def main(setting: Setting) -> None:
        await setting.cell.update(noting)
        assert seen == [0, 2]
        assert await setting.count() == 3

    play(main, put=[others(2)])


def test_others_writes_are_remembered_whatever_the_change_returns() -> None:
    async def main(setting: Setting) -> None:
        await setting.others_write(3)
        for change in (increment, lambda present: Entrant(writes={"forged": "x"})):
            updated = await setting.cell.update(change)
            assert updated is not None
            assert len(updated.writes) == 4
            assert "forged" not in updated.writes

    play(main)


ONCE: dict[str, dict[str, Script]] = {
    "a lost answer": {"put": [LOST]},
    "a lost request": {"put": [GONE]},
    "many of both": {"put": [GONE, GONE, LOST]},
    "lost, then overtaken": {"put": [LOST], "get": [OK, others(1)]},
    "lost, then overtaken by many": {"put": [LOST], "get": [OK, others(WRITERS_MAX - 1)]},
    "never arrived, then overtaken": {"put": [GONE], "get": [OK, others(3)]},
    "never arrived, overtaken again and again": {"put": [GONE, others(1), GONE, others(1)]},
    "overtaken, then lost": {"put": [others(1), OK, LOST], "get": [OK, OK, others(1)]},
}


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("there", [0, 5])
def test_an_update_takes_effect_once(name: str, there: int) -> None:
    async def main(setting: Setting) -> None:
        await setting.others_write(there)
        updated = await setting.cell.update(increment)
        assert updated is not None
        assert await setting.count() == updated.count == setting.others_wrote + 1
        await setting.cell.update(increment)
        assert await setting.count() == setting.others_wrote + 2

    play(main, **ONCE[name])


async def arriving(setting: Setting) -> None:
    await setting.scripted.arrive()


@pytest.mark.parametrize(
    "puts",
    [
        pytest.param([LATE, arriving], id="before the second"),
        pytest.param([LATE, LATE, arriving], id="before the third"),
        pytest.param([LATE, others(1), arriving], id="after somebody else's"),
        pytest.param([LATE, others(1), OK, LATE, arriving], id="two, from different versions"),
        pytest.param([LATE, LOST], id="after the second"),
        pytest.param([LATE, GONE, LATE, arriving, others(1)], id="before somebody else's"),
    ],
)
@pytest.mark.parametrize("there", [0, 5])
def test_an_earlier_send_that_arrives_later_is_recognised(puts: Script, there: int) -> None:
    async def main(setting: Setting) -> None:
        await setting.others_write(there)
        await setting.cell.update(increment)
        assert await setting.count() == setting.others_wrote + 1
        await setting.cell.update(increment)
        await setting.scripted.arrive()
        assert await setting.count() == setting.others_wrote + 2

    play(main, put=puts)


def test_an_update_that_is_superseded_is_done_even_if_nobody_remembers() -> None:
    async def main(setting: Setting) -> None:
        store = RetryingStore(setting.scripted, entropy=setting.world.entropy("retries"))
        cell = Cell(store, KEY, Entrant, entropy=setting.world.entropy("cell"))
        await cell.update(increment)
        assert await setting.count() == setting.others_wrote + 1

    # Read back by the retrying store before the crowd comes, and by the cell after it.
    play(main, put=[LOST, others(1)], get=[OK, OK, others(WRITERS_MAX)])


UNKNOWN: dict[str, dict[str, Script]] = {
    "a crowd has come over it": {"put": [LOST], "get": [OK, others(WRITERS_MAX)]},
    "a crowd came first": {"put": [GONE], "get": [OK, others(WRITERS_MAX)]},
    "down after a lost answer": {"put": [LOST], "get": [OK, Unavailable("down")]},
    "busy after a lost answer": {"put": [LOST], "get": [OK, Throttled("slow down")]},
    "not allowed after a lost answer": {"put": [LOST], "get": [OK, Refused("no")]},
    "down after a lost request": {"put": [GONE, Unavailable("down")]},
    "down after being superseded": {"put": [Superseded("x")], "get": [OK, Unavailable("down")]},
    "lost for ever": {"put": [GONE] * TRIES_MAX},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_update_that_cannot_be_told_is_never_called_failed(name: str) -> None:
    async def main(setting: Setting) -> None:
        with pytest.raises(OutcomeUnknown) as caught:
            await setting.cell.update(increment)
        assert caught.value.key == KEY

    play(main, **UNKNOWN[name])


def test_damage_after_a_lost_answer_does_not_hide_it() -> None:
    async def damaging(setting: Setting) -> None:
        await setting.other.put(KEY, b"damaged")

    async def main(setting: Setting) -> None:
        with pytest.raises(OutcomeUnknown) as caught:
            await setting.cell.update(increment)
        assert isinstance(caught.value.__cause__, NotOurs)

    play(main, put=[LOST], get=[OK, damaging])


def test_a_change_of_mind_while_a_send_is_on_its_way_is_not_called_leaving_it() -> None:
    answers = iter([Entrant(count=7), None])

    async def main(setting: Setting) -> None:
        with pytest.raises(OutcomeUnknown):
            await setting.cell.update(lambda _: next(answers))
        await setting.scripted.arrive()
        assert await setting.count() == 7

    play(main, put=[LATE])


def test_a_change_of_mind_after_a_send_was_overtaken_leaves_it() -> None:
    def first(present: Entrant | None) -> Entrant | None:
        return increment(None) if present is None else None

    async def main(setting: Setting) -> None:
        left = await setting.cell.update(first)
        assert left is not None
        assert left.count == 1
        await setting.scripted.arrive()
        assert await setting.count() == 1

    play(main, put=[LATE], get=[OK, others(1)])


@pytest.mark.parametrize("error", [Unavailable("down"), Throttled("slow down"), Refused("no")])
def test_errors_before_anything_was_sent_are_raised_as_they_are(error: StoreError) -> None:
    async def reading(setting: Setting) -> None:
        with pytest.raises(type(error)) as caught:
            await setting.cell.update(increment)
        assert caught.value is error

    play(reading, get=[error])
    play(reading, put=[error])
    play(reading, put=[others(1), OK, error])


def test_an_error_after_a_send_was_overtaken_is_raised_as_it_is() -> None:
    async def main(setting: Setting) -> None:
        with pytest.raises(Unavailable):
            await setting.cell.update(increment)
        await setting.scripted.arrive()
        assert await setting.count() == setting.others_wrote

    play(main, put=[LATE, Unavailable("down")], get=[OK, others(1)])


def test_too_much_contention_is_told() -> None:
    async def main(setting: Setting) -> None:
        with pytest.raises(VersionConflict, match=f"each of {TRIES_MAX} tries") as caught:
            await setting.cell.update(increment)
        assert type(caught.value) is VersionConflict
        assert await setting.count() == TRIES_MAX
        assert setting.scripted.sent.count("put") == TRIES_MAX

    play(main, put=[step for _ in range(TRIES_MAX) for step in (others(1), OK)])


@pytest.mark.parametrize("puts", [[deleting], [LATE, deleting]], ids=["at once", "late"])
def test_an_object_that_is_deleted_is_made_again(puts: Script) -> None:
    async def main(setting: Setting) -> None:
        await setting.others_write(3)
        updated = await setting.cell.update(increment)
        assert updated is not None
        await setting.scripted.arrive()
        assert await setting.count() == updated.count

    play(main, put=puts)


def test_an_object_that_is_deleted_after_a_lost_answer_starts_anew() -> None:
    async def main(setting: Setting) -> None:
        await setting.others_write(3)
        updated = await setting.cell.update(increment)
        assert updated == await setting.cell.read()
        assert await setting.count() == 1

    play(main, put=[LOST], get=[OK, deleting])


def test_what_is_not_a_cells_is_refused() -> None:
    async def main(setting: Setting) -> None:
        await setting.other.put(KEY, b"something else")
        for request in (setting.cell.read, lambda: setting.cell.update(increment)):
            with pytest.raises(NotOurs, match=KEY):
                await request()
        await setting.other.put(KEY, encode(Entrant(count=7)))
        await setting.cell.update(increment)
        assert await setting.count() == 8

    play(main)


@pytest.mark.parametrize("fault", [OK, LOST, GONE])
def test_a_cancelled_update_leaves_the_object_before_or_after(fault: Fault) -> None:
    async def main(setting: Setting) -> None:
        hanging = asyncio.Event()

        async def hang() -> None:
            await hanging.wait()

        setting.scripted.add("put", hang, fault)
        async with asyncio.TaskGroup() as group:
            update = group.create_task(setting.cell.update(increment))
            await setting.world.clock().sleep(1)
            update.cancel()
        assert update.cancelled()
        await setting.cell.update(increment)
        await setting.cell.update(increment)
        assert await setting.count() == 2

    play(main)


def test_a_cancelled_put_that_arrives_later_does_no_harm() -> None:
    async def main(setting: Setting) -> None:
        await setting.cell.update(increment)
        cancelled = asyncio.Event()

        async def cut_off() -> None:
            await cancelled.wait()

        setting.scripted.add("put", LATE)
        setting.scripted.add("get", cut_off)
        async with asyncio.TaskGroup() as group:
            update = group.create_task(setting.cell.update(increment))
            await setting.world.clock().sleep(1)
            update.cancel()
        setting.scripted.add("put", setting.scripted.arrive)
        await setting.cell.update(increment)
        assert await setting.count() == 3, "both took effect, once each"

    play(main)


def test_two_cells_are_two_writers() -> None:
    async def main(setting: Setting) -> None:
        twin = Cell(setting.scripted, KEY, Entrant, entropy=setting.world.entropy("cell"))
        for _ in range(3):
            await setting.cell.update(increment)
            await twin.update(increment)
        assert await setting.count() == 6
        present = await twin.read()
        assert present is not None
        assert len(present.writes) == 2

    play(main, put=[LOST, GONE, LOST, LOST])


def test_a_document_keeps_what_the_change_made_of_it() -> None:
    class Named(Entrant, frozen=True):
        name: str = ""

    async def main(setting: Setting) -> None:
        cell = Cell(setting.scripted, KEY, Named, entropy=setting.world.entropy("cell"))
        await cell.update(lambda _: Named(name="one", count=7))
        await cell.update(lambda it: msgspec.structs.replace(it, name="two") if it else None)
        present = await cell.read()
        assert present is not None
        assert (present.name, present.count) == ("two", 7)

    play(main)


# From here on: machines with seeded faults.

FAULTS = FaultPlan(
    latency_seconds_max=0.05,
    throttled=0.05,
    failed=0.05,
    lost_request=0.08,
    late_request=0.05,
    lost_answer=0.1,
    duplicate=0.1,
    late_seconds_max=3.0,
)


@dataclass
class Tally:
    """What the machines were told, all in all."""

    done: int = 0
    unknown: int = 0
    faults: int = 0


async def _count_up(world: World, *, machines: int, each: int, retrying: bool) -> Tally:
    bucket = MemoryBucket(world.clock(), date_resolution_seconds=1.0)
    tally = Tally()
    stores: list[FaultyStore] = []

    async def machine(name: str) -> None:
        entropy = world.entropy(name)
        clock = world.clock(skew_seconds=entropy.uniform(-1e5, 1e5))
        faulty = FaultyStore(MemoryStore(bucket, clock=clock), FAULTS, entropy=entropy)
        stores.append(faulty)
        store = RetryingStore(faulty, entropy=entropy, retries=Retries(8)) if retrying else faulty
        cell = Cell(store, KEY, Entrant, entropy=entropy)
        for _ in range(each):
            await _once(cell, tally)

    async with asyncio.TaskGroup() as group:
        for number in range(machines):
            group.create_task(machine(f"machine {number}"))
    await world.clock().sleep(FAULTS.late_seconds_max + 1)
    tally.faults = sum(sum(store.injected.values()) for store in stores)
    for store in stores:
        await store.close()
    stored = bucket.objects.get(KEY)
    total = decode(Entrant, stored.body, where=KEY).count if stored else 0
    assert tally.done <= total <= tally.done + tally.unknown, (total, tally)
    return tally


async def _once(cell: Cell[Entrant], tally: Tally) -> None:
    """Count up once: again if nothing was done, and by looking if that is not known."""
    while True:
        try:
            await cell.update(increment)
        except OutcomeUnknown:
            tally.unknown += 1
            return
        except (Throttled, Unavailable):
            continue
        tally.done += 1
        return


def test_a_counter_is_exact_whatever_goes_wrong() -> None:
    faults = 0
    for seed in range(400):
        tally = simulate(
            lambda world: _count_up(world, machines=4, each=4, retrying=True), seed=seed
        )
        assert (tally.done, tally.unknown) == (16, 0)
        faults += tally.faults
    assert faults > 400 * 10


def test_a_counter_is_exact_without_retries_but_for_what_is_unknown() -> None:
    unknown = 0
    for seed in range(200):
        tally = simulate(
            lambda world: _count_up(world, machines=4, each=4, retrying=False), seed=seed
        )
        assert tally.done + tally.unknown == 16
        unknown += tally.unknown
    assert unknown > 0


def test_more_writers_than_are_remembered() -> None:
    done = unknown = 0
    for seed in range(3):
        tally = simulate(
            lambda world: _count_up(world, machines=48, each=2, retrying=True), seed=seed
        )
        done += tally.done
        unknown += tally.unknown
    assert done + unknown == 3 * 96
    assert 0 < unknown < done


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> list[str]:
        trace: list[str] = []
        simulate(
            lambda world: _count_up(world, machines=3, each=3, retrying=True),
            seed=5,
            trace=trace.append,
        )
        return trace

    assert run() == run()


def _aged(state: Entrant, modified: float) -> Entrant:
    return msgspec.structs.replace(state, count=int(modified))


def test_a_document_is_seen_as_its_date_says_and_written_so() -> None:
    """Also when nothing but the date has changed: a touch may leave the version as it is."""

    async def main(setting: Setting) -> None:
        cell = Cell(setting.other, KEY, Entrant, dated=_aged, entropy=setting.world.entropy("aged"))
        await setting.others_write()
        clock = setting.other.clock.machine
        first = await cell.read()
        await clock.sleep(100)
        head = await setting.other.head(KEY)
        assert await setting.other.touch(KEY, version=head.version) == head.version
        second = await cell.read()
        assert first is not None
        assert second is not None
        assert second.count - first.count == 100
        assert cell.last is not None
        assert int(cell.last.modified) == second.count
        await cell.update(increment)
        assert await setting.count() == second.count + 1

    play(main)


def test_what_is_written_has_its_metadata() -> None:
    async def main(setting: Setting) -> None:
        cell = Cell(
            setting.other,
            KEY,
            Entrant,
            metadata=lambda state: {"count": str(state.count)},
            entropy=setting.world.entropy("told"),
        )
        for count in ("1", "2"):
            await cell.update(increment)
            assert (await setting.other.head(KEY)).metadata == {"count": count}

    play(main)


def test_a_touch_dates_what_was_written_and_sends_nothing() -> None:
    async def main(setting: Setting) -> None:
        cell, clock = setting.cell, setting.other.clock.machine
        assert not await cell.touch({"by": "me"}), "there is nothing yet"
        await cell.update(increment)
        before = await setting.other.head(KEY)
        await clock.sleep(100)
        assert await cell.touch({"by": "me"})
        after = await setting.other.head(KEY)
        assert (after.version, after.metadata) == (before.version, {"by": "me"})
        assert after.modified - before.modified == pytest.approx(100)
        await cell.update(increment)
        assert await setting.count() == 2

    play(main)


@pytest.mark.parametrize("others_do", [others(1), deleting])
def test_a_touch_of_what_others_have_changed_is_refused_and_reads(others_do: Others) -> None:
    async def main(setting: Setting) -> None:
        await setting.cell.update(increment)
        await others_do(setting)
        assert not await setting.cell.touch({"by": "me"})
        following = await setting.cell.update(increment)
        assert following is not None
        assert following.count == (2 + setting.others_wrote if setting.others_wrote else 1)

    play(main)
