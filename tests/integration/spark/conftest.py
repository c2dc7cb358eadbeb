"""One JVM for all tests of the engine, in this process, and a bench for each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.errors import PenstockError
from penstock.runtimes.spark.classic import ClassicSessions
from tests.integration.spark.bench import Bench, settings_of

PASSWORD_NAME, PASSWORD = "spark.hadoop.fs.s3a.bucket.penstock.secret.key", "hunter2-of-a-bucket"
"""Of a bucket that there is not: looked for where it must not be."""
ODD_NAME, ODD = "spark.odd #!:= key", "= a\\b\n#ü"
CONF = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    PASSWORD_NAME: PASSWORD,
    ODD_NAME: ODD,
}


@pytest.fixture(scope="session")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The sessions of one SparkContext. Without Java tests are skipped, and fail in CI."""
    folder = tmp_path_factory.mktemp("spark")
    before = dict(os.environ)
    ended: list[str] = []
    try:
        sessions = ClassicSessions(
            settings_of(folder, conf=CONF, archive=False, driver_memory="1g"), folder, ended.append
        )
    except PenstockError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Spark: {error.message} {error.hint}")
    yield sessions
    sessions.stop()
    os.environ.clear()
    os.environ.update(before)
    assert not ended


@pytest.fixture
def spark(jvm: Any) -> Iterator[Any]:
    """A session of its own."""
    session = jvm.fresh()
    yield session
    jvm.leave(session)


@pytest.fixture
def bench(spark: Any, tmp_path: Path) -> Bench:
    """An engine over a folder, in whose name is what may be in one."""
    return Bench(spark, tmp_path / "root [x] {y}? a=1 ü%", tmp_path)
