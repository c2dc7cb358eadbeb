"""The object store: one small async protocol over S3, a folder, or memory.

`open_store` is the way in; `penstock.store.base` says what every store promises.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kernel.errors import (
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    StoreError,
    VersionConflict,
)

if TYPE_CHECKING:
    from penstock.kernel.document_format import Stamped
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


_LATER = {
    "CREATE": "penstock.store.base",
    "Cell": "penstock.store.cell",
    "Credentials": "penstock.store.s3.signing",
    "Entry": "penstock.store.base",
    "FaultPlan": "penstock.store.faulty",
    "FaultyStore": "penstock.store.faulty",
    "Head": "penstock.store.base",
    "Interval": "penstock.store.time",
    "Kind": "penstock.store.metered",
    "Meter": "penstock.store.metered",
    "MeteredStore": "penstock.store.metered",
    "Object": "penstock.store.base",
    "ObjectStore": "penstock.store.base",
    "Opening": "penstock.store.opening",
    "Page": "penstock.store.base",
    "Prices": "penstock.store.metered",
    "REPLACE": "penstock.store.base",
    "Retries": "penstock.store.retrying",
    "RetryingStore": "penstock.store.retrying",
    "Stamped": "penstock.kernel.document_format",
    "Swap": "penstock.store.base",
    "TombstonedStore": "penstock.store.tombstoned",
    "Version": "penstock.store.base",
    "labelled": "penstock.store.metered",
    "open_store": "penstock.store.opening",
    "pages": "penstock.store.base",
}


def __getattr__(name: str) -> object:
    # Each name is imported when it is first asked for: who only sends requests to a dispatcher, by
    # the connections of this package, does not wait for all backends.
    if name in _LATER:
        found = getattr(import_module(_LATER[name]), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
