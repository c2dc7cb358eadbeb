"""What one job leaves in a session, a thread or the context of Spark, no other finds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark.engine_protocol import JobGroup
from penstock.runtimes.spark.internals import SharedState

GROUP = JobGroup(name="group", title="a run", tasks="task 1")


@contextmanager
def a_run(jvm: Any) -> Iterator[Any]:
    """A session as a slot uses it, in this thread."""
    session = jvm.fresh()
    jvm.enter(session, GROUP)
    try:
        yield session
    finally:
        jvm.leave(session)


class Neighbour:
    """A run beside others, in a thread of its own, with something of each kind."""

    def __init__(self, jvm: Any) -> None:
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        ready = threading.Event()
        self._run = self._pool.submit(self._work, jvm, ready)
        assert ready.wait(60)

    def _work(self, jvm: Any, ready: threading.Event) -> dict[str, Any]:
        with a_run(jvm) as session:
            frame = session.range(7).selectExpr("id * 3 AS tripled").cache()
            frame.count()
            frame.createOrReplaceTempView("mine")
            session.sql("CREATE TABLE beside AS SELECT 1 AS one")
            ready.set()
            assert self._over.wait(300)
            return {
                "is cached": frame.storageLevel.useMemory,
                "view": session.sql("SELECT count(*) FROM mine").collect()[0][0],
                "table": session.sql("SELECT one FROM beside").collect()[0][0],
            }

    def end(self) -> dict[str, Any]:
        self._over.set()
        try:
            return self._run.result(60)
        finally:
            self._pool.shutdown()


class Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "n int"

    def reader(self, schema: Any) -> DataSourceReader:
        raise NotImplementedError


def _leaves(session: Any) -> None:
    context = session.sparkContext
    session.range(3).createOrReplaceTempView("theirs")
    session.sql("CREATE TEMPORARY FUNCTION twice(x INT) RETURNS INT RETURN 2 * x")
    session.udf.register("thrice", lambda x: 3 * x, "int")
    session.sql("DECLARE VARIABLE secret INT DEFAULT 42")
    session.dataSource.register(Numbers)
    session.conf.set("spark.sql.shuffle.partitions", "17")
    session.sql("CREATE DATABASE theirs_too")
    session.sql("USE theirs_too")
    session.sql("CREATE TABLE default.left_behind AS SELECT 1 AS one")
    session.sql("CACHE TABLE cached AS SELECT id FROM range(5)")
    session.range(11).selectExpr("id + 1 AS more").persist().count()
    context.parallelize([1, 2]).cache().count()
    context.setLocalProperty("theirs", "yes")
    context.addJobTag("theirs")
    SparkSession.builder.config("spark.theirs", "yes").getOrCreate().range(1).createTempView("v2")


def _finds(session: Any) -> set[str]:
    """Of all that the run before has left, what there is."""
    attempts: dict[str, Callable[[], Any]] = {
        "view": lambda: session.table("theirs"),
        "function": lambda: session.sql("SELECT twice(1)").collect(),
        "registered function": lambda: session.sql("SELECT thrice(1)").collect(),
        "variable": lambda: session.sql("SELECT secret").collect(),
        "data source": lambda: session.read.format("numbers").load(),
        "database": lambda: session.sql("USE theirs_too"),
        "table": lambda: session.table("default.left_behind"),
        "cached view": lambda: session.table("cached"),
        "view by the builder": lambda: SparkSession.builder.getOrCreate().table("v2"),
        "view by the active session": lambda: SparkSession.active().table("v2"),
    }
    found = set()
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception:  # noqa: BLE001 - it is not there
            continue
        found.add(name)
    context = session.sparkContext
    facts = {
        "setting": session.conf.get("spark.sql.shuffle.partitions") == "17",
        "setting by the builder": session.conf.get("spark.theirs", "") == "yes",
        "current database": session.catalog.currentDatabase() != "default",
        "property": context.getLocalProperty("theirs") is not None,
        "tag": bool(context.getJobTags()),
        "cache": session.range(11).selectExpr("id + 1 AS more").storageLevel.useMemory,
    }
    return found | {name for name, is_there in facts.items() if is_there}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("has_neighbour", [False, True])
def test_a_job_finds_nothing_and_leaves_nothing(jvm: Any, has_neighbour: bool) -> None:
    neighbour = Neighbour(jvm) if has_neighbour else None
    with a_run(jvm) as session:
        _leaves(session)
        assert len(_finds(session)) > 13, "what is looked for below can be found"
        families = jvm._families._count
    with a_run(jvm) as session:
        assert _finds(session) == set()
        assert jvm._families._count == families, "what is clean is used again"
        with pytest.raises(Exception, match="beside"):
            session.table("beside")
        # Nor is it in the way of what has its name, as that of another task of the same job has.
        session.sql("CREATE TABLE beside AS SELECT 2 AS two")
        assert session.sql("SELECT two FROM beside").collect()[0][0] == 2
    if neighbour is not None:
        assert neighbour.end() == {"is cached": True, "view": 7, "table": 1}
    assert not jvm.base.catalog.listTables()
    assert not jvm.base.sparkContext._jsc.getPersistentRDDs().size()


def test_a_family_that_is_not_clean_serves_nobody(
    jvm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, kind: str, name: str) -> None:
        raise Py4JError(f"the {kind} {name} stays")

    with monkeypatch.context() as patched:
        patched.setattr(SharedState, "drop", refuse)
        with a_run(jvm) as session:
            session.sql("CREATE TABLE stays AS SELECT 1 AS one")
    for _ in range(2):
        with a_run(jvm) as session:
            assert not session.catalog.tableExists("stays")


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.range(1).createGlobalTempView("g"),
        lambda session: session.range(1).createOrReplaceGlobalTempView("g"),
        lambda session: session.sql("-- hm\n create /* x */ Global temporary VIEW g AS SELECT 1"),
        lambda session: session.sql("CLEAR\nCACHE"),
        lambda session: session.catalog.clearCache(),
        lambda session: session.sql("ADD JAR '/x.jar'"),
        lambda session: session.sparkContext.addPyFile("/x.py"),
        lambda session: session.sparkContext.setCheckpointDir("/x"),
        lambda session: session.sparkContext.setLogLevel("OFF"),
        lambda session: session.stop(),
    ],
)
def test_what_would_change_the_context_is_refused(jvm: Any, call: Callable[[Any], Any]) -> None:
    with a_run(jvm) as session:
        with pytest.raises(WorkFailed, match="other tasks in the same JVM") as caught:
            call(session)
        assert not caught.value.is_retried


def test_global_views_that_got_through_are_dropped(jvm: Any) -> None:
    with a_run(jvm) as session:
        session.sql("EXECUTE IMMEDIATE 'CREATE GLOBAL TEMPORARY VIEW g AS SELECT 1 AS one'")
        assert session.table("global_temp.g").count() == 1
    with a_run(jvm) as session, pytest.raises(Exception, match="global_temp"):
        session.table("global_temp.g")


def test_a_thread_that_a_job_starts_has_the_session_of_the_job(jvm: Any) -> None:
    """And not the host's own, in which the next one would find what it has made."""
    with a_run(jvm) as session, ThreadPoolExecutor(1) as pool:
        builder = SparkSession.builder.config("spark.sql.shuffle.partitions", "7")
        found = pool.submit(builder.getOrCreate).result(60)
        assert found is session
        with pytest.raises(WorkFailed, match="other tasks in the same JVM"):
            pool.submit(session.sparkContext.addPyFile, "/x.py").result(60)
    assert jvm.base.conf.get("spark.sql.shuffle.partitions") != "7"


def test_a_job_whose_database_is_gone_leaves_nothing(jvm: Any) -> None:
    neighbour = Neighbour(jvm)
    with a_run(jvm) as session:
        session.sql("CREATE DATABASE theirs")
        session.sql("USE theirs")
        session.range(13).selectExpr("id + 2 AS more").cache().count()
        session.sql("DROP DATABASE theirs")
    with a_run(jvm) as session:
        assert not session.range(13).selectExpr("id + 2 AS more").storageLevel.useMemory
    assert neighbour.end()["is cached"]
