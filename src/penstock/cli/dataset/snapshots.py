"""The files behind a snapshot of a dataset: asked of a dispatcher, and read where they lie.

The dispatcher says what is published at one moment; manifests and files are read from here, so
this machine must reach them: a folder, or a bucket with the keys of the environment. `--store` is
needed only to say which server `s3://` means, if the environment does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from penstock.cli.calling import asked, on_a_dispatcher
from penstock.cli.completing import datasets
from penstock.datasets.snapshot import Contents, DataFile, read, read_what_is_there
from penstock.datasets.transfer import Transfer
from penstock.dispatcher.wire.datasets import SnapshotAnswer
from penstock.kernel.errors import Damaged

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
    help="The store of the dispatcher, if s3:// means another server than in the environment.",
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was published at one moment, and its files."""

    answer: SnapshotAnswer
    contents: list[Contents]
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
) -> Snapshot:
    """Ask for a snapshot, and read its manifests. One that is wrong is `Damaged`, unless they are
    judged: then it is told of all of them."""
    answer, _ = asked(
        url,
        token,
        lambda client: client.snapshot(name, generation=generation, partition_key=partition),
    )
    transfer = Transfer(store)
    if is_judged:
        contents, damaged = read_what_is_there(answer.parts, transfer)
        return Snapshot(answer, contents, transfer, damaged)
    return Snapshot(answer, read(answer.parts, transfer), transfer)
