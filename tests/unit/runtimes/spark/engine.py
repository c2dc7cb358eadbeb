"""An engine without Spark, for tests of the runtime and its hosts: does what the config says."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.kernel.errors import InvalidInput
from penstock.runtimes.base import Finished, Work
from penstock.runtimes.spark.settings import SparkSettings
from penstock.runtimes.spark.telling import Ended, Telling
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

    def run(self, session: Any, works: Sequence[Work], tell: Telling) -> Mapping[int, Ended]:
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
        return {work.task_id: Finished(made=(), metrics=said) for work in works}
