"""Handlers for processes of their own: found there by their names."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from penstock.kernel.errors import DoNotRetry, Reschedule
from penstock.queue.execution.handlers import TaskContext


class Odd(OSError):
    """An error that only this module knows."""


def whoami(task: TaskContext) -> dict[str, Any]:
    sys.stdout.write(f"working on {task.input}\n")
    sys.stderr.write("and complaining\n")
    assert sys.stdin.read() == ""
    task.report(1, total=4, message="begun")
    return {"pid": os.getpid(), "input": task.input, "attempt": task.attempt, "id": task.id}


async def gently(task: TaskContext) -> Any:
    await asyncio.wait_for(asyncio.Event().wait(), 0.01) if task.input is None else None
    return task.input


def odd(_: TaskContext) -> None:
    raise Odd("out of order")


def later(_: TaskContext) -> None:
    raise Reschedule(90, reason="not there yet")


def hopeless(_: TaskContext) -> None:
    raise ExceptionGroup("all", [Odd("one"), DoNotRetry("two")])


def several(_: TaskContext) -> None:
    raise ExceptionGroup("all", [Odd("one"), Odd("two")])


def leave(task: TaskContext) -> None:
    os._exit(task.input)


def suicide(task: TaskContext) -> None:
    os.kill(os.getpid(), signal.Signals[task.input])


def _begin(task: TaskContext) -> None:
    """Have the file at `input` open, here and in a child, and say so."""
    opened = os.open(task.input, os.O_WRONLY)
    subprocess.Popen(["sleep", "600"], stdout=opened)
    task.report(0.5)


def hog(task: TaskContext) -> None:
    _begin(task)
    while True:
        pass


def heed(task: TaskContext) -> None:
    _begin(task)
    while True:
        threading.Event().wait(0.01)


def heed_not(task: TaskContext) -> None:
    _begin(task)
    while True:
        try:
            while True:
                threading.Event().wait(0.01)
        except BaseException:  # noqa: BLE001 - it shall be killed
            continue


def twice(function: Callable[[TaskContext], Any]) -> Callable[[TaskContext], Any]:
    def call(task: TaskContext) -> Any:
        return function(task)

    return call


def hidden(_: TaskContext) -> None:
    pass


original = hidden
hidden = twice(hidden)  # type: ignore[assignment]  # as a decorator above would
