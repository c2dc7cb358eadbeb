"""Decodes an assignment of the dispatcher to work, and encodes results as completions.

Pure functions. An assignment that cannot be decoded raises `WorkReleased`, since a worker of
another release may understand it; a result that is no output of its job raises `WorkFailed`: a
sentence for people, and the end of that attempt alone. Everything encoded here is valid by the
rules of the wire, so that no task can spoil a call that is about several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.datasets.layout import AGAIN
from penstock.datasets.schema import Column
from penstock.kernel.errors import InvalidInput, WorkFailed, WorkReleased
from penstock.kernel.units import duration_ms
from penstock.protocol.work import (
    Assignment,
    ColumnAsk,
    EndAsk,
    FactsAsk,
    FailureAsk,
    InputAnswer,
    InputColumnAnswer,
    OutputAsk,
    PartAnswer,
    ReleaseAsk,
)
from penstock.runtimes.base import (
    AttemptPaths,
    AttemptWork,
    Facts,
    Merge,
    Part,
    ProducedOutput,
    WorkInput,
    WorkOutput,
    WorkResult,
    progress_fault,
)

REASON_CHARACTERS_MAX: Final = 10_000
_OUTPUTS_MAX: Final = 10_000
_METRICS_BYTES_MAX: Final = 8_000
_LOG_CHARACTERS_MAX: Final = 1000
_ALWAYS_ON: Final = "always_on"
_ENDS: Final = msgspec.json.Decoder(EndAsk)


def is_always_on(assignment: Assignment) -> bool:
    """Whether it is a source that runs until it is stopped, and so has no time limit."""
    source = assignment.definition.get("source")
    return isinstance(source, Mapping) and source.get("kind") == _ALWAYS_ON


def secrets_of(assignment: Assignment) -> Mapping[str, Any]:
    """What its job calls secrets, and where they are; nothing of it is judged here."""
    said = assignment.definition.get("secrets") or {}
    if not isinstance(said, Mapping):
        raise WorkReleased(
            f"The secrets of job {assignment.job} cannot be understood by this worker.",
            hint="Upgrade the worker to the release of the dispatcher.",
        )
    return said


def work_of(
    assignment: Assignment,
    *,
    logs: Path | None,
    grace_seconds: float,
    batch_size: int = 1,
    merges: int = 0,
) -> AttemptWork:
    """An assignment as a runtime is given it. The dispatcher says where the attempt writes.

    What is merged again, for the `merges`th time, is written to a place of its own.
    """
    places = _places(assignment, logs)
    folder = f"{assignment.folder}/merge-{merges}" if merges else assignment.folder
    definition = assignment.definition
    return AttemptWork(
        task_id=assignment.task_id,
        attempt=assignment.attempt,
        job=assignment.job,
        operator=assignment.operator,
        generation=assignment.generation,
        config=_mapping(definition, "config"),
        resources=_mapping(definition, "resources"),
        payload=assignment.payload,
        inputs={name: _given(each) for name, each in assignment.inputs.items()},
        outputs=_outputs(assignment, places, merges=merges),
        merge=_merge(assignment),
        grace_seconds=_grace_seconds(assignment, otherwise=grace_seconds),
        timeout_seconds=None if is_always_on(assignment) else assignment.timeout_seconds,
        batch=assignment.batch,
        batch_size=batch_size,
        scratch=places.scratch(folder),
        log=places.log(task_id=assignment.task_id, attempt=assignment.attempt),
        # What is not plainly false is not trusted.
        is_untrusted=definition.get("untrusted", False) is not False,
        runs_alone=assignment.runs_alone,
    )


def succeeded(
    work: AttemptWork, finished: WorkResult, *, lease_token: str, token: str = ""
) -> EndAsk:
    """The end of an attempt that has finished so."""
    outputs = [_output(work, each) for each in finished.made]
    if len(outputs) > _OUTPUTS_MAX:
        raise WorkFailed(
            f"The task has made {len(outputs):,} outputs; at most {_OUTPUTS_MAX:,} are allowed."
        )
    end = EndAsk(
        task_id=work.task_id,
        attempt=work.attempt,
        lease_token=lease_token,
        token=token or None,
        outputs=outputs,
        log=_log(work),
        metrics=_metrics(finished),
    )
    try:
        # msgspec checks the bounds of what it reads, not of what is made in code.
        return _ENDS.decode(msgspec.json.encode(end))
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError) as error:
        raise WorkFailed(f"The outputs of the task cannot be published: {error}.") from error


def failed(
    assignment: Assignment,
    reason: str,
    *,
    token: str = "",
    is_retried: bool = True,
    runs_alone: bool = False,
    log: str = "",
    metrics: dict[str, Any] | None = None,
) -> EndAsk:
    """The end of an attempt that has failed."""
    return EndAsk(
        task_id=assignment.task_id,
        attempt=assignment.attempt,
        lease_token=assignment.lease_token,
        token=token or None,
        failure=FailureAsk(reason=_told(reason), is_retried=is_retried, runs_alone=runs_alone),
        log=log if 0 < len(log) <= _LOG_CHARACTERS_MAX else None,
        metrics=metrics,
    )


def released(
    assignment: Assignment,
    reason: str,
    *,
    token: str = "",
    is_delayed: bool,
    runs_alone: bool = False,
    log: str = "",
) -> EndAsk:
    """The completion of an attempt that is released."""
    return EndAsk(
        task_id=assignment.task_id,
        attempt=assignment.attempt,
        lease_token=assignment.lease_token,
        token=token or None,
        release=ReleaseAsk(reason=_told(reason), is_delayed=is_delayed, runs_alone=runs_alone),
        log=log if 0 < len(log) <= _LOG_CHARACTERS_MAX else None,
    )


def _told(reason: str) -> str:
    return reason.encode("utf-8", "replace").decode()[:REASON_CHARACTERS_MAX]


def _places(assignment: Assignment, logs: Path | None) -> AttemptPaths:
    if not assignment.folder:
        raise WorkReleased(
            "The dispatcher does not say where this attempt may write.",
            hint="Upgrade the dispatcher to the release of the worker.",
        )
    try:
        return AttemptPaths(assignment.root, logs=logs)
    except InvalidInput as error:
        raise WorkReleased(error.message, hint=error.hint) from error


def _given(answer: InputAnswer) -> WorkInput:
    return WorkInput(
        dataset=answer.dataset,
        generation=answer.generation,
        location=answer.location,
        revision=answer.revision,
        has_data=answer.has_data,
        columns=_columns(answer.columns),
        missed=answer.missed,
        parts=_parts(answer.parts),
    )


def _columns(answers: Iterable[InputColumnAnswer]) -> tuple[Column, ...]:
    return tuple(Column(each.name, each.type, each.is_nullable) for each in answers)


def _parts(answers: Iterable[PartAnswer]) -> tuple[Part, ...]:
    return tuple(
        Part(
            location=each.location,
            partition_key=each.partition_key,
            start=each.start,
            end=each.end,
            revision=each.revision,
            append_key=each.append_key,
            manifest=each.manifest,
            rows=each.rows,
            bytes=each.bytes,
        )
        for each in answers
    )


def _merge(assignment: Assignment) -> Merge | None:
    definition = assignment.definition
    # What is to be written anew may be of a job that does not merge.
    if assignment.current is None or definition.get("update") != "merge":
        return None
    key = definition.get("unique_key")
    version, delete = (definition.get(name, "") for name in ("version_by", "delete_when"))
    is_text = isinstance(version, str) and isinstance(delete, str)
    if not isinstance(key, list) or not key or not is_text:
        raise WorkReleased(
            f"How job {assignment.job} merges cannot be read by this worker.",
            hint="Upgrade the worker to the release of the dispatcher.",
        )
    return Merge(key=tuple(map(str, key)), version_by=version, delete_when=delete)


def _outputs(assignment: Assignment, places: AttemptPaths, *, merges: int) -> dict[str, WorkOutput]:
    folder = many = assignment.folder
    if merges:
        folder, many = f"{folder}/merge-{merges}", f"{folder}/{AGAIN}{merges}"
    current = assignment.current or {}
    found: dict[str, WorkOutput] = {}
    uuids = _mapping(assignment.definition, "datasets")
    for each in assignment.definition.get("outputs") or ():
        name = each.get("name") if isinstance(each, Mapping) else None
        dataset = each.get("dataset", name) if isinstance(each, Mapping) else None
        uuid = uuids.get(dataset) if isinstance(dataset, str) else None
        if not isinstance(name, str) or not isinstance(dataset, str) or not isinstance(uuid, str):
            raise WorkReleased(
                f"An output of job {assignment.job} cannot be read by this worker: {each!r}.",
                hint="Upgrade the worker to the release of the dispatcher.",
            )
        location = places.output(
            dataset,
            generation=assignment.generation,
            payload=assignment.payload,
            attempt_id=folder,
        )
        by = each.get("partition_by", "")
        if by:
            location = places.many(dataset, generation=assignment.generation, attempt_id=many)
        found[name] = WorkOutput(
            dataset=dataset,
            uuid=uuid,
            location=location,
            partition_by=by,
            current=_parts(current.get(dataset, ())),
            columns=_columns(assignment.columns.get(dataset, ())),
            declared=tuple(
                Column(str(name), str(kind))
                for said in each.get("columns") or ()
                for name, kind in said.items()
            ),
        )
    return found


def _output(work: AttemptWork, made: ProducedOutput) -> OutputAsk:
    place = work.outputs.get(made.output)
    if place is None:
        known = ", ".join(sorted(work.outputs)) or "none"
        raise WorkFailed(
            f"The work has made {made.output!r}, which is no output of job {work.job};"
            f" its outputs: {known}.",
            is_retried=False,
        )
    return OutputAsk(
        dataset=place.uuid,
        location=made.location,
        partition_key=made.partition_key,
        start=made.start,
        end=made.end,
        cursor=made.cursor,
        append_key=made.append_key,
        facts=None if made.facts is None else _facts(made.facts),
        base_revision=made.base_revision,
    )


def _facts(facts: Facts) -> FactsAsk:
    return FactsAsk(
        manifest=facts.manifest,
        files=facts.files,
        rows=facts.rows,
        bytes=facts.bytes,
        columns=[
            ColumnAsk(name=each.name, type=each.type, is_nullable=each.is_nullable)
            for each in facts.columns
        ],
    )


def _metrics(finished: WorkResult) -> dict[str, Any] | None:
    """What the attempt took. Figures that cannot be told never cost what was made."""
    if not finished.metrics:
        return None
    try:
        encoded = msgspec.json.encode(finished.metrics)
        why = progress_fault(finished.metrics)
        if len(encoded) > _METRICS_BYTES_MAX:
            why = f"They have {len(encoded):,} bytes; {_METRICS_BYTES_MAX:,} are allowed."
        if not why:
            return msgspec.json.decode(encoded, type=dict[str, Any])
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        why = f"They are no JSON: {error}."
    return {"omitted": why}


def _mapping(definition: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = definition.get(name)
    return value if isinstance(value, Mapping) else {}


def _grace_seconds(assignment: Assignment, *, otherwise: float) -> float:
    if not is_always_on(assignment):
        return otherwise
    try:
        return duration_ms(assignment.definition["source"]["drain_timeout"]) / 1000
    except (KeyError, TypeError, ValueError):
        return otherwise


def _log(work: AttemptWork) -> str | None:
    return work.log if 0 < len(work.log) <= _LOG_CHARACTERS_MAX else None
