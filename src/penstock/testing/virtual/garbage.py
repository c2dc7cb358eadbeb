"""When Python collects garbage while a simulation runs.

A collection ends tasks and generators that were dropped, and so adds steps. Python starts one
after so many allocations of the whole process, which is no function of a seed. So while a
simulation runs, Python's own collections are off, and the loop collects at fixed steps. Called by
`penstock.testing.virtual.loop` and `penstock.testing.virtual`; collections are on again when they
are done, also after an error.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

COLLECT_EVERY_STEPS: Final = 10_000
COLLECT_ALL_EVERY_STEPS: Final = 100 * COLLECT_EVERY_STEPS


@contextmanager
def collections_off() -> Iterator[None]:
    """Keep Python from collecting by itself; may be nested."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect(*, everything: bool) -> None:
    """Collect what was made since the last time, or what is older as well, which takes longer."""
    gc.collect(2 if everything else 0)
