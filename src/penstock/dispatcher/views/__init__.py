"""Read models: what people, workers and sources are shown of the state. Queries only."""

from __future__ import annotations
