"""What the work of the runtime contract does, as Python: a function and a handler.

`config` says which `deed` it is, and names a pipe. Whatever runs holds the pipe open, so that its
other end shows when nothing runs any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.datasets.layout import path_of
from penstock.kernel.handler_errors import DoNotRetry
from penstock.runtimes.task import Task
from penstock.testing.runtime_contract import BEGUN, PRINTED, Deed

_HOLDER = "import os, signal, sys\nos.write(1, b'begun\\n')\nwhile True: signal.pause()\n"


def work(task: Task) -> None:
    """A function of the runtime `process`."""
    deed = Deed(task.config["deed"])
    if deed is Deed.TELLS:
        task.progress(part=1, of=2)
        if paused := task.emit(cursor=7):
            task.progress(paused=paused)
    elif deed is Deed.DRAINS:
        # Having looked, it is left to end by itself.
        assert not task.stopping
        _open(task.config)
        while not task.wait(60):
            pass
        task.emit(event_id="last words", cursor=8)
    _act(deed, task.config, {name: each.location for name, each in task.outputs.items()})


def handle(event: Mapping[str, Any], context: Any) -> None:
    """A handler of the runtime `lambda`."""
    assert context.get_remaining_time_in_millis() > 0
    outputs = {name: each["location"] for name, each in event["outputs"].items()}
    _act(Deed(event["config"]["deed"]), event["config"], outputs)


def _act(deed: Deed, config: Mapping[str, Any], outputs: Mapping[str, str]) -> None:
    if deed is Deed.MAKES:
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


def _spawn(config: Mapping[str, Any]) -> None:
    """Start a process that holds the pipe, and is not waited for."""
    pipe = os.open(config["pipe"], os.O_WRONLY)
    subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=pipe)  # noqa: S603 - our own
    os.close(pipe)


def _wait() -> None:
    while True:
        signal.pause()


_ENDS: Final[Mapping[Deed, Callable[[], object]]] = {
    Deed.FAILS: _fail,
    Deed.FAILS_FOR_GOOD: _fail_for_good,
    Deed.CRASHES: lambda: os._exit(7),
    Deed.PRINTS: _print,
}
_HOLDS: Final[Mapping[Deed, Callable[[Mapping[str, Any]], None]]] = {
    Deed.HANGS: _hang,
    Deed.IS_STUBBORN: _be_stubborn,
    Deed.SPAWNS: _spawn_and_hang,
    Deed.LEAVES_BEHIND: _spawn,
}
