"""A dispatcher in memory, behind the same HTTP as the real one, that a test can take down.

It keeps the rules that a worker counts on: attempts are fenced, a lease that has run out is its
holder's until somebody ends the attempt, and the same end told twice gets the same answer. Its time
is the virtual loop's. `calls` has every request that reached it, also those whose answer was lost.

Every attempt has a capability token, and every heartbeat brings the next. It knows all that it has
given to an attempt, and none of others; events and credentials want one that is not `expired`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec

from penstock.datasets.layout import attempt_name
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER, Answer
from penstock.protocol.events import EventResult, EventsAnswer, SourcesAnswer, TaskEventsAsk
from penstock.protocol.problem import Problem
from penstock.protocol.work import (
    Assignment,
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    CredentialsAnswer,
    CredentialsAsk,
    EndAsk,
    HeartbeatAsk,
    HelloAnswer,
    HelloAsk,
    InputAnswer,
    OperatorAnswer,
    PartAnswer,
    ResultsAnswer,
    TaskResult,
)

URL = "http://dispatcher"
DATASET = "11111111-1111-1111-1111-111111111111"
GENERATION = "22222222-2222-2222-2222-222222222222"
EPOCH = datetime(2025, 1, 1, tzinfo=UTC)

Message = MutableMapping[str, Any]


@dataclass
class Task:
    id: int
    job: str = "clean"
    operator: str = "a:clean"
    runtime: str = "process"
    payload: dict[str, Any] = field(default_factory=dict)
    definition: dict[str, Any] = field(
        default_factory=lambda: {
            "outputs": [{"name": "out", "dataset": "cleaned"}],
            "datasets": {"cleaned": DATASET},
        }
    )
    timeout_seconds: float = 3600.0
    heartbeat_seconds: float = 30.0
    status: str = "queued"
    attempt: int = 0
    claims: int = 0
    lease_ends_at: float = 0.0
    cancel_asked: bool = False
    ended: list[EndAsk] = field(default_factory=list)
    """The ends that were taken: never more than one an attempt."""
    progress: list[dict[str, Any]] = field(default_factory=list)
    bad_outputs: bool = False
    bad_schema: bool | str = False
    bad_columns: bool = False
    """Whether its schema is refused as long as it tells columns."""
    current: dict[str, list[PartAnswer]] | None = None
    """What is published of its partition, if its job merges."""
    moves: list[dict[str, list[PartAnswer]] | None] = field(default_factory=list)
    """What its ends are refused with, one after the other."""
    claim_id: str | None = None
    """Of the claim that has begun the running attempt, until it is acknowledged."""
    was_lost: bool = False
    """Whether an attempt of it was taken back uncounted."""
    batch: str = ""
    """Claimed together with those of the same batch, as one."""
    mints: bool = False
    inputs: dict[str, InputAnswer] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    """Those of the running attempt, the newest last."""

    def signed(self) -> str:
        """One more token."""
        self.tokens.append(f"cap.{self.id}.{self.attempt}-{len(self.tokens)}")
        return self.tokens[-1]

    @property
    def reason(self) -> str:
        end = self.ended[-1].failure or self.ended[-1].release
        return "" if end is None else end.reason


class _UnspeakableTask(Exception):
    """A task that no answer can assign."""


@dataclass
class Dispatcher:
    """The app, what it knows, and what goes wrong with it."""

    tasks: dict[int, Task] = field(default_factory=dict)
    operators: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    is_down: bool = False
    is_hanging: bool = False
    hanging: set[str] = field(default_factory=set)
    """Paths whose calls are not answered, nor carried out."""
    answers_lost: Counter[str] = field(default_factory=Counter)
    """How many answers of a path are lost: the call was carried out."""
    problems: dict[str, Problem] = field(default_factory=dict)
    """What a path answers instead."""
    problems_once: dict[str, Problem] = field(default_factory=dict)
    latency_seconds: float = 0.005
    answer_latency_seconds: dict[str, float] = field(default_factory=dict)
    """How long answers of a path are under way, after the call was carried out."""
    paused: str = ""
    is_signing: bool = True
    """Whether heartbeats bring tokens."""
    expired: set[str] = field(default_factory=set)
    unknown_tokens: int = 0
    """How many tokens are taken for strangers'."""
    strange_ends: set[str] = field(default_factory=set)
    """Tokens that are taken for strangers' where attempts end."""
    strangers: set[str] = field(default_factory=set)
    """Tokens that are taken for strangers' everywhere."""
    minted: int = 0
    folders_max: int | None = None
    """For how many folders credentials are minted at a time; None for any number."""
    granted: dict[str, list[str]] = field(default_factory=dict)
    """What tokens grant to `read` and to `write`."""
    acknowledge_seconds: float = 0.0
    """How long leases of claims with an id are until they are acknowledged; 0 for as ever."""
    is_claiming_with_ends: bool = False
    """Whether calls that end attempts claim what the worker has room for."""
    unspeakable: set[int] = field(default_factory=set)
    """Tasks that no answer can assign: the call is carried out, and fails then."""
    in_calls: Counter[str] = field(default_factory=Counter)
    most_in_calls: Counter[str] = field(default_factory=Counter)

    def add(self, **fields: Any) -> Task:
        """One more task that waits."""
        task = Task(len(self.tasks) + 1, **fields)
        self.tasks[task.id] = task
        self.operators.setdefault(task.operator, task.runtime)
        return task

    def paths(self) -> Counter[str]:
        return Counter(path for path, _ in self.calls)

    def reap(self) -> None:
        """End the attempts whose leases are over."""
        for task in self.tasks.values():
            if task.status == "running" and task.lease_ends_at <= now():
                task.status = "queued" if task.claim_id else "retrying"

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        path, body = scope["path"], (await receive()).get("body", b"")
        self.headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        if self.is_down:
            raise httpx.ConnectError("nobody is there")
        if self.is_hanging or path in self.hanging:
            await asyncio.Event().wait()
        self.in_calls[path] += 1
        self.most_in_calls[path] = max(self.most_in_calls[path], self.in_calls[path])
        try:
            await _pause(self.latency_seconds)
            if self.is_down:
                raise httpx.ReadError("it went away")
            status, answer = self._answer(path, body)
            await _pause(self.answer_latency_seconds.get(path, 0.0))
        finally:
            self.in_calls[path] -= 1
        if self.answers_lost[path] > 0:
            self.answers_lost[path] -= 1
            raise httpx.ReadError("the answer is lost")
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": msgspec.json.encode(answer)})

    def _answer(self, path: str, body: bytes) -> tuple[int, Answer]:
        asks: dict[str, tuple[Any, Callable[[Any], tuple[int, Answer]]]] = {
            "/internal/hello": (HelloAsk, self._hello),
            "/internal/task-claim": (ClaimAsk, self._claim),
            "/v1/task/heartbeat": (HeartbeatAsk, self._heartbeat),
            "/v1/task/complete": (CompleteAsk, self._complete),
            "/v1/task/events": (TaskEventsAsk, self._events),
            "/v1/task/credentials": (CredentialsAsk, self._credentials),
        }
        if path == "/internal/sources":
            self.calls.append((path, None))
            return 200, SourcesAnswer(sources=[], now=at(0))
        kind, handler = asks[path]
        ask = msgspec.json.decode(body or b"{}", type=kind)
        self.calls.append((path, ask))
        if path in self.problems_once:
            problem = self.problems_once.pop(path)
            return problem.status, problem
        if path in self.problems:
            return self.problems[path].status, self.problems[path]
        try:
            return handler(ask)
        except _UnspeakableTask:
            return 500, Problem(type="internal", title="It failed.", status=500)

    def _hello(self, ask: HelloAsk) -> tuple[int, Answer]:
        served = [
            OperatorAnswer(name=name, runtime=runtime)
            for name, runtime in self.operators.items()
            if runtime in ask.runtimes
        ]
        return 200, HelloAnswer(operators=served, now=at(0))

    def _claim(self, ask: ClaimAsk) -> tuple[int, Answer]:
        if again := self._claimed_by(ask.claim_id):
            return 200, ClaimAnswer(tasks=[self._assigned(task) for task in again])
        waiting = [
            task
            for task in self.tasks.values()
            if task.operator == ask.operator and task.status in {"queued", "retrying"}
        ]
        places = list(dict.fromkeys(task.batch or str(task.id) for task in waiting))[: ask.limit]
        taken = [task for task in waiting if (task.batch or str(task.id)) in places]
        return 200, ClaimAnswer(tasks=[self._begun(task, ask.claim_id) for task in taken])

    def _claimed_by(self, claim_id: str | None) -> list[Task]:
        """What a claim has begun that nobody has acknowledged."""
        return [
            task
            for task in self.tasks.values()
            if task.status == "running" and claim_id and task.claim_id == claim_id
        ]

    def _begun(self, task: Task, claim_id: str | None = None) -> Assignment:
        task.status = "running"
        task.attempt += 1
        task.claims += 1
        task.claim_id = claim_id if self.acknowledge_seconds else None
        lease_seconds = self.acknowledge_seconds if task.claim_id else task.heartbeat_seconds
        task.lease_ends_at = now() + lease_seconds
        task.tokens.clear()
        return self._assigned(task)

    def _assigned(self, task: Task) -> Assignment:
        if task.id in self.unspeakable:
            raise _UnspeakableTask
        return Assignment(
            task_id=task.id,
            attempt=task.attempt,
            lease_token=f"token {task.id} {task.claims}",
            lease_expires_at=at(task.heartbeat_seconds),
            heartbeat_seconds=task.heartbeat_seconds,
            acknowledge_seconds=self.acknowledge_seconds,
            was_lost=task.was_lost,
            timeout_seconds=task.timeout_seconds,
            job=task.job,
            operator=task.operator,
            runtime=task.runtime,
            generation=GENERATION,
            definition=task.definition,
            payload=task.payload,
            batch=task.batch,
            root="file:///data",
            folder=attempt_name(task_id=task.id, attempt=task.attempt, lease_token="scripted"),
            token=task.signed(),
            mints=task.mints,
            inputs=task.inputs,
            current=task.current,
        )

    def _heartbeat(self, ask: HeartbeatAsk) -> tuple[int, Answer]:
        results = []
        for each in ask.tasks:
            task = self.tasks[each.task_id]
            if self._is_strange(each.token, each.task_id, each.attempt):
                results.append(_unproved(each.task_id))
                continue
            if not self._is_held(task, each.attempt, each.lease_token):
                results.append(TaskResult(task_id=each.task_id, status=409, why="stale"))
                continue
            task.lease_ends_at = now() + task.heartbeat_seconds
            task.claim_id = None
            if each.progress is not None:
                task.progress.append(each.progress)
            results.append(
                TaskResult(
                    task_id=each.task_id,
                    status=200,
                    cancel_asked=task.cancel_asked,
                    token=task.signed() if self.is_signing else "",
                )
            )
        return _several(results)

    def _complete(self, ask: CompleteAsk) -> tuple[int, Answer]:
        assert len({each.task_id for each in ask.tasks}) == len(ask.tasks), "a task twice"
        status, answer = _several([self._end(each) for each in ask.tasks])
        if self.is_claiming_with_ends and isinstance(answer, ResultsAnswer):
            if again := self._claimed_by(ask.claim_id):
                answer.claimed_of = again[0].operator
                answer.claimed = [self._assigned(task) for task in again]
                return status, answer
            for each in [each for each in ask.next if each.is_wanted][:1]:
                claim = ClaimAsk(operator=each.operator, limit=each.limit, claim_id=ask.claim_id)
                claimed = self._claim(claim)[1]
                assert isinstance(claimed, ClaimAnswer)
                answer.claimed_of, answer.claimed = each.operator, claimed.tasks
        return status, answer

    def _end(self, ask: EndAsk) -> TaskResult:
        task = self.tasks[ask.task_id]
        is_strange = self._is_strange(ask.token, ask.task_id, ask.attempt)
        if is_strange or ask.token in self.strange_ends:
            return _unproved(task.id)
        if ask in task.ended:
            return TaskResult(task_id=task.id, status=200, task_status=task.status)
        if not self._is_held(task, ask.attempt, ask.lease_token):
            return TaskResult(task_id=task.id, status=409, why="stale")
        is_success = ask.failure is None and ask.release is None
        if task.bad_outputs and is_success:
            told = "Dataset x has the same output twice."
            return TaskResult(task_id=task.id, status=409, why="outputs", detail=told)
        has_columns = any(each.facts and each.facts.columns for each in ask.outputs)
        if (task.bad_schema or (task.bad_columns and has_columns)) and is_success:
            told = "The column 'delay' is string here, and bigint in what is published."
            why = task.bad_schema if isinstance(task.bad_schema, str) else "schema"
            return TaskResult(task_id=task.id, status=409, why=why, detail=told)
        if task.moves and is_success:
            current = task.moves.pop(0)
            return TaskResult(task_id=task.id, status=409, why="moved", current=current)
        task.ended.append(ask)
        if task.cancel_asked:
            task.status = "cancelled"
        elif ask.release is not None:
            task.status = "released"
        elif ask.failure is None:
            task.status = "completed"
        else:
            task.status = "failed" if ask.failure.is_retried else "dead"
        return TaskResult(task_id=task.id, status=200, task_status=task.status)

    def _events(self, ask: TaskEventsAsk) -> tuple[int, Answer]:
        task = self.tasks[ask.task_id]
        if (problem := self._header_problem()) is not None:
            return problem.status, problem
        if not self._is_held(task, ask.attempt, ask.lease_token):
            return 409, Problem(type="stale", title="The attempt is not current.", status=409)
        results = [EventResult(outcome="new", paused=self.paused or None) for _ in ask.events]
        return 200, EventsAnswer(results=results)

    def _credentials(self, ask: CredentialsAsk) -> tuple[int, Answer]:
        if (problem := self._header_problem()) is not None:
            return problem.status, problem
        read = self.granted.get("read", []) if ask.read is None else ask.read
        write = self.granted.get("write", []) if ask.write is None else ask.write
        if self.folders_max is not None and len(read) + len(write) > self.folders_max:
            return 409, Problem(type="too many folders", title="There are too many.", status=409)
        self.minted += 1
        return 200, CredentialsAnswer(
            access_key=f"key-{self.minted}",
            secret_key=f"secret-{self.minted}",
            session_token=f"session-{self.minted}",
            expires_at=at(900),
            region="eu-west-1",
            read=read,
            write=write,
            endpoint="http://store",
        )

    def _header_problem(self) -> Problem | None:
        token = self.headers.get(TASK_HEADER.lower(), "")
        number = int(token.split(".")[1]) if token else 0
        is_known = number in self.tasks and token in self.tasks[number].tokens
        if is_known and token not in self.expired:
            return None
        return Problem(type="token expired", title="The token has expired.", status=403)

    def _is_strange(self, token: str | None, task_id: int, attempt: int) -> bool:
        if self.unknown_tokens > 0:
            self.unknown_tokens -= 1
            return True
        if token in self.strangers:
            return True
        return not (token or "").startswith(f"cap.{task_id}.{attempt}-")

    def _is_held(self, task: Task, attempt: int, token: str) -> bool:
        current = (task.status, task.attempt, f"token {task.id} {task.claims}")
        return current == ("running", attempt, token)

    def worker(self) -> str:
        """Who called last."""
        return self.headers[WORKER_HEADER.lower()]


def _several(results: list[TaskResult]) -> tuple[int, Answer]:
    """As the API has it: a single one that is refused is a problem, with its result."""
    statuses = {each.status for each in results}
    status = statuses.pop() if len(statuses) == 1 else 207
    if len(results) == 1 and status >= 400:
        told = Problem(type=results[0].why, title="No.", status=status, results=results)
        return status, told
    return status, ResultsAnswer(results=results)


def _unproved(task_id: int) -> TaskResult:
    told = "The token is not one of this task."
    return TaskResult(task_id=task_id, status=403, why="token another attempt", detail=told)


async def _pause(seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


def now() -> float:
    return asyncio.get_running_loop().time()


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=now() + seconds)
