"""`penstock dag apply|list|rollback`: put a file in force, and go back to an earlier version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from penstock.cli.completion import versions
from penstock.cli.dispatcher_call import ago, asked, counted, fitted, on_a_dispatcher, show_json
from penstock.cli.options import absolute_option
from penstock.protocol.dags import AppliedAnswer, BreakAnswer, LossAnswer


def show_applied(answer: AppliedAnswer, *, as_json: bool) -> None:
    """Tell it, on standard output."""
    if as_json:
        show_json(answer)
        return
    for sentence in told(answer):
        click.echo(sentence)


def told(answer: AppliedAnswer) -> Iterator[str]:
    """What has become of the DAG and its jobs, or would, in sentences."""
    if not answer.is_changed:
        yield f"Version {answer.version} is identical and already in force."
        return
    if answer.is_dry_run:
        named = "a new version" if answer.version is None else f"version {answer.version}"
        yield f"Dry run: this would put {named} in force ({answer.hash[:12]})."
    else:
        yield f"Version {answer.version} is in force ({answer.hash[:12]})."
    yield from _changes(answer)
    if anew := [each for each in answer.building if each not in answer.resumed]:
        yield f"Rebuilt, and readers see the current data until then: {', '.join(anew)}."
    if answer.returned:
        yield f"Restored from their earlier output: {', '.join(answer.returned)}."
    if answer.resumed:
        yield (
            "Restored from their earlier output once it is up to date:"
            f" {', '.join(answer.resumed)}."
        )
    yield from (
        lost(each, is_at_once=each.job in answer.returned and each.job not in answer.building)
        for each in answer.losses
    )
    if answer.cancelled:
        yield f"Cancelled: {counted(answer.cancelled, 'task')} that became obsolete."
    if answer.breaks:
        yield "It would make waiting or running work obsolete, and needs --force:"
        yield from (f"  {broken(each)}" for each in answer.breaks)


def lost(loss: LossAnswer, *, is_at_once: bool) -> str:
    """What cannot be built anew, and what to do about it."""
    told = (
        f"Cannot be built anew: {loss.lost:,} of {counted(loss.publications, 'publication')} of"
        f" {loss.dataset}, whose events retention has removed or whose inputs were replaced since."
    )
    if is_at_once:
        return f"{told} Readers would lose them."
    return (
        f"{told} Readers keep the current data until you decide: 'penstock dataset cut-over"
        f" {loss.dataset} --keep' takes them over as they are, --force leaves them out."
    )


def broken(work: BreakAnswer) -> str:
    """Work of a job that a change makes useless."""
    backfills = counted(work.backfills, "backfill")
    return f"{work.job}: {work.waiting:,} waiting, {work.running:,} running, {backfills}"


def _changes(answer: AppliedAnswer) -> Iterator[str]:
    changes = answer.changes
    if changes is None:
        return
    if changes.added:
        yield f"Added: {', '.join(changes.added)}."
    if changes.changed:
        shown = []
        for name, change in changes.changed.items():
            is_built = name in answer.building and name not in answer.resumed
            effect = "; rebuilt" if is_built else "; keeps its data"
            is_told = is_built or change.keeps_generation
            shown.append(f"{name} ({', '.join(change.fields)}{effect if is_told else ''})")
        yield f"Changed: {', '.join(shown)}."
    if changes.removed:
        yield f"Removed: {', '.join(changes.removed)}; their data stays."


@click.command(
    short_help="Apply a DAG file.",
    epilog="Example: penstock dag apply pipeline.yaml",
)
@click.argument("file", metavar="FILE", type=click.Path(readable=False))
@click.option(
    "--force", is_flag=True, help="Apply even if waiting or running work becomes obsolete."
)
@click.option("--dry-run", is_flag=True, help="Dry run: show what would change.")
@on_a_dispatcher
@click.pass_context
def apply(
    context: click.Context,
    *,
    file: str,
    force: bool,
    dry_run: bool,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Put the DAG of a file in force, in one step, whatever was in force before.

    A file that says the same as the one in force changes nothing. Jobs whose data would come out
    the same keep what they have made; the others are built anew, and readers are served what there
    was until that is done. With --dry-run nothing is changed, and it is told what would be.

    Exit code 0: it is in force, or with --dry-run, it could be. 1: not, because it would break work
    (see --force), or the dispatcher cannot be asked. 2: the file is wrong.
    """
    # A name that is no text in this locale could not be printed, or sent.
    where = click.format_filename(file)
    answer, _ = asked(
        url,
        token,
        lambda client: client.apply(Path(file), where=where, force=force, dry_run=dry_run),
    )
    show_applied(answer, as_json=as_json)
    context.exit(1 if answer.breaks and not force else 0)


@click.command(
    "list",
    short_help="List the versions that were applied.",
    epilog="Example: penstock dag list",
)
@absolute_option
@on_a_dispatcher
def list_(*, url: str, token: str | None, as_json: bool) -> None:
    """List the versions of the DAG, the newest first, and which of them is in force.

    'since' tells when each was put in force last; first by its number is not first by that.
    """
    answer, now = asked(url, token, lambda client: client.versions())
    if as_json:
        show_json(answer)
        return
    if not answer.versions:
        click.echo("No DAG was applied yet; run 'penstock dag apply FILE'.", err=True)
        return
    rows = [
        (
            str(each.id),
            "in force" if each.is_current else "",
            ago(each.since, now=now),
            ago(each.created_at, now=now),
            each.hash[:12],
        )
        for each in answer.versions
    ]
    fitted(("version", "state", "since", "first applied", "hash"), rows, numbers=(0,))


@click.command(
    short_help="Roll back to an earlier version.",
    epilog="Example: penstock dag rollback 3",
)
@click.argument(
    "version",
    metavar="[VERSION]",
    type=click.IntRange(min=1),
    required=False,
    shell_complete=versions,
)
@click.option("--dry-run", is_flag=True, help="Dry run: show what would change.")
@on_a_dispatcher
def rollback(
    *, version: int | None, dry_run: bool, url: str, token: str | None, as_json: bool
) -> None:
    """Put an earlier version of the DAG in force.

    Without VERSION it is the one that was in force before the present one, whatever its number; so
    to roll back twice is to go there and back. 'penstock dag list' shows which there are, and when
    each was in force last. What waits for a generation that nobody reads any more is cancelled.

    Exit code 0: it is in force. 1: there is no such version, or the dispatcher cannot be asked.
    """
    answer, _ = asked(url, token, lambda client: client.rollback(version, dry_run=dry_run))
    show_applied(answer, as_json=as_json)
