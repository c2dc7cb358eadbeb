"""`POST /v1/task/credentials`: what its token grants, for the attempt that runs, and a note."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from penstock.dispatcher.capabilities.credentials import (
    CredentialMinter,
    MintedStore,
    RoleSession,
    StsBounds,
    StsSessions,
    make_minter,
)
from penstock.kernel.aws import Aws
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import CredentialsRefused, CredentialsUnavailable
from penstock.protocol.base import TASK_HEADER
from penstock.protocol.keys import AuditNote
from penstock.protocol.work import Assignment, CredentialsAnswer
from penstock.tokens.claims import TASK_AUDIENCE, Claims
from penstock.tokens.scopes import Root
from tests.iam import Policy
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, held, ok, output, read, refused
from tests.integration.dispatcher.api.test_proofs import ATTEMPTS

ROOT = "s3://lake/root"
ROLE = "arn:aws:iam::123456789012:role/tasks"
SECRET, TOKEN = "a-very-secret-key", "a-session-token-of-many-letters"


@dataclass
class Sessions:
    """STS: each session has another number. What is to happen meanwhile can be said."""

    asked: list[str] = field(default_factory=list)
    failure: Exception | None = None
    meanwhile: Callable[[], Any] | None = None

    async def assume(self, *, role: str, name: str, policy: str) -> RoleSession:
        assert role == ROLE
        self.asked.append(f"{name} {policy}")
        if self.meanwhile is not None:
            await self.meanwhile()
        if self.failure is not None:
            raise self.failure
        return RoleSession(
            access_key=f"ASIA{len(self.asked)}",
            secret_key=SECRET,
            session_token=TOKEN,
            expires_at=datetime(2030, 1, 1, 0, 15, tzinfo=UTC),
        )

    def close(self) -> None:
        pass

    @property
    def policy(self) -> Policy:
        """Of the last session."""
        return Policy(self.asked[-1].partition(" ")[2])


def minting(sessions: Sessions) -> dict[str, Any]:
    """The parts of a dispatcher that mints."""
    store = MintedStore(root=Root.parse(ROOT), region="eu-west-1", endpoint="", role=ROLE)
    return {"root": ROOT, "minter": CredentialMinter(store, sessions)}


async def running(stage: Stage, *keys: str) -> list[Assignment]:
    ok(await stage.apply(ATTEMPTS))
    await stage.trigger(*(keys or ("p",)))
    await stage.world.tasks.reap()
    return await stage.claim(limit=len(keys) or 1)


async def ask(stage: Stage, task: Assignment, said: Any = None, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {} if said is None else {"json": said}
    headers = {TASK_HEADER: fields.get("token", task.token)}
    return await stage.internal.post("/v1/task/credentials", headers=headers, **body)


async def claims_of(stage: Stage, task: Assignment) -> Claims:
    return await stage.parts.issuer.verify(
        task.token, audience=TASK_AUDIENCE, is_expiry_judged=True
    )


async def audited(stage: Stage) -> list[AuditNote]:
    """What the audit says of this endpoint, the oldest first."""
    await stage.parts.audit.turn()
    notes = (await stage.parts.audit.listed(task_id=None, limit=100)).notes
    return [each for each in reversed(notes) if each.what == "POST /v1/task/credentials"]


def test_an_attempt_has_credentials_for_its_own_folders(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        assert task.mints
        claims = await claims_of(stage, task)
        found = read(await ask(stage, task), CredentialsAnswer)
        assert (found.access_key, found.secret_key, found.session_token) == ("ASIA1", SECRET, TOKEN)
        assert found.expires_at == datetime(2030, 1, 1, 0, 15, tzinfo=UTC)
        assert (found.region, found.endpoint) == ("eu-west-1", "")
        assert tuple(found.read) == claims.grants.read_prefixes
        assert tuple(found.write) == claims.grants.write_prefixes
        assert f"{task.folder}/" in found.write[0]
        assert sessions.asked[0].startswith(f"penstock-{task.task_id}-1 ")
        for prefix in found.write:
            key = prefix.removeprefix("s3://")
            assert sessions.policy.allows("s3:PutObject", f"arn:aws:s3:::{key}x")
            assert not sessions.policy.allows("s3:PutObject", f"arn:aws:s3:::{key[:-1]}x")
        (note,) = await audited(stage)
        assert (note.what, note.outcome) == ("POST /v1/task/credentials", "allowed")
        assert (note.task_id, note.attempt, note.reason) == (task.task_id, 1, "minted")
        assert SECRET not in str(note)
        assert SECRET not in repr(found)
        assert TOKEN not in repr(found)

    on_stage(story, **minting(sessions))


def test_an_answer_that_was_lost_is_given_again_and_each_attempt_has_its_own(
    on_stage: Perform,
) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        first, second = await running(stage, "p", "q")
        one = read(await ask(stage, first), CredentialsAnswer)
        assert read(await ask(stage, first, {}), CredentialsAnswer) == one
        assert read(await ask(stage, second), CredentialsAnswer).access_key != one.access_key
        assert len(sessions.asked) == 2
        (note,) = [each for each in await audited(stage) if each.task_id == first.task_id]
        assert note.times == 2

    on_stage(story, **minting(sessions))


def test_less_may_be_asked_for(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        scratch = (await claims_of(stage, task)).grants.scratch
        said = {"read": [], "write": [f"{scratch}deeper/"]}
        found = read(await ask(stage, task, said), CredentialsAnswer)
        assert (found.read, found.write) == ([], [f"{scratch}deeper/"])
        inside = f"arn:aws:s3:::{scratch.removeprefix('s3://')}"
        assert sessions.policy.allows("s3:PutObject", f"{inside}deeper/x")
        assert not sessions.policy.allows("s3:PutObject", f"{inside}x")
        assert not sessions.policy.allows("s3:GetObject", f"{inside}deeper/x")

    on_stage(story, **minting(sessions))


def test_more_is_refused_and_noted(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        first, second = await running(stage, "p", "q")
        scratch = (await claims_of(stage, second)).grants.scratch
        for said in (
            {"write": [scratch]},
            {"read": [f"{ROOT}/"]},
            {"write": [f"{ROOT}/scratch/"]},
            {"read": ["s3://another/root/x/"]},
        ):
            problem = refused(await ask(stage, first, said), 403)
            assert problem.type == "token not granted"
        (note,) = await audited(stage)
        assert (note.outcome, note.reason, note.times) == ("refused", "not granted", 4)
        assert (note.task_id, note.attempt) == (first.task_id, 1)
        assert sessions.asked == []

    on_stage(story, **minting(sessions))


@pytest.mark.parametrize(
    "said",
    [
        {"read": [f"{ROOT}/scratch/../x/"]},
        {"write": [f"{ROOT}/*/"]},
        {"write": [f"{ROOT}/scratch"]},
        {"read": ["file:///etc/"]},
    ],
)
def test_what_is_no_folder_is_refused_and_noted(on_stage: Perform, said: Any) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        assert refused(await ask(stage, task, said), 422).type == "malformed"
        (note,) = await audited(stage)
        assert (note.outcome, note.reason) == ("refused", "malformed")
        assert sessions.asked == []

    on_stage(story, **minting(sessions))


@pytest.mark.parametrize(
    "said", [{"folder": []}, {"read": "x"}, {"read": [1]}, {"read": ["x"] * 101}]
)
def test_what_is_not_as_declared_is_refused(on_stage: Perform, said: Any) -> None:
    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        refused(await ask(stage, task, said), 422)

    on_stage(story, **minting(Sessions()))


def test_too_many_folders_are_refused_with_what_to_do(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        scratch = (await claims_of(stage, task)).grants.scratch
        many = [f"{scratch}{number}-{'x' * 60}/" for number in range(40)]
        problem = refused(await ask(stage, task, {"read": many, "write": many}), 409)
        assert problem.type == "too many folders"
        assert "40 folders to read and 40 folders to write" in problem.title
        assert "fewer" in problem.detail
        (note,) = await audited(stage)
        assert note.reason == "too many folders"
        assert sessions.asked == []
        ok(await ask(stage, task, {"read": many[:4], "write": []}))

    on_stage(story, **minting(sessions))


@pytest.mark.parametrize(
    ("failure", "status", "kind", "reason"),
    [
        (CredentialsUnavailable("STS does not answer."), 503, "unavailable", "unavailable"),
        (CredentialsRefused("STS says no."), 409, "no credentials", "no credentials"),
    ],
)
def test_an_sts_that_fails_is_told_and_noted(
    on_stage: Perform, failure: Exception, status: int, kind: str, reason: str
) -> None:
    sessions = Sessions(failure=failure)

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        assert refused(await ask(stage, task), status).type == kind
        (note,) = await audited(stage)
        assert (note.outcome, note.reason) == ("refused", reason)
        # Whatever became of it, the attempt goes on.
        ok(await stage.beat(held(task)))
        sessions.failure = None
        ok(await ask(stage, task))

    on_stage(story, **minting(sessions))


def test_an_sts_that_never_answers_does_not_hold_anybody(on_stage: Perform) -> None:
    began = asyncio.Event()

    class Silent:
        def assume_role(self, **_: Any) -> Any:
            raise TimeoutError  # What a client of boto3 ends with, after a time of its own.

    class Slow(StsSessions):
        async def assume(self, *, role: str, name: str, policy: str) -> RoleSession:
            began.set()
            return await super().assume(role=role, name=name, policy=policy)

    sessions = Slow(Aws(), client=Silent(), bounds=StsBounds(seconds_max=0))
    fields = minting(Sessions())
    fields["minter"] = CredentialMinter(fields["minter"]._store, sessions)

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        assert refused(await ask(stage, task), 503).type == "unavailable"
        assert began.is_set()
        ok(await stage.beat(held(task)))

    on_stage(story, **fields)
    sessions.close()


@pytest.mark.parametrize(
    ("store_url", "role", "words"),
    [("file:///lake", ROLE, "S3 stores"), (ROOT, "", "no role")],
)
def test_where_nothing_is_minted_a_sentence_says_why(
    on_stage: Perform, store_url: str, role: str, words: str
) -> None:
    minter = make_minter(
        store_url=store_url, role=role, sts=Aws(), environment={}, clock=SystemClock()
    )

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        assert not task.mints
        problem = refused(await ask(stage, task), 409)
        assert problem.type == "no credentials"
        assert words in problem.title
        assert problem.detail

    on_stage(story, root=store_url, minter=minter)


def test_a_former_attempt_has_none(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        ok(await stage.complete(held(task, failure={"reason": "no luck"})))
        problem = refused(await ask(stage, task), 409)
        assert problem.type == "stale"
        stage.world.later(3600)
        (again,) = await stage.claim()
        assert (again.task_id, again.attempt) == (task.task_id, 2)
        # The token of the first has not expired by its own saying.
        kept = await stage.token(task.task_id, 1)
        assert refused(await ask(stage, task, token=kept), 409).type == "stale"
        found = [each for each in await audited(stage) if each.reason == "stale"]
        assert sum(each.times for each in found) == 2
        assert sessions.asked == []
        ok(await ask(stage, again))

    on_stage(story, **minting(sessions))


def test_one_that_was_reaped_has_none_at_once(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        stage.world.later(120)
        assert (await stage.world.tasks.reap(outage_seconds=1000)).reaped
        kept = await stage.token(task.task_id, 1)
        assert refused(await ask(stage, task, token=kept), 409).type == "stale"
        assert sessions.asked == []

    on_stage(story, **minting(sessions))


def test_one_that_is_over_has_none(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        ok(await stage.complete(held(task, outputs=[output(task)])))
        assert refused(await ask(stage, task), 409).type == "over"
        assert sessions.asked == []

    on_stage(story, **minting(sessions))


def test_one_that_is_to_stop_has_none(on_stage: Perform) -> None:
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        ok(await stage.public.post("/v1/tasks/cancel", json={"tasks": [task.task_id]}))
        assert refused(await ask(stage, task), 409).type == "cancelled"
        (note,) = await audited(stage)
        assert (note.outcome, note.reason) == ("refused", "cancelled")
        assert sessions.asked == []

    on_stage(story, **minting(sessions))


def test_a_task_that_there_never_was_has_none(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        kept = await stage.token(task.task_id + 1000, 1)
        refused(await ask(stage, task, token=kept), 404)

    on_stage(story, **minting(Sessions()))


def test_one_that_ends_while_sts_is_asked_has_none(on_stage: Perform) -> None:
    """Also not when it asks again, and the answer is known."""
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)

        async def end() -> None:
            ok(await stage.complete(held(task, outputs=[output(task)])))

        sessions.meanwhile = end
        assert refused(await ask(stage, task), 409).type == "over"
        assert refused(await ask(stage, task), 409).type == "over"
        assert [each.outcome for each in await audited(stage)] == ["refused"]
        assert len(sessions.asked) == 1

    on_stage(story, **minting(sessions))


def test_what_the_token_grants_elsewhere_is_not_minted(on_stage: Perform) -> None:
    """The store of the dispatcher was changed, say."""
    sessions = Sessions()

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        await stage.world.rows("UPDATE task SET grants = NULL")
        other = await stage.token(task.task_id, 1, write={"d": "s3://another/root/x"})
        assert refused(await ask(stage, task, token=other), 409).type == "no credentials"
        assert sessions.asked == []

    on_stage(story, **minting(sessions))


def test_nothing_of_it_is_logged(on_stage: Perform, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def story(stage: Stage) -> None:
        (task,) = await running(stage)
        ok(await ask(stage, task))
        refused(await ask(stage, task, {"read": ["nothing"]}), 422)
        for secret in (SECRET, TOKEN, task.token):
            assert secret not in caplog.text

    on_stage(story, **minting(Sessions()))
