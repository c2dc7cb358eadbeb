"""The functions of browsed.yaml. A file with the name of a partition in a folder lets it pass."""

import os
import sys
import threading
from pathlib import Path

from penstock.runtimes.task import FunctionTask

SCRIPT = "<script>window.attacked = 'said'</script><img src=x onerror=\"window.attacked = 'img'\">"
SLOW_SECONDS_MAX = 120.0


def quick(task: FunctionTask) -> None:
    """Write a row, with a tag in it."""
    sys.stdout.write(f"It was quick. {SCRIPT}\n")
    for each in task.outputs.values():
        (each.path / "rows.csv").write_text(f'name,said\nsomebody,"{SCRIPT}"\n')


def loud(task: FunctionTask) -> None:
    """Publish a row that fits, and one that does not."""
    task.buffer("alerts", [{"id": "a", "level": "info"}, {"id": "b", "level": SCRIPT}], id=SCRIPT)
    quick(task)


def slow(task: FunctionTask) -> None:
    """Say that it runs, and wait to be stopped."""
    sys.stdout.write("It has begun.\n")
    sys.stdout.flush()
    task.progress(done=1, of=4)
    threading.Event().wait(SLOW_SECONDS_MAX)


def picky(task: FunctionTask) -> None:
    """Fail until a file is there."""
    if not Path(os.environ["BROWSED_THERE"], str(task.partition_key)).exists():
        raise FileNotFoundError(f"{task.partition_key} is not there.")
    quick(task)


def rude(task: FunctionTask) -> None:
    """Print and fail with what a page must not believe."""
    sys.stdout.write(f"{SCRIPT}\n</pre></script><!-- {SCRIPT}\n")
    raise ValueError(SCRIPT)
