"""The files of the archive: what pandas sees in them, and that ledgers come out as they went in."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.document_format import encode
from penstock.kernel.entropy import seeded_entropy
from penstock.kernel.errors import NewerFormat, NotOurs
from penstock.queue import archive_rows
from penstock.queue.archive_rows import (
    LOG_LINES_SHOWN,
    LegacyArchiveBatch,
    LegacyArchiveRecord,
    ledger_of,
    packed,
    rows_of,
    unpacked,
)
from penstock.queue.ids import PackAt, keyed_pack, new_pack
from penstock.queue.ledger import (
    NULL,
    Ledger,
    LedgerEvent,
    LedgerFailure,
    LedgerLogLine,
    LedgerProgress,
    QueueTaskState,
    QueueTaskStatus,
)
from penstock.queue.pack import PayloadReference
from penstock.queue.payloads import raw

MS = 1_900_000_000_123
NAME = "queues/q/archive/x.jsonl.gz"
REF = PayloadReference("payloads/2030-03-17/t/n", 100_000, "ab" * 32)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
raws = values.map(lambda value: msgspec.Raw(msgspec.json.encode(value)))


@st.composite
def states(draw: st.DrawFn) -> QueueTaskState:
    status = draw(
        st.sampled_from(
            [
                QueueTaskStatus.SUCCEEDED,
                QueueTaskStatus.FAILED,
                QueueTaskStatus.CANCELLED,
                QueueTaskStatus.EXPIRED,
            ]
        )
    )
    is_ref = status is QueueTaskStatus.SUCCEEDED and draw(st.booleans())
    result = raw(REF) if is_ref else draw(raws) if status is QueueTaskStatus.SUCCEEDED else NULL
    failure = st.builds(LedgerFailure, texts, texts, texts)
    return QueueTaskState(
        status,
        draw(st.integers(0, 9)),
        given_back=draw(st.integers(0, 3)),
        claim=draw(texts),
        at_ms=draw(st.integers(0, 2**42)),
        result=result,
        failure=draw(failure) if status is QueueTaskStatus.FAILED else draw(st.none() | failure),
        is_ref=is_ref,
        progress=draw(st.none() | st.just(LedgerProgress(MS, 0.5, 2.0, "half"))),
    )


@st.composite
def records(draw: st.DrawFn) -> tuple[PackAt, Ledger]:
    tasks = draw(st.lists(states(), min_size=1, max_size=4))
    refs = tuple(n for n in range(len(tasks)) if draw(st.booleans()))
    inputs = tuple(raw(REF) if n in refs else draw(raws) for n in range(len(tasks)))
    has_inputs = draw(st.booleans())
    lines = st.builds(
        lambda what, attempt, who: LedgerLogLine(MS, what, (0, len(tasks) - 1), attempt, who),
        st.sampled_from(LedgerEvent),
        st.integers(0, 9),
        texts,
    )
    key = draw(st.none() | texts) if len(tasks) == 1 else None
    at = new_pack(type="t", count=len(tasks), submitted_ms=MS, entropy=seeded_entropy(1))
    ledger = Ledger(
        pack_version=draw(texts),
        born=draw(texts),
        tasks=tuple(tasks),
        log=tuple(draw(st.lists(lines, max_size=5))),
        inputs=inputs if has_inputs else (),
        refs=refs if has_inputs else (),
        submitted_ms=draw(st.integers(0, 2**42)),
        due_ms=draw(st.sampled_from([0, MS])),
        key=key,
        key_ends_ms=MS if key is not None else 0,
        priority=draw(st.integers(-9, 9)),
        limit=draw(st.sampled_from(["", "api"])),
        expires_ms=draw(st.sampled_from([0, MS])),
        tags=draw(st.dictionaries(texts, texts, max_size=3)),
        batch=draw(st.sampled_from(["", "b"])),
        trace=draw(texts),
        writes={"w": "1"},
    )
    return keyed_pack(type="t", key=key or "k") if key is not None else at, ledger


@settings(max_examples=40)
@given(st.lists(records(), max_size=3))
def test_ledgers_come_out_as_they_went_in(members: list[tuple[PackAt, Ledger]]) -> None:
    body = b"".join(packed(members))
    found = list(unpacked(body, where=NAME))
    assert [at for at, _ in found] == [at for at, _ in members]
    assert [encode(ledger) for _, ledger in found] == [encode(ledger) for _, ledger in members]
    for at, _ in members:
        alone = [encode(ledger) for _, ledger in unpacked(body, where=NAME, only=at)]
        assert alone == [encode(ledger) for where, ledger in members if where == at]
    assert body == b"".join(packed(members))


def _record(*tasks: QueueTaskState, **named: Any) -> tuple[PackAt, Ledger]:
    tasks = tasks or (
        QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, at_ms=MS + 5, result=msgspec.Raw(b"[17]")),
    )
    at = new_pack(type="resize", count=len(tasks), submitted_ms=MS, entropy=seeded_entropy(1))
    given: dict[str, Any] = {"inputs": (msgspec.Raw(b'{"n":17}'),) * len(tasks), "submitted_ms": MS}
    given |= named
    return at, Ledger(pack_version="v", born="b", tasks=tasks, **given)


def test_pandas_reads_a_file_as_it_is(tmp_path: Path) -> None:
    log = (
        LedgerLogLine(MS + 1, LedgerEvent.CLAIMED, (0, 2), 1, "w"),
        LedgerLogLine(MS + 2, LedgerEvent.FAILED, (1, 1), 1, "w", "IOError"),
    )
    members = [
        _record(
            QueueTaskState(QueueTaskStatus.SUCCEEDED, 1, at_ms=MS + 5, result=msgspec.Raw(b"[17]")),
            QueueTaskState(
                QueueTaskStatus.FAILED,
                2,
                at_ms=MS + 6,
                failure=LedgerFailure("IOError", "no", "Tr…"),
            ),
            QueueTaskState(
                QueueTaskStatus.SUCCEEDED, 1, at_ms=MS + 7, result=raw(REF), is_ref=True
            ),
            log=log,
            tags={"customer": "x"},
            priority=3,
            limit="api",
        ),
        _record(key="k", due_ms=MS + 1000, refs=(0,), inputs=(raw(REF),)),
    ]
    path = tmp_path / "tasks.jsonl.gz"
    path.write_bytes(b"".join(packed(members)))
    frame = pd.read_json(path, lines=True, dtype=False)
    assert list(frame["status"]) == ["succeeded", "failed", "succeeded", "succeeded"]
    assert list(frame["id"][:3]) == [members[0][0].task(n) for n in range(3)]
    assert list(frame["type"]) == ["resize"] * 4
    assert [json.loads(text) for text in frame["input"][:3]] == [{"n": 17}] * 3
    assert frame["result"][0] == "[17]"
    assert frame["result"].isna().tolist() == [False, True, True, False]
    assert frame["error"][1] == "IOError"
    assert frame["message"][1] == "no"
    assert str(frame["submitted_at"].dtype) == "datetime64[ns, UTC]"
    assert frame["submitted_at"][0].timestamp() == MS / 1000
    assert (frame["settled_at"][1] - frame["submitted_at"][1]).total_seconds() == 0.006
    assert frame["tags"].str.get("customer").tolist()[:3] == ["x"] * 3
    assert list(frame["priority"]) == [3, 3, 3, 0]
    assert list(frame["limit"][:3]) == ["api"] * 3
    assert frame["limit"].isna()[3]
    assert [line["what"] for line in frame["log"][1]] == ["claimed", "failed"]
    assert [line["what"] for line in frame["log"][0]] == ["claimed"]
    assert frame["result_ref"][2]["bytes"] == 100_000
    assert frame["input_ref"][3]["key"] == REF.key
    assert frame["key"][3] == "k"
    assert frame["input"].isna()[3]


def test_the_schema_names_the_columns_for_people() -> None:
    (row,) = rows_of(*_record())
    names = set(msgspec.to_builtins(row)) - {"pack", "place", "record"}
    told = {part.split()[0].strip("`") for part in archive_rows.SCHEMA.split(", ")}
    assert told == names


def test_a_batch_of_an_earlier_release_is_read() -> None:
    members = [_record(), _record(priority=1)]
    batch = LegacyArchiveBatch(
        records=tuple(LegacyArchiveRecord(at.path, msgspec.Raw(encode(it))) for at, it in members)
    )
    key = NAME.removesuffix(archive_rows.ENDING)
    found = list(unpacked(encode(batch), where=key))
    assert [(at, encode(it)) for at, it in found] == [(at, encode(it)) for at, it in members]
    assert len(list(unpacked(encode(batch), where=key, only=members[0][0]))) == 2
    assert not list(unpacked(encode(batch), where=key, only=keyed_pack(type="t", key="k")))


def test_words_of_others_do_not_pass_for_the_name_of_a_pack() -> None:
    at, _ = _record()
    other = keyed_pack(type="t", key="k")
    body = b"".join(packed([(other, _record(tags={"pack": at.path})[1])]))
    assert not list(unpacked(body, where=NAME, only=at))


def test_a_long_log_is_shown_in_part_and_kept_whole() -> None:
    lines = tuple(
        LedgerLogLine(MS + n, LedgerEvent.LEASE_EXPIRED, (0, 1), n, "w")
        for n in range(LOG_LINES_SHOWN * 2)
    )
    at, ledger = _record(*(QueueTaskState(QueueTaskStatus.FAILED, 1),) * 2, log=lines)
    rows = list(rows_of(at, ledger))
    assert [entry.attempt for entry in rows[1].log] == list(
        range(LOG_LINES_SHOWN, LOG_LINES_SHOWN * 2)
    )
    assert ledger_of(rows, where=NAME)[1].log == lines


@pytest.mark.parametrize("cut", [1, 10, 30, -1, -9])
def test_a_file_that_breaks_off_is_damaged(cut: int) -> None:
    body = b"".join(packed([_record(), _record()]))
    with pytest.raises(NotOurs, match=r"x\.jsonl\.gz"):
        list(unpacked(body[:cut], where=NAME))


def test_what_is_no_file_of_ours_is_told() -> None:
    lines = gzip.decompress(
        b"".join(packed([_record(*(QueueTaskState(QueueTaskStatus.FAILED, 1),) * 2)]))
    )
    first, second = lines.splitlines()
    for body, error in (
        (b"plain text", NotOurs),
        (gzip.compress(b'{"a": 1}\n'), NotOurs),
        (gzip.compress(second + b"\n"), NotOurs),
        (gzip.compress(first + b"\n"), NotOurs),
        (gzip.compress(first + b"\n" + first + b"\n"), NotOurs),
        (gzip.compress(lines.replace(b"settled-task/1", b"settled-task/2")), NewerFormat),
        (b"", NotOurs),
    ):
        with pytest.raises(error):
            list(unpacked(body, where=NAME))


def test_what_grows_without_end_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_rows, "BATCH_BYTES_READ_MAX", 3_000_000)
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = bomb.compress(b"\n" * 8_000_000) + bomb.flush()
    with pytest.raises(NotOurs, match="larger than a batch can be"):
        list(unpacked(body, where=NAME))
