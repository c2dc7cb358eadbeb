"""Files that were fetched to this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.datasets.cache import Cache, WantedFile
from penstock.datasets.transfer import Sent, Transfer
from penstock.kernel.errors import Damaged, NotFound


class Bench:
    """A cache of a folder, and what was fetched into it."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = tmp_path / "source"
        self.folder = tmp_path / "cache"
        self.fetched: list[str] = []
        fetch = Transfer.fetch

        def counted(
            transfer: Transfer, location: str, to: Path, *, sha256: str | None = None
        ) -> Sent:
            self.fetched.append(location.rpartition("/")[2])
            return fetch(transfer, location, to, sha256=sha256)

        monkeypatch.setattr(Transfer, "fetch", counted)
        self._transfer = Transfer("file:///unused?fsync=off")
        self._ages = 0

    def cache(self, *, bytes_max: int = 1000) -> Cache:
        return Cache(self.folder, self._transfer, bytes_max=bytes_max)

    def wanted(self, name: str, *, size: int = 100) -> WantedFile:
        location = f"{self.source.as_uri()}/{name}"
        sent = self._transfer.write_bytes(location, (name * size).encode()[:size])
        return WantedFile(location=location, bytes=size, sha256=sent.sha256)

    def names(self) -> set[str]:
        """What is there, by the first letter in it."""
        return {path.read_text()[0] for path in self.folder.glob("files-*/*.parquet")}

    def used(self, cache: Cache, wanted: WantedFile) -> None:
        """Use a file, later than all that were used so."""
        with cache.holding([wanted]) as (path,):
            pass
        self._ages += 1
        os.utime(path, (self._ages, self._ages))

    def pins(self) -> int:
        return len(list((self.folder / "pins").iterdir()))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_file_is_fetched_once(bench: Bench) -> None:
    one, two = bench.wanted("a"), bench.wanted("b")
    with bench.cache().holding([one, two, one]) as paths:
        assert [path.read_text()[0] for path in paths] == ["a", "b", "a"]
        assert all(path.suffix == ".parquet" for path in paths)
        assert bench.pins() == 1
    assert bench.pins() == 0
    with bench.cache().holding([two]):
        pass
    assert sorted(bench.fetched) == ["a", "b"]


def test_equal_files_are_one_wherever_they_lie(bench: Bench) -> None:
    one = bench.wanted("a")
    other = WantedFile(location="file:///nowhere", bytes=one.bytes, sha256=one.sha256)
    with bench.cache().holding([one]) as first, bench.cache().holding([other]) as second:
        assert first == second


def test_what_was_used_longest_ago_goes_first(bench: Bench) -> None:
    cache = bench.cache(bytes_max=300)
    one, two, three, four = (bench.wanted(name) for name in "abcd")
    for each in (one, two, three, one):
        bench.used(cache, each)
    bench.used(cache, four)
    assert bench.names() == {"a", "c", "d"}


def test_room_is_made_for_all_that_come_together(bench: Bench) -> None:
    cache = bench.cache(bytes_max=300)
    for name in "abc":
        bench.used(cache, bench.wanted(name))
    with cache.holding([bench.wanted("d"), bench.wanted("e")]):
        assert bench.names() == {"c", "d", "e"}


def test_what_is_held_stays_also_beyond_the_bound(bench: Bench) -> None:
    cache, other = bench.cache(bytes_max=150), bench.cache(bytes_max=150)
    one, two, three = (bench.wanted(name) for name in "abc")
    with cache.holding([one]) as (path,):
        os.utime(path, (0, 0))
        with other.holding([two]):
            assert bench.names() == {"a", "b"}
        with other.holding([three]):
            assert bench.names() == {"a", "c"}
    bench.used(cache, two)
    assert bench.names() == {"b"}


def test_the_pin_of_a_process_that_died_holds_nothing(bench: Bench) -> None:
    cache = bench.cache(bytes_max=100)
    one, two = bench.wanted("a"), bench.wanted("b")
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from penstock.datasets.cache import Cache, WantedFile\n"
        "from penstock.datasets.transfer import Transfer\n"
        "folder, location, sha256 = sys.argv[1:]\n"
        "cache = Cache(Path(folder), Transfer('file:///x'), bytes_max=100)\n"
        "with cache.holding([WantedFile(location=location, bytes=100, sha256=sha256)]):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", program, str(bench.folder), one.location, one.sha256 or ""]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with cache.holding([two]):
            assert bench.names() == {"a", "b"}
        holder.kill()
        holder.wait(timeout=60)
    assert bench.pins() == 1
    with cache.holding([bench.wanted("c")]):
        assert bench.names() == {"c"}
        assert bench.pins() == 1


def test_a_file_of_another_size_is_fetched_again(bench: Bench) -> None:
    one = bench.wanted("a")
    with bench.cache().holding([one]) as (path,):
        path.write_text("torn")
    with bench.cache().holding([one]) as (path,):
        assert path.stat().st_size == 100
    assert bench.fetched == ["a", "a"]


def test_what_another_boot_fetched_is_not_used(bench: Bench) -> None:
    one = bench.wanted("a")
    with bench.cache().holding([one]) as (path,):
        pass
    old = bench.folder / "files-another-boot"
    path.parent.rename(old)
    with bench.cache().holding([one]):
        assert not old.exists()
    assert bench.fetched == ["a", "a"]


def test_what_cannot_be_had_leaves_no_pin(bench: Bench) -> None:
    one = bench.wanted("a")
    wrong = WantedFile(location=one.location, bytes=100, sha256="0" * 64)
    gone = WantedFile(location=f"{bench.source.as_uri()}/none", bytes=1)
    for wanted, problem in ((wrong, Damaged), (gone, NotFound)):
        with pytest.raises(problem), bench.cache().holding([one, wanted]):
            raise AssertionError("never held")
    assert bench.pins() == 0
    assert bench.names() <= {"a"}


def test_what_has_no_sum_is_fetched_by_each_who_holds_it(bench: Bench) -> None:
    """Somebody may have written another file there, of the same size."""
    one = bench.wanted("a")
    loose = WantedFile(location=one.location, bytes=100)
    with bench.cache().holding([one, loose, loose]) as paths:
        assert len(set(paths)) == 2
        Path(one.location.removeprefix("file://")).write_text("b" * 100)
        with bench.cache().holding([loose]) as (other,):
            assert other.read_text() == "b" * 100
            assert [path.read_text()[0] for path in paths] == ["a", "a", "a"]
        assert not other.exists()
    assert bench.names() == {"a"}
    assert bench.fetched == ["a", "a", "a"]


def test_old_leftovers_of_a_fetch_are_removed(bench: Bench) -> None:
    cache = bench.cache()
    with cache.holding([bench.wanted("a")]) as (path,):
        pass
    old, young = path.parent / ".old", path.parent / ".young"
    old.write_text("")
    young.write_text("")
    os.utime(old, (0, 0))
    with cache.holding([bench.wanted("b")]):
        assert not old.exists()
        assert young.exists()


def test_nothing_is_held_for_nothing(bench: Bench) -> None:
    with bench.cache().holding([]) as paths:
        assert paths == []
