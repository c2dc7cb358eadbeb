"""`penstock dataset files|preview|verify`: the files of a snapshot, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import click
import msgspec

from penstock.cli.completion import datasets
from penstock.cli.dataset.overview import size
from penstock.cli.dispatcher_call import asked, counted, fitted, line, on_a_dispatcher
from penstock.cli.dispatcher_call import lines as shown_lines
from penstock.cli.format import notes, print_json
from penstock.cli.output import ProgressBar
from penstock.datasets.snapshot import (
    TEXTS,
    DataFile,
    FileContents,
    first_lines,
    read,
    read_what_is_there,
)
from penstock.datasets.snapshot import preview as first_rows
from penstock.datasets.snapshot import verify as damaged_files
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import Damaged, InvalidInput
from penstock.protocol.datasets import SnapshotAnswer

Verb = TypeVar("Verb", bound=Callable[..., Any])

_generation_option = click.option(
    "--generation", metavar="UUID", help="By default the current one."
)
_partition_option = click.option("--partition", metavar="KEY", help="Only of this partition.")
_store_option = click.option(
    "--store",
    metavar="URL",
    envvar="PENSTOCK_STORE",
    default="",
    help="The store of the dispatcher, if its s3:// server differs from the environment.",
)


@dataclass(frozen=True, slots=True)
class PublishedSnapshot:
    """What was published at one moment, and its files."""

    answer: SnapshotAnswer
    contents: list[FileContents]
    transfer: Transfer
    damaged: list[Damaged] = field(default_factory=list)
    """What is wrong with manifests, if who asks wants to know of all of them."""

    @property
    def files(self) -> list[DataFile]:
        """All of them: what has rows, and what has not."""
        return [each for part in self.contents for each in (*part.files, *part.others)]


def on_a_snapshot(verb: Verb) -> Verb:
    """Give a verb `name`, `generation`, `partition`, `store`, and what a dispatcher needs."""
    named = click.argument("name", metavar="DATASET", shell_complete=datasets)
    chosen = _generation_option(_partition_option(_store_option(on_a_dispatcher(verb))))
    return named(chosen)


def snapshot_of(
    name: str,
    *,
    generation: str | None,
    partition: str | None,
    store: str,
    url: str,
    token: str | None,
    is_judged: bool = False,
    at: str | None = None,
) -> PublishedSnapshot:
    """Ask for a snapshot, and read its manifests. One that is wrong is `Damaged`, unless they are
    judged: then it is told of all of them."""
    answer, _ = asked(
        url,
        token,
        lambda client: client.snapshot(name, generation=generation, partition_key=partition, at=at),
    )
    transfer = Transfer(store)
    if is_judged:
        contents, damaged = read_what_is_there(answer.parts, transfer)
        return PublishedSnapshot(answer, contents, transfer, damaged)
    return PublishedSnapshot(answer, read(answer.parts, transfer), transfer)


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
    print_json(
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


PARTITION = "_partition"
"""As transforms of many partitions call it too."""
_ROWS_MAX = 1000


@click.command(
    short_help="Show some rows of a dataset.",
    epilog="Example: penstock dataset preview sales --partition 2026-01-01 --rows 20",
)
@on_a_snapshot
@click.option(
    "--at",
    metavar="TIME|ID",
    help="At this snapshot or time, such as 2026-01-31T12:00:00Z.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, _ROWS_MAX),
    default=10,
    show_default=True,
    help="Maximum number of entries.",
)
def preview(
    *,
    name: str,
    generation: str | None,
    partition: str | None,
    store: str,
    at: str | None,
    rows: int,
    url: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Show the first rows of a dataset, or of one partition of it.

    Of a dataset with partitions each row says which one it is of, as `_partition`. Of what has no
    rows, such as a report, the first lines of the first text are shown.
    """
    found = snapshot_of(
        name,
        generation=generation,
        partition=partition,
        store=store,
        url=url,
        token=token,
        at=at,
    )
    if any(each.files for each in found.contents) and find_spec("pyarrow") is None:
        raise InvalidInput(
            "Parquet files are read with pyarrow, which is not installed.",
            hint="Install it: pip install 'penstock[spark]'",
        )
    shown = _first(found, rows=rows)
    if not shown and any(each.manifest is None or each.others for each in found.contents):
        _show_text(found, lines=rows, as_json=as_json)
        return
    if as_json:
        # A line for each row; what JSON has no word for is told as text.
        for row in shown:
            click.echo(json.dumps(row, ensure_ascii=False, default=str))
        return
    heads = [PARTITION] * any(PARTITION in row for row in shown)
    heads += [each.name for each in found.answer.columns]
    heads += sorted({head for row in shown for head in row} - set(heads))
    if not shown:
        click.echo("There are no rows.", err=True)
        return
    fitted(heads, [[_cell(row.get(head)) for head in heads] for row in shown])


def _first(found: PublishedSnapshot, *, rows: int) -> list[dict[str, Any]]:
    """The first rows of all parts; those of a partition begin with its key."""
    shown: list[dict[str, Any]] = []
    for part, contents in zip(found.answer.parts, found.contents, strict=True):
        if len(shown) >= rows:
            break
        said = {} if part.partition_key is None else {PARTITION: part.partition_key}
        more = first_rows(contents.files, found.transfer, rows=rows - len(shown))
        shown += [{**said, **row} for row in more]
    return shown


def _show_text(found: PublishedSnapshot, *, lines: int, as_json: bool) -> None:
    """The first lines of the first text of parts that have no rows."""
    texts = [
        (part.partition_key, each)
        for part, contents in zip(found.answer.parts, found.contents, strict=True)
        for each in contents.others
        if each.location.endswith(TEXTS)
    ]
    if not texts:
        click.echo(_why_nothing(found.contents), err=True)
        return
    key, file = texts[0]
    if not as_json:
        click.echo(f"The first lines of {file.location}:", err=True)
    for text in first_lines(file, found.transfer, lines=lines):
        click.echo(_text_line(key, file, text) if as_json else shown_lines(text))


def _text_line(key: str | None, file: DataFile, text: str) -> str:
    said = {} if key is None else {PARTITION: key}
    row = {**said, "_file": file.location, "line": text}
    return json.dumps(row, ensure_ascii=False)


def _why_nothing(contents: list[FileContents]) -> str:
    for each in contents:
        if each.others:
            return (
                f"It has no rows and no text that could be shown; its files are in {each.location}."
            )
    bare = next(each for each in contents if each.manifest is None)
    return f"It has no manifest, and there are no files in {bare.location}."


def _cell(value: Any) -> str:
    return "" if value is None else line(str(value), characters_max=60)


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
        print_json(_facts(found, damaged))
    else:
        for _, said in damaged:
            click.echo(f"penstock: {said}", err=True)
        _tell(found, damaged)
    if damaged or _unlisted(found):
        context.exit(1)


def _facts(found: PublishedSnapshot, damaged: Sequence[tuple[str, str]]) -> dict[str, Any]:
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


def _tell(found: PublishedSnapshot, damaged: Sequence[tuple[str, str]]) -> None:
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


def _unlisted(found: PublishedSnapshot) -> int:
    return sum(each.manifest is None for each in found.contents)


def _damaged(found: PublishedSnapshot) -> list[tuple[str, str]]:
    """Files that are not what they should be, each with a sentence."""
    files, damaged = found.files, list[tuple[str, str]]()
    with ProgressBar() as bar:
        for place in range(0, len(files), _AT_ONCE):
            bar.show(f"{place:,} of {len(files):,} files", done=place, of=len(files))
            some = damaged_files(files[place : place + _AT_ONCE], found.transfer)
            damaged += [(each.location, said) for each, said in some]
    return damaged
