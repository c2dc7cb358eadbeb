"""The pipeline of examples/flights: what it publishes, also if something dies on the way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cli.demo import pipeline_folder
from penstock.cli.demo.run import (
    Chaos,
    Display,
    Pipeline,
    PipelineRun,
    PublishedPartition,
    checksums,
    stages_of,
)
from penstock.kernel.clock import SystemClock
from tests.e2e.command import penstock

DAYS = 31
DEADLY_DAYS = 5
WHOLE = ("airlines", "airports", "planes")
# What was let through is what was checked.
MADE_FROM = {"carrier_report": "carrier_months", "airport_report": "airport_months"}


def _run_pipeline(folder: Path) -> PipelineRun:
    display = Display(stages_of(DAYS), is_live=False)
    chaos = Chaos(told=display.say) if Path("/proc/self/stat").exists() else None

    async def main() -> PipelineRun:
        async with Pipeline(folder, pipeline_folder(), clock=SystemClock()) as pipeline:
            return await pipeline.run(DAYS, display, chaos)

    run = asyncio.run(main())
    assert chaos is None or not chaos.deaths, "something was not killed"
    return run


def _run_plain(folder: Path) -> None:
    script = pipeline_folder() / "plain.py"
    done = subprocess.run(
        [sys.executable, script, "--days", str(DAYS), "--to", folder],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _rows(paths: Sequence[Path]) -> tuple[list[tuple[str, str]], list[str]]:
    """The columns of some Parquet files, and their rows in an order of their own."""
    table = pa.concat_tables([pq.read_table(each, partitioning=None) for each in paths])
    columns = sorted((each.name, str(each.type)) for each in table.schema)
    ordered = table.select([name for name, _ in columns]).to_pylist()
    return columns, sorted(map(repr, ordered))


def _plain_files(folder: Path, dataset: str, partition: PublishedPartition) -> list[Path]:
    name = MADE_FROM.get(dataset, dataset)
    of = folder / name if name in WHOLE else folder / name / f"_partition={partition.key}"
    return sorted(of.glob("*.parquet"))


@pytest.mark.timeout(600)
def test_a_pipeline_that_dies_publishes_what_a_plain_script_computes(
    tmp_path: Path,
) -> None:
    run = _run_pipeline(tmp_path / "pipeline")
    _run_plain(tmp_path / "plain")
    assert len(run.datasets["observed"].partitions) == DAYS
    assert run.datasets["raw_flights"].rows == 27_004
    for name, dataset in run.datasets.items():
        for partition in dataset.partitions:
            theirs = _plain_files(tmp_path / "plain", name, partition)
            assert theirs, (name, partition.key)
            assert _rows(partition.paths) == _rows(theirs), (name, partition.key)
            assert partition.revision == 1
    # The files are what their manifests say.
    assert len(checksums(run.datasets)) == len(WHOLE) + 6 * DAYS + 4


@pytest.mark.proof(meanwhile="test_a_pipeline_that_dies_publishes_what_a_plain_script_computes")
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
def test_the_demo_of_deaths_says_that_they_change_no_byte() -> None:
    ran = penstock("demo", "--chaos", "--days", str(DEADLY_DAYS), seconds=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the worker is dead" in ran.stdout
    assert "the dispatcher is dead" in ran.stdout
    # The register's three, and six of each day.
    count = len(WHOLE) + 6 * DEADLY_DAYS
    assert f"The same {count} partitions are published as without the deaths" in ran.stdout
    assert f"{count} of {count} partitions were published exactly once" in ran.stdout
    assert "What airport_days says" in ran.stdout


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    ran = penstock("demo", "--data", str(tmp_path))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "is not empty" in ran.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]
