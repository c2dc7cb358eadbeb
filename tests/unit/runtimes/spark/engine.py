"""An engine without Spark, for tests of the runtime and its hosts: does what the config says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import AttemptWork, WorkResult
from penstock.runtimes.spark.engine_protocol import RunReporter
from penstock.runtimes.spark.settings import SparkSettings
from penstock.runtimes.task import Stopped
from tests.contract.spark_standin import NoSessions

_never = threading.Event()
_counting = threading.Condition()
_running = 0


def open_sessions(settings: SparkSettings) -> NoSessions:
    if settings.master == "nowhere":
        raise InvalidInput("Spark needs Java.", hint="Install one.")
    return NoSessions()


class Engine:
    def __init__(self, settings: SparkSettings, session: Any) -> None:
        pass

    def run(self, session: Any, works: Sequence[AttemptWork], tell: RunReporter) -> None:
        global _running  # noqa: PLW0603 - a count of this process
        with _counting:
            _running += 1
            _counting.notify_all()
            # If more could run at once, they would have come by then.
            if works[0].config.get("do") == "crowd":
                _counting.wait_for(lambda: _running > 2, timeout=0.3)
            seen = _running
        if works[0].config.get("do") == "hold":
            Path(works[0].config["folder"], f"begun-{works[0].task_id}").touch()
            while not Path(works[0].config["folder"], "go").exists():
                _never.wait(0.02)
        with _counting:
            _running -= 1
        said = {"pid": os.getpid(), "at_once": seen, "of": len(works)}
        is_one_by_one = any(work.config.get("do") in _DEEDS for work in works)
        for work in works:
            if is_one_by_one:
                tell.begin([work.task_id])
                _DEEDS.get(work.config.get("do", ""), _nothing)(work)
            tell.end(work.task_id, WorkResult(made=(), metrics=said))


def _nothing(work: AttemptWork) -> None:
    pass


def _die(work: AttemptWork) -> None:
    """End the host, when the others have begun."""
    for number in work.config.get("after", ()):
        while not Path(work.config["folder"], f"begun-{number}").exists():
            _never.wait(0.02)
    os._exit(9)


def _hang(work: AttemptWork) -> None:
    """Hold on to the thread, until it is stopped or for good."""
    Path(work.config["folder"], f"begun-{work.task_id}").touch()
    while True:
        try:
            _never.wait(0.02)
        except Stopped:
            if not work.config.get("is_stubborn"):
                return


_DEEDS: Mapping[str, Callable[[AttemptWork], None]] = {"die": _die, "hang": _hang}
