"""What jobs write and read: outputs become datasets, and references become edges.

A file is read in two passes, because an input may name an output that stands further down: first
the outputs of all jobs go into a `Catalog`, which lets one job and no other write a dataset; then
the inputs are looked up in it, as `job.output` or by the name of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.datasets.schema import Column, declared_type, is_hidden
from penstock.dispatcher.dag.filters import parse_where
from penstock.dispatcher.dag.model import (
    NAME_CHARACTERS_MAX,
    CompactSpec,
    InputSpec,
    KeepSpec,
    MaintainSpec,
    OutputSpec,
    OutputStorage,
    ReadMode,
    is_name,
)
from penstock.dispatcher.dag.yaml_reader import Field, FieldProblems
from penstock.kernel.text import listed, shown
from penstock.kernel.units import (
    age_ms,
    bounded,
    byte_count,
    bytes_text,
    count,
    duration_ms,
    duration_text,
)

EDGES_MAX = 100
"""How many inputs, and how many outputs, a job may have."""

_OUTPUT_FIELDS = (
    "name",
    "dataset",
    "keep",
    "partition_by",
    "maintain",
    "columns",
    "storage",
    "buffered",
)
_INPUT_FIELDS = ("from", "as", "where", "trigger", "read", "lookback")
_KEEP_FIELDS = ("partitions", "age", "generations", "history")
_MAINTAIN_FIELDS = ("compact", "cluster", "after")
_COMPACT_FIELDS = ("files", "below")
_MAINTAIN = MaintainSpec()
_COMPACT = CompactSpec()
_COLUMNS_MAX = 100
_DECLARED_MAX = 500
_COLUMN_BYTES_MAX = 63
"""Of a declared column: as much as Postgres takes of a name."""
_EXPRESSION_CHARACTERS_MAX = 1_000
_COUNT_FROM_1 = bounded(count, least=1, show=str)
_AGE = bounded(age_ms, least=60_000, show=duration_text)
_FROM_2 = bounded(count, least=2, show=str)
_BELOW = bounded(byte_count, least=1024, show=bytes_text)
_SECOND_MS = 1000
_NAMING = f"is not a name; use a-z, 0-9, _ and -, at most {NAME_CHARACTERS_MAX} characters"


def name(text: str) -> str:
    """A text that has the form of a name."""
    if not is_name(text):
        raise ValueError(_NAMING)
    return text


def lookback(text: str) -> int:
    """How far back a task reads, in milliseconds; ranges are of whole seconds."""
    found = _LOOKBACK(text)
    if found % _SECOND_MS:
        raise ValueError("is finer than a second; write whole seconds, as in 3d")
    return found


_LOOKBACK = bounded(duration_ms, least=_SECOND_MS, show=duration_text)


def _expression(text: str) -> str:
    if not text.strip() or len(text) > _EXPRESSION_CHARACTERS_MAX:
        raise ValueError(
            "is no SQL expression over the columns of the result; write one of at most"
            f" {_EXPRESSION_CHARACTERS_MAX:,} characters, as in date_trunc('month', ts)"
        )
    return text.strip()


class DatasetIndex:
    """Every dataset of a file, and the job that writes it."""

    def __init__(self, findings: FieldProblems) -> None:
        self._findings = findings
        self._outputs: dict[str, dict[str, str]] = {}
        self._writers: dict[str, str] = {}
        self._places: dict[str, str] = {}

    def add(self, job: str, outputs: Field | None) -> tuple[OutputSpec, ...]:
        """The outputs of a job, by name; they are known to the inputs of all jobs from now on."""
        found = self._outputs.setdefault(job, {})
        read: dict[str, OutputSpec] = {}
        for item in outputs.items(most=EDGES_MAX) if outputs is not None else ():
            output = _read_output(item)
            if output is None:
                continue
            if output.name in found:
                item.wrong(f"The job has two outputs of the name {output.name}; rename one.")
            elif output.dataset in self._writers:
                first = self._writers[output.dataset]
                line = self._findings.line(self._places[output.dataset])
                writer = "this job" if first == job else f"the job {first}"
                item.wrong(
                    f"The dataset {output.dataset} is already written by {writer}, in line {line};"
                    " give one of the two another name or another `dataset`."
                )
            else:
                self._writers[output.dataset] = job
                self._places[output.dataset] = item.path
            found.setdefault(output.name, output.dataset)
            read.setdefault(output.name, output)
        return tuple(read[each] for each in sorted(read))

    def dataset(self, reference: Field) -> str | None:
        """The dataset that a reference means; None, with a problem noted, if there is none."""
        text = reference.text()
        if text is None:
            return None
        job, dot, output = text.partition(".")
        if dot:
            return self._output(reference, job, output)
        if text in self._writers:
            return text
        if text in self._outputs:
            outputs = [f"{text}.{each}" for each in self._outputs[text]]
            do = f"write {' or '.join(outputs)}" if outputs else "give that job an output"
            reference.wrong(f"{text} is a job and not a dataset; {do}.")
            return None
        names = self._findings.meant(text, [*self._writers, *self._outputs])
        reference.wrong(f"There is no dataset {shown(text)}.{names or self._all()}")
        return None

    def _output(self, reference: Field, job: str, output: str) -> str | None:
        if job not in self._outputs:
            ask = self._findings.meant(job, self._outputs)
            reference.wrong(f"There is no job {shown(job)}.{ask or self._all()}")
            return None
        outputs = self._outputs[job]
        if output in outputs:
            return outputs[output]
        if self._findings.is_broken(f"jobs.{job}.outputs"):
            # It may be the very output that could not be read.
            self._findings.distrust(reference.path)
        else:
            has = f"it has {listed(outputs)}" if outputs else "it has none"
            ask = self._findings.meant(output, outputs)
            reference.wrong(f"The job {job} has no output {shown(output)}; {has}.{ask}")
        return None

    def _all(self) -> str:
        if not self._writers:
            return " No job has an output."
        return f" There are {listed(sorted(self._writers))}."


def _read_output(item: Field) -> OutputSpec | None:
    if item.is_scalar:
        text = item.read(name)
        return None if text is None else OutputSpec(text, text)
    section = item.section(_OUTPUT_FIELDS)
    named = section.need("name", "write what the job calls this output")
    text = named.read(name) if named is not None else None
    if text is None:
        return None
    kept = section.get("keep")
    keep = _read_keep(kept) if kept is not None else None
    by = section.read("partition_by", _expression, "")
    maintained = section.get("maintain")
    maintain = _read_maintain(maintained) if maintained is not None else None
    declared = section.get("columns")
    return OutputSpec(
        text,
        section.read("dataset", name, text),
        keep,
        by,
        maintain,
        _read_declared(declared) if declared is not None else (),
        section.choice("storage", OutputStorage.FILES),
        (said := section.get("buffered")) is not None and said.flag() is True,
    )


def _read_declared(field: Field) -> tuple[Column, ...]:
    """Columns by their names: a mapping, or a list of such, as the canonical form has them."""
    found: list[Column] = []
    for name, value in _named_types(field):
        kind = value.read(declared_type)
        if not name.isprintable() or len(name.encode()) > _COLUMN_BYTES_MAX or is_hidden(name):
            value.wrong(
                f"{shown(name)} cannot be a column here; write at most {_COLUMN_BYTES_MAX}"
                " printable bytes that do not begin with _penstock_."
            )
        elif any(each.name.casefold() == name.casefold() for each in found):
            value.wrong(f"The column {shown(name)} is declared twice; take one out.")
        elif kind is not None:
            found.append(Column(name, kind))
    if len(found) > _DECLARED_MAX:
        field.wrong(f"There are {len(found)} columns; at most {_DECLARED_MAX} are allowed.")
    elif not found and not field.findings.is_broken(field.path):
        field.wrong("It declares no column; write one, as in id: bigint.")
    return tuple(found)


def _named_types(field: Field) -> Iterator[tuple[str, Field]]:
    for item in field.items(most=_DECLARED_MAX):
        yield from item.entries()


def _read_keep(field: Field) -> KeepSpec | None:
    section = field.section(_KEEP_FIELDS)
    keep = KeepSpec(
        partitions=section.read("partitions", _COUNT_FROM_1, None),
        age_ms=section.read("age", _AGE, None),
        generations=section.read("generations", _COUNT_FROM_1, None),
        history_ms=section.read("history", _AGE, None),
    )
    if keep != KeepSpec():
        return keep
    if field.is_mapping and not field.findings.is_broken(field.path):
        field.wrong(
            "It bounds nothing; write partitions: 100, age: 90d, generations: 3 or history: 7d."
        )
    return None


def _read_maintain(field: Field) -> MaintainSpec | None:
    section = field.section(_MAINTAIN_FIELDS)
    compact, cluster = section.get("compact"), section.get("cluster")
    maintain = MaintainSpec(
        compact=_read_compact(compact) if compact is not None else None,
        cluster=_read_columns(cluster) if cluster is not None else (),
        after_ms=section.read("after", duration_ms, _MAINTAIN.after_ms),
    )
    if maintain.compact is not None or maintain.cluster:
        return maintain
    if field.is_mapping and not field.findings.is_broken(field.path):
        field.wrong("It does nothing; write compact: true, or cluster with a list of columns.")
    return None


def _read_compact(field: Field) -> CompactSpec | None:
    if field.is_scalar:
        return _COMPACT if field.flag() else None
    section = field.section(_COMPACT_FIELDS)
    return CompactSpec(
        files=section.read("files", _FROM_2, _COMPACT.files),
        below_bytes=section.read("below", _BELOW, _COMPACT.below_bytes),
    )


def _read_columns(field: Field) -> tuple[str, ...]:
    columns = [each.text() for each in field.items(most=_COLUMNS_MAX)]
    found = tuple(each for each in columns if each)
    if len(set(found)) < len(found):
        field.wrong("A column is listed twice; remove one.")
    return found


def read_buffers(field: Field | None, catalog: DatasetIndex) -> tuple[str, ...]:
    """The datasets into which a job may publish batches, sorted."""
    found: set[str] = set()
    for item in field.items(most=EDGES_MAX) if field is not None else ():
        dataset = catalog.dataset(item)
        if dataset in found:
            item.wrong(f"The dataset {dataset} is named twice; take one out.")
        if dataset is not None:
            found.add(dataset)
    return tuple(sorted(found))


def read_inputs(inputs: Field | None, catalog: DatasetIndex) -> tuple[InputSpec, ...]:
    """The inputs of a job that could be resolved, by name."""
    found: dict[str, InputSpec] = {}
    for item in inputs.items(most=EDGES_MAX) if inputs is not None else ():
        edge = _read_input(item, catalog)
        if edge is None:
            continue
        if edge.name in found:
            item.wrong(
                f"The job has two inputs of the name {edge.name}; give one of them another by `as`."
            )
        found.setdefault(edge.name, edge)
    return tuple(found[each] for each in sorted(found))


def _read_input(item: Field, catalog: DatasetIndex) -> InputSpec | None:
    if item.is_scalar:
        dataset = catalog.dataset(item)
        return None if dataset is None else InputSpec(dataset, dataset)
    section = item.section(_INPUT_FIELDS)
    reference = section.need("from", "write job.output, or the name of a dataset")
    dataset = catalog.dataset(reference) if reference is not None else None
    where = section.get("where")
    called = section.get("as")
    # Everything is looked at, also when one part is wrong.
    filtered = where.read(parse_where) if where is not None else None
    alias = called.read(name) if called is not None else None
    trigger = section.get("trigger")
    is_trigger = trigger is None or trigger.flag() is not False
    reads = section.choice("read", ReadMode.PARTITION)
    back = section.read("lookback", lookback, None)
    if dataset is None:
        return None
    return InputSpec(alias or dataset, dataset, filtered, is_trigger, reads, back)
