"""What a function asks of a dispatcher by itself, with the token of its attempt: queries, and
batches of rows for buffered datasets. See `task.query` and `task.buffer`.

A loop and a connection of its own for each, in the thread that asks. Called by `task`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from penstock.kernel.clock import SystemClock
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import DispatcherUnavailable, InvalidInput, WorkFailed
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.client import DispatcherCaller, DispatcherReply, NoReply
from penstock.protocol.events import BATCH_BYTES_MAX, ROWS_MAX, BufferPublishAsk
from penstock.protocol.queries import QUERY_SECONDS_MAX, QueryAsk, QueryFormat
from penstock.runtimes.secrets import AttemptFiles

_QUERY_PATH: Final = "/v1/task/query"
_PUBLISH_PATH: Final = "/v1/task/buffer-publish"
_PUBLISH_SECONDS: Final = 20.0
_WAIT_SECONDS: Final = 5.0
WAITS_MAX: Final = 120
"""How often a batch waits for a sink that has fallen behind, or for a dispatcher: ten minutes."""
_LATER: Final = frozenset({429, 503})


def result_of(handed: AttemptFiles, sql: str) -> bytes:
    """The result of a query as a stream of Arrow IPC, whole."""
    ask = msgspec.json.encode(QueryAsk(sql=sql, format=QueryFormat.ARROW))
    try:
        reply = asyncio.run(_sent(handed, _QUERY_PATH, ask, seconds=QUERY_SECONDS_MAX))
    except NoReply as error:
        said = [each.reply.problem for each in error.misses if each.reply is not None]
        why = next((f" {each.title}" for each in said if each is not None), "")
        raise DispatcherUnavailable(f"No dispatcher could run the query.{why}") from error
    if reply.status == 200:
        return reply.body
    raise _refused(reply, "query")


def publish(
    handed: AttemptFiles,
    dataset: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    batch: str,
    partition_key: str | None,
    made_at: int | None,
) -> int:
    """Publish rows as one batch, or as several where they are large; how many batches."""
    count = 0
    for count, some in enumerate(_pieces(rows), start=1):
        ask = BufferPublishAsk(
            dataset=dataset,
            batch=batch if count == 1 else f"{batch}:{count}",
            partition_key=partition_key,
            rows=some,
            made_at=made_at,
        )
        asyncio.run(_published(handed, msgspec.json.encode(ask)))
    return count


def _pieces(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[msgspec.Raw]]:
    """The rows in as many pieces as they need: the same for the same rows."""
    piece: list[msgspec.Raw] = []
    size = 0
    for row in rows:
        # What came with an event is a view of a dict, which nobody writes as JSON.
        body = msgspec.json.encode(dict(row))
        if len(body) > BATCH_BYTES_MAX:
            raise InvalidInput(
                f"A row has {BATCH_BYTES_MAX:,} bytes at most as JSON, not {len(body):,}."
            )
        if piece and (size + len(body) + 1 > BATCH_BYTES_MAX or len(piece) >= ROWS_MAX):
            yield piece
            piece, size = [], 0
        piece.append(msgspec.Raw(body))
        size += len(body) + 1
    if piece:
        yield piece


async def _published(handed: AttemptFiles, body: bytes) -> None:
    clock = SystemClock()
    told = "No dispatcher has answered."
    for _ in range(WAITS_MAX):
        try:
            reply = await _sent(handed, _PUBLISH_PATH, body, seconds=_PUBLISH_SECONDS)
        except NoReply:
            reply = None
        if reply is not None and reply.status == 200:
            return
        if reply is not None and reply.status not in _LATER:
            raise _refused(reply, "batch")
        if reply is not None and reply.problem is not None:
            told = reply.problem.title
        # Sent again it is the same batch: whether the first was heard makes no difference.
        await clock.sleep(_WAIT_SECONDS)
    raise DispatcherUnavailable(f"The batch was not accepted in time. {told}")


async def _sent(handed: AttemptFiles, path: str, body: bytes, *, seconds: float) -> DispatcherReply:
    headers = {TASK_HEADER: handed.token}
    entropy, clock = system_entropy(), SystemClock()
    caller = DispatcherCaller(handed.dispatchers, headers, clock=clock, entropy=entropy)
    try:
        return await caller.send("POST", path, body, seconds=seconds)
    finally:
        await caller.close()


def _refused(reply: DispatcherReply, what: str) -> InvalidInput | WorkFailed:
    problem = reply.problem
    title = f"The {what} was answered with {reply.named}." if problem is None else problem.title
    hint = "" if problem is None else problem.detail
    if reply.status in (413, 422):
        return InvalidInput(title, hint=hint)
    return WorkFailed(title, hint=hint)
