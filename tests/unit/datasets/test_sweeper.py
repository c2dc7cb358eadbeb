"""What attempts left behind is removed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from penstock.datasets import sweeper
from penstock.datasets.layout import attempt_name
from penstock.datasets.projection import CurrentPart, CurrentPartition
from penstock.datasets.sweeper import Sweeper, Swept, Verdict
from penstock.kernel.document_format import encode
from penstock.kernel.errors import Refused, Unavailable
from penstock.store.base import Delimiter, Page, Version, Wrapper
from penstock.store.memory import MemoryBucket, MemoryStore
from penstock.testing.virtual import World, simulate

GRACE = 100.0
_lease_tokens = itertools.count()


def name(task_id: int) -> str:
    return attempt_name(task_id=task_id, attempt=1, lease_token=str(next(_lease_tokens)))


class Words:
    """A book that says what it was told to, and remembers what it was asked."""

    def __init__(self, *gone: str) -> None:
        self.gone = set(gone)
        self.asked: list[str] = []

    async def verdicts(self, places: Sequence[str]) -> Mapping[str, Verdict]:
        self.asked += places
        return {
            each: Verdict.GONE if each in self.gone else Verdict.KEEP
            for each in places
            if "silent" not in each
        }


class Shed:
    """A bucket with the files of attempts."""

    def __init__(self, world: World) -> None:
        self.clock = world.clock()
        self.bucket = MemoryBucket(self.clock)
        self.store = MemoryStore(self.bucket, clock=self.clock)

    async def write(self, place: str, *names: str) -> None:
        base = "datasets" if "/" in place else "scratch"
        for each in names or ("part.parquet", "manifest.json"):
            await self.store.put(f"{base}/{place}/{each}", b"12345")

    @property
    def keys(self) -> set[str]:
        return set(self.bucket.objects)


def test_what_is_gone_goes_and_all_else_stays() -> None:
    gone, kept, silent = (f"d/g/{p}/{name(1)}" for p in ("p", "p", "silent"))
    scratch, busy = name(2), name(3)
    foreign = {
        "datasets/readme.txt",
        "datasets/d/current.json",
        "datasets/d/g/p/somebody/else.parquet",
        f"datasets/d/g/p/{name(9)}",
        f"datasets/d/g/{name(9)}/x",
        "scratch/notes.txt",
        "scratch/somebody/x",
        f"queues/{name(9)}/x",
    }

    async def main(world: World) -> None:
        shed = Shed(world)
        for place in (gone, kept, silent, scratch, busy):
            await shed.write(place)
        await shed.write(gone, "_temporary/0/x", ".crc")
        for key in foreign:
            await shed.store.put(key, b"")
        await shed.clock.sleep(GRACE + 1)
        book = Words(gone, scratch, silent)
        swept = await Sweeper(shed.store, book, grace_seconds=GRACE).round()
        assert swept == Swept(attempts=2, files=6, bytes=30, is_round_over=True)
        assert foreign <= shed.keys
        assert {key.rpartition("/")[0] for key in shed.keys - foreign} == {
            f"datasets/{kept}",
            f"datasets/{silent}",
            f"scratch/{busy}",
        }
        assert sorted(book.asked) == sorted((gone, kept, silent, scratch, busy))

    simulate(main, seed=1)


def current(*places: str) -> bytes:
    parts = tuple(CurrentPart(location=f"s3://b/datasets/{each}") for each in places)
    return encode(
        CurrentPartition(dataset="d", generation="g", partition_key="p", revision=3, parts=parts)
    )


def test_what_readers_of_the_bucket_are_sent_to_stays_whatever_the_book_says() -> None:
    named, left, scratch = f"d/g/p/{name(1)}", f"d/g/p/{name(2)}", name(1)

    async def main(world: World) -> None:
        shed = Shed(world)
        for place in (named, left, scratch):
            await shed.write(place)
        await shed.store.put("datasets/d/g/p/current.json", current(named))
        await shed.clock.sleep(GRACE + 1)
        sweeper = Sweeper(shed.store, Words(named, left, scratch), grace_seconds=GRACE)
        assert (await sweeper.round()).attempts == 2
        assert {key.rpartition("/")[0] for key in shed.keys} == {
            f"datasets/{named}",
            "datasets/d/g/p",
        }
        # One that cannot be read may name anything.
        await shed.store.put("datasets/d/g/p/current.json", b"{}")
        assert (await sweeper.round()).attempts == 0
        await shed.store.put("datasets/d/g/p/current.json", current(left))
        assert (await sweeper.round()).attempts == 1
        assert shed.keys == {"datasets/d/g/p/current.json"}

    simulate(main, seed=1)


def test_a_folder_is_left_alone_while_anything_in_it_is_young() -> None:
    place = f"d/g/p/{name(1)}"

    async def main(world: World) -> None:
        shed = Shed(world)
        sweeper = Sweeper(shed.store, Words(place), grace_seconds=GRACE)
        await shed.write(place)
        await shed.clock.sleep(GRACE)
        await shed.write(place, "late")
        assert (await sweeper.round()).files == 0
        await shed.clock.sleep(GRACE - 1)
        assert (await sweeper.round()).files == 0
        await shed.clock.sleep(2)
        assert (await sweeper.round()).files == 3
        await shed.write(place, "again")
        await shed.clock.sleep(GRACE + 1)
        assert (await sweeper.round()).files == 1
        assert shed.keys == set()

    simulate(main, seed=1)


def test_one_dataset_is_swept_alone() -> None:
    ours, theirs, scratch = f"d/g/p/{name(1)}", f"d2/g/p/{name(1)}", name(1)

    async def main(world: World) -> None:
        shed = Shed(world)
        for place in (ours, theirs, scratch):
            await shed.write(place)
        await shed.clock.sleep(GRACE + 1)
        book = Words(ours, theirs, scratch)
        sweeper = Sweeper(shed.store, book, grace_seconds=GRACE, dataset="d")
        assert (await sweeper.round()).attempts == 1
        assert book.asked == [ours]

    simulate(main, seed=1)


class Small(Wrapper):
    """A store with pages of three keys, some of which are empty and not the last."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.lists = 0

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = 1000,
        cursor: str | None = None,
    ) -> Page:
        self.lists += 1
        if cursor is None:
            return Page((), (), cursor=start_after)
        return await self.inner.list(prefix, start_after=start_after, limit=3, cursor=cursor)


@pytest.mark.parametrize("files", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("pages_max", [1, 2, 20])
def test_folders_are_whole_however_pages_cut_them(
    files: int, pages_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "PAGES_MAX", pages_max)
    places = [f"d/g/p{number}/{name(1)}" for number in range(7)]

    async def main(world: World) -> None:
        shed = Shed(world)
        for place in places:
            await shed.write(place, *(f"{number:02}" for number in range(files)))
        await shed.clock.sleep(GRACE + 1)
        # The last file of each second folder is young.
        for place in places[::2]:
            await shed.write(place, f"{files - 1:02}")
        sweeper = Sweeper(Small(shed.store), Words(*places), grace_seconds=GRACE)
        swept = await sweeper.round()
        assert (swept.attempts, swept.files) == (3, 3 * files)
        await shed.clock.sleep(GRACE + 1)
        assert (await sweeper.round()).attempts == 4
        assert shed.keys == set()

    simulate(main, seed=1)


def test_a_turn_is_bounded_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "PAGES_MAX", 2)
    places = [f"d/g/p{number}/{name(1)}" for number in range(9)]

    async def main(world: World) -> None:
        shed = Shed(world)
        for place in places:
            await shed.write(place)
        await shed.clock.sleep(GRACE + 1)
        store = Small(shed.store)
        sweeper = Sweeper(store, Words(*places), grace_seconds=GRACE)
        turns = []
        for _ in range(20):
            before = store.lists
            turns.append(await sweeper.turn())
            assert store.lists - before <= 8
            if turns[-1].is_round_over:
                break
        assert len(turns) > 2
        assert sum(each.attempts for each in turns) == 9

    simulate(main, seed=1)


def test_a_large_folder_goes_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "FOLDER_FILES_MAX", 4)
    place = f"d/g/p/{name(1)}"

    async def main(world: World) -> None:
        shed = Shed(world)
        await shed.write(place, *(str(number) for number in range(9)))
        await shed.clock.sleep(GRACE + 1)
        await shed.write(place, "8")
        sweeper = Sweeper(Small(shed.store), Words(place), grace_seconds=GRACE)
        # The young one is beyond what is removed at once, and still counts.
        assert (await sweeper.round()).files == 0
        await shed.clock.sleep(GRACE + 1)
        assert [(await sweeper.round()).files for _ in range(4)] == [4, 4, 1, 0]

    simulate(main, seed=1)


class Stubborn(Wrapper):
    """A store that does not let some objects go, and does not list for a while."""

    is_silent = False

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        if "p1" in key:
            raise Refused("Not allowed.", key=key)
        await self.inner.delete(key, version=version)

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = 1000,
        cursor: str | None = None,
    ) -> Page:
        if self.is_silent:
            raise Unavailable("Not now.")
        return await self.inner.list(prefix, start_after=start_after, cursor=cursor)


def test_what_cannot_be_removed_holds_nothing_up() -> None:
    places = [f"d/g/p{number}/{name(1)}" for number in range(3)]

    async def main(world: World) -> None:
        shed = Shed(world)
        for place in places:
            await shed.write(place)
        await shed.clock.sleep(GRACE + 1)
        store = Stubborn(shed.store)
        sweeper = Sweeper(store, Words(*places), grace_seconds=GRACE)
        store.is_silent = True
        with pytest.raises(Unavailable):
            await sweeper.turn()
        store.is_silent = False
        swept = await sweeper.turn()
        assert swept == Swept(attempts=2, files=4, bytes=20, left=2, is_round_over=True)

    simulate(main, seed=1)
