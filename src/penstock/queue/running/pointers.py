"""Pointers that looks have shown, so that one that is gone before its time is missed at once.

A pack with a key is found by its pointer alone. Once shown, a pointer is shown by every whole look
at what is due, until its pack is settled. So one that is shown no more was removed by whoever
settled the pack, or is lost; which of the two, the pack tells. Whoever guards the slot looks, for a
HEAD, and writes the pointer again if the pack is there. A pointer too many is removed by whoever
follows it. What no look has shown is found by sweeps (`penstock.queue.monitor`).

A crash leaves nothing: a worker that begins to guard slots sweeps them. Used by `…running.shift`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from penstock.queue.discovery.scan import Run, View
from penstock.queue.places import PackAt

POINTERS_MAX: Final = 20_000


class Pointers:
    """What the looks of one worker have shown of the slots that it guards."""

    def __init__(self) -> None:
        self._seen: dict[str, PackAt] = {}
        self._guarded: Sequence[Run] = ()

    def forget(self, key: str) -> None:
        """This worker has removed a pointer itself, or is about to."""
        self._seen.pop(key, None)

    def missing(self, view: View, guarded: Sequence[Run]) -> list[PackAt]:
        """The packs that nothing points to any more, by a look at what is due."""
        if not view.is_ready_whole or not guarded:
            return []
        is_same, self._guarded = guarded == self._guarded, guarded
        pointed = set(view.pointers.values())
        gone = {at: None for key, at in self._seen.items() if key not in view.pointers}
        self._seen = dict(islice(view.pointers.items(), POINTERS_MAX))
        return [at for at in gone if at not in pointed] if is_same else []
