"""A handler as it is deployed at Lambda, against a dispatcher that reads its requests by the wire.

The function lies below the dispatcher and writes its requests by hand; here every one of them has
to be what `penstock.protocol` says, and every answer is made from it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.datasets.layout import path_of
from penstock.datasets.manifest import digest
from penstock.kernel.entropy import system_entropy
from penstock.kernel.errors import DispatcherUnavailable, DoNotRetry, InvalidInput
from penstock.protocol.base import PROTOCOL, PROTOCOL_HEADER, TASK_HEADER, WORKER_HEADER
from penstock.protocol.problem import Problem
from penstock.protocol.work import (
    Assignment,
    ClaimAnswer,
    ClaimAsk,
    CompleteAsk,
    EndAsk,
    HeartbeatAsk,
    InputAnswer,
    PartAnswer,
    ResultsAnswer,
    TaskResult,
)
from penstock.runtimes.deployed import FunctionDeployment, task_handler
from penstock.runtimes.task import Stopped

UUID = "00000000-0000-0000-0000-000000000001"
Answer = tuple[int, msgspec.Struct]


@dataclass
class Dispatcher:
    """One task, and what was asked about it."""

    outputs: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)
    proofs: list[tuple[str | None, ...]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    """Of heartbeats."""
    ends: list[EndAsk] = field(default_factory=list)
    heartbeat: Answer = (200, ResultsAnswer(results=[TaskResult(task_id=7, status=200)]))
    refusal: Problem | None = None
    """The answer to an end with outputs."""
    refusals: int = 1000
    """How many of them there are."""
    beaten: threading.Event = field(default_factory=threading.Event)
    outage: int = 0
    """How many requests are answered by 503."""
    assignment: Assignment = field(init=False)

    def __post_init__(self) -> None:
        self.assignment = _assignment(self.outputs.as_uri())

    def answer(self, path: str, body: bytes, headers: Any) -> Answer:
        if self.outage:
            self.outage -= 1
            return 503, Problem(type="away", title="Not now.", status=503)
        self.asked.append(path)
        assert headers[PROTOCOL_HEADER] == str(PROTOCOL)
        match path:
            case "/internal/task-claim":
                names = (TASK_HEADER, WORKER_HEADER, "Authorization")
                self.proofs.append(tuple(headers[name] for name in names))
                assert msgspec.json.decode(body, type=ClaimAsk) == ClaimAsk(task_id=7)
                if self.asked.count(path) > 1:
                    return 409, Problem(type="running", title="It is held.", status=409)
                return 200, ClaimAnswer(tasks=[self.assignment])
            case "/v1/task/heartbeat":
                (held,) = msgspec.json.decode(body, type=HeartbeatAsk).tasks
                assert (held.task_id, held.attempt, held.lease_token) == (7, 2, "proof")
                self.tokens.append(held.token)
                if len(self.tokens) == 2:
                    self.beaten.set()
                return self.heartbeat
            case "/v1/task/complete":
                (end,) = msgspec.json.decode(body, type=CompleteAsk).tasks
                self.ends.append(end)
                is_refused = self.refusal is not None and len(self.ends) <= self.refusals
                if self.refusal is not None and is_refused and end.failure is None:
                    return self.refusal.status, self.refusal
                result = TaskResult(task_id=7, status=200, task_status="completed")
                return 200, ResultsAnswer(results=[result])
        return 404, Problem(type="unknown", title="There is no such path.", status=404)

    def invoke(self, handler: Callable[..., Any]) -> Any:
        event = {"dispatcher": self.url, "task_id": 7, "claim_token": "invoked", "payload": {}}
        # Pauses take no time.
        hasty = Mock(wraps=system_entropy(), uniform=lambda *_: 0.0)
        return task_handler(handler, FunctionDeployment(entropy=hasty))(event, Context())


@dataclass
class Context:
    left_ms: int = 60_000

    def get_remaining_time_in_millis(self) -> int:
        return self.left_ms


def _assignment(root: str) -> Assignment:
    return Assignment(
        task_id=7,
        attempt=2,
        lease_token="proof",
        lease_expires_at=datetime(2026, 1, 31, tzinfo=UTC),
        heartbeat_seconds=0.03,
        timeout_seconds=60,
        job="clean",
        operator="clean-sales",
        runtime="lambda",
        generation="first",
        definition={
            "config": {"colour": "red"},
            "outputs": [{"name": "out", "dataset": "sales"}],
            "datasets": {"sales": UUID},
        },
        payload={"partition_key": "p", "start": 1, "end": 5},
        root=root,
        folder="7-2-folder",
        token="first",
        inputs={
            "raw": InputAnswer(
                dataset="raw",
                uuid=UUID,
                generation="g",
                location="s3://b/k",
                parts=[PartAnswer(location="s3://b/k", partition_key="p", rows=3)],
            )
        },
    )


@contextmanager
def _serving(dispatcher: Dispatcher) -> Iterator[None]:
    class Serving(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, answer = dispatcher.answer(self.path, body, self.headers)
            encoded = msgspec.json.encode(answer)
            self.send_response(status)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Serving) as server:
        dispatcher.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[Dispatcher]:
    one = Dispatcher(tmp_path)
    with _serving(one):
        yield one


def test_it_claims_runs_heartbeats_and_completes(dispatcher: Dispatcher) -> None:
    events = []
    renewed = ResultsAnswer(results=[TaskResult(task_id=7, status=200, token="second")])
    dispatcher.heartbeat = (200, renewed)

    def handler(event: Any, context: Context) -> None:
        events.append(event)
        assert dispatcher.beaten.wait(30)

    assert dispatcher.invoke(handler) == {"task_id": 7, "status": "completed"}
    # The invocation's token is all that it has; then the attempt's, and the one after it.
    assert dispatcher.proofs == [("invoked", None, None)]
    assert dispatcher.tokens[:2] == ["first", "second"]
    assert dispatcher.ends[0].token == "second"
    (event,) = events
    assert (event["config"], event["attempt"]) == ({"colour": "red"}, 2)
    raw = event["inputs"]["raw"]
    assert raw["location"] == "s3://b/k"
    (part,) = raw["parts"]
    assert (part["location"], part["partition_key"], part["rows"]) == ("s3://b/k", "p", 3)
    (end,) = dispatcher.ends
    (output,) = end.outputs
    assert (output.dataset, output.partition_key, output.start, output.end) == (UUID, "p", 1, 5)
    assert output.location == event["outputs"]["out"]["location"]
    where = f"{dispatcher.outputs.as_uri()}/datasets/sales/first/p/7-2-folder"
    assert output.location == where
    assert "invoked" not in json.dumps(event)


def test_a_task_of_another_release_is_handed_back(dispatcher: Dispatcher) -> None:
    dispatcher.assignment = msgspec.structs.replace(
        dispatcher.assignment, definition={"outputs": [{"called": "out"}]}
    )
    dispatcher.invoke(lambda event, context: pytest.fail("it runs"))
    (end,) = dispatcher.ends
    assert end.release is not None
    assert end.release.reason.startswith("This function cannot read the task: KeyError: 'name'.")
    assert (end.release.is_delayed, end.token, end.attempt) == (True, "first", 2)


def test_a_doubled_invocation_runs_once(dispatcher: Dispatcher) -> None:
    runs: list[int] = []
    answers = [dispatcher.invoke(lambda *_: runs.append(1)) for _ in range(2)]
    assert [each["status"] for each in answers] == ["completed", "refused"]
    assert (len(runs), len(dispatcher.ends)) == (1, 1)


@pytest.mark.parametrize(("error", "is_retried"), [(ValueError, True), (DoNotRetry, False)])
def test_what_it_raises_is_reported(
    dispatcher: Dispatcher, error: type[Exception], is_retried: bool
) -> None:
    def handler(*_: Any) -> None:
        raise error("no")

    dispatcher.invoke(handler)
    (end,) = dispatcher.ends
    assert end.failure is not None
    assert end.failure.is_retried is is_retried
    assert "no" in end.failure.reason.splitlines()[0]
    assert end.outputs == []


@pytest.mark.parametrize(
    "heartbeat",
    [
        (409, Problem(type="stale", title="It is another's.", status=409)),
        (200, ResultsAnswer(results=[TaskResult(task_id=7, status=200, cancel_asked=True)])),
    ],
    ids=["refused", "cancelled"],
)
def test_it_is_stopped_by_its_heartbeat(dispatcher: Dispatcher, heartbeat: Answer) -> None:
    dispatcher.heartbeat = heartbeat
    stopped = []

    def handler(*_: Any) -> None:
        never = threading.Event()
        try:
            # Between instructions only can it be stopped, so it does not wait in one.
            for _attempt in range(10_000):
                never.wait(0.01)
        except Stopped:
            stopped.append(True)
            raise

    dispatcher.invoke(handler)
    assert stopped == [True]
    assert dispatcher.ends[0].failure is not None


def test_an_outage_is_waited_out(dispatcher: Dispatcher) -> None:
    dispatcher.outage = 2

    def handler(*_: Any) -> None:
        dispatcher.outage = 2

    assert dispatcher.invoke(handler)["status"] == "completed"


@pytest.mark.parametrize(
    ("kind", "status"), [("outputs", 409), ("schema", 409), ("too large", 413)]
)
def test_outputs_that_are_refused_are_a_failure_and_no_lease_that_runs_out(
    dispatcher: Dispatcher, kind: str, status: int
) -> None:
    dispatcher.refusal = Problem(type=kind, title="It may not.", status=status)
    assert dispatcher.invoke(lambda *_: None)["status"] == "completed"
    first, second = dispatcher.ends
    assert (first.failure, len(first.outputs)) == (None, 1)
    assert second.failure is not None
    assert second.failure.reason == "Its outputs were refused: It may not."
    # With the same columns, another attempt would be refused just so.
    assert second.failure.is_retried == (kind != "schema")


def test_what_it_made_is_told_with_a_manifest_and_columns_that_refuse_nothing(
    dispatcher: Dispatcher,
) -> None:
    def handler(event: Any, context: Any) -> None:
        place = path_of(event["outputs"]["out"]["location"])
        parquet.write_table(pa.table({"n": [1, 2]}), place / "x.parquet")

    dispatcher.refusal = Problem(type="schema", title="It is text.", status=409)
    dispatcher.refusals = 1
    assert dispatcher.invoke(handler)["status"] == "completed"
    first, second = (each.outputs[0].facts for each in dispatcher.ends)
    assert first is not None
    assert second is not None
    assert [(each.name, each.type) for each in first.columns] == [("n", "bigint")]
    assert (second.columns, second.rows, second.files) == ([], 2, 1)
    written = (path_of(dispatcher.ends[1].outputs[0].location) / "_manifest.json").read_bytes()
    assert second.manifest == digest(written)


def test_an_attempt_that_is_over_is_told_of_once(dispatcher: Dispatcher) -> None:
    dispatcher.refusal = Problem(type="stale", title="It is another's.", status=409)
    assert dispatcher.invoke(lambda *_: None)["status"] == "refused"
    assert len(dispatcher.ends) == 1


def test_without_time_an_outage_is_an_error(dispatcher: Dispatcher) -> None:
    dispatcher.outage = 1_000
    handler = task_handler(lambda *_: None, FunctionDeployment())
    event = {"dispatcher": dispatcher.url, "task_id": 7, "claim_token": "t"}
    with pytest.raises(DispatcherUnavailable):
        handler(event, Context(left_ms=2_100))


def test_the_event_must_say_enough(dispatcher: Dispatcher) -> None:
    handler = task_handler(lambda *_: None, FunctionDeployment.of_environment({}))
    with pytest.raises(InvalidInput, match="names a `task_id`"):
        handler({"claim_token": "t"}, Context())
    with pytest.raises(InvalidInput, match="brings a `claim_token`"):
        handler({"dispatcher": dispatcher.url, "task_id": 7}, Context())
    assert (
        FunctionDeployment.of_environment({"PENSTOCK_DISPATCHER": "http://x"}).dispatcher
        == "http://x"
    )
    assert dispatcher.asked == []


def test_a_token_that_is_not_known_says_nothing_of_the_attempt(dispatcher: Dispatcher) -> None:
    dispatcher.heartbeat = (403, Problem(type="token unknown key", title="No.", status=403))

    def handler(*_: Any) -> None:
        assert dispatcher.beaten.wait(30)

    assert dispatcher.invoke(handler)["status"] == "completed"
    assert dispatcher.tokens[:2] == ["first", "first"]
    # A failure would prove no more than what was made.
    dispatcher.asked.clear()
    dispatcher.ends.clear()
    dispatcher.refusal = Problem(type="token unknown key", title="No.", status=403)
    assert dispatcher.invoke(lambda *_: None)["status"] == "refused"
    assert {end.failure for end in dispatcher.ends} == {None}
    assert len(dispatcher.ends) > 1


def test_an_end_is_told_again_while_the_token_is_not_known(dispatcher: Dispatcher) -> None:
    result = TaskResult(task_id=7, status=200, token="second")
    dispatcher.heartbeat = (200, ResultsAnswer(results=[result]))
    dispatcher.refusal = Problem(type="token unknown key", title="No.", status=403)
    dispatcher.refusals = 3

    def handler(*_: Any) -> None:
        assert dispatcher.beaten.wait(30)

    assert dispatcher.invoke(handler)["status"] == "completed"
    # The key of the later one may be the one that is not known.
    assert [end.token for end in dispatcher.ends] == ["second", "first", "second", "first"]
