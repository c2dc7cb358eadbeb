"""What `penstock demo` says and when it kills, without running anything."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.cli.demo import finding, pipeline_folder
from penstock.cli.demo.run import (
    Chaos,
    Dataset,
    Death,
    Display,
    PublishedPartition,
    Stage,
    checksums,
    differences,
    stages_of,
    whole_months,
)
from penstock.datasets.manifest import File
from penstock.kernel.errors import PenstockError

AT = datetime(2013, 1, 1, tzinfo=UTC)


def _row(origin: str, hour: int, *, wet: bool, flights: int, late: int) -> dict[str, object]:
    return {
        "origin": origin,
        "hour": hour,
        "is_wet": wet,
        "flights": flights + 1,
        "cancelled": 1,
        "late": late,
    }


def test_the_finding_names_the_best_and_the_worst_hour_and_the_weather() -> None:
    rows = [
        _row("EWR", 19, wet=True, flights=50, late=40),
        _row("EWR", 19, wet=False, flights=50, late=20),
        _row("LGA", 6, wet=False, flights=100, late=5),
        _row("JFK", 23, wet=False, flights=2, late=2),
    ]
    said = " ".join(finding(rows, days=10))
    assert "leave Newark between 19:00 and 20:00, 60 % left at least 15 minutes late;" in said
    assert "leave LaGuardia between 6:00 and 7:00, 5 % did" in said
    assert "In rain or snow it was 80 % of all flights, in dry hours 18 %." in said
    # The night flights are too few to say anything, unless there was only one day.
    assert "JFK" not in said
    assert finding(rows[3:], days=10) == []


def test_what_is_expected_follows_from_the_days() -> None:
    assert whole_months(30) == []
    assert whole_months(31) == ["2013-01"]
    assert whole_months(365)[-1] == "2013-12"
    assert len(whole_months(365)) == 12
    expected = {each.dataset: each.partitions for each in stages_of(59)}
    assert (expected["planes"], expected["observed"], expected["carrier_report"]) == (1, 59, 2)
    assert "carrier_report" not in {each.dataset for each in stages_of(30)}


def test_every_stage_is_in_the_pipeline() -> None:
    text = (pipeline_folder() / "flights.yaml").read_text()
    for each in stages_of(31):
        assert re.search(rf"^  {each.job}:$", text, re.MULTILINE), each
        assert re.search(rf"outputs: \[.*\b{each.dataset}\b.*\]", text), each


def test_a_stage_is_told_once_when_it_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display([Stage(dataset="flights", job="clean", partitions=2)], is_live=False)
    for done in (0, 1, 2, 2):
        display.show({"flights": done}, {"clean": 1}, seconds=done * 10.0)
    display.say("and that was all")
    assert (
        capsys.readouterr().out == "   20.0 s  flights            2 by clean\n  and that was all\n"
    )


def test_a_picture_takes_the_place_of_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display([Stage(dataset="flights", job="clean", partitions=4)], is_live=True)
    display.show({}, {"clean": 3}, seconds=1)
    first = capsys.readouterr().out
    assert "0 of 4  3 running" in first
    assert "\x1b" not in first
    display.show({"flights": 2}, {}, seconds=2)
    second = capsys.readouterr().out
    assert second.startswith("\x1b[2A\x1b[J")
    assert "████████████············    2 of 4\n" in second
    display.end()
    display.say("over")
    assert capsys.readouterr().out == "  over\n"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line ends as that of a worker does."""
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "-m", "penstock", "worker"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_what_is_due_is_killed_and_nothing_else(victim: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    chaos = Chaos(said.append, [Death("worker", 0.5), Death("no-such-verb", 0.6)])
    chaos.look(share_done=0.4, is_running=True)
    chaos.look(share_done=0.5, is_running=False)
    assert (victim.poll(), said) == (None, [])
    chaos.look(share_done=0.5, is_running=True)
    assert victim.wait(30) == -9
    assert said == [f"kill -9 {victim.pid}: the worker is dead, and is started again"]
    # What is not there cannot be killed, and stays to be killed.
    chaos.look(share_done=1.0, is_running=True)
    assert [each.process for each in chaos.deaths] == ["no-such-verb"]


def _dataset(folder: Path, key: str, body: bytes, *, sha256: str) -> dict[str, Dataset]:
    (folder / key).mkdir(parents=True)
    (folder / key / "part-0.parquet").write_bytes(body)
    file = File(name="part-0.parquet", rows=1, bytes=len(body), sha256=sha256)
    made = PublishedPartition(key, folder / key, (file,), 1, AT)
    return {"flights": Dataset("flights", (made,))}


def test_results_are_compared_by_the_bytes_themselves(tmp_path: Path) -> None:
    sha256 = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    one = checksums(_dataset(tmp_path / "one", "2013-01-01", b"a", sha256=sha256))
    two = checksums(_dataset(tmp_path / "two", "2013-01-01", b"a", sha256=sha256))
    late = checksums(_dataset(tmp_path / "late", "2013-01-02", b"a", sha256=sha256))
    assert one == {("flights", "2013-01-01"): (sha256,)}
    assert differences(one, two) == []
    assert differences(one, late) == ["flights 2013-01-01", "flights 2013-01-02"]
    changed = _dataset(tmp_path / "changed", "2013-01-01", b"b", sha256=sha256)
    with pytest.raises(PenstockError, match="not the file that its manifest names"):
        checksums(changed)
