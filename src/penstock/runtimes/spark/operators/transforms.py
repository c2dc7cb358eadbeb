"""Users' transforms: found by name, loaded once, and again when their files have changed.

They are called here, in the driver. What they hand to executors (functions of a `udf`, or of
`mapInArrow`) goes there by value, with what it uses of users' modules: executors have no such
modules, and one that had would keep what it has imported first, whatever has changed since.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame

from penstock.kernel.errors import WorkFailed, WorkReleased
from penstock.runtimes.calling import Code
from penstock.runtimes.references import Reference
from penstock.runtimes.spark.context import Context, Inputs


class Transforms:
    """The transforms that are loaded. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._code = Code()
        self._modules: set[str] = set()

    def function(self, wanted: Reference) -> Callable[..., Any]:
        """The function. Raises `WorkFailed` if there is none, or its module does not import."""
        with self._lock:
            if self._code.is_stale():
                self._forget()
            before = set(sys.modules)
            try:
                return self._code.function(str(wanted))
            except WorkReleased:
                raise
            except WorkFailed as error:
                raise WorkFailed(error.message, is_retried=False) from error
            except (Exception, SystemExit) as error:
                raise WorkFailed(_unimportable(wanted, error), is_retried=False) from error
            finally:
                self._keep(set(sys.modules) - before)

    def _keep(self, names: set[str]) -> None:
        """Remember what was imported for users, and have it travel by value."""
        theirs = {name for name in names if _is_theirs(name)}
        self._modules |= theirs
        register: Any = cloudpickle.register_pickle_by_value
        for name in theirs:
            register(sys.modules[name])

    def _forget(self) -> None:
        """Drop what was imported for users, so that it is imported as it is now."""
        for name in self._modules:
            sys.modules.pop(name, None)
        self._modules = set()
        self._code = Code()


def call(
    function: Callable[..., Any], inputs: Inputs, context: Context, *, name: str
) -> dict[str, DataFrame]:
    """What a transform returns, by the names of outputs."""
    try:
        returned = function(inputs, context)
    except SystemExit as error:
        # It would end the thread, and with it the other tasks of a batch.
        raise WorkFailed(f"{name} ended by SystemExit: {error.code!r}.") from error
    if isinstance(returned, DataFrame):
        if len(context.outputs) != 1:
            raise WorkFailed(
                f"{name} returned one DataFrame, and the job has {_these(context.outputs)};"
                " return a dict of outputs to DataFrames.",
                is_retried=False,
            )
        return {context.outputs[0]: returned}
    if not isinstance(returned, Mapping):
        raise WorkFailed(
            f"{name} returned {_kind(returned)}; it has to return a DataFrame of Spark, or a dict"
            " of outputs to DataFrames.",
            is_retried=False,
        )
    for output, frame in returned.items():
        if output not in context.outputs:
            raise WorkFailed(
                f"{name} returned something for {output!r}, and the job has"
                f" {_these(context.outputs)}.",
                is_retried=False,
            )
        if not isinstance(frame, DataFrame):
            raise WorkFailed(
                f"{name} returned {_kind(frame)} for {output!r}; it has to be a DataFrame of"
                " Spark.",
                is_retried=False,
            )
    missing = [output for output in context.outputs if output not in returned]
    if missing:
        raise WorkFailed(f"{name} returned nothing for {missing[0]!r}.", is_retried=False)
    return dict(returned)


def _unimportable(wanted: Reference, error: BaseException) -> str:
    said = str(error) or type(error).__name__
    where = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if Path(file).exists() and _is_user_file(file):
            where = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        said, where = error.msg, f" ({error.filename}, line {error.lineno})"
    return f"The module {wanted.module} does not import: {type(error).__name__}: {said}{where}"


def _is_theirs(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _is_user_file(file)


def _is_user_file(file: str) -> bool:
    ours = str(Path(__file__).parents[3])
    installed = (sys.prefix, sys.base_prefix, ours)
    return not file.startswith(installed) and "site-packages" not in file


def _kind(value: object) -> str:
    kind = type(value)
    named = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if value is None else f"a {named}"


def _these(outputs: tuple[str, ...]) -> str:
    return f"the outputs {', '.join(outputs)}" if outputs else "no outputs"
