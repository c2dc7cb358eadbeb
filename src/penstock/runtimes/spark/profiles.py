"""A job's own Spark: what its `resources` ask for, and the settings of a host that follow. Pure.

    resources:
      memory: 8GiB                            # on this machine the heap, on a cluster an executor's
      cpu: 4                                  # cores: of this machine, or of an executor
      conf: {spark.sql.ansi.enabled: "false"} # Spark's own settings
      packages: ["org.postgresql:postgresql:42.7.4"]
      python: env.tar.gz                      # or the path of an interpreter

Jobs whose settings come out the same share a host, and so a session; others never do. What a named
runtime has under `resources` holds for its jobs that say nothing else. Nothing of it is part of a
generation: another heap makes no other rows.

What says who may connect to a JVM, and where Spark runs, is the operator's and not a job's: jobs
of one worker are apart by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.base import Fault
from penstock.runtimes.resources import memory_bytes
from penstock.runtimes.spark.settings import SparkSettings

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


def profile_faults(resources: Mapping[str, Any], *, runtime: str) -> Iterator[Fault]:
    """What is wrong with what a job asks for."""
    for name in resources:
        if name not in RESOURCES:
            message = f"The runtime {runtime} has no resource {name!r}; it has {_known()}."
            yield Fault(f"resources.{name}", message)
    if "memory" in resources and (memory_bytes(resources["memory"]) or 0) < _MEMORY_MIN:
        yield Fault("resources.memory", "Write how much, 512MiB or more, as in 8GiB.")
    cpu = resources.get("cpu", 1)
    if isinstance(cpu, bool) or not isinstance(cpu, int) or not 1 <= cpu <= 1024:
        yield Fault("resources.cpu", "Write how many cores, as in 4.")
    packages = resources.get("packages", [])
    if not isinstance(packages, list | tuple) or not all(
        isinstance(each, str) and _COORDINATES.fullmatch(each) for each in packages
    ):
        message = 'Write a list of Maven packages, as in ["org.postgresql:postgresql:42.7.4"].'
        yield Fault("resources.packages", message)
    python = resources.get("python", "python3")
    if not isinstance(python, str) or not python or "," in python or "#" in python:
        message = "Write the path of an interpreter, or of an archive, as in env.tar.gz."
        yield Fault("resources.python", message)
    yield from _conf_faults(resources.get("conf", {}))


def _conf_faults(conf: object) -> Iterator[Fault]:
    if not isinstance(conf, Mapping):
        message = 'Write settings of Spark, as in {spark.sql.ansi.enabled: "false"}.'
        yield Fault("resources.conf", message)
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
            yield Fault("resources.conf", message)


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
        return msgspec.structs.replace(settings, conf=conf)
    if packages := asked.get("packages"):
        there = filter(None, conf.get("spark.jars.packages", "").split(","))
        conf["spark.jars.packages"] = ",".join(dict.fromkeys([*there, *packages]))
    if python := asked.get("python"):
        conf |= _python(settings, python, conf)
    return msgspec.structs.replace(settings, **_sized(settings, asked, conf))


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
