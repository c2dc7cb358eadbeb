"""Two writers and a few faults, in every order there is: what they are told is what happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from penstock.kernel.document_format import decode, encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import NotFound, OutcomeUnknown, StoreError, Superseded
from penstock.store.base import CREATE, ObjectStore, PutMode, Swap, Version
from penstock.store.cell import Cell
from penstock.store.races import Entrant
from penstock.store.retrying import Retries, RetryingStore
from penstock.store.tombstoned import Tombstone, TombstonedStore, is_tombstone
from tests.unit.store.explorer import Choices, FaultyClient, Field, Turn, explore

KEY = "a"
_entropy = seeded_entropy("explored")
_TOMBSTONE = encode(Tombstone(nonce="0" * 60))


@dataclass
class Write:
    """One put of one writer, and what it was told."""

    body: bytes
    client: FaultyClient
    version: Version | None = None
    error: StoreError | None = None

    async def send(self, store: ObjectStore, mode: PutMode) -> None:
        try:
            self.version = await store.put(KEY, self.body, mode)
        except StoreError as error:
            self.error = error


def _judge(field: Field, writes: list[Write]) -> None:
    """Compare what each writer was told with every body that was ever there."""
    for write in writes:
        applied = field.applied.count(write.body)
        assert applied <= 1
        match write.error:
            case None:
                assert applied == 1
                stored = field.bucket.objects[KEY]
                assert stored.body != write.body or stored.version == write.version
            case Superseded():
                assert applied == 1
                assert field.bucket.objects[KEY].body != write.body
            case OutcomeUnknown():
                assert write.client.unknown
            case _:
                assert applied == 0


def _retrying(client: FaultyClient) -> RetryingStore:
    return RetryingStore(client, entropy=_entropy, retries=Retries(tries_max=3))


def _race(*, mode: str, faults: int) -> Callable[[Choices], None]:
    """Two writers that create the same key, or swap the same version."""

    def run(choices: Choices) -> None:
        field = Field(choices, faults)
        condition: PutMode = CREATE
        if mode == "swap":
            condition = Swap(field.bucket.write(KEY, _stamped("first"), {}))
        writes = []
        for name in ("one", "other"):
            client = field.client()
            writes.append(Write(_stamped(name), client))
            field.start(writes[-1].send(_retrying(client), condition))
        field.run()
        _judge(field, writes)
        assert sum(field.applied.count(write.body) for write in writes) <= 1

    return run


def _succession(*, faults: int) -> Callable[[Choices], None]:
    """One swaps a version; another reads and swaps what is there, and remembers it."""

    def run(choices: Choices) -> None:
        field = Field(choices, faults)
        first = field.bucket.write(KEY, _stamped("first"), {})
        writes = [Write(_stamped("one", over=_stamped("first")), field.client())]
        field.start(writes[0].send(_retrying(writes[0].client), Swap(first)))
        client = field.client()

        async def follow() -> None:
            for number in range(2):
                await Turn()
                found = await field.direct().get(KEY)
                assert found is not None
                write = Write(_stamped(f"other {number}", over=found.body), client)
                writes.append(write)
                await write.send(_retrying(client), Swap(found.version))

        field.start(follow())
        field.run()
        _judge(field, writes)

    return run


def _create_over_a_tombstone(*, faults: int) -> Callable[[Choices], None]:
    """Two create the key of a deleted object: one may, and both are told what happened."""

    def run(choices: Choices) -> None:
        field = Field(choices, faults)
        field.bucket.write(KEY, _TOMBSTONE, {})
        writes = []
        for name in ("one", "other"):
            client = field.client()
            writes.append(Write(_stamped(name), client))
            field.start(writes[-1].send(_tombstoned(client), CREATE))
        field.run()
        _judge(field, writes)
        assert sum(field.applied.count(write.body) for write in writes) <= 1

    return run


def _delete_by_tombstone(*, faults: int) -> Callable[[Choices], None]:
    """One deletes a version that another swaps: one may, and both are told what happened."""

    def run(choices: Choices) -> None:
        field = Field(choices, faults)
        version = field.bucket.write(KEY, _stamped("first"), {})
        write = Write(_stamped("one", over=_stamped("first")), field.client())
        field.start(write.send(_tombstoned(write.client), Swap(version)))
        deleter = field.client()
        told: list[StoreError] = []

        async def delete() -> None:
            try:
                await _tombstoned(deleter).delete(KEY, version=version)
            except StoreError as error:
                told.append(error)

        field.start(delete())
        field.run()
        is_gone = is_tombstone(field.bucket.objects[KEY].body)
        applied = field.applied.count(write.body)
        assert applied + is_gone <= 1
        if not told:
            assert is_gone
        elif isinstance(told[0], OutcomeUnknown):
            assert deleter.unknown
        else:
            assert not is_gone
        if write.error is None:
            assert applied == 1
        elif isinstance(write.error, OutcomeUnknown):
            assert write.client.unknown
        else:
            assert applied == 0

    return run


def _tombstoned(client: FaultyClient) -> RetryingStore:
    store = TombstonedStore(client, entropy=_entropy)
    return RetryingStore(store, entropy=_entropy, retries=Retries(tries_max=3))


def _stamped(name: str, *, over: bytes | None = None) -> bytes:
    before = decode(Entrant, over, where="over") if over else Entrant()
    return encode(before.stamped(writer=name, write=name))


@pytest.mark.parametrize(
    ("run", "ways_min"),
    [
        pytest.param(_race(mode="create", faults=2), 1000, id="create race"),
        pytest.param(_race(mode="swap", faults=2), 1000, id="swap race"),
        pytest.param(_succession(faults=2), 10_000, id="succession"),
        pytest.param(_create_over_a_tombstone(faults=1), 1000, id="create over a tombstone"),
        pytest.param(_delete_by_tombstone(faults=2), 1000, id="delete by tombstone"),
    ],
)
def test_what_a_retrying_store_tells_is_true(run: Callable[[Choices], None], ways_min: int) -> None:
    assert explore(run) > ways_min


def _increment(present: Entrant | None) -> Entrant:
    return Entrant(count=present.count + 1 if present else 1)


@dataclass
class Count:
    """How many updates succeeded, and of how many the outcome is unknown."""

    done: int = 0
    unknown: int = 0

    async def up(self, cell: Cell[Entrant], client: FaultyClient, *, times: int) -> None:
        for _ in range(times):
            try:
                await cell.update(_increment)
                self.done += 1
            except OutcomeUnknown:
                assert client.unknown
                self.unknown += 1
            except StoreError:
                continue


def _counting(
    *, retrying: bool, faults: int, each: tuple[int, ...], deleting: bool = False
) -> Callable[[Choices], None]:
    """Cells that count; what they were told must fit with where the counter ends."""

    def run(choices: Choices) -> None:
        field = Field(choices, faults)
        count = Count()
        for times in each:
            client = field.client()
            store = _retrying(client) if retrying else client
            cell = Cell(store, KEY, Entrant, entropy=_entropy)
            field.start(count.up(cell, client, times=times))
        if deleting:
            field.start(_delete(field.client()))
        field.run()
        total = _total(field)
        assert total <= count.done + count.unknown
        assert deleting or count.done <= total

    return run


async def _delete(store: ObjectStore) -> None:
    with suppress(StoreError):
        await store.delete(KEY)


def _total(field: Field) -> int:
    stored = field.bucket.objects.get(KEY)
    return decode(Entrant, stored.body, where=KEY).count if stored else 0


@pytest.mark.parametrize(
    ("run", "ways_min"),
    [
        pytest.param(_counting(retrying=False, faults=2, each=(1, 1)), 10_000, id="bare"),
        pytest.param(_counting(retrying=False, faults=1, each=(2, 1)), 1000, id="bare, twice"),
        pytest.param(_counting(retrying=True, faults=2, each=(1, 1)), 10_000, id="retrying"),
    ],
)
def test_a_cells_updates_take_effect_once(run: Callable[[Choices], None], ways_min: int) -> None:
    assert explore(run) > ways_min


def test_a_cells_updates_take_effect_at_most_once_when_the_object_is_deleted() -> None:
    assert explore(_counting(retrying=False, faults=1, each=(1, 1), deleting=True)) > 1000


def test_the_explorer_goes_every_way() -> None:
    seen = []
    assert explore(lambda choices: seen.append((choices.choose(2), choices.choose(3)))) == 6
    assert sorted(seen) == [(a, b) for a in range(2) for b in range(3)]


def test_the_explorer_finds_a_lost_update() -> None:
    """A writer that does not mind the version loses updates in some of the orders."""

    def run(choices: Choices) -> None:
        field = Field(choices, 0)

        async def count() -> None:
            store = field.client()
            try:
                found = await store.get(KEY)
            except NotFound:
                found = None
            present = decode(Entrant, found.body, where=KEY) if found else None
            await store.put(KEY, encode(_increment(present)))

        field.start(count())
        field.start(count())
        field.run()
        assert _total(field) == 2

    with pytest.raises(AssertionError):
        explore(run)
