"""What somebody who looks into a queue wants to know: its tasks, its figures, its dead letters.

Called by the command line and by a console. Everything here reads, except `run_monitor`, which
does what `penstock.queue.monitor` does. What is seen is a moment that is over: a task may be moved
between a list and the read that follows it, and is then shown where it was found, or not at all.

What cannot be read (not ours, damaged, of a later release) stops nobody: it is named in `notes`,
one sentence each, and left out.

Requests. A *survey* is one LIST of the queue's top, and one for every 1,000 objects in each of
`keyed/`, `ready/` and `tasks/` that is there, at most `PAGES_MAX` each: four for a small queue.

| what | requests at the most |
|---|---|
| `list_tasks` | a survey, and 2 GETs a pack, for `READS_MAX` packs |
| `dead_letters` | a LIST for every 1,000 batches, and `BATCHES_MAX` GETs |
| `stats` | a survey, a LIST of `workers/`, one of `dead/`, a GET a worker and `DOUBTS_MAX` more |
| `run_monitor` | a pass: a LIST for every 1,000 objects, and what it finds to do |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from penstock.kernel.errors import NotFound, StoreError, UnreadableObject
from penstock.kernel.wire import Document, decode
from penstock.queue import archive
from penstock.queue import shards as decide
from penstock.queue.access import Access
from penstock.queue.election import Elected
from penstock.queue.layout import LEDGER, PackAt
from penstock.queue.leases import LeaseSettings
from penstock.queue.ledger import Ledger
from penstock.queue.monitor import Monitor
from penstock.queue.pack import Pack
from penstock.queue.registry import Registry, Role
from penstock.queue.scan import ALL, Scanner
from penstock.queue.views import STATES, TaskView, view_of_ledger, view_of_pack
from penstock.store.base import (
    NO_METADATA,
    REPLACE,
    Entry,
    Mapping,
    ObjectStore,
    PutMode,
    Version,
    Wrapper,
    pages,
)
from penstock.store.metered import labelled
