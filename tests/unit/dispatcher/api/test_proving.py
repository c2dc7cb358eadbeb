"""Which proofs open what, and what the audit is told of those that do not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import cast

import pytest

from penstock.dispatcher.api.auth import (
    IN_A_ROW_MAX,
    WRONG_MAX,
    answered,
    prove_each,
    proved,
    require_attempt,
    require_invoked,
)
from penstock.dispatcher.api.context import ApiContext
from penstock.dispatcher.api.endpoints import ApiCall, RequiredProof
from penstock.dispatcher.api.requests import RequestLimits
from penstock.kernel.clock import SystemClock
from penstock.kernel.errors import DatabaseUnavailable, InvalidInput, TokenRefused
from penstock.protocol.base import TASK_HEADER, WORKER_HEADER, Answer
from penstock.protocol.identity import Identities
from penstock.protocol.work import HeldAsk, TaskResult
from penstock.tokens.claims import Claims
from tests.unit.dispatcher.api.calling import (
    SECRET,
    Caller,
    FewParts,
    FewTokens,
    Said,
    application,
    claims,
    get,
)

ENDPOINTS = [get(f"/{each.name.lower()}", proof=each) for each in RequiredProof]


def identity(name: str = "me") -> list[tuple[str, str]]:
    token = Identities(SECRET).identity(name).token
    return [(WORKER_HEADER, name), ("Authorization", f"Bearer {token}")]


def ask(parts: FewParts, proof: RequiredProof, headers: Sequence[tuple[str, str]]) -> Said:
    call = Caller(application(*ENDPOINTS, parts=parts))
    found = asyncio.run(call("GET", f"/{proof.name.lower()}", headers=headers))
    assert found is not None
    return found


TOKEN = [(TASK_HEADER, "7-2")]
OLD = [(TASK_HEADER, "7-2-old")]
INVOCATION = [(TASK_HEADER, "7-0")]
FORGED = [(TASK_HEADER, "nonsense")]
API = [("Authorization", "Bearer the token")]
WEBHOOK = [
    (WORKER_HEADER, "me"),
    ("Authorization", f"Bearer {Identities(SECRET).webhook().token}"),
]


@pytest.mark.parametrize(
    ("proof", "headers", "status", "reason"),
    [
        (RequiredProof.NONE, [], 200, ""),
        (RequiredProof.NONE, FORGED, 200, ""),
        (RequiredProof.WORKER, [], 401, "no identity"),
        (RequiredProof.WORKER, TOKEN, 401, "no identity"),
        (RequiredProof.WORKER, INVOCATION, 401, "no identity"),
        (RequiredProof.WORKER, API, 401, "no identity"),
        (RequiredProof.WORKER, [(WORKER_HEADER, "you"), identity()[1]], 403, "wrong identity"),
        (RequiredProof.WORKER, identity(), 200, ""),
        (RequiredProof.WORKER, WEBHOOK, 403, "webhook token"),
        (RequiredProof.SOURCE, [], 401, "no identity"),
        (RequiredProof.SOURCE, identity(), 200, ""),
        (RequiredProof.SOURCE, WEBHOOK, 200, ""),
        (
            RequiredProof.SOURCE,
            [WEBHOOK[0], (WEBHOOK[1][0], WEBHOOK[1][1] + "x")],
            403,
            "wrong identity",
        ),
        (RequiredProof.WORKER_OR_INVOCATION, WEBHOOK, 403, "webhook token"),
        (RequiredProof.WORKER_OR_INVOCATION, [], 401, "no identity"),
        (RequiredProof.WORKER_OR_INVOCATION, identity(), 200, ""),
        (RequiredProof.WORKER_OR_INVOCATION, INVOCATION, 200, ""),
        (RequiredProof.WORKER_OR_INVOCATION, TOKEN, 403, "wrong audience"),
        (RequiredProof.WORKER_OR_INVOCATION, FORGED, 403, "malformed"),
        # Whoever brings a token is judged by it: a good identity does not mend a wrong one.
        (RequiredProof.WORKER_OR_INVOCATION, [*identity(), *TOKEN], 403, "wrong audience"),
        (RequiredProof.TASK, [], 401, "missing"),
        (RequiredProof.TASK, identity(), 401, "missing"),
        (RequiredProof.TASK, API, 401, "missing"),
        (RequiredProof.TASK, [("Authorization", "Bearer 7-2")], 401, "missing"),
        (RequiredProof.TASK, FORGED, 403, "malformed"),
        (RequiredProof.TASK, OLD, 403, "expired"),
        (RequiredProof.TASK, INVOCATION, 403, "wrong audience"),
        (RequiredProof.TASK, TOKEN, 200, ""),
        # Who would have to choose one of two chooses none.
        (RequiredProof.TASK, [*FORGED, *TOKEN], 403, "malformed"),
        (RequiredProof.EACH_TASK, [], 200, ""),
        (RequiredProof.API_TOKEN, [], 401, "no api token"),
        (RequiredProof.API_TOKEN, TOKEN, 401, "no api token"),
        (RequiredProof.API_TOKEN, identity(), 401, "wrong api token"),
        (RequiredProof.API_TOKEN, API, 200, ""),
    ],
)
def test_proofs(
    proof: RequiredProof, headers: list[tuple[str, str]], status: int, reason: str
) -> None:
    parts = FewParts(api_token="the token")
    answer = ask(parts, proof, headers)
    assert answer.status == status
    assert parts.audit.reasons == ([reason] if reason else [])
    if reason:
        (note,) = parts.audit.notes
        assert (note["what"], note["outcome"]) == (f"GET /{proof.name.lower()}", "refused")
        # Who brings an old token is known all the same.
        assert note["address"] == "1.2.3.4"
        known = {"expired": "task:7:2", "webhook token": "webhook"}
        assert note["caller"] == known.get(reason, "")
        assert answer.problem.title.endswith(".")
    elif TOKEN[0] in headers or INVOCATION[0] in headers:
        assert answer.echo.subject in ("task:7:2", "task:7:0")
        assert answer.echo.worker == ""


def test_who_may_look_may_do_nothing_else() -> None:
    parts = FewParts(api_token="the token", viewer_token="a viewer's")
    viewer = [("Authorization", "Bearer a viewer's")]
    assert ask(parts, RequiredProof.LOOKING, viewer).status == 200
    refused = ask(parts, RequiredProof.API_TOKEN, viewer)
    assert refused.status == 403
    assert "read-only" in refused.problem.title
    assert parts.audit.reasons == ["viewer token"]
    # Where there are no viewers, nobody is one by showing nothing.
    for headers in ([], [("Authorization", "Bearer ")], viewer):
        assert ask(FewParts(api_token="the token"), RequiredProof.LOOKING, headers).status == 401


def test_every_kind_of_proof_is_asked_for_without_one() -> None:
    """A kind that is new is refused, or is one of those that ask for nothing here."""
    parts = FewParts(api_token="the token")
    found = {each for each in RequiredProof if ask(parts, each, []).status == 200}
    assert found == {RequiredProof.NONE, RequiredProof.EACH_TASK}


def test_no_secret_is_in_the_audit_or_an_answer() -> None:
    parts = FewParts(api_token="the token")
    (_, secret) = identity("me")
    wrong = [(WORKER_HEADER, "you"), secret, (TASK_HEADER, "a.secret.token")]
    for each in RequiredProof:
        answer = ask(parts, each, wrong)
        assert b"a.secret.token" not in answer.body
        assert secret[1].encode() not in answer.body
    for secret_text in ("a.secret.token", secret[1], secret[1].removeprefix("Bearer ")):
        assert secret_text not in str(parts.audit.notes)
    assert "a.secret.token" not in repr(ApiCall(token="a.secret.token"))


def test_a_name_without_proof_is_noted_as_what_was_said() -> None:
    parts = FewParts()
    ask(parts, RequiredProof.WORKER, [(WORKER_HEADER, "x" * 1000), ("Authorization", "Bearer no")])
    (note,) = parts.audit.notes
    assert note["caller"] == ""
    assert note["detail"] == {"said": "x" * 200}


@pytest.mark.parametrize("proof", [RequiredProof.TASK, RequiredProof.WORKER_OR_INVOCATION])
def test_keys_that_cannot_be_read(proof: RequiredProof) -> None:
    parts = FewParts(issuer=FewTokens(error=DatabaseUnavailable("It is away.")))
    answer = ask(parts, proof, TOKEN)
    assert (answer.status, answer.problem.type) == (503, "unavailable")
    assert parts.audit.notes == []


def held(task_id: int, attempt: int, token: str | None) -> HeldAsk:
    return HeldAsk(task_id=task_id, attempt=attempt, lease_token="x", token=token)


def prove(
    *entries: HeldAsk, header: str = "", parts: FewParts | None = None
) -> Sequence[Claims | TaskResult]:
    call = ApiCall(token=header, what="POST /x")
    return asyncio.run(prove_each(cast("ApiContext", parts or FewParts()), call, entries))


def test_each_entry_is_judged_by_itself() -> None:
    parts = FewParts()
    found = prove(
        held(7, 2, "7-2"),
        held(8, 1, None),
        held(9, 1, "7-2"),
        held(7, 3, "7-2"),
        held(7, 1, "7-2"),
        held(5, 1, "nonsense"),
        held(6, 1, "6-1-old"),
        held(4, 1, "4-0"),
        parts=parts,
    )
    assert found[0] == claims(7, 2)
    # On these calls the fence decides, not how old a token is.
    assert found[6] == claims(6, 1)
    refused = [each for each in found if isinstance(each, TaskResult)]
    assert [(each.task_id, each.status, each.why) for each in refused] == [
        (8, 401, "token missing"),
        (9, 403, "token another attempt"),
        (7, 403, "token former attempt"),
        (7, 403, "token another attempt"),
        (5, 403, "token malformed"),
        (4, 403, "token wrong audience"),
    ]
    assert all(each.detail.endswith(".") and each.state is None for each in refused)
    # Who is known is noted as who it is, with what it asked for; those who are not as one, for each
    # reason, with what they asked for in the details alone.
    notes = [
        (each["task_id"], each["attempt"], each["caller"], each["detail"])
        for each in parts.audit.notes
    ]
    assert notes == [
        (7, 2, "task:7:2", {"asked": "task:9:1"}),
        (7, 2, "task:7:2", {"asked": "task:7:3"}),
        (7, 2, "task:7:2", {"asked": "task:7:1"}),
        (None, None, "", {"asked": ["task:8:1"], "entries": 1}),
        (None, None, "", {"asked": ["task:5:1"], "entries": 1}),
        (None, None, "", {"asked": ["task:4:1"], "entries": 1}),
    ]


def test_the_header_serves_a_call_about_one_task_alone() -> None:
    assert prove(held(7, 2, None), header="7-2") == [claims(7, 2)]
    # The entry's own is nearer.
    (found,) = prove(held(7, 2, "nonsense"), header="7-2")
    assert isinstance(found, TaskResult)
    first, second = prove(held(7, 2, None), held(8, 1, None), header="7-2")
    assert isinstance(first, TaskResult)
    assert isinstance(second, TaskResult)
    assert (first.status, second.status) == (401, 401)


def test_many_entries_let_others_run() -> None:
    """A call of a thousand tokens holds up nobody for longer than a few of them take."""
    parts = FewParts()
    turns: list[int] = []
    clock = SystemClock()

    async def main() -> None:
        async def other() -> None:
            while len(parts.issuer.asked) < 1000:
                turns.append(len(parts.issuer.asked))
                await clock.sleep(0)

        entries = [held(each, 1, f"{each}-1") for each in range(1, 1001)]
        async with asyncio.TaskGroup() as group:
            group.create_task(other())
            found = await prove_each(cast("ApiContext", parts), ApiCall(), entries)
            assert all(isinstance(each, Claims) for each in found)

    asyncio.run(main())
    steps = [after - before for before, after in itertools.pairwise([0, *turns, 1000])]
    assert max(steps) <= IN_A_ROW_MAX


def test_a_call_has_few_wrong_tokens_verified() -> None:
    parts = FewParts()
    mine, wrong = held(1, 1, "1-1"), [held(each, 1, f"{each}-0") for each in range(2, 1001)]
    found = asyncio.run(prove_each(cast("ApiContext", parts), ApiCall(), [mine, *wrong]))
    assert found[0] == claims(1, 1)
    refused = [each for each in found if isinstance(each, TaskResult)]
    assert [each.status for each in refused] == [403] * 999
    assert refused[-1].why == "token not verified"
    assert len(parts.issuer.asked) == 1 + WRONG_MAX


def test_a_token_is_verified_once_a_call() -> None:
    parts = FewParts()
    entries = [held(7, each, "7-1") for each in range(1, 1001)]
    found = asyncio.run(prove_each(cast("ApiContext", parts), ApiCall(), entries))
    assert isinstance(found[0], Claims)
    whys = [each.why for each in found if isinstance(each, TaskResult)]
    assert whys == ["token former attempt"] * WRONG_MAX + ["token not verified"] * (999 - WRONG_MAX)
    assert parts.issuer.asked == ["7-1"]
    assert len(parts.audit.notes) == WRONG_MAX + 1


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [(identity(), True), (TOKEN, True), (OLD, True), (FORGED, False), (INVOCATION, False)],
)
def test_who_shows_an_identity_with_the_proofs_in_the_body_is_known(
    headers: Sequence[tuple[str, str]], is_known: bool
) -> None:
    # There is room for those who are known alone.
    limits = RequestLimits(anonymous_requests_max=0)
    app = application(*ENDPOINTS, parts=FewParts(), limits=limits)
    found = asyncio.run(Caller(app)("GET", "/each_task", headers=headers))
    assert found is not None
    assert found.status == (200 if is_known else 503)


@pytest.mark.parametrize(
    ("path", "headers", "is_limited"),
    [
        ("/task", TOKEN, True),
        ("/task", (*TOKEN, *identity()), False),
        ("/each_task", TOKEN, True),
        ("/each_task", identity(), False),
        ("/worker_or_invocation", INVOCATION, True),
        ("/worker", identity(), False),
        ("/source", WEBHOOK, True),
        ("/source", identity(), False),
    ],
)
def test_the_token_of_an_attempt_takes_no_place_of_workers(
    path: str, headers: Sequence[tuple[str, str]], is_limited: bool
) -> None:
    limits = RequestLimits(limited_requests_max=0)
    app = application(*ENDPOINTS, parts=FewParts(), limits=limits)
    found = asyncio.run(Caller(app)("GET", path, headers=headers))
    assert found is not None
    assert found.status == (503 if is_limited else 200)


def test_one_attempt_takes_no_place_of_others() -> None:
    gate = asyncio.Event()

    async def waits(_parts: ApiContext, _: ApiCall) -> Answer:
        await gate.wait()
        raise InvalidInput("It is over.")

    app = application(get("/waits", waits, proof=RequiredProof.TASK), parts=FewParts())

    async def main() -> None:
        call = Caller(app)
        most = RequestLimits().attempt_requests_max
        async with asyncio.TaskGroup() as group:
            held = [group.create_task(call("GET", "/waits", headers=TOKEN)) for _ in range(most)]
            await asyncio.wait(held, timeout=0.1)
            more = await call("GET", "/waits", headers=TOKEN)
            others = [
                group.create_task(call("GET", "/waits", headers=headers))
                for headers in ([(TASK_HEADER, "8-1")], [*TOKEN, *identity()])
            ]
            await asyncio.wait(others, timeout=0.1)
            gate.set()
        assert more is not None
        assert more.problem.type == "busy"
        for each in others:
            found = each.result()
            assert found is not None
            assert found.status == 422

    asyncio.run(main())


def test_answers_stand_where_their_entries_stood() -> None:
    no = TaskResult(task_id=2, status=403)
    found: list[Claims | TaskResult] = [claims(1, 1), no, claims(3, 1)]
    assert proved(found, "abc") == [("a", claims(1, 1)), ("c", claims(3, 1))]
    told = [TaskResult(task_id=1, status=200), TaskResult(task_id=3, status=409)]
    assert answered(found, told) == [told[0], no, told[1]]


@pytest.mark.parametrize(("task_id", "attempt"), [(8, 2), (7, 1), (7, 3)])
def test_the_token_of_the_header_is_of_the_attempt_that_the_body_names(
    task_id: int, attempt: int
) -> None:
    parts = FewParts()
    call = ApiCall(claims=claims(7, 2), what="POST /x")
    few = cast("ApiContext", parts)
    assert require_attempt(few, call, task_id=7, attempt=2) == claims(7, 2)
    assert parts.audit.notes == []
    with pytest.raises(TokenRefused):
        require_attempt(few, call, task_id=task_id, attempt=attempt)
    (note,) = parts.audit.notes
    assert (note["task_id"], note["caller"]) == (7, "task:7:2")


def test_an_invocation_claims_its_own_task_alone() -> None:
    parts = FewParts()
    few = cast("ApiContext", parts)
    invoked = ApiCall(claims=claims(7, 0), what="POST /x")
    require_invoked(few, invoked, task_id=7)
    require_invoked(few, ApiCall(worker="me"), task_id=8)
    require_invoked(few, ApiCall(worker="me"), task_id=None)
    assert parts.audit.notes == []
    for other in (8, None):
        with pytest.raises(TokenRefused, match="task 7 alone"):
            require_invoked(few, invoked, task_id=other)
    assert parts.audit.reasons == ["another task", "another task"]
