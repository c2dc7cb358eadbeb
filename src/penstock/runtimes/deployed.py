"""The Lambda side of an invocation: `task_handler`, which wraps a handler that is deployed at AWS.

    from penstock.runtimes.function import task_handler

    @task_handler
    def handler(event, context): ...

The function is invoked with the number of a task. It claims that task at the dispatcher before
anything runs, so of two invocations one is refused and runs nothing. While the handler runs, a
thread heartbeats; what it returned or raised is reported as the end of the attempt. An end that
cannot be reported before the function's time is over is left to the reaper, as is a sandbox that
is killed. A refused heartbeat or a cancellation raises `Stopped` in the handler.

The invocation brings what allows the claim, `claim_token`: a token for this task, of a few
minutes, so that the function has no secret of its own. The claim's answer has the capability
token of the attempt, which every call brings, and a heartbeat the next one. A dispatcher may
not know for a moment who has signed a token, as after a failover of its database: an end is
reported `_PROOFS_MAX` times, by turns with the latest token and with the first.
`PENSTOCK_DISPATCHER` in the environment says where the dispatcher is, or else the invocation
does.

Requests are sent by `penstock.protocol.client`, and written by hand, for a cold start has to be
short: a test compares them with `penstock.protocol`. Each has a loop and a connection of its own,
in a thread of its own: nothing of them is open while the sandbox is frozen, and whatever loop the
user's handler has is left alone. `output_collector`, which describes outputs, takes more packages;
where that is not deployed they have no manifest.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Final

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import DispatcherRefused, DispatcherUnavailable, InvalidInput
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.client import (
    DispatcherCaller,
    DispatcherReply,
    NoReply,
    check_url,
    refusal,
)
from penstock.protocol.work import HEARTBEATS
from penstock.runtimes.base import (
    AttemptPaths,
    AttemptWork,
    Facts,
    Part,
    ProducedOutput,
    WorkInput,
    WorkOutput,
)
from penstock.runtimes.task import FunctionTask, Stopped, make_folders
from penstock.runtimes.user_code import event_of, told

Handler = Callable[[Any, Any], Any]

_log = logging.getLogger(__name__)

_REQUEST_SECONDS: Final = 10.0
_CLAIM_SECONDS: Final = 30.0
_PART: Final = frozenset(Part.__slots__)
_PAUSE_SECONDS_MAX: Final = 5.0
_RESERVE_SECONDS: Final = 2.0
"""How much of the function's time is left for AWS."""
_OVER: Final = frozenset({404, 409})
_UNPROVED: Final = frozenset({401, 403})
_PROOFS_MAX: Final = 6
_SCHEMA: Final = "schema"
_UNDECLARED: Final = "undeclared"
_OUTPUTS: Final = frozenset({"outputs", _SCHEMA, _UNDECLARED})
"""The types of the problems that an attempt's outputs are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDeployment:
    """Whom the function talks to."""

    dispatcher: str = ""
    clock: Clock = field(default_factory=SystemClock)
    entropy: Entropy = field(default_factory=system_entropy)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> FunctionDeployment:
        """What the environment says."""
        return cls(dispatcher=environment.get("PENSTOCK_DISPATCHER", ""))


def task_handler(user_handler: Handler, deployment: FunctionDeployment | None = None) -> Handler:
    """A handler for Lambda that claims a task, has it handled, and reports its end."""

    @functools.wraps(user_handler)
    def handler(event: Any, context: Any) -> dict[str, Any]:
        us = deployment or FunctionDeployment.of_environment(os.environ)
        said: Mapping[str, Any] = event if isinstance(event, Mapping) else {}
        task_id, token = said.get("task_id"), said.get("claim_token")
        url = us.dispatcher or said.get("dispatcher", "")
        if isinstance(task_id, bool) or not isinstance(task_id, int) or not url:
            raise InvalidInput("An invocation names a `task_id` and a `dispatcher`.")
        if not isinstance(token, str) or not token:
            raise InvalidInput("An invocation brings a `claim_token`; have a dispatcher invoke it.")
        calls = DispatcherCalls(url, us, ends_at=_ends_at(context, us.clock))
        try:
            assignment = calls.claim(task_id, token)
        except DispatcherRefused as error:
            _log.info("task %s was not claimed: %s", task_id, error.message)
            return {"task_id": task_id, "status": "refused", "reason": error.message}
        try:
            attempt = _Attempt(calls, assignment)
        except Exception as error:  # noqa: BLE001 - of another release, it may say anything
            return _handed_back(calls, assignment, error)
        return attempt.run(user_handler, context)

    return handler


def _handed_back(
    calls: DispatcherCalls, assignment: Mapping[str, Any], error: Exception
) -> dict[str, Any]:
    """Have another function run a task that this one cannot read; it is not counted."""
    told = (
        f"This function cannot read the task: {type(error).__name__}: {error}. Deploy it with the"
        " release of the dispatcher."
    )
    _log.warning("task %s is released: %s", assignment["task_id"], told)
    held = {name: assignment[name] for name in ("task_id", "attempt", "lease_token")}
    release = {"reason": told, "is_delayed": True}
    status = calls.complete({**held, "release": release}, tokens=[assignment["token"]])
    return {"task_id": assignment["task_id"], "status": status}


class DispatcherCalls:
    """Requests to a dispatcher, repeated until they are answered or the function's time is over."""

    def __init__(self, url: str, deployment: FunctionDeployment, *, ends_at: float) -> None:
        self._url = check_url(url)
        self._us = deployment
        self._ends_at = ends_at
        self._pausing = threading.Event()

    def claim(self, task_id: int, token: str) -> Mapping[str, Any]:
        """Begin an attempt; returns the assignment."""
        proof = {TASK_HEADER: token}
        until = min(self._us.clock.monotonic() + _CLAIM_SECONDS, self._ends_at)
        answer = self._repeated("/internal/task-claim", {"task_id": task_id}, proof, until)
        tasks = answer.get("tasks") or []
        if not tasks:
            raise DispatcherRefused("There is nothing to claim.", status=409)
        assignment: Mapping[str, Any] = tasks[0]
        return assignment

    def heartbeat(self, held: Mapping[str, Any]) -> Mapping[str, Any]:
        """Tell that the attempt lives, once; returns what is said of it."""
        proof = {TASK_HEADER: held["token"]}
        answer = self._once("/v1/task/heartbeat", {"tasks": [held]}, proof)
        result: Mapping[str, Any] = (answer.get("results") or [{}])[0]
        return result

    def complete(self, ended: Mapping[str, Any], *, tokens: Sequence[str]) -> str:
        """Tell how the attempt has ended; returns what the task is now.

        By one of these tokens: if none is known, it is tried again, for it may be in a moment.
        """
        for tries, token in enumerate(islice(cycle(tokens), _PROOFS_MAX), 1):
            body = {"tasks": [{**ended, "token": token}]}
            try:
                # In the header too: who shows there who it is is not behind those who do not.
                proof = {TASK_HEADER: token}
                answer = self._repeated("/v1/task/complete", body, proof, self._ends_at)
            except DispatcherRefused as error:
                left_seconds = self._ends_at - self._us.clock.monotonic()
                if error.status not in _UNPROVED or tries == _PROOFS_MAX or left_seconds < tries:
                    raise
                self._pausing.wait(tries * self._us.entropy.uniform(0.5, 1.0))
                continue
            results = answer.get("results") or [{}]
            return str(results[0].get("task_status", ""))
        raise AssertionError("the last try returns or raises")

    def _repeated(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], until: float
    ) -> Mapping[str, Any]:
        pause_seconds = 0.1
        while True:
            try:
                return self._once(path, body, headers)
            except DispatcherUnavailable:
                if self._us.clock.monotonic() + pause_seconds >= until:
                    raise
            self._pausing.wait(pause_seconds * self._us.entropy.uniform(0.5, 1.0))
            pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)

    def _once(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        with ThreadPoolExecutor(1, "penstock-call") as threads:
            reply = threads.submit(self._sent, path, json.dumps(body).encode(), headers).result()
        if reply.status >= 300:
            raise refusal(reply, side="internal")
        try:
            answer = json.loads(reply.body)
        except ValueError as error:
            raise DispatcherUnavailable(f"The dispatcher did not answer: {error!r}.") from error
        if not isinstance(answer, dict):
            raise DispatcherUnavailable("The dispatcher did not answer with an object.")
        return answer

    def _sent(self, path: str, body: bytes, headers: Mapping[str, str]) -> DispatcherReply:
        async def send() -> DispatcherReply:
            us = self._us
            caller = DispatcherCaller(
                [self._url], {}, clock=us.clock, entropy=us.entropy, lost_tries=1
            )
            try:
                return await caller.send(
                    "POST", path, body, seconds=_REQUEST_SECONDS, headers=headers
                )
            finally:
                await caller.close()

        try:
            return asyncio.run(send())
        except NoReply as error:
            (miss,) = error.misses
            said = miss.why or (f"it answered {miss.reply.status}" if miss.reply else "no answer")
            raise DispatcherUnavailable(f"The dispatcher cannot be asked now: {said}.") from error


class _Attempt:
    """One attempt in this sandbox."""

    def __init__(self, calls: DispatcherCalls, assignment: Mapping[str, Any]) -> None:
        self._calls = calls
        names = ("task_id", "attempt", "lease_token", "token")
        self._held = {name: assignment[name] for name in names}
        self._first_token: str = assignment["token"]
        self._pause_seconds = HEARTBEATS.pause_seconds(assignment["heartbeat_seconds"])
        self._work = work_of(assignment)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread_id: int | None = None

    def run(self, user_handler: Handler, context: Any) -> dict[str, Any]:
        beating = threading.Thread(target=self._beat, daemon=True)
        beating.start()
        try:
            end = self._end(user_handler, context)
        finally:
            # The sandbox is frozen between invocations: nothing may be on its way then.
            self._over.set()
            beating.join()
        task_id = self._work.task_id
        try:
            status = self._tell(end)
        except DispatcherRefused as error:
            _log.warning("the completion of task %s was refused: %s", task_id, error.message)
            return {"task_id": task_id, "status": "refused", "reason": error.message}
        return {"task_id": task_id, "status": status}

    def _tell(self, end: Mapping[str, Any]) -> str:
        """Tell how the attempt has ended; as a failure, if what was made is refused."""
        try:
            return self._complete(end)
        except DispatcherRefused as error:
            is_over = error.status in _OVER and error.kind not in _OUTPUTS
            if is_over or error.status in _UNPROVED or "failure" in end:
                raise
            if error.kind == _SCHEMA and any(_columns(each) for each in end["outputs"]):
                # They were only seen, and are left out where they do not fit: decision 0030.
                _log.warning("task %s: %s", self._work.task_id, error.message)
                return self._tell({"outputs": [_without_columns(each) for each in end["outputs"]]})
            # The attempt is still ours, and would be run again only when its lease has run out.
            failure = {
                "reason": f"Its outputs were refused: {error.message}",
                "is_retried": error.kind not in (_SCHEMA, _UNDECLARED),
            }
            return self._complete({"failure": failure})

    def _complete(self, end: Mapping[str, Any]) -> str:
        tokens = list(dict.fromkeys([self._held["token"], self._first_token]))
        return self._calls.complete({**self._held, **end}, tokens=tokens)

    def _end(self, user_handler: Handler, context: Any) -> dict[str, Any]:
        try:
            make_folders(self._work)
            try:
                with self._lock:
                    self._thread_id = threading.get_ident()
                returned = user_handler(event_of(self._work), context)
            finally:
                with self._lock:
                    _raise_in(threading.get_ident(), None)
                    self._thread_id = None
            made = _described(self._work, FunctionTask(self._work).made(returned))
            return {"outputs": outputs_of(self._work, made)}
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the end of the attempt
            _log.exception("task %s failed", self._work.task_id)
            reason, is_retried = told(error)
            return {"failure": {"reason": reason, "is_retried": is_retried}}

    def _beat(self) -> None:
        while not self._over.wait(self._pause_seconds):
            # An unreachable dispatcher is not a lost lease.
            with suppress(DispatcherUnavailable):
                try:
                    said = self._calls.heartbeat(self._held)
                except DispatcherRefused as error:
                    # Who does not know our token says nothing of the attempt.
                    is_stopped = error.status not in _UNPROVED
                else:
                    is_stopped = bool(said.get("cancel_asked"))
                    self._held["token"] = said.get("token") or self._held["token"]
                if is_stopped:
                    self._interrupt()
                    return

    def _interrupt(self) -> None:
        with self._lock:
            if self._thread_id is not None:
                _raise_in(self._thread_id, Stopped)


def work_of(assignment: Mapping[str, Any]) -> AttemptWork:
    """An assignment, as JSON has it, as work. The dispatcher says where the attempt writes."""
    places, attempt_id = AttemptPaths(assignment["root"]), assignment["folder"]
    definition = assignment["definition"]
    payload, generation = assignment["payload"], assignment["generation"]
    uuids = definition.get("datasets") or {}
    outputs = {}
    for each in definition.get("outputs") or ():
        dataset = each.get("dataset", each["name"])
        location = places.output(
            dataset, generation=generation, payload=payload, attempt_id=attempt_id
        )
        outputs[each["name"]] = WorkOutput(dataset=dataset, uuid=uuids[dataset], location=location)
    return AttemptWork(
        task_id=assignment["task_id"],
        attempt=assignment["attempt"],
        job=assignment["job"],
        operator=assignment["operator"],
        generation=generation,
        config=definition.get("config") or {},
        resources=definition.get("resources") or {},
        payload=payload,
        inputs={name: _given(each) for name, each in (assignment.get("inputs") or {}).items()},
        outputs=outputs,
        timeout_seconds=assignment.get("timeout_seconds"),
        scratch=places.scratch(attempt_id),
    )


def _given(answer: Mapping[str, Any]) -> WorkInput:
    # What a later dispatcher says of a part beyond what is known here is left out.
    return WorkInput(
        dataset=answer["dataset"],
        generation=answer["generation"],
        location=answer.get("location"),
        revision=answer.get("revision"),
        missed=answer.get("missed") or 0,
        parts=tuple(
            Part(**{name: value for name, value in each.items() if name in _PART})
            for each in answer.get("parts") or ()
        ),
    )


def outputs_of(work: AttemptWork, made: tuple[ProducedOutput, ...]) -> list[dict[str, Any]]:
    """What was made, as JSON of a completion."""
    said = [
        {
            "dataset": work.outputs[each.output].uuid,
            "location": each.location,
            "partition_key": each.partition_key,
            "start": each.start,
            "end": each.end,
            "cursor": each.cursor,
            "append_key": each.append_key,
            "facts": None if each.facts is None else _facts(each.facts),
        }
        for each in made
    ]
    return [{name: value for name, value in each.items() if value is not None} for each in said]


def _described(work: AttemptWork, made: tuple[ProducedOutput, ...]) -> tuple[ProducedOutput, ...]:
    """What was made, with what is found of it; as it is, where the package for that is missing."""
    try:
        from penstock.datasets.transfer import Transfer  # noqa: PLC0415 - most starts need none
        from penstock.runtimes.output_collector import ManifestBuilder  # noqa: PLC0415
    except ImportError as error:
        _log.info("the outputs of task %s have no manifest: %s", work.task_id, error)
        return made
    return ManifestBuilder(Transfer(""), work).run(made, {})


def _facts(facts: Facts) -> dict[str, Any]:
    plain = {name: getattr(facts, name) for name in ("manifest", "files", "rows", "bytes")}
    columns = [
        {"name": each.name, "type": each.type, "is_nullable": each.is_nullable}
        for each in facts.columns
    ]
    return {**plain, "columns": columns}


def _columns(output: Mapping[str, Any]) -> Sequence[Any]:
    columns: Sequence[Any] = (output.get("facts") or {}).get("columns") or ()
    return columns


def _without_columns(output: Mapping[str, Any]) -> dict[str, Any]:
    facts = output.get("facts")
    return {**output, "facts": {**facts, "columns": []}} if facts else dict(output)


def _ends_at(context: Any, clock: Clock) -> float:
    left_ms = getattr(context, "get_remaining_time_in_millis", lambda: 900_000)()
    return clock.monotonic() + float(left_ms) / 1000 - _RESERVE_SECONDS


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Have a thread raise this at its next instruction; None takes back what it has not raised."""
    thing = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), thing)
