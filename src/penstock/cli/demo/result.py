"""What a run of the pipeline has published, read from its manifests: how much, and which bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.datasets.layout import MANIFEST, path_of
from penstock.datasets.manifest import File, decode
from penstock.dispatcher.client import Client
from penstock.dispatcher.wire.steering import PartitionAnswer
from penstock.kernel.errors import PenstockError

_PAGE: Final = 1000
_PAGES_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Published:
    """A partition of a dataset."""

    key: str
    folder: Path
    files: tuple[File, ...]
    revision: int
    published_at: datetime

    @property
    def paths(self) -> list[Path]:
        return [self.folder / each.name for each in self.files]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All that is published of a dataset."""

    name: str
    partitions: tuple[Published, ...]

    @property
    def files(self) -> Iterator[File]:
        for each in self.partitions:
            yield from each.files

    @property
    def paths(self) -> list[Path]:
        return [path for each in self.partitions for path in each.paths]

    @property
    def rows(self) -> int:
        return sum(each.rows or 0 for each in self.files)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files)

    @property
    def complete_at(self) -> datetime | None:
        return max((each.published_at for each in self.partitions), default=None)


async def read_datasets(client: Client, names: Sequence[str]) -> dict[str, Dataset]:
    """What is published of these datasets, on a store that is a folder of this machine."""
    found = {}
    for name in names:
        every: list[PartitionAnswer] = []
        after: str | None = None
        for _ in range(_PAGES_MAX):
            answer = await client.partitions(name, limit=_PAGE, after=after)
            every += answer.partitions
            after = answer.after
            if after is None:
                break
        found[name] = Dataset(name, tuple(_published(each) for each in every))
    return found


def _published(answer: PartitionAnswer) -> Published:
    folder = path_of(answer.location)
    manifest = decode((folder / MANIFEST).read_bytes(), where=str(folder / MANIFEST))
    return Published(
        answer.partition_key, folder, manifest.files, answer.revision, answer.published_at
    )


def checksums(datasets: Mapping[str, Dataset]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The SHA-256 of every file, by dataset and partition, taken from the bytes themselves."""
    return {
        (dataset.name, partition.key): tuple(
            _checked(path, file)
            for path, file in zip(partition.paths, partition.files, strict=True)
        )
        for dataset in datasets.values()
        for partition in dataset.partitions
    }


def _checked(path: Path, file: File) -> str:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != file.sha256:
        raise PenstockError(f"{path} is not the file that its manifest names.")
    return found


def differences(
    one: Mapping[tuple[str, str], tuple[str, ...]], two: Mapping[tuple[str, str], tuple[str, ...]]
) -> list[str]:
    """The partitions that are not the same in both, by dataset and key."""
    return sorted(
        f"{dataset} {key}".rstrip()
        for dataset, key in one.keys() | two.keys()
        if one.get((dataset, key)) != two.get((dataset, key))
    )
