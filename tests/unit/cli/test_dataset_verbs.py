"""The verbs on datasets as files: with Parquet in a folder, and a scripted dispatcher."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.datasets import manifest as manifests
from penstock.datasets.schema import Column
from penstock.protocol.datasets import (
    ColumnAnswer,
    CompactAnswer,
    DatasetDetail,
    GenerationDetail,
    HotTableAnswer,
    KeepAnswer,
    MaintainAnswer,
    MaintainedAnswer,
    RebuildTableAnswer,
    RefreshAnswer,
    SnapshotAnswer,
    SnapshotPart,
    SweepAnswer,
)
from tests.unit.cli.test_dispatcher_verbs import User, user
from tests.unit.dispatcher.client.scripted import NOW, problem

__all__ = ["user"]

SNAPSHOT = "GET /v1/datasets/sales/snapshot"


def made(folder: Path, *, partition: str, values: list[int]) -> SnapshotPart:
    """A published partition in a folder."""
    folder = folder / partition
    folder.mkdir()
    files = []
    if values:
        path = folder / "part-0.parquet"
        table = pa.table({"id": values, "day": [partition] * len(values)})
        pq.write_table(table, path)
        body = path.read_bytes()
        files.append(
            manifests.File(
                name=path.name, rows=len(values), bytes=len(body), sha256=manifests.digest(body)
            )
        )
    body = manifests.encode(
        manifests.Manifest(
            dataset="sales",
            generation="g1",
            job="clean",
            task_id=1,
            attempt=1,
            rows=len(values),
            bytes=sum(each.bytes for each in files),
            columns=(Column("id", "bigint"), Column("day", "string")),
            files=tuple(files),
        )
    )
    (folder / "manifest.json").write_bytes(body)
    return SnapshotPart(
        location=folder.as_uri(),
        partition_key=partition,
        revision=1,
        manifest=manifests.digest(body),
        rows=len(values),
    )


@pytest.fixture
def sales(user: User, tmp_path: Path) -> Path:
    """Three partitions, one of them empty."""
    parts = [
        made(tmp_path, partition="p", values=[1, 2]),
        made(tmp_path, partition="q", values=[]),
        made(tmp_path, partition="r", values=[3]),
    ]
    columns = [ColumnAnswer(name="id", type="bigint"), ColumnAnswer(name="day", type="string")]
    answer = SnapshotAnswer(dataset="sales", generation="g1", columns=columns, parts=parts)
    user.on(SNAPSHOT, *[answer] * 5)
    return tmp_path


def test_others_read_the_files_of_a_snapshot(user: User, sales: Path) -> None:
    named = user.said("dataset files sales").splitlines()
    assert named == [f"{(sales / key).as_uri()}/part-0.parquet" for key in "pr"]
    paths = [each.removeprefix("file://") for each in named]
    with duckdb.connect() as database:
        counted = f"SELECT sum(id), count(*) FROM read_parquet({paths})"
        found = database.execute(counted).fetchone()
    assert found == (6, 3)
    frame = pd.concat([pd.read_parquet(each) for each in paths])
    assert sorted(frame["id"]) == [1, 2, 3]
    shown = user.json("dataset files sales")
    assert [each["partition_key"] for each in shown["parts"]] == ["p", "q", "r"]
    assert shown["columns"][0] == {"name": "id", "type": "bigint", "is_nullable": True}
    (file,) = shown["parts"][0]["files"]
    assert (file["rows"], len(file["sha256"])) == (2, 64)
    assert shown["parts"][1]["files"] == []


def test_some_rows_are_shown(user: User, sales: Path) -> None:
    assert user.said("dataset preview sales --rows 3").splitlines() == [
        "_partition  id  day",
        "p           1   p",
        "p           2   p",
        "r           3   r",
    ]
    lines = user.said("dataset preview sales --rows 1 --json").splitlines()
    assert [json.loads(each) for each in lines] == [{"_partition": "p", "id": 1, "day": "p"}]
    (sales / "p" / "manifest.json").write_bytes(b"{}")
    ran = user.types("dataset preview sales")
    assert ran.returncode == 1
    assert "is not the one that was published" in ran.stderr


def test_damage_is_found(user: User, sales: Path) -> None:
    said = user.said("dataset verify sales")
    assert said.startswith("2 files in 3 parts, ")
    assert said.endswith(": all as they were written.\n")
    path = sales / "r" / "part-0.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (sales / "p" / "part-0.parquet").unlink()
    ran = user.types("dataset verify sales")
    assert ran.returncode == 1
    assert "2 damaged" in ran.stdout
    assert f"{path.as_uri()} is not what its manifest says" in ran.stderr
    shown = user.json("dataset verify sales", code=1)
    assert [each["location"] for each in shown["damaged"]] == [
        f"{(sales / key).as_uri()}/part-0.parquet" for key in "pr"
    ]


def test_every_manifest_that_is_gone_is_named(user: User, sales: Path) -> None:
    for key in "pr":
        (sales / key / "manifest.json").unlink()
    ran = user.types("dataset verify sales")
    assert ran.returncode == 1
    assert "2 damaged" in ran.stdout
    for key in "pr":
        assert f"{(sales / key).as_uri()}/manifest.json is not there" in ran.stderr
    shown = user.json("dataset verify sales", code=1)
    assert (shown["parts"], len(shown["damaged"])) == (3, 2)


@pytest.fixture
def reports(user: User, tmp_path: Path) -> Path:
    """Two partitions of a job that writes what it likes: one has a text, the other nothing."""
    parts = []
    for key in "pq":
        (tmp_path / key).mkdir()
        location = (tmp_path / key).as_uri()
        parts.append(SnapshotPart(location=location, partition_key=key, revision=1, manifest=None))
    (tmp_path / "p" / "report.md").write_text("# Sales\n\x1b[31mall\twell\n")
    (tmp_path / "p" / "_SUCCESS").write_text("")
    answer = SnapshotAnswer(dataset="sales", generation="g1", columns=[], parts=parts)
    user.on(SNAPSHOT, *[answer] * 3)
    return tmp_path


def test_what_has_no_manifest_is_not_said_to_be_whole(user: User, reports: Path) -> None:
    ran = user.types("dataset verify sales")
    assert ran.returncode == 1
    assert ran.stdout == "2 parts have no manifest: nothing could be compared.\n"
    shown = user.json("dataset verify sales", code=1)
    assert (shown["parts"], shown["unlisted"], shown["compared"]) == (2, 2, 0)


def test_of_what_has_no_manifest_the_files_that_are_there_are_listed(
    user: User, reports: Path
) -> None:
    ran = user.types("dataset files sales")
    assert ran.stdout == f"{(reports / 'p').as_uri()}/report.md\n"
    assert ran.stderr == f"note: there is no manifest and no file in {(reports / 'q').as_uri()}\n"
    shown = user.json("dataset files sales")
    assert [len(each["files"]) for each in shown["parts"]] == [1, 0]


def test_of_what_has_no_rows_the_first_lines_are_shown(user: User, reports: Path) -> None:
    ran = user.types("dataset preview sales --rows 2")
    assert ran.stdout == "# Sales\n[31mall    well\n"
    assert ran.stderr == f"The first lines of {(reports / 'p').as_uri()}/report.md:\n"
    first = json.loads(user.said("dataset preview sales --rows 1 --json"))
    assert (first["_partition"], first["line"]) == ("p", "# Sales")
    (reports / "p" / "report.md").unlink()
    ran = user.types("dataset preview sales")
    assert (
        ran.stderr == f"It has no manifest, and there are no files in {(reports / 'p').as_uri()}.\n"
    )


def test_files_are_rewritten_when_asked_for(user: User) -> None:
    path = "POST /v1/datasets/sales/maintain"
    user.on(path, MaintainAnswer(tasks=[7, 8], is_all=False))
    said = user.said("dataset maintain sales")
    assert said == "Made 2 tasks: tasks 7 to 8; there is more, run it again when they have ended.\n"
    user.on(path, MaintainAnswer(tasks=[9], is_all=True))
    assert user.said("dataset maintain sales --partition p") == "Made 1 task: task 9.\n"
    assert user.bodies == [{}, {"partition_key": "p"}]
    user.on(path, MaintainAnswer(tasks=[], is_all=True))
    assert "Nothing to rewrite" in user.said("dataset maintain sales")


def test_refreshing_goes_on_until_it_is_over(user: User) -> None:
    more = RefreshAnswer(looked=200, written=0, after="g/p")
    last = RefreshAnswer(looked=3, written=2, after=None)
    user.on("POST /v1/datasets/sales/refresh", more, last)
    said = user.said("dataset refresh sales")
    assert said == "203 partitions compared: 2 files said something else, and now do not.\n"
    assert user.bodies == [{}, {"after": "g/p"}]
    user.on("POST /v1/datasets/sales/refresh", RefreshAnswer(looked=1, written=0, after=None))
    said = user.said("dataset refresh sales")
    assert said == "1 partition compared: all up to date.\n"


def test_a_table_is_loaded_again(user: User) -> None:
    user.on("POST /v1/datasets/sales/rebuild-table", RebuildTableAnswer(partitions=2))
    said = user.said("dataset rebuild-table sales")
    assert said == "2 partitions to load; 'penstock status' says when.\n"
    user.on("POST /v1/datasets/sales/rebuild-table", problem(409, title="There is no table."))
    assert user.types("dataset rebuild-table sales").returncode == 1


def test_a_partition_that_is_not_there(user: User) -> None:
    user.on(SNAPSHOT, problem(404, title="The dataset 'sales' has no partition 'x'."))
    ran = user.types("dataset files sales --partition x")
    assert ran.returncode == 1
    assert ran.stderr.startswith("penstock: The dataset 'sales' has no partition 'x'.")
    assert user.dispatcher.heard[-1].query == "partition_key=x"


def generation(version: str, state: str, **fields: object) -> GenerationDetail:
    given = {
        "is_dropped": False,
        "partitions": 3,
        "files": 4,
        "rows": 5000,
        "bytes": 2048,
        "unknown": 0,
        "columns": [],
        **fields,
    }
    return GenerationDetail(
        version=version,
        state=state,
        created_at=NOW,
        changed_at=NOW,
        **given,  # type: ignore[arg-type]  # each is of its own type
    )


def test_a_dataset_is_shown(user: User) -> None:
    columns = [ColumnAnswer(name="id", type="bigint", is_nullable=False)]
    shown = DatasetDetail(
        name="sales",
        uuid="u",
        job="clean",
        keep=KeepAnswer(partitions=9, age="90d"),
        revision=2,
        is_projected=False,
        unprojected=1,
        generations=[
            generation("g2", "current", columns=columns, unknown=1),
            generation("g1", "abandoned", is_dropped=True, partitions=0, rows=0, bytes=0, files=0),
        ],
        maintain=MaintainedAnswer(
            after="10m", compact=CompactAnswer(files=16, below="32MiB"), cluster=["id", "day"]
        ),
    )
    user.on("GET /v1/datasets/sales", shown, shown)
    said = user.said("dataset show sales")
    assert "kept                 9 partitions, 90d at most\n" in said
    assert (
        "maintained           from 16 files below 32MiB on, clustered by id, day;"
        " 10m after the last publication\n"
    ) in said
    assert "rows not known       1 partition: no Parquet, or without a manifest\n" in said
    assert "not in current.json  which generation is current and 1 partition\n" in said
    assert "current           3  5,000  2.0 KiB      4  0 s ago  g2\n" in said
    assert "dropped           0      0      0 B      0  0 s ago  g1\n" in said
    assert "id      bigint  never null\n" in said
    assert user.json("dataset show sales")["keep"]["age"] == "90d"
    assert "table has" not in said
    for fields, has in (
        ({}, "all that is published"),
        ({"is_served": False}, "the generation before the current one"),
        ({"behind": 2, "behind_seconds": 90.0}, "not yet 2 partitions of what is published, for"),
        ({"problem": "It is away."}, "not all that is published: It is away."),
    ):
        given = {"behind": 0, "behind_seconds": 0.0, "problem": None, "is_served": True, **fields}
        own = {"dataset": "sales", "partitions": 3, "events": 0, "url": "host=h user=r", **given}
        table = msgspec.convert(own, HotTableAnswer)
        user.on("GET /v1/datasets/sales", msgspec.structs.replace(shown, table=table))
        said = user.said("dataset show sales")
        assert "hot.sales in host=h user=r" in said
        assert has in said


def test_sweeping_goes_on_until_it_is_over(user: User) -> None:
    more = SweepAnswer(attempts=1, files=2, bytes=1024, left=0, is_over=False)
    last = SweepAnswer(attempts=2, files=3, bytes=1024, left=1, is_over=True)
    nothing = SweepAnswer(attempts=0, files=0, bytes=0, left=0, is_over=True)
    user.on("POST /v1/datasets/sales/sweep", more, last)
    ran = user.types("dataset sweep sales --grace 60")
    assert ran.stdout == "Removed 5 files of 3 attempts, 2.0 KiB.\n"
    assert ran.stderr == "1 file could not be removed now.\n"
    assert user.bodies == [{"grace_seconds": 60.0}] * 2
    user.on("POST /v1/sweep", nothing)
    assert user.said("dataset sweep") == "Nothing to remove.\n"
    user.on("POST /v1/sweep", last)
    said = user.said("dataset sweep --dry-run")
    assert said == "This would remove 3 files of 2 attempts, 1.0 KiB.\n"
    assert user.bodies[-1] == {"dry_run": True}
