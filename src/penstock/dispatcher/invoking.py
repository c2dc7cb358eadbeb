"""Invocations of functions through the Lambda API: the carrier of the rows of kind `invoke`.

A function is invoked asynchronously (`InvocationType=Event`) with all that it needs to begin:

    {"dispatcher": URL, "task_id": 7, "job": …, "operator": …, "generation": …, "payload": {…},
     "claim_token": …}

It claims the task before it runs anything, with the token, which is good for the next attempt of
this task and a quarter of an hour; so a function needs no identity of its own, an invocation that
comes twice runs once, and one that comes late, or runs on after its attempt was given up, begins no
other. The dispatcher owns the attempts: retries of Lambda's own are turned off for a function
before it is first invoked, and an event that Lambda could not start for some minutes is dropped by
it, for the reconciler invokes again what was not claimed. If that cannot be set up, the function is
invoked anyway and says so in the log: it may be invoked more often than it has to be.

Only tasks that could be claimed now are invoked. What is over needs nothing, and what is not due,
paused or beyond a limit is announced again when that changes. A payload that is too large for an
event is left out: the claim's answer has it.

The function of an operator is the one that settings name for it, or else the one of its own name,
with `-` for what names of functions cannot have: `etl.clean:handler` is `etl-clean-handler`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.outbox.values import Row
from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.errors import InvalidInput
from penstock.kernel.service import Service

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

    async def carry(self, rows: Sequence[Row]) -> Mapping[int, str]:
        """Invoke the function of these rows' operator, once for each task that could be claimed."""
        function = function_name(rows[0].target, self._functions)
        tasks = await self._tasks(rows)
        wanted = [row for row in rows if row.body["task_id"] in tasks]
        if not wanted:
            return {}
        await asyncio.to_thread(self._make_ready, function)

        async def one(row: Row) -> str:
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

    async def _tasks(self, rows: Sequence[Row]) -> Mapping[int, Mapping[str, Any]]:
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
            _log.warning("the retries of the function %s cannot be turned off: %s", function, error)
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
