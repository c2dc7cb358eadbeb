"""The runtime `sink`: rows are judged by themselves, and nothing that they hold reaches anybody."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import WorkFailed
from penstock.runtimes.base import AttemptWork, Merge, Part, WorkOutput, WorkResult
from penstock.runtimes.sink import (
    CHECKS,
    OPERATOR,
    BatchLimits,
    SinkConfigError,
    SinkRuntime,
    SinkSettings,
    batch_limits,
)
from penstock.runtimes.sink_child import SinkBatch, SinkOrder, made
from penstock.testing.runtime_contract import RecordingReporter

COLUMNS = [
    ("id", "string"),
    ("n", "smallint"),
    ("amount", "decimal(6,2)"),
    ("at", "timestamp"),
    ("day", "date"),
    ("tags", "array<string>"),
    ("sums", "map<string,int>"),
    ("who", "struct<name:string,age:int>"),
]


def order(*bodies: bytes, **more: Any) -> SinkOrder:
    batches = [
        SinkBatch(sequence=number, batch=f"b{number}", task=9, format="jsonl", bytes=len(body))
        for number, body in enumerate(bodies, start=1)
    ]
    bounds = {"cpu_seconds": 60, "memory_bytes": 2**30}
    return SinkOrder(**{"columns": COLUMNS, "batches": batches, **bounds, **more})


def rows_of(body: bytes) -> list[dict[str, Any]]:
    return pq.read_table(pa.BufferReader(body)).to_pylist() if body else []


def lines(*rows: Any) -> bytes:
    return b"\n".join(
        each if isinstance(each, bytes) else json.dumps(each).encode() for each in rows
    )


def wrote(*bodies: bytes, **more: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    _, rows, rejected = made(order(*bodies, **more), iter(bodies), iter([]))
    return rows_of(rows), rows_of(rejected)


def test_rows_of_every_type_are_as_they_were_sent() -> None:
    row = {
        "id": "é",
        "n": -32768,
        "amount": "9999.99",
        "at": "2026-01-02T03:04:05.000006+01:00",
        "day": "2026-02-03",
        "tags": ["a", None],
        "sums": {"k": 1},
        "who": {"name": "x"},
    }
    (found, _), rejected = wrote(lines(row, {}))
    assert rejected == []
    assert found["at"].isoformat() == "2026-01-02T02:04:05.000006+00:00"
    assert str(found["amount"]) == "9999.99"
    assert (found["day"].isoformat(), found["tags"]) == ("2026-02-03", ["a", None])
    assert (found["sums"], found["who"]) == ([("k", 1)], {"name": "x", "age": None})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"nonsense", "malformed"),
        (b"[1]", "Expected `object`"),
        ({"x": 1}, "unknown field `x`"),
        ({"n": 40_000}, "<= 32767"),
        ({"n": "1"}, "Expected `int"),
        ({"amount": "1.234"}, "no decimal(6,2)"),
        ({"amount": "99999"}, "no decimal(6,2)"),
        ({"at": "2026-01-02T03:04:05"}, "timezone"),
        ({"id": "a\0b"}, "NUL"),
        ({"id": 1}, "Expected `str"),
        (b'{"id": "\xff"}', "does not fit"),
        ({"tags": [1]}, "Expected `str"),
    ],
)
def test_a_row_that_does_not_fit_costs_its_neighbours_nothing(row: Any, why: str) -> None:
    rows, rejected = wrote(lines({"id": "before"}, row, {"id": "after"}))
    assert [each["id"] for each in rows] == ["before", "after"]
    (found,) = rejected
    assert why in found["reason"]
    assert (found["place"], found["sequence"], found["task"]) == (1, 1, 9)
    text = row if isinstance(row, bytes) else json.dumps(row).encode()
    assert found["row"] == text.decode("utf-8", "replace")


@pytest.mark.parametrize("odd", ["fits", "has a neighbour that does not", "fails a check too"])
def test_moments_that_not_everybody_knows_are_rejected_alone(odd: str) -> None:
    """Also where a row has to be read by itself, and where its text is asked for."""
    ends = [-62_135_596_800_000_000, 253_402_300_799_999_999]
    moments = [*ends, ends[0] - 1, ends[1] + 1, 2**62]
    nested = pa.array(moments, pa.timestamp("us", "UTC"))
    columns = [("id", "string"), ("day", "date"), ("at", "timestamp"), ("all", "array<timestamp>")]
    texts = ["a", "b", "c", "d", "e"]
    table = pa.table(
        {
            "id": pa.array([1.0, 1.5, 3.0, 4.0, 5.0] if odd.startswith("has") else texts),
            "day": pa.array([-719_162, 2_932_896, -719_163, 2_932_897, -(2**31)], pa.int32()).view(
                pa.date32()
            ),
            "at": nested,
            "all": pa.ListArray.from_arrays(list(range(6)), nested),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    body = sink.getvalue().to_pybytes()
    said = order(body, columns=columns)
    if odd == "has a neighbour that does not":
        said = order(body, columns=[("id", "int"), *columns[1:]])
    expect = {"id": {"in": ["a", "b"]}, "at": {"max": "9999-12-31T00:00:00Z"}}
    if odd == "fails a check too":
        said = order(body, columns=columns, expect=expect)
    (batch,) = said.batches
    said = msgspec.structs.replace(said, batches=[msgspec.structs.replace(batch, format="arrow")])
    _, rows, rejected = made(said, iter([body]), iter([]))
    found = [(each["place"], each["reason"]) for each in rows_of(rejected)]
    written = 2 if odd == "fits" else 1
    assert len(rows_of(rows)) == written
    assert [place for place, _ in found] == [0, 1, 2, 3, 4][written:]
    assert all("in the years 1 to 9999" in why for place, why in found if place > 1)


@pytest.mark.parametrize("is_hot", [True, False])
def test_keys_that_no_index_holds_are_rejected_where_there_is_one(is_hot: bool) -> None:
    body = lines({"id": "é" * 990}, {"id": "é" * 1_000})
    rows, rejected = wrote(body, key=["id"], is_hot=is_hot)
    assert len(rows) == (1 if is_hot else 2)
    assert [each["place"] for each in rejected] == ([1] if is_hot else [])


@pytest.mark.parametrize(
    ("expect", "fits", "fails"),
    [
        ({"id": {"required": True}}, {"id": ""}, {}),
        ({"id": {"in": ["a", "b"]}}, {"id": "b"}, {"id": "c"}),
        ({"n": {"in": [1, 2]}}, {}, {"n": 3}),
        ({"n": {"min": 0}}, {"n": 0}, {"n": -1}),
        ({"amount": {"max": "1.50"}}, {"amount": "1.5"}, {"amount": "1.51"}),
        ({"day": {"min": "2026-01-01"}}, {"day": "2026-01-01"}, {"day": "2025-12-31"}),
        ({"id": {"matches": "[a-z]+"}}, {"id": "abc"}, {"id": "abc1"}),
        ({"id": {"matches": "a|bc"}}, {"id": "bc"}, {"id": "ac"}),
        ({"id": {"max_length": 2, "min_length": 1}}, {"id": "éé"}, {"id": ""}),
    ],
)
def test_expectations(expect: dict[str, Any], fits: dict[str, Any], fails: dict[str, Any]) -> None:
    rows, rejected = wrote(lines(fits, fails), expect=expect)
    assert len(rows) == 1
    assert [each["place"] for each in rejected] == [1]


def test_of_rows_with_one_key_the_highest_counts_in_every_order() -> None:
    """Versions, then sequences, then places: whatever is merged first."""
    entropy = seeded_entropy(7)
    said: list[list[dict[str, Any]]] = [
        [{"id": f"k{entropy.randrange(4)}", "n": entropy.randrange(3)} for _ in range(6)]
        for _ in range(4)
    ]
    best: dict[str, tuple[int, int, int]] = {}
    for sequence, some in enumerate(said, start=1):
        for place, row in enumerate(some):
            key = (row["n"], sequence, place)
            best[row["id"]] = max(best.get(row["id"], (-1, 0, 0)), key)
    wanted = {name: version for name, (version, _, _) in best.items()}
    for turn in range(4):
        held = b""
        for number in [*range(turn, 4), *range(turn)]:
            body = lines(*said[number])
            batch = SinkBatch(
                sequence=number + 1, batch="b", task=1, format="jsonl", bytes=len(body)
            )
            asked = order(
                columns=COLUMNS[:2],
                batches=[batch],
                key=["id"],
                version_by="n",
                current=[len(held)] if held else [],
            )
            _, held, _ = made(asked, iter([body]), iter([held] if held else []))
        found = {row["id"]: (row["n"], row["_penstock_task"]) for row in rows_of(held)}
        assert {name: version for name, (version, _) in found.items()} == wanted
        assert {name: at for name, (_, at) in found.items()} == {
            name: sequence for name, (_, sequence, _) in best.items()
        }


def test_rows_without_key_or_version_are_rejected() -> None:
    body = lines({"id": "a", "n": 1}, {"n": 1}, {"id": "b"})
    rows, rejected = wrote(body, key=["id"], version_by="n")
    assert [row["id"] for row in rows] == ["a"]
    assert [row["reason"] for row in rejected] == ["id: it is missing.", "n: it is missing."]


def test_what_is_published_takes_the_columns_that_are_declared_now() -> None:
    first = order(b"x", columns=[("id", "string"), ("n", "int")], key=["id"])
    _, held, _ = made(first, iter([lines({"id": "a", "n": 1})]), iter([]))
    wider = [("id", "string"), ("n", "bigint"), ("more", "string")]
    batch = SinkBatch(sequence=2, batch="b", task=1, format="jsonl", bytes=1)
    second = order(columns=wider, batches=[batch], key=["id"], current=[len(held)])
    _, body, _ = made(second, iter([lines({"id": "b", "more": "x"})]), iter([held]))
    assert [(row["id"], row["n"], row["more"]) for row in rows_of(body)] == [
        ("a", 1, None),
        ("b", None, "x"),
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"max_rows": "no"},
        {"max_rows": 0},
        {"max_age": 5},
        {"max_bytes": "1GiB"},
        {"expect": []},
        {"expect": {"id": {}}},
        {"expect": {"id": {"sql": "1 = 1"}}},
        {"expect": {"id": {"in": []}}},
        {"expect": {"id": {"matches": 1}}},
        {"expect": {"id": {"required": "yes"}}},
        {"other": 1},
    ],
)
def test_a_wrong_config_is_found_when_the_dag_is_applied(config: dict[str, Any]) -> None:
    found = list(SinkRuntime().faults(OPERATOR, config=config, resources={}))
    assert found
    assert all(each.field.startswith("config.") and each.message for each in found)


def test_limits() -> None:
    assert batch_limits({}) == BatchLimits()
    said = {"max_rows": "10k", "max_bytes": "1MiB", "max_age": "2m"}
    assert batch_limits(said) == BatchLimits(rows=10_000, bytes=2**20, age_ms=120_000)
    with pytest.raises(SinkConfigError):
        batch_limits({"max_rows": True})


def work(folder: Path, *bodies: bytes, formats: str = "jsonl", **more: Any) -> AttemptWork:
    batches = []
    for number, body in enumerate(bodies, start=1):
        path = folder / f"batch-{number}"
        path.write_bytes(body)
        batches.append(
            {
                "sequence": number,
                "batch": f"b{number}",
                "task": 9,
                "format": formats,
                "location": path.as_uri(),
                "sha256": hashlib.sha256(body).hexdigest(),
            }
        )
    buffer = {
        "output": "alerts",
        "rejected": "aside",
        "columns": [["id", "string"]],
        "batches": batches,
    }
    outputs = {
        name: WorkOutput(dataset=name, uuid=name, location=(folder / f"out-{name}").as_uri())
        for name in ("alerts", "aside")
    }
    said: dict[str, Any] = {
        "task_id": 7,
        "attempt": 1,
        "job": "write",
        "operator": OPERATOR,
        "generation": "g",
        "payload": {"buffer": buffer},
        "outputs": outputs,
    }
    return AttemptWork(**{**said, **more})


async def run(task: AttemptWork, **settings: Any) -> WorkResult:
    async with SinkRuntime(SinkSettings(**settings)) as runtime:
        found = await runtime.run(task, RecordingReporter())
        assert runtime.pids == []
        return found


def test_a_task_writes_what_it_was_given(tmp_path: Path) -> None:
    task = work(tmp_path, lines({"id": "a"}, {"no": 1}), lines({"id": "b"}))
    found = asyncio.run(run(task))
    assert found.metrics == {"batches": 2, "rows": 2, "rejected": 1}
    made_of = {each.output: each for each in found.made}
    facts = made_of["alerts"].facts
    assert facts is not None
    assert (facts.rows, facts.files, [each.name for each in facts.columns]) == (2, 1, ["id"])
    assert not facts.is_observed
    body = (tmp_path / "out-alerts" / "part-00000.parquet").read_bytes()
    assert [row["id"] for row in rows_of(body)] == ["a", "b"]
    field = pq.ParquetFile(pa.BufferReader(body)).schema_arrow.field("id")
    assert b"PARQUET:field_id" in (field.metadata or {})
    # The same again is the same, whoever reads it: nothing in it is of the attempt.
    again = asyncio.run(run(work(tmp_path, lines({"id": "a"}, {"no": 1}), lines({"id": "b"}))))
    assert [each.facts for each in again.made] == [each.facts for each in found.made]


@pytest.mark.parametrize("what", ["a link", "too large"])
def test_a_batch_that_cannot_be_read_is_rejected_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("penstock.datasets.transfer.READ_BYTES_MAX", 1_000)
    task = work(tmp_path, lines({"id": "a"}), lines({"id": "b"}))
    alone = work(tmp_path, lines({"id": "a"}))
    file = Path(urlsplit(task.payload["buffer"]["batches"][0]["location"]).path)
    if what == "a link":
        file.unlink()
        file.symlink_to("/etc/passwd")
    else:
        file.write_bytes(b"x" * 2_000)
    assert asyncio.run(run(task)).metrics == {"batches": 2, "rows": 1, "rejected": 1}
    (rejected,) = rows_of((tmp_path / "out-aside" / "part-00000.parquet").read_bytes())
    assert (rejected["batch"], rejected["place"]) == ("b1", -1)
    assert "cannot be read" in rejected["reason"]
    # Who can read none may have no right to read any.
    with pytest.raises(WorkFailed, match="cannot be read") as failure:
        asyncio.run(run(alone))
    assert failure.value.is_retried


def test_a_task_without_batches_makes_nothing(tmp_path: Path) -> None:
    assert asyncio.run(run(work(tmp_path))).made == ()


def test_a_batch_that_ends_its_reader_is_rejected_and_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    # A small file of a value that is repeated a billion times.
    bomb = pa.BufferOutputStream()
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000_000, pa.int32()), ["x" * 4_000])
    pq.write_table(pa.table({"id": column}), bomb, compression="zstd", store_schema=False)
    small = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": ["a"]}), small)
    bodies = [small.getvalue().to_pybytes(), bomb.getvalue().to_pybytes()]
    assert len(bodies[1]) < 2**21
    found = asyncio.run(run(work(tmp_path, *bodies, formats="parquet"), memory="1GiB"))
    assert found.metrics == {"batches": 2, "rows": 1, "rejected": 1}
    rejected = rows_of((tmp_path / "out-aside" / "part-00000.parquet").read_bytes())
    assert [(row["batch"], row["place"]) for row in rejected] == [("b2", -1)]


def test_a_process_that_cannot_be_started_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtimes.sink._CHILD", "raise SystemExit(3)")
    with pytest.raises(WorkFailed, match="could not be started") as failure:
        asyncio.run(run(work(tmp_path, lines({"id": "a"}))))
    assert failure.value.is_retried


@pytest.mark.parametrize("check", [{"min": 5}, {"in": [1]}, {"matches": "("}])
def test_a_check_that_does_not_fit_its_column_costs_no_row(
    tmp_path: Path, check: dict[str, Any]
) -> None:
    task = work(tmp_path, lines({"id": "a"}), config={"expect": {"id": check}})
    with pytest.raises(WorkFailed, match="does not fit the columns") as failure:
        asyncio.run(run(task))
    assert not failure.value.is_retried


def test_cancelling_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        started = asyncio.Event()
        real = asyncio.create_subprocess_exec

        async def noting(*words: Any, **options: Any) -> asyncio.subprocess.Process:
            process = await real(*words, **options)
            started.set()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", noting)
        body = lines(*({"id": f"k{number}"} for number in range(200_000)))
        async with SinkRuntime() as runtime, asyncio.TaskGroup() as group:
            running = group.create_task(runtime.run(work(tmp_path, body), RecordingReporter()))
            await started.wait()
            (pid,) = runtime.pids
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert runtime.pids == []
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(main())


def test_what_is_merged_with_has_to_be_what_was_published(tmp_path: Path) -> None:
    merge = Merge(key=("id",))
    first = asyncio.run(run(work(tmp_path, lines({"id": "a"}), merge=merge)))
    (output,) = first.made
    assert output.base_revision == 0
    facts = output.facts
    assert facts is not None
    current = Part(location=output.location, revision=4, manifest=facts.manifest)
    place = WorkOutput(
        dataset="alerts", uuid="u", location=(tmp_path / "second").as_uri(), current=(current,)
    )
    task = work(tmp_path, lines({"id": "b"}), merge=merge)
    task = AttemptWork(
        **{
            **{name: getattr(task, name) for name in task.__dataclass_fields__},
            "outputs": {**task.outputs, "alerts": place},
        }
    )
    (merged,) = asyncio.run(run(task)).made
    assert merged.base_revision == 4
    body = (tmp_path / "second" / "part-00000.parquet").read_bytes()
    assert [row["id"] for row in rows_of(body)] == ["a", "b"]
    (tmp_path / "out-alerts" / "manifest.json").write_text("{}")
    with pytest.raises(WorkFailed, match="not the one that was published"):
        asyncio.run(run(task))


def test_the_words_of_the_config_are_those_of_the_process() -> None:
    values: dict[str, Any] = {
        "required": True,
        "in": ["a"],
        "min": "a",
        "max": "z",
        "matches": "a",
        "min_length": 0,
        "max_length": 5,
    }
    rows, rejected = wrote(lines({"id": "a"}), expect={"id": values})
    assert (len(rows), rejected) == (1, [])
    assert tuple(values) == CHECKS
