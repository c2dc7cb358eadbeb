"""The carriers of the outbox that start work: wake-ups for workers, invocations of functions.

`WakeCarrier` sends wake-ups of an operator, and how many tasks there are: its loop is kicked if it
is the dispatcher's own, workers hear through the `WakeUpSender`, and where functions are invoked
the next tasks get invocations. `LocalInvokeCarrier` is for installations without Lambda: workers
run the functions.

`LambdaCarrier` invokes a function asynchronously (`InvocationType=Event`) with all that it
needs:

    {"dispatcher": URL, "task_id": 7, "job": …, "operator": …, "generation": …, "payload": {…},
     "claim_token": …}

The function claims the task with that token, which is good for the next attempt of this task
and a quarter of an hour; so it needs no identity of its own, a doubled invocation runs once,
and a late one begins no other attempt. Retries of Lambda's own are turned off before the first
invocation, and Lambda drops an event that it could not start for some minutes: the reconciler
invokes again. If that cannot be set up, the function is invoked anyway and a warning logged.
Only claimable tasks are invoked. A payload that is too large is left out: the answer to the
claim has it.

The function of an operator is the one that settings name for it, or the one of its own name
with `-` for characters that names of functions cannot have: `etl.clean:handler` is
`etl-clean-handler`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Connection, Database, query
from penstock.dispatcher.outbox import OutboxEntry
from penstock.dispatcher.wakeups.base import WakeUpChannel, WakeUpSender
from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service

INVOKED_MAX: Final = 200
"""How many tasks one wake-up invokes; the end of each brings the next."""
PARKED_SECONDS: Final = 600.0
"""How long an invocation that is parked keeps its task from being invoked again."""


class WakeCarrier:
    """Carries out rows of the kind `wake`."""

    def __init__(
        self,
        sender: WakeUpSender,
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

    async def carry(self, rows: Sequence[OutboxEntry]) -> Mapping[int, str]:
        rows_of: dict[WakeUpChannel, list[int]] = {}
        tasks_of: dict[WakeUpChannel, int] = {}
        for row in rows:
            channel = WakeUpChannel(row.body["operator"], Priority(row.body["priority"]))
            rows_of.setdefault(channel, []).append(row.id)
            tasks_of[channel] = row.body.get("tasks", 1)
        for channel in rows_of:
            if kick := self._own.get(channel.operator):
                kick()
                del tasks_of[channel]
            elif self._invokes is not None and not await self._invoke_next(self._invokes, channel):
                del tasks_of[channel]
        failed = await self._sender.send(tasks_of) if tasks_of else {}
        return {row: why for channel, why in failed.items() for row in rows_of[channel]}

    async def _invoke_next(self, database: Database, channel: WakeUpChannel) -> bool:
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


class LocalInvokeCarrier:
    """Carries out rows of the kind `invoke` by waking their operator."""

    def __init__(self, sender: WakeUpSender) -> None:
        self._sender = sender

    async def carry(self, rows: Sequence[OutboxEntry]) -> Mapping[int, str]:
        channels = {row.id: WakeUpChannel(row.target, Priority.NORMAL) for row in rows}
        failed = await self._sender.send(Counter(channels.values()))
        return {row: failed[channel] for row, channel in channels.items() if channel in failed}


_log = logging.getLogger(__name__)

AT_ONCE_MAX: Final = 16
EVENT_BYTES_MAX: Final = 200_000
EVENT_AGE_SECONDS_MAX: Final = 300
NAME_CHARACTERS_MAX: Final = 64
_OTHER: Final = re.compile(r"[^A-Za-z0-9_]+")


class LambdaCarrier(Service):
    """Invokes functions. `dispatcher_url` is where they find the internal listener.

    `token_for` makes the token with which an attempt may be begun, from its task and its number.
    """

    def __init__(
        self,
        database: Database,
        *,
        dispatcher_url: str,
        token_for: Callable[[int, int], Awaitable[str]],
        aws: Aws | None = None,
        functions: Mapping[str, str] | None = None,
    ) -> None:
        self._database = database
        self._dispatcher_url = dispatcher_url
        self._token_for = token_for
        self._aws = aws or Aws()
        self._functions = dict(functions or {})
        self._ready: set[str] = set()
        self._lock = threading.Lock()
        self._client: Any = None
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)

    async def start(self) -> None:
        """Nothing to do yet."""

    async def stop(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)

    async def carry(self, rows: Sequence[OutboxEntry]) -> Mapping[int, str]:
        """Invoke the function of these rows' operator, once for each task that could be claimed."""
        function = function_name(rows[0].target, self._functions)
        tasks = await self._tasks(rows)
        wanted = [row for row in rows if row.body["task_id"] in tasks]
        if not wanted:
            return {}
        await asyncio.to_thread(self._make_ready, function)

        async def one(row: OutboxEntry) -> str:
            task = dict(tasks[row.body["task_id"]])
            attempt = task.pop("attempt")
            async with self._slots:
                try:
                    token = await self._token_for(row.body["task_id"], attempt)
                    event = encoded_event(
                        task, dispatcher_url=self._dispatcher_url, claim_token=token
                    )
                    await asyncio.to_thread(self._invoke, function, event)
                except Exception as error:  # noqa: BLE001 - boto3 has no end of errors; it is told
                    return str(error) or type(error).__name__
            return ""

        said = await asyncio.gather(*map(one, wanted))
        return {row.id: why for row, why in zip(wanted, said, strict=True) if why}

    async def _tasks(self, rows: Sequence[OutboxEntry]) -> Mapping[int, Mapping[str, Any]]:
        """The tasks that could be claimed now. The rows of the others are gone with the answer.

        Whatever makes those claimable may come while the function of another is being invoked, and
        must not find that they have an invocation.
        """

        async def work(connection: Connection) -> Mapping[int, Mapping[str, Any]]:
            asked = {"tasks": [row.body["task_id"] for row in rows]}
            answer = await connection.execute(query("tasks_to_invoke"), asked)
            found = {task["task_id"]: task for task in await answer.fetchall()}
            useless = [row.id for row in rows if row.body["task_id"] not in found]
            await connection.execute(query("drop_invocations"), {"rows": useless})
            return found

        return await self._database.transact(work)

    def _lambda(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = aws_client("lambda", aws=self._aws, connections_max=AT_ONCE_MAX)
            return self._client

    def _invoke(self, function: str, event: bytes) -> None:
        self._lambda().invoke(FunctionName=function, InvocationType="Event", Payload=event)

    def _make_ready(self, function: str) -> None:
        """Turn off Lambda's own retries, once a function and process."""
        if function in self._ready:
            return
        wanted = {
            "FunctionName": function,
            "MaximumRetryAttempts": 0,
            "MaximumEventAgeInSeconds": EVENT_AGE_SECONDS_MAX,
        }
        client = self._lambda()
        try:
            try:
                # Leaves destinations as they are.
                client.update_function_event_invoke_config(**wanted)
            except Exception as error:
                if error_code(error) != "ResourceNotFoundException":
                    raise
                client.put_function_event_invoke_config(**wanted)
        except Exception as error:  # noqa: BLE001 - whether it can be invoked is seen next
            _log.warning("failed to turn off the retries of function %s: %s", function, error)
            return
        self._ready.add(function)


def function_name(operator: str, functions: Mapping[str, str]) -> str:
    """The name, or the ARN, of the function that an operator is."""
    if operator in functions:
        return functions[operator]
    name = _OTHER.sub("-", operator).strip("-")
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise InvalidInput(
            f"No function can have the name of the operator {operator!r}.",
            hint="Name its function in the settings of the runtime.",
        )
    return name


def encoded_event(task: Mapping[str, Any], *, dispatcher_url: str, claim_token: str) -> bytes:
    """What a function is invoked with."""
    event = {"dispatcher": dispatcher_url, **task, "claim_token": claim_token}
    body = json.dumps(event, separators=(",", ":")).encode()
    if len(body) > EVENT_BYTES_MAX:
        body = json.dumps({**event, "payload": None}, separators=(",", ":")).encode()
    return body
