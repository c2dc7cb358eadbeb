"""Asking STS: within bounds, whatever it does, and without its words."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import Any

import botocore.exceptions
import pytest

from penstock.dispatcher.capabilities.credentials import (
    SESSION_SECONDS,
    RoleSession,
    StsBounds,
    StsSessions,
)
from penstock.kernel.aws import Aws
from penstock.kernel.errors import CredentialsRefused, CredentialsUnavailable

ROLE = "arn:aws:iam::123456789012:role/tasks"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
LONG_SECONDS = 60


class Client:
    """STS: answers, fails, or waits until it is let go."""

    def __init__(self, *, failure: Exception | None = None, waits: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failure = failure
        self.go = threading.Event()
        if not waits:
            self.go.set()
        self.inside = threading.Semaphore(0)

    def assume_role(self, **said: Any) -> dict[str, Any]:
        self.asked.append(said)
        self.inside.release()
        assert self.go.wait(LONG_SECONDS)
        if self.failure is not None:
            raise self.failure
        made = {
            "AccessKeyId": "ASIA1",
            "SecretAccessKey": SECRET,
            "SessionToken": "token",
            "Expiration": datetime(2026, 1, 1, tzinfo=UTC),
        }
        return {"Credentials": made}


def error(code: str, status: int) -> Exception:
    said = {
        "Error": {"Code": code, "Message": f"the session token is {SECRET}"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    found: Exception = botocore.exceptions.ClientError(said, "AssumeRole")
    return found


async def assume(sessions: StsSessions, name: str = "penstock-7-1") -> RoleSession:
    return await sessions.assume(role=ROLE, name=name, policy="{}")


def test_a_session_is_asked_for_the_shortest_time() -> None:
    client = Client()
    sessions = StsSessions(Aws(), client=client)
    made = asyncio.run(assume(sessions))
    assert client.asked == [
        {
            "RoleArn": ROLE,
            "RoleSessionName": "penstock-7-1",
            "Policy": "{}",
            "DurationSeconds": SESSION_SECONDS,
        }
    ]
    assert (made.access_key, made.secret_key, made.session_token) == ("ASIA1", SECRET, "token")
    assert SECRET not in repr(made)
    sessions.close()


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (error("Throttling", 400), CredentialsUnavailable),
        (error("ThrottlingException", 400), CredentialsUnavailable),
        (error("RequestLimitExceeded", 503), CredentialsUnavailable),
        (error("InternalFailure", 500), CredentialsUnavailable),
        (error("Whatever", 502), CredentialsUnavailable),
        (error("Whatever", 429), CredentialsUnavailable),
        (error("ExpiredToken", 403), CredentialsUnavailable),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), CredentialsUnavailable),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), CredentialsUnavailable),
        (botocore.exceptions.NoCredentialsError(), CredentialsUnavailable),
        (ConnectionResetError(), CredentialsUnavailable),
        # These are about the dispatcher, and no reason to end a task.
        (error("AccessDenied", 403), CredentialsUnavailable),
        (error("SignatureDoesNotMatch", 403), CredentialsUnavailable),
        (error("InvalidClientTokenId", 403), CredentialsUnavailable),
        (error("RegionDisabledException", 403), CredentialsUnavailable),
        (error("MalformedPolicyDocument", 400), CredentialsRefused),
        (error("ValidationError", 400), CredentialsRefused),
        (error("PackedPolicyTooLarge", 400), CredentialsRefused),
        (botocore.exceptions.ParamValidationError(report="short"), CredentialsRefused),
    ],
)
def test_what_it_answers_is_no_for_good_or_not_now(failure: Exception, kind: type) -> None:
    sessions = StsSessions(Aws(), client=Client(failure=failure))
    with pytest.raises(kind) as no:
        asyncio.run(assume(sessions))
    # Its words can have the dispatcher's own token in them.
    assert SECRET not in f"{no.value!r} {no.value} {no.value.__cause__!r}"
    assert no.value.__suppress_context__
    sessions.close()


def test_what_people_have_to_put_right_is_told_loudly_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client()
    sessions = StsSessions(Aws(), client=client)

    async def story() -> None:
        for code in (
            "AccessDenied",
            "AccessDenied",
            "Throttling",
            "ExpiredToken",
            "",
            "ExpiredToken",
        ):
            client.failure = error(code, 403) if code else None
            if code:
                with pytest.raises(CredentialsUnavailable):
                    await assume(sessions)
            else:
                await assume(sessions)

    asyncio.run(story())
    told = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert [each.partition(" now: ")[2].partition(".")[0] for each in told] == [
        "AccessDenied",
        "ExpiredToken",
        "ExpiredToken",
    ]
    assert SECRET not in caplog.text
    sessions.close()


def test_too_large_a_policy_says_so() -> None:
    sessions = StsSessions(Aws(), client=Client(failure=error("PackedPolicyTooLarge", 400)))
    with pytest.raises(CredentialsRefused) as no:
        asyncio.run(assume(sessions))
    assert no.value.kind == "too many folders"
    sessions.close()


def test_a_mistake_of_ours_is_not_hidden() -> None:
    sessions = StsSessions(Aws(), client=Client(failure=ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(assume(sessions))
    sessions.close()


def test_who_asks_is_answered_in_time_and_the_place_stays_taken() -> None:
    client = Client(waits=True)
    bounds = StsBounds(at_once_max=1, waiting_max=1, seconds_max=0.01)
    sessions = StsSessions(Aws(), client=client, bounds=bounds)

    async def story() -> None:
        with pytest.raises(CredentialsUnavailable, match="did not answer within"):
            await assume(sessions, "penstock-1-1")
        # It has begun, so that its thread is not free; what waits is dropped when its time is over.
        assert client.inside.acquire(timeout=LONG_SECONDS)
        for _ in range(3):
            with pytest.raises(CredentialsUnavailable, match="did not answer within"):
                await assume(sessions)
        # Its own name stays taken with it.
        with pytest.raises(CredentialsUnavailable, match="already in progress"):
            await assume(sessions, "penstock-1-1")
        assert len(client.asked) == 1

    asyncio.run(story())
    client.go.set()
    sessions.close()


def test_no_more_are_asked_at_once_than_may() -> None:
    client = Client(waits=True)
    sessions = StsSessions(Aws(), client=client, bounds=StsBounds(at_once_max=2, waiting_max=3))

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(assume(sessions, f"penstock-{n}-1")) for n in range(5)]
            for _ in range(2):
                assert await asyncio.to_thread(client.inside.acquire, timeout=LONG_SECONDS)
            with pytest.raises(CredentialsUnavailable, match="Too many concurrent requests"):
                await assume(sessions)
            assert len(client.asked) == 2
            client.go.set()
        assert {each.result().access_key for each in asked} == {"ASIA1"}
        assert len(client.asked) == 5
        await assume(sessions)

    asyncio.run(story())
    sessions.close()


def test_an_attempt_has_one_place_however_often_it_asks() -> None:
    client = Client(waits=True)
    sessions = StsSessions(Aws(), client=client, bounds=StsBounds(at_once_max=2, waiting_max=0))

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            greedy = group.create_task(assume(sessions, "penstock-1-1"))
            assert await asyncio.to_thread(client.inside.acquire, timeout=LONG_SECONDS)
            for _ in range(40):
                with pytest.raises(CredentialsUnavailable, match="already in progress"):
                    await assume(sessions, "penstock-1-1")
            other = group.create_task(assume(sessions, "penstock-2-1"))
            assert await asyncio.to_thread(client.inside.acquire, timeout=LONG_SECONDS)
            client.go.set()
        assert greedy.result().access_key == other.result().access_key == "ASIA1"
        # And then the next.
        await assume(sessions, "penstock-1-1")

    asyncio.run(story())
    sessions.close()


def test_one_that_leaves_gives_its_place_back() -> None:
    client = Client(waits=True)
    sessions = StsSessions(Aws(), client=client, bounds=StsBounds(at_once_max=1, waiting_max=1))

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(assume(sessions, "penstock-1-1"))
            assert await asyncio.to_thread(client.inside.acquire, timeout=LONG_SECONDS)
            for _ in range(3):
                waits = asyncio.timeout(0)
                with pytest.raises(TimeoutError):
                    async with waits:
                        await assume(sessions)
            client.go.set()
        assert first.result().access_key == "ASIA1"
        await assume(sessions)
        assert len(client.asked) == 2

    asyncio.run(story())
    sessions.close()


def test_what_cannot_be_asked_at_all_may_be_put_right() -> None:
    sessions = StsSessions(Aws(region="no region", endpoint="nothing"))
    with pytest.raises(CredentialsUnavailable, match="no client for STS"):
        asyncio.run(assume(sessions))
    sessions.close()
