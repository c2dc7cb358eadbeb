"""What the work of the runtime contract does, as Python: functions and a handler.

`work` is for a process of its own. `share` and `share_async` do the same side by side with others:
they print by Python's streams, and wait where Python can interrupt them.

`config` says which `deed` it is, and names a pipe. Whatever runs holds the pipe open, so that its
other end shows when nothing runs any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from penstock.datasets.layout import path_of
from penstock.kernel.errors import DoNotRetry
from penstock.runtimes.task import FunctionTask
from penstock.testing.runtime_contract import BEGUN, PRINTED, WorkKind

_MOMENT_SECONDS: Final = 0.005
_HOLDER = "import os, signal, sys\nos.write(1, b'begun\\n')\nwhile True: signal.pause()\n"


def work(task: FunctionTask) -> None:
    """A function of the runtime `process`."""
    deed = WorkKind(task.config["deed"])
    if deed is WorkKind.TELLS:
        task.progress(part=1, of=2)
        if paused := task.emit(cursor=7):
            task.progress(paused=paused)
    elif deed is WorkKind.DRAINS:
        # Having looked, it is left to end by itself.
        assert not task.stopping
        with _holding(task.config):
            while not task.wait(60):
                pass
        task.emit(event_id="last words", cursor=8)
    _act(deed, task.config, {name: each.location for name, each in task.outputs.items()})


def share(task: FunctionTask) -> None:
    """A plain function of the runtime `thread`."""
    deed = WorkKind(task.config["deed"])
    if deed is WorkKind.PRINTS:
        _print_by_streams()
    elif deed in (WorkKind.HANGS, WorkKind.IS_STUBBORN):
        with _holding(task.config):
            while True:
                try:
                    time.sleep(_MOMENT_SECONDS)  # noqa: TID251 - what is tried is its interruption
                except BaseException:
                    if deed is WorkKind.HANGS:
                        raise
    else:
        work(task)


async def share_async(task: FunctionTask) -> None:
    """An `async def` of the runtime `thread`."""
    deed = WorkKind(task.config["deed"])
    if deed is WorkKind.PRINTS:
        _print_by_streams()
    elif deed in (WorkKind.HANGS, WorkKind.IS_STUBBORN):
        with _holding(task.config):
            while True:
                try:
                    await asyncio.Event().wait()
                except BaseException:
                    if deed is WorkKind.HANGS:
                        raise
    else:
        await asyncio.to_thread(work, task)


def handle(event: Mapping[str, Any], context: Any) -> None:
    """A handler of the runtime `lambda`."""
    assert context.get_remaining_time_in_millis() > 0
    outputs = {name: each["location"] for name, each in event["outputs"].items()}
    _act(WorkKind(event["config"]["deed"]), event["config"], outputs)


def _act(deed: WorkKind, config: Mapping[str, Any], outputs: Mapping[str, str]) -> None:
    if deed is WorkKind.MAKES:
        for location in outputs.values():
            (path_of(location) / "made.txt").write_text("made")
    elif deed in _ENDS:
        _ENDS[deed]()
    elif deed in _HOLDS:
        _HOLDS[deed](config)


def _fail() -> None:
    raise ValueError("The number is wrong.")


def _fail_for_good() -> None:
    raise DoNotRetry("The number will always be wrong.")


def _print() -> None:
    os.write(1, PRINTED.encode())
    sys.stderr.write(PRINTED)


def _print_by_streams() -> None:
    sys.stdout.write(PRINTED)
    sys.stderr.write(PRINTED)


def _hang(config: Mapping[str, Any]) -> None:
    _open(config)
    _wait()


def _be_stubborn(config: Mapping[str, Any]) -> None:
    _open(config)
    while True:
        try:
            _wait()
        except BaseException:  # noqa: BLE001, S112 - that is what stubborn means
            continue


def _spawn_and_hang(config: Mapping[str, Any]) -> None:
    _spawn(config)
    _wait()


def _open(config: Mapping[str, Any]) -> int:
    pipe = os.open(config["pipe"], os.O_WRONLY)
    os.write(pipe, BEGUN.encode())
    return pipe


@contextmanager
def _holding(config: Mapping[str, Any]) -> Iterator[None]:
    """Within this the pipe is open, whatever process this is."""
    pipe = os.open(config["pipe"], os.O_WRONLY)
    try:
        # Who has read this may interrupt it.
        os.write(pipe, BEGUN.encode())
        yield
    finally:
        os.close(pipe)


def _spawn(config: Mapping[str, Any]) -> None:
    """Start a process that holds the pipe, and is not waited for."""
    pipe = os.open(config["pipe"], os.O_WRONLY)
    subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=pipe)  # noqa: S603 - our own
    os.close(pipe)


def _wait() -> None:
    while True:
        signal.pause()


_ENDS: Final[Mapping[WorkKind, Callable[[], object]]] = {
    WorkKind.FAILS: _fail,
    WorkKind.FAILS_FOR_GOOD: _fail_for_good,
    WorkKind.CRASHES: lambda: os._exit(7),
    WorkKind.PRINTS: _print,
}
_HOLDS: Final[Mapping[WorkKind, Callable[[Mapping[str, Any]], None]]] = {
    WorkKind.HANGS: _hang,
    WorkKind.IS_STUBBORN: _be_stubborn,
    WorkKind.SPAWNS: _spawn_and_hang,
    WorkKind.LEAVES_BEHIND: _spawn,
}
