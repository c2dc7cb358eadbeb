"""Routes what is printed to the log of the task that printed it. Imports no Spark.

The hosts of `spark` and `thread` run tasks side by side in one process, so file descriptors
cannot tell them apart, as they do in `penstock.runtimes.child`. Here `sys.stdout` and
`sys.stderr` look at the context of the writer: a thread, or a task of an event loop. What is
written without a task, and what programs and the JVM write, goes to the log of the host.
Logging of Python goes through `sys.stderr`, and so does the same.

A log that cannot be written fails nothing: the host's log says so, once a task.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final, TextIO

from penstock.kernel.logs import log_to_stderr

_BUFFER_BYTES_MAX: Final = 64 * 2**10
_QUIET: Final = ("py4j", "SQLQueryContextLogger", "pyspark")


class TaskLogs:
    """The logs of the tasks that a thread works for; of several, what is printed goes to each.

    Of one task it is written at once. Of a batch it is collected, and written by `flush`: there may
    be a thousand files, and a line for each of them takes its time.
    """

    def __init__(self, files: Callable[[], Sequence[str]]) -> None:
        """`files` tells which logs there are now."""
        self._files = files
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._is_told = False

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            self._waiting += data
            if len(self._files()) <= 1 or len(self._waiting) > _BUFFER_BYTES_MAX:
                self._write()

    def flush(self) -> None:
        """Write what waits; called before the tasks that a thread works for change."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        data, self._waiting = bytes(self._waiting), bytearray()
        for file in self._files() if data else ():
            if not file:
                continue
            try:
                _append(file, data)
            except OSError as error:
                if not self._is_told:
                    self._is_told = True
                    _complain(f"The log {file} cannot be written: {error.strerror or error}.")


class LogRouter:
    """Standard output and standard error of a process whose threads work for tasks."""

    def __init__(self) -> None:
        self._log: ContextVar[TaskLogs | None] = ContextVar("log", default=None)

    def install(self) -> None:
        """From now on what is printed goes where it belongs."""
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr] # the interpreter's own are of this kind
        sys.stdout = RoutedStream(sys.stdout, self)
        sys.stderr = RoutedStream(sys.stderr, self)
        log_to_stderr()
        logging.getLogger().setLevel(logging.INFO)
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    @property
    def log(self) -> TaskLogs | None:
        """Where what is printed now goes; None for the host's own."""
        return self._log.get()

    @contextmanager
    def to(self, log: TaskLogs) -> Iterator[None]:
        """Within this, what is printed goes to these logs."""
        before = self._log.set(log)
        try:
            yield
        finally:
            self._log.reset(before)
            log.flush()


class RoutedStream(io.TextIOBase):
    """A stream that writes to the log of the thread, or else where it always did."""

    encoding = "utf-8"

    def __init__(self, otherwise: TextIO, printing: LogRouter) -> None:
        self._otherwise = otherwise
        self._printing = printing

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        log = self._printing.log
        if log is None:
            return self._otherwise.write(text)
        log.write(text)
        return len(text)

    def flush(self) -> None:
        if self._printing.log is None:
            self._otherwise.flush()

    def fileno(self) -> int:
        return self._otherwise.fileno()


def _complain(words: str) -> None:
    """In the log of the host: that of the task is what is complained of."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"{words}\n")


def _append(file: str, data: bytes) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        os.write(opened, data)
    finally:
        os.close(opened)
