"""The carriers of wake-ups, and of invocations where workers run the functions.

`WakeCarrier` has three ways for the word that an operator has work: an operator of the dispatcher
itself has its loop kicked; workers hear it through the `Sender`; and where functions are invoked
(`invokes` is the database), the next tasks of the operator get invocations of their own. So
whatever writes a wake-up, the end of a pause or room under a limit, reaches functions as well.

`InvokeAsWake` is for a profile without a Lambda service: workers run the functions, and an
invocation is nothing but the word that there is work. Tasks of any priority are claimed on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.outbox.values import Row
from penstock.dispatcher.wakeups.base import Channel, Sender

INVOKED_MAX: Final = 200
"""How many tasks one wake-up invokes; the end of each brings the next."""
PARKED_SECONDS: Final = 600.0
"""How long an invocation that is parked keeps its task from being invoked again."""


class WakeCarrier:
    """Carries out rows of the kind `wake`."""

    def __init__(
        self,
        sender: Sender,
        *,
        own: Mapping[str, Callable[[], None]] | None = None,
        invokes: Database | None = None,
        kick: Callable[[], None] | None = None,
    ) -> None:
        """`kick` is called when there are new invocations, so that they need not be looked for."""
        self._sender = sender
        self._own = dict(own or {})
        self._invokes = invokes
        self._kick = kick

    async def carry(self, rows: Sequence[Row]) -> Mapping[int, str]:
        rows_of: dict[Channel, list[int]] = {}
        for row in rows:
            channel = Channel(row.body["operator"], Priority(row.body["priority"]))
            rows_of.setdefault(channel, []).append(row.id)
        heard: list[Channel] = []
        for channel in rows_of:
            if kick := self._own.get(channel.operator):
                kick()
            elif self._invokes is None or await self._invoke_next(self._invokes, channel):
                heard.append(channel)
        failed = await self._sender.send(heard) if heard else {}
        return {row: why for channel, why in failed.items() for row in rows_of[channel]}

    async def _invoke_next(self, database: Database, channel: Channel) -> bool:
        """Write the invocations of the next tasks; returns whether workers have to be told too."""

        async def work(connection: Connection) -> tuple[int, bool]:
            asked = {
                "operator": channel.operator,
                "priority": channel.priority.value,
                "limit": INVOKED_MAX,
                "parked_seconds": PARKED_SECONDS,
            }
            row = await (await connection.execute(query("invoke_next"), asked)).fetchone()
            assert row is not None, "it always has one row"
            return row["made"], row["has_workers"]

        made, has_workers = await database.transact(work)
        if made and self._kick is not None:
            self._kick()
        return has_workers


class InvokeAsWake:
    """Carries out rows of the kind `invoke` by waking their operator."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def carry(self, rows: Sequence[Row]) -> Mapping[int, str]:
        channels = {row.id: Channel(row.target, Priority.NORMAL) for row in rows}
        failed = await self._sender.send(set(channels.values()))
        return {row: failed[channel] for row, channel in channels.items() if channel in failed}
