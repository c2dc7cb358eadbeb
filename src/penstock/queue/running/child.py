"""The process that isolated handlers run in: `python -m penstock.queue.running.child`.

Started by `penstock.queue.running.isolated` and told what to do in frames on its standard input.
A handler runs here as it would in the worker, as an `Attempt`, without a timeout: the worker is the
judge of time, and kills. Whether an error is retried is told by the names of its classes, for the
classes themselves are in the worker.

When the input ends, the worker is gone or wants no more. Then this ends by itself if it is idle,
and with everything that it has started, at once, if a handler runs: another worker may run the task
already. On Linux a signal says the same, to a handler that does not let the loop run. Only one that
never returns from C, and never lets go of the interpreter, would go on alone.

Handlers cannot read the input nor write into the frames by mistake: what they know as standard
input is empty, and what they print is the worker's to log.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any, Final

from penstock.kernel.entropy import system_entropy
from penstock.kernel.parents import die_with
from penstock.queue.endings import Failed, Rescheduled, Retried, Succeeded
from penstock.queue.ledger import Failure
from penstock.queue.places import TaskId
from penstock.queue.running.addresses import MAIN
from penstock.queue.running.attempts import Attempt
from penstock.queue.running.frames import (
    Begun,
    ClassName,
    Over,
    Report,
    Run,
    Stop,
    ToWorker,
    frame,
    read_frame,
    to_child,
)
from penstock.queue.running.handlers import Handler, TaskContext
from penstock.queue.running.progress import Voice
from penstock.queue.running.retry import Retry, raised
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
    def __init__(self, output: int) -> None:
        self._output = output
        self._attempt: Attempt | None = None
        self._voice = Voice(self._heard)
        self._loop = asyncio.get_running_loop()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Do what is said, until there is nobody to say anything."""
        async with asyncio.TaskGroup() as group:
            while (body := await read_frame(reader)) is not None:
                match to_child.decode(body):
                    case Run() as call:
                        group.create_task(self._run(call))
                    case Stop() if self._attempt is not None:
                        self._attempt.ask_to_stop()
            if self._attempt is not None:
                os.killpg(0, signal.SIGKILL)

    async def _run(self, call: Run) -> None:
        sys.path[:] = call.path
        retry = RetryByName(
            attempts=2, names=frozenset(call.retried), never_names=frozenset(call.never)
        )
        try:
            function = call.handler.find()
            handler = Handler(type=call.type, function=function, retry=retry)
        except BaseException as error:  # noqa: BLE001 - the user's module may raise anything
            found = raised(error, retry, ours=__file__)
            self._say(Over(failure=_explained(call, found.failure), is_retried=found.is_retried))
            return
        self._voice = Voice(self._heard)
        task = TaskContext(
            id=TaskId(call.id),
            type=call.type,
            attempt=call.attempt,
            raw_input=call.input,
            voice=self._voice,
        )
        self._attempt = Attempt(
            handler,
            task,
            counted=1,
            now_ms=int,
            entropy=system_entropy(),
            grace_seconds=_GRACE_SECONDS,
        )
        self._say(Begun())
        with under(call.trace):
            ended = await self._attempt.run()
        self._attempt = None
        self._speak()
        match ended.ending:
            case Succeeded(result):
                self._say(Over(result=result, has_result=True))
            case Retried(failure) | Failed(failure):
                self._say(Over(failure=failure, is_retried=isinstance(ended.ending, Retried)))
            case Rescheduled(due_ms, reason):
                # The clock of this attempt stands at zero.
                self._say(Over(again_seconds=due_ms / 1000, reason=reason))
            case _:
                self._say(Over())

    def _heard(self) -> None:
        """The handler has something to say, in whatever thread."""
        self._loop.call_soon_threadsafe(self._loop.call_later, _REPORT_SECONDS, self._speak)

    def _speak(self) -> None:
        said = self._voice.unsent
        if said is not None:
            self._voice.sent(said)
            self._say(Report(said.done, said.total, said.message))

    def _say(self, said: ToWorker) -> None:
        rest = memoryview(frame(said))
        while rest:
            rest = rest[os.write(self._output, rest) :]


def _explained(call: Run, failure: Failure) -> Failure:
    where = call.handler.path or call.handler.module
    name = "the script" if call.handler.module == MAIN else "the module"
    message = f"In a process of its own, {name} {where} cannot be used: {failure.message}"
    return Failure(failure.error, message, failure.trace)


async def _serve(given: int, output: int) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(given, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        await _Child(output).serve(reader)
    finally:
        transport.close()


def main(arguments: list[str]) -> Any:
    """Serve the worker that has started this."""
    output, parent = (int(each) for each in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not SIGKILL, which would leave what the handler has started.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with(parent, by=signal.SIGTERM)
    # Handlers read nothing from it, and their children inherit neither end.
    given = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    kept = os.dup(output)
    os.close(output)
    asyncio.run(_serve(given, kept))


if __name__ == "__main__":
    main(sys.argv[1:])
