"""What a worker does with the packs that it finds: claim, run, settle."""

from __future__ import annotations
