"""What can be shown without a bucket: simulated worlds, and the price of a load."""

from __future__ import annotations

import click

from penstock.testing.cost import Workload, price
from penstock.testing.simulator.plans import Fleet
from penstock.testing.simulator.worlds import run_world

_WORLDS = 20


def show_worlds() -> None:
    """Simulate some worlds and say what the referee saw."""
    reports = [run_world(seed, fleet) for seed in range(_WORLDS) for fleet in Fleet]
    tasks = sum(report.tasks for report in reports)
    starts = sum(report.starts for report in reports)
    hours = sum(report.seconds for report in reports) / 3600
    broken = sum(len(report.violations) for report in reports)
    click.echo(f"   {len(reports)} worlds with crashes, pauses, lost answers and wrong clocks,")
    click.echo(f"   {hours:.0f} hours of virtual time:")
    click.echo(f"   {tasks} tasks, {starts} attempts, {broken} violations of the six invariants.")


def show_price() -> None:
    """Price a small fleet, one by one and in batches."""
    for batch in (1, 100):
        load = Workload(workers=5, tasks_per_day=20_000, batch=batch, days=1 / 24)
        figures = price(load)
        how = "one by one" if batch == 1 else f"in batches of {batch}"
        click.echo(
            f"   5 workers, 20,000 tasks a day, {how}: ${figures.dollars_per_month:.2f} a month,"
            f" {figures.start_seconds(50):.1f} s to start."
        )
