"""All that Penstock uses of PySpark beyond what PySpark promises, in one place.

Spark has no public way to what stands here: the JVM behind a session, its plans and its figures,
the schema of Arrow for a schema of Spark, the retries of a Connect client, and the classes that
our jar extends. These change between releases without notice. So nothing else below
`runtimes/spark` names them (`tests/architecture` sees to that), and a host tries them when it
starts: `check_driver` for a JVM of our own, `check_client` for a Connect server. What is missing is
said in one sentence, with the release, before any task has run.

Tried by `make spark` on the lowest, a middle and the newest release that is allowed.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, java_gateway, serializers, util
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.captured import unwrap_spark_exception
from pyspark.sql import DataFrame, SparkSession, types
from pyspark.sql.pandas import types as arrow_types

from penstock.kernel.errors import WorkFailed

COMMIT_PROTOCOL: Final = "penstock.spark.AttemptCommit"
"""What commits a write, in our jar."""
_NOBODY: Final = "penstock-nobody"
_CATALOG: Final = "spark.sql.catalogImplementation"
_WAREHOUSE: Final = "spark.sql.warehouse.dir"


def arrow_schema(schema: types.StructType) -> Any:
    """The schema that Arrow has for it; instants are in UTC."""
    convert: Any = arrow_types.to_arrow_schema
    # Up to 4.1 instants are in UTC without being asked.
    is_asked = "timezone" in inspect.signature(convert).parameters
    return convert(schema, timezone="UTC") if is_asked else convert(schema)


BatchSeen = Callable[[Any], object]
"""Is given each batch of Arrow when it is there; what it raises ends the gathering."""
_gatherings: Final = itertools.count()


def gather(frame: DataFrame, seen: BatchSeen) -> Any:
    """The rows of a frame, as `toArrow` gives them, whose Spark job ends where `seen` raises."""
    batches = (_from_server if is_of_connect(frame) else _from_jvm)(frame, seen)
    schema = arrow_schema(frame.schema)
    return pa.Table.from_batches(batches).cast(schema) if batches else schema.empty_table()


def _from_server(frame: DataFrame, seen: BatchSeen) -> list[Any]:
    plan: Any = frame._plan  # noqa: SLF001 - PySpark has no other way
    client: Any = frame.sparkSession.client
    found = []
    # A server ends the operation of an answer that is closed.
    with closing(client.to_table_as_iterator(plan.to_proto(client), plan.observations)) as answer:
        for each in answer:
            for batch in each.to_batches() if isinstance(each, pa.Table) else ():
                seen(batch)
                found.append(batch)
    return found


def _from_jvm(frame: DataFrame, seen: BatchSeen) -> list[Any]:
    context = frame.sparkSession.sparkContext
    tag = f"penstock-gathering-{next(_gatherings)}"
    context.addJobTag(tag)
    try:
        port, secret, server = frame._jdf.collectAsArrowToPython()  # noqa: SLF001
    finally:
        context.removeJobTag(tag)
    stream = _BatchStream(seen, lambda: context.cancelJobsWithTag(tag))
    try:
        load: Any = util._load_from_socket  # noqa: SLF001 - PySpark has no other way
        opened = load((port, secret), stream)
        # Up to 4.1 it is what was read, and later what opens and closes it.
        if hasattr(opened, "__enter__"):
            with opened:
                pass
    finally:
        with suppress(PySparkException, Py4JError) if stream.error else unwrap_spark_exception():
            server.getResult()  # Raises what the job has failed with.
    if stream.error is not None:
        raise stream.error
    return stream.found


class _BatchStream:
    """Reads what a JVM sends of a frame: batches as they are made, and then their order."""

    def __init__(self, seen: BatchSeen, cancel: Callable[[], None]) -> None:
        self.found: list[Any] = []
        self.error: Exception | None = None
        self._seen = seen
        self._cancel = cancel

    def load_stream(self, stream: Any) -> None:
        for batch in pa.ipc.open_stream(stream):
            # What the job has made before it is cancelled is read to its end, and not kept.
            if self.error is None:
                self._see(batch)
        # Less than 0 if the job has failed, which is raised elsewhere.
        read_int: Any = serializers.read_int
        count = 0 if self.error else max(0, read_int(stream))
        self.found = [self.found[read_int(stream)] for _ in range(count)]

    def _see(self, batch: Any) -> None:
        try:
            self._seen(batch)
            self.found.append(batch)
        except Exception as error:  # noqa: BLE001 - it is raised when the job has ended
            self.error = error
            self.found.clear()
            self._cancel()


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
    """What the sessions of one family share: the cache, the catalog, global views."""

    def __init__(self, session: Any) -> None:
        shared = scala_session(session).sharedState()
        self._cache = shared.cacheManager()
        self._catalog = shared.externalCatalog()
        self._views = shared.globalTempViewManager()
        self.is_ours = has_catalog_of_its_own(session)

    def names(self) -> set[tuple[str, str]]:
        """What there is: global views, databases, and what is in the default one of them."""
        found = {"view": self._views.listViewNames("*")}
        if self.is_ours:
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
        """Drop whatever is cached by a frame or a name."""
        self._cache.clearCache()

    def drop_nothing(self) -> None:
        """Try what drops, with names that there are not; a function last, since that is refused."""
        for kind in ("view", *(("database", "table", "function") if self.is_ours else ())):
            self.drop(kind, _NOBODY)


def has_catalog_of_its_own(session: Any) -> bool:
    """Whether tables are known to this JVM alone: a metastore is others' too, and keeps them."""
    return bool(session.conf.get(_CATALOG) == "in-memory")


def stranger(session: Any, *, warehouse: str) -> SparkSession:
    """A session of the same context that shares nothing else with this one, nor its folder."""
    jvm = jvm_of(session)
    options = jvm.java.util.HashMap()
    options.put(_WAREHOUSE, warehouse)
    scala = scala_context(session.sparkContext)
    made = session_class(jvm)(scala, options)
    # What its web page would show. One of these hears of the queries of all, and none is removed.
    listener = made.sharedState().statusStore().listener()
    scala.listenerBus().removeListener(listener.get())
    return SparkSession(session.sparkContext, made)


def clear_rdds(session: Any) -> None:
    """Drop whatever is cached in a context as an RDD."""
    kept = session.sparkContext._jsc.getPersistentRDDs()  # noqa: SLF001 - PySpark has no other way
    if kept.size():
        for each in kept.values():
            each.unpersist(False)  # noqa: FBT003 - Java's own


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


def plan_leaves(plan: Any, *, leaves_max: int) -> list[Any]:
    """What a plan reads, as nodes of it."""
    leaves = plan.collectLeaves()
    return [leaves.apply(place) for place in range(min(leaves.size(), leaves_max))]


def rdd_of_leaf(leaf: Any) -> str:
    """What the rows of a leaf come from, in Spark's words; empty if that is no RDD."""
    return str(leaf.rdd().toDebugString()) if leaf.nodeName() == "LogicalRDD" else ""


@dataclass(frozen=True, slots=True)
class PlanExpression:
    """An expression of a plan: a function, a column or a value."""

    kind: str
    """Spark's name of its class."""
    below: tuple[PlanExpression, ...] = ()
    column: str | None = None
    """The name of a column of the scan that the expression stands above."""
    type: Any = None
    value: str | None = None
    """Of a literal, with its type, as Spark writes them."""


@dataclass(frozen=True, slots=True)
class PlannedScan:
    """One use of a folder of files in a plan, and the filter directly above it."""

    folder: str
    filter: PlanExpression | None


_SCANS_MAX: Final = 100_000
_EXPRESSIONS: Final = "org.apache.spark.sql.catalyst.expressions."
_FILTER: Final = "org.apache.spark.sql.catalyst.plans.logical.Filter"
_RELATION: Final = "LogicalRelation"
# `DATE 'today'` is a literal to the parser. All else that tells the time has a class of its own.
_TIME_CLASS: Final = re.compile(r'expressions\.(?:Current\w*|Now|LocalTime\w*)"')


def asks_for_time(frame: DataFrame) -> bool:
    """Whether the plan of a classic frame has what tells the time."""
    return _TIME_CLASS.search(query_execution(frame).analyzed().toJSON()) is not None


def planned_scans(frame: DataFrame, folder: str) -> list[PlannedScan]:
    """The uses of what is in a folder of this name, in the optimized plan of a classic frame.

    Raises whatever, where plans have another form.
    """
    whole = optimized_plan(frame)
    inner = whole.subqueriesAll()
    found = []
    for plan in (whole, *(inner.apply(place) for place in range(inner.size()))):
        nodes: list[dict[str, Any]] = json.loads(plan.toJSON())
        leaves = plan_leaves(plan, leaves_max=_SCANS_MAX)
        places = [place for place, node in enumerate(nodes) if not node["num-children"]]
        for leaf, place in zip(leaves, places, strict=True):
            if leaf.nodeName() != _RELATION:
                continue
            roots = leaf.relation().location().rootPaths()
            root = roots.apply(0) if roots.size() == 1 else None
            if root is not None and root.getParent().getName() == folder:
                # A plan is written from the top: what comes before a leaf is above it, or beside.
                above = nodes[place - 1] if place else None
                condition = None
                if above is not None and above["class"] == _FILTER:
                    output = nodes[place]["output"]
                    names = {each["exprId"]["id"]: each["name"] for (each,) in output}
                    condition = _expression(iter(above["condition"]), names)
                found.append(PlannedScan(str(root.getName()), condition))
    return found


def _expression(nodes: Iterator[Mapping[str, Any]], names: Mapping[int, str]) -> PlanExpression:
    """The next expression, which is written from the top: each node before those below it."""
    node = next(nodes)
    kind = node["class"].removeprefix(_EXPRESSIONS)
    match kind:
        case "AttributeReference":
            return PlanExpression(kind, column=names.get(node["exprId"]["id"]))
        case "Literal":
            return PlanExpression(kind, type=node["dataType"], value=node["value"])
    below = tuple(_expression(nodes, names) for _ in range(node["num-children"]))
    return PlanExpression(kind, below)


def has_class(session: Any, name: str) -> bool:
    """Whether the driver has a class."""
    jvm = jvm_of(session)
    if jvm is None:
        return False
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    path = name.replace(".", "/") + ".class"
    return loader is not None and loader.getResource(path) is not None


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
        ("client.to_table_as_iterator", lambda: session.client.to_table_as_iterator),
        ("Builder._options", lambda: builder_options(session.builder)),
        ("Catalog._sparkSession", lambda: session_of_catalog(session.catalog)),
    ]
    _refuse(_missing(checks))


def _driver_checks(session: Any) -> list[tuple[str, Callable[[], Any]]]:
    context = session.sparkContext
    jvm = jvm_of(session)
    return [
        ("to_arrow_schema", _check_arrow),
        ("collectAsArrowToPython", lambda: gather(session.range(1).where("false"), id)),
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
        ("SparkSession.sharedState", lambda: _check_stranger(session)),
        ("getPersistentRDDs", lambda: clear_rdds(session)),
        ("Builder._options", lambda: builder_options(SparkSession.builder)),
        ("Catalog._sparkSession", lambda: session_of_catalog(session.catalog)),
        ("optimizedPlan.stats", lambda: _check_plan(session.range(1))),
        ("optimizedPlan.toJSON", lambda: _check_scans(session)),
        ("FileCommitProtocol", lambda: _check_commit(session)),
        ("SparkPlugin", lambda: _check_plugin(session)),
    ]


def _check_stranger(session: Any) -> None:
    if not has_catalog_of_its_own(session):
        return
    name = f"{_NOBODY}-{id(session)}"
    other = stranger(session, warehouse=f"{session.conf.get(_WAREHOUSE)}/{name}")
    ours = scala_session(session).sharedState()
    if str(other.conf.get(_WAREHOUSE)).endswith(name) and not ours.equals(
        scala_session(other.newSession()).sharedState()
    ):
        return
    raise TypeError(name)


def _check_arrow() -> None:
    found = arrow_schema(types.StructType([types.StructField("at", types.TimestampType())]))
    if str(found.field("at").type) != "timestamp[us, tz=UTC]":
        raise TypeError(found)


def _check_plan(frame: DataFrame) -> None:
    plan = optimized_plan(frame)
    planned_bytes(plan.collectLeaves().apply(0))


def _check_scans(session: Any) -> None:
    """Files are pruned by what is read from plans; whoever cannot read them prunes nothing."""
    with tempfile.TemporaryDirectory(prefix="penstock-plan-") as folder:
        Path(folder, "0").mkdir()
        files = session.read.schema("n bigint, s string").parquet(f"file://{folder}/0")
        frame = files.where("n > 1 AND s IN ('a', 'b')")
        (scan,) = planned_scans(frame, Path(folder).name)
        is_timed = asks_for_time(frame) or not asks_for_time(files.where("s > current_date()"))
    waiting = [] if scan.filter is None else [scan.filter]
    found = set()
    while waiting:
        one = waiting.pop()
        found.add((one.kind, *((each.column, each.type, each.value) for each in one.below)))
        waiting += one.below
    column, texts = ("s", None, None), [(None, "string", each) for each in "ab"]
    wanted = {("GreaterThan", ("n", None, None), (None, "long", "1")), ("In", column, *texts)}
    if is_timed or not wanted <= found:
        raise TypeError(found)


def _check_commit(session: Any) -> None:
    if not has_class(session, COMMIT_PROTOCOL):
        return
    jvm = jvm_of(session)
    protocols = jvm.org.apache.spark.internal.io.FileCommitProtocol
    try:
        made = protocols.instantiate(COMMIT_PROTOCOL, _NOBODY, "/", False)  # noqa: FBT003 - Scala's
    except Py4JJavaError as error:
        raise TypeError(COMMIT_PROTOCOL) from error
    # What Spark wants of a protocol beyond what ours has would be missed in the middle of a write.
    methods = [str(each.toString()) for each in made.getClass().getMethods()]
    if missing := [each for each in methods if " abstract " in each]:
        raise TypeError(missing)


def _check_plugin(session: Any) -> None:
    if not has_class(session, COMMIT_PROTOCOL):
        return
    plugin = jvm_of(session).penstock.spark.Plugin()
    if plugin.driverPlugin().receive(f"file {_NOBODY}") or plugin.executorPlugin() is None:
        raise TypeError(plugin)


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
