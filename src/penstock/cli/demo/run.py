"""One run of the pipeline of flights: an installation, its events, and the wait for all partitions.

The display is a picture that is drawn anew on a terminal, and lines elsewhere. `Chaos` kills
processes with `kill -9`, so that nothing can be tidied up; what `penstock up` keeps is found
among the processes below this one, by its command line. `read_datasets` reads what was published
from its manifests: how much, and which bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import click

from penstock.cli.installation import wiring
from penstock.cli.output import unguarded
from penstock.datasets.layout import MANIFEST, path_of
from penstock.datasets.manifest import File, decode
from penstock.dispatcher.client import Client
from penstock.kernel import parent_watch
from penstock.kernel.clock import Clock
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, PenstockError
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import PartitionAnswer, StatusAnswer
from penstock.settings import Settings

_PROCESSES: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Death:
    """One that is to come: of which process, and when how much of the work is done."""

    process: str
    share_done: float
    """Of all partitions."""


@dataclass(slots=True)
class Chaos:
    """What is still to be killed; `told` is called with a sentence about each."""

    told: Callable[[str], None]
    deaths: list[Death] = field(
        default_factory=lambda: [Death("worker", 0.2), Death("dispatcher", 0.5)]
    )

    def __post_init__(self) -> None:
        if not (_PROCESSES / "self" / "stat").exists():
            raise InvalidInput(
                "--chaos finds the processes to kill in /proc, which this machine does not have.",
                hint="Leave --chaos out.",
            )

    def look(self, *, share_done: float, is_running: bool) -> None:
        """Kill what is due. Nothing is killed while nothing runs: that would prove nothing."""
        if not self.deaths or not is_running or share_done < self.deaths[0].share_done:
            return
        process = self.deaths[0].process
        number = next(_running(process), None)
        if number is None:
            return
        os.kill(number, signal.SIGKILL)
        self.deaths.pop(0)
        self.told(f"kill -9 {number}: the {process} is dead, and is started again")


def _running(process: str) -> Iterator[int]:
    """The numbers of the processes below this one that run a verb of ours, as `worker`."""
    every = _processes()
    below = {os.getpid()}
    # A process is below if its parent is; as many rounds as there are levels.
    for _ in range(10):
        below |= {number for number, (parent, _) in every.items() if parent in below}
    for number in sorted(below - {os.getpid()}):
        words = every[number][1]
        if parent_watch.__name__ not in words and _verb(words) == process:
            yield number


def _verb(words: Sequence[str]) -> str:
    """What comes after `-m penstock` in a command line; options may follow it."""
    for place, pair in enumerate(pairwise(words)):
        if pair == ("-m", "penstock"):
            return words[place + 2] if place + 2 < len(words) else ""
    return ""


def _processes() -> Mapping[int, tuple[int, list[str]]]:
    """The parent and the command line of every process, by its number."""
    found = {}
    for folder in _PROCESSES.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except (OSError, IndexError):
            # It has ended meanwhile.
            continue
        found[int(folder.name)] = (parent, [word for word in words if word])
    return found


_BAR: Final = 24
_FULL, _EMPTY = "█", "·"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A dataset on the way, and the job that makes it."""

    dataset: str
    job: str
    partitions: int
    """How many it will have."""


class Display:
    """The picture, from the first `show` to the last."""

    def __init__(self, stages: Sequence[Stage], *, is_live: bool | None = None) -> None:
        self._stages = stages
        self._is_live = sys.stdout.isatty() if is_live is None else is_live
        self._drawn = 0
        self._complete: set[str] = set()

    def show(
        self, published: Mapping[str, int], running: Mapping[str, int], *, seconds: float
    ) -> None:
        """What there is of each dataset, how many tasks run of each job, and since when."""
        if self._is_live:
            lines = [self._line(each, published, running) for each in self._stages]
            # Nothing is as slow as the first of it.
            remark = "" if any(published.values()) else "  Spark is starting"
            room = shutil.get_terminal_size().columns - 1
            lines.append(f"  {seconds:5.1f} s{remark}")
            # At once with what erases the last one, so that nothing flickers.
            drawn = self._erasing() + "\n".join(line[:room] for line in lines)
            click.echo(drawn, file=unguarded(sys.stdout), color=True)
            self._drawn = len(lines)
            return
        for stage in self._stages:
            done = published.get(stage.dataset, 0)
            if done >= stage.partitions and stage.dataset not in self._complete:
                self._complete.add(stage.dataset)
                click.echo(f"  {seconds:5.1f} s  {stage.dataset:<15} {done:>4} by {stage.job}")

    def say(self, sentence: str) -> None:
        """A sentence that stays."""
        drawn = f"{self._erasing()}  {sentence}"
        click.echo(drawn, file=unguarded(sys.stdout), color=True)
        self._drawn = 0

    def end(self) -> None:
        """Leave the picture as it is."""
        self._drawn = 0

    def _erasing(self) -> str:
        """What erases the picture. These codes are no colours: nobody's wish for none is meant."""
        return f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""

    @staticmethod
    def _line(stage: Stage, published: Mapping[str, int], running: Mapping[str, int]) -> str:
        done = min(published.get(stage.dataset, 0), stage.partitions)
        full = _BAR * done // stage.partitions if stage.partitions else _BAR
        now = running.get(stage.job, 0)
        remark = f"  {now} running" if now and done < stage.partitions else ""
        bar = _FULL * full + _EMPTY * (_BAR - full)
        return f"  {stage.dataset:<15} {bar} {done:>4} of {stage.partitions}{remark}"


_PAGE: Final = 1000
_PAGES_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class PublishedPartition:
    """A partition of a dataset."""

    key: str
    folder: Path
    files: tuple[File, ...]
    revision: int
    published_at: datetime

    @property
    def paths(self) -> list[Path]:
        return [self.folder / each.name for each in self.files]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All that is published of a dataset."""

    name: str
    partitions: tuple[PublishedPartition, ...]

    @property
    def files(self) -> Iterator[File]:
        for each in self.partitions:
            yield from each.files

    @property
    def paths(self) -> list[Path]:
        return [path for each in self.partitions for path in each.paths]

    @property
    def rows(self) -> int:
        return sum(each.rows or 0 for each in self.files)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files)

    @property
    def complete_at(self) -> datetime | None:
        return max((each.published_at for each in self.partitions), default=None)


async def read_datasets(client: Client, names: Sequence[str]) -> dict[str, Dataset]:
    """What is published of these datasets, on a store that is a folder of this machine."""
    found = {}
    for name in names:
        every: list[PartitionAnswer] = []
        after: str | None = None
        for _ in range(_PAGES_MAX):
            answer = await client.partitions(name, limit=_PAGE, after=after)
            every += answer.partitions
            after = answer.after
            if after is None:
                break
        found[name] = Dataset(name, tuple(_published_files(each) for each in every))
    return found


def _published_files(answer: PartitionAnswer) -> PublishedPartition:
    folder = path_of(answer.location)
    manifest = decode((folder / MANIFEST).read_bytes(), where=str(folder / MANIFEST))
    return PublishedPartition(
        answer.partition_key, folder, manifest.files, answer.revision, answer.published_at
    )


def checksums(datasets: Mapping[str, Dataset]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The SHA-256 of every file, by dataset and partition, taken from the bytes themselves."""
    return {
        (dataset.name, partition.key): tuple(
            _checked(path, file)
            for path, file in zip(partition.paths, partition.files, strict=True)
        )
        for dataset in datasets.values()
        for partition in dataset.partitions
    }


def _checked(path: Path, file: File) -> str:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != file.sha256:
        raise PenstockError(f"{path} is not the file that its manifest names.")
    return found


def differences(
    one: Mapping[tuple[str, str], tuple[str, ...]], two: Mapping[tuple[str, str], tuple[str, ...]]
) -> list[str]:
    """The partitions that are not the same in both, by dataset and key."""
    return sorted(
        f"{dataset} {key}".rstrip()
        for dataset, key in one.keys() | two.keys()
        if one.get((dataset, key)) != two.get((dataset, key))
    )


FIRST_DAY: Final = date(2013, 1, 1)
DAG: Final = "flights.yaml"
_REFERENCE: Final = ("airlines", "airports", "planes")
_FIRST: Final = ("ingest_flights", "ingest_weather")
# A day is a thousand flights: all that takes time is the start of Spark.
_SETTINGS: Final = "[runtimes.spark]\ntiny = true\n"
_DAILY: Final = {
    "raw_flights": "ingest_flights",
    "raw_weather": "ingest_weather",
    "flights": "clean",
    "observed": "join_weather",
    "carrier_days": "carrier_days",
    "airport_days": "airport_days",
}
_MONTHLY: Final = {
    "carrier_months": "carrier_months",
    "airport_months": "airport_months",
    "carrier_report": "check_carriers",
    "airport_report": "check_airports",
}
_LOOK_SECONDS: Final = 0.25
_START_SECONDS_MAX: Final = 90.0
_RUN_SECONDS_MAX: Final = 300.0
_DAY_SECONDS_MAX: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """What a run has made, and what it took."""

    datasets: Mapping[str, Dataset]
    began_at: datetime
    seconds: float
    """From the first event to the last partition."""
    tasks: int
    again: int
    """How many of them needed more than one attempt."""


def stages_of(days: int) -> list[Stage]:
    """What will be there after so many days, in the order in which it is made."""
    months = len(whole_months(days))
    stages = [Stage(dataset=each, job="reference", partitions=1) for each in _REFERENCE]
    stages += [Stage(dataset=each, job=job, partitions=days) for each, job in _DAILY.items()]
    if months:
        stages += [
            Stage(dataset=each, job=job, partitions=months) for each, job in _MONTHLY.items()
        ]
    return stages


def days_of(count: int) -> list[date]:
    """The first days of 2013."""
    return [FIRST_DAY + timedelta(days=each) for each in range(count)]


def whole_months(count: int) -> list[str]:
    """The months that lie within so many days."""
    return [f"{day:%Y-%m}" for day in days_of(count) if (day + timedelta(days=1)).day == 1]


class Pipeline:
    """An installation with the pipeline in it, on a data folder, for one run."""

    def __init__(self, data: Path, code: Path, *, clock: Clock) -> None:
        self._clock = clock
        self._code = code
        self._data = data
        store = (data.absolute() / "store").as_uri()
        settings = Settings(data=data, store=store, port=0, internal_port=0, webhook_port=0)
        self._file = data / "penstock.toml"
        self._installation = wiring("penstock.installation").Installation(
            settings, code=code, file=self._file, waiting=click.echo
        )
        self._client = Client(self._installation.public_url)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._data.mkdir(parents=True, exist_ok=True)
        self._file.write_text(_SETTINGS)
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._installation)
            await opened.enter_async_context(self._client)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._opened.aclose()

    @property
    def url(self) -> str:
        """Where the console is."""
        url: str = self._installation.public_url
        return url

    @property
    def client(self) -> Client:
        """For what comes after the run."""
        return self._client

    async def run(self, days: int, display: Display, chaos: Chaos | None = None) -> PipelineRun:
        """Run the pipeline for so many days."""
        client, stages = self._client, stages_of(days)
        await self._until_ready()
        display.say(f"Watch it at {self.url}")
        await client.apply(self._code / DAG)
        began_at, began = (await client.status()).now, self._clock.monotonic()

        def show(published: Mapping[str, int], status: StatusAnswer) -> None:
            running = {each.name: each.running for each in status.jobs}
            display.show(published, running, seconds=self._clock.monotonic() - began)
            if chaos is not None:
                done = _done(stages, published)
                chaos.look(share_done=done, is_running=any(running.values()))

        await client.trigger("register", event_id="register")
        for job in _FIRST:
            await client.pause(job, reason="The small tables are not there yet.")
        for day in days_of(days):
            await _tell_of(client, day)
        await self._until([each for each in stages if each.dataset in _REFERENCE], show)
        for job in _FIRST:
            await client.resume(job)
        seconds_max = _RUN_SECONDS_MAX + days * _DAY_SECONDS_MAX
        await self._until(stages, show, seconds_max=seconds_max)
        seconds = self._clock.monotonic() - began
        display.end()
        await client.wait(timeout_seconds=_START_SECONDS_MAX)
        return await self._outcome(stages, began_at=began_at, seconds=seconds)

    async def _outcome(
        self, stages: Sequence[Stage], *, began_at: datetime, seconds: float
    ) -> PipelineRun:
        client = self._client
        tasks, again, before = 0, 0, None
        for _ in range(100):
            page = await client.tasks(limit=1000, before=before)
            tasks += len(page.tasks)
            again += sum(each.attempt > 1 for each in page.tasks)
            before = page.before
            if before is None:
                break
        datasets = await read_datasets(client, [each.dataset for each in stages])
        return PipelineRun(
            datasets=datasets, began_at=began_at, seconds=seconds, tasks=tasks, again=again
        )

    async def _until_ready(self) -> None:
        """Wait until the dispatcher answers. The worker finds it, and what it is to serve."""
        deadline = self._clock.monotonic() + _START_SECONDS_MAX
        while self._clock.monotonic() < deadline:
            with suppress(DispatcherUnavailable):
                await self._client.status()
                return
            self._check()
            await self._clock.sleep(_LOOK_SECONDS)
        raise PenstockError(
            f"It has not started in {_START_SECONDS_MAX:.0f} s.",
            hint=f"The logs are in {self._data / 'logs'}.",
        )

    async def _until(
        self,
        stages: Sequence[Stage],
        show: Callable[[Mapping[str, int], StatusAnswer], None],
        *,
        seconds_max: float = _RUN_SECONDS_MAX,
    ) -> None:
        """Look again and again until these are complete; a dispatcher that is dead comes back."""
        deadline = self._clock.monotonic() + seconds_max
        while self._clock.monotonic() < deadline:
            with suppress(DispatcherUnavailable):
                status = await self._client.status()
                published = await _published(self._client)
                show(published, status)
                if _is_complete(stages, published):
                    return
                if any(each.dead for each in status.jobs):
                    raise await _death(self._client)
            self._check()
            await self._clock.sleep(_LOOK_SECONDS)
        names = ", ".join(each.dataset for each in stages)
        raise PenstockError(
            f"Not all of {names} is there after {seconds_max:.0f} s.",
            hint=f"The logs are in {self._data / 'logs'}; --data FOLDER keeps them.",
        )

    def _check(self) -> None:
        """Raise what is wrong with a process that ends again and again."""
        failure: PenstockError | None = self._installation.failure()
        if failure is not None:
            raise failure


async def _tell_of(client: Client, day: date) -> None:
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    key = day.isoformat()
    await client.trigger(
        "calendar", event_id=key, partition_key=key, start=start, end=start + 86_400
    )


async def _published(client: Client) -> dict[str, int]:
    """How many partitions of each dataset are published."""
    found: dict[str, int] = {}
    for dataset in (await client.datasets()).datasets:
        for generation in dataset.generations:
            found[dataset.name] = max(found.get(dataset.name, 0), generation.partitions)
    return found


async def _death(client: Client) -> PenstockError:
    """What to say of a task without attempts left."""
    dead = (await client.tasks(status=TaskStatus.FAILED, limit=1)).tasks
    said = [f"{each.job} has failed for {each.partition_key}: {each.reason}" for each in dead]
    return PenstockError(*said or ["A task has failed."])


def _is_complete(stages: Iterable[Stage], published: Mapping[str, int]) -> bool:
    return all(published.get(each.dataset, 0) >= each.partitions for each in stages)


def _done(stages: Sequence[Stage], published: Mapping[str, int]) -> float:
    """Which share of all partitions is there."""
    done = sum(min(each.partitions, published.get(each.dataset, 0)) for each in stages)
    return done / sum(each.partitions for each in stages)
