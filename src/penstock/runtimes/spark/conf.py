"""What Spark is told when a session is made, as far as the user's own `conf` says nothing. Pure.

On a local master, driver and executor are one JVM that only this machine can reach, and of this
machine only who has a secret that Spark makes for each JVM and keeps in its memory: untrusted work
runs beside it. Shuffles of little data are few partitions, because tasks of Penstock run side by
side already; those of more are adapted to it by Spark. Elsewhere the cluster's own settings hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from penstock.runtimes.spark.settings import SparkSettings, heap_bytes

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
        # What is larger leaves through files; without a bound it would end the JVM.
        "spark.driver.maxResultSize": f"{heap_bytes(settings.driver_memory) // 4}b",
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
    return {**said, **settings.conf, **joined}


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
    return {**_EVERYWHERE, **settings.conf}


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
