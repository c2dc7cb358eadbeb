"""Opens the store of a URL for an examination: several clients, a second process, one meter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

from penstock.store.base import ObjectStore
from penstock.store.doctor.examination import Patient
from penstock.store.doctor.second import SecondProcess
from penstock.store.opening import Opening, is_by_tombstone, open_backend, wrapped
from penstock.store.s3.backend import S3Store
from penstock.store.s3.versions import is_versioned, purge

CLIENTS: Final = 4


@asynccontextmanager
async def open_patient(url: str, opening: Opening) -> AsyncIterator[Patient]:
    """The store at this URL, ready for `examine`, closed afterwards."""
    async with AsyncExitStack() as stack:
        backends: list[ObjectStore] = []
        for _ in range(CLIENTS if not _is_private(url) else 1):
            backend = await open_backend(url, opening)
            stack.push_async_callback(backend.close)
            backends.append(backend)
        yield Patient(
            url=url,
            clients=[wrapped(backend, opening) for backend in backends],
            with_tombstones=[
                wrapped(backend, opening, by_tombstone=True)
                for backend in backends
                if isinstance(backend, S3Store)
            ],
            by_tombstone=is_by_tombstone(backends[0]),
            meter=opening.meter,
            entropy=opening.entropy,
            second=None if _is_memory(url) else SecondProcess(url, environment=_for_child(opening)),
            purge=await _purge_of(backends[0]),
        )


async def _purge_of(backend: ObjectStore) -> Callable[[str], Awaitable[None]] | None:
    if isinstance(backend, S3Store) and await is_versioned(backend.bucket):
        return partial(purge, backend.bucket)
    return None


def _is_memory(url: str) -> bool:
    return url.startswith("memory://")


def _is_private(url: str) -> bool:
    """A memory store without a name is another one each time it is opened."""
    return url == "memory://"


def _for_child(opening: Opening) -> Mapping[str, str]:
    """The environment of the second process; credentials go there and nowhere else."""
    environment = dict(opening.environment)
    if opening.credentials is not None:
        environment["AWS_ACCESS_KEY_ID"] = opening.credentials.access_key
        environment["AWS_SECRET_ACCESS_KEY"] = opening.credentials.secret_key
        environment.pop("AWS_SESSION_TOKEN", None)
        if opening.credentials.session_token:
            environment["AWS_SESSION_TOKEN"] = opening.credentials.session_token
    return environment
