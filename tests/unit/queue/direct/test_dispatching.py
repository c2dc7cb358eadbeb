"""What a submit of a direct type does more, and that it can never fail because of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.kernel.errors import Refused, Unavailable
from penstock.queue.config import QueueConfig
from penstock.queue.ids import URGENT_MINUTE, task_at
from penstock.queue.settings import WorkerSelection
from penstock.queue.submit_options import SubmitOptions
from penstock.queue.submitter import Submitter
from penstock.store.base import (
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    ObjectStore,
    Page,
    PutMode,
    Version,
    Wrapper,
)
from penstock.store.metered import Kind
from tests.unit.queue.direct.office import LAYOUT, LEASE_SECONDS, Office, run


class Fails(Wrapper):
    """Fails, or never answers, what is asked of inboxes."""

    def __init__(self, inner: ObjectStore, *, hangs: bool = False) -> None:
        super().__init__(inner)
        self.hangs = hangs
        self.lists = self.puts = True

    async def _fail(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        raise Unavailable("The store is away.")

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        if self.puts and key.startswith(LAYOUT.inboxes):
            await self._fail()
        return await self.inner.put(key, body, mode, metadata=metadata)

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        if self.lists:
            await self._fail()
        return await self.inner.list(
            prefix, start_after=start_after, delimiter=delimiter, limit=limit, cursor=cursor
        )


def _submitter(office: Office, store: ObjectStore | None = None, **settings: object) -> Submitter:
    store = store or office.store()
    dispatch = office.dispatch(store=store, **settings)
    return Submitter(store, LAYOUT, office.world.entropy("submits"), dispatch)


def test_an_entry_is_written_after_the_pack_and_tells_all() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()
        order: list[str] = []
        write = office.bucket.write

        def note(key: str, body: bytes, metadata: Mapping[str, str]) -> Version:
            order.append(key)
            return write(key, body, metadata)

        office.bucket.write = note  # type: ignore[method-assign]  # to see the order
        (task,) = await _submitter(office).submit_many("t", [1], SubmitOptions(limit="api"))
        at, _ = task_at(task)
        assert order[0] == LAYOUT.pack(at)
        entry = LAYOUT.read_inbox_entry(order[1])
        assert entry is not None
        assert (entry.worker, entry.minute, entry.to.at) == ("w", office.minute, at)
        assert office.bucket.objects[order[1]].body == b""

    run(check)


def test_a_submit_costs_one_put_more_and_a_list_in_half_a_minute() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()
        submitter = _submitter(office)
        await submitter.submit_many("t", [1])
        puts, lists, gets = (
            office.meter.requests(kind=kind) for kind in (Kind.PUT, Kind.LIST, Kind.GET)
        )
        for _ in range(20):
            await submitter.submit_many("t", [1])
        assert office.meter.requests(kind=Kind.PUT) == puts + 40
        assert office.meter.requests(kind=Kind.LIST) == lists
        assert office.meter.requests(kind=Kind.GET) == gets
        await office.clock.sleep(31)
        await submitter.submit_many("t", [1])
        assert office.meter.requests(kind=Kind.LIST) == lists + 1

    run(check)


def test_a_type_that_is_not_direct_costs_nothing_more() -> None:
    async def check(office: Office) -> None:
        office.config = QueueConfig(direct=("other",))
        await office.held("w", handles=frozenset({"t"})).take()
        submitter = _submitter(office)
        await submitter.store.now()
        before, puts = office.meter.requests(), office.meter.requests(kind=Kind.PUT)
        (task,) = await submitter.submit_many("t", [1])
        assert office.meter.requests() - before == 1
        assert office.meter.requests(kind=Kind.PUT) - puts == 1
        assert task_at(task)[0].path.startswith("tasks/")

    run(check)


def test_without_a_worker_the_pack_goes_where_things_become_due() -> None:
    async def check(office: Office) -> None:
        submitter = _submitter(office)
        (task,) = await submitter.submit_many("t", [1])
        assert task_at(task)[0].path.startswith(f"ready/{office.minute}/")
        (low,) = await submitter.submit_many("t", [1], SubmitOptions(priority=-1))
        assert task_at(low)[0].path.startswith("unhurried/")
        # One for another type does not help.
        await office.held("w", handles=frozenset({"other"})).take()
        await office.clock.sleep(31)
        (task,) = await submitter.submit_many("t", [1])
        assert task_at(task)[0].path.startswith(f"ready/{office.minute}/")
        assert office.entries("w") == []

    run(check)


def test_a_worker_that_died_is_no_longer_told_when_its_lease_has_ended() -> None:
    async def check(office: Office) -> None:
        await office.held("dies").take()
        submitter = _submitter(office)
        await submitter.submit_many("t", [1])
        await office.clock.sleep(LEASE_SECONDS + 3)
        await office.held("lives").take()
        for _ in range(5):
            await submitter.submit_many("t", [1])
        assert len(office.entries("dies")) == 1
        assert len(office.entries("lives")) == 5

    run(check)


def test_urgent_and_delayed_packs_are_in_minutes_of_their_own() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()
        submitter = _submitter(office)
        await submitter.submit_many("t", [1], SubmitOptions(priority=9))
        await submitter.submit_many("t", [1], SubmitOptions(delay=600))
        await submitter.submit_many("t", [1], SubmitOptions(delay=1200, priority=9))
        minutes = sorted(
            entry.minute
            for key in office.bucket.objects
            if (entry := LAYOUT.read_inbox_entry(key)) is not None
        )
        assert minutes == [URGENT_MINUTE, office.minute + 10, office.minute + 20]

    run(check)


def test_a_key_is_announced_once() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()
        submitter = _submitter(office)
        options = SubmitOptions(key="k", priority=2)
        for _ in range(3):
            await submitter.submit_keyed("t", 1, options, key_seconds=3600)
        (at,) = office.entries("w")
        (pointer,) = [
            read for key in office.bucket.objects if (read := LAYOUT.read_pointer(key)) is not None
        ]
        assert pointer.at == at

    run(check)


def test_a_submit_succeeds_whatever_becomes_of_its_entry() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()
        for hangs in (False, True):
            for lists in (False, True):
                store = Fails(office.store(), hangs=hangs)
                store.lists = lists
                began = office.world.now()
                (task,) = await _submitter(office, store).submit_many("t", [1])
                assert LAYOUT.pack(task_at(task)[0]) in office.bucket.objects
                assert office.world.now() - began < 11
        assert office.entries("w") == []

    run(check)


def test_a_picture_that_failed_is_not_asked_for_again_by_every_submit() -> None:
    async def check(office: Office) -> None:
        store = Fails(office.store(), hangs=True)
        submitter = _submitter(office, store)
        began = office.world.now()
        for _ in range(10):
            await submitter.submit_many("t", [1])
        assert office.world.now() - began < 11

    run(check)


def test_no_entry_is_written_for_a_pack_that_was_not() -> None:
    async def check(office: Office) -> None:
        await office.held("w").take()

        class Refuses(Wrapper):
            async def put(
                self,
                key: str,
                body: bytes,
                mode: PutMode = REPLACE,
                *,
                metadata: Mapping[str, str] = NO_METADATA,
            ) -> Version:
                if key.startswith(LAYOUT.tasks):
                    raise Refused("No.")
                return await self.inner.put(key, body, mode, metadata=metadata)

        try:
            await _submitter(office, Refuses(office.store())).submit_many("t", [1])
        except Refused:
            assert office.entries("w") == []
        else:
            raise AssertionError("a submit that is refused is an error")

    run(check)


def test_hash_sends_all_of_an_affinity_to_one_worker() -> None:
    async def check(office: Office) -> None:
        for name in ("a", "b", "c", "d", "e"):
            await office.held(name).take()
        submitter = _submitter(office, worker_selection=WorkerSelection.HASH)

        def told() -> list[str]:
            found = [LAYOUT.read_inbox_entry(key) for key in office.bucket.objects]
            return [each.worker for each in found if each is not None]

        for _ in range(10):
            await submitter.submit_many("t", [1], SubmitOptions(affinity="customer-7"))
        for number in range(5):
            options = SubmitOptions(affinity="customer-7", key=f"k{number}")
            await submitter.submit_keyed("t", 1, options, key_seconds=3600)
        assert len(told()) == 15
        assert len(set(told())) == 1
        for number in range(30):
            await submitter.submit_many("t", [1], SubmitOptions(affinity=f"customer-{number}"))
        assert set(told()) == {"a", "b", "c", "d", "e"}

    run(check)
