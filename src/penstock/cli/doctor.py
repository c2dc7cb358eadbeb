"""`penstock doctor URL`: can this bucket be trusted?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import click

from penstock.store.doctor import CheckMark, StoreFinding, StoreReport, examine, open_patient
from penstock.store.opening import Opening

_MARKS = {CheckMark.GOOD: "ok  ", CheckMark.BAD: "BAD ", CheckMark.NOTE: "note"}
_COLOURS = {CheckMark.GOOD: "green", CheckMark.BAD: "red", CheckMark.NOTE: "yellow"}


@click.command(
    short_help="Check that a store is safe to use.",
    epilog="Example: penstock doctor s3://my-bucket/penstock",
)
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def doctor(context: click.Context, url: str, as_json: bool) -> None:  # noqa: FBT001
    """Check whether the store at URL has the guarantees that Penstock relies on.

    Tries every conditional rule, alone, in races of sixteen writers and from two processes, and
    the store's dates, lists and latencies. Writes below one folder and removes it. Takes seconds,
    up to two minutes where writers of one object wait for each other.

    Exit code 0: it can be trusted. 1: it cannot, or could not be examined. 2: the URL is wrong.
    """
    report = asyncio.run(_examined(url, tell=(lambda _: None) if as_json else show_finding))
    if as_json:
        click.echo(json.dumps(as_dict(report), indent=2))
    else:
        show_summary(report)
    context.exit(0 if report.trusted else 1)


async def _examined(url: str, *, tell: Callable[[StoreFinding], None]) -> StoreReport:
    async with open_patient(url, Opening()) as patient:
        return await examine(patient, tell=tell)


def show_finding(finding: StoreFinding) -> None:
    """One line a check."""
    mark = click.style(_MARKS[finding.mark], fg=_COLOURS[finding.mark])
    click.echo(f"{mark}  {finding.check}: {finding.seen}")


def show_summary(report: StoreReport) -> None:
    """Latencies, price and verdict."""
    trips = ", ".join(
        f"{each.kind} {each.median_ms:.1f} ms (slowest {each.slowest_ms:.0f})"
        for each in report.latencies
    )
    click.echo(f"\nRound trips: {trips}.")
    click.echo(
        f"This run: {report.requests} requests, ${report.dollars:.4f} at S3 Standard's prices; "
        f"once a day, ${report.dollars_per_month:.2f} a month."
    )
    click.secho(report.verdict, fg="green" if report.trusted else "red", bold=True)


def as_dict(report: StoreReport) -> dict[str, object]:
    """The report for programs."""
    return {
        "url": report.url,
        "trusted": report.trusted,
        "verdict": report.verdict,
        "deletes": "tombstone" if report.by_tombstone else "conditional",
        "tombstones_would_do": report.tombstones_would_do,
        "checks": [
            {"check": each.check, "mark": each.mark.value, "seen": each.seen}
            for each in report.findings
        ],
        "latencies_ms": {
            each.kind: {"median": round(each.median_ms, 3), "slowest": round(each.slowest_ms, 3)}
            for each in report.latencies
        },
        "requests": report.requests,
        "dollars": report.dollars,
        "dollars_per_month": report.dollars_per_month,
    }
