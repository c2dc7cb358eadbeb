"""`penstock cost`: what would this queue cost, and how soon would its tasks start?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count

import click

from penstock.cli.options import DURATION, Days, Seconds
from penstock.cli.output import ProgressBar
from penstock.kernel.errors import InvalidInput
from penstock.queue.settings import DiscoveryMode, mode_from
from penstock.store.metered import Kind
from penstock.testing.cost import Figures, Growth, Workload, price, price_modes, saturate

_HOUR_SECONDS = 3600
_SATURATED = {"concurrency": 8, "handler_seconds": 2.0, "workers": 64}
_DEFAULT = {"concurrency": 32, "handler_seconds": 1.0, "workers": 50}
_CONDITIONAL, _TOMBSTONE = "conditional", "tombstone"
_HYBRID_INDEX = (
    "There is no row for a hybrid index: the ledger lies beside its pack, so the list that"
    " discovery reads is the index, and nothing else has to be written or kept right."
)
_ON_PAPER = (
    "Estimates on paper for the reference load, of one object a task: hybrid index with adaptive"
    " polling $56, shard leasing $77, direct dispatch $1,630."
)


@click.command(
    short_help="Estimate the monthly cost of a queue.",
    epilog="Example: penstock cost --tasks-per-day 1000000 --batch 100",
)
@click.option("--workers", type=int, help="Workers in the fleet.  [default: 50]")
@click.option(
    "--tasks-per-day", default=100_000, show_default=True, help="Tasks submitted per day."
)
@click.option("--batch", default=1, show_default=True, help="Tasks submitted at a time.")
@click.option(
    "--gather-seconds",
    metavar=DURATION,
    type=Seconds(),
    help="How long the producer gathers submits into one object.  [default: not at all]",
)
@click.option("--keyed", is_flag=True, help="Every task has a key of its own.")
@click.option("--mode", default="leased", show_default=True, help="How workers find tasks.")
@click.option(
    "--days",
    metavar=DURATION,
    type=Days(),
    default=1.0,
    show_default=True,
    help="Maximum simulated time, such as 12h; a number is days.",
)
@click.option(
    "--handler-seconds",
    metavar=DURATION,
    type=Seconds(),
    help="Duration of a task.  [default: 1]",
)
@click.option("--concurrency", type=int, help="Concurrency of a worker.  [default: 32]")
@click.option(
    "--deletes",
    default=_CONDITIONAL,
    show_default=True,
    type=click.Choice([_CONDITIONAL, _TOMBSTONE]),
    help="How the store makes deletes safe.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the simulation.")
@click.option("--full", is_flag=True, help="Simulate all days, however long it takes.")
@click.option("--table", is_flag=True, help="Compare all modes, by cause.")
@click.option(
    "--saturated",
    is_flag=True,
    help="Requests a task of one worker and of --workers (64) under saturation.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def cost(
    *,
    workers: int | None,
    tasks_per_day: int,
    batch: int,
    gather_seconds: float | None,
    keyed: bool,
    mode: str,
    days: float,
    handler_seconds: float | None,
    concurrency: int | None,
    deletes: str,
    seed: int,
    full: bool,
    table: bool,
    saturated: bool,
    as_json: bool,
) -> None:
    """Estimate the monthly cost in requests, at S3 Standard's prices.

    Runs the real code in virtual time on a bucket in memory: the fleet with its load, and the same
    fleet with nothing to do. Takes a minute or several, and longer with many workers or modes; of
    a large load a part is simulated and scaled, which is then said.

    Exit code 0: here are the figures. 2: an option is wrong.
    """
    if table and saturated:
        raise InvalidInput("--table and --saturated are two different questions; ask one.")
    if saturated and (keyed or gather_seconds is not None):
        raise InvalidInput("--saturated is of a backlog without keys that is there already.")
    otherwise = _SATURATED if saturated else _DEFAULT
    load = Workload(
        workers=int(otherwise["workers"] if workers is None else workers),
        tasks_per_day=1 if saturated else tasks_per_day,
        batch=1 if saturated else batch,
        gather_seconds=gather_seconds,
        keyed=keyed,
        mode=mode_from(mode, {}),
        days=days,
        handler_seconds=(
            otherwise["handler_seconds"] if handler_seconds is None else handler_seconds
        ),
        concurrency=int(otherwise["concurrency"] if concurrency is None else concurrency),
        seed=seed,
        by_tombstone=deletes == _TOMBSTONE,
    )
    with ProgressBar() as bar:
        if saturated:
            growth = saturate(load, fleets=(1, load.workers), tell=_teller(bar, runs=2))
            text, found = growth_text(growth), growth.as_dict()
        elif table:
            modes = price_modes(load, full=full, tell=_teller(bar, runs=2 * len(DiscoveryMode)))
            text, found = table_text(modes), table_dict(modes)
        else:
            figures = price(load, full=full, tell=_teller(bar, runs=2))
            text, found = figures_text(figures), figures.as_dict()
    click.echo(json.dumps(found, indent=2) if as_json else text)


def _teller(bar: ProgressBar, *, runs: int) -> Callable[[str], None]:
    """Shows which of so many runs is simulated; how far a run is can only be known at its end."""
    done = count()

    def tell(what: str) -> None:
        number = next(done)
        text = f"Simulating {what}, {number + 1} of {runs}; a run takes a minute or several"
        bar.show(text, done=number, of=runs)

    return tell


def figures_text(figures: Figures) -> str:
    """The figures of one workload."""
    bill, tasks = figures.steady.bill, figures.steady.tasks
    kinds = ", ".join(
        f"{bill.requests(kind=kind) / tasks:.3f} {kind.value}"
        for kind in Kind
        if bill.requests(kind=kind)
    )
    p50, p99 = _seconds(figures.start_seconds(50)), _seconds(figures.start_seconds(99))
    lines = [
        f"{_fleet(figures.load)}, {figures.load.mode.value}",
        _simulated(figures),
        "",
        f"Requests a task         {figures.requests_per_task:.3f}: {kinds}",
        f"Dollars a month         {figures.dollars_per_month:.2f}",
        *(
            f"  {cause:<21} {bill.dollars_per_month(cause=cause):.2f}"
            for cause in bill.causes
            if bill.requests(cause=cause)
        ),
        f"Idle, dollars a month   {figures.idle_dollars_per_month:.2f}",
        f"A million tasks         ${figures.dollars_per_million:.3f} beyond the idle cost",
        f"A task starts within    {p50} (p50), {p99} (p99) of its submit",
        f"The first one after an idle hour within {_seconds(figures.first_start_seconds)}",
    ]
    return "\n".join([*lines, *_tombstones(figures), *_late([figures])])


def _tombstones(figures: Figures) -> list[str]:
    """What deletes by tombstone cost that tasks with a key leave, and no others."""
    if not figures.load.by_tombstone:
        return []
    keys = f"${figures.tombstone_dollars_per_million_keys:.2f}"
    sweeps = f"${figures.tombstone_dollars_per_month:.2f}"
    return [
        f"Tombstones, a million keys {keys}, and {sweeps} a month from then on",
        "                        (keys keep theirs, and sweeps list them; other tasks leave none)",
    ]


def table_text(modes: Sequence[Figures]) -> str:
    """All modes beside each other."""
    bills = [figures.steady.bill for figures in modes]
    causes = list(dict.fromkeys(cause for bill in bills for cause in bill.causes))
    rows = [["dollars a month", *(figures.load.mode.value for figures in modes)]]
    rows += [
        [cause, *(f"{bill.dollars_per_month(cause=cause):.2f}" for bill in bills)]
        for cause in causes
    ]
    rows += [
        ["all", *(f"{figures.dollars_per_month:.2f}" for figures in modes)],
        ["idle fleet", *(f"{figures.idle_dollars_per_month:.2f}" for figures in modes)],
        ["a million more tasks", *(f"{figures.dollars_per_million:.3f}" for figures in modes)],
        ["requests a task", *(f"{figures.requests_per_task:.3f}" for figures in modes)],
        ["start latency, p50", *(_seconds(figures.start_seconds(50)) for figures in modes)],
        ["start latency, p99", *(_seconds(figures.start_seconds(99)) for figures in modes)],
        ["after an idle hour", *(_seconds(figures.first_start_seconds) for figures in modes)],
    ]
    body = ["".join([f"{first:<22}", *(f"{cell:>12}" for cell in rest)]) for first, *rest in rows]
    simulated = [f"{figures.load.mode.value}: {_simulated(figures)}" for figures in modes]
    return "\n".join(
        [_fleet(modes[0].load), *simulated, "", *body, "", _HYBRID_INDEX, _ON_PAPER, *_late(modes)]
    )


def table_dict(modes: Sequence[Figures]) -> dict[str, object]:
    """The table for programs."""
    return {"modes": [figures.as_dict() for figures in modes], "hybrid_index": _HYBRID_INDEX}


def growth_text(growth: Growth) -> str:
    """What fleets of different sizes need for a task of a saturated queue."""
    load = growth.load
    at_a_time = f"{load.concurrency} at a time a worker, {load.mode.value}"
    lines = [f"A backlog of single tasks of {load.handler_seconds:g} s, {at_a_time}", ""]
    for workers, run in growth.by_workers:
        causes = ", ".join(
            f"{cause} {run.bill.requests(cause=cause) / run.tasks:.3f}"
            for cause in run.bill.causes
            if cause != "submit" and run.bill.requests(cause=cause)
        )
        lines.append(
            f"{workers:>4} workers, {run.busy} of them busy: {run.requests_per_task:.3f}"
            f" requests to process a task ({causes})"
        )
    return "\n".join([*lines, "", f"It grows by {growth.percent:.1f} %."])


def _fleet(load: Workload) -> str:
    batch = "one by one" if load.batch == 1 else f"in batches of {load.batch:,}"
    if load.gather_seconds is not None:
        batch = f"gathered for {load.gather_seconds:g} s"
    batch += ", each with a key" if load.keyed else ""
    return (
        f"{load.workers:,} workers, {load.tasks_per_day:,} tasks a day {batch},"
        f" handlers of {load.handler_seconds:g} s, {load.concurrency} at a time a worker"
        f"{', deletes by tombstone' if load.by_tombstone else ''}"
    )


def _simulated(figures: Figures) -> str:
    hours = figures.window.seconds / _HOUR_SECONDS
    tasks = f"{figures.steady.tasks:,} tasks"
    warm_up = f"after {figures.window.warm_up_seconds / 60:.0f} minutes to warm up"
    if figures.window.is_whole:
        return f"simulated {hours:,.1f} hours {warm_up}: {tasks}, scaled to a month of 30 days"
    return (
        f"simulated only {hours:,.1f} of {figures.load.days * 24:,.0f} hours {warm_up}: {tasks},"
        " scaled to a month of 30 days; --full simulates all"
    )


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.2f} s"


def _late(modes: Sequence[Figures]) -> list[str]:
    return [
        f"{figures.load.mode.value}: {figures.unstarted:,} tasks had not started a quarter of an"
        " hour after the window: the fleet cannot keep up."
        for figures in modes
        if figures.unstarted
    ]
