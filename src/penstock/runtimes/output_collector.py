"""Collects what functions have made: uploads it to where it belongs, and writes its manifest.

A runtime that writes manifests itself, as Spark's does, is left alone. What users' own code has
made is described here, after nothing of it runs any more and what untrusted code wrote has
become the worker's: which files there are, how large they are, their sums, and of Parquet how
many rows and which columns. None of it is the code's own word. The manifest is written last,
beside them.

An output in a bucket has a folder of this machine meanwhile (`AttemptFiles.outputs`). What the
function has put there is uploaded first; what it has written to the bucket by itself is there
already. Parquet in a folder, this one or the output itself, is given the field ids of its columns
before (`datasets.parquet_footer`). Each file is read once: when it is sent, or else from where it
lies, so that a large output which was written to the bucket directly is fetched once more. Memory
is bounded; at most `FILES_MAX` files are described.

Columns are recorded as observed, and refuse nothing: see decision 0030. What has no manifest
afterwards: an output without a file, one that is a single file instead of a folder, and one
that may not be read here. Called before the completion is reported: by
`penstock.worker.sandbox`, and by `deployed` for functions at AWS, in the function itself. A
crash leaves files of an attempt that is run again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

from penstock.datasets.layout import HIDDEN_MANIFEST, location_below, path_of
from penstock.datasets.manifest import File, Manifest, Unfit, decode, encode, with_bounds
from penstock.datasets.parquet import Footer, footers
from penstock.datasets.parquet_footer import identify
from penstock.datasets.schema import Column, evolve
from penstock.datasets.snapshot import is_data
from penstock.datasets.transfer import Sent, Transfer
from penstock.kernel.errors import InvalidInput, PenstockError, Refused, SchemaRefused, WorkFailed
from penstock.runtimes.base import (
    AttemptWork,
    Facts,
    ProducedOutput,
    WorkResult,
    facts_of,
    manifest_inputs,
    manifest_totals,
)
from penstock.tokens.scopes import scope_of_location

_log = logging.getLogger(__name__)

FILES_MAX: Final = 100_000
_ATTEMPTS_AT_ONCE: Final = 8
_AT_ONCE: Final = 4
"""How many places of an attempt, and how many files of each."""
_FOOTERS_AT_ONCE: Final = 64
_FOOTERS_SECONDS_MAX: Final = 60.0
_PARQUET: Final = ".parquet"
# Who writes to the bucket may be another than who describes, and the package for that not here.
_UNREADABLE: Final = (Refused, InvalidInput)
_COLUMNS_MAX: Final = 1_000
"""Of wider tables, and of names that nobody reads, the columns are not told."""

Answer = TypeVar("Answer")


class OutputCollector:
    """Completes what work has made."""

    def __init__(self, store_url: str) -> None:
        self._transfer = Transfer(store_url)
        # Threads of its own: what is sent for minutes must not keep others from the loop's.
        self._threads = ThreadPoolExecutor(_ATTEMPTS_AT_ONCE, thread_name_prefix="penstock-made")

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def complete(
        self, work: AttemptWork, finished: WorkResult, *, staged: Mapping[str, Path]
    ) -> WorkResult:
        """Send what is `staged`, by output, and give a manifest to what has none."""
        if all(each.facts is not None for each in finished.made):
            return finished
        completing = ManifestBuilder(self._transfer, work)
        try:
            running = partial(completing.run, finished.made, staged)
            made = await asyncio.get_running_loop().run_in_executor(self._threads, running)
        except BaseException:
            completing.stop()
            raise
        return replace(finished, made=made)


class ManifestBuilder:
    """Completes what one attempt has made. Blocks."""

    def __init__(self, transfer: Transfer, work: AttemptWork) -> None:
        self._transfer = transfer
        self._work = work
        self._sums: dict[str, Sent] = {}
        """Of files that were sent from here, by location."""
        self._footers: dict[str, Footer | None] = {}
        """Of those that were in a folder."""
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped.set()

    def run(
        self, made: Sequence[ProducedOutput], staged: Mapping[str, Path]
    ) -> tuple[ProducedOutput, ...]:
        """The same with facts, where there are any."""
        try:
            for name in {each.output for each in made} & set(staged):
                self._send(staged[name], self._work.outputs[name].location)
            # All are described before one is written: a folder may lie in another.
            bare = self._bare(made)
            described = _each(
                lambda location: self._described(location, bare[location]), list(bare)
            )
            manifests = {
                location: manifest
                for location, manifest in zip(bare, described, strict=True)
                if manifest is not None
            }
            facts = _each(
                lambda location: self._written(location, manifests[location]), list(manifests)
            )
            found = dict(zip(manifests, facts, strict=True))
        except (UnicodeError, OSError) as error:
            raise WorkFailed(f"The outputs of the task cannot be described: {error}.") from error
        except WorkFailed:
            raise
        except PenstockError as error:
            raise WorkFailed(
                f"The outputs of the task cannot be stored: {error.message}", hint=error.hint
            ) from error
        return tuple(
            replace(each, facts=each.facts or found.get(each.location.rstrip("/"))) for each in made
        )

    def _send(self, folder: Path, location: str) -> None:
        base = folder.as_uri()
        names = [each.name for each in self._transfer.list(base)]
        tables = self._tables(base, [each for each in names if each.endswith(_PARQUET)])
        self._footers |= {location_below(location, name): each for name, each in tables.items()}

        def send(name: str) -> tuple[str, Sent]:
            self._go_on()
            to = location_below(location, name)
            return to, self._transfer.send(path_of(location_below(base, name)), to)

        self._sums.update(_each(send, names))

    def _bare(self, made: Sequence[ProducedOutput]) -> Mapping[str, Sequence[ProducedOutput]]:
        """What has no facts and lies in the attempt's own folders, by location."""
        found: dict[str, list[ProducedOutput]] = {}
        for each in made:
            place = self._work.outputs.get(each.output)
            if each.facts is None and place is not None and _lies_in(each.location, place.location):
                found.setdefault(each.location.rstrip("/"), []).append(each)
        return found

    def _described(self, location: str, made: Sequence[ProducedOutput]) -> Manifest | None:
        """What lies at a location that these name; None if nothing does, or nobody may look."""
        try:
            every = list(self._transfer.list(location))
        except _UNREADABLE as error:
            _log.warning("%s has no manifest: %s", location, error.advice)
            return None
        if any(each.name == HIDDEN_MANIFEST for each in every):
            raise WorkFailed(
                f"The work has written a file {HIDDEN_MANIFEST}, which is Penstock's own name.",
                is_retried=False,
                hint="Give the file another name.",
            )
        names = sorted(each.name for each in every if is_data(each.name))
        if not names:
            return None
        if len(names) > FILES_MAX:
            _log.warning("%s has no manifest: it has more than %d files", location, FILES_MAX)
            return None
        try:
            files, columns = self._files(location, names)
        except _UNREADABLE as error:
            _log.warning("%s has no manifest: %s", location, error.advice)
            return None
        tables = [each for each in files if each.name.endswith(_PARQUET)]
        is_counted = bool(tables) and all(each.rows is not None for each in tables)
        one = made[0] if len(made) == 1 else None
        return Manifest(
            dataset=self._work.outputs[made[0].output].dataset,
            generation=self._work.generation,
            job=self._work.job,
            task_id=self._work.task_id,
            attempt=self._work.attempt,
            partition_key=one.partition_key if one else None,
            start=one.start if one else None,
            end=one.end if one else None,
            rows=sum(each.rows or 0 for each in tables) if is_counted else None,
            bytes=sum(each.bytes for each in files),
            columns=columns,
            files=with_bounds(files),
            inputs=manifest_inputs(self._work.inputs),
            input_totals=manifest_totals(self._work.inputs),
        )

    def _files(self, location: str, names: Sequence[str]) -> tuple[list[File], tuple[Column, ...]]:
        places = {name: location_below(location, name) for name in names}

        def look(name: str) -> Sent:
            self._go_on()
            return self._sums.get(places[name]) or self._transfer.sum(places[name])

        tables = [name for name in names if name.endswith(_PARQUET)]
        found = self._tables(
            location, [each for each in tables if places[each] not in self._footers]
        )
        found |= {name: self._footers[at] for name, at in places.items() if at in self._footers}
        sums = dict(zip(names, _each(look, names), strict=True))
        files = [
            File(
                name=name,
                rows=footer.rows if (footer := found.get(name)) is not None else None,
                bytes=sums[name].bytes,
                sha256=sums[name].sha256,
                bounds=dict(footer.bounds) if footer is not None else {},
                unfit=footer.unfit if footer is not None else None,
            )
            for name in names
        ]
        return files, _columns([found[name] for name in tables])

    def _tables(self, location: str, names: Sequence[str]) -> dict[str, Footer | None]:
        """The footers of Parquet files, by name; those in a folder have field ids then."""
        places = [location_below(location, each) for each in names]
        found = zip(places, self._read(places), strict=True)
        return dict(zip(names, [self._identified(*each) for each in found], strict=True))

    def _identified(self, place: str, footer: Footer | None) -> Footer | None:
        if footer is None or not footer.columns or not place.startswith("file:"):
            return footer
        try:
            with self._transfer.change(place) as file:
                is_trusted = not self._work.is_untrusted
                has_ids = identify(file, footer.columns, is_trusted=is_trusted)
        except (OSError, PenstockError):
            # A file that cannot be changed has none.
            return footer
        is_fit = has_ids and footer.unfit is Unfit.FIELD_IDS
        return replace(footer, unfit=None) if is_fit else footer

    def _read(self, locations: Sequence[str]) -> Iterator[Footer | None]:
        if not locations:
            return
        if find_spec("pyarrow") is None:
            yield from (None for _ in locations)
            return
        for start in range(0, len(locations), _FOOTERS_AT_ONCE):
            self._go_on()
            some = locations[start : start + _FOOTERS_AT_ONCE]
            with ExitStack() as stack:
                opened = [stack.enter_context(self._transfer.open(each)) for each in some]
                try:
                    yield from footers(
                        opened,
                        seconds_max=_FOOTERS_SECONDS_MAX,
                        is_trusted=not self._work.is_untrusted,
                    )
                except PenstockError as error:
                    _log.warning("the rows of %s are not known: %s", some[0], error.message)
                    yield from (None for _ in some)

    def _written(self, location: str, manifest: Manifest) -> Facts:
        self._go_on()
        body = encode(manifest)
        # A name that no reader would take is told now.
        decode(body, where=f"The manifest of {location}")
        self._transfer.write_bytes(f"{location}/{HIDDEN_MANIFEST}", body)
        return facts_of(manifest, body, is_observed=True)

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise WorkFailed("It was interrupted.")


def _each(deed: Callable[[str], Answer], names: Sequence[str]) -> list[Answer]:
    """Done for each of these, several at a time."""
    if len(names) < 2:
        return [deed(each) for each in names]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="penstock-outputs") as pool:
        return list(pool.map(deed, names))


def _columns(found: Sequence[Footer | None]) -> tuple[Column, ...]:
    """The columns that all of these have together; none if they do not fit."""
    columns: tuple[Column, ...] = ()
    try:
        for each in found:
            if each is None or not each.columns:
                return ()
            columns = evolve(columns, each.columns)
    except SchemaRefused:
        return ()
    is_odd = any(
        len(each.name) > 500 or len(each.type) > 10_000 or "\0" in each.name + each.type
        for each in columns
    )
    return () if is_odd or len(columns) > _COLUMNS_MAX else columns


def _lies_in(location: str, place: str) -> bool:
    if not location.startswith(("s3://", "file:///")):
        return False
    try:
        return scope_of_location(place).covers(scope_of_location(location))
    except InvalidInput:
        return False
