"""The query of a function: sent to a dispatcher with the token of its attempt. See `task.query`.

A loop and a connection of its own for each query, in the thread that asks. Called by `task`.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, WorkFailed
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.client import DispatcherCaller, NoReply
from penstock.protocol.queries import QUERY_SECONDS_MAX, QueryAsk, QueryFormat
from penstock.runtimes.secrets import AttemptFiles

_PATH: Final = "/v1/task/query"


def result_of(handed: AttemptFiles, sql: str) -> bytes:
    """The result as a stream of Arrow IPC, whole."""
    return asyncio.run(_asked(handed, sql))


async def _asked(handed: AttemptFiles, sql: str) -> bytes:
    ask = msgspec.json.encode(QueryAsk(sql=sql, format=QueryFormat.ARROW))
    headers = {TASK_HEADER: handed.token}
    entropy, clock = system_entropy(), SystemClock()
    caller = DispatcherCaller(handed.dispatchers, headers, clock=clock, entropy=entropy)
    try:
        reply = await caller.send("POST", _PATH, ask, seconds=QUERY_SECONDS_MAX)
    except NoReply as error:
        said = [each.reply.problem for each in error.misses if each.reply is not None]
        why = next((f" {each.title}" for each in said if each is not None), "")
        raise DispatcherUnavailable(f"No dispatcher could run the query.{why}") from error
    finally:
        await caller.close()
    if reply.status == 200:
        return reply.body
    problem = reply.problem
    title = f"The query was answered with {reply.named}." if problem is None else problem.title
    hint = "" if problem is None else problem.detail
    if reply.status == 422:
        raise InvalidInput(title, hint=hint)
    raise WorkFailed(title, hint=hint)
