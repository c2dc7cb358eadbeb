"""The protocol between the runtime `spark` and its host process.

The runtime opens a session with its settings, gives the host work, and starts it: a *run* is
one task or a batch of them, under a number that is used once. Work travels in frames of its
own, because a batch may read very many partitions. The host reports when its session is ready,
how far runs are, how each task of them ended, and when a run is over: then nothing of it is
left in the host. `HostBroken` is its last frame. Frames are encoded as in
`penstock.runtimes.frames`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from penstock.runtimes.base import AttemptWork, WorkResult
from penstock.runtimes.spark.settings import SparkSettings


class OpenSession(msgspec.Struct, tag="hello", kw_only=True):
    """Make a session. `engine` is what runs work in it: `module:name`."""

    settings: SparkSettings
    engine: str
    folder: str
    """A folder of this host's own, which is removed after its end."""


class GiveWork(msgspec.Struct, tag="give", kw_only=True):
    """Work of a run that has not been started."""

    run: int
    work: AttemptWork


class StartRun(msgspec.Struct, tag="start", kw_only=True):
    """Run what was given under this number."""

    run: int


class DropTask(msgspec.Struct, tag="drop", kw_only=True):
    """Nobody wants this task any more."""

    run: int
    task_id: int


class EndHost(msgspec.Struct, tag="bye"):
    """End all runs, the session and the process."""


class HostReady(msgspec.Struct, tag="ready", kw_only=True):
    """There is a session."""

    spark: str
    """The version of Spark."""
    java: str
    """The version of Java; empty with Connect."""
    jvm: int
    """The process of the JVM; 0 with Connect."""
    is_archived: bool
    """Whether the JVM was started with an archive of classes, or is not to have one."""


class RunProgress(msgspec.Struct, tag="told", kw_only=True):
    """How far a run is; for these tasks of it."""

    run: int
    task_ids: list[int]
    said: dict[str, Any]


class RunFocus(msgspec.Struct, tag="begun", kw_only=True):
    """A run works for these of its tasks now, and for no other."""

    run: int
    task_ids: list[int]


class TaskEnded(msgspec.Struct, tag="ended", kw_only=True):
    """How a task has ended: with what it has made, or for a reason."""

    run: int
    task_id: int
    finished: WorkResult | None = None
    reason: str = ""
    is_retried: bool = True
    is_released: bool = False


class RunOver(msgspec.Struct, tag="over", kw_only=True):
    """Nothing of a run is left."""

    run: int


class HostMemory(msgspec.Struct, tag="resident"):
    """How much memory the host has, with all that it has started."""

    bytes: int


class HostBroken(msgspec.Struct, tag="broken", kw_only=True):
    """The host is of no use, and ends."""

    reason: str


ToHost = OpenSession | GiveWork | StartRun | DropTask | EndHost
FromHost = HostReady | RunProgress | RunFocus | TaskEnded | RunOver | HostMemory | HostBroken

to_host: Final = msgspec.json.Decoder(ToHost)
from_host: Final = msgspec.json.Decoder(FromHost)
