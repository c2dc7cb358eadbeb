"""`penstock dataset verify NAME`: whether all files are what their manifests say."""

from __future__ import annotations

from typing import Final

import click

from penstock.cli.dataset.showing import size
from penstock.cli.dataset.snapshots import Snapshot, on_a_snapshot, snapshot_of
from penstock.cli.progress import Bar
from penstock.cli.queue.showing import as_json as show_plain
from penstock.cli.telling import counted
from penstock.datasets.snapshot import DataFile
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

    Exit code 0: all is as it was written. 1: something is damaged or missing, and it is said what.
    """
    found = snapshot_of(
        name, generation=generation, partition=partition, store=store, url=url, token=token
    )
    damaged = _damaged(found)
    total = sum(each.bytes for each in found.files)
    if as_json:
        show_plain(
            {
                "dataset": name,
                "generation": found.answer.generation,
                "parts": len(found.contents),
                "files": len(found.files),
                "bytes": total,
                "unsummed": sum(each.sha256 is None for each in found.files),
                "damaged": [{"location": each.location, "problem": said} for each, said in damaged],
            }
        )
    else:
        for _, said in damaged:
            click.echo(f"penstock: {said}", err=True)
        whole = f"{counted(len(found.files), 'file')} in {counted(len(found.contents), 'part')}"
        state = f"{len(damaged)} damaged" if damaged else "all as they were written"
        click.echo(f"{whole}, {size(total)}: {state}.")
        if unsummed := sum(each.sha256 is None for each in found.files):
            click.echo(f"{counted(unsummed, 'file')} without a checksum: only looked for.")
    if damaged:
        context.exit(1)


def _damaged(found: Snapshot) -> list[tuple[DataFile, str]]:
    """Files that are not what they should be, with a sentence for each."""
    files, damaged = found.files, list[tuple[DataFile, str]]()
    with Bar() as bar:
        for place in range(0, len(files), _AT_ONCE):
            bar.show(f"{place:,} of {len(files):,} files", done=place, of=len(files))
            damaged += damaged_files(files[place : place + _AT_ONCE], found.transfer)
    return damaged
