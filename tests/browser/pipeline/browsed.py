"""The functions of browsed.yaml. A file with the name of a partition in `there/` makes it pass."""

import os
import threading
from pathlib import Path

SCRIPT = "<script>window.attacked = 'said'</script><img src=x onerror=\"window.attacked = 'img'\">"
SLOW_SECONDS_MAX = 120.0


def quick(task):
    """Write a row, with a tag in it."""
    print("It was quick.", SCRIPT)
    for each in task.outputs.values():
        (each.path / "rows.csv").write_text(f'name,said\nsomebody,"{SCRIPT}"\n')


def slow(task):
    """Say that it runs, and wait to be stopped."""
    print("It has begun.", flush=True)
    task.progress(done=1, of=4)
    threading.Event().wait(SLOW_SECONDS_MAX)


def picky(task):
    """Fail until a file is there."""
    if not Path(os.environ["BROWSED_THERE"], task.partition_key).exists():
        raise FileNotFoundError(f"{task.partition_key} is not there.")
    quick(task)


def rude(task):
    """Print and fail with what a page must not believe."""
    print(SCRIPT)
    print("</pre></script><!--", SCRIPT)
    raise ValueError(SCRIPT)
