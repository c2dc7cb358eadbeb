"""What has become of the DAG, or would: as `apply`, `rollback` and `up` tell it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from penstock.cli.telling import counted, show_json
from penstock.dispatcher.wire.dags import AppliedAnswer, BreakAnswer, LossAnswer


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
        yield f"Version {answer.version} says the same and is in force already."
        return
    if answer.is_dry_run:
        named = "a new version" if answer.version is None else f"version {answer.version}"
        yield f"Nothing was changed. This would put {named} in force ({answer.hash[:12]})."
    else:
        yield f"Version {answer.version} is in force ({answer.hash[:12]})."
    yield from _changes(answer)
    if anew := [each for each in answer.building if each not in answer.resumed]:
        yield f"Built anew, and served as before until then: {', '.join(anew)}."
    if answer.returned:
        yield f"Back at once to what they had made earlier: {', '.join(answer.returned)}."
    if answer.resumed:
        yield (
            "Back to what they had made earlier, once that is brought up to date:"
            f" {', '.join(answer.resumed)}."
        )
    yield from (
        lost(each, is_at_once=each.job in answer.returned and each.job not in answer.building)
        for each in answer.losses
    )
    if answer.cancelled:
        yield f"Cancelled: {counted(answer.cancelled, 'task')} that nobody needs any more."
    if answer.breaks:
        yield "It would make work useless that waits or runs, and needs --force:"
        yield from (f"  {broken(each)}" for each in answer.breaks)


def lost(loss: LossAnswer, *, is_at_once: bool) -> str:
    """What cannot be built anew, and what to do about it."""
    told = (
        f"Cannot be built anew: {loss.lost:,} of {counted(loss.publications, 'publication')} of"
        f" {loss.dataset}, whose events retention has removed or whose inputs were replaced since."
    )
    if is_at_once:
        return f"{told} Readers would miss them from then on."
    return (
        f"{told} Readers keep what they have until somebody decides: 'penstock dataset cut-over"
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
            effect = "; built anew" if is_built else "; keeps its data"
            is_told = is_built or change.keeps_generation
            shown.append(f"{name} ({', '.join(change.fields)}{effect if is_told else ''})")
        yield f"Changed: {', '.join(shown)}."
    if changes.removed:
        yield f"Removed: {', '.join(changes.removed)}; what they have made stays."
