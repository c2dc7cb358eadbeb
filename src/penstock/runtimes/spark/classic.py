"""Sessions of a JVM that this process starts: local masters and clusters. Imports PySpark.

The JVM is a child in the process group of the host, so it ends with it. It is started by
PySpark's own launcher, with its output in the log of the host. All sessions share one
SparkContext, and what jobs leave in it is kept from others (`isolation`); each thread of ours
has a thread in the JVM (pinned threads), which is what job groups, pools and the task in lines
of the log hang on.

Figures of jobs and stages are as Spark's own REST interface has them: `progress_of` for jobs
that run, `metrics_of` for those that have ended. A stage that was made by an earlier job is
skipped by later ones: it counts once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.catalog import Catalog
from pyspark.sql.classic.dataframe import DataFrame

from penstock.kernel.errors import WorkFailed
from penstock.runtimes.spark import isolation
from penstock.runtimes.spark.engine_protocol import JobGroup
from penstock.runtimes.spark.errors import why_jvm_ended
from penstock.runtimes.spark.internals import (
    check_driver,
    json_mapper,
    jvm_of,
    launch_jvm,
    scala_context,
    scala_session,
    session_class,
    status_store,
    wait_for_figures,
)
from penstock.runtimes.spark.java import archive_of, find_java, packaged_java, spark_home_of
from penstock.runtimes.spark.settings import (
    SparkSettings,
    classic_conf,
    environment,
    java_options,
    log_config,
    properties,
    python_of,
)

_SUMS: Final = {
    "executor_run_ms": ("executorRunTime", 1),
    "executor_cpu_ms": ("executorCpuTime", 1_000_000),
    "gc_ms": ("jvmGcTime", 1),
    "input_bytes": ("inputBytes", 1),
    "input_rows": ("inputRecords", 1),
    "output_bytes": ("outputBytes", 1),
    "output_rows": ("outputRecords", 1),
    "shuffle_read_bytes": ("shuffleReadBytes", 1),
    "shuffle_write_bytes": ("shuffleWriteBytes", 1),
    "spill_memory_bytes": ("memoryBytesSpilled", 1),
    "spill_disk_bytes": ("diskBytesSpilled", 1),
}
_ALWAYS: Final = ("executor_run_ms", "shuffle_read_bytes", "shuffle_write_bytes")


def progress_of(jobs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How far jobs are. What is skipped is neither to be done nor done."""
    said = dict.fromkeys(("stages", "stages_done", "tasks", "tasks_done"), 0)
    for job in jobs:
        said["stages"] += len(job["stageIds"]) - int(job["numSkippedStages"])
        said["stages_done"] += int(job["numCompletedStages"])
        said["tasks"] += int(job["numTasks"]) - int(job["numSkippedTasks"])
        said["tasks_done"] += int(job["numCompletedTasks"])
    return said


def metrics_of(jobs: int, stages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What this many jobs, of these stages, took. Spilling nothing is not worth a word."""
    ran = [stage for stage in stages if stage["status"] != "SKIPPED"]
    said: dict[str, Any] = {
        "jobs": jobs,
        "stages": len(ran),
        "tasks": sum(int(stage["numCompleteTasks"]) for stage in ran),
    }
    for name, (field, unit) in _SUMS.items():
        total = sum(int(stage[field]) for stage in ran) // unit
        if total or name in _ALWAYS:
            said[name] = total
    return said


_log = logging.getLogger(__name__)

_SUBMIT: Final = "PYSPARK_SUBMIT_ARGS"
_JOBS_MAX: Final = 100
_STAGES_MAX: Final = 300
"""How much of a task's Spark jobs is looked at."""
_BUS_MS: Final = 500
_END_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 4.0


class ClassicSessions:
    """Sessions of one SparkContext."""

    def __init__(
        self,
        settings: SparkSettings,
        folder: Path,
        ended: Callable[[str], None],
        *,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> None:
        """Start the JVM. `ended` is told when it has ended unasked, and why.

        `meanwhile` is called in another thread while the context starts, which takes seconds.
        """
        self._settings = settings
        self._ended = ended
        self._is_stopped = False
        self._is_started = False
        java = find_java(settings.java, os.environ, packaged=packaged_java())
        self.java = java.version
        self.archive = archive_of(settings, java)
        self._gateway, conf = self._launch(settings, folder, spark_home_of(java, _kept(settings)))
        self._process: subprocess.Popen[bytes] = self._gateway.proc
        self.jvm = self._process.pid
        threading.Thread(target=self._watch, name="penstock-jvm", daemon=True).start()
        # Not before: a process is started with some of Python's locks as they are then.
        aside = threading.Thread(target=meanwhile, name="penstock-meanwhile")
        aside.start()
        try:
            context = SparkContext(conf=conf, gateway=self._gateway)
        finally:
            aside.join()
        self._context = context
        self._spark_context = scala_context(context)
        self._store = status_store(self._spark_context)
        self._tracker = self._spark_context.statusTracker()
        # A name in the JVM costs a call for each of its parts, so these are looked up once.
        jvm = jvm_of(context)
        self._mapper = json_mapper(jvm)
        self._mdc = jvm.org.slf4j.MDC
        self._arrays = jvm.java.util.Arrays
        self.spark = context.version
        self._properties = jvm.java.util.Properties
        self._active = session_class(jvm)
        self.base = SparkSession(context)
        check_driver(self.base)
        isolation.install(SparkSession, DataFrame, Catalog, SparkContext)
        self._families = isolation.SessionFamilies(self.base)
        self._thread = threading.local()
        self._is_started = True

    def fresh(self) -> Any:
        return self._families.fresh()

    def enter(self, session: Any, group: JobGroup) -> None:
        context = self._context
        if getattr(self._thread, "session", None) is not session:
            self._families.enter(session)
            # What the thread asks for its session by gets this one.
            self._active.setActiveSession(scala_session(session))
            context.setLocalProperty("spark.scheduler.pool", threading.current_thread().name)
            self._thread.session = session
        context.setJobGroup(group.name, group.title, interruptOnCancel=True)
        context.setLocalProperty("mdc.penstock", group.tasks)
        self._mdc.put("mdc.penstock", group.tasks)

    def leave(self, session: Any) -> None:
        self._thread.session = None
        try:
            self._mdc.clear()
            self._spark_context.setLocalProperties(self._properties())
            self._active.clearActiveSession()
        finally:
            self._families.leave(session)

    def cancel(self, group: str) -> None:
        self._spark_context.cancelJobGroupAndFutureJobs(group)

    def progress(self, groups: Sequence[str]) -> Mapping[str, int]:
        return progress_of(self._jobs(groups))

    def metrics(self, groups: Sequence[str]) -> Mapping[str, Any]:
        with suppress(Py4JError):
            # What has ended is known a moment later; in vain is no harm.
            wait_for_figures(self._spark_context, milliseconds=_BUS_MS)
        jobs = self._jobs(groups)
        stages = dict.fromkeys(stage for job in jobs for stage in job["stageIds"])
        get = self._store.lastStageAttempt
        found = (self._read(get, stage) for stage in list(stages)[:_STAGES_MAX])
        return metrics_of(len(jobs), [stage for stage in found if stage is not None])

    def why_dead(self) -> str:
        try:
            if not self._spark_context.isStopped():
                return ""
        except (Py4JError, OSError):
            return self._why_ended()
        return "The session of Spark was stopped while the task ran; nothing may call its stop()."

    def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """End the session, and the JVM if that takes no longer than this."""
        self._is_stopped = True
        with suppress(Exception):
            self.base.stop()
        with suppress(Exception):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(seconds)

    def _launch(
        self, settings: SparkSettings, folder: Path, java_home: Path
    ) -> tuple[Any, SparkConf]:
        config = folder / "log4j2.properties"
        config.write_text(log_config())
        archive = str(self.archive.path) if self.archive.is_there else ""
        options = java_options(
            settings, log_config=str(config), archive=archive, temporary=str(folder)
        )
        said = os.environ.get("SPARK_SUBMIT_OPTS", "")
        # A space in the path of a folder is the reason for quotes, which Spark's launcher knows.
        os.environ["SPARK_SUBMIT_OPTS"] = " ".join([*map(shlex.quote, options), said]).strip()
        os.environ["JAVA_HOME"] = str(java_home)
        os.environ.update(environment(settings, os.environ, folder=str(folder)))
        os.environ["PYSPARK_PYTHON"] = python_of(settings, os.environ, running=sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        conf = SparkConf(loadDefaults=False)
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        said_to_spark = classic_conf(settings, folder=str(folder), cores=cores)
        conf.setAll(list(said_to_spark.items()))
        try:
            with _submitting(folder, said_to_spark):
                return launch_jvm(stdout=sys.__stderr__, stderr=sys.__stderr__), conf
        except Exception as error:
            self.archive.forget()
            raise WorkFailed(
                f"The JVM of Spark did not start ({error}); its log says why."
            ) from error

    def _watch(self) -> None:
        self._process.wait()
        if not self._is_started:
            # It may have been the archive; without it, the next one shows.
            self.archive.forget()
        if not self._is_stopped:
            self._ended(self._why_ended())

    def _why_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.returncode
        return why_jvm_ended(code, memory=self._settings.driver_memory)

    def _jobs(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """Jobs of these groups, as far as Spark remembers them."""
        found: list[dict[str, Any]] = []
        for group in groups:
            said = self._arrays.toString(self._tracker.getJobIdsForGroup(group))
            for number in sorted(json.loads(said))[: _JOBS_MAX - len(found)]:
                job = self._read(self._store.job, number)
                if job is not None:
                    found.append(job)
        return found

    def _read(self, get: Callable[[int], Any], number: int) -> dict[str, Any] | None:
        """Something of the store, in one call; None if it is there no more, or not yet."""
        try:
            said: dict[str, Any] = json.loads(self._mapper.writeValueAsString(get(number)))
        except Py4JError:
            return None
        return said


@contextmanager
def _submitting(folder: Path, conf: Mapping[str, str]) -> Iterator[None]:
    """Within this, a JVM is started with these settings: they hold passwords, so not by arguments.

    PySpark would make arguments of them, which every user of the machine can read. The JVM has
    read the file by the time that it answers.
    """
    file = folder / "conf.properties"
    given = os.environ.get(_SUBMIT)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(properties(conf).encode())
    ours = ("--load-spark-defaults", "--properties-file", str(file))
    os.environ[_SUBMIT] = f"{shlex.join(ours)} {given or 'pyspark-shell'}"
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.environ.pop(_SUBMIT)
        if given is not None:
            os.environ[_SUBMIT] = given


def _kept(settings: SparkSettings) -> Path:
    return Path(settings.data) / "spark"
