"""Into whose inbox a pack goes. Pure, but for where a round begins.

`round_robin` deals the packs of one producer out evenly, from a random worker on. `hash` gives
an affinity, or else a pack id and so a key, the same worker as long as that lives: when one comes
or goes only what was, or is now, its own moves (rendezvous hashing). `random` needs no memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from penstock.kernel.entropy import Entropy
from penstock.queue.settings import Selection


class Selector:
    """Chooses workers for one process."""

    def __init__(self, selection: Selection, *, entropy: Entropy) -> None:
        self._selection = selection
        self._entropy = entropy
        self._turn = entropy.getrandbits(16)

    def choose(self, workers: Sequence[str], *, by: str) -> str:
        """One of these, which are in order and not none; `by` is what is hashed."""
        match self._selection:
            case Selection.ROUND_ROBIN:
                self._turn += 1
                return workers[self._turn % len(workers)]
            case Selection.HASH:
                return max(workers, key=lambda worker: _weight(worker, by))
            case Selection.RANDOM:
                return self._entropy.choice(workers)


def _weight(worker: str, by: str) -> bytes:
    return hashlib.blake2b(f"{worker}\0{by}".encode(), digest_size=8).digest()
