"""The runtime `sink`: writes the batches that were published into a buffered dataset.

Its operator is `sink.write`. A task is given batches by the dispatcher, when it is claimed
(`penstock.dispatcher.tasks.batches`): where each body lies, how long it is, and its sum. The bodies
are read by a process of its own, which can reach nothing (`sink_child`); this one fetches them,
stores the Parquet that comes out, and describes it by its footer, which another closed process
reads. So what stands in a batch is believed by nobody who has anything to lose.

| what happens | what becomes of it |
|---|---|
| a row does not fit | it is in the output for rejected rows, with the reason |
| a body is not there, or not what was accepted | the batch is rejected as a whole |
| a body cannot be read, while that of another can | the same |
| no body can be read, or the store is away | the attempt has failed |
| a body ends the process that reads it | the same, if it does so alone as well |
| the process runs out of memory or time on all of them | the attempt has failed |
| `expect` has values that do not fit the columns | the attempt has failed, and is not retried |
| nothing is left to be written | no output, and the batches are done |

A task whose rows are merged is given what is published of its partition (`WorkOutput.current`), and
says what it was merged with (`ProducedOutput.base_revision`); if that has moved it is run again
from the beginning. Nothing is kept between two attempts: a batch gives the same rows each time. A
crash leaves files of an attempt that is run again. The process ends with this one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.datasets.layout import MANIFEST, location_below
from penstock.datasets.manifest import File, Manifest, decode, digest, encode, with_bounds
from penstock.datasets.parquet import Footer, footers
from penstock.datasets.parquet_footer import identify
from penstock.datasets.schema import is_hidden
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import (
    Damaged,
    InvalidInput,
    NotFound,
    PenstockError,
    Refused,
    WorkFailed,
)
from penstock.kernel.settings_schema import check, read_table, setting
from penstock.kernel.units import byte_count, bytes_text, count, duration_ms, memory_bytes
from penstock.runtimes.base import (
    AttemptWork,
    ProducedOutput,
    Runtime,
    RuntimeFault,
    WorkReporter,
    WorkResult,
    facts_of,
)

OPERATOR: Final = "sink.write"
FILE_NAME: Final = "part-00000.parquet"
CHECKS: Final = ("required", "in", "min", "max", "matches", "min_length", "max_length")
"""What a row may be expected to satisfy, column by column."""
_CONFIG: Final = ("expect", "max_rows", "max_bytes", "max_age")
_CHILD: Final = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from penstock.runtimes import sink_child; sink_child.main()"
)
_ENVIRONMENT: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
_LINE_BYTES_MAX: Final = 64 * 1024
_MADE_BYTES_MAX: Final = 2 * 2**30
_CURRENT_BYTES_MAX: Final = 512 * 2**20
_FOOTER_SECONDS: Final = 60.0
_CANCELS_MAX: Final = 100
_VALUES_MAX: Final = 10_000
_PATTERN_CHARACTERS_MAX: Final = 1_000
_ENDED: Final = "The batch ended the process that was to read it."


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How much one task of a sink writes, and how long it may wait for more."""

    rows: int = 100_000
    bytes: int = 64 * 2**20
    age_ms: int = 5_000


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """The settings of the runtime `sink`."""

    store_url: str = setting("")
    """How the store is reached."""
    memory: str = setting("2GiB")
    """How much memory the process of a task may use."""
    cpu_seconds: int = setting(1_800, least=1, most=86_400)
    """How much processor time it may use."""

    def __post_init__(self) -> None:
        check(self)
        memory_bytes(self.memory)


class SinkConfigError(InvalidInput):
    """What is wrong with the config of a sink job; `field` is where, as in `config.max_rows`."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.field = where


def batch_limits(config: Mapping[str, Any]) -> BatchLimits:
    """How much a task of a sink with this config writes. Raises `SinkConfigError`."""
    default = BatchLimits()
    return BatchLimits(
        rows=_number(config, "max_rows", count, default.rows, least=1, most=10_000_000),
        bytes=_number(config, "max_bytes", byte_count, default.bytes, least=1024, most=256 * 2**20),
        age_ms=_number(config, "max_age", duration_ms, default.age_ms, least=0, most=86_400_000),
    )


def _number(
    config: Mapping[str, Any], name: str, read: Any, otherwise: int, *, least: int, most: int
) -> int:
    if name not in config:
        return otherwise
    said = config[name]
    try:
        found: int = read(str(said))
    except ValueError as error:
        raise SinkConfigError(f"config.{name}", f"{str(said)[:60]!r} {error}.") from error
    if not least <= found <= most:
        raise SinkConfigError(
            f"config.{name}", f"{str(said)[:60]!r} is not between {least:,} and {most:,}."
        )
    return found


def expectations(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What rows have to satisfy, by column. Raises `SinkConfigError`."""
    said = config.get("expect", {})
    if not isinstance(said, Mapping):
        raise SinkConfigError(
            "config.expect", "Write columns and their checks, as in expect: {amount: {min: 0}}."
        )
    for name, checks in said.items():
        where = f"config.expect.{name}"
        if not isinstance(checks, Mapping) or not checks:
            raise SinkConfigError(where, "Write the checks of the column, as in {min: 0}.")
        for word, value in checks.items():
            if word not in CHECKS:
                known = ", ".join(CHECKS)
                raise SinkConfigError(where, f"There is no check {word!r}; there are {known}.")
            if why := _check_problem(word, value):
                raise SinkConfigError(where, f"`{word}` {why}.")
    return {name: dict(checks) for name, checks in said.items()}


def _check_problem(word: str, value: Any) -> str:
    match word:
        case "required":
            return "" if isinstance(value, bool) else "is true or false"
        case "in":
            is_list = isinstance(value, list | tuple) and 0 < len(value) <= _VALUES_MAX
            return "" if is_list else f"is a list of 1 to {_VALUES_MAX:,} values"
        case "min" | "max":
            is_value = isinstance(value, int | float | str) and not isinstance(value, bool)
            return "" if is_value else "is a number, or a text for times and decimals"
        case "matches":
            is_text = isinstance(value, str) and 0 < len(value) <= _PATTERN_CHARACTERS_MAX
            return "" if is_text else f"is a pattern of 1 to {_PATTERN_CHARACTERS_MAX:,} characters"
        case _:
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            return "" if is_count else "is a number of characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """A batch that a task of a sink is given."""

    sequence: int
    batch: str
    task: int
    format: str
    location: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTask:
    """What a task of a sink is to write, as the dispatcher says in its payload."""

    output: str
    rejected: str
    columns: list[tuple[str, str]]
    is_hot: bool = False
    """Whether a table of Postgres follows the output."""
    batches: list[TakenBatch] = field(default_factory=list)

    @classmethod
    def of(cls, work: AttemptWork) -> SinkTask:
        try:
            return msgspec.convert(work.payload.get("buffer"), cls)
        except msgspec.ValidationError as error:
            raise WorkFailed(
                f"The task says of no batches what is to be written: {error}."
            ) from error


@dataclass(frozen=True, slots=True)
class _Made:
    """What the process has made."""

    found: Any
    rows: bytes
    rejected: bytes


class _ChildEnded(Exception):
    """The process has ended; `place` is the batch that it was reading, None after the last."""

    def __init__(self, place: int | None, why: str) -> None:
        super().__init__(why)
        self.place = place


class SinkRuntime(Runtime):
    """Runs `sink.write`."""

    name = "sink"
    joins_batches = False
    merges = True

    def __init__(self, settings: SinkSettings | None = None) -> None:
        self._settings = settings if settings is not None else SinkSettings()
        self._children: set[asyncio.subprocess.Process] = set()
        self._is_stopped = False

    @property
    def pids(self) -> Sequence[int]:
        """The processes there are."""
        return [each.pid for each in self._children if each.returncode is None]

    async def start(self) -> None:
        self._is_stopped = False

    async def stop(self) -> None:
        self._is_stopped = True
        for child in list(self._children):
            await _ended(child)

    def operators(self) -> Collection[str] | None:
        return {OPERATOR}

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[RuntimeFault]:
        del operator
        for name in config:
            if name not in _CONFIG:
                known = ", ".join(_CONFIG)
                yield RuntimeFault(f"config.{name}", f"It means nothing here; there are {known}.")
        for read in (batch_limits, expectations):
            try:
                read(config)
            except SinkConfigError as error:
                yield RuntimeFault(error.field, error.message)
        for name in resources:
            message = "A sink has no resources of its own; take it out."
            yield RuntimeFault(f"resources.{name}", message)

    def untrusted_refused(self) -> str:
        return "A sink runs no code of anybody; take `untrusted` out."

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        if work.operator != OPERATOR:
            raise WorkFailed(f"The runtime {self.name} has no operator {work.operator!r}.")
        task = SinkTask.of(work)
        reporter.begins()
        if not task.batches:
            return WorkResult(made=(), metrics={"batches": 0, "rows": 0, "rejected": 0})
        transfer = Transfer(self._settings.store_url)
        made = await self._made(work, task, transfer)
        outputs = await asyncio.to_thread(lambda: tuple(_outputs(work, task, made, transfer)))
        metrics = {
            "batches": len(task.batches),
            "rows": made.found.rows,
            "rejected": made.found.rejected,
        }
        return WorkResult(made=outputs, metrics=metrics)

    async def _made(self, work: AttemptWork, task: SinkTask, transfer: Transfer) -> _Made:
        """What all batches make, without those that the process cannot bear."""
        child = import_module("penstock.runtimes.sink_child")
        fetched = await asyncio.to_thread(_fetched, task, transfer)
        current = await asyncio.to_thread(_current, work, task, transfer)
        merge = work.merge
        order = child.SinkOrder(
            columns=task.columns,
            batches=[
                child.SinkBatch(
                    sequence=each.sequence,
                    batch=each.batch,
                    task=each.task,
                    format=each.format,
                    bytes=len(found) if isinstance(found, bytes) else 0,
                    unreadable="" if isinstance(found, bytes) else found,
                )
                for each, found in zip(task.batches, fetched, strict=True)
            ],
            expect=expectations(work.config),
            partition=work.payload.get("partition_key") or "",
            key=[] if merge is None else list(merge.key),
            version_by="" if merge is None else merge.version_by,
            is_hot=task.is_hot,
            current=[size for _, size in current],
            cpu_seconds=self._settings.cpu_seconds,
            memory_bytes=memory_bytes(self._settings.memory),
        )
        bodies = [each if isinstance(each, bytes) else b"" for each in fetched]
        for _ in range(len(bodies) + 1):
            try:
                return await self._asked(order, bodies, transfer, current)
            except _ChildEnded as error:
                if error.place is None or not await self._is_unbearable(
                    order, bodies, transfer, error.place
                ):
                    raise WorkFailed(
                        f"The process that writes {len(bodies)} batches ended before it was done.",
                        hint="Lower max_rows or max_bytes of the job, or give the runtime `sink`"
                        " more memory.",
                    ) from error
                left_out = msgspec.structs.replace(
                    order.batches[error.place], unreadable=_ENDED, bytes=0
                )
                batches = [*order.batches]
                batches[error.place] = left_out
                order = msgspec.structs.replace(order, batches=batches)
        raise AssertionError("each round leaves a batch out")

    async def _is_unbearable(
        self, order: Any, bodies: Sequence[bytes], transfer: Transfer, place: int
    ) -> bool:
        """Whether a batch ends a process of its own too."""
        alone = msgspec.structs.replace(order, batches=[order.batches[place]], current=[])
        with suppress(_ChildEnded):
            await self._asked(alone, [bodies[place]], transfer, ())
            return False
        return True

    async def _asked(
        self,
        order: Any,
        bodies: Sequence[bytes],
        transfer: Transfer,
        current: Sequence[tuple[str, int]],
    ) -> _Made:
        """What one process makes of an order."""
        if self._is_stopped:
            raise WorkFailed("The runtime was stopped.")
        root = Path(__file__).parents[2]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _CHILD, str(root), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
            limit=_LINE_BYTES_MAX,
        )
        self._children.add(process)
        try:
            return await _conversation(process, order, bodies, transfer, current)
        finally:
            await _ended(process)
            self._children.discard(process)


async def _conversation(
    process: asyncio.subprocess.Process,
    order: Any,
    bodies: Sequence[bytes],
    transfer: Transfer,
    current: Sequence[tuple[str, int]],
) -> _Made:
    """Hand over the batches one by one, so that it is known which one ends the process."""
    child = import_module("penstock.runtimes.sink_child")
    assert process.stdin is not None
    assert process.stdout is not None
    place: int | None = None
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        await process.stdin.drain()
        if (first := await process.stdout.readline()) != child.READY:
            raise _not_ready(first)
        for place, (batch, body) in enumerate(zip(order.batches, bodies, strict=True)):
            if not batch.unreadable:
                process.stdin.write(body)
                await process.stdin.drain()
            said = msgspec.json.decode(await process.stdout.readline(), type=dict[str, int])
            if said != {"read": place}:
                raise _ChildEnded(place, "it has read another batch")
        place = None
        for location, size in current:
            file = await asyncio.to_thread(transfer.read_bytes, location)
            if len(file) != size:
                raise WorkFailed(f"The file {location} has changed while it was merged with.")
            process.stdin.write(file)
            await process.stdin.drain()
        found = msgspec.json.decode(await process.stdout.readline(), type=child.SinkYield)
        if not 0 <= found.bytes + found.rejected_bytes <= _MADE_BYTES_MAX:
            raise _ChildEnded(None, "it has made too much")
        rows = await process.stdout.readexactly(found.bytes)
        rejected = await process.stdout.readexactly(found.rejected_bytes)
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
        raise _ChildEnded(place, str(error)) from error
    return _Made(found, rows, rejected)


def _not_ready(said: bytes) -> WorkFailed:
    """Why nothing was read: no batch is to blame for it."""
    with suppress(msgspec.MsgspecError):
        wrong = msgspec.json.decode(said, type=dict[str, str])["wrong"]
        return WorkFailed(wrong, is_retried=False, hint="Correct the config of the job.")
    return WorkFailed("The process that reads batches could not be started.")


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill a process and wait for it, also if this is cancelled."""
    with suppress(ProcessLookupError):
        process.kill()
    cancelled: asyncio.CancelledError | None = None
    for _ in range(_CANCELS_MAX):
        try:
            await process.wait()
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        break
    if cancelled is not None:
        raise cancelled


def _fetched(task: SinkTask, transfer: Transfer) -> list[bytes | str]:
    """The body of each batch, or why it is rejected as a whole. Raises what is worth a retry.

    Who publishes may have made a file of its own unreadable. Who can read none, or none any more,
    lacks the credentials, and no batch is to blame.
    """
    read = [(each.location, _body(each, transfer)) for each in task.batches]
    refused = [found for _, found in read if isinstance(found, PenstockError)]
    if refused:
        readable = [location for location, found in read if isinstance(found, bytes)]
        try:
            if not readable:
                raise refused[0]
            transfer.read_bytes(readable[0])
        except PenstockError as error:
            raise _unread(error) from error
    return [
        f"The body of the batch cannot be read: {found.message}"
        if isinstance(found, PenstockError)
        else found
        for _, found in read
    ]


def _body(batch: TakenBatch, transfer: Transfer) -> bytes | str | PenstockError:
    try:
        body = transfer.read_bytes(batch.location)
    except (NotFound, Damaged):
        return "The body of the batch is not there any more."
    except (Refused, InvalidInput) as error:
        return error
    except PenstockError as error:
        raise _unread(error) from error
    is_same = hashlib.sha256(body).hexdigest() == batch.sha256
    return body if is_same else "The body of the batch is not what was accepted."


def _unread(error: PenstockError) -> WorkFailed:
    return WorkFailed(f"A batch cannot be read: {error.message}", hint=error.hint)


def _current(work: AttemptWork, task: SinkTask, transfer: Transfer) -> list[tuple[str, int]]:
    """The files that are published of the partition, if rows are merged, and how long they are."""
    if work.merge is None:
        return []
    files: list[tuple[str, int]] = []
    for part in work.outputs[task.output].current:
        where = f"{part.location}/{MANIFEST}"
        try:
            body = transfer.read_bytes(where)
        except PenstockError as error:
            raise WorkFailed(
                f"What is published cannot be read: {error.message}", hint=error.hint
            ) from error
        if part.manifest is not None and digest(body) != part.manifest:
            raise WorkFailed(f"The manifest {where} is not the one that was published.")
        files += [
            (location_below(part.location, each.name), each.bytes)
            for each in decode(body, where=where).files
        ]
    total = sum(size for _, size in files)
    if total > _CURRENT_BYTES_MAX:
        raise WorkFailed(
            f"The partition has {bytes_text(total)}, and a sink merges with"
            f" {bytes_text(_CURRENT_BYTES_MAX)} at most.",
            is_retried=False,
            hint="Publish into smaller partitions, or append here and merge with Spark.",
        )
    return files


def _outputs(
    work: AttemptWork, task: SinkTask, made: _Made, transfer: Transfer
) -> Iterator[ProducedOutput]:
    """What is published, each with its manifest."""
    if made.rows:
        base: int | None = None
        if work.merge is not None:
            held = work.outputs[task.output].current
            base = (held[0].revision or 0) if held else 0
        yield replace(_output(work, task.output, made.rows, transfer), base_revision=base)
    if made.rejected:
        yield _output(work, task.rejected, made.rejected, transfer)


def _output(work: AttemptWork, name: str, body: bytes, transfer: Transfer) -> ProducedOutput:
    place = work.outputs[name]
    with tempfile.TemporaryDirectory(prefix="penstock-sink-") as folder:
        path = Path(folder) / FILE_NAME
        path.write_bytes(body)
        footer = _footer(path)
        columns = tuple(each for each in footer.columns if not is_hidden(each.name))
        with path.open("r+b") as file:
            has_ids = identify(file, footer.columns, is_trusted=False)
        sent = transfer.send(path, location_below(place.location, FILE_NAME))
    file_of = File(
        name=FILE_NAME,
        rows=footer.rows,
        bytes=sent.bytes,
        sha256=sent.sha256,
        bounds=dict(footer.bounds),
        unfit=None if has_ids else footer.unfit,
    )
    slice_: dict[str, Any] = {
        name: work.payload.get(name) for name in ("partition_key", "start", "end")
    }
    manifest = Manifest(
        dataset=place.dataset,
        generation=work.generation,
        job=work.job,
        task_id=work.task_id,
        attempt=work.attempt,
        rows=footer.rows,
        bytes=sent.bytes,
        columns=columns,
        files=with_bounds([file_of]),
        **slice_,
    )
    encoded = encode(manifest)
    transfer.write_bytes(location_below(place.location, MANIFEST), encoded)
    return ProducedOutput(
        output=name, location=place.location, facts=facts_of(manifest, encoded), **slice_
    )


def _footer(path: Path) -> Footer:
    """What the file says of itself, read by a closed process: this one believes nothing of it."""
    with path.open("rb") as file:
        try:
            (found,) = footers([file], seconds_max=_FOOTER_SECONDS)
        except PenstockError as error:
            raise WorkFailed(f"What was made cannot be described: {error.message}") from error
    if found is None or not found.columns:
        raise WorkFailed("What was made cannot be read as Parquet.")
    return found


def sink(settings: Mapping[str, Any]) -> SinkRuntime:
    """The runtime of these settings."""
    return SinkRuntime(read_table(SinkSettings, settings, whose="the runtime sink"))
