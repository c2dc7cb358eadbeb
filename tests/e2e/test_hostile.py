"""A hostile job tries all that it should not be able to do: each try fails, and is noted.

`tests.e2e.hostile_story` says what happens, once for all of these tests. What the dispatcher has
refused has to be in the audit, with whom it was, and as often; what S3 or the machine's kernel
refuses is theirs to note. Only a job that is untrusted is tried against the machine: see
docs/security.md for what is not defended.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.kernel.errors import PenstockError
from penstock.settings import Wakeups
from penstock.store.s3.local import LocalS3
from tests.conftest import Background
from tests.e2e.hostile_stage import API_TOKEN
from tests.e2e.hostile_story import Story, play
from tests.integration.aws_server import AwsServer
from tests.unit.runtimes import test_untrusted

pytestmark = pytest.mark.timeout(300)

JOBS: Final = {"hostile": "hostile h-tries", "rogue": "rogue r-tries"}
"""The jobs that try everything, and their tasks."""
CREDENTIALS, EVENTS = "POST /v1/task/credentials", "POST /v1/task/events"
QUERY, BEGIN = "POST /v1/task/query", "POST /internal/query/begin"
HEARTBEAT, COMPLETE = "POST /v1/task/heartbeat", "POST /v1/task/complete"
PUBLISH: Final = "POST /v1/task/buffer-publish"
OUTSIDE: Final = "outside of its grants"


@dataclass(frozen=True)
class Refused:
    """How a call is answered, and how that is noted."""

    status: int
    kind: str
    what: str
    reason: str
    is_proved: bool = False
    """Whether it is known whose call it was."""
    is_noted: bool = True


def by_token(status: int, kind: str, what: str, *, is_proved: bool = False) -> Refused:
    return Refused(status, f"token {kind}", what, kind, is_proved)


def by_fence(kind: str, what: str, reason: str = "") -> Refused:
    return Refused(409, kind, what, reason or kind, is_proved=True)


def _forged() -> Iterator[tuple[str, Refused]]:
    kinds = {
        "no token": (401, "missing"),
        "tampered": (403, "bad signature"),
        "for another task": (403, "bad signature"),
        "alg none": (403, "malformed"),
        "alg none, signed": (403, "malformed"),
        "by the public key": (403, "malformed"),
        "by its own key": (403, "bad signature"),
        "by a key of a made-up name": (403, "unknown key"),
        "truncated": (403, "bad signature"),
    }
    whats = {
        "credentials": CREDENTIALS,
        "events": EVENTS,
        "heartbeat": HEARTBEAT,
        "complete": COMPLETE,
        "query": QUERY,
        "publish": PUBLISH,
    }
    for name, (status, kind) in kinds.items():
        for call, what in whats.items():
            yield f"{call}, {name}", by_token(status, kind, what)


def _fenced() -> Iterator[tuple[str, Refused]]:
    for name in ("to read everything", "to write everything", "to write the victim's"):
        yield (
            f"credentials, {name}",
            by_token(403, "not granted", CREDENTIALS, is_proved=True),
        )
    yield (
        "credentials, by a way up",
        Refused(422, "malformed", CREDENTIALS, "malformed", is_proved=True),
    )
    theirs = "query begun, of the victim's dataset"
    yield theirs, by_token(403, "not granted", BEGIN, is_proved=True)
    yield from _queried()
    yield from _published()
    for lease in ("guessed", "leaked"):
        for name, what in (
            ("events of the victim", EVENTS),
            ("heartbeat of the victim", HEARTBEAT),
            ("complete the victim", COMPLETE),
            ("fail the victim", COMPLETE),
        ):
            yield f"{name}, {lease}", by_token(403, "another attempt", what, is_proved=True)
    yield "events of its own, guessed", by_fence("stale", EVENTS)
    yield "heartbeat of its own, guessed", by_fence("stale", HEARTBEAT)
    yield "complete its own, guessed", by_fence("stale", COMPLETE)
    yield (
        "heartbeat of its next attempt",
        by_token(403, "former attempt", HEARTBEAT, is_proved=True),
    )
    yield "complete with the victim's", by_fence("outputs", COMPLETE, OUTSIDE)
    yield "complete by a way up", by_fence("outputs", COMPLETE, OUTSIDE)
    yield "complete the victim's dataset", by_fence("outputs", COMPLETE, OUTSIDE)


def _queried() -> Iterator[tuple[str, Refused]]:
    """SQL by its own token, run by the query service, which notes it in the log of queries."""
    for name in (
        *("of the victim's file", "of a file", "to attach", "to install", "to load", "to set"),
        *("to copy", "for all memory"),
    ):
        kind = "memory" if "memory" in name else "query"
        yield f"query, {name}", Refused(422, kind, QUERY, kind, is_noted=False)
    for name in (
        *("of the victim's dataset", "of the victim's dataset, by WITH"),
        "of the victim's file, by its name",
    ):
        yield f"query, {name}", by_token(403, "not granted", BEGIN, is_proved=True)


def _published() -> Iterator[tuple[str, Refused]]:
    """Into buffers, by its own token."""
    outside = Refused(403, "not granted", PUBLISH, OUTSIDE, is_proved=True)
    for name in ("the victim's file", "the victim's running file", "a file by a way up"):
        yield f"publish {name}", outside
    yield "publish a file of the machine", outside
    for name in ("confided", "precious", "grumbles_rejected", "nothing"):
        wrong = Refused(403, "not granted", PUBLISH, "not granted", is_proved=True)
        yield f"publish into {name}", wrong
    for name in ("publish too much", "publish far too much"):
        yield name, Refused(413, "too large", PUBLISH, "too large", is_noted=False)


def _listened() -> Iterator[tuple[str, Refused]]:
    claim = "POST /internal/task-claim"
    for what in ("POST /internal/hello", claim, "POST /internal/events", "GET /internal/sources"):
        nobody = Refused(401, "unauthorized", what, "no identity")
        yield f"{what}, as nobody", nobody
        yield f"{what}, as a worker", Refused(403, "forbidden", what, "wrong identity")
        # It is one of a task, and that of an invocation would be wanted.
        wrong = by_token(403, "wrong audience", what)
        yield f"{what}, by its token", wrong if what == claim else nobody
    for what in (
        *("GET /v1/tasks", "GET /v1/keys", "GET /v1/audit", "GET /metrics", "POST /v1/keys/rotate"),
        *("POST /v1/trigger", "POST /v1/tasks/cancel", "POST /v1/dag", "POST /v1/query"),
    ):
        yield f"{what}, as nobody", Refused(401, "unauthorized", what, "no api token")
        yield f"{what}, by its token", Refused(401, "unauthorized", what, "wrong api token")
    yield (
        "POST /sign-in, by its token",
        Refused(403, "page", "POST /sign-in", "wrong api token"),
    )


ASKED: Final = dict([*_forged(), *_fenced(), *_listened()])
LOCKED_OUT: Final = Refused(403, "not isolated", QUERY, "not isolated", is_noted=False)
"""Where queries cannot be users of their own no SQL of a task is run at all."""
if os.geteuid() != 0:
    ASKED.update({name: LOCKED_OUT for name, _ in _queried()})
SIGN_IN: Final = {"GET /, as nobody": [401, "page"]}
"""Whoever comes to the console is asked to sign in; that is no refusal, and not noted."""
OVER: Final = {
    "credentials": by_fence("over", CREDENTIALS),
    "query": by_fence("over", QUERY),
    "query begun": by_fence("over", BEGIN),
    "publish": by_fence("over", PUBLISH),
    "query, directly": by_fence("over", BEGIN),
    "events": by_fence("over", EVENTS),
    "events, renewed": by_token(401, "missing", EVENTS),
    # With its own lease it is as one that was under way when the attempt ended.
    "heartbeat": replace(by_fence("over", HEARTBEAT), is_noted=False),
    "heartbeat, guessed": by_fence("over", HEARTBEAT),
    "complete": by_fence("different", COMPLETE),
    "complete, guessed": by_fence("over", COMPLETE),
    "complete with the victim's": by_fence("different", COMPLETE, OUTSIDE),
    "fail": by_fence("different", COMPLETE),
}
REAPED: Final = {
    **OVER,
    "heartbeat": by_fence("over", HEARTBEAT),
    "credentials": by_token(403, "expired", CREDENTIALS, is_proved=True),
    "query": by_token(403, "expired", QUERY, is_proved=True),
    "query begun": by_token(403, "expired", BEGIN, is_proved=True),
    "publish": by_token(403, "expired", PUBLISH, is_proved=True),
    # The query service verifies it by itself.
    "query, directly": Refused(403, "token expired", QUERY, "expired", is_noted=False),
    "events": by_token(403, "expired", EVENTS, is_proved=True),
    "complete": by_fence("over", COMPLETE),
    "complete with the victim's": by_fence("outputs", COMPLETE, OUTSIDE),
    "fail": by_fence("over", COMPLETE),
}
LEAKED: Final = {
    "events, renewed": Refused(200, "refused", EVENTS, "not an output", is_proved=True),
    "complete with the victim's": by_fence("outputs", COMPLETE, OUTSIDE),
}
if os.geteuid() != 0:
    OVER["query, directly"] = LOCKED_OUT
LATER: Final = {"hostile": OVER, "rogue": OVER, "reaped": REAPED, "running": LEAKED}
BEYOND: Final = ("get the victim's", "put the victim's")
"""What is tried in the bucket besides, with credentials that are still good."""


def settings_of(folder: Path) -> str:
    """The settings of a worker that keeps untrusted work apart; empty if none can, here."""
    if any(mark.args[0] for mark in test_untrusted.pytestmark):
        return ""
    path = (folder, test_untrusted.SOURCE, test_untrusted.PACKAGES)
    said = {
        "uids": test_untrusted.RANGE,
        "uids_folder": str(folder / "users"),
        "python": [test_untrusted.PYTHON],
        "path": [str(each) for each in path],
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in said.items()]
    return "\n".join(["[runtimes.process]", *lines, ""])


@pytest.fixture(
    scope="module",
    params=[
        Wakeups.LONG_POLL,
        *(
            pytest.param(
                each, marks=pytest.mark.proof(meanwhile="test_the_dispatcher_refuses_every_call")
            )
            for each in (Wakeups.BUCKET, Wakeups.SQS)
        ),
    ],
)
def story(
    background: Background, aws_server: AwsServer, request: pytest.FixtureRequest
) -> Iterator[Story]:
    with tempfile.TemporaryDirectory() as made:
        # One that everybody can enter, as the temporary ones of pytest are not.
        Path(made).chmod(0o755)
        folder = Path(made) / "installation"
        folder.mkdir()
        server = LocalS3(Path(made) / "s3", mints=True, grace_seconds=1)
        try:
            background.run(server.start())
        except PenstockError as error:
            background.run(server.stop())
            if os.environ.get("CI"):
                raise
            pytest.skip(f"no S3 server: {error.message} {error.hint}")
        try:
            settings = settings_of(folder)
            told: dict[str, object] = {"wakeups": request.param}
            if request.param is Wakeups.SQS:
                told |= {"aws_endpoint": aws_server.endpoint, "aws_region": "us-east-1"}
                told |= {"sqs_prefix": "hostile-", "sts_endpoint": server.endpoint}
            yield asyncio.run(play(folder, server, settings=settings, told=told))
        finally:
            background.run(server.stop())


def is_refused(found: dict[str, list[Any]], expected: dict[str, Refused]) -> None:
    assert {name: tuple(said) for name, said in found.items()} == {
        name: (each.status, each.kind) for name, each in expected.items()
    }


@pytest.mark.parametrize("job", JOBS)
def test_the_bucket_is_closed_but_for_its_own(story: Story, job: str) -> None:
    said = story.told[job]["s3"]
    assert len(said) == 14 * 9 + 3
    wrong = {name: each for name, each in said.items() if each[0] != 403}
    assert wrong == {}
    # A HEAD has no body, and so no code but its status.
    assert {each[1] for each in said.values()} == {"AccessDenied", "403"}


@pytest.mark.parametrize("job", JOBS)
def test_a_session_is_what_it_was_minted_as(story: Story, job: str) -> None:
    assert story.told[job]["session"] == {
        "a changed session token": [403, "InvalidAccessKeyId"],
        "no session token": [403, "InvalidAccessKeyId"],
        "another secret": [403, "SignatureDoesNotMatch"],
        "no signature": [403, "AccessDenied"],
        "the role again": [403, "AccessDenied"],
        "a federation token": [403, "AccessDenied"],
    }


@pytest.mark.parametrize("job", JOBS)
def test_the_dispatcher_refuses_every_call(story: Story, job: str) -> None:
    said = dict(story.told[job]["api"])
    assert {name: said.pop(name) for name in SIGN_IN} == SIGN_IN
    is_refused(said, ASKED)


@pytest.mark.parametrize("job", JOBS)
def test_its_environment_proves_nothing(story: Story, job: str) -> None:
    said = story.told[job]["environment"]
    assert [name for name in said if name.startswith("PENSTOCK_")] == ["PENSTOCK_TASK_TOKEN_FILE"]
    assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"} & said.keys()
    assert API_TOKEN not in said.values()


def test_the_machine_is_closed_to_an_untrusted_task(story: Story) -> None:
    for mark in test_untrusted.pytestmark:
        if mark.args[0]:
            pytest.skip(f"the job was not untrusted: {mark.kwargs['reason']}")
    told = story.told["hostile"]
    assert told["user"] >= test_untrusted.FIRST
    assert len(told["machine"]) == 7 * 2 + 9 + 3 + 4
    assert {
        name: each for name, each in told["machine"].items() if each != ["PermissionError"]
    } == {}


@pytest.mark.parametrize("whose", LATER)
def test_what_an_attempt_has_kept_is_worth_nothing_after_it(story: Story, whose: str) -> None:
    said = dict(story.later[whose])
    for name in BEYOND:
        assert said.pop(name) == [403, "AccessDenied"]
    is_refused(said, LATER[whose])


def test_the_victim_has_noticed_nothing(story: Story) -> None:
    assert story.victim["after"] == story.victim["before"]
    assert story.victim["after"]["data"] == "precious open"
    assert story.victim["after"]["batches"] == []
    for task in ("victim open", "victim held"):
        assert (story.tasks[task]["status"], story.tasks[task]["attempt"]) == ("completed", 1)


def test_what_was_its_own_was_published(story: Story) -> None:
    for partition, task, attempt in (
        ("h-tries", "hostile h-tries", 1),
        ("r-tries", "rogue r-tries", 1),
        ("g-ghost", "ghost g-ghost", 2),
    ):
        published = json.loads(story.published[partition])
        number = story.tasks[task]["task_id"]
        assert (published["task_id"], published["attempt"]) == (number, attempt)
        assert f"/{number}-{attempt}-" in published["location"]
        assert published["revision"] == 1


def test_another_location_is_not_published(story: Story) -> None:
    thief = story.tasks["hostile h-thief"]
    assert thief["status"] == "dead"
    assert "does not lie in the folder of this attempt" in thief["reason"]
    # What has waited in its worker behind others was handed back, and is another attempt.
    attempts = [f"task:{thief['task_id']}:{each}" for each in (1, 2, 3)]
    assert sum(noted(story)[COMPLETE, OUTSIDE, each] for each in attempts) >= 1


def noted(story: Story) -> Counter[tuple[str, str, str]]:
    """How often each refusal is in the audit: what, why, and whose it was if that is proved."""
    found: Counter[tuple[str, str, str]] = Counter()
    for each in story.audit:
        if each["outcome"] == "refused":
            found[each["what"], each["reason"], each["caller"]] += each["times"]
    return found


def test_every_refusal_is_in_the_audit(story: Story) -> None:
    wanted: Counter[tuple[str, str, str]] = Counter()
    ghost = f"task:{story.tasks['ghost g-ghost']['task_id']}:1"
    callers = [f"task:{story.tasks[task]['task_id']}:1" for task in JOBS.values()]
    for caller in callers:
        for each in (*ASKED.values(), *OVER.values()):
            if each.is_noted:
                wanted[each.what, each.reason, caller if each.is_proved else ""] += 1
    for each in (*REAPED.values(), *LEAKED.values()):
        if each.is_noted:
            wanted[each.what, each.reason, ghost if each.is_proved else ""] += 1
    found = noted(story)
    assert {key: (times, found[key]) for key, times in wanted.items() if found[key] < times} == {}


def test_every_credential_is_in_the_audit_and_none_is_told(story: Story) -> None:
    minted = {each["caller"] for each in story.audit if each["reason"] == "minted"}
    for task in story.tasks.values():
        assert f"task:{task['task_id']}:{task['attempt']}" in minted
    written = json.dumps(story.audit) + story.logs
    for told in story.told.values():
        kept = told["kept"]["credentials"]
        for secret in (
            told["kept"]["token"].rpartition(".")[2],
            kept["aws_secret_access_key"],
            kept["aws_session_token"],
        ):
            assert secret not in written
    for task in story.tasks.values():
        assert task["lease_token"] not in written
    assert API_TOKEN not in written
