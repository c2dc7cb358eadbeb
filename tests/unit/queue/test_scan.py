"""What a look at the lists shows, whatever the size of a page, and what it costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.queue.discovery import scanner
from penstock.queue.discovery.scanner import ALL, PackCandidate, Run, Scanner, ScanResult
from penstock.queue.ids import LEDGER, SLOTS, PackAt, PackId
from penstock.queue.layout import QueueLayout
from penstock.store.base import PAGE_KEYS_MAX, Delimiter, Page, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import EPOCH, World, simulate
from tests.sizes import some

LAYOUT = QueueLayout("q")
MINUTE = int(EPOCH // 60)
NONCE = "0" * 15


class SmallPages(Wrapper):
    """A store that shows fewer keys at a time than it is asked for, and counts the lists.

    Before every page but the first, it shows an empty one if `with_empty_pages`: stores may.
    """

    def __init__(self, inner: MemoryStore, *, keys: int) -> None:
        super().__init__(inner)
        self.keys = keys
        self.with_empty_pages = False
        self.lists: list[str] = []

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        self.lists.append(prefix)
        if self.with_empty_pages and cursor is None:
            return Page((), (), cursor=start_after)
        return await self.inner.list(
            prefix,
            start_after=start_after,
            delimiter=delimiter,
            limit=min(limit, self.keys),
            cursor=cursor,
        )


class Bench:
    """A bucket with keys in it, and a scanner."""

    def __init__(self, world: World, *, page_keys: int = PAGE_KEYS_MAX) -> None:
        clock = world.clock()
        self.bucket = MemoryBucket(clock)
        self.store = SmallPages(MemoryStore(self.bucket, clock=clock), keys=page_keys)
        self.scanner = Scanner(self.store, LAYOUT)

    def put(self, *keys: str) -> None:
        for key in keys:
            self.bucket.write(key, key.encode(), {})

    def pair(self, at: PackAt) -> None:
        self.put(LAYOUT.pack(at), LAYOUT.ledger(at))

    async def look(
        self,
        runs: Sequence[Run] = ALL,
        *,
        wanted: int = 1_000_000,
        with_ready: bool = True,
        worth: Callable[[PackCandidate], int] = lambda sight: sight.at.count,
    ) -> ScanResult:
        return await self.scanner.look(
            runs, minute=MINUTE, worth=worth, wanted=wanted, with_ready=with_ready
        )


def _run(check: Callable[[Bench], Awaitable[None]], *, page_keys: int = PAGE_KEYS_MAX) -> None:
    async def main(world: World) -> None:
        await check(Bench(world, page_keys=page_keys))

    simulate(main, seed=1)


def _at(
    slot: int, number: int = 0, *, place: str = "now", count: int = 1, type: str = "t"
) -> PackAt:
    return PackAt(place, slot, PackId(f"{number:024d}"), count, type)


def _later(slot: int, *, minutes: int, number: int = 0) -> PackAt:
    return _at(slot, number, place=str(MINUTE + minutes))


def _pointer(at: PackAt, *, minutes: int = 0, nonce: str = NONCE) -> str:
    return LAYOUT.pointer(at, due_ms=(MINUTE + minutes) * 60_000, nonce=nonce)


def _places(view: ScanResult) -> list[PackAt]:
    return [sight.at for sight in view.sights]


def test_a_nearly_empty_queue_is_one_list() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.config, LAYOUT.monitor, LAYOUT.worker("w"), LAYOUT.shard_lease(0))
        bench.put(
            LAYOUT.pack(_at(0)), LAYOUT.pack(_at(SLOTS - 1)), LAYOUT.pack(_later(7, minutes=-1))
        )
        view = await bench.look()
        assert len(bench.store.lists) == 1
        assert _places(view) == [_later(7, minutes=-1), _at(0), _at(SLOTS - 1)]
        assert view.foreign == []
        assert (await bench.look()).sights == view.sights
        assert len(bench.store.lists) == 2

    _run(check)


def test_an_empty_bucket_shows_nothing_for_one_list() -> None:
    async def check(bench: Bench) -> None:
        assert await bench.look() == ScanResult(is_ready_whole=True)
        assert len(bench.store.lists) == 1

    _run(check)


def test_pack_alone_pair_and_ledger_alone_are_told_apart() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.pack(_at(1)))
        bench.pair(_at(2))
        bench.put(LAYOUT.ledger(_at(3)))
        view = await bench.look()
        alone, pair = view.sights
        assert (alone.at, pair.at) == (_at(1), _at(2))
        assert alone.seen is not None
        assert pair.seen is not None
        assert (alone.seen.has_ledger, alone.ledger) == (False, None)
        assert pair.seen.has_ledger
        assert pair.ledger == bench.bucket.objects[LAYOUT.ledger(_at(2))].version
        assert pair.seen.version == bench.bucket.objects[LAYOUT.pack(_at(2))].version
        assert pair.seen.modified == EPOCH
        ((at, entry),) = view.settled
        assert (at, entry.key) == (_at(3), LAYOUT.ledger(_at(3)))

    _run(check)


def test_what_is_due_later_is_jumped_over() -> None:
    async def check(bench: Bench) -> None:
        for number in range(40):
            bench.put(LAYOUT.pack(_later(number, minutes=3, number=number)))
        bench.put(LAYOUT.pack(_later(5, minutes=0)), LAYOUT.pack(_at(9)))
        view = await bench.look()
        assert _places(view) == [_later(5, minutes=0), _at(9)]
        assert len(bench.store.lists) == 2
        assert view.later_ms == (MINUTE + 3) * 60_000

    _run(check, page_keys=10)


def test_the_present_minute_is_looked_at_and_the_next_is_not() -> None:
    async def check(bench: Bench) -> None:
        bench.pair(_later(1, minutes=0))
        bench.pair(_later(1, minutes=1))
        view = await bench.look()
        assert _places(view) == [_later(1, minutes=0)]
        assert view.later_ms == (MINUTE + 1) * 60_000

    _run(check)


@pytest.mark.parametrize("page_keys", [1, 2, 3, 1000])
def test_the_next_minute_is_noted_whatever_the_page(page_keys: int) -> None:
    async def check(bench: Bench) -> None:
        for number in range(4):
            bench.put(LAYOUT.pack(_later(1, minutes=-1, number=number)))
        bench.put(LAYOUT.pack(_later(1, minutes=2)), LAYOUT.pack(_later(1, minutes=4)))
        assert (await bench.look()).later_ms == (MINUTE + 2) * 60_000

    _run(check, page_keys=page_keys)


def test_nothing_later_is_no_time() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.pack(_later(1, minutes=0)), LAYOUT.pack(_at(1)))
        assert (await bench.look()).later_ms is None

    _run(check)


def test_without_ready_only_tasks_are_looked_at() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.pack(_later(1, minutes=0)), LAYOUT.pack(_later(1, minutes=5)))
        bench.put(LAYOUT.pack(_at(1)))
        view = await bench.look(with_ready=False)
        assert _places(view) == [_at(1)]
        assert view.later_ms is None
        assert bench.store.lists == [LAYOUT.root]

    _run(check)


@pytest.mark.parametrize("page_keys", [1, 2, 3, 4, 5])
def test_a_pair_that_is_cut_between_pages_is_judged_whole(page_keys: int) -> None:
    async def check(bench: Bench) -> None:
        for number in range(6):
            bench.pair(_at(number))
        view = await bench.look()
        assert _places(view) == [_at(number) for number in range(6)]
        assert all(sight.seen and sight.seen.has_ledger for sight in view.sights)
        assert view.settled == []

    _run(check, page_keys=page_keys)


def test_empty_pages_are_not_the_end() -> None:
    async def check(bench: Bench) -> None:
        bench.store.with_empty_pages = True
        for number in range(6):
            bench.pair(_at(number))
        assert _places(await bench.look()) == [_at(number) for number in range(6)]

    _run(check, page_keys=3)


def test_a_look_breaks_off_when_it_has_enough() -> None:
    async def check(bench: Bench) -> None:
        for number in range(20):
            bench.put(LAYOUT.pack(_at(number)))
        view = await bench.look(wanted=4, with_ready=False)
        assert _places(view) == [_at(number) for number in range(4)]
        assert len(bench.store.lists) == 1

    _run(check, page_keys=5)


def test_only_what_is_of_use_counts_as_found() -> None:
    async def check(bench: Bench) -> None:
        for number in range(20):
            bench.put(LAYOUT.pack(_at(number, type="known" if number >= 12 else "unknown")))
        view = await bench.look(wanted=1, worth=lambda sight: int(sight.at.type == "known"))
        assert _at(12, type="known") in _places(view)

    _run(check, page_keys=5)


def test_nothing_starves_behind_what_is_always_found_first() -> None:
    """Nobody takes what is found, and still every pack is shown in every round of looks."""

    async def check(bench: Bench) -> None:
        ats = [_at(number) for number in range(23)]
        for at in ats:
            bench.put(LAYOUT.pack(at))
        for _ in range(2):
            shown: list[PackAt] = []
            for _ in range(30):
                shown += _places(await bench.look(wanted=3))
                if len(shown) >= len(ats):
                    break
            assert shown == ats

    _run(check, page_keys=5)


def test_what_was_cut_when_a_look_broke_off_is_shown_next() -> None:
    async def check(bench: Bench) -> None:
        for number in range(5):
            bench.pair(_at(number))
        shown: list[PackCandidate] = []
        for _ in range(5):
            shown += (await bench.look(wanted=1)).sights
        assert sorted(sight.at.slot for sight in shown[:5]) == list(range(5))
        assert all(sight.seen and sight.seen.has_ledger for sight in shown)

    _run(check, page_keys=3)


def test_the_ledger_of_a_pack_that_a_look_broke_off_behind_is_not_alone() -> None:
    """A pack is shown, and claimed before the next look goes on: it is there, and not settled."""

    async def check(bench: Bench) -> None:
        for number in range(3):
            bench.put(LAYOUT.pack(_at(number)))
        runs = ((0, 15),)
        assert _places(await bench.look(runs, wanted=1, with_ready=False)) == [_at(0)]
        bench.put(LAYOUT.ledger(_at(0)))
        view = await bench.look(runs, wanted=1, with_ready=False)
        assert view.settled == []
        assert _places(view) == [_at(1), _at(2)]

    _run(check, page_keys=2)


def test_a_look_is_bounded_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "PAGES_MAX", 3)

    async def check(bench: Bench) -> None:
        for number in range(20):
            bench.put(LAYOUT.pack(_at(number)))
        shown = _places(await bench.look(with_ready=False))
        assert len(bench.store.lists) == 3
        assert shown == [_at(number) for number in range(5)]
        for _ in range(3):
            shown += _places(await bench.look(with_ready=False))
        assert shown == [_at(number) for number in range(20)]

    _run(check, page_keys=2)


def test_nothing_starves_in_ready_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a look reads is due, and of no use to this worker."""
    monkeypatch.setattr(scanner, "PAGES_MAX", 3)

    async def check(bench: Bench) -> None:
        for number in range(30):
            bench.pair(_later(number, minutes=-1, number=number))
        wanted = _later(40, minutes=0)
        bench.put(LAYOUT.pack(wanted), LAYOUT.pack(_later(1, minutes=5)), LAYOUT.pack(_at(1)))
        shown: list[PackAt] = []
        later: set[int | None] = set()
        for _ in range(15):
            view = await bench.look(worth=lambda sight: int(sight.at == wanted))
            assert _at(1) in _places(view)
            assert view.settled == []
            shown += _places(view)
            later.add(view.later_ms)
        assert wanted in shown
        assert set(shown) > {_later(n, minutes=-1, number=n) for n in range(30)}
        assert later == {None, (MINUTE + 5) * 60_000}

    _run(check, page_keys=4)


def test_another_slot_to_go_on_from() -> None:
    async def check(bench: Bench) -> None:
        for number in range(12):
            bench.put(LAYOUT.pack(_at(number)))
        bench.scanner.go_on_from(ALL[0], 9)
        assert _at(0) in _places(await bench.look(wanted=1))
        bench.scanner.go_on_from(ALL[0], 9)
        assert _places(await bench.look()) == [_at(9), _at(10), _at(11)]
        assert len(_places(await bench.look())) == 12

    _run(check, page_keys=4)


def test_part_of_the_slots_is_looked_at_and_no_other() -> None:
    async def check(bench: Bench) -> None:
        for slot in (0x00F, 0x010, 0x01F, 0x020, 0x100, 0x7FF, 0x800, 0xFFF):
            bench.put(LAYOUT.pack(_at(slot)), LAYOUT.pack(_later(slot, minutes=0)))
            bench.put(LAYOUT.ledger(_at(slot, 1)), _pointer(_at(slot, place="key")))
        view = await bench.look([(0x010, 0x01F), (0x7FF, 0x7FF), (0x900, 0xFFF)])
        shown = sorted((at.place, at.slot) for at in _places(view))
        slots = [0x010, 0x01F, 0x7FF, 0xFFF]
        assert shown == [(place, s) for place in (str(MINUTE), "key", "now") for s in slots]
        assert [at.slot for at, _ in view.settled] == slots

    _run(check)


def test_neighbours_are_one_list_and_a_run_asks_only_for_its_own_keys() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.pack(_at(0x010)), LAYOUT.pack(_at(0x01F)), LAYOUT.pack(_at(0x300)))
        await bench.look([(0x010, 0x01F)], with_ready=False)
        assert bench.store.lists == [f"{LAYOUT.tasks}01"]
        bench.store.lists.clear()
        await bench.look([(0x010, 0x01F)])
        assert bench.store.lists == [LAYOUT.ready, f"{LAYOUT.tasks}01", LAYOUT.unhurried]

    _run(check)


def _urgent(slot: int, priority: int) -> PackAt:
    return replace(_at(slot), priority=priority)


def test_one_list_shows_what_is_urgent_first_and_what_is_unhurried_last() -> None:
    async def check(bench: Bench) -> None:
        packs = [_urgent(slot, priority) for slot, priority in enumerate((-9, -1, 0, 1, 9))]
        bench.put(*(LAYOUT.pack(at) for at in packs))
        view = await bench.look()
        assert [at.priority for at in _places(view)] == [9, 1, 0, -1, -9]
        assert len(bench.store.lists) == 1

    _run(check)


def test_what_is_unhurried_is_not_looked_at_while_there_is_enough_else() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.pack(_urgent(1, -3)), LAYOUT.pack(_at(2)))
        assert [at.priority for at in _places(await bench.look(wanted=1))] == [0]
        assert [at.priority for at in _places(await bench.look(wanted=2))] == [0, -3]

    _run(check)


def test_two_runs_that_one_list_has_shown_are_not_listed_again() -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.pack(_at(0x000)), LAYOUT.pack(_at(0x02F)), LAYOUT.pack(_at(0x0F0)))
        view = await bench.look([(0x000, 0x02F), (0x0F0, 0x0FF)], with_ready=False)
        assert [at.slot for at in _places(view)] == [0x000, 0x02F, 0x0F0]
        assert len(bench.store.lists) == 1

    _run(check)


def test_runs_break_off_and_go_on_each_for_itself() -> None:
    async def check(bench: Bench) -> None:
        runs = [(0, 15), (256, 271)]
        for slot in (*range(6), *range(256, 262)):
            bench.put(LAYOUT.pack(_at(slot)))
        shown = [
            [at.slot for at in _places(await bench.look(runs, wanted=1, with_ready=False))]
            for _ in range(3)
        ]
        assert shown == [[0, 256], [1, 257], [2, 258]]
        await bench.look(runs[:1], wanted=1, with_ready=False)
        # A run that was not looked at in between is forgotten, and begins again.
        again = _places(await bench.look(runs, wanted=1, with_ready=False))
        assert [at.slot for at in again] == [4, 5, 256]

    _run(check, page_keys=2)


def test_a_pointer_shows_a_pack_with_a_key() -> None:
    async def check(bench: Bench) -> None:
        at = _at(7, place="key")
        key = _pointer(at, minutes=-2, nonce="7" * 15)
        bench.put(key, LAYOUT.pack(at), LAYOUT.ledger(at), _pointer(at, minutes=2))
        view = await bench.look()
        (sight,) = view.sights
        assert (sight.at, sight.seen, sight.ledger) == (at, None, None)
        assert sight.pointer is not None
        assert (sight.pointer.key, sight.pointer.nonce) == (key, "7" * 15)
        assert sight.pointer.modified == EPOCH
        assert view.later_ms == (MINUTE + 2) * 60_000

    _run(check)


@pytest.mark.parametrize(
    "path",
    [
        "tasks/000/readme.txt",
        "tasks/00g/" + "0" * 24 + "~1~t",
        "tasks/000/" + "0" * 24 + "~0~t",
        "tasks/000/" + "0" * 24 + "~1~t/deeper",
        "tasks/000/" + "0" * 24 + "~1~t.ledger.ledger",
        f"ready/{MINUTE}/000/x@y",
        f"ready/{MINUTE}/000/{NONCE}@{'0' * 24}~1~t.ledger",
        "ready/12/x",
    ],
)
def test_what_is_not_ours_is_reported_and_in_nobodys_way(path: str) -> None:
    async def check(bench: Bench) -> None:
        bench.put(LAYOUT.root + path, LAYOUT.pack(_at(1)), LAYOUT.pack(_later(1, minutes=0)))
        view = await bench.look()
        assert view.foreign == [LAYOUT.root + path]
        assert sorted(at.place for at in _places(view)) == [str(MINUTE), "now"]
        assert view.settled == []

    _run(check)


@pytest.mark.parametrize("minute", ["²", "٣", "latest", "-1"])
def test_a_foreign_minute_does_not_stop_a_look(minute: str) -> None:
    """Some characters are digits to `str.isdigit` and no number to `int`."""

    async def check(bench: Bench) -> None:
        bench.put(f"{LAYOUT.ready}{minute}/x", LAYOUT.pack(_at(1)))
        view = await bench.look()
        assert _places(view) == [_at(1)]
        assert view.later_ms is None

    _run(check)


@pytest.mark.parametrize("minute", ["1000000000000", "1", "latest"])
def test_a_foreign_minute_does_not_hide_the_next_one(minute: str) -> None:
    async def check(bench: Bench) -> None:
        bench.put(f"{LAYOUT.ready}{minute}/x", LAYOUT.pack(_later(1, minutes=3)))
        assert (await bench.look()).later_ms == (MINUTE + 3) * 60_000

    _run(check)


@dataclass
class Content:
    """What is in a queue, in the view of one who sees it whole."""

    packs: dict[PackAt, bool] = field(default_factory=dict)
    """Whether the pack has a ledger."""
    ledgers: set[PackAt] = field(default_factory=set)
    pointers: set[str] = field(default_factory=set)

    def keys(self) -> list[str]:
        paired = [LAYOUT.ledger(at) for at, has_ledger in self.packs.items() if has_ledger]
        alone = [LAYOUT.ledger(at) for at in self.ledgers]
        return [*map(LAYOUT.pack, self.packs), *paired, *alone, *self.pointers]


_SLOTS = st.sampled_from([0, 1, 15, 16, 31, 255, 256, 4095])
_PLACES = st.sampled_from(["now", "now", str(MINUTE - 1), str(MINUTE), str(MINUTE + 1)])


@st.composite
def _contents(draw: st.DrawFn) -> Content:
    content = Content()
    for number in range(draw(st.integers(0, 14))):
        slot, place = draw(_SLOTS), draw(_PLACES)
        match draw(st.sampled_from(["pack", "pair", "ledger", "pointer"])):
            case "pack":
                content.packs[_at(slot, number, place=place)] = False
            case "pair":
                content.packs[_at(slot, number, place=place)] = True
            case "ledger":
                content.ledgers.add(_at(slot, number, place=place))
            case _:
                content.pointers.add(_pointer(_at(slot, number, place="key")))
    return content


def _is_shown(at: PackAt, runs: Sequence[Run]) -> bool:
    is_due = at.due_minute is None or at.due_minute <= MINUTE
    return is_due and any(first <= at.slot <= last for first, last in runs)


def _check_view(content: Content, runs: Sequence[Run], views: Sequence[ScanResult]) -> None:
    """Whether these looks have shown all there is, each pair whole, and nothing else."""
    sights = [sight for view in views for sight in view.sights]
    packs = {sight.at: sight.seen.has_ledger for sight in sights if sight.seen}
    pointers = {sight.pointer.key for sight in sights if sight.pointer}
    assert packs == {at: has for at, has in content.packs.items() if _is_shown(at, runs)}
    settled = {at for view in views for at, _ in view.settled}
    assert settled == {at for at in content.ledgers if _is_shown(at, runs)}
    pointed = {key: LAYOUT.read_pointer(key) for key in content.pointers}
    assert pointers == {key for key, at in pointed.items() if at and _is_shown(at[0], runs)}
    assert [key for view in views for key in view.foreign] == []


_RUNS = st.sampled_from(
    [ALL, ((0, 15),), ((16, 255),), ((0, 0), (31, 256)), ((1, 16), (255, 255), (4095, 4095))]
)


@given(content=_contents(), runs=_RUNS, page_keys=st.integers(1, 7))
@settings(max_examples=some(120), deadline=None)
def test_one_long_look_shows_what_is_there(
    content: Content, runs: Sequence[Run], page_keys: int
) -> None:
    async def check(bench: Bench) -> None:
        bench.put(*content.keys(), LAYOUT.config, LAYOUT.worker("w"), LAYOUT.shard_lease(1))
        view = await bench.look(runs)
        _check_view(content, runs, [view])
        assert len({sight.at for sight in view.sights if sight.seen}) == len(
            [sight for sight in view.sights if sight.seen]
        )

    _run(check, page_keys=page_keys)


@given(
    content=_contents(),
    runs=_RUNS,
    page_keys=st.integers(1, 7),
    wanted=st.integers(1, 4),
)
@settings(max_examples=some(120), deadline=None)
def test_many_short_looks_show_what_is_there(
    content: Content, runs: Sequence[Run], page_keys: int, wanted: int
) -> None:
    """What is found is of use once, as to a worker: so nothing of `ready/` stays in the way."""

    async def check(bench: Bench) -> None:
        bench.put(*content.keys())
        known: set[tuple[PackAt, str]] = set()

        def worth(sight: PackCandidate) -> int:
            name = (sight.at, sight.pointer.key if sight.pointer else "")
            is_new = name not in known
            known.add(name)
            return int(is_new)

        views = [await bench.look(runs, wanted=wanted, worth=worth) for _ in range(30)]
        _check_view(content, runs, views)

    _run(check, page_keys=page_keys)


def test_the_suffix_of_a_ledger_sorts_behind_its_pack() -> None:
    """What the judgement of cut pairs rests on."""
    assert LAYOUT.pack(_at(1)) + LEDGER == LAYOUT.ledger(_at(1))
    assert LAYOUT.pack(_at(1)) < LAYOUT.ledger(_at(1)) < LAYOUT.pack(_at(1, 1))
