"""The object store: one small async protocol over S3, a folder, or memory.

`open_store` is the way in; `penstock.store.base` says what every store promises.
"""

from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    StoreError,
    VersionConflict,
)
from penstock.kernel.wire import Stamped
from penstock.store.base import (
    CREATE,
    REPLACE,
    Entry,
    Head,
    Object,
    ObjectStore,
    Page,
    Swap,
    Version,
    pages,
)
from penstock.store.cell import Cell
from penstock.store.faulty import FaultPlan, FaultyStore
from penstock.store.metered import Kind, Meter, MeteredStore, Prices, labelled
from penstock.store.opening import Opening, open_store
from penstock.store.retrying import Retries, RetryingStore
from penstock.store.s3.signing import Credentials
from penstock.store.time import Interval
from penstock.store.tombstoned import TombstonedStore

__all__ = [
    "CREATE",
    "REPLACE",
    "AlreadyExists",
    "Cell",
    "Credentials",
    "Entry",
    "FaultPlan",
    "FaultyStore",
    "Head",
    "Interval",
    "Kind",
    "Meter",
    "MeteredStore",
    "NotFound",
    "Object",
    "ObjectStore",
    "Opening",
    "OutcomeUnknown",
    "Page",
    "Prices",
    "Retries",
    "RetryingStore",
    "Stamped",
    "StoreError",
    "Swap",
    "TombstonedStore",
    "Version",
    "VersionConflict",
    "labelled",
    "open_store",
    "pages",
]
