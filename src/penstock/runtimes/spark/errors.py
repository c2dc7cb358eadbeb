"""Why a Spark task failed, in a sentence that people read, and whether a retry may help.

Spark's errors have a condition (`UNRESOLVED_COLUMN`) and an SQLSTATE, whose class says whose
fault it is: 42 is the query's, 22 that of the data, and both fail the same way again.
Everything else may be the fault of a machine. The line of a SQL text is in Spark's message,
that of a Python module in the traceback. What users' code raises is reported as the runtime
`process` does, and retried.

What arrives is often only where somebody waited ("Exception thrown in awaitResult"): the
sentence is then that of the first cause that Spark has a condition for, which names the file if
it is about one, and behind it that of the root cause.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Final

import py4j
import pyspark
from pyspark.errors import PySparkException

from penstock.kernel.errors import (
    Damaged,
    DoNotRetry,
    PenstockError,
    SchemaRefused,
    StoreError,
    WorkFailed,
    WorkReleased,
)
from penstock.runtimes.spark.engine_protocol import WorkFailure
from penstock.runtimes.spark.internals import java_trace
from penstock.runtimes.spark.job_config import JobConfig

_SQL_CHARACTERS_MAX: Final = 60
_NANOSECONDS: Final = (
    "Spark reads no nanoseconds: write times in microseconds, as pandas does by"
    " to_parquet(path, coerce_timestamps='us')."
)
_ADVICE: Final = {
    "UNBOUND_SQL_PARAMETER": "Give it a value below parameters in the config of the job.",
    "TIMESTAMP(NANOS": _NANOSECONDS,
    # What it says of a file whose columns are known.
    "Expected Spark type timestamp": _NANOSECONDS,
}
"""What to do, by the condition of an error or words of its sentence."""
_REASON_CHARACTERS_MAX: Final = 4_000
_TRACE_LINES_MAX: Final = 12
_HOPELESS: Final = ("0A", "21", "22", "42", "44", "54", "P0")
"""Classes of SQLSTATE that say that another attempt fails just so."""
_LINE: Final = re.compile(r"\(?line (\d+),? pos(?:ition)? (\d+)\)?")
_STATE: Final = re.compile(r"[.;]?\s*SQLSTATE: ([0-9A-Z]{5})")
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s*")
_ABORTED: Final = re.compile(
    r"Job aborted due to stage failure: .*?most recent failure: ", re.DOTALL
)
_UNSENDABLE: Final = (
    "A function cannot be sent to executors. It goes there with all that it uses of your modules:"
    " make things like locks and connections inside of it, or install the module there."
)
_NO_MODULE: Final = "ModuleNotFoundError: "
_ABSENT: Final = (
    "Executors have no such module: install it where they run; docs/cluster.md says how code"
    " reaches them."
)
_DAMAGED: Final = re.compile(r"penstock\.spark\.Damaged: (.+)")
_BAD_PAGE: Final = "CRC checksum verification failed"
_READ_FILE: Final = re.compile(r"while reading file (\S+)\.\s")
_TOO_LARGE: Final = "spark.driver.maxResultSize"
_CAUSED: Final = re.compile(r"\n\s*Caused by: ")
_FRAMES: Final = re.compile(r"\n\s+at |\n\s*\.\.\. \d+ more|\nDriver stacktrace")
_ROOT_CHARACTERS_MAX: Final = 600
_ROOTS: Final = {
    "java.lang.OutOfMemoryError": (
        "Spark ran out of memory: give the JVM more by driver_memory, or executors of a cluster by"
        " spark.executor.memory, or this job alone by its resources.memory."
    ),
    "java.lang.StackOverflowError": (
        "The plan is nested too deeply for Spark's planner (StackOverflowError): make part of it a"
        " job of its own, or give the JVM more stack, as by -Xss16m in"
        " spark.driver.extraJavaOptions below conf in the settings of the runtime."
    ),
    "Python worker exited unexpectedly": (
        "A Python worker of Spark died while it ran a function of the job: the function ended its"
        " process, it crashed, or it was killed because the machine was short of memory."
    ),
}
"""What causes that say little mean."""
_OUT_OF_MEMORY: Final = (3, 52)
"""Exit codes: Java's own, and Spark's, for memory beside the heap, of which there is as much."""
_OURS: Final = f"{PenstockError.__module__}."
_PYTHON: Final = "PYTHON_EXCEPTION"
_INTERNAL: Final = (
    str(Path(__file__).parents[2]),
    str(Path(pyspark.__file__).parent),
    str(Path(py4j.__file__).parent),
    str(Path(importlib.__file__).parent),
    str(contextlib.__file__),
    "<frozen ",
)
"""Where frames begin that are not the user's."""


def failed(error: BaseException, config: JobConfig | None = None) -> WorkFailure:
    """How an attempt failed."""
    match error:
        case WorkReleased():
            return WorkFailure(reason=_text(_whole(error)), is_released=True)
        case WorkFailed():
            return WorkFailure(reason=_text(_whole(error)), is_retried=error.is_retried)
        case Damaged() | SchemaRefused():
            return WorkFailure(reason=_text(_whole(error)), is_retried=False)
        case StoreError() | PenstockError():
            return WorkFailure(reason=_text(_whole(error)))
    if damage := _damage(f"{error}\n{java_trace(error)}"):
        return WorkFailure(reason=_text(damage), is_retried=False)
    if isinstance(error, PySparkException):
        return _spark(error, config)
    if isinstance(error, PicklingError):
        return WorkFailure(reason=_text(f"{_UNSENDABLE} {error}"), is_retried=False)
    if type(error).__module__.startswith("py4j"):
        return _java(error)
    said = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_list(list(_frames(error)))).splitlines()
    lines = [said, *trace[-_TRACE_LINES_MAX:]]
    return WorkFailure(reason=_text("\n".join(lines)), is_retried=not isinstance(error, DoNotRetry))


def why_jvm_ended(code: int | None, *, memory: str) -> str:
    """What the exit code of a JVM means, None if it has none; `memory` is its heap."""
    if code is None:
        return "The JVM of Spark does not answer any more."
    if code in _OUT_OF_MEMORY:
        return (
            f"The JVM of Spark ran out of memory: its heap is {memory};"
            " give all jobs more by driver_memory, or one by its resources.memory."
        )
    if code < 0:
        return (
            f"The JVM of Spark was killed by signal {-code}; if nobody did that, the machine"
            " was probably short of memory."
        )
    return f"The JVM of Spark ended with exit code {code}; its log says why."


def is_too_large(error: BaseException) -> bool:
    """Whether a result did not fit into the driver."""
    return _TOO_LARGE in str(error)


def in_field(error: PySparkException, field: str) -> WorkFailed:
    """An error in a piece of SQL that stands in a field of the config."""
    is_retried = not _is_hopeless(error, str(error))
    return WorkFailed(f"{field}: {_sentence(str(error))}", is_retried=is_retried)


def relation_not_found(error: PySparkException) -> str:
    """The table or view that a query names and that is not there, if that is what is wrong."""
    if _condition(error) != "TABLE_OR_VIEW_NOT_FOUND":
        return ""
    said = error.getMessageParameters() or {}
    return said.get("relationName", "").strip("`").lower()


def _damage(trace: str) -> str:
    """What Spark's reader has found wrong with the bytes of a file, if that is what failed."""
    found = _DAMAGED.search(trace)
    if found is not None:
        return found[1]
    if _BAD_PAGE not in trace:
        return ""
    file = _READ_FILE.search(trace)
    name = "A file" if file is None else f"The file {file[1].replace('penstock://', 's3://')}"
    return (
        f"{name} is damaged: a page of it has another checksum than it was written with. Make the"
        " partition again: a backfill of it writes new files."
    )


def _spark(error: PySparkException, config: JobConfig | None) -> WorkFailure:
    whole = str(error)
    if _condition(error) == _PYTHON or "Traceback (most recent call last)" in whole:
        said = _python(whole)
        if said.startswith(_OURS):
            # Ours, from an executor: the sentence is enough.
            name, _, sentence = said.splitlines()[0].removeprefix(_OURS).partition(": ")
            return WorkFailure(reason=_text(sentence), is_retried=name != Damaged.__name__)
        if said.startswith(_NO_MODULE):
            # The trace is Spark's own, which looks for it.
            return WorkFailure(reason=_text(f"{said.splitlines()[0]}. {_ABSENT}"))
        return WorkFailure(reason=_text(said))
    sentence = _explained(whole, java_trace(error))
    where = _where(error, whole, config)
    reason = f"{where}: {sentence}" if where else sentence
    for mark, advice in _ADVICE.items():
        if mark in sentence:
            reason += f" {advice}"
    return WorkFailure(reason=_text(reason), is_retried=not _is_hopeless(error, whole))


def _condition(error: PySparkException) -> str:
    try:
        return error.getCondition() or ""
    except Exception:  # noqa: BLE001 - it asks a JVM that may be gone
        return ""


def _is_hopeless(error: PySparkException, whole: str) -> bool:
    if _condition(error).startswith("FAILED_READ_FILE"):
        return False
    try:
        state = error.getSqlState()
    except Exception:  # noqa: BLE001 - it asks a JVM that may be gone
        state = None
    return state[:2] in _HOPELESS if state else _is_hopeless_text(whole)


def _is_hopeless_text(whole: str) -> bool:
    found = _STATE.findall(whole)
    return bool(found) and found[-1][:2] in _HOPELESS


def _where(error: PySparkException, whole: str, config: JobConfig | None) -> str:
    """The file and the line: of the SQL text, or of the user's module."""
    if config is not None and config.sql:
        found = _LINE.search(whole)
        name = config.sql_file or "config.sql"
        if found is None:
            return name
        line = int(found[1])
        lines = config.sql.splitlines()
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        if len(text) > _SQL_CHARACTERS_MAX:
            # What Spark says of it is worth more than all of it.
            text = f"{text[:_SQL_CHARACTERS_MAX]} …"
        return f"{name}, line {line} ({text})" if text else f"{name}, line {line}"
    frames = list(_frames(error))
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _sentence(whole: str) -> str:
    """What Spark says, without its plan, its trace and its codes; the condition comes last."""
    said = _ABORTED.sub("", whole.strip())
    condition = _CONDITION.search(said)
    start = condition.end() if condition else 0
    state = _STATE.search(said, start)
    if state is not None:
        said = said[start : state.start()]
    else:
        said = re.split(r"\n\s*at |\n== |\nDriver stacktrace|\n\n", said[start:])[0]
    said = " ".join(said.split()).rstrip(". ")
    return f"{said}. [{condition[1]}]" if condition else f"{said}."


def _python(whole: str) -> str:
    """What users' code raised on an executor: the error first, then where."""
    _, _, trace = whole.partition("Traceback (most recent call last):")
    trace = re.split(r"\n\s*SQLSTATE: |\n\tat ", trace)[0]
    lines = [line for line in trace.splitlines() if line.strip()]
    if not lines:
        return _sentence(whole)
    kept = [line for line in lines[:-1] if not _is_marks(line)]
    return "\n".join([lines[-1].strip(), *kept[-_TRACE_LINES_MAX:]])


def _java(error: BaseException) -> WorkFailure:
    """An error of the JVM that PySpark has no class for."""
    whole = str(error)
    known = next((each for each in _causes(whole) if _CONDITION.search(each)), "")
    if known:
        said = _explained(known, whole)
        return WorkFailure(reason=_text(said), is_retried=not _is_hopeless_text(known))
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    said = next((line for line in lines if not line.startswith("An error occurred")), "")
    root = _root(whole)
    return WorkFailure(
        reason=_text(f"Spark failed: {root or said.removeprefix(': ') or type(error).__name__}")
    )


def _explained(whole: str, trace: str) -> str:
    """What Spark says, and what was at the root of it, if that is something else."""
    sentence, root = _sentence(whole), _root(trace)
    return sentence if root in sentence else f"{sentence} {root}"


def _root(trace: str) -> str:
    """What the innermost cause says, in plain words; empty if nothing was caused by another."""
    causes = _causes(trace)
    for mark, sentence in _ROOTS.items():
        if any(mark in each for each in causes):
            return sentence
    if len(causes) == 1 or not causes:
        return ""
    last = _ABORTED.sub("", causes[-1])
    if _CONDITION.search(last):
        return _sentence(last)
    name, _, words = last.partition(": ")
    said = " ".join(words.split()) or name.rpartition(".")[2]
    return f"{said[:_ROOT_CHARACTERS_MAX].rstrip('. ')}."


def _causes(trace: str) -> list[str]:
    """The class and the words of what was thrown and of its causes, the innermost last."""
    found = []
    for each in _CAUSED.split(trace):
        words = _FRAMES.split(each)[0].strip()
        if words.startswith("An error occurred while calling"):
            words = words.partition("\n: ")[2]
        if words:
            found.append(words)
    return found


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """The frames of the user."""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(_INTERNAL):
            yield frame


def _is_marks(line: str) -> bool:
    return not line.strip().strip("^~")


def _whole(error: PenstockError) -> str:
    return f"{error.message} {error.hint}".strip()


def _text(said: str) -> str:
    return said[:_REASON_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
