"""`penstock dataset sweep|maintain|refresh|rebuild-table|cut-over|purge`: change what is kept."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import click

from penstock.cli.completion import datasets
from penstock.cli.dataset.overview import size
from penstock.cli.dispatcher_call import asked, counted, line, on_a_dispatcher, show_json
from penstock.cli.options import DURATION, Seconds
from penstock.dispatcher.client import Client
from penstock.kernel.errors import InvalidInput
from penstock.protocol.datasets import RefreshAnswer, SweepAnswer

_REQUESTS_MAX = 100_000


@click.command(
    short_help="Remove files that no reader can use any more.",
    epilog="Example: penstock dataset sweep sales",
)
@click.argument("name", metavar="[DATASET]", required=False, shell_complete=datasets)
@click.option(
    "--grace",
    "grace_seconds",
    metavar=DURATION,
    type=Seconds(0, 3.2e9),
    help="Keep files needed within this time. By default as set in the dispatcher.",
)
@click.option("--dry-run", is_flag=True, help="Dry run: show what would be removed.")
@on_a_dispatcher
def sweep(
    *,
    name: str | None,
    grace_seconds: float | None,
    dry_run: bool,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Remove the files of attempts that have failed or were replaced, of one dataset or of all.

    The dispatcher does that by itself, every hour. What is published, what may still be read by a
    task, and what was published within the grace is never removed. Somebody who has listed files
    and reads them may lose them with a shorter grace.
    """

    def one(client: Client) -> Awaitable[SweepAnswer]:
        return client.sweep(name, grace_seconds=grace_seconds, dry_run=dry_run)

    answer, _ = asked(url, token, lambda client: _swept(client, one))
    if as_json:
        show_json(answer)
        return
    if answer.files:
        gone, attempts = counted(answer.files, "file"), counted(answer.attempts, "attempt")
        begun = "This would remove" if dry_run else "Removed"
        click.echo(f"{begun} {gone} of {attempts}, {size(answer.bytes)}.")
    else:
        click.echo("Nothing to remove.")
    if answer.left:
        click.echo(f"{counted(answer.left, 'file')} could not be removed now.", err=True)


async def _swept(client: Client, one: Callable[[Client], Awaitable[SweepAnswer]]) -> SweepAnswer:
    """All that was removed until everything was looked at."""
    total = SweepAnswer(attempts=0, files=0, bytes=0, left=0, is_over=False)
    for _ in range(_REQUESTS_MAX):
        more = await one(client)
        total = SweepAnswer(
            attempts=total.attempts + more.attempts,
            files=total.files + more.files,
            bytes=total.bytes + more.bytes,
            left=total.left + more.left,
            is_over=more.is_over,
        )
        if more.is_over:
            break
    return total


@click.command(
    short_help="Rewrite the files of a dataset now.",
    epilog="Example: penstock dataset maintain sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option("--partition", metavar="KEY", help="Only this partition.")
@on_a_dispatcher
def maintain(
    *, name: str, partition: str | None, url: str, token: str | None, as_json: bool
) -> None:
    """Make a task for each partition of several files that puts them together, or clusters them, as
    `maintain` of the DAG says.

    The dispatcher does so by itself, one partition after the other, where files are many and
    small. This is for now, and also for files that are neither. The rows stay as they are, and
    nobody downstream is told.
    """
    answer, _ = asked(url, token, lambda client: client.maintain(name, partition_key=partition))
    if as_json:
        show_json(answer)
        return
    if not answer.tasks:
        click.echo("Nothing to rewrite that has no task yet.")
        return
    first, last = answer.tasks[0], answer.tasks[-1]
    which = f"task {first}" if first == last else f"tasks {first} to {last}"
    more = "" if answer.is_all else "; there is more, run it again when they have ended"
    click.echo(f"Made {counted(len(answer.tasks), 'task')}: {which}{more}.")


@click.command(
    short_help="Rewrite current.json where it is out of date.",
    epilog="Example: penstock dataset refresh sales",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@on_a_dispatcher
def refresh(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """Compare every current.json of a dataset with the database, and write those that say
    something else.

    The dispatcher keeps them up to date by itself. This is for after Postgres, or the bucket, was
    brought back from a backup. Partitions that the database does not know are left as they are.
    """
    answer, _ = asked(url, token, lambda client: _refreshed(client, name))
    if as_json:
        show_json(answer)
        return
    looked = counted(answer.looked, "partition")
    said = "all up to date"
    if answer.written:
        said = f"{counted(answer.written, 'file')} said something else, and now do not"
    click.echo(f"{looked} compared: {said}.")


async def _refreshed(client: Client, name: str) -> RefreshAnswer:
    """All that was done until everything was looked at."""
    total = RefreshAnswer(looked=0, written=0, after="")
    for _ in range(_REQUESTS_MAX):
        more = await client.refresh(name, after=total.after or "")
        total = RefreshAnswer(
            looked=total.looked + more.looked,
            written=total.written + more.written,
            after=more.after,
        )
        if more.after is None:
            break
    return total


@click.command(
    "rebuild-table",
    short_help="Load the table of a dataset in Postgres anew.",
    epilog="Example: penstock dataset rebuild-table alerts",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@on_a_dispatcher
def rebuild_table(*, name: str, url: str, token: str | None, as_json: bool) -> None:
    """Load the table of a dataset with storage: postgres anew from its published files, one
    partition after the other, each in a transaction: readers always find all of a partition.

    The table follows what is published by itself, also after either database was brought back from
    a backup. This is for a table that somebody has changed by hand, or dropped.
    """
    answer, _ = asked(url, token, lambda client: client.rebuild_table(name))
    if as_json:
        show_json(answer)
        return
    click.echo(f"{counted(answer.partitions, 'partition')} to load; 'penstock status' says when.")


@click.command(
    "cut-over",
    short_help="Switch readers to the generation being built.",
    epilog="Example: penstock dataset cut-over sales --keep",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option("--force", is_flag=True, help="Switch even if the new generation is incomplete.")
@click.option("--keep", is_flag=True, help="Carry over what cannot be rebuilt.")
@on_a_dispatcher
def cut_over(
    *, name: str, force: bool, keep: bool, url: str, token: str | None, as_json: bool
) -> None:
    """Have readers read the generation that is being built, of all datasets of the same job.

    That happens by itself once it has all that the current generation has: every partition, and
    of a job that appends every publication. It never has what an edited filter leaves out, whose
    tasks are dead, or whose events retention has removed: then somebody decides. With --force it
    is missing from then on. With --keep what was never computed anew is taken over from the current
    generation, as it is; what is computed of that is computed again, and then it is cut over.

    Exit code 0: readers read it, or will. 1: they do not, and it is said why.
    """
    answer, _ = asked(url, token, lambda client: client.cut_over(name, force=force, keep=keep))
    if as_json:
        show_json(answer)
        return
    if answer.kept is not None:
        click.echo(f"Carried over: {counted(answer.kept, 'publication')}.")
    if answer.is_waiting:
        click.echo(
            f"Readers of {line(answer.dataset)} read {answer.generation} until all is built that"
            " is computed of it."
        )
    else:
        click.echo(f"Readers of {line(answer.dataset)} read {answer.generation} now.")


@click.command(
    short_help="Delete data of a dataset for good.",
    epilog="Example: penstock dataset purge sales --partition 2026-01-01 --current",
)
@click.argument("name", metavar="DATASET", shell_complete=datasets)
@click.option(
    "--partition",
    "keys",
    metavar="KEY",
    multiple=True,
    help="Only of this partition; may be repeated.",
)
@click.option("--current", is_flag=True, help="With --partition: also the current publication.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@on_a_dispatcher
def purge(
    *,
    name: str,
    keys: tuple[str, ...],
    current: bool,
    yes: bool,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Forget what a dataset was, to erase what may not be kept: nothing brings it back.

    What readers read now stays, but for partitions that are named with --current. All snapshots
    go, tags too, and generations that were left, with those of the other outputs of the same job.
    With --partition only snapshots go that show another state of it, and what generations that
    were left have of it.

    The files go with the next sweep that finds that nobody can be reading them.

    Exit code 0: it is forgotten. 1: there is no such dataset, or a generation that was left stays
    because something reads it. 2: nobody has said yes.
    """
    if current and not keys:
        raise InvalidInput("--current is for what --partition names.")
    if not yes:
        of = f"{counted(len(keys), 'partition')} of {line(name)}" if keys else line(name)
        what = f"What {of} {'is and was' if current else 'was'} will be deleted for good."
        if not sys.stdin.isatty():
            raise InvalidInput(what, hint="Nothing was done; confirm with --yes.")
        click.confirm(f"{what} Continue?", abort=True, err=True)
    answer, _ = asked(
        url, token, lambda client: client.purge(name, partition_keys=keys, is_current=current)
    )
    if as_json:
        show_json(answer)
    else:
        gone = [
            counted(answer.snapshots, "snapshot"),
            *([counted(answer.generations, "generation")] if answer.generations else []),
            *([counted(answer.publications, "publication")] if answer.publications else []),
        ]
        click.echo(f"Forgotten: {', '.join(gone)}. The sweeper removes the files.")
        if answer.generations_left:
            left = counted(answer.generations_left, "generation")
            click.echo(
                f"In use by a generation that is read or built: {left}. Try again later.", err=True
            )
    if answer.generations_left:
        raise SystemExit(1)
