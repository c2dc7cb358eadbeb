"""`penstock dataset verify NAME`: whether all files are what their manifests say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import click

from penstock.cli.dataset.showing import size
from penstock.cli.dataset.snapshots import Snapshot, on_a_snapshot, snapshot_of
from penstock.cli.progress import Bar
from penstock.cli.queue.showing import as_json as show_plain
from penstock.cli.telling import counted
from penstock.datasets.snapshot import verify as damaged_files

_AT_ONCE: Final = 32


@click.command(
    short_help="Read all files of a dataset and compare their checksums.",
    epilog="Example: penstock dataset verify sales",
)
@on_a_snapshot
@click.pass_context
def verify(
    context: click.Context,
    *,
    name: str,
    generation: str | None,
    partition: str | None,
    store: str,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Read every file of what is published, and compare it with its checksum in the manifest, and
    every manifest with what was published.

    What was published without a manifest has nothing to be compared with: single files, what the
    worker was not allowed to read, and what functions made with release 0.1.

    Exit code 0: all is as it was written. 1: something is damaged or missing, and it is said what;
    or something has no manifest, so that it could not be compared.
    """
    found = snapshot_of(
        name,
        generation=generation,
        partition=partition,
        store=store,
        url=url,
        token=token,
        is_judged=True,
    )
    damaged = [(each.location, each.message) for each in found.damaged] + _damaged(found)
    if as_json:
        show_plain(_facts(found, damaged))
    else:
        for _, said in damaged:
            click.echo(f"penstock: {said}", err=True)
        _tell(found, damaged)
    if damaged or _unlisted(found):
        context.exit(1)


def _facts(found: Snapshot, damaged: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "dataset": found.answer.dataset,
        "generation": found.answer.generation,
        "parts": len(found.answer.parts),
        "files": len(found.files),
        "bytes": sum(each.bytes for each in found.files),
        "compared": sum(each.sha256 is not None for each in found.files),
        "unsummed": sum(each.sha256 is None for each in found.files),
        "unlisted": _unlisted(found),
        "damaged": [{"location": location, "problem": said} for location, said in damaged],
    }


def _tell(found: Snapshot, damaged: Sequence[tuple[str, str]]) -> None:
    parts, unlisted = len(found.answer.parts), _unlisted(found)
    if parts > unlisted:
        listed = [
            each for part in found.contents if part.manifest for each in (*part.files, *part.others)
        ]
        whole = f"{counted(len(listed), 'file')} in {counted(parts - unlisted, 'part')}"
        state = f"{len(damaged)} damaged" if damaged else "all as they were written"
        click.echo(f"{whole}, {size(sum(each.bytes for each in listed))}: {state}.")
    elif not unlisted:
        click.echo("Nothing is published: there is nothing to compare.")
    if unlisted:
        have, they = ("has", "it was") if unlisted == 1 else ("have", "they were")
        said = f"{they} not compared" if parts > unlisted else "nothing could be compared"
        click.echo(f"{counted(unlisted, 'part')} {have} no manifest: {said}.")


def _unlisted(found: Snapshot) -> int:
    return sum(each.manifest is None for each in found.contents)


def _damaged(found: Snapshot) -> list[tuple[str, str]]:
    """Files that are not what they should be, each with a sentence."""
    files, damaged = found.files, list[tuple[str, str]]()
    with Bar() as bar:
        for place in range(0, len(files), _AT_ONCE):
            bar.show(f"{place:,} of {len(files):,} files", done=place, of=len(files))
            some = damaged_files(files[place : place + _AT_ONCE], found.transfer)
            damaged += [(each.location, said) for each, said in some]
    return damaged
