"""What a user's function is given: its task, what it reads, where it writes, and how it reports.

    def clean(task):
        for number, file in enumerate(task.inputs["raw"].path.glob("*.csv")):
            (task.outputs["sales"].path / file.name).write_text(cleaned(file.read_text()))
            task.progress(files=number + 1)

It may be an `async def` as well. What it returns says what was made: None is every output at its
own place, for the task's own partition; a dict of outputs to locations is just these. `publish`
says more than a dict can, and then nothing is taken for granted. Raising fails the attempt, and
`DoNotRetry` the task.

`task.secrets` has the values of the job's secrets. `task.token` is the capability token of the
attempt and `task.credentials` are credentials for its own prefixes, or None where none are
minted; both are read anew each time, because they are renewed while the task runs. Of a task
with many prefixes they hold what is written, say in `lacks` what is missing, and
`task.credentials_for` gives credentials for some of those at a time.

When the task is to stop, a function that has looked at `stopping`, or waits by `wait`, is left
to end by itself within the grace period. Any other is interrupted by an exception at once:
`Stopped`, or `CancelledError` in an `async def`. All methods may be called from any thread;
`emit`, `query` and `wait` block, so an `async def` calls them by `asyncio.to_thread`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.datasets.layout import path_of
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import (
    AttemptWork,
    Part,
    ProducedOutput,
    WorkEvent,
    WorkInput,
    WorkOutput,
)
from penstock.runtimes.secrets import AttemptFiles, Secrets, TaskCredentials

if TYPE_CHECKING:
    import pyarrow as pa

Named = TypeVar("Named")

_FILE = "file://"


class Stopped(BaseException):
    """Raised inside a user's function that is to stop. Not an `Exception`, so it is not caught."""


class ReportChannel(Protocol):
    """Where a task's words go."""

    def progress(self, said: Mapping[str, Any]) -> None: ...

    def emit(self, news: Sequence[WorkEvent]) -> str: ...

    def credentials(self, locations: Sequence[str]) -> TaskCredentials: ...


class RecordingChannel:
    """A line to nobody, for trying a function out: what was said is kept."""

    def __init__(self) -> None:
        self.said: list[Mapping[str, Any]] = []
        self.news: list[WorkEvent] = []

    def progress(self, said: Mapping[str, Any]) -> None:
        self.said.append(said)

    def emit(self, news: Sequence[WorkEvent]) -> str:
        self.news.extend(news)
        return ""

    def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        raise InvalidInput(f"No credentials are minted for {', '.join(locations)} here.")


class StopFlag:
    """Whether a task is to stop, and whether its function looks at that."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.is_watched = False

    def set(self) -> None:
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the task is to stop, for who is not its function."""
        return self._event.is_set()

    def __bool__(self) -> bool:
        self.is_watched = True
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        self.is_watched = True
        return self._event.wait(seconds)


@dataclass(frozen=True, slots=True)
class FunctionInput:
    """An input: what is published of it for the task's partition, if anything is."""

    name: str
    dataset: str
    generation: str
    location: str | None
    revision: int | None
    parts: tuple[Part, ...] = ()
    """All that there is to read: several, if the task reads a range or all partitions, or if the
    partition was appended to. See `penstock.runtimes.base.WorkInput`."""
    missed: int = 0
    """With `read: changes`, how many partitions were removed before their changes were read."""

    @property
    def is_there(self) -> bool:
        """Whether anything is published."""
        return self.location is not None or bool(self.parts)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All parts as folders or files of this machine."""
        return tuple(path_of(each.location) for each in self.parts)

    @property
    def path(self) -> Path:
        """The location as a folder or file of this machine."""
        if self.location is None and self.parts:
            raise ValueError(
                f"The input {self.name} has {len(self.parts)} parts for this task; read all of"
                " them, by paths."
            )
        if self.location is None:
            raise FileNotFoundError(
                f"Nothing is published of the input {self.name} for this partition yet;"
                " look at is_there before, if that is to be expected."
            )
        return path_of(self.location)


@dataclass(frozen=True, slots=True)
class FunctionOutput:
    """An output: where this attempt, and no other, may write."""

    name: str
    dataset: str
    location: str
    folder: str = ""
    """Of an output in a bucket, a folder of this machine whose files are sent there afterwards."""
    columns: tuple[Column, ...] = ()
    """Those that the DAG declares, in their order; empty if it declares none."""

    @property
    def path(self) -> Path:
        """A folder of this machine, which is there: what it holds when the function has returned is
        the output, wherever the output lies."""
        return Path(self.folder) if self.folder else path_of(self.location)


class _Known(dict[str, Named]):
    """Inputs or outputs by name; for any other it is told which there are."""

    def __init__(self, noun: str, named: Mapping[str, Named]) -> None:
        super().__init__(named)
        self._noun = noun

    def __missing__(self, name: str) -> Named:
        there = f"it has {', '.join(self)}" if self else "it has none"
        raise KeyError(f"The job has no {self._noun} {name!r}; {there}.")


class FunctionTask:
    """One attempt, as a user's function sees it."""

    def __init__(
        self,
        work: AttemptWork,
        *,
        line: ReportChannel | None = None,
        stopping: StopFlag | None = None,
    ) -> None:
        self._line = line if line is not None else RecordingChannel()
        self._stopping = stopping if stopping is not None else StopFlag()
        self._lock = threading.Lock()
        self._emitted = 0
        self._written = 0
        self._published: list[ProducedOutput] = []
        self._handed = work.handed
        self.secrets: Mapping[str, str] = Secrets(work.secrets)
        """The values of the job's secrets, by name. No repr shows them."""
        self.id = work.task_id
        self.attempt = work.attempt
        self.job = work.job
        self.operator = work.operator
        self.generation = work.generation
        self.config = work.config
        self.resources = work.resources
        self.payload: Mapping[str, Any] = MappingProxyType(work.payload.get("payload") or {})
        """What came with the event; empty if nothing did, and not to be changed."""
        self.partition_key: str | None = work.payload.get("partition_key")
        self.start: int | None = work.payload.get("start")
        self.end: int | None = work.payload.get("end")
        self.cursor: int | None = work.payload.get("cursor")
        self.inputs = _Known("input", {n: _input(n, each) for n, each in work.inputs.items()})
        outputs = {n: _output(n, each, work.handed) for n, each in work.outputs.items()}
        self.outputs = _Known("output", outputs)

    @property
    def token(self) -> str:
        """The capability token as it is now; empty if the task was handed none."""
        return self._handed.token if self._handed is not None else ""

    @property
    def credentials(self) -> TaskCredentials | None:
        """Credentials for what the task reads and writes, as they are now; None without any."""
        return self._handed.credentials if self._handed is not None else None

    def credentials_for(self, *locations: str) -> TaskCredentials:
        """Credentials for some of what the task reads and writes: for these folders, or below.

            for part in task.inputs["hours"].parts:
                s3 = boto3.client("s3", **task.credentials_for(part.location).for_boto3())

        Several at a time cost less than one by one, and about seven to read fit. Blocks until
        they are there, good for 15 minutes; they are not renewed. `WorkFailed` says why there are
        none, which fails the attempt unless it is caught.
        """
        if not locations:
            raise ValueError("Say for which locations the credentials are to be.")
        if self._handed is None or not self._handed.has_credentials:
            raise InvalidInput(
                "No credentials are minted for this task.",
                hint="Look whether task.credentials is None before.",
            )
        return self._line.credentials(locations)

    def query(self, sql: str) -> pa.Table:
        """The rows of one SELECT over what this attempt was given to read, by names of datasets.

            table = task.query("SELECT city, sum(amount) AS total FROM sales GROUP BY city")
            for row in table.to_pylist():
                print(row["city"], row["total"])

        Needs pyarrow, and a query service (docs/query.md). Blocks until the result is whole.
        `InvalidInput` says what is wrong with the query, `WorkFailed` why it was not run to its
        end, `DispatcherUnavailable` that nobody could run it now.
        """
        if self._handed is None or not self._handed.dispatchers:
            raise InvalidInput("This task was handed no token, so it cannot run queries.")
        # Only now: most functions ask for nothing, and it is HTTP with all that it stands on.
        body = import_module("penstock.runtimes.task_requests").result_of(self._handed, sql)
        return import_module("pyarrow").ipc.open_stream(body).read_all()

    def buffer(
        self,
        dataset: str,
        rows: Iterable[Mapping[str, Any]],
        *,
        id: str,
        partition_key: str | None = None,
        made_at: int | None = None,
    ) -> int:
        """Publish rows into a buffered dataset that the job names in its `buffers`.

            task.buffer("alerts", [{"id": "a-1", "level": "warning"}], id="hour-7")

        Rows are JSON objects by the columns of the dataset. They count when this attempt has
        completed, all of them or none; of a source that is always on, at once, and then `made_at`
        says when they were made, in milliseconds since 1970. The same `id` with the same rows is
        the same batch; with other rows it is refused. Rows that are large together become several
        batches, whose number is returned. Blocks while the sink has fallen behind, for ten minutes
        at the most (docs/buffers.md).

        `InvalidInput` says what is wrong with the rows, `WorkFailed` why they are not taken,
        `DispatcherUnavailable` that nobody could take them now.
        """
        if self._handed is None or not self._handed.dispatchers:
            raise InvalidInput("This task was handed no token, so it cannot publish batches.")
        published: int = import_module("penstock.runtimes.task_requests").publish(
            self._handed, dataset, rows, batch=id, partition_key=partition_key, made_at=made_at
        )
        return published

    def write_rows(self, output: str | None, rows: Iterable[Mapping[str, Any]] | pa.Table) -> int:
        """Write rows as a Parquet file of an output whose `columns` the DAG declares.

            task.write_rows("alerts", [{"id": 1, "level": "high"}, {"id": 2, "level": None}])

        Rows are mappings, or a table of pyarrow, which this needs. Each call writes a file more;
        what all of them have is the output, as if the function had written the files itself.
        Returns how many rows they were. `InvalidInput` says which column or value does not fit.
        """
        name = self._named(output)
        place = self.outputs[name]
        if not place.columns:
            raise InvalidInput(
                f"The output {name} declares no `columns`.",
                hint="Write them in the DAG, as in columns: {id: bigint}, or write files yourself.",
            )
        with self._lock:
            self._written += 1
            path = place.path / f"rows-{self._written:05}.parquet"
        writing = import_module("penstock.runtimes.row_writer")
        return int(writing.write_rows(path, place.columns, rows))

    @property
    def output(self) -> FunctionOutput:
        """The output of a job that has one."""
        return self.outputs[self._named(None)]

    @property
    def stopping(self) -> bool:
        """Whether the task is to stop. Having looked, the function ends by itself."""
        return bool(self._stopping)

    def wait(self, seconds: float) -> bool:
        """Wait until the task is to stop, but no longer than this; whether it is to stop."""
        return self._stopping.wait(seconds)

    def progress(self, **said: Any) -> None:
        """Say how far the task is: whatever JSON can say, by name."""
        self._line.progress(said)

    def emit(
        self,
        output: str | None = None,
        *,
        event_id: str | None = None,
        partition_key: str | None = None,
        start: int | None = None,
        end: int | None = None,
        cursor: int | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> str:
        """Tell that an output has moved on, without ending; for sources.

        Blocks until the dispatcher has heard it, and returns why the source is to pause; nothing
        if it may go on. An event with the id of an earlier one is that one again: by default
        events are known by their cursor, and ones without a cursor are all new. The `payload`, a
        JSON object of 64 KiB at most, is what the functions that follow find in `task.payload`.
        """
        name = self._named(output)
        with self._lock:
            self._emitted += 1
            own = f"task:{self.id}:{self.attempt}:{self._emitted}"
        known_by = event_id or (own if cursor is None else f"cursor:{cursor}")
        news = WorkEvent(
            output=name,
            event_id=known_by,
            partition_key=partition_key,
            start=start,
            end=end,
            cursor=cursor,
            payload=dict(payload) if payload else None,
        )
        return self._line.emit([news])

    def publish(
        self,
        output: str | None = None,
        *,
        location: str | None = None,
        partition_key: str | None = None,
        start: int | None = None,
        end: int | None = None,
        cursor: int | None = None,
        append_key: str | None = None,
    ) -> None:
        """Have something published when the function has returned, and not before.

        By default it is what stands at the output's own place, for the task's own partition.
        """
        name = self._named(output)
        said = {"partition_key": partition_key, "start": start, "end": end, "cursor": cursor}
        slice_ = said if any(each is not None for each in said.values()) else self._slice()
        made = ProducedOutput(
            output=name,
            location=location or self.outputs[name].location,
            append_key=append_key,
            **slice_,
        )
        with self._lock:
            self._published.append(made)

    def made(self, returned: object) -> tuple[ProducedOutput, ...]:
        """What was made, by what was published and what the function has returned."""
        if returned is None:
            if self._published:
                return tuple(self._published)
            returned = {name: output.location for name, output in self.outputs.items()}
        if not isinstance(returned, Mapping) or not all(
            isinstance(name, str) and isinstance(location, str)
            for name, location in returned.items()
        ):
            raise TypeError(
                f"The function returned {type(returned).__name__}; it returns None, or a dict of"
                " the outputs that it has made to their locations."
            )
        said = [
            ProducedOutput(output=self._named(name), location=location, **self._slice())
            for name, location in returned.items()
        ]
        return (*self._published, *said)

    def _slice(self) -> dict[str, Any]:
        """The partition of the task, or its cursor if it has none."""
        if self.partition_key is None:
            return {"cursor": self.cursor}
        return {"partition_key": self.partition_key, "start": self.start, "end": self.end}

    def _named(self, output: str | None) -> str:
        if output is None:
            if len(self.outputs) == 1:
                return next(iter(self.outputs))
            raise ValueError(f"The job has {_these(self.outputs)}; say which one is meant.")
        if output not in self.outputs:
            raise ValueError(f"The job has no output {output!r}; it has {_these(self.outputs)}.")
        return output


def make_folders(work: AttemptWork) -> None:
    """Make the folders of the outputs that are on this machine."""
    for place in work.outputs.values():
        if place.location.startswith(f"{_FILE}/"):
            path_of(place.location).mkdir(parents=True, exist_ok=True)


def _input(name: str, given: WorkInput) -> FunctionInput:
    return FunctionInput(
        name,
        given.dataset,
        given.generation,
        given.location,
        given.revision,
        given.parts,
        given.missed,
    )


def _output(name: str, place: WorkOutput, handed: AttemptFiles | None) -> FunctionOutput:
    folder = handed.outputs.get(name, "") if handed else ""
    return FunctionOutput(name, place.dataset, place.location, folder, place.declared)


def _these(outputs: Mapping[str, Named]) -> str:
    return f"the outputs {', '.join(outputs)}" if outputs else "no outputs"
