"""The contract of a runtime: it runs one attempt at a time of many, and returns what was produced.

A runtime is given `AttemptWork`, runs it, and returns a `WorkResult`. It knows no dispatcher, no
leases and no retries: those are its caller's, the worker. The contract:

- `run` may be called many times at once. It raises `WorkFailed` if the work failed, with a
  sentence that people read; any other error counts as a failure that is retried.
- It raises `WorkReleased` for work that cannot be run here, but elsewhere, such as a function
  whose module this worker does not have. That is no failure: the caller releases the task.
- Cancelling `run` stops the work: it is asked to end, has `work.grace_seconds` to do so, and is
  then ended by force. `run` returns or raises when nothing of it runs any more, and not before.
- Time limits are the caller's, by cancelling.
- What the runtime starts never outlives this process, even one that is killed with `kill -9`.
- `faults` judges a job when its DAG is applied, so that a wrong config is not found at night. It
  runs in the dispatcher, so it neither imports nor runs users' code.

`penstock.testing.runtime_contract` holds every runtime to this. Called by the worker (`run`) and
the dispatcher (`operators`, `faults`, `delivery`).

`AttemptPaths` says where an attempt writes and where its log is: names only, nothing is made.

    {root}/datasets/{dataset}/{generation}/{partition}/{attempt}
    {root}/datasets/{dataset}/{generation}/~many/{attempt}   for an output with `partition_by`
    {root}/scratch/{attempt}
    {logs}/{task}-{attempt}.log

The names are those of `penstock.datasets.layout`; an attempt's is made by its `attempt_name`.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from penstock.datasets.layout import attempt_prefix, many_prefix, scratch_prefix
from penstock.datasets.manifest import LISTED_MAX, File, InputTotal, Manifest, ManifestInput, digest
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service
from penstock.runtimes.secrets import AttemptFiles, TaskCredentials

if TYPE_CHECKING:
    from penstock.runtimes.uid_pool import UidPool


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """The roots below which an attempt writes: the dispatcher's, and its worker's for logs."""

    root: str
    """A URL: file:///FOLDER or s3://BUCKET/PREFIX."""
    logs: Path | None = None

    def __post_init__(self) -> None:
        parsed = urlsplit(self.root)
        is_file = parsed.scheme == "file" and parsed.path.startswith("/")
        if not is_file and not (parsed.scheme == "s3" and parsed.netloc):
            raise InvalidInput(
                f"{self.root!r} is no place for outputs.",
                hint="Write it as file:///FOLDER or s3://BUCKET/PREFIX.",
            )
        if parsed.query or parsed.fragment:
            raise InvalidInput(
                f"{self.root!r} has a query.", hint="Give the place for outputs without one."
            )

    def output(
        self, dataset: str, *, generation: str, payload: Mapping[str, Any], attempt_id: str
    ) -> str:
        """Where an attempt may write this output."""
        key = payload.get("partition_key")
        prefix = attempt_prefix(
            dataset,
            generation=generation,
            partition_key=key if isinstance(key, str) else None,
            attempt=attempt_id,
        )
        return f"{self.root.rstrip('/')}/{prefix}"

    def many(self, dataset: str, *, generation: str, attempt_id: str) -> str:
        """Where an attempt may write the partitions of this output that it finds by itself."""
        prefix = many_prefix(dataset, generation=generation, attempt=attempt_id)
        return f"{self.root.rstrip('/')}/{prefix}"

    def scratch(self, attempt_id: str) -> str:
        """Where an attempt may write what is not to be published."""
        return f"{self.root.rstrip('/')}/{scratch_prefix(attempt_id)}"

    def log(self, *, task_id: int, attempt: int) -> str:
        """The file for what an attempt prints; empty if nothing is kept."""
        return "" if self.logs is None else str(self.logs / f"{task_id}-{attempt}.log")


PROGRESS_BYTES_MAX: Final = 16 * 1024
"""How much an attempt may say of its progress at a time, as JSON in UTF-8 without spaces."""
PROGRESS_DEPTH_MAX: Final = 32
"""How deep that may be nested."""


def progress_fault(said: Mapping[str, Any]) -> str:
    """Why this cannot be passed on as progress, as a sentence; empty if it can.

    `TypeError` for what is no value of JSON at all.
    """
    try:
        size = len(msgspec.json.encode(said))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        return f"It cannot be written as JSON: {type(error).__name__}: {error}."
    if size > PROGRESS_BYTES_MAX:
        return f"It has {size:,} bytes as JSON; {PROGRESS_BYTES_MAX:,} are allowed."
    level: list[Any] = [said]
    for _ in range(PROGRESS_DEPTH_MAX):
        level = [
            inner
            for each in level
            if isinstance(each, Mapping | list | tuple)
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return ""
    return f"It is nested more than {PROGRESS_DEPTH_MAX} levels deep."


MAINTAIN: Final = "maintain"
"""The operator of work that writes what is published of its outputs (`WorkOutput.current`) anew, in
other files. No job names it: dispatchers make such tasks by themselves."""


class Delivery(StrEnum):
    """How a task of a runtime reaches whatever runs it."""

    WAKE = "wake"
    """Its operator is woken, and a worker claims."""
    INVOKE = "invoke"
    """A function is invoked for each task, which claims it."""


@dataclass(frozen=True, slots=True)
class RuntimeFault:
    """Something in a job that its runtime does not accept."""

    field: str
    """The path inside the job, as in `config.sql` or `resources.memory`."""
    message: str
    """A sentence that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that is published: a partition, or one of several that were appended to it."""

    location: str
    partition_key: str | None = None
    """None for a dataset without partitions."""
    start: int | None = None
    end: int | None = None
    revision: int | None = None
    append_key: str | None = None
    manifest: str | None = None
    """The SHA-256 of its manifest; None for what has none."""
    rows: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkInput:
    """An input of a task: what is published of it for the task's partition, if anything is."""

    dataset: str
    """Its name."""
    generation: str
    location: str | None = None
    revision: int | None = None
    has_data: bool = True
    """Whether there can be something to read: not of sources that only tell, and not of ranges."""
    parts: tuple[Part, ...] = ()
    """All that there is to read: one partition, or those within the task's range, or all of them;
    and of partitions that are appended to, everything that was. In the order of partitions, then
    of publication. `location` is that of the only one; of a partition that is appended to, that
    of the last; None where parts of several partitions are read. With `read: changes`, what the job
    has not consumed yet of all this."""
    columns: tuple[Column, ...] = ()
    """Of an input of which nothing has changed: what its rows would be, if that is known."""
    missed: int = 0
    """Partitions whose changes were removed before the job has read them."""

    @property
    def is_there(self) -> bool:
        """Whether something is published, be it that nothing of it has changed."""
        return bool(self.parts or self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOutput:
    """An output of a task: which dataset it is, and where this attempt, and no other, may write."""

    dataset: str
    """Its name."""
    uuid: str
    location: str
    partition_by: str = ""
    """An SQL expression over the rows: each of its values is a partition, with a folder of its own
    below `location`. Empty if the task makes its own partition."""
    current: tuple[Part, ...] = ()
    """What is published of the task's own partition, for what is to be merged with it, or to be
    written anew. With `partition_by`, of all partitions that it has told of
    (`ProducedOutput.base_revision`)."""
    columns: tuple[Column, ...] = ()
    """Those that the generation had when the task was claimed; empty if none are known."""
    declared: tuple[Column, ...] = ()
    """Those that the DAG declares, in their order; empty if it declares none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """How what was made is merged with what is published.

    Of the rows with one key, the one with the higher version is there afterwards; without versions,
    and of equal ones, the one of the later task. What was made says what it was merged with
    (`ProducedOutput.base_revision`): if that is not published any more by then, the work is run
    again, with `WorkOutput.current` as it is by then and in another place. What it has computed may
    be kept for that (`WorkResult.staged`), and is only merged then.
    """

    key: tuple[str, ...]
    version_by: str = ""
    delete_when: str = ""
    """A predicate in SQL: rows that satisfy it delete what has their key."""


NOT_READ: Final = -1
"""Said as `base_revision` of an output that was not merged yet: what is published of it is to be
told, and nothing is published now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What an output is to be merged of: computed and checked, in the attempt's scratch folder."""

    location: str
    files: tuple[File, ...]
    columns: tuple[Column, ...]
    keys: tuple[tuple[str, int | None, int | None], ...] = ()
    """With `partition_by`, the partitions that it has rows of, and their ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptWork:
    """One attempt, as a runtime sees it."""

    task_id: int
    attempt: int
    job: str
    operator: str
    generation: str
    config: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Why there is a task: `partition_key`, `start`, `end` or `cursor`, `payload` if something came
    with the event, and more; see routing."""
    inputs: Mapping[str, WorkInput] = field(default_factory=dict)
    """By the names that the job gives them."""
    outputs: Mapping[str, WorkOutput] = field(default_factory=dict)
    """By the names that the job gives them."""
    merge: Merge | None = None
    """How its outputs are merged with what is published; None if they are not."""
    staged: Mapping[str, Staged] = field(default_factory=dict)
    """By output, what an earlier run of this attempt has computed: it is only to be merged."""
    grace_seconds: float = 10.0
    timeout_seconds: float | None = None
    """How long the caller will let it run; told to the work, and kept by the caller."""
    batch: str = ""
    """Work with the same batch was claimed together, to be run as one job where a runtime can."""
    batch_size: int = 1
    scratch: str = ""
    """Where this attempt, and no other, may write what is not to be published; a URL."""
    log: str = ""
    """The file that what the work prints is appended to; empty for none."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The values of secrets, by the job's names for them: see `penstock.runtimes.secrets`."""
    handed: AttemptFiles | None = None
    """Its token and credentials, for runtimes that hand them on."""
    is_untrusted: bool = False
    """Whether its code is kept from all that is not its own."""
    user: int = 0
    """The user that untrusted work runs as, whom nobody else is; 0 for the worker's own."""
    runs_alone: bool = False
    """Whether nothing else may run in its process: one has died before that it ran in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a manifest says of something that was made, for whoever does not read manifests."""

    manifest: str
    """The SHA-256 of the manifest, in hexadecimal digits."""
    files: int
    rows: int | None
    """None if they are not known, as of texts."""
    bytes: int
    columns: tuple[Column, ...] = ()
    """Its schema; empty if it has none."""
    is_observed: bool = False
    """Whether the columns were only seen, in what a function has made: they are kept where they fit
    the schema of the dataset, and refuse nothing."""


def facts_of(manifest: Manifest, body: bytes, *, is_observed: bool = False) -> Facts:
    """What a manifest says, whose stored form is `body`."""
    return Facts(
        manifest=digest(body),
        files=len(manifest.files),
        rows=manifest.rows,
        bytes=manifest.bytes,
        columns=manifest.columns,
        is_observed=is_observed,
    )


def manifest_inputs(inputs: Mapping[str, WorkInput]) -> tuple[ManifestInput, ...]:
    """What a manifest lists of what was read: the first parts of each input."""
    return tuple(
        ManifestInput(
            input=name,
            dataset=given.dataset,
            generation=given.generation,
            location=part.location,
            partition_key=part.partition_key,
            revision=part.revision,
            manifest=part.manifest,
        )
        for name, given in inputs.items()
        for part in given.parts[:LISTED_MAX]
    )


def manifest_totals(inputs: Mapping[str, WorkInput]) -> tuple[InputTotal, ...] | msgspec.UnsetType:
    """What a manifest says of inputs that have more parts than it lists."""
    found = tuple(
        InputTotal(
            input=name,
            dataset=given.dataset,
            generation=given.generation,
            parts=len(given.parts),
            digest=digest("".join(map(_line, given.parts)).encode()),
        )
        for name, given in inputs.items()
        if len(given.parts) > LISTED_MAX
    )
    return found or msgspec.UNSET


def _line(part: Part) -> str:
    return f"{part.location}\t{part.manifest or ''}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedOutput:
    """Something that was made. `output` is the job's name for it."""

    output: str
    location: str
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    append_key: str | None = None
    facts: Facts | None = None
    base_revision: int | None = None
    """The revision of the partition that it was merged with, 0 for nothing, or that it has the rows
    of, in other files; None if it was made of neither, and `NOT_READ` to be told what to merge
    with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """What work has made, and what it took: figures by name, kept with the attempt."""

    made: tuple[ProducedOutput, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    staged: Mapping[str, Staged] = field(default_factory=dict)
    """What the next run of this attempt is given, if it has to merge again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEvent:
    """An event that running work sends of one of its outputs."""

    output: str
    event_id: str
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    payload: Mapping[str, Any] | None = None
    """What comes with it: a JSON object."""


class WorkReporter(Protocol):
    """What running work may say. Its methods may be called from the event loop only."""

    def progress(self, said: Mapping[str, Any]) -> None:
        """How far it is; the last word before a heartbeat is passed on."""
        ...

    def begins(self) -> None:
        """Its code is about to run: said before anything of it is so much as imported.

        Until then an attempt whose worker is killed is not counted against its task.
        """
        ...

    def timed(self, *, is_running: bool) -> None:
        """Whether its time limit runs now, from its beginning each time; at first it does.

        It does not while the work waits for a place, or behind others of its batch.
        """
        ...

    async def emit(self, news: Sequence[WorkEvent]) -> str:
        """Send events; returns why the source is to pause, or nothing. Repeats until heard."""
        ...

    async def credentials(self, locations: Sequence[str]) -> TaskCredentials:
        """Credentials for these folders of the work; `WorkFailed` says why there are none."""
        ...


class Runtime(Service):
    """Runs work. Started before the first `run`, stopped after the last."""

    name: str
    delivery: Delivery = Delivery.WAKE
    joins_batches: bool = True
    """Whether work of one batch is run as one. Where it is not, nothing is claimed in batches."""
    hands_over: bool = False
    """Whether work is given its token and credentials: see `penstock.runtimes.secrets`."""
    merges: bool = False
    """Whether what a task makes can be merged with what is published: see `Merge`."""
    users: UidPool | None = None
    """The users that untrusted work may run as; None if it cannot be kept apart here."""

    @abstractmethod
    def operators(self) -> Collection[str] | None:
        """The operators there are; None if any operator may be the name of a user's code."""

    @abstractmethod
    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterable[RuntimeFault]:
        """What is wrong with a job, as far as that can be told without running anything."""

    @abstractmethod
    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        """Run the work and return what it has made.

        Work of one batch is given to it at once, each by a call of its own, and may be run
        together. Each call ends by itself, and cancelling one never costs the others anything.
        """

    def secrets_refused(self, operator: str) -> str:
        """Why an operator is not to be given secrets, as a sentence; empty if it is."""
        return f"The runtime {self.name} hands no secrets to {operator}; take them out."

    def untrusted_refused(self) -> str:
        """Why no untrusted work is run here, as a sentence; empty if it is."""
        return (
            f"The runtime {self.name} cannot keep untrusted code from what is the worker's; write"
            " runtime: process or runtime: lambda."
        )

    def partition_by_refused(self, config: Mapping[str, Any]) -> str:
        """Why no output of a job may have `partition_by`, as a sentence; empty if it may."""
        del config
        return (
            f"The runtime {self.name} does not divide what a job makes into partitions; take"
            " `partition_by` out. A function publishes each by task.publish(partition_key=...)."
        )

    def expect(self) -> None:
        """There will be work: called, any number of times, when its operators are served."""
        return


def renamed(module: Mapping[str, object], names: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module that third parties' runtimes or their tests have imported other
    names of: these still work, with a `DeprecationWarning`."""
    where = module["__name__"]

    def of_old_name(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {where!r} has no attribute {name!r}")
        message = f"{where}.{name} is called {names[name]} now."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return module[names[name]]

    return of_old_name


if not TYPE_CHECKING:
    __getattr__ = renamed(
        globals(),
        {
            "Fault": "RuntimeFault",
            "Finished": "WorkResult",
            "Given": "WorkInput",
            "Made": "ProducedOutput",
            "News": "WorkEvent",
            "Place": "WorkOutput",
            "Voice": "WorkReporter",
            "Work": "AttemptWork",
        },
    )
