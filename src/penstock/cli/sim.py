"""`penstock sim`: does the queue hold its promises, whatever fails?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Final

import click

from penstock.cli.output import ProgressBar
from penstock.testing.simulator.plans import WorkerModes
from penstock.testing.simulator.worlds import WorldReport, run_world

ALL: Final = "all"
_TELL_EVERY: Final = 100


@click.command(
    short_help="Run the queue in a deterministic simulation.",
    epilog="Example: penstock sim --seeds 500 --mode mixed",
)
@click.option(
    "--seeds",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Number of simulated worlds.",
)
@click.option(
    "--first-seed", default=0, show_default=True, type=click.IntRange(0), help="First seed."
)
@click.option(
    "--mode",
    default=ALL,
    show_default=True,
    type=click.Choice([*(fleet.value for fleet in WorkerModes), ALL]),
    help="The modes of the workers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def sim(
    context: click.Context,
    seeds: int,
    first_seed: int,
    mode: str,
    as_json: bool,  # noqa: FBT001 - click passes it so
) -> None:
    """Run the queue in simulated worlds, and judge what happens in them.

    In each world real producers, workers and monitors work on a bucket in memory and in virtual
    time, while machines crash and freeze, requests are lost, late and doubled, clocks are wrong
    and operators make mistakes. A referee reads every write. A seed that finds something finds it
    again: run it alone with --first-seed and --seeds 1.

    Exit code 0: everything held. 1: a promise was broken, and its story is shown.
    """
    fleets = tuple(WorkerModes) if mode == ALL else (WorkerModes(mode),)
    reports = _run(range(first_seed, first_seed + seeds), fleets, quiet=as_json)
    broken = [report for report in reports if report.violations]
    if as_json:
        click.echo(json.dumps(as_dict(reports), indent=2))
    else:
        for report in broken:
            show(report)
        show_summary(reports)
    context.exit(1 if broken else 0)


def _run(seeds: range, fleets: Sequence[WorkerModes], *, quiet: bool) -> list[WorldReport]:
    reports: list[WorldReport] = []
    every = len(seeds) * len(fleets)
    with ProgressBar(is_live=False if quiet else None) as bar:
        for fleet, seed in product(fleets, seeds):
            bar.show(f"{len(reports):,} of {every:,} worlds", done=len(reports), of=every)
            reports.append(run_world(seed, fleet))
            done = seed - seeds.start + 1
            if not quiet and (done % _TELL_EVERY == 0 or done == len(seeds)):
                found = sum(bool(each.violations) for each in reports if each.fleet is fleet)
                bar.end()
                click.echo(f"{fleet}: {done:,} worlds, {found or 'no'} violations")
    return reports


def show(report: WorldReport) -> None:
    """One violation and its story."""
    again = f"penstock sim --first-seed {report.seed} --seeds 1 --mode {report.fleet}"
    for found in report.violations[:1]:
        click.secho(f"\n{found.sentence}", fg="red", bold=True)
        click.echo(f"World of seed {report.seed}, {report.profile}. Again: {again}")
        for line in found.story:
            click.echo(f"  {line}")


def show_summary(reports: Sequence[WorldReport]) -> None:
    """What was run, and the verdict."""
    tasks, starts, refusals, seconds = _totals(reports)
    broken = sum(bool(report.violations) for report in reports)
    click.echo(
        f"\n{len(reports):,} worlds, {seconds / 3600:,.0f} hours of virtual time: {tasks:,} tasks,"
        f" {starts:,} attempts, {refusals:,} stale attempts refused."
    )
    if broken:
        click.secho(f"{broken:,} worlds violated an invariant.", fg="red", bold=True)
    else:
        click.secho("No invariant was violated.", fg="green", bold=True)


def as_dict(reports: Sequence[WorldReport]) -> dict[str, object]:
    """The report for programs."""
    tasks, starts, refusals, seconds = _totals(reports)
    return {
        "seeds": len({report.seed for report in reports}),
        "worlds": len(reports),
        "tasks": tasks,
        "attempts": starts,
        "refused_endings": refusals,
        "virtual_seconds": round(seconds, 3),
        "violations": [
            {
                "seed": report.seed,
                "mode": report.fleet.value,
                "profile": report.profile.value,
                "sentence": found.sentence,
                "at_seconds": round(found.at, 3),
                "story": list(found.story),
            }
            for report in reports
            for found in report.violations
        ],
    }


def _totals(reports: Sequence[WorldReport]) -> tuple[int, int, int, float]:
    return (
        sum(report.tasks for report in reports),
        sum(report.starts for report in reports),
        sum(report.refusals for report in reports),
        sum(report.seconds for report in reports),
    )
