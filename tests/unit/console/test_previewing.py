"""What is in a partition: within bounds, from its own folder only, and always with a sentence."""

from __future__ import annotations

import asyncio
import io
import subprocess

import pytest

from penstock.console.pages import partition
from penstock.console.pages.partition import (
    FILE_BYTES_MAX,
    ROWS_MAX,
    PartitionPreview,
    preview_partition,
)
from penstock.datasets.manifest import File, Manifest, digest, encode
from penstock.kernel.clock import SystemClock
from penstock.store.memory import MemoryBucket, MemoryStore

ROOT = "s3://bucket/root"
ATTEMPT = f"7-1-{'a' * 24}"
FOLDER = f"datasets/tidy/gen/p/{ATTEMPT}"
LOCATION = f"{ROOT}/{FOLDER}"


def shown(
    files: dict[str, bytes], *, location: str = LOCATION, manifest: str | None = None
) -> PartitionPreview:
    """What is told of a folder with these files."""

    async def main() -> PartitionPreview:
        store = MemoryStore(MemoryBucket(SystemClock()), clock=SystemClock())
        for name, body in files.items():
            await store.put(f"{FOLDER}/{name}", body)
        return await preview_partition(store, root=ROOT, location=location, manifest=manifest)

    return asyncio.run(main())


def manifest_of(**files: tuple[int, int]) -> bytes:
    """A manifest of files by name, each with its rows and bytes."""
    return encode(
        Manifest(
            dataset="tidy",
            generation="gen",
            job="clean",
            task_id=7,
            attempt=1,
            rows=0,
            bytes=0,
            files=tuple(
                File(name=name.replace("__", "."), rows=rows, bytes=size, sha256="0" * 64)
                for name, (rows, size) in files.items()
            ),
        )
    )


def parquet(rows: int) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer  # noqa: PLC0415

    table = pyarrow.table(
        {
            "n": list(range(rows)),
            "text": ["<b>" * 100] * rows,
            "raw": [b"\x00" * 40] * rows,
            "none": pyarrow.array([None] * rows, pyarrow.string()),
        }
    )
    out = io.BytesIO()
    writer.write_table(table, out)
    return out.getvalue()


def test_the_first_rows_of_a_parquet_file_as_texts() -> None:
    body = parquet(50)
    manifest = manifest_of(part__parquet=(50, len(body)))
    found = shown({"part.parquet": body, "manifest.json": manifest}, manifest=digest(manifest))
    assert found.why_not == ""
    assert list(found.columns) == ["n", "text", "raw", "none"]
    assert len(found.rows) == ROWS_MAX
    number, text, raw, none = found.rows[1]
    assert (number, none) == ("1", None)
    assert text is not None
    assert text.startswith("<b>")
    assert text.endswith("…")
    assert len(text) == 200
    assert raw is not None
    assert raw.startswith("0x0000")
    assert found.manifest is not None


def odd_parquet() -> bytes:
    """Two rows, of which the second is odd in every column but the first."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer  # noqa: PLC0415

    ends = pyarrow.array([0, 4, 6], pyarrow.int32()).buffers()[1]
    wide = pyarrow.py_buffer((150).to_bytes(16, "little") + (2**126).to_bytes(16, "little"))
    table = pyarrow.table(
        {
            "n": [1, 2],
            "when": pyarrow.array([0, 2**62], pyarrow.timestamp("us")),
            "there": pyarrow.array([None, 0], pyarrow.timestamp("us", tz="No/Where")),
            "day": pyarrow.array([0, 2**31 - 1], pyarrow.date32()),
            "long": pyarrow.array([0, 2**62], pyarrow.duration("s")),
            "text": pyarrow.Array.from_buffers(
                pyarrow.string(), 2, [None, ends, pyarrow.py_buffer(b"good\xff\xfe")]
            ),
            "inside": pyarrow.array([[0], [2**62]], pyarrow.list_(pyarrow.timestamp("us"))),
            "money": pyarrow.Array.from_buffers(pyarrow.decimal128(38, 2), 2, [None, wide]),
        }
    )
    out = io.BytesIO()
    writer.write_table(table, out)
    return out.getvalue()


def test_an_odd_cell_hides_itself_alone() -> None:
    found = shown({"part.parquet": odd_parquet()})
    assert found.why_not == ""
    good, odd = found.rows
    assert good == [
        *("1", "1970-01-01 00:00:00", None, "1970-01-01", "0:00:00", "good"),
        *("[datetime.datetime(1970, 1, 1, 0, 0)]", "1.50"),
    ]
    # One digit more than the column says to have is still a number.
    assert odd == ["2", *["(cannot be shown)"] * 6, f"{2**126 // 100}.{2**126 % 100:02}"]


def test_what_is_no_parquet_is_told() -> None:
    assert "cannot be read as Parquet" in shown({"x.parquet": b"junk"}).why_not


def test_a_process_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "READER_SECONDS_MAX", 0.0)
    assert "within" in shown({"x.parquet": b"junk"}).why_not


def test_only_a_few_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "READERS_MAX", 0)
    assert "reload the page" in shown({"x.parquet": b"junk"}).why_not


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "find_spec", lambda name: None)
    assert "pip install" in shown({"x.parquet": b"junk"}).why_not


def test_a_machine_without_room_for_a_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert "Failed to start a process" in shown({"x.parquet": b"junk"}).why_not


def test_texts_are_shown_by_their_first_lines() -> None:
    body = ("a\x1b[2J,b\n" * 100).encode() + b"\xff"
    found = shown({"sales.csv": body})
    assert len(found.lines) == ROWS_MAX
    assert found.lines[0] == "a\ufffd[2J,b"
    assert found.file == "sales.csv"


def test_the_first_file_that_fits_is_shown() -> None:
    large = b"x" * (FILE_BYTES_MAX + 1)
    assert "larger than" in shown({"a.csv": large}).why_not
    assert shown({"a.csv": large, "b.csv": b"b"}).file == "b.csv"
    assert shown({"_x.csv": b"hidden", "b.csv": b"b"}).file == "b.csv"
    assert "can be previewed" in shown({"a.bin": b"x"}).why_not
    assert "no files" in shown({}).why_not


def test_a_manifest_is_what_was_published_or_nothing_is_shown() -> None:
    manifest = manifest_of(part__csv=(1, 1))
    files = {"part.csv": b"x", "manifest.json": manifest}
    assert shown(files, manifest=digest(manifest)).lines == ["x"]
    of_function = {"part.csv": b"x", "manifest.json": b"{}", "_manifest.json": manifest}
    assert shown(of_function, manifest=digest(manifest)).lines == ["x"]
    other = shown(files, manifest="1" * 64)
    assert "not the one that was published" in other.why_not
    assert not other.lines
    assert "is not there" in shown({"part.csv": b"x"}, manifest="1" * 64).why_not
    empty = manifest_of(part__csv=(0, 1))
    files["manifest.json"] = empty
    assert shown(files, manifest=digest(empty)).why_not == "There are no rows."


def test_a_file_that_has_grown_is_not_read() -> None:
    manifest = manifest_of(part__csv=(1, 1))
    files = {"part.csv": b"x" * (FILE_BYTES_MAX + 1), "manifest.json": manifest}
    assert "too large" in shown(files, manifest=digest(manifest)).why_not


@pytest.mark.parametrize(
    "location",
    [
        "s3://other/root/" + FOLDER,
        f"{ROOT}/queues/x",
        f"{ROOT}/datasets/../queues",
        f"{ROOT}/datasets/tidy",
        f"{ROOT}x/{FOLDER}",
        f"{ROOT}/datasets/x/datasets/a/b/c/{ATTEMPT}",
    ],
)
def test_only_folders_of_attempts_below_the_root_are_read(location: str) -> None:
    found = shown({"a.csv": b"secret"}, location=location)
    assert "is not the folder of an attempt" in found.why_not
    assert not found.lines


def test_ranges_and_no_store_are_told() -> None:
    assert "range" in shown({}, location="range:1-2").why_not
    told = asyncio.run(preview_partition(None, root=ROOT, location=LOCATION, manifest=None))
    assert "no store" in told.why_not


def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(MemoryStore):
        async def list(self, *_: object, **__: object) -> None:  # type: ignore[override]
            await asyncio.Event().wait()

    monkeypatch.setattr(partition, "STORE_SECONDS_MAX", 0.0)
    silent = Silent(MemoryBucket(SystemClock()), clock=SystemClock())
    told = asyncio.run(preview_partition(silent, root=ROOT, location=LOCATION, manifest=None))
    assert "timed out" in told.why_not
