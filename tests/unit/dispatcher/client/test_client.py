"""What the client sends, what it makes of answers, and what it repeats."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock import Client
from penstock.dispatcher.client.connection import TRIES
from penstock.kernel.errors import (
    DispatcherRefused,
    DispatcherUnavailable,
    InvalidInput,
    PenstockError,
)
from penstock.protocol.client import DispatcherRequest
from penstock.protocol.dags import AppliedAnswer, BreakAnswer, DagProblem
from penstock.protocol.events import EventResult
from penstock.protocol.problem import DagError
from penstock.protocol.steering import (
    BackfillsAnswer,
    DatasetsAnswer,
    JobPausesAnswer,
    OperatorLimitAnswer,
    OutboxRetryAnswer,
    PartitionsAnswer,
    PressuresAnswer,
    TasksAnswer,
    TriggerAnswer,
)
from penstock.protocol.work import ResultsAnswer, TaskResult
from penstock.store.s3.connection import Response
from penstock.testing import World, simulate
from tests.unit.dispatcher.client.scripted import (
    Reply,
    Scripted,
    Step,
    backfill,
    problem,
    status,
    task,
)

URL = "http://dispatcher.test"
STATUS = "GET /v1/status"
APPLIED = AppliedAnswer(version=3, hash="h", is_changed=True, building=[], cancelled=0)
TRIGGERED = TriggerAnswer(event_id="e", results=[EventResult(outcome="new", seq=1)])
TEXT = "jobs:\n  x: y\n"

Call = Callable[[Client], Awaitable[object]]


def ask(scripted: Scripted, call: Call, *, token: str | None = None) -> Any:
    """One call, with the real loop."""

    async def main() -> object:
        async with Client(URL, token, transport=scripted.transport) as client:
            return await call(client)

    return asyncio.run(main())


def ask_slowly(scripted: Scripted, call: Call) -> tuple[Any, float]:
    """One call in virtual time: its answer or error, and how long it took."""

    async def main(world: World) -> tuple[Any, float]:
        began = world.now()
        client = Client(
            URL,
            clock=world.clock(),
            entropy=world.entropy("client"),
            transport=scripted.transport,
        )
        async with client:
            try:
                found: object = await call(client)
            except PenstockError as error:
                found = error
        return found, world.now() - began

    return simulate(main, seed=1)


REQUESTS: list[tuple[str, Call, str, Any, Step]] = [
    ("GET /v1/dag/versions", lambda c: c.versions(), "", None, Reply(b'{"versions":[]}')),
    ("POST /v1/dag/rollback", lambda c: c.rollback(), "", {}, APPLIED),
    ("POST /v1/dag/rollback", lambda c: c.rollback(2), "", {"version": 2}, APPLIED),
    (
        "POST /v1/trigger",
        lambda c: c.trigger("ingest", partition_key="p", event_id="e"),
        "",
        {"job": "ingest", "partition_key": "p", "event_id": "e"},
        TRIGGERED,
    ),
    (
        "POST /v1/trigger",
        lambda c: c.trigger("ingest", event_id="e", payload={"id": [1, None]}),
        "",
        {"job": "ingest", "event_id": "e", "payload": {"id": [1, None]}},
        TRIGGERED,
    ),
    (
        "POST /v1/backfills",
        lambda c: c.backfill("totals", keys=("a", "b"), request_id="r", concurrency=5),
        "",
        {"job": "totals", "keys": ["a", "b"], "concurrency": 5, "request_id": "r"},
        backfill(),
    ),
    (
        "POST /v1/backfills",
        lambda c: c.backfill("totals", start=0, end=10, step=5, request_id="r"),
        "",
        {"job": "totals", "start": 0, "end": 10, "step": 5, "request_id": "r"},
        backfill(),
    ),
    (
        "GET /v1/backfills",
        lambda c: c.backfills(limit=3),
        "limit=3",
        None,
        BackfillsAnswer(backfills=[]),
    ),
    ("GET /v1/backfills/7", lambda c: c.find_backfill(7), "", None, backfill()),
    ("POST /v1/backfills/7/pause", lambda c: c.pause_backfill(7), "", None, backfill()),
    ("POST /v1/backfills/7/resume", lambda c: c.resume_backfill(7), "", None, backfill()),
    ("POST /v1/backfills/7/cancel", lambda c: c.cancel_backfill(7), "", None, backfill()),
    (
        "GET /v1/tasks",
        lambda c: c.tasks(job="clean", status="dead", limit=5, before=9),
        "job=clean&status=dead&limit=5&before=9",
        None,
        TasksAnswer(tasks=[], before=None),
    ),
    ("GET /v1/tasks", lambda c: c.tasks(), "", None, TasksAnswer(tasks=[], before=None)),
    ("GET /v1/tasks/42", lambda c: c.task(42), "", None, task()),
    (STATUS, lambda c: c.status(), "", None, status()),
    ("GET /v1/pressure", lambda c: c.pressure(), "", None, PressuresAnswer(jobs=[], pauses=[])),
    (
        "POST /v1/jobs/clean/pause",
        lambda c: c.pause("clean", reason="r"),
        "",
        {"reason": "r"},
        JobPausesAnswer(job="clean", pauses=[]),
    ),
    (
        "POST /v1/jobs/clean/resume",
        lambda c: c.resume("clean"),
        "",
        None,
        JobPausesAnswer(job="clean", pauses=[]),
    ),
    (
        "PUT /v1/operators/mine:clean",
        lambda c: c.limit_operator("mine:clean", 4),
        "",
        {"in_flight_max": 4},
        OperatorLimitAnswer(name="mine:clean", in_flight_max=4),
    ),
    (
        "POST /v1/outbox/retry",
        lambda c: c.retry_outbox([1, 2]),
        "",
        {"ids": [1, 2]},
        OutboxRetryAnswer(retried=2),
    ),
    ("GET /v1/datasets", lambda c: c.datasets(), "", None, DatasetsAnswer(datasets=[])),
    (
        "GET /v1/datasets/sales/partitions",
        lambda c: c.partitions("sales", after="a b&c", limit=2),
        "after=a+b%26c&limit=2",
        None,
        PartitionsAnswer(generation="g", partitions=[], after=None),
    ),
]


@pytest.mark.parametrize(("request_", "call", "query", "body", "answer"), REQUESTS)
def test_every_method_is_one_request(
    request_: str, call: Call, query: str, body: Any, answer: Step
) -> None:
    scripted = Scripted().on(request_, answer)
    found = ask(scripted, call, token="secret")
    (heard,) = scripted.heard
    assert f"{heard.method} {heard.path}" == request_
    assert (heard.query, heard.body) == (query, body)
    assert heard.headers["authorization"] == "Bearer secret"
    if not isinstance(answer, Reply):
        assert found == answer


def test_without_a_token_none_is_sent() -> None:
    scripted = Scripted().on(STATUS, status())
    ask(scripted, lambda c: c.status())
    assert "authorization" not in scripted.heard[0].headers


@pytest.mark.parametrize("is_named", [True, False])
def test_a_dag_is_a_file_or_a_text(is_named: bool, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    scripted = Scripted().on("POST /v1/dag", APPLIED)
    where = "called so" if is_named else None
    assert ask(scripted, lambda c: c.apply(file, where=where)) == APPLIED
    assert ask(scripted, lambda c: c.apply(str(file), where=where)) == APPLIED
    ask(scripted, lambda c: c.apply(TEXT, force=True))
    named = "called so" if is_named else str(file)
    assert [each.body for each in scripted.heard] == [
        {"source": TEXT, "where": named},
        {"source": TEXT, "where": named},
        {"source": TEXT, "where": "dag.yaml", "force": True},
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.yaml", "There is no file 'missing.yaml'."),
        (".", "'.' is a folder; name a file in it."),
        ("a\0b", "is not the name of a file."),
    ],
)
def test_a_file_that_is_not_there_is_one_sentence_and_no_request(name: str, said: str) -> None:
    scripted = Scripted()
    with pytest.raises(InvalidInput, match=said):
        ask(scripted, lambda c: c.apply(name))
    assert scripted.heard == []


def test_what_is_wrong_with_a_dag_comes_with_its_lines() -> None:
    wrong = [
        DagProblem(line=9, field="jobs.x", message="No."),
        DagProblem(line=2, field="", message="Bad."),
    ]
    scripted = Scripted().on("POST /v1/dag", problem(422, type="dag", problems=wrong))
    with pytest.raises(DagError) as caught:
        ask(scripted, lambda c: c.apply(TEXT))
    assert str(caught.value) == (
        "dag.yaml has 2 problems:\n  dag.yaml:2: Bad.\n  dag.yaml:9: jobs.x: No."
    )


def test_what_a_dag_would_break_is_listed_with_the_way_to_do_it_all_the_same() -> None:
    broken = BreakAnswer(job="clean", generation="g", waiting=1200, running=3, backfills=1)
    refused = problem(409, title="It would break work.", type="breaks", breaks=[broken])
    with pytest.raises(DispatcherRefused) as caught:
        ask(Scripted().on("POST /v1/dag", refused), lambda c: c.apply(TEXT))
    assert (caught.value.status, caught.value.kind) == (409, "breaks")
    assert caught.value.message == (
        "It would break work.\n  clean: 1,200 waiting, 3 running, 1 backfill"
    )
    assert "--force" in caught.value.hint


@pytest.mark.parametrize(
    ("answer", "said", "hint"),
    [
        (problem(404, title="There is no task 42."), "There is no task 42.", ""),
        (problem(409, title="No.", detail="Do that."), "No.", "Do that."),
        (problem(401, title="Who are you?"), "Who are you?", "PENSTOCK_API_TOKEN"),
        (problem(422, title="Too long", field="keys[3]"), r"Too long \(in keys\[3\]\)", ""),
        (problem(422, title="`keys[3]` is long", field="keys[3]"), "`keys.3.` is long$", ""),
        (
            Reply(b"<html>", 404),
            "answered 404 Not Found, which is not an answer of a dispatcher",
            "public",
        ),
        (Reply(b"", 302, {"Location": "/login"}), "answered 302 Found", "public"),
        (Reply(b"", 499), "answered 499, which is not an answer of a dispatcher", "public"),
        (Reply(b"<html>"), "cannot be decoded by this release", "release"),
        (Reply(b'{"task": {}}'), "cannot be decoded by this release", "release"),
        (Reply(b"[" * 100_000), "cannot be decoded by this release", "release"),
    ],
)
def test_a_refusal_is_the_dispatchers_own_sentence(answer: Reply, said: str, hint: str) -> None:
    scripted = Scripted().on("GET /v1/tasks/42", answer)
    with pytest.raises(DispatcherRefused, match=said) as caught:
        ask(scripted, lambda c: c.task(42))
    assert hint in caught.value.hint
    assert caught.value.status == answer.status
    assert len(scripted.heard) == 1


def test_where_nobody_listens_is_said_at_once() -> None:
    scripted = Scripted().on(STATUS, httpx.ConnectError("refused"))
    found, seconds = ask_slowly(scripted, lambda c: c.status())
    assert isinstance(found, DispatcherUnavailable)
    assert found.message == f"No dispatcher answers at {URL}."
    assert "penstock up" in found.hint
    assert (len(scripted.heard), seconds) == (1, 0)


def test_a_certificate_that_is_not_trusted_is_named() -> None:
    scripted = Scripted().on(STATUS, httpx.ConnectError("certificate verify failed"))

    async def main() -> None:
        async with Client("https://x", transport=scripted.transport) as client:
            await client.status()

    with pytest.raises(DispatcherUnavailable, match="at https://x: certificate verify failed"):
        asyncio.run(main())


LOST: list[Step] = [
    httpx.ReadError("reset"),
    httpx.RemoteProtocolError("gone"),
    problem(503, title="The database does not answer."),
    Reply(b"Bad Gateway", 502),
]


@pytest.mark.parametrize("lost", LOST)
def test_a_lost_answer_is_asked_for_again_as_the_same_request(lost: Step) -> None:
    scripted = Scripted().on("POST /v1/trigger", lost, lost, TRIGGERED)
    found, seconds = ask_slowly(scripted, lambda c: c.trigger("ingest"))
    assert found == TRIGGERED
    assert len(scripted.heard) == 3
    assert len({each.body["event_id"] for each in scripted.heard}) == 1
    assert 0.5 < seconds < 2


@pytest.mark.parametrize("lost", LOST)
def test_it_is_not_asked_for_ever(lost: Step) -> None:
    scripted = Scripted().on(STATUS, lost)
    found, _ = ask_slowly(scripted, lambda c: c.status())
    assert isinstance(found, DispatcherUnavailable)
    assert found.hint
    assert len(scripted.heard) == TRIES


def test_the_dispatcher_says_when_to_come_again() -> None:
    later = problem(503, headers={"Retry-After": "3"})
    found, seconds = ask_slowly(Scripted().on(STATUS, later, status()), lambda c: c.status())
    assert found == status()
    assert 3 <= seconds <= 5


@pytest.mark.parametrize("call", [lambda c: c.rollback(), lambda c: c.replay([1])])
def test_what_twice_is_not_once_is_not_repeated(call: Call) -> None:
    scripted = Scripted()
    for path in ("dag/rollback", "tasks/replay"):
        scripted.on(f"POST /v1/{path}", httpx.ReadError("reset"))
    found, _ = ask_slowly(scripted, call)
    assert isinstance(found, DispatcherUnavailable)
    assert "The request may have succeeded" in found.hint
    assert len(scripted.heard) == 1


def test_a_mistake_of_the_dispatcher_is_not_repeated() -> None:
    scripted = Scripted().on(STATUS, Reply(b"Internal Server Error", 500))
    with pytest.raises(DispatcherUnavailable, match="it answered 500 Internal Server Error"):
        ask(scripted, lambda c: c.status())
    assert len(scripted.heard) == 1


def test_a_dispatcher_that_never_answers_is_given_up() -> None:
    class Silent:
        async def send(self, request: DispatcherRequest) -> Response:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            pass

    async def main(world: World) -> tuple[str, float]:
        client = Client(URL, clock=world.clock(), transport=Silent())
        began = world.now()
        async with client:
            # Something else has to be going on: a world in which all wait is at its end.
            with pytest.raises(DispatcherUnavailable) as caught:
                await client.status()
        return caught.value.message, world.now() - began

    said, seconds = simulate(main, seed=1)
    assert "timed out after 60 s" in said
    assert seconds == pytest.approx(60)


def _result(number: int, code: int = 200) -> TaskResult:
    return TaskResult(task_id=number, status=code, detail="" if code == 200 else "Is over.")


@pytest.mark.parametrize(
    ("results", "code"),
    [([_result(1)], 200), ([_result(1), _result(2, 409)], 207)],
)
def test_tasks_are_answered_one_by_one(results: list[TaskResult], code: int) -> None:
    body = msgspec.json.encode(ResultsAnswer(results=results))
    scripted = Scripted().on("POST /v1/tasks/cancel", Reply(body, code))
    assert ask(scripted, lambda c: c.cancel([1, 2], reason="r")).results == results
    assert scripted.heard[0].body == {"tasks": [1, 2], "reason": "r"}


def test_tasks_that_were_all_refused_are_an_answer_too() -> None:
    refused = problem(409, results=[_result(1, 409), _result(2, 409)])
    scripted = Scripted().on("POST /v1/tasks/replay", refused)
    answer = ask(scripted, lambda c: c.replay([1, 2]))
    assert [each.status for each in answer.results] == [409, 409]


def test_a_request_about_tasks_that_is_refused_as_such_is_an_error() -> None:
    with pytest.raises(DispatcherRefused, match=r"Who are you\?"):
        ask(
            Scripted().on("POST /v1/tasks/cancel", problem(401, title="Who are you?")),
            lambda c: c.cancel([1]),
        )


def test_more_tasks_than_fit_are_several_requests() -> None:
    scripted = Scripted().on(
        "POST /v1/tasks/cancel",
        ResultsAnswer(results=[_result(1)]),
        ResultsAnswer(results=[_result(2)]),
    )
    answer = ask(scripted, lambda c: c.cancel(range(1, 1502)))
    assert [len(each.body["tasks"]) for each in scripted.heard] == [1000, 501]
    assert [each.task_id for each in answer.results] == [1, 2]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "dispatcher",
        "ftp://x",
        "http://",
        "http://a b",
        "http://x?y=z",
        "http://[",
        "http://x#y",
    ],
)
def test_a_bad_url_is_one_sentence(url: str) -> None:
    async def main() -> None:
        async with Client(url):
            pass

    with pytest.raises(InvalidInput, match="is not the URL of a dispatcher"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "token", "said"),
    [
        ("http://me:hunter2@x", None, "Credentials do not go into the URL"),
        ("http://x", "hunter2\n", "A token has printable ASCII"),
        ("http://x", "hünter2", "A token has printable ASCII"),
        ("http://x", "", "A token has printable ASCII"),
    ],
)
def test_secrets_are_not_repeated(url: str, token: str | None, said: str) -> None:
    async def main() -> None:
        async with Client(url, token):
            pass

    with pytest.raises(InvalidInput, match=said) as caught:
        asyncio.run(main())
    assert "nter2" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.pause("a/b"),
        lambda c: c.resume(".."),
        lambda c: c.partitions("x?y"),
        lambda c: c.limit_operator("a b", 1),
        lambda c: c.trigger("\udcff"),
        lambda c: c.trigger("ingest", payload={"a": object()}),
        lambda c: c.trigger("ingest", payload={"a": "x" * 70_000}),
        lambda c: c.tasks(job="\udcff"),
        lambda c: c.wait(task=1, backfill=1),
        lambda c: c.wait(timeout_seconds=float("nan")),
    ],
)
def test_words_that_cannot_be_right_are_never_sent(call: Call) -> None:
    scripted = Scripted()
    with pytest.raises(InvalidInput):
        ask(scripted, call)
    assert scripted.heard == []


def test_a_client_that_is_not_open_says_how_to_open_it() -> None:
    with pytest.raises(InvalidInput, match="The client is not open") as caught:
        asyncio.run(Client(URL).status())
    assert "async with" in caught.value.hint


def test_a_path_in_front_is_kept() -> None:
    scripted = Scripted().on("GET /penstock/v1/status", status())

    async def main() -> None:
        async with Client(f"{URL}/penstock/", transport=scripted.transport) as client:
            await client.status()

    asyncio.run(main())
    assert scripted.heard[0].path == "/penstock/v1/status"


def test_the_time_is_the_dispatchers() -> None:
    said = Reply(msgspec.json.encode(status()), 200, {"Date": "Tue, 01 Jan 2030 00:00:00 GMT"})

    async def main(world: World) -> tuple[float, float]:
        clock = world.clock()
        async with Client(
            URL, clock=clock, transport=Scripted().on(STATUS, said).transport
        ) as client:
            before = client.now() - clock.wall()
            await client.status()
            await clock.sleep(5)
            return before, client.now()

    assert simulate(main, seed=1) == (0, 1_893_456_005)


_WITHOUT_HTTPX = """
import sys
sys.modules["httpx"] = None
import asyncio
from penstock import Client
from penstock.kernel.errors import DispatcherUnavailable
async def main():
    async with Client("http://127.0.0.1:1") as client:
        await client.status()
try:
    asyncio.run(main())
except DispatcherUnavailable as error:
    print(error.message, error.hint)
"""


def test_it_needs_no_package_besides_those_of_penstock_itself() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HTTPX],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "No dispatcher answers at http://127.0.0.1:1." in ran.stdout
