"""What a task reads: its inputs' parts, their manifests, and the files that those name.

Manifests are immutable and known by their sums, so they are read once and remembered. Nothing of
the data is read here, and nothing is inferred where manifests tell the columns: the columns of an
input are those of all its parts together, and a part that lacks one has nulls there.

Called by the engine, in its threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.datasets import snapshot
from penstock.datasets.manifest import Manifest
from penstock.datasets.schema import Column, evolve
from penstock.datasets.snapshot import Contents, DataFile
from penstock.datasets.transfer import Transfer
from penstock.kernel.errors import PenstockError, SchemaRefused, WorkFailed
from penstock.runtimes.base import Given, Part, Place, Work

_REMEMBERED_MAX: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input of a task, as files."""

    name: str
    given: Given
    files: tuple[DataFile, ...]
    columns: tuple[Column, ...] | None
    """None if a part has no manifest: then Spark has to look into the files."""
    is_own: bool
    """Whether it is a slice that belongs to the task's partition; else all tasks read the same."""
    place: str = ""
    """Where it lies; if nothing of it has changed, where the task may write: a URL."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.files)

    @property
    def rows(self) -> int:
        return sum(each.rows or 0 for each in self.files)


class Reader:
    """Turns what a task is given into files."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._held: OrderedDict[tuple[str, str], Contents] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, works: Iterable[Work]) -> None:
        """Read the manifests of many tasks at once; whose are wrong is found by `inputs`."""
        parts = {
            (part.location, part.manifest): part
            for work in works
            for given in work.inputs.values()
            for part in given.parts
        }
        try:
            self._contents(tuple(parts.values()))
        except PenstockError:
            return

    def inputs(self, work: Work) -> dict[str, Input]:
        """The inputs by name. One of which nothing is published has no files and no columns."""
        return {name: self._input(name, given, work) for name, given in work.inputs.items()}

    def published(self, place: Place, work: Work) -> tuple[Input, Input]:
        """What is published of an output: the rows that there are, and the keys of deleted ones."""
        given = Given(dataset=place.dataset, generation=work.generation, parts=place.current)
        rows = self._input("what is published", given, work)
        deleted = tuple(
            replace(each, partition_key=part.partition_key)
            for part, one in zip(place.current, self._contents(place.current), strict=True)
            for each in one.deleted
        )
        return rows, replace(rows, name="what was deleted", files=deleted)

    def manifest(self, part: Part) -> Manifest | None:
        """The manifest of a part, if it has one."""
        (found,) = self._contents((part,))
        return found.manifest

    def _input(self, name: str, given: Given, work: Work) -> Input:
        contents = self._contents(given.parts)
        columns = _columns(name, given, contents) or given.columns or None
        return Input(
            name=name,
            given=given,
            files=tuple(
                each
                for part, found in zip(given.parts, contents, strict=True)
                for each in _files(part, found, columns)
            ),
            columns=columns,
            place=given.parts[0].location if given.parts else work.scratch,
            is_own=all(_is_own(part, work) for part in given.parts)
            and (bool(given.parts) or (given.is_there and "partition_key" in work.payload)),
        )

    def _contents(self, parts: Sequence[Part]) -> list[Contents]:
        with self._lock:
            known = {
                part.location: self._held[part.location, part.manifest]
                for part in parts
                if part.manifest is not None and (part.location, part.manifest) in self._held
            }
        missing = [part for part in parts if part.location not in known]
        if missing:
            found = snapshot.read(missing, self._transfer)
            known |= {part.location: each for part, each in zip(missing, found, strict=True)}
            self._remember(missing, found)
        return [known[part.location] for part in parts]

    def _remember(self, parts: Sequence[Part], found: Sequence[Contents]) -> None:
        with self._lock:
            for part, each in zip(parts, found, strict=True):
                if part.manifest is not None:
                    self._held[part.location, part.manifest] = each
            while len(self._held) > _REMEMBERED_MAX:
                self._held.popitem(last=False)


def needed(inputs: Iterable[Input], work: Work) -> None:
    """Raise `WorkFailed` if nothing is published of one of these."""
    for each in inputs:
        if not each.given.is_there and each.given.has_data:
            raise missing(each, work)


def missing(given: Input, work: Work) -> WorkFailed:
    """That nothing is published of an input."""
    key = work.payload.get("partition_key")
    whose = f" for the partition {key!r}" if key else ""
    return WorkFailed(
        f"Nothing is published of the input {given.name} (dataset {given.given.dataset}){whose}."
        " Run the job that makes it, or wait for it with `when: all`.",
        is_retried=False,
    )


def _columns(name: str, given: Given, contents: Sequence[Contents]) -> tuple[Column, ...] | None:
    if not all(each.columns for each in contents):
        return None
    columns: tuple[Column, ...] = ()
    for each in contents:
        if each.columns == columns:
            continue
        try:
            columns = evolve(columns, each.columns)
        except SchemaRefused as error:
            raise WorkFailed(
                f"The parts of the input {name} (dataset {given.dataset}) do not fit together:"
                f" {error.message} {error.hint}",
                is_retried=False,
            ) from error
    return columns


def _files(part: Part, found: Contents, columns: tuple[Column, ...] | None) -> Iterator[DataFile]:
    """The files of a part that have rows, with the bounds of columns whose type is the input's."""
    types = {each.name: each.type for each in columns or ()}
    changed = {each.name for each in found.columns if types.get(each.name) != each.type}
    for each in found.files:
        if each.rows != 0:
            bounds = {name: one for name, one in each.bounds.items() if name not in changed}
            yield replace(
                each,
                bounds=bounds if changed else each.bounds,
                partition_key=part.partition_key,
            )


def _is_own(part: Part, work: Work) -> bool:
    key, start, end = (work.payload.get(name) for name in ("partition_key", "start", "end"))
    if part.partition_key is None or key is None:
        return False
    if part.partition_key == key:
        return True
    if start is None or end is None or part.start is None or part.end is None:
        return False
    return bool(start <= part.start and part.end <= end)
