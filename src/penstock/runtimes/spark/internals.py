"""All that Penstock uses of PySpark beyond what PySpark promises, in one place.

Spark has no public way to what stands here: the JVM behind a session, its plans and its figures,
the schema of Arrow for a schema of Spark, the retries of a Connect client. These change between
releases without notice. So nothing else below `runtimes/spark` names them (`tests/architecture`
sees to that), and a host tries them when it starts: `check_driver` for a JVM of our own,
`check_client` for a Connect server. What is missing is said in one sentence, with the release,
before any task has run.

Tried by `make spark` on the lowest, a middle and the newest release that is allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, java_gateway
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, types
from pyspark.sql.pandas import types as arrow_types

from penstock.kernel.errors import WorkFailed

_NOBODY: Final = "penstock-nobody"


def arrow_schema(schema: types.StructType) -> Any:
    """The schema that Arrow has for it; instants are in UTC."""
    convert: Any = arrow_types.to_arrow_schema
    # Up to 4.1 instants are in UTC without being asked.
    is_asked = "timezone" in inspect.signature(convert).parameters
    return convert(schema, timezone="UTC") if is_asked else convert(schema)


def launch_jvm(**how: Any) -> Any:
    """Start a JVM; its gateway, which has the process as `proc`. `how` is for `Popen`."""
    launch: Any = java_gateway.launch_gateway
    return launch(None, how)


def jvm_of(session: Any) -> Any:
    """The names of the JVM behind a session or a context; None for a Connect session."""
    return getattr(session, "_jvm", None)


def scala_context(context: SparkContext) -> Any:
    """The context in the JVM."""
    return context._jsc.sc()  # noqa: SLF001 - PySpark has no other way


def status_store(scala: Any) -> Any:
    """Where the driver keeps figures of jobs and stages."""
    return scala.statusStore()


def json_mapper(jvm: Any) -> Any:
    """Turns Spark's own values to JSON, so that each costs one call."""
    mapper = jvm.com.fasterxml.jackson.databind.ObjectMapper()
    mapper.registerModule(jvm.com.fasterxml.jackson.module.scala.DefaultScalaModule())
    return mapper


def wait_for_figures(scala: Any, *, milliseconds: int) -> None:
    """Until the driver knows the figures of jobs that have ended."""
    scala.listenerBus().waitUntilEmpty(milliseconds)


def scala_session(session: Any) -> Any:
    """A session in the JVM; None for one of a Connect server."""
    return getattr(session, "_jsparkSession", None)


def session_class(jvm: Any) -> Any:
    """What knows which session is the active one of a thread."""
    return SparkSession._get_j_spark_session_class(jvm)  # noqa: SLF001 - PySpark has no other way


class SharedState:
    """What all sessions of a context share: the cache, the catalog, global views."""

    def __init__(self, session: Any) -> None:
        shared = scala_session(session).sharedState()
        self._context = session.sparkContext._jsc  # noqa: SLF001 - PySpark has no other way
        self._cache = shared.cacheManager()
        self._catalog = shared.externalCatalog()
        self._views = shared.globalTempViewManager()
        # A metastore is others' too, and keeps what it is given.
        self._is_ours = session.conf.get("spark.sql.catalogImplementation") == "in-memory"

    def names(self) -> set[tuple[str, str]]:
        """What there is: global views, databases, and what is in the default one of them."""
        found = {"view": self._views.listViewNames("*")}
        if self._is_ours:
            found |= {
                "database": self._catalog.listDatabases(),
                "table": self._catalog.listTables("default"),
                "function": self._catalog.listFunctions("default", "*"),
            }
        return {
            (kind, name)
            for kind, names in found.items()
            for name in str(names.mkString("\n")).splitlines()
        }

    def drop(self, kind: str, name: str) -> None:
        """Drop one of these. Raises `Py4JError` if that fails."""
        match kind:
            case "view":
                self._views.remove(name)
            case "database":
                self._catalog.dropDatabase(name, True, True)  # noqa: FBT003 - Scala's own
            case "table":
                self._catalog.dropTable("default", name, True, False)  # noqa: FBT003
            case _:
                self._catalog.dropFunction("default", name)

    def has_cached(self) -> bool:
        """Whether anything is cached by a frame or a name."""
        return not self._cache.isEmpty()

    def clear(self) -> None:
        """Drop whatever is cached."""
        self._cache.clearCache()
        kept = self._context.getPersistentRDDs()
        if kept.size():
            for each in kept.values():
                each.unpersist(False)  # noqa: FBT003 - Java's own

    def drop_nothing(self) -> None:
        """Try what drops, with names that there are not; a function last, since that is refused."""
        for kind in ("view", *(("database", "table", "function") if self._is_ours else ())):
            self.drop(kind, _NOBODY)


def session_of_catalog(catalog: Any) -> Any:
    """The session that a catalog is of."""
    return catalog._sparkSession  # noqa: SLF001 - PySpark has no other way


def builder_options(builder: Any) -> dict[str, Any]:
    """What a builder of sessions was told."""
    return dict(builder._options)  # noqa: SLF001 - PySpark has no other way


def query_execution(frame: DataFrame) -> Any:
    """The plans of a frame in the JVM; None for one of a Connect session."""
    plan: Any = getattr(frame, "_jdf", None)
    return None if plan is None else plan.queryExecution()


def optimized_plan(frame: DataFrame) -> Any:
    """The optimized plan of a frame in the JVM; None for one of a Connect session."""
    execution = query_execution(frame)
    return None if execution is None else execution.optimizedPlan()


def planned_bytes(plan: Any) -> int:
    """How many bytes the optimizer expects of a plan."""
    # A number, or one of Scala's that is written as one.
    return int(str(plan.stats().sizeInBytes()))


def is_of_connect(frame: DataFrame) -> bool:
    """Whether a frame is of a Connect session."""
    return type(frame).__module__.startswith("pyspark.sql.connect")


def connect_observation() -> Any:
    """An observation for a frame of a Connect session."""
    from pyspark.sql.connect import observation  # noqa: PLC0415 - needs gRPC

    return observation.Observation()


def java_trace(error: BaseException) -> str:
    """The trace that the JVM had for an error of PySpark's, with its causes; empty if it had none.

    The errors of a Connect server have it only where the server is told to send it.
    """
    return str(getattr(error, "_stackTrace", None) or "")


def limit_retries(session: Any, *, retries_max: int, pause_ms_max: int) -> None:
    """Bound how long a Connect session tries to reach a server that is gone."""
    from pyspark.sql.connect.client.retries import DefaultPolicy  # noqa: PLC0415 - needs gRPC

    policy = DefaultPolicy(max_retries=retries_max, max_backoff=pause_ms_max)
    session.client.set_retry_policies([policy])


def ask_server(session: Any) -> None:
    """Ask a Connect server for something that does nothing; raises if it does not answer."""
    session.client.interrupt_tag(_NOBODY)


def check_driver(session: Any) -> None:
    """Raise `WorkFailed` if a driver lacks something that is used here."""
    _refuse(_missing(_driver_checks(session)))


def check_client(session: Any) -> None:
    """Raise `WorkFailed` if a Connect client lacks something that is used here."""
    # Whether the server answers is another question, with its own sentence.
    checks: list[tuple[str, Callable[[], Any]]] = [
        ("to_arrow_schema", _check_arrow),
        ("connect.observation", connect_observation),
        ("client.set_retry_policies", lambda: session.client.set_retry_policies),
        ("client.interrupt_tag", lambda: session.client.interrupt_tag),
        ("Builder._options", lambda: builder_options(session.builder)),
        ("Catalog._sparkSession", lambda: session_of_catalog(session.catalog)),
    ]
    _refuse(_missing(checks))


def _driver_checks(session: Any) -> list[tuple[str, Callable[[], Any]]]:
    context = session.sparkContext
    jvm = jvm_of(session)
    return [
        ("to_arrow_schema", _check_arrow),
        ("SparkContext.isStopped", lambda: scala_context(context).isStopped()),
        (
            "SparkContext.cancelJobGroupAndFutureJobs",
            # One that is never used: what comes later in it would be cancelled too.
            lambda: scala_context(context).cancelJobGroupAndFutureJobs(_NOBODY),
        ),
        (
            "SparkContext.statusTracker.getJobIdsForGroup",
            lambda: scala_context(context).statusTracker().getJobIdsForGroup(_NOBODY),
        ),
        ("statusStore.job", lambda: status_store(scala_context(context)).job(-1)),
        (
            "statusStore.lastStageAttempt",
            lambda: status_store(scala_context(context)).lastStageAttempt(-1),
        ),
        ("listenerBus", lambda: wait_for_figures(scala_context(context), milliseconds=0)),
        ("ObjectMapper", lambda: json_mapper(jvm).writeValueAsString(1)),
        ("slf4j.MDC", lambda: jvm.org.slf4j.MDC.get(_NOBODY)),
        ("SparkSession.getActiveSession", lambda: session_class(jvm).getActiveSession()),
        ("sharedState", lambda: SharedState(session).names()),
        ("sharedState.cacheManager.isEmpty", lambda: SharedState(session).has_cached()),
        ("sharedState.cacheManager.clearCache", lambda: SharedState(session).clear()),
        ("sharedState.externalCatalog.drop", lambda: SharedState(session).drop_nothing()),
        ("Builder._options", lambda: builder_options(SparkSession.builder)),
        ("Catalog._sparkSession", lambda: session_of_catalog(session.catalog)),
        ("optimizedPlan.stats", lambda: _check_plan(session.range(1))),
    ]


def _check_arrow() -> None:
    found = arrow_schema(types.StructType([types.StructField("at", types.TimestampType())]))
    if str(found.field("at").type) != "timestamp[us, tz=UTC]":
        raise TypeError(found)


def _check_plan(frame: DataFrame) -> None:
    plan = optimized_plan(frame)
    planned_bytes(plan.collectLeaves().apply(0))


def _missing(checks: list[tuple[str, Callable[[], Any]]]) -> Iterator[str]:
    for name, check in checks:
        try:
            check()
        except (Py4JJavaError, PySparkException):
            continue  # It is there, and says no.
        except (Py4JError, ArithmeticError, AttributeError, ImportError, TypeError, ValueError):
            yield name


def _refuse(missing: Iterator[str]) -> None:
    if said := ", ".join(missing):
        raise WorkFailed(
            f"PySpark {pyspark.__version__} cannot be used: it lacks {said}, or has it in another"
            " form. Install a release that Penstock is tested with; CONTRIBUTING.md names them.",
            is_retried=False,
        )
