"""What a worker says of what goes wrong: each sentence once an hour, not once a try."""

from __future__ import annotations

import logging
from typing import Final

from penstock.kernel.clock import Clock

AGAIN_SECONDS: Final = 3600.0
SENTENCES_MAX: Final = 1000

_log = logging.getLogger(__name__)


class Saying:
    """Remembers what it has logged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def __call__(self, sentence: str) -> None:
        """Log a sentence as a warning, unless that was done within the hour."""
        instant = self._clock.monotonic()
        if self._said.get(sentence, float("-inf")) + AGAIN_SECONDS > instant:
            return
        self._said.pop(sentence, None)
        if len(self._said) >= SENTENCES_MAX:
            del self._said[next(iter(self._said))]
        self._said[sentence] = instant
        _log.warning("%s", sentence)
