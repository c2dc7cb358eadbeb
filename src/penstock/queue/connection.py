"""The connection of one process to one queue: how it is opened, shared and closed.

A queue is made by the first who opens it. An object that is not connected yet connects when it is
used with `async with`, or by a worker that runs it; it can be closed and connected again. A store
that was handed in stays the caller's to close. To open costs a GET of the settings, or two requests
where the queue is made, and what the store needs to know the time.

`penstock.queue.client.Queue` is this and what users do with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import InvalidInput
from penstock.queue.access import Access
from penstock.queue.config import (
    EVERY_TYPE,
    QueueConfig,
    checked,
    differences,
    make_queue,
    no_such_queue,
    read_config,
)
from penstock.queue.control import Door
from penstock.queue.direct.dispatching import Dispatch
from penstock.queue.gathering import check_seconds
from penstock.queue.incarnation import Locks
from penstock.queue.layout import QueueLayout, is_used_once
from penstock.queue.reading import Reader
from penstock.queue.settings import DispatchSettings, dispatch_from, is_direct_from
from penstock.queue.settings_file import with_file
from penstock.queue.waiting import Waiter
from penstock.store.base import ObjectStore
from penstock.store.metered import labelled
from penstock.store.opening import Opening, open_store
from penstock.store.tombstoned import declare_used_once

_log = logging.getLogger(__name__)


class Connection:
    """One process's connection to one queue: open, closed, or opened when it is first used."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        config: QueueConfig | None = None,
        create: bool = True,
        opening: Opening | None = None,
        dispatch: DispatchSettings | None = None,
        gather_seconds: float | None = None,
    ) -> None:
        self.url = url
        self.name = name
        self._layout = QueueLayout(name)
        environment = with_file(os.environ)
        all_direct = QueueConfig(direct=(EVERY_TYPE,)) if is_direct_from(environment) else None
        self._wanted = checked(config or all_direct or QueueConfig())
        self._create = create
        self._opening = opening or Opening()
        self._access: Access | None = None
        self._waiter: Waiter | None = None
        self._door: Door | None = None
        self._dispatch = dispatch or dispatch_from(environment)
        self._announcer: Dispatch | None = None
        self._owns_store = True
        self._gather_seconds = None if gather_seconds is None else check_seconds(gather_seconds)
        self.locks: Locks | None = None
        """What proves that a worker's process has ended, where the queue was handed a store."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        name: str,
        config: QueueConfig | None = None,
        create: bool = True,
        opening: Opening | None = None,
        dispatch: DispatchSettings | None = None,
        gather_seconds: float | None = None,
    ) -> Self:
        """Connect to a queue; make it if it is not there and `create` is true.

        With `gather_seconds`, submits of that time share objects (`penstock.queue.gathering`).
        """
        queue = cls(
            url,
            name=name,
            config=config,
            create=create,
            opening=opening,
            dispatch=dispatch,
            gather_seconds=gather_seconds,
        )
        await queue._connect()
        return queue

    @classmethod
    async def on(
        cls, store: ObjectStore, *, name: str, entropy: Entropy, config: QueueConfig | None = None
    ) -> Self:
        """A queue in a store that is open already, and that stays the caller's to close."""
        queue = cls("", name=name, config=config)
        await queue.attach(store, entropy)
        return queue

    async def attach(self, store: ObjectStore, entropy: Entropy) -> None:
        """Connect this object to a store that is open already, and stays the caller's to close."""
        self._owns_store = False
        await self._use(store, entropy)

    @property
    def access(self) -> Access:
        """The store, the keys and the settings, for the parts that work on the queue."""
        if self._access is None:
            raise self._not_open()
        return self._access

    def _not_open(self) -> InvalidInput:
        return InvalidInput(
            f"The queue {self.name!r} is not open.",
            hint="Use 'await Queue.open(...)', or 'async with queue:'.",
        )

    async def _connect(self) -> None:
        store = await open_store(self.url, replace(self._opening, create=self._create))
        self._owns_store = True
        try:
            await self._use(store, self._opening.entropy)
        except BaseException:
            await store.close()
            raise

    async def _use(self, store: ObjectStore, entropy: Entropy) -> None:
        declare_used_once(store, is_used_once)
        with labelled("open"):
            config = await read_config(store, self._layout)
            if config is None and not self._create:
                raise await no_such_queue(store, self._layout)
            if config is None:
                config = await make_queue(store, self._layout, self._wanted)
            await store.now()
        differing = differences(self._wanted, config)
        if differing:
            _log.warning(
                "the queue %r is there already, and is not as its config= says: %s."
                " 'penstock queue config set' or queue.configure() changes it",
                self.name,
                ", ".join(differing),
            )
        self._access = Access(store, self._layout, config, entropy)
        self._waiter = Waiter(Reader(self._access))
        self._announcer = Dispatch(self._access, self._dispatch)
        self._door = Door(self._access)

    def _adopt(self, config: QueueConfig) -> None:
        """The settings have changed."""
        self._access = replace(self.access, config=config)
        self._announcer = Dispatch(self._access, self._dispatch)

    async def close(self) -> None:
        """Close the connection."""
        access, self._access, self._waiter = self._access, None, None
        if access is not None and self._owns_store:
            await access.store.close()

    async def __aenter__(self) -> Self:
        if self._access is None:
            await self._connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """This queue, connected: closed in the end only if it was not connected before."""
        if self._access is not None:
            yield self
        else:
            async with self:
                yield self
