"""What probes are told."""

from __future__ import annotations

from penstock.dispatcher.wire.base import Answer


class HealthAnswer(Answer):
    status: str
    """`ok` or `ready`; whoever is not is answered with a problem."""
