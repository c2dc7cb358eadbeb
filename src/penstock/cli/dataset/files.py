"""`penstock dataset files NAME`: the files of a consistent snapshot, for other programs."""

from __future__ import annotations

from dataclasses import asdict

import click
import msgspec

from penstock.cli.dataset.snapshots import on_a_snapshot, snapshot_of
from penstock.cli.queue.showing import as_json as show_plain
from penstock.cli.queue.showing import notes


@click.command(
    short_help="List the files of a snapshot, for other programs.",
    epilog="Example: penstock dataset files sales | xargs -n1 echo",
)
@on_a_snapshot
def files(
    *,
    name: str,
    generation: str | None,
    partition: str | None,
    store: str,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List the files that hold what is published of a dataset at this moment, one a line.

    Any program that reads Parquet can read them: DuckDB, pandas, Spark. Columns that were added
    later are missing in earlier files. With --json there are the sizes, rows and SHA-256 sums as
    well, and the columns of the dataset. Of what was published without a manifest the files are
    listed that lie there now: its Parquet files, or whatever it has instead. The files stay for
    some hours at least, also if other ones are published meanwhile.
    """
    found = snapshot_of(
        name, generation=generation, partition=partition, store=store, url=url, token=token
    )
    if not as_json:
        for contents in found.contents:
            for each in (*contents.files, *contents.others):
                click.echo(each.location)
            if contents.manifest is None and not (contents.files or contents.others):
                notes([f"there is no manifest and no file in {contents.location}"])
        return
    show_plain(
        {
            "dataset": name,
            "generation": found.answer.generation,
            "columns": msgspec.to_builtins(found.answer.columns),
            "parts": [
                {
                    "partition_key": part.partition_key,
                    "start": part.start,
                    "end": part.end,
                    "revision": part.revision,
                    "location": part.location,
                    "files": [
                        msgspec.to_builtins(asdict(each))
                        for each in (*contents.files, *contents.others)
                    ],
                }
                for part, contents in zip(found.answer.parts, found.contents, strict=True)
            ],
        }
    )
