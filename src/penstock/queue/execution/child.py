"""The process that runs isolated handlers: `python -m penstock.queue.execution.child`.

Started by `penstock.queue.execution.handler_processes`, which sends frames to its standard
input. A handler runs here as in the worker, as a `HandlerAttempt`, without a timeout: the
worker measures time, and kills. Whether an error is retried is told by the names of its
classes, for the classes themselves are in the worker.

When the input ends, the worker is gone or wants no more. Then this process ends when it is idle,
and with everything that it has started, at once, if a handler runs: another worker may run the
task already. On Linux a signal says the same, to a handler that does not let the loop run. Only
one that never returns from C, and never releases the interpreter, would go on alone.

Handlers cannot read the input nor write into the frames by mistake: their standard input is
empty, and what they print is the worker's to log.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.entropy import system_entropy
from penstock.kernel.framed_child import FrameChannel, FrameCodec
from penstock.kernel.frames import parent_connection
from penstock.kernel.parent_watch import die_with
from penstock.queue.attempt_outcomes import Failed, Rescheduled, Retried, Succeeded
from penstock.queue.execution.attempt import HandlerAttempt
from penstock.queue.execution.handler_processes import (
    FRAME_BYTES_MAX,
    ClassName,
    HandlerFinished,
    HandlerProgress,
    HandlerStarted,
    RunHandler,
    StopHandler,
    ToChild,
    encode,
    to_child,
)
from penstock.queue.execution.handlers import MAIN, Handler, ProgressReporter, TaskContext
from penstock.queue.execution.retry import Retry, raised
from penstock.queue.ids import TaskId
from penstock.queue.ledger import LedgerFailure
from penstock.queue.tracing import under

_REPORT_SECONDS: Final = 0.5
_GRACE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class RetryByName(Retry):
    """Retries errors by the names of their classes."""

    names: frozenset[ClassName] = frozenset()
    never_names: frozenset[ClassName] = frozenset()

    def retries(self, error: BaseException) -> bool:
        if self.excludes(error):
            return False
        if _is_named(error, self.names):
            return True
        return isinstance(error, BaseExceptionGroup) and all(map(self.retries, error.exceptions))

    def excludes(self, error: BaseException) -> bool:
        # Not super(): a dataclass with slots is another class than the one that this is read in.
        return Retry.excludes(self, error) or _is_named(error, self.never_names)


def _is_named(error: BaseException, names: frozenset[ClassName]) -> bool:
    kinds = inspect.getmro(type(error))
    return any((each.__module__, each.__qualname__) in names for each in kinds)


class _Child:
    def __init__(self, worker: FrameChannel[ToChild]) -> None:
        self._worker = worker
        self._attempt: HandlerAttempt | None = None
        self._reporter = ProgressReporter(self._on_progress)
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Do what is said, until there is nobody to say anything."""
        async with asyncio.TaskGroup() as group:
            while (said := await self._worker.hear()) is not None:
                match said:
                    case RunHandler() as call:
                        group.create_task(self._run(call))
                    case StopHandler() if self._attempt is not None:
                        self._attempt.ask_to_stop()
            if self._attempt is not None:
                os.killpg(0, signal.SIGKILL)

    async def _run(self, call: RunHandler) -> None:
        sys.path[:] = call.path
        retry = RetryByName(
            attempts=2, names=frozenset(call.retried), never_names=frozenset(call.never)
        )
        try:
            function = call.handler.find()
            handler = Handler(type=call.type, function=function, retry=retry)
        except BaseException as error:  # noqa: BLE001 - the user's module may raise anything
            found = raised(error, retry, ours=__file__)
            self._worker.tell(
                HandlerFinished(
                    failure=_explained(call, found.failure), is_retried=found.is_retried
                )
            )
            return
        self._reporter = ProgressReporter(self._on_progress)
        task = TaskContext(
            id=TaskId(call.id),
            type=call.type,
            attempt=call.attempt,
            raw_input=call.input,
            reporter=self._reporter,
        )
        self._attempt = HandlerAttempt(
            handler,
            task,
            counted=1,
            now_ms=int,
            entropy=system_entropy(),
            grace_seconds=_GRACE_SECONDS,
        )
        self._worker.tell(HandlerStarted())
        with under(call.trace):
            ended = await self._attempt.run()
        self._attempt = None
        self._speak()
        match ended.ending:
            case Succeeded(result):
                self._worker.tell(HandlerFinished(result=result, has_result=True))
            case Retried(failure) | Failed(failure):
                self._worker.tell(
                    HandlerFinished(failure=failure, is_retried=isinstance(ended.ending, Retried))
                )
            case Rescheduled(due_ms, reason):
                # The clock of this attempt stands at zero.
                self._worker.tell(HandlerFinished(again_seconds=due_ms / 1000, reason=reason))
            case _:
                self._worker.tell(HandlerFinished())

    def _on_progress(self) -> None:
        """The handler has something to say, in whatever thread."""
        self._loop.call_soon_threadsafe(self._loop.call_later, _REPORT_SECONDS, self._speak)

    def _speak(self) -> None:
        said = self._reporter.unsent
        if said is not None:
            self._reporter.sent(said)
            self._worker.tell(HandlerProgress(said.done, said.total, said.message))


def _explained(call: RunHandler, failure: LedgerFailure) -> LedgerFailure:
    where = call.handler.path or call.handler.module
    name = "the script" if call.handler.module == MAIN else "the module"
    message = f"In a process of its own, {name} {where} cannot be used: {failure.message}"
    return LedgerFailure(failure.error, message, failure.trace)


async def _serve(connection: socket.socket) -> None:
    worker = FrameChannel(FrameCodec(encode, to_child.decode, FRAME_BYTES_MAX))
    await worker.open(connection)
    try:
        await _Child(worker).serve()
    finally:
        worker.close()


def main(arguments: list[str]) -> Any:
    """Serve the worker that has started this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not SIGKILL, which would leave what the handler has started.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with(int(arguments[0]), by=signal.SIGTERM)
    asyncio.run(_serve(parent_connection()))


if __name__ == "__main__":
    main(sys.argv[1:])
