"""The bell of a queue: one small object that says "somebody has changed what chores mind".

Whoever adds or changes a schedule, or begins a batch, rings it afterwards: a put over whatever is
there. Whoever minds the chores asks for it every so often, with a GET that costs a twelfth of a
LIST, and makes the LIST only if it has rung. The bell is a hint: a ring that is lost, because its
ringer died before it, costs time and nothing else, for the lists are made at long intervals anyway.

At one GET in `HEARD_SECONDS` an idle queue pays 86,400 a month, three and a half cents.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import ClassVar, Final

from penstock.kernel.entropy import new_id
from penstock.kernel.errors import NotFound, StoreError
from penstock.kernel.wire import Document, encode
from penstock.queue.access import Access
from penstock.store.base import REPLACE, Version
from penstock.store.metered import labelled

HEARD_SECONDS: Final = 30.0
"""How old the answer may be that several chores share."""


class Rung(Document, frozen=True, kw_only=True):
    """Says nothing but that it is another one than before."""

    kind: ClassVar[str] = "bell"

    nonce: str


async def ring(access: Access) -> None:
    """Say that something has changed. Never fails: it is a hint."""
    body = encode(Rung(nonce=new_id(access.entropy)))
    with suppress(StoreError), labelled("chores"):
        await access.store.put(access.layout.bell, body, REPLACE)


class Bell:
    """One process's ear."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._clock = access.store.clock.machine
        self._version: Version | None = None
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def version(self) -> Version | None:
        """Another one whenever the bell has rung; None if it never has. Raises `StoreError`."""
        async with self._asking:
            instant = self._clock.monotonic()
            # A little less than a period: who asks once in a period gets a new answer every time.
            if instant - self._asked_at >= HEARD_SECONDS * 0.9:
                await self._ask()
                self._asked_at = instant
        return self._version

    async def _ask(self) -> None:
        with labelled("chores"), suppress(NotFound):
            found = await self._access.store.get(self._access.layout.bell, unless=self._version)
            self._version = found.version if found else self._version
