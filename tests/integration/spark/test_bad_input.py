"""What is wrong is said in a sentence, with the file and the line, and not tried again in vain."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import parquet

from penstock.datasets.layout import path_of
from penstock.runtimes.base import AttemptWork, Part
from penstock.runtimes.spark.access import folder
from penstock.runtimes.spark.engine_protocol import WorkFailure
from tests.integration.spark.bench import Bench


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of a user, which a test fills."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "theirs.py"
    sys.modules.pop("theirs", None)


def failure_of(bench: Bench, sql: str, **config: object) -> WorkFailure:
    raw = bench.publish({"distance": [1, 2], "carrier": ["UA", "AA"]})
    said = {"sql": sql, "sql_file": "clean.sql", **config}
    return bench.failure(bench.work("spark.sql", said, inputs={"raw": [raw]}))


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT *\nFROM raw\nWHER distance > 1", "clean.sql, line 3 (WHER distance > 1): Syntax"),
        ("SELECT carrier,\n  distanse + 1\nFROM raw", "clean.sql, line 2 (distanse + 1): A column"),
        ("SELECT *\nFROM raww", "clean.sql, line 2 (FROM raww): The table or view `raww` cannot"),
        ("SELECT\n 1 / (distance - 1) AS x FROM raw", "raw): Division by zero. Use"),
        ("SELECT CAST(carrier AS int) AS c FROM raw", "'UA'"),
        ("SELECT :nothing AS n FROM raw", "nothing"),
        ("SELECT CAST(raise_error('no good') AS int) AS n FROM raw", "no good"),
        ("SELECT distance, distance FROM raw", "twice"),
        ("SELECT NULL AS n FROM raw", "The column 'n' of the result has no type"),
        ("CREATE TABLE t (a int)", "clean.sql"),
    ],
)
def test_wrong_sql_is_told_with_its_line(bench: Bench, sql: str, words: str) -> None:
    failure = failure_of(bench, sql)
    assert words in failure.reason
    assert not failure.is_retried
    assert "org.apache" not in failure.reason
    assert "Traceback" not in failure.reason
    assert "\n" not in failure.reason


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sort_by": ["nope"]}, "config.sort_by: the result has no column 'nope'; it has"),
        ({"expect": [{"check": "nope > 1"}]}, "config.expect: A column"),
        ({"expect": [{"unique": ["nope"]}]}, "names the column 'nope', which the output does not"),
    ],
)
def test_wrong_config_is_told_with_its_field(
    bench: Bench, config: dict[str, object], words: str
) -> None:
    failure = failure_of(bench, "SELECT * FROM raw", **config)
    assert words in failure.reason
    assert not failure.is_retried


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\ndef clean(:\n", "theirs.py, line 2)"),
        ("def clean(inputs, context):\n    return 5\n", "theirs:clean returned a int"),
        ("def clean(inputs, context): ...\n", "theirs:clean returned None; it has to return"),
        (
            "def clean(inputs, context):\n    raw = inputs['raw']\n    return raw.select('nope')\n",
            "theirs.py, line 3: A column",
        ),
        (
            "def clean(inputs, context):\n    return inputs['later']\n",
            "Nothing is published of the input later",
        ),
        (
            "def clean(inputs, context):\n    return {'other': inputs['raw']}\n",
            "returned something for 'other', and the job has the outputs out",
        ),
    ],
)
def test_a_wrong_transform_is_told_and_not_retried(
    bench: Bench, module: Path, code: str | None, words: str
) -> None:
    if code is not None:
        module.write_text(code)
    raw = bench.publish({"a": [1]})
    config = {"transform": "theirs:clean"}
    inputs = {"raw": [raw], "later": []}
    failure = bench.failure(bench.work("spark.python", config, inputs=inputs))
    assert words in failure.reason
    assert not failure.is_retried


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "There is no module theirs"),
        ("import nothing_like_that\n", "The module theirs does not import: ModuleNotFoundError"),
        ("def dirty(): ...\n", "The module theirs has no clean."),
    ],
)
def test_a_transform_that_is_not_here_is_left_to_other_workers(
    bench: Bench, module: Path, code: str | None, words: str
) -> None:
    if code is not None:
        module.write_text(code)
    config = {"transform": "theirs:clean"}
    failure = bench.failure(bench.work("spark.python", config))
    assert words in failure.reason
    assert failure.is_released


def test_what_a_transform_raises_is_retried(bench: Bench, module: Path) -> None:
    module.write_text(
        "from pyspark.sql.functions import udf\n"
        "def clean(inputs, context):\n"
        "    raise ValueError('the moon is wrong')\n"
        "@udf('int')\n"
        "def broken(x):\n"
        "    raise ValueError(f'bad {x}')\n"
        "def far(inputs, context):\n"
        "    return inputs['raw'].select(broken('a').alias('b'))\n"
    )
    raw = bench.publish({"a": [1]})
    near = bench.failure(
        bench.work("spark.python", {"transform": "theirs:clean"}, inputs={"raw": [raw]})
    )
    assert near.reason.startswith("ValueError: the moon is wrong\n")
    assert "theirs.py" in near.reason
    assert "line 3, in clean" in near.reason
    assert near.is_retried
    far = bench.failure(
        bench.work("spark.python", {"transform": "theirs:far"}, inputs={"raw": [raw]})
    )
    assert far.is_retried
    assert far.reason.startswith("ValueError: bad 1\n")
    assert "line 6, in broken" in far.reason


def test_do_not_retry_is_obeyed(bench: Bench, module: Path) -> None:
    module.write_text(
        "from penstock import DoNotRetry\n"
        "def clean(inputs, context):\n    raise DoNotRetry('never')\n"
    )
    failure = bench.failure(bench.work("spark.python", {"transform": "theirs:clean"}))
    assert "never" in failure.reason
    assert not failure.is_retried


def test_damaged_files_are_found_before_they_are_read(bench: Bench) -> None:
    raw = bench.publish({"a": [1, 2, 3]})
    path = path_of(raw.location) / "part-00000.parquet"
    body = path.read_bytes()
    path.write_bytes(body[:-1] + b"!")
    work = bench.work("spark.sql", {"sql": "SELECT * FROM raw"}, inputs={"raw": [raw]})
    failure = bench.failure(work)
    assert "is not what its manifest says" in failure.reason
    assert not failure.is_retried
    path.unlink()
    assert "is not there" in bench.failure(work).reason


def test_what_is_large_is_compared_page_by_page_as_it_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "WHOLE_BYTES_MAX", 0)
    raw = bench.publish({"a": list(range(1000)), "b": [hex(each) for each in range(1000)]})
    path = path_of(raw.location) / "part-00000.parquet"
    body = bytearray(path.read_bytes())
    body[parquet.read_metadata(path).row_group(0).column(1).data_page_offset + 99] ^= 1
    path.write_bytes(body)

    def sums(column: str) -> AttemptWork:
        query = {"sql": f"SELECT sum(hash({column})) AS s FROM raw"}
        return bench.work("spark.sql", query, inputs={"raw": [raw]})

    # A pass over the whole file would have found it, and would have read what nobody asks for.
    assert bench.rows(bench.made(sums("a")))
    failure = bench.failure(sums("b"))
    assert f"{path.name} is damaged: a page of it" in failure.reason
    assert not failure.is_retried
    path.write_bytes(body[:-1])
    assert "has another size" in bench.failure(sums("a")).reason
    path.unlink()
    assert "is not there" in bench.failure(sums("a")).reason


def test_a_manifest_that_was_not_published_is_not_read(bench: Bench) -> None:
    raw = bench.publish({"a": [1]})
    other = Part(location=raw.location, partition_key="x", manifest="0" * 64)
    work = bench.work("spark.sql", {"sql": "SELECT * FROM raw"}, inputs={"raw": [other]})
    assert "is not the one that was published" in bench.failure(work).reason


def test_parts_that_do_not_fit_together_are_told(bench: Bench) -> None:
    one, two = bench.publish({"a": [1]}, key="x"), bench.publish({"a": ["one"]}, key="y")
    work = bench.work("spark.sql", {"sql": "SELECT * FROM raw"}, inputs={"raw": [one, two]})
    failure = bench.failure(work)
    assert "The parts of the input raw (dataset raw) do not fit together: The column 'a'" in (
        failure.reason
    )
    assert not failure.is_retried


def test_built_ins_say_what_they_lack(bench: Bench) -> None:
    raw = bench.publish({"a": [1]})
    for config, words in [
        ({"by": ["nope"], "measures": {"n": "count(*)"}}, "config.by: the input has no column"),
        ({"by": ["a"], "measures": {"n": "summ(a)"}}, "config.measures.n: "),
    ]:
        failure = bench.failure(bench.work("rollup", config, inputs={"raw": [raw]}))
        assert words in failure.reason
        assert not failure.is_retried
    two = bench.work("compact", {}, inputs={"raw": [raw], "more": [raw]})
    assert "compact reads one input, and the job has 2" in bench.failure(two).reason
